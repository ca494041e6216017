"""Which parameters an optimizer treats in which way. Optimizers do not belong here."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["split_parameters"]


def split_parameters(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices and filters with decay and trust ratios, biases and norms with neither.

    Frozen parameters are left out, and so is a group that has none. Only LARS and LAMB read `adapt`; the optimizers of
    torch carry it along.
    """
    params = [param for param in module.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": weight_decay, "adapt": True},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]
