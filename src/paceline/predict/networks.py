"""Networks by name, and fabrics: what joins the ranks, for any number of them, and the cost curve that follows.

The numbers of named networks are assumptions, each with its source. A measured fabric is a sweep of all-reduce.
"""

from __future__ import annotations

import difflib
import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from paceline.errors import ConfigError, MeasurementError, RecordError
from paceline.machine import canonical_backend
from paceline.predict.curves import (
    ContinuedCurve,
    CostCurve,
    FamilyCurve,
    FamilyFit,
    Resample,
    ScaledCurve,
    TwoLevelCurve,
    check_algorithm,
    choose_best,
    fit_curve,
    fit_family,
)
from paceline.records import CollectiveRecord
from paceline.records.samples import Samples
from paceline.units import format_duration, format_rate

_CUSTOM = re.compile(r"(\d+(?:\.\d+)?)([kMGT]?)(b|bit|B)/s,(\d+(?:\.\d+)?)(ns|us|µs|ms|s)")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


# Nobody measured a network that is only named: its times are taken to be known to this standard deviation.
ASSUMED_ERROR = 0.10
# And a measured one is known worse with each doubling of the ranks away; chosen on the sweeps that the docs cite.
ERROR_PER_DOUBLING = 0.20


@dataclass(frozen=True)
class Network:
    """An assumed network: seconds of one message's way between two ranks, and bytes per second out of each rank."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    note: str

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf or not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise ConfigError(
                f"network {self.name} has {self.latency_s} s and {self.bandwidth_bytes_per_s} bytes/s: "
                "the latency must not be negative, and the bandwidth above 0"
            )


# Latencies are of one message between neighbours, in round numbers: they decide only where gradients are small.
NETWORKS = (
    Network("nvlink", 2e-6, 300e9, "NVLink of an A100: 300 GB/s each way, the 600 of data sheets both ways"),
    Network("pcie4", 5e-6, 25e9, "PCIe 4.0 x16: 31.5 GB/s each way on paper, about 25 in practice"),
    Network("hdr", 2e-6, 25e9, "InfiniBand HDR: 200 Gb/s, which is 25 GB/s and not 200 GB/s"),
    Network("100gbe", 10e-6, 12.5e9, "100 Gb/s Ethernet at line rate"),
    Network("10gbe", 30e-6, 1.25e9, "10 Gb/s Ethernet at line rate; TCP reaches about 1.2 GB/s"),
    Network("1gbe", 50e-6, 0.125e9, "1 Gb/s Ethernet at line rate"),
)


def find_network(text: str) -> Network:
    """A network by its name, or one such as `10Gb/s,50us` (bits) or `1.25GB/s,50us` (bytes)."""
    known = {network.name: network for network in NETWORKS}
    name = text.strip().lower()
    if name in known:
        return known[name]
    match = _CUSTOM.fullmatch(re.sub(r"\s", "", text))
    if match:
        rate, prefix, unit, latency, second = match.groups()
        bits = 1 if unit == "B" else 8
        return Network(
            text.strip(), float(latency) * _SECONDS[second], float(rate) * _PREFIXES[prefix] / bits, "as given"
        )
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"unknown network {text!r}: {hint}known are {', '.join(known)}, or write its rate and latency as 10Gb/s,50us"
    )


def find_networks(text: str) -> list[Network]:
    """Networks by commas, each once; one by its rate and latency has a comma of its own."""
    parts = [part.strip() for part in re.findall(r"[^,]*/s\s*,[^,]+|[^,]+", text)]
    found = [find_network(part) for part in dict.fromkeys(filter(None, parts))]
    if not found:
        raise ConfigError(f"--network {text!r} names none: known are {', '.join(known.name for known in NETWORKS)}")
    return list(dict.fromkeys(found))


# -- fabrics -----------------------------------------------------------------------------------------------------------


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

    def build_curve(self, world_size: int) -> CostCurve:
        if world_size <= self.ranks_per_node and self.ranks_per_node > 1:
            names = {"auto": ("ring", "tree"), "two-level": ("ring",)}.get(self.algorithm, (self.algorithm,))
            return choose_best(self._on(self.inside, name, world_size, "inside") for name in names)
        if self.algorithm == "two-level":
            return self._two_level(world_size)
        if self.algorithm != "auto":
            return self._on(self._slower(), self.algorithm, world_size)
        flat: list[CostCurve] = [self._on(self._slower(), name, world_size) for name in ("ring", "tree")]
        return choose_best(flat if self.ranks_per_node == 1 else [*flat, self._two_level(world_size)])

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

    def _two_level(self, world_size: int) -> CostCurve:
        nodes = math.ceil(world_size / self.ranks_per_node)
        return TwoLevelCurve(
            self._on(self.inside, "ring", self.ranks_per_node),
            choose_best(self._on(self.network, name, nodes) for name in ("ring", "tree")),
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


@dataclass(frozen=True)
class Sweep:
    """The all-reduces of one number of ranks: for each size the seconds of all repetitions, in order of size."""

    world_size: int
    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class MeasuredFabric:
    """Sweeps of one backend: on their own ranks as measured, on others scaled from the nearest as the fits say.

    `what` is the name with device and dtype. `shift` moves the times on other ranks by that many standard deviations of
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

    def build_curve(self, world_size: int) -> CostCurve:
        # The nearest by ratio, and of two as near the larger one: more is known of many ranks from many.
        sweep = min(self.sweeps, key=lambda s: (abs(math.log(s.world_size / world_size)), -s.world_size))
        measured = fit_curve(zip(sweep.sizes, map(statistics.median, sweep.seconds), strict=True))
        if sweep.world_size != world_size:
            away = abs(math.log2(world_size / sweep.world_size))
            error = min(fit.error for fit in self.fits) + ERROR_PER_DOUBLING * away
            measured = measured.multiplied(math.exp(self.shift * error))
        return choose_best(
            ScaledCurve(measured, fit.build_curve(sweep.world_size), fit.build_curve(world_size)) for fit in self.fits
        )

    @property
    def is_continued(self) -> bool:
        """Whether ranks share what carries their messages, and two or more sweeps show what that costs."""
        return len(self.ranks) > 1 and self.fits[0].algorithm in ("gloo", "shared")

    def build_continued_curve(self, world_size: int) -> CostCurve:
        """The fabric's own curve; for more ranks of one host than were measured the continued one."""
        shifted = self.build_curve(world_size)
        if not self.is_continued or world_size <= self.ranks[-1]:
            return shifted
        near, last = self.ranks[-2:]
        return ContinuedCurve(
            plain=replace(self, shift=0.0).build_curve(world_size),
            shifted=shifted,
            near=self.build_curve(near),
            last=self.build_curve(last),
            steps=(world_size - last) / (last - near),
        )

    def draw(self, source: random.Random) -> Self:
        sweeps = tuple(
            replace(sweep, seconds=tuple(Resample(source).take(row) for row in sweep.seconds)) for sweep in self.sweeps
        )
        return replace(self, sweeps=sweeps, shift=source.gauss(0, 1))


Fabric = AssumedFabric | MeasuredFabric


def _name(record: CollectiveRecord) -> str:
    return record.backend if record.memory == "ordinary" else f"{record.backend} ({record.memory})"


def _describe(record: CollectiveRecord) -> str:
    return f"{_name(record)} on {record.device} in {record.dtype}"


def build_measured_fabric(
    records: Sequence[CollectiveRecord], backend: str | None, algorithm: str = "auto"
) -> MeasuredFabric:
    """The sweep of one backend, and the family that its algorithm is known to follow, or the one that is named.

    Where a backend was measured on ordinary and on shared memory the latter is taken: the wrapper's buckets lie there.
    """
    check_algorithm(algorithm)
    if algorithm == "two-level":
        raise ConfigError("algorithm two-level cannot be fitted to one sweep: name a --network with --ranks-per-node")
    records = [record for record in records if record.collective == "all_reduce" and record.world_size > 1]
    if not records:
        raise RecordError("no all-reduce on two or more ranks is in the run: measure one with `bench allreduce`")
    if backend is not None:
        there = sorted({record.backend for record in records})
        wanted = canonical_backend(backend)
        records = [record for record in records if canonical_backend(record.backend) == wanted]
        if not records:
            raise ConfigError(f"no all-reduce on the backend {backend} is in the run: there is {', '.join(there)}")
    if len({record.backend for record in records}) == 1 and any(record.memory == "shared" for record in records):
        records = [record for record in records if record.memory == "shared"]
    kinds = sorted({_describe(record) for record in records})
    if len(kinds) > 1:
        raise ConfigError(f"the run has several curves ({'; '.join(kinds)}): choose one with --backend")
    own = {"gloo": ("gloo",), "shm": ("shared",)}.get(canonical_backend(records[0].backend), ("ring", "tree"))
    points = [(record.num_bytes, record.world_size, statistics.median(_seconds(record))) for record in records]
    try:
        fits = tuple(fit_family(points, name) for name in (own if algorithm == "auto" else (algorithm,)))
    except MeasurementError as error:
        raise RecordError(f"{kinds[0]}: {error}") from None
    return MeasuredFabric(_name(records[0]), kinds[0], _sweeps(records), fits)


def _seconds(record: CollectiveRecord) -> tuple[float, ...]:
    """Times without the wait for a late rank, where the clock shows it; one time where a table has no more."""
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
