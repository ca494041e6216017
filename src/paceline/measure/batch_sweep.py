"""Whole epochs of a job on one rank at one batch size: their time without data loading, and their memory.

Which batch sizes there are belongs to the study; what follows from the times is in `records`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import time
from pathlib import Path

import torch

from paceline.measure.engine import synchronize
from paceline.records import BatchRecord, Record, Samples
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.training.build import Job, build_job, open_world
from paceline.training.loader import load_windows
from paceline.training.settings import TrainSettings
from paceline.training.step import NoPhases, PhaseClock, take_step

# How torch reports that memory is exhausted: on a GPU by the error's class, on a CPU only by its text.
_FULL = re.compile(r"can't allocate memory|not enough memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


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
