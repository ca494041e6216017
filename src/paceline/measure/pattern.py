"""Data whose reduction is known exactly, so that every element of every repetition can be checked.

Each rank's vector repeats a short list of small whole numbers of its own; the list starts elsewhere in every
repetition. A wrong offset, a missing rank, stale or torn data all give other numbers. Timing is not done here.
"""

from __future__ import annotations

from functools import reduce

import torch

__all__ = ["Pattern"]

_PERIOD = 4093  # a prime: no power-of-two shift of the data looks like the data
_BLOCK = 64 * _PERIOD  # elements written or compared at once: no temporary of the size of the message
# Whole numbers up to here are exact in the type, in any order of summation.
_EXACT = {
    torch.float32: 2**24, torch.float64: 2**53, torch.float16: 2**11, torch.bfloat16: 2**8,
    torch.int32: 2**31 - 1, torch.int64: 2**63 - 1, torch.uint8: 2**8 - 1, torch.int8: 2**7 - 1,
}  # fmt: skip


class Pattern:
    """The data of `world_size` ranks and what becomes of it under `op`."""

    def __init__(self, world_size: int, dtype: torch.dtype, op: str, device: torch.device | str) -> None:
        self._op, self._world_size = op, world_size
        self._dtype, self._device = dtype, device
        self._ceiling = max(1, min(100, _EXACT[dtype] // world_size))
        sources = [self._source(rank) for rank in range(world_size)]
        self._blocks = [self._expand(source) for source in sources]
        self._reduced = self._expand(self._reduce(sources))
        # An average is rounded, and so are floating sums of more ranks than the type can count exactly: by at most
        # eps / 2 for each rank. Twice that, but never so much that an empty vector would pass.
        exact = op in ("min", "max", "prod") or not dtype.is_floating_point
        exact = exact or (op == "sum" and world_size * self._ceiling <= _EXACT[dtype])
        self._tolerance = 0.0 if exact else min(0.25, world_size * torch.finfo(dtype).eps)

    def _source(self, rank: int) -> torch.Tensor:
        if self._op == "prod":
            # A two from up to six ranks, drawn anew for each element, and ones: the product stays small and exact.
            generator = torch.Generator().manual_seed(7919)
            drawn = torch.randint(0, self._world_size, (6, _PERIOD), generator=generator)
            return 1 + (drawn == rank).any(0).long()
        generator = torch.Generator().manual_seed(7919 * (rank + 1))
        return torch.randint(0, self._ceiling + 1, (_PERIOD,), generator=generator)

    def _reduce(self, sources: list[torch.Tensor]) -> torch.Tensor:
        match self._op:
            case "sum":
                return sum(sources, torch.zeros_like(sources[0]))
            case "avg":
                return sum(sources, torch.zeros_like(sources[0])).double() / self._world_size
            case "min":
                return reduce(torch.minimum, sources)
            case "max":
                return reduce(torch.maximum, sources)
        return reduce(torch.mul, sources)

    def _expand(self, source: torch.Tensor) -> torch.Tensor:
        """One block and one period more, so that a block can start anywhere in the period."""
        return source.to(self._dtype).repeat(_BLOCK // _PERIOD + 1).to(self._device)

    def fill(self, vector: torch.Tensor, rank: int, repetition: int) -> None:
        """Write this rank's data of this repetition."""
        start = repetition % _PERIOD
        for part in vector.split(_BLOCK):
            part.copy_(self._blocks[rank][start : start + part.numel()])

    def count_wrong(self, vector: torch.Tensor, repetition: int, rank: int | None = None, offset: int = 0) -> int:
        """Elements that differ from rank's data or, without a rank, from the reduction over all ranks.

        `offset` is the index in the full vector at which this vector starts.
        """
        block = self._reduced if rank is None else self._blocks[rank]
        start = (repetition + offset) % _PERIOD
        wrong = 0
        for part in vector.split(_BLOCK):
            expected = block[start : start + part.numel()]
            if torch.equal(part, expected):
                continue
            if rank is None and self._tolerance:
                distance = (part.double() - expected.double()).abs()
                good = distance <= self._tolerance * expected.double().abs()
            else:
                good = part == expected
            wrong += part.numel() - int(good.sum())  # a NaN is equal to nothing, so it counts
        return wrong
