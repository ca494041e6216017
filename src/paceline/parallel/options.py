"""What a wrapper was asked for: torch's arguments and ours, checked, and the plan rule that follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.plan import TORCH_CAP_BYTES, TORCH_FIRST_CAP_BYTES, Gradient, Plan, plan_like_torch
from paceline.units import MIB

__all__ = ["AVERAGES", "INITS", "REDUCERS", "Options"]

REDUCERS = ("bucketed", "overlap", "flat", "per_parameter")
INITS = ("broadcast", "verify", "none")
AVERAGES = ("ranks", "samples")

# On gloo a message needs about this much per rank to be as fast per byte as a larger one.
_GLOO_BYTES_PER_RANK = 4 * MIB
# On NCCL the host pays for each bucket: few, and none so large that the last one holds everything up.
_NCCL_BUCKETS, _NCCL_CAP_BYTES = 16, 256 * MIB


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that all ranks must share. `check_every` and `statistics_every` count synchronised steps."""

    reducer: str = "bucketed"
    init: str = "broadcast"
    average: str = "ranks"
    plan: Plan | None = None
    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: tuple[float, ...] | None = None
    allow_missing: bool = False
    manual: bool = False
    check_every: int = 100
    statistics_every: int = 1

    def __post_init__(self) -> None:
        for what, value, known in (
            ("reducer", self.reducer, REDUCERS), ("init", self.init, INITS), ("average", self.average, AVERAGES),
        ):  # fmt: skip
            if value not in known:
                raise ConfigError(f"{what}={value!r} is unknown: use {', '.join(known)}")
        if self.bucket_cap_mb_list is not None and not self.bucket_cap_mb_list:
            raise ConfigError("bucket_cap_mb_list=[] is empty: give at least one cap in MiB")
        caps = [("bucket_cap_mb", self.bucket_cap_mb), *(("bucket_cap_mb_list", cap) for cap in self.caps_list)]
        for what, cap in caps:
            if cap is not None and not (isinstance(cap, int | float) and math.isfinite(cap) and cap > 0):
                raise ConfigError(f"{what}={cap!r}: a cap in MiB, above 0")
        given = [name for name in ("plan", "bucket_cap_mb", "bucket_cap_mb_list") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} contradict each other: give one")
        if given and self.reducer != "bucketed":
            raise ConfigError(f"{given[0]} contradicts reducer={self.reducer!r}, which has no buckets to plan")
        for what, every in (("check_replicas_every", self.check_every), ("statistics_every", self.statistics_every)):
            if every < 0:
                raise ConfigError(f"{what}={every}: a number of steps, or 0 for never")

    @property
    def caps_list(self) -> tuple[float, ...]:
        return self.bucket_cap_mb_list or ()

    def make_planner(
        self, *, on_nccl: bool, with_hook: bool, world_size: int, has_spare_cores: bool
    ) -> Callable[[Sequence[Gradient], Sequence[int]], Plan]:
        """The rule that makes a plan from gradients in ready order."""
        if self.plan is not None:
            plan = self.plan
            return lambda gradients, order: _check_plan(plan, gradients, with_hook)
        if self.bucket_cap_mb is not None:
            caps = [max(1, int(self.bucket_cap_mb * MIB))]
            return lambda gradients, order: plan_like_torch(gradients, order, caps)
        if self.caps_list:
            listed = [max(1, int(cap * MIB)) for cap in self.caps_list]
            return lambda gradients, order: plan_like_torch(gradients, order, listed)
        if on_nccl:
            return _plan_for_nccl
        if with_hook:
            return plan_like_torch
        # Small buckets leave early, where cores are free to carry them; else they only cost.
        cap = min(world_size * _GLOO_BYTES_PER_RANK, TORCH_CAP_BYTES)
        fitting = [TORCH_FIRST_CAP_BYTES, cap] if has_spare_cores else [TORCH_CAP_BYTES]
        return lambda gradients, order: plan_like_torch(gradients, order, fitting)

    def describe(self) -> dict[str, Any]:
        """What the ranks compare."""
        plan = "" if self.plan is None else self.plan.to_json()
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "plan": plan}


def _plan_for_nccl(gradients: Sequence[Gradient], order: Sequence[int]) -> Plan:
    total = sum(gradient.num_bytes for gradient in gradients)
    cap = min(max(total // _NCCL_BUCKETS, TORCH_CAP_BYTES), _NCCL_CAP_BYTES)
    return plan_like_torch(gradients, order, [cap])


def _check_plan(plan: Plan, gradients: Sequence[Gradient], with_hook: bool) -> Plan:
    """The given plan, if it is one for this model."""
    if len(plan.gradients) != len(gradients):
        raise ConfigError(f"the plan is for {len(plan.gradients)} gradients, and the model has {len(gradients)}")
    for index, (planned, real) in enumerate(zip(plan.gradients, gradients, strict=True)):
        if (planned.num_bytes, planned.dtype) != (real.num_bytes, real.dtype):
            raise ConfigError(
                f"the plan is for another model: gradient {index} is {planned.name} ({planned.num_bytes} bytes "
                f"{planned.dtype}) there, and {real.name} ({real.num_bytes} bytes {real.dtype}) here"
            )
    if plan.is_split and with_hook:
        raise ConfigError("the plan splits a gradient over buckets, and a communication hook needs whole ones")
    return Plan(tuple(gradients), plan.buckets, plan.rule)
