"""`paceline tune` end to end, on a model too small for the results to mean anything."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from paceline import load_result, load_run
from paceline.cli.commands import print_result
from paceline.plan import Plan
from paceline.predict.race import VERDICTS
from paceline.records import CollectiveRecord, LayerProfileRecord, StepRecord
from paceline.report.predictions import TuneResult
from tests.cli.test_train import type_alone, type_command
from tests.cli.test_train_bad_input import LAUNCH_VARIABLES, assert_refused
from tests.conftest import Answer

TINY = ("--channels", "2", "4", "--hidden", "16")
CAPS = (16, 1024, 4 << 20)
TUNE = ("tune", *TINY, "--batch-size", "1", "--samples", "16", "--caps", "16B,1KiB,4MiB", "--iters", "2")
KEYS = {
    "model", "wrapper", "backend", "world_size", "grid", "mape", "max_error", "exposed_error", "kendall_tau", "noise",
    "best_predicted_cap_bytes", "best_measured_cap_bytes", "regret", "regret_high", "gain", "gain_low", "gain_high",
    "plan", "plan_measured_s", "default_measured_s", "verdict", "answer", "race",
}  # fmt: skip
FILES = {
    "run.json", "plan.json", "grid.md", "grid.csv", "buckets.md", "buckets.csv", "tuning.png", "tuning.svg",
}  # fmt: skip
RACE_FILES = {"predictions.json", "race.md", "race.csv", "race.png", "race.svg"}


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


def read(answer: Answer) -> dict:
    assert answer.code == 0, answer.err
    document: dict = json.loads(answer.out)
    return document


def steps_of(document: dict) -> list[StepRecord]:
    return [record for record in load_run(Path(document["run"])).records if isinstance(record, StepRecord)]


@pytest.fixture(scope="module")
def on_gloo(out) -> dict:
    return read(type_command(*TUNE, "--ranks", "2", "--backend", "gloo", "--json", "--out", out))


@pytest.fixture(scope="module")
def emulated(out) -> dict:
    asked = ("--network", "10gbe", "--network-ranks", "16")
    return read(type_alone(*TUNE, *asked, "--json", "--out", out))


@pytest.fixture(scope="module")
def emulated_torch(out) -> dict:
    return read(type_alone(*TUNE, "--network", "1Gb/s,20us", "--wrapper", "torch", "--json", "--out", out))


@pytest.fixture(scope="module")
def type_on_ranks(warm_pool):
    """The command line in a launched world of two warm ranks; returns the answer of rank 0."""
    return lambda *arguments: warm_pool.run(type_command, arguments, num_ranks=2, timeout_s=200)[0]


def assert_complete(document: dict, wrapper: str, backend: str, world_size: int) -> None:
    assert set(document) >= KEYS
    assert (document["model"], document["wrapper"]) == ("cnn", wrapper)
    assert (document["backend"], document["world_size"]) == (backend, world_size)
    assert [point["cap_bytes"] for point in document["grid"]] == list(CAPS)
    counts = [point["num_buckets"] for point in document["grid"]]
    assert counts[0] > counts[1] > counts[2] == 1
    for point in document["grid"]:
        assert point["low_s"] < point["predicted_s"] < point["high_s"] and point["measured_s"] > 0
        assert point["same_layout"] is True
    errors = [abs(point["predicted_s"] / point["measured_s"] - 1) for point in document["grid"]]
    assert document["mape"] == pytest.approx(sum(errors) / 3)
    assert document["best_measured_cap_bytes"] in CAPS and document["best_predicted_cap_bytes"] in CAPS
    assert document["regret"] >= 0 and document["default_measured_s"] > 0 and document["plan_measured_s"] > 0
    assert {path.name for path in Path(document["run"]).iterdir()} == FILES | RACE_FILES
    written = json.loads((Path(document["run"]) / "predictions.json").read_text())["predictions"]
    assert [one["label"] for one in written] == [row["plan"] for row in document["race"]]
    assert [one["step_s"] for one in written] == [row["predicted_s"] for row in document["race"]]
    assert len({tuple(one["bucket_bytes"]) for one in written}) == len(written) <= 6
    plan = Plan.from_json(Path(document["plan"]).read_text())
    run = load_run(Path(document["run"]))
    assert run.complete and run.verb == "tune" and document["verdict"] in VERDICTS
    again = load_result(document["run"])
    assert isinstance(again, TuneResult) and again.to_json() == document and again.plan == plan
    (profile,) = (record for record in run.records if isinstance(record, LayerProfileRecord))
    assert {g.name for g in plan.gradients} == {p.name for p in profile.parameters}
    assert plan.num_bytes == profile.num_bytes


def test_everything_is_measured_predicted_and_written(on_gloo):
    assert_complete(on_gloo, "paceline", "gloo", 2)
    steps = steps_of(on_gloo)
    assert all(len(record.turns_s) == 2 and record.timing.num_ranks == 2 for record in steps)
    assert on_gloo["verdict"] in ("undecided", "flat")  # two rounds decide nothing
    assert {record.role for record in steps} == {"plain", "local", "job"}
    grid = [record for record in steps if record.role == "job" and not record.note]
    assert [record.cap_bytes for record in grid] == list(CAPS)
    confirmed = {record.label for record in steps if record.note == "confirmed"}
    assert confirmed == {row["plan"] for row in on_gloo["race"]} and "default" in confirmed
    assert all(record.source == "measured" for record in steps)
    sweep = [r for r in load_run(Path(on_gloo["run"])).records if isinstance(r, CollectiveRecord)]
    assert len(sweep) >= 2 and {record.world_size for record in sweep} == {2}
    with (Path(on_gloo["run"]) / "grid.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["measured_s"]) for row in rows] == [point["measured_s"] for point in on_gloo["grid"]]


@pytest.mark.slow
def test_on_shared_memory_with_messages_during_backward(type_on_ranks, out):
    # Wide enough that its gradients hold two messages of 256 KiB.
    wide = ("--hidden", "700", "--quick", "--backend", "paceline")
    document = read(type_on_ranks(*TUNE, *wide, "--json", "--out", out))
    assert_complete(document, "paceline", "shm", 2)
    (disturbed,) = (record for record in steps_of(document) if record.role == "disturbed")
    assert disturbed.message_bytes == 256 << 10 and 1 <= disturbed.num_messages <= 4
    assert 0 < disturbed.overlapped.median_s <= disturbed.under_way.median_s


@pytest.mark.slow
def test_torchs_wrapper_has_the_layout_that_was_simulated(type_on_ranks, out):
    asked = ("--wrapper", "torch", "--backend", "gloo")
    document = read(type_on_ranks(*TUNE, *asked, "--json", "--out", out))
    assert_complete(document, "torch", "gloo", 2)
    grid = [record for record in steps_of(document) if record.role == "job" and not record.note]
    assert [record.num_buckets for record in grid] == [point["num_buckets"] for point in document["grid"]]


@pytest.mark.slow
def test_a_prediction_alone_never_runs_the_job_under_a_plan(type_on_ranks, out):
    # All gradients together are smaller than the smallest message of a sweep.
    smallest = ("--channels", "1", "1", "--hidden", "2")
    answer = type_on_ranks(*TUNE, *smallest, "--no-confirm", "--out", out)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("cnn on 2 ranks, wrapper paceline") and "\n\n\n" not in answer.out
    run = Path(answer.out.split("run: ", 1)[1].splitlines()[0])
    assert {path.name for path in run.iterdir()} == FILES
    for words in ("predicted (ms)", "simulated", "for torch's own wrapper: ", "next: paceline "):
        assert words in answer.out
    steps = steps_of({"run": run})
    assert sum(steps[-1].bucket_bytes) < 4096
    assert {record.role for record in steps} == {"plain", "local"}


@pytest.mark.slow
def test_an_emulated_network(emulated):
    assert_complete(emulated, "paceline", emulated["backend"], 16)
    assert {point["source"] for point in emulated["grid"]} == {"emulated"}
    sources = {record.role: record.source for record in steps_of(emulated)}
    assert sources == {"plain": "measured", "local": "measured", "job": "emulated"}
    config = load_run(Path(emulated["run"])).config["tune"]
    assert (config["network"], config["network_ranks"]) == ("10gbe", 16)
    assert "10gbe at its nominal speed, 16 ranks, emulated" in emulated["answer"]


@pytest.mark.slow
def test_torchs_wrapper_on_an_emulated_network(emulated_torch):
    assert_complete(emulated_torch, "torch", emulated_torch["backend"], 8)
    assert {point["source"] for point in emulated_torch["grid"]} == {"emulated"}


@pytest.mark.slow
@pytest.mark.parametrize(("wrapper", "tuned"), [("paceline", "emulated"), ("torch", "emulated_torch")])
def test_training_takes_the_plan_of_its_wrapper(request, out, wrapper, tuned):
    plan = request.getfixturevalue(tuned)["plan"]
    asked = ("--batch-size", "4", "--samples", "16", "--wrapper", wrapper, "--plan", plan)
    answer = type_alone("train", *TINY, *asked, "--epochs", "1", "--json", "--out", out)
    assert answer.code == 0, answer.err
    other = type_alone("train", "--channels", "3", "4", *asked, "--out", out)
    assert other.code == 2 and "plan" in other.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "1"), "tune 2 or more ranks, or emulate a --network"),
        (("--network", "10gb"), "unknown network '10gb': did you mean 10gbe?"),
        (("--network-ranks", "16"), "--network-ranks 16 without a --network"),
        (("--caps", ","), "no size in"),
    ],
)
def test_jobs_that_cannot_be_tuned_are_refused_at_once(command, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert_refused(command("tune", *TINY, *arguments), words)


@pytest.mark.parametrize("option", ["--plan", "--accumulate"])
def test_unsupported_options_of_a_tuning(command, option):
    """A tuning yields a plan, and gradients are sent only with the last micro-batch: the plan is the same without
    accumulation."""
    answer = command("tune", option, "2")
    assert answer.code == 2 and option in answer.err


@pytest.mark.parametrize(("verdict", "code"), [("undecided", 1), ("flat", 0), ("use", 0)])
def test_strict_fails_an_inconclusive_tuning(emulated, capsys, monkeypatch, verdict, code):
    monkeypatch.setattr(TuneResult, "verdict", verdict)
    result = load_result(emulated["run"])
    assert print_result(result, json=False) == 0
    assert print_result(result, json=False, strict=True) == code
    assert ("paceline: failed (--strict): " in capsys.readouterr().err) == bool(code)
