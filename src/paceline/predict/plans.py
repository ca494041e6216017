"""Which plan is best for a calibrated job, how sure that is, and what it gains over the default. Pure.

How right it was is judged in `judgement`, against steps that nothing here has seen.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.plan import Gradient, Plan
from paceline.predict.calibrate import CalibratedJob, Evidence, fit_job, resample
from paceline.predict.curves import Curve
from paceline.predict.search import enumerate_caps, find_best_cuts, plan_by_cuts
from paceline.predict.simulate import SimulatedStep

__all__ = ["Choice", "Estimate", "PlanModel"]

_DRAWS = 40
_SEED = 11
# The standard deviation of what the model leaves out, as a share of what communication adds; and that of a step itself.
_MODEL_ERROR = 0.10
_Z90 = 1.645
# A free plan that is not this much better than one cap is not worth its length.
_WORTH = 0.002


@dataclass(frozen=True)
class Estimate:
    """A predicted step; a measured one of it lies between `low_s` and `high_s` in 90 % of cases."""

    cuts: tuple[int, ...]
    step_s: float
    low_s: float
    high_s: float
    exposed_s: float
    step: SimulatedStep

    @property
    def num_buckets(self) -> int:
        return len(self.cuts)


@dataclass(frozen=True)
class Choice:
    """The recommended buckets. `cap_bytes` is 0 where no single cap makes them; `is_default`: nothing is to be gained
    beyond what is known."""

    estimate: Estimate
    cap_bytes: int
    is_default: bool
    gain: float


class PlanModel:
    """The calibrated job, and what else it might be given how well it was measured."""

    def __init__(self, evidence: Evidence, curve: Curve | None = None) -> None:
        self.job: CalibratedJob = fit_job(evidence, curve)
        source = random.Random(_SEED)
        self._draws = [fit_job(evidence, curve, resample(source)) for _ in range(_DRAWS)]
        self.plain_s = evidence.plain.timing.median_s
        # Of the median of as many steps as calibrated it: a measured point has that noise, too.
        timing = evidence.plain.timing
        self.noise = 1.25 * timing.stdev_s / math.sqrt(timing.count) / timing.median_s if timing.count > 1 else 0.0

    def estimate(self, cuts: Sequence[int]) -> Estimate:
        step = self.job.simulate(cuts)
        drawn = [draw.simulate(cuts).step_s for draw in self._draws]
        spread_s = statistics.stdev(drawn)
        model_s = _MODEL_ERROR * max(0.0, step.step_s - self.plain_s)
        sd_s = math.sqrt(spread_s**2 + model_s**2 + (self.noise * step.step_s) ** 2)
        low_s, high_s = max(0.0, step.step_s - _Z90 * sd_s), step.step_s + _Z90 * sd_s
        return Estimate(tuple(cuts), step.step_s, low_s, high_s, step.step_s - self.plain_s, step)

    def estimate_doubts(self, cuts: Sequence[int]) -> dict[str, float]:
        """The standard deviation of the step, as a share of it, that comes from each input alone; the largest first.

        That input is the one to measure again, where the answer hangs on it.
        """
        base = self.job
        step_s = base.simulate(cuts).step_s

        def take(draw: CalibratedJob, *names: str) -> CalibratedJob:
            return replace(base, costs=replace(base.costs, **{name: getattr(draw.costs, name) for name in names}))

        inputs: dict[str, Callable[[CalibratedJob], CalibratedJob]] = {
            "all-reduce": lambda draw: take(draw, "curve", "pair_rate", "finish_s"),
            "contention": lambda draw: take(draw, "contention"),
            "the wrapper's own cost": lambda draw: take(draw, "launch_s", "gather_s_per_byte"),
            "the model's own step": lambda draw: replace(base, ready_s=draw.ready_s, backward=draw.backward),
        }
        shares = {
            name: statistics.stdev(vary(draw).simulate(cuts).step_s for draw in self._draws) / step_s
            for name, vary in inputs.items()
        }
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))

    def estimate_cap(self, cap_bytes: int) -> Estimate:
        return self.estimate(self.job.cut(cap_bytes))

    def cut_like(self, bucket_bytes: Sequence[int]) -> tuple[int, ...]:
        """The cuts of buckets of these sizes, which a wrapper told; the nearest where it orders gradients otherwise."""
        totals = [0, *itertools.accumulate(self.job.sizes)]
        ends = itertools.accumulate(bucket_bytes)
        cuts = dict.fromkeys(min(len(totals) - 1, max(1, bisect.bisect_left(totals, end))) for end in ends)
        return tuple(sorted({*cuts, len(totals) - 1}))

    def choose(self, default_cuts: Sequence[int], only_caps: bool = False) -> Choice:
        """The best plan, unless the default is as good within what is known. `only_caps`: what one cap can make."""
        job = self.job
        default = self.estimate(default_cuts)
        intervals = enumerate_caps(job.sizes)
        times = [(job.simulate(interval.cuts).step_s, interval) for interval in intervals]
        cap_s, interval = min(times, key=lambda pair: (pair[0], len(pair[1].cuts)))
        # Of those that are as good, the one with the fewest buckets: what each costs is known least.
        close = [i for seconds, i in times if seconds <= cap_s * (1 + _WORTH)]
        interval = min(close, key=lambda one: len(one.cuts))
        best, cap_bytes = self.estimate(interval.cuts), interval.high_bytes
        if not only_caps:
            seeds = (tuple(default_cuts), interval.cuts)
            cuts, step = find_best_cuts(job.sizes, job.ready_s, job.backward, job.costs, seeds)
            if step.step_s < best.step_s * (1 - _WORTH):
                best, cap_bytes = self.estimate(cuts), 0
        gains = [1 - draw.simulate(best.cuts).step_s / draw.simulate(default.cuts).step_s for draw in self._draws]
        gain = 1 - best.step_s / default.step_s
        is_sure = sum(value > 0 for value in gains) >= 0.9 * len(gains)
        if best.cuts == default.cuts or not is_sure or gain < max(_WORTH, self.noise):
            return Choice(default, 0, True, gain)
        return Choice(best, cap_bytes, False, gain)

    def build_plan(self, gradients: Sequence[Gradient], cuts: Sequence[int], rule: str) -> Plan:
        """The plan for a wrapper, whose gradients are in the order of the model's definition."""
        place = {gradient.name: index for index, gradient in enumerate(gradients)}
        order = [place[gradient.name] for gradient in self.job.gradients]
        missing = [index for index in range(len(gradients)) if index not in set(order)]
        # What never had a gradient travels last, with the rest of the last bucket.
        cuts = [*list(cuts)[:-1], len(gradients)]
        return plan_by_cuts(gradients, [*order, *missing], cuts, rule)
