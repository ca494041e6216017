"""Steps of a job on one rank and on many, in every wrapper, all in turns: the cells of a scaling study.

How steps take turns is in `steps`; which cells there are in `scale_settings`; what follows in `records.steps`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

import torch
import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.measure.collectives import measure_collectives
from paceline.measure.engine import Pace
from paceline.measure.profiles import measure_job_layers
from paceline.measure.scale_settings import Cell, Contestant, ScaleSettings
from paceline.measure.settings import CollectiveSettings
from paceline.measure.steps import PATIENCE, Replica, StepBench, TimedMessages, TrainingJob, Variant, build_scaled
from paceline.records import Record
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.runtime.world import World, check_backend
from paceline.training.build import Job, build_job, open_world
from paceline.training.loader import Window, load_windows
from paceline.training.settings import TrainSettings
from paceline.workloads.data.sharding import EpochOrder

_LAYER_ITERS = 12
_PACE = Pace(budget_s=20.0, min_iters=10, max_iters=60, warmup=3)


def measure_allreduce(settings: CollectiveSettings) -> list[Record]:
    """The all-reduces alone. Collective: every rank of the launched world must call this."""
    return list(measure_collectives(settings).records)


def measure_layers_alone(settings: TrainSettings) -> list[Record]:
    """The layers of the job on one rank."""
    return [measure_job_layers(settings, _LAYER_ITERS, 2)]


def measure_scaling(settings: ScaleSettings, cell: Cell) -> list[Record]:
    """All of one cell, in turns. Collective: every rank of the launched world must call this."""
    with open_world(dataclasses.replace(settings.job, backend="gloo")) as world:
        job = _build_job(settings, cell, world)
        labels = TrainingJob(job).labels | {
            "mode": cell.mode,
            "cell_size": cell.count_samples(job.batches.accumulate),
            "threads": torch.get_num_threads(),
        }
        bench = StepBench(world, labels)
        try:
            bench.add(_build_variant(job, cell, world, Contestant("none", ""), 1, None))
            for world_size in (n for n in settings.ranks if n > 1):
                groups: dict[str, dist.ProcessGroup] = {}
                for backend in settings.backends:
                    check_backend(backend, world.device.type, min(world_size, world.local_world_size))
                    groups[backend] = dist.new_group(list(range(world_size)), backend=backend, timeout=PATIENCE)
                for one in settings.contestants:
                    bench.add(_build_variant(job, cell, world, one, world_size, groups.get(one.backend)))
            bench.run(_PACE, settings.iters, None, lambda share: _tell(world, share, cell.name))
            return [bench.build_record(variant) for variant in bench.variants]
        finally:
            bench.clear()


def _tell(world: World, share: float, label: str) -> None:
    if world.rank == 0:
        post(Progress(share, 1, label))


def _build_job(settings: ScaleSettings, cell: Cell, world: World) -> Job:
    if max(settings.ranks) > world.world_size:
        raise ConfigError(f"{max(settings.ranks)} ranks are needed, and the world has {world.world_size}")
    alone = dataclasses.replace(
        settings.job,
        ranks=1,
        wrapper="none",
        batch_size=cell.batch_size(1, settings.job.accumulate or 1),
        global_batch_size=None,
    )
    job = build_job(alone, world)
    largest = cell.count_samples(job.batches.accumulate) * (max(settings.ranks) if cell.mode == "weak" else 1)
    if len(job.train) < largest:
        raise ConfigError(
            f"{job.train.describe()}: less than one global batch of {largest}; use fewer ranks, a smaller batch, or "
            "more --samples"
        )
    return job


def _build_variant(
    job: Job, cell: Cell, world: World, contestant: Contestant, world_size: int, group: dist.ProcessGroup | None
) -> Variant:
    """A wrapper on the first `world_size` ranks; without a replica on a rank outside."""
    is_one_process = contestant.wrapper in ("none", "dp")
    kinds = ("plain",) if is_one_process else ("plain", "no_comm", "timed")
    labels = {
        "wrapper": contestant.wrapper,
        "backend": contestant.backend,
        "world_size": world_size,
        "batch_size": cell.batch_size(world_size, job.batches.accumulate),
    }
    if world.rank >= (1 if is_one_process else world_size):
        return Variant(labels, None, kinds)

    windows = _cycle(job, cell, world, world_size, is_one_process)

    def build() -> Replica:
        return TrainingJob(job).as_replica(build_scaled(job, world, contestant.wrapper, group, world_size), windows)

    replica = build()
    return Variant(labels, replica, kinds, None if is_one_process else TimedMessages(replica, build, group))


def _cycle(job: Job, cell: Cell, world: World, world_size: int, is_one: bool) -> Generator[Window, None, None]:
    """Whole global batches of this number of ranks, epoch after epoch; this rank's share of each."""
    accumulate, epoch = job.batches.accumulate, 0
    batch_size = cell.batch_size(world_size, accumulate)
    rank, shares = (0, 1) if is_one else (world.rank, world_size)
    micro = batch_size * (world_size if is_one else 1)
    while True:
        order = EpochOrder(len(job.train), world_size * batch_size * accumulate, job.settings.seed, epoch, "drop")
        yield from load_windows(job.train, order, 0, rank, shares, micro, world.device)
        epoch += 1
