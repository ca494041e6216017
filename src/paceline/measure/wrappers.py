"""Data-parallel wrappers against each other: replicas of one model that step in turns, and are compared at the end.

What one replica and its step are is in `replicas`; what is derived from the samples is in `records.steps`.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.measure.engine import (
    Group,
    Measured,
    Pace,
    Timing,
    agree_on_max,
    merge_timings,
    run_cells,
    run_rounds,
)
from paceline.measure.replicas import (
    LEARNING_RATE,
    PHASES,
    Replica,
    Wrapping,
    build_module,
    build_replica,
    find_wrapping,
)
from paceline.measure.torch_tuning import ask_for_plan, build_candidates, choose_fastest
from paceline.measure.wrapper_settings import WrapperSettings
from paceline.records import Record, Samples, StepRecord
from paceline.records.steps import PRECISIONS
from paceline.units import format_bytes
from paceline.workloads.registry import WORKLOADS

__all__ = ["count_wrong_parameters", "measure_wrappers", "order_turns"]

_SEED = 1
# The budget is for all wrappers of a cell. Warm-ups: torch cuts its buckets anew in its second step, and Paceline plans
# in its first.
_PACE = Pace(budget_s=30.0, min_iters=10, max_iters=100, warmup=3)
# How far a parameter's way from its start may be from the way under torch's wrapper, as a share of that way. Rounding
# gives 1e-6 on a CPU, and much more where matrices are multiplied in bfloat16 or TF32; a division forgotten, or ranks
# that were not averaged, about 1.
_TOLERANCE, _COARSE_TOLERANCE = 0.05, 0.5


@dataclass
class _Answer:
    """What one rank knows of one wrapper when the cell is done."""

    wrapper: str
    configuration: str
    note: str
    timing: Timing
    phases_s: list[tuple[float, ...]]
    was_checked: bool
    held_bytes: int
    peak_step_bytes: int


def measure_wrappers(settings: WrapperSettings) -> Measured:
    """Time and check every cell of the settings. Collective: every rank of the launched world must call this."""

    def measure(
        groups: Sequence[Group], rank: int, model: str, tell: Callable[[float], None] | None
    ) -> list[list[_Answer]]:
        try:
            return _measure_cell(settings, groups, rank, model, tell)
        finally:
            _free()  # the next cell finds the memory that this one found

    def build_records(
        groups: Sequence[Group], model: str, answers: list[list[list[_Answer]]], shares_clock: bool
    ) -> list[Record]:
        return [
            _build_record(settings, group, model, [mine[turn][number] for mine in answers], shares_clock)
            for turn, group in enumerate(groups)
            for number in range(len(settings.wrappers))
        ]

    return run_cells(settings, settings.models, str, measure, build_records)


def order_turns(count: int, repetition: int) -> list[int]:
    """The order of the contestants in one repetition: over many, each follows every other one equally often.

    A Williams design: 0, 1, n-1, 2, n-2, ... shifted by the repetition; every second time round it is reversed, which
    also balances an odd number.
    """
    zigzag = [(k + 1) // 2 if k % 2 else (count - k // 2) % count for k in range(count)]
    order = [(place + repetition) % count for place in zigzag]
    return order[::-1] if (repetition // count) % 2 else order


def _measure_cell(
    settings: WrapperSettings,
    groups: Sequence[Group],
    rank: int,
    model: str,
    tell: Callable[[float], None] | None,
) -> list[list[_Answer]]:
    """One model on one number of ranks: every wrapper on every backend, in turns; per backend, per wrapper."""
    control, dtype = groups[0].control, getattr(torch, settings.dtype)
    for group in groups:
        _check_gpu_memory(settings, group, model)

    def build(wrapping: Wrapping, group: Group) -> Replica:
        return build_replica(model, wrapping, group, rank, _SEED, settings.batch_of(model), dtype)

    wrappings = [_find_wrappings(settings, build, group, model) for group in groups]
    replicas = [
        {wrapper: build(wrapping, group) for wrapper, wrapping in found.items()}
        for group, found in zip(groups, wrappings, strict=True)
    ]
    everyone = [replica for of_group in replicas for replica in of_group.values()]
    with contextlib.ExitStack() as closing:
        for replica in everyone:
            closing.callback(replica.close)
        _step_in_turns(
            everyone, control, settings, tell, lambda: _compare_with_torch(settings, groups, model, replicas)
        )
        return [
            _check_and_answer(settings, group, model, of_group)
            for group, of_group in zip(groups, replicas, strict=True)
        ]


def _find_wrappings(
    settings: WrapperSettings, build: Callable[[Wrapping, Group], Replica], group: Group, model: str
) -> dict[str, Wrapping]:
    """What each wrapper is on this group; `torch-tuned` is found by trying, before anything else takes memory."""
    found = {wrapper: find_wrapping(wrapper) for wrapper in settings.wrappers if wrapper != "torch-tuned"}
    if "torch-tuned" in settings.wrappers:

        def build_here(wrapping: Wrapping) -> Replica:
            return build(wrapping, group)

        plan = ask_for_plan(build_here, group.control)
        candidates = build_candidates(build_module(model, _SEED, group.device), plan)
        _free()
        found["torch-tuned"] = choose_fastest(candidates, build_here, group.control)
        _free()
    return {wrapper: found[wrapper] for wrapper in settings.wrappers}


def _step_in_turns(
    replicas: list[Replica],
    control: dist.ProcessGroup,
    settings: WrapperSettings,
    tell: Callable[[float], None] | None,
    compare: Callable[[], None],
) -> None:
    """All repetitions, warm-ups first; every replica steps once in each, in an order that changes.

    `compare` is called after the warm-ups: later, rounding alone can lead replicas far apart.
    """

    def run_round(repetition: int) -> float:
        return sum(replicas[index].take_step(control) for index in order_turns(len(replicas), repetition))

    def end_warmup(num_warmup: int) -> None:
        for replica in replicas:
            replica.timing.num_warmup = num_warmup
        compare()

    run_rounds(run_round, control, _PACE, settings.iters, settings.warmup, tell, end_warmup)


def _compare_with_torch(
    settings: WrapperSettings, groups: Sequence[Group], model: str, replicas: Sequence[dict[str, Replica]]
) -> None:
    """Count, in each replica, the parameters that went another way than under torch's wrapper."""
    for group, of_group in zip(groups, replicas, strict=True):
        reference = of_group.get("torch") or of_group.get("torch-tuned")
        start = list(build_module(model, _SEED, group.device).parameters())
        for wrapper, replica in of_group.items():
            steps = len(replica.timing.seconds)
            if steps and wrapper != "bare" and reference not in (None, replica):
                assert reference is not None
                is_coarse = settings.dtype == "bfloat16" or group.device.type == "cuda"
                tolerance = _COARSE_TOLERANCE if is_coarse else _TOLERANCE
                replica.timing.num_wrong = count_wrong_parameters(
                    replica.parameters, start, reference.parameters, group.data, steps, tolerance
                )


def _check_and_answer(
    settings: WrapperSettings, group: Group, model: str, replicas: dict[str, Replica]
) -> list[_Answer]:
    """What this rank knows of each wrapper on one backend, with its parameters checked to be equal on all ranks."""
    answers = []
    for wrapper, replica in replicas.items():
        if wrapper != "bare":
            start = replica.parameters
            unequal = count_wrong_parameters(start, start, None, group.data, 0, 0.0)
            replica.timing.num_wrong = max(replica.timing.num_wrong, unequal)
            replica.timing.num_checked = len(start)
        plan = getattr(replica.model, "plan", None) if wrapper.startswith("paceline") else None
        buckets = f", {len(plan.buckets)} buckets: {plan.rule}" if plan is not None else ""
        answers.append(
            _Answer(
                wrapper=wrapper,
                configuration=replica.wrapping.configuration + buckets,
                note=replica.wrapping.note,
                timing=replica.timing,
                phases_s=replica.phases_s,
                was_checked=wrapper != "bare",
                held_bytes=replica.held_bytes,
                peak_step_bytes=replica.peak_step_bytes,
            )
        )
    return answers


@torch.no_grad()
def count_wrong_parameters(
    parameters: Sequence[torch.Tensor],
    start: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor] | None,
    group: dist.ProcessGroup,
    num_steps: int,
    tolerance: float,
) -> int:
    """The parameters of this rank that are not equal to rank 0's or, after these steps, not close to the reference.

    Close means: the way from `start` (rank 0's) to here differs from the reference's way by at most a share
    `tolerance` of it. A comparison of values instead of ways would not see a wrong gradient after few small steps.
    Collective: every rank of the group must call this.
    """
    wrong = 0
    for index, (parameter, origin) in enumerate(zip(parameters, start, strict=True)):
        first = parameter.detach().clone()
        dist.broadcast(first, group=group, group_src=0)
        is_wrong = not torch.equal(first, parameter)
        if reference is not None:
            theirs = reference[index]
            # Rounding: one ulp of the value in each step, and gradients that are zero but for rounding.
            ulps = torch.finfo(theirs.dtype).eps * math.sqrt(num_steps) * float(theirs.norm())
            slack = ulps + 1e-6 * LEARNING_RATE * num_steps * math.sqrt(theirs.numel())
            way, apart = float((theirs - origin).norm()), float((parameter - theirs).norm())
            is_wrong = is_wrong or not apart <= tolerance * way + slack  # `not <=`, so that NaN is wrong
        wrong += is_wrong
    return wrong


def _build_record(
    settings: WrapperSettings, group: Group, model: str, answers: list[_Answer], shares_clock: bool
) -> StepRecord:
    first, workload = answers[0], WORKLOADS[model]
    num_warmup = first.timing.num_warmup
    rows = list(zip(*(answer.phases_s[num_warmup:] for answer in answers), strict=True))
    phases = {
        name: Samples(seconds=tuple(tuple(rank[number] for rank in row) for row in rows))
        for number, name in enumerate(PHASES)
    }
    return StepRecord(
        model=model,
        wrapper=first.wrapper,
        configuration=first.configuration,
        note=first.note,
        backend=group.backend,
        device=group.device.type,
        world_size=group.world_size,
        precision=PRECISIONS[settings.dtype],
        batch_size=settings.batch_of(model),
        num_parameters=workload.num_parameters,
        num_bytes=4 * workload.num_elements,
        timing=merge_timings([answer.timing for answer in answers], shares_clock),
        num_wrong=sum(answer.timing.num_wrong for answer in answers) if first.was_checked else None,
        num_checked=sum(answer.timing.num_checked for answer in answers) if first.was_checked else None,
        held_bytes=max(answer.held_bytes for answer in answers),
        peak_step_bytes=max(answer.peak_step_bytes for answer in answers),
        forward=phases["forward"],
        backward=phases["backward"],
        optimizer=phases["optimizer"],
    )


def _check_gpu_memory(settings: WrapperSettings, group: Group, model: str) -> None:
    """Refuse on every rank what does not fit the GPU of one. Collective: every rank of the group must call this."""
    if group.device.type != "cuda":
        return
    sharing = math.ceil(group.world_size / torch.cuda.device_count())  # too many where there are several hosts
    on_gpu = sum(settings.device_of(backend) == "cuda" for backend in settings.backends)
    need = settings.replica_bytes(model, on_gpu) * sharing
    free = -agree_on_max(-float(torch.cuda.mem_get_info(group.device)[0]), group.control)
    if need > free:
        raise ConfigError(
            f"the replicas of {model} take about {format_bytes(need)} and {format_bytes(free)} are free on the GPU: "
            f"{settings.memory_words[1]}"
        )


def _free() -> None:
    gc.collect()  # a wrapped module is full of cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
