"""Tensors as the core sees them: runs of numbers at an address. Sending them does not belong here (`group`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from paceline.transport import native

__all__ = ["DTYPES", "as_run", "as_run_in_place", "is_movable", "is_reducible", "stands_for_another"]

DTYPES = {
    torch.float32: native.F32, torch.float64: native.F64, torch.bfloat16: native.BF16, torch.float16: native.F16,
    torch.int32: native.I32, torch.int64: native.I64,
}  # fmt: skip


def stands_for_another(tensor: torch.Tensor) -> bool:
    return bool(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes in this process's memory, and is not one that stands for another."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not stands_for_another(tensor)


def is_reducible(tensor: torch.Tensor) -> bool:
    """Whether the core can add up a tensor's numbers."""
    return tensor.dtype in DTYPES and is_movable(tensor)


def as_run(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one whose elements do not follow each other: another rank's may, so the way is one."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.data)


def as_run_in_place(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any] | None]:
    """The same for a tensor that is written: with what brings the result from the copy to it, if there is one."""
    run = as_run(tensor)
    if run is not tensor and torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError("a tensor whose elements share memory (expanded, say) cannot take a result: clone it first")
    # Through `data`: as with every backend, what a collective writes does not count as a change that autograd sees.
    return run, None if run is tensor else functools.partial(tensor.data.copy_, run)
