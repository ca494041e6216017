"""Gradients that arrive in several parts: of parameters that are used in several segments of re-entrant checkpointing.

The first step counts how often each arrives. From then on it is complete when it has arrived as often, so that its
bucket need not wait for the end of backward. `.grad` is None from that moment to the end: whatever still arrives is in
memory of its own. The control words report that there is some, and all ranks add it in a message of its own.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence

import torch

from paceline.parallel.channel import Channel
from paceline.parallel.replicas import Replica


class Parts:
    """Counts arrivals, by the index of the parameter. `is_on` is the same on all ranks; what they count need not be."""

    def __init__(self, replica: Replica, channel: Channel) -> None:
        self._replica, self._channel, self.is_on = replica, channel, False
        self.counts: dict[int, int] = {}  # in how many parts each is expected
        self._seen: collections.Counter[int] = collections.Counter()  # in this backward
        self._complete: dict[int, torch.Tensor] = {}  # gradients that were taken, while `.grad` is None
        self._later: dict[int, torch.Tensor] = {}  # what arrived after that
        self._known: set[int] = set()  # parameters that once arrived in parts, on any rank
        self._varied: set[int] = set()  # and those in more parts than expected

    def agree(self, found: Collection[int], is_possible: bool) -> None:
        """These arrived in parts here, when the order was recorded. Collective."""
        self._known = {index for each in self._channel.share(sorted(found)) for index in each}
        # On a GPU the host would wait for the control words of each step.
        self.is_on = is_possible and bool(self._known) and self._channel.device.type == "cpu"

    def use(self, found: Mapping[int, int]) -> set[int]:
        """Expect these numbers. Returns the parameters whose number is not known: they wait for the end of backward."""
        self._known |= found.keys()
        self.counts = {index: count for index, count in found.items() if self.is_on and index not in self._varied}
        return self._known - self.counts.keys()

    def begin(self) -> None:
        """Forget what a backward that failed has left."""
        self._complete.clear()
        self._later.clear()
        self._seen.clear()

    def note(self, index: int) -> bool:
        """A part arrives; whether the gradient is complete with it."""
        self._seen[index] += 1
        return self._seen[index] == self.counts.get(index)

    def are_complete(self, indices: Collection[int]) -> bool:
        return all(index in self._complete or self._seen[index] == self.counts[index] for index in indices)

    def count_more(self, indices: Sequence[int], views: Sequence[torch.Tensor]) -> int:
        """How many parts beyond the first were added in these views."""
        pairs, params = zip(indices, views, strict=True), self._replica.params
        return sum(self.counts.get(index, 1) - 1 for index, view in pairs if params[index].grad is view)

    def release(self, indices: Sequence[int]) -> None:
        """These gradients are taken: what still arrives must not be added to them."""
        for index in indices:
            param = self._replica.params[index]
            if index not in self._complete and param.grad is not None:
                self._complete[index], param.grad = param.grad, None

    def restore(self) -> None:
        """Backward is over: `.grad` is what was taken."""
        taken, self._complete = self._complete, {}
        for index, grad in taken.items():
            param = self._replica.params[index]
            if param.grad is not None and param.grad is not grad:
                self._later[index] = param.grad
            param.grad = grad

    @property
    def has_more(self) -> bool:
        """Whether something arrived after its gradient was taken."""
        return bool(self._later)

    def exchange(self, factor: float, take_part: bool) -> None:
        """Add what arrived later on any rank, times `factor`. From now on these wait for the end. Collective."""
        later, self._later = self._later, {}
        late = sorted({index for each in self._channel.share(sorted(later)) for index in each})
        for index in late:
            param = self._replica.params[index]
            total = torch.zeros_like(param, requires_grad=False, memory_format=torch.contiguous_format)
            if index in later:
                torch.mul(later[index], factor, out=total)
            self._channel.wait(self._channel.start_sum(total), f"the gradient of {self._replica.name(index)}")
            if take_part and param.grad is not None:
                param.grad.add_(total)
        self._varied.update(late)
