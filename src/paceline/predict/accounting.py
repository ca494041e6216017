"""Where a step's time goes on each rank: phases that add up to the step, with waits for other ranks separate.

`PhaseFinder` splits a recorded step of one rank. `account_steps` compares the ranks: the last rank to reach a
collective shows how long the transfer takes, and the rest of the collective's time on other ranks is waiting for that
rank. Only durations are compared, not timestamps, so the ranks' clocks need not agree.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from paceline.predict.traces import BUCKET, Event, Floats, attribute_time, find_messages, is_collective, union_time
from paceline.records.samples import Samples, group_by
from paceline.records.steps import RESENT, OperatorTime, Stall, TracedStepRecord

_LOADING, _FORWARD, _OPTIMIZER = (
    "enumerate(DataLoader)",
    ("DistributedDataParallel.forward", "forward"),
    "Optimizer.step#",
)
_LAUNCH = "c10d::"
# Fraction of steps (the longest) excluded from the mean wait for data, because a restart of the workers is not typical,
# unless there were so many.
_TRIM, _MANY_RESTARTS = 0.05, 3
_MOST_OPERATORS = 20  # maximum number kept per step, besides `_KEPT`
# Fraction of a rank's lateness that an operator must explain to count as its cause. Slowdown above which another
# program must be competing for the core. Competition takes half of a core; a busy sibling hyperthread, a hypervisor and
# a lower clock cost up to about 40 %.
_EXPLAINS, _COMPETING = 0.4, 1.75
# Fraction by which an operator must take longer on the late rank to be more than the effect of a slower core.
_MUCH_LONGER = 0.25
OUTSIDE = "code outside operators"
_KEPT = ("torch.distributed.ddp.reducer::search_unused_parameters",)


class PhaseFinder:
    """The ranges in one rank's trace that divide its steps into phases."""

    def __init__(self, timed: Sequence[Event]) -> None:
        ranges = [event for event in timed if event.get("cat") == "user_annotation"]
        self._loading = [e for e in ranges if e["name"].startswith(_LOADING)]
        self._forwards = [e for e in ranges if e["name"] in _FORWARD]
        self._optimizers = [e for e in ranges if e["name"].startswith(_OPTIMIZER)]
        self._collectives = [e for e in find_messages(timed) if e["cat"] != BUCKET]
        kinds = ("kernel",) if any(e.get("cat") == "kernel" for e in timed) else ("cpu_op",)
        own = [e for e in timed if e.get("cat") in kinds and not is_collective(e["cat"], e["name"])]
        self._own = own = [e for e in own if not e["name"].startswith(_LAUNCH)]
        self._starts = np.array([float(e["ts"]) for e in own])
        self._ends = self._starts + np.array([float(e["dur"]) for e in own])

    def find(
        self, device: Any, window: tuple[float, float], span: tuple[float, float], backwards: Sequence[Any],
        sent: AbstractSet[int], resent: AbstractSet[int],
    ) -> dict[str, Any]:  # fmt: skip
        """Fields for the record of a step. Its last backward sent the messages `sent`, and its earlier backward passes
        sent `resent`. `window` is the step in host time, `span` in device time."""
        places = [device.place(one) for one in backwards]
        begin, forward = places[-1][0], 0.0
        for one, (first, _) in zip(backwards, places, strict=True):
            before = [e["ts"] for e in self._forwards if window[0] <= e["ts"] < one.begin]
            if before:
                forward += max(0.0, first - max(span[0], device.find_ready(window[0], max(before))))
        loading = [(e["ts"], e["ts"] + e["dur"]) for e in self._loading if window[0] <= e["ts"] < window[1]]
        data = sum(last - first for first, last in loading)
        if device.is_gpu:
            data = sum(device.measure_idle(*window, part) for part in loading)
        ends = [e["ts"] for e in self._optimizers if backwards[-1].end <= e["ts"] < window[1]]
        optimizer = span[1] - device.find_ready(window[0], min(ends)) if ends else 0.0
        stalls = tuple(self._list_stalls(span, begin, sent, resent))
        times = {"data_s": data, "forward_s": forward, "optimizer_s": optimizer}
        operators = tuple(self._list_operators(*(span if device.is_gpu else window)))
        found = {name: max(0.0, time) * 1e-6 for name, time in times.items()}
        return found | {"stalls": stalls, "operators": operators}

    def _list_operators(self, begin: float, end: float) -> Iterator[OperatorTime]:
        """The operators with the longest self time; on a GPU, the kernels."""
        first, last = np.searchsorted(self._starts, (begin, end))
        times, stacks = Counter[str](), defaultdict[Any, list[tuple[float, str]]](list)
        for event in self._own[first:last]:
            at, took, stack = event["ts"], event["dur"], stacks[event.get("tid")]
            while stack and stack[-1][0] <= at:
                stack.pop()
            if stack:
                times[stack[-1][1]] -= took
            times[event["name"]] += took
            stack.append((at + took, event["name"]))
        for place, (name, took) in enumerate(times.most_common()):
            if took > 0 and (place < _MOST_OPERATORS or name in _KEPT):
                yield OperatorTime(name, took * 1e-6)

    def _list_stalls(
        self, span: tuple[float, float], begin: float, sent: AbstractSet[int], resent: AbstractSet[int]
    ) -> Iterator[Stall]:
        for event in self._collectives:
            first, last = event["ts"], event["ts"] + event["dur"]
            if id(event) not in sent and span[0] <= first < span[1]:
                own = union_time(self._starts, self._ends, np.array([[first, last]])) if last > first else 0.0
                name = RESENT if id(event) in resent else event["name"].rpartition(":")[2]
                took, blocked = max(0.0, last - first), max(0.0, last - first - own)
                yield Stall((first - begin) * 1e-6, took * 1e-6, blocked * 1e-6, name)


@dataclass(frozen=True)
class RankRow:
    """Where the time of a step goes on one rank, in seconds. The parts add up to the step; unknown parts are None, and
    their time counts as `rest_s`."""

    rank: int
    step_s: float
    data_s: float
    forward_s: float | None = None
    backward_s: float | None = None
    waiting_s: float | None = None
    exposed_s: float | None = None
    optimizer_s: float | None = None

    @property
    def rest_s(self) -> float:
        known = (self.forward_s, self.backward_s, self.waiting_s, self.exposed_s, self.optimizer_s)
        return self.step_s - self.data_s - sum(part or 0.0 for part in known)


def build_rank_row(rank: int, step_s: float, data_s: float, parts: Mapping[str, float], rest_s: float = 0.0) -> RankRow:
    """The row of a step that takes `step_s`, with the parts and the rest scaled to fill the time not spent on data."""
    data_s = min(data_s, step_s)
    factor = (step_s - data_s) / max(1e-12, sum(parts.values()) + rest_s)
    return RankRow(rank, step_s, data_s, **{name: factor * seconds for name, seconds in parts.items()})


def average_data(timing: Samples, waits: Samples) -> list[float]:
    """The mean fraction of time that each rank waits for data. A median would not work, because workers deliver batches
    in groups."""
    found = []
    for rank in range(timing.num_ranks):
        both = sorted((step[rank], wait[rank]) for step, wait in zip(timing.seconds, waits.seconds, strict=True))
        longest_s = max(wait_s for _, wait_s in both)
        if sum(wait_s > longest_s / 2 for _, wait_s in both) < _MANY_RESTARTS:
            both = both[: max(1, round(len(both) * (1 - _TRIM)))]
        found.append(min(1.0, sum(wait for _, wait in both) / max(1e-12, sum(step for step, _ in both))))
    return found


def account_steps(records: Sequence[TracedStepRecord]) -> dict[int, list[dict[str, float]]]:
    """The parts of each recorded step of each rank, without data; waiting includes only time in which the rank did
    nothing else. Steps that some rank did not record count only if no step was recorded on all ranks."""
    by_number = group_by(records, lambda record: record.number)
    whole = [same for same in by_number.values() if len(same) == len({record.rank for record in records})]
    found: dict[int, list[dict[str, float]]] = {}
    for same in whole or by_number.values():
        moved = _find_least(same, lambda step: [message.done_s - message.start_s for message in step.messages])
        stalled = _find_least(same, lambda step: [stall.took_s for stall in step.stalls])
        for step in same:
            found.setdefault(step.rank, []).append(_split_step(step, moved, stalled))
    return found


def _find_least(same: Sequence[TracedStepRecord], read: Callable[[TracedStepRecord], list[float]]) -> list[float]:
    """The shortest time of each collective over the ranks; empty if the ranks ran different numbers of collectives."""
    rows = [read(step) for step in same]
    return [min(times) for times in zip(*rows, strict=True)] if len({len(row) for row in rows}) == 1 else []


def _split_step(step: TracedStepRecord, moved: Sequence[float], stalled: Sequence[float]) -> dict[str, float]:
    exposed_s, waiting_s = step.exposed_s, 0.0
    if exposed_s > 0 and len(moved) == len(step.messages):
        spans = [(m.start_s, m.done_s - least_s, m.done_s) for m, least_s in zip(step.messages, moved, strict=True)]
        starts, arrivals, ends = (np.array(times) for times in zip(*spans, strict=True))
        window: Floats = np.array([[step.backward_s, step.over_s]])
        waiting_s = float(attribute_time([(arrivals, ends), (starts, arrivals)], window)[0, 1])
    parts = {
        "forward_s": min(step.forward_s or step.before_s, max(0.0, step.before_s - step.data_s)),
        "backward_s": step.backward_s + sum(step.alone_s),
        "waiting_s": waiting_s,
        "exposed_s": exposed_s - waiting_s,
        "optimizer_s": min(step.optimizer_s or step.after_s, step.after_s),
    }
    parts["rest_s"] = max(0.0, step.step_s - step.data_s - sum(parts.values()))
    # Other collectives block the phase in which they run: buffers in forward, a sum of losses after the optimizer.
    least = stalled if len(stalled) == len(step.stalls) else [stall.took_s for stall in step.stalls]
    for stall, least_s in zip(step.stalls, least, strict=True):
        place = bisect.bisect((0.0, step.over_s), stall.start_s)
        for name in (("forward_s", "rest_s"), ("backward_s",), ("rest_s", "optimizer_s"))[place]:
            late_s = min(stall.blocked_s, stall.took_s - least_s, parts[name])
            sent_s = min(stall.blocked_s - late_s, parts[name] - late_s)
            if late_s + sent_s > 0:
                parts[name] -= late_s + sent_s
                parts["waiting_s"] += late_s
                parts["exposed_s"] += sent_s
                break
    return parts


def average_parts(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each part of a step. Means add up to the mean step; medians would not."""
    return {name: statistics.fmean(step[name] for step in steps) for name in steps[0]} if steps else {}


def list_waits(records: Sequence[TracedStepRecord]) -> list[dict[int, float]]:
    """How long each rank waited for others in each recorded step; empty if the ranks cannot be compared."""
    waits = {rank: [parts["waiting_s"] for parts in steps] for rank, steps in account_steps(records).items()}
    if len(waits) < 2 or len({len(times) for times in waits.values()}) > 1:
        return []
    return [dict(zip(waits, row, strict=True)) for row in zip(*waits.values(), strict=True)]


class SlowPart(NamedTuple):
    """Where a late rank spends more time than the others. All of its operators take `slower` times as long, which
    explains the fraction `diffuse` of the lateness. Beyond that, the operator `name` takes `more_s` longer, a fraction
    `longer` of its usual time, which explains the fraction `share`."""

    name: str
    more_s: float
    slower: float
    share: float
    diffuse: float
    longer: float = math.inf

    @property
    def is_named(self) -> bool:
        return self.share >= _EXPLAINS and self.longer >= _MUCH_LONGER

    @property
    def is_core(self) -> bool:
        """Whether a slower core explains the lateness, rather than more work or another program on the core."""
        return not self.is_named and self.slower < _COMPETING


def find_slow_part(records: Sequence[TracedStepRecord], rank: int | None = None) -> SlowPart | None:
    """Find the cause of the lateness of this rank, or of the last rank of each step; None without operators. Excludes
    waits for data. Compares medians over the steps, because an interruption lengthens whatever runs at that moment,
    whereas a rank's extra work is the same in each step."""
    pairs = []
    for same in group_by(records, lambda record: record.number).values():
        own = {step.rank: _split_work(step) for step in same if step.operators}
        last = max(own, key=lambda one: sum(own[one].values()), default=-1) if rank is None else rank
        if last in own and len(own) > 1:
            pairs.append((own[last], [times for other, times in own.items() if other != last]))
    if not pairs:
        return None
    median, mean = statistics.median, statistics.fmean
    names = {name for times, others in pairs for one in (times, *others) for name in one}
    here = {name: median(times[name] for times, _ in pairs) for name in names}
    there = {name: median(mean(one[name] for one in others) for _, others in pairs) for name in names}
    late_s = median(sum(times.values()) - mean(sum(one.values()) for one in others) for times, others in pairs)
    ratios = sorted((here[name] / there[name], there[name]) for name in names if there[name] > 0 and name != OUTSIDE)
    passed = list(itertools.accumulate(took_s for _, took_s in ratios))
    slower = ratios[bisect.bisect(passed, passed[-1] / 2)][0] if passed and passed[-1] > 0 else 1.0
    usual = max(1.0, slower)
    more = {name: here[name] - usual * there[name] for name in names}
    name = max(more, key=more.__getitem__)
    share, diffuse = (
        min(1.0, max(0.0, part_s / max(late_s, 1e-12))) for part_s in (more[name], (usual - 1) * sum(there.values()))
    )
    return SlowPart(name, more[name], slower, share, diffuse, more[name] / max(usual * there[name], 1e-12))


def _split_work(step: TracedStepRecord) -> defaultdict[str, float]:
    """A rank's own seconds in a step, by operator."""
    times = defaultdict[str, float](float)
    for one in step.operators:
        times[one.name] += one.own_s
    own_s = step.step_s - step.exposed_s - step.data_s - sum(stall.blocked_s for stall in step.stalls)
    times[OUTSIDE] = max(0.0, own_s - sum(times.values()))
    return times


def estimate_mean(values: Sequence[float], value: float) -> tuple[float, float] | None:
    """The 90 % interval of the mean of these values, extended to include `value`; None for fewer than two."""
    if len(values) < 2:
        return None
    mean, half = statistics.fmean(values), 1.645 * statistics.stdev(values) / math.sqrt(len(values))
    return min(value, max(0.0, mean - half)), max(value, mean + half)
