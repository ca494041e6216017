"""Analysis of an attached program's steps: late ranks and bottlenecks. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from paceline.predict.advice import WORTH, blame_data, blame_rank
from paceline.predict.traces import Lateness
from paceline.records.findings import Finding
from paceline.records.samples import Samples, group_by
from paceline.records.steps import TracedMessage, TracedStepRecord
from paceline.units import format_duration

# Share of a step that must be exposed with the best buckets to count as a bottleneck; below this it cannot be told from
# rank skew.
_STANDS_OUT = 0.1


def find_late_rank(records: Sequence[TracedStepRecord]) -> Lateness | None:
    """The rank that the others wait for, from how long the same message takes on each rank. The transfer itself takes
    the same time everywhere and the rest is waiting, so no clocks are compared. None if fewer than two ranks recorded
    the same messages."""
    late_s, last = [], Counter[int]()
    for steps in group_by((r for r in records if r.messages), lambda record: record.number).values():
        if len(steps) < 2 or len({len(step.messages) for step in steps}) > 1:
            continue
        took = [[m.done_s - m.start_s for m in messages] for messages in zip(*(s.messages for s in steps), strict=True)]
        worst = max(took, key=lambda times: sum(times) - len(times) * min(times))
        late_s.append((sum(worst) - min(worst)) / (len(worst) - 1) - min(worst))
        last[steps[worst.index(min(worst))].rank] += 1
    if not late_s:
        return None
    rank, times = last.most_common(1)[0]
    return Lateness(rank, times / len(late_s), statistics.median(late_s))


def find_late_by_waits(waits: Sequence[Sequence[float]]) -> Lateness | None:
    """The rank that the others wait for, from how long each rank waits in each step (`waits[step][rank]`)."""
    if not waits or len(waits[0]) < 2:
        return None
    rank, times = Counter(row.index(min(row)) for row in waits).most_common(1)[0]
    late_s = [(sum(row) - row[rank]) / (len(row) - 1) - row[rank] for row in waits]
    return Lateness(rank, times / len(waits), statistics.median(late_s))


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
    in data loaders. `buckets` is what better buckets save. `messages` is the communication time of
    a step, its exposed part with the best buckets, and the compute time of a rank. `idle_s` is how long a GPU is idle
    for reasons other than data and messages."""
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
        # Better buckets cost nothing, so they come first if they save a good part of the exposed time.
        gain_s = min(exposed_s, saved_s) if saved_s >= max(WORTH * step_s, exposed_s / 3) else exposed_s
        if is_small or exposed_s >= _STANDS_OUT * step_s:
            takes = f"a step computes for {format_duration(compute_s)} and communicates for "
            takes += f"{format_duration(message_s)}, so {format_duration(exposed_s)} stays exposed even with the best "
            cure = "use a larger batch, or accumulate gradients" if is_small else "use a faster network, or send bf16"
            found.append(Finding("batch" if is_small else "network", f"{takes}buckets", cure, gain_s, "at most"))
    worth = [replace(one, step_s=step_s) for one in found if one.gain_s >= WORTH * step_s]
    rest = Finding("computing", "there is no other bottleneck: compute bounds the step", step_s=step_s)
    return [*sorted(worth, key=lambda one: -one.gain_s), rest]
