"""Tables of a layer profile: its blocks, and its parameters in the order in which their gradients become ready."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.records import BlockTimes, LayerProfileRecord, ParameterTimes
from paceline.records.layers import OUTSIDE, CostRatio
from paceline.report.tables import Column
from paceline.units import format_bytes, format_ms

__all__ = [
    "BlockLine",
    "ParameterLine",
    "block_lines",
    "block_row",
    "block_table",
    "describe_profile",
    "parameter_lines",
    "parameter_row",
    "parameter_table",
]


@dataclass(frozen=True)
class BlockLine:
    """One block of a profile, or what is in none."""

    profile: LayerProfileRecord
    times: BlockTimes

    @property
    def forward_s(self) -> float:
        return statistics.median(self.times.forward_s)

    @property
    def backward_s(self) -> float:
        return statistics.median(self.times.backward_s)

    @property
    def num_bytes(self) -> int:
        return sum(parameter.num_bytes for parameter in self.profile.parameters_of(self.times.name))

    @property
    def ready_s(self) -> float | None:
        return self.profile.ready_of(self.times.name)

    @property
    def share(self) -> float:
        """Of the profiled backward."""
        whole_s = self.profile.profiled_backward.median_s
        return self.backward_s / whole_s if whole_s else 0.0


@dataclass(frozen=True)
class ParameterLine:
    """One parameter of a profile: its place in ready order, and the bytes ready with it."""

    profile: LayerProfileRecord
    index: int
    parameter: ParameterTimes
    ready_bytes: int

    @property
    def names(self) -> str:
        return " = ".join((self.parameter.name, *self.parameter.aliases))


def block_lines(profile: LayerProfileRecord) -> list[BlockLine]:
    """The blocks in the order of the model's definition, and the rest, so that the columns add up."""
    return [BlockLine(profile, times) for times in (*profile.blocks, profile.outside)]


def parameter_lines(profile: LayerProfileRecord) -> list[ParameterLine]:
    ready = itertools.accumulate(0 if p.median_s is None else p.num_bytes for p in profile.parameters)
    return [
        ParameterLine(profile, index, parameter, num_bytes)
        for index, (parameter, num_bytes) in enumerate(zip(profile.parameters, ready, strict=True))
    ]


def _ready(seconds: float | None) -> str:
    return "" if seconds is None else format_ms(seconds)


block_table: Sequence[Column] = (
    Column("block", lambda line: line.times.name, False),
    Column("gradients", lambda line: format_bytes(line.num_bytes)),
    Column("forward (ms)", lambda line: format_ms(line.forward_s)),
    Column("backward (ms)", lambda line: format_ms(line.backward_s)),
    Column("of backward", lambda line: f"{line.share:.1%}"),
    Column("last ready (ms)", lambda line: _ready(line.ready_s)),
    Column("source", lambda line: line.profile.source, False),
)

parameter_table: Sequence[Column] = (
    Column("#", lambda line: str(line.index)),
    Column("parameter", lambda line: line.names, False),
    Column("block", lambda line: line.parameter.block or OUTSIDE, False),
    Column("type", lambda line: line.parameter.dtype, False),
    Column("bytes", lambda line: format_bytes(line.parameter.num_bytes)),
    Column("ready (ms)", lambda line: _ready(line.parameter.median_s) or "never"),
    Column("ready so far", lambda line: format_bytes(line.ready_bytes)),
    Column("source", lambda line: line.profile.source, False),
)


def block_row(line: BlockLine) -> dict[str, Any]:
    """One block of `profile layers --json` and of its table.csv. Times are medians of the profiled steps."""
    return {
        "model": line.profile.model,
        "block": line.times.name,
        "num_bytes": line.num_bytes,
        "forward_s": line.forward_s,
        "backward_s": line.backward_s,
        "share_of_backward": line.share,
        "last_ready_s": line.ready_s,
        "source": line.profile.source,
    }


def parameter_row(line: ParameterLine) -> dict[str, Any]:
    """One parameter of `profile layers --json`."""
    return {
        "model": line.profile.model,
        "index": line.index,
        "parameter": line.parameter.name,
        "aliases": list(line.parameter.aliases),
        "block": line.parameter.block or None,
        "dtype": line.parameter.dtype,
        "num_bytes": line.parameter.num_bytes,
        "ready_s": line.parameter.median_s,
        "ready_bytes": line.ready_bytes,
        "source": line.profile.source,
    }


def _cost(ratio: CostRatio) -> str:
    verdict = "" if ratio.is_clear else ", within the noise"
    return f"{ratio.value - 1:+.1%} (p10 {ratio.p10 - 1:+.1%}, p90 {ratio.p90 - 1:+.1%}{verdict})"


def describe_profile(profile: LayerProfileRecord) -> list[str]:
    """What the tables do not show: the plain step, what profiling costs, and what is odd about the gradients."""
    lines = [
        f"plain step {format_ms(profile.timing.median_s)} ms: forward {format_ms(profile.forward.median_s)}, backward "
        f"{format_ms(profile.backward.median_s)}, optimizer {format_ms(profile.optimizer.median_s)}",
        f"profiling costs {_cost(profile.step_cost)} of a step, {_cost(profile.backward_cost)} of backward",
        "gradients became ready in the same order in every step"
        if profile.is_order_stable
        else "the order in which gradients became ready changed between steps: it is that of the medians",
    ]
    tied = [p for p in profile.parameters if p.aliases]
    if tied:
        names = "; ".join(" = ".join((p.name, *p.aliases)) for p in tied)
        lines.append(f"tied, and ready only after the last use: {names}")
    if profile.unused:
        lines.append(f"without a gradient: {', '.join(p.name for p in profile.unused)}")
    return [*lines, profile.note] if profile.note else lines
