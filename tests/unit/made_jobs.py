"""Jobs and linear costs for the simulator, built from the few numbers that matter to a test."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plan import Gradient
from paceline.predict.curves import FamilyCurve
from paceline.predict.job import Job


def line(alpha_s: float, bytes_per_s: float) -> FamilyCurve:
    return FamilyCurve("line", 2, alpha_s, bytes_per_s)


def make_job(
    sizes: Sequence[int], ready_s: Sequence[float], backward_s: float, before_s: float = 0.0, after_s: float = 0.0
) -> Job:
    gradients = tuple(Gradient(f"layer{place}", size, 1) for place, size in enumerate(sizes))
    return Job(gradients, tuple(ready_s), backward_s, before_s, after_s)
