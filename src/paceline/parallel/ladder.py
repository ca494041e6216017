"""The ladder's simple rungs: three ways to average gradients, each readable on its own, and what all rungs share.

`per_parameter` -> `flat` -> `overlap` -> `bucketed` (in its own file): the same results, less time at each step up.
Which steps are synchronised, and what the control words in the tail mean, is decided in `steps`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from paceline.parallel.channel import Channel
from paceline.parallel.flat import FlatGradients
from paceline.parallel.replicas import Members
from paceline.plan import plan_torch_start

__all__ = ["Flat", "Overlap", "PerParameter", "Reducer", "on_gradient"]

WriteTail = Callable[[torch.Tensor], None]


def on_gradient(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """Call `hook(param)`, with the parameter and not its gradient, whenever its gradient has been accumulated."""
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call, no-any-return]


class Reducer:
    """Averages the gradients of one step over all ranks: `begin`, then hooks during backward, then `finish`.

    Every rank sends the same messages in the same order whatever happened in its backward: a gradient that is missing
    is sent as zeros, so no rank ever waits for a message that will not come.
    """

    def __init__(self, members: Members, channel: Channel, num_words: int) -> None:
        self.members, self.channel, self.num_words = members, channel, num_words
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.failure: Exception | None = None  # what a hook raised; kept until the other ranks can be told
        self.failed_in = "backward"

    def begin(self, factor: float) -> None:
        """A backward starts whose gradients are to be summed after each rank has multiplied its own by `factor`."""

    def finish(self, write_tail: WriteTail, factor: float, take_part: bool) -> torch.Tensor:
        """Send what is left, wait for everything, leave the sums in `.grad`, and return the summed tail.

        `write_tail` fills the words of the tail just before they leave, when `failure` is known. `take_part` of False
        sends zeros in place of gradients and leaves `.grad` alone. Collective: every rank must call this.
        """
        raise NotImplementedError

    def find_missing(self) -> list[int]:
        """The parameters that have no gradient now."""
        return [index for index, param in enumerate(self.members.params) if param.grad is None]

    def find_late(self) -> list[int]:
        """The parameters whose gradient changed after it was sent: they cannot be mended, only named."""
        return []

    def multiply(self, factor: float) -> None:
        """Multiply all gradients, after `finish`."""
        for param in self.members.params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def settle(self) -> None:
        """A step went well on every rank: learn from it. Collective: every rank must call this."""

    def stop(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_all(self, make_hook: Callable[[int], Callable[[torch.Tensor], None]]) -> None:
        for index, param in enumerate(self.members.params):
            self._handles.append(on_gradient(param, make_hook(index)))

    def _scaled(self, index: int, factor: float, take_part: bool) -> torch.Tensor:
        """This rank's share of one gradient, in memory of its own: autograd may have handed over an aliased one.

        What cannot be sent is sent as zeros, and the reason kept until all ranks can be told.
        """
        grad, mine = self.members.params[index].grad, self.members.zeros(index)
        if take_part and grad is not None and self.failure is None:
            try:
                self.members.check(index, grad)
                torch.mul(grad, factor, out=mine)
            except Exception as error:
                self.failure = error
        return mine

    def _new_tail(self, write_tail: WriteTail) -> torch.Tensor:
        tail = torch.zeros(self.num_words, dtype=torch.float32, device=self.channel.device)
        write_tail(tail)
        return tail


class PerParameter(Reducer):
    """After backward, one all-reduce per parameter, one after the other."""

    def finish(self, write_tail: WriteTail, factor: float, take_part: bool) -> torch.Tensor:
        with torch.no_grad():
            for index, param in enumerate(self.members.params):
                grad = self._scaled(index, factor, take_part)
                self.channel.wait(self.channel.start_sum(grad), f"the gradient of {self.members.name(index)}")
                if take_part and self.failure is None:
                    param.grad = grad
            tail = self._new_tail(write_tail)
            self.channel.wait(self.channel.start_sum(tail, rider_bytes=tail.nbytes), "the tail")
            return tail


class Flat(Reducer):
    """After backward, one all-reduce of all gradients: one message per dtype, the tail at the end of the last."""

    def __init__(self, members: Members, channel: Channel, num_words: int) -> None:
        super().__init__(members, channel, num_words)
        # Kept from step to step: fresh memory of that size would cost more than the copy.
        self._flat = FlatGradients(members, plan_torch_start(members.gradients), num_words)

    def finish(self, write_tail: WriteTail, factor: float, take_part: bool) -> torch.Tensor:
        with torch.no_grad():
            for index, view in self._flat.views.items():
                view.copy_(self._scaled(index, factor, take_part))
                if take_part and self.failure is None:
                    self.members.params[index].grad = view
            write_tail(self._flat.words)
            messages = (*self._flat.ranges[:-1], self._flat.last)
            for message, rider_bytes in zip(messages, self._flat.rider_bytes, strict=True):
                work = self.channel.start_sum(message, rider_bytes=rider_bytes)
                self.channel.wait(work, "the message of all gradients")
            return self._flat.words


class Overlap(Reducer):
    """One all-reduce per parameter, started as soon as its gradient is ready, while backward goes on.

    The messages must leave in the same order everywhere, and backward reaches parameters in about the reverse of the
    module's order: so a gradient waits until all later parameters have sent theirs. The first step only counts: a
    gradient that arrives in several parts (re-entrant checkpointing) waits for the end of backward from then on.
    """

    def __init__(self, members: Members, channel: Channel, num_words: int) -> None:
        super().__init__(members, channel, num_words)
        self._order = list(reversed(range(len(members.params))))
        self._active, self._factor, self._next = False, 1.0, 0
        self._counts: dict[int, int] = {}
        self._in_parts: set[int] | None = None
        self._in_flight: list[tuple[int, torch.Tensor, int, dist.Work]] = []
        self._hook_all(lambda index: lambda param: self._on_ready(index))

    def begin(self, factor: float) -> None:
        self._active, self._factor, self._next, self.failure = True, factor, 0, None
        self._counts.clear()
        self._in_flight.clear()

    def _on_ready(self, index: int) -> None:
        self._counts[index] = self._counts.get(index, 0) + 1
        if not self._active or self._in_parts is None or self.failure is not None:
            return
        try:
            while self._next < len(self._order):
                upcoming = self._order[self._next]
                if upcoming not in self._counts or upcoming in self._in_parts:
                    break
                self._send(upcoming, True)
        except Exception as error:  # raised after `finish`, when the other ranks can be told
            self.failure = error

    def _send(self, index: int, take_part: bool) -> None:
        self._next += 1
        with torch.no_grad():
            grad = self._scaled(index, self._factor, take_part)
        if take_part and self.failure is None and (param := self.members.params[index]).grad is not None:
            param.grad = grad
        self._in_flight.append((index, grad, grad._version, self.channel.start_sum(grad)))

    def find_late(self) -> list[int]:
        return [index for index, grad, version, _ in self._in_flight if grad._version != version]

    def finish(self, write_tail: WriteTail, factor: float, take_part: bool) -> torch.Tensor:
        if not self._active:
            self.begin(factor)
        elif self._in_parts is None:
            self._in_parts = {index for index, count in self._counts.items() if count > 1}
        self._active = False
        for index in self._order[self._next :]:
            self._send(index, take_part)
        with torch.no_grad():
            tail = self._new_tail(write_tail)
        last = self.channel.start_sum(tail, rider_bytes=tail.nbytes)
        for index, grad, _, work in self._in_flight:
            self.channel.wait(work, f"the gradient of {self.members.name(index)}")
            if take_part and self.failure is None:
                self.members.params[index].grad = grad
        self._in_flight.clear()
        self.channel.wait(last, "the tail")
        return tail
