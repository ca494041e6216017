"""One large all-reduce against many small ones: a fixed total, cut into chunks of many sizes.

All chunks are launched before the first is waited for, as a wrapper launches its buckets.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from paceline.measure.engine import Allocator, Contestant, Group, Measured, measure_cells
from paceline.measure.pattern import Pattern
from paceline.measure.settings import ChunkSettings
from paceline.records import ChunksRecord

__all__ = ["measure_chunks"]


def measure_chunks(settings: ChunkSettings) -> Measured:
    """Time and check the total in every chunk size. Collective: every rank of the launched world must call this."""
    dtype = getattr(torch, settings.dtype)

    def build_contestant(group: Group, rank: int, chunk_bytes: int, allocate: Allocator) -> Contestant:
        vector = allocate("vector", settings.total_bytes // settings.item_bytes, dtype, group.device)
        chunks = vector.split(chunk_bytes // settings.item_bytes)
        pattern = Pattern(group.world_size, dtype, "sum", group.device)

        def reduce_chunks() -> None:
            works: list[Any] = [dist.all_reduce(chunk, group=group.data, async_op=True) for chunk in chunks]
            for work in works:
                work.wait()

        return Contestant(
            device=group.device,
            prepare=lambda repetition: pattern.fill(vector, rank, repetition),
            call=reduce_chunks,
            count_wrong=lambda repetition: pattern.count_wrong(vector, repetition),
            num_elements=vector.numel(),
        )

    def build_record(group: Group, chunk_bytes: int, **measured: Any) -> ChunksRecord:
        return ChunksRecord(
            backend=group.backend,
            device=group.device.type,
            world_size=group.world_size,
            total_bytes=settings.total_bytes,
            chunk_bytes=chunk_bytes,
            dtype=settings.dtype,
            **measured,
        )

    return measure_cells(settings, settings.chunks, list, build_contestant, build_record)
