"""How `train` runs ranks: it starts them or joins a launched world, shows progress, and passes a wish to stop on.

The training itself is in `training`; what was typed becomes settings in `train`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import rich.markup
import rich.progress

from paceline.cli.session import stderr
from paceline.errors import ConfigError, LaunchError
from paceline.records.environment import capture_environment
from paceline.records.store import RunFolder
from paceline.runtime.environment import is_launched, read_place
from paceline.runtime.launch import RankPool, check_rank_count, defer_signals
from paceline.runtime.worker import listen
from paceline.training.journal import SAME_SIGNAL_S
from paceline.training.settings import TrainSettings
from paceline.units import format_speed

if TYPE_CHECKING:
    from paceline.training.loop import TrainProgress, TrainResult

__all__ = ["CONFIG", "load_config", "prolong_config", "run_training", "save_config"]

CONFIG = "config.json"
_FORMAT, _VERSION = "paceline-train", 1
# How often a log gets a line, where there is no terminal to draw on.
_LINE_S = 10.0


def save_config(folder: RunFolder, settings: TrainSettings) -> None:
    """What the run was asked to do, resolved, and where: enough to go on with it."""
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "settings": settings.to_json(),
        "batches": vars(settings.batches) | {"global_batch_size": settings.batches.global_batch_size},
        "environment": vars(capture_environment()),
    }
    folder.write(CONFIG, json.dumps(document, indent=1, default=str) + "\n")


def load_config(run: Path) -> TrainSettings:
    """The settings of a run that is to go on."""
    file = run / CONFIG
    try:
        document = json.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--resume {run}: {file} does not exist; give the folder of a training run") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--resume {run}: {file} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != _FORMAT or document.get("version") != _VERSION:
        raise ConfigError(f"--resume {run}: {file} is not the configuration of a training run of this Paceline")
    if not isinstance(document.get("settings"), dict):
        raise ConfigError(f"--resume {run}: {file} lacks its settings, which a whole one has: start anew")
    return TrainSettings.from_json(document["settings"])


def prolong_config(run: Path, settings: TrainSettings) -> None:
    """Note that a run goes on for more epochs or steps, so that it does when it is killed and goes on once more."""
    file = run / CONFIG
    document = json.loads(file.read_text())
    name = "epochs" if settings.steps is None else "steps"
    length = getattr(settings, name)
    if length > document["settings"][name]:
        document["settings"][name] = length
        new = file.with_name(f".{CONFIG}.new")
        try:
            new.write_text(json.dumps(document, indent=1) + "\n")
            new.replace(file)
        except OSError as error:
            raise ConfigError(f"--{name} {length}: {file} cannot be changed: {error.strerror}") from None


def run_training(settings: TrainSettings, folder: Path | None, resume: bool) -> TrainResult:
    """Train on ranks of our own, or as one rank of the launched world."""
    is_ours = not is_launched() or (read_place().world_size == 1 and settings.ranks > 1)
    shows = is_ours or read_place().rank == 0
    with _show_progress(shows) as show:
        if not is_ours:
            from paceline.training.loop import train

            with listen(show):
                return train(settings, folder, resume)
        check_rank_count(settings.ranks)
        with RankPool(settings.ranks) as pool, _pass_on_stop(pool) as came:
            pool.start()
            if came:  # perhaps before there was a rank to tell
                raise SystemExit(128 + came[0])
            with defer_signals():
                from paceline.training.loop import train
            try:
                answers = pool.run(train, (settings, folder, resume), on_message=lambda rank, message: show(message))
            except LaunchError:
                if came:  # it came before the ranks had begun to listen for it
                    raise SystemExit(128 + came[0]) from None
                raise
            result: TrainResult = answers[0]
            # To the ranks Ctrl-C is a SIGTERM.
            return dataclasses.replace(result, signal=came[0]) if came and result.signal else result


@contextlib.contextmanager
def _pass_on_stop(pool: RankPool) -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM asks the ranks to save and stop; the second ends them."""
    came: list[int] = []
    came_s = 0.0
    if threading.current_thread() is not threading.main_thread():
        yield came
        return

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal came_s
        if came:
            if time.monotonic() - came_s <= SAME_SIGNAL_S:
                return
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        came.append(number)
        came_s = time.monotonic()
        stderr().print("paceline: stopping after this step, with a checkpoint; once more to stop at once")
        for pid in pool.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _describe_row(row: dict[str, Any], samples_per_s: float) -> str:
    words = [f"loss {row['loss']:.4f}" if row["loss"] is not None else "loss nan"]
    if row.get("accuracy") is not None:
        words.append(f"accuracy {row['accuracy']:.1%}")
    words.append(f"{format_speed(samples_per_s)} samples/s")
    if row.get("exposed_comm_s") is not None and row["step_s"]:
        words.append(f"exposed {row['exposed_comm_s'] / row['step_s']:.0%}")
    if row.get("test_accuracy") is not None:
        words.append(f"test accuracy {row['test_accuracy']:.1%}")
    return ", ".join(words)


@contextlib.contextmanager
def _show_progress(shows: bool) -> Iterator[Callable[[TrainProgress], None]]:
    """A bar on a terminal; elsewhere a line now and then, and for each epoch. Always on stderr."""
    console = stderr()
    if not shows:
        yield lambda message: None
        return
    if not console.is_terminal:
        last_s = [time.monotonic()]

        def print_line(message: TrainProgress) -> None:
            if message.word:
                console.print(f"paceline: train: {rich.markup.escape(message.word)}")
            row = message.row
            now_s = time.monotonic()
            if row is not None and (now_s - last_s[0] > _LINE_S or "test_loss" in row):
                last_s[0] = now_s
                place = f"step {message.step} of {message.num_steps}, epoch {message.epoch + 1}"
                console.print(f"paceline: train: {place}: {_describe_row(row, message.samples_per_s)}")

        yield print_line
        return
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(bar_width=20),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[word]}"),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting ranks", total=None, word="")

        def update(message: TrainProgress) -> None:
            if message.word:
                bar.console.print(f"paceline: {rich.markup.escape(message.word)}")
            word = "" if message.row is None else _describe_row(message.row, message.samples_per_s)
            bar.update(
                task,
                completed=message.step,
                total=message.num_steps,
                description=f"epoch {message.epoch + 1}",
                word=word,
            )

        yield update
