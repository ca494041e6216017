"""The table of wrappers: JSON rows with every key, nulls where nobody knows, and a word on the noise."""

import json

import pytest

from paceline.records.steps import compare_wrappers
from paceline.report import tables
from paceline.report.wrapper_tables import choose_columns, wrapper_row, wrapper_table

ROW_KEYS = {
    "model", "wrapper", "world_size", "backend", "step_median_s", "backward_median_s", "ratio_to_torch",
    "ratio_to_torch_tuned", "noise", "forward_median_s", "step_p10_s", "step_p90_s", "ratio_to_bare",
    "host_us_per_parameter", "nwrong", "iters", "source",
}  # fmt: skip


@pytest.fixture
def standings(build_wrapper):
    steady, noisy = (1e-3,) * 10, (0.8e-3, 1.3e-3) * 5
    return compare_wrappers(
        [
            build_wrapper("bare", tuple(0.5 * t for t in steady), num_wrong=None, num_checked=None),
            build_wrapper("torch", steady),
            build_wrapper("paceline", tuple(0.9 * t for t in steady)),
            build_wrapper("paceline-flat", noisy, num_wrong=7),
        ]
    )


def _cells(standings):
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in tables.render_markdown(wrapper_table, standings).splitlines()
    ]
    return {row[header.index("wrapper")]: dict(zip(header, row, strict=True)) for row in rows}


def test_a_json_row_has_every_key_in_plain_values(standings):
    rows = [wrapper_row(standing) for standing in standings]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    ours = rows[2]
    assert set(ours) >= ROW_KEYS
    assert (ours["step_median_s"], ours["forward_median_s"], ours["backward_median_s"]) == pytest.approx(
        (0.9e-3, 0.225e-3, 0.45e-3)
    )
    assert (ours["ratio_to_torch"], ours["noise"], ours["ratio_to_bare"]) == pytest.approx((0.9, 0.0, 1.8))
    assert ours["added_s"] == pytest.approx(0.4e-3)
    assert rows[1]["ratio_to_torch"] == 1.0


def test_what_did_not_run_is_null(build_wrapper, standings):
    row = wrapper_row(standings[2])
    assert (row["ratio_to_torch_tuned"], row["noise_to_torch_tuned"], row["host_us_per_parameter"]) == (None,) * 3
    (alone,) = compare_wrappers([build_wrapper("paceline")])
    row = wrapper_row(alone)
    assert all(row[name] is None for name in ("ratio_to_torch", "noise", "ratio_to_bare", "added_s", "added_bytes"))
    assert wrapper_row(standings[0])["nwrong"] is None


def test_host_time_is_told_in_us(build_wrapper):
    records = [build_wrapper("bare", world_size=1), build_wrapper("torch", (1.2e-3,) * 10, world_size=1)]
    assert wrapper_row(compare_wrappers(records)[1])["host_us_per_parameter"] == pytest.approx(2.0)


def test_a_difference_inside_the_noise_is_marked(standings):
    cells = _cells(standings)
    assert cells["paceline"]["/ torch"] == "0.900 ± 0.000"
    assert cells["paceline"]["than torch"] == "10.0% faster"
    assert cells["bare"]["than torch"] == "50.0% faster"
    assert cells["paceline-flat"]["/ torch"].endswith("=")
    assert cells["paceline-flat"]["than torch"] == "within the noise"
    assert (cells["torch"]["/ torch"], cells["torch"]["than torch"]) == ("1", "")
    assert (cells["paceline-flat"]["#wrong"], cells["bare"]["#wrong"]) == ("7", "")
    assert {row["/ tuned"] for row in cells.values()} == {""}


def test_one_repetition_is_no_verdict(build_wrapper):
    cells = _cells(compare_wrappers([build_wrapper("torch", (1.0,)), build_wrapper("paceline", (2.0,))]))
    assert (cells["paceline"]["/ torch"], cells["paceline"]["than torch"]) == ("2.000 ?", "one repetition")


def test_several_backends_are_compared_with_torch_on_gloo(build_wrapper):
    records = [
        build_wrapper("torch"),
        build_wrapper("torch", (0.8e-3,) * 10, backend="paceline"),
        build_wrapper("paceline", (0.4e-3,) * 10, backend="paceline"),
    ]
    standings = compare_wrappers(records)
    rows = [wrapper_row(standing) for standing in standings]
    assert [row["backend"] for row in rows] == ["gloo", "paceline", "paceline"]
    assert [row["ratio_to_torch_on_gloo"] for row in rows] == pytest.approx([1.0, 0.8, 0.4])
    assert [row["ratio_to_torch"] for row in rows] == pytest.approx([1.0, 1.0, 0.5])
    assert [row["noise_to_torch_on_gloo"] for row in rows] == pytest.approx([0.0] * 3)
    (column,) = [c for c in choose_columns(standings) if c.name == "/ torch on gloo"]
    assert [column.cell(standing) for standing in standings] == ["1", "0.800 ± 0.000", "0.400 ± 0.000"]


def test_one_backend_has_no_column_across_backends(standings, build_wrapper):
    assert list(choose_columns(standings)) == list(wrapper_table)
    (alone,) = compare_wrappers([build_wrapper("paceline", backend="paceline")])
    assert wrapper_row(alone)["ratio_to_torch_on_gloo"] is None
