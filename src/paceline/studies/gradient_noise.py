"""Measures the gradient noise scale between two training steps, without any effect on training.

`records.training` derives it from the squared norms of the probes.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import MeasurementError
from paceline.records.training import NoiseProbe, NoiseRecord
from paceline.runtime.world import set_seed
from paceline.training.build import Job
from paceline.workloads.data.sharding import derive_seed
from paceline.workloads.models import compute_outcome


def measure_noise_scale(
    job: Job, *, step: int, epoch: float, batch_size: int, num_small: int, num_probes: int, note: str = ""
) -> NoiseRecord:
    """Probe the model after `step` steps and `epoch` epochs; every rank gets the record.

    A probe is `num_small` gradients of `batch_size` samples each on every rank, and one message of a gradient's size.
    The model trains as it does in the job (mode, precision, label smoothing, augmentation), but is not compiled.
    Samples are drawn with replacement, so that they are independent, as the formulas assume. Samples and dropout follow
    from the job's seed, `step` and the probe, not from the ranks. BatchNorm sees `batch_size` samples, SyncBatchNorm
    those of all ranks. Parameters, gradients, buffers, the optimizer and random states are unchanged afterwards.
    Collective: every rank must call this, between steps.
    """
    # Gradients that fit half precision in training may overflow here: the losses of smaller batches weigh more.
    scale = job.learner.scaler.get_scale()
    probes: list[NoiseProbe] = []
    # A second batch size would make torch.compile switch to dynamic shapes, and training to other kernels.
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
                found = f"step {step}: a gradient of probe {len(probes)} is not finite, so there is no noise scale"
                raise MeasurementError(f"{found}; try a lower --lr, or --clip")
    return NoiseRecord(
        model=job.settings.model, data=job.train.name, device=job.world.device.type, world_size=job.world.world_size,
        precision=job.settings.precision, step=step, epoch=epoch, seed=job.settings.seed, small_batch_size=batch_size,
        probes=tuple(probes), note=note,
    )  # fmt: skip


def _take_probe(
    job: Job, purpose: tuple[int, ...], epoch: int, batch_size: int, num_small: int, scale: float
) -> tuple[tuple[float, ...], float]:
    """The squared norms of all ranks' gradients, and of their mean. `scale` multiplies losses and not these norms.
    Small batches are numbered over all ranks, and their samples follow from their number. Collective."""
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
    # The only synchronisation with the device: all small batches are queued by now.
    *small, big = (torch.stack([*squares, _square(pieces)]) / scale**2).tolist()
    everyone: list[tuple[list[float], float]] = world.share((small, big / (num_small * world.world_size) ** 2))
    # Backends may round sums differently on each rank, and all must return the same record.
    return tuple(square for squares, _ in everyone for square in squares), everyone[0][1]


def _compute_grad(
    job: Job, purpose: tuple[int, ...], epoch: int, batch_size: int, scale: float
) -> tuple[torch.Tensor | None, ...]:
    """The gradient of the mean loss of one small batch, times `scale`, without any `.grad` or hook."""
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
    """The squared norm of all tensors together, in double precision, on their device."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square().sum()


@contextlib.contextmanager
def _restoring(module: nn.Module) -> Iterator[None]:
    """Restore buffers, modes and random state at the end, also after an error."""
    modes = [(part, part.training) for part in module.modules()]
    buffers: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = [
        (part._buffers, name, buffer, buffer.clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    numbers, more_numbers = random.getstate(), numpy.random.get_state()
    # All GPUs, since `set_seed` seeds them all.
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            yield
        finally:
            random.setstate(numbers)
            numpy.random.set_state(more_numbers)
            with torch.no_grad():
                for place, name, buffer, value in buffers:
                    place[name] = buffer.copy_(value)  # a forward may have replaced the tensor
            for part, mode in modes:
                part.training = mode
