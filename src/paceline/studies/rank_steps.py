"""The rank-side measurements of `paceline scale ranks`: interleaved steps of all wrappers, and plain all-reduces."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError
from paceline.measure import step_bench
from paceline.measure.bench_settings import CollectiveSettings
from paceline.measure.collectives import measure_collectives
from paceline.measure.engine import PATIENCE, Pace, follow
from paceline.measure.step_bench import Replica, StepBench, TimedMessages, TrainingJob, Variant
from paceline.parallel.replicas import only_computing
from paceline.records import Record
from paceline.runtime.ranks.world import World, check_backend
from paceline.studies.rank_scaling import ScaleSettings, ScalingCell, Setup
from paceline.training.build import build_job, open_world
from paceline.workloads.data.own import OwnData

_PACE = Pace(budget_s=20.0, min_iters=10, max_iters=60, warmup=3)


def measure_allreduce(settings: CollectiveSettings) -> list[Record]:
    """Time plain all-reduces. Collective: call on every rank of the launched world."""
    return list(measure_collectives(settings).records)


def measure_scaling(settings: ScaleSettings, cell: ScalingCell) -> list[Record]:
    """Time all variants of one cell, interleaved. Collective: call on every rank of the launched world."""
    with open_world(dataclasses.replace(settings.job, backend="gloo")) as world:
        job = _build_job(settings, cell, world)
        samples = cell.count_samples(job.job.batches.accumulate)
        more = {"mode": cell.mode, "cell_size": samples, "threads": torch.get_num_threads()}
        # Waiting for a user's loader is part of a step.
        with StepBench(world, job.labels | more, loads_inside=isinstance(job.job.train, OwnData)) as bench:
            bench.add(_build_variant(job, cell, world, Setup("none", ""), 1, None))
            alone = {backend: dist.new_group([0], backend=backend, timeout=PATIENCE) for backend in settings.backends}
            for setup in (setup for setup in settings.setups if setup.wrapper != "dp"):  # cost on one rank
                bench.add(_build_variant(job, cell, world, setup, 1, alone[setup.backend], "local"))
            for world_size in (n for n in settings.ranks if n > 1):
                bench.add(_build_variant(job, cell, world, Setup("none", ""), world_size, None, "together"))
                groups: dict[str, dist.ProcessGroup] = {}
                for backend in settings.backends:
                    check_backend(backend, world.device.type, min(world_size, world.local_world_size))
                    groups[backend] = dist.new_group(list(range(world_size)), backend=backend, timeout=PATIENCE)
                for setup in settings.setups:
                    bench.add(_build_variant(job, cell, world, setup, world_size, groups.get(setup.backend)))
            bench.run(_PACE, settings.iters, None, follow(world, cell.name))
            return [bench.build_record(variant) for variant in bench.variants]


def _build_job(settings: ScaleSettings, cell: ScalingCell, world: World) -> TrainingJob:
    if max(settings.ranks) > world.world_size:
        raise ConfigError(f"{max(settings.ranks)} ranks requested, but the world has only {world.world_size}")
    size = cell.batch_size(1, settings.job.accumulate or 1)
    alone = dataclasses.replace(settings.job, ranks=1, wrapper="none", batch_size=size, global_batch_size=None)
    job = build_job(alone, world)
    largest = cell.count_samples(job.batches.accumulate) * (max(settings.ranks) if cell.mode == "weak" else 1)
    step_bench.check_whole(job, largest, "fewer ranks, a smaller batch")
    return TrainingJob(job)


def _build_variant(
    job: TrainingJob, cell: ScalingCell, world: World, setup: Setup, world_size: int, group: dist.ProcessGroup | None,
    role: str = "job",
) -> Variant:  # fmt: skip
    """Build a wrapper, or the bare model, on the first `world_size` ranks; the other ranks have no replica."""
    is_silent = role != "job" or setup.wrapper in ("none", "dp")  # without messages
    num_ranks = 1 if setup.wrapper == "dp" else world_size
    kinds = ("plain",) if is_silent else ("plain", "no_comm", "timed")
    batch_size = cell.batch_size(world_size, job.job.batches.accumulate)
    labels = dataclasses.asdict(setup) | {"world_size": world_size, "batch_size": batch_size, "role": role}
    if world.rank >= num_ranks:
        return Variant(labels, None, kinds)
    windows = step_bench.cycle_windows(job.job, batch_size * world_size // num_ranks, num_ranks)

    def wrap(module: nn.Module) -> nn.Module:
        if setup.wrapper == "dp":
            return nn.DataParallel(module, device_ids=list(range(world_size)))
        with only_computing(world_size):
            return step_bench.wrap(module, setup.wrapper, group)

    def build() -> Replica:
        # `take_step` divides the loss by the samples of all ranks, and the wrapper averages.
        return job.build(None if setup.wrapper == "none" else wrap, windows, num_ranks)

    replica = build()
    return Variant(labels, replica, kinds, None if is_silent else TimedMessages(replica, build, group))
