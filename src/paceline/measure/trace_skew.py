"""Who waits for whom: how much later than the others a rank comes to the messages of a step, from all ranks' traces."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.measure.trace_events import BUCKET, RankTrace, find_messages, find_steps

__all__ = ["Lateness", "find_lateness"]


@dataclass(frozen=True)
class Lateness:
    """The rank that was last at the message where most was waited, in most steps, and in how large a share of them.

    `mean_s` is the mean over steps of how long the others, in the mean, had been waiting there.
    """

    rank: int
    share: float
    mean_s: float


def _arrivals_ns(trace: RankTrace) -> list[list[float]]:
    """For each step, when this rank came to each message, in order."""
    found = find_messages(trace.events)
    # A bucket on gloo is shown twice, by the wrapper and by gloo: one of them, the same on every rank.
    found = [event for event in found if event["cat"] == BUCKET] or found
    messages = sorted(trace.origin_ns + event["ts"] * 1e3 for event in found)
    steps = []
    for step in find_steps(trace.events):
        begin = trace.origin_ns + step["ts"] * 1e3
        steps.append([moment for moment in messages if begin <= moment < begin + step["dur"] * 1e3])
    return steps


def find_lateness(traces: Sequence[RankTrace]) -> Lateness | None:
    """None where there is nothing to compare: one rank, no messages, or ranks that show different ones.

    The ranks' clocks must agree, as on one host.
    """
    if len(traces) < 2:
        return None
    late_s, last = [], Counter[int]()
    for steps in zip(*(_arrivals_ns(trace) for trace in traces), strict=False):
        if not steps[0] or len({len(arrivals) for arrivals in steps}) > 1:
            continue
        # Later messages inherit the lateness of earlier ones: the worst one counts, not their sum.
        worst = max(zip(*steps, strict=True), key=lambda moments: len(moments) * max(moments) - sum(moments))
        latest = max(worst)
        late_s.append((latest - (sum(worst) - latest) / (len(worst) - 1)) / 1e9)
        last[traces[worst.index(latest)].rank] += 1
    if not late_s:
        return None
    rank, times = last.most_common(1)[0]
    return Lateness(rank, times / len(late_s), statistics.fmean(late_s))
