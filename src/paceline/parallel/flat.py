"""The memory that gradients travel in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.parallel.channel import alias
from paceline.parallel.replicas import Replica
from paceline.plan import Plan

_ALIGN_BYTES = 64
_PACK_BYTES = 16  # the widest load of a GPU
# Below this mean size, one fused copy and one pass for the factor are faster than a call per gradient.
_LARGE_BYTES = 64 << 10
_get_grad = operator.attrgetter("grad")


class FlatGradients:
    """One vector per dtype and device, in the order of a plan: a view per parameter, a range per bucket, control words.
    `messages` are the ranges, the last one with the words; `extra_bytes` of each are not gradients. A view shares its
    version counter with its range, except for those in `separate` and split ones. Those in `uncopied` have no place."""

    def __init__(
        self, replica: Replica, plan: Plan, num_words: int,
        uncopied: Collection[int] = (), separate: Collection[int] = (),
        allocate: Callable[..., torch.Tensor] = torch.zeros,
    ) -> None:  # fmt: skip
        starts: dict[int, int] = {}
        ends: dict[tuple[str, str], int] = {}
        spans: list[tuple[tuple[str, str], int, int]] = []  # family, first and last element of each bucket
        self.extra_bytes: list[int] = []
        for bucket in plan.buckets:
            family = plan.gradients[bucket.pieces[0].gradient].family
            end, first, gap_bytes = ends.get(family, 0), -1, 0
            for piece in bucket.pieces:
                if piece.gradient in uncopied:
                    continue
                item = plan.gradients[piece.gradient].item_bytes
                if piece.start_bytes == 0 and (first < 0 or piece.gradient in separate):
                    # One short bias would move everything after it off the processor's vector alignment.
                    aligned = -(-end * item // _ALIGN_BYTES) * _ALIGN_BYTES // item
                    gap_bytes += 0 if first < 0 else (aligned - end) * item
                    end = aligned
                first = end if first < 0 else first
                start = end - piece.start_bytes // item
                if starts.setdefault(piece.gradient, start) != start:
                    text = f"the plan sends the parts of {plan.gradients[piece.gradient].name} out of order"
                    raise ConfigError(text, code="plan")
                end += piece.num_bytes // item
            spans.append((family, first if first >= 0 else end, end))
            self.extra_bytes.append(gap_bytes)
            ends[family] = end
        kinds = {g.family: layout[1:] for g, layout in zip(plan.gradients, replica.layouts, strict=True)}
        last_family, last_start, _ = spans[-1]
        self._flats: dict[tuple[str, str], torch.Tensor] = {}
        for family, end in ends.items():
            dtype, device = kinds[family]
            # A whole number of elements that holds the words. A complex element holds two.
            extra = -(-num_words // (2 if dtype.is_complex else 1)) if family == last_family else 0
            self._flats[family] = allocate(end + extra, dtype=dtype, device=device)
            self.extra_bytes[-1] += extra * dtype.itemsize
        self.ranges = [alias(self._flats[family][start:end]) for family, start, end in spans]
        self.views: dict[int, torch.Tensor] = {}
        for bucket, (family, *_), span in zip(plan.buckets, spans, self.ranges, strict=True):
            for piece in bucket.pieces:
                if piece.gradient in starts and piece.gradient not in self.views:
                    param = replica.params[piece.gradient]
                    is_whole = piece.num_bytes == plan.gradients[piece.gradient].num_bytes
                    is_together = is_whole and piece.gradient not in separate
                    base = span if is_together else alias(self._flats[family][: ends[family]])
                    # The parameter's own strides, so that optimizers and all ranks walk memory in the same order.
                    strides = torch.empty_like(param, device="meta").stride()
                    self.views[piece.gradient] = base.as_strided(param.size(), strides, starts[piece.gradient])
        behind = self._flats[last_family][ends[last_family] :]
        self.words = (torch.view_as_real(behind).reshape(-1) if behind.is_complex() else behind)[:num_words]
        self.messages = [*self.ranges[:-1], alias(self._flats[last_family][last_start:])]

    def multiply(self, factor: float) -> None:
        for flat in self._flats.values():
            flat.mul_(factor)


class LiveBucket:
    """One bucket at run time. `fused` gradients are copied together when all have arrived, `copied` ones separately as
    they arrive, `uncopied` ones stay where autograd left them until the bucket leaves: then several are packed into
    one message, if the bucket `packs`, and a single one is reduced in place."""

    def __init__(
        self, number: int, indices: Sequence[int], uncopied: set[int], separate: set[int], flat: FlatGradients,
        params: Sequence[torch.Tensor], packs: bool = False,
    ) -> None:  # fmt: skip
        self.number, self.indices, self.range = number, indices, flat.ranges[number]
        self.fused = [index for index in indices if index not in separate]
        self.copied = [index for index in indices if index in separate and index not in uncopied]
        self.uncopied = [index for index in indices if index in uncopied]
        self.uncopied_params = [params[index] for index in self.uncopied]
        self.separate = self.copied + self.uncopied
        self.params = [params[index] for index in self.fused]
        self.views = [flat.views[index] for index in self.fused]
        on_cpu = self.range.device.type == "cpu"  # on a GPU each call is a launch, and a fused one is always faster
        self.is_large = on_cpu and sum(view.nbytes for view in self.views) >= _LARGE_BYTES * max(1, len(self.views))
        self.is_packed = packs and len(self.uncopied) > 1
        self.packed_places: list[tuple[torch.Size, tuple[int, ...], int]] = []  # size, strides and first element
        self.packed_size = self.gap_bytes = 0
        for param in self.uncopied_params if self.is_packed else ():
            strides = torch.empty_like(param, device="meta").stride()
            self.packed_places.append((param.size(), strides, self.packed_size))
            aligned_bytes = -(-param.nbytes // _PACK_BYTES) * _PACK_BYTES
            self.packed_size += aligned_bytes // param.element_size()
            self.gap_bytes += aligned_bytes - param.nbytes
        self.seen: list[Any] = []
        self.in_parts = False  # some gradient arrives nobody knows how often: only the end of backward is safe
        self.counted: list[int] = []  # gradients that arrive several times, as often as in the steps before
        self.version = 0  # of the range when backward began, later when it was sent
        self.work: dist.Work | None = None  # with a communication hook, its Future

    def read_grads(self) -> list[Any]:
        """The fused gradients, kept until they are gathered: reading each attribute takes time."""
        self.seen = list(map(_get_grad, self.params))
        return self.seen

    def pack(self, make_zeros: Callable[[int], torch.Tensor], factor: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copy the uncopied gradients into one message and multiply it by the factor. Returns the message, and the
        gradients as views of it. The memory is freed with the gradients: if it were kept between steps, it would add to
        the peak of the next forward."""
        grads = list(map(_get_grad, self.uncopied_params))
        if any(map(operator.is_, grads, repeat(None))):
            zeros = map(make_zeros, self.uncopied)
            grads = [zero if grad is None else grad for zero, grad in zip(zeros, grads, strict=True)]
        packed = self.range.new_empty(self.packed_size)
        # `data` gives each its own version counter, which shows when a later backward adds to it in place.
        views = [packed.as_strided(*place).data for place in self.packed_places]
        torch._foreach_copy_(views, grads)
        if factor != 1.0:
            packed.mul_(factor)
        for param, view in zip(self.uncopied_params, views, strict=True):
            param.grad = view
        return packed, views
