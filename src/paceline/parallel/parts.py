"""Gradients that arrive in several parts, because re-entrant checkpointing uses the parameter in several segments.

The first step counts the parts of each gradient. From then on a gradient is complete when as many parts have arrived,
so its bucket need not wait for the end of backward. Its `.grad` is then None until backward ends, so that any further
part goes to separate memory. The control words report such late parts, and all ranks add them in an extra message.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence

import torch

from paceline.parallel.channel import Channel
from paceline.parallel.replicas import Replica


class PartialGradients:
    """Counts the parts of gradients by parameter index. `is_on` is the same on all ranks; the counts may differ."""

    def __init__(self, replica: Replica, channel: Channel) -> None:
        self._replica, self._channel, self.is_on = replica, channel, False
        self.counts: dict[int, int] = {}  # expected number of parts
        self._seen: collections.Counter[int] = collections.Counter()  # parts that arrived in this backward
        self._complete: dict[int, torch.Tensor] = {}  # completed gradients, while `.grad` is None
        self._later: dict[int, torch.Tensor] = {}  # parts that arrived after completion
        self._known: set[int] = set()  # parameters that ever arrived in parts, on any rank
        self._varied: set[int] = set()  # parameters that ever had late parts

    def agree(self, found: Collection[int], is_possible: bool) -> None:
        """Share which gradients arrived in parts while the ready order was recorded. Collective."""
        self._known = {index for each in self._channel.share(sorted(found)) for index in each}
        # On a GPU the host would wait for the control words of each step.
        self.is_on = is_possible and bool(self._known) and self._channel.device.type == "cpu"

    def use(self, found: Mapping[int, int]) -> set[int]:
        """Expect these numbers of parts. Returns the parameters without a known number: they wait for the end."""
        self._known |= found.keys()
        self.counts = {index: count for index, count in found.items() if self.is_on and index not in self._varied}
        return self._known - self.counts.keys()

    def begin(self) -> None:
        """Discard the leftovers of a failed backward."""
        self._complete.clear()
        self._later.clear()
        self._seen.clear()

    def note(self, index: int) -> bool:
        """Count a part that has arrived. Returns whether it completes the gradient."""
        self._seen[index] += 1
        return self._seen[index] == self.counts.get(index)

    def are_complete(self, indices: Collection[int]) -> bool:
        return all(index in self._complete or self._seen[index] == self.counts[index] for index in indices)

    def count_more(self, indices: Sequence[int], views: Sequence[torch.Tensor]) -> int:
        """How many parts, not counting the first of each gradient, were accumulated into these views."""
        pairs, params = zip(indices, views, strict=True), self._replica.params
        return sum(self.counts.get(index, 1) - 1 for index, view in pairs if params[index].grad is view)

    def release(self, indices: Sequence[int]) -> None:
        """Detach these completed gradients, so that late parts are not added to them."""
        for index in indices:
            param = self._replica.params[index]
            if index not in self._complete and param.grad is not None:
                self._complete[index], param.grad = param.grad, None

    def restore(self) -> None:
        """Put the completed gradients back into `.grad` at the end of backward, and keep late parts aside."""
        taken, self._complete = self._complete, {}
        for index, grad in taken.items():
            param = self._replica.params[index]
            if param.grad is not None and param.grad is not grad:
                self._later[index] = param.grad
            param.grad = grad

    @property
    def has_more(self) -> bool:
        """Whether a part arrived after its gradient was complete."""
        return bool(self._later)

    def exchange(self, factor: float, take_part: bool) -> None:
        """Add the late parts of all ranks, scaled by `factor`. These gradients wait for the end from now on.
        Collective."""
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
