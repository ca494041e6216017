"""The training loop, top to bottom: epochs of windows, a step each, meetings, evaluation, checkpoints.

One step is in `step`, what ranks tell each other in `journal`, what is kept on disk in `checkpoints`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.errors import ConfigError, TrainingError
from paceline.parallel import DataParallel
from paceline.runtime.worker import post
from paceline.training.build import Job, build_job, open_world
from paceline.training.evaluate import Evaluation, evaluate
from paceline.training.journal import Heard, Journal, StepNote
from paceline.training.keeping import Keeper, Position
from paceline.training.loader import Window, load_windows
from paceline.training.phases import NoPhases, PhaseClock, Phases, StepClock
from paceline.training.requests import build_model_options
from paceline.training.settings import TrainSettings
from paceline.training.step import find_bad_parameter, take_step
from paceline.training.stopping import StopWish, catch_stop
from paceline.units import format_number_of
from paceline.workloads.choose import describe_model

__all__ = ["TrainProgress", "TrainResult", "train"]

T = TypeVar("T")


@dataclass(frozen=True)
class TrainProgress:
    """What rank 0 posts: how far the run is, the newest row of metrics, and a word for people if there is one."""

    step: int
    num_steps: int
    epoch: int
    samples_per_s: float = 0.0
    row: dict[str, Any] | None = None
    word: str = ""


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: `signal` is what stopped it, or 0 when it came to its end."""

    step: int
    signal: int
    backend: str
    device: str
    num_parameters: int
    description: str


def train(settings: TrainSettings, folder: Path | None, resume: bool) -> TrainResult:
    """Train as asked; rank 0 writes into the run's folder. Collective: every rank of the launched world calls this."""
    with (
        catch_stop() as wish,
        open_world(settings) as world,
        contextlib.ExitStack() as ending,
    ):
        settings = dataclasses.replace(settings, ranks=world.world_size)
        settings.check()
        keeper = Keeper(folder, settings, world)
        ending.callback(keeper.release)
        found = keeper.find() if resume else None
        job = build_job(settings, world, found.plan if found is not None else None)
        start = keeper.restore(job, found) if found is not None else Position(0, 0, 0)
        if start.step > job.schedule.num_steps:
            flag = f"--epochs {settings.epochs}" if settings.steps is None else f"--steps {settings.steps}"
            raise ConfigError(
                f"{flag} is over after step {job.schedule.num_steps}, and the run is at step {start.step} already: ask "
                f"for more {'epochs' if settings.steps is None else 'steps'}"
            )
        keeper.begin(start.step)
        if world.rank == 0:
            if found is not None:
                said = found.loaded.refused
            else:
                said = ["there is no checkpoint yet: begins at the first step"] if resume else []
            for word in (
                *said,
                describe_model(settings.model, build_model_options(settings)),
                _describe(job, start),
            ):
                post(TrainProgress(start.step, job.schedule.num_steps, start.epoch, word=word))
        return _Run(job, keeper, wish).go(start)


def _describe(job: Job, start: Position) -> str:
    batches, world = job.batches, job.world
    made_of = f"{batches.world_size} x {batches.batch_size}" + (
        f" x {batches.accumulate} micro-batches" if batches.accumulate > 1 else ""
    )
    again = f"; goes on at step {start.step}" if start.step else ""
    return (
        f"{job.settings.model} with {_count(job.learner.module):,} parameters on {job.train.describe()}; "
        f"{format_number_of(world.world_size, 'rank')} on {world.backend} ({world.device.type}), "
        f"global batch {batches.global_batch_size} = {made_of}, "
        f"{_describe_length(job)}{again}"
    )


def _describe_length(job: Job) -> str:
    batches = job.batch_schedule
    grown = "".join(
        f"{size} from step {step + 1} on, "
        for (_, size), step in zip(batches.marks, batches.growth_steps, strict=True)
        if step is not None
    )
    if grown or job.settings.steps is not None:
        total = format_number_of(job.schedule.num_steps, "step")
        return f"{grown}{total} in {format_number_of(job.epochs, 'epoch')}"
    return f"{format_number_of(batches.count_steps(0), 'step')} per epoch"


def _count(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


class _Run:
    """The loop of one rank, with what it keeps from step to step."""

    def __init__(self, job: Job, keeper: Keeper, wish: StopWish) -> None:
        self._job, self._keeper = job, keeper
        self._journal = Journal(job.world, wish)
        self._clock = StepClock(job.world.device)
        self._phases: Phases = PhaseClock(job.world.device) if job.settings.profile else NoPhases()

    def go(self, start: Position) -> TrainResult:
        job, world, position = self._job, self._job.world, start
        job.learner.model.train()
        while position.step < job.schedule.num_steps:
            self._clock.start()
            epoch, first = position.epoch, position.window
            order, sizes = job.order(epoch), job.micro_batch_sizes(epoch)
            windows = load_windows(job.train, order, first, world.rank, world.world_size, sizes, world.device)
            for window, waited_s in _time_waits(windows):
                self._step(window, waited_s, epoch, position.step)
                is_end = window.number == order.num_windows - 1
                position = (
                    Position(epoch + 1, 0, position.step + 1)
                    if is_end
                    else Position(epoch, window.number + 1, position.step + 1)
                )
                is_over = position.step == job.schedule.num_steps
                if is_end or is_over or self._journal.is_due or self._keeper.is_due_by_steps(position.step):
                    heard = self._meet(position, is_end)
                    if heard.signal:
                        return self._end(position, heard.signal)
                    if is_over:
                        break
                    self._clock.start()  # what was done between two steps is in none of them
        return self._end(position, 0)

    def _step(self, window: Window, waited_s: float, epoch: int, step: int) -> None:
        """Take a step and note what it was like; nothing here waits for the GPU or another rank."""
        job, rate = self._job, self._job.schedule.rate(step)
        num_targets = window.num_samples * job.learner.form.targets_per_sample
        outcome = take_step(job.learner, window.batches, num_targets, rate, self._phases)
        phases = self._phases.end()
        correct = outcome.num_correct
        self._journal.note(
            StepNote(
                step=step + 1,
                epoch=epoch,
                num_samples=window.num_samples,
                num_targets=num_targets,
                rate=rate,
                lap=self._clock.lap(),
                data_wait_s=waited_s,
                exposed_s=read_exposed(job.learner.model, job.world.world_size),
                phases=phases,
                values=torch.stack(
                    [outcome.loss_sum.double(), (outcome.loss_sum if correct is None else correct).double()]
                ),
                has_accuracy=correct is not None,
                bad_parameter=outcome.bad_parameter,
            )
        )

    def _meet(self, position: Position, is_epoch_end: bool) -> Heard:
        """Ranks tell each other of their steps; then what is due: evaluation, rows of metrics, a checkpoint."""
        job, keeper = self._job, self._keeper
        heard = self._journal.meet(keeper.is_due_by_time)
        if heard.bad is not None:
            keeper.write_rows(heard.rows)
            keeper.close()
            raise _blame(heard.bad, job, keeper)
        rows = list(heard.rows)
        is_over = position.step == job.schedule.num_steps
        if is_epoch_end or is_over:
            evaluation = evaluate(job.learner, job.test, job.world)
            rows[-1] |= _evaluation_keys(evaluation)
        keeper.write_rows(rows)
        self._report(position, rows)
        if (
            heard.signal
            or heard.wants_save
            or is_over
            or keeper.is_due_by_steps(position.step)
            or (is_epoch_end and keeper.every_epoch)
        ):
            self._check_model(position.step)
            keeper.save(job, position)
        return heard

    def _check_model(self, step: int) -> None:
        """A finite loss can have gradients that are not: never save what they made of the model over what was whole."""
        name = find_bad_parameter(self._job.learner.module)
        if name:
            self._keeper.close()
            raise TrainingError(
                f"step {step}: {name} is not finite after the update, and the loss was; "
                f"{self._keeper.describe_last()}; try a lower --lr, --clip, or look at the model"
            )

    def _report(self, position: Position, rows: list[dict[str, Any]]) -> None:
        if self._job.world.rank == 0 and rows:
            seconds = sum(row["step_s"] for row in rows)
            rate = sum(row["samples"] for row in rows) / seconds if seconds else 0.0
            post(TrainProgress(position.step, self._job.schedule.num_steps, rows[-1]["epoch"], rate, rows[-1]))

    def _end(self, position: Position, signal: int) -> TrainResult:
        job, world = self._job, self._job.world
        if not signal:
            self._keeper.export(job)
        self._keeper.close()
        return TrainResult(
            position.step, signal, world.backend, world.device.type, _count(job.learner.module), job.train.describe()
        )


def _time_waits(windows: Iterator[T]) -> Iterator[tuple[T, float]]:
    """Each window with the seconds that it was waited for."""
    while True:
        begin_s = time.perf_counter()
        window = next(windows, None)
        if window is None:
            return
        yield window, time.perf_counter() - begin_s


def read_exposed(model: nn.Module, world_size: int) -> float | None:
    """Seconds of the last step in which this rank stood and waited for communication; None where nobody knows."""
    if not isinstance(model, DataParallel):
        return None if hasattr(model, "no_sync") else 0.0
    return model.exposed_s if world_size > 1 else 0.0


def _evaluation_keys(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "test_loss": evaluation.loss,
        "test_accuracy": evaluation.accuracy,
        "test_samples": evaluation.num_samples,
    }


def _blame(bad: tuple[int, int, str], job: Job, keeper: Keeper) -> TrainingError:
    step, rank, parameter = bad
    parameter = parameter or find_bad_parameter(job.learner.module) or "none: the loss alone"
    return TrainingError(
        f"step {step}: the loss of rank {rank} is not a finite number, and the first in the model is {parameter}; "
        f"{keeper.describe_last()}; try a lower --lr, --clip, or look at the data"
    )
