"""What a reducer is, the memory gradients travel in, and three simple reducers with the results of the default one.

A reducer moves gradients and returns what it found. It does not call the step logic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.parallel.channel import Channel
from paceline.parallel.replicas import Replica
from paceline.plan import Plan, plan_torch_start

_ALIGN_BYTES = 64
IN_FORWARD, IN_BACKWARD, IN_HOOK = "forward", "backward", "the communication hook"


class Failure(NamedTuple):
    """An error on this rank, and where it happened: `IN_FORWARD`, `IN_BACKWARD` or `IN_HOOK`."""

    error: Exception
    place: str = IN_BACKWARD


# What a reducer found at the end of a backward: the control words, which the caller fills before `exchange` and which
# hold the sums after it, the parameters without a gradient, and the failure.
Collected = tuple[torch.Tensor, list[int], Failure | None]


def on_gradient(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """Call `hook(param)`, with the parameter and not its gradient, whenever its gradient has been accumulated."""
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call, no-any-return]


class Reducer:
    """Averages the gradients of one step: `begin`, hooks during backward, `collect`, and `exchange`. Every rank sends
    the same messages in the same order, whatever happened: a missing gradient is sent as zeros."""

    def __init__(self, replica: Replica, channel: Channel, num_words: int) -> None:
        self.replica, self.channel, self.num_words = replica, channel, num_words
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._failure: Failure | None = None  # kept from the hook that raised until `collect` returns it

    def begin(self, factor: float) -> None:
        """A backward starts. Each rank multiplies its gradients by `factor`, and the results are summed."""

    def collect(self, factor: float, take_part: bool) -> Collected:
        """Backward is over: send everything except the message that carries the control words. Collective. `factor`
        counts where `begin` was not called. With `take_part=False`, zeros are sent and `.grad` is unchanged."""
        raise NotImplementedError

    def exchange(self) -> None:
        """Send the control words, wait for all messages, and leave the sums in `.grad`. Collective."""
        self.channel.wait(self._start_words(), "the control words")

    def multiply(self, factor: float) -> None:
        """Multiply all gradients, after `exchange`."""
        for param in self.replica.params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def learn(self) -> None:
        """A step succeeded on every rank: improve the next one. Collective: every rank must call this."""

    def stop(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _find_missing(self) -> list[int]:
        return [index for index, param in enumerate(self.replica.params) if param.grad is None]

    def _scale(self, index: int, factor: float, take_part: bool) -> torch.Tensor:
        """This rank's part of one gradient, in its own memory. One that cannot be sent becomes zeros and a failure."""
        grad, mine = self.replica.params[index].grad, self.replica.zeros(index)
        if take_part and grad is not None and self._failure is None:
            try:
                self.replica.check(index, grad)
                torch.mul(grad, factor, out=mine)
            except Exception as error:
                self._failure = Failure(error)
        return mine

    def _report(self, words: torch.Tensor | None, missing: list[int]) -> Collected:
        """Without `words`, they travel in a message of their own, by `_start_words`."""
        failure, self._failure = self._failure, None
        if words is None:
            words = torch.zeros(self.num_words, dtype=torch.float32, device=self.channel.device)
        self._words = words
        return words, missing, failure

    def _start_words(self) -> dist.Work:
        return self.channel.start_sum(self._words, extra_bytes=self._words.nbytes)


class PerParameterReducer(Reducer):
    """After backward, one all-reduce per parameter, one after the other."""

    def collect(self, factor: float, take_part: bool) -> Collected:
        missing = self._find_missing()
        with torch.no_grad():
            for index, param in enumerate(self.replica.params):
                grad = self._scale(index, factor, take_part)
                self.channel.wait(self.channel.start_sum(grad), f"the gradient of {self.replica.name(index)}")
                if take_part and self._failure is None:
                    param.grad = grad
        return self._report(None, missing)


class FlatReducer(Reducer):
    """After backward, one all-reduce of all gradients: one message per dtype, with the control words in the last."""

    def __init__(self, replica: Replica, channel: Channel, num_words: int) -> None:
        super().__init__(replica, channel, num_words)
        # Kept from step to step: new memory of that size would cost more than the copy.
        self._flat = FlatGradients(replica, plan_torch_start(replica.gradients), num_words)

    def collect(self, factor: float, take_part: bool) -> Collected:
        missing = self._find_missing()
        with torch.no_grad():
            for index, view in self._flat.views.items():
                view.copy_(self._scale(index, factor, take_part))
                if take_part and self._failure is None:
                    self.replica.params[index].grad = view
        return self._report(self._flat.words, missing)

    def exchange(self) -> None:
        for message, extra_bytes in zip(self._flat.messages, self._flat.extra_bytes, strict=True):
            self.channel.wait(self.channel.start_sum(message, extra_bytes=extra_bytes), "the message of all gradients")


class OverlapReducer(Reducer):
    """One all-reduce per parameter, started as soon as its gradient is ready, while backward continues. Messages leave
    in the reverse of the module's order: a gradient waits until all later parameters have sent theirs. The first step
    only counts: a gradient that arrives in several parts waits for the end of backward from then on."""

    def __init__(self, replica: Replica, channel: Channel, num_words: int) -> None:
        super().__init__(replica, channel, num_words)
        self._active, self._factor, self._next, self._keep = False, 1.0, len(replica.params), False
        self._counts: dict[int, int] = {}
        self._in_parts: set[int] | None = None
        self._in_flight: list[tuple[int, torch.Tensor, int, dist.Work]] = []
        for index, param in enumerate(replica.params):
            self._handles.append(on_gradient(param, functools.partial(self._on_ready, index)))

    def begin(self, factor: float) -> None:
        self._active, self._factor, self._next, self._failure = True, factor, len(self.replica.params), None
        self._counts.clear()
        self._in_flight.clear()

    def _on_ready(self, index: int, _: torch.Tensor) -> None:
        self._counts[index] = self._counts.get(index, 0) + 1
        if not self._active or self._in_parts is None or self._failure is not None:
            return
        try:
            while self._next - 1 in self._counts and self._next - 1 not in self._in_parts:
                self._send_next(True)
        except Exception as error:
            self._failure = Failure(error)

    def _send_next(self, take_part: bool) -> None:
        self._next -= 1
        with torch.no_grad():
            grad = self._scale(self._next, self._factor, take_part)
        if take_part and self._failure is None and (param := self.replica.params[self._next]).grad is not None:
            param.grad = grad
        self._in_flight.append((self._next, grad, grad._version, self.channel.start_sum(grad)))

    def collect(self, factor: float, take_part: bool) -> Collected:
        missing = self._find_missing()
        late = [index for index, grad, version, _ in self._in_flight if grad._version != version]
        if late and take_part and self._failure is None:
            self._failure = Failure(self.replica.build_late_error(late))
        if not self._active:
            self.begin(factor)
        elif self._in_parts is None:
            self._in_parts = {index for index, count in self._counts.items() if count > 1}
        self._active = False
        while self._next:
            self._send_next(take_part)
        self._keep = take_part and self._failure is None
        return self._report(None, missing)

    def exchange(self) -> None:
        last = self._start_words()
        for index, grad, _, work in self._in_flight:
            self.channel.wait(work, f"the gradient of {self.replica.name(index)}")
            if self._keep:
                self.replica.params[index].grad = grad
        self._in_flight.clear()
        self.channel.wait(last, "the control words")


class FlatGradients:
    """One vector per dtype and device, in the order of a plan: a view per parameter, a range per bucket, control words.
    `messages` are the ranges, the last one with the words; `extra_bytes` of each are not gradients. A view shares its
    version counter with its range, except for those in `separate` and split ones. Those in `uncopied` have no place."""

    def __init__(
        self, replica: Replica, plan: Plan, num_words: int,
        uncopied: Collection[int] = (), separate: Collection[int] = (),
        allocate: Callable[[int, torch.dtype, torch.device], torch.Tensor] | None = None,
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
            make = allocate or (lambda size, dtype, device: torch.zeros(size, dtype=dtype, device=device))
            self._flats[family] = make(end + extra, dtype, device)
            self.extra_bytes[-1] += extra * dtype.itemsize
        self.ranges = [self.alias(self._flats[family][start:end]) for family, start, end in spans]
        self.views: dict[int, torch.Tensor] = {}
        for bucket, (family, *_), span in zip(plan.buckets, spans, self.ranges, strict=True):
            for piece in bucket.pieces:
                if piece.gradient in starts and piece.gradient not in self.views:
                    param = replica.params[piece.gradient]
                    is_whole = piece.num_bytes == plan.gradients[piece.gradient].num_bytes
                    is_together = is_whole and piece.gradient not in separate
                    base = span if is_together else self.alias(self._flats[family][: ends[family]])
                    # The parameter's own strides, so that optimizers and all ranks walk memory in the same order.
                    strides = torch.empty_like(param, device="meta").stride()
                    self.views[piece.gradient] = base.as_strided(param.size(), strides, starts[piece.gradient])
        behind = self._flats[last_family][ends[last_family] :]
        self.words = (torch.view_as_real(behind).reshape(-1) if behind.is_complex() else behind)[:num_words]
        self.messages = [*self.ranges[:-1], self.alias(self._flats[last_family][last_start:])]

    @staticmethod
    def alias(vector: torch.Tensor) -> torch.Tensor:
        """The same memory as a vector with its own version counter, so that writes through it can be counted."""
        empty = torch.empty(0, dtype=vector.dtype, device=vector.device)
        return empty.set_(vector.untyped_storage(), vector.storage_offset(), vector.shape, (1,))

    def multiply(self, factor: float) -> None:
        for flat in self._flats.values():
            flat.mul_(factor)
