"""One training step, top to bottom: micro-batches, the loss by weight, synchronisation on the last, the update.

Where the micro-batches come from is in `loader`; what happens between steps is in `trainer`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.parallel import SyncBatchNorm
from paceline.training.loader import LoadedBatch
from paceline.training.phases import Phases
from paceline.workloads.forms import Batch, DataForm
from paceline.workloads.losses import compute_outcome

__all__ = ["Learner", "StepOutcome", "find_bad_parameter", "take_step"]

_OVER_RANKS = (SyncBatchNorm, nn.SyncBatchNorm)
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Learner:
    """All that learns on one rank: the model in its wrapper, its optimizer, and how a step treats them."""

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    form: DataForm
    device: torch.device
    world_size: int
    precision: str
    clip: float | None
    label_smoothing: float = 0.0

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [param for param in self.module.parameters() if param.requires_grad]

    def fill(self, loaded: LoadedBatch) -> Batch:
        """What is computed in a place that no sample of this rank has: one that does not count or, before layers that
        normalise over all ranks and would count it, none."""
        if loaded.num_counted or not any(isinstance(layer, _OVER_RANKS) for layer in self.module.modules()):
            return loaded.batch
        return loaded.batch.first(0)

    def no_sync(self) -> contextlib.AbstractContextManager[Any]:
        """Backwards inside stay on this rank."""
        manager = getattr(self.model, "no_sync", None)
        return manager() if manager is not None else contextlib.nullcontext()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=_AUTOCAST[self.precision])


@dataclass
class StepOutcome:
    """What this rank saw in one step: sums over its own samples, still on the device."""

    loss_sum: torch.Tensor
    num_correct: torch.Tensor | None
    num_samples: int
    bad_parameter: str = ""


def take_step(
    learner: Learner, window: Sequence[LoadedBatch], num_targets: int, rate: float, phases: Phases
) -> StepOutcome:
    """Learn from this rank's micro-batches of one global batch, which has `num_targets` targets over all ranks.

    Each loss is a sum, divided by the targets of the whole global batch: so micro-batches, ranks and a short tail count
    by what they hold, and their gradients add up to the gradient of one big batch. The wrapper averages over ranks,
    which the factor `world_size` undoes. Gradients travel once, behind the last micro-batch.
    Collective: every rank must call this, with the same number of micro-batches.
    """
    # A rank whose part of a short tail is empty has 0 right, which is not the same as no accuracy.
    correct = torch.zeros((), dtype=torch.int64, device=learner.device) if learner.form.num_classes else None
    total = StepOutcome(torch.zeros((), device=learner.device), correct, 0)
    for number, loaded in enumerate(window):
        is_last = number == len(window) - 1
        with contextlib.nullcontext() if is_last else learner.no_sync():
            phases.enter("forward")
            with learner.autocast():
                outcome = compute_outcome(
                    learner.model, learner.fill(loaded), learner.form, label_smoothing=learner.label_smoothing
                )
            weight = 1.0 if loaded.num_counted else 0.0
            loss = outcome.loss_sum * (weight * learner.world_size / num_targets)
            phases.enter("backward")
            learner.scaler.scale(loss).backward()
        _add(total, outcome.loss_sum.detach(), outcome.num_correct, loaded.num_counted)
    if learner.device.type == "cpu" and not math.isfinite(total.loss_sum.item()):
        total.bad_parameter = find_bad_parameter(learner.module)
    phases.enter("optimizer")
    update(learner, rate)
    return total


def _add(total: StepOutcome, loss_sum: torch.Tensor, num_correct: torch.Tensor | None, num_counted: int) -> None:
    """Count a micro-batch; one that only fills a place counts for nothing."""
    if num_counted == 0:
        return
    total.loss_sum = total.loss_sum + loss_sum
    total.num_samples += num_counted
    if num_correct is not None and total.num_correct is not None:
        total.num_correct = total.num_correct + num_correct


def update(learner: Learner, rate: float) -> None:
    """Apply the averaged gradients at this learning rate, and forget them."""
    if learner.clip is not None:
        learner.scaler.unscale_(learner.optimizer)
        torch.nn.utils.clip_grad_norm_(learner.parameters, learner.clip)
    for group in learner.optimizer.param_groups:
        group["lr"] = rate
    learner.scaler.step(learner.optimizer)
    learner.scaler.update()
    learner.optimizer.zero_grad(set_to_none=True)


def find_bad_parameter(module: nn.Module) -> str:
    """The first parameter or buffer of the model that is not finite; else the first whose gradient is not."""
    floating = (pair for pair in module.named_buffers() if pair[1].is_floating_point() and pair[1].numel())
    named = [*module.named_parameters(), *floating]
    # One pass over all, and one answer to wait for on a GPU.
    norms = torch._foreach_norm([param.detach() for _, param in named], ord=float("inf"))
    finite = torch.isfinite(torch.stack([norm.float() for norm in norms])).tolist()
    for (name, _), is_finite in zip(named, finite, strict=True):
        if not is_finite:
            return name
    for name, param in module.named_parameters():
        if param.grad is not None and not bool(torch.isfinite(param.grad).all()):
            return f"the gradient of {name}"
    return ""
