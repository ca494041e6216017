"""The measurable collectives: objects that prepare their data, run the call, and check every element.

`engine` times them. The module also defines a chunked all-reduce and memory passes, which bound all-reduce bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.measure.bench_settings import REDUCING, ChunkSettings, CollectiveSettings, GroupSettings, Measured
from paceline.measure.engine import Allocator, Group, Timed, measure_cells
from paceline.records import ChunksRecord, CollectiveRecord, MemoryRecord, Record
from paceline.transport.group import PacelineGroup

# torch 2.13 renames these two; 2.11 has only the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS = {
    "sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}  # fmt: skip


def measure_collectives(settings: CollectiveSettings) -> Measured:
    """Time and check every cell of `bench allreduce`. Collective: call on every rank of the launched world."""

    def build(groups: Sequence[Group], num_bytes: int, allocate: Allocator) -> list[Timed]:
        kind = COLLECTIVES[settings.collective]
        timed: list[Timed] = [
            kind(settings, group, num_bytes, allocate, memory)
            for group in groups
            for memory in settings.memories_of(group.backend)
        ]
        for group in groups if settings.limit else ():
            if group is next(other for other in groups if other.device == group.device):
                timed += [make(settings, group, num_bytes, allocate) for make in (MemoryAdd, MemoryCopy)]
        return timed

    return measure_cells(settings, settings.sizes, build)


def measure_chunks(settings: ChunkSettings) -> Measured:
    """Time and check the all-reduce at every chunk size. Collective: call on every rank of the launched world."""
    return measure_cells(
        settings, settings.chunks, lambda groups, *size: [ChunkedAllReduce(settings, group, *size) for group in groups]
    )


class _Vector(Timed):
    """An operation on a vector of known data on every rank."""

    def __init__(
        self, settings: GroupSettings, group: Group, elements: int, allocate: Allocator, record: Callable[..., Record],
        op: str = "sum", memory: str = "ordinary",
    ) -> None:  # fmt: skip
        self.dtype = getattr(torch, settings.dtype)
        self.device = group.device
        self.group = group.data
        self.rank = dist.get_rank()
        self.op = _OPS[op]
        self.num_elements = elements
        self.pattern = Pattern(group.world_size, self.dtype, op, group.device)
        if memory == "shared":
            assert isinstance(group.data, PacelineGroup)
            if not group.data.shares_memory:
                raise ConfigError("--memory shared needs all ranks on one host: use --memory ordinary")
            self.vector = group.data.allocate(elements * self.dtype.itemsize).view(self.dtype)
        else:
            self.vector = allocate("vector", elements, self.dtype, group.device)
        self.record = partial(record, device=group.device.type, world_size=group.world_size, dtype=settings.dtype)

    def prepare(self, repetition: int) -> None:
        self.pattern.fill(self.vector, self.rank, repetition)

    def check(self, repetition: int) -> int:
        return self.pattern.count_wrong(self.vector, repetition)


class AllReduce(_Vector):
    """Reduces a vector in place. Other collectives override `prepare`, `call` and `check`; some also use `share`, which
    is 1/n of the vector."""

    def __init__(
        self, settings: CollectiveSettings, group: Group, num_bytes: int, allocate: Allocator, memory: str
    ) -> None:
        elements = settings.num_elements(num_bytes, group.world_size)
        op = settings.op
        record = partial(
            CollectiveRecord, collective=settings.collective, backend=group.backend, memory=memory,
            op=op if settings.collective in REDUCING else "none", num_bytes=elements * settings.item_bytes,
        )  # fmt: skip
        super().__init__(settings, group, elements, allocate, record, op, memory)
        share = elements // group.world_size if settings.has_shares else 0
        self.share = allocate("share", share, self.dtype, group.device)

    def call(self) -> Any:
        return dist.all_reduce(self.vector, self.op, self.group)


class AllGather(AllReduce):
    """Gathers every rank's part into the vector."""

    def prepare(self, repetition: int) -> None:
        self.pattern.fill(self.share, self.rank, repetition)
        self.vector.zero_()

    def call(self) -> Any:
        return _all_gather(self.vector, self.share, self.group)

    def check(self, repetition: int) -> int:
        parts = self.vector.split(self.share.numel())
        return sum(self.pattern.count_wrong(part, repetition, rank=rank) for rank, part in enumerate(parts))


class ReduceScatter(AllReduce):
    """Reduces the vectors and leaves each rank one part of the result."""

    def prepare(self, repetition: int) -> None:
        super().prepare(repetition)
        self.share.zero_()
        self.num_elements = self.share.numel()

    def call(self) -> Any:
        return _reduce_scatter(self.share, self.vector, self.op, self.group)

    def check(self, repetition: int) -> int:
        return self.pattern.count_wrong(self.share, repetition, offset=self.rank * self.share.numel())


class Broadcast(AllReduce):
    """Sends rank 0's vector to all ranks."""

    def prepare(self, repetition: int) -> None:
        if self.rank == 0:
            super().prepare(repetition)
        else:
            self.vector.zero_()

    def call(self) -> Any:
        return dist.broadcast(self.vector, 0, self.group)

    def check(self, repetition: int) -> int:
        return self.pattern.count_wrong(self.vector, repetition, rank=0)


COLLECTIVES: dict[str, type[AllReduce]] = {
    "all_reduce": AllReduce, "all_gather": AllGather, "reduce_scatter": ReduceScatter, "broadcast": Broadcast,
}  # fmt: skip


class ChunkedAllReduce(_Vector):
    """Reduces a vector in chunks and launches them all before waiting for the first, as a wrapper launches buckets."""

    def __init__(self, settings: ChunkSettings, group: Group, chunk_bytes: int, allocate: Allocator) -> None:
        total = settings.total_bytes
        record = partial(ChunksRecord, backend=group.backend, total_bytes=total, chunk_bytes=chunk_bytes)
        super().__init__(settings, group, total // settings.item_bytes, allocate, record)
        self.chunks = self.vector.split(chunk_bytes // settings.item_bytes)

    def call(self) -> None:
        works: list[Any] = [dist.all_reduce(chunk, group=self.group, async_op=True) for chunk in self.chunks]
        for work in works:
            work.wait()


class MemoryAdd(_Vector):
    """Measures memory bandwidth: all ranks add a number to their vectors in place, at the same time.

    `MemoryBounds` combines this with `MemoryCopy` into a bound for an all-reduce of the same vector.
    """

    operation = "add"

    def __init__(self, settings: CollectiveSettings, group: Group, num_bytes: int, allocate: Allocator) -> None:
        elements = settings.num_elements(num_bytes, group.world_size)
        record = partial(MemoryRecord, operation=self.operation, num_bytes=elements * settings.item_bytes)
        super().__init__(settings, group, elements, allocate, record)
        self.target = self.vector if self.operation == "add" else allocate("target", elements, self.dtype, group.device)

    def call(self) -> Any:
        return self.vector.add_(1)

    def check(self, repetition: int) -> int:
        # Exact: the values are small integers.
        return self.pattern.count_wrong(self.vector.sub_(1), repetition, rank=self.rank)


class MemoryCopy(MemoryAdd):
    """Measures memory bandwidth by copying into another vector."""

    operation = "copy"

    def prepare(self, repetition: int) -> None:
        # Write the source last, to leave it in the caches, as for an all-reduce.
        self.target.fill_(-1 if self.dtype.is_signed else 255)
        super().prepare(repetition)

    def call(self) -> Any:
        return self.target.copy_(self.vector)

    def check(self, repetition: int) -> int:
        return self.pattern.count_wrong(self.target, repetition, rank=self.rank)


_PERIOD = 4093  # prime, so that a shift by a power of two changes the data
_BLOCK = 64 * _PERIOD  # elements written or compared at once, which avoids message-sized temporaries
# Integer sums up to this bound are exact in the type, in any order of summation.
_EXACT = {
    torch.float32: 2**24, torch.float64: 2**53, torch.float16: 2**11, torch.bfloat16: 2**8,
    torch.int32: 2**31 - 1, torch.int64: 2**63 - 1, torch.uint8: 2**8 - 1, torch.int8: 2**7 - 1,
}  # fmt: skip


class Pattern:
    """Data for `world_size` ranks with an exactly known reduction under `op`, so that every element can be checked.

    Each rank's vector repeats its own short list of small integers, starting at a different place in every repetition.
    A wrong offset, a missing rank, and stale or torn data all produce wrong values.
    """

    def __init__(self, world_size: int, dtype: torch.dtype, op: str, device: torch.device | str) -> None:
        ceiling = max(1, min(100, _EXACT[dtype] // world_size))
        # For a product, each element is 2 on up to six random ranks and 1 on the others, which keeps it exact.
        twos = torch.randint(0, world_size, (6, _PERIOD), generator=torch.Generator().manual_seed(7919))

        def source(rank: int) -> torch.Tensor:
            if op == "prod":
                return 1 + (twos == rank).any(0).long()
            generator = torch.Generator().manual_seed(7919 * (rank + 1))
            return torch.randint(0, ceiling + 1, (_PERIOD,), generator=generator)

        def expand(source: torch.Tensor) -> torch.Tensor:
            """One block plus one period: a block can then start anywhere in the period."""
            return source.to(dtype).repeat(_BLOCK // _PERIOD + 1).to(device)

        sources = [source(rank) for rank in range(world_size)]
        pairwise = {"min": torch.minimum, "max": torch.maximum, "prod": torch.mul}.get(op, torch.add)
        reduced = reduce(pairwise, sources)
        self._blocks = [expand(source) for source in sources]
        self._reduced = expand(reduced.double() / world_size if op == "avg" else reduced)
        # Rounding changes averages, and sums beyond the exact range, by at most eps / 2 per rank. Allow twice that, but
        # never enough for a vector of zeros to pass.
        exact = op in ("min", "max", "prod") or not dtype.is_floating_point
        exact = exact or (op == "sum" and world_size * ceiling <= _EXACT[dtype])
        self._tolerance = 0.0 if exact else min(0.25, world_size * torch.finfo(dtype).eps)

    def fill(self, vector: torch.Tensor, rank: int, repetition: int) -> None:
        """Write this rank's data for this repetition."""
        start = repetition % _PERIOD
        for part in vector.split(_BLOCK):
            part.copy_(self._blocks[rank][start : start + part.numel()])

    def count_wrong(self, vector: torch.Tensor, repetition: int, rank: int | None = None, offset: int = 0) -> int:
        """Number of elements that differ from `rank`'s data or, if it is None, from the reduction over all ranks.
        `offset` is the vector's start index in the full vector."""
        block = self._reduced if rank is None else self._blocks[rank]
        start = (repetition + offset) % _PERIOD
        tolerance = self._tolerance if rank is None else 0.0
        wrong = 0
        for part in vector.split(_BLOCK):
            expected = block[start : start + part.numel()]
            if not torch.equal(part, expected):
                is_right = torch.isclose(part.double(), expected.double(), rtol=tolerance, atol=0.0)  # False for NaN
                wrong += part.numel() - int(is_right.sum())
        return wrong
