"""Conclusions from the steps of an attached program: the late rank, the bottleneck, the buckets, the lines to paste."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.plan import plan_by_cuts, plan_like_torch
from paceline.predict.advice import find_late_rank, list_bottlenecks, remove_recording
from paceline.predict.curves import FamilyCurve
from paceline.predict.simulate import Contention, MachineCosts
from paceline.predict.trace_steps import read_steps
from paceline.predict.traces import Lateness, read_ranks
from paceline.records import Samples, StepRecord, TracedMessage, TracedStepRecord
from paceline.records.environment import capture_environment
from paceline.records.findings import Finding, find_doubts
from paceline.records.samples import UNSTABLE
from paceline.records.steps import RACED
from paceline.records.store import Run
from paceline.report.observed import NOW, AttachedResult, _write_cap
from paceline.units import KIB, MIB, format_ms
from paceline.verbs.attach import _build_record, _Files
from tests.unit.made_ddp import build_document, made_job, made_on_cpu, made_on_gpu

SIZES = (8 * MIB, 4 * MIB, 4 * MIB, 2 * MIB, MIB, MIB, 512 * KIB, 512 * KIB)
JOB = made_job(SIZES, (4, 8, 12, 18, 22, 24, 28, 30), 31, device="cuda")
COSTS = MachineCosts(FamilyCurve("line", 2, 1e-4, 2e9), contention=Contention())
NOTHING = Samples(((0.0, 0.0),))
CAP = Finding("buckets", "other buckets save time", "use cap", gain_s=0.02)


def made_step(rank: int, number: int, took: tuple[float, ...], before: float = 0.01) -> TracedStepRecord:
    """Messages one after the other from the end of a backward of 10 ms on."""
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
    return AttachedResult(Run("profile attach", config, capture_environment(), records))


def test_the_late_rank_is_the_one_whose_messages_take_least():
    records = [made_step(0, n, (0.021, 0.001)) for n in range(4)] + [made_step(1, n, (0.001, 0.001)) for n in range(4)]
    found = find_late_rank(records)
    assert found is not None and (found.rank, found.share) == (1, 1.0) and found.mean_s == pytest.approx(0.02)
    assert find_late_rank(records[:4]) is None
    assert find_late_rank([]) is None


def test_the_cost_of_recording_is_removed():
    records = [made_step(0, n, (0.004,), before=0.01 + 0.001 * n) for n in range(3)]  # 27 ms in the median
    found = remove_recording(records, 0.0155)  # half of 23 ms of its own work
    assert [step.step_s for step in found] == pytest.approx([0.015, 0.0155, 0.016])
    assert [step.exposed_s for step in found] == pytest.approx([0.004] * 3)
    assert [(step.backward_s, step.ready_s, step.after_s) for step in found] == [(0.005, (0.0025,), 0.001)] * 3
    assert [step.messages[0].launch_s for step in found] == pytest.approx([0.005] * 3)
    assert remove_recording(records, 0.001) == found  # never more than half


def test_short_recorded_steps_are_stretched():
    records = [made_step(0, n, (0.004,)) for n in range(3)]  # 26 ms
    for step in remove_recording(records, 0.039):
        assert (step.step_s, step.exposed_s, step.backward_s) == pytest.approx((0.039, 0.006, 0.015))
        assert step.messages[0].launch_s == step.messages[0].start_s == pytest.approx(0.015)


def test_the_bottleneck_is_the_one_with_most_to_gain():
    data = Samples(((0.03, 0.02),) * 3)
    late, buckets, messages = Lateness(1, 0.9, 0.05), CAP, (0.02, 0.012, 0.05)
    kinds = [one.kind for one in list_bottlenecks(0.1, data, late, buckets, messages)]
    assert kinds == ["late rank", "data", "buckets", "network", "computing"]
    (only,) = list_bottlenecks(1.0, data, None, None, None)
    assert (only.kind, only.gain_s) == ("computing", 0.0)
    for exposed_s, kind in ((0.009, "computing"), (0.011, "network")):  # a tenth of the step
        assert list_bottlenecks(0.1, NOTHING, None, None, (0.02, exposed_s, 0.05))[0].kind == kind


def test_a_step_that_sends_for_longer_than_it_computes_has_too_small_a_batch():
    first, *_ = list_bottlenecks(0.1, NOTHING, None, None, (0.06, 0.05, 0.04))
    assert first.kind == "batch"
    first, *others = list_bottlenecks(0.1, NOTHING, None, CAP, (0.06, 0.05, 0.04))
    assert (first.kind, others[0].kind) == ("buckets", "batch")  # free remedies come first
    first, *others = list_bottlenecks(0.1, NOTHING, None, replace(CAP, gain_s=0.01), (0.06, 0.05, 0.04))
    assert (first.kind, others[0].kind) == ("batch", "buckets")  # unless it saves little of what is exposed


def test_ranks_that_take_turns_are_not_late_and_one_that_waits_for_data_is_late_because_of_that():
    assert list_bottlenecks(0.1, NOTHING, Lateness(0, 0.5, 0.09), None, None)[0].kind == "computing"
    data = Samples(((0.0, 0.05),) * 3)
    first, *others = list_bottlenecks(0.1, data, Lateness(1, 1.0, 0.05), None, None)
    assert first.kind == "data" and "rank 1" in first.text and others[0].kind == "computing"


def test_the_answer_has_the_measured_step_the_best_cap_and_the_lines_to_paste(one_bucket):
    recorded_s = sorted(step.step_s for step in one_bucket)[len(one_bucket) // 2]
    result = build((made_steps((recorded_s * 0.97,) * 9), *one_bucket))
    assert result.verdict == "use" and result.bottleneck.kind == "buckets"
    assert result.step_s == pytest.approx(recorded_s * 0.97)
    assert result.buckets is not None and result.buckets.traced.step_s == pytest.approx(result.step_s, rel=1e-3)
    cap = f"bucket_cap_mb={result.buckets.best.cap_mib:g}"
    assert result.lines["torch"] == f"DistributedDataParallel(model, {cap})"
    assert result.lines["transformers"] == f"TrainingArguments(..., ddp_{cap})"
    assert f"DistributedDataParallelKwargs({cap})" in result.lines["Accelerate"]
    assert f"DDPStrategy({cap})" in result.lines["Lightning"]
    text, document = result.text(80, details=True), result.to_json()
    assert cap in result.answer and all(line in text for line in result.lines.values())
    assert document["bottleneck"] == "buckets" and document["gain_low"] < document["gain"] < document["gain_high"]
    assert [row.rank for row in result.rows] == [0, 1]
    for row in result.rows:
        parts = (row.data_s, row.forward_s, row.backward_s, row.exposed_s, row.after_s)
        assert sum(part or 0.0 for part in parts) == pytest.approx(row.step_s, rel=1e-3)


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


def test_a_race_has_the_last_word(one_bucket):
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


def test_what_a_race_predicts_starts_from_the_own_buckets_in_its_run(one_bucket):
    """The machine takes a quarter longer in the second run."""
    given = {"note": RACED, "steps_per_turn": 3}
    turns = [made_steps((0.0625,) * 21, label=NOW, bucket_bytes=(sum(SIZES),), **given)]
    turns.append(made_steps((0.05,) * 21, label="small", bucket_bytes=SIZES, **given))
    result = build((made_steps((0.05,) * 9), *one_bucket, *turns), plans={NOW: None, "small": 4.0})
    now, other = result.table("race").rows_json()
    assert result.buckets is not None and now["predicted_s"] == pytest.approx(0.0625)
    ratio = result.buckets.build_row("", result.buckets.model.cut_like(SIZES)).step_s
    assert other["predicted_s"] == pytest.approx(0.0625 * ratio / result.buckets.now.step_s)
    assert other["low_s"] < other["predicted_s"] < other["high_s"]


def test_a_race_of_few_rounds_decides_nothing_and_has_no_interval(one_bucket):
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
    assert _write_cap(cap_bytes / MIB) == text


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
    path.write_text(text + text[:20])  # the second line is half written
    assert [len(rank.steps) for rank in files.read()] == [3]
    path.write_text(text + write_rank(tmp_path, "unused", 1, range(5, 10), num_steps=9))
    (tmp_path / "rank-unused.jsonl").unlink()
    assert not files.is_over()  # one of two ranks
    write_rank(tmp_path, "0-10", 0, range(2, 10), num_steps=9)
    write_rank(tmp_path, "0-12", 0, range(2, 4))  # another process that claims to be rank 0
    files.show()
    assert files.is_over() and [(r.about["rank"], len(r.steps)) for r in files.read()] == [(0, 8), (1, 8)]
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in lines] == [" step 4", " step 8"] and "30.0 ms" in lines[0]


def test_steps_that_were_recorded_or_came_first_are_not_timed(tmp_path):
    wrapper = {"model": "Net", "wrapper": "torch", "cap_bytes": MIB, "bucket_bytes": [3 * MIB, MIB]}
    for rank in (0, 1):
        write_rank(tmp_path, str(rank), rank, range(2, 13), recorded=[6, 9], wrappers=[wrapper])
    record = _build_record(_Files(tmp_path, 0).read())
    assert [row[0] for row in record.timing.seconds] == pytest.approx([0.05, 0.10, 0.11, 0.12])
    assert len(record.timing.warmup_seconds) == 3 and record.phase("data_wait").median_s == 0.001
    assert (record.model, record.wrapper, record.bucket_bytes) == ("Net", "torch", (3 * MIB, MIB))


def write_cuda_rank(folder: Path, rank: int, gpu_s: float, host_s: list[float]) -> None:
    steps = [(number, gpu_s, 0.0, seconds) for number, seconds in enumerate(host_s, 2)]
    head = {"rank": rank, "world_size": 2, "backend": "nccl", "device": "cuda", "threads": 1}
    (folder / f"rank-{rank}-1.jsonl").write_text(json.dumps(head | {"steps": steps, "num_steps": steps[-1][0]}) + "\n")


def test_a_host_that_runs_ahead_of_its_gpu_is_no_reason_to_doubt_the_times(tmp_path):
    """Steps of 156 ms, which the host launches in 7 ms until the queue of the GPU is full."""
    for rank in (0, 1):
        write_cuda_rank(tmp_path, rank, 0.156, [0.007] * 20 + [0.160, 0.030] * 10)
    record = _build_record(_Files(tmp_path, 0).read())
    assert record.timing.median_s == 0.156 and record.timing.noise == 0
    assert record.host is not None and record.host.noise > UNSTABLE  # the host clock alone would allow no conclusion
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
    # Where recording made the step longer, the GPU waited that much longer for the host.
    result = build((made_steps((0.7 * recorded_s,) * 9), *idle))
    assert result.idle_s == pytest.approx(0.2 * recorded_s)
    # A GPU that waits for data is idle because of the data.
    waits = Samples(((0.6 * recorded_s, 0.6 * recorded_s),) * 9)
    result = build((made_steps((recorded_s,) * 9, data_wait=waits), *idle))
    assert result.bottleneck.kind == "data" and result.idle_s == 0
    assert "host" not in [one.kind for one in build((made_steps((recorded_s,) * 9), *one_bucket)).bottlenecks]


def attached_over_link(ready_ms: tuple[float, ...], cuts: tuple[int, ...]) -> AttachedResult:
    """A wait of 480 ms for data, a backward of 8 ms, and 1 MiB over a link of 1 Gb/s that others use, too."""
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
