"""What memory could do: every rank at once reads a vector of its own once and writes one once, in two ways.

The bound that follows from it is derived in `records.bounds`.
"""

from __future__ import annotations

import torch

from paceline.measure.engine import Allocator, Contestant, Group
from paceline.measure.pattern import Pattern

__all__ = ["PASSES", "build_pass"]

PASSES = ("add", "copy")


def build_pass(
    operation: str, group: Group, rank: int, elements: int, dtype: torch.dtype, allocate: Allocator
) -> Contestant:
    """One pass over the vector of so many elements, which the all-reduces of the same cell also use."""
    vector = allocate("vector", elements, dtype, group.device)
    pattern = Pattern(group.world_size, dtype, "sum", group.device)
    if operation == "add":

        def count_wrong(repetition: int) -> int:
            return pattern.count_wrong(vector.sub_(1), repetition, rank=rank)  # exact: the numbers are small and whole

        return Contestant(
            device=group.device,
            prepare=lambda repetition: pattern.fill(vector, rank, repetition),
            call=lambda: vector.add_(1),
            count_wrong=count_wrong,
            num_elements=elements,
        )
    target = allocate("target", elements, dtype, group.device)

    def prepare(repetition: int) -> None:
        # Last the source: an all-reduce, too, finds its vector in the caches as far as it fits.
        target.fill_(-1 if dtype.is_signed else 255)
        pattern.fill(vector, rank, repetition)

    return Contestant(
        device=group.device,
        prepare=prepare,
        call=lambda: target.copy_(vector),
        count_wrong=lambda repetition: pattern.count_wrong(target, repetition, rank=rank),
        num_elements=elements,
    )
