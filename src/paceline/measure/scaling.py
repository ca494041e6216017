"""The cells of scaling studies on ranks: steps of all wrappers in turns, epochs at a batch size, training runs.

Which cells there are is in `settings`. How steps take turns is in `steps`, the training loop in `training.loop`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError, MeasurementError, refuse
from paceline.measure import steps
from paceline.measure.collectives import measure_collectives
from paceline.measure.engine import PATIENCE, Pace, build_samples, follow, synchronize
from paceline.measure.noise_scale import measure_noise_scale
from paceline.measure.settings import Cell, CollectiveSettings, ScaleSettings, Setup, TrainingCell
from paceline.measure.steps import Replica, StepBench, TimedMessages, TrainingJob, Variant
from paceline.parallel.replicas import only_computing, read_replica
from paceline.records import BatchRecord, CurvePoint, LargeBatchRecord, NoiseRecord, Record
from paceline.runtime.world import World, check_backend
from paceline.torch_internals import BatchNorm
from paceline.training.build import Job, build_job, build_learner, load_sets, open_world
from paceline.training.loop import evaluate, run_steps
from paceline.training.settings import TrainSettings
from paceline.training.step import PhaseClock
from paceline.workloads.data.own import OwnData

_PACE = Pace(budget_s=20.0, min_iters=10, max_iters=60, warmup=3)
# How torch reports that memory is exhausted: on a GPU by the error's class, on a CPU only by its text.
_FULL = re.compile(r"can't allocate memory|not enough memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
# When the noise of gradients is probed, as shares of the run, and how. All probes together may take a small share of
# the run's samples: the more small batches a probe has, the later in training the noise can still be measured.
_PROBE_SHARES = (0.1, 0.3, 0.6, 1.0)
_NUM_PROBES, _SMALL_BATCH_SIZE, _PROBE_COST = 8, 32, 0.05
_LEAST_SMALL, _MOST_SMALL = 4, 64


def measure_allreduce(settings: CollectiveSettings) -> list[Record]:
    """The all-reduces alone. Collective: every rank of the launched world must call this."""
    return list(measure_collectives(settings).records)


def measure_scaling(settings: ScaleSettings, cell: Cell) -> list[Record]:
    """All of one cell, in turns. Collective: every rank of the launched world must call this."""
    with open_world(dataclasses.replace(settings.job, backend="gloo")) as world:
        job = _build_job(settings, cell, world)
        samples = cell.count_samples(job.job.batches.accumulate)
        more = {"mode": cell.mode, "cell_size": samples, "threads": torch.get_num_threads()}
        # A wait for the user's loader is part of a step.
        with StepBench(world, job.labels | more, loads_inside=isinstance(job.job.train, OwnData)) as bench:
            bench.add(_build_variant(job, cell, world, Setup("none", ""), 1, None))
            alone = {backend: dist.new_group([0], backend=backend, timeout=PATIENCE) for backend in settings.backends}
            for setup in (setup for setup in settings.setups if setup.wrapper != "dp"):  # what it does to one rank
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


def _build_job(settings: ScaleSettings, cell: Cell, world: World) -> TrainingJob:
    if max(settings.ranks) > world.world_size:
        raise ConfigError(f"{max(settings.ranks)} ranks are needed, and the world has {world.world_size}")
    size = cell.batch_size(1, settings.job.accumulate or 1)
    alone = dataclasses.replace(settings.job, ranks=1, wrapper="none", batch_size=size, global_batch_size=None)
    job = build_job(alone, world)
    largest = cell.count_samples(job.batches.accumulate) * (max(settings.ranks) if cell.mode == "weak" else 1)
    steps.check_whole(job, largest, "fewer ranks, a smaller batch")
    return TrainingJob(job)


def _build_variant(
    job: TrainingJob, cell: Cell, world: World, setup: Setup, world_size: int, group: dist.ProcessGroup | None,
    role: str = "job",
) -> Variant:  # fmt: skip
    """A wrapper, or the bare model, on the first `world_size` ranks; without a replica on a rank outside."""
    is_silent = role != "job" or setup.wrapper in ("none", "dp")  # no rank sends anything to another
    num_ranks = 1 if setup.wrapper == "dp" else world_size
    kinds = ("plain",) if is_silent else ("plain", "no_comm", "timed")
    batch_size = cell.batch_size(world_size, job.job.batches.accumulate)
    labels = dataclasses.asdict(setup) | {"world_size": world_size, "batch_size": batch_size, "role": role}
    if world.rank >= num_ranks:
        return Variant(labels, None, kinds)
    windows = steps.cycle_windows(job.job, batch_size * world_size // num_ranks, num_ranks)

    def wrap(module: nn.Module) -> nn.Module:
        if setup.wrapper == "dp":
            return nn.DataParallel(module, device_ids=list(range(world_size)))
        with only_computing(world_size):
            return steps.wrap(module, setup.wrapper, group)

    def build() -> Replica:
        # The loss is divided by the samples of all ranks, and the wrapper averages: see `take_step`.
        return job.build(None if setup.wrapper == "none" else wrap, windows, num_ranks)

    replica = build()
    return Variant(labels, replica, kinds, None if is_silent else TimedMessages(replica, build, group))


def measure_batch(settings: TrainSettings, epochs: int) -> list[Record]:
    """Epochs of the job, the first of them a warm-up. A batch that does not fit into memory gives a record, too."""
    with open_world(settings) as world:
        with contextlib.suppress(OSError):
            # Where the kernel must end a process for memory, let it be this one and not somebody's desktop.
            Path("/proc/self/oom_score_adj").write_text("1000")
        job = build_job(dataclasses.replace(settings, ranks=world.world_size, epochs=epochs, steps=None), world)
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(world.device)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak of this process so far
        times: list[tuple[float, float]] = []
        # A short batch would appear in the table as the larger one.
        num_samples = job.batch_schedule.num_samples
        is_large = job.batches.global_batch_size > num_samples
        failure = f"more than the {num_samples} samples of an epoch" if is_large else ""
        try:
            times.extend(() if failure else _time_epochs(job))
        except (RuntimeError, MemoryError, ConfigError) as error:
            cause = error.__cause__ or error  # a step of the user's own may have raised it
            if not (isinstance(cause, MemoryError | torch.OutOfMemoryError) or _FULL.search(str(cause))):
                raise
            failure = f"out of memory in epoch {len(times) + 1}"
        timing, data_wait = (None if failure else build_samples([[row[i] for row in times]], 1) for i in (0, 1))
        record = BatchRecord(
            model=settings.model, data=job.train.name, device=world.device.type, precision=settings.precision,
            threads=torch.get_num_threads(), batch_size=job.batches.batch_size, num_samples=num_samples,
            num_steps=job.batch_schedule.count_steps(0), timing=timing, data_wait=data_wait,
            peak_bytes=_read_peak(world.device), failure=failure,
        )  # fmt: skip
        del job
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        return [record]


def _time_epochs(job: Job) -> Iterator[tuple[float, float]]:
    """(seconds of an epoch's steps, the rest of it: what they waited for data), epoch after epoch.

    On a GPU the steps are timed by its own clock. The host runs ahead there, and while it waits for data or in a full
    queue the GPU computes: taken off, such a wait would make steps too short.
    """
    device, laps, report = job.world.device, [], follow(job.world, f"batch size {job.batches.batch_size}")
    clock = PhaseClock(device)
    synchronize(device)
    begin_s = time.perf_counter()
    for taken in run_steps(job, phases=clock):
        laps.append(clock.end())
        report(taken.position.step / job.schedule.num_steps)
        if taken.is_epoch_end:
            synchronize(device)
            epoch_s = time.perf_counter() - begin_s
            steps_s = min(epoch_s, sum(sum(lap.read().values()) for lap in laps))
            yield steps_s, epoch_s - steps_s
            laps, begin_s = [], time.perf_counter()


def _read_peak(device: torch.device) -> int:
    """The most bytes since the reset: of tensors on CUDA, of the whole process on the CPU; 0 where it is unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def survey_job(settings: TrainSettings) -> tuple[int, bool]:
    """How many samples an epoch has, and whether the model has a BatchNorm that a recipe can change. Collective: call
    on every rank of the launched world."""
    with open_world(settings) as world:
        train, test = load_sets(settings, world)
        needed = "test losses of runs of whole epochs are compared: return (train, test), each with a length"
        refuse((train.is_stream or test is None, f"data {train.name}: {needed}"), code="own-type")
        module = build_learner(dataclasses.replace(settings, wrapper="none"), world, train).module
        return len(train), any(isinstance(layer, BatchNorm) for layer in module.modules())


def measure_training(cell: TrainingCell, evaluations: int, data_seed: int) -> list[Record]:
    """Train the cell to its end. Collective: call on every rank of the launched world. Synthetic data has one seed in
    all cells: another seed would be another task, not another run of it."""
    with open_world(cell.settings) as world:
        settings = dataclasses.replace(cell.settings, ranks=world.world_size)
        is_synthetic = settings.data.startswith("synthetic")
        sets = load_sets(dataclasses.replace(settings, seed=data_seed) if is_synthetic else settings, world)
        return _train_cell(build_job(settings, world, sets=sets), cell, evaluations)


def _train_cell(job: Job, cell: TrainingCell, evaluations: int) -> list[Record]:
    world, settings, num_steps, epoch_samples = job.world, job.settings, job.schedule.num_steps, len(job.train)
    due = [(number + 1) / evaluations for number in range(evaluations - 1)]
    probed = {max(1, round(num_steps * share)) for share in _PROBE_SHARES} if cell.probes else set()
    size, epochs = min(_SMALL_BATCH_SIZE, job.batches.batch_size), job.batch_schedule.epochs
    budget = _PROBE_COST * epochs * epoch_samples / len(_PROBE_SHARES)
    num_small = max(_LEAST_SMALL, min(_MOST_SMALL, int(budget / (_NUM_PROBES * size * world.world_size))))
    asked: dict[str, Any] = {"batch_size": size, "num_small": num_small, "num_probes": _NUM_PROBES}
    asked["note"] = f"{cell.recipe} at {cell.global_batch_size}"
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    step = num_targets = num_samples = largest = 0
    curve: list[CurvePoint] = []
    noise: list[NoiseRecord] = []
    report, failure, begin_s = follow(world, cell.name), "", time.perf_counter()
    for taken in run_steps(job):
        step = taken.position.step
        loss_sum += taken.outcome.loss_sum.detach().double()
        num_targets += taken.num_targets
        num_samples += taken.num_samples
        largest = max(largest, taken.num_samples)
        # By samples, for a batch that grows has most of its updates at the beginning; by updates where those end it.
        done = step / num_steps if settings.steps is not None else num_samples / (epochs * epoch_samples)
        passed = sum(share <= done + 1e-9 for share in due)
        due = due[passed:]
        if passed or taken.is_last:
            total = loss_sum.cpu()
            reached_s = time.perf_counter() - begin_s
            if world.world_size > 1:
                dist.all_reduce(total, group=world.control)
            assert job.test is not None
            train_loss, test = float(total) / num_targets, evaluate(job.learner, job.test, world)
            if not (math.isfinite(train_loss) and math.isfinite(test.loss)):
                failure = f"the loss was no number after {step} updates"
                break
            curve.append(CurvePoint(step, num_samples, train_loss, test.loss, test.accuracy, reached_s))
            begin_s += time.perf_counter() - begin_s - reached_s  # evaluations do not count
            loss_sum.zero_()
            num_targets = 0
        if step in probed:
            # Gradients that are not finite have no noise scale; the next evaluation reports what is wrong with the run.
            with contextlib.suppress(MeasurementError):
                noise.append(measure_noise_scale(job, step=step, epoch=num_samples / epoch_samples, **asked))
        report(done)
    num_workers, gradients = world.world_size * settings.workers, read_replica(job.learner.module).gradients
    record = LargeBatchRecord(
        model=settings.model, data=job.train.name, device=world.device.type, precision=settings.precision,
        world_size=world.world_size, batch_size=job.batches.batch_size, global_batch_size=cell.global_batch_size,
        largest_batch_size=largest, recipe=cell.recipe, configuration=cell.configuration, budget=cell.budget,
        epochs=epochs if settings.steps is None else num_samples / epoch_samples, num_updates=step,
        num_samples=num_samples, seed=settings.seed, lr=settings.lr, seconds=time.perf_counter() - begin_s,
        curve=tuple(curve), failure=failure, num_workers=num_workers,
        sent_bytes=settings.parsed_strategy.count_sent_bytes(
            gradients, num_workers, world.local_world_size, step
        ),
        num_classes=job.learner.form.num_classes,
    )  # fmt: skip
    return [record, *noise]
