"""The best that torch's wrapper can do on a model: several ways to cut its buckets, timed in turns for some seconds."""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ConfigError
from paceline.measure.engine import Pace, agree_on_max, run_rounds
from paceline.measure.replicas import Replica, Wrapping, wrap_by_paceline, wrap_by_torch
from paceline.measure.wrapper_settings import MAX_CANDIDATES
from paceline.plan import TORCH_CAP_BYTES, TORCH_FIRST_CAP_BYTES, Gradient, Plan, plan_like_torch
from paceline.units import MIB, format_duration

__all__ = ["ask_for_plan", "build_candidates", "choose_fastest"]

_CAPS_MIB = (1, 5, 10, 25, 50)
# Warm-ups: torch cuts its buckets anew at the second forward.
_PACE = Pace(budget_s=8.0, min_iters=5, max_iters=15, warmup=2)
_OPTIONS = set(inspect.signature(DistributedDataParallel.__init__).parameters)
# What a user who tunes torch's wrapper would set, whatever the buckets are.
_TUNED: dict[str, Any] = {
    "gradient_as_bucket_view": True,
    "static_graph": True,
    # torch 2.13 renames the option that stops the broadcast of buffers in every forward.
    ("forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"): False,
}


def build_candidates(module: nn.Module, ours: Plan | None) -> list[Wrapping]:
    """Ways to cut torch's buckets, without those that give the same buckets; `ours` is one more where torch can do it.

    What is the same is judged by the reverse order of parameters, which is close to the order of gradients.
    """
    gradients = [
        Gradient(name, p.numel() * p.element_size(), p.element_size(), str(p.dtype), str(p.device))
        for name, p in module.named_parameters()
        if p.requires_grad
    ]
    order, total = list(reversed(range(len(gradients)))), sum(gradient.num_bytes for gradient in gradients)
    ways: list[tuple[str, list[int], dict[str, Any]]] = [
        ("torch's own caps", [TORCH_FIRST_CAP_BYTES, TORCH_CAP_BYTES], {}),
        *((f"cap {cap} MiB", [cap * MIB], {"bucket_cap_mb": cap}) for cap in _CAPS_MIB),
        ("one bucket", [total + 1], {"bucket_cap_mb": math.ceil(total / MIB) + 1}),
    ]
    found: dict[Any, Wrapping] = {}
    for name, caps, options in ways:
        found.setdefault(plan_like_torch(gradients, order, caps).partition, _tuned_wrapping(name, options))
    if ours is not None:
        try:
            options = ours.as_torch_kwargs()
        except ConfigError:  # torch cannot cut them so
            options = {"not expressible": True}
        if set(options) <= _OPTIONS:
            found.setdefault(ours.partition, _tuned_wrapping("Paceline's plan", options))
    assert len(found) <= MAX_CANDIDATES
    return list(found.values())


def _tuned_wrapping(name: str, options: dict[str, Any]) -> Wrapping:
    words = f"bucket view, static graph, no buffers in forward, {name}"
    return Wrapping(words, partial(wrap_by_torch, **_TUNED, **options))


def ask_for_plan(build: Callable[[Wrapping], Replica], control: dist.ProcessGroup) -> Plan | None:
    """The plan that Paceline's wrapper uses after its first step. Collective: every rank must call this."""
    replica = build(Wrapping("defaults", wrap_by_paceline))
    for _ in range(2):
        replica.take_step(control)
    plan = getattr(replica.model, "plan", None)
    replica.close()
    return plan if isinstance(plan, Plan) else None


def choose_fastest(
    candidates: list[Wrapping], build: Callable[[Wrapping], Replica], control: dist.ProcessGroup
) -> Wrapping:
    """The candidate with the least median step, with the medians of all as its note. Equal on every rank.

    A few rounds in turns, as many as some seconds allow. Collective: every rank of the group must call this.
    """
    if len(candidates) == 1:
        return replace(candidates[0], note="the only way to cut its buckets")
    rounds = _time_rounds([build(candidate) for candidate in candidates], control)
    medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
    told = "; ".join(
        f"{candidate.configuration.rpartition(', ')[2]} {format_duration(median)}"
        for candidate, median in zip(candidates, medians, strict=True)
    )
    best = min(range(len(candidates)), key=medians.__getitem__)
    return replace(candidates[best], note=f"fastest of {len(candidates)} in {len(rounds)} rounds: {told}")


def _time_rounds(replicas: list[Replica], control: dist.ProcessGroup) -> list[list[float]]:
    """For each round the seconds of every replica's step, on the slowest rank."""

    rounds: list[list[float]] = []

    def run_round(repetition: int) -> float:
        rounds.append([agree_on_max(replica.take_step(control), control) for replica in replicas])
        return sum(rounds[-1])

    run_rounds(run_round, control, _PACE)
    return rounds[_PACE.warmup :]
