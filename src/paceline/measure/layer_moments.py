"""Moments of one profiled step, and the hooks that note them. Repetitions and records are in `layers`.

No hook waits for the device: on CUDA a moment is an event on the stream, and is read when the step is over.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from paceline.measure.engine import synchronize
from paceline.parallel.backward import find_tensors

__all__ = ["LayerHooks", "Moments"]

_OUTSIDE = -1


class Moments:
    """Moments in the order of their marks: clock readings on CPU, events on CUDA that are used again in each step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._readings_s: list[float] = []
        self._count = 0

    def restart(self) -> None:
        self._readings_s.clear()
        self._count = 0

    def mark(self) -> int:
        """Note this moment, and return its number."""
        if not self._on_gpu:
            self._readings_s.append(time.perf_counter())
            return len(self._readings_s) - 1
        number = self._count
        self._count += 1
        if number == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[number].record()
        return number

    def read_s(self) -> list[float]:
        """Seconds of every moment since the first one; waits for the device."""
        synchronize(self._device)
        if self._on_gpu:
            first = self._events[0]
            return [first.elapsed_time(event) / 1e3 for event in self._events[: self._count]]
        return [reading - self._readings_s[0] for reading in self._readings_s]


class LayerHooks:
    """What happened in one step, as numbers of moments: gradients that became ready, and blocks that came and went.

    A hook on a parameter would cost in every later step even after its removal, because torch still looks for it; a
    hook on the node that accumulates its gradient goes with the graph. Full backward hooks of modules put views around
    every output, which breaks operations in place; hooks on the nodes of a block's inputs and outputs do not.
    """

    def __init__(self, params: Sequence[torch.Tensor], blocks: Sequence[nn.Module], moments: Moments) -> None:
        self._params, self._blocks, self._moments = params, blocks, moments
        self._clear()

    def _clear(self) -> None:
        self.ready: dict[int, int] = {}
        self.calls: list[tuple[int, int, int]] = []  # block, begin and end of one forward
        self.owners: list[tuple[int, int]] = []  # from this moment of backward on, this block or none is at work
        self._open: dict[int, tuple[int, list[Any]]] = {}  # a block that runs again may stop half-way
        self._is_forward = True

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks for one step; none is left afterwards."""
        self._clear()
        with contextlib.ExitStack() as hooks:
            # The nodes are held until the end: a graph made in backward (checkpointing) then uses the same ones.
            nodes = [get_gradient_edge(param).node for param in self._params]
            for index, node in enumerate(nodes):
                hooks.callback(node.register_hook(functools.partial(self._note_ready, index)).remove)
            for index, block in enumerate(self._blocks):
                before = functools.partial(self._begin_forward, index)
                after = functools.partial(self._end_forward, index)
                hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(after).remove)
            yield

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    def begin_backward(self, moment: int) -> None:
        # A forward that is run again from here on (checkpointing) is part of its block's backward.
        self._is_forward = False
        self.owners.append((moment, _OUTSIDE))

    def _note_ready(self, index: int, *grads: Any) -> None:
        self.ready[index] = self._moments.mark()  # a gradient may come in parts: the last one counts

    def _begin_forward(self, index: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = _find_nodes(*args, *kwargs.values())
        self._open[index] = self._moments.mark(), inputs
        if not self._is_forward:
            self._begin_block(index)

    def _end_forward(self, index: int, block: nn.Module, args: Any, output: Any) -> None:
        begin, inputs = self._open.pop(index)
        if self._is_forward:
            self.calls.append((index, begin, self._moments.mark()))
        # A block that hands on its input has no backward of its own.
        for node in _find_nodes(output):
            if not any(node is other for other in inputs):
                node.register_prehook(functools.partial(self._begin_block, index))
        waiting = set(range(len(inputs)))
        for number, node in enumerate(inputs):
            node.register_prehook(functools.partial(self._end_block, index, waiting, number))

    def _begin_block(self, index: int, *grads: Any) -> None:
        if self.owners[-1][1] != index:
            self.owners.append((self._moments.mark(), index))

    def _end_block(self, index: int, waiting: set[int], number: int, *grads: Any) -> None:
        waiting.discard(number)
        if not waiting and self.owners[-1][1] == index:
            self.owners.append((self._moments.mark(), _OUTSIDE))


def _find_nodes(*values: Any) -> list[Any]:
    """The autograd nodes that made the tensors in nested values."""
    found: list[Any] = []
    for value in values:
        # Nearly always a tensor, and the search takes longer than the rest of a hook.
        for tensor in [value] if isinstance(value, torch.Tensor) else find_tensors(value):
            node = tensor.grad_fn
            if node is not None and not any(node is other for other in found):
                found.append(node)
    return found
