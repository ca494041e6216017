"""The result of a training run: its epochs, its curves, and where the time of its steps went."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import RecordError
from paceline.records import training as records
from paceline.records.environment import Environment, capture_environment
from paceline.records.store import Run, write_new
from paceline.report.plots import COLORS, new_figure, place_legend
from paceline.report.result import Result, describe_job
from paceline.report.table import Column, Table, raw_columns
from paceline.units import format_ms, format_number_of, format_speed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = ("step_s", "data_wait_s", "forward_s", "backward_s", "optimizer_s", "exposed_comm_s")


_COLUMNS = (
    Column("epoch", lambda e: e.epoch + 1, "number", "epoch", is_key=True),
    Column("steps", "num_steps", "number", "steps", priority=-1),
    *raw_columns(samples="num_samples"),
    Column("loss", "loss", "{:.4f}".format, "loss", is_key=True),
    Column("accuracy", "accuracy", "percent.1", "accuracy"),
    Column("test loss", "test_loss", "{:.4f}".format, "test_loss", priority=1),
    Column("test accuracy", "test_accuracy", "percent.1", "test_accuracy", priority=2),
    Column("test F1", "test_f1", "{:.3f}".format, "test_f1", priority=2),
    Column("time", "seconds", "s", "seconds", priority=1),
    Column("samples/s", "samples_per_s", format_speed, "samples_per_s", priority=2),
    Column("exposed comm", "exposed_share", "percent.1", "exposed_share", priority=1),
    Column("data wait", "data_wait_share", "percent.1", priority=-1),
    *raw_columns("exposed_comm_s", "data_wait_s"),
)


class TrainRunResult(Result):
    """A training run: in its folder, `config.json` and `metrics.jsonl`. `rows` has a row for each step.

    `run.config` has the settings, and in `outcome` its `steps`, `world_size`, `backend`, `device`, `num_parameters`.
    """

    def __init__(self, run: Run, folder: Path | None = None, rows: Sequence[dict[str, Any]] | None = None) -> None:
        super().__init__(run, folder)
        if rows is None:
            file = None if folder is None else folder / records.METRICS_FILE
            rows = records.load_metrics(file) if file is not None and file.exists() else ()
        self.rows, self.epochs = rows, records.summarize_epochs(rows)
        # How the run ended; empty for an unfinished one, and for one of an older Paceline.
        self.outcome: dict[str, Any] = dict(self.config.get("outcome") or {})
        self.steps: int = rows[-1]["step"] if rows else 0
        self.world_size = int(self.outcome.get("world_size", self.config.get("ranks", 1)))

    @property
    def finished(self) -> bool:
        has_weights = self.folder is not None and (self.folder / "weights.safetensors").exists()
        return bool(self.rows) and self.outcome.get("steps", self.steps if has_weights else -1) == self.steps

    @property
    def phases(self) -> dict[str, float]:
        """The median seconds of each part of a step, without the first, which makes the plan; {} without `profile`."""
        timed = [row for row in self.rows if "forward_s" in row]
        columns = {name: [row[name] for row in timed[1:] or timed if row[name] is not None] for name in _PARTS}
        return {name: statistics.median(values) for name, values in columns.items() if values} if timed else {}

    @property
    def answer(self) -> str:
        epochs = self.epochs
        if not epochs:
            return "No step was taken."
        seconds, num_samples, wait_s, exposed_s = (
            sum(getattr(epoch, name) or 0.0 for epoch in epochs)
            for name in ("seconds", "num_samples", "data_wait_s", "exposed_comm_s")
        )
        text = f"loss {epochs[-1].loss:.4g}"
        tested = next((epoch for epoch in reversed(epochs) if epoch.test_loss is not None), None)
        if tested is not None:
            accuracy = tested.test_accuracy
            text += f", test loss {tested.test_loss:.4g}" if accuracy is None else f", test accuracy {accuracy:.1%}"
            text += "" if tested.test_f1 is None else f", test F1 {tested.test_f1:.3f}"
        length, ranks = format_number_of(len(epochs), "epoch"), format_number_of(self.world_size, "rank")
        text += f" after {length} on {ranks}{'' if self.finished else ' (not finished)'}"
        if seconds:
            text += f"; {format_speed(num_samples / seconds)} samples/s; data wait {wait_s / seconds:.0%}"
        timed_s = sum(epoch.seconds for epoch in epochs if epoch.exposed_comm_s is not None)
        if self.world_size > 1 and timed_s:
            text += f"; {exposed_s / timed_s:.0%} of the time is exposed communication"
        return f"{text}."

    @property
    def findings(self) -> Sequence[str]:
        phases = self.phases
        if not phases:
            return ()
        parts = ", ".join(f"{name[:-2].replace('_', ' ')} {format_ms(phases[name])}" for name in _PARTS[1:-1])
        sent, exposed_s = "`paceline profile phases` measures how much of it is communication", phases.get(_PARTS[-1])
        if exposed_s is not None:
            sent = f"exposed communication is {format_ms(exposed_s)} ({exposed_s / phases['step_s']:.1%}) of it"
        return (f"Median step {format_ms(phases['step_s'])} ms: {parts}; {sent}.",)

    def tables(self) -> list[Table]:
        return [Table("table", "", _COLUMNS, self.epochs, key="epochs")]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        config, ranks = self.config, format_number_of(self.world_size, "rank")
        title = f"{config['model']} on {config['data'].split(':')[0]}, {ranks} ({config['wrapper']})"
        return {"training": lambda: plot_training(self.rows, title, self.machine)} if self.rows else {}

    @property
    def next_steps(self) -> Sequence[str]:
        job = f"--ranks {self.world_size} {describe_job(self.config)}"
        steps = [] if self.world_size == 1 else [f"paceline profile phases {job}"]
        if self.folder is not None:
            ends = "epochs" if self.config.get("steps") is None else "steps"
            more = f" --{ends} {2 * self.config[ends]}" if self.finished and not self.config.get("batch_growth") else ""
            if more or not self.finished:
                steps.append(f"paceline train --resume {self.folder}{more}")
        return steps

    def to_json(self) -> dict[str, Any]:
        outcome = {name: self.outcome.get(name) for name in ("backend", "device", "num_parameters")}
        facts = {"finished": self.finished, "steps": self.steps, "world_size": self.world_size, **outcome}
        return super().to_json() | facts | {"phases": self.phases or None}

    def _save_run(self, folder: Path) -> None:
        """The files of a run that wrote none: it can be loaded from there, but not resumed."""
        if self.folder is not None and folder.resolve() == self.folder.resolve():
            return
        if (folder / records.CONFIG_FILE).exists() or (folder / records.METRICS_FILE).exists():
            raise RecordError(f"{folder} holds another run, which is never overwritten: choose another", code="exists")
        settings = {name: value for name, value in self.config.items() if name != "outcome"}
        write_new(folder / records.CONFIG_FILE, render_config(settings, self.run.environment, self.outcome))
        with contextlib.closing(records.MetricsLog(folder / records.METRICS_FILE)) as log:
            log.append(*self.rows)


def render_config(settings: dict[str, Any], environment: Environment, outcome: dict[str, Any] | None = None) -> str:
    """The text of `config.json`."""
    document = dict(zip(("format", "version"), records.CONFIG_FORMAT, strict=True))
    document |= {"settings": settings, "environment": dataclasses.asdict(environment)}
    return json.dumps(document | ({"outcome": outcome} if outcome else {}), indent=1) + "\n"


def load_training(folder: str | Path) -> TrainRunResult:
    """The result of a training run, finished or not, from its folder."""
    folder = Path(folder)
    document = records.load_config(folder)
    fields = {field.name for field in dataclasses.fields(Environment)}
    found = {name: value for name, value in (document.get("environment") or {}).items() if name in fields}
    try:
        environment = Environment(**found)
    except TypeError:  # of an older Paceline, which noted less
        environment = dataclasses.replace(capture_environment(), cpu="another machine", details={})
    config = document["settings"] | {"outcome": document.get("outcome")}
    return TrainRunResult(Run("train", config, environment, ()), folder)


def plot_training(rows: Sequence[dict[str, Any]], title: str, subtitle: str) -> Figure:
    """The loss of every step, and the test loss and accuracy where they were measured."""
    figure, axes = new_figure(title, f"{subtitle}; measured")
    steps, losses = ([row[name] for row in rows] for name in ("step", "loss"))
    axes.plot(steps, losses, color=COLORS[0], linewidth=0.9, alpha=0.8, label="training loss")
    tested = [row for row in rows if row.get("test_loss") is not None]
    at, accuracy = [row["step"] for row in tested], [row.get("test_accuracy") for row in tested]
    if tested:
        axes.plot(at, [row["test_loss"] for row in tested], color=COLORS[1], marker="o", label="test loss")
    axes.set(xlabel="step", ylabel="loss")
    axes.set_ylim(bottom=0)
    if tested and None not in accuracy:
        right, percent = axes.twinx(), [100 * row["test_accuracy"] for row in tested]
        right.plot(at, percent, color=COLORS[2], marker="s", linestyle="--", label="test accuracy")
        right.set(ylabel="test accuracy (%)", ylim=(0, 100))
        right.spines[["top"]].set_visible(False)
    place_legend(figure, *figure.axes)
    return figure
