"""The job that was traced, and the cost of its messages: the simulator's inputs for predicting other buckets.

A trace shows a step in which messages and compute slow each other down. This module removes that effect, and the
simulator adds it back. The rates are measured if the trace has a backward without messages, or kernels that also ran
without them; otherwise they are assumed.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from paceline.errors import MeasurementError, RecordError
from paceline.plan import Gradient, cut_like
from paceline.predict.curves import MeasuredCurve, Resample, draw, fit_line
from paceline.predict.job import Job
from paceline.predict.networks import MeasuredFabric, build_measured_fabric
from paceline.predict.predictor import Draw, Predictor, RankCosts, calibrate
from paceline.predict.simulate import MODEL_ERROR, Contention, MachineCosts, simulate
from paceline.predict.traces import Floats
from paceline.records import CollectiveRecord
from paceline.records.samples import Samples, group_by
from paceline.records.steps import SERVERS, TracedStepRecord
from paceline.units import KIB, format_bytes, format_duration, format_number_of

# Sizes within this factor form one point of the curve: their times differ only by noise.
_ALIKE = 1.25
# Assumed latency of a message between two ranks, and its uncertainty as a factor (one standard deviation): roughly that
# of the smallest all-reduces in the reference measurements. A trace has few message sizes, so it changes this latency
# by at most the factor `_REACH`.
_LATENCY_S, _LATENCY_FACTOR, _REACH = {"gloo": 5e-4, "nccl": 3e-5, "shm": 3e-5}, 2.0, 4.0
# Standard deviation of messages around a line of latency and bandwidth.
_LINE_ERROR = 0.2
# Uncertainty of a message at twice the largest traced size; the variance grows with each doubling.
_ERROR_OF_TWICE = 0.05
# A trace with fewer steps than this does not show how much they vary.
_FEW_STEPS, _FEW_NOISE = 3, 0.05
# Bounds of the factor on message times that makes the simulation reproduce the traced step.
_FACTORS = (0.5, 2.0)
# Minimum fraction of the overlapped message time that the compared kernels must cover.
_LEAST_COMPARED = 0.1
# A smaller relative change of the step says nothing about its messages.
_HIDDEN = 0.01


class _Split(NamedTuple):
    """One step, divided into intervals by activity. `under_s` is how long messages were in flight before each gradient
    was ready, and before compute ended. `message_s` divides each message's time into four parts: alone and with another
    message during compute, and alone and with another message after compute."""

    under_s: Floats
    message_s: Floats


def _split_step(step: TracedStepRecord) -> _Split:
    starts, dones = (np.array([getattr(m, name) for m in step.messages]) for name in ("start_s", "done_s"))
    points = np.unique(np.concatenate([[0.0, step.backward_s], starts, dones]))
    middle, took = (points[1:] + points[:-1]) / 2, np.diff(points)
    moving = (starts[None, :] <= middle[:, None]) & (middle[:, None] < dones[None, :])
    computes, shares = middle < step.backward_s, moving.sum(axis=1) > 1
    under = np.concatenate([[0.0], np.cumsum(took * (computes & moving.any(axis=1)))])
    cases = [computes & ~shares, computes & shares, ~computes & ~shares, ~computes & shares]
    times = np.stack([(moving * (took * case)[:, None]).sum(axis=0) for case in cases], axis=1)
    return _Split(np.interp([*step.ready_s, step.backward_s], points, under), times)


class _Fit(NamedTuple):
    """The calibrated job and costs: message times were multiplied by `factor`. `error` is the relative error of the
    simulated step before calibration."""

    job: Job
    costs: MachineCosts
    error: float
    factor: float


class TracedJob:
    """The traced steps of one job, from one or more ranks. `rank` is the rank whose messages are shortest: the other
    ranks wait for it, so its steps define the job. `steps` are its usable steps, without those that have unusual
    buckets, such as a wrapper's first step."""

    def __init__(self, records: Sequence[TracedStepRecord]) -> None:
        by_rank = group_by(records, lambda record: record.rank)
        layouts = {rank: _find_layout(rank, steps) for rank, steps in by_rank.items()}
        (first, self.layout), *others = layouts.items()
        for rank, layout in others:
            if layout != self.layout:
                found = f"rank {first} sends {_describe(self.layout)}, rank {rank} {_describe(layout)}"
                raise RecordError(f"the traces are from different jobs: {found}", code="mismatch")
        used = {rank: [s for s in steps if s.layout == self.layout] for rank, steps in by_rank.items()}
        # Use steps with the same number of gradients as the last step.
        used = {rank: [s for s in steps if len(s.ready_s) == len(steps[-1].ready_s)] for rank, steps in used.items()}
        self.rank = min(used, key=lambda rank: _sum_messages(used[rank]))
        # If ranks were traced for different numbers of steps, their steps cannot be matched.
        like = [rank for rank in used if len(by_rank[rank]) == len(by_rank[self.rank])]
        whole = set.intersection(*({step.number for step in used[rank]} for rank in like))
        self.compared = [self.rank]
        if 2 * len(whole) >= len(used[self.rank]):  # the last step of a trace may lack messages on some ranks
            self.compared = like
            used |= {rank: [step for step in used[rank] if step.number in whole] for rank in like}
        self.ranks, self.steps, of_rank = tuple(sorted(used)), used[self.rank], by_rank[self.rank]
        self.num_left_out = sum(1 for step in of_rank if step.messages) - len(self.steps)
        last = self.steps[-1]
        self.device, self.backend, self.world_size = last.device, last.backend, last.world_size
        # A single trace does not show which hosts the other ranks are on.
        hosts = {record.host for record in records}
        self.is_on_host = self.device == "cpu" and len(hosts) == 1
        self.nodes = len(hosts) if len(self.ranks) == self.world_size and all(hosts) else 0
        self.step_s = statistics.median(step.step_s for step in self.steps)
        self.exposed_s = statistics.median(step.exposed_s for step in self.steps)
        alone = [step.backward_s for step in of_rank if not step.messages]
        self.alone_s = (*alone, *(seconds for step in of_rank for seconds in step.alone_s))
        self._splits = {rank: [_split_step(step) for step in steps] for rank, steps in used.items()}
        self.gradients = self._build_gradients()
        self.fit = self._fit(Resample())

    @cached_property
    def predictor(self) -> Predictor:
        """The calibrated job, with draws that reflect the spread of its steps and the uncertainty of the
        assumptions."""
        noise = _FEW_NOISE if self.is_short else 1.25 * self.spread / math.sqrt(len(self.steps))

        def build(resample: Resample) -> Draw:
            fit = self._fit(resample) if resample.source else self.fit
            return Draw(fit.job, fit.costs, MODEL_ERROR * resample.error, noise * resample.noise)

        return Predictor(*draw(build), noise=noise)

    @property
    def is_short(self) -> bool:
        """Whether there are too few steps to show how much they vary."""
        return len(self.steps) < _FEW_STEPS

    @property
    def spread(self) -> float:
        """The relative standard deviation of the steps; 0 for a single step."""
        times = [step.step_s for step in self.steps]
        return statistics.stdev(times) / self.step_s if len(times) > 1 else 0.0

    @property
    def where(self) -> str:
        return f"{format_number_of(self.world_size, 'rank')} ({self.backend}, {self.device})"

    @property
    def has_contention(self) -> bool:
        """Whether contention is measured, from a backward or kernels without messages; otherwise it is assumed."""
        under_s = statistics.median(split.under_s[-1] for split in self._splits[self.rank])
        return (bool(self.alone_s) and under_s >= 0.02 * self.step_s) or self.has_kernels

    @property
    def has_kernels(self) -> bool:
        """Whether enough kernels ran both with and without concurrent messages to measure contention."""
        under_s = sum(split.under_s[-1] for split in self._splits[self.rank])
        return sum(step.beside_s for step in self.steps) >= max(1e-9, _LEAST_COMPARED * float(under_s))

    @property
    def has_latency(self) -> bool:
        """Whether messages of different sizes determine the latency; otherwise it is assumed."""
        return max(self.layout) >= 2 * min(self.layout)

    @property
    def is_off(self) -> bool:
        """Whether no allowed factor on message times reproduces the traced step."""
        return self.fit.factor in _FACTORS

    @property
    def notes(self) -> list[str]:
        """The assumptions, one per line."""
        last, sizes, curve = self.steps[-1], sorted(set(self.layout)), self.fit.costs.curve
        seen = format_bytes(sizes[0]) if len(sizes) == 1 else f"{format_bytes(sizes[0])} to {format_bytes(sizes[-1])}"
        latency = format_duration(curve.estimate_s(1))
        known = "from their sizes" if self.has_latency else "assumed, since their sizes are similar"
        waits = "timed from the last rank's arrival" if len(self.compared) > 1 else "including the wait for later ranks"
        num_other = max(step.num_other for step in self.steps)
        other = (
            f"other traffic: {format_number_of(num_other, 'all-reduce')} per step inside backward, not launched by a "
        )
        other += "gradient hook (SyncBatchNorm, for example); they are not buckets, and their time stays in backward"
        by = "sizes from the trace" if last.are_sizes_known else "sizes estimated from copy times within each bucket"
        return [
            f"{format_number_of(len(self.gradients), 'gradient')}, {format_bytes(self.fit.job.num_bytes)} ({by})",
            f"all-reduce: {format_number_of(len(self.layout), 'message')} of {seen} per step, {waits}; about {latency} "
            f"latency per message ({known}; within {_LATENCY_FACTOR:g}x)",
            f"contention: {self.fit.costs.contention.basis}",
            *([other] if num_other else []),
        ]

    @property
    def rank_costs(self) -> RankCosts:
        """The costs that also apply to other networks. Ranks on a CPU host were already sharing it when traced."""
        costs, count = self.fit.costs, self.world_size if self.is_on_host else 1
        contention = costs.contention if self.has_contention else None
        return RankCosts(costs.launch_s, contention=contention, neighbors=((count, 1.0),))

    def build_fabric(self, algorithm: str = "auto", ranks_per_node: int = 0) -> MeasuredFabric:
        """The job's messages as an all-reduce sweep, for other rank counts; `ranks_per_node` is 0 if unknown."""
        curve = self.fit.costs.curve
        assert isinstance(curve, MeasuredCurve)
        points = [
            CollectiveRecord(
                collective="all_reduce", backend=self.backend, device=self.device, dtype="float32", op="sum",
                world_size=self.world_size, num_bytes=size, timing=Samples(((seconds,),)), nodes=self.nodes,
            )
            for size, seconds in zip(curve.sizes, curve.seconds, strict=True)
        ]  # fmt: skip
        return build_measured_fabric(points, None, algorithm, ranks_per_node=ranks_per_node)

    def _build_gradients(self) -> tuple[Gradient, ...]:
        """Build the gradients. Sizes are means over the steps, which differ only if sizes were estimated from times."""
        ends = np.cumsum(np.mean([step.gradient_bytes for step in self.steps], axis=0))
        sizes = np.diff(np.round(ends / 4).astype(np.int64) * 4, prepend=0).tolist()
        return tuple(Gradient(f"gradient {number}", size, device=self.device) for number, size in enumerate(sizes))

    def _fit(self, resample: Resample) -> _Fit:
        drawn = resample.take(range(len(self.steps)))
        steps, launch_s = [self.steps[int(k)] for k in drawn], self.steps[0].launch_s
        under = np.array([self._splits[self.rank][int(k)].under_s for k in drawn])
        servers = SERVERS.get(self.backend, 1)
        # For each message, use the rank that arrived last, and split the time it shared with another message.
        every = np.array([[self._splits[rank][int(k)].message_s for k in drawn] for rank in self.compared])
        last = np.take_along_axis(every, every.sum(axis=3).argmin(axis=0)[None, :, :, None], axis=0)[0]
        parts = last[..., ::2] + last[..., 1::2] / servers
        contention = self._fit_contention(steps, float(np.median(under[:, -1])), parts, resample)
        compute_rate, message_rate = contention.rates(self.layout[0])
        # Remove the slowdown by messages and the cost of launching them.
        moments = np.array([[*step.ready_s, step.backward_s] for step in steps])
        launched = np.array([[message.launch_s for message in step.messages] for step in steps])
        handed = np.sum(launched[:, None, :] < moments[:, :, None] - 1e-9, axis=2) * launch_s
        alone = np.maximum(0.0, np.median(moments - handed - (1 - compute_rate) * under, axis=0))
        before_s, after_s = (statistics.median(getattr(s, name) for s in steps) for name in ("before_s", "after_s"))
        backward_s = max(1e-9, float(alone.max()))
        job = Job(self.gradients, tuple(alone[:-1].tolist()), backward_s, before_s, after_s, self.device)
        curve = self._fit_curve(parts @ np.array([message_rate, 1.0]), resample)
        costs = MachineCosts(curve, servers, launch_s, contention=contention)
        costs = replace(costs, pair_rate=1 / servers)
        return self._calibrate(job, costs, statistics.median(step.step_s for step in steps))

    def _fit_contention(
        self, steps: Sequence[TracedStepRecord], under_s: float, parts: Floats, resample: Resample
    ) -> Contention:
        """Fit contention from kernels that ran both with and without concurrent messages, or from backward passes
        without messages. Otherwise it is assumed, unless the messages show that they are slowed less. `parts` has each
        message's time during and after compute, per step."""
        if self.has_kernels and (beside_s := sum(step.beside_s for step in steps)) > 0:
            rate = min(1.0, max(0.1, sum(step.without_s for step in steps) / beside_s))
            basis = f"measured: kernels take {1 / rate - 1:.1%} longer while messages are in flight"
            return Contention((1,), (rate,), (1.0,), basis, is_by_bytes=True)
        if not self.has_contention or under_s <= 0:
            assumed = Contention.assume(self.device, self.is_on_host, source=resample.source, is_alone=False)
            rate = self._find_least_rate(parts)
            basis = f"fitted: during compute, messages run at {rate:.0%} of their normal speed, as does compute"
            return Contention((1,), (rate,), (rate,), basis) if rate > assumed.message_rates[0] else assumed
        own_s = statistics.median(step.backward_s for step in steps) - len(self.layout) * self.steps[0].launch_s
        rate = 1 - (own_s - statistics.median(resample.take(self.alone_s))) / under_s
        rate = min(1.0, max(0.1, rate))
        # The message gains the time that compute loses; if compute loses little, so does the message.
        basis = f"fitted to {format_number_of(len(self.alone_s), 'backward')} without messages (no_sync) in the trace"
        return Contention((1,), (rate,), (max(rate, 1 - rate),), basis)

    def _find_least_rate(self, parts: Floats) -> float:
        """A lower bound on the speed of messages during compute: without contention, they would not be faster per byte
        than messages of at least the same size after compute. 0 if the trace has no such messages."""
        sizes, took_s = np.array(self.layout), np.median(parts, axis=0)
        is_next = took_s[:, 0] > took_s[:, 1]
        if is_next.all() or not is_next.any() or sizes[is_next].mean() > _ALIKE * sizes[~is_next].mean():
            return 0.0
        first, other = (took_s[which].sum(axis=0) / sizes[which].sum() for which in (is_next, ~is_next))
        return float(np.clip((other[1] - first[1]) / max(1e-15, first[0] - other[0]), 0.0, 1.0))

    def _fit_curve(self, seconds: Floats, resample: Resample) -> MeasuredCurve:
        """The cost curve of messages, from one row of times per step. Outside the traced sizes it is a fitted line. At
        the traced sizes it lies between that line and the times, and the less the times vary, the closer it is to
        them."""
        sizes, times = np.array(self.layout), np.maximum(np.median(seconds, axis=0), 1e-9)
        noise = 1.25 * np.std(seconds, axis=0) / math.sqrt(len(seconds)) / times
        latency_s = self._fit_latency(sizes, times) * _LATENCY_FACTOR**resample.latency
        # Use means: if messages end at the same moment, all but the first seem to take no time.
        halves = sizes <= np.median(sizes), sizes >= np.median(sizes)
        latency_s = min(latency_s, *(0.9 * float(times[half].mean()) for half in halves))
        bytes_per_s = float(sizes.sum() / (times - latency_s).sum())
        line = latency_s + sizes / bytes_per_s
        weight = _LINE_ERROR**2 / (_LINE_ERROR**2 + noise**2)
        points = _pool_rates(_merge_alike(zip(self.layout, (line * (times / line) ** weight).tolist(), strict=True)))
        (small, least_s), (large, most_s) = points[0], points[-1]
        # Continue through the first and the last point to avoid a jump.
        found = dict(points) | {size: latency_s + (least_s - latency_s) * size / small for size in _halve(small)}
        shift, count = _ERROR_OF_TWICE * resample.shift, math.ceil(math.log2(sum(self.layout) / large)) + 1
        moved_s = max(most_s - latency_s, large / bytes_per_s)
        for n in range(1, count):
            found[large << n] = (latency_s + moved_s * 2**n) * math.exp(shift * math.sqrt(n))
        ordered = tuple(sorted(found))
        return MeasuredCurve(ordered, tuple(max(1e-9, found[size]) for size in ordered))

    def _fit_latency(self, sizes: Floats, times: Floats) -> float:
        assumed_s = _LATENCY_S.get(self.backend, 1e-4) * (1 + math.log2(max(2, self.world_size))) / 2
        if not self.has_latency:
            return assumed_s
        try:
            fitted_s = fit_line(zip(sizes.tolist(), times.tolist(), strict=True)).alpha_s
        except MeasurementError:  # larger messages were not slower
            return assumed_s
        return min(_REACH * assumed_s, max(assumed_s / _REACH, fitted_s))

    def _calibrate(self, job: Job, costs: MachineCosts, step_s: float) -> _Fit:
        """The costs with which the simulated buckets take as long as in the trace: scales message times and, if that is
        not enough, changes the time after backward."""
        curve, cuts = costs.curve, cut_like(job.totals, self.layout)
        assert isinstance(curve, MeasuredCurve)

        def scale(factor: float) -> MachineCosts:
            return replace(costs, curve=MeasuredCurve(curve.sizes, tuple(factor * s for s in curve.seconds)))

        own_s = simulate(job, cuts, costs).step_s
        _, [factor], [rest_s] = calibrate(job, scale, [(cuts, step_s)], _FACTORS)
        # If messages are hidden, a factor at a bound explains nothing.
        if factor in _FACTORS and abs(step_s - rest_s - own_s) <= _HIDDEN * step_s:
            factor, rest_s = 1.0, step_s - own_s
        fitted = replace(job, after_s=max(0.0, job.after_s + rest_s))
        return _Fit(fitted, scale(factor), own_s / step_s - 1, factor)


def _find_layout(rank: int, steps: Sequence[TracedStepRecord]) -> tuple[int, ...]:
    """The most frequent buckets over the steps; on a tie, those of later steps."""
    found = Counter(step.layout for step in reversed(steps) if step.messages)
    if not found:
        raise RecordError(f"no step of rank {rank} sent gradients: trace steps outside no_sync")
    return found.most_common(1)[0][0]


def _describe(layout: tuple[int, ...]) -> str:
    return f"{format_bytes(sum(layout))} in {format_number_of(len(layout), 'bucket')}"


def _sum_messages(steps: Sequence[TracedStepRecord]) -> float:
    return statistics.median(sum(m.done_s - m.start_s for m in step.messages) for step in steps)


def _halve(size: int) -> list[int]:
    """Half the size, a quarter, and so on down to 1 KiB, followed by one byte."""
    return [1, *(part for part in (size >> n for n in range(1, 64)) if part >= KIB)]


def _merge_alike(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Sorted points; neighbors of similar size are merged into one point by medians."""
    groups: list[list[tuple[int, float]]] = []
    for point in sorted(points):
        if not groups or point[0] > _ALIKE * groups[-1][0][0]:
            groups.append([])
        groups[-1].append(point)
    return [
        (round(statistics.median(size for size, _ in group)), max(1e-9, statistics.median(s for _, s in group)))
        for group in groups
    ]


def _pool_rates(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Sorted points whose rates do not fall with size: a message that seems faster per byte than a larger one gets the
    common rate of both. An idle link may transfer the first bytes in a burst, but a busy link does not."""
    groups: list[list[tuple[int, float]]] = []
    for point in points:
        groups.append([point])
        while len(groups) > 1 and _take_per_byte(groups[-2]) < _take_per_byte(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [(size, size * _take_per_byte(group)) for group in groups for size, _ in group]


def _take_per_byte(points: Sequence[tuple[int, float]]) -> float:
    return sum(seconds for _, seconds in points) / sum(size for size, _ in points)
