"""`paceline train`: what was typed becomes the arguments of `paceline.train`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

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
    read_drops,
    read_given,
    read_one,
    takes_job,
)
from paceline.cli.options import JOB, LEARNING, MEASUREMENT, MODEL, OUTPUT, Json, Out, Wide, print_result
from paceline.training.schedules import parse_growths
from paceline.units import parse_counts


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
            "--batch-growth",
            help="SHARE:FACTOR,...: from that share of the run on, FACTOR times the batch.",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    grow: Annotated[
        str,
        typer.Option(
            "--grow",
            help="What grows on a rank: accumulate (more micro-batches) or batch-size.",
            rich_help_panel=LEARNING,
        ),
    ] = "accumulate",
    tail: Tail = "keep",
    clip: Annotated[
        float | None, typer.Option("--clip", help="Largest norm of the gradients.", rich_help_panel=LEARNING)
    ] = None,
    lr: Lr = 0.05,
    momentum: Momentum = 0.9,
    trust_coefficient: Annotated[
        float | None,
        typer.Option(
            "--trust-coefficient", help="Of lars: a layer's step, as a share of its weights.", rich_help_panel=LEARNING
        ),
    ] = None,
    weight_decay: WeightDecay = 0.0,
    schedule: ScheduleName = "constant",
    lr_warmup: Annotated[
        int, typer.Option("--lr-warmup", help="Steps in which the learning rate climbs.", rich_help_panel=LEARNING)
    ] = 0,
    lr_drops: LrDrops = None,
    ghost_batchnorm: Annotated[
        int | None, typer.Option("--ghost-batchnorm", help="BatchNorm over N samples at a time.", rich_help_panel=MODEL)
    ] = None,
    label_smoothing: Annotated[
        float,
        typer.Option(
            "--label-smoothing", help="Share of a target that is spread over all classes.", rich_help_panel=LEARNING
        ),
    ] = 0.0,
    augment: Augment = None,
    cutout: Cutout = 0,
    test_samples: TestSamples = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile", help="Time forward, backward and optimizer of each step.", rich_help_panel=MEASUREMENT
        ),
    ] = False,
    resume: Resume = None,
    save_every: Annotated[
        str,
        typer.Option(
            "--save-every", help="When a checkpoint is due: epoch, 10s, 5min or 100steps", rich_help_panel=OUTPUT
        ),
    ] = "60s",
    keep: Annotated[int, typer.Option("--keep", help="How many checkpoints are kept.", rich_help_panel=OUTPUT)] = 3,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write event files for TensorBoard, too.", rich_help_panel=OUTPUT)
    ] = False,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Train a model on one rank or many, and see where the time goes."""
    from paceline.verbs.train import train as run

    given = {
        name: context_.params[name] for name in read_given(context_) if name not in ("resume", "out", "json", "wide")
    }
    for name, read in _READERS.items():
        if name in given:
            given[name] = read(given[name])
    into = out if resume is None or "out" in read_given(context_) else None
    result = run(resume=resume, out=into, progress=True, **given)
    raise typer.Exit(print_result(result, json, wide))


def _read_channels(text: str) -> tuple[int, ...]:
    """One by one: a list of counts has no repeats, and two layers may well be alike."""
    return tuple(parse_counts(part, "--channels")[0] for part in text.split(","))


# How an option that is typed as text becomes a setting.
_READERS: dict[str, Callable[[str], Any]] = {
    "ranks": lambda text: read_one(text, "--ranks"),
    "batch_size": lambda text: read_one(text, "--batch-size"),
    "channels": _read_channels,
    "plan": str,
    "batch_growth": parse_growths,
    "lr_drops": read_drops,
}
