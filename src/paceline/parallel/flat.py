"""Message buffers for gradients: flat vectors with a view per parameter, or packed messages."""

from __future__ import annotations

import operator
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.parallel.channel import alias
from paceline.parallel.replicas import Replica, find_strides
from paceline.plan import Plan
from paceline.torch_internals import count_storage_uses

_ALIGN_BYTES = 64
_PACK_BYTES = 16  # the widest load instruction of a GPU
# If the mean gradient size is at least this, a new message is allocated for each step.
_LASTING_BYTES = 1 << 20
# Below this mean size, one fused copy and one scaling pass are faster than a call per gradient.
_LARGE_BYTES = 64 << 10
_get_grad = operator.attrgetter("grad")
_get_version = operator.attrgetter("_version")


class FlatGradients:
    """One vector per dtype and device, in plan order: a view per parameter, a range per bucket, and control words.
    `messages` are the ranges, the last one with the control words. A view shares its version counter with its range,
    unless it is `separate` or split. `uncopied` gradients have no space here."""

    def __init__(
        self, replica: Replica, plan: Plan, num_words: int,
        uncopied: Collection[int] = (), separate: Collection[int] = (),
        allocate: Callable[..., torch.Tensor] = torch.zeros,
    ) -> None:  # fmt: skip
        self.plan, self.num_words = plan, num_words
        self.uncopied, self.separate = uncopied, separate
        starts: dict[int, int] = {}
        ends = Counter[tuple[str, str]]()  # by family
        spans: list[tuple[tuple[str, str], int, int]] = []  # family, first and last element of each bucket
        for bucket in plan.buckets:
            family = plan.gradients[bucket.pieces[0].gradient].family
            first = end = ends[family]
            pieces = [piece for piece in bucket.pieces if piece.gradient not in uncopied]
            for place, piece in enumerate(pieces):
                item = plan.gradients[piece.gradient].item_bytes
                if piece.start_bytes == 0 and (place == 0 or piece.gradient in separate):
                    # Without alignment, one short bias would misalign everything after it for vector instructions.
                    end = -(-end * item // _ALIGN_BYTES) * _ALIGN_BYTES // item
                first = end if place == 0 else first
                start = end - piece.start_bytes // item
                if starts.setdefault(piece.gradient, start) != start:
                    text = f"the plan sends the pieces of {plan.gradients[piece.gradient].name} out of order"
                    raise ConfigError(text, code="plan")
                end += piece.num_bytes // item
            spans.append((family, first, end))
            ends[family] = end
        kinds = {g.family: layout[1:] for g, layout in zip(plan.gradients, replica.layouts, strict=True)}
        last_family, last_start, _ = spans[-1]
        self._flats: dict[tuple[str, str], torch.Tensor] = {}
        for family, end in ends.items():
            dtype, device = kinds[family]
            extra = _count_elements(num_words, dtype) if family == last_family else 0
            self._flats[family] = allocate(end + extra, dtype=dtype, device=device)
        self.ranges = [alias(self._flats[family][start:end]) for family, start, end in spans]
        self.views: dict[int, torch.Tensor] = {}
        for bucket, (family, *_), span in zip(plan.buckets, spans, self.ranges, strict=True):
            for piece in bucket.pieces:
                if piece.gradient in starts and piece.gradient not in self.views:
                    param = replica.params[piece.gradient]
                    is_whole = piece.num_bytes == plan.gradients[piece.gradient].num_bytes
                    is_together = is_whole and piece.gradient not in separate
                    base = span if is_together else alias(self._flats[family][: ends[family]])
                    # The parameter's own strides, so that optimizers and all ranks traverse memory in the same order.
                    start = starts[piece.gradient]
                    self.views[piece.gradient] = base.as_strided(param.size(), find_strides(param), start)
        self.bucket_bytes = plan.bucket_bytes
        self.words = _view_words(self._flats[last_family][ends[last_family] :], num_words)
        self.messages = [*self.ranges[:-1], alias(self._flats[last_family][last_start:])]

    def multiply(self, factor: float) -> None:
        for flat in self._flats.values():
            flat.mul_(factor)


def choose_separate(plan: Plan, least_bytes: float, stays: bool) -> tuple[set[int], set[int]]:
    """Return two sets: gradients that stay where autograd put them until they are sent, and all gradients excluded from
    the fused copy. The second set contains gradients of at least `least_bytes`, and split gradients, which need one
    contiguous vector."""
    pieces = Counter(piece.gradient for bucket in plan.buckets for piece in bucket.pieces)
    split = {index for index, count in pieces.items() if count > 1}
    separate = {i for i, g in enumerate(plan.gradients) if g.num_bytes >= least_bytes} - plan.alone | split
    return (separate - split if stays else set()), separate


class LiveBucket:
    """One bucket at run time. `fused` gradients are copied together once all have arrived, and `copied` ones separately
    as they arrive. `uncopied` gradients stay where autograd left them until the bucket is sent. If the bucket `packs`,
    several of them share one message; one alone is reduced in place. The last bucket always packs them, with the
    control words, if none of its gradients are in the flat vector (`sends_words`)."""

    def __init__(self, number: int, flat: FlatGradients, params: Sequence[torch.Tensor], packs: bool) -> None:
        self.number, self.range = number, flat.ranges[number]
        self.indices = flat.plan.partition[number]
        self.fused = [index for index in self.indices if index not in flat.separate]
        self.copied = [index for index in self.indices if index in flat.separate and index not in flat.uncopied]
        self.uncopied = [index for index in self.indices if index in flat.uncopied]
        self.uncopied_params = [params[index] for index in self.uncopied]
        self.separate = self.copied + self.uncopied
        self.params = [params[index] for index in self.fused]
        self.views = [flat.views[index] for index in self.fused]
        on_cpu = self.range.device.type == "cpu"  # on a GPU each call is a launch, so a fused one is always faster
        self.is_large = on_cpu and sum(view.nbytes for view in self.views) >= _LARGE_BYTES * max(1, len(self.views))
        # The control words travel with the last bucket, because a separate message would be one more launch.
        num_words = flat.num_words if number == len(flat.ranges) - 1 and not self.range.numel() else 0
        self.pack: Pack | None = None
        if packs and len(self.uncopied) > (0 if num_words else 1):
            self.pack = Pack(self.uncopied_params, self.range, num_words)
        self.in_place = self.uncopied if self.pack is None else []
        self.sends_words = self.pack is not None and num_words > 0
        self.seen: list[Any] = []
        self.in_parts = False  # some gradient arrives in several parts: wait for the end of backward
        self.version = 0  # version of the range when backward began, later when it was sent
        self.work: dist.Work | None = None  # or a Future, with a communication hook

    def read_grads(self) -> list[Any]:
        """The fused gradients, cached until they are gathered because reading the attributes takes time."""
        self.seen = list(map(_get_grad, self.params))
        return self.seen

    def gather(self, factor: float) -> None:
        """Copy the fused gradients into the range, multiply by the factor, and make each `.grad` its view."""
        if not self.fused:
            return
        grads, self.seen = self.seen or self.read_grads(), []
        if any(map(operator.is_, grads, repeat(None))):
            grads = [view.zero_() if grad is None else grad for grad, view in zip(grads, self.views, strict=True)]
        # If a gradient already is its view, the copy is a no-op.
        if factor != 1.0 and self.is_large:
            for grad, view in zip(grads, self.views, strict=True):
                torch.mul(grad, factor, out=view)
        else:
            torch._foreach_copy_(self.views, grads)
            if factor != 1.0:
                # Multiply one tensor at a time: a fused call would first round the factor to bfloat16 for bfloat16
                # tensors.
                for part in self.views if self.copied else [self.range]:
                    part.mul_(factor)
        for param, view in zip(self.params, self.views, strict=True):
            param.grad = view

    def find_words(self, flat: FlatGradients, uncopied: Sequence[torch.Tensor]) -> torch.Tensor:
        """The control words in the last bucket's message."""
        return self.pack.find_words(uncopied[0]) if self.pack is not None and self.sends_words else flat.words


class Pack:
    """Several gradients as one message, optionally followed by control words.

    The message and its views, which serve as gradients, are created once: creating a view per parameter in every step
    would cost a small model several percent of the step. Their memory is freed before the next forward unless some
    parameter has its gradient here, so that it does not add to the peak. Memory that the program still uses is not
    freed. If gradients are large, creating views is cheap compared with the memory that a message occupies, so each
    step creates a message and frees it with its gradients.
    """

    def __init__(self, params: Sequence[torch.Tensor], like: torch.Tensor, num_words: int) -> None:
        self._params, self._like, self._num_words = params, like, num_words
        self._places: list[tuple[torch.Size, tuple[int, ...], int]] = []  # size, strides and first element
        self._end = 0
        for param in params:
            self._places.append((param.size(), find_strides(param), self._end))
            self._end += -(-param.nbytes // _PACK_BYTES) * _PACK_BYTES // param.element_size()
        self._numel = self._end + _count_elements(num_words, like.dtype)
        self._lasts = self._end * like.element_size() < _LASTING_BYTES * len(params)
        self._drop()

    def _drop(self) -> None:
        """Drop the message. Gradients and other users keep its memory alive."""
        self.views: list[torch.Tensor] = []
        self.message = self._gradients = self._like
        self._storage = self._like.untyped_storage()

    def _build(self) -> None:
        self.message = self._like.new_empty(self._numel)
        self._gradients, self._storage = self.message[: self._end], self.message.untyped_storage()
        # `data` gives each view its own version counter, which shows whether a later backward adds to it in place.
        self.views = [self.message.as_strided(*place).data for place in self._places]
        self._num_uses = count_storage_uses(self._storage._cdata)
        self._num_references = list(map(sys.getrefcount, self.views))

    def find_words(self, message: torch.Tensor) -> torch.Tensor:
        return _view_words(message[self._end :], self._num_words)

    def build_zeros(self) -> torch.Tensor:
        return self._like.new_zeros(self._numel)

    def fill(self, factor: float) -> torch.Tensor:
        """Copy the gradients here, scale them by the factor, and make each `.grad` its view. Returns the message."""
        grads = list(map(_get_grad, self._params))
        are_here = list(map(operator.is_, grads, self.views)) if self.views else [False]
        if not all(are_here):
            if self.views and self._storage.nbytes() == 0:
                self._storage.resize_(self.message.nbytes)
            elif not self.views or self._is_used_elsewhere(are_here):
                self._build()
            self._copy(grads)
        if factor != 1.0:
            self._gradients.mul_(factor)
        for param, view in zip(self._params, self.views, strict=True):
            param.grad = view
        self._versions = list(map(_get_version, self.views))
        return self.message

    def _copy(self, grads: list[torch.Tensor | None]) -> None:
        moved = [pair for pair in zip(self.views, grads, strict=True) if pair[0] is not pair[1]]
        for view, grad in moved:
            if grad is None:
                view.zero_()
        found = [(view, grad) for view, grad in moved if grad is not None]
        if found:
            torch._foreach_copy_([view for view, _ in found], [grad for _, grad in found])

    def find_changed(self) -> list[int]:
        """The gradients that were modified or replaced since `fill`."""
        grads = list(map(_get_grad, self._params))
        are_here = all(map(operator.is_, grads, self.views))
        if are_here and list(map(_get_version, self.views)) == self._versions:
            return []
        found = zip(grads, self.views, self._versions, strict=True)
        return [place for place, (grad, view, then) in enumerate(found) if grad is not view or view._version != then]

    def end_step(self) -> None:
        """Call this once the message has arrived."""
        if not self._lasts:
            self._drop()

    def free(self) -> None:
        """Free the memory if no parameter has its gradient here."""
        if not self.views or self._storage.nbytes() == 0:
            return
        if any(map(operator.is_, map(_get_grad, self._params), self.views)):
            return
        if self._is_used_elsewhere():
            self._drop()
        else:
            self._storage.resize_(0)

    def _is_used_elsewhere(self, are_here: Sequence[bool] = ()) -> bool:
        """Whether the program uses this memory, other than as the `.grad` of a parameter (`are_here`)."""
        if count_storage_uses(self._storage._cdata) != self._num_uses:
            return True
        found = map(operator.ne, map(sys.getrefcount, self.views), self._num_references)
        return any(map(operator.gt, found, are_here or repeat(False)))


def _count_elements(num_words: int, dtype: torch.dtype) -> int:
    """The number of elements that the control words need. A complex element stores two."""
    return -(-num_words // (2 if dtype.is_complex else 1))


def _view_words(behind: torch.Tensor, num_words: int) -> torch.Tensor:
    return (torch.view_as_real(behind).reshape(-1) if behind.is_complex() else behind)[:num_words]
