"""The collectives that can be measured: how each is filled, called and checked, and its records.

A collective is a record of functions; `engine` times them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.measure.engine import Allocator, Contestant, Group, Measured, measure_cells
from paceline.measure.memory_passes import PASSES, build_pass
from paceline.measure.pattern import Pattern
from paceline.measure.settings import REDUCING, CollectiveSettings
from paceline.records import CollectiveRecord, MemoryRecord, Record
from paceline.transport.group import PacelineGroup

__all__ = ["COLLECTIVES", "Buffers", "Collective", "measure_collectives"]

# torch 2.13 renames these two; 2.11 has only the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Buffers:
    """The full vector and, for the collectives that are not in place, one rank's share of it."""

    vector: torch.Tensor
    share: torch.Tensor


@dataclass(frozen=True)
class Collective:
    """How to run and check one collective on a vector and, where it is not in place, a share of 1/n of it.

    `fill(buffers, pattern, rank, repetition)`, `call(buffers, op, group)`, and `count_wrong` with fill's arguments.
    """

    fill: Callable[[Buffers, Pattern, int, int], None]
    call: Callable[[Buffers, dist.ReduceOp.RedOpType, dist.ProcessGroup], Any]
    count_wrong: Callable[[Buffers, Pattern, int, int], int]
    output: Callable[[Buffers], torch.Tensor]
    needs_share: bool = False


def _fill_root(b: Buffers, pattern: Pattern, rank: int, repetition: int) -> None:
    if rank == 0:
        pattern.fill(b.vector, 0, repetition)
    else:
        b.vector.zero_()


def _fill_share(b: Buffers, pattern: Pattern, rank: int, repetition: int) -> None:
    pattern.fill(b.share, rank, repetition)
    b.vector.zero_()


def _fill_vector(b: Buffers, pattern: Pattern, rank: int, repetition: int) -> None:
    pattern.fill(b.vector, rank, repetition)
    b.share.zero_()


def _count_wrong_shares(b: Buffers, pattern: Pattern, rank: int, repetition: int) -> int:
    parts = b.vector.split(b.share.numel())
    return sum(pattern.count_wrong(part, repetition, rank=peer) for peer, part in enumerate(parts))


COLLECTIVES = {
    "all_reduce": Collective(
        fill=_fill_vector,
        call=lambda b, op, group: dist.all_reduce(b.vector, op, group),
        count_wrong=lambda b, pattern, rank, repetition: pattern.count_wrong(b.vector, repetition),
        output=lambda b: b.vector,
    ),
    "all_gather": Collective(
        fill=_fill_share,
        call=lambda b, op, group: _all_gather(b.vector, b.share, group),
        count_wrong=_count_wrong_shares,
        output=lambda b: b.vector,
        needs_share=True,
    ),
    "reduce_scatter": Collective(
        fill=_fill_vector,
        call=lambda b, op, group: _reduce_scatter(b.share, b.vector, op, group),
        count_wrong=lambda b, pattern, rank, repetition: pattern.count_wrong(
            b.share, repetition, offset=rank * b.share.numel()
        ),
        output=lambda b: b.share,
        needs_share=True,
    ),
    "broadcast": Collective(
        fill=_fill_root,
        call=lambda b, op, group: dist.broadcast(b.vector, 0, group),
        count_wrong=lambda b, pattern, rank, repetition: pattern.count_wrong(b.vector, repetition, rank=0),
        output=lambda b: b.vector,
    ),
}
_OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}  # fmt: skip


@dataclass(frozen=True)
class _Turn:
    """Who takes a turn: a collective on a group with its vector in one kind of memory, or else a pass over memory."""

    group: Group
    memory: str = "ordinary"
    operation: str | None = None


def _list_turns(settings: CollectiveSettings, groups: Sequence[Group]) -> list[_Turn]:
    turns = [_Turn(group, memory) for group in groups for memory in settings.memories_of(group.backend)]
    if settings.limit:
        first_on: dict[torch.device, Group] = {}
        for group in groups:
            first_on.setdefault(group.device, group)
        turns += [_Turn(group, operation=operation) for group in first_on.values() for operation in PASSES]
    return turns


def _share_vector(group: Group, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """A vector in memory that the ranks share. Collective: every rank of the group must call this."""
    assert isinstance(group.data, PacelineGroup)
    if not group.data.shares_memory:
        raise ConfigError("--memory shared needs all ranks on one host: use --memory ordinary")
    vector: torch.Tensor = group.data.allocate(elements * dtype.itemsize).view(dtype)
    return vector


def measure_collectives(settings: CollectiveSettings) -> Measured:
    """Time and check every cell of the settings. Collective: every rank of the launched world must call this."""
    collective, dtype = COLLECTIVES[settings.collective], getattr(torch, settings.dtype)

    def build_contestant(turn: _Turn, rank: int, num_bytes: int, allocate: Allocator) -> Contestant:
        group = turn.group
        elements = settings.num_elements(num_bytes, group.world_size)
        if turn.operation is not None:
            return build_pass(turn.operation, group, rank, elements, dtype, allocate)
        share = elements // group.world_size if collective.needs_share else 0
        is_shared = turn.memory == "shared"
        buffers = Buffers(
            _share_vector(group, elements, dtype) if is_shared else allocate("vector", elements, dtype, group.device),
            allocate("share", share, dtype, group.device),
        )
        pattern = Pattern(group.world_size, dtype, settings.op, group.device)
        return Contestant(
            device=group.device,
            prepare=lambda repetition: collective.fill(buffers, pattern, rank, repetition),
            call=lambda: collective.call(buffers, _OPS[settings.op], group.data),
            count_wrong=lambda repetition: collective.count_wrong(buffers, pattern, rank, repetition),
            num_elements=collective.output(buffers).numel(),
        )

    def build_record(turn: _Turn, num_bytes: int, **measured: Any) -> Record:
        group = turn.group
        measured |= {
            "device": group.device.type,
            "world_size": group.world_size,
            "num_bytes": settings.num_elements(num_bytes, group.world_size) * settings.item_bytes,
            "dtype": settings.dtype,
        }
        if turn.operation is not None:
            return MemoryRecord(operation=turn.operation, **measured)
        return CollectiveRecord(
            collective=settings.collective,
            backend=group.backend,
            memory=turn.memory,
            op=settings.op if settings.collective in REDUCING else "none",
            **measured,
        )

    def list_turns(groups: Sequence[Group]) -> list[_Turn]:
        return _list_turns(settings, groups)

    return measure_cells(settings, settings.sizes, list_turns, build_contestant, build_record)
