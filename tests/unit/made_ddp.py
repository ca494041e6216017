"""Synthetic DDP traces in torch.profiler's format: simulated steps with known timings."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any

from paceline.plan import Gradient
from paceline.predict.job import Job
from paceline.predict.simulate import MachineCosts, simulate
from tests.unit.made_traces import NCCL, MadeTrace

NODE, ACCUMULATE = "autograd::engine::evaluate_function: ", "torch::autograd::AccumulateGrad"
OPTIMIZER, FORWARD = "Optimizer.step#SGD.step", "DistributedDataParallel.forward"
_TINY = 1e-6


def made_job(sizes: Sequence[int], ready_ms: Sequence[float], backward_ms: float, before=4.0, after=2.0, device="cpu"):
    gradients = tuple(Gradient(f"gradient {n}", size, device=device) for n, size in enumerate(sizes))
    times = (backward_ms, before, after)
    return Job(gradients, tuple(ms / 1e3 for ms in ready_ms), *(ms / 1e3 for ms in times), device)


def build_document(made: MadeTrace, rank: int = 0, world_size: int = 2) -> dict[str, Any]:
    place = {"backend": "gloo", "rank": rank, "world_size": world_size}
    return {"traceEvents": made.events, "distributedInfo": place, "baseTimeNanoseconds": 0, "host_name": "box"}


def made_on_cpu(
    job: Job, costs: MachineCosts, cuts: Sequence[int], *, num_steps: int = 3, num_alone: int = 0, shapes: bool = True,
    marks: bool = False, late_ms: float = 0.0,
) -> MadeTrace:  # fmt: skip
    """Steps on gloo. The first `num_alone` steps begin with a backward inside `no_sync`. A gradient that does not close
    its bucket must be ready while no message is in flight, unless messages use no core. With `late_ms`, every
    message waits that long for another rank."""
    made, now, step = MadeTrace(), 0.0, simulate(job, cuts, costs)
    launch_ms = costs.launch_s * 1e3
    for number in range(num_steps):
        first = now
        if number < num_alone:
            _add_backward(made, job, now, range(0), {}, shapes)
            now += job.backward_s * 1e3 + 1.0
        made.phase(FORWARD, now, now + 0.5)
        begin = now + job.before_s * 1e3
        ends = {cut - 1: span for cut, span in zip(cuts, step.buckets, strict=True)}
        moments = {place: begin + span.ready_s * 1e3 for place, span in ends.items()}
        for place in set(range(len(job.gradients))) - set(moments):
            handed = sum(job.latest_s[cut - 1] < job.ready_s[place] for cut in cuts)
            moments[place] = begin + job.ready_s[place] * 1e3 + handed * launch_ms
        _add_nodes(made, job, begin, begin + step.backward_s * 1e3, moments, dict.fromkeys(ends, launch_ms), shapes)
        for place, span in ends.items():
            dims = {"Input Dims": [[[span.num_bytes // 4]], []], "Input type": ["TensorList", ""]} if shapes else {}
            made.op("c10d::allreduce_", moments[place], moments[place] + launch_ms, **dims)
            count = {} if shapes else {"In msg nelems": span.num_bytes // 4, "dtype": "Float", "Group size": 2}
            start, done = begin + span.start_s * 1e3 - late_ms, begin + span.done_s * 1e3
            start = max(start, moments[place])
            made.add("user_annotation", "gloo:all_reduce", start, done, tid=50 + place % 2, **count)
        over = begin + step.over_s * 1e3
        now = over + job.after_s * 1e3
        made.phase(OPTIMIZER, over, now)
        if marks:
            made.phase(f"ProfilerStep#{number}", first, now)
    return made


def _add_backward(made: MadeTrace, job: Job, begin: float, *rest: Any) -> None:
    made.phase(FORWARD, begin, begin + 0.5)
    start = begin + 1.0
    moments = {place: start + ready_s * 1e3 for place, ready_s in enumerate(job.ready_s)}
    _add_nodes(made, job, start, start + job.backward_s * 1e3, moments, {}, rest[-1])


def _add_nodes(
    made: MadeTrace, job: Job, begin: float, end: float, moments: dict[int, float], handing: dict[int, float],
    shapes: bool,
) -> None:  # fmt: skip
    made.op(f"{NODE}NllLossBackward0", begin, begin + _TINY)
    for place, gradient in enumerate(job.gradients):
        # Most of the time in a hook goes to the copy into its bucket.
        start, ready = moments[place] - 1e-6 - gradient.num_bytes * 1e-9, moments[place]
        made.op(NODE + ACCUMULATE, start, ready + handing.get(place, 0.0))
        dims = {"Input Dims": [[gradient.num_bytes // 4]], "Input type": ["float"]} if shapes else {}
        made.op(ACCUMULATE, start, start + 0.5e-6, **dims)
    made.op(f"{NODE}MmBackward0", end - _TINY, end)


def made_on_gpu(
    job: Job, costs: MachineCosts, cuts: Sequence[int], *, num_steps: int = 3, shapes: bool = True,
    dtype: str = "Float", behind_ms: float = 0.0, marks: bool = False,
) -> MadeTrace:  # fmt: skip
    """Steps on NCCL: the host launches a step in a millisecond and runs ahead of the GPU; times in `job` are the
    GPU's. For the first `behind_ms` the GPU is still working on steps from before the trace."""
    made, now, step, numbers = MadeTrace(), behind_ms, simulate(job, cuts, costs), itertools.count(1)

    def launch(host: float, name: str, begin: float, end: float, tid: int = 7, **arguments: Any) -> None:
        number = next(numbers)
        made.add("cuda_runtime", "cudaLaunchKernel", host, host + _TINY, correlation=number)
        made.kernel(name, begin, end, tid=tid, correlation=number, **arguments)

    for number in range(num_steps):
        host, begin = float(number), now + job.before_s * 1e3
        made.phase(FORWARD, host, host + 0.05)
        launch(host + 0.01, "forward_kernel", now, begin)
        host, last = host + 0.1, begin
        made.op(f"{NODE}NllLossBackward0", host, host + _TINY)
        for place, gradient in enumerate(job.gradients):
            host += 0.8 / len(job.gradients)
            bucket = bisect.bisect_left(cuts, place + 1)
            span, is_end = step.buckets[bucket], cuts[bucket] == place + 1
            ready = begin + (span.ready_s if is_end else job.ready_s[place]) * 1e3
            launch(host - 1e-3, "gemm_kernel", last, ready, grid=[place + 1, 1, 1])
            last = ready
            made.op(NODE + ACCUMULATE, host - 1e-4, host + 2e-3)
            dims = {"Input Dims": [[gradient.num_bytes // 4]], "Input type": ["float"]} if shapes else {}
            made.op(ACCUMULATE, host - 1e-4, host, **dims)
            if is_end:
                said = {"Collective name": "allreduce", "In msg nelems": span.num_bytes // 4, "dtype": dtype}
                made.op("c10d::allreduce_", host + 1e-4, host + 1e-3)
                made.op("record_param_comms", host + 2e-4, host + 9e-4, **said)
                made.add("user_annotation", "nccl:all_reduce", host + 3e-4, host + 9e-4)
                times = begin + span.start_s * 1e3, begin + span.done_s * 1e3
                launch(host + 5e-4, NCCL, *times, tid=20, **said)
        launch(host + 3e-3, "gemm_kernel", last, begin + step.backward_s * 1e3)
        made.op(f"{NODE}MmBackward0", host + 2.5e-3, host + 4e-3)
        over = begin + step.over_s * 1e3
        now = over + job.after_s * 1e3
        made.phase(OPTIMIZER, host + 0.01, host + 0.02)
        launch(host + 0.015, "optimizer_kernel", over, now)
        if marks:
            made.phase(f"ProfilerStep#{number}", float(number), number + 1.0)
    return made
