"""One run of a large-batch study: train by its recipe, evaluate on the way, probe the noise of the gradients.

Which runs there are is in `large_batch_settings`; the loop is `training.loop.run_steps`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import MeasurementError
from paceline.measure.large_batch_settings import TrainingCell
from paceline.measure.noise_scale import measure_noise_scale
from paceline.records import CurvePoint, LargeBatchRecord, NoiseRecord, Record
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.training.build import Job, build_job, build_learner, load_sets, open_world
from paceline.training.loop import evaluate, run_steps
from paceline.training.settings import TrainSettings

# When the noise of gradients is probed, as shares of the run, and how. All probes together may take a small share of
# the run's samples: the more small batches a probe has, the later in training the noise can still be measured.
_PROBE_SHARES = (0.1, 0.3, 0.6, 1.0)
_NUM_PROBES, _SMALL_BATCH_SIZE, _PROBE_COST = 8, 32, 0.05
_LEAST_SMALL, _MOST_SMALL = 4, 64


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
