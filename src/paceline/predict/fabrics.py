"""What joins the ranks, for any number of them: an assumed network, or a measured sweep and what follows from it.

The formulas are in `families`; what a step costs on a fabric is simulated in `whatif`.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from paceline.errors import ConfigError, MeasurementError, RecordError
from paceline.predict.curves import fit_curve
from paceline.predict.families import (
    BestCurve,
    FamilyCurve,
    FamilyFit,
    NamedCurve,
    ScaledCurve,
    TwoLevelCurve,
    check_algorithm,
    fit_family,
)
from paceline.predict.networks import Network
from paceline.records import CollectiveRecord
from paceline.records.samples import Samples
from paceline.units import format_duration, format_rate

__all__ = ["AssumedFabric", "Fabric", "MeasuredFabric", "build_measured_fabric"]

# Nobody measured a network that is only named: its times are taken to be known to this standard deviation.
ASSUMED_ERROR = 0.10
# And a measured one is known worse with each doubling of the ranks away; chosen on the sweeps that the docs cite.
ERROR_PER_DOUBLING = 0.20


class Fabric(Protocol):
    """Ranks joined somehow. `servers`: messages under way at once, which share what there is."""

    @property
    def name(self) -> str: ...

    @property
    def servers(self) -> int: ...

    @property
    def assumptions(self) -> tuple[str, ...]: ...

    def build_curve(self, world_size: int) -> NamedCurve: ...

    def draw(self, source: random.Random) -> Self:
        """The fabric as it might be, too, given how well it is known."""
        ...


@dataclass(frozen=True)
class AssumedFabric:
    """A network by name. With several ranks per node it is what leaves a node, and `inside` joins the node's ranks."""

    network: Network
    inside: Network
    ranks_per_node: int = 1
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        if self.ranks_per_node < 1:
            raise ConfigError(f"{self.ranks_per_node} ranks per node: at least 1")
        if self.algorithm == "shared":
            raise ConfigError(
                f"algorithm shared on the network {self.network.name}: shared memory is no network; "
                "give the --allreduce run of a host instead"
            )
        if self.algorithm == "two-level" and self.ranks_per_node == 1:
            raise ConfigError("algorithm two-level with 1 rank per node has one level: give --ranks-per-node")

    @property
    def name(self) -> str:
        return self.network.name

    @property
    def servers(self) -> int:
        return 2 if self.algorithm == "gloo" else 1

    @property
    def assumptions(self) -> tuple[str, ...]:
        def describe(network: Network, place: str) -> str:
            rate, latency = format_rate(network.bandwidth_bytes_per_s), format_duration(network.latency_s)
            return f"{network.name}: {rate} GB/s and {latency} {place} ({network.note})"

        if self.ranks_per_node == 1:
            return (describe(self.network, "out of each rank"),)
        return (
            describe(self.network, f"out of each node of {self.ranks_per_node} ranks, which share it"),
            describe(self.inside, "out of each rank inside a node"),
        )

    def build_curve(self, world_size: int) -> NamedCurve:
        if world_size <= self.ranks_per_node and self.ranks_per_node > 1:
            names = {"auto": ("ring", "tree"), "two-level": ("ring",)}.get(self.algorithm, (self.algorithm,))
            return _best(self._on(self.inside, name, world_size, "inside") for name in names)
        if self.algorithm == "two-level":
            return self._two_level(world_size)
        if self.algorithm != "auto":
            return self._on(self._slower(), self.algorithm, world_size)
        flat: list[NamedCurve] = [self._on(self._slower(), name, world_size) for name in ("ring", "tree")]
        return _best(flat if self.ranks_per_node == 1 else [*flat, self._two_level(world_size)])

    def _slower(self) -> Network:
        """What a flat algorithm meets: it goes through nodes as well as between them, and waits for the slower."""
        if self.ranks_per_node == 1:
            return self.network
        return replace(
            self.network,
            latency_s=max(self.network.latency_s, self.inside.latency_s),
            bandwidth_bytes_per_s=min(self.network.bandwidth_bytes_per_s, self.inside.bandwidth_bytes_per_s),
        )

    def _on(self, network: Network, algorithm: str, count: int, place: str = "") -> FamilyCurve:
        return FamilyCurve(algorithm, count, network.latency_s, network.bandwidth_bytes_per_s, place=place)

    def _two_level(self, world_size: int) -> NamedCurve:
        nodes = math.ceil(world_size / self.ranks_per_node)
        return TwoLevelCurve(
            self._on(self.inside, "ring", self.ranks_per_node),
            _best(self._on(self.network, name, nodes) for name in ("ring", "tree")),
        )

    def draw(self, source: random.Random) -> Self:
        def vary(network: Network) -> Network:
            factor = math.exp(source.gauss(0, ASSUMED_ERROR))
            return replace(
                network,
                latency_s=network.latency_s * factor,
                bandwidth_bytes_per_s=network.bandwidth_bytes_per_s / factor,
            )

        return replace(self, network=vary(self.network), inside=vary(self.inside))


def _best(curves: Iterable[NamedCurve]) -> NamedCurve:
    found = tuple(curves)
    return found[0] if len(found) == 1 else BestCurve(found)


@dataclass(frozen=True)
class Sweep:
    """The all-reduces of one number of ranks: for each size the seconds of all repetitions, in order of size."""

    world_size: int
    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class MeasuredFabric:
    """Sweeps of one backend: on their own ranks as measured, on others scaled from the nearest as the fits say.

    `what` is the name with device and dtype. `shift` moves the times on other ranks by so many standard deviations of
    what is known of them.
    """

    name: str
    what: str
    sweeps: tuple[Sweep, ...]
    fits: tuple[FamilyFit, ...]
    shift: float = 0.0

    @property
    def servers(self) -> int:
        return 2 if self.fits[0].algorithm == "gloo" else 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sweep.world_size for sweep in self.sweeps)

    @property
    def assumptions(self) -> tuple[str, ...]:
        ranks = ", ".join(map(str, self.ranks))
        lines = [f"{self.what}: all-reduce as measured on {ranks} ranks, timed from the last rank's arrival"]
        lines += [
            f"{self.name} on other ranks: scaled as {fit.algorithm} with {format_duration(fit.alpha_s)} and "
            f"{format_rate(fit.bytes_per_s)} GB/s, which fits the sweep to {fit.error:.0%}"
            for fit in self.fits
        ]
        shares = any(fit.algorithm == "shared" for fit in self.fits)
        others = "share the memory of the same host" if shares else "bring links as fast as those that were measured"
        lines.append(f"{self.name}: further ranks {others}")
        return tuple(lines)

    def build_curve(self, world_size: int) -> NamedCurve:
        # The nearest by ratio, and of two as near the larger one: more is known of many ranks from many.
        sweep = min(self.sweeps, key=lambda s: (abs(math.log(s.world_size / world_size)), -s.world_size))
        measured = fit_curve(zip(sweep.sizes, map(statistics.median, sweep.seconds), strict=True))
        if sweep.world_size != world_size:
            away = abs(math.log2(world_size / sweep.world_size))
            error = min(fit.error for fit in self.fits) + ERROR_PER_DOUBLING * away
            measured = measured.scaled([math.exp(self.shift * error)] * len(measured.sizes))
        return _best(
            ScaledCurve(measured, fit.build_curve(sweep.world_size), fit.build_curve(world_size)) for fit in self.fits
        )

    def draw(self, source: random.Random) -> Self:
        sweeps = tuple(
            replace(sweep, seconds=tuple(tuple(source.choices(row, k=len(row))) for row in sweep.seconds))
            for sweep in self.sweeps
        )
        return replace(self, sweeps=sweeps, shift=source.gauss(0, 1))


def _name(record: CollectiveRecord) -> str:
    return record.backend if record.memory == "ordinary" else f"{record.backend} ({record.memory})"


def _describe(record: CollectiveRecord) -> str:
    return f"{_name(record)} on {record.device} in {record.dtype}"


def build_measured_fabric(
    records: Sequence[CollectiveRecord], backend: str | None, algorithm: str = "auto"
) -> MeasuredFabric:
    """The sweep of one backend, and the family that its algorithm is known to follow, or the one that is asked for.

    Where a backend was measured on ordinary and on shared memory the latter is taken: the wrapper's buckets lie there.
    """
    check_algorithm(algorithm)
    if algorithm == "two-level":
        raise ConfigError("algorithm two-level cannot be told from one sweep: name a --network with --ranks-per-node")
    records = [record for record in records if record.collective == "all_reduce" and record.world_size > 1]
    if not records:
        raise RecordError("no all-reduce on two or more ranks is in the run: measure one with `bench allreduce`")
    if backend is not None:
        there = sorted({record.backend for record in records})
        records = [record for record in records if record.backend == backend]
        if not records:
            raise ConfigError(f"no all-reduce on the backend {backend} is in the run: there is {', '.join(there)}")
    if len({record.backend for record in records}) == 1 and any(record.memory == "shared" for record in records):
        records = [record for record in records if record.memory == "shared"]
    kinds = sorted({_describe(record) for record in records})
    if len(kinds) > 1:
        raise ConfigError(f"the run has several curves ({'; '.join(kinds)}): choose one with --backend")
    own = {"gloo": ("gloo",), "shm": ("shared",), "paceline": ("shared",)}.get(records[0].backend, ("ring", "tree"))
    points = [(record.num_bytes, record.world_size, statistics.median(_seconds(record))) for record in records]
    try:
        fits = tuple(fit_family(points, name) for name in (own if algorithm == "auto" else (algorithm,)))
    except MeasurementError as error:
        raise RecordError(f"{kinds[0]}: {error}") from None
    return MeasuredFabric(_name(records[0]), kinds[0], _sweeps(records), fits)


def _seconds(record: CollectiveRecord) -> tuple[float, ...]:
    """Times without the wait for a late rank, where the clock can tell; one time where a table has no more."""
    if isinstance(record.timing, Samples):
        return record.timing.from_last_arrival_s or record.timing.reduced_s
    return (record.time_s,)


def _sweeps(records: Sequence[CollectiveRecord]) -> tuple[Sweep, ...]:
    sweeps = []
    for world_size in sorted({record.world_size for record in records}):
        by_size: dict[int, tuple[float, ...]] = {}
        for record in records:
            if record.world_size == world_size:
                by_size[record.num_bytes] = by_size.get(record.num_bytes, ()) + _seconds(record)
        if len(by_size) > 1:
            sizes = tuple(sorted(by_size))
            sweeps.append(Sweep(world_size, sizes, tuple(by_size[size] for size in sizes)))
    if not sweeps:
        raise RecordError("the run has one size for each number of ranks: a curve needs two or more")
    return tuple(sweeps)
