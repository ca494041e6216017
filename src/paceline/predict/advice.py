"""What bounds a step and how to speed it up: from the overviews of its ranks, or from an attached program's steps."""

import math
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.errors import RecordError
from paceline.predict.traces import GpuUse, Lateness, Overview, find_late
from paceline.records.findings import Finding
from paceline.records.samples import Samples, group_by
from paceline.records.steps import TracedMessage, TracedStepRecord
from paceline.units import format_duration

# Below these shares of the step there is no advice: run-to-run noise is as large.
WORTH, _IDLE_WORTH = 0.05, 0.2
# Share of a step that must be exposed with the best buckets to count as a bottleneck; below this it cannot be told from
# rank skew.
_STANDS_OUT = 0.1
_TINY_KERNEL_S = 10e-6
# A batch that keeps the GPU busy, relative to one that just fills the step.
_FILL = 1.1
# Dense bf16 tensor-core peaks (fp16 on V100 and T4) relative to fp32 without tensor cores, from vendor data sheets.
_PEAK_RATIOS = (
    ("H100|H200|GH200", 989 / 67), ("A100|A800", 312 / 19.5), ("B200|B100|GB200", 2250 / 80), ("V100", 125 / 15.7),
    ("T4", 65 / 8.1), (r"L40|L4\b|RTX|A10\b|A40", 4.0), ("", 8.0),
)  # fmt: skip
_WITHOUT_BF16 = re.compile(r"V100|T4\b|TITAN V|RTX 20\d\d|Quadro RTX", re.I)


@dataclass(frozen=True)
class StepFacts:
    """Facts about the step that the trace does not contain. `accumulate` is the number of micro-batches per optimizer
    step."""

    batch_size: int
    accumulate: int = 1
    precision: str = "fp32"
    world_size: int = 1
    is_compiled: bool = False


class MessageShare(NamedTuple):
    """The share of messages in kernel time, or in the step if no kernel sends them, and the optimizer's share, which is
    0 if unknown. `rank` is the rank that waits least for messages: on the other ranks, messages include the time they
    wait for it."""

    share: float
    of: str
    optimizer: float
    rank: int

    def estimate(self, times: float) -> float:
        """The share of messages in a step of `times` as many micro-batches, with the same messages and optimizer
        work."""
        once = self.share + self.optimizer
        return self.share / (once + times * (1 - once))


def find_message_share(overviews: Sequence[Overview]) -> MessageShare:
    first = _pick_first(overviews)
    if first.gpu is not None and first.gpu.communication_share:
        return MessageShare(first.gpu.communication_share, "kernel time", 0.0, first.rank)
    optimizer = first.phases_s.get("optimizer", 0.0) / first.step_s
    return MessageShare(first.share("communication"), "the step", optimizer, first.rank)


def _pick_first(overviews: Sequence[Overview]) -> Overview:
    return min(overviews, key=lambda overview: overview.seconds("communication"))


def advise(overviews: Sequence[Overview], facts: StepFacts, lateness: Lateness | None = None) -> list[Finding]:
    """Recommendations, largest gain first; if nothing is worth doing, the bottleneck."""
    if not overviews:
        raise RecordError("no rank was recorded, so there is no advice to give: record at least one")
    first = _pick_first(overviews)
    found = [*_on_messages(first, facts), *_on_waiting(first)]
    if lateness is not None:
        found += _on_lateness(lateness, max(overview.seconds("communication") for overview in overviews), first.step_s)
    if first.gpu is not None:
        found += _on_gpu(first, first.gpu, facts)
    found = [replace(one, step_s=first.step_s) for one in found]
    return sorted(found, key=lambda one: -one.gain_s) or [_name_bound(first)]


def _on_messages(overview: Overview, facts: StepFacts) -> Iterator[Finding]:
    exposed_s, message_s = overview.seconds("communication"), overview.message_s
    if facts.world_size < 2 or exposed_s < WORTH * overview.step_s:
        return
    exposed, more = format_duration(exposed_s), 2 * facts.accumulate
    found = find_message_share([overview])
    yield Finding(
        "accumulate",
        f"communication is {found.share:.0%} of {found.of}, and {exposed} per step is exposed",
        f"accumulating over {more} micro-batches instead of {facts.accumulate} would reduce it to about "
        f"{found.estimate(2):.0%} and save {format_duration(exposed_s / more)} per micro-batch",
        exposed_s / 2,
    )
    halved_s, backward_s = min(exposed_s, message_s / 2), overview.phases_s.get("backward", 0.0)
    yield Finding(
        "compress",
        f"{exposed} of communication per step is exposed",
        "a communication hook that sends bf16 halves the bytes and would save about "
        f"{format_duration(halved_s)} if time is proportional to size",
        halved_s,
        "estimated",
    )
    if 0 < message_s < backward_s:
        yield Finding(
            "buckets",
            f"communication takes {format_duration(message_s)} and backward {format_duration(backward_s)}, yet "
            f"{exposed} is exposed",
            "other buckets (--plan) could hide nearly all of it",
            exposed_s,
            "at most",
        )


def blame_rank(lateness: Lateness, gain_s: float) -> Finding:
    """The rank that the others wait for."""
    return Finding(
        "late rank",
        f"the other ranks wait {format_duration(lateness.mean_s)} per step for rank {lateness.rank}, which is last in "
        f"{lateness.share:.0%} of steps",
        "check its cores, its GPU's clock, its data and its batch sizes",
        gain_s,
        "at most",
        rank=lateness.rank,
    )


def blame_data(waited_s: float, step_s: float, rank: int | None = None) -> Finding:
    """The data loader, on one rank or on all of them."""
    where = "" if rank is None else f" on rank {rank}"
    return Finding(
        "data",
        f"the step waits {format_duration(waited_s)} for data{where} ({waited_s / step_s:.0%} of the step)",
        "use more DataLoader workers, prefetching, or smaller inputs",
        waited_s,
        "at most",
        rank=rank,
    )


def blame_buckets(code: str, saved_s: float, interval_s: tuple[float, float] | None, certainty: str) -> Finding:
    """The bucket size, and the argument that sets a better one."""
    saves = f"other buckets would save {format_duration(saved_s)} per step"
    return Finding("buckets", saves, f"use {code}", saved_s, certainty, gain_interval_s=interval_s)


def _on_lateness(lateness: Lateness, waited_s: float, step_s: float) -> Iterator[Finding]:
    # Being late for a message that compute hides delays no rank.
    gain_s = min(lateness.mean_s, waited_s)
    if gain_s < WORTH * step_s:
        return
    if lateness.share >= 0.75:
        yield blame_rank(lateness, gain_s)
    else:
        late = f"ranks reach messages {format_duration(lateness.mean_s)} apart, and the last rank changes"
        yield Finding("late rank", late, "look for other load on the hosts", gain_s, "at most")


def _on_waiting(overview: Overview) -> Iterator[Finding]:
    """Waiting for data, exposed copies, and optimizers that make several passes over the parameters."""
    if overview.share("data") >= WORTH:
        yield blame_data(overview.seconds("data"), overview.step_s)
    copied_s, share = overview.seconds("copy"), overview.share("copy")
    if share >= WORTH:
        copies = f"copies take {format_duration(copied_s)} while nothing else runs ({share:.0%} of the step)"
        cure = "pin the batches' memory and copy with non_blocking=True"
        yield Finding("copies", copies, cure, copied_s, "at most")
    seconds, passes = overview.phases_s.get("optimizer", 0.0), overview.optimizer_passes
    if seconds >= 0.1 * overview.step_s and passes > 1:
        yield Finding(
            "optimizer",
            f"the optimizer takes {format_duration(seconds)} ({seconds / overview.step_s:.0%} of the step) and makes "
            f"{passes} passes over the parameters",
            "fused=True makes one",
            seconds * (1 - 1 / passes),
            "at most",
        )


def _on_gpu(overview: Overview, gpu: GpuUse, facts: StepFacts) -> Iterator[Finding]:
    step_s, worth_s = overview.step_s, WORTH * overview.step_s
    idle_s = overview.seconds("cpu") + overview.seconds("other")
    if idle_s >= _IDLE_WORTH * step_s:
        # Host time depends on the number of launches, not on the batch size; GPU time grows with the batch.
        needed = facts.batch_size * _FILL / max(gpu.busy, 1e-3)
        yield Finding(
            "host",
            f"the GPU is {gpu.busy:.0%} busy and waits for the host for {format_duration(idle_s)} of the step",
            f"use a batch of {2 ** math.ceil(math.log2(needed))} instead of {facts.batch_size} if memory allows"
            f"{'' if facts.is_compiled else ', or --compile'}, until the step is GPU-bound",
            idle_s,
            "at most",
        )
    mean_s, launching_s = gpu.kernel_s / gpu.num_kernels, gpu.num_kernels * gpu.launch_s
    if gpu.num_kernels >= 1 and mean_s <= _TINY_KERNEL_S and min(launching_s, idle_s) >= worth_s:
        yield Finding(
            "launches",
            f"launching {gpu.num_kernels:.0f} kernels per step, {format_duration(mean_s)} each, takes "
            f"{format_duration(launching_s)}",
            "--compile or a CUDA graph launches fewer",
            min(launching_s, idle_s),
            "at most",
        )
    assumed = max(1.0, next(ratio for names, ratio in _PEAK_RATIOS if re.search(names, gpu.name, re.I)) / 2)
    # A step cannot be shorter than the host's own work.
    gain_s = min(gpu.missed_s * (1 - 1 / assumed), max(0.0, step_s - overview.host_s))
    if gain_s >= worth_s:
        half = "fp16" if _WITHOUT_BF16.search(gpu.name) else "bf16"
        todo = f"--precision {half}" if facts.precision == "fp32" else "sizes that are multiples of 8"
        yield Finding(
            "tensor cores",
            f"{format_duration(gpu.missed_s)} of matrix kernels per step do not use tensor cores",
            f"{todo} would save about {format_duration(gain_s)} if they became {assumed:.1f} times as fast, half of "
            f"the peak speed ratio of {gpu.name or 'an unknown GPU'}",
            gain_s,
            "estimated",
        )
    filled = 1.0 if gpu.sm_efficiency is None or gpu.busy <= 0 else min(1.0, gpu.sm_efficiency / gpu.busy)
    gain_s = overview.seconds("kernel") * (1 - filled)
    if filled <= 0.6 and gain_s >= worth_s:
        yield Finding(
            "batch",
            f"while kernels run, only {filled:.0%} of the SMs are in use",
            f"a batch above {facts.batch_size} costs little more time and saves up to {format_duration(gain_s)} for "
            "the same samples",
            gain_s,
            "at most",
        )


def _name_bound(overview: Overview) -> Finding:
    largest = max(overview.steps[0].seconds, key=overview.seconds)
    name = {"kernel": "kernels", "cpu": "operators"}.get(largest, largest)
    parts = {
        "kernel": [(row.name, row.time_s) for row in overview.kernels[:1]],
        "cpu": [(row.name, row.self_s) for row in overview.operators[:1]],
    }
    most = "".join(f", of which {row} takes {format_duration(time_s)}" for row, time_s in parts.get(largest, []))
    share = f"{overview.share(largest):.0%} of {format_duration(overview.step_s)}{most}"
    text = f"no clear bottleneck: the largest part of the step is {name}, {share}"
    return Finding("bound", text, step_s=overview.step_s)


# -- an attached program -----------------------------------------------------------------------------------------------


def find_late_rank(records: Sequence[TracedStepRecord]) -> Lateness | None:
    """The rank that the others wait for, found by comparing the duration of each message across ranks, not their
    clocks."""
    steps = []
    for same in group_by((record for record in records if record.messages), lambda record: record.number).values():
        if len({len(step.messages) for step in same}) == 1:
            messages = zip(*(step.messages for step in same), strict=True)
            steps.append([{s.rank: m.done_s - m.start_s for s, m in zip(same, row, strict=True)} for row in messages])
    return find_late(steps)


def remove_recording(records: Sequence[TracedStepRecord], step_s: float) -> list[TracedStepRecord]:
    """Remove the cost of recording: make each rank's median recorded step as long as its unrecorded steps. The cost is
    subtracted from the rank's own work, which recording slows evenly, and from the time a GPU waits for the host;
    messages leave earlier by that amount and take the same time. If the recorded steps were shorter, everything is
    stretched instead."""
    found = []
    for steps in group_by(records, lambda record: record.rank).values():
        recorded_s = statistics.median(step.step_s for step in steps)
        own_s = statistics.median(step.step_s - step.exposed_s for step in steps)
        stretch = max(1.0, step_s / recorded_s)
        factor = stretch if stretch > 1 else max(0.5, 1 - (recorded_s - step_s) / own_s)
        for step in steps:
            moments = [(m, m.launch_s * factor) for m in step.messages]
            messages = tuple(
                TracedMessage(m.num_bytes, at_s, *(at_s + (s - m.launch_s) * stretch for s in (m.start_s, m.done_s)))
                for m, at_s in moments
            )
            times = {name: getattr(step, name) * factor for name in ("before_s", "backward_s", "after_s")}
            times["idle_s"] = max(0.0, step.idle_s - max(0.0, recorded_s - step_s))
            ready_s = tuple(moment * factor for moment in step.ready_s)
            found.append(replace(step, **times, ready_s=ready_s, messages=messages))
    return found


def list_bottlenecks(
    step_s: float, data: Samples, lateness: Lateness | None, buckets: Finding | None,
    messages: tuple[float, float, float] | None, idle_s: float = 0.0,
) -> list[Finding]:  # fmt: skip
    """The bottlenecks of a step of `step_s`, largest first: data, late rank, buckets, batch (communication takes more
    than half as long as compute, and buckets do not hide it), network, host, or compute. `data` holds each rank's waits
    in data loaders. `buckets` is the gain from better buckets. `messages` is the communication time of a step, its
    exposed part with the best buckets, and the compute time of a rank. `idle_s` is how long a GPU is idle for reasons
    other than data and messages."""
    waits = [statistics.median(row[rank] for row in data.seconds) for rank in range(data.num_ranks)]
    data_s = max(waits)
    found = [blame_data(data_s, step_s, None if min(waits) > data_s / 2 else waits.index(data_s))]
    if lateness is not None and lateness.share > 0.8:
        # A rank may be late because it waits for its data.
        own_s = waits[lateness.rank] - min(waits) if lateness.rank < len(waits) else 0.0
        found.append(blame_rank(lateness, max(0.0, lateness.mean_s - own_s)))
    idle = f"the GPU is idle for {format_duration(idle_s)} per step ({idle_s / step_s:.0%} of it) until the host "
    cure = "use a larger batch, torch.compile, CUDA graphs, or fewer calls that wait for the GPU, such as .item()"
    found.append(Finding("host", f"{idle}launches more work", cure, idle_s, "at most"))
    saved_s = 0.0
    if buckets is not None:
        saved_s = buckets.gain_s
        found.append(buckets)
    if messages is not None:
        message_s, exposed_s, compute_s = messages
        is_small = message_s > compute_s / 2
        # Better buckets are free, so they come first if they save a substantial part of the exposed time.
        gain_s = min(exposed_s, saved_s) if saved_s >= max(WORTH * step_s, exposed_s / 3) else exposed_s
        if is_small or exposed_s >= _STANDS_OUT * step_s:
            takes = f"a step computes for {format_duration(compute_s)} and communicates for "
            takes += f"{format_duration(message_s)}, so {format_duration(exposed_s)} stays exposed even with the best "
            cure = "use a larger batch, or accumulate gradients" if is_small else "use a faster network, or send bf16"
            found.append(Finding("batch" if is_small else "network", f"{takes}buckets", cure, gain_s, "at most"))
    worth = [replace(one, step_s=step_s) for one in found if one.gain_s >= WORTH * step_s]
    rest = Finding("computing", "there is no other bottleneck: the step is compute-bound", step_s=step_s)
    return [*sorted(worth, key=lambda one: -one.gain_s), rest]
