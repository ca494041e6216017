"""What an all-reduce costs as a function of its size: the measured curve, and what is known of it beyond.

The line through the points, for people, is in `costs`; curves for other numbers of ranks are in `families`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from paceline.errors import MeasurementError
from paceline.predict.costs import AlphaBeta
from paceline.units import format_bytes

__all__ = ["Curve", "LineCurve", "MeasuredCurve", "fit_curve"]

# Beyond this many times the largest measured size an estimate is a guess.
_REACH = 2.0


class Curve(Protocol):
    """Seconds of an all-reduce of so many bytes, and whether that is known or guessed."""

    def estimate_s(self, num_bytes: float) -> float: ...

    def describe_doubt(self, num_bytes: float) -> str:
        """Why an estimate of this size is not to be trusted; empty where it is."""
        ...


@dataclass(frozen=True)
class LineCurve:
    """`alpha + x / beta`, as a curve: for closed forms and for networks that nobody has measured."""

    line: AlphaBeta

    def estimate_s(self, num_bytes: float) -> float:
        return self.line.estimate_s(num_bytes)

    def describe_doubt(self, num_bytes: float) -> str:
        return ""


@dataclass(frozen=True)
class MeasuredCurve:
    """Straight lines on log axes between measured points: curves are neither convex nor monotone, and stay so.

    Below the smallest size the time is that of the smallest; above the largest it grows with the bandwidth of the
    last two points. `spread` is the median of (p90 - p10) / median over the points, where that is known.
    """

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: float = 0.0
    _logs: tuple[tuple[float, float], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1:
            raise MeasurementError(f"a curve needs two or more sizes, in order and once each, not {self.sizes}")
        if len(self.seconds) != len(self.sizes) or not all(0 < s < math.inf for s in self.seconds):
            raise MeasurementError("a curve needs a positive time for each size")
        logs = tuple((math.log(x), math.log(t)) for x, t in zip(self.sizes, self.seconds, strict=True))
        object.__setattr__(self, "_logs", logs)

    def estimate_s(self, num_bytes: float) -> float:
        if num_bytes <= 0:
            return 0.0
        if num_bytes <= self.sizes[0]:
            return self.seconds[0]
        if num_bytes >= self.sizes[-1]:
            return self.seconds[-1] + (num_bytes - self.sizes[-1]) * self._last_slope()
        right = bisect.bisect_right(self.sizes, num_bytes)
        (x0, t0), (x1, t1) = self._logs[right - 1], self._logs[right]
        return math.exp(t0 + (t1 - t0) * (math.log(num_bytes) - x0) / (x1 - x0))

    def _last_slope(self) -> float:
        """Seconds per byte beyond the largest size: never less than a point's own average would leave, nor negative."""
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        return slope if slope > 0 else self.seconds[-1] / self.sizes[-1]

    def describe_doubt(self, num_bytes: float) -> str:
        if num_bytes > _REACH * self.sizes[-1]:
            return (
                f"{format_bytes(num_bytes)} is beyond twice the largest measured size, {format_bytes(self.sizes[-1])}"
            )
        return ""

    def scaled(self, factors: Sequence[float]) -> MeasuredCurve:
        """The curve with each point's time multiplied: what a bootstrap draws."""
        times = tuple(t * f for t, f in zip(self.seconds, factors, strict=True))
        return MeasuredCurve(self.sizes, times, self.spread)


def fit_curve(points: Iterable[tuple[int, float]], reduce: Callable[[Sequence[float]], float] = min) -> MeasuredCurve:
    """The curve through (bytes, seconds); where a size has several times, `reduce` makes one of them."""
    by_size: dict[int, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    sizes = sorted(by_size)
    return MeasuredCurve(tuple(sizes), tuple(float(reduce(by_size[size])) for size in sizes))
