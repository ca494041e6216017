"""The forwards whose backward is still to come, and the samples behind a step. What a backward starts is in `steps`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from paceline.parallel.inputs import find_tensors

__all__ = ["Forwards"]


class _Forward:
    """A forward whose backward has not begun, how many samples it had, and whether it was one of training."""

    def __init__(self, samples: int, is_training: bool) -> None:
        self.samples, self.is_training = samples, is_training


class Forwards:
    """Those of one model. One counts for as long as its graph lives: a forward whose output is dropped does not."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[_Forward] = weakref.WeakSet()
        self._samples: int | None = None  # behind the gradients since the last step; None: no backward has begun
        self._last_samples = 0  # in the last step: for another backward through the same graph

    def watch(self, output: Any, samples: int, is_training: bool, on_backward: Callable[[], None]) -> bool:
        """Be told when a backward passes through the output; False where it hides its tensors."""
        if isinstance(output, torch.Tensor) and not output.requires_grad:
            return True  # as of a teacher: there is no backward to come
        own, forward = weakref.ref(self), _Forward(samples, is_training)
        self._open.add(forward)

        def begin(_: Any) -> None:
            if (me := own()) is not None and forward in me._open:
                me._open.discard(forward)
                me._samples = (me._samples or 0) + forward.samples
            on_backward()

        nodes = {tensor.grad_fn for tensor in find_tensors(output) if tensor.grad_fn is not None}
        for node in nodes:
            node.register_prehook(begin)
        if not nodes:
            self._samples = (self._samples or 0) + samples
        return bool(nodes)

    @property
    def need_buffers(self) -> bool:
        """Whether a backward is still to come that needs buffers as they are.

        An output of evaluation may be kept for ever, and rarely is one for a backward.
        """
        return any(forward.is_training for forward in self._open)

    def count_samples(self) -> int:
        """The samples of all forwards since the last step, those whose backward is still to come in it included."""
        still = [forward.samples for forward in self._open if forward.is_training]
        if self._samples is None and not still:
            return self._last_samples
        return (self._samples or 0) + sum(still)

    def settle(self, samples: int) -> None:
        """A step is over, and this many samples were in it."""
        self._samples, self._last_samples = None, samples
