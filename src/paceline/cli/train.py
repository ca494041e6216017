"""`paceline train`: what was typed becomes settings, and a finished run becomes a table.

How its ranks are run is in `training`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.jobs import (
    Augment,
    Cutout,
    Epochs,
    Lr,
    LrDrops,
    Momentum,
    Resume,
    ScheduleName,
    Tail,
    TestSamples,
    WeightDecay,
    build_settings,
    check_job,
    read_drops,
    read_given,
    read_one,
    read_world,
    takes_job,
)
from paceline.cli.options import JOB, LEARNING, Json, Out
from paceline.errors import ConfigError
from paceline.training.schedules import format_growths, parse_growths

if TYPE_CHECKING:
    from paceline.records.store import RunFolder
    from paceline.training.loop import TrainResult
    from paceline.training.settings import TrainSettings

__all__ = ["train"]

_METRICS = "metrics.jsonl"
_PARTS = ("step_s", "data_wait_s", "forward_s", "backward_s", "optimizer_s", "exposed_comm_s")
# What a run that goes on may change: how it is run, and for how long, but not what is computed. Data may move.
_CHANGEABLE = (
    "ranks", "backend", "device", "threads", "epochs", "save_every", "keep", "profile", "tensorboard", "batch_size",
    "accumulate", "steps", "grow",
)  # fmt: skip


@takes_job(help={"ranks": "Number of ranks. Default: the launched world's, else 1."})
def train(
    context_: typer.Context,
    job: dict[str, Any],
    epochs: Epochs = 1,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Optimizer steps, instead of --epochs.", rich_help_panel=LEARNING)
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option("--global-batch-size", help="Samples of one step over all ranks.", rich_help_panel=JOB)
    ] = None,
    batch_growth: Annotated[
        str | None,
        typer.Option(
            "--batch-growth", help="SHARE:FACTOR,...: from that share of the run on, so many times the batch."
        ),
    ] = None,
    grow: Annotated[
        str, typer.Option("--grow", help="What grows on a rank: accumulate (more micro-batches) or batch-size.")
    ] = "accumulate",
    tail: Tail = "keep",
    clip: Annotated[float | None, typer.Option("--clip", help="Largest norm of the gradients.")] = None,
    lr: Lr = 0.05,
    momentum: Momentum = 0.9,
    trust_coefficient: Annotated[
        float | None, typer.Option("--trust-coefficient", help="Of lars: a layer's step, as a share of its weights.")
    ] = None,
    weight_decay: WeightDecay = 0.0,
    schedule: ScheduleName = "constant",
    lr_warmup: Annotated[int, typer.Option("--lr-warmup", help="Steps in which the learning rate climbs.")] = 0,
    lr_drops: LrDrops = None,
    ghost_batchnorm: Annotated[
        int | None, typer.Option("--ghost-batchnorm", help="BatchNorm over so many samples at a time.")
    ] = None,
    label_smoothing: Annotated[
        float, typer.Option("--label-smoothing", help="Share of a target that is spread over all classes.")
    ] = 0.0,
    augment: Augment = None,
    cutout: Cutout = 0,
    test_samples: TestSamples = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Note forward, backward and optimizer of each step.")
    ] = False,
    resume: Resume = None,
    save_every: Annotated[
        str, typer.Option("--save-every", help="When a checkpoint is due: epoch, 10s, 5min or 100steps")
    ] = "60s",
    keep: Annotated[int, typer.Option("--keep", help="How many checkpoints are kept.")] = 3,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files, too.")] = False,
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """Train a model on one rank or many, and see where the time goes."""
    ranks = read_world(job["ranks"], 1)
    if len(ranks) != 1:
        raise ConfigError(f"--ranks {job['ranks']}: training takes one number of ranks")
    growths = () if batch_growth is None else parse_growths(batch_growth)
    typed = build_settings(
        job, ranks[0], read_one(job["batch_size"], "--batch-size"),
        steps=steps, batch_growth=growths, grow=grow,
        epochs=epochs, global_batch_size=global_batch_size, tail=tail, clip=clip, lr=lr, momentum=momentum,
        weight_decay=weight_decay, schedule=schedule, lr_warmup=lr_warmup, augment=augment, cutout=cutout,
        label_smoothing=label_smoothing, profile=profile,
        trust_coefficient=trust_coefficient, lr_drops=read_drops(lr_drops), ghost_batchnorm=ghost_batchnorm,
        test_samples=test_samples, save_every=save_every, keep=keep, tensorboard=tensorboard,
    )  # fmt: skip
    asked = read_given(context_)
    if steps is not None and "epochs" in asked:
        raise ConfigError(f"--steps {steps} beside --epochs {epochs}: a run ends by one of them; leave the other out")
    if "momentum" in asked and typed.optimizer not in ("sgd", "lars"):
        raise ConfigError(f"--momentum {momentum}: {typed.optimizer} has moments of its own; leave it out, or use sgd")
    if "out" in asked and resume is not None:
        raise ConfigError(f"--out {out} beside --resume: a run goes on in its own folder {resume}; leave out --out")
    raise typer.Exit(_resume(asked, typed, resume, json) if resume is not None else _start(typed, out, json))


def _start(settings: TrainSettings, out: Path, json: bool) -> int:
    from paceline.cli.training import run_training, save_config
    from paceline.records.store import RunFolder
    from paceline.runtime.environment import is_launched, read_place

    check_job(settings)
    if is_launched() and read_place().rank > 0:
        RunFolder.check(out)
        return _code(run_training(settings, None, False))
    with RunFolder.create(out, "train") as folder, _forgets_false_start(folder):
        save_config(folder, settings)
        result = run_training(settings, folder.path, False)
        return _finish(settings, folder, result, json)


@contextlib.contextmanager
def _forgets_false_start(folder: RunFolder) -> Iterator[None]:
    """Empty the folder of a run that broke off before its first rows of metrics: nothing could go on from it."""
    try:
        yield
    except BaseException:
        if not (folder.path / _METRICS).exists():
            for entry in folder.path.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        raise


def _resume(asked: Sequence[str], typed: TrainSettings, run: Path, json: bool) -> int:
    from paceline.cli.session import stderr
    from paceline.cli.training import load_config, prolong_config, run_training
    from paceline.records.store import RunFolder
    from paceline.runtime.environment import is_launched, read_place
    from paceline.training.journal import load_metrics

    settings = _change(load_config(run), typed, asked)
    check_job(settings)
    metrics = run / _METRICS
    rows = load_metrics(metrics) if metrics.exists() else []  # none where only a part of the first was written
    num_steps = rows[-1]["step"] if rows else 0
    if not is_launched() or read_place().rank == 0:
        prolong_config(run, settings)
    result = run_training(settings, run, True)
    if is_launched() and read_place().rank > 0:
        return _code(result)
    if result.step == num_steps and not result.signal:
        more = "--epochs" if settings.steps is None else "--steps"
        stderr().print(f"paceline: the run was over, after {result.step} steps; to go on, give more {more}")
    return _finish(settings, RunFolder(run), result, json)


def _change(saved: TrainSettings, typed: TrainSettings, asked: Sequence[str]) -> TrainSettings:
    """The run's own settings with what was typed beside --resume, where that may change."""
    from paceline.workloads.data.sources import parse_data

    changes: dict[str, Any] = {}
    for name in asked:
        if not hasattr(typed, name):
            continue
        before, value = getattr(saved, name), getattr(typed, name)
        if name == "global_batch_size":
            before = saved.batches.global_batch_size
        is_moved = name == "data" and parse_data(value)[0] == parse_data(before)[0]
        if value != before and name not in _CHANGEABLE and not is_moved:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} {_show(value)} beside --resume: the run was started with {_show(before)}, and another value "
                "would make it another run; leave it out, or start anew"
            )
        _check_prolonged(saved, name, value)
        changes[name] = value
    from paceline.runtime.environment import is_launched

    if "ranks" not in changes and is_launched():
        changes["ranks"] = typed.ranks
    settings = dataclasses.replace(saved, **changes)
    if changes.get("ranks", saved.ranks) != saved.ranks:
        # The global batch stays what it was; how it is shared out follows.
        size = saved.batches.global_batch_size
        if size % settings.ranks:
            fits = ", ".join(str(ranks) for ranks in range(1, size + 1) if size % ranks == 0)
            raise ConfigError(
                f"{settings.ranks} ranks cannot share the run's global batch of {size} samples equally, and with "
                f"another it would be another run: use one of {fits} ranks"
            )
        batch_size, accumulate = changes.get("batch_size"), changes.get("accumulate")
        same = saved.batches.batch_size
        if batch_size is None and accumulate is None and size % (settings.ranks * same) == 0:
            batch_size = same  # what fits into memory, and what BatchNorm sees at a time, stay as they were
        settings = dataclasses.replace(settings, global_batch_size=size, batch_size=batch_size, accumulate=accumulate)
    return settings


def _check_prolonged(saved: TrainSettings, name: str, value: Any) -> None:
    """A run is made longer by what ends it; and where its batch grows at shares of it, not at all."""
    ends = "epochs" if saved.steps is None else "steps"
    if name in ("epochs", "steps") and name != ends:
        raise ConfigError(
            f"--{name} {value} beside --resume: the run ends by --{ends} {getattr(saved, ends)}; give more --{ends}, "
            "or start anew"
        )
    if name == "epochs" and saved.batch_growth and value != saved.epochs:
        raise ConfigError(
            f"--epochs {value} beside --resume: the batch grows at shares ({_show(saved.batch_growth)}) of the run's "
            f"{saved.epochs} epochs, and would have grown elsewhere; leave it out, or start anew"
        )


def _show(value: Any) -> str:
    if isinstance(value, tuple) and (not value or isinstance(value[0], tuple)):
        return format_growths(value)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _code(result: TrainResult) -> int:
    return 128 + result.signal if result.signal else 0


def _find_medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median seconds of each part of the steps that --profile noted, without the first, which makes the plan."""
    noted = [row for row in rows if "forward_s" in row]
    noted = noted[1:] or noted
    medians = {}
    for name in _PARTS:
        values = [row[name] for row in noted if row[name] is not None]
        if values:
            medians[name] = statistics.median(values)
    return medians


def _describe_phases(medians: dict[str, float]) -> str:
    from paceline.units import format_ms

    parts = ", ".join(
        f"{name.removesuffix('_s').replace('_', ' ')} {format_ms(medians[name])}"
        for name in ("data_wait_s", "forward_s", "backward_s", "optimizer_s")
    )
    step_s, exposed_s = medians["step_s"], medians.get("exposed_comm_s")
    sent = (
        "how much of it is communication, `paceline profile phases` measures"
        if exposed_s is None
        else f"of it exposed communication {format_ms(exposed_s)} ({exposed_s / step_s:.1%})"
    )
    return f"median step {format_ms(step_s)} ms: {parts}; {sent}"


def _finish(settings: TrainSettings, folder: RunFolder, result: TrainResult, json: bool) -> int:
    """Tables and the picture into the run's folder, and what a person wants to read."""
    from paceline.cli.session import describe_machine, print_json, stderr, stdout
    from paceline.records.training import summarize_epochs
    from paceline.report import plots, tables
    from paceline.report.training import epoch_row, epoch_table, plot_training
    from paceline.training.journal import load_metrics

    rows = load_metrics(folder.path / _METRICS)
    epochs, phases = summarize_epochs(rows), _find_medians(rows)
    if json:
        print_json(
            {
                "run": str(folder.path),
                "finished": not result.signal,
                "steps": result.step,
                "backend": result.backend,
                "device": result.device,
                "world_size": settings.ranks,
                "num_parameters": result.num_parameters,
                "epochs": [epoch_row(epoch) for epoch in epochs],
                "phases": phases or None,
            }
        )
    else:
        columns = [column for column in epoch_table if any(column.cell(epoch) for epoch in epochs)]
        stdout().print(tables.render_terminal(columns, epochs, "", stdout().width))
        if phases:
            stdout().print(_describe_phases(phases))
    if result.signal:
        stderr().print(
            f"paceline: stopped after step {result.step}, which is kept; go on with "
            f"paceline train --resume {folder.path}"
        )
        return _code(result)
    ranks = f"{settings.ranks} rank{'s' if settings.ranks > 1 else ''}"
    title = f"{settings.model} on {settings.data.split(':')[0]}, {ranks} ({settings.wrapper})"
    figure = plot_training(rows, title, describe_machine())
    for name, content in (
        ("table.csv", tables.render_csv([epoch_row(epoch) for epoch in epochs])),
        ("table.md", tables.render_markdown(epoch_table, epochs)),
        ("training.png", plots.render_png(figure)),
        ("training.svg", plots.render_svg(figure)),
    ):
        for path in (folder.path / name, *folder.path.glob(f".{name}.*")):  # of a run that went on, or was killed here
            path.unlink(missing_ok=True)
        folder.write(name, content)
    if not json:
        stdout().print(f"run: {folder.path}")
    return 0
