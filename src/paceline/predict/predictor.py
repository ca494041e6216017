"""From the records of a tuning run to predictions with intervals and the best plan. Pure.

`Evidence` leaves out the steps of the job under its own plans, so a prediction never sees what it is judged by.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import MeasurementError
from paceline.plan import Gradient, Plan, cut_like, plan_by_cuts
from paceline.predict.curves import CostCurve, Resample, fit_curve, median_noise
from paceline.predict.job import Job
from paceline.predict.search import estimate_caps, find_best_cuts
from paceline.predict.simulate import SERVERS, Contention, MachineCosts, SimulatedStep, simulate
from paceline.records import ChunksRecord, CollectiveRecord, LayerProfileRecord, Record, StepRecord
from paceline.units import format_bytes

_DRAWS, _SEED = 40, 11
# The standard deviation of what the model leaves out, as a share of what communication adds.
_MODEL_ERROR = 0.10
_Z90 = 1.645
# A free plan that is not this much better than one cap is not worth its length.
_WORTH = 0.002


class Evidence:
    """What a prediction may learn from the records of a tuning run, by what it is: not the job's own steps."""

    def __init__(self, records: Sequence[Record]) -> None:
        every = [record for record in records if isinstance(record, StepRecord)]
        plain, local, disturbed = ([r for r in every if r.role == role] for role in ("plain", "local", "disturbed"))
        profiles = [record for record in records if isinstance(record, LayerProfileRecord)]
        if not profiles or not plain or not local:
            raise MeasurementError("a prediction needs a layer profile, plain steps and steps of the wrapper alone")
        self.profile, self.plain, self.disturbed = profiles[0], plain[0], disturbed
        local.sort(key=lambda record: record.num_buckets)
        self.one_bucket, self.bucket_each = local[0], local[-1]
        collectives = [record for record in records if isinstance(record, CollectiveRecord)]
        self.sweep = [record for record in collectives if record.note != "buffers"]
        self.extras = [record for record in collectives if record.note == "buffers"]
        self.pairs = [record for record in records if isinstance(record, ChunksRecord)]


def fit_job(
    evidence: Evidence, curve: CostCurve | None = None, resample: Resample | None = None
) -> tuple[Job, MachineCosts]:
    """The job and its costs, by medians. `curve` is used where messages are not measured but emulated."""
    resample = resample or Resample()
    median = resample.median
    plain, one, each, profile = evidence.plain, evidence.one_bucket, evidence.bucket_each, evidence.profile
    backward_s = median(plain.phase("backward"))
    more_s = max(0.0, median(each.timing) - median(one.timing))
    launch_s = more_s / max(1, each.num_buckets - one.num_buckets)
    # The copies of the wrapper, without its one launch; they can be within the noise.
    gather_s = max(0.0, median(one.phase("backward")) - backward_s - launch_s)
    after_s = median(one.phase("optimizer"))
    before_s = max(0.0, median(one.timing) - backward_s - gather_s - after_s - launch_s)
    used = [parameter for parameter in profile.parameters if parameter.median_s is not None]
    profiled_s = statistics.median(profile.profiled_backward.reduced_s)
    # Buffers are sent at the end of our wrapper's step and at the beginning of torch's.
    buffers_s = sum(median(record.timing) for record in evidence.extras)
    is_ours, is_emulated = plain.wrapper == "paceline", curve is not None and not evidence.disturbed
    if curve is None:
        curve = fit_curve((record.num_bytes, median(record.timing)) for record in evidence.sweep)
    pairs = [curve.estimate_s(record.chunk_bytes) / median(record.timing) for record in evidence.pairs]
    pair_rate = _limit(statistics.median(pairs)) if pairs else 1.0
    servers = SERVERS.get(plain.backend, 1) if evidence.sweep else 1
    emulated = Contention(basis="an emulated network takes no core")
    contention = emulated if is_emulated else _fit_contention(evidence, curve, resample, backward_s)
    gather, finish_s = gather_s / profile.num_bytes, buffers_s if is_ours else 0.0
    gradients = (Gradient(p.name, p.num_bytes, p.num_bytes // max(1, p.num_elements), p.dtype) for p in used)
    ready = (min(backward_s, (p.median_s or 0.0) * backward_s / profiled_s) for p in used)
    before_s += 0.0 if is_ours else buffers_s
    job = Job(tuple(gradients), tuple(ready), backward_s, before_s, after_s, plain.device)
    return job, MachineCosts(curve, servers, launch_s, gather, contention, pair_rate, finish_s)


def _limit(rate: float) -> float:
    return min(1.0, max(0.02, rate))


def _fit_contention(evidence: Evidence, curve: CostCurve, resample: Resample, backward_s: float) -> Contention:
    """From backwards during which messages were sent: what these cost it, and how slow they were; else as assumed."""
    rates: dict[int, tuple[float, float]] = {}
    for record in evidence.disturbed:
        assert record.under_way is not None and record.overlapped is not None
        # From the last rank's start on; a message that waits for a peer takes no core.
        under_way_s = resample.median(replace(record.under_way, reducer="min"))
        overlapped_s = min(resample.median(replace(record.overlapped, reducer="min")), under_way_s)
        if overlapped_s <= 0:
            continue
        delay_s = max(0.0, resample.median(record.phase("backward")) - backward_s) / record.num_messages
        moved_s = max(0.0, curve.estimate_s(record.message_bytes) - (under_way_s - overlapped_s))
        compute_rate = _limit(1 - delay_s / overlapped_s)
        # What arithmetic loses moves the message: a core is never idle while both want it.
        rates[record.message_bytes] = compute_rate, _limit(max(moved_s / overlapped_s, 1 - compute_rate))
    if not rates:
        return Contention.assume(evidence.plain.device, is_on_host=True)
    sizes = tuple(sorted(rates))
    basis = f"fitted to steps during which messages of {' and '.join(map(format_bytes, sizes))} were sent"
    return Contention(sizes, tuple(rates[size][0] for size in sizes), tuple(rates[size][1] for size in sizes), basis)


@dataclass(frozen=True)
class Estimate:
    """A predicted step; a measured one of it lies between `low_s` and `high_s` in 90 % of cases."""

    cuts: tuple[int, ...]
    low_s: float
    high_s: float
    exposed_s: float
    step: SimulatedStep

    @property
    def step_s(self) -> float:
        return self.step.step_s

    @property
    def num_buckets(self) -> int:
        return len(self.cuts)


@dataclass(frozen=True)
class Choice:
    """The buckets that are predicted best, and what the wrapper's default ones take. `cap_bytes` is 0 where no single
    cap makes them; `is_clear`: they are better in nearly all draws, and by more than the noise."""

    estimate: Estimate
    default: Estimate
    cap_bytes: int
    is_clear: bool

    @property
    def gain(self) -> float:
        return 1 - self.estimate.step_s / self.default.step_s


class Predictor:
    """The fitted job and costs, and `draws`: what else they might be given how well they were measured. `plain_s` is
    the step without communication. A measured point has the noise of its median, too: that of as many steps as
    calibrated it."""

    def __init__(
        self, job: Job, costs: MachineCosts, draws: Sequence[tuple[Job, MachineCosts]], plain_s: float, noise: float
    ) -> None:
        self.job, self.costs, self.draws, self.plain_s, self.noise = job, costs, draws, plain_s, noise

    @classmethod
    def fit(cls, evidence: Evidence, curve: CostCurve | None = None) -> Predictor:
        source, timing = random.Random(_SEED), evidence.plain.timing
        draws = [fit_job(evidence, curve, Resample(source)) for _ in range(_DRAWS)]
        return cls(*fit_job(evidence, curve), draws, timing.median_s, median_noise(timing))

    def estimate(self, cuts: Sequence[int]) -> Estimate:
        step = simulate(self.job, cuts, self.costs)
        spread_s = statistics.stdev(simulate(job, cuts, costs).step_s for job, costs in self.draws)
        exposed_s = step.step_s - self.plain_s
        model_s = _MODEL_ERROR * max(0.0, exposed_s)
        sd_s = math.sqrt(spread_s**2 + model_s**2 + (self.noise * step.step_s) ** 2)
        return Estimate(tuple(cuts), max(0.0, step.step_s - _Z90 * sd_s), step.step_s + _Z90 * sd_s, exposed_s, step)

    def estimate_gain(self, cuts: Sequence[int], other: Sequence[int]) -> tuple[float, float, float]:
        """The share of the step with other cuts that these save, and its 90 % interval."""
        (mine, theirs), *drawn = (
            [simulate(job, each, costs).step_s for each in (cuts, other)]
            for job, costs in [(self.job, self.costs), *self.draws]
        )
        gain, model = 1 - mine / theirs, _MODEL_ERROR * abs(mine - theirs) / theirs
        sd = math.hypot(statistics.stdev(1 - here / there for here, there in drawn), model)
        return gain, gain - _Z90 * sd, gain + _Z90 * sd

    def estimate_doubts(self, cuts: Sequence[int]) -> dict[str, float]:
        """The standard deviation of the step, as a share of it, that comes from each input alone; the largest first."""
        inputs = {
            "all-reduce": ("curve", "pair_rate", "finish_s"),
            "contention": ("contention",),
            "the wrapper's own cost": ("launch_s", "gather_s_per_byte"),
            "the model's own step": (),
        }
        step_s = simulate(self.job, cuts, self.costs).step_s
        shares = {}
        for name, fields in inputs.items():
            times = []
            for job, drawn in self.draws:
                costs = replace(self.costs, **{field: getattr(drawn, field) for field in fields})
                times.append(simulate(self.job if fields else job, cuts, costs).step_s)
            shares[name] = statistics.stdev(times) / step_s
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))

    def cut_like(self, bucket_bytes: Sequence[int]) -> tuple[int, ...]:
        """The cuts of a wrapper's buckets of these sizes; the nearest where it orders gradients otherwise."""
        return cut_like(self.job.totals, bucket_bytes)

    def choose(self, default_cuts: Sequence[int], only_caps: bool = False) -> Choice:
        """The best plan. `only_caps`: of those that one cap can make."""
        default, points = self.estimate(default_cuts), estimate_caps(self.job, self.costs).points
        least_s = min(point.step.step_s for point in points)
        # Of those that are as good, the one with the fewest buckets: what each costs is known least.
        close = [point for point in points if point.step.step_s <= least_s * (1 + _WORTH)]
        found = min(close, key=lambda point: len(point.cuts))
        best, cap_bytes = self.estimate(found.cuts), found.high_bytes
        if not only_caps:
            cuts, step = find_best_cuts(self.job, self.costs, (tuple(default_cuts), found.cuts))
            if step.step_s < best.step_s * (1 - _WORTH):
                best, cap_bytes = self.estimate(cuts), 0
        wins = sum(
            simulate(job, best.cuts, costs).step_s < simulate(job, default.cuts, costs).step_s
            for job, costs in self.draws
        )
        choice = Choice(best, default, cap_bytes, False)
        is_clear = wins >= 0.9 * len(self.draws) and choice.gain >= max(_WORTH, self.noise)
        return replace(choice, is_clear=is_clear and best.cuts != default.cuts)

    def build_plan(self, gradients: Sequence[Gradient], cuts: Sequence[int], rule: str) -> Plan:
        """The plan for a wrapper, whose gradients are in the order of the model's definition."""
        place = {gradient.name: index for index, gradient in enumerate(gradients)}
        order = [place[gradient.name] for gradient in self.job.gradients]
        # What never had a gradient is sent last, with the rest of the last bucket.
        missing = [index for index in range(len(gradients)) if index not in set(order)]
        return plan_by_cuts(gradients, [*order, *missing], [*cuts[:-1], len(gradients)], rule)
