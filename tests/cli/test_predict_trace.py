"""`paceline predict --trace`: the answer comes first, with one-line errors for unusable traces."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

import paceline
from paceline.errors import ConfigError
from paceline.predict.curves import FamilyCurve
from paceline.predict.simulate import Contention, MachineCosts, simulate
from paceline.predict.traces import RankTrace, merge_traces, read_ranks, render_trace
from paceline.records.environment import capture_environment
from paceline.records.store import Run
from paceline.report.observed import TracedResult, round_cap
from paceline.report.prediction_rows import get_saved
from paceline.units import KIB, MIB
from paceline.verbs.predict import load_traced_steps
from tests.unit.made_ddp import NODE, build_document, made_job, made_on_cpu, made_on_gpu
from tests.unit.made_traces import MadeTrace

SIZES = (8 * MIB, 4 * MIB, 4 * MIB, 2 * MIB, MIB, MIB, 512 * KIB, 512 * KIB)
READY = (4, 8, 12, 18, 22, 24, 28, 30)
JOB = made_job(SIZES, READY, 31, device="cuda")
# A slow link with significant latency and no contention: one bucket leaves everything exposed.
COSTS = MachineCosts(FamilyCurve("line", 2, 1e-4, 2e9), contention=Contention())


def write(folder: Path, made: MadeTrace, name: str = "rank-0.json", **place: int) -> Path:
    file = folder / name
    file.write_text(json.dumps(build_document(made, **place)))
    return file


@pytest.fixture
def one_bucket(tmp_path) -> Path:
    return write(tmp_path, made_on_gpu(JOB, COSTS, (8,), num_steps=4))


def test_the_best_cap_comes_first_and_is_the_argument_to_write(command, one_bucket, tmp_path):
    answer = command("predict", "--trace", str(one_bucket), "--out", str(tmp_path / "runs"))
    assert answer.code == 0, answer.err
    result = paceline.predict_trace(one_bucket)
    assert result.verdict == "use" and not result.now.doubt
    assert answer.out.replace("\n", " ").startswith(result.answer)
    cap = f"bucket_cap_mb={result.best.cap_mib:g}"
    assert cap in result.answer and f"next: DistributedDataParallel(model, {cap})" in answer.out
    # The predicted gain is real; in this synthetic trace the true gain is known.
    truth = simulate(JOB, JOB.cut(result.best.cap_bytes), COSTS).step_s / simulate(JOB, (8,), COSTS).step_s
    gain, low, high = get_saved(result.best)
    assert low - 0.01 <= 1 - truth <= high + 0.01 and gain > 0.05
    assert JOB.cut(result.best.cap_bytes) == result.best.cuts
    assert any(row.doubt for row in result.rows)  # the trace has no message half as large
    planned = simulate(result.job, result.model.cut_like(result.plan.bucket_bytes), result.costs).step_s
    assert planned <= result.best.step_s


def test_the_best_buckets_stay(tmp_path):
    cuts = paceline.predict_trace(write(tmp_path, made_on_gpu(JOB, COSTS, (8,)))).best.cuts
    result = paceline.predict_trace(write(tmp_path, made_on_gpu(JOB, COSTS, cuts), "again.json"))
    assert result.verdict == "keep" and result.best is result.now
    assert max(get_saved(row)[2] for row in result.rows) <= 0.01 and "(flat)" not in result.answer
    assert get_saved(result.candidate)[0] == pytest.approx(0, abs=0.01)
    assert result.to_json()["best_bucket_cap_mb"] == pytest.approx(result.now.cap_mib)
    assert result.next_steps and not paceline.predict_trace(tmp_path / "again.json", network="hdr").next_steps


def test_a_step_measured_without_the_profiler_sets_the_level(command, one_bucket, tmp_path):
    before = paceline.predict_trace(one_bucket)
    size = f"{sum(before.traced.layout)}B"
    for factor in (0.8, 1.0, 1.2):
        asked = f"{size}={factor * 1e3 * before.now.step_s:.6f}ms"
        result = paceline.predict_trace(one_bucket, measured=asked)
        assert result.now.step_s == pytest.approx(factor * before.now.step_s, rel=0.01)
    assert result.measured and not any("--measured" in line for line in result.next_steps)
    document = json.loads(
        command("predict", "--trace", str(one_bucket), "--measured", asked, "--json", "--out", str(tmp_path)).out
    )
    assert document["step_s"] == pytest.approx(result.best.step_s)
    table = tmp_path / "times.csv"
    table.write_text("bucket_size,backward_s\n25MiB,0.1\n")
    with pytest.raises(ConfigError, match="backward_s"):
        paceline.predict_trace(one_bucket, measured=table)


@pytest.mark.parametrize(
    ("latency_s", "bytes_per_s", "cuts", "verdict"),
    [(1e-3, 2e9, tuple(range(1, 9)), "keep"), (1e-4, 2e10, (8,), "flat"), (1e-3, 1e9, (2, 4, 6, 8), "use")],
)
def test_intervals_decide_rather_than_single_values(tmp_path, latency_s, bytes_per_s, cuts, verdict):
    costs = MachineCosts(FamilyCurve("line", 2, latency_s, bytes_per_s), contention=Contention())
    result = paceline.predict_trace(write(tmp_path, made_on_gpu(JOB, costs, cuts)))
    highest, lowest = max(get_saved(row)[2] for row in result.rows), min(get_saved(row)[1] for row in result.rows)
    assert (result.verdict, result.to_json()["verdict"]) == (verdict, verdict)
    # no value is above 1 %, so there is nothing to recommend or compare, although an interval reaches above it
    if verdict == "keep":
        assert max(get_saved(row)[0] for row in result.rows) < 0.01 < highest
    if verdict == "flat":
        assert lowest >= -0.01 and highest <= 0.01 and "(flat)" in result.answer
    assert (result.best is result.now) == (verdict != "use")


def test_the_plan_is_that_of_the_verdict(one_bucket):
    used, kept = (paceline.predict_trace(one_bucket) for _ in range(2))
    assert used.verdict == "use" and len(used.plan.buckets) > 1
    kept.verdict, kept.best = "undecided", kept.now  # as when a gain is uncertain
    assert kept.plan.bucket_bytes == kept.traced.layout == (sum(SIZES),)


def test_highly_variable_steps_are_doubtful(one_bucket):
    steps = load_traced_steps([one_bucket])
    runs = [
        Run("predict trace", paceline.predict_trace(one_bucket).config, capture_environment(), tuple(
            replace(step, before_s=step.before_s * factor ** (step.number % 2)) for step in steps
        ))
        for factor in (1, 20)
    ]  # fmt: skip
    quiet, busy = (TracedResult(run) for run in runs)
    assert not any(line.startswith("doubtful") for line in quiet.findings)
    assert any(line.startswith("doubtful: the traced steps vary") for line in busy.findings)
    assert busy.now.high_s - busy.now.low_s > quiet.now.high_s - quiet.now.low_s


def test_a_saved_run_gives_the_same_result_again(one_bucket, tmp_path):
    result = paceline.predict_trace(one_bucket, network="10gbe", ranks=8, out=tmp_path / "runs")
    again = paceline.load_result(result.folder)
    assert again.to_json() == result.to_json() and len(again.table("elsewhere").rows_json()) == 1
    assert {path.name for path in result.folder.iterdir()} >= {"run.json", "caps.csv", "caps.png", "messages.md"}


def test_all_ranks_in_one_file_as_in_our_own_traces(tmp_path):
    made = made_on_cpu(made_job(SIZES, READY, 31), MachineCosts(COSTS.curve, 2, pair_rate=0.5), (3, 8))
    ranks: list[RankTrace] = [read_ranks(build_document(made, rank=rank))[0] for rank in (0, 1)]
    file = tmp_path / "ranks.json.gz"
    file.write_bytes(render_trace(merge_traces(ranks)))
    (tmp_path / "run.json").write_text('{"format": 1}')
    result = paceline.predict_trace(tmp_path)  # the folder of a run
    assert result.traced.ranks == (0, 1) and result.traced.world_size == 2
    assert result.traced.layout == (16 * MIB, 5 * MIB)


def test_a_cap_is_short_and_makes_the_same_buckets():
    for low, high in ((MIB, MIB), (3 * MIB // 2, 25 * MIB - 1), (1, 4), (123456, 123457), (7 * MIB, 9 * MIB)):
        assert low <= round_cap(low, high) <= high
    assert round_cap(3 * MIB, 45 * MIB // 10) == 4 * MIB


def damage(folder: Path, how: str) -> list[Path]:
    """Unusable traces."""
    cpu, costs = made_job(SIZES, READY, 31), MachineCosts(COSTS.curve, 2, pair_rate=0.5)
    made = made_on_cpu(cpu, costs, (3, 8))
    whole, file = json.dumps(build_document(made)), folder / "bad.json"
    texts = {
        "malformed": "{]", "empty": "", "truncated": whole[: len(whole) // 2], "no trace": '{"a": 1}', "a list": "[1]",
        "no events": json.dumps({"traceEvents": [], "distributedInfo": {"rank": 0, "world_size": 2}}),
        "no rank": json.dumps({"traceEvents": made.events}),
        "odd events": json.dumps(build_document(made) | {"traceEvents": [1, 2]}),
    }  # fmt: skip
    if how in texts:
        file.write_text(texts[how])
        return [file]
    if how == "truncated gzip":
        file.write_bytes(gzip.compress(whole.encode())[:-200])
        return [file]
    if how == "no such file":
        return [folder / "none.json"]
    if how in ("no all-reduce", "no backward"):
        lacking = "all_reduce" if how == "no all-reduce" else NODE
        made.events = [event for event in made.events if lacking not in event["name"]]
        return [write(folder, made)]
    if how == "one rank twice":
        return [write(folder, made), write(folder, made, "again.json")]
    if how == "unlike world sizes":
        return [write(folder, made), write(folder, made, "other.json", rank=1, world_size=4)]
    if how == "one rank alone":
        return [write(folder, made, world_size=1)]
    if how == "two times":
        later = build_document(made, rank=1) | {"baseTimeNanoseconds": 10**12}
        file.write_text(json.dumps(later))
        return [write(folder, made), file]
    assert how == "two jobs"
    return [write(folder, made), write(folder, made_on_cpu(cpu, costs, (1, 8)), "other.json", rank=1)]


@pytest.mark.parametrize(
    "how",
    [
        "malformed", "empty", "truncated", "no trace", "a list", "no events", "no rank", "odd events", "truncated gzip",
        "no such file", "no all-reduce", "no backward", "one rank alone", "one rank twice", "unlike world sizes",
        "two jobs", "two times",
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_used_is_refused_in_one_line(command, tmp_path, how):
    files = damage(tmp_path, how)
    answer = command("predict", "--trace", *map(str, files), "--out", str(tmp_path / "runs"))
    assert (answer.code, answer.out) == (2, "") and answer.err.count("\n") == 1, answer.err
    assert answer.err.startswith("paceline: error: ")
    if how != "two jobs":  # it is impossible to know which of them is wrong
        assert files[-1].name in answer.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("option", [("--csv", "x"), ("--gradients", "bf16"), ("--inside", "nvlink"), ("--ranks", "0")])
def test_options_that_do_not_go_with_a_trace_are_refused(command, one_bucket, tmp_path, option):
    answer = command("predict", "--trace", str(one_bucket), *option, "--out", str(tmp_path / "runs"))
    assert answer.code == 2 and option[0].lstrip("-") in answer.err and answer.err.count("\n") == 1
