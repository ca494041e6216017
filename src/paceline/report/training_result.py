"""The result of a training run: its epochs, its curves, and where its step time went."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.errors import RecordError
from paceline.records import TracedStepRecord
from paceline.records import training as records
from paceline.records.checked import decode
from paceline.records.environment import Environment
from paceline.records.store import Run, find_file, name_format, write_new
from paceline.report.observed import PARTS, AttachedResult, plot_ranks
from paceline.report.plots import COLORS, Drawings, Figure, new_figure, place_legend
from paceline.report.result import Result, describe_job
from paceline.report.table import Column, Table, join_words, raw_columns
from paceline.units import format_duration, format_ms, format_number_of, format_speed

_MOST_EPOCHS = 12  # maximum number in the text; --details shows all
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


_MOST_RANKS = 4  # maximum number of ranks to list individually, instead of the fastest and the slowest
_MOST_FAULTS = 3  # maximum number of faults to list individually


class ObservedTraining(AttachedResult):
    """The steps of a training run, analyzed like those of an attached program, with each rank's waits in every row."""

    def __init__(self, run: Run, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows
        super().__init__(run)

    @property
    def _waits(self) -> list[list[float]]:
        rows = records.pick_like_last(self._rows)[1:]
        waits = [row["ranks"]["exposed_comm_s"] for row in rows]
        return [row for row in waits if None not in row]

    def _list_waits(self, recorded: Sequence[TracedStepRecord]) -> Sequence[Mapping[int, float]]:
        return [dict(enumerate(row)) for row in self._waits]


class TrainRunResult(Result):
    """A training run: `config.json` (its settings and, after the end, its `outcome`) and `metrics.jsonl` in its folder.
    `rows` has one row per step."""

    json_columns = (
        *raw_columns("finished", "steps", "world_size"),
        *raw_columns("outcome.backend", "outcome.device", "outcome.num_parameters"),
    )

    def __init__(self, run: Run, folder: Path | None = None, rows: Sequence[dict[str, Any]] | None = None) -> None:
        super().__init__(run, folder)
        self.rows = self._load_rows(records.METRICS_FILE) if rows is None else rows
        self.epochs = records.summarize_epochs(self.rows)
        self.total = records.summarize_rows(self.rows) if self.rows else None  # the whole run as one epoch
        self.tested = next((epoch for epoch in reversed(self.epochs) if epoch.test_loss is not None), None)
        # How the run ended; empty for an unfinished one.
        self.outcome: dict[str, Any] = dict(self.config.get("outcome") or {})
        self.faults: list[dict[str, Any]] = list(self.config.get("faults") or ())
        self.steps: int = self.rows[-1]["step"] if self.rows else 0
        self.world_size = int(self.outcome.get("world_size", self.config.get("ranks", 1)))

    @classmethod
    def load(cls, path: Path) -> TrainRunResult:
        """The result of a training run, finished or not, from its folder."""
        document = records.load_config(path)
        try:
            environment: Environment = decode(Environment, document.get("environment"), "environment")
        except (RecordError, TypeError) as error:
            raise RecordError(f"{path / records.CONFIG_FILE}: {error}", code="damaged") from None
        config = document["settings"] | {"outcome": document.get("outcome"), "faults": document.get("faults", [])}
        return cls(Run("train", config, environment, ()), path)

    @cached_property
    def saves(self) -> list[dict[str, Any]]:
        """One row per completed save: its `step`, how long training waited for it (`stall_s`) and for the previous
        write, how long this write took, and the next interval of `--save-every auto` (`next_s`)."""
        return self._load_rows(records.SAVES_FILE)

    def _load_rows(self, name: str) -> list[dict[str, Any]]:
        file = None if self.folder is None else self.folder / name
        return [] if file is None or find_file(file) is None else records.load_metrics(file)

    @property
    def finished(self) -> bool:
        return bool(self.rows) and self.outcome.get("steps") == self.steps

    @property
    def phases(self) -> dict[str, float]:
        """Median seconds of each part of a step, except the first step, which builds the plan; {} without `profile`."""
        timed = [row for row in self.rows if "forward_s" in row]
        columns = {name: [row[name] for row in timed[1:] or timed if row[name] is not None] for name in PARTS}
        return {name: statistics.median(values) for name, values in columns.items() if values} if timed else {}

    @property
    def answer(self) -> str:
        epochs, total, tested = self.epochs, self.total, self.tested
        if total is None:
            return "No steps were taken."
        scores = [f"loss {epochs[-1].loss:.4g}"]
        if tested is not None:
            accuracy = tested.test_accuracy
            scores.append(f"test loss {tested.test_loss:.4g}" if accuracy is None else f"test accuracy {accuracy:.1%}")
            scores += [] if tested.test_f1 is None else [f"test F1 {tested.test_f1:.3f}"]
        length, ranks = format_number_of(len(epochs), "epoch"), format_number_of(self.world_size, "rank")
        clauses = [f"{', '.join(scores)} after {length} on {ranks}{'' if self.finished else ' (not finished)'}"]
        if total.seconds:
            clauses += [f"{format_speed(total.samples_per_s)} samples/s", f"data wait {total.data_wait_share:.0%}"]
        if self.world_size > 1 and total.exposed_share is not None:
            clauses.append(f"{total.exposed_share:.0%} of the time is exposed communication")
        return f"{'; '.join(clauses)}."

    @cached_property
    def observed(self) -> AttachedResult | None:
        """The steps, analyzed like those of an attached program: their bottleneck and their buckets."""
        if not self.rows or not self.total or not self.total.seconds:
            return None
        labels = {name: str(self.config[name]) for name in ("model", "wrapper", "backend", "device")} | self.outcome
        labels = {name: labels[name] for name in ("model", "wrapper", "backend", "device")}
        steps = records.build_steps(self.rows, self.world_size, **labels)
        return ObservedTraining(dataclasses.replace(self.run, records=tuple(steps), warnings=()), self.rows)

    @property
    def headline(self) -> str:
        return self.answer if self.observed is None else f"{self.observed.verdict_text} {self.answer}"

    @property
    def findings(self) -> Sequence[str]:
        return [*self._describe_times(), *self._describe_phases(), *self._describe_saves(), *self._describe_faults()]

    def _describe_times(self) -> Sequence[str]:
        """The total time and the mean step of each rank over the steps with the final number of ranks."""
        if self.total is None or not self.total.seconds or "ranks" not in self.rows[-1]:
            return ()
        own = zip(*(records.list_ranks(row, "step_s") for row in records.pick_like_last(self.rows)), strict=True)
        times = [(statistics.fmean(seconds), rank) for rank, seconds in enumerate(own)]
        shown = times if len(times) <= _MOST_RANKS else [min(times), max(times)]
        ranks = join_words([f"{mean_s:.4f} s on rank {rank}" for mean_s, rank in shown])
        what = format_number_of(len(self.rows), "step")
        return (f"{what} took {self.total.seconds:.2f} s; the mean step took {ranks}.",)

    def _describe_faults(self) -> Sequence[str]:
        """The faults that the run recovered from, excluding a fault that ended it."""
        faults = [fault for fault in self.faults if fault["policy"] != "stop"]
        if not faults:
            return ()
        names = []
        for fault in faults[:_MOST_FAULTS]:
            who = "all ranks" if fault["rank"] is None else f"rank {fault['rank']}"
            where = "before the first step" if fault["step"] is None else f"in step {fault['step']}"
            names.append(f"{who} {where} ({fault['policy']})")
        names += [f"{len(faults) - _MOST_FAULTS} more"] * (len(faults) > _MOST_FAULTS)
        lost = format_number_of(sum(fault.get("steps_lost") or 0 for fault in faults), "step")
        took_s = sum(fault.get("recovered_s") or 0.0 for fault in faults)
        many = format_number_of(len(faults), "fault")
        return (f"Recovered from {many} in {took_s:.1f} s and repeated {lost}: {join_words(names)}.",)

    def _describe_saves(self) -> Sequence[str]:
        saves = [row for row in self.saves if "next_s" in row]  # written with --save-every auto
        if not saves:
            return ()
        stall_s, write_s = (statistics.fmean(row[name] for row in saves) for name in ("stall_s", "write_s"))
        many, next_s = format_number_of(len(saves), "save"), format_duration(saves[-1]["next_s"])
        times = f"each stalled training for {format_ms(stall_s)} ms and reached the disk {format_ms(write_s)} ms later"
        return (f"{many}: {times}; the interval is {next_s} (--save-every auto).",)

    def _describe_phases(self) -> Sequence[str]:
        phases = self.phases
        if not phases:
            return ()
        parts = ", ".join(f"{name[:-2].replace('_', ' ')} {format_ms(phases[name])}" for name in PARTS[1:-1])
        sent, exposed_s = "`paceline profile phases` measures how much of it is communication", phases.get(PARTS[-1])
        if exposed_s is not None:
            sent = f"of this, {format_ms(exposed_s)} ms ({exposed_s / phases['step_s']:.1%}) is exposed communication"
        return (f"Median step {format_ms(phases['step_s'])} ms: {parts}; {sent}.",)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Includes the machine's load, because the run reports times."""
        return (*super().warnings, *(doubt.text for doubt in self.doubts))

    def tables(self) -> list[Table]:
        return [Table("table", "", _COLUMNS, self.epochs, key="epochs", shown=self.epochs[-_MOST_EPOCHS:])]

    def page_tables(self) -> list[Table]:
        return [*self.tables(), *(self.observed.tables() if self.observed is not None else ())]

    def page_figures(self) -> Drawings:
        if self.observed is None:
            return self.figures()
        return {**self.figures(), "ranks": lambda: plot_ranks(self.rows, self.machine), **self.observed.figures()}

    @property
    def title(self) -> str:
        return f"{self.config['model']} on {self.config['data'].split(':')[0]}"

    def figures(self) -> Drawings:
        title = f"{self.title}, {format_number_of(self.world_size, 'rank')} ({self.config['wrapper']})"
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
        return super().to_json() | ({"faults": self.faults} if self.faults else {}) | {"phases": self.phases or None}

    def _save_run(self, folder: Path) -> None:
        """Write the files of a run that was not saved. The run can then be loaded but not resumed."""
        if self.folder is not None and folder.resolve() == self.folder.resolve():
            return
        if (folder / records.CONFIG_FILE).exists() or (folder / records.METRICS_FILE).exists():
            raise RecordError(
                f"{folder} contains another run and is not overwritten: choose another folder", code="exists"
            )
        settings = {name: value for name, value in self.config.items() if name not in ("outcome", "faults")}
        text = render_config(settings, self.run.environment, self.outcome, self.faults)
        write_new(folder / records.CONFIG_FILE, text)
        with contextlib.closing(records.MetricsLog(folder / records.METRICS_FILE)) as log:
            log.append(*self.rows)


def render_config(
    settings: dict[str, Any],
    environment: Environment,
    outcome: dict[str, Any] | None = None,
    faults: Sequence[dict[str, Any]] = (),
) -> str:
    """The text of `config.json`."""
    document = name_format(records.CONFIG_FORMAT) | {
        "settings": settings,
        "environment": dataclasses.asdict(environment),
    }
    document |= {"outcome": outcome} if outcome else {}
    return json.dumps(document | ({"faults": list(faults)} if faults else {}), indent=1) + "\n"


def plot_training(rows: Sequence[dict[str, Any]], title: str, subtitle: str) -> Figure:
    """Plot the loss of every step, and the test loss and accuracy if measured."""
    figure, axes = new_figure(title, f"{subtitle}; measured")
    steps, losses = ([row[name] for row in rows] for name in ("step", "loss"))
    axes.plot(steps, losses, color=COLORS[0], linewidth=0.9, alpha=0.8, label="training loss", gid="loss")
    tested = [row for row in rows if row.get("test_loss") is not None]
    at, accuracy = [row["step"] for row in tested], [row.get("test_accuracy") for row in tested]
    if tested:
        axes.plot(
            at, [row["test_loss"] for row in tested], color=COLORS[1], marker="o", label="test loss", gid="test_loss"
        )
    axes.set(xlabel="step", ylabel="loss")
    axes.set_ylim(bottom=0)
    if tested and None not in accuracy:
        right, percent = axes.twinx(), [100 * row["test_accuracy"] for row in tested]
        right.plot(
            at, percent, color=COLORS[2], marker="s", linestyle="--", label="test accuracy", gid="percent:test_accuracy"
        )
        right.set(ylabel="test accuracy (%)", ylim=(0, 105), yticks=range(0, 101, 20))  # room for a marker at 100 %
        right.spines[["top"]].set_visible(False)
    place_legend(figure, *figure.axes)
    return figure
