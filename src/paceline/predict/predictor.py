"""Every prediction: a calibrated job, its step with an interval, and the best plan. Pure.

`Evidence` excludes the job's steps under its own plans, so a prediction never sees the data it is tested on.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from paceline.errors import MeasurementError
from paceline.machine import canonical_backend
from paceline.plan import Gradient, Plan, cut_like, plan_by_cuts
from paceline.predict.curves import (
    CostCurve,
    MeasuredCurve,
    Resample,
    draw,
    find_interval,
    fit_curve,
    median_noise,
)
from paceline.predict.job import Job, read_parameters
from paceline.predict.race import Interval, Limit
from paceline.predict.search import PLATEAU, estimate_caps, estimate_least_s, find_best_cuts
from paceline.predict.simulate import MODEL_ERROR, Contention, Layout, MachineCosts, SimulatedStep, simulate
from paceline.records import ChunksRecord, CollectiveRecord, LayerProfileRecord, Record, StepRecord
from paceline.records.steps import SERVERS
from paceline.strategy import DENSE, Strategy
from paceline.units import MIB, format_bytes, format_duration, format_ms

# Number of candidate factors between two bounds.
_FACTORS = 1 << 20
# A free plan that does not beat a single cap by this fraction is not worth its complexity.
_WORTH = 0.002
# Lower bound for the relative speed of compute and messages while they overlap.
_LEAST_RATE = 0.02
# Upper bound for the idle part of the smallest message's time.
_MOST_IDLE = 0.8


class Evidence:
    """The records of a tuning run or a profile that a prediction may use, by purpose. Excludes the job's own steps. A
    profile has no sweep."""

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
        """Disturbed steps that lost more time than their messages overlapped, so that they do not show contention.
        Depends only on medians, so every draw has the same sizes."""
        resample = Resample()
        backward_s = resample.median(self.plain.phase("backward")) if self.disturbed else 0.0
        found = ((record, *_find_overlap(record, resample, backward_s)[1:]) for record in self.disturbed)
        return [record for record, overlap_s, delay_s in found if delay_s >= (1 - _LEAST_RATE) * overlap_s]

    @property
    def servers(self) -> int:
        return SERVERS.get(self.plain.backend, 1) if self.sweep else 1

    @cached_property
    def idle_share(self) -> float:
        """The part of the smallest message's time in the sweep that a queued message on a GPU does not take: the
        launch, the wait for the last rank, and the return to the host. Two messages launched together take twice the
        time of one, minus this part. Depends only on medians, so it is the same in every draw."""
        if self.plain.device != "cuda" or self.servers > 1 or not self.pairs:
            return 0.0
        resample = Resample()
        swept = fit_curve((record.num_bytes, resample.median(record.timing)) for record in self.sweep)
        idle_s = statistics.median(2 * swept.estimate_s(r.chunk_bytes) - resample.median(r.timing) for r in self.pairs)
        return min(max(0.0, idle_s / min(swept.seconds)), _MOST_IDLE)


@dataclass(frozen=True)
class RankCosts:
    """What a wrapper and its messages cost a rank, on any network; None if not measured. `neighbors` maps the number
    of ranks on a host to their compute time relative to the profile's; the profile's own number comes first. Steps with
    messages of the sizes in `too_short` could not measure contention."""

    launch_s: float = 0.0
    gather_s_per_byte: float = 0.0
    contention: Contention | None = None
    neighbors: tuple[tuple[int, float], ...] = ((1, 1.0),)
    wrapper: str = ""
    too_short: tuple[int, ...] = ()


def fit_rank(evidence: Evidence, resample: Resample | None = None, curve: CostCurve | None = None) -> RankCosts:
    """Fit the costs to medians. The wrapper's copy time is the time of one bucket minus its launch, or 0 if that is
    within the noise. `curve` is the cost curve of the messages in the disturbed steps."""
    resample = resample or Resample()
    median, one, each, profile = resample.median, evidence.one_bucket, evidence.bucket_each, evidence.profile
    launch_s = max(0.0, median(each.timing) - median(one.timing)) / max(1, each.num_buckets - one.num_buckets)
    backward_s = median(evidence.plain.phase("backward"))
    gather_s = max(0.0, median(one.phase("backward")) - backward_s - launch_s)
    contention = _fit_contention(evidence, curve, resample, backward_s)
    times = {record.world_size: median(record.timing) for record in evidence.together}  # one entry per number of ranks
    first_s = next(iter(times.values()), 0.0)
    neighbors = tuple((count, max(1.0, time_s / first_s)) for count, time_s in times.items())
    neighbors = neighbors or ((evidence.plain.world_size, 1.0),)
    too_short = tuple(sorted({record.message_bytes for record in evidence.too_short}))
    return RankCosts(launch_s, gather_s / profile.num_bytes, contention, neighbors, one.wrapper, too_short)


def find_evidence(records: Sequence[Record]) -> Evidence | None:
    """The costs of copies, contention and other ranks measured by a profile; None if the profile has only layers."""
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
        f"measured: in the {rank.wrapper} wrapper, {copies}, and each bucket takes {format_duration(rank.launch_s)}"
    ]
    if rank.contention is not None:
        found, percent = rank.contention, "{:.0%}".format
        columns = ((format_bytes, found.sizes), (percent, found.compute_rates), (percent, found.message_rates))
        sizes, compute, message = (" and ".join(map(say, values)) for say, values in columns)
        speeds = f"compute runs at {compute} of its normal speed, messages at {message}"
        lines.append(f"measured: while messages of {sizes} are in flight, {speeds}")
    if rank.too_short:
        sizes = " and ".join(map(format_bytes, rank.too_short))
        lines.append(f"contention could not be measured with messages of {sizes}: this backward is too short")
    for count, factor in rank.neighbors[1:]:
        lines.append(f"measured: with {count} ranks on the host, compute takes {factor:.2f} times as long")
    return lines


def fit_job(
    evidence: Evidence, curve: CostCurve | None = None, resample: Resample | None = None
) -> tuple[Job, MachineCosts]:
    """Fit the job and its costs to medians. `curve` replaces the measured messages if the network is emulated."""
    resample = resample or Resample()
    median = resample.median
    plain, one, profile = evidence.plain, evidence.one_bucket, evidence.profile
    is_ours, is_emulated = plain.wrapper == "paceline", curve is not None and not evidence.disturbed
    if curve is None:
        swept = fit_curve((record.num_bytes, median(record.timing)) for record in evidence.sweep)
        idle_s = evidence.idle_share * min(swept.seconds)
        curve = MeasuredCurve(swept.sizes, tuple(time_s - idle_s for time_s in swept.seconds))
    rank, backward_s = fit_rank(evidence, resample, curve), median(plain.phase("backward"))
    after_s = median(one.phase("optimizer"))
    gather_s = rank.gather_s_per_byte * profile.num_bytes
    before_s = max(0.0, median(one.timing) - backward_s - gather_s - after_s - rank.launch_s)
    used = [parameter for parameter in profile.parameters if parameter.median_s is not None]
    profiled_s = statistics.median(profile.profiled_backward.reduced_s)
    # Paceline's wrapper sends buffers at the end of a step, torch's at the beginning.
    buffers_s = sum(median(record.timing) for record in evidence.extras)
    pairs = [curve.estimate_s(record.chunk_bytes) / median(record.timing) for record in evidence.pairs]
    pair_rate, servers = _limit(statistics.median(pairs)) if pairs else 1.0, evidence.servers
    assumed = Contention.assume(plain.device, is_on_host=True, source=resample.source)
    if plain.device == "cuda" and rank.too_short:  # these steps still have message times
        times = ((_find_s(r, "alone", resample), _find_s(r, "under_way", resample)) for r in evidence.disturbed)
        assumed = replace(assumed, message_rates=(_limit(statistics.median(a / b for a, b in times)),))
    assumed = assumed.spread_over(curve)
    if rank.too_short:
        assumed = replace(assumed, basis=f"{assumed.basis} (this backward is too short to measure it)")
    emulated = Contention(basis="an emulated network uses no CPU core")
    contention = emulated if is_emulated else rank.contention or assumed
    finish_s = buffers_s if is_ours else 0.0
    before_s += 0.0 if is_ours else buffers_s

    def place(moment_s: float) -> float:
        return min(backward_s, moment_s * backward_s / profiled_s)

    gradients, ready, lookups = read_parameters(used, place, backward_s)
    job = Job(gradients, ready, backward_s, before_s, after_s, plain.device)
    if is_ours and not is_emulated and canonical_backend(plain.backend) != "shm" and plain.device != "cuda":
        job = replace(job, lookups=lookups).split(plain.world_size)
    costs = MachineCosts(curve, servers, rank.launch_s, rank.gather_s_per_byte, contention, pair_rate, finish_s)
    return job, costs


def _limit(rate: float) -> float:
    return min(1.0, max(_LEAST_RATE, rate))


def _find_s(record: StepRecord, name: str, resample: Resample) -> float:
    # Count from the last rank's start, because a message that waits for a peer uses no core.
    return resample.median(replace(record.phase(name), reducer="min"))


def _find_overlap(record: StepRecord, resample: Resample, backward_s: float) -> tuple[float, float, float]:
    """The duration of a message, its overlap with backward, and the time it adds to backward, in seconds."""
    under_way_s = _find_s(record, "under_way", resample)
    delay_s = max(0.0, resample.median(record.phase("backward")) - backward_s) / record.num_messages
    return under_way_s, min(_find_s(record, "overlapped", resample), under_way_s), delay_s


def _fit_contention(
    evidence: Evidence, curve: CostCurve | None, resample: Resample, backward_s: float
) -> Contention | None:
    """Contention from backward passes that overlap messages: how much each slows the other. None without such steps.
    Without a curve, the same rounds also timed the messages alone."""
    rates: dict[int, tuple[float, float, float]] = {}
    for record in evidence.disturbed:
        under_way_s, overlapped_s, delay_s = _find_overlap(record, resample, backward_s)
        # On a GPU both times of a message include its launch, which the curve does not.
        known = None if record.device == "cuda" else curve
        if record in evidence.too_short or overlapped_s <= 0 or (known is None and record.alone is None):
            continue
        alone_s = _find_s(record, "alone", resample) if known is None else known.estimate_s(record.message_bytes)
        moved_s = max(0.0, alone_s - (under_way_s - overlapped_s))
        compute_rate = _limit(1 - delay_s / overlapped_s)
        # The message gains the time that compute loses: a core is never idle while both need it.
        message_rate = _limit(max(moved_s / overlapped_s, 1 - compute_rate))
        rates[record.message_bytes] = compute_rate, message_rate, alone_s
    if not rates:
        return None
    sizes = tuple(sorted(rates))
    basis = f"fitted to steps during which messages of {' and '.join(map(format_bytes, sizes))} were sent"
    compute_rates, message_rates, times_s = zip(*(rates[size] for size in sizes), strict=True)
    return Contention(sizes, compute_rates, message_rates, basis, times_s)


@dataclass(frozen=True)
class Draw:
    """All inputs of a step: the best estimates, or a draw. `error` is the model's own error as a fraction of exposed
    communication. `noise` is the logarithm of the error of the measured median that a prediction is compared with.
    `wait_s` is the random wait for the slowest rank, `slow_s` the part of the job that is due to a rank that is always
    slower, and `local_s` the step of one rank alone. `offset_s` is added to the step, because a measured step includes
    the model's error at its own buckets. `layout` has the buckets if they are fixed."""

    job: Job
    costs: MachineCosts
    error: float = 0.0
    noise: float = 0.0
    wait_s: float = 0.0
    slow_s: float = 0.0
    local_s: float = 0.0
    layout: Layout | None = None
    offset_s: float = 0.0

    def estimate_s(self, cuts: Sequence[int]) -> float:
        step = simulate(self.job, self.layout or cuts, self.costs)
        added_s = self.error * max(0.0, step.exposed_s) + self.wait_s + self.offset_s
        return (step.step_s + added_s) * math.exp(self.noise)


class Calibration(NamedTuple):
    """Costs with one unknown factor, calibrated to measured steps: the factor that explains each step, and the seconds
    that remain unexplained."""

    scale: Callable[[float], MachineCosts]
    factors: tuple[float, ...]
    rests_s: tuple[float, ...]

    @property
    def factor(self) -> float:
        return self.factors[0] if len(self.factors) == 1 else statistics.geometric_mean(self.factors)

    def draw(self, shift: float = 0.0) -> MachineCosts:
        """The costs at `shift` standard errors from the mean factor. A single step has no standard error."""
        logs = [math.log(factor) for factor in self.factors]
        error = statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
        return self.scale(self.factor * math.exp(error * shift))


def calibrate(
    job: Job,
    scale: Callable[[float], MachineCosts],
    steps: Sequence[tuple[Layout | Sequence[int], float]],
    bounds: tuple[float, float],
) -> Calibration:
    """Calibrate to measured steps (buckets and seconds): for each step, find the factor between these bounds for which
    a step with the costs `scale(factor)` takes as long as measured."""

    def find(place: int) -> float:
        return bounds[0] * math.pow(bounds[1] / bounds[0], place / _FACTORS)

    def fit(buckets: Layout | Sequence[int], step_s: float) -> tuple[float, float]:
        def estimate_s(place: int) -> float:
            return simulate(job, buckets, scale(find(place))).step_s

        place = max(0, bisect.bisect_right(range(_FACTORS + 1), step_s, key=estimate_s) - 1)
        return find(place), step_s - estimate_s(place)

    return Calibration(scale, *zip(*itertools.starmap(fit, steps), strict=True))


_NO_STEP = SimulatedStep((), 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted step: the row of every prediction. A measured step should lie between `low_s` and `high_s` in 90 % of
    cases. `exposed_s` is exposed communication, `local_s` the step time of one rank alone, and `step` the simulated
    step, which does not include random waits. `straggler_s` is the time that the slowest rank adds. `drawn_s` is the
    step time in each draw, and `drawn_local_s` that of one rank alone.

    It applies to `world_size` ranks on a `network` with a `strategy`. `cuts` are the ends of the buckets, which come
    from a `plan` or from the cap `cap_bytes` (0 if no cap produces them). All caps on the `plateau` are equally good,
    and `default_step_s` is the step time with torch's default buckets. `message_s` is the time of a single message with
    all gradients, `sent_bytes` the bytes that a rank sends per step, `neighbours_s` the slowdown caused by other ranks
    on a CPU host, `algorithm` the all-reduce algorithm, `bound` the bottleneck, and `doubt` a reason why the row may be
    wrong.

    `measured` is the record of the same step if it was run; it must not be used if it `is_disturbed`. `ratios` compare
    the step with others, by name, and `status` is the conclusion.
    """

    step_s: float
    low_s: float
    high_s: float
    exposed_s: float = 0.0
    local_s: float = 0.0
    step: SimulatedStep = _NO_STEP
    drawn_s: tuple[float, ...] = ()
    drawn_local_s: tuple[float, ...] = ()
    label: str = ""
    network: str = ""
    world_size: int = 0
    mode: str = "weak"
    cell_size: int = 0
    strategy: Strategy = DENSE
    cuts: tuple[int, ...] = ()
    plan: Plan | None = None
    cap_bytes: int = 0
    plateau: tuple[int, int] = (0, 0)
    default_step_s: float = math.nan
    message_s: float = 0.0
    sent_bytes: float = 0.0
    straggler_s: float = 0.0
    neighbours_s: float = 0.0
    algorithm: str = ""
    bound: str = ""
    doubt: str = ""
    source: str = "simulated"
    measured: StepRecord | None = None
    measured_efficiency: float | None = None
    is_disturbed: bool = False
    ratios: Mapping[str, Interval] = field(default_factory=dict)
    status: str = ""

    @property
    def num_buckets(self) -> int:
        return len(self.cuts)

    @property
    def cap_mib(self) -> float | None:
        return self.cap_bytes / MIB if self.cap_bytes else None

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        return tuple(bucket.num_bytes for bucket in self.step.buckets)

    @property
    def speedup(self) -> float:
        """Throughput relative to one rank."""
        return self.local_s / self.step_s * (self.world_size if self.mode == "weak" else 1)

    @property
    def efficiency(self) -> float:
        """The speed-up as a fraction of the ideal speed-up; in weak scaling T(1) / T(n)."""
        return self.speedup / self.world_size

    @property
    def efficiency_bounds(self) -> tuple[float, float]:
        return self.find_bounds(self.efficiency)

    def find_bounds(self, value: float) -> tuple[float, float]:
        """The bounds of a speed-up or an efficiency, each relative to one rank alone in the same draw."""
        if not self.drawn_local_s:
            return value * self.step_s / self.high_s, value * self.step_s / self.low_s
        share = self.local_s / self.step_s
        drawn = (local_s / step_s for local_s, step_s in zip(self.drawn_local_s, self.drawn_s, strict=True))
        low, high = find_interval(share, list(drawn))
        return value * low / share, value * high / share

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.step_s

    @property
    def overhead(self) -> float:
        """The fraction of a step that communication would take without any overlap."""
        return self.message_s / (self.message_s + self.local_s)

    @property
    def gain(self) -> float:
        """The fraction of the step time that these buckets save compared with the default."""
        return 1 - self.step_s / self.default_step_s

    @property
    def keeps_default(self) -> bool:
        """Whether torch's default is on the plateau, so there is nothing to change."""
        return self.gain <= PLATEAU

    @property
    def measured_s(self) -> float | None:
        return None if self.measured is None else self.measured.timing.median_s

    @property
    def best_s(self) -> float:
        """The best estimate of the step time: measured if available, otherwise predicted."""
        return self.step_s if self.measured_s is None else self.measured_s

    @property
    def measured_exposed_s(self) -> float | None:
        return None if self.measured_s is None else self.measured_s - self.local_s

    @property
    def error(self) -> float | None:
        """The predicted step divided by the measured one, minus 1; None if the latter is missing or disturbed."""
        return None if self.measured_s is None or self.is_disturbed else self.step_s / self.measured_s - 1

    @property
    def is_covered(self) -> bool | None:
        """Whether the measured step lies in the predicted interval; None if it is missing or disturbed."""
        return None if self.measured_s is None or self.is_disturbed else self.low_s <= self.measured_s <= self.high_s

    @property
    def same_layout(self) -> bool:
        """Whether the wrapper used the simulated buckets; also True if it did not run."""
        return self.measured is None or self.measured.bucket_bytes == self.bucket_bytes

    def compare(self, other: Prediction) -> Interval:
        """The ratio of this step to another, with its interval. Both must use the same draws."""
        value = self.step_s / other.step_s
        drawn = [here / there for here, there in zip(self.drawn_s, other.drawn_s, strict=True)]
        return Interval(value, *find_interval(value, drawn))

    def stretch(self, factor: float) -> Prediction:
        """The prediction for a machine that is slower by this factor."""
        names = ("step_s", "low_s", "high_s", "exposed_s", "local_s")
        return replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclass(frozen=True)
class Choice:
    """The best buckets and the wrapper's default. `is_clear` means that the best buckets win in nearly all draws, and
    by more than the noise."""

    best: Prediction
    default: Prediction
    is_clear: bool

    @property
    def gain(self) -> float:
        return 1 - self.best.step_s / self.default.step_s


class Predictor:
    """A calibrated job: the best estimates of its inputs, with `draws` that reflect their uncertainty. `plain_s` is the
    measured step without communication, if there is one. `noise` is the noise of a measured median over the number of
    steps that the calibration used."""

    def __init__(self, best: Draw, draws: Sequence[Draw], plain_s: float | None = None, noise: float = 0.0) -> None:
        self.best = best
        self.job = best.job
        self.costs = best.costs
        self.draws = draws
        self.noise = noise
        self.plain_s = best.job.local_s if plain_s is None else plain_s
        self._limits: dict[tuple[int, ...], Limit] = {}

    @classmethod
    def fit(cls, evidence: Evidence, curve: CostCurve | None = None) -> Predictor:
        timing = evidence.plain.timing
        noise = median_noise(timing)

        def build(resample: Resample) -> Draw:
            job, costs = fit_job(evidence, curve, resample)
            return Draw(job, costs, MODEL_ERROR * resample.error, noise * resample.noise, local_s=timing.median_s)

        return cls(*draw(build), timing.median_s, noise)

    def change(self, change: Callable[[Job, MachineCosts, Resample], MachineCosts]) -> Predictor:
        """The same job with another strategy, which sends whole gradients. The draws change as well."""

        def send(one: Draw, resample: Resample) -> Draw:
            job = one.job.whole or one.job
            return replace(one, job=job, costs=change(job, one.costs, resample))

        drawn = [send(one, Resample(random.Random(number))) for number, one in enumerate(self.draws)]
        return Predictor(send(self.best, Resample()), drawn, self.plain_s, self.noise)

    def predict(self, cuts: Sequence[int] = ()) -> Prediction:
        best = self.best
        step = simulate(self.job, best.layout or cuts, self.costs)
        step_s = step.step_s + best.wait_s
        drawn_s = tuple(one.estimate_s(cuts) for one in self.draws)
        low_s, high_s = find_interval(step_s, drawn_s)
        return Prediction(
            step_s=step_s,
            low_s=low_s,
            high_s=high_s,
            exposed_s=step.step_s - self.plain_s,
            local_s=best.local_s or self.plain_s,
            step=step,
            drawn_s=drawn_s,
            drawn_local_s=tuple(one.local_s for one in self.draws) if best.local_s else (),
            cuts=tuple(cuts),
            straggler_s=best.wait_s + best.slow_s,
        )

    def compare(self, mine: Prediction, other: Prediction) -> Interval:
        """The ratio of one prediction to another. Its lower bound is limited by the largest saving possible with any
        plan."""
        ratio = mine.compare(other)
        return replace(ratio, low=min(ratio.value, max(ratio.low, 1 - self.limit_gain(other.cuts).share)))

    def limit_gain(self, cuts: Sequence[int]) -> Limit:
        """The largest saving that any other buckets can achieve over a step with these cuts."""
        if (found := self._limits.get(tuple(cuts))) is None:
            shares, adds = [], []
            for one in (self.best, *self.draws):
                step = simulate(one.job, cuts, one.costs)
                adds.append((1 + one.error) * step.exposed_s / step.step_s)
                least_s = estimate_least_s(one.job, one.costs)
                shares.append((1 + one.error) * max(0.0, 1 - least_s / step.step_s))
            (_, share), (_, most) = (find_interval(values[0], values[1:]) for values in (shares, adds))
            found = self._limits[tuple(cuts)] = Limit(max(shares[0], min(share, most)), max(0.0, most))
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
            for one in self.draws:
                costs = replace(self.costs, **{field: getattr(one.costs, field) for field in fields})
                times.append(simulate(self.job if fields else one.job, cuts, costs).step_s)
            shares[name] = statistics.stdev(times) / step_s
        return dict(sorted(shares.items(), key=lambda pair: -pair[1]))

    def cut_like(self, bucket_bytes: Sequence[int]) -> tuple[int, ...]:
        """The cuts that produce a wrapper's bucket sizes, or the nearest cuts if the wrapper orders gradients
        differently."""
        return cut_like(self.job.totals, bucket_bytes)

    def choose(self, default_cuts: Sequence[int], only_caps: bool = False) -> Choice:
        """The best plan; with `only_caps`, the best that a single cap can produce."""
        default, points = self.predict(default_cuts), estimate_caps(self.job, self.costs).points
        least_s = min(point.step_s for point in points)
        # Among equally good plans, choose the one with the fewest buckets: per-bucket cost is our least certain input.
        close = [point for point in points if point.step_s <= least_s * (1 + _WORTH)]
        found = min(close, key=lambda point: len(point.cuts))
        cuts, cap_bytes = found.cuts, found.high_bytes
        if not only_caps:
            free, step = find_best_cuts(self.job, self.costs, (tuple(default_cuts), found.cuts))
            if step.step_s < found.step.step_s * (1 - _WORTH):
                cuts, cap_bytes = free, 0
        best = replace(self.predict(cuts), cap_bytes=cap_bytes)
        wins = sum(here < there for here, there in zip(best.drawn_s, default.drawn_s, strict=True))
        gain = 1 - best.step_s / default.step_s
        is_clear = wins >= 0.9 * len(self.draws) and gain >= max(_WORTH, self.noise)
        return Choice(best, default, is_clear and best.cuts != default.cuts)

    def build_plan(self, gradients: Sequence[Gradient], cuts: Sequence[int], rule: str) -> Plan:
        """The plan for a wrapper, whose gradients are in model definition order."""
        # Parameters that never received a gradient are sent last, in the last bucket.
        order = self.job.order(gradients)
        return plan_by_cuts(gradients, order, [*cuts[:-1], len(order)], rule, self.job.list_rows(gradients))
