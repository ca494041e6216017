"""What a collective costs as a function of its size, fitted from records.

The straight line `alpha + x / beta` is the summary for people; how it is printed does not belong here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import MeasurementError
from paceline.records import CollectiveRecord

__all__ = ["AlphaBeta", "fit_alpha_beta", "fit_collectives"]


@dataclass(frozen=True)
class AlphaBeta:
    """`T(x) = alpha_s + x / beta_bytes_per_s`, valid from `min_bytes` to `max_bytes`, where it was fitted.

    `residuals` are (fitted - measured) / measured, one per point, in increasing order of size.
    """

    alpha_s: float
    beta_bytes_per_s: float
    min_bytes: int
    max_bytes: int
    residuals: tuple[float, ...]

    @property
    def max_rel_residual(self) -> float:
        return max(abs(residual) for residual in self.residuals)

    def estimate_s(self, num_bytes: float) -> float:
        """Seconds of a message of this size. Outside the fitted range this is an extrapolation."""
        return self.alpha_s + num_bytes / self.beta_bytes_per_s


def fit_alpha_beta(points: Sequence[tuple[int, float]]) -> AlphaBeta:
    """The line through (bytes, seconds) that minimises the squared *relative* errors, with alpha >= 0.

    Relative, because sizes span decades: with absolute errors the largest message would be the whole fit.
    """
    points = sorted(points)
    sizes = sorted({size for size, _ in points})
    if len(sizes) < 2:
        raise MeasurementError(f"a line needs at least two sizes, got {len(sizes)}")
    if any(seconds <= 0 for _, seconds in points):
        raise MeasurementError("a time of 0 s cannot be fitted by relative error")
    # Weighted normal equations with weight 1/t^2, in x / x_max to keep the sums well scaled.
    scale = float(sizes[-1])
    w = [1 / t**2 for _, t in points]
    x = [size / scale for size, _ in points]
    t = [seconds for _, seconds in points]
    s0 = sum(w)
    s1 = sum(wi * xi for wi, xi in zip(w, x, strict=True))
    s2 = sum(wi * xi * xi for wi, xi in zip(w, x, strict=True))
    r0 = sum(wi * ti for wi, ti in zip(w, t, strict=True))
    r1 = sum(wi * xi * ti for wi, xi, ti in zip(w, x, t, strict=True))
    slope = (s0 * r1 - s1 * r0) / (s0 * s2 - s1 * s1)
    alpha = (r0 - slope * s1) / s0
    if alpha < 0:  # noise on nearly proportional data; the best line through the origin instead
        alpha, slope = 0.0, r1 / s2
    if slope <= 1e-9 * (alpha + slope):  # rounding of equal times leaves a slope of either sign
        raise MeasurementError(
            "the times do not grow with the size, so they have no bandwidth: measure larger messages"
        )
    fitted = [(alpha + slope * xi - ti) / ti for xi, ti in zip(x, t, strict=True)]
    return AlphaBeta(alpha, scale / slope, sizes[0], sizes[-1], tuple(fitted))


def fit_collectives(records: Sequence[CollectiveRecord]) -> list[tuple[CollectiveRecord, AlphaBeta]]:
    """One line per curve (collective, backend, device, ranks, dtype, op), with a record of it for its labels.

    A curve of one size, or one whose times do not grow, has no line and is left out; so is a world of one rank, in
    which nothing is sent.
    """
    curves: dict[object, list[CollectiveRecord]] = {}
    for record in (record for record in records if record.world_size > 1):
        curves.setdefault(record.key, []).append(record)
    fits = []
    for curve in curves.values():
        try:
            fits.append((curve[0], fit_alpha_beta([(r.num_bytes, r.time_s) for r in curve])))
        except MeasurementError:
            continue
    return fits
