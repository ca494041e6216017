"""Results of `bench allreduce`, `bench chunks` and `doctor`, built from records and loaded from disk."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest

from paceline import load_result
from paceline.errors import RecordError
from paceline.records import Samples, Summary
from paceline.records.kinds import CheckRecord
from paceline.records.store import Run
from paceline.report.result import DoctorResult, Result, build_result
from paceline.report.sweeps import ChunksResult, CollectiveResult

ROW_KEYS = {
    "collective", "backend", "device", "world_size", "num_bytes", "dtype", "op", "median_s", "mean_s", "p10_s", "p90_s",
    "algbw_gbps", "busbw_gbps", "nwrong", "iters", "statistic", "skew_s", "source", "memory", "memory_bound_s",
    "fraction_of_memory",
}  # fmt: skip


@pytest.fixture
def build(build_environment):
    def build(*records, verb="bench allreduce", warnings=(), **options):
        run = Run(verb, {}, build_environment(), tuple(records), tuple(warnings))
        return build_result(run) if not options else CollectiveResult(run, **options)

    return build


@pytest.fixture
def record(build_collective):
    samples = Samples(
        seconds=tuple((t / 1e3,) * 4 for t in range(11)), arrivals_s=((0.0, 0.0, 0.001, 0.0),) * 11
    )  # median 5 ms, p10 1 ms, p90 9 ms
    return build_collective(num_bytes=10 * 2**20, world_size=4, timing=samples, num_wrong=3)


@pytest.fixture
def imported(build_collective):
    return build_collective(
        timing=Summary(mean_s=0.002), num_wrong=None, num_checked=None, source="imported", note="somebody"
    )


def test_a_json_row_has_every_key_in_plain_values(build, record):
    (row,) = build(record).to_json()["rows"]
    assert set(row) == ROW_KEYS
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert (row["collective"], row["backend"], row["device"], row["dtype"]) == ("all_reduce", "gloo", "cpu", "float32")
    assert (row["world_size"], row["num_bytes"], row["iters"], row["nwrong"]) == (4, 10 * 2**20, 11, 3)
    assert (row["median_s"], row["p10_s"], row["p90_s"]) == pytest.approx((0.005, 0.001, 0.009))
    assert row["mean_s"] == pytest.approx(0.005)
    assert row["algbw_gbps"] == pytest.approx(10 * 2**20 / 0.005 / 1e9)
    assert row["busbw_gbps"] == pytest.approx(1.5 * row["algbw_gbps"])
    assert (row["skew_s"], row["source"]) == (0.001, "measured")


def test_a_json_row_of_an_import_marks_unknown_values(build, imported):
    (row,) = build(imported).to_json()["rows"]
    assert {name for name, value in row.items() if value is None} == {
        "p10_s", "p90_s", "nwrong", "iters", "skew_s", "memory_bound_s", "fraction_of_memory",
    }  # fmt: skip
    assert (row["median_s"], row["source"], row["statistic"]) == (0.002, "imported", "mean")


def read_cells(markdown):
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_the_table_has_the_columns_of_nccl_tests(build, record, imported):
    measured, published = read_cells(build(record, imported).table().markdown())
    assert measured == {
        "backend": "gloo", "device": "cpu", "ranks": "4", "size": "10 MiB", "count": "2 621 440", "type": "float32",
        "redop": "sum", "time (ms)": "5.00", "mean (ms)": "5.00", "p10 (ms)": "1.00", "p90 (ms)": "9.00",
        "algbw (GB/s)": "2.10", "busbw (GB/s)": "3.15", "#wrong": "3", "iters": "11", "source": "measured",
    }  # fmt: skip
    assert [name for name, cell in published.items() if not cell] == ["p10 (ms)", "p90 (ms)", "#wrong", "iters"]


def test_csv_keeps_full_precision(build, build_collective, build_samples):
    records = [build_collective(timing=build_samples(1 / 3), num_bytes=n) for n in (4, 8)]
    lines = list(csv.DictReader(io.StringIO(build(*records).table().csv())))
    assert [(int(line["num_bytes"]), float(line["median_s"])) for line in lines] == [(4, 1 / 3), (8, 1 / 3)]


def test_the_answer_names_the_fastest_backend_at_the_largest_size_first(build, build_collective, build_samples):
    records = [
        build_collective(backend=backend, num_bytes=size, timing=build_samples(seconds))
        for size, times in ((2**10, (1e-4, 2e-4)), (2**24, (4e-2, 2e-2)))
        for backend, seconds in zip(("gloo", "shm"), times, strict=True)
    ]
    answer = build(*records).answer
    assert re.search(r"16 MiB on 2 ranks takes 20 ms on shm .*, 40 ms on gloo", answer) and "correct" in answer


def test_backends_are_compared_repetition_by_repetition(build, build_collective, build_samples):
    times = {"gloo": (1e-3, 2e-3, 4e-3), "shm": (1e-4, 1e-4, 8e-4)}
    records = [
        build_collective(backend=name, num_bytes=4, timing=build_samples(*found)) for name, found in times.items()
    ]
    ((where, found),) = build(*records).ratios.items()
    assert where == "shm / gloo, 2 ranks, interleaved"
    assert [(size, ratio.value) for size, ratio in found] == [(4, pytest.approx(0.1))]
    assert build(*records).findings[0].startswith("shm / gloo, 2 ranks, interleaved: 4 B 0.100 ± ")


def test_wrong_data_is_in_the_answer_and_a_failure(build, record):
    result = build(record)
    assert "3 elements were WRONG" in result.answer and "WRONG DATA" in result.failure


def test_strict_fails_on_noise(build, build_collective, build_samples):
    assert build(build_collective()).noise == [] and build(build_collective()).failure == ""
    (noise,) = build(build_collective(timing=build_samples(1.0))).noise
    assert "fewer than 5 repetitions" in noise


def test_one_rank_is_a_finding_but_not_a_doubt(build, build_collective):
    result = build(build_collective(world_size=1))
    assert not result.doubts
    assert result.findings[-1].startswith("1 rank: nothing is sent, so busbw is 0")


@pytest.mark.parametrize(("number", "drawn"), [(6, True), (7, False)])
def test_a_few_imported_curves_are_drawn_whatever_their_backend(build, build_collective, imported, number, drawn):
    others = [replace(imported, backend="nccl", world_size=8, note=f"table {n}") for n in range(number)]
    lines = build(build_collective(), compared=others).figure("time").axes[0].get_legend_handles_labels()[1]
    assert any("nccl, 8 ranks" in line for line in lines) is drawn


def test_a_figure_does_not_name_a_gpu_that_was_not_used(build_environment, build_collective):
    environment = build_environment(details={"gpu": "Some GPU"})
    machines = {
        device: build_result(Run("bench allreduce", {}, environment, (build_collective(device=device),))).machine
        for device in ("cpu", "cuda")
    }
    assert machines["cuda"] == f"{machines['cpu']}, Some GPU" == environment.machine


def test_a_line_is_fitted_to_every_curve_of_two_sizes(build, build_collective, build_samples):
    records = [
        build_collective(num_bytes=size, timing=build_samples(1e-3 + size / 1e9)) for size in (10**6, 10**7, 10**8)
    ]
    (fit,) = build(*records).to_json()["fits"]
    assert (fit["alpha_s"], fit["beta_bytes_per_s"]) == (pytest.approx(1e-3), pytest.approx(1e9))
    assert fit["max_rel_residual"] < 1e-9 and (fit["min_bytes"], fit["max_bytes"]) == (10**6, 10**8)
    assert any(
        line.startswith("fit: gloo, 2 ranks: time = 1 ms + size / 1.00 GB/s") for line in build(*records).findings
    )


@pytest.fixture
def bounded(build_collective, build_pass, build_samples):
    """gloo takes 1 ms and shm 0.25 ms, with a memory bound of 0.2 ms."""
    records = [
        build_collective(),
        build_collective(backend="shm", memory="shared", timing=build_samples(*(2.5e-4,) * 10)),
    ]
    return [*records, build_pass("add", 3e-4), build_pass("copy", 2e-4)]


def test_a_row_has_its_memory_and_what_memory_allows(build, bounded):
    rows = build(*bounded).to_json()["rows"]
    assert [(row["backend"], row["memory"]) for row in rows] == [("gloo", "ordinary"), ("shm", "shared")]
    assert [row["fraction_of_memory"] for row in rows] == pytest.approx([0.2, 0.8])
    assert [row["memory_bound_s"] for row in rows] == pytest.approx([2e-4, 2e-4])
    cells = read_cells(build(*bounded).table().markdown())
    assert [(row["memory"], row["bound (ms)"], row["of memory"]) for row in cells] == [
        ("ordinary", "0.200", "20%"), ("shared", "0.200", "80%"),
    ]  # fmt: skip


def test_the_columns_of_memory_are_left_out_where_they_are_empty(build, bounded, build_collective):
    (cells,) = read_cells(build(build_collective()).table().markdown())
    assert not {"memory", "bound (ms)", "of memory"} & set(cells)
    (cells,) = read_cells(build(bounded[1]).table().markdown())
    assert cells["memory"] == "shared" and "of memory" not in cells


def test_a_comparison_shows_both_sides_and_leaves_gaps(build, build_collective, build_samples, imported):
    here = build_collective(timing=build_samples(*(0.001,) * 10))
    other = build_collective(num_bytes=2**24)
    result = build(here, other, compared=[imported, build_collective(num_bytes=2**10)])
    less, both, ours = read_cells(result.table("comparison").markdown())
    assert (both["this run (ms)"], both["other (ms)"], both["this / other"]) == ("1.00", "2.00", "0.50")
    assert (both["other source"], both["from"]) == ("imported, mean", "somebody")
    assert (ours["other (ms)"], ours["this / other"], ours["other source"], ours["from"]) == ("", "", "", "")
    assert (less["this run (ms)"], less["this busbw (GB/s)"], less["size"]) == ("", "", "1 KiB")
    pairs = result.to_json()["comparison"]
    assert [(bool(pair["here"]), bool(pair["there"])) for pair in pairs] == [(False, True), (True, True), (True, False)]


def test_another_type_is_not_compared_and_an_unknown_one_is(build, build_collective):
    types = ("float64", "float32", "unknown")
    result = build(build_collective(), compared=[build_collective(dtype=dtype) for dtype in types])
    assert [(here and here.dtype, there.dtype) for here, there in result.pairs] == [
        ("float32", "float32"), ("float32", "unknown"), (None, "float64"),
    ]  # fmt: skip


def test_a_comparison_names_the_memory_and_the_other_machine(build, bounded):
    result = build(*bounded[:2], compared=bounded[:1], differences=["cpu: a compared with b"])
    assert [row["backend"] for row in read_cells(result.table("comparison").markdown())] == ["gloo", "shm (shared)"]
    assert result.warnings == ("the runs differ in cpu: a compared with b",)
    assert result.run.warnings == ()


@pytest.fixture
def chunked(build, build_chunks, build_samples):
    records = [
        build_chunks(total_bytes=4 * 10**6, chunk_bytes=size, timing=build_samples(time_s))
        for size, time_s in ((40_000, 0.004), (4 * 10**6, 0.001))
    ]
    return build(*records, verb="bench chunks")


def test_chunks(chunked):
    assert isinstance(chunked, ChunksResult)
    rows = chunked.to_json()["rows"]
    assert [(row["num_messages"], row["chunk_bytes"], row["total_bytes"]) for row in rows] == [
        (100, 40_000, 4 * 10**6), (1, 4 * 10**6, 4 * 10**6),
    ]  # fmt: skip
    assert rows[0]["algbw_gbps"] == pytest.approx(1.0) and rows[0]["busbw_gbps"] == pytest.approx(1.0)
    cells = read_cells(chunked.table().markdown())[0]
    assert (cells["elements"], cells["messages"], cells["total time (ms)"]) == ("10 000", "100", "4.00")
    assert re.search(r"fastest with 1 message of .*\(1 ms\), slowest with 100 messages .*\(4 ms\)", chunked.answer)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("what", ["bounded", "chunked", "compared"])
def test_a_terminal_shows_every_key_and_no_cut_number(request, build, build_collective, width, what):
    if what == "chunked":
        result = request.getfixturevalue("chunked")
    else:
        records = request.getfixturevalue("bounded")
        records = [*records, build_collective(world_size=1024, num_bytes=2**40, backend="a-long-backend")]
        result = build(*records, compared=[records[0]] if what == "compared" else ())
    text = result.text(width, details=True)
    assert all(len(line) <= width for line in text.splitlines()) and "…" not in text
    for table in result.tables():
        for column in table.columns:
            if column.is_key and column.name:
                assert all(column.cell(row) in text for row in table.rows)
    assert text.startswith(result.answer[:40]) and text.splitlines()[-1].startswith("next: paceline ")


def test_str_is_what_80_columns_show(bounded, build):
    result = build(*bounded)
    assert str(result) == result.text(80) != result.text(None)


def test_a_result_is_saved_with_its_tables_and_figures_and_is_the_same_again(build, build_collective, tmp_path):
    result = build(*(build_collective(num_bytes=n) for n in (2**10, 2**20)), warnings=["noisy"])
    folder = result.save(tmp_path / "a" / "run")
    assert {path.name for path in folder.iterdir()} == {
        "run.json", "table.md", "table.csv", "allreduce-times.csv",
        "time.png", "time.svg", "bandwidth.png", "bandwidth.svg",
    }  # fmt: skip
    again = load_result(folder)
    assert isinstance(again, CollectiveResult) and again.records == result.records
    assert again.to_json() == result.to_json() and str(again) == str(result) and again.warnings == ("noisy",)
    before = (folder / "run.json").read_bytes()
    again.save(folder)  # redraws the figure and keeps the records
    assert (folder / "run.json").read_bytes() == before
    with pytest.raises(RecordError) as caught:
        build_result(Run("bench chunks", {}, result.run.environment, ())).save(folder)
    assert caught.value.code == "exists"


@pytest.mark.parametrize("verb", ["bench allreduce", "bench chunks", "bench wrappers"])
def test_a_run_that_was_interrupted_at_once_says_so(verb, build, build_collective, tmp_path):
    run = Run(verb, {}, build(build_collective()).run.environment, ())
    result = load_result(build_result(run).save(tmp_path / "run"))
    assert str(result).startswith(f"Nothing was measured: the run of `paceline {verb}` has no records.")
    assert result._repr_html_() and result.to_json()["answer"] == result.answer


def test_a_notebook_shows_answer_table_and_figures(build, build_collective):
    html = build(build_collective())._repr_html_()
    assert "<table>" in html and html.count("data:image/png;base64,") == 2 and "1 MiB" in html


def test_names_that_do_not_exist_are_refused_with_those_that_do(build, build_collective):
    result = build(build_collective())
    with pytest.raises(KeyError, match="time, bandwidth"):
        result.figure("nonsense")
    with pytest.raises(KeyError, match="'nonsense'"):
        result.table("nonsense")


def test_a_run_of_an_unknown_verb_is_a_plain_result(build, build_collective):
    result = build(build_collective(), verb="some verb")
    assert type(result) is Result and "1 records" in result.answer and result.to_json()["verb"] == "some verb"


def test_a_doctor_names_what_failed(build):
    ok = CheckRecord(name="2-rank all-reduce", status="ok", found="fast")
    bad = CheckRecord(name="network", status="fail", found="none", advice="buy one")
    result = build(ok, bad, verb="doctor")
    assert isinstance(result, DoctorResult) and result.failure == "network" and "network" in result.answer
    document = result.to_json()
    assert document["ok"] is False and document["checks"][1] == {
        "status": "fail", "name": "network", "found": "none", "advice": "buy one",
    }  # fmt: skip
    assert "buy one" in str(result)
    assert build(ok, verb="doctor").to_json()["ok"] and "ready" in build(ok, verb="doctor").answer
    alone = CheckRecord(name="torch", status="ok", found="2.13")
    assert "no rank was started" in build(alone, verb="doctor").answer
