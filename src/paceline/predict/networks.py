"""Networks by name, and what an all-reduce takes on them. The numbers are assumptions, each with its source.

What one step of a model sends is put together in `comm_table`; curves that were measured are fitted in `costs`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.predict.costs import AlphaBeta, fit_collectives
from paceline.records import CollectiveRecord
from paceline.units import format_duration, format_rate

__all__ = [
    "NETWORKS",
    "MeasuredNetwork",
    "Network",
    "build_measured_networks",
    "estimate_allreduce",
    "find_network",
    "find_networks",
]

_CUSTOM = re.compile(r"(\d+(?:\.\d+)?)([kMGT]?)(b|bit|B)/s,(\d+(?:\.\d+)?)(ns|us|µs|ms|s)")
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


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

    @property
    def assumption(self) -> str:
        """What an estimate on this network takes for granted."""
        rate, latency = format_rate(self.bandwidth_bytes_per_s), format_duration(self.latency_s)
        return f"ring, {rate} GB/s and {latency} between neighbours ({self.note})"


@dataclass(frozen=True)
class MeasuredNetwork:
    """The line through measured all-reduces; it holds for the ranks that were measured."""

    name: str
    world_size: int
    line: AlphaBeta

    @property
    def assumption(self) -> str:
        return (
            f"line through {len(self.line.residuals)} measured all-reduces on {self.world_size} ranks, off by "
            f"{self.line.max_rel_residual:.0%} at most"
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


def build_measured_networks(records: Sequence[CollectiveRecord]) -> list[MeasuredNetwork]:
    """One for each curve of measured all-reduces that has a line."""
    fits = fit_collectives([record for record in records if record.collective == "all_reduce"])
    return [MeasuredNetwork(f"{record.backend} {record.device}", record.world_size, line) for record, line in fits]


def estimate_allreduce(num_bytes: int, world_size: int, network: Network | MeasuredNetwork) -> float:
    """Seconds of one all-reduce: on an assumed network that of a ring, 2(P-1) latency + 2(P-1)/P bytes / bandwidth.

    A tree would have fewer latencies, and real rings do not reach the line rate: the result is an estimate.
    """
    if num_bytes < 0 or world_size < 1:
        raise ConfigError(f"an all-reduce of {num_bytes} bytes on {world_size} ranks: at least 0 bytes and 1 rank")
    if world_size == 1 or num_bytes == 0:
        return 0.0
    if isinstance(network, MeasuredNetwork):
        if world_size != network.world_size:
            raise ConfigError(
                f"{network.name} was measured on {network.world_size} ranks and is asked for {world_size}: "
                "measure it there, or name an assumed network"
            )
        return network.line.estimate_s(num_bytes)
    steps = 2 * (world_size - 1)
    return steps * network.latency_s + steps / world_size * num_bytes / network.bandwidth_bytes_per_s
