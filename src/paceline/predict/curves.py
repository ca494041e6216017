"""The cost of an all-reduce as a function of its bytes: an interface with its implementations, a fit, and a bootstrap.

A `CostCurve` applies to a fixed number of ranks; `networks` chooses the curve for a network and a number of ranks.
"""

import bisect
import contextlib
import functools
import itertools
import math
import random
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.errors import ConfigError, MeasurementError, suggest
from paceline.records import CollectiveRecord
from paceline.records.samples import Samples, Summary, group_by
from paceline.units import MIB, format_bytes

T = TypeVar("T")

ALGORITHMS = ("auto", "ring", "tree", "two-level", "gloo", "shared")
# Beyond this multiple of the measured bytes or ranks, an estimate is a guess.
_REACH = 2
# Lower bound on the time of a message, for tables that begin with large messages.
_LEAST_S = 10e-6
# Number of draws of the inputs for an interval.
DRAWS = 40
_SEED = 17
# Number of errors per draw that repetitions cannot show, and number of random orders tried for each error.
_NUM_ERRORS, _TRIES = 5, 200
# No single host has more ranks than this.
_MOST_ON_ONE_HOST = 512


class CostCurve(ABC):
    """All-reduce time in seconds by size in bytes, and whether the estimate can be trusted."""

    @abstractmethod
    def estimate_s(self, num_bytes: float) -> float:
        """Seconds for a message of this size; 0 for an empty one."""

    def estimate_all(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Seconds for each of many sizes."""
        return np.array([self.estimate_s(size) for size in sizes])

    def explain(self, num_bytes: float) -> tuple[str, str]:
        """The algorithm for a message of this size, and a reason why its time is uncertain (empty if there is none)."""
        return "measured", ""


@dataclass
class Resample:
    """The repetitions that a fit uses: all of them or, given a random source, a bootstrap sample with replacement.
    Series of equal length were interleaved, so they share one draw: a slow spell affects all of them. An unstable
    series (`UNSTABLE`) draws a single repetition: more samples do not average out a busy machine. Errors that
    repetitions cannot show are in standard deviations, and 0 if nothing is drawn: those of the model (`error`), the
    measured median (`noise`), the network (`shift`), the slowdown by neighboring ranks, and a message's latency."""

    source: random.Random | None = None
    is_unstable: bool = False
    error: float = 0.0
    noise: float = 0.0
    shift: float = 0.0
    slowdown: float = 0.0
    latency: float = 0.0
    _drawn: dict[int, Sequence[int]] = field(default_factory=dict, init=False, repr=False)

    def take(self, seconds: Sequence[float]) -> tuple[float, ...]:
        count = len(seconds)
        if count not in self._drawn:
            drawn = 1 if self.is_unstable else count
            self._drawn[count] = self.source.choices(range(count), k=drawn) if self.source else range(count)
        return tuple(seconds[number] for number in self._drawn[count])

    def median(self, samples: Samples | Summary) -> float:
        if not isinstance(samples, Samples):
            raise MeasurementError("a prediction needs raw samples, but this is a summary")
        return statistics.median(self.take(samples.reduced_s))


def median_noise(timing: Samples) -> float:
    """The relative standard deviation of the median of repeated times: 1.25 times that of their mean."""
    return 1.25 * timing.stdev_s / math.sqrt(timing.count) / timing.median_s


def find_nearest(counts: Iterable[int], world_size: int) -> int:
    """The nearest count by ratio; on a tie the larger one, since large worlds say more about other large worlds."""
    return min(counts, key=lambda count: (abs(math.log(count / world_size)), -count))


@functools.lru_cache(maxsize=8)
def _draw_errors(count: int) -> list[tuple[float, ...]]:
    """For each draw, its errors in standard deviations. Each error takes equally spaced quantiles of a normal
    distribution, because a few random numbers would hardly reach its tails. Of many random orders, it uses the one that
    correlates least with the other errors: correlation would distort the spread of sums and differences."""
    source = random.Random(_SEED)
    quantiles = [statistics.NormalDist().inv_cdf((place + 0.5) / count) for place in range(count)]
    columns: list[list[float]] = []

    def correlate(column: Sequence[float]) -> float:  # all columns have a mean of 0 and the same sum of squares
        return float(np.abs(np.array(columns) @ column).max()) if columns else 0.0

    for _ in range(_NUM_ERRORS):
        tries = [source.sample(quantiles, count) for _ in range(_TRIES if count > 2 else 1)]
        columns.append(tries[0] if len(tries) == 1 else min(tries, key=correlate))
    return list(zip(*columns, strict=True))


def draw(build: Callable[[Resample], T], count: int = DRAWS) -> tuple[T, list[T]]:
    """The objects built from the best estimates of the inputs, and from draws of them."""
    source = random.Random(_SEED + 1)
    return build(Resample()), [build(Resample(source, False, *errors)) for errors in _draw_errors(count)]


def find_interval(value: float, draws: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval: from p5 to p95 of the draws, extended to include the value itself."""
    if not draws:
        return value, value
    low, high = np.quantile(draws, (0.05, 0.95), method="hazen").tolist()  # draws are midpoints of equal strata
    return min(value, low), max(value, high)


@dataclass(frozen=True)
class MeasuredCurve(CostCurve):
    """Linear interpolation on log axes between measured points, which need be neither convex nor monotone. Below the
    smallest size, times follow the first two points, if they rise; above the largest, the bandwidth of the last two."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise MeasurementError(f"a curve needs two or more distinct sizes in ascending order, not {self.sizes}")
        if len(self.seconds) != len(self.sizes) or not all(0 < s < math.inf for s in self.seconds):
            raise MeasurementError("a curve needs a positive time for each size")

    @functools.cached_property
    def _logs(self) -> tuple[tuple[float, float], ...]:
        return tuple((math.log(x), math.log(t)) for x, t in zip(self.sizes, self.seconds, strict=True))

    @functools.cached_property
    def _slope_below(self) -> float:
        """Seconds per byte below the smallest size; 0 if the second time is not longer."""
        slope = (self.seconds[1] - self.seconds[0]) / (self.sizes[1] - self.sizes[0])
        return max(0.0, min(slope, (self.seconds[0] - _LEAST_S) / self.sizes[0]))

    def estimate_s(self, num_bytes: float) -> float:
        if num_bytes <= 0:
            return 0.0
        if num_bytes <= self.sizes[0]:
            return self.seconds[0] - self._slope_below * (self.sizes[0] - num_bytes)
        if num_bytes >= self.sizes[-1]:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
            # If times fall toward the largest size, use its average rate.
            slope = slope if slope > 0 else self.seconds[-1] / self.sizes[-1]
            return self.seconds[-1] + (num_bytes - self.sizes[-1]) * slope
        right = bisect.bisect_right(self.sizes, num_bytes)
        (x0, t0), (x1, t1) = self._logs[right - 1], self._logs[right]
        return math.exp(t0 + (t1 - t0) * (math.log(num_bytes) - x0) / (x1 - x0))

    def estimate_all(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        known_sizes, known_s = np.array(self._logs).T
        last_s = np.array([self.estimate_s(size) for size in sizes[sizes >= self.sizes[-1]]])
        found = np.exp(np.interp(np.log(np.maximum(sizes, self.sizes[0])), known_sizes, known_s))
        found -= self._slope_below * np.maximum(0.0, self.sizes[0] - sizes)
        found[sizes >= self.sizes[-1]] = last_s
        return np.where(sizes > 0, found, 0.0)

    def explain(self, num_bytes: float) -> tuple[str, str]:
        return "measured", _warn_about_size(num_bytes, self.sizes[-1], self.sizes[0])


def _warn_about_size(num_bytes: float, most_bytes: int, least_bytes: int = 0) -> str:
    size = format_bytes(num_bytes)
    if num_bytes > _REACH * most_bytes:
        return f"{size} is more than twice the largest measured size, {format_bytes(most_bytes)}"
    if 0 < _REACH * num_bytes < least_bytes:
        return f"{size} is extrapolated: it is less than half the smallest measured size, {format_bytes(least_bytes)}"
    return ""


def fit_curve(points: Iterable[tuple[int, float]]) -> MeasuredCurve:
    """The curve through (bytes, seconds); uses the shortest time for each size."""
    by_size: dict[int, float] = {}
    for size, seconds in points:
        by_size[size] = min(float(seconds), by_size.get(size, math.inf))
    sizes = tuple(sorted(by_size))
    return MeasuredCurve(sizes, tuple(by_size[size] for size in sizes))


def smooth_curve(points: Iterable[tuple[int, float]]) -> MeasuredCurve:
    """A line fitted to (bytes, seconds), as a curve through the fitted times at these sizes. Otherwise the noise of
    single points would determine the bucket size. If times do not grow, the curve uses the points themselves."""
    curve = fit_curve(points)
    with contextlib.suppress(MeasurementError):
        line = fit_line(zip(curve.sizes, curve.seconds, strict=True))
        return MeasuredCurve(curve.sizes, tuple(line.estimate_s(size) for size in curve.sizes))
    return curve


# The work of an all-reduce of x bytes on p ranks: sequential latencies, and bytes through the narrowest link.
FAMILIES: dict[str, Callable[[float, int], tuple[float, float]]] = {
    "line": lambda x, p: (1, x),
    # p-1 reduce steps and p-1 gather steps, each with 1/p of the bytes.
    "ring": lambda x, p: (2 * (p - 1), 2 * (p - 1) / p * x),
    # Two binary trees with half of the bytes each, up and down again. A rank is a leaf in one tree and a branch in the
    # other: it sends 1/2 + 1/2 up and 2 x 1/2 down. With two ranks, each is the root of one tree and has one child: 1/2
    # up and 1/2 down.
    "tree": lambda x, p: (2 * math.ceil(math.log2(p)), x if p == 2 else 2 * x),
    # A ring whose chunks are sent in segments of at most 1 MiB, at least two per chunk and two in flight. One extra
    # chunk accounts for the start.
    "gloo": lambda x, p: (p * max(2, math.ceil(x / p / MIB)), 2 * (p - 1) / p * x),
    # Every rank reads 1/p of all p vectors and writes the result to all: two passes per rank over shared memory, part
    # of which hits the rank's own caches for any p. A barrier costs two latencies plus one per rank.
    "shared": lambda x, p: (p + 2, (1.5 * p + 1) * x),
}


def check_algorithm(name: str) -> None:
    if name not in ALGORITHMS:
        raise ConfigError(f"unknown algorithm {name!r}: {suggest(name, ALGORITHMS)}use one of {', '.join(ALGORITHMS)}")


@dataclass(frozen=True)
class FamilyCurve(CostCurve):
    """`latencies * alpha_s + bytes / bytes_per_s` with the work of one algorithm on `world_size` ranks, plus
    `overhead_s`. `ramp` adds an interaction of the two terms: 1 is a pipeline with the best number of chunks. If the
    two parameters were fitted, `residuals` are (fitted - measured) / measured in the order of the points, which range
    from `min_bytes` to `max_bytes` on up to `max_ranks` ranks; these are 0 if the parameters are assumed. `replace(fit,
    world_size=n)` applies the same fit to other rank counts."""

    algorithm: str
    world_size: int
    alpha_s: float
    bytes_per_s: float
    min_bytes: int = 0
    max_bytes: int = 0
    max_ranks: int = 0
    residuals: tuple[float, ...] = ()
    place: str = ""
    overhead_s: float = 0.0
    ramp: float = 0.0

    def __post_init__(self) -> None:
        if self.algorithm == "shared" and self.world_size > _MOST_ON_ONE_HOST:
            found = f"{self.world_size:,} ranks do not fit in the memory of one host; the limit is {_MOST_ON_ONE_HOST}"
            raise ConfigError(f"{found}: use fewer --ranks, or name a --network")

    @property
    def error(self) -> float:
        return math.sqrt(math.fsum(r * r for r in self.residuals) / len(self.residuals))

    @property
    def max_rel_residual(self) -> float:
        return max(map(abs, self.residuals), default=0.0)

    def estimate_s(self, num_bytes: float) -> float:
        if self.world_size == 1 or num_bytes <= 0:
            return 0.0
        latencies, moved_bytes = FAMILIES[self.algorithm](num_bytes, self.world_size)
        waiting_s, moving_s = self.overhead_s + latencies * self.alpha_s, moved_bytes / self.bytes_per_s
        return waiting_s + moving_s + 2 * self.ramp * math.sqrt(waiting_s * moving_s)

    def explain(self, num_bytes: float) -> tuple[str, str]:
        doubts = []
        if 0 < _REACH * self.max_ranks < self.world_size:
            doubts.append(f"{self.world_size:,} ranks are over twice the largest measured number, {self.max_ranks}")
        if self.max_bytes:
            doubts.append(_warn_about_size(num_bytes, self.max_bytes))
        return f"{self.algorithm} {self.place}".strip(), "; ".join(filter(None, doubts))


def fit_family(points: Iterable[tuple[int, int, float]], algorithm: str, launch: float = 0.0) -> FamilyCurve:
    """Fit `t = latencies * alpha + bytes / rate`, with alpha >= 0, to (bytes, ranks, seconds) points of all rank counts
    above 1 at once. Minimizes the squared *relative* errors: with absolute ones the largest message would dominate the
    fit. `launch` is the fraction of the latencies on the fewest ranks that does not grow with the ranks."""
    points = [point for point in points if point[1] > 1]
    work = [FAMILIES[algorithm](num_bytes, ranks) for num_bytes, ranks, _ in points]
    if len(set(work)) < 2:
        raise MeasurementError(f"a fit needs two or more sizes on two or more ranks, but got {len(points)} points")
    if any(not 0 < seconds < math.inf for _, _, seconds in points):
        raise MeasurementError("relative errors cannot be fitted to a time that is 0 or infinite")
    # Divide columns by the measured times, and scale them to about 1 to keep the sums well conditioned.
    scale = max(moved_bytes for _, moved_bytes in work)
    u = [latencies / seconds for (latencies, _), (_, _, seconds) in zip(work, points, strict=True)]
    v = [moved_bytes / scale / seconds for (_, moved_bytes), (_, _, seconds) in zip(work, points, strict=True)]
    uu, vv = math.fsum(a * a for a in u), math.fsum(b * b for b in v)
    uv, u1, v1 = math.fsum(a * b for a, b in zip(u, v, strict=True)), math.fsum(u), math.fsum(v)
    determinant = uu * vv - uv * uv
    alpha_s = (u1 * vv - v1 * uv) / determinant if determinant > 1e-12 * uu * vv else 0.0
    slope = (v1 - alpha_s * uv) / vv
    if alpha_s < 0:  # noise on nearly proportional data: use the best line through the origin
        alpha_s, slope = 0.0, v1 / vv
    if slope <= 1e-9 * (alpha_s + slope):  # for equal times, rounding leaves a tiny slope of either sign
        raise MeasurementError("the times do not grow with the size, so there is no bandwidth: measure larger messages")
    sizes, ranks = [point[0] for point in points], max(point[1] for point in points)
    residuals = tuple(alpha_s * a + slope * b - 1 for a, b in zip(u, v, strict=True))
    launch_s = launch * alpha_s * FAMILIES[algorithm](min(sizes), min(point[1] for point in points))[0]
    fit = FamilyCurve(algorithm, ranks, alpha_s, scale / slope, min(sizes), max(sizes), ranks, residuals)
    return replace(fit, alpha_s=(1 - launch) * alpha_s, overhead_s=launch_s)


def fit_line(points: Iterable[tuple[int, float]]) -> FamilyCurve:
    """A line through (bytes, seconds), for display only."""
    return fit_family([(size, 2, seconds) for size, seconds in sorted(points)], "line")


def fit_collectives(records: Sequence[CollectiveRecord]) -> list[tuple[CollectiveRecord, FamilyCurve]]:
    """Fit one line per curve (collective, backend, device, ranks, dtype, op); one of its records provides the labels.
    Omits curves with a single size or rank, and curves whose times do not grow."""
    fits = []
    for curve in group_by((record for record in records if record.world_size > 1), lambda record: record.key).values():
        with contextlib.suppress(MeasurementError):
            fits.append((curve[0], fit_line((record.num_bytes, record.time_s) for record in curve)))
    return fits


@dataclass(frozen=True)
class DerivedCurve(CostCurve):
    """A curve defined by two functions, usually of other curves."""

    seconds: Callable[[float], float]
    explained: Callable[[float], tuple[str, str]] = lambda num_bytes: ("measured", "")

    def estimate_s(self, num_bytes: float) -> float:
        return self.seconds(num_bytes)

    def explain(self, num_bytes: float) -> tuple[str, str]:
        return self.explained(num_bytes)


def multiply_curve(curve: CostCurve, factor: Callable[[float], float], doubt: str = "") -> CostCurve:
    """The curve multiplied by a factor that depends on the message size. `doubt` precedes the curve's own reason for
    uncertainty."""

    def explain(num_bytes: float) -> tuple[str, str]:
        algorithm, own = curve.explain(num_bytes)
        return algorithm, "; ".join(filter(None, (doubt, own)))

    return DerivedCurve(lambda num_bytes: curve.estimate_s(num_bytes) * factor(num_bytes), explain)


def interpolate_sizes(values: Sequence[tuple[int, float]], num_bytes: float) -> float:
    """Linear over the logarithm of the size; constant beyond the ends."""
    for (size, value), (next_size, next_value) in itertools.pairwise(values):
        if num_bytes <= next_size:
            share = max(0.0, math.log(max(num_bytes, 1) / size) / math.log(next_size / size))
            return value + (next_value - value) * share
    return values[-1][1]


def join_levels(inside: CostCurve, between: CostCurve) -> CostCurve:
    """Reduce-scatter inside each node, all-reduce between the nodes, and all-gather inside each node. The two inner
    phases together cost as much as a ring. Between nodes, each of the m ranks of a node sends 1/m over the node's
    shared link, so all bytes pass through it; `between` is a curve over nodes. The latencies add, while transfers
    overlap in part: the root of their squares lies between the longer one (a full pipeline) and their sum."""

    def estimate_s(num_bytes: float) -> float:
        whole_s = [curve.estimate_s(num_bytes) for curve in (inside, between)]
        latency_s = [min(own_s, curve.estimate_s(1)) for own_s, curve in zip(whole_s, (inside, between), strict=True)]
        return sum(latency_s) + math.dist(whole_s, latency_s)

    def explain(num_bytes: float) -> tuple[str, str]:
        algorithm, doubt = between.explain(num_bytes)
        return f"two-level ({algorithm})", inside.explain(num_bytes)[1] or doubt

    return DerivedCurve(estimate_s, explain)


def choose_best(curves: Sequence[CostCurve]) -> CostCurve:
    if len(curves) == 1:
        return curves[0]
    return DerivedCurve(
        lambda num_bytes: min(curve.estimate_s(num_bytes) for curve in curves),
        lambda num_bytes: min(curves, key=lambda curve: curve.estimate_s(num_bytes)).explain(num_bytes),
    )


def scale_curve(
    measured: MeasuredCurve, family: FamilyCurve, measured_on: int, world_size: int, power: float = 1.0
) -> CostCurve:
    """A curve that was measured on one number of ranks, scaled to another by a power of the ratio of the family's
    times. The scaling preserves the shape of the curve."""
    there, here = (replace(family, world_size=count) for count in (measured_on, world_size))

    def estimate_s(num_bytes: float) -> float:
        if num_bytes <= 0 or world_size == 1:
            return 0.0
        grown = math.pow(here.estimate_s(num_bytes) / there.estimate_s(num_bytes), power)
        return measured.estimate_s(num_bytes) * grown

    def explain(num_bytes: float) -> tuple[str, str]:
        is_own = world_size == measured_on
        name = "measured" if is_own else f"scaled from {measured_on} ranks as {family.algorithm}"
        # The size limit is that of this curve: the fit may include larger sizes on other ranks.
        return name, "; ".join(filter(None, (here.explain(0)[1], measured.explain(num_bytes)[1])))

    return DerivedCurve(estimate_s, explain)
