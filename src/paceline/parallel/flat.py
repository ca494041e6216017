"""The memory that gradients travel in: one vector per dtype and device, laid out in the order of a plan.

A bucket is a range of such a vector, so a gradient that a plan splits over neighbouring buckets still is one tensor.
When to fill or send it does not belong here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from paceline.errors import ConfigError
from paceline.parallel.replicas import Members
from paceline.plan import Plan

__all__ = ["Allocate", "FlatGradients"]

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]

_ALIGN_BYTES = 64


class FlatGradients:
    """Views in the shape of each parameter, a range for each bucket, and room for words behind the last range.

    A view counts its writes together with its bucket's range; those of the gradients in `alone` count by themselves,
    and so do split ones. `loose` are indices of gradients that stay where autograd puts them and have no room here.
    `rider_bytes` is what of each bucket's message is no gradient: gaps, and behind the last the words.
    """

    def __init__(
        self,
        members: Members,
        plan: Plan,
        num_words: int,
        loose: Collection[int] = (),
        alone: Collection[int] = (),
        allocate: Allocate | None = None,
    ) -> None:
        starts: dict[int, int] = {}
        ends: dict[tuple[str, str], int] = {}
        self.spans: list[tuple[tuple[str, str], int, int]] = []  # family, first and last element of each bucket
        self.rider_bytes: list[int] = []
        for bucket in plan.buckets:
            family = plan.gradients[bucket.pieces[0].gradient].family
            end, first, gap_bytes = ends.get(family, 0), -1, 0
            for piece in bucket.pieces:
                if piece.gradient in loose:
                    continue
                item = plan.gradients[piece.gradient].item_bytes
                if piece.start_bytes == 0 and (first < 0 or piece.gradient in alone):
                    # One short bias would put all that follows beside the processor's vectors.
                    aligned = -(-end * item // _ALIGN_BYTES) * _ALIGN_BYTES // item
                    gap_bytes += 0 if first < 0 else (aligned - end) * item
                    end = aligned
                first = end if first < 0 else first
                start = end - piece.start_bytes // item
                if starts.setdefault(piece.gradient, start) != start:
                    name = plan.gradients[piece.gradient].name
                    raise ConfigError(f"the plan sends parts of {name} in an order that is not that of its elements")
                end += piece.num_bytes // item
            self.spans.append((family, first if first >= 0 else end, end))
            self.rider_bytes.append(gap_bytes)
            ends[family] = end
        self._flats: dict[tuple[str, str], torch.Tensor] = {}
        kinds = {gradient.family: members.kind(index) for index, gradient in enumerate(plan.gradients)}
        last_family = self.spans[-1][0]
        for family, end in ends.items():
            dtype, device = kinds[family]
            # A whole number of elements that holds the words; complex elements are two words each.
            width = 2 if dtype.is_complex else 1
            extra = -(-num_words // width) if family == last_family else 0
            self._flats[family] = (allocate or _allocate)(end + extra, dtype, device)
            self.rider_bytes[-1] += extra * dtype.itemsize
        self.ranges = [self._alias(family, start, end) for family, start, end in self.spans]
        self.views: dict[int, torch.Tensor] = {}
        pieces = [(piece, number) for number, bucket in enumerate(plan.buckets) for piece in bucket.pieces]
        for piece, number in pieces:
            if piece.gradient in starts and piece.gradient not in self.views:
                param, family = members.params[piece.gradient], plan.gradients[piece.gradient].family
                whole = piece.num_bytes == plan.gradients[piece.gradient].num_bytes
                together = whole and piece.gradient not in alone
                base = self.ranges[number] if together else self._alias(family, 0, ends[family])
                # The parameter's own order of elements, so that optimizers and all ranks walk memory alike.
                strides = torch.empty_like(param, device="meta").stride()
                self.views[piece.gradient] = base.as_strided(param.size(), strides, starts[piece.gradient])
        behind = self._flats[last_family][ends[last_family] :]
        self.words = (torch.view_as_real(behind).reshape(-1) if behind.is_complex() else behind)[:num_words]
        self.last = self._alias(last_family, self.spans[-1][1], self._flats[last_family].numel())

    def _alias(self, family: tuple[str, str], start: int, end: int) -> torch.Tensor:
        return self.alias(self._flats[family][start:end])

    @staticmethod
    def alias(vector: torch.Tensor) -> torch.Tensor:
        """The same memory as a vector with a version counter of its own: what is written through it can be counted."""
        empty = torch.empty(0, dtype=vector.dtype, device=vector.device)
        return empty.set_(vector.untyped_storage(), vector.storage_offset(), vector.shape, (1,))

    def multiply(self, factor: float) -> None:
        for flat in self._flats.values():
            flat.mul_(factor)


def _allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)
