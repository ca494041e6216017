"""Warm-ups and repetitions of whatever takes turns: how many there are, and nothing in between that disturbs them.

What is done in one round belongs to the benchmark.
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from paceline.records import Samples

__all__ = ["Pace", "agree_on_max", "build_samples", "no_garbage_collection", "run_rounds"]

_TELL_S = 0.2


@dataclass(frozen=True)
class Pace:
    """How many rounds there are where nobody said: as many as fit `budget_s`, within bounds, after `warmup` others, or
    fewer of those once `warmup_s` is over."""

    budget_s: float
    min_iters: int
    max_iters: int
    warmup: int
    warmup_s: float = math.inf


def run_rounds(
    run_round: Callable[[int], float],
    control: dist.ProcessGroup,
    pace: Pace,
    iters: int | None = None,
    warmup: int | None = None,
    tell: Callable[[float], None] | None = None,
    end_warmup: Callable[[int], None] = lambda num_warmup: None,
) -> None:
    """Call `run_round(number)` for every warm-up and every repetition; it returns its seconds on this rank.

    `end_warmup` is called with the number of warm-ups when they are over, `tell` with the share of the repetitions
    that is done. Collective: every rank of `control` must call this.
    """
    with no_garbage_collection():
        warm_s: list[float] = []
        while len(warm_s) < (pace.warmup if warmup is None else warmup):
            warm_s.append(agree_on_max(run_round(len(warm_s)), control))
            if warmup is None and sum(warm_s) > pace.warmup_s:
                break
        end_warmup(len(warm_s))
        if iters is None:
            # By the quickest warm-up: a hiccup in one of them must not cost repetitions.
            fitting = int(pace.budget_s / min(warm_s)) if warm_s else pace.min_iters
            iters = min(pace.max_iters, max(pace.min_iters, fitting))
        last_told_s = time.perf_counter()
        for repetition in range(iters):
            run_round(len(warm_s) + repetition)
            if tell is not None and time.perf_counter() - last_told_s > _TELL_S:
                tell((repetition + 1) / iters)
                last_told_s = time.perf_counter()


def build_samples(by_rank: Sequence[Sequence[float]], num_warmup: int) -> Samples:
    """What each rank timed in every round, warm-ups first, as samples."""
    rows = tuple(zip(*by_rank, strict=True))
    return Samples(seconds=rows[num_warmup:], warmup_seconds=rows[:num_warmup])


def agree_on_max(value: float, control: dist.ProcessGroup) -> float:
    """The largest of the ranks' values. Collective: every rank of `control` must call this."""
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, control)
    return float(tensor)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No collection inside, where it would fall into somebody's time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
