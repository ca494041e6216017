"""The options of learning itself (rates, epochs, augmentation), written once for every verb that trains to an end."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.errors import ConfigError

__all__ = [
    "Augment",
    "Cutout",
    "Epochs",
    "Lr",
    "LrDrops",
    "Momentum",
    "ScheduleName",
    "Tail",
    "TestSamples",
    "WeightDecay",
    "GLOBAL_BATCH_HELP",
    "RESUME_HELP",
    "read_asked",
    "read_drops",
]

GLOBAL_BATCH_HELP = "Samples of one step over all ranks and micro-batches; a study takes several: 1024,8192"
RESUME_HELP = "Go on with the run in this folder: training from its newest checkpoint, a study with its next cell."
Epochs = Annotated[int, typer.Option("--epochs", help="How often each sample is seen.")]
Lr = Annotated[float, typer.Option("--lr", help="Learning rate (its peak).")]
Momentum = Annotated[float, typer.Option("--momentum", help="Of sgd, Nesterov's, or of lars.")]
WeightDecay = Annotated[float, typer.Option("--weight-decay", help="Of matrices and filters alone.")]
ScheduleName = Annotated[
    str, typer.Option("--schedule", help="constant, cosine or linear (to 0 at the end), piecewise")
]
LrDrops = Annotated[
    str | None, typer.Option("--lr-drops", help="Where piecewise divides by 10, as shares of the run: 0.5,0.75")
]
Augment = Annotated[
    bool | None, typer.Option("--augment/--no-augment", help="Crop and flip images. Default: CIFAR-10 alone.")
]
Cutout = Annotated[
    int, typer.Option("--cutout", help="Side of the square that is hidden in augmented images, in pixels.")
]
TestSamples = Annotated[
    int | None, typer.Option("--test-samples", help="Evaluate on the first so many. Default: all of them.")
]
Tail = Annotated[
    str, typer.Option("--tail", help="The last, smaller batch of an epoch: keep, drop, or pad with first samples.")
]


def read_asked(context: typer.Context) -> list[str]:
    """The names of the options that were typed, rather than left at their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def read_drops(text: str | None) -> tuple[float, ...]:
    try:
        return () if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"--lr-drops {text!r} is not understood: use shares of the run, such as 0.5,0.75") from None
