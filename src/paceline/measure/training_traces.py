"""Traces and layer profiles of a training job: what `traces` and `layers` measure, on the steps that training takes.

Merging and judging traces does not belong here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from paceline.measure.layers import LayerStep, measure_layers
from paceline.measure.steps import cycle_windows
from paceline.measure.traces import record_trace
from paceline.predict.traces import RankTrace
from paceline.records import LayerProfileRecord
from paceline.runtime.worker import post
from paceline.runtime.world import World
from paceline.training.build import Job, build_job, open_world
from paceline.training.settings import TrainSettings
from paceline.training.step import PhaseTimes, take_step
from paceline.workloads.models import compute_outcome, find_blocks

__all__ = ["TracedJob", "measure_job_layers", "trace_job"]

_RATE = 0.0


class _TracedPhases:
    """Ranges in the trace, one for each phase."""

    def __init__(self) -> None:
        self._range: record_function | None = None

    def enter(self, phase: str) -> None:
        self.end()
        self._range = record_function(phase)
        self._range.__enter__()

    def end(self) -> PhaseTimes:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        return PhaseTimes()


@dataclass(frozen=True)
class TracedJob:
    """What one rank brings back: its trace, and what the trace does not tell of the job."""

    trace: RankTrace
    batch_size: int
    accumulate: int
    precision: str
    world_size: int
    description: str


def _build(settings: TrainSettings, world: World) -> Job:
    job = build_job(dataclasses.replace(settings, ranks=world.world_size), world)
    job.learner.model.train()
    return job


def trace_job(settings: TrainSettings, warmup: int, active: int, extras: tuple[str, ...]) -> list[TracedJob]:
    """Record steps of the job on every rank; rank 0 gets them all, the others nothing.

    Collective: every rank of the launched world must call this.
    """
    with open_world(settings) as world:
        job = _build(settings, world)
        learner, windows, phases = job.learner, cycle_windows(job), _TracedPhases()
        num_steps = [0]

        def step() -> None:
            if world.rank == 0:
                post(num_steps[0] / (1 + warmup + active))
            num_steps[0] += 1
            with record_function("data"):
                window = next(windows)
            take_step(learner, window.batches, window.num_samples * learner.form.targets_per_sample, _RATE, phases)
            phases.end()

        step()  # the wrapper plans in its first step
        try:
            trace = record_trace(
                step,
                warmup=warmup,
                active=active,
                rank=world.rank,
                world_size=world.world_size,
                device=world.device,
                model=learner.model,
                extras=extras,
                meet=world.barrier,
            )
        finally:
            windows.close()
        batches = job.batches
        mine = TracedJob(
            trace, batches.batch_size, batches.accumulate, settings.precision, world.world_size, job.train.describe()
        )
        everyone: list[TracedJob] = world.share(mine)
        return everyone if world.rank == 0 else []


def measure_job_layers(settings: TrainSettings, iters: int, warmup: int) -> LayerProfileRecord:
    """Profile the bare model of the job, layer by layer, on one rank: communication would blur it."""
    with open_world(settings) as world:
        job = _build(dataclasses.replace(settings, wrapper="none"), world)
        learner = job.learner
        window = next(cycle_windows(job))
        batch = window.batches[0].batch
        num_targets = len(batch) * learner.form.targets_per_sample

        def forward() -> torch.Tensor:
            with learner.autocast():
                outcome = compute_outcome(learner.model, batch, learner.form)
            return learner.scaler.scale(outcome.loss_sum / num_targets)

        def optimize() -> None:
            learner.update(_RATE)

        step = LayerStep(
            module=learner.module,
            forward=forward,
            update=optimize,
            model=settings.model,
            dtype=settings.precision,
            batch_size=job.batches.batch_size,
        )
        tell: Callable[[float], Any] = post
        tell(0.0)
        return measure_layers(step, find_blocks(learner.module), iters=iters, warmup=warmup, tell=tell)
