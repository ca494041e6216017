"""How long the slowest of many ranks keeps the others waiting. The spread itself is measured elsewhere.

A collective starts when the last rank arrives, so with more ranks the same spread costs more.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence

from paceline.errors import ConfigError
from paceline.records.samples import quantile

__all__ = ["estimate_maximum", "estimate_spread", "estimate_wait"]

_STRATA = 1000
# p90 - p10 of a normal distribution, in standard deviations.
_P10_TO_P90 = 2 * statistics.NormalDist().inv_cdf(0.9)


def estimate_maximum(inverse: Callable[[float], float], count: int) -> float:
    """The expected largest of `count` independent values whose inverse distribution function is given.

    F^-1(U^(1/count)) has the distribution of the largest. U goes through the middles of equal strata: the same answer
    every time, and no noise.
    """
    if count < 1:
        raise ConfigError(f"the largest of {count} values: at least 1 is needed")
    moments = ((place + 0.5) / _STRATA for place in range(_STRATA))
    return math.fsum(inverse(math.exp(math.log(u) / count)) for u in moments) / _STRATA


@functools.lru_cache(maxsize=256)  # a thousand strata, and a curve is drawn many times
def estimate_wait(spread: float, count: int) -> float:
    """How much longer than a rank the slowest of `count` takes, as a share of the median: lognormal times.

    `spread` is the standard deviation of a rank's time relative to that median.
    """
    if not 0 <= spread < 1:
        raise ConfigError(f"a spread of {spread:.0%} between ranks: from 0 to below 100 %")
    if spread == 0 or count == 1:
        return 0.0
    # For a lognormal time of median 1: sd^2 = (e^(s^2) - 1) e^(s^2), solved for s.
    sigma = math.sqrt(math.log((1 + math.sqrt(1 + 4 * spread**2)) / 2))
    normal = statistics.NormalDist()

    def inverse(p: float) -> float:
        return math.exp(sigma * normal.inv_cdf(p))

    return estimate_maximum(inverse, count) - estimate_maximum(inverse, 1)


def estimate_spread(seconds: Sequence[float]) -> float:
    """The relative standard deviation of repeated times, from p10 and p90: one outlier does not make it."""
    return (quantile(seconds, 0.9) - quantile(seconds, 0.1)) / _P10_TO_P90 / statistics.median(seconds)
