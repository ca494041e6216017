"""What goes into a forward: moved to the device, and its samples counted."""

from __future__ import annotations

import collections
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from paceline.errors import ConfigError

__all__ = ["count_samples", "find_tensors", "move_inputs"]


def move_inputs(value: Any, device: torch.device) -> Any:
    """The same nested value with every tensor on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move_inputs(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(move_inputs(item, device) for item in value)
    if isinstance(value, dict):
        moved = value.copy()
        for key, item in value.items():
            moved[key] = move_inputs(item, device)
        return moved
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: move_inputs(getattr(value, f.name), device) for f in fields(value) if f.init}
        return replace(value, **changes)
    return value


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
        else:
            seen.add(id(item))
            waiting += reversed(_items(item))
    return found


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return list(value)
    slots = [getattr(value, name, None) for name in getattr(value, "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *slots]


def count_samples(*args: Any, **kwargs: Any) -> int:
    """The first dimension of the first tensor."""
    for tensor in find_tensors((args, kwargs)):
        if tensor.dim():
            return tensor.size(0)
    raise ConfigError("average='samples' finds no tensor with a first dimension in the inputs: pass samples_of")
