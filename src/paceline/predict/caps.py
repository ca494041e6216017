"""Backward time as a function of the bucket size: the whole curve, its plateau, and what would move it.

The answer for a person is a range of sizes that cost the same, not one number. How it prints is in `report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.predict.costs import AlphaBeta, fit_alpha_beta
from paceline.predict.curves import MeasuredCurve
from paceline.predict.search import enumerate_caps, simulate_cuts
from paceline.predict.simulate import Backward, MachineCosts

__all__ = ["CapCurve", "CapPoint", "Change", "estimate_caps", "estimate_sensitivity"]

# Within this share of the best, sizes are one plateau: no measurement tells them apart.
PLATEAU = 0.01
_FACTORS = (0.1, 0.5, 2.0, 10.0)


@dataclass(frozen=True)
class CapPoint:
    """All caps from `low_bytes` to `high_bytes` make the same buckets, and take the same time."""

    low_bytes: int
    high_bytes: int
    num_buckets: int
    backward_s: float
    exposed_s: float


@dataclass(frozen=True)
class CapCurve:
    """Every distinct partition in order of its caps."""

    points: tuple[CapPoint, ...]
    local_s: float
    num_bytes: int

    @property
    def best(self) -> CapPoint:
        return min(self.points, key=lambda point: point.backward_s)

    @property
    def plateau(self) -> tuple[int, int]:
        """The caps around the best one whose times are within 1 % of it: the answer to "which bucket size"."""
        limit_s = self.best.backward_s * (1 + PLATEAU)
        first = last = self.points.index(self.best)
        while first > 0 and self.points[first - 1].backward_s <= limit_s:
            first -= 1
        while last + 1 < len(self.points) and self.points[last + 1].backward_s <= limit_s:
            last += 1
        return self.points[first].low_bytes, self.points[last].high_bytes

    def at(self, cap_bytes: int) -> CapPoint:
        """The point that a cap falls into; above the largest, one bucket."""
        return next((point for point in self.points if cap_bytes <= point.high_bytes), self.points[-1])


def estimate_caps(sizes: Sequence[int], ready_s: Sequence[float], backward: Backward, costs: MachineCosts) -> CapCurve:
    """Simulate every partition that one cap can make of gradients in ready order."""
    points = []
    for interval in enumerate_caps(sizes):
        step = simulate_cuts(sizes, ready_s, interval.cuts, backward, costs)
        points.append(
            CapPoint(interval.low_bytes, interval.high_bytes, len(interval.cuts), step.over_s, step.exposed_s)
        )
    return CapCurve(tuple(points), backward.total_s, sum(sizes))


@dataclass(frozen=True)
class Change:
    """The curve with one input multiplied by a factor; `what` is `B`, `alpha` or `beta`."""

    what: str
    factor: float
    curve: CapCurve


def estimate_sensitivity(
    sizes: Sequence[int], ready_s: Sequence[float], backward: Backward, costs: MachineCosts, curve: MeasuredCurve
) -> list[Change]:
    """How the best bucket size moves with the bytes of the model, the latency and the bandwidth, one at a time.

    Latency and bandwidth are those of the line through the measured curve; its residuals stay as they are.
    """
    line = fit_alpha_beta(list(zip(curve.sizes, curve.seconds, strict=True)))
    changes = []
    for factor in _FACTORS:
        larger = [max(1, round(size * factor)) for size in sizes]
        changes.append(Change("B", factor, estimate_caps(larger, ready_s, backward, costs)))
    for what in ("alpha", "beta"):
        for factor in _FACTORS:
            changed = replace(costs, curve=_change(curve, line, what, factor))
            changes.append(Change(what, factor, estimate_caps(sizes, ready_s, backward, changed)))
    return changes


def _change(curve: MeasuredCurve, line: AlphaBeta, what: str, factor: float) -> MeasuredCurve:
    """Each point's time with its share of latency, or of transfer, as the line divides it, multiplied."""
    seconds = []
    for size, measured_s in zip(curve.sizes, curve.seconds, strict=True):
        share = line.alpha_s / line.estimate_s(size)
        latency_s, transfer_s = measured_s * share, measured_s * (1 - share)
        seconds.append(latency_s * factor + transfer_s if what == "alpha" else latency_s + transfer_s / factor)
    return MeasuredCurve(curve.sizes, tuple(seconds), curve.spread)
