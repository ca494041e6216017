"""What an all-reduce costs on any number of ranks: one formula for each algorithm, fitted to points or put on a link.

A curve that was measured is in `curves`; which curve serves a network with so many ranks is chosen in `fabrics`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import ConfigError, MeasurementError
from paceline.predict.curves import MeasuredCurve
from paceline.units import MIB, format_bytes

__all__ = [
    "ALGORITHMS",
    "FAMILIES",
    "BestCurve",
    "FamilyCurve",
    "FamilyFit",
    "NamedCurve",
    "ScaledCurve",
    "TwoLevelCurve",
    "Work",
    "check_algorithm",
    "fit_family",
]

ALGORITHMS = ("auto", "ring", "tree", "two-level", "gloo", "shared")
# Beyond this many times what was measured, in bytes or in ranks, an estimate is a guess.
_REACH = 2
# A host with more ranks than this is not one that anybody has.
_MOST_ON_ONE_HOST = 512


@dataclass(frozen=True)
class Work:
    """What one all-reduce asks for: latencies one after the other, and bytes through the narrowest place."""

    latencies: float
    bytes: float


def _ring(num_bytes: float, world_size: int) -> Work:
    """P-1 steps that reduce and P-1 that gather, each with 1/P of the bytes."""
    steps = 2 * (world_size - 1)
    return Work(steps, steps / world_size * num_bytes)


def _tree(num_bytes: float, world_size: int) -> Work:
    """Two binary trees with half of the bytes each, up and down again.

    A rank is a leaf of one tree and a branch of the other. It sends 1/2 + 1/2 of the bytes up and 2 x 1/2 down. Of two
    ranks each is once the root with one child: 1/2 up and 1/2 down.
    """
    depth = math.ceil(math.log2(world_size))
    return Work(2 * depth, num_bytes if world_size == 2 else 2 * num_bytes)


def _gloo(num_bytes: float, world_size: int) -> Work:
    """A ring whose parts go in segments of at most 1 MiB, at least two to a part; two of them are under way at once."""
    segments = max(2, math.ceil(num_bytes / world_size / MIB))
    return Work((world_size - 1) * segments, _ring(num_bytes, world_size).bytes)


def _shared(num_bytes: float, world_size: int) -> Work:
    """Every rank reads 1/P of all P vectors and writes it to all: two passes for each rank over a memory they share.

    A barrier has a flag for each rank.
    """
    return Work(world_size, 2 * world_size * num_bytes)


FAMILIES: dict[str, Callable[[float, int], Work]] = {
    "ring": _ring,
    "tree": _tree,
    "gloo": _gloo,
    "shared": _shared,
}


def check_algorithm(name: str) -> None:
    """Refuse a name that is none of `ALGORITHMS`, with the nearest one."""
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"unknown algorithm {name!r}: {hint}known are {', '.join(ALGORITHMS)}")


class NamedCurve(Protocol):
    """A `Curve` that can say which algorithm a message of some size takes."""

    def estimate_s(self, num_bytes: float) -> float: ...

    def describe_doubt(self, num_bytes: float) -> str: ...

    def name_algorithm(self, num_bytes: float) -> str: ...


@dataclass(frozen=True)
class FamilyCurve:
    """`latencies * alpha_s + bytes / bytes_per_s` with the work of one algorithm on so many ranks.

    `most_bytes` and `most_ranks` are the largest that the two numbers were fitted to; None where they are assumed.
    """

    algorithm: str
    world_size: int
    alpha_s: float
    bytes_per_s: float
    most_bytes: int | None = None
    most_ranks: int | None = None
    place: str = ""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"an all-reduce on {self.world_size} ranks: at least 1 is needed")
        if self.algorithm == "shared" and self.world_size > _MOST_ON_ONE_HOST:
            raise ConfigError(
                f"{self.world_size:,} ranks in one host's memory cannot be, {_MOST_ON_ONE_HOST} are taken as the most: "
                "name fewer --ranks, or a --network"
            )

    def estimate_s(self, num_bytes: float) -> float:
        if self.world_size == 1 or num_bytes <= 0:
            return 0.0
        work = FAMILIES[self.algorithm](num_bytes, self.world_size)
        return work.latencies * self.alpha_s + work.bytes / self.bytes_per_s

    def describe_doubt(self, num_bytes: float) -> str:
        doubts = []
        if self.most_ranks is not None and self.world_size > _REACH * self.most_ranks:
            doubts.append(f"{self.world_size:,} ranks are beyond twice the most that were measured, {self.most_ranks}")
        if self.most_bytes is not None and num_bytes > _REACH * self.most_bytes:
            most = format_bytes(self.most_bytes)
            doubts.append(f"{format_bytes(num_bytes)} is beyond twice the largest measured size, {most}")
        return "; ".join(doubts)

    def name_algorithm(self, num_bytes: float) -> str:
        return f"{self.algorithm} {self.place}".strip()


@dataclass(frozen=True)
class TwoLevelCurve:
    """Reduce-scatter inside each node, all-reduce between the nodes, all-gather inside: one after the other.

    Inside, that is as much as a ring. Between, the ranks of a node send 1/m each and share the node's link, so that all
    bytes pass it; `between` is a curve over nodes.
    """

    inside: NamedCurve
    between: NamedCurve

    def estimate_s(self, num_bytes: float) -> float:
        return self.inside.estimate_s(num_bytes) + self.between.estimate_s(num_bytes)

    def describe_doubt(self, num_bytes: float) -> str:
        return self.inside.describe_doubt(num_bytes) or self.between.describe_doubt(num_bytes)

    def name_algorithm(self, num_bytes: float) -> str:
        return f"two-level ({self.between.name_algorithm(num_bytes)})"


@dataclass(frozen=True)
class BestCurve:
    """For each message the algorithm that is quickest for its size."""

    curves: tuple[NamedCurve, ...]

    def estimate_s(self, num_bytes: float) -> float:
        return min(curve.estimate_s(num_bytes) for curve in self.curves)

    def _best(self, num_bytes: float) -> NamedCurve:
        return min(self.curves, key=lambda curve: curve.estimate_s(num_bytes))

    def describe_doubt(self, num_bytes: float) -> str:
        return self._best(num_bytes).describe_doubt(num_bytes)

    def name_algorithm(self, num_bytes: float) -> str:
        return self._best(num_bytes).name_algorithm(num_bytes)


@dataclass(frozen=True)
class ScaledCurve:
    """A measured curve on other ranks: each time grows as the family does from the measured ranks to those.

    So its bends stay, and on the measured ranks themselves it is the measured curve.
    """

    measured: MeasuredCurve
    there: FamilyCurve
    here: FamilyCurve

    def estimate_s(self, num_bytes: float) -> float:
        if num_bytes <= 0 or self.here.world_size == 1:
            return 0.0
        # Below the smallest measured size the curve is flat, and so must be what it is multiplied by.
        size = max(num_bytes, self.measured.sizes[0])
        return self.measured.estimate_s(size) * self.here.estimate_s(size) / self.there.estimate_s(size)

    def describe_doubt(self, num_bytes: float) -> str:
        # The sizes are those of this curve: the fit may have seen larger ones on other ranks.
        return "; ".join(filter(None, (self.here.describe_doubt(0), self.measured.describe_doubt(num_bytes))))

    def name_algorithm(self, num_bytes: float) -> str:
        if self.here.world_size == self.there.world_size:
            return "measured"
        return f"{self.here.algorithm}, measured on {self.there.world_size}"


@dataclass(frozen=True)
class FamilyFit:
    """The latency and the bandwidth of one algorithm, from points of all numbers of ranks at once.

    `residuals` are (fitted - measured) / measured, in the order of the points.
    """

    algorithm: str
    alpha_s: float
    bytes_per_s: float
    most_bytes: int
    most_ranks: int
    residuals: tuple[float, ...]

    @property
    def error(self) -> float:
        """The root of the mean square of the residuals."""
        return math.sqrt(math.fsum(r * r for r in self.residuals) / len(self.residuals))

    def build_curve(self, world_size: int) -> FamilyCurve:
        return FamilyCurve(self.algorithm, world_size, self.alpha_s, self.bytes_per_s, self.most_bytes, self.most_ranks)


def fit_family(points: Sequence[tuple[int, int, float]], algorithm: str) -> FamilyFit:
    """Fit (bytes, ranks, seconds) by least squares of relative errors, with a latency of at least 0."""
    if algorithm not in FAMILIES:
        raise ConfigError(f"{algorithm} cannot be fitted to one sweep: choose one of {', '.join(FAMILIES)}")
    points = [point for point in points if point[1] > 1]
    if any(not 0 < seconds < math.inf for _, _, seconds in points):
        raise MeasurementError("a time of 0 s cannot be fitted by relative error")
    work = [FAMILIES[algorithm](num_bytes, ranks) for num_bytes, ranks, _ in points]
    if len({(w.latencies, w.bytes) for w in work}) < 2:
        raise MeasurementError(f"a fit needs two or more sizes on two or more ranks, got {len(points)} points")
    # Columns relative to the measured time, and scaled to about 1 to keep the sums well conditioned.
    scale = max(w.bytes for w in work)
    u = [w.latencies / t for w, (_, _, t) in zip(work, points, strict=True)]
    v = [w.bytes / scale / t for w, (_, _, t) in zip(work, points, strict=True)]
    uu, vv = math.fsum(a * a for a in u), math.fsum(b * b for b in v)
    uv, u1, v1 = math.fsum(a * b for a, b in zip(u, v, strict=True)), math.fsum(u), math.fsum(v)
    determinant = uu * vv - uv * uv
    alpha = (u1 * vv - v1 * uv) / determinant if determinant > 1e-12 * uu * vv else 0.0
    slope = (v1 - alpha * uv) / vv
    if alpha < 0:
        alpha, slope = 0.0, v1 / vv
    if slope <= 1e-9 * alpha:
        raise MeasurementError(f"the times do not grow with the size as {algorithm} would: measure larger messages")
    residuals = tuple(alpha * a + slope * b - 1 for a, b in zip(u, v, strict=True))
    most_bytes, most_ranks = max(point[0] for point in points), max(point[1] for point in points)
    return FamilyFit(algorithm, alpha, scale / slope, most_bytes, most_ranks, residuals)
