"""The predicted scaling curve: calibrated on steps of a few ranks and extrapolated to larger rank counts. Pure."""

import bisect
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.errors import ConfigError, RecordError
from paceline.machine import canonical_backend
from paceline.plan import plan_like_torch
from paceline.predict import curves
from paceline.predict.curves import DRAWS, CostCurve, DerivedCurve, Resample
from paceline.predict.job import Job, build_job_from_profile, draw_jobs
from paceline.predict.networks import (
    ERROR_PER_DOUBLING,
    AssumedFabric,
    Network,
    build_measured_fabric,
    describe_uncertainty,
)
from paceline.predict.predictor import Draw, Prediction, Predictor, calibrate
from paceline.predict.simulate import MODEL_ERROR, Contention, Layout, MachineCosts
from paceline.records import CollectiveRecord, LayerProfileRecord, Record, StepRecord
from paceline.records.samples import find_noise
from paceline.records.steps import find_straggler
from paceline.units import format_ms

# Bounds of the factor on message times, relative to the sweep.
_FACTORS = (1 / 3, 1.0)
# Standard deviation of an extrapolated slowdown: a fraction per doubling of the ranks, plus half of the extrapolated
# growth. The last number applies if only one rank was measured, so that the effect of neighbors, which can only slow it
# down, is unknown.
SLOWDOWN_ERROR, _GROWTH_ERROR, _UNKNOWN_ERROR = 0.03, 0.5, 0.15
# A wrapper's overhead is mostly copies. Ranks share memory bandwidth more than compute, so copies slow down by the
# slowdown of compute to this power.
_COPIES_POWER = 2.0


@functools.lru_cache(maxsize=256)  # each call sums a thousand terms, and a curve has many draws
def estimate_wait(spread: float, count: int, slow: float = 0.0) -> float:
    """The extra time of the slowest of `count` ranks over an average rank, as a fraction of the median, for lognormal
    times. `spread` is the standard deviation of a rank's time relative to the median. If one rank is always slower by
    the fraction `slow`, the extra time is relative to that rank."""
    if not slow >= 0:
        raise ConfigError(f"a slow rank takes longer than the others by 0 % or more, not {slow:.0%}")
    if not 0 <= spread < 1 or count < 1:
        raise ConfigError(f"a spread must be 0 to below 100 %, on at least 1 rank, not {spread:.0%} on {count}")
    if spread < 1e-6 or count == 1:
        return 0.0
    # For a lognormal time of median 1: sd^2 = (e^(s^2) - 1) e^(s^2), solved for s.
    sigma = math.sqrt(math.log((1 + math.sqrt(1 + 4 * spread**2)) / 2))
    reach, logs = statistics.NormalDist().cdf, math.log1p(slow)
    # The mean of the largest is the integral of the probability that it is longer; below e^(-8 s) that is 1.
    least, most = -8 * sigma, logs + 8 * sigma
    step = (most - least) / 1000
    places = (least + (place + 0.5) * step for place in range(1000))  # logarithms of times
    longer = (math.exp(x) * (1 - reach(x / sigma) ** (count - 1) * reach((x - logs) / sigma)) for x in places)
    return max(0.0, math.exp(least) + step * math.fsum(longer) - (1 + slow) * math.exp(sigma**2 / 2))


def estimate_spread(seconds: Sequence[float]) -> float:
    """The relative standard deviation of repeated times, from p10 and p90 so that one outlier cannot dominate it."""
    return find_noise(seconds) / statistics.NormalDist().inv_cdf(0.9)


class ScalingEvidence:
    """The measurements of one wrapper and backend in one cell (mode, size) of a study. Excludes rank counts at which a
    slow rank disturbed the cell. With `up_to`, wrapper steps and sweeps on more ranks are held out. This host has
    enough cores (or devices) for `at_hand` ranks."""

    def __init__(
        self, records: Sequence[Record], wrapper: str, backend: str, cell: tuple[str, int], at_hand: int, up_to: int = 0
    ) -> None:
        every = [record for record in records if isinstance(record, StepRecord) and record.mode]
        steps = [record for record in every if record.role == "job"]
        alone = [record for record in steps if record.world_size == 1]
        mine = [record for record in every if (record.wrapper, record.backend, record.cell) == (wrapper, backend, cell)]
        own = [record for record in mine if record.role == "job" and record.world_size > 1]
        sweeps = [record for record in records if isinstance(record, CollectiveRecord)]
        # One rank's step by number of samples, for strong scaling. The wrapper's buckets by ranks depend on its
        # planner, not on times, so they are never held out.
        self.one_rank_s = {record.global_batch_size: record.timing.median_s for record in alone}
        self.layouts = {record.world_size: record.bucket_bytes for record in own if record.bucket_bytes}
        disturbed = {record.world_size for record in steps if record.cell == cell and find_straggler(record)}
        self.left_out = sorted(disturbed & {record.world_size for record in own})
        own = [record for record in own if record.world_size not in disturbed]
        # Steps without a wrapper or messages: on several ranks they show only how much the ranks slow each other down.
        silent = (r for r in every if r.role == "together" and r.cell == cell and r.world_size not in disturbed)
        self.together = {record.world_size: record for record in silent}
        # The wrapper on one rank, which sends nothing. This measures only its copies and launches.
        self.local = next((record for record in mine if record.role == "local"), None)
        if up_to:
            own = [record for record in own if record.world_size <= up_to]
            # A single rank sends nothing, so keep the smallest sweep for it.
            most = max(up_to, min((record.world_size for record in sweeps), default=0))
            sweeps = [record for record in sweeps if record.world_size <= most]
        # With communication off, steps are the same in every wrapper, so all wrappers contribute.
        self.shared = sorted((_join_no_comm(record, steps) for record in own), key=lambda record: record.world_size)
        found = [*(record for record in alone if record.cell == cell), *self.shared]
        self.ranks = tuple(record.world_size for record in found)
        if self.ranks[:1] != (1,) or len(set(self.ranks)) < len(self.ranks):
            needed = "a scaling curve needs a measurement of one rank, and each rank count only once"
            raise RecordError(f"{needed}, but {cell} has {list(self.ranks)}")
        self.alone, self.backend, self.ranks_at_hand = found[0], backend, at_hand
        self.variant = replace(self.alone, wrapper=wrapper, backend=backend).variant
        for record in (record for record in self.shared if record.no_comm is None):
            lacks = f"{self.variant} on {record.world_size} ranks has no steps with communication off"
            raise RecordError(f"{lacks}, which a scaling curve needs for calibration")
        self.most_on_host = max(at_hand, *self.ranks)
        self.profiles = [record for record in records if isinstance(record, LayerProfileRecord)]
        self.jobs = [build_job_from_profile(profile) for profile in self.profiles]
        # The sweeps in the kind of memory that this wrapper's messages use; None without sweeps.
        memory, wanted = "shared" if wrapper == "paceline" else "ordinary", canonical_backend(backend)
        sweeps = [r for r in sweeps if r.collective == "all_reduce" and canonical_backend(r.backend) == wanted]
        cores = at_hand * self.alone.threads if self.alone.device == "cpu" else 0
        self.fabric = build_measured_fabric(sweeps, backend, memory=memory, cores=cores) if sweeps else None
        # Spread of the ranks' steps without communication, as a standard deviation relative to their median.
        rows = self.shared[-1].phase("no_comm").seconds if self.shared else ((1.0,),)
        self.spread = min(0.5, estimate_spread([time_s / statistics.median(row) for row in rows for time_s in row]))

    def count_samples(self, world_size: int) -> float:
        """Samples per rank and step."""
        mode, size = self.alone.mode, self.alone.cell_size
        if mode == "strong" and world_size > size:
            raise ConfigError(f"{size} samples are too few for {world_size} ranks: each needs at least one")
        return size if mode == "weak" else size / world_size

    def list_buckets(self, world_size: int) -> tuple[int, ...]:
        """The wrapper's buckets for this number of ranks or the nearest known number; torch's default if none are
        known."""
        if self.layouts:
            return self.layouts[curves.find_nearest(self.layouts, world_size)]
        gradients = self.jobs[0].gradients
        return plan_like_torch(gradients, range(len(gradients))).bucket_bytes


def _join_no_comm(record: StepRecord, steps: Sequence[StepRecord]) -> StepRecord:
    """The record with the no-communication steps of all wrappers in its cell on the same ranks."""
    alike = [r for r in steps if (r.job, r.cell, r.world_size) == (record.job, record.cell, record.world_size)]
    found = [r.no_comm for r in alike if r.no_comm is not None and r.no_comm.count == record.timing.count]
    if record.no_comm is None or len(found) < 2:
        return record
    joined = []  # per repetition: median slowest rank over wrappers, other ranks scaled to match
    for number in range(record.timing.count):
        slowest_s = statistics.median(samples.reduced_s[number] for samples in found)
        row = [statistics.median(times) for times in zip(*(samples.seconds[number] for samples in found), strict=True)]
        joined.append(tuple(time_s / max(row) * slowest_s for time_s in row))
    return replace(record, no_comm=replace(record.no_comm, seconds=tuple(joined)))


def interpolate_logs(points: Sequence[tuple[float, float]], place: float) -> float:
    """Linear interpolation on log axes through sorted points. Beyond the ends, the nearest line continues but grows at
    most in proportion to `place`, as it does from a single point."""
    if len(points) == 1:
        return points[0][1] * place / points[0][0]
    right = min(max(1, bisect.bisect_left([x for x, _ in points], place)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    if not x0 <= place <= x1:
        slope = min(1.0, max(0.0, slope))
    from_x, from_y = (x1, y1) if place > x1 else (x0, y0)
    return from_y * math.exp(slope * math.log(place / from_x))


def estimate_slowdown(points: Sequence[tuple[int, float]], world_size: int, shift: float = 0.0) -> float:
    """The slowdown of a rank's compute by other ranks on the host, from (ranks, factor) pairs that start with one rank.
    Interpolates measured points; beyond them, a line through the last two continues, since every additional rank shares
    the same resources. It never falls and never grows faster than the ranks. `shift` is the error of the extrapolated
    part in standard deviations."""
    last, top = points[-1]
    if len(points) == 1:
        return top * math.exp(abs(shift) * _UNKNOWN_ERROR * min(1.0, math.log2(max(1.0, world_size / last))))
    if world_size <= last:
        return interpolate_logs(points, world_size)
    before, low = points[-2]
    line = top + max(0.0, (top - low) / (last - before)) * (world_size - last)
    continued = min(line, top * world_size / last)
    error = SLOWDOWN_ERROR * math.log2(max(1, world_size / last)) + _GROWTH_ERROR * math.log(continued / top)
    return continued * math.exp(shift * error)


def simulate_scaling(
    evidence: ScalingEvidence, ranks: Sequence[int], networks: Sequence[Network] = ()
) -> list[Prediction]:
    """Predict one point per rank count. Beyond the capacity of this host, predict one point per network between such
    hosts."""
    here, alone = evidence.most_on_host, evidence.alone
    if max(ranks) > here and not networks:
        raise ConfigError(f"{max(ranks)} ranks do not fit on this host ({here}): pass a --network between hosts")
    best, draws = curves.draw(functools.partial(_ScalingCurve, evidence, networks))
    points = []
    for world_size in ranks:
        for place in range(len(networks)) if world_size > here else (0,):
            model = Predictor(best.build(world_size, place), [one.build(world_size, place) for one in draws])
            points.append(
                replace(
                    model.predict(),
                    label=evidence.variant,
                    mode=alone.mode,
                    cell_size=alone.cell_size,
                    world_size=world_size,
                    network=networks[place].name if world_size > here else "",
                    doubt=best.describe_doubt(world_size, place),
                )
            )
    return points


class _ScalingCurve:
    """The curve from medians of the selected repetitions; with a random source, assumptions are also drawn.
    `corrections` maps each calibrated rank count to a factor of at most 1 on the message times of the sweep, and to the
    seconds that remain unexplained: copies, waits and the model's own error. `own_s` is the wrapper's overhead on one
    rank, None if not measured. `shift` is the error of messages and copies on other rank counts, in standard
    deviations."""

    def __init__(self, evidence: ScalingEvidence, networks: Sequence[Network], resample: Resample) -> None:
        self.evidence, source, alone = evidence, resample.source, evidence.alone
        self.alone_s = resample.median(alone.timing)
        # A prediction is compared with a measured median, which has its own sampling noise.
        self.noise = resample.noise * curves.median_noise(alone.timing)
        self._model_error = MODEL_ERROR * resample.error
        drift = self.alone_s / alone.timing.median_s
        self.own_s = None
        if evidence.local is not None:
            self.own_s = max(0.0, resample.median(evidence.local.timing) - self.alone_s)
        known = {float(samples): seconds * drift for samples, seconds in evidence.one_rank_s.items()}
        self.one_rank_s = sorted((known | {float(alone.global_batch_size): self.alone_s}).items())
        found = {record.world_size: resample.median(record.phase("no_comm")) for record in evidence.shared}
        silent = {count: resample.median(record.timing) for count, record in evidence.together.items()}
        for count in sorted(set(silent) - set(found)):  # assume the same wrapper overhead as on fewer ranks
            both = [near for near in found if near in silent]
            near = curves.find_nearest(both, count) if both else count
            found[count] = silent[count] * (found[near] / silent[near] if both else 1.0)
        factors = {1: 1.0}
        for count, time_s in sorted(found.items()):
            factors[count] = time_s / interpolate_logs(self.one_rank_s, evidence.count_samples(count))
            if alone.mode == "weak":  # more ranks are never faster, so a smaller factor than the previous one is noise
                factors[count] = max(factors.values())
        self.slowed = list(factors.items())
        # Not drawn at random, because in 40 draws it would correlate by chance with the other errors.
        self.slowed_shift = resample.slowdown
        self.jobs = [
            draw_jobs(profile, job, 1, source.randrange(1 << 30))[0] if source else job
            for profile, job in zip(evidence.profiles, evidence.jobs, strict=True)
        ]
        self.fabric = evidence.fabric.draw(source) if evidence.fabric and source else evidence.fabric
        joined = [AssumedFabric(network, network) for network in networks]
        self.networks = [fabric.draw(source) if source else fabric for fabric in joined]
        self.corrections = {
            count: self._calibrate(count, max(0.0, resample.median(record.timing) - self.compute_s(count)))
            for count, record in zip(evidence.ranks[1:], evidence.shared, strict=True)
        }
        self.shift = resample.shift

    def compute_s(self, world_size: int) -> float:
        """The slowest rank's step without communication; hosts do not slow each other down."""
        evidence, most = self.evidence, self.evidence.most_on_host
        compute_s = interpolate_logs(self.one_rank_s, evidence.count_samples(world_size))
        if world_size == 1:
            return compute_s
        compute_s *= estimate_slowdown(self.slowed, min(world_size, most), self.slowed_shift)
        if world_size > most and evidence.spread:
            here, there = (1 + estimate_wait(evidence.spread, count) for count in (most, world_size))
            compute_s *= there / here
        return compute_s

    def build(self, world_size: int, place: int = 0) -> Draw:
        job, layout = self._build_job(world_size)
        if world_size == 1:
            silent = MachineCosts(DerivedCurve(lambda num_bytes: 0.0))
            return Draw(job, silent, noise=self.noise, local_s=self.alone_s, layout=layout)
        here = min(world_size, self.evidence.most_on_host)
        nearest = curves.find_nearest(self.corrections, world_size) if self.corrections else 1
        factor, extra_s = self.corrections.get(nearest, (1.0, self.own_s or 0.0))
        away = abs(math.log2(here / nearest))
        doubt = math.exp(self.shift * ERROR_PER_DOUBLING * away)
        slowed, before = (estimate_slowdown(self.slowed, count) for count in (here, nearest))
        extra_s *= math.pow(slowed / before, _COPIES_POWER) * doubt
        if not self.corrections and self.own_s is None:
            extra_s += abs(self.shift) * _UNKNOWN_ERROR * job.local_s
        costs = replace(self._build_costs(world_size, place)(factor * doubt), finish_s=extra_s)
        # Corrections from measured steps include the model's own error.
        error = 0.0 if self.corrections else self._model_error
        return Draw(job, costs, error=error, noise=self.noise, local_s=self.alone_s, layout=layout)

    def _build_job(self, world_size: int) -> tuple[Job, Layout]:
        """The profiled job, scaled to the step time without communication, and its buckets."""
        evidence, accumulate = self.evidence, [self.evidence.alone, *self.evidence.shared][-1].accumulate
        samples = evidence.count_samples(world_size) / accumulate
        sizes = [abs(math.log(profile.batch_size / samples)) for profile in evidence.profiles]
        job = self.jobs[sizes.index(min(sizes))].accumulate(accumulate)
        # The optimizer's time does not shrink with the batch.
        compute_s = self.compute_s(world_size)
        slowed = estimate_slowdown(self.slowed, min(world_size, evidence.most_on_host), self.slowed_shift)
        after_s = min(job.after_s * slowed, compute_s / 2)
        job = replace(job.stretch((compute_s - after_s) / job.computing_s), after_s=after_s)
        # A bucket is complete once the profiled job has produced the same fraction of its gradient bytes.
        buckets = evidence.list_buckets(world_size)
        ends = list(itertools.accumulate(buckets))
        places = [bisect.bisect_left(job.totals, end / ends[-1] * job.num_bytes) - 1 for end in ends]
        return job, Layout(buckets, tuple(job.ready_s[min(max(0, number), len(job.sizes) - 1)] for number in places))

    def _build_costs(self, world_size: int, place: int = 0) -> Callable[[float], MachineCosts]:
        """The costs as a function of the factor on message times."""
        curve, servers = self._build_curve(world_size, place), self.fabric.servers if self.fabric else 1
        seconds: dict[float, float] = {size: curve.estimate_s(size) for size in self.evidence.list_buckets(world_size)}
        contention = self.find_contention(world_size).spread_over(curve)

        def scale(factor: float) -> MachineCosts:
            slowed = DerivedCurve(lambda num_bytes: factor * seconds[num_bytes])
            return MachineCosts.assume(slowed, servers, contention)

        return scale

    def _calibrate(self, world_size: int, exposed_s: float) -> tuple[float, float]:
        """The factor on message times that explains the measured exposed communication, and the seconds that remain."""
        job, layout = self._build_job(world_size)
        steps = [(layout, job.local_s + exposed_s)]
        _, [factor], [rest_s] = calibrate(job, self._build_costs(world_size), steps, _FACTORS)
        return factor, rest_s

    def find_contention(self, world_size: int) -> Contention:
        evidence, here = self.evidence, min(world_size, self.evidence.most_on_host)
        # gloo moves the messages of a GPU over its host, where kernels do not slow them down.
        is_slowed, spare_cores = evidence.backend == "nccl", evidence.ranks_at_hand / here - 1
        return Contention.assume(evidence.alone.device, here > 1, spare_cores, is_alone=is_slowed)

    def _build_curve(self, world_size: int, place: int) -> CostCurve:
        most = self.evidence.most_on_host
        here, nodes = min(world_size, most), math.ceil(world_size / most)
        if most == 1:
            return self.networks[place].build_curve(nodes)
        if self.fabric is None:
            raise RecordError(f"no all-reduce on {self.evidence.backend} was measured: run `bench allreduce`")
        inside = self.fabric.build_curve(here)
        return inside if nodes == 1 else curves.join_levels(inside, self.networks[place].build_curve(nodes))

    def describe_doubt(self, world_size: int, place: int) -> str:
        if world_size == 1:
            return ""
        most, doubts = max(self.corrections, default=1), []
        if not self.corrections:
            taken = "" if len(self.slowed) > 1 else ": ranks are assumed not to slow each other down"
            doubts.append(f"no step with communication was measured for calibration{taken}")
        elif world_size > 2 * most:
            doubts.append(f"{world_size:,} ranks are over twice the largest number used for calibration, {most}")
        doubts.append(self._build_curve(world_size, place).explain(max(self.evidence.list_buckets(world_size)))[1])
        return "; ".join(filter(None, doubts))


def describe_assumptions(evidence: ScalingEvidence, networks: Sequence[Network] = ()) -> list[str]:
    curve = _ScalingCurve(evidence, networks, Resample())
    ranks = ", ".join(map(str, evidence.ranks))
    lines = [f"{evidence.variant}: calibrated on steps of {ranks} ranks; larger numbers are simulated"]
    lines[0] += "".join(f"; disturbed steps on {count} ranks are excluded" for count in evidence.left_out)
    if curve.corrections:
        factors = ", ".join(f"{factor:.3f} on {count}" for count, factor in curve.slowed[1:])
        found = ", ".join(
            f"{factor:.2f} on {count}" + (f" and {format_ms(extra_s)} ms" if abs(extra_s) > 1e-6 else "")
            for count, (factor, extra_s) in curve.corrections.items()
        )
        lines += [
            "step without communication, relative to one rank alone (extrapolated linearly from the last two rank "
            f"counts): {factors}",
            f"message times relative to the sweep, plus unexplained time: {found}",
        ]
    else:
        lines.append("no steps on several ranks: compute is assumed not to slow down, and messages to match the sweep")
    lines.append(f"contention: {curve.find_contention(2).basis}")
    if evidence.alone.device == "cpu":
        lines.append(f"{evidence.ranks_at_hand} ranks fit this host")
    if evidence.alone.mode == "strong":
        sizes = ", ".join(f"{samples:g}" for samples, _ in curve.one_rank_s)
        lines.append(f"the step of one rank is interpolated log-linearly between {sizes} samples")
    if curve.fabric:
        lines += curve.fabric.assumptions
    lines += [line for fabric in curve.networks for line in fabric.assumptions]
    if networks and evidence.most_on_host > 1:
        lines += [
            f"more ranks are assumed on several hosts of {evidence.most_on_host} ranks each: messages are reduced "
            "inside each host, then between hosts",
            "hosts do not slow each other down, but all wait for the slowest rank; ranks differ by "
            f"{evidence.spread:.1%} (one standard deviation) without communication",
        ]
    lines.append(
        f"interval: 90 % of {DRAWS} draws from the repetitions of the inputs; standard deviations: compute "
        f"{SLOWDOWN_ERROR:.0%} per doubling of the ranks; messages {describe_uncertainty(networks)}"
    )
    return lines
