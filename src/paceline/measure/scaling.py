"""The cells of scaling studies on ranks: steps of all wrappers in turns, epochs at a batch size, training runs.

Which cells there are is in `scale_settings`. How steps take turns is in `steps`, the training loop in `training.loop`,
what follows from the records in `records.steps` and `records.training`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import re
import time
from collections.abc import Generator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import ConfigError, MeasurementError
from paceline.measure.collectives import measure_collectives
from paceline.measure.engine import Pace, synchronize
from paceline.measure.noise_scale import measure_noise_scale
from paceline.measure.profiles import measure_profile
from paceline.measure.scale_settings import Cell, ScaleSettings, Setup, TrainingCell
from paceline.measure.settings import CollectiveSettings
from paceline.measure.steps import PATIENCE, Replica, StepBench, TimedMessages, TrainingJob, Variant, build_scaled
from paceline.records import BatchRecord, CurvePoint, LargeBatchRecord, NoiseRecord, Record, Samples
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.runtime.world import World, check_backend
from paceline.training.build import Job, build_job, build_learner, load_sets, open_world
from paceline.training.loader import Window, load_windows
from paceline.training.loop import evaluate, run_steps
from paceline.training.settings import TrainSettings
from paceline.training.step import NoPhases, PhaseClock, take_step
from paceline.workloads.data.sharding import EpochOrder

_LAYER_ITERS = 12
_PACE = Pace(budget_s=20.0, min_iters=10, max_iters=60, warmup=3)
# How torch reports that memory is exhausted: on a GPU by the error's class, on a CPU only by its text.
_FULL = re.compile(r"can't allocate memory|not enough memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
# When the noise of gradients is probed, as shares of the run, and how. All probes together may take a small share of
# the run's samples: the more small batches a probe has, the later in training the noise can still be measured.
_PROBE_SHARES = (0.1, 0.3, 0.6, 1.0)
_NUM_PROBES, _SMALL_BATCH_SIZE, _PROBE_COST = 8, 32, 0.05
_LEAST_SMALL, _MOST_SMALL = 4, 64

# -- ranks -------------------------------------------------------------------------------------------------------------


def measure_allreduce(settings: CollectiveSettings) -> list[Record]:
    """The all-reduces alone. Collective: every rank of the launched world must call this."""
    return list(measure_collectives(settings).records)


def measure_layers_alone(settings: TrainSettings) -> list[Record]:
    """The layers of the job on one rank."""
    return measure_profile(settings, "layers", _LAYER_ITERS, 2)


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
            bench.add(_build_variant(job, cell, world, Setup("none", ""), 1, None))
            for world_size in (n for n in settings.ranks if n > 1):
                groups: dict[str, dist.ProcessGroup] = {}
                for backend in settings.backends:
                    check_backend(backend, world.device.type, min(world_size, world.local_world_size))
                    groups[backend] = dist.new_group(list(range(world_size)), backend=backend, timeout=PATIENCE)
                for setup in settings.setups:
                    bench.add(_build_variant(job, cell, world, setup, world_size, groups.get(setup.backend)))
            bench.run(_PACE, settings.iters, None, lambda share: _post_share(world, share, cell.name))
            return [bench.build_record(variant) for variant in bench.variants]
        finally:
            bench.clear()


def _post_share(world: World, share: float, label: str) -> None:
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
    job: Job, cell: Cell, world: World, setup: Setup, world_size: int, group: dist.ProcessGroup | None
) -> Variant:
    """A wrapper on the first `world_size` ranks; without a replica on a rank outside."""
    is_one_process = setup.wrapper in ("none", "dp")
    kinds = ("plain",) if is_one_process else ("plain", "no_comm", "timed")
    labels = {
        "wrapper": setup.wrapper,
        "backend": setup.backend,
        "world_size": world_size,
        "batch_size": cell.batch_size(world_size, job.batches.accumulate),
    }
    if world.rank >= (1 if is_one_process else world_size):
        return Variant(labels, None, kinds)

    windows = _cycle(job, cell, world, world_size, is_one_process)

    def build() -> Replica:
        return TrainingJob(job).as_replica(build_scaled(job, world, setup.wrapper, group, world_size), windows)

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


# -- one rank at one batch size ----------------------------------------------------------------------------------------


def measure_batch(settings: TrainSettings, epochs: int) -> list[Record]:
    """Epochs of the job, the first of them a warm-up. A batch that does not fit into memory gives a record, too."""
    with open_world(settings) as world:
        _prefer_to_be_killed()
        job = build_job(dataclasses.replace(settings, ranks=world.world_size), world)
        job.learner.model.train()
        _reset_peak(world.device)
        epoch_s: list[float] = []
        waits_s: list[float] = []
        # A short batch would appear in the table as the larger one.
        is_short = job.batches.global_batch_size > len(job.train)
        failure = f"more than the {len(job.train)} samples of an epoch" if is_short else ""
        try:
            for epoch in range(0 if is_short else epochs):
                seconds, waited_s = _run_epoch(job, epoch, epochs)
                epoch_s.append(seconds)
                waits_s.append(waited_s)
        except (RuntimeError, MemoryError) as error:
            if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or _FULL.search(str(error))):
                raise
            failure = f"out of memory in epoch {len(epoch_s) + 1}"
        peak_bytes = _read_peak(world.device)
        record = BatchRecord(
            model=settings.model,
            data=job.train.name,
            device=world.device.type,
            precision=settings.precision,
            threads=torch.get_num_threads(),
            batch_size=job.batches.batch_size,
            num_samples=len(job.train),
            num_steps=job.batch_schedule.count_steps(0),
            timing=None if failure else _build_samples(epoch_s),
            data_wait=None if failure else _build_samples(waits_s),
            peak_bytes=peak_bytes,
            failure=failure,
        )
        del job
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        return [record]


def _build_samples(seconds: list[float]) -> Samples:
    return Samples(seconds=tuple((s,) for s in seconds[1:]), warmup_seconds=((seconds[0],),))


def _run_epoch(job: Job, epoch: int, epochs: int) -> tuple[float, float]:
    """(seconds of the epoch's steps, the rest of it: what they waited for data).

    On a GPU the steps are timed by its own clock. The host runs ahead there, and while it waits for data or in a full
    queue the GPU computes: taken off, such a wait would make steps too short.
    """
    world, learner = job.world, job.learner
    order = job.order(epoch)
    windows = load_windows(job.train, order, 0, world.rank, world.world_size, job.batches.batch_size, world.device)
    synchronize(world.device)
    begin_s = reported_s = time.perf_counter()
    laps = []
    for window in windows:
        phases = PhaseClock(world.device)
        phases.enter("step")
        num_targets = window.num_samples * learner.form.targets_per_sample
        take_step(learner, window.batches, num_targets, job.settings.lr, NoPhases())
        laps.append(phases.end())
        if time.perf_counter() - reported_s > 0.5:
            reported_s = time.perf_counter()
            done = (epoch + (window.number + 1) / order.num_windows) / epochs
            post(Progress(done, 1, f"batch size {job.batches.batch_size}"))
    synchronize(world.device)
    epoch_s = time.perf_counter() - begin_s
    steps_s = min(epoch_s, sum(lap.read()["step"] for lap in laps))
    return steps_s, epoch_s - steps_s


def _prefer_to_be_killed() -> None:
    """Where the kernel must end a process for memory, let it be this one and not somebody's desktop."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak of this process so far


def _read_peak(device: torch.device) -> int:
    """The most bytes since the reset: of tensors on CUDA, of the whole process on the CPU; 0 where it is unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


# -- training runs with large batches ----------------------------------------------------------------------------------


def survey_job(settings: TrainSettings) -> tuple[int, bool]:
    """How many samples an epoch has, and whether the model has a BatchNorm that a recipe can change.

    Collective: call on every rank of the launched world.
    """
    with open_world(settings) as world:
        train, _ = load_sets(settings, world)
        module = build_learner(dataclasses.replace(settings, wrapper="none"), world, train).module
        return len(train), any(isinstance(layer, _BatchNorm) for layer in module.modules())


def measure_large_batch(cell: TrainingCell, evaluations: int, data_seed: int) -> list[Record]:
    """Train the cell to its end. Collective: call on every rank of the launched world.

    Synthetic data has one seed in all cells: another seed would be another task, not another run of it.
    """
    with open_world(cell.settings) as world:
        settings = dataclasses.replace(cell.settings, ranks=world.world_size)
        is_synthetic = settings.data.startswith("synthetic")
        sets = load_sets(dataclasses.replace(settings, seed=data_seed) if is_synthetic else settings, world)
        return _CellRun(build_job(settings, world, sets=sets), cell, evaluations).run()


class _CellRun:
    """A run of one cell on this rank, with what it keeps from step to step."""

    def __init__(self, job: Job, cell: TrainingCell, evaluations: int) -> None:
        self._job, self._cell = job, cell
        num_steps = job.schedule.num_steps
        self._due = [(number + 1) / evaluations for number in range(evaluations - 1)]
        self._probed = {max(1, round(num_steps * share)) for share in _PROBE_SHARES} if cell.probes else set()
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=job.world.device)
        self._num_targets = self._num_samples = 0
        self._curve: list[CurvePoint] = []
        self._noise: list[NoiseRecord] = []
        self._reported_s = 0.0

    def run(self) -> list[Record]:
        begin_s, step, largest, failure = time.perf_counter(), 0, 0, ""
        for taken in run_steps(self._job):
            step = taken.position.step
            self._loss_sum += taken.outcome.loss_sum.detach().double()
            self._num_targets += taken.num_targets
            self._num_samples += taken.num_samples
            largest = max(largest, taken.num_samples)
            if (self._is_due(step) or taken.is_last) and (failure := self._evaluate(step)):
                break
            if step in self._probed:
                self._probe(step)
            self._report(step)
        return [self._build_record(step, largest, failure, time.perf_counter() - begin_s), *self._noise]

    def _share_done(self, step: int) -> float:
        """By samples, for a batch that grows has most of its updates at the beginning; by updates where those are what
        ends the run."""
        job = self._job
        if job.settings.steps is not None:
            return step / job.schedule.num_steps
        return self._num_samples / (job.epochs * len(job.train))

    def _is_due(self, step: int) -> bool:
        done = self._share_done(step)
        passed = [share for share in self._due if share <= done + 1e-9]
        self._due = self._due[len(passed) :]
        return bool(passed)

    def _evaluate(self, step: int) -> str:
        """Add a point to the curve; returns what is wrong where the loss is not finite, the same on all ranks."""
        job = self._job
        total = self._loss_sum.cpu()
        if job.world.world_size > 1:
            dist.all_reduce(total, group=job.world.control)
        train_loss = float(total) / self._num_targets
        evaluation = evaluate(job.learner, job.test, job.world)
        if not math.isfinite(train_loss) or not math.isfinite(evaluation.loss):
            return f"the loss was no number after {step} updates"
        self._curve.append(CurvePoint(step, self._num_samples, train_loss, evaluation.loss, evaluation.accuracy or 0.0))
        self._loss_sum.zero_()
        self._num_targets = 0
        return ""

    def _probe(self, step: int) -> None:
        job = self._job
        size = min(_SMALL_BATCH_SIZE, job.batches.batch_size)
        budget = _PROBE_COST * job.epochs * len(job.train) / len(_PROBE_SHARES)
        num_small = int(budget / (_NUM_PROBES * size * job.world.world_size))
        # Gradients that are not finite have no noise scale; the next evaluation reports what is wrong with the run.
        with contextlib.suppress(MeasurementError):
            self._noise.append(
                measure_noise_scale(
                    job,
                    step=step,
                    epoch=self._num_samples / len(job.train),
                    batch_size=size,
                    num_small=max(_LEAST_SMALL, min(_MOST_SMALL, num_small)),
                    num_probes=_NUM_PROBES,
                    note=f"{self._cell.recipe} at {self._cell.global_batch_size}",
                )
            )

    def _report(self, step: int) -> None:
        if self._job.world.rank == 0 and time.perf_counter() - self._reported_s > 0.5:
            self._reported_s = time.perf_counter()
            post(Progress(self._share_done(step), 1, self._cell.name))

    def _build_record(self, step: int, largest: int, failure: str, seconds: float) -> LargeBatchRecord:
        job, cell = self._job, self._cell
        return LargeBatchRecord(
            model=job.settings.model,
            data=job.train.name,
            device=job.world.device.type,
            precision=job.settings.precision,
            world_size=job.world.world_size,
            batch_size=job.batches.batch_size,
            global_batch_size=cell.global_batch_size,
            largest_batch_size=largest,
            recipe=cell.recipe,
            configuration=cell.configuration,
            budget=cell.budget,
            epochs=job.epochs if job.settings.steps is None else self._num_samples / len(job.train),
            num_updates=step,
            num_samples=self._num_samples,
            seed=job.settings.seed,
            lr=job.settings.lr,
            seconds=seconds,
            curve=tuple(self._curve),
            failure=failure,
        )
