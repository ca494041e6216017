"""Predictions with intervals, and the best plan, from the records of a tuning run or a profile. Pure.

`Evidence` excludes the job's steps under its own plans, so a prediction never sees the data it is tested on.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.errors import MeasurementError
from paceline.machine import canonical_backend
from paceline.plan import Gradient, Plan, cut_like, plan_by_cuts
from paceline.predict.curves import CostCurve, Resample, fit_curve, hold_draws, median_noise
from paceline.predict.job import Job, Lookup
from paceline.predict.race import Limit
from paceline.predict.search import estimate_caps, estimate_least_s, find_best_cuts
from paceline.predict.simulate import MODEL_ERROR, Contention, MachineCosts, SimulatedStep, simulate
from paceline.records import ChunksRecord, CollectiveRecord, LayerProfileRecord, ParameterTimes, Record, StepRecord
from paceline.records.traced import SERVERS
from paceline.units import format_bytes, format_duration, format_ms

_DRAWS, _SEED = 40, 11
_Z90 = 1.645
# A free plan that is not better than a single cap by this share is not worth its complexity.
_WORTH = 0.002
# Lower bound for the relative speed of compute or a message next to the other.
_LEAST_RATE = 0.02


class Evidence:
    """The records of a tuning run or a profile that a prediction may learn from, by purpose. The job's own steps are
    excluded. A profile has no sweep."""

    def __init__(self, records: Sequence[Record]) -> None:
        every = [record for record in records if isinstance(record, StepRecord)]
        plain, local, disturbed = ([r for r in every if r.role == role] for role in ("plain", "local", "disturbed"))
        profiles = [record for record in records if isinstance(record, LayerProfileRecord)]
        if not profiles or not plain or not local:
            raise MeasurementError("a prediction needs a layer profile, plain steps and local steps of the wrapper")
        self.profile, self.plain, self.disturbed = profiles[0], plain[0], disturbed
        local.sort(key=lambda record: record.num_buckets)
        self.one_bucket, self.bucket_each = local[0], local[-1]
        self.together = sorted((r for r in every if r.role == "together"), key=lambda record: record.world_size)
        collectives = [record for record in records if isinstance(record, CollectiveRecord)]
        self.sweep = [record for record in collectives if record.note != "buffers"]
        self.extras = [record for record in collectives if record.note == "buffers"]
        self.pairs = [record for record in records if isinstance(record, ChunksRecord)]

    @cached_property
    def too_short(self) -> list[StepRecord]:
        """Disturbed steps that lost more time than messages overlapped, so they did not measure contention. Decided by
        the medians, so that every draw has the same sizes."""
        resample = Resample()
        backward_s = resample.median(self.plain.phase("backward")) if self.disturbed else 0.0
        found = ((record, *_find_overlap(record, resample, backward_s)[1:]) for record in self.disturbed)
        return [record for record, overlap_s, delay_s in found if delay_s >= (1 - _LEAST_RATE) * overlap_s]


@dataclass(frozen=True)
class RankCosts:
    """What a wrapper and its messages cost a rank on any network; None if not measured. `neighbours` maps the number of
    ranks on a host to their compute time relative to the profile, whose own number comes first. Messages of the sizes
    in `too_short` could not measure contention."""

    launch_s: float = 0.0
    gather_s_per_byte: float = 0.0
    contention: Contention | None = None
    neighbours: tuple[tuple[int, float], ...] = ((1, 1.0),)
    wrapper: str = ""
    too_short: tuple[int, ...] = ()


def fit_rank(evidence: Evidence, resample: Resample | None = None, curve: CostCurve | None = None) -> RankCosts:
    """Fit by medians. The wrapper's copy time is that of one bucket without its launch, or 0 if it is within the noise.
    `curve` is the cost curve of the messages in the disturbed steps."""
    resample = resample or Resample()
    median, one, each, profile = resample.median, evidence.one_bucket, evidence.bucket_each, evidence.profile
    launch_s = max(0.0, median(each.timing) - median(one.timing)) / max(1, each.num_buckets - one.num_buckets)
    backward_s = median(evidence.plain.phase("backward"))
    gather_s = max(0.0, median(one.phase("backward")) - backward_s - launch_s)
    contention = _fit_contention(evidence, curve, resample, backward_s)
    times = {record.world_size: median(record.timing) for record in evidence.together}  # one entry per number of ranks
    first_s = next(iter(times.values()), 0.0)
    neighbours = tuple((count, max(1.0, time_s / first_s)) for count, time_s in times.items())
    neighbours = neighbours or ((evidence.plain.world_size, 1.0),)
    too_short = tuple(sorted({record.message_bytes for record in evidence.too_short}))
    return RankCosts(launch_s, gather_s / profile.num_bytes, contention, neighbours, one.wrapper, too_short)


def find_evidence(records: Sequence[Record]) -> Evidence | None:
    """What a profile measured of copies, contention and neighbours; None where it holds only layers."""
    try:
        return Evidence([record for record in records if isinstance(record, LayerProfileRecord | StepRecord)])
    except MeasurementError:
        return None


def describe_rank(rank: RankCosts, num_bytes: int) -> list[str]:
    """The measured costs, one per line; empty if nothing was measured."""
    if not rank.wrapper:
        return []
    copies = f"copies take {format_ms(rank.gather_s_per_byte * num_bytes)} ms of a step"
    lines = [
        f"measured: in the wrapper of {rank.wrapper} {copies}, and each bucket takes {format_duration(rank.launch_s)}"
    ]
    if rank.contention is not None:
        found, percent = rank.contention, "{:.0%}".format
        columns = ((format_bytes, found.sizes), (percent, found.compute_rates), (percent, found.message_rates))
        sizes, compute, message = (" and ".join(map(say, values)) for say, values in columns)
        speeds = f"compute runs at {compute} of its speed, messages at {message}"
        lines.append(f"measured: while messages of {sizes} are in flight, {speeds}")
    if rank.too_short:
        sizes = " and ".join(map(format_bytes, rank.too_short))
        lines.append(f"contention could not be measured with messages of {sizes}: this backward is too short")
    for count, factor in rank.neighbours[1:]:
        lines.append(f"measured: with {count} ranks on the host, compute takes {factor:.2f} times as long")
    return lines


def fit_job(
    evidence: Evidence, curve: CostCurve | None = None, resample: Resample | None = None
) -> tuple[Job, MachineCosts]:
    """Fit the job and its costs by medians. `curve` replaces the measured messages if they are emulated."""
    resample = resample or Resample()
    median = resample.median
    plain, one, profile = evidence.plain, evidence.one_bucket, evidence.profile
    is_ours, is_emulated = plain.wrapper == "paceline", curve is not None and not evidence.disturbed
    if curve is None:
        curve = fit_curve((record.num_bytes, median(record.timing)) for record in evidence.sweep)
    rank, backward_s = fit_rank(evidence, resample, curve), median(plain.phase("backward"))
    after_s = median(one.phase("optimizer"))
    gather_s = rank.gather_s_per_byte * profile.num_bytes
    before_s = max(0.0, median(one.timing) - backward_s - gather_s - after_s - rank.launch_s)
    used = [parameter for parameter in profile.parameters if parameter.median_s is not None]
    profiled_s = statistics.median(profile.profiled_backward.reduced_s)
    # Paceline's wrapper sends buffers at the end of a step, torch's at the beginning.
    buffers_s = sum(median(record.timing) for record in evidence.extras)
    pairs = [curve.estimate_s(record.chunk_bytes) / median(record.timing) for record in evidence.pairs]
    pair_rate = _limit(statistics.median(pairs)) if pairs else 1.0
    servers = SERVERS.get(plain.backend, 1) if evidence.sweep else 1
    assumed = Contention.assume(plain.device, is_on_host=True, source=resample.source).spread_over(curve)
    if rank.too_short:
        assumed = replace(assumed, basis=f"{assumed.basis} (this backward is too short to measure it)")
    emulated = Contention(basis="an emulated network uses no core")
    contention = emulated if is_emulated else rank.contention or assumed
    finish_s = buffers_s if is_ours else 0.0
    gradients = (
        Gradient(p.name, p.num_bytes, p.num_bytes // max(1, p.num_elements), p.dtype, shape=p.shape) for p in used
    )
    ready = (min(backward_s, (p.median_s or 0.0) * backward_s / profiled_s) for p in used)
    before_s += 0.0 if is_ours else buffers_s
    job = Job(tuple(gradients), tuple(ready), backward_s, before_s, after_s, plain.device)
    if is_ours and not is_emulated and canonical_backend(plain.backend) != "shm" and plain.device != "cuda":
        scale = backward_s / profiled_s
        job = replace(job, lookups=tuple(_read_lookup(p, scale) for p in used if p.num_rows)).split(plain.world_size)
    costs = MachineCosts(curve, servers, rank.launch_s, rank.gather_s_per_byte, contention, pair_rate, finish_s)
    return job, costs


def _read_lookup(parameter: ParameterTimes, scale: float) -> Lookup:
    rest_s = parameter.median_rest_s
    row_bytes = parameter.num_bytes // parameter.shape[0]
    return Lookup(parameter.name, parameter.num_rows, row_bytes, None if rest_s is None else rest_s * scale)


def _limit(rate: float) -> float:
    return min(1.0, max(_LEAST_RATE, rate))


def _find_s(record: StepRecord, name: str, resample: Resample) -> float:
    # Counts from the last rank's start: a message that waits for a peer uses no core.
    return resample.median(replace(record.phase(name), reducer="min"))


def _find_overlap(record: StepRecord, resample: Resample, backward_s: float) -> tuple[float, float, float]:
    """Seconds that a message takes, that it overlaps backward, and by which it makes backward longer."""
    under_way_s = _find_s(record, "under_way", resample)
    delay_s = max(0.0, resample.median(record.phase("backward")) - backward_s) / record.num_messages
    return under_way_s, min(_find_s(record, "overlapped", resample), under_way_s), delay_s


def _fit_contention(
    evidence: Evidence, curve: CostCurve | None, resample: Resample, backward_s: float
) -> Contention | None:
    """Contention from backward passes that overlap messages: how much each slows the other. None without such steps. If
    no curve is given, the same rounds also timed the messages alone."""
    rates: dict[int, tuple[float, float, float]] = {}
    for record in evidence.disturbed:
        under_way_s, overlapped_s, delay_s = _find_overlap(record, resample, backward_s)
        if record in evidence.too_short or overlapped_s <= 0 or (curve is None and record.alone is None):
            continue
        alone_s = _find_s(record, "alone", resample) if curve is None else curve.estimate_s(record.message_bytes)
        moved_s = max(0.0, alone_s - (under_way_s - overlapped_s))
        compute_rate = _limit(1 - delay_s / overlapped_s)
        # The time that compute loses goes to the message: a core is never idle while both want it.
        message_rate = _limit(max(moved_s / overlapped_s, 1 - compute_rate))
        rates[record.message_bytes] = compute_rate, message_rate, alone_s
    if not rates:
        return None
    sizes = tuple(sorted(rates))
    basis = f"fitted to steps during which messages of {' and '.join(map(format_bytes, sizes))} were sent"
    compute_rates, message_rates, times_s = zip(*(rates[size] for size in sizes), strict=True)
    return Contention(sizes, compute_rates, message_rates, basis, times_s)


@dataclass(frozen=True)
class Estimate:
    """A predicted step; the measured step lies between `low_s` and `high_s` in 90 % of cases."""

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

    def stretch(self, factor: float) -> Estimate:
        """The estimate for a machine on which everything takes this many times as long."""
        names = ("before_s", "backward_s", "over_s", "after_s", "local_s")
        step = replace(self.step, **{name: factor * getattr(self.step, name) for name in names})
        return Estimate(self.cuts, factor * self.low_s, factor * self.high_s, factor * self.exposed_s, step)


@dataclass(frozen=True)
class Choice:
    """The buckets with the best prediction, and the prediction for the wrapper's default. `cap_bytes` is 0 if no single
    cap produces them. `is_clear` means that they are better in nearly all draws, and by more than the noise."""

    estimate: Estimate
    default: Estimate
    cap_bytes: int
    is_clear: bool

    @property
    def gain(self) -> float:
        return 1 - self.estimate.step_s / self.default.step_s


class Predictor:
    """The fitted job and costs, with `draws` of both that reflect the measurement uncertainty. `plain_s` is the step
    without communication. `noise` is that of a measured median, assuming as many steps as were used for calibration."""

    def __init__(
        self, job: Job, costs: MachineCosts, draws: Sequence[tuple[Job, MachineCosts]], plain_s: float, noise: float
    ) -> None:
        self.job, self.costs, self.draws, self.plain_s, self.noise = job, costs, draws, plain_s, noise
        self._limits: dict[tuple[int, ...], Limit] = {}

    @classmethod
    def fit(cls, evidence: Evidence, curve: CostCurve | None = None) -> Predictor:
        source, timing = random.Random(_SEED), evidence.plain.timing
        draws = [fit_job(evidence, curve, Resample(source)) for _ in range(_DRAWS)]
        return cls(*fit_job(evidence, curve), draws, timing.median_s, median_noise(timing))

    def change(self, change: Callable[[Job, MachineCosts, Resample], MachineCosts]) -> Predictor:
        """The same job with another strategy, which sends whole gradients; applied to the draws, too."""
        wholes = [(job.whole or job, costs) for job, costs in self.draws]
        drawn = [(job, change(job, costs, Resample(random.Random(n)))) for n, (job, costs) in enumerate(wholes)]
        job = self.job.whole or self.job
        return Predictor(job, change(job, self.costs, Resample()), drawn, self.plain_s, self.noise)

    def estimate(self, cuts: Sequence[int]) -> Estimate:
        step = simulate(self.job, cuts, self.costs)
        spread_s = statistics.stdev(simulate(job, cuts, costs).step_s for job, costs in self.draws)
        exposed_s = step.step_s - self.plain_s
        model_s = MODEL_ERROR * max(0.0, exposed_s)
        sd_s = math.sqrt(spread_s**2 + model_s**2 + (self.noise * step.step_s) ** 2)
        return Estimate(tuple(cuts), max(0.0, step.step_s - _Z90 * sd_s), step.step_s + _Z90 * sd_s, exposed_s, step)

    def estimate_gain(self, cuts: Sequence[int], other: Sequence[int]) -> tuple[float, float, float]:
        """The share of the step that these cuts save compared with others, with its 90 % interval. The upper end is
        limited to what any plan can save."""
        (mine, theirs), *drawn = (
            [simulate(job, each, costs) for each in (cuts, other)]
            for job, costs in [(self.job, self.costs), *self.draws]
        )
        gain, model = 1 - mine.step_s / theirs.step_s, MODEL_ERROR * abs(mine.step_s - theirs.step_s) / theirs.step_s
        sd = math.hypot(statistics.stdev(1 - here.step_s / there.step_s for here, there in drawn), model)
        return gain, gain - _Z90 * sd, max(gain, min(gain + _Z90 * sd, self.limit_gain(other).share))

    def limit_gain(self, cuts: Sequence[int]) -> Limit:
        """The most that any other buckets can save of the step with these cuts."""
        if (found := self._limits.get(tuple(cuts))) is None:
            shares, adds = [], []
            for job, costs in [(self.job, self.costs), *self.draws]:
                step = simulate(job, cuts, costs)
                adds.append(step.exposed_s / step.step_s)
                shares.append(max(0.0, 1 - estimate_least_s(job, costs) / step.step_s))
            share, most = shares[0], hold_draws(adds[0], adds[1:])[1]
            sd = math.hypot(statistics.stdev(shares[1:]), MODEL_ERROR * share)
            found = self._limits[tuple(cuts)] = Limit(max(share, min(share + _Z90 * sd, most)), max(0.0, most))
        return found

    def estimate_doubts(self, cuts: Sequence[int]) -> dict[str, float]:
        """The relative standard deviation of the step due to each input alone, largest first."""
        inputs = {
            "all-reduce": ("curve", "pair_rate", "finish_s"),
            "contention": ("contention",),
            "wrapper overhead": ("launch_s", "gather_s_per_byte"),
            "the local step": (),
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
        """The cuts of a wrapper's buckets of these sizes; the nearest ones if it orders gradients differently."""
        return cut_like(self.job.totals, bucket_bytes)

    def choose(self, default_cuts: Sequence[int], only_caps: bool = False) -> Choice:
        """The best plan; with `only_caps`, the best that a single cap can produce."""
        default, points = self.estimate(default_cuts), estimate_caps(self.job, self.costs).points
        least_s = min(point.step.step_s for point in points)
        # Among equally good plans, choose the one with the fewest buckets: per-bucket cost is our least certain input.
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
        """The plan for a wrapper, whose gradients are in model definition order."""
        # Parameters that never had a gradient are sent last, in the last bucket.
        order = self.job.order(gradients)
        return plan_by_cuts(gradients, order, [*cuts[:-1], len(order)], rule, self.job.list_rows(gradients))
