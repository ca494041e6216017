"""Conclusions from the steps of an attached program: the late rank, the bottleneck, the buckets, the suggested code."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.plan import plan_by_cuts, plan_like_torch
from paceline.predict.accounting import (
    PhaseFinder,
    RankRow,
    account_steps,
    average_data,
    find_slow_part,
    list_waits,
)
from paceline.predict.advice import rank_findings, remove_recording
from paceline.predict.curves import FamilyCurve
from paceline.predict.race import Interval, Race
from paceline.predict.simulate import Contention, MachineCosts
from paceline.predict.trace_steps import read_steps
from paceline.predict.traces import read_ranks
from paceline.records import Samples, StepRecord, TracedMessage, TracedStepRecord
from paceline.records.environment import capture_environment
from paceline.records.findings import Finding, find_doubts
from paceline.records.samples import UNSTABLE
from paceline.records.steps import RACED, OperatorTime, Stall
from paceline.records.store import Run
from paceline.report.compared import compare_results
from paceline.report.observed import NOW, AttachedResult, _order_columns
from paceline.report.prediction_rows import _find_status, format_cap
from paceline.runtime.ranks.session import Session
from paceline.units import KIB, MIB, format_ms
from paceline.verbs import attach as attaching
from paceline.verbs.attach import _build_ranks, _build_record, _Files
from tests.unit.made_ddp import build_document, made_job, made_on_cpu, made_on_gpu
from tests.unit.made_traces import MadeTrace
from tests.unit.test_causes import made_rank

SIZES = (8 * MIB, 4 * MIB, 4 * MIB, 2 * MIB, MIB, MIB, 512 * KIB, 512 * KIB)
PARTS = ("data_s", "forward_s", "backward_s", "waiting_s", "exposed_s", "optimizer_s", "rest_s")
JOB = made_job(SIZES, (4, 8, 12, 18, 22, 24, 28, 30), 31, device="cuda")
QUIET = replace(capture_environment(), stolen=0.0, load_average=0.0)
COSTS = MachineCosts(FamilyCurve("line", 2, 1e-4, 2e9), contention=Contention())


def made_step(rank: int, number: int, took: tuple[float, ...], before: float = 0.01) -> TracedStepRecord:
    """Messages back to back, starting at the end of a 10 ms backward."""
    starts = [0.01 + sum(took[:n]) for n in range(len(took))]
    messages = tuple(TracedMessage(MIB, s, s, s + t) for s, t in zip(starts, took, strict=True))
    return TracedStepRecord(
        rank=rank, world_size=2, device="cpu", backend="gloo", host="box", number=number, before_s=before,
        backward_s=0.01, after_s=0.002, gradient_bytes=(MIB,) * len(took), ready_s=(0.005,) * len(took),
        messages=messages,
    )  # fmt: skip


def made_steps(times: tuple[float, ...], **more: object) -> StepRecord:
    rows = tuple((time, time) for time in times)
    given = {"data_wait": Samples(tuple((0.0, 0.0) for _ in times)), "label": "", "backend": "nccl", "device": "cuda"}
    return StepRecord(
        model="Net", wrapper="torch", world_size=2, batch_size=1, timing=Samples(rows), **given | more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def one_bucket() -> tuple[TracedStepRecord, ...]:
    made = made_on_gpu(JOB, COSTS, (8,), num_steps=4)
    return tuple(step for rank in (0, 1) for step in read_steps(read_ranks(build_document(made, rank=rank))[0]))


def build(records: tuple, **config: object) -> AttachedResult:
    config = {"command": ["x"], **config}
    return AttachedResult(Run("profile attach", config, QUIET, records))


def test_the_late_rank_is_the_one_that_waits_least():
    records = [made_step(0, n, (0.021, 0.001)) for n in range(4)] + [made_step(1, n, (0.001, 0.001)) for n in range(4)]
    waits = list_waits(records)
    assert [sorted(row) for row in waits] == [[0, 1]] * 4
    assert all(row[0] == pytest.approx(0.02) and row[1] == 0 for row in waits)
    assert list_waits(records[:4]) == list_waits([]) == []


def test_the_cost_of_recording_is_removed():
    records = [made_step(0, n, (0.004,), before=0.01 + 0.001 * n) for n in range(3)]  # median 27 ms
    found = remove_recording(records, 0.0155)  # half of its work of 23 ms
    assert [step.step_s for step in found] == pytest.approx([0.015, 0.0155, 0.016])
    assert [step.exposed_s for step in found] == pytest.approx([0.004] * 3)
    assert [(step.backward_s, step.ready_s, step.after_s) for step in found] == [(0.005, (0.0025,), 0.001)] * 3
    assert [step.messages[0].launch_s for step in found] == pytest.approx([0.005] * 3)
    assert remove_recording(records, 0.001) == found  # never more than half


def test_short_recorded_steps_are_stretched():
    records = [made_step(0, n, (0.004,)) for n in range(3)]  # median 26 ms
    for step in remove_recording(records, 0.039):
        assert (step.step_s, step.exposed_s, step.backward_s) == pytest.approx((0.039, 0.006, 0.015))
        assert step.messages[0].launch_s == step.messages[0].start_s == pytest.approx(0.015)


def test_findings_are_ranked_by_gain_and_silent_below_the_noise():
    found = [
        Finding("data", "a", gain_s=0.006),
        Finding("buckets", "b", gain_s=0.02),
        Finding("host", "c", gain_s=0.004),
    ]
    assert [one.kind for one in rank_findings(found, 0.1)] == ["buckets", "data"]
    assert [one.kind for one in rank_findings(found, 0.1, noise=0.1)] == ["buckets"]
    (only,) = rank_findings(found, 0.1, noise=0.3)
    assert (only.kind, only.gain_s, only.step_s) == ("healthy", 0.0, 0.1)
    unsure = Finding("backend", "d", gain_s=0.05, gain_interval_s=(0.0, 0.08))  # the gain may be zero
    assert [one.kind for one in rank_findings([*found, unsure], 0.1)] == ["buckets", "data"]


@pytest.mark.parametrize("exact", ["backend", "buckets", "optimizer", "collectives"])
@pytest.mark.parametrize("changing", ["network", "batch"])
def test_a_cure_that_changes_the_training_comes_second_unless_it_saves_twice_as_much(exact, changing):
    def rank(gain_s):
        found = [
            Finding(changing, "a", gain_s=gain_s),
            Finding(exact, "b", gain_s=0.02),
            Finding("data", "c", gain_s=0.03),
        ]
        return [one.kind for one in rank_findings(found, 0.1)]

    assert rank(0.04) == ["data", exact, changing] and rank(0.041) == [changing, "data", exact]


def test_the_answer_has_the_measured_step_the_best_cap_and_the_lines_to_paste(one_bucket):
    recorded_s = sorted(step.step_s for step in one_bucket)[len(one_bucket) // 2]
    result = build((made_steps((recorded_s * 0.97,) * 9), *one_bucket))
    assert result.verdict == "use" and result.bottleneck.kind == "buckets"
    assert result.step_s == pytest.approx(recorded_s * 0.97)
    assert result.buckets is not None and result.buckets.traced.step_s == pytest.approx(result.step_s, rel=1e-3)
    cap = f"bucket_cap_mb={result.buckets.best.cap_mib:g}"
    assert result.lines["torch"] == f"DistributedDataParallel(model, {cap})"
    assert result.next_steps[0] == f"DistributedDataParallel(model, {cap})  # torch"
    assert result.lines["transformers"] == f"TrainingArguments(..., ddp_{cap})"
    assert f"DistributedDataParallelKwargs({cap})" in result.lines["Accelerate"]
    assert f"DDPStrategy({cap})" in result.lines["Lightning"]
    text, document = result.text(80, details=True), result.to_json()
    assert cap in result.answer and all(line in text for line in result.lines.values())
    assert document["bottleneck"] == "buckets" and document["gain_low"] < document["gain"] < document["gain_high"]
    assert [row.rank for row in result.rows] == [0, 1]
    for row in result.rows:
        assert row.forward_s and row.backward_s and row.exposed_s and row.optimizer_s
        assert sum(getattr(row, name) for name in PARTS) == pytest.approx(row.step_s)


def test_the_caps_of_a_list_make_the_buckets_of_the_plan(one_bucket):
    result = build((made_steps((0.05,) * 9), *one_bucket))
    assert result.buckets is not None
    gradients = result.buckets.job.gradients
    plan = plan_by_cuts(gradients, range(len(gradients)), (1, 2, 5, 8), "free")
    vars(result.buckets)["plan"] = plan
    caps = [int(cap * MIB) for cap in result.cap_list]
    order = [index for indices in plan.partition for index in indices]
    assert caps and plan_like_torch(plan.gradients, order, caps).partition == plan.partition
    assert "bucket_cap_mb_list=[" in result.lines["torch 2.13, predicted"]


def test_a_plan_comparison_overrides_the_prediction(one_bucket):
    steps = made_steps((0.05,) * 9)
    plans = {NOW: None, "small": 4.0}
    for factor, verdict in ((0.8, "use"), (1.0, "flat"), (1.2, "default")):
        given = {"note": RACED, "steps_per_turn": 3}
        turns = [made_steps((0.05,) * 21, label=NOW, bucket_bytes=(sum(SIZES),), **given)]
        turns.append(made_steps((0.05 * factor,) * 21, label="small", bucket_bytes=SIZES, **given))
        result = build((steps, *one_bucket, *turns), plans=plans)
        assert result.verdict == verdict and result.race is not None and result.race.num_rounds == 7
        assert result.cap_mib == (4.0 if verdict == "use" else None) and bool(result.lines) == (verdict == "use")
        now, other = result.table("race").rows_json()
        assert (now["num_buckets"], other["num_buckets"]) == (1, len(SIZES))
        assert other["ratio"] == pytest.approx(factor) and now["predicted_s"] == pytest.approx(result.step_s, rel=0.01)
        assert (result.bottleneck.kind == "buckets") == (verdict == "use")


def test_two_observed_programs_are_compared_by_the_parts_of_a_step_and_by_plan(one_bucket):
    plans = {NOW: None, "small": 4.0}
    turns = [made_steps((0.05,) * 21, label=label, bucket_bytes=SIZES, note=RACED, steps_per_turn=3) for label in plans]
    results = [build((made_steps((0.05,) * 9), *one_bucket, *turns), plans=plans) for _ in range(2)]
    rows = {row.name: row for row in compare_results(results, QUIET).rows}
    assert {"step", "forward", "backward", f"step, {NOW}", "step, small"} <= set(rows)
    assert rows["step"].first == pytest.approx(0.05) and rows["step"].ratio == 1


def test_predictions_in_a_comparison_start_from_its_own_buckets(one_bucket):
    """The machine is 25 % slower in the second run."""
    given = {"note": RACED, "steps_per_turn": 3}
    turns = [made_steps((0.0625,) * 21, label=NOW, bucket_bytes=(sum(SIZES),), **given)]
    turns.append(made_steps((0.05,) * 21, label="small", bucket_bytes=SIZES, **given))
    result = build((made_steps((0.05,) * 9), *one_bucket, *turns), plans={NOW: None, "small": 4.0})
    now, other = result.table("race").rows_json()
    assert result.buckets is not None and now["predicted_s"] == pytest.approx(0.0625)
    ratio = result.buckets.build_row("", result.buckets.model.cut_like(SIZES)).step_s
    assert other["predicted_s"] == pytest.approx(0.0625 * ratio / result.buckets.now.step_s)
    assert other["low_s"] < other["predicted_s"] < other["high_s"]


def test_a_comparison_of_few_rounds_decides_nothing_and_has_no_interval(one_bucket):
    given = {"note": RACED, "steps_per_turn": 3, "bucket_bytes": SIZES}
    turns = [made_steps((0.05 * factor,) * 6, label=name, **given) for name, factor in ((NOW, 1.0), ("4 MiB", 0.8))]
    result = build((made_steps((0.05,) * 9), *one_bucket, *turns), plans={NOW: None, "4 MiB": 4.0})
    assert result.verdict == "undecided" and result.lines == {} and "2 rounds" in result.answer
    assert result.table("race").rows_json()[1]["ratio_high"] is None
    json.dumps(result.to_json(), allow_nan=False)


def test_a_program_that_sends_nothing_has_its_data_and_no_buckets():
    waits = Samples(tuple((0.02,) for _ in range(6)))
    alone = replace(
        made_steps((0.05,) * 6), world_size=1, wrapper="none", backend="none", data_wait=waits,
        timing=Samples(tuple((0.05,) for _ in range(6))),
    )  # fmt: skip
    result = build((alone,))
    assert result.buckets is None and result.verdict == "" and result.lines == {} and result.exposed_s is None
    assert result.bottleneck.kind == "data" and result.bottleneck.gain_s == pytest.approx(0.02)
    assert result.rows[0].forward_s is None and "buckets" not in result.answer
    assert result.text(80) and result.to_json()["bottleneck"] == "data"


def test_a_program_that_failed_is_a_failure(one_bucket):
    result = build((made_steps((0.05,) * 9), *one_bucket), failure="train.py ended with exit code 3")
    assert result.failure == "train.py ended with exit code 3"


@pytest.mark.parametrize(("cap_bytes", "text"), [(100 * MIB, "100"), (4404019, "4.2"), (MIB // 8, "0.125")])
def test_a_cap_is_written_as_short_as_torch_understands_it(cap_bytes, text):
    assert format_cap(cap_bytes / MIB) == text


def write_rank(folder: Path, name: str, rank: int, numbers: range, **more: object) -> str:
    steps = [(number, 0.01 * number, 0.001, 0.002) for number in numbers]
    head = {"rank": rank, "world_size": 2, "backend": "gloo", "device": "cpu", "threads": 1}
    text = json.dumps(head | more | {"steps": steps}) + "\n"
    with (folder / f"rank-{name}.jsonl").open("a") as file:
        file.write(text)
    return text


def test_files_of_ranks_are_read_as_they_grow(tmp_path, capsys):
    files = _Files(tmp_path, every=4)
    assert files.read() == [] and not files.is_over()
    text = write_rank(tmp_path, "1-11", 1, range(2, 5))
    path = tmp_path / "rank-1-11.jsonl"
    path.write_text(text + text[:20])  # the second line is incomplete
    assert [len(rank.steps) for rank in files.read()] == [3]
    path.write_text(text + write_rank(tmp_path, "unused", 1, range(5, 10), num_steps=9))
    (tmp_path / "rank-unused.jsonl").unlink()
    assert not files.is_over()  # one of two ranks is done
    write_rank(tmp_path, "0-10", 0, range(2, 10), num_steps=9)
    write_rank(tmp_path, "0-12", 0, range(2, 4))  # another process that claims to be rank 0
    files.show()
    assert files.is_over() and [(r.about["rank"], len(r.steps)) for r in files.read()] == [(0, 8), (1, 8)]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in lines] == [" step 4", " step 8"] and "30.0 ms" in lines[0]


def test_steps_that_were_recorded_or_came_first_are_not_timed(tmp_path):
    wrapper = {"model": "Net", "wrapper": "torch", "cap_bytes": MIB, "bucket_bytes": [3 * MIB, MIB]}
    for rank in (0, 1):
        write_rank(tmp_path, str(rank), rank, range(2, 13), windows=[["trace", 6, 9, 0]], wrappers=[wrapper])
    record = _build_record(_Files(tmp_path, 0).read())
    assert [row[0] for row in record.timing.seconds] == pytest.approx([0.05, 0.10, 0.11, 0.12])
    assert len(record.timing.warmup_seconds) == 3 and record.phase("data_wait").median_s == 0.001
    assert (record.model, record.wrapper, record.bucket_bytes) == ("Net", "torch", (3 * MIB, MIB))


@pytest.mark.parametrize("disturbed", [0, 1])
def test_of_two_recordings_the_one_in_which_ranks_work_less_is_read(disturbed, monkeypatch):
    """Rank 1 is 10 ms late. In one recording another process delays rank 0 as much, and it seems that none is."""
    windows = [["a", 11, 19, 0], ["b", 31, 39, 0]]

    def read(ranks: object, window: attaching._Window) -> attaching._Reading:
        own_s = (0.02 if window.trace == "ab"[disturbed] else 0.01, 0.02)
        waits_s = tuple(0.03 - one for one in own_s)
        steps = [made_step(r, n, (waits_s[r],), before=own_s[r]) for r in (0, 1) for n in range(4)]
        return attaching._Reading([], steps)

    monkeypatch.setattr(attaching, "_read_window", read)
    steps = [(n, 0.05, 0.0) for n in range(1, 60)]
    found = attaching._read_traces([attaching._Rank({"windows": windows}, steps)] * 2).steps
    assert statistics.median(step.before_s for step in found if step.rank == 0) == 0.01


def test_a_recording_with_an_unreadable_trace_is_used_only_if_there_is_no_other(tmp_path):
    about = {"windows": [["a", 11, 19, 0], ["b", 31, 39, 0]], "folder": tmp_path, "rank": 0, "world_size": 2}
    found = attaching._read_traces([attaching._Rank(about, [(n, 0.05, 0.0) for n in range(1, 60)])])
    assert found.steps == [] and next(iter(found.why)).startswith("messages could not be read from the recorded steps")


def write_paused(folder: Path, num_paused: int) -> None:
    """Twenty steps of 10 ms. After some of them rank 0 saves for 40 ms, writes it to disk for another 20 ms, and rank 1
    waits."""
    for rank in (0, 1):
        steps = []
        for number in range(5, 25):
            is_paused = number - 5 < num_paused
            saved_s = 0.040 if is_paused and not rank else 0.0
            steps.append((number, 0.070 if is_paused else 0.010, 0.0, 0.0, 0.0, saved_s, 0.0))
        head = {"rank": rank, "world_size": 2, "backend": "gloo", "device": "cpu", "threads": 1, "cores": 1, "host": ""}
        (folder / f"rank-{rank}-1.jsonl").write_text(json.dumps(head | {"steps": steps}) + "\n")


def test_steps_with_a_pause_count_only_as_a_pause_with_what_follows_from_it(tmp_path):
    write_paused(tmp_path, 5)
    ranks = _Files(tmp_path, 0).read()
    timing = _build_record(ranks).timing
    assert timing.count == 15 and timing.median_s == pytest.approx(0.010) and timing.noise == 0
    saved_s = [sum(rank.saved_s) for rank in _build_ranks(ranks)]
    assert saved_s == [pytest.approx(5 * 0.060), 0.0]


def test_steps_are_shortened_by_their_pauses_if_most_have_one(tmp_path):
    write_paused(tmp_path, 15)
    ranks = _Files(tmp_path, 0).read()
    timing = _build_record(ranks).timing
    assert timing.count == 20 and timing.median_s == pytest.approx(0.030)
    assert sum(_build_ranks(ranks)[0].saved_s) == pytest.approx(15 * 0.040)


@pytest.mark.parametrize(("count", "is_busy"), [(12, True), (400, False)])
def test_an_observed_program_whose_steps_vary_is_doubted_only_if_its_median_is_uncertain(count, is_busy, tmp_path):
    for rank in (0, 1):
        steps = [(number, 0.010 if number % 3 else 0.020, 0.0, 0.0) for number in range(5, 5 + count)]
        head = {"rank": rank, "world_size": 2, "backend": "gloo", "device": "cpu", "threads": 1, "cores": 1, "host": ""}
        (tmp_path / f"rank-{rank}-1.jsonl").write_text(json.dumps(head | {"steps": steps}) + "\n")
    ranks = _Files(tmp_path, 0).read()
    record, environment = _build_record(ranks), replace(capture_environment(), load_average=None, stolen=0.0)
    assert record.timing.noise > UNSTABLE
    doubts = find_doubts([record, *_build_ranks(ranks)], environment)
    assert [doubt.kind for doubt in doubts] == (["inconclusive", "unstable"] if is_busy else [])


def write_cuda_rank(folder: Path, rank: int, gpu_s: float, host_s: list[float]) -> None:
    steps = [(number, gpu_s, 0.0, seconds) for number, seconds in enumerate(host_s, 2)]
    head = {"rank": rank, "world_size": 2, "backend": "nccl", "device": "cuda", "threads": 1}
    (folder / f"rank-{rank}-1.jsonl").write_text(json.dumps(head | {"steps": steps, "num_steps": steps[-1][0]}) + "\n")


def test_a_host_that_runs_ahead_of_its_gpu_is_no_reason_to_doubt_the_times(tmp_path):
    """Steps of 156 ms, which the host launches in 7 ms until the GPU's queue is full."""
    for rank in (0, 1):
        write_cuda_rank(tmp_path, rank, 0.156, [0.007] * 20 + [0.160, 0.030] * 10)
    record = _build_record(_Files(tmp_path, 0).read())
    assert record.timing.median_s == 0.156 and record.timing.noise == 0
    assert record.host is not None and record.host.noise > UNSTABLE  # the host clock would allow no conclusion
    environment = replace(capture_environment(), load_average=None, stolen=0.0)
    assert find_doubts([record], environment) == []
    assert find_doubts([replace(record, timing=record.host)], environment)[0].kind == "inconclusive"
    result = build((record,))
    spread = f"{format_ms(0.007)} to {format_ms(0.16)} ms"
    assert result.step_s == 0.156 and any(spread in line for line in result.findings)


def test_a_gpu_that_is_idle_until_the_host_launches_more_is_bound_by_the_host(one_bucket):
    recorded_s = statistics.median(step.step_s for step in one_bucket)
    idle = tuple(replace(step, idle_s=0.5 * recorded_s) for step in one_bucket)
    result = build((made_steps((recorded_s,) * 9), *idle))
    assert result.bottleneck.kind == "host" and result.idle_s == pytest.approx(0.5 * recorded_s)
    assert result.to_json()["idle_s"] == result.idle_s and result.verdict_text.count("To fix it, ") == 1
    # Where recording lengthened the step, the GPU waited that much longer for the host.
    result = build((made_steps((0.7 * recorded_s,) * 9), *idle))
    assert result.idle_s == pytest.approx(0.2 * recorded_s)
    # A GPU that waits for data is idle because of data loading.
    waits = Samples(((0.6 * recorded_s, 0.6 * recorded_s),) * 9)
    result = build((made_steps((recorded_s,) * 9, data_wait=waits), *idle))
    assert result.bottleneck.kind == "data" and result.idle_s == 0
    assert "host" not in [one.kind for one in build((made_steps((recorded_s,) * 9), *one_bucket)).bottlenecks]


def attached_over_link(ready_ms: tuple[float, ...], cuts: tuple[int, ...]) -> AttachedResult:
    """A 480 ms wait for data, an 8 ms backward, and 1 MiB over a shared 1 Gb/s link."""
    job, records = made_job((256 * KIB,) * 4, ready_ms, 8.0, before=480.0), []
    for number, share in enumerate((1.0, 0.7, 1.0, 1.2, 1.4, 0.9, 1.0, 1.3)):
        costs = MachineCosts(FamilyCurve("line", 2, 2e-4, 1.25e8 / share))
        made = made_on_cpu(job, costs, cuts, num_steps=1, marks=True)
        found = [read_steps(read_ranks(build_document(made, rank=rank))[0])[0] for rank in (0, 1)]
        records += [replace(step, number=number) for step in found]
    times = [step.step_s for step in records[::2]]
    return build((made_steps(tuple(times), backend="gloo", device="cpu"), *records))


def test_communication_that_no_buckets_can_hide_is_flat_and_says_why():
    result = attached_over_link((4.0, 5.0, 6.0, 8.0), (4,))
    assert result.exposed_s is not None and result.exposed_s / result.step_s > 0.01  # more than 1 % is exposed
    assert result.buckets is not None and result.buckets.limit.share <= 0.01
    assert result.verdict == "flat" and str(result.buckets.limit) in result.answer and result.lines == {}
    assert str(result.buckets.limit) in result.buckets.answer


def test_as_much_that_could_be_hidden_is_not_flat():
    result = attached_over_link((1.0, 2.0, 3.0, 8.0), (4,))
    assert result.buckets is not None and result.buckets.limit.share > 0.01
    assert result.verdict != "flat"


# -- one accounting ----------------------------------------------------------------------------------------------------


def add_up(row: RankRow) -> float:
    return sum(getattr(row, name) for name in PARTS)


def attached_to(late_ms: float = 0.0, cuts: tuple[int, ...] = (4,), **more: object) -> AttachedResult:
    """Two ranks on gloo; rank 1 reaches its messages later than rank 0 by this much."""
    job, records = made_job((MIB,) * 4, (4.0, 5.0, 6.0, 7.5), 8.0, before=30.0), []
    costs = MachineCosts(FamilyCurve("line", 2, 2e-4, 1e9), contention=Contention())
    for rank in (0, 1):
        given = replace(job, backward_s=job.backward_s + (rank * late_ms) / 1e3, ready_s=tuple(
            ready_s + rank * late_ms / 1e3 for ready_s in job.ready_s))  # fmt: skip
        made = made_on_cpu(given, costs, cuts, num_steps=6, marks=True, late_ms=late_ms * (1 - rank))
        steps = read_steps(read_ranks(build_document(made, rank=rank))[0])
        if rank == 0:  # messages of rank 0 last until the other rank joins
            steps = [_delay(step, late_ms / 1e3) for step in steps]
        records += steps
    times = [step.step_s for step in records[:6]]
    return build((made_steps(tuple(times), **{"backend": "gloo", "device": "cpu"} | more), *records))


def _delay(step: TracedStepRecord, late_s: float) -> TracedStepRecord:
    messages = tuple(replace(m, start_s=m.start_s, done_s=m.done_s + late_s) for m in step.messages)
    return replace(step, messages=messages)


def test_the_phases_of_a_step_add_up_and_waiting_is_charged_to_the_late_rank():
    result = attached_to(late_ms=20.0)
    early, late = result.rows
    assert add_up(early) == pytest.approx(early.step_s) and add_up(late) == pytest.approx(late.step_s)
    assert early.waiting_s == pytest.approx(0.020, rel=0.05) and late.waiting_s == pytest.approx(0, abs=1e-6)
    assert (result.bottleneck.kind, result.bottleneck.rank) == ("late rank", 1)
    assert result.bottleneck.gain_s == pytest.approx(early.waiting_s, rel=0.05)
    # The sentence, the table and the JSON show the same numbers: those of the limiting rank.
    document = result.to_json()
    assert result.critical is late and document["step_s"] == result.step_s == late.step_s
    assert document["exposed_s"] == late.exposed_s == document["where"][1]["exposed_s"]
    assert [add_up(row) for row in result.rows] == pytest.approx([row["step_s"] for row in document["where"]])


def test_waiting_in_forward_is_not_forward():
    """A buffer broadcast keeps rank 0 in forward until rank 1 arrives; its own part of the work takes 1 ms."""
    records = [made_step(rank, n, (0.001,)) for rank in (0, 1) for n in range(4)]
    took = {0: 0.006, 1: 0.001}
    records = [
        replace(r, forward_s=0.009, data_s=0.001, stalls=(Stall(-0.009, took[r.rank], took[r.rank]),)) for r in records
    ]
    first, other = (account_steps(records)[rank][0] for rank in (0, 1))
    assert (first["waiting_s"], first["exposed_s"]) == pytest.approx((0.005, 0.002))
    assert first["forward_s"] == pytest.approx(0.003) and other["forward_s"] == pytest.approx(0.008)
    assert (other["waiting_s"], other["exposed_s"]) == pytest.approx((0.0, 0.002))
    for parts in (first, other):
        assert sum(parts.values()) == pytest.approx(records[0].step_s - 0.001)


def test_data_that_comes_in_several_batches_at_once_is_averaged():
    waits = tuple((0.0, 0.0) if n % 4 else (0.04, 0.04) for n in range(40))
    times = tuple((0.02 + row[0],) * 2 for row in waits)
    steps = replace(made_steps((0.02,)), timing=Samples(times), data_wait=Samples(waits))
    result = build((steps,))
    assert result.bottleneck.kind == "data" and result.rows[0].data_s / result.step_s == pytest.approx(1 / 3, abs=0.04)


# -- one answer --------------------------------------------------------------------------------------------------------


def test_the_first_three_lines_have_the_cause_the_cure_and_the_gain():
    result = attached_to(late_ms=20.0)
    first, cure, gain, *_ = result.text(None).splitlines()
    finding = result.bottleneck
    assert finding.subject in first.lower() and f"{finding.share:.0%}" in first
    assert finding.cure in cure and finding.gain in gain and finding.gain_interval_s is not None
    assert list(result.to_json()["card"]) == ["verdict", "cure", "gain", "why"]


def test_best_buckets_expose_no_more_than_those_in_use():
    for cuts in ((4,), (1, 2, 3, 4), (2, 4)):
        result = attached_to(cuts=cuts)
        rows = {row["label"]: row for row in result.to_json()["caps"]}
        now = next(row for label, row in rows.items() if label.startswith("traced"))
        assert (now["exposed_s"], now["step_s"]) == pytest.approx((result.exposed_s, result.step_s))
        best = rows.get("best", now)
        assert best["exposed_s"] <= now["exposed_s"] + 1e-9 or best["gain"] < 0


@pytest.mark.parametrize(
    "cuts", [(1, 2, 3, 4, 5, 6, 7, 8), *(pytest.param(cuts, marks=pytest.mark.slow) for cuts in ((8,), (2, 4, 6, 8)))]
)
@pytest.mark.parametrize(("latency_s", "bandwidth"), [(1e-3, 2e9), (1e-4, 2e10), (3e-3, 5e9), (1e-4, 5e8)])
def test_a_verdict_on_buckets_follows_from_its_interval(cuts, latency_s, bandwidth):
    costs = MachineCosts(FamilyCurve("line", 2, latency_s, bandwidth), contention=Contention())
    made = made_on_gpu(JOB, costs, cuts, num_steps=4)
    records = [step for rank in (0, 1) for step in read_steps(read_ranks(build_document(made, rank=rank))[0])]
    result = build((made_steps((records[0].step_s,) * 9), *records))
    gain, low, high = result.saves
    assert low <= gain <= high and result.rival is result.buckets.candidate and result.rival.cap_bytes
    least_s = min(row.step_s for row in result.buckets.rows if row.label != "default")
    assert result.rival.step_s <= 1.01 * least_s  # the best prediction, not the largest upper bound
    if result.verdict == "use":
        assert low > 0 and gain > 0.01
    elif result.verdict == "undecided":
        assert gain > 0.01 and low <= 0
    else:
        assert gain <= 0.01 + 1e-9
    assert ("buckets" in [one.kind for one in result.bottlenecks]) <= (result.verdict == "use")
    assert bool(result.lines) == (result.verdict == "use")


def test_a_tuner_races_the_best_prediction_even_if_the_default_saves_as_much(monkeypatch, tmp_path):
    costs = MachineCosts(FamilyCurve("line", 2, 3e-3, 5e9), contention=Contention())
    made = made_on_gpu(JOB, costs, tuple(range(1, 9)), num_steps=4)
    records = [step for rank in (0, 1) for step in read_steps(read_ranks(build_document(made, rank=rank))[0])]
    session = Session("tune attach", {"command": ["x"]}, 1, capture_environment(), progress=False)
    asked = {}

    def run(session, folder, settings, viewer=None):
        asked.update(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(attaching, "_run", run)
    with pytest.raises(KeyboardInterrupt):
        attaching._compare_plans(session, tmp_path, [made_steps((records[0].step_s,) * 9), *records], (), None)
    own, other = asked["race"]["plans"]
    assert own is None and other > 1 and not session.warnings


@pytest.mark.parametrize(("num_steps", "num_rounds"), [(120, 11), (27, 2), (23, 0)])
def test_a_comparison_that_the_program_cuts_short_counts_its_whole_rounds(monkeypatch, tmp_path, num_steps, num_rounds):
    session = Session("tune attach", {"command": ["x"]}, 1, capture_environment(), progress=False)

    def run(session, folder, settings, viewer=None):
        about = {"num_steps": num_steps, "world_size": 2, "backend": "gloo", "device": "cpu", "threads": 1}
        about["layouts"] = {"0": [MIB], "1": [MIB // 2] * 2}
        return [attaching._Rank(about, [(n, 0.1, 0.0, 0.1) for n in range(1, num_steps + 1)]) for _ in range(2)]

    monkeypatch.setattr(attaching, "_run", run)
    made = attached_to(cap_bytes=MIB)
    found = attaching._compare_plans(session, tmp_path, made.run.records, (MIB // 2,), None)
    assert [len(record.turns_s) for record in found] == ([num_rounds] * 2 if num_rounds else [])
    assert f"step {num_steps}" in session.warnings[0]


def test_caps_are_those_of_the_program():
    for cap_mib, text in ((25.0, "25"), (0.0001, "0.0001")):
        result = attached_to(cap_bytes=int(cap_mib * MIB))
        now = result.buckets.now
        assert now.cap_bytes == int(cap_mib * MIB) and format_cap(now.cap_mib) == text
    default = next((row for row in result.buckets.rows if "default" in row.label), None)
    assert default is None or default.cap_mib in (25.0, now.cap_mib)


def test_cures_for_exposed_messages_are_those_of_the_backend():
    """On one host, shared memory replaces gloo; elsewhere messages are compressed by a hook that works there."""
    job, found = made_job((MIB,) * 4, (4.0, 5.0, 6.0, 7.5), 8.0, before=4.0), {}
    costs = MachineCosts(FamilyCurve("line", 2, 2e-4, 2e8), contention=Contention())
    for backend, device, make in (("gloo", "cpu", made_on_cpu), ("nccl", "cuda", made_on_gpu)):
        made = make(replace(job, device=device), costs, (4,), num_steps=6)
        records = [step for rank in (0, 1) for step in read_steps(read_ranks(build_document(made, rank=rank))[0])]
        result = build((made_steps((records[0].step_s,) * 9, backend=backend, device=device), *records))
        found[backend] = {one.kind: one for one in result.bottlenecks}
        assert all(one.gain_s <= result.exposed_s + 1e-9 for one in result.bottlenecks)
        assert result.next_steps and not any("bucket_cap" in line for line in result.next_steps)
    assert '"shm"' in found["gloo"]["backend"].line and "network" not in found["gloo"]
    assert "paceline.comm_hook" in found["nccl"]["network"].line and "backend" not in found["nccl"]


def test_a_doubt_about_the_machine_comes_first_and_no_gain_is_claimed(one_bucket):
    records = (made_steps((0.05,) * 9), *one_bucket)
    results = [
        AttachedResult(Run("profile attach", {"command": ["x"]}, environment, records))
        for environment in (QUIET, replace(QUIET, stolen=0.5))
    ]
    sure, busy = results
    assert sure.verdict == "use" and sure.bottleneck.gain_s > 0 and sure.lines and sure.busy is None
    assert busy.to_json()["is_inconclusive"] and busy.busy.evidence in busy.text(None).splitlines()[0]
    assert [one.gain_s for one in busy.bottlenecks] == [0.0] * len(busy.bottlenecks)
    assert busy.verdict != "use" and busy.lines == {} and busy.cap_mib is None
    assert busy.bottleneck.certainty == "withdrawn" and [line.split()[:2] for line in busy.next_steps] == [
        ["paceline", "profile"]
    ]


def test_a_gain_measured_on_a_busy_machine_is_claimed(one_bucket):
    plans, given = {NOW: None, "small": 4.0}, {"note": RACED, "steps_per_turn": 3}
    turns = [made_steps((0.05,) * 21, label=NOW, bucket_bytes=(sum(SIZES),), **given)]
    turns.append(made_steps((0.04,) * 21, label="small", bucket_bytes=SIZES, **given))
    records = (made_steps((0.05,) * 9), *one_bucket, *turns)
    config = {"command": ["x"], "plans": plans}
    busy = AttachedResult(Run("tune attach", config, replace(QUIET, stolen=0.5), records))
    assert busy.busy is not None and busy.bottleneck.certainty == "measured"
    assert busy.card["verdict"] == "The bucket size is the bottleneck; fixing it saves 20% of a step"


def test_a_healthy_program_is_called_healthy():
    result = build((made_steps((0.05,) * 9),))
    assert (result.bottleneck.kind, result.bottleneck.gain_s, result.next_steps) == ("healthy", 0.0, [])
    assert result.to_json()["bottleneck"] == "healthy" and result.card["gain"] == "none"


def test_the_next_command_follows_from_the_verdict():
    waits = Samples(((0.03, 0.03),) * 9)
    result = build((made_steps((0.05,) * 9, data_wait=waits),))
    assert result.next_steps == [result.bottleneck.line] and "num_workers" in result.bottleneck.line


def test_a_plan_is_slower_only_if_its_interval_says_so():
    wide, narrow = Interval(1.316, 0.888, 1.695), Interval(1.3, 1.2, 1.4)
    ratios = {("a", "now"): wide, ("b", "now"): narrow, ("now", "now"): Interval(1.0, 1.0, 1.0)}
    race = Race("now", "now", ("now",), ratios, 20)
    assert (_find_status(race, "a"), _find_status(race, "b")) == ("beaten", "slower")


def test_the_operator_that_makes_a_rank_late_is_named():
    made = MadeTrace().op("outer", 0, 10).op("inner", 2, 8).op("inner", 9, 9.5).op("c10d::allreduce_", 11, 20)
    times = PhaseFinder(sorted(made.events, key=lambda event: event["ts"]))._list_operators(0.0, 30_000.0)
    assert {one.name: one.own_s for one in times} == pytest.approx({"inner": 6.5e-3, "outer": 3.5e-3})
    result, records = attached_to(late_ms=20.0), []
    assert result.bottleneck.operator == ""  # then no operator may be named as the cause
    for step in result.only(TracedStepRecord):
        own_s = (0.02 if step.rank else 0.0) + 0.005
        records.append(replace(step, operators=(OperatorTime("aten::mm", 0.03), OperatorTime("SlowBackward", own_s))))
    finding = build((result.steps, *records)).bottleneck
    assert (finding.kind, finding.rank, finding.operator) == ("late rank", 1, "SlowBackward")


def attached_with(slower: float, **extra_s: float) -> AttachedResult:
    """Two ranks; rank 1 takes `slower` times as long for its operators, and `extra_s` more for some of them."""
    result, records = attached_to(late_ms=20.0), []
    for step in result.only(TracedStepRecord):
        times = {"mm": 0.009, "relu": 0.005, "copy_": 0.004}
        if step.rank:
            times = {name: slower * own_s + extra_s.get(name, 0.0) for name, own_s in times.items()}
        records.append(replace(step, operators=tuple(OperatorTime(*one) for one in times.items())))
    return build((result.steps, *records))


def test_a_somewhat_slower_core_is_not_a_problem_of_the_program_but_more_work_is():
    result, records = attached_to(late_ms=20.0), []
    for step in result.only(TracedStepRecord):  # 40 ms of work on rank 0 and 60 ms on rank 1
        times = {name: (1.5 if step.rank else 1.0) * own_s for name, own_s in
                 {"mm": 0.018, "relu": 0.012, "copy_": 0.009}.items()}  # fmt: skip
        records.append(replace(step, operators=tuple(OperatorTime(*one) for one in times.items())))
    diffuse = build((result.steps, *records))
    assert [one.kind for one in diffuse.bottlenecks] == ["healthy"]
    assert any("1.50" in line for line in diffuse.findings)
    # A GPU is not shared, so a diffuse slowdown means that its clock is lower.
    gpu = replace(result.steps, device="cuda", backend="nccl")
    assert build((gpu, *records)).bottleneck.kind == "late rank"
    # Operators that take twice as long mean that another program takes half of a core.
    taken = attached_with(slower=2.0)
    assert (taken.bottleneck.kind, taken.bottleneck.rank, taken.bottleneck.operator) == ("late rank", 1, "")
    # A slower core explains 1.8 of the 20 ms, and one operator 17.
    work = attached_with(slower=1.1, relu=0.017)
    assert (work.bottleneck.kind, work.bottleneck.rank, work.bottleneck.operator) == ("late rank", 1, "relu")
    assert work.bottleneck.gain_s == pytest.approx(0.0195 * (1 - 1.8 / 20), rel=0.15)


@pytest.mark.parametrize(("factor", "is_named"), [(1.15, False), (1.4, True)])
def test_an_operator_must_take_much_longer_on_a_late_rank_to_be_named(factor, is_named):
    """The core of a rank may be slower for one kind of work only, such as convolutions."""
    result, records = attached_to(late_ms=6.0), []
    for step in result.only(TracedStepRecord):
        times = {"conv": 0.020 * (factor if step.rank else 1.0), "relu": 0.012, "copy_": 0.011}
        records.append(replace(step, operators=tuple(OperatorTime(*one) for one in times.items())))
    slow = find_slow_part(records, 1)
    assert (slow.name, slow.is_named, slow.is_core) == ("conv", is_named, not is_named)
    assert slow.share > 0.4 and slow.longer == pytest.approx(factor - 1)


@pytest.mark.parametrize(("num_restarts", "share"), [(1, 0.0), (2, 0.0), (4, 0.2 / 1.4)])
def test_restarts_of_a_loader_count_if_they_recur(num_restarts, share):
    waits_s = [0.05 if number < num_restarts else 0.0 for number in range(60)]
    timing = Samples(tuple((0.02 + wait_s,) for wait_s in waits_s))
    assert average_data(timing, Samples(tuple((wait_s,) for wait_s in waits_s))) == [pytest.approx(share)]


def test_messages_that_can_be_removed_are_not_sent_in_another_way(monkeypatch):
    def list_gains():
        result = attached_to()
        return {one.kind: one.gain_s for one in result._list_findings(result.only(TracedStepRecord))}

    before = list_gains()
    removable = Finding("buffers", "buffers", "do not send them", attached_to().exposed_s / 2)
    monkeypatch.setattr("paceline.report.observed.find_causes", lambda _: iter([removable]))
    assert list_gains()["backend"] == pytest.approx(before["backend"] / 2)
    removable = replace(removable, gain_s=2 * removable.gain_s)
    assert "backend" in before and "backend" not in list_gains()


def test_an_interruption_of_another_operator_in_each_step_is_not_more_work():
    result, records = attached_to(late_ms=20.0), []
    for step in result.only(TracedStepRecord):
        times = dict.fromkeys("abcdef", 0.006)
        if step.rank:
            times["abcdef"[step.number % 6]] += 0.02
        records.append(replace(step, operators=tuple(OperatorTime(*one) for one in times.items())))
    assert find_slow_part(records, 1).share < 0.1 and find_slow_part(records).is_core
    assert find_slow_part(result.only(TracedStepRecord)[:6]) is None
    assert build((result.steps, *records)).bottleneck.kind == "healthy"


@pytest.mark.parametrize(
    ("workers", "is_persistent", "delivered", "line"),
    [
        (0, False, 0.0, "num_workers=1"),
        (3, False, 0.0, "num_workers=3"),  # the advice changes only that workers persist
        (3, True, 0.0, "num_workers=4"),
        (3, True, 0.9, ""),  # a batch that has already been delivered is only transferred
    ],
)
def test_a_loader_is_not_advised_to_do_what_it_already_does(workers, is_persistent, delivered, line):
    given = {"num_workers": workers, "are_workers_persistent": is_persistent, "delivered_share": delivered}
    ranks = [replace(made_rank(rank), **given) for rank in (0, 1)]
    waits = Samples(tuple((0.02, 0.02) for _ in range(9)))
    steps = made_steps((0.1,) * 9, backend="gloo", device="cpu", data_wait=waits)
    environment = replace(QUIET, cores=2)
    found = AttachedResult(Run("profile attach", {"command": ["x"]}, environment, (steps, *ranks))).bottleneck
    assert (found.kind, found.line[16:29], found.gain_s) == (
        ("data", line, pytest.approx(0.02)) if line else ("healthy", "", 0.0)
    )


@pytest.mark.parametrize(
    ("wait_s", "share", "workers"),
    [(0.02, 0.1, 1), (0.07, 0.1, 3), (0.07, 1.0, 1), (0.0999, 0.1, 16)],
    ids=["less than compute", "waiting for a disk", "computing, too", "almost all of the step"],
)
def test_enough_workers_are_advised_to_keep_up_with_compute(wait_s, share, workers):
    ranks = [replace(made_rank(rank), cpu_share=share) for rank in (0, 1)]
    steps = made_steps((0.1,) * 9, backend="gloo", device="cpu", data_wait=Samples(((wait_s, wait_s),) * 9))
    environment = replace(QUIET, cores=2)
    found = AttachedResult(Run("profile attach", {"command": ["x"]}, environment, (steps, *ranks))).bottleneck
    assert found.kind == "data" and f"num_workers={workers}," in found.line


def test_a_bound_is_the_upper_end_of_its_interval():
    found = Finding("data", "a", gain_s=0.03, certainty="at most", step_s=0.1, gain_interval_s=(0.02, 0.04))
    assert found.gain == "up to 40.0% of a step (40.0 of 100 ms), 90 %: 20.0% to 40.0%"
    assert found.verdict == "data loading is the bottleneck; fixing it saves up to 40% of a step"
    assert replace(found, gain_interval_s=(0.02, 0.2)).gain.startswith("up to 100.0% of a step")
    assert (
        replace(found, certainty="computed").gain == "30.0% of a step (30.0 of 100 ms), computed, 90 %: 20.0% to 40.0%"
    )


def test_a_program_that_failed_is_said_to_have_failed_first():
    failed = build((made_steps((0.1,) * 9),), failure="python train.py ended with exit code 3")
    assert failed.card["verdict"] == "The program failed with exit code 3: its own output says why"
    assert failed.card["why"].startswith("until then: healthy") and list(failed.card) == ["verdict", "why"]


def test_a_narrow_terminal_keeps_the_columns_of_the_largest_parts(one_bucket):
    row = build((made_steps((0.1,) * 9), *one_bucket)).rows[0]
    parts = dict.fromkeys(("forward_s", "backward_s", "waiting_s", "exposed_s", "optimizer_s"), 0.01)
    for data_s, largest in ((0.9, {"data_s"}), (0.01, {"rest_s"})):
        columns = _order_columns([replace(row, step_s=1.0, data_s=data_s, **parts)])
        assert {column.key for column in columns if column.priority == 4} == largest


def test_a_gain_from_shorter_messages_must_exceed_the_noise_at_its_lower_end():
    def tell(kind, low):
        return rank_findings([Finding(kind, "a", gain_s=0.1, gain_interval_s=(low, 0.2))], 1.0, noise=0.06)[0].kind

    assert [tell("backend", low) for low in (0.055, 0.065)] == ["healthy", "backend"]
    assert tell("network", 0.055) == tell("batch", 0.055) == "healthy" and tell("threads", 0.01) == "threads"


def test_the_gain_of_another_backend_is_as_uncertain_as_what_is_exposed():
    def find_low(spread_s):
        job = made_job((MIB,) * 4, (4.0, 5.0, 6.0, 7.5), 8.0, before=4.0)
        costs = MachineCosts(FamilyCurve("line", 2, 2e-4, 2e8), contention=Contention())
        made = made_on_cpu(job, costs, (4,), num_steps=6)
        records = [step for rank in (0, 1) for step in read_steps(read_ranks(build_document(made, rank=rank))[0])]
        records = [_delay(step, spread_s * (step.number % 2)) for step in records]
        result = build((made_steps((records[0].step_s,) * 9, backend="gloo", device="cpu"), *records))
        found = next(one for one in result.bottlenecks if one.kind == "backend")
        return found.gain_interval_s[0] / found.gain_s

    assert find_low(0.02) < 0.8 * find_low(0.0)


def test_the_bars_of_a_rank_add_up_to_its_step():
    result = build((made_steps((0.1, 0.14)), *(made_step(rank, 1, (0.1,) * 4) for rank in (0, 1))))
    axes = result.figure("step").axes[0]
    ends = [0.0] * len(result.rows)
    for bars in axes.containers:
        for number, bar in enumerate(bars):
            assert bar.get_x() == pytest.approx(ends[number])
            ends[number] += bar.get_width()
    assert ends == pytest.approx([1e3 * row.step_s for row in result.rows], rel=0.01)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]


@pytest.mark.parametrize("kind", ["add_scalar", "log"])
def test_a_logger_gets_the_parts_of_each_rank_and_the_findings(kind):
    result = build((made_steps((0.1, 0.14)), *(made_step(rank, 1, (0.1,) * 4) for rank in (0, 1))))
    got = {}
    if kind == "log":
        logger = SimpleNamespace(log=lambda values, step: got.update(values, step=step))
    else:
        record = lambda name, value, step: got.update({name: value, "step": step})  # noqa: E731
        logger = SimpleNamespace(add_scalar=record, add_text=record)
    result.log_to(logger, step=7)
    assert got["step"] == 7 and got["paceline/answer"] == result.headline
    for row in result.rows:
        assert got[f"paceline/rank_{row.rank}/exposed_s"] == pytest.approx(row.exposed_s)
    assert {f"paceline/gain_s/{one.kind}" for one in result.bottlenecks} <= set(got)
