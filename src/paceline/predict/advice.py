"""What bounds a step and how to speed it up: from the overviews of its ranks, or from an attached program's steps."""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from paceline.errors import RecordError
from paceline.predict.accounting import OUTSIDE, SlowPart, estimate_mean
from paceline.predict.curves import MeasuredCurve, find_interval
from paceline.predict.predictor import Predictor
from paceline.predict.simulate import simulate
from paceline.predict.traces import GpuUse, Lateness, Overview
from paceline.records.findings import Finding
from paceline.records.samples import group_by
from paceline.records.steps import Stall, TracedMessage, TracedStepRecord
from paceline.units import format_duration

# Gains below these fractions of the step are within run-to-run noise and lead to no advice. The last one is for a
# changing late rank, because ranks also wait for each other when their steps merely vary.
WORTH, _IDLE_WORTH, _TURNS_WORTH = 0.05, 0.2, 0.1
# Assumed time of a shared-memory message during compute, relative to gloo on one host: typical, longest and shortest.
# Without compute, the ratios in `results` are 0.05 to 0.36.
_SHM_TIMES = (0.35, 0.6, 0.15)
# Kinds whose gain depends on assumptions about messages: the lower end of its interval must exceed the noise.
_ASSUMED = ("backend", "network", "batch")
REMOVABLE = ("collectives", "buffers", "unused parameters", "accumulate")  # messages that no gradient needs
# Cures that do not change the training, and cures that may take less of the same time but change it.
_EXACT, _CHANGING = ("backend", "buckets", "optimizer", *REMOVABLE), ("network", "batch")
_MORE = 4  # recommended factor on the samples per message
_TINY_KERNEL_S = 10e-6
# Size of a batch that keeps the GPU busy, relative to one that just fills the step.
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
    """The fraction of kernel time (or of the step, if no kernel sends messages) that messages take, and the optimizer's
    fraction, 0 if unknown. `rank` is the rank that waits least for messages: on the other ranks, messages include the
    time for which they wait for this rank."""

    share: float
    of: str
    optimizer: float
    rank: int

    def estimate(self, times: float) -> float:
        """The fraction of a step spent on messages, for a step of `times` as many micro-batches with the same messages
        and optimizer work."""
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
    """Recommendations, largest gain first, or the bottleneck if nothing is worth doing."""
    if not overviews:
        raise RecordError("no rank was recorded, so there is no advice: record at least one")
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
        f"sending bf16 halves the bytes and would save about {format_duration(halved_s)} if time is proportional to "
        "size: strategy='bf16', or paceline.comm_hook in torch's wrapper",
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


def blame_rank(
    lateness: Lateness,
    gain_s: float,
    interval_s: tuple[float, float] | None = None,
    slow: SlowPart | None = None,
    since: int = 0,
) -> Finding:
    """The finding for a late rank, with the operator that is slower on it if that explains much of the wait, and with
    the step `since` which steps are slower."""
    waited = f"the other ranks wait {format_duration(lateness.mean_s)} per step for rank {lateness.rank}"
    cure = f"check the cores, GPU clock, data and batch sizes of rank {lateness.rank}"
    often = f"which is last in {lateness.share:.0%} of steps{f' since step {since}' if since else ''}"
    evidence, operator = f"{waited}, {often}", ""
    if slow is not None and slow.is_named:
        operator = slow.name if slow.name != OUTSIDE else ""
        evidence += f"; {slow.name} takes {format_duration(slow.more_s)} longer there"
        cure = f"check the cores and clock of rank {lateness.rank}, or why {slow.name} is slower there"
    elif slow is not None and slow.slower > 1:
        evidence += f"; its operators take {slow.slower:.2f} times as long"
    return Finding(
        "late rank", evidence, cure, gain_s, "at most", rank=lateness.rank, gain_interval_s=interval_s,
        operator=operator,
    )  # fmt: skip


def blame_changing_rank(
    waits: Sequence[float], late: Lateness, step_s: float, slow: SlowPart | None = None
) -> Iterator[Finding]:
    """The finding for a late rank that changes, from the waits of the rank that waits least, one per step. Ranks also
    wait for each other by chance, so a small gain counts only if one part of the work explains the lateness."""
    gain_s, is_named = statistics.fmean(waits or [0.0]), slow is not None and slow.is_named
    if gain_s < (WORTH if is_named else _TURNS_WORTH) * step_s:
        return
    text = f"the last rank changes, and even the rank that waits least loses {format_duration(gain_s)} per step"
    if slow is not None and is_named:
        text += f"; {slow.name} takes {format_duration(slow.more_s)} longer on it"
    cure = "look for work that ranks do in different steps: garbage collection, logging, long inputs, other programs"
    interval_s = estimate_mean(waits, gain_s)
    yield Finding(
        "changing late rank",
        f"{text} (most often rank {late.rank}, in {late.share:.0%} of steps)",
        cure,
        gain_s,
        "at most",
        gain_interval_s=interval_s,
    )


def blame_data(
    waited_s: float, step_s: float, rank: int | None = None, workers: int = 2,
    interval_s: tuple[float, float] | None = None,
) -> Finding:  # fmt: skip
    """The finding for waits on the data loader, on one rank or on all of them."""
    where = "" if rank is None else f" on rank {rank}"
    return Finding(
        "data",
        f"the step waits {format_duration(waited_s)} for data{where} ({waited_s / step_s:.0%} of the step)",
        "prefetch with more workers, or make inputs smaller",
        waited_s,
        "at most",
        rank=rank,
        gain_interval_s=interval_s,
        line=f"DataLoader(..., num_workers={workers}, persistent_workers=True)",
    )


def _on_lateness(lateness: Lateness, waited_s: float, step_s: float) -> Iterator[Finding]:
    # A late rank does not delay the others if compute hides the message.
    gain_s = min(lateness.mean_s, waited_s)
    if gain_s < WORTH * step_s:
        return
    if lateness.share >= 0.75:
        yield blame_rank(lateness, gain_s)
    else:
        late = f"ranks reach messages {format_duration(lateness.mean_s)} apart"
        late += ", and the last rank changes from step to step"
        yield Finding("late rank", late, "look for other load on the hosts", gain_s, "at most")


def _on_waiting(overview: Overview) -> Iterator[Finding]:
    """Find waits for data, exposed copies, and optimizers that make several passes over the parameters."""
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
            "use fused=True, which makes a single pass",
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
            "use --compile or a CUDA graph, which launch fewer kernels",
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
    most = "".join(f", with {format_duration(time_s)} in {row}" for row, time_s in parts.get(largest, []))
    share = f"{overview.share(largest):.0%} of {format_duration(overview.step_s)}{most}"
    text = f"no clear bottleneck: the largest part of the step is {name}, {share}"
    return Finding("bound", text, step_s=overview.step_s)


# -- an attached program -----------------------------------------------------------------------------------------------


def remove_recording(records: Sequence[TracedStepRecord], step_s: float) -> list[TracedStepRecord]:
    """Remove the cost of recording: make each rank's median recorded step as long as its unrecorded steps. The cost is
    subtracted from the rank's own work, which recording slows evenly, and from the time a GPU waits for the host.
    Messages start earlier by the same amount and take the same time. If the recorded steps were shorter, everything is
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
            own = ("before_s", "backward_s", "after_s", "data_s", "forward_s", "optimizer_s")
            times: dict[str, Any] = {name: getattr(step, name) * factor for name in own}
            times["alone_s"] = tuple(seconds * factor for seconds in step.alone_s)
            times["stalls"] = tuple(
                Stall(stall.start_s * factor, stall.took_s * stretch, stall.blocked_s * stretch, stall.name)
                for stall in step.stalls
            )
            times["idle_s"] = max(0.0, step.idle_s - max(0.0, recorded_s - step_s))
            ready_s = tuple(moment * factor for moment in step.ready_s)
            found.append(replace(step, **times, ready_s=ready_s, messages=messages))
    return found


def blame_host(idle_s: float, step_s: float) -> Finding:
    """The finding for a host that launches work too slowly for its GPU."""
    idle = f"the GPU is idle for {format_duration(idle_s)} per step ({idle_s / step_s:.0%} of it) until the host "
    cure = "use a larger batch, torch.compile, CUDA graphs, or fewer calls that wait for the GPU, such as .item()"
    return Finding("host", f"{idle}launches more work", cure, idle_s, "at most", line="model = torch.compile(model)")


def blame_messages(
    traced: Predictor, cuts: Sequence[int], backend: str, exposed_s: float, step_s: float, *, on_host: bool,
    is_ours: bool, fixed_s: float = 0.0, spread: tuple[float, float] = (1.0, 1.0),
) -> list[Finding]:  # fmt: skip
    """The cures for exposed communication that this backend allows, each with the simulated gain: another transport on
    one host, fewer bytes, or fewer messages per sample. `cuts` are the buckets in use. `fixed_s` is the time of a step
    that does not depend on its batch, 0 if the batch is large enough. `spread` is the interval of `exposed_s` as
    multiples of `exposed_s`."""
    share = (
        f"{format_duration(exposed_s)} of gradient messages per step are exposed ({exposed_s / step_s:.0%} of the step)"
    )
    found = []

    def add(kind: str, cure: str, line: str, certainty: str, gains: tuple[float, float, float]) -> None:
        gain_s, low_s, high_s = (gain * exposed_s for gain in gains)
        interval_s = (low_s * spread[0], high_s * spread[1])
        found.append(Finding(kind, share, cure, gain_s, certainty, gain_interval_s=interval_s, line=line))

    if backend == "gloo" and on_host:
        (typical, *_), (_, low, _), (*_, high) = (simulate_messages(traced, cuts, factor) for factor in _SHM_TIMES)
        _, longest, shortest = _SHM_TIMES
        cure = f"send through shared memory, assumed to take {shortest} to {longest} times as long as gloo on one host"
        line = 'import paceline; torch.distributed.init_process_group("shm")'
        add("backend", cure, line, "estimated", (typical, low, high))
    else:
        how = 'paceline.DDP(net, strategy="bf16")' if is_ours else (
            'model.register_comm_hook(*paceline.comm_hook("bf16", net))'
        )  # fmt: skip
        cure = "send bf16; int8, PowerSGD and DiLoCo send less, but change the update"
        add("network", cure, how, "estimated", simulate_messages(traced, cuts, bytes_factor=0.5))
    if fixed_s:
        took = f"{format_duration(fixed_s)} per step ({fixed_s / step_s:.0%} of it)"
        share = f"communication and the optimizer take {took}, regardless of the batch"
        cure = f"accumulate over {_MORE} times as many micro-batches, or make the batch {_MORE} times as large"
        line = "with model.no_sync(): ...  # in all micro-batches of a step but the last"
        add("batch", cure, line, "computed", ((1 - 1 / _MORE) * fixed_s / exposed_s,) * 3)
    return found


def simulate_messages(
    traced: Predictor, cuts: Sequence[int], factor: float = 1.0, bytes_factor: float = 1.0
) -> tuple[float, float, float]:
    """The fraction of exposed communication that shorter messages save, with its 90 % interval."""
    gains = []
    for one in (traced.best, *traced.draws):
        curve = one.costs.curve
        assert isinstance(curve, MeasuredCurve)
        sizes = tuple(round(size / bytes_factor) for size in curve.sizes)
        shorter = replace(one.costs, curve=MeasuredCurve(sizes, tuple(factor * s for s in curve.seconds)))
        before, after = (simulate(one.job, cuts, costs) for costs in (one.costs, shorter))
        gains.append(min(1.0, max(0.0, (before.step_s - after.step_s) / max(1e-12, before.exposed_s))))
    return gains[0], *find_interval(gains[0], gains[1:])


def rank_findings(found: Iterable[Finding], step_s: float, noise: float = 0.0) -> list[Finding]:
    """The findings above the noise, largest predicted gain first; `healthy` if there are none. `step_s` is the step for
    findings that have none. Cures that change the training come after one that leaves it unchanged and saves at least
    half as much."""
    worth = max(WORTH, noise)
    kept = [one for one in (replace(one, step_s=one.step_s or step_s) for one in found) if one.is_worth(worth)]
    low_s = {one: one.gain_interval_s[0] for one in kept if one.kind in _ASSUMED and one.gain_interval_s}
    kept = [one for one in kept if low_s.get(one, math.inf) >= worth * one.step_s]
    healthy = f"no change is predicted to save more than the noise, {worth:.0%} of a step"
    exact_s = max((one.gain_s for one in kept if one.kind in _EXACT), default=0.0)

    def order(one: Finding) -> tuple[float, bool]:
        is_after = one.kind in _CHANGING and one.gain_s <= 2 * exact_s
        return -(min(one.gain_s, exact_s) if is_after else one.gain_s), is_after

    return sorted(kept, key=order) or [Finding("healthy", healthy, step_s=step_s)]
