"""Where the time of a step goes: its phases, and communication as the difference to steps without it.

How steps take turns is in `steps`; what is derived from the times is in `records.steps`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator

from paceline.measure.engine import Pace
from paceline.measure.steps import (
    MeasuredJob,
    Replica,
    StepBench,
    TimedMessages,
    TrainingJob,
    Variant,
    Wrap,
    check_whole,
    cycle_windows,
)
from paceline.records import StepRecord
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.runtime.world import World
from paceline.training.build import build_job, build_learner, open_world
from paceline.training.loader import Window
from paceline.training.settings import TrainSettings

_PACE = Pace(budget_s=15.0, min_iters=12, max_iters=100, warmup=4)
_KINDS = ("plain", "marked", "no_comm")


def measure_phases(
    settings: TrainSettings, batch_sizes: tuple[int, ...], iters: int | None, warmup: int | None
) -> list[StepRecord]:
    """Profile the job at each batch size per rank. Collective: every rank of the launched world must call this."""
    records: list[StepRecord] = []
    with open_world(settings) as world:
        for number, batch_size in enumerate(batch_sizes):
            resized = dataclasses.replace(settings, ranks=world.world_size, batch_size=batch_size)
            job = TrainingJob(build_job(resized, world))
            # Before the first is measured: the largest would end the run, and lose what was measured.
            check_whole(job.job, dataclasses.replace(job.job.batches, batch_size=max(batch_sizes)).global_batch_size)
            label = f"{world.world_size} rank{'s' if world.world_size > 1 else ''}, batch {batch_size}"

            def tell(share: float, number: int = number, label: str = label) -> None:
                if world.rank == 0:
                    post(Progress(number + share, len(batch_sizes), label))

            tell(0.0)
            windows = cycle_windows(job.job)

            def build(job: TrainingJob = job, windows: Generator[Window, None, None] = windows) -> Replica:
                return job.as_replica(build_learner(job.job.settings, world, job.job.train), windows)

            replica = job.as_replica(job.job.learner, windows)
            timed = TimedMessages(replica, build) if world.world_size > 1 else None
            records.append(_measure(world, job, replica, timed, settings.wrapper, iters, warmup, tell))
            if world.rank == 0:
                post(Progress(number + 1, len(batch_sizes), label, (records[-1],)))
    return records


def measure_own_phases(
    world: World,
    job: MeasuredJob,
    wrapper: str,
    wrap_by: Wrap | None,
    iters: int | None = None,
    warmup: int | None = None,
    tell: Callable[[float], None] | None = None,
) -> StepRecord:
    """The phases of a user's own job in a wrapper. Collective: every rank of the world must call this."""
    replica = job.build(world, wrap_by)
    return _measure(world, job, replica, None, wrapper, iters, warmup, tell)


def _measure(
    world: World,
    job: MeasuredJob,
    replica: Replica,
    timed: TimedMessages | None,
    wrapper: str,
    iters: int | None,
    warmup: int | None,
    tell: Callable[[float], None] | None,
) -> StepRecord:
    labels = job.labels | {"wrapper": wrapper, "num_parameters": len(replica.parameters)}
    bench = StepBench(world, labels, loads_inside=True)
    try:
        kinds = _KINDS if timed is None else (*_KINDS, "timed")
        variant = bench.add(Variant({}, replica, kinds, timed))
        bench.run(_PACE, iters, warmup, tell)
        return bench.build_record(variant)
    finally:
        bench.clear()
