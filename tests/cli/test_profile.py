"""`paceline profile` as users run it: phases, layers, traces, networks, and two runs compared."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import pytest

from paceline import load_result, load_run
from paceline.records.exchange import load_layer_sizes, load_layer_times
from paceline.records.steps import StepRecord
from tests.cli.test_train import TINY, TORCHRUN, type_alone, type_command
from tests.conftest import Answer
from tests.unit.made_traces import check_trace

SMALL = (*TINY, "--samples", "64")
PHASES = ("profile", "phases", *SMALL, "--iters", "3", "--warmup", "1")
TRACE = ("profile", "trace", *SMALL, "--batch-size", "8", "--steps", "2", "--warmup", "1")
LAYERS = ("profile", "layers", *SMALL, "--iters", "2", "--warmup", "1")
TABLE = ("profile", "comm-table", *SMALL, "--iters", "2", "--warmup", "1")


def find_run(answer: Answer) -> Path:
    assert answer.code == 0, answer.err
    return Path(answer.out.rsplit("\nrun: ", 1)[1].splitlines()[0])


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def phases(out) -> Answer:
    return type_command(*PHASES, "--ranks", "2", "--batch-size", "4,8", "--details", "--out", out)


@pytest.fixture(scope="module")
def trace(out) -> Answer:
    return type_command(*TRACE, "--ranks", "2", "--plot", "--details", "--out", out)


@pytest.fixture(scope="module")
def phases_alone(out) -> Answer:
    return type_alone(*PHASES, "--batch-size", "8", "--details", "--out", out)


@pytest.fixture(scope="module")
def layers(out) -> Answer:
    return type_alone(*LAYERS, "--out", out)


@pytest.fixture(scope="module")
def phases_bare(out) -> Answer:
    return type_alone(*PHASES, "--batch-size", "8", "--wrapper", "none", "--json", "--out", out)


def test_phases_are_a_table_and_a_record_for_each_batch_size(phases):
    run = find_run(phases)
    for words in ("forward (ms)", "backward (ms)", "exposed (ms)", "comm overhead", "batch 8: profiling overhead"):
        assert words in phases.out
    lines = [line for line in phases.err.splitlines() if "cells" in line]
    assert [line.partition(", about")[0] for line in lines] == [
        "paceline: profile phases: 1 of 2 cells (2 ranks, batch 4)",
        "paceline: profile phases: 2 of 2 cells (2 ranks, batch 8)",
    ]
    assert phases.out.startswith("A step of cnn takes ") and "exposed communication" in phases.out.splitlines()[0]
    records = load_run(run).records
    assert [(record.world_size, record.batch_size) for record in records] == [(2, 4), (2, 8)]
    with (run / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    for record, row in zip(records, rows, strict=True):
        assert isinstance(record, StepRecord)
        assert record.timing.count == 3 and record.busy is not None
        assert record.num_bytes == 4 * 18_954
        assert float(row["step_s"]) == pytest.approx(record.timing.median_s)
        assert float(row["samples_per_s"]) == pytest.approx(2 * record.batch_size / record.timing.median_s)


def test_one_rank_sends_nothing_and_has_no_column_for_it(phases_alone):
    find_run(phases_alone)
    assert "busbw" not in phases_alone.out and "busy (ms)" not in phases_alone.out
    assert "1 rank, batch 8: profiling overhead" in phases_alone.out


@pytest.mark.parametrize("wrapper", ["torch", "none"])
def test_phases_of_other_wrappers(out, phases_bare, wrapper):
    answer = phases_bare
    if wrapper != "none":
        answer = type_alone(*PHASES, "--batch-size", "8", "--wrapper", wrapper, "--json", "--out", out)
    assert answer.code == 0, answer.err
    (row,) = json.loads(answer.out)["records"]
    assert (row["wrapper"], row["world_size"], row["comm_overhead"]) == (wrapper, 1, 0.0)


def test_two_runs_of_phases_are_compared(phases, phases_alone, phases_bare, command):
    other = json.loads(phases_bare.out)
    first, second = find_run(phases_alone), other["run"]
    answer = command("profile", "--compare", str(first), second, "--details")
    assert answer.code == 0, answer.err
    for words in ("1 rank, batch 8: step", "samples/s", "second / first", "differ in wrapper: paceline and none"):
        assert words in answer.out
    document = json.loads(command("profile", "--json", "--compare", str(first), second).out)
    rows = {row["name"]: row for row in document["rows"]}
    step = rows["1 rank, batch 8: step"]
    assert step["second"] == other["records"][0]["step_s"]
    assert step["ratio"] == pytest.approx(step["second"] / step["first"])
    assert document["settings_that_differ"] == {"wrapper": ["paceline", "none"]}
    unlike = command("profile", "--compare", str(first), str(find_run(phases)))
    assert unlike.code == 2 and "no numbers in common" in unlike.err


def test_a_trace_is_one_file_with_a_process_for_each_rank(trace):
    run = find_run(trace)
    document = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))
    assert check_trace(document) == []
    names = {
        event["pid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"
    }
    begun = {event["pid"] for event in document["traceEvents"] if event["name"] == "step 1"}
    assert len(begun) == 2 and {names[pid].split()[1] for pid in begun} == {"0", "1"}


def test_a_trace_comes_with_an_overview_advice_and_a_picture(trace):
    run = find_run(trace)
    assert "cnn on 2 ranks, batch 8, fp32" in trace.out and "ui.perfetto.dev" in trace.out
    assert f"figure: {run / 'timeline.png'}" in trace.out
    assert (run / "timeline.png").read_bytes().startswith(b"\x89PNG")
    overview = json.loads((run / "overview.json").read_text())
    assert [one["rank"] for one in overview["overviews"]] == [0, 1] and overview["advice"]
    assert {"overview.csv", "overview.md", "operators.csv", "run.json"} <= {path.name for path in run.iterdir()}


def test_two_traces_are_compared(trace, phases, out, command):
    extras = ("--shapes", "--memory-use", "--accumulate", "2", "--json")
    answer = type_alone(*TRACE, *extras, "--out", out)
    assert "CPUAllocator" not in answer.err  # torch prints this for each block whose allocation it did not see
    other = json.loads(answer.out)
    assert other["picture"] is None
    *rows, total = other["memory"]
    assert sum(row["peak_bytes"] for row in rows) == total["peak_bytes"] == other["overview"][0]["peak_bytes"]
    held = {row["category"]: row["begin_bytes"] for row in rows}
    assert held["parameters"] == 4 * 18_954 <= held["buckets"] and other["findings"][0].startswith("memory: peak ")
    assert {"memory.png", "memory.md", "memory.csv"} <= {path.name for path in Path(other["run"]).iterdir()}
    assert load_result(other["run"]).to_json()["memory"] == other["memory"]
    assert "Input Dims" in gzip.decompress(Path(other["run"], "trace.json.gz").read_bytes()).decode()
    answer = command("profile", "--compare", str(find_run(trace)), other["run"], "--details")
    assert answer.code == 0, answer.err
    assert "  backward " in answer.out and "the runs differ in ranks: 2 and 1" in answer.out
    assert "the runs differ in accumulate: 1 and 2" in answer.out and "operators of rank 0" in answer.out
    unlike = command("profile", "--compare", str(find_run(trace)), str(find_run(phases)))
    assert unlike.code == 2 and unlike.out == "" and len(unlike.err.splitlines()) == 1
    assert "(`paceline profile trace`)" in unlike.err and "(`paceline profile phases`)" in unlike.err


def test_layers_are_files_that_can_be_read_again(layers):
    run = find_run(layers)
    sizes, times = load_layer_sizes(run / "layer-sizes.csv"), load_layer_times(run / "layer-times.csv")
    assert sum(size.num_params for size in sizes) == 18_954
    assert times and all(time.timing.median_s >= 0 for time in times)
    assert {"blocks.md", "parameters.csv", "ready.png", "run.json"} <= {path.name for path in run.iterdir()}
    steps = [record for record in load_run(run).records if isinstance(record, StepRecord)]
    assert [(r.role, r.wrapper) for r in steps if r.role != "together"] == [
        ("plain", "paceline"), ("local", "paceline"), ("local", "paceline")
    ]  # fmt: skip


@pytest.fixture(scope="module")
def curve() -> str:
    """All-reduces on 2 ranks, measured earlier."""
    return str(Path(__file__).parents[2] / "results" / "neoverse-n1-2-cores" / "allreduce-gloo")


@pytest.mark.slow
def test_gradients_on_assumed_and_measured_networks_as_predict_sees_them(out, curve, command):
    """A prediction from the profile that comm-table saved yields the same step and exposed times."""
    networks = ("--network", "nvlink,10Gb/s,50us", "--json", "--out", out)
    answer = type_alone(*TABLE, *networks, "--ranks", "2,8", "--curve", curve)
    assert answer.code == 0, answer.err
    rows = json.loads(answer.out)["rows"]
    assert [(row["network"], row["world_size"]) for row in rows] == [
        ("nvlink", 2), ("nvlink", 8), ("10Gb/s,50us", 2), ("10Gb/s,50us", 8), ("gloo", 2),
    ]  # fmt: skip
    for row in rows:
        assert row["gradient_bytes"] == 4 * 18_954
        assert row["overhead"] == pytest.approx(row["comm_s"] / (row["comm_s"] + row["compute_s"]))
    # A ring of two: each byte crosses the link once, after two latencies.
    assert rows[2]["comm_s"] == pytest.approx(200e-6 + 2 * 4 * 50e-6 + 4 * 18_954 / 0.95 / 1.25e9)
    assert "all-reduce measured on 2, 4, 6 ranks" in rows[4]["assumption"]
    asked = (*networks, "--ranks", "2", "--allreduce", curve, "--model-profile", json.loads(answer.out)["run"])
    predicted = json.loads(command("predict", *asked).out)["rows"]
    for row, other in zip([row for row in rows if row["world_size"] == 2], predicted, strict=True):
        for key in ("network", "world_size", "step_s", "low_s", "high_s", "exposed_s", "algorithm", "best_cap_bytes"):
            assert row[key] == other[key]
        assert row["compute_s"] == other["local_step_s"]


@pytest.mark.slow
def test_profiles_of_several_models_are_one_table(layers, out, command, tmp_path):
    runs = [str(find_run(answer)) for answer in (layers, type_alone(*LAYERS, "--hidden", "64", "--out", out))]
    given = [word for run in runs for word in ("--model-profile", run)]
    asked = ("profile", "comm-table", *given, "--network", "10gbe", "--ranks", "2", "--out", str(tmp_path))
    rows = json.loads(command(*asked, "--json").out)["rows"]
    assert [row["gradient_bytes"] for row in rows] == sorted(row["gradient_bytes"] for row in rows) and len(rows) == 2
    for more in (("--model", "cnn"), ("--batch-size", "8"), ("--iters", "3")):
        refused = command(*asked, *more)
        assert refused.code == 2 and f": {more[0]} with --model-profile" in refused.err


def test_a_curve_of_other_ranks_is_refused(command, curve, tmp_path):
    answer = command(*TABLE, "--ranks", "64", "--curve", curve, "--out", str(tmp_path))
    assert answer.code == 2 and "has no measured all-reduce on 64 ranks" in answer.err
    assert list(tmp_path.iterdir()) == []


BOTH = """
import sys
from paceline.cli.main import main

for verb in sys.argv[1].split(";"):
    sys.argv = ["paceline", *verb.split()]
    try:
        main()
    except SystemExit as exit_:
        assert not exit_.code, exit_.code
"""


@pytest.mark.slow
def test_phases_and_traces_under_torchrun(start, tmp_path):
    (tmp_path / "both.py").write_text(BOTH)
    verbs = ";".join(" ".join((*verb, "--batch-size", "8", "--json")) for verb in (PHASES, TRACE))
    job = start(*TORCHRUN, "both.py", verbs)
    printed, err = job.communicate(timeout=150)
    assert job.returncode == 0, err
    decoder = json.JSONDecoder()
    first, end = decoder.raw_decode(printed)
    second = json.loads(printed[end:])
    assert [row["world_size"] for row in first["records"]] == [2]
    assert [one["rank"] for one in second["overviews"]] == [0, 1]
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_run_of_another_kind_is_refused_with_the_command_that_makes_the_right_one(command, curve, phases, tmp_path):
    answer = command(*TABLE, "--curve", str(find_run(phases)), "--out", str(tmp_path))
    assert answer.code == 2 and "pass a run of `paceline bench allreduce`" in answer.err
    answer = command("profile", "--compare", curve, str(find_run(phases)))
    assert answer.code == 2 and "(`paceline bench allreduce`)" in answer.err and "no numbers" in answer.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [(*LAYERS, "--strict"), ("scale", "batch", *SMALL, "--batch-size", "8", "--epochs", "2")]
)
def test_other_verbs_warn_of_a_busy_machine_as_bench_does(asked, monkeypatch, tmp_path):
    monkeypatch.setattr("paceline.machine.find_load", lambda: 1e6)
    answer = type_alone(*asked, "--json", "--out", str(tmp_path))
    document = json.loads(answer.out)
    (warning,) = (
        line for line in document["warnings"] if line.startswith("the machine was busy before the run (load ")
    )
    assert warning in load_result(document["run"]).warnings
    # With --strict, load alone is not a failure, but two repetitions are.
    assert answer.code == (1 if "--strict" in asked else 0)
    assert ("failed (--strict): 1 rank: fewer than 5 repetitions" in answer.err) is ("--strict" in asked)


def test_torchs_dataparallel_on_one_gpu_warns_that_it_replicates_nothing(monkeypatch, tmp_path):
    for name, value in (("count_gpus", 1), ("gpu_name", "")):  # the CPU computes in its place
        monkeypatch.setattr(f"paceline.machine.{name}", lambda value=value: value)
    asked = ("--wrapper", "dp", "--device", "cpu", "--json", "--out", str(tmp_path))
    assert type_alone(*TRACE, *asked).code == 2  # --device has no effect there
    document = json.loads(type_alone(*TRACE, "--wrapper", "dp", "--json", "--out", str(tmp_path)).out)
    assert document["warnings"][0].startswith("--wrapper dp on one GPU")
