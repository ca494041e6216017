"""What autograd is doing right now, asked from inside a hook. Synchronising does not belong here."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch
from torch.autograd.graph import _engine_run_backward, get_gradient_edge

__all__ = ["is_nested", "will_accumulate"]

_RUN_BACKWARD = _engine_run_backward.__code__


def will_accumulate(params: Sequence[torch.Tensor]) -> bool:
    """Whether this pass leaves gradients: torch.autograd.grad goes through a model and leaves none."""
    for param in (params[-1], params[0], *params):
        try:
            if param.requires_grad and torch._C._will_engine_execute_node(get_gradient_edge(param).node):
                return True
        except RuntimeError:  # torch.autograd.grad with respect to this very parameter
            continue
    return False


def is_nested() -> bool:
    """Whether this hook runs in a backward inside a backward, seen from Python."""
    frame, depth = sys._getframe(1), 0
    while frame is not None:
        depth += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    # A GPU's backward has a thread of its own, on which only a nested one can be seen.
    return depth > (0 if isinstance(threading.current_thread(), threading._DummyThread) else 1)
