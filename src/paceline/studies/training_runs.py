"""Runs one cell of a training study on its ranks, with evaluations and noise probes along the way.

`records.training` derives the gradient noise scale from the squared norms of the probes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import MeasurementError, refuse
from paceline.measure.engine import follow
from paceline.parallel.replicas import read_replica
from paceline.records import CurvePoint, LargeBatchRecord, NoiseRecord, Record
from paceline.records.training import NoiseProbe
from paceline.runtime.ranks.world import set_seed
from paceline.studies.training_grid import TrainingCell
from paceline.torch_internals import BatchNorm
from paceline.training.build import Job, build_job, build_learner, load_sets, open_world
from paceline.training.loop import evaluate, run_steps
from paceline.training.train_settings import TrainSettings
from paceline.workloads.data.own import OwnRandom
from paceline.workloads.data.sharding import derive_seed
from paceline.workloads.models import compute_outcome

# Gradient noise is probed at these fractions of the run. All probes together may use at most this small fraction of the
# run's samples. More small batches per probe allow measuring noise later in training.
_PROBE_SHARES = (0.1, 0.3, 0.6, 1.0)
_NUM_PROBES, _SMALL_BATCH_SIZE, _PROBE_COST = 8, 32, 0.05
_LEAST_SMALL, _MOST_SMALL = 4, 64


def survey_job(settings: TrainSettings) -> tuple[int, bool]:
    """The number of samples per epoch, and whether the model has BatchNorm. Collective: call on every rank of the
    launched world."""
    with open_world(settings) as world:
        (train, test), _ = load_sets(settings, world)
        needed = "the study compares test losses after whole epochs: return (train, test), each with a length"
        refuse((train.is_stream or test is None, f"data {train.name}: {needed}"), code="own-type")
        module = build_learner(dataclasses.replace(settings, wrapper="none"), world, train).module
        return len(train), any(isinstance(layer, BatchNorm) for layer in module.modules())


def measure_training(cell: TrainingCell, evaluations: int, data_seed: int) -> list[Record]:
    """Run the cell's whole training. Collective: call on every rank of the launched world.

    Synthetic data has the same seed in all cells: a different seed would create a different task.
    """
    with open_world(cell.settings) as world:
        settings = dataclasses.replace(cell.settings, ranks=world.world_size)
        is_synthetic = settings.data.startswith("synthetic")
        sets, _ = load_sets(dataclasses.replace(settings, seed=data_seed) if is_synthetic else settings, world)
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
        # Progress counts samples, because a growing batch has most of its updates at the beginning; or updates, if the
        # run has a fixed number of them.
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
            begin_s += time.perf_counter() - begin_s - reached_s  # exclude evaluation time
            loss_sum.zero_()
            num_targets = 0
        if step in probed:
            # The noise scale of non-finite gradients is undefined; the next evaluation reports the failure.
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


def measure_noise_scale(
    job: Job, *, step: int, epoch: float, batch_size: int, num_small: int, num_probes: int, note: str = ""
) -> NoiseRecord:
    """Probe the model after `step` steps and `epoch` epochs; every rank gets the record.

    A probe is `num_small` gradients of `batch_size` samples each on every rank, and one message of a gradient's size.
    The model trains as in the job (mode, precision, label smoothing, augmentation), but is not compiled.
    Drawing samples with replacement makes them independent, as the formulas assume. Samples and dropout depend on the
    job's seed, `step` and the probe, but not on the ranks. BatchNorm sees `batch_size` samples, SyncBatchNorm those of
    all ranks. Does not change parameters, gradients, buffers, the optimizer or random states.
    Collective: call on every rank, between steps.
    """
    # Smaller batches have larger gradients, which may overflow half precision even if training does not.
    scale = job.learner.scaler.get_scale()
    probes: list[NoiseProbe] = []
    # A second batch size would make torch.compile switch to dynamic shapes and change the kernels for training.
    eager: Any = torch.compiler.set_stance("force_eager") if job.settings.compile else contextlib.nullcontext()
    with _restoring(job.learner.module), eager:
        job.learner.module.train()
        while len(probes) < num_probes:
            purpose = job.settings.seed, step, len(probes)
            small_squares, big_square = _take_probe(job, purpose, int(epoch), batch_size, num_small, scale)
            if all(map(math.isfinite, (*small_squares, big_square))):
                probes.append(NoiseProbe(small_squares, big_square))
            elif scale > 1:
                scale /= 16
            else:
                found = f"step {step}: a gradient of probe {len(probes)} is not finite, so the noise scale is undefined"
                raise MeasurementError(f"{found}; try a lower --lr, or --clip")
    return NoiseRecord(
        model=job.settings.model, data=job.train.name, device=job.world.device.type, world_size=job.world.world_size,
        precision=job.settings.precision, step=step, epoch=epoch, seed=job.settings.seed, small_batch_size=batch_size,
        probes=tuple(probes), note=note,
    )  # fmt: skip


def _take_probe(
    job: Job, purpose: tuple[int, ...], epoch: int, batch_size: int, num_small: int, scale: float
) -> tuple[tuple[float, ...], float]:
    """The squared norms of all ranks' gradients, and of their mean. `scale` multiplies the losses but not these norms.
    The number of a small batch, counted over all ranks, determines its samples. Collective: call on every rank."""
    params, world = job.learner.parameters, job.world
    widest = max((param.dtype for param in params), key=lambda dtype: dtype.itemsize)
    dtype = torch.float64 if widest == torch.float64 else torch.float32
    total = torch.zeros(sum(param.numel() for param in params), dtype=dtype, device=world.device)
    pieces = [piece.view(p.shape) for piece, p in zip(total.split([p.numel() for p in params]), params, strict=True)]
    squares = []
    for number in range(world.rank * num_small, (world.rank + 1) * num_small):
        found = zip(pieces, _compute_grad(job, (*purpose, number), epoch, batch_size, scale), strict=True)
        used = [(piece, grad) for piece, grad in found if grad is not None]
        squares.append(_square([grad for _, grad in used]))
        torch._foreach_add_([piece for piece, _ in used], [grad for _, grad in used])
    if world.world_size > 1:
        dist.all_reduce(total)
    # The only wait for the device, after queueing all small batches.
    *small, big = (torch.stack([*squares, _square(pieces)]) / scale**2).tolist()
    everyone: list[tuple[list[float], float]] = world.share((small, big / (num_small * world.world_size) ** 2))
    # Backends may round sums differently on each rank. All ranks must return the same record, so use rank 0's sums.
    return tuple(square for squares, _ in everyone for square in squares), everyone[0][1]


def _compute_grad(
    job: Job, purpose: tuple[int, ...], epoch: int, batch_size: int, scale: float
) -> tuple[torch.Tensor | None, ...]:
    """The gradient of one small batch's mean loss, times `scale`, without touching `.grad` or hooks."""
    data, learner = job.train, job.learner
    generator = torch.Generator().manual_seed(derive_seed("noise samples", *purpose))
    indices = torch.randint(len(data), (batch_size,), generator=generator)
    batch = data.prepare(data.take(indices).to(learner.device), indices, epoch)
    set_seed(derive_seed("noise dropout", *purpose) % 2**32)
    with learner.autocast():
        outcome = compute_outcome(learner.module, batch, learner.form, label_smoothing=learner.label_smoothing)
    loss = outcome.loss_sum * (scale / (batch_size * learner.form.targets_per_sample))
    return torch.autograd.grad(loss, learner.parameters, allow_unused=True)


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The joint squared norm of all tensors, in double precision, on their device."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square().sum()


@contextlib.contextmanager
def _restoring(module: nn.Module) -> Iterator[None]:
    """Restore buffers, modes and random state at the end, even after an error."""
    modes = [(part, part.training) for part in module.modules()]
    buffers: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
        (part._buffers, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    # Fork the state of all GPUs, since `set_seed` seeds them all.
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), OwnRandom(0):
        try:
            yield
        finally:
            with torch.no_grad():
                for place, name, buffer, value in buffers:
                    place[name] = buffer.copy_(value)  # forward may have replaced the tensor
            for part, mode in modes:
                part.training = mode
