"""A model's forward pass and its loss, as a sum over targets: sums can be added over micro-batches and ranks.

What is averaged, and over what, is decided by `training`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from paceline.errors import ConfigError
from paceline.workloads.forms import IGNORED, Batch, DataForm

__all__ = ["Outcome", "compute_outcome"]


@dataclass(frozen=True)
class Outcome:
    """The loss summed over the targets of a batch, and how many of them were predicted (None where numbers are)."""

    loss_sum: torch.Tensor
    num_correct: torch.Tensor | None


def compute_outcome(
    model: Callable[..., Any], batch: Batch, form: DataForm, *, label_smoothing: float = 0.0
) -> Outcome:
    """Cross-entropy where there are classes, squared error where numbers are predicted; summed, in float32.

    `label_smoothing` is the share of a target that is spread evenly over all classes.
    """
    output = model(batch.inputs) if batch.mask is None else model(batch.inputs, attention_mask=batch.mask)
    predicted = getattr(output, "logits", output)
    if not isinstance(predicted, torch.Tensor):
        raise ConfigError(
            f"the model returned {type(predicted).__name__}: it must return a tensor, or an object with `logits`"
        )
    if form.num_classes == 0:
        if predicted.numel() != batch.targets.numel():
            raise ConfigError(
                f"the model returned the shape {tuple(predicted.shape)} for {len(batch)} numbers: ({len(batch)}, 1) "
                "is needed"
            )
        errors = predicted.float().reshape(-1) - batch.targets.reshape(-1)
        return Outcome((errors * errors).sum(), None)
    classes = predicted.shape[-1] if predicted.dim() else 0
    if classes == 0 or predicted.numel() != batch.targets.numel() * classes or classes < form.num_classes:
        needed = (*batch.targets.shape, form.num_classes)
        raise ConfigError(
            f"the model returned the shape {tuple(predicted.shape)} for targets of shape {tuple(batch.targets.shape)} "
            f"and {form.num_classes} classes: {needed} is needed"
        )
    logits, targets = predicted.reshape(-1, classes), batch.targets.reshape(-1)
    loss = F.cross_entropy(
        logits.float(), targets, reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing
    )
    return Outcome(loss, (logits.detach().argmax(dim=-1) == targets).sum())
