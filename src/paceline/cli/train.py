"""`paceline train`: what was typed becomes settings, and a finished run becomes a table. Running it is in `training`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import (
    MODEL_HELP,
    WRAPPER_HELP,
    Backend,
    BatchSize,
    Device,
    Json,
    Out,
    Ranks,
    Threads,
)
from paceline.errors import ConfigError
from paceline.units import parse_counts

if TYPE_CHECKING:
    from paceline.records.store import RunFolder
    from paceline.training.settings import TrainSettings
    from paceline.training.trainer import TrainResult

__all__ = ["train"]

# What a run that goes on may change: how it is run, and for how long, but not what is computed.
_CHANGEABLE = (
    "ranks", "backend", "device", "threads", "epochs", "save_every", "keep", "profile", "tensorboard", "batch_size",
    "accumulate", "data",
)  # fmt: skip


def train(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option("--model", help=MODEL_HELP),
    ] = "cnn",
    data: Annotated[
        str,
        typer.Option("--data", help="synthetic, or mnist, fashion-mnist, cifar10, mrpc, text with :PATH of the files."),
    ] = "synthetic",
    ranks: Ranks = None,
    epochs: Annotated[int, typer.Option("--epochs", help="How often each sample is seen.")] = 1,
    batch_size: BatchSize = None,
    global_batch_size: Annotated[
        int | None, typer.Option("--global-batch-size", help="Samples of one step over all ranks and micro-batches.")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option("--accumulate", help="Micro-batches per step; gradients travel with the last.")
    ] = None,
    tail: Annotated[
        str, typer.Option("--tail", help="The last, smaller batch of an epoch: keep, drop, or pad with first samples.")
    ] = "keep",
    precision: Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp16 (by autocast)")] = "fp32",
    compile: Annotated[bool, typer.Option("--compile", help="Compile the model, block by block.")] = False,
    clip: Annotated[float | None, typer.Option("--clip", help="Largest norm of the gradients.")] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd or adamw")] = "sgd",
    lr: Annotated[float, typer.Option("--lr", help="Learning rate (its peak).")] = 0.05,
    momentum: Annotated[float, typer.Option("--momentum", help="Of sgd, Nesterov's.")] = 0.9,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of matrices and filters alone.")] = 0.0,
    schedule: Annotated[str, typer.Option("--schedule", help="constant, cosine or linear (to 0 at the end)")] = "constant",
    lr_warmup: Annotated[int, typer.Option("--lr-warmup", help="Steps in which the learning rate climbs.")] = 0,
    wrapper: Annotated[
        str, typer.Option("--wrapper", help=WRAPPER_HELP)
    ] = "paceline",
    sync_batchnorm: Annotated[
        bool, typer.Option("--sync-batchnorm", help="BatchNorm over the whole global batch.")
    ] = False,
    plan: Annotated[Path | None, typer.Option("--plan", help="Buckets from a file of a plan.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Note forward, backward and optimizer of each step.")] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Go on with the run in this folder, from its newest checkpoint.")
    ] = None,
    save_every: Annotated[
        str, typer.Option("--save-every", help="When a checkpoint is due: epoch, 10s, 5min or 100steps")
    ] = "60s",
    keep: Annotated[int, typer.Option("--keep", help="How many checkpoints are kept.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of the model, the order of the data, and dropout.")] = 1,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Train on the first so many; how many to make if synthetic.")
    ] = None,
    tokens: Annotated[int | None, typer.Option("--context", help="Tokens per sequence.")] = None,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", help="auto (the model's own, or bytes), bytes, or a folder")
    ] = "auto",
    augment: Annotated[
        bool | None, typer.Option("--augment/--no-augment", help="Crop and flip images. Default: CIFAR-10 alone.")
    ] = None,
    channels: Annotated[
        str | None, typer.Option("--channels", help="Channels of the cnn's convolutions: 32 64 128")
    ] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", help="Width of the hidden layer.")] = None,
    dropout: Annotated[float | None, typer.Option("--dropout", help="Share that is dropped, where a model can.")] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files, too.")] = False,
    backend: Backend = "auto",
    device: Device = "auto",
    threads: Threads = None,
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """Train a model on one rank or many, and see where the time goes."""
    from paceline.training.settings import TrainSettings

    typed = TrainSettings(
        model=model, data=data, ranks=_read_rank_count(ranks), backend=backend, device=device, threads=threads,
        epochs=epochs, batch_size=batch_size, global_batch_size=global_batch_size, accumulate=accumulate, tail=tail,
        precision=precision, compile=compile, clip=clip, optimizer=optimizer, lr=lr, momentum=momentum,
        weight_decay=weight_decay, schedule=schedule, lr_warmup=lr_warmup, wrapper=wrapper,
        sync_batchnorm=sync_batchnorm, plan=None if plan is None else str(plan), profile=profile,
        save_every=save_every, keep=keep, seed=seed, samples=samples, context=tokens, tokenizer=tokenizer,
        augment=augment, channels=None if channels is None else parse_counts(channels, "--channels"), hidden=hidden,
        dropout=dropout, tensorboard=tensorboard,
    )  # fmt: skip
    code = _resume(context, typed, resume, json) if resume is not None else _start(typed, out, json)
    raise typer.Exit(code)


def _read_rank_count(ranks: str | None) -> int:
    from paceline.runtime.environment import is_launched, read_place

    if ranks is None:
        return read_place().world_size if is_launched() else 1
    counts = parse_counts(ranks, "--ranks")
    if len(counts) != 1:
        raise ConfigError(f"--ranks {ranks}: training takes one number of ranks")
    if is_launched() and read_place().world_size not in (1, counts[0]):
        raise ConfigError(
            f"--ranks {ranks} in a launched world of {read_place().world_size}: leave out --ranks, or launch as many"
        )
    return counts[0]


def _check(settings: TrainSettings) -> None:
    """Everything that can be refused before a rank starts."""
    from paceline.training.requests import check_requests

    settings.check()
    check_requests(settings)


def _start(settings: TrainSettings, out: Path, json: bool) -> int:
    from paceline.cli.training import run_training, save_config
    from paceline.records.store import RunFolder
    from paceline.runtime.environment import is_launched, read_place

    _check(settings)
    if is_launched() and read_place().rank > 0:
        RunFolder.check(out)
        return _code(run_training(settings, None, False))
    with RunFolder.create(out, "train") as folder:
        save_config(folder, settings)
        result = run_training(settings, folder.path, False)
        return _finish(settings, folder, result, json)


def _resume(context: typer.Context, typed: TrainSettings, run: Path, json: bool) -> int:
    from paceline.cli.training import load_config, run_training
    from paceline.records.store import RunFolder
    from paceline.runtime.environment import is_launched, read_place

    settings = _change(load_config(run), typed, context)
    _check(settings)
    result = run_training(settings, run, True)
    if is_launched() and read_place().rank > 0:
        return _code(result)
    return _finish(settings, RunFolder(run), result, json)


def _change(saved: TrainSettings, typed: TrainSettings, context: typer.Context) -> TrainSettings:
    """The run's own settings with what was typed beside --resume, where that may change."""
    changes: dict[str, Any] = {}
    for name in context.params:
        field = {"tokens": "context"}.get(name, name)
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or not hasattr(typed, field):
            continue
        value = getattr(typed, field)
        if field not in _CHANGEABLE and value != getattr(saved, field):
            flag = f"--{field.replace('_', '-')}"
            raise ConfigError(
                f"{flag} {value} beside --resume: the run was started with {getattr(saved, field)}, and another value "
                "would make it another run; leave it out, or start anew"
            )
        changes[field] = value
    from paceline.runtime.environment import is_launched

    if "ranks" not in changes and is_launched():
        changes["ranks"] = typed.ranks
    settings = dataclasses.replace(saved, **changes)
    if changes.get("ranks", saved.ranks) != saved.ranks:
        # The global batch stays what it was; how it is shared out follows.
        settings = dataclasses.replace(
            settings,
            global_batch_size=saved.batches.global_batch_size,
            batch_size=changes.get("batch_size"),
            accumulate=changes.get("accumulate"),
        )
    return settings


def _code(result: TrainResult) -> int:
    return 128 + result.signal if result.signal else 0


def _finish(settings: TrainSettings, folder: RunFolder, result: TrainResult, json: bool) -> int:
    """Tables and the picture into the run's folder, and what a person wants to read."""
    from paceline.cli.session import describe_machine, print_json, stderr, stdout
    from paceline.records.epochs import summarize_epochs
    from paceline.report import plots, tables
    from paceline.report.training import epoch_row, epoch_table, plot_training
    from paceline.training.metrics import load_metrics

    rows = load_metrics(folder.path / "metrics.jsonl")
    epochs = summarize_epochs(rows)
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
            }
        )
    else:
        stdout().print(tables.render_terminal(epoch_table, epochs, "", stdout().width))
    if result.signal:
        stderr().print(
            f"paceline: stopped after step {result.step}, which is kept; go on with "
            f"paceline train --resume {folder.path}"
        )
        return _code(result)
    title = f"{settings.model} on {settings.data.split(':')[0]}, {settings.ranks} ranks ({settings.wrapper})"
    figure = plot_training(rows, title, describe_machine())
    for name, content in (
        ("table.csv", tables.render_csv([epoch_row(epoch) for epoch in epochs])),
        ("table.md", tables.render_markdown(epoch_table, epochs)),
        ("training.png", plots.render_png(figure)),
        ("training.svg", plots.render_svg(figure)),
    ):
        (folder.path / name).unlink(missing_ok=True)  # a run that went on has more to show
        folder.write(name, content)
    if not json:
        stdout().print(f"run: {folder.path}")
    return 0
