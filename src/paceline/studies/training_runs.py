"""What the ranks of a study of training run: one cell to its end, with evaluations and noise probes on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import MeasurementError, refuse
from paceline.measure.engine import follow
from paceline.parallel.replicas import read_replica
from paceline.records import CurvePoint, LargeBatchRecord, NoiseRecord, Record
from paceline.studies.gradient_noise import measure_noise_scale
from paceline.studies.training_grid import TrainingCell
from paceline.torch_internals import BatchNorm
from paceline.training.build import Job, build_job, build_learner, load_sets, open_world
from paceline.training.loop import evaluate, run_steps
from paceline.training.settings import TrainSettings

# When gradient noise is probed, as shares of the run, and how. All probes together may take a small share of the run's
# samples: the more small batches a probe has, the later in training the noise can still be measured.
_PROBE_SHARES = (0.1, 0.3, 0.6, 1.0)
_NUM_PROBES, _SMALL_BATCH_SIZE, _PROBE_COST = 8, 32, 0.05
_LEAST_SMALL, _MOST_SMALL = 4, 64


def survey_job(settings: TrainSettings) -> tuple[int, bool]:
    """How many samples an epoch has, and whether the model has a BatchNorm. Collective: call on every rank of the
    launched world."""
    with open_world(settings) as world:
        train, test = load_sets(settings, world)
        needed = "whole epochs are compared by their test loss: return (train, test), each with a length"
        refuse((train.is_stream or test is None, f"data {train.name}: {needed}"), code="own-type")
        module = build_learner(dataclasses.replace(settings, wrapper="none"), world, train).module
        return len(train), any(isinstance(layer, BatchNorm) for layer in module.modules())


def measure_training(cell: TrainingCell, evaluations: int, data_seed: int) -> list[Record]:
    """Train the cell to its end. Collective: call on every rank of the launched world. Synthetic data has the same seed
    in all cells: another one would be another task, not another run of the same task."""
    with open_world(cell.settings) as world:
        settings = dataclasses.replace(cell.settings, ranks=world.world_size)
        is_synthetic = settings.data.startswith("synthetic")
        sets = load_sets(dataclasses.replace(settings, seed=data_seed) if is_synthetic else settings, world)
        return train_cell(build_job(settings, world, sets=sets), cell, evaluations)


def train_cell(job: Job, cell: TrainingCell, evaluations: int) -> list[Record]:
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
        # By samples, since a growing batch has most of its updates at the beginning; or by updates, where they end it.
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
                failure = f"the loss was not finite after {step} updates"
                break
            curve.append(CurvePoint(step, num_samples, train_loss, test.loss, test.accuracy, reached_s))
            begin_s += time.perf_counter() - begin_s - reached_s  # without the time of evaluations
            loss_sum.zero_()
            num_targets = 0
        if step in probed:
            # Gradients that are not finite have no noise scale; the next evaluation reports the failure.
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
