"""Named networks, and fabrics: the interconnect for any number of ranks, and its cost curve.

A named network is a published table, or a data sheet with corrections derived from published tables. A measured fabric
is an all-reduce sweep. `benchmarks/validate_networks.py` fits and validates the numbers here.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import math
import random
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import ConfigError, MeasurementError, RecordError, refuse, suggest
from paceline.machine import canonical_backend
from paceline.predict import curves
from paceline.predict.curves import CostCurve, FamilyCurve, MeasuredCurve
from paceline.records import CollectiveRecord
from paceline.records.samples import UNSTABLE, Samples, find_noise, group_by
from paceline.records.steps import SERVERS
from paceline.units import MIB, format_duration, format_rate

_CUSTOM = re.compile(r"(\d+(?:\.\d+)?)([kMGT]?)(b|bit|B)/s,(\d+(?:\.\d+)?)(ns|us|µs|ms|s)")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Correction:
    """The costs of an all-reduce that a data sheet omits. Each call costs `overhead_s` to launch, a message between two
    ranks takes `latency` times the nominal latency, large messages reach `efficiency` of the line rate, and a pipeline
    of chunks takes time to fill and drain: `ramp` times the 2 sqrt(latency x transfer) of the best number of chunks."""

    overhead_s: float = 0.0
    latency: float = 1.0
    efficiency: float = 1.0
    ramp: float = 0.0


# Standard deviations of log(time) by message size, interpolated linearly over log(size). The first is for a corrected
# data sheet, the second for a published table applied to the same kind of machine at another site.
Errors = Sequence[tuple[int, float]]
SHEET_ERRORS: Errors = ((MIB // 4, 0.65), (4 * MIB, 0.45), (128 * MIB, 0.45))
SITE_ERRORS: Errors = ((MIB // 4, 0.6), (4 * MIB, 0.55), (128 * MIB, 0.45))
# Factor on published times at other sites. On average nccl-tests takes equally long there, but a torch program's
# messages take about 1.5 times as long, because they are not sent back to back.
SITE_FACTOR = 1.3
CORRECTION = Correction(overhead_s=7e-6, latency=1.9, efficiency=0.76, ramp=1.0)
# We found no published table for links of up to 25 Gb/s. On our own 1 Gb/s link, TCP reaches the full rate but starts
# slowly.
_SLOW_BYTES_PER_S, SLOW = 25e9 / 8, Correction(overhead_s=200e-6, latency=4.0, efficiency=0.95)
# The error of a measured sweep on other rank counts grows with the square root of the doublings between them. From one
# node to several, times grow by a factor that depends on the size and is itself uncertain.
ERROR_PER_DOUBLING = 0.27
FIRST_NODE, FIRST_NODE_ERROR = ((MIB // 4, 1.5), (4 * MIB, 2.5)), 0.5
# Few nodes have more GPUs, so more NCCL ranks than this are assumed to span nodes.
_MOST_GPUS = 8
# The fraction of the latency inside a node that does not grow with the ranks: NCCL's launch. Between nodes it is small.
_LAUNCH = 0.7
# By family: how many threads per rank move messages, and the exponent of (threads / cores) by which messages slow down
# when threads wait for a core. A barrier in shared memory waits for all threads.
_CROWDING = {"gloo": (2, 0.8), "shared": (1, 1.3)}
# The exponent of the ranks of a host with which gloo slows down in an imported table, which does not name the host's
# cores: half way between ranks with links of their own (0) and one link that all share (1).
_UNKNOWN_CORES = 0.5
# Two NCCL ranks of a node use their links less well than more ranks do, so from two ranks times grow only with this
# power of the family's ratio. Fitted to one of two public sources, each predicts the other.
_FROM_TWO = 0.6


@dataclass(frozen=True)
class PublicSweep:
    """A published table: out-of-place averages of nccl-tests for `first_bytes`, 2 `first_bytes`, and so on."""

    source: str
    ranks: int
    nodes: int
    first_bytes: int
    times_us: tuple[float, ...]

    @property
    def points(self) -> list[tuple[int, float]]:
        """(bytes, seconds), in ascending order."""
        return [(self.first_bytes << place, time_us * 1e-6) for place, time_us in enumerate(self.times_us)]


def _load_published() -> dict[str, tuple[PublicSweep, ...]]:
    """The published sweeps, by hardware name."""
    with Path(__file__).with_name("published.csv").open(encoding="utf-8") as file:
        by_name = group_by(csv.DictReader(file), lambda row: row["name"])
    return {name: tuple(map(_read_published, rows)) for name, rows in by_name.items()}


def _read_published(row: Mapping[str, str]) -> PublicSweep:
    ranks, nodes, first_bytes = (int(row[name]) for name in ("ranks", "nodes", "first_bytes"))
    return PublicSweep(row["source"], ranks, nodes, first_bytes, tuple(map(float, row["times_us"].split())))


PUBLISHED = _load_published()


@dataclass(frozen=True)
class Network:
    """A network described by its data sheet: the latency of one message between two ranks, the bandwidth out of each
    rank, and a `correction` for the costs that the data sheet omits. With `sweeps`, it is a published network instead:
    its nodes have `ranks_per_node` ranks, and the data sheet's numbers serve only for comparison."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    note: str
    correction: Correction = Correction()
    sweeps: tuple[PublicSweep, ...] = ()
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf or not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise ConfigError(
                f"network {self.name} needs a latency of 0 or more and a bandwidth above 0, not "
                f"{self.latency_s} s and {self.bandwidth_bytes_per_s} bytes/s"
            )

    @property
    def as_written(self) -> Network:
        """The network at its nominal speed, without corrections, as used for emulation."""
        return replace(self, correction=Correction())

    def describe(self, place: str) -> str:
        if self.sweeps:
            ranks = ", ".join(dict.fromkeys(str(sweep.ranks) for sweep in self.sweeps))
            sources = "; ".join(dict.fromkeys(sweep.source for sweep in self.sweeps))
            slower = f"times multiplied by {SITE_FACTOR:g}, because other sites measured longer times"
            return f"{self.name}: as published for {ranks} ranks ({self.note}; {sources}), with {slower}"
        rate, latency = format_rate(self.bandwidth_bytes_per_s), format_duration(self.latency_s)
        return f"{self.name}: {rate} GB/s and {latency} {place} ({self.note})"


# Latencies are round numbers for one message between neighbors: they matter only for small gradients.
_SHEETS = (
    Network("nvlink", 2e-6, 300e9, "A100 NVLink: 300 GB/s each way (data sheets add both directions: 600)"),
    Network("nvlink4", 2e-6, 450e9, "H100 NVLink: 450 GB/s each way (data sheets add both directions: 900)"),
    Network("pcie3", 5e-6, 15.8e9, "PCIe 3.0 x16"),
    Network("pcie4", 5e-6, 31.5e9, "PCIe 4.0 x16"),
    Network("ndr", 2e-6, 50e9, "InfiniBand NDR: 400 Gb/s"),
    Network("hdr", 2e-6, 25e9, "InfiniBand HDR: 200 Gb/s, that is, 25 GB/s"),
    Network("100gbe", 10e-6, 12.5e9, "100 Gb/s Ethernet at line rate"),
    Network("10gbe", 30e-6, 1.25e9, "10 Gb/s Ethernet at line rate; TCP reaches about 1.2 GB/s"),
    Network("1gbe", 50e-6, 0.125e9, "1 Gb/s Ethernet at line rate"),
)


def _publish(
    name: str, latency_s: float, bytes_per_s: float, note: str, tables: Sequence[str], ranks_per_node: int = 1
) -> Network:
    sweeps = tuple(sweep for table in tables for sweep in PUBLISHED[table])
    return Network(name, latency_s, bytes_per_s, note, sweeps=sweeps, ranks_per_node=ranks_per_node)


_MEASURED = (
    _publish("a100-nvlink", 2e-6, 300e9, "A100 in one node", ("a100",), 8),
    _publish("h100-nvlink", 2e-6, 450e9, "H100 in one node", ("h100",), 8),
    _publish("pcie4-4090", 5e-6, 31.5e9, "RTX 4090 in one node", ("pcie4",), 8),
    _publish("pcie3-host", 5e-6, 15.8e9, "GPUs in one node without peer access", ("pcie3",), 8),
    _publish("a100-roce", 2e-6, 200e9, "8 A100 and 16 links of 100 Gb/s per node", ("a100-roce",), 8),
    _publish("a100-hdr", 2e-6, 100e9, "8 A100 and 4 HDR links per node", ("a100", "a100-nodes"), 8),
    _publish("v100-edr", 2e-6, 25e9, "4 V100 and 2 EDR links per node", ("v100", "v100-nodes"), 4),
    _publish("h100-rdma", 2e-6, 200e9, "8 H100 per node, RDMA", ("h100", "h100-nodes"), 8),
    _publish("h100-tcpxo", 2e-6, 200e9, "8 H100 and 8 links of 200 Gb/s per node", ("h100-tcpxo",), 8),
    _publish("gh200-slingshot", 2e-6, 100e9, "4 GH200 and 4 Slingshot links per node", ("gh200",), 4),
    _publish("mi250x-slingshot", 2e-6, 100e9, "8 MI250X dies and 4 Slingshot links per node", ("mi250x",), 8),
    _publish("b200-roce", 2e-6, 400e9, "8 B200 and 8 links of 400 Gb/s per node", ("b200-roce",), 8),
    _publish("h200-roce", 2e-6, 50e9, "one H200 and one 400 Gb/s link per node", ("h200-roce",)),
)


def _correct(network: Network) -> Network:
    return replace(network, correction=SLOW if network.bandwidth_bytes_per_s <= _SLOW_BYTES_PER_S else CORRECTION)


NETWORKS = (*map(_correct, _SHEETS), *_MEASURED)


def find_network(text: str) -> Network:
    """A network by name, or by rate and latency, such as `10Gb/s,50us` (bits) or `1.25GB/s,50us` (bytes)."""
    known = {network.name: network for network in NETWORKS}
    name = text.strip().lower()
    if name in known:
        return known[name]
    if match := _CUSTOM.fullmatch(re.sub(r"\s", "", text)):
        rate, prefix, unit, latency, second = match.groups()
        bytes_per_s = float(rate) * _PREFIXES[prefix] / (1 if unit == "B" else 8)
        return _correct(Network(text.strip(), float(latency) * _SECONDS[second], bytes_per_s, "as specified"))
    listed = f"use one of {', '.join(known)}, or a rate and latency such as 10Gb/s,50us"
    raise ConfigError(f"unknown network {text!r}: {suggest(name, known)}{listed}")


def find_networks(text: str) -> list[Network]:
    """Distinct networks from a comma-separated list. A network specified by rate and latency also contains a comma."""
    parts = [part.strip() for part in re.findall(r"[^,]*/s\s*,[^,]+|[^,]+", text)]
    found = [find_network(part) for part in dict.fromkeys(filter(None, parts))]
    if not found:
        raise ConfigError(f"--network {text!r} is empty: use one of {', '.join(known.name for known in NETWORKS)}")
    return list(dict.fromkeys(found))


def find_links(text: str) -> list[Network]:
    """Networks between hosts, from a comma-separated list. Refuses published networks with several ranks per node."""
    found = find_networks(text)
    for network in found:
        if network.ranks_per_node > 1:
            whole = f"--network {network.name} was measured with {network.ranks_per_node} ranks per node"
            raise ConfigError(f"{whole}, but this needs a link between hosts: use one such as hdr or 10gbe")
    return found


def describe_uncertainty(networks: Iterable[Network]) -> str:
    """The uncertainties (one standard deviation) that the intervals include, in words, for the networks in use."""
    used = {bool(network.sweeps) for network in networks}
    kinds = ((False, "data-sheet networks", SHEET_ERRORS), (True, "published networks", SITE_ERRORS))
    named = [
        f"{max(errors)[1]:.0%} to {max(sd for _, sd in errors):.0%} for {what}, more for small messages"
        for is_public, what, errors in kinds
        if is_public in used
    ]
    others = f"{ERROR_PER_DOUBLING:.0%} per doubling, plus {FIRST_NODE_ERROR:.0%} from one node to several"
    return "; ".join([*named, f"for other rank counts {others}"])


@dataclass(frozen=True)
class AssumedFabric:
    """A named network. With several ranks per node, it connects the nodes, and `inside`, a network or a sweep,
    connects the ranks of a node. A published network defines its own nodes. `shift` moves all times by that many
    standard deviations of the network's uncertainty."""

    network: Network
    inside: Network | MeasuredFabric
    ranks_per_node: int = 1
    algorithm: str = "auto"
    shift: float = 0.0

    def __post_init__(self) -> None:
        curves.check_algorithm(self.algorithm)
        name, own, given = self.network.name, self.network.ranks_per_node, self.ranks_per_node
        is_flat = self.algorithm == "two-level" and given == 1
        has_nodes = own > 1 and isinstance(self.inside, MeasuredFabric)
        refuse(
            (given < 1, f"--ranks-per-node {given}: use 1 or more"),
            (self.algorithm == "shared", "shared memory is not a network: use an --allreduce run of a host"),
            (is_flat, "algorithm two-level with 1 rank per node has only one level: set --ranks-per-node"),
            (1 < given != own > 1, f"--ranks-per-node {given}: {name} was measured with {own}; omit the option"),
            (has_nodes, f"{name} has its own nodes: omit --ranks-per-node to compare the sweep with it"),
        )

    @property
    def name(self) -> str:
        return self.network.name

    @property
    def servers(self) -> int:
        return SERVERS.get(self.algorithm, 1)

    @property
    def assumptions(self) -> tuple[str, ...]:
        if self.ranks_per_node == 1 or self.network.ranks_per_node > 1:
            return (self.network.describe("out of each rank"),)
        between = self.network.describe(f"out of each node, shared by its {self.ranks_per_node} ranks")
        if isinstance(self.inside, MeasuredFabric):
            return (between, *self.inside.assumptions)
        return between, self.inside.describe("out of each rank inside a node")

    def build_curve(self, world_size: int) -> CostCurve:
        asked, per_node, inside = self.algorithm, self.ranks_per_node, self.inside
        flat = ("ring", "tree") if asked == "auto" else (asked,)
        if self.network.ranks_per_node > 1:
            return self._on(self.network, flat, world_size)
        if world_size <= per_node and per_node > 1:
            return self._on(inside, ("ring",) if asked == "two-level" else flat, world_size, "inside")
        two_level = curves.join_levels(*self.build_levels(world_size))
        is_measured = isinstance(inside, MeasuredFabric) or bool(inside.sweeps or self.network.sweeps)
        if asked == "two-level" or (per_node > 1 and is_measured):
            return two_level
        slower = self.network
        if per_node > 1:  # a flat algorithm uses both kinds of links and is limited by the slower one
            assert isinstance(inside, Network)
            latency_s = max(slower.latency_s, inside.latency_s)
            rate = min(slower.bandwidth_bytes_per_s, inside.bandwidth_bytes_per_s)
            slower = replace(slower, latency_s=latency_s, bandwidth_bytes_per_s=rate)
        found = self._on(slower, flat, world_size)
        return curves.choose_best([found, two_level]) if asked == "auto" and per_node > 1 else found

    def build_levels(self, world_size: int) -> tuple[CostCurve, CostCurve]:
        """The cost curves inside a node and between nodes."""
        if self.network.ranks_per_node > 1:
            raise _no_levels(self.name)
        nodes = self._on(self.network, ("ring", "tree"), math.ceil(world_size / self.ranks_per_node))
        return self._on(self.inside, ("ring",), self.ranks_per_node), nodes

    def _on(self, network: Network | MeasuredFabric, names: Iterable[str], count: int, place: str = "") -> CostCurve:
        """The cost curve of a network on this many ranks: the measured curve, or the fastest of several algorithms."""
        if isinstance(network, MeasuredFabric):
            return network.build_curve(count)
        if network.sweeps:
            return replace(build_public_fabric(network), shift=self.shift).build_curve(count)
        less = network.correction
        rates = (network.latency_s * less.latency, network.bandwidth_bytes_per_s * less.efficiency)
        family = functools.partial(FamilyCurve, overhead_s=less.overhead_s, ramp=less.ramp, place=place)
        best = curves.choose_best([family(name, count, *rates) for name in names])

        def vary(num_bytes: float) -> float:
            return math.exp(self.shift * curves.interpolate_sizes(SHEET_ERRORS, num_bytes))

        return curves.multiply_curve(best, vary) if self.shift else best

    def draw(self, source: random.Random, shift: float | None = None) -> AssumedFabric:
        """A random draw of the fabric, or the fabric with the given shift."""
        inside = self.inside.draw(source, shift) if isinstance(self.inside, MeasuredFabric) else self.inside
        return replace(self, shift=source.gauss(0, 1) if shift is None else shift, inside=inside)


def _no_levels(name: str) -> ConfigError:
    text = f"{name} was measured inside and between nodes together, but +hosts treats them differently"
    return ConfigError(f"{text}: use a link such as hdr or 10gbe with --ranks-per-node", code="strategy")


@functools.cache
def build_public_fabric(network: Network) -> MeasuredFabric:
    """The tables of a published network as one sweep; each source counts as a repetition."""
    points = [(size, sweep.ranks, seconds) for sweep in network.sweeps for size, seconds in sweep.points]
    launch = _LAUNCH if all(sweep.nodes == 1 for sweep in network.sweeps) else 0.0
    fits = tuple(curves.fit_family(points, name, launch) for name in ("ring", "tree"))
    sweeps = _group_sweeps((ranks, size, (SITE_FACTOR * seconds,)) for size, ranks, seconds in points)
    return MeasuredFabric(network.name, network.name, sweeps, fits, network.ranks_per_node, errors=SITE_ERRORS)


def _group_sweeps(points: Iterable[tuple[int, int, tuple[float, ...]]]) -> dict[int, dict[int, tuple[float, ...]]]:
    """The seconds of all repetitions by ranks and size, both ascending."""
    sweeps: dict[int, dict[int, tuple[float, ...]]] = {}
    for ranks, size, seconds in sorted(points, key=lambda point: point[:2]):
        by_size = sweeps.setdefault(ranks, {})
        by_size[size] = by_size.get(size, ()) + seconds
    return sweeps


@dataclass(frozen=True)
class MeasuredFabric:
    """Sweeps of one backend. Measured rank counts are used as they are; others are scaled from the nearest one with the
    fits. `sweeps` maps ranks and sizes, both ascending, to the seconds of all repetitions. `what` is the name with
    device and dtype. `ranks_per_node` ranks share a node (0 if unknown); measurements on one node do not predict
    several nodes well. `cores` are the host's cores that move messages: 0 if none, None if unknown. `errors` are the
    standard deviations of the sweeps themselves, and `shift` moves the times by that many standard deviations."""

    name: str
    what: str
    sweeps: Mapping[int, Mapping[int, Sequence[float]]]
    fits: tuple[FamilyCurve, ...]
    ranks_per_node: int = 0
    cores: int | None = 0
    errors: Errors = ((1, 0.0),)
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
        others = "share the same host's memory" if shares else "have links as fast as the measured ones"
        nodes = f", {self.ranks_per_node} per node" if self.ranks_per_node else ""
        return (
            f"{self.what}: all-reduce measured on {ranks} ranks{nodes}",
            *(
                f"{self.name} on other rank counts: scaled as {fit.algorithm} with {format_duration(fit.alpha_s)} and "
                f"{format_rate(fit.bytes_per_s)} GB/s, which fits the sweep within {fit.error:.0%}"
                for fit in self.fits
            ),
            f"{self.name}: additional ranks {others}",
        )

    def _is_beyond(self, world_size: int) -> bool:
        """Whether this many ranks span several nodes."""
        return 0 < self.ranks_per_node < world_size

    def _may_be_beyond(self, world_size: int) -> bool:
        """Whether these ranks may span more nodes than the measured ones did; unknown without `ranks_per_node`."""
        is_shared = self.fits[0].algorithm == "shared"  # always on one host
        return not self.ranks_per_node and not is_shared and world_size > max(self.ranks)

    def _estimate_crowd(self, world_size: int) -> float:
        """The slowdown factor of messages when threads wait for a core."""
        here, family = min(world_size, self.ranks_per_node or world_size), self.fits[0].algorithm
        if self.cores is None:
            return math.pow(here, _UNKNOWN_CORES)
        threads, power = _CROWDING.get(family, (0, 1.0))
        return max(1.0, here * threads / self.cores) ** power if self.cores else 1.0

    def build_curve(self, world_size: int) -> CostCurve:
        is_beyond = self._is_beyond(world_size)
        alike = [count for count in self.sweeps if self._is_beyond(count) == is_beyond]
        nearest = curves.find_nearest(alike or self.sweeps, world_size)
        crowd = self._estimate_crowd(world_size) / self._estimate_crowd(nearest)
        measured = curves.fit_curve(
            (size, statistics.median(times) * crowd) for size, times in self.sweeps[nearest].items()
        )
        is_nccl = self.fits[0].algorithm in ("ring", "tree")
        growth = _FROM_TWO if is_nccl and nearest == 2 < world_size <= _MOST_GPUS and not is_beyond else 1.0
        scaled = curves.choose_best(
            [curves.scale_curve(measured, fit, nearest, world_size, growth) for fit in self.fits]
        )
        error, power, doubt = ERROR_PER_DOUBLING * math.sqrt(abs(math.log2(world_size / nearest))), 0, ""
        if not alike and world_size > 1:
            error, power = math.hypot(error, FIRST_NODE_ERROR), 1 if is_beyond else -1
            here, there = ("several nodes", "one") if is_beyond else ("one node", "several")
            doubt = f"{world_size:,} ranks are on {here}, but all measurements are from {there}"
            doubt += " (use a --network with --ranks-per-node)" if is_beyond else ""
        elif self._may_be_beyond(world_size):
            error = math.hypot(error, FIRST_NODE_ERROR)
            power = int(max(self.ranks) <= _MOST_GPUS < world_size and self.fits[0].algorithm != "gloo")
            doubt = f"cannot tell how many of the {world_size:,} ranks share a node: set --ranks-per-node"
        if not self.shift and not doubt:
            return scaled

        def vary(num_bytes: float) -> float:
            whole = math.hypot(
                error, estimate_error_below(measured, num_bytes), curves.interpolate_sizes(self.errors, num_bytes)
            )
            return math.exp(self.shift * whole) * curves.interpolate_sizes(FIRST_NODE, num_bytes) ** power

        return curves.multiply_curve(scaled, vary, doubt)

    def build_levels(self, world_size: int) -> tuple[CostCurve, CostCurve]:
        raise _no_levels(self.name)

    def draw(self, source: random.Random, shift: float | None = None) -> MeasuredFabric:
        """A random draw of the fabric, or the fabric with the given shift."""
        sweeps = {
            count: {
                size: curves.Resample(source, find_noise(times) > UNSTABLE).take(times)
                for size, times in by_size.items()
            }
            for count, by_size in self.sweeps.items()
        }
        return replace(self, sweeps=sweeps, shift=source.gauss(0, 1) if shift is None else shift)


Fabric = AssumedFabric | MeasuredFabric


def estimate_error_below(curve: MeasuredCurve, num_bytes: float) -> float:
    """The standard deviation of log(time) for a message below the smallest measured size, 0 for others."""
    return ERROR_PER_DOUBLING * math.sqrt(max(0.0, math.log2(curve.sizes[0] / max(1.0, num_bytes))))


def list_networks(fabrics: Iterable[Fabric]) -> list[Network]:
    """The named networks of these fabrics; the one inside nodes only if there are several ranks per node."""
    found: list[Network | MeasuredFabric] = []
    for fabric in fabrics:
        if isinstance(fabric, AssumedFabric):
            has_nodes = fabric.ranks_per_node > 1 and fabric.network.ranks_per_node == 1
            found += [fabric.network, *([fabric.inside] if has_nodes else [])]
    return [network for network in found if isinstance(network, Network)]


def build_measured_fabric(
    records: Sequence[CollectiveRecord], backend: str | None, algorithm: str = "auto", memory: str = "shared",
    ranks_per_node: int = 0, cores: int = 0,
) -> MeasuredFabric:  # fmt: skip
    """The sweep of one backend, with its algorithm's known family unless one is specified. `memory` selects the records
    if a backend was measured on both ordinary and shared memory; the buckets of Paceline's wrapper are in shared
    memory. `ranks_per_node` applies only if the records do not contain it, and `cores` only if they were measured on
    one host."""
    curves.check_algorithm(algorithm)
    if algorithm == "two-level":
        raise ConfigError("algorithm two-level cannot be fitted to one sweep: use a --network with --ranks-per-node")
    records = [record for record in records if record.collective == "all_reduce" and record.world_size > 1]
    if not records:
        raise RecordError("the run has no all-reduce on two or more ranks: measure one with `bench allreduce`")
    if backend is not None:
        there, wanted = sorted({record.backend for record in records}), canonical_backend(backend)
        records = [record for record in records if canonical_backend(record.backend) == wanted]
        if not records:
            raise ConfigError(f"the run has no all-reduce on the backend {backend}, only on {', '.join(there)}")
    if len({record.backend for record in records}) == 1:
        records = [record for record in records if record.memory == memory] or records
    kinds = sorted({f"{_name(record)} on {record.device} in {record.dtype}" for record in records})
    if len(kinds) > 1:
        is_of_one = len({(_name(record), record.device) for record in records}) == 1
        remedy = "keep the rows of one dtype" if is_of_one else "choose one with --backend"
        raise ConfigError(f"the run has several curves ({'; '.join(kinds)}): {remedy}")
    if len(sources := dict.fromkeys(record.note for record in records if record.source == "imported")) > 1:
        raise ConfigError(f"the table has several sources ({'; '.join(sources)}): keep the rows of one source")
    fits_host = max(cores, *(record.world_size for record in records)) if cores else 0
    per_node = find_ranks_per_node(records, ranks_per_node if ranks_per_node > 1 else fits_host or ranks_per_node)
    own = {"gloo": ("gloo",), "shm": ("shared",)}.get(canonical_backend(records[0].backend), ("ring", "tree"))
    launch = _LAUNCH if "ring" in own and not 0 < per_node < max(r.world_size for r in records) else 0.0
    points = [(record.num_bytes, record.world_size, statistics.median(list_seconds(record))) for record in records]
    names = own if algorithm == "auto" else (algorithm,)
    try:
        fits = tuple(curves.fit_family(points, name, launch) for name in names)
    except MeasurementError as error:
        raise RecordError(f"{kinds[0]}: {error}") from None
    found = _group_sweeps((record.world_size, record.num_bytes, list_seconds(record)) for record in records)
    sweeps = {count: by_size for count, by_size in found.items() if len(by_size) > 1}
    if not sweeps:
        raise RecordError("the run has one size per rank count: a curve needs two or more")
    is_unknown = own == ("gloo",) and not cores and per_node and all(r.source == "imported" for r in records)
    return MeasuredFabric(_name(records[0]), kinds[0], sweeps, fits, per_node, None if is_unknown else cores)


def find_ranks_per_node(records: Sequence[CollectiveRecord], given: int = 0) -> int:
    """The number of ranks that share a node: from the records, otherwise the argument; 0 if neither is known."""
    found = max((math.ceil(record.world_size / record.nodes) for record in records if record.nodes > 1), default=0)
    least = max((record.world_size for record in records if record.nodes == 1), default=0)
    for record in records:
        if found and record.nodes not in (0, math.ceil(record.world_size / found)):
            has = f"{record.world_size} ranks on {record.nodes} nodes and others with {found} per node"
            raise RecordError(f"the sweep has {has}: keep the rows of one kind of node")
    if given > 1 and (found not in (0, given) or given < least):
        raise ConfigError(f"--ranks-per-node {given}: the sweep was measured with {found or least} per node")
    return found or max(given, least)


def build_sweeps(records: Sequence[CollectiveRecord]) -> list[MeasuredFabric]:
    """A fabric for each backend, device and dtype that has a curve."""
    reduced, found = (record for record in records if record.collective == "all_reduce"), []
    for kind in group_by(reduced, lambda record: (record.backend, record.device, record.dtype)).values():
        with contextlib.suppress(RecordError):  # no curve: only one size, or times that do not grow
            found.append(build_measured_fabric(kind, None))
    return found


def _name(record: CollectiveRecord) -> str:
    return record.backend if record.memory == "ordinary" else f"{record.backend} ({record.memory})"


def list_seconds(record: CollectiveRecord) -> tuple[float, ...]:
    """Times without the wait for a late rank, if the clocks show this wait; a single time if the table has only one."""
    if isinstance(record.timing, Samples):
        return record.timing.from_last_arrival_s or record.timing.reduced_s
    return (record.time_s,)
