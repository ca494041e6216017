"""The phases of training steps, and communication as the difference to steps without: all taken in turns.

One training step is in `training.step`; what is derived from the times is in `records.steps`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import torch.distributed as dist

from paceline.errors import ConfigError
from paceline.measure.busy import AskedSteps
from paceline.measure.engine import Pace, build_samples, run_rounds, synchronize
from paceline.measure.replicas import read_buckets
from paceline.measure.wrappers import order_turns
from paceline.parallel import DataParallel
from paceline.records.samples import Samples
from paceline.records.steps import PHASES, StepRecord
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.training.build import Job, build_job, build_learner, open_world
from paceline.training.loader import Window, load_windows
from paceline.training.settings import TrainSettings
from paceline.training.step import NoPhases, PhaseClock, Phases, take_step

__all__ = ["cycle_windows", "measure_phases"]

_PACE = Pace(budget_s=15.0, min_iters=12, max_iters=100, warmup=4)
# Learning nothing: replicas whose gradients are not averaged in every step must not drift apart.
_RATE = 0.0
_KINDS = ("plain", "marked", "silent", "asked")


@dataclass
class _Times:
    """What this rank noted of one kind of steps."""

    step_s: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PHASES})


def measure_phases(
    settings: TrainSettings, batch_sizes: tuple[int, ...], iters: int | None, warmup: int | None
) -> list[StepRecord]:
    """Profile the job at each batch size per rank. Collective: every rank of the launched world must call this."""
    records: list[StepRecord] = []
    with open_world(settings) as world:
        for number, batch_size in enumerate(batch_sizes):
            asked = dataclasses.replace(settings, ranks=world.world_size, batch_size=batch_size)
            job = build_job(asked, world)
            # Before the first is measured: the largest would end the run, and lose what was.
            _check_whole(job, dataclasses.replace(job.batches, batch_size=max(batch_sizes)).global_batch_size)
            label = f"{world.world_size} rank{'s' if world.world_size > 1 else ''}, batch {batch_size}"

            def tell(share: float, number: int = number, label: str = label) -> None:
                if world.rank == 0:
                    post(Progress(number + share, len(batch_sizes), label))

            tell(0.0)
            with _Steps(job) as steps:
                num_warmup = steps.run(iters, warmup, tell)
                records.append(steps.build_record(num_warmup))
            if world.rank == 0:
                post(Progress(number + 1, len(batch_sizes), label, (records[-1],)))
    return records


class _Steps:
    """Four kinds of steps of one job: plain, with phases marked, without communication, and asked about messages."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._times = {kind: _Times() for kind in _KINDS}
        self._busy_s: list[float] = []
        self._windows = cycle_windows(job)
        self._asked = AskedSteps(job.learner, lambda: build_learner(job.settings, job.world, job.train))
        job.learner.model.train()

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *error: object) -> None:
        self._windows.close()
        self._asked.close()
        if isinstance(self._job.learner.model, DataParallel):
            self._job.learner.model.stop()

    def run(self, iters: int | None, warmup: int | None, tell: Callable[[float], None]) -> int:
        """All rounds; returns how many were warm-ups."""
        num_warmup = [0]

        def end_warmup(number: int) -> None:
            num_warmup[0] = number

        def run_round(repetition: int) -> float:
            return sum(self._take(_KINDS[index]) for index in order_turns(len(_KINDS), repetition))

        run_rounds(run_round, self._job.world.control, _PACE, iters, warmup, tell, end_warmup)
        return num_warmup[0]

    def _take(self, kind: str) -> float:
        """One step, begun by all ranks together and timed to its end."""
        job, device = self._job, self._job.world.device
        learner = self._asked.learner if kind == "asked" else job.learner
        quiet = learner.no_sync() if kind == "silent" else contextlib.nullcontext()
        phases: Phases = PhaseClock(device) if kind in ("marked", "silent") else NoPhases()
        if kind == "asked":
            self._asked.begin()
        synchronize(device)
        dist.barrier(group=job.world.control)
        begin_s = time.perf_counter()
        window = next(self._windows)
        waited_s = time.perf_counter() - begin_s
        with quiet:
            take_step(learner, window.batches, window.num_samples * learner.form.targets_per_sample, _RATE, phases)
        marked = phases.end()
        synchronize(device)
        seconds = time.perf_counter() - begin_s
        self._note(kind, seconds, {"data_wait": waited_s, **marked.read()})
        return seconds

    def _note(self, kind: str, seconds: float, parts_s: dict[str, float]) -> None:
        times = self._times[kind]
        times.step_s.append(seconds)
        for name, value in parts_s.items():
            times.parts_s[name].append(value)
        busy_s = self._asked.take_busy_s() if kind == "asked" else None
        if busy_s is not None:
            self._busy_s.append(busy_s)

    def build_record(self, num_warmup: int) -> StepRecord:
        """Collective: every rank must call this, and every rank gets the record."""
        job, times = self._job, self._times
        everyone: list[tuple[dict[str, _Times], list[float]]] = job.world.share((times, self._busy_s))

        def samples(pick: Callable[[dict[str, _Times]], list[float]]) -> Samples:
            return build_samples([pick(theirs) for theirs, _ in everyone], num_warmup)

        buckets = read_buckets(job.learner.model)
        has_busy = len(self._busy_s) > num_warmup and job.world.world_size > 1
        return StepRecord(
            model=job.settings.model,
            data=job.train.name,
            wrapper=job.settings.wrapper,
            backend=job.world.backend,
            device=job.world.device.type,
            world_size=job.world.world_size,
            precision=job.settings.precision,
            batch_size=job.batches.batch_size,
            accumulate=job.batches.accumulate,
            num_parameters=len(job.learner.parameters),
            num_bytes=sum(buckets),
            num_messages=len(buckets),
            timing=samples(lambda t: t["plain"].step_s),
            marked=samples(lambda t: t["marked"].step_s),
            no_comm=samples(lambda t: t["silent"].step_s),
            no_comm_backward=samples(lambda t: t["silent"].parts_s["backward"]),
            data_wait=samples(lambda t: t["marked"].parts_s["data_wait"]),
            forward=samples(lambda t: t["marked"].parts_s["forward"]),
            backward=samples(lambda t: t["marked"].parts_s["backward"]),
            optimizer=samples(lambda t: t["marked"].parts_s["optimizer"]),
            busy=build_samples([busy for _, busy in everyone], num_warmup) if has_busy else None,
        )


def cycle_windows(job: Job) -> Generator[Window, None, None]:
    """Whole windows, epoch after epoch: a smaller tail would be another step."""
    world, epoch, size = job.world, 0, job.batches.global_batch_size
    _check_whole(job, size)
    if job.settings.batch_growth:
        raise ConfigError("--batch-growth: steps are measured at one batch; leave it out")
    while True:
        order = job.order(epoch)
        windows = load_windows(job.train, order, 0, world.rank, world.world_size, job.batches.batch_size, world.device)
        for window in windows:
            if window.num_samples == size:
                yield window
        epoch += 1


def _check_whole(job: Job, size: int) -> None:
    if len(job.train) < size:
        raise ConfigError(
            f"{job.train.describe()}: less than one global batch of {size}; use a smaller --batch-size, or more samples"
        )
