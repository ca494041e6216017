"""Learning rates as pure functions of the step: nothing to save, so a resumed run cannot differ.

What applies them is in `step`. Optimizers do not belong here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import ConfigError

__all__ = ["SCHEDULES", "Schedule"]

SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate that climbs linearly over `warmup_steps`, then stays, or falls to 0 at `num_steps`."""

    shape: str
    peak: float
    num_steps: int
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        if self.shape not in SCHEDULES:
            raise ConfigError(f"unknown schedule {self.shape!r}: known are {', '.join(SCHEDULES)}")

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps count from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        length = max(1, self.num_steps - self.warmup_steps)
        share = min(1.0, (step - self.warmup_steps) / length)
        if self.shape == "linear":
            return self.peak * (1 - share)
        return self.peak * 0.5 * (1 + math.cos(math.pi * share))
