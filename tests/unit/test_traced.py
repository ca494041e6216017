"""Traces of DDP jobs: a synthetic job is recovered from its trace, and its own buckets take the traced time."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RecordError
from paceline.predict.curves import DerivedCurve, FamilyCurve
from paceline.predict.simulate import Contention, MachineCosts, simulate
from paceline.predict.trace_steps import read_steps
from paceline.predict.traced_job import TracedJob
from paceline.predict.traces import read_ranks
from paceline.units import KIB, MIB
from tests.unit.made_ddp import FORWARD, NODE, build_document, made_job, made_on_cpu, made_on_gpu
from tests.unit.made_traces import MadeTrace

SIZES = (8 * MIB, 4 * MIB, 4 * MIB, 2 * MIB, MIB, MIB, 512 * KIB, 512 * KIB)
JOB = made_job(SIZES, (4, 8, 12, 18, 22, 24, 28, 30), 31)
CUTS = (1, 3, 5, 8)
LINE = FamilyCurve("line", 2, 1e-3, 2e9)  # 1 ms and 2 GB/s
# On gloo, two messages share the link.
FREE = MachineCosts(LINE, 2, launch_s=2e-4, pair_rate=0.5)
HALF = Contention.assume("cpu", is_on_host=True)


def read(made: MadeTrace, **place: int):
    (trace,) = read_ranks(build_document(made, **place))
    return read_steps(trace)


def test_a_step_on_a_cpu_is_read_as_it_was_simulated():
    truth = simulate(JOB, CUTS, FREE)
    steps = read(made_on_cpu(JOB, FREE, CUTS))
    assert len(steps) == 3
    for step in steps:
        assert (step.device, step.backend, step.rank, step.world_size) == ("cpu", "gloo", 0, 2)
        assert step.before_s == pytest.approx(JOB.before_s) and step.after_s == pytest.approx(JOB.after_s)
        assert step.backward_s == pytest.approx(truth.backward_s)
        assert step.step_s == pytest.approx(truth.step_s)
        assert step.gradient_bytes == SIZES and step.are_sizes_known
        assert step.launch_s == pytest.approx(2e-4)
        for message, bucket in zip(step.messages, truth.buckets, strict=True):
            assert message.num_bytes == bucket.num_bytes
            assert message.launch_s == pytest.approx(bucket.ready_s)  # at the moment of the launch
            assert (message.start_s, message.done_s) == pytest.approx((bucket.start_s, bucket.done_s))


def test_a_step_on_a_gpu_has_the_times_of_its_kernels():
    costs = MachineCosts(LINE)
    job = made_job(SIZES, (4, 8, 12, 18, 22, 24, 28, 30), 31, device="cuda")
    truth = simulate(job, CUTS, costs)
    for step in read(made_on_gpu(job, costs, CUTS)):
        assert (step.device, step.backend, step.launch_s) == ("cuda", "nccl", 0)
        assert step.backward_s == pytest.approx(31e-3) and step.step_s == pytest.approx(truth.step_s)
        assert step.before_s == pytest.approx(job.before_s) and step.after_s == pytest.approx(job.after_s)
        assert step.ready_s == pytest.approx(job.ready_s)
        for message, bucket in zip(step.messages, truth.buckets, strict=True):
            assert message.num_bytes == bucket.num_bytes
            assert (message.start_s, message.done_s) == pytest.approx((bucket.start_s, bucket.done_s))


ON_GPU = replace(JOB, device="cuda")


@pytest.mark.parametrize("marks", [False, True])
def test_a_gpu_backlog_at_the_start_does_not_lengthen_the_first_step(marks):
    """The host was 1.5 s ahead: its clock does not reveal when the first traced step started."""
    costs = MachineCosts(LINE)
    steps = read(made_on_gpu(ON_GPU, costs, CUTS, num_steps=6, behind_ms=1500.0, marks=marks))
    expected = simulate(ON_GPU, CUTS, costs)
    assert [step.step_s for step in steps] == pytest.approx([expected.step_s] * 6)
    assert [step.before_s for step in steps] == pytest.approx([JOB.before_s] * 6)
    assert TracedJob(steps).spread == pytest.approx(0, abs=1e-6)


def test_a_pause_between_steps_belongs_to_none_and_a_lagging_gpu_works_through_it():
    made = MadeTrace()
    starts = {0: (0.0, 10.0), 1: (50.0, 60.0), 2: (90.0, 95.0)}  # the host pauses between steps, in ms
    kernels = {0: (1.5, 2.5, 9.0), 1: (51.5, 53.5, 120.0), 2: (120.0, 130.0, 140.0)}  # forward, backward, end
    for number, (begin, end) in starts.items():
        made.phase(f"ProfilerStep#{number}", begin, end)
        made.op(f"{NODE}torch::autograd::AccumulateGrad", begin + 2, begin + 3, **{"Input Dims": [[4]]})
        made.op("torch::autograd::AccumulateGrad", begin + 2, begin + 2.1, **{"Input Dims": [[4]]})
        made.op("c10d::allreduce_", begin + 2.5, begin + 2.6, **{"Input Dims": [[[4]]]})
        for place, (first, last) in enumerate(itertools.pairwise(kernels[number])):
            host, correlation = begin + 1 + 1.2 * place, 2 * number + place + 1
            made.add("cuda_runtime", "cudaLaunchKernel", host, host + 0.1, correlation=correlation)
            made.kernel("gemm_kernel", first, last, correlation=correlation)
        made.add("user_annotation", "gloo:all_reduce", begin + 2.6, begin + 2.7)
    # The first step is followed by a pause, the second starts with the host, and the third starts when the second ends.
    assert [step.step_s * 1e3 for step in read(made)] == pytest.approx([9.0, 71.0, 20.0], abs=0.01)


def made_layers(beside_ms: float, shapes: bool = True) -> MadeTrace:
    """A backward of 8 equal 10 ms layers on a GPU: next to a message, which the second layer launches, three of them
    take longer, and before each layer the GPU waits a millisecond for the host."""
    made, now, number = MadeTrace(), 0.0, 0
    for step in range(3):
        made.phase(FORWARD, now, now + 0.1)
        for layer in range(8):
            took = beside_ms if 2 <= layer < 5 else 10.0
            dims = {"Input Dims": [[64, 64]]} if shapes else {}
            made.op("aten::mm", now + 0.7, now + 0.9, tid=2, **dims)
            number += 1
            made.add("cuda_runtime", "cudaLaunchKernel", now + 0.8, now + 0.85, tid=2, correlation=number)
            made.kernel("gemm_kernel", now + 1.0, now + 1.0 + took, grid=[4, 1, 1], correlation=number)
            made.op(f"{NODE}torch::autograd::AccumulateGrad", now + 0.65, now + 0.95, tid=2)
            made.op("torch::autograd::AccumulateGrad", now + 0.9, now + 0.91, tid=2, **dims)
            if layer == 1:
                said = {"Collective name": "allreduce", "In msg nelems": 8 * 64 * 64, "dtype": "Float"}
                made.op("c10d::allreduce_", now + 0.92, now + 0.94, tid=2)
                made.add("user_annotation", "nccl:all_reduce", now + 0.92, now + 0.94, tid=2)
                made.add("cuda_runtime", "cudaLaunchKernel", now + 0.93, now + 0.94, tid=2, correlation=1000 + step)
                sent = now + 11.5, now + 11.5 + 3 * (beside_ms + 1)
                made.kernel("ncclDevKernel_AllReduce_Sum_f32", *sent, tid=20, correlation=1000 + step, **said)
            now += took + 1.0
        made.phase("Optimizer.step#SGD.step", now, now + 0.5)
        now += 0.5
    return made


def test_kernels_with_and_without_messages_measure_contention():
    for beside_ms, rate in ((12.5, 0.8), (10.0, 1.0)):
        steps = read(made_layers(beside_ms))
        assert [step.without_s / step.beside_s for step in steps] == pytest.approx([rate] * 3)
        traced = TracedJob(steps)
        assert traced.has_contention and traced.fit.costs.contention.basis.startswith("measured")
        assert traced.fit.costs.contention.rates(MIB) == pytest.approx((rate, 1.0))
    traced = TracedJob(read(made_layers(12.5, shapes=False)))  # the kernels may have had other inputs
    assert not traced.has_contention and traced.fit.costs.contention.basis.startswith("assumed")


def test_a_gpu_that_waits_for_the_host_is_idle():
    steps = read(made_layers(12.5))
    # The GPU is idle before each layer, except next to a message, which keeps the GPU busy.
    assert [step.idle_s for step in steps] == pytest.approx([5e-3, 5.5e-3, 5.5e-3], abs=1e-5)
    assert [step.idle_s for step in read(made_on_gpu(ON_GPU, MachineCosts(LINE), CUTS))] == pytest.approx([0] * 3)
    assert [step.idle_s for step in read(made_on_cpu(JOB, FREE, CUTS))] == [0] * 3


@pytest.mark.parametrize("marks", [False, True])
def test_one_trace_gives_the_job_and_predicts_other_buckets(marks):
    job = made_job(SIZES, (4, 8, 12, 18, 22, 24, 28, 30), 31)
    traced = TracedJob(read(made_on_cpu(job, FREE, CUTS, marks=marks, num_alone=2)))
    # A backward without messages took as long as one with them, so nothing slows down.
    assert traced.fit.costs.contention.rates(MIB) == pytest.approx((1, 1))
    assert traced.fit.job.ready_s == pytest.approx(job.ready_s, abs=1e-6)
    assert traced.fit.job.backward_s == pytest.approx(job.backward_s)
    assert traced.fit.error == pytest.approx(0, abs=1e-3) and traced.fit.factor == pytest.approx(1, abs=0.01)
    for cuts in ((8,), (3, 8), (1, 2, 3, 4, 8), tuple(range(1, 9))):
        expected = simulate(job, cuts, FREE)
        found = traced.predictor.predict(cuts)
        # The first two steps start with an additional micro-batch.
        around_s = traced.fit.job.before_s + traced.fit.job.after_s - job.before_s - job.after_s
        assert found.step_s - around_s == pytest.approx(expected.step_s, rel=0.01)
        assert found.low_s <= found.step_s <= found.high_s


def test_contention_is_removed_and_added_again():
    """One gradient per bucket: the simulator then reports each ready time while messages are in flight."""
    costs = MachineCosts(LINE, 2, contention=HALF, pair_rate=0.5)
    cuts = tuple(range(1, len(SIZES) + 1))
    slowed = simulate(JOB, cuts, costs)
    assert slowed.backward_s > 1.2 * JOB.backward_s
    traced = TracedJob(read(made_on_cpu(JOB, costs, cuts)))
    assert traced.fit.job.ready_s == pytest.approx(JOB.ready_s, abs=1e-5)
    assert traced.fit.job.backward_s == pytest.approx(JOB.backward_s, rel=1e-3)
    assert "assumed" in traced.fit.costs.contention.basis
    for other in ((8,), (3, 8)):
        assert traced.predictor.predict(other).step_s == pytest.approx(simulate(JOB, other, costs).step_s, rel=0.02)


# A first message of 1 MiB during compute and the rest after it, like torch's default buckets: 10 ms and 160 ms.
LINKED = made_job((MIB, *[2 * MIB] * 8), range(2, 20, 2), 19)
LINK = FamilyCurve("line", 2, 5e-4, 1.1e8)


def test_messages_over_a_link_are_not_slowed_by_compute():
    """Ranks in containers on one machine share a host name, which does not prove that cores move the messages."""
    costs = MachineCosts(LINK, 2, launch_s=2e-4, pair_rate=0.5)
    traced = TracedJob(read(made_on_cpu(LINKED, costs, (1, 9))))
    assert traced.is_on_host and traced.fit.costs.contention.rates(MIB) == pytest.approx((1, 1), abs=0.06)
    assert traced.fit.costs.contention.basis.startswith("fitted")
    for other in ((9,), (1, 3, 9), tuple(range(1, 10))):
        assert traced.predictor.predict(other).step_s == pytest.approx(simulate(LINKED, other, costs).step_s, rel=0.02)


def test_larger_messages_next_to_compute_do_not_measure_contention():
    costs = MachineCosts(LINE, 2, contention=HALF, pair_rate=0.5)
    job = made_job((8 * MIB, 8 * MIB, 4 * KIB), (4, 16, 30), 31)
    slow = replace(costs, curve=FamilyCurve("line", 2, 3e-3, 2e9))  # the last message, of 4 KiB, takes 3 ms
    traced = TracedJob(read(made_on_cpu(job, slow, (1, 2, 3))))
    assert traced.fit.costs.contention.rates(MIB) == pytest.approx((0.5, 0.5))


def test_no_message_has_more_bandwidth_than_a_larger_one():
    """A burst that a link lets through after a pause shortens only the first message."""
    burst = DerivedCurve(lambda size: LINK.estimate_s(size) - (2e-3 if size == MIB else 0.0))
    costs = MachineCosts(burst, 2, launch_s=2e-4, pair_rate=0.5)
    traced = TracedJob(read(made_on_cpu(LINKED, costs, (1, 9))))
    curve, each = traced.fit.costs.curve, tuple(range(1, 10))
    times = [curve.estimate_s(size) / size for size in (64 * KIB, MIB, 2 * MIB, 8 * MIB, 16 * MIB, 32 * MIB)]
    assert times == pytest.approx(sorted(times, reverse=True), rel=1e-9)
    assert traced.predictor.predict(each).step_s == pytest.approx(simulate(LINKED, each, costs).step_s, rel=0.03)


def test_a_backward_without_messages_measures_contention():
    rates = Contention((1,), (0.7,), (0.7,))
    costs = MachineCosts(LINE, 2, contention=rates, pair_rate=0.5)
    cuts = tuple(range(1, len(SIZES) + 1))
    traced = TracedJob(read(made_on_cpu(JOB, costs, cuts, num_alone=1)))
    assert traced.fit.costs.contention.rates(MIB) == pytest.approx((0.7, 0.7), abs=0.01)
    assert "no_sync" in traced.fit.costs.contention.basis


@given(st.data())
def test_the_traced_buckets_take_as_long_as_they_did(data):
    count = data.draw(st.integers(1, 6))
    sizes = data.draw(st.lists(st.integers(1, 4 * MIB).map(lambda n: 4 * n), min_size=count, max_size=count))
    gaps = data.draw(st.lists(st.floats(0.1, 20), min_size=count, max_size=count))
    ready = list(itertools.accumulate(gaps))
    job = made_job(sizes, ready, ready[-1] + data.draw(st.floats(0.1, 5)))
    curve = FamilyCurve("line", 2, data.draw(st.floats(1e-5, 1e-2)), data.draw(st.floats(1e8, 1e10)))
    costs = MachineCosts(curve, 2, 1e-5, contention=HALF, pair_rate=0.5)
    cuts = tuple(range(1, count + 1))
    traced = TracedJob(read(made_on_cpu(job, costs, cuts)))
    assert traced.step_s == pytest.approx(simulate(job, cuts, costs).step_s, rel=1e-6)
    assert simulate(traced.fit.job, cuts, traced.fit.costs).step_s == pytest.approx(traced.step_s, rel=1e-3)
    assert traced.fit.job.num_bytes == sum(sizes)


@pytest.mark.parametrize("make", [made_on_cpu, made_on_gpu])
def test_without_shapes_bytes_are_divided_by_copy_times(make):
    """The hook of the smallest gradient, a bias, gives the cost of a hook without its bytes."""
    costs, sizes = FREE if make is made_on_cpu else MachineCosts(LINE), (4 * MIB, 4 * KIB, 2 * MIB, 8 * MIB, 4 * KIB)
    step = read(make(made_job(sizes, (4, 8, 12, 18, 22), 31), costs, (2, 5), shapes=False))[-1]
    assert not step.are_sizes_known
    for part, message in zip((slice(0, 2), slice(2, 5)), step.messages, strict=True):
        assert sum(step.gradient_bytes[part]) == message.num_bytes == sum(sizes[part])
    if make is made_on_cpu:  # on the synthetic GPU, copies take no time
        assert step.gradient_bytes == pytest.approx(sizes, rel=0.01, abs=16 * KIB)


def test_half_precision_counts_two_bytes_for_each_element():
    step = read(made_on_gpu(JOB, MachineCosts(LINE), CUTS, shapes=False, dtype="BFloat16"))[0]
    assert sum(step.gradient_bytes) == sum(SIZES) // 2


def test_the_slowest_rank_defines_the_job_and_the_start_of_messages():
    first = read(made_on_cpu(JOB, FREE, CUTS))
    other = read(made_on_cpu(JOB, FREE, CUTS, late_ms=0.1), rank=1)
    assert TracedJob([*first, *other]).rank == TracedJob([*other, *first]).rank == 0
    both, late = TracedJob([*first, *other]), TracedJob(other)
    assert both.ranks == (0, 1)
    costs = [job.fit.costs.curve.estimate_s(8 * MIB) / job.fit.factor for job in (TracedJob(first), both, late)]
    assert costs[0] == pytest.approx(costs[1]) and costs[2] > costs[1]


def test_gloos_threads_may_swap_neighboring_messages():
    cuts = (7, 8)  # buckets of unequal sizes
    made = made_on_cpu(JOB, FREE, cuts, num_steps=1)
    (plain,) = read(made)
    first, second = (event for event in made.events if event["name"] == "gloo:all_reduce")
    for event, message in zip((first, second), plain.messages, strict=True):
        event["args"] = {"Input Dims": [[message.num_bytes // 4]], "Input type": ["float"]}
    late = second["ts"] + 5 - first["ts"]
    first.update(ts=first["ts"] + late, dur=first["dur"] - late)
    (step,) = read(made)
    assert step.layout == plain.layout and len(set(step.layout)) == 2
    assert [m.launch_s for m in step.messages] == [m.launch_s for m in plain.messages]
    assert [m.done_s for m in step.messages] == pytest.approx([m.done_s for m in plain.messages])


def test_the_flags_of_unused_parameters_are_not_a_bucket():
    made = made_on_cpu(JOB, FREE, CUTS, num_steps=1)
    end = max(e["ts"] + e["dur"] for e in made.events if e["name"].startswith(NODE)) / 1e3
    made.op(f"{NODE}Last", end, end + 0.3).op("c10d::allreduce_", end + 0.1, end + 0.2)
    made.add(
        "user_annotation", "gloo:all_reduce", end + 0.21, end + 0.29, **{"Input Dims": [[8]], "Input type": ["int"]}
    )
    (step,) = read(made)
    assert step.layout == (8 * MIB, 8 * MIB, 3 * MIB, 2 * MIB)


def test_an_all_reduce_of_another_autograd_node_is_not_a_bucket():
    """SyncBatchNorm does this in its own autograd node."""
    plain = read(made_on_cpu(JOB, FREE, CUTS, num_steps=2))
    made = made_on_cpu(JOB, FREE, CUTS, num_steps=2)
    for first in [e["ts"] / 1e3 for e in made.events if e["name"] == f"{NODE}NllLossBackward0"]:
        made.op(f"{NODE}SyncBatchNormBackward", first + 1, first + 2)
        made.op("c10d::allreduce_", first + 1.1, first + 1.2, **{"Input Dims": [[[64]]], "Input type": ["TensorList"]})
        made.add("user_annotation", "gloo:all_reduce", first + 1.2, first + 1.9)
    steps = read(made)
    assert [step.num_other for step in steps] == [1, 1] and [step.num_other for step in plain] == [0, 0]
    assert [len(step.stalls) - len(other.stalls) for step, other in zip(steps, plain, strict=True)] == [1, 1]
    same = [replace(step, num_other=0, stalls=(), operators=()) for step in steps]
    assert same == [replace(step, stalls=(), operators=()) for step in plain]
    assert any("other traffic: 1 all-reduce per step" in note for note in TracedJob(steps).notes)
    assert not any("other traffic" in note for note in TracedJob(plain).notes)


def test_ranks_are_compared_in_the_complete_steps_of_both():
    first, other = (read(made_on_cpu(JOB, FREE, CUTS), rank=rank) for rank in (0, 1))
    cut = replace(other[-1], messages=other[-1].messages[:-1])  # a trace that ended before the last message did
    both = TracedJob([*first, *other[:-1], cut])
    assert both.compared == [0, 1] and [step.number for step in both.steps] == [step.number for step in first[:-1]]
    assert TracedJob([*first, *other[:-1]]).compared == [0]  # traced for different durations
    split = [replace(step, messages=step.messages[: None if step.number else -1]) for step in other[:2]]
    assert TracedJob([*first[:2], *split]).compared == [0, 1]
    assert TracedJob([*first, *(replace(step, number=step.number + 9) for step in other)]).compared == [0]


def test_the_nodes_are_the_traced_hosts_if_all_ranks_are_present():
    one, other = (read(made_on_cpu(JOB, FREE, CUTS), rank=rank) for rank in (0, 1))
    away = [replace(step, host="other") for step in other]
    jobs = [TracedJob(steps) for steps in (one, [*one, *other], [*one, *away])]
    assert [job.nodes for job in jobs] == [0, 1, 2]
    doubts = [job.build_fabric().build_curve(4).explain(MIB)[1] for job in jobs]
    assert "cannot tell how many" in doubts[0] and "on several nodes" in doubts[1] and not doubts[2]
    assert not jobs[0].build_fabric(ranks_per_node=1).build_curve(4).explain(MIB)[1]


def test_an_insufficient_factor_is_at_its_bound_and_has_a_warning():
    steps = read(made_on_cpu(JOB, FREE, CUTS))
    assert not TracedJob(steps).is_off
    # The traced step is much longer than its parts: doubling the message times does not explain the difference.
    longer = TracedJob(steps)._calibrate(*TracedJob(steps).fit[:2], 0.2)
    shorter = TracedJob(steps)._calibrate(*TracedJob(steps).fit[:2], 0.02)
    assert (longer.factor, shorter.factor) == (2.0, 0.5)


def test_steps_with_other_buckets_are_excluded():
    odd = read(made_on_cpu(JOB, FREE, (8,), num_steps=1))
    traced = TracedJob([*odd, *read(made_on_cpu(JOB, FREE, CUTS))])
    assert (len(traced.steps), traced.num_left_out) == (3, 1)
    assert traced.layout == (8 * MIB, 8 * MIB, 3 * MIB, 2 * MIB)


def test_messages_of_one_size_leave_the_latency_assumed_and_the_interval_wide():
    job = made_job((4 * MIB,) * 6, (4, 8, 12, 16, 20, 24), 25)
    alike = TracedJob(read(made_on_cpu(job, FREE, tuple(range(1, 7)))))
    unlike = TracedJob(read(made_on_cpu(JOB, FREE, CUTS)))
    assert not alike.has_latency and unlike.has_latency
    assert any("assumed, since their sizes are similar" in note for note in alike.notes)
    narrow, wide = (one.predictor.predict(one.fit.job.cut(4 * MIB)) for one in (unlike, alike))
    assert wide.high_s - wide.low_s > 0 and narrow.high_s - narrow.low_s > 0


def test_two_jobs_are_refused():
    with pytest.raises(RecordError, match="job") as caught:
        TracedJob([*read(made_on_cpu(JOB, FREE, CUTS)), *read(made_on_cpu(JOB, FREE, (8,)), rank=1)])
    assert caught.value.code == "mismatch"


def test_an_all_reduce_of_the_program_is_not_a_bucket():
    made = made_on_cpu(JOB, FREE, CUTS, num_steps=1)
    over = max(e["ts"] + e["dur"] for e in made.events if e["name"] == "gloo:all_reduce") / 1e3
    moved = next(e for e in made.events if e["name"].startswith("Optimizer"))
    moved["ts"] += 2e3
    made.op("c10d::allreduce_", over + 0.1, over + 0.2).add("user_annotation", "gloo:all_reduce", over + 0.3, over + 1)
    (step,) = read(made)
    assert len(step.messages) == len(CUTS)


def test_a_message_recorded_late_ends_when_the_optimizer_begins():
    made = made_on_cpu(JOB, FREE, CUTS)
    expected = [step.after_s for step in read(made)]
    last = max((e for e in made.events if e["name"] == "gloo:all_reduce"), key=lambda e: e["ts"])
    last["dur"] += 1e4
    assert [step.after_s for step in read(made)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("without", "text"),
    [("all_reduce", "no all-reduce"), (NODE, "no backward"), ("Optimizer", "")],
)
def test_an_incomplete_trace_is_refused_with_the_missing_part(without, text):
    made = made_on_cpu(JOB, FREE, CUTS)
    made.events = [event for event in made.events if without not in event["name"]]
    if text:
        with pytest.raises(RecordError, match=text):
            read(made)
    else:  # a step then ends at the start of the next forward
        assert len(read(made)) == 3 and [e for e in made.events if e["name"] == FORWARD]


def test_gloo_without_shapes_has_no_message_sizes():
    made = made_on_cpu(JOB, FREE, CUTS, shapes=False)
    for event in made.events:
        event["args"] = {}
    with pytest.raises(RecordError, match="record_shapes=True"):
        read(made)
