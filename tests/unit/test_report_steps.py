"""Results of wrappers and phases: JSON rows with every key, nulls for unknown values, and the noise."""

import json

import pytest

from paceline import load_result
from paceline.records.samples import Ratio
from paceline.records.steps import compare_wrappers
from paceline.records.store import Run
from paceline.report.result import build_result
from paceline.report.step_tables import (
    PHASES,
    PhasesResult,
    WrappersResult,
    build_columns,
    describe_phases,
    plot_wrappers,
)
from paceline.report.table import Table, describe_change
from tests.unit.made_runs import list_texts

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


def build_rows(standings):
    return Table("", "", build_columns(standings), standings).rows_json()


def _cells(standings):
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in Table("", "", build_columns(standings), standings).markdown().splitlines()
    ]
    return {row[header.index("wrapper")]: dict(zip(header, row, strict=True)) for row in rows}


def test_a_json_row_has_every_key_in_plain_values(standings):
    rows = build_rows(standings)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    ours = rows[2]
    assert set(ours) >= ROW_KEYS
    assert (ours["step_median_s"], ours["forward_median_s"], ours["backward_median_s"]) == pytest.approx(
        (0.9e-3, 0.225e-3, 0.45e-3)
    )
    assert (ours["ratio_to_torch"], ours["noise"], ours["ratio_to_bare"]) == pytest.approx((0.9, 0.0, 1.8))
    assert ours["added_s"] == pytest.approx(0.4e-3)
    assert rows[1]["ratio_to_torch"] == 1.0


def test_values_not_measured_are_null(build_wrapper, standings):
    row = build_rows(standings)[2]
    assert (row["ratio_to_torch_tuned"], row["noise_to_torch_tuned"], row["host_us_per_parameter"]) == (None,) * 3
    (alone,) = compare_wrappers([build_wrapper("paceline")])
    (row,) = build_rows([alone])
    assert all(row[name] is None for name in ("ratio_to_torch", "noise", "ratio_to_bare", "added_s", "added_bytes"))
    assert build_rows(standings)[0]["nwrong"] is None


def test_host_time_is_shown_in_us(build_wrapper):
    records = [build_wrapper("bare", world_size=1), build_wrapper("torch", (1.2e-3,) * 10, world_size=1)]
    assert build_rows(compare_wrappers(records))[1]["host_us_per_parameter"] == pytest.approx(2.0)


def test_a_difference_inside_the_noise_is_marked(standings):
    cells = _cells(standings)
    assert cells["paceline"]["/ torch"] == "0.900 ± 0.000"
    assert cells["paceline-flat"]["/ torch"].endswith("=")
    assert cells["torch"]["/ torch"] == "1"
    assert (cells["paceline-flat"]["#wrong"], cells["bare"]["#wrong"]) == ("7", "")
    assert "/ tuned" not in cells["torch"]


def test_one_repetition_gives_no_verdict(build_wrapper):
    cells = _cells(compare_wrappers([build_wrapper("torch", (1.0,)), build_wrapper("paceline", (2.0,))]))
    assert cells["paceline"]["/ torch"] == "2.000 ?"


def test_several_backends_are_compared_with_torch_on_gloo(build_wrapper):
    records = [
        build_wrapper("torch"),
        build_wrapper("torch", (0.8e-3,) * 10, backend="paceline"),
        build_wrapper("paceline", (0.4e-3,) * 10, backend="paceline"),
    ]
    standings = compare_wrappers(records)
    rows = build_rows(standings)
    assert [row["backend"] for row in rows] == ["gloo", "paceline", "paceline"]
    assert [row["ratio_to_torch_on_gloo"] for row in rows] == pytest.approx([1.0, 0.8, 0.4])
    assert [row["ratio_to_torch"] for row in rows] == pytest.approx([1.0, 1.0, 0.5])
    assert [row["noise_to_torch_on_gloo"] for row in rows] == pytest.approx([0.0] * 3)
    (column,) = [c for c in build_columns(standings) if c.name == "/ torch on gloo"]
    assert [column.cell(standing) for standing in standings] == ["1", "0.800 ± 0.000", "0.400 ± 0.000"]


def test_one_backend_has_no_column_across_backends(standings, build_wrapper):
    assert "/ torch on gloo" not in [column.name for column in build_columns(standings)]
    (alone,) = compare_wrappers([build_wrapper("paceline", backend="paceline")])
    assert build_rows([alone])[0]["ratio_to_torch_on_gloo"] is None


def test_wrappers_have_a_panel_for_each_model_and_ranks(build_wrapper):
    slow = (3e-3, 4e-3, 5e-3)
    records = [
        build_wrapper("torch", slow), build_wrapper("paceline"), build_wrapper("torch", model="mlp"),
        build_wrapper("torch", world_size=1),
    ]  # fmt: skip
    figure = plot_wrappers(records, "box")
    panels = [axes for axes in figure.axes if axes.get_visible()]
    titles = [axes.get_title(loc="left") for axes in panels]
    assert titles == ["cnn (gloo, 2 ranks, measured)", "mlp (gloo, 2 ranks, measured)", "cnn (gloo, 1 rank, measured)"]
    assert list(panels[0].get_lines()[0].get_xdata()) == pytest.approx([3.2, 4.0, 4.8])
    texts = list_texts(figure)
    assert {"torch", "paceline"} <= texts and any("box" in text for text in texts)


def test_wrappers_on_several_backends_share_a_panel(build_wrapper):
    records = [build_wrapper(w, backend=b) for b in ("gloo", "paceline") for w in ("torch", "paceline")]
    figure = plot_wrappers(records, "box")
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "cnn (2 ranks, measured)"
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "torch on gloo", "torch on paceline", "paceline on gloo", "paceline on paceline",
    ]  # fmt: skip
    colors = [line.get_color() for line in axes.get_lines()]
    assert colors == [colors[0], colors[1]] * 2 and colors[0] != colors[1]


def test_the_row_and_the_table_say_the_same(build_phases):
    record = build_phases()
    table = Table("", "", PHASES, [record])
    (row,) = table.rows_json()
    assert row["exposed_comm_s"] == pytest.approx(0.002) and row["comm_overhead"] == pytest.approx(0.2)
    assert row["backward_s"] == pytest.approx(0.004), "what is computed, not what is waited for"
    assert row["busbw_gbps"] == pytest.approx(0.8)
    assert row["profiling_cost"] == pytest.approx(0.01)
    assert (row["world_size"], row["batch_size"], row["accumulate"], row["source"]) == (2, 16, 2, "measured")
    head, _, line = table.markdown().strip().splitlines()
    cells = dict(zip((c.strip() for c in head.split("|")), (c.strip() for c in line.split("|")), strict=True))
    assert float(cells["step (ms)"]) == pytest.approx(10) and float(cells["exposed (ms)"]) == pytest.approx(2)
    assert (cells["comm overhead"], cells["overlap"], cells["samples/s"]) == ("20.0%", "60.0%", "6,400")
    assert cells["source"] == "measured"


def test_unknown_values_are_empty_cells(build_phases):
    cells = {column.header: column.cell(build_phases(busy=None)) for column in PHASES}
    assert (cells["busy (ms)"], cells["overlap"], cells["busbw (GB/s)"]) == ("", "", "")


def test_in_words(build_phases, build_samples):
    sent, cost = describe_phases(build_phases())
    assert "2 ranks, batch 16: each rank sends" in sent and "in 3 messages per step" in sent and "20.0%" in sent
    assert "profiling overhead: +1.0%" in cost and "within the noise" not in cost
    (alone,) = describe_phases(build_phases(world_size=1, busy=None, marked=build_samples(*(0.01, 0.011) * 5, ranks=1)))
    assert alone.startswith("1 rank, batch 16: profiling overhead") and alone.endswith("within the noise")


@pytest.fixture
def results(build_environment, build_phases, build_wrapper, build_samples):
    """Results of `bench phases` and `bench wrappers`, with long names and several cells."""

    def build(verb, *records):
        return build_result(Run(verb, {}, build_environment(), records))

    alone = build_phases(world_size=1, busy=None, batch_size=128)
    phases = build("profile phases", alone, build_phases())
    times = {"bare": 0.9, "torch": 1.0, "torch-tuned": 1.1, "paceline-per_parameter": 1.2, "paceline": 0.5}
    wrappers = [
        build_wrapper(name, tuple(time_s * (1 + number / 100) for number in range(10)), model=model, note="x")
        for model in ("gpt2-mini", "cnn")
        for name, time_s in times.items()
    ]
    return {"phases": phases, "wrappers": build("bench wrappers", *wrappers)}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("what", ["phases", "wrappers"])
def test_a_terminal_shows_every_key_and_no_cut_number(results, what, width):
    result = results[what]
    text = result.text(width, details=True)
    assert all(len(line) <= width for line in text.splitlines()) and "…" not in text
    for table in result.tables():
        for column in table.columns:
            if column.is_key and column.name:
                assert all(column.cell(row) in text for row in table.rows)
    assert text.splitlines()[-1].startswith("next: paceline ")


def test_the_answer_says_where_the_time_goes(results):
    phases = results["phases"]
    assert isinstance(phases, PhasesResult)
    assert phases.answer == (
        "A step of cnn takes 10 ms (2 ranks, batch 16): 10% waiting for data, 20% forward, 40% backward, "
        "10% optimizer, 20% exposed communication."
    )
    assert [row["world_size"] for row in phases.to_json()["records"]] == [1, 2]


def test_the_answer_says_whether_ours_is_faster(results, build_wrapper, build_environment):
    wrappers = results["wrappers"]
    assert isinstance(wrappers, WrappersResult)
    assert "faster than torch's in 2 of 2 cells, slower in 0" in wrappers.answer
    assert [line.split(":")[0] for line in wrappers.findings] == [
        "torch-tuned (gpt2-mini, 2 ranks, gloo)", "torch-tuned (cnn, 2 ranks, gloo)",
    ]  # fmt: skip
    records = (build_wrapper("torch"), build_wrapper("paceline", (2e-3,) * 10))
    one = build_result(Run("bench wrappers", {}, build_environment(), records))
    assert "takes 2 ms: +100.0% ± 0.0% compared with torch's." in one.answer
    assert "not measured together" in build_result(Run("bench wrappers", {}, build_environment(), records[:1])).answer


@pytest.mark.parametrize(
    ("value", "noise", "words"),
    [
        (0.9, 0.02, "-10.0% ± 2.0% of a step"),
        (0.99, 0.02, "-1.0% ± 2.0% of a step, within the noise"),
        (1.5, None, "+50.0% of a step (one repetition)"),
    ],
)
def test_a_comparison_says_whether_it_is_shown(value, noise, words):
    assert describe_change(Ratio(value, noise), "of a step") == words


def test_results_are_saved_and_the_same_again(results, tmp_path):
    for name, result in results.items():
        folder = result.save(tmp_path / name)
        again = load_result(folder)
        assert again.to_json() == result.to_json()
        files = {path.name for path in folder.iterdir()}
        pictures = {"wrappers.png", "wrappers.svg"} if name == "wrappers" else set()
        assert files == {"run.json", "table.md", "table.csv"} | pictures
