"""How things grow with the ranks of one host: what computing loses to its neighbours, and what a message costs.

Continued from a few measured numbers of ranks to more. What a step makes of both is in `scaling`.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.predict.fabrics import MeasuredFabric
from paceline.predict.families import NamedCurve

__all__ = ["SLOWDOWN_ERROR", "ContinuedCurve", "Slowdown", "build_continued_curve", "interpolate_logs", "is_continued"]

# The standard deviation of a continued slow-down for each doubling of the ranks, beside half of what it grew by.
SLOWDOWN_ERROR = 0.03
_GROWTH_ERROR = 0.5
# And of one rank by itself, which says nothing of its neighbours: they only ever slow it.
_UNKNOWN_ERROR = 0.15


def interpolate_logs(points: Sequence[tuple[float, float]], place: float) -> float:
    """Straight lines on log axes through points in order; outside them the last line goes on, rising by at most the
    place itself. One point alone rises by that."""
    if len(points) == 1:
        return points[0][1] * place / points[0][0]
    right = min(max(1, bisect.bisect_left([x for x, _ in points], place)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    slope = math.log(y1 / y0) / math.log(x1 / x0)
    if not x0 <= place <= x1:
        slope = min(1.0, max(0.0, slope))
    from_x, from_y = (x1, y1) if place > x1 else (x0, y0)
    return from_y * math.exp(slope * math.log(place / from_x))


@dataclass(frozen=True)
class Slowdown:
    """How much longer a rank computes beside others: (ranks, factor), one rank first. On measured ranks as measured.

    Beyond them a straight line through the last two: what ranks share, they share with one more each. It never falls,
    and never grows faster than the ranks. `shift` moves what is continued by so many standard deviations.
    """

    points: tuple[tuple[int, float], ...]
    shift: float = 0.0

    def estimate(self, world_size: int) -> float:
        last, top = self.points[-1]
        if len(self.points) == 1:
            alone: float = top * math.exp(abs(self.shift) * _UNKNOWN_ERROR * min(1.0, math.log2(world_size)))
            return alone
        if world_size <= last:
            return interpolate_logs(self.points, world_size)
        before, low = self.points[-2]
        line = top + max(0.0, (top - low) / (last - before)) * (world_size - last)
        continued: float = min(line, top * world_size / last)
        error = SLOWDOWN_ERROR * math.log2(max(1, world_size / last)) + _GROWTH_ERROR * math.log(continued / top)
        return continued * math.exp(self.shift * error)

    def rising(self) -> Slowdown:
        """The same where more ranks are never quicker: a factor below the one before it is noise."""
        factors = itertools.accumulate((factor for _, factor in self.points), max)
        ranks = (count for count, _ in self.points)
        return replace(self, points=tuple(zip(ranks, factors, strict=True)))


@dataclass(frozen=True)
class ContinuedCurve:
    """An all-reduce on more ranks of a host than were measured. Its family lets each rank bring a link of its own, and
    a straight line through the last two sweeps lets none: where the line is more, the mean of both, size by size.

    `plain` and `shifted` are the family's curve as it is known, and as it might be.
    """

    plain: NamedCurve
    shifted: NamedCurve
    near: NamedCurve
    last: NamedCurve
    steps: float

    def estimate_s(self, num_bytes: float) -> float:
        plain_s = self.plain.estimate_s(num_bytes)
        if plain_s <= 0:
            return 0.0
        last_s = self.last.estimate_s(num_bytes)
        line_s = last_s + max(0.0, last_s - self.near.estimate_s(num_bytes)) * self.steps
        return (plain_s + max(plain_s, line_s)) / 2 * self.shifted.estimate_s(num_bytes) / plain_s

    def describe_doubt(self, num_bytes: float) -> str:
        return self.plain.describe_doubt(num_bytes)

    def name_algorithm(self, num_bytes: float) -> str:
        return self.plain.name_algorithm(num_bytes)


def is_continued(fabric: MeasuredFabric) -> bool:
    """Whether ranks share what carries their messages, and two or more sweeps tell how they fare with that."""
    return len(fabric.ranks) > 1 and fabric.fits[0].algorithm in ("gloo", "shared")


def build_continued_curve(fabric: MeasuredFabric, world_size: int) -> NamedCurve:
    """The fabric's own curve; for more ranks of a host than were measured the continued one."""
    shifted = fabric.build_curve(world_size)
    if not is_continued(fabric) or world_size <= fabric.ranks[-1]:
        return shifted
    near, last = fabric.ranks[-2:]
    return ContinuedCurve(
        plain=replace(fabric, shift=0.0).build_curve(world_size),
        shifted=shifted,
        near=fabric.build_curve(near),
        last=fabric.build_curve(last),
        steps=(world_size - last) / (last - near),
    )
