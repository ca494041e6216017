"""Which of torch's kernels a run computes with, settled before its first step. Choosing them is torch's business."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["settled_kernels"]


@contextlib.contextmanager
def settled_kernels(device: torch.device, precision: str) -> Iterator[None]:
    """Turn oneDNN off where the CPU cannot do this precision by it, and on again behind.

    Left alone, torch tries, prints a page, and turns it off for the rest of the process: in the middle of the first
    step, so that a resumed run would compute its first step by other kernels than the undisturbed one.
    """
    supports = {"bf16": "_is_mkldnn_bf16_supported", "fp16": "_is_mkldnn_fp16_supported"}
    if device.type != "cpu" or precision not in supports or getattr(torch.ops.mkldnn, supports[precision])():
        yield
        return
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
