"""The order in which gradients become ready, recorded for one backward. What follows from it is planned elsewhere."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

__all__ = ["Arrivals"]


class Arrivals:
    """Notes every gradient of one backward; a gradient may arrive in several parts.

    The hooks are on autograd's nodes, which go with the graph. A hook on each parameter would cost in every later
    step, even after its removal: torch still looks for it.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._noted: list[int] = []
        self._held: list[tuple[Any, Any]] = []  # nodes, and the handles of their hooks

    def start(self) -> None:
        """At the beginning of a backward."""
        self.stop()
        self._noted.clear()
        for index, param in enumerate(self._params):
            if param.requires_grad:
                # Held for as long as the record lasts: a graph made in backward (checkpointing) then uses the same one.
                node = get_gradient_edge(param).node
                self._held.append((node, node.register_hook(functools.partial(_note, self._noted, index))))

    def stop(self) -> None:
        """What was noted stays."""
        for _, handle in self._held:
            handle.remove()
        self._held.clear()

    def ready_order(self) -> list[int]:
        """All parameters in the order in which they were complete; those that never came are last, in reverse."""
        complete = {index: place for place, index in enumerate(self._noted)}
        return sorted(reversed(range(len(self._params))), key=lambda index: complete.get(index, len(self._noted)))

    def find_last(self, indices: Iterable[int]) -> int | None:
        """Of these, the one that was complete last; None where none came."""
        complete = {index: place for place, index in enumerate(self._noted)}
        return max((index for index in indices if index in complete), key=complete.__getitem__, default=None)

    def in_parts(self) -> set[int]:
        return {index for index, count in Counter(self._noted).items() if count > 1}


def _note(noted: list[int], index: int, *grads: Any) -> None:
    noted.append(index)
