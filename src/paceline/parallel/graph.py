"""The autograd graph: tensors in a value, queries about the current backward, the order of gradients, and hooks."""

from __future__ import annotations

import collections
import functools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from paceline.torch_internals import run_backward, will_execute
from paceline.transport.works import keep_from_compiler

_RUN_BACKWARD = run_backward.__code__


def find_tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor in nested tuples, lists, dicts and objects with fields."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif item is None or isinstance(item, str | bytes | int | float | torch.nn.Module | type) or id(item) in seen:
            continue
        elif isinstance(item, dict):
            waiting += reversed(list(item.values()))
        elif isinstance(item, list | tuple | set | frozenset | collections.deque):
            waiting += reversed(list(item))
        else:
            slots = [getattr(item, name, None) for name in getattr(item, "__slots__", ())]
            waiting += reversed([*getattr(item, "__dict__", {}).values(), *slots])
        seen.add(id(item))
    return found


def move_tensors(value: Any, device: torch.device) -> Any:
    """The nested value with every tensor moved to the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, list | tuple):
        moved = [move_tensors(item, device) for item in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if isinstance(value, dict):
        clone = value.copy()
        for key, item in value.items():  # a subclass may forbid `update`
            clone[key] = move_tensors(item, device)
        return clone
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: move_tensors(getattr(value, f.name), device) for f in fields(value) if f.init})
    return value


def will_accumulate(params: Sequence[torch.Tensor]) -> bool:
    """Whether this backward accumulates gradients. torch.autograd.grad also runs through a model, but does not."""
    for param in (params[-1], params[0], *params):
        try:
            if param.requires_grad and will_execute(get_gradient_edge(param).node):
                return True
        except RuntimeError:  # torch.autograd.grad with respect to this parameter
            continue
    return False


class Arrivals:
    """The order in which gradients arrive in one backward. Some may arrive in several parts."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._arrived: list[int] = []
        self._hooked: list[tuple[Any, Any]] = []  # autograd nodes and the handles of their hooks

    def record(self) -> None:
        """Hook the autograd nodes, which disappear with the graph. Hooks on parameters cost time even when removed."""
        self.stop()
        self._arrived.clear()
        for index, param in enumerate(self._params):
            if param.requires_grad:
                # Kept alive while recording, so that a graph built in backward (checkpointing) uses the same node.
                node = get_gradient_edge(param).node
                self._hooked.append((node, node.register_hook(functools.partial(_note_arrival, self._arrived, index))))

    def stop(self) -> None:
        for _, handle in self._hooked:
            handle.remove()
        self._hooked.clear()

    @property
    def places(self) -> dict[int, int]:
        """The position of each gradient in the order, by its last part."""
        return {index: place for place, index in enumerate(self._arrived)}

    @property
    def ready_order(self) -> list[int]:
        """All gradients in the order in which they were last recorded as complete. Gradients that did not arrive come
        last."""
        places = self.places
        return sorted(reversed(range(len(self._params))), key=lambda index: places.get(index, math.inf))

    def find_parts(self) -> set[int]:
        """The gradients that arrived more than once."""
        return {index for index, count in collections.Counter(self._arrived).items() if count > 1}


def _note_arrival(arrived: list[int], index: int, *_: object) -> None:
    arrived.append(index)


def is_nested() -> bool:
    """Whether this hook runs in a nested backward, according to the Python stack."""
    frame, depth = sys._getframe(1), 0
    while frame is not None:
        depth += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    # On a GPU, backward runs on a separate thread, whose stack shows only nested calls.
    return depth > (0 if isinstance(threading.current_thread(), threading._DummyThread) else 1)


def on_gradient(param: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """Call `hook(param)` (the parameter, not its gradient) whenever its gradient has been accumulated."""
    return param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call, no-any-return]


class WeakHook:
    """A hook that calls a method, with `given` as first arguments, while its object exists. Copies do nothing."""

    def __init__(self, method: Any = None, *given: Any) -> None:
        self._find = (lambda: None) if method is None else weakref.ref(method.__self__)
        self._call = getattr(method, "__func__", None)
        self._given = given

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if (owner := self._find()) is not None:
            self._call(owner, *self._given, *args)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        return WeakHook, ()


keep_from_compiler(_note_arrival, move_tensors)
