"""Learning rates as pure functions of the step: nothing to save, so a resumed run cannot differ.

What applies them in `paceline train` is in `step`. Optimizers do not belong here, and torch is not imported.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["SCALING_RULES", "SCHEDULES", "Schedule", "check_drops", "correct_momentum", "scale_rate"]

SCHEDULES = ("constant", "cosine", "linear", "piecewise")
SCALING_RULES = ("none", "linear", "sqrt")


def check_drops(drops: tuple[float, ...], name: str = "drops") -> None:
    """Refuse drops that are not increasing shares of a run."""
    is_rising = all(first < second for first, second in itertools.pairwise(drops))
    if not is_rising or not all(0 < drop < 1 for drop in drops):
        raise ConfigError(
            f"{name} {','.join(map(str, drops))}: increasing shares of the run between 0 and 1 are needed"
        )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate that climbs linearly over `warmup_steps`, from `warmup_start` to `peak`, and then has a shape.

    It stays (constant), falls to 0 at `num_steps` (cosine, linear), or is multiplied by `drop_factor` at each of
    `drops`, which are shares of all `num_steps`, the warm-up's included (piecewise).
    """

    shape: str
    peak: float
    num_steps: int
    warmup_steps: int = 0
    warmup_start: float = 0.0
    drops: tuple[float, ...] = ()
    drop_factor: float = 0.1

    def __post_init__(self) -> None:
        if self.shape not in SCHEDULES:
            raise ConfigError(f"unknown schedule {self.shape!r}: known are {', '.join(SCHEDULES)}")
        for name, rate in (("peak", self.peak), ("warmup_start", self.warmup_start)):
            if not math.isfinite(rate) or rate < 0:
                raise ConfigError(f"{name} {rate}: a finite number from 0 is needed")
        if self.num_steps < 1 or self.warmup_steps < 0:
            raise ConfigError(f"{self.num_steps} steps, {self.warmup_steps} of warm-up: at least 1 and 0 are needed")
        if not 0 < self.drop_factor < 1:
            raise ConfigError(f"drop_factor {self.drop_factor}: a number between 0 and 1 is needed")
        if bool(self.drops) != (self.shape == "piecewise"):
            raise ConfigError(
                f"schedule {self.shape} with drops {self.drops}: drops belong to piecewise, which needs them"
            )
        check_drops(self.drops)
        if self.drops and self.drops[0] * self.num_steps < self.warmup_steps:
            raise ConfigError(
                f"a drop at {self.drops[0]} of {self.num_steps} steps, inside of the warm-up of {self.warmup_steps}: "
                "drop later, or warm up in fewer steps"
            )

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps count from 0."""
        if step < self.warmup_steps:
            return self.warmup_start + (self.peak - self.warmup_start) * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        if self.shape == "piecewise":
            # The quotient is rounded once, as a share that was typed is: 0.55 of 100 steps is step 55, not 56.
            return self.peak * self.drop_factor ** sum(step / self.num_steps >= drop for drop in self.drops)
        length = max(1, self.num_steps - self.warmup_steps)
        share = min(1.0, (step - self.warmup_steps) / length)
        if self.shape == "linear":
            return self.peak * (1 - share)
        return self.peak * 0.5 * (1 + math.cos(math.pi * share))

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Give all groups of an optimizer the learning rate of a step, and return it."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate


def scale_rate(rate: float, batch_size: int, base_batch_size: int, rule: str) -> float:
    """The rate for a global batch, from one that is good for `base_batch_size`.

    `linear` in the batch keeps what an epoch does while gradients of a batch change little (Goyal 2017), and wants a
    warm-up; `sqrt` keeps the noise of a step (Krizhevsky 2014) and is the usual one with LAMB; `none` keeps the rate.
    """
    if rule not in SCALING_RULES:
        raise ConfigError(f"unknown scaling rule {rule!r}: known are {', '.join(SCALING_RULES)}")
    if not math.isfinite(rate) or rate < 0:
        raise ConfigError(f"rate {rate}: a finite number from 0 is needed")
    if batch_size < 1 or base_batch_size < 1:
        raise ConfigError(f"a batch of {batch_size} from a batch of {base_batch_size}: at least 1 sample is needed")
    if rule == "none":
        return rate
    factor = batch_size / base_batch_size
    return rate * (factor if rule == "linear" else math.sqrt(factor))


def correct_momentum(optimizer: Optimizer, factor: float) -> None:
    """Multiply the velocities of an optimizer that keeps the rate inside of them, when its rate changes by `factor`.

    Such a velocity is v = momentum * v + lr * g, and it still holds the old rate (Goyal 2017). The SGD of torch and our
    LARS have u = momentum * u + g and multiply by the rate afterwards: they need no correction, and it would harm.
    """
    if not math.isfinite(factor) or factor < 0:
        raise ConfigError(f"factor {factor}: a finite number from 0 is needed")
    for state in optimizer.state.values():
        if state.get("momentum_buffer") is not None:
            state["momentum_buffer"].mul_(factor)
