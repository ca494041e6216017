"""The order in which gradients become ready, recorded by a hook on every parameter. What follows from it is planned
elsewhere."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from paceline.parallel.ladder import on_gradient

__all__ = ["Arrivals"]


class Arrivals:
    """While it is on, notes every gradient of the current step; a gradient may arrive in several parts."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._noted: list[int] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def is_on(self) -> bool:
        return bool(self._handles)

    def start(self) -> None:
        for index, param in enumerate(self._params):
            self._handles.append(on_gradient(param, functools.partial(_note, self._noted, index)))

    def stop(self) -> None:
        """Take the hooks off; what was noted stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def clear(self) -> None:
        self._noted.clear()

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


def _note(noted: list[int], index: int, param: torch.Tensor) -> None:
    noted.append(index)
