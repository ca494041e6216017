"""Raw timings of repetitions, and the statistics derived from them, which are never stored."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeVar

from paceline.errors import RecordError
from paceline.records.checked import Checked, Seconds, one_of

K = TypeVar("K")
T = TypeVar("T")
# If the noise (`find_noise`) exceeds this, repetitions are unstable and their median is unreliable.
UNSTABLE = 0.25


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile of the values, with linear interpolation."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def find_noise(values: Sequence[float]) -> float:
    """Half of p90 - p10, relative to the median."""
    middle = statistics.median(values)
    return (quantile(values, 0.9) - quantile(values, 0.1)) / 2 / middle if middle else 0.0


# How the times of all ranks are reduced to one time per repetition. A collective ends when its last rank does.
REDUCERS: dict[str, Callable[[Sequence[float]], float]] = {"max": max, "min": min, "mean": statistics.fmean}


@dataclass(frozen=True)
class Samples(Checked):
    """Raw times `seconds[repetition][rank]`, with warm-ups stored separately. `arrivals_s[repetition][rank]` is each
    rank's delay after the first rank to enter the timed call; empty unless all ranks share a clock, that is, run on one
    host."""

    statistic = "median"
    seconds: tuple[tuple[Seconds, ...], ...]
    warmup_seconds: tuple[tuple[Seconds, ...], ...] = ()
    arrivals_s: tuple[tuple[Seconds, ...], ...] = ()
    reducer: Annotated[str, one_of(REDUCERS)] = "max"

    def find_faults(self) -> Iterator[str]:
        rows = (*self.seconds, *self.warmup_seconds, *self.arrivals_s)
        widths = {len(row) for row in rows}
        if not self.seconds or len(widths) != 1 or 0 in widths:
            yield "expected at least one repetition, and the same number of ranks in each"
        if self.arrivals_s and len(self.arrivals_s) != len(self.seconds):
            yield f"{len(self.arrivals_s)} arrivals for {len(self.seconds)} repetitions"

    @cached_property
    def reduced_s(self) -> tuple[float, ...]:
        return tuple(float(REDUCERS[self.reducer](row)) for row in self.seconds)

    @property
    def count(self) -> int:
        return len(self.seconds)

    @property
    def num_ranks(self) -> int:
        return len(self.seconds[0])

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of repetitions and ranks."""
        return self.count, self.num_ranks

    @cached_property
    def median_s(self) -> float:
        return statistics.median(self.reduced_s)

    @property
    def center_s(self) -> float:
        return self.median_s

    @property
    def p10_s(self) -> float:
        return quantile(self.reduced_s, 0.1)

    @property
    def p90_s(self) -> float:
        return quantile(self.reduced_s, 0.9)

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.reduced_s)

    @property
    def stdev_s(self) -> float:
        return statistics.stdev(self.reduced_s) if self.count > 1 else 0.0

    @property
    def min_s(self) -> float:
        return min(self.reduced_s)

    @property
    def max_s(self) -> float:
        return max(self.reduced_s)

    @property
    def noise(self) -> float:
        return find_noise(self.reduced_s)

    @property
    def drift(self) -> float:
        """Median of the second half divided by that of the first, minus 1: far from 0 if times have not stabilized."""
        half = self.count // 2
        if half < 2:
            return 0.0
        first, second = statistics.median(self.reduced_s[:half]), statistics.median(self.reduced_s[-half:])
        return second / first - 1 if first else 0.0

    @property
    def skew_s(self) -> float | None:
        """Median delay between the first and the last rank to enter the call; None without a common clock."""
        return statistics.median(max(row) for row in self.arrivals_s) if self.arrivals_s else None

    @cached_property
    def from_last_arrival_s(self) -> tuple[float, ...] | None:
        """Per repetition, from the arrival of the last rank until the last is done. None without a common clock."""
        if not self.arrivals_s:
            return None
        return tuple(
            max(a + s for a, s in zip(arrivals, seconds, strict=True)) - max(arrivals)
            for arrivals, seconds in zip(self.arrivals_s, self.seconds, strict=True)
        )


@dataclass(frozen=True)
class Summary(Checked):
    """Statistics without raw samples, from a row of an imported table."""

    p10_s = p90_s = skew_s = None
    mean_s: Seconds | None = None
    stdev_s: Seconds | None = None
    median_s: Seconds | None = None
    min_s: Seconds | None = None
    max_s: Seconds | None = None
    count: int | None = None

    def find_faults(self) -> Iterator[str]:
        if self.mean_s is None and self.median_s is None:
            yield "expected a mean or a median"

    @property
    def center_s(self) -> float:
        center = self.mean_s if self.median_s is None else self.median_s
        assert center is not None  # `find_faults` refuses a summary with neither
        return center

    @property
    def statistic(self) -> str:
        return "mean" if self.median_s is None else "median"


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios; `noise` is the half-width of its 95 % interval, None for one repetition."""

    value: float
    noise: float | None

    @property
    def is_clear(self) -> bool:
        return self.noise is not None and abs(self.value - 1) > self.noise


def compare_medians(mine: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio of the medians of two series that were not interleaved; intervals as in `compare_times`."""
    value, parts = statistics.median(mine) / (statistics.median(theirs) or math.nan), []
    for times in (sorted(mine), sorted(theirs)):
        n, middle = len(times), statistics.median(times)
        low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
        parts.append(max(times[n - 1 - low] - middle, middle - times[low]) / (middle or math.nan))
    return Ratio(value, None if min(len(mine), len(theirs)) < 2 else value * math.hypot(*parts))


def compare_times(mine: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio of two interleaved series, repetition by repetition. The interval of the median comes from order
    statistics, which assume nothing about the distribution: the number of values below the true median is binomial(n,
    1/2), within n/2 +- 0.98 sqrt(n) in 95 % of cases. Below 6 values the interval spans all of them and covers less."""
    ratios = sorted(here / there for here, there in zip(mine, theirs, strict=True) if there > 0)
    if not ratios:
        raise RecordError("all times of the reference are 0: there is nothing to compare with")
    value, n = statistics.median(ratios), len(ratios)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return Ratio(value, max(ratios[n - 1 - low] - value, value - ratios[low]) if n > 1 else None)
