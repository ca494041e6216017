"""Networks by name, and fabrics: what joins the ranks, for any number of them, and the cost curve that follows.

The numbers of named networks are assumptions, each with its source. A measured fabric is a sweep of all-reduce.
"""

from __future__ import annotations

import contextlib
import math
import random
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError, MeasurementError, RecordError, refuse, suggest
from paceline.machine import canonical_backend
from paceline.predict import curves
from paceline.predict.curves import CostCurve, FamilyCurve
from paceline.predict.simulate import SERVERS
from paceline.records import CollectiveRecord
from paceline.records.samples import UNSTABLE, Samples, find_noise, group_by
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
            has = f"{self.latency_s} s and {self.bandwidth_bytes_per_s} bytes/s"
            raise ConfigError(f"network {self.name} has {has}: a latency of 0 or more, and a bandwidth above 0")

    def describe(self, place: str) -> str:
        rate, latency = format_rate(self.bandwidth_bytes_per_s), format_duration(self.latency_s)
        return f"{self.name}: {rate} GB/s and {latency} {place} ({self.note})"

    def draw(self, source: random.Random) -> Network:
        """The network as it might be."""
        factor = math.exp(source.gauss(0, ASSUMED_ERROR))
        rate = self.bandwidth_bytes_per_s / factor
        return replace(self, latency_s=self.latency_s * factor, bandwidth_bytes_per_s=rate)


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
    if match := _CUSTOM.fullmatch(re.sub(r"\s", "", text)):
        rate, prefix, unit, latency, second = match.groups()
        bytes_per_s = float(rate) * _PREFIXES[prefix] / (1 if unit == "B" else 8)
        return Network(text.strip(), float(latency) * _SECONDS[second], bytes_per_s, "as given")
    listed = f"known are {', '.join(known)}, or write its rate and latency as 10Gb/s,50us"
    raise ConfigError(f"unknown network {text!r}: {suggest(name, known)}{listed}")


def find_networks(text: str) -> list[Network]:
    """Networks by commas, each once; one by its rate and latency has a comma of its own."""
    parts = [part.strip() for part in re.findall(r"[^,]*/s\s*,[^,]+|[^,]+", text)]
    found = [find_network(part) for part in dict.fromkeys(filter(None, parts))]
    if not found:
        raise ConfigError(f"--network {text!r} names none: known are {', '.join(known.name for known in NETWORKS)}")
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class AssumedFabric:
    """A network by name. With several ranks per node it is what leaves a node, and `inside` joins the node's ranks."""

    network: Network
    inside: Network
    ranks_per_node: int = 1
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        curves.check_algorithm(self.algorithm)
        refuse(
            (self.ranks_per_node < 1, f"{self.ranks_per_node} ranks per node: at least 1"),
            (self.algorithm == "shared", "shared memory is no network: give the --allreduce run of a host"),
            (self.algorithm == "two-level" and self.ranks_per_node == 1,
             "algorithm two-level with 1 rank per node has one level: give --ranks-per-node"),
        )  # fmt: skip

    @property
    def name(self) -> str:
        return self.network.name

    @property
    def servers(self) -> int:
        return SERVERS.get(self.algorithm, 1)

    @property
    def assumptions(self) -> tuple[str, ...]:
        if self.ranks_per_node == 1:
            return (self.network.describe("out of each rank"),)
        return (
            self.network.describe(f"out of each node of {self.ranks_per_node} ranks, which share it"),
            self.inside.describe("out of each rank inside a node"),
        )

    def build_curve(self, world_size: int) -> CostCurve:
        asked, per_node, inside = self.algorithm, self.ranks_per_node, self.inside
        flat = ("ring", "tree") if asked == "auto" else (asked,)
        if world_size <= per_node and per_node > 1:
            return _on(inside, ("ring",) if asked == "two-level" else flat, world_size, "inside")
        nodes = _on(self.network, ("ring", "tree"), math.ceil(world_size / per_node))
        two_level = curves.join_levels(_on(inside, ("ring",), per_node), nodes)
        if asked == "two-level":
            return two_level
        slower = self.network
        if per_node > 1:  # a flat algorithm goes through nodes as well as between them, and waits for the slower
            latency_s = max(slower.latency_s, inside.latency_s)
            rate = min(slower.bandwidth_bytes_per_s, inside.bandwidth_bytes_per_s)
            slower = replace(slower, latency_s=latency_s, bandwidth_bytes_per_s=rate)
        found = _on(slower, flat, world_size)
        return curves.choose_best([found, two_level]) if asked == "auto" and per_node > 1 else found

    def draw(self, source: random.Random) -> AssumedFabric:
        return replace(self, network=self.network.draw(source), inside=self.inside.draw(source))


def _on(network: Network, names: Iterable[str], count: int, place: str = "") -> CostCurve:
    """The best of some algorithms on this many ranks of a network."""
    rates = (network.latency_s, network.bandwidth_bytes_per_s)
    return curves.choose_best([FamilyCurve(name, count, *rates, place=place) for name in names])


@dataclass(frozen=True)
class MeasuredFabric:
    """Sweeps of one backend: on their own ranks as measured, on others scaled from the nearest as the fits say.
    `sweeps` has, by ranks and by size, both in order, the seconds of all repetitions. `what` is the name with device
    and dtype. `shift` moves the times on other ranks by that many standard deviations of what is known of them."""

    name: str
    what: str
    sweeps: Mapping[int, Mapping[int, Sequence[float]]]
    fits: tuple[FamilyCurve, ...]
    shift: float = 0.0

    @property
    def servers(self) -> int:
        return SERVERS.get(self.fits[0].algorithm, 1)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.sweeps)

    @property
    def assumptions(self) -> tuple[str, ...]:
        ranks = ", ".join(map(str, self.ranks))
        shares = any(fit.algorithm == "shared" for fit in self.fits)
        others = "share the memory of the same host" if shares else "bring links as fast as those that were measured"
        return (
            f"{self.what}: all-reduce as measured on {ranks} ranks, timed from the last rank's arrival",
            *(
                f"{self.name} on other ranks: scaled as {fit.algorithm} with {format_duration(fit.alpha_s)} and "
                f"{format_rate(fit.bytes_per_s)} GB/s, which fits the sweep to {fit.error:.0%}"
                for fit in self.fits
            ),
            f"{self.name}: further ranks {others}",
        )

    def build_curve(self, world_size: int) -> CostCurve:
        nearest, factor = curves.find_nearest(self.sweeps, world_size), 1.0
        if nearest != world_size:
            error = min(fit.error for fit in self.fits) + ERROR_PER_DOUBLING * abs(math.log2(world_size / nearest))
            factor = math.exp(self.shift * error)
        measured = curves.fit_curve(
            (size, statistics.median(times) * factor) for size, times in self.sweeps[nearest].items()
        )
        return curves.choose_best([
            curves.scale_curve(measured, replace(fit, world_size=nearest), replace(fit, world_size=world_size))
            for fit in self.fits
        ])  # fmt: skip

    @property
    def is_continued(self) -> bool:
        """Whether ranks share what carries their messages, and two or more sweeps show what that costs."""
        return len(self.ranks) > 1 and self.fits[0].algorithm in ("gloo", "shared")

    def build_continued_curve(self, world_size: int) -> CostCurve:
        """The fabric's own curve, continued to more ranks of one host than were measured. The family lets each rank
        bring a link of its own, and a straight line through the last two sweeps lets none: where the line is more, the
        mean of both, size by size."""
        shifted = self.build_curve(world_size)
        if not self.is_continued or world_size <= self.ranks[-1]:
            return shifted
        before, most = self.ranks[-2:]
        near, last, steps = self.build_curve(before), self.build_curve(most), (world_size - most) / (most - before)
        plain = replace(self, shift=0.0).build_curve(world_size)

        def estimate_s(num_bytes: float) -> float:
            if num_bytes <= 0:
                return 0.0
            plain_s, last_s = plain.estimate_s(num_bytes), last.estimate_s(num_bytes)
            line_s = last_s + max(0.0, last_s - near.estimate_s(num_bytes)) * steps
            return (plain_s + max(plain_s, line_s)) / 2 * shifted.estimate_s(num_bytes) / plain_s

        return curves.DerivedCurve(estimate_s, plain.explain)

    def draw(self, source: random.Random) -> MeasuredFabric:
        sweeps = {
            count: {
                size: curves.Resample(source, find_noise(times) > UNSTABLE).take(times)
                for size, times in by_size.items()
            }
            for count, by_size in self.sweeps.items()
        }
        return replace(self, sweeps=sweeps, shift=source.gauss(0, 1))


Fabric = AssumedFabric | MeasuredFabric


def build_measured_fabric(
    records: Sequence[CollectiveRecord], backend: str | None, algorithm: str = "auto", memory: str = "shared"
) -> MeasuredFabric:
    """The sweep of one backend, and the family that its algorithm is known to follow, or the one that is named.
    `memory` is the one to take where a backend was measured on ordinary and on shared memory: our wrapper's buckets lie
    in shared memory."""
    curves.check_algorithm(algorithm)
    if algorithm == "two-level":
        raise ConfigError("algorithm two-level cannot be fitted to one sweep: name a --network with --ranks-per-node")
    records = [record for record in records if record.collective == "all_reduce" and record.world_size > 1]
    if not records:
        raise RecordError("no all-reduce on two or more ranks is in the run: measure one with `bench allreduce`")
    if backend is not None:
        there, wanted = sorted({record.backend for record in records}), canonical_backend(backend)
        records = [record for record in records if canonical_backend(record.backend) == wanted]
        if not records:
            raise ConfigError(f"no all-reduce on the backend {backend} is in the run: there is {', '.join(there)}")
    if len({record.backend for record in records}) == 1:
        records = [record for record in records if record.memory == memory] or records
    kinds = sorted({f"{_name(record)} on {record.device} in {record.dtype}" for record in records})
    if len(kinds) > 1:
        raise ConfigError(f"the run has several curves ({'; '.join(kinds)}): choose one with --backend")
    own = {"gloo": ("gloo",), "shm": ("shared",)}.get(canonical_backend(records[0].backend), ("ring", "tree"))
    points = [(record.num_bytes, record.world_size, statistics.median(_seconds(record))) for record in records]
    try:
        fits = tuple(curves.fit_family(points, name) for name in (own if algorithm == "auto" else (algorithm,)))
    except MeasurementError as error:
        raise RecordError(f"{kinds[0]}: {error}") from None
    sweeps: dict[int, dict[int, tuple[float, ...]]] = {}
    for record in sorted(records, key=lambda record: (record.world_size, record.num_bytes)):
        by_size = sweeps.setdefault(record.world_size, {})
        by_size[record.num_bytes] = by_size.get(record.num_bytes, ()) + _seconds(record)
    sweeps = {count: by_size for count, by_size in sweeps.items() if len(by_size) > 1}
    if not sweeps:
        raise RecordError("the run has one size for each number of ranks: a curve needs two or more")
    return MeasuredFabric(_name(records[0]), kinds[0], sweeps, fits)


def build_sweeps(records: Sequence[CollectiveRecord]) -> list[MeasuredFabric]:
    """A fabric for each backend, device and dtype that has a curve."""
    reduced, fabrics = (record for record in records if record.collective == "all_reduce"), []
    for kind in group_by(reduced, lambda record: (record.backend, record.device, record.dtype)).values():
        with contextlib.suppress(RecordError):  # one size, or times that do not grow: no curve
            fabrics.append(build_measured_fabric(kind, None))
    return fabrics


def _name(record: CollectiveRecord) -> str:
    return record.backend if record.memory == "ordinary" else f"{record.backend} ({record.memory})"


def _seconds(record: CollectiveRecord) -> tuple[float, ...]:
    """Times without the wait for a late rank, where the clock shows it; one time where a table has no more."""
    if isinstance(record.timing, Samples):
        return record.timing.from_last_arrival_s or record.timing.reduced_s
    return (record.time_s,)
