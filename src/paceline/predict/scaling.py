"""The predicted scaling curve: calibrated on steps of a few ranks, continued to ranks that are not at hand. Pure.

How things grow with ranks is in `growth`; measured efficiency and speed-up are in `records.steps`.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from paceline.errors import ConfigError, RecordError
from paceline.predict.fabrics import ASSUMED_ERROR, ERROR_PER_DOUBLING, AssumedFabric, MeasuredFabric
from paceline.predict.families import NamedCurve, TwoLevelCurve
from paceline.predict.growth import SLOWDOWN_ERROR, Slowdown, build_continued_curve, interpolate_logs, is_continued
from paceline.predict.layerwise import LayerwiseModel
from paceline.predict.networks import Network
from paceline.predict.profiled import build_backward, draw_backwards
from paceline.predict.scaling_evidence import ScalingEvidence
from paceline.predict.simulate import Backward, Contention, MachineCosts, simulate_buckets
from paceline.predict.whatif import accumulate
from paceline.records.samples import Samples, quantile
from paceline.records.steps import find_straggler
from paceline.units import format_ms

__all__ = [
    "PredictedPoint",
    "ScalingEvidence",
    "describe_assumptions",
    "simulate_scaling",
]

_DRAWS = 40
_SEED = 17
# Messages of a step take at most so many times what they take alone, or as small a part of it.
_MOST_FACTOR = 3.0
_HALVINGS = 20
# The standard deviation of a median, in those of a mean.
_MEDIAN_NOISE = 1.25
# Less than this share of a step is no difference.
_NOTHING = 1e-3


@dataclass(frozen=True)
class PredictedPoint:
    """A step on so many ranks; a measured one of it should lie between `low_s` and `high_s` in 90 % of cases.

    `alone_s` is the step of one rank by itself, `network` what joins the hosts (empty: all ranks are on this one),
    `calibrated` the numbers of ranks whose steps it learnt from, and `doubt` why not to trust it.
    """

    contestant: str
    mode: str
    cell_size: int
    world_size: int
    step_s: float
    low_s: float
    high_s: float
    alone_s: float
    network: str = ""
    doubt: str = ""
    calibrated: tuple[int, ...] = ()
    source: str = "simulated"

    @property
    def speedup(self) -> float:
        """How many times the samples per second of one rank."""
        return self.alone_s / self.step_s * (self.world_size if self.mode == "weak" else 1)

    @property
    def efficiency(self) -> float:
        """The speed-up as a share of the ideal one."""
        return self.speedup / self.world_size


def simulate_scaling(
    evidence: ScalingEvidence, ranks: Sequence[int], networks: Sequence[Network] = ()
) -> list[PredictedPoint]:
    """A point for each number of ranks; for more than this host has, one for each network between such hosts."""
    if not ranks or min(ranks) < 1:
        raise ConfigError(f"numbers of ranks {list(ranks)}: one or more, of at least 1")
    here = evidence.most_on_host
    if max(ranks) > here and not networks:
        raise ConfigError(f"{max(ranks)} ranks where this host has {here}: name a network that joins hosts")
    source = random.Random(_SEED)
    best = _fit_curve(evidence, networks, None)
    draws = [_fit_curve(evidence, networks, source) for _ in range(_DRAWS)]
    # The median that a prediction is compared with has the noise of its own repetitions.
    timing = evidence.alone.timing
    noise = _MEDIAN_NOISE * timing.stdev_s / math.sqrt(timing.count) / timing.median_s
    noises = [math.exp(source.gauss(0, noise)) for _ in draws]
    points = []
    for world_size in ranks:
        for place in range(len(networks)) if world_size > here else (0,):
            step_s = best.simulate_s(world_size, place)
            times = [draw.simulate_s(world_size, place) * own for draw, own in zip(draws, noises, strict=True)]
            points.append(
                PredictedPoint(
                    contestant=evidence.contestant,
                    mode=evidence.alone.mode,
                    cell_size=evidence.alone.cell_size,
                    world_size=world_size,
                    step_s=step_s,
                    low_s=min(step_s, quantile(times, 0.05)),
                    high_s=max(step_s, quantile(times, 0.95)),
                    alone_s=best.alone_s,
                    network=networks[place].name if world_size > here else "",
                    doubt=best.describe_doubt(world_size, place),
                    calibrated=tuple(sorted(record.world_size for record in evidence.records)),
                )
            )
    return points


@dataclass(frozen=True)
class _SlowedTimes:
    """The messages of a step, each so many times as long as alone."""

    seconds: Mapping[float, float]
    factor: float

    def estimate_s(self, num_bytes: float) -> float:
        return self.factor * self.seconds[num_bytes]

    def describe_doubt(self, num_bytes: float) -> str:
        return ""


@dataclass(frozen=True)
class _ScalingCurve:
    """The fitted curve. `corrections` has for each calibrated number of ranks how many times as long its messages take
    as alone, and the seconds that no such factor explains. `shift` is how far off the factor is elsewhere, in
    standard deviations."""

    evidence: ScalingEvidence
    alone_s: float
    one_rank_s: tuple[tuple[float, float], ...]
    slowdown: Slowdown
    models: tuple[tuple[int, LayerwiseModel], ...]
    fabric: MeasuredFabric | None
    networks: tuple[AssumedFabric, ...]
    corrections: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    shift: float = 0.0

    def compute_s(self, world_size: int) -> float:
        """A step of the slowest rank without communication; hosts do not slow each other."""
        base_s = interpolate_logs(self.one_rank_s, self.evidence.count_samples(world_size))
        if world_size == 1:
            return base_s
        here = min(world_size, self.evidence.most_on_host)
        own_s = 0.0 if self.evidence.shared else self.evidence.wrapper_s
        return base_s * self.slowdown.estimate(here) * self.evidence.estimate_wait(world_size) + own_s

    def simulate_s(self, world_size: int, place: int = 0) -> float:
        compute_s = self.compute_s(world_size)
        if world_size == 1:
            return compute_s
        factor, extra_s = 1.0, 0.0
        nearest = 1
        if self.corrections:
            nearest = min(self.corrections, key=lambda count: (abs(math.log(count / world_size)), -count))
            factor, extra_s = self.corrections[nearest]
        away = abs(math.log2(min(world_size, self.evidence.most_on_host) / nearest))
        factor *= math.exp(self.shift * ERROR_PER_DOUBLING * away)
        return compute_s + max(0.0, self.build_exposed(world_size, place)(factor) + extra_s)

    def build_exposed(self, world_size: int, place: int = 0) -> Callable[[float], float]:
        """What a step exposes, in seconds, where its messages take so many times as long as alone."""
        samples = self.evidence.count_samples(world_size) / self.evidence.accumulate
        _, model = min(self.models, key=lambda pair: abs(math.log(pair[0] / samples)))
        backward = self._stretch(accumulate(model.backward, self.evidence.accumulate), world_size)
        # A bucket is complete with the gradient at which as much of all bytes is ready.
        totals = [0, *itertools.accumulate(model.sizes)]
        buckets = self.evidence.list_buckets(world_size)
        ends = list(itertools.accumulate(buckets))
        places = [bisect.bisect_left(totals, end / ends[-1] * totals[-1]) - 1 for end in ends]
        ready = [backward.ready_s[min(max(0, number), len(model.sizes) - 1)] for number in places]
        curve, contention = self.build_curve(world_size, place), self._share_cores(world_size)
        seconds: dict[float, float] = {size: curve.estimate_s(size) for size in buckets}

        def simulate(factor: float) -> float:
            costs = MachineCosts(
                _SlowedTimes(seconds, factor), self.servers, pair_rate=1 / self.servers, contention=contention
            )
            return simulate_buckets(buckets, ready, backward, costs).exposed_s

        return simulate

    @property
    def servers(self) -> int:
        return self.fabric.servers if self.fabric else 1

    def _stretch(self, backward: Backward, world_size: int) -> Backward:
        """The profiled step made as long as `compute_s`. The optimizer does not shrink with the batch."""
        compute_s = self.compute_s(world_size)
        slowdown = self.slowdown.estimate(min(world_size, self.evidence.most_on_host))
        after_s = min(backward.after_s * slowdown, compute_s / 2)
        stretch = (compute_s - after_s) / (backward.before_s + backward.total_s)
        ready_s = tuple(moment * stretch for moment in backward.ready_s)
        return Backward(ready_s, backward.total_s * stretch, backward.before_s * stretch, after_s)

    def _share_cores(self, world_size: int) -> Contention:
        """On CPU a message takes half a rank's core, less what cores of the host are idle."""
        if self.evidence.alone.device != "cpu":
            return Contention()
        idle = self.evidence.ranks_at_hand / min(world_size, self.evidence.most_on_host) - 1
        rate = (1 + min(1.0, max(0.0, idle))) / 2
        return Contention.uniform(rate, rate)

    def build_curve(self, world_size: int, place: int) -> NamedCurve:
        evidence = self.evidence
        here = evidence.most_on_host
        nodes = math.ceil(world_size / here)
        if here == 1:
            return self.networks[place].build_curve(nodes)
        if self.fabric is None:
            raise RecordError(f"no all-reduce on {evidence.backend} is at hand: measure one with `bench allreduce`")
        inside = build_continued_curve(self.fabric, min(world_size, here))
        return inside if nodes == 1 else TwoLevelCurve(inside, self.networks[place].build_curve(nodes))

    def describe_doubt(self, world_size: int, place: int) -> str:
        if world_size == 1:
            return ""
        doubts = []
        most = max(self.corrections, default=1)
        if not self.corrections:
            doubts.append("no step on several ranks calibrates it: they are taken not to slow each other")
        elif world_size > 2 * most:
            doubts.append(f"{world_size:,} ranks are beyond twice the most whose steps calibrate it, {most}")
        doubts += [
            f"rank {straggler.rank} was disturbed in steps on {straggler.record.world_size} ranks"
            for straggler in filter(None, map(find_straggler, self.evidence.shared))
        ]
        doubts.append(self.build_curve(world_size, place).describe_doubt(max(self.evidence.list_buckets(world_size))))
        return "; ".join(filter(None, doubts))


def _fit_curve(evidence: ScalingEvidence, networks: Sequence[Network], source: random.Random | None) -> _ScalingCurve:
    """By medians; with a source by those of repetitions drawn again, and with what is only assumed drawn, too."""
    kept: dict[int, Sequence[int]] = {}

    def center(samples: Samples) -> float:
        # Steps of a cell were taken in turns, so they are drawn together: a slow spell is in all of them.
        if samples.count not in kept:
            numbers = range(samples.count)
            kept[samples.count] = source.choices(numbers, k=len(numbers)) if source else numbers
        return statistics.median(samples.reduced_s[number] for number in kept[samples.count])

    alone_s = center(evidence.alone.timing)
    drift = alone_s / evidence.alone.timing.median_s
    known = {float(samples): seconds * drift for samples, seconds in evidence.one_rank_s.items()}
    one_rank_s = tuple(sorted({**known, float(evidence.alone.global_batch_size): alone_s}.items()))
    factors = [(1, 1.0)]
    for record in evidence.shared:
        assert record.no_comm is not None  # refused by the evidence
        base_s = interpolate_logs(one_rank_s, evidence.count_samples(record.world_size))
        factors.append((record.world_size, center(record.no_comm) / base_s))
    slowdown = Slowdown(tuple(factors), source.gauss(0, 1) if source else 0.0)
    fabric = evidence.build_fabric()
    joined = [AssumedFabric(network, network) for network in networks]
    models = []
    for profile in evidence.profiles:
        model = build_backward(profile)
        if source:
            [backward] = draw_backwards(profile, model, 1, source.randrange(1 << 30))
            model = replace(model, ready_s=backward.ready_s, backward=backward)
        models.append((profile.batch_size, model))
    curve = _ScalingCurve(
        evidence=evidence,
        alone_s=alone_s,
        one_rank_s=one_rank_s,
        slowdown=slowdown.rising() if evidence.alone.mode == "weak" else slowdown,
        models=tuple(models),
        fabric=fabric.draw(source) if fabric and source else fabric,
        networks=tuple(fabric.draw(source) if source else fabric for fabric in joined),
    )
    corrections = {}
    for record in evidence.shared:
        exposed_s = max(0.0, center(record.timing) - curve.compute_s(record.world_size))
        corrections[record.world_size] = _fit_correction(curve, record.world_size, exposed_s)
    return replace(curve, corrections=corrections, shift=source.gauss(0, 1) if source else 0.0)


def _fit_correction(curve: _ScalingCurve, world_size: int, exposed_s: float) -> tuple[float, float]:
    """The factor on messages with which the simulated step exposes what the measured one did, and what is left.

    Where even the largest explains less than half of it the messages are hidden, and all of the difference is left.
    """
    simulate = curve.build_exposed(world_size)
    low, high = 1 / _MOST_FACTOR, _MOST_FACTOR
    as_alone_s, most_s = simulate(1.0), simulate(high)
    if abs(as_alone_s - exposed_s) < _NOTHING * curve.compute_s(world_size) or most_s < exposed_s / 2:
        return 1.0, exposed_s - as_alone_s
    if most_s <= exposed_s or simulate(low) > exposed_s:
        factor = high if most_s <= exposed_s else low
        return factor, exposed_s - simulate(factor)
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if simulate(middle) <= exposed_s else (low, middle)
    return low, exposed_s - simulate(low)


def describe_assumptions(evidence: ScalingEvidence, networks: Sequence[Network] = ()) -> list[str]:
    """What every point of the curve takes for granted, one line each."""
    curve = _fit_curve(evidence, networks, None)
    counts = ", ".join(str(record.world_size) for record in [evidence.alone, *evidence.shared])
    lines = [f"{evidence.contestant}: calibrated on steps of {counts} ranks; more ranks than that are simulated"]
    if curve.corrections:
        factors = ", ".join(f"{factor:.3f} on {count}" for count, factor in curve.slowdown.points[1:])
        lines.append(
            f"without communication a rank takes so many times the step of one alone, its wrapper included: {factors}; "
            "on more it grows along the line through the last two"
        )
        found = ", ".join(
            f"{factor:.2f} on {count}" + (f" and {format_ms(extra_s)} ms" if abs(extra_s) > 1e-6 else "")
            for count, (factor, extra_s) in curve.corrections.items()
        )
        lines.append(f"messages of a step take so many times those of the sweep, or seconds beside: {found}")
    else:
        lines.append("no steps on several ranks: neighbours do not slow a rank, and messages take what the sweep's do")
    if evidence.alone.device == "cpu":
        lines.append(
            f"{evidence.ranks_at_hand} ranks fit this host; on a full host a message under way takes half of its "
            "rank's core, and with a core to spare for each rank nothing"
        )
    if evidence.alone.mode == "strong":
        sizes = ", ".join(f"{samples:g}" for samples, _ in curve.one_rank_s)
        lines.append(f"one rank's step by its share of the samples: log-linear between {sizes} samples")
    if curve.fabric:
        lines += curve.fabric.assumptions
        if is_continued(curve.fabric):
            lines.append("but half way to a line through the last two sweeps where that is more: ranks share the host")
    lines += [line for fabric in curve.networks for line in fabric.assumptions]
    if networks and evidence.most_on_host > 1:
        lines.append(f"beyond it, hosts of {evidence.most_on_host} ranks: reduced inside, then between, one by one")
        lines.append(
            "hosts do not slow each other's computing, but all wait for the slowest rank: ranks lie "
            f"{evidence.spread:.1%} apart (standard deviation), as measured without communication"
        )
    lines.append(
        f"interval: 90 % of {_DRAWS} draws from the repetitions of the inputs; a standard deviation of "
        f"{ERROR_PER_DOUBLING:.0%} on messages and {SLOWDOWN_ERROR:.0%} on computing for each doubling away from what "
        f"was measured, and {ASSUMED_ERROR:.0%} on a network that is only named"
    )
    return lines
