"""The options that describe a training job and how it learns, and how what was typed becomes settings.

They are written once, for every command that trains, profiles, tunes or scales a job.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from paceline.cli.options import DATA, JOB, LEARNING, MODEL, MODEL_HELP, OUTPUT, PANELS, Device, Threads
from paceline.errors import ConfigError
from paceline.machine import canonical_backend
from paceline.units import parse_counts

if TYPE_CHECKING:
    from paceline.training.settings import TrainSettings

Accumulate = Annotated[
    int | None,
    typer.Option("--accumulate", help="Micro-batches per step; gradients travel with the last.", rich_help_panel=JOB),
]

# -- learning: options that a command lists itself -------------------------------------------------------------------

Epochs = Annotated[int, typer.Option("--epochs", help="How many times each sample is seen.", rich_help_panel=LEARNING)]
Lr = Annotated[float, typer.Option("--lr", help="Learning rate (its peak).", rich_help_panel=LEARNING)]
Momentum = Annotated[
    float, typer.Option("--momentum", help="Momentum of sgd (Nesterov) or lars.", rich_help_panel=LEARNING)
]
WeightDecay = Annotated[
    float,
    typer.Option("--weight-decay", help="Of matrices and filters, not of biases and norms.", rich_help_panel=LEARNING),
]
ScheduleName = Annotated[
    str,
    typer.Option(
        "--schedule", help="constant, cosine or linear (to 0 at the end), piecewise", rich_help_panel=LEARNING
    ),
]
LrDrops = Annotated[
    str | None,
    typer.Option(
        "--lr-drops", help="Where piecewise divides by 10, as shares of the run: 0.5,0.75", rich_help_panel=LEARNING
    ),
]
Augment = Annotated[
    bool | None,
    typer.Option("--augment/--no-augment", help="Crop and flip images. Default: CIFAR-10 only.", rich_help_panel=DATA),
]
Cutout = Annotated[
    int,
    typer.Option("--cutout", help="Side of the square hidden in augmented images, in pixels.", rich_help_panel=DATA),
]
TestSamples = Annotated[
    int | None,
    typer.Option("--test-samples", help="Evaluate on the first N samples. Default: all.", rich_help_panel=DATA),
]
Tail = Annotated[
    str,
    typer.Option(
        "--tail",
        help="The smaller last batch of an epoch: keep, drop, or pad with first samples.",
        rich_help_panel=DATA,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", help="Resume the interrupted run in this folder.", rich_help_panel=OUTPUT),
]


def _job(
    model: Annotated[str, typer.Option("--model", help=MODEL_HELP, rich_help_panel=JOB)] = "cnn",
    data: Annotated[
        str,
        typer.Option(
            "--data",
            help="synthetic, or mnist, fashion-mnist, cifar10, mrpc, text with :PATH of the files.",
            rich_help_panel=JOB,
        ),
    ] = "synthetic",
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", help="Number of ranks. Default: the launched world's, else 2.", rich_help_panel=JOB),
    ] = None,
    batch_size: Annotated[
        str | None,
        typer.Option("--batch-size", help="Samples per rank in a micro-batch. Default: 32.", rich_help_panel=JOB),
    ] = None,
    accumulate: Accumulate = None,
    precision: Annotated[
        str, typer.Option("--precision", help="fp32, bf16 or fp16 (autocast)", rich_help_panel=JOB)
    ] = "fp32",
    wrapper: Annotated[
        str, typer.Option("--wrapper", help="paceline, torch, none or dp", rich_help_panel=JOB)
    ] = "paceline",
    backend: Annotated[
        str, typer.Option("--backend", help="auto, gloo, shm (shared memory) or nccl", rich_help_panel=JOB)
    ] = "auto",
    device: Device = "auto",
    threads: Threads = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the model, block by block.", rich_help_panel=JOB)
    ] = False,
    sync_batchnorm: Annotated[
        bool, typer.Option("--sync-batchnorm", help="BatchNorm over the whole global batch.", rich_help_panel=JOB)
    ] = False,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Buckets from this file, which `tune` writes.", rich_help_panel=JOB)
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Of the model, the order of the data, and dropout.", rich_help_panel=JOB)
    ] = 1,
    samples: Annotated[
        int | None,
        typer.Option("--samples", help="Use the first N samples; synthetic: make N.", rich_help_panel=DATA),
    ] = None,
    context: Annotated[int | None, typer.Option("--context", help="Tokens per sequence.", rich_help_panel=DATA)] = None,
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", help="auto (the model's own, or bytes), bytes, or a folder", rich_help_panel=DATA),
    ] = "auto",
    channels: Annotated[
        str | None,
        typer.Option("--channels", help="Channels of the cnn's convolutions: 32 64 128", rich_help_panel=MODEL),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option("--hidden", help="Width of the hidden layer.", rich_help_panel=MODEL)
    ] = None,
    dropout: Annotated[
        float | None, typer.Option("--dropout", help="Dropout rate, where a model has one.", rich_help_panel=MODEL)
    ] = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help="sgd, adamw, lars or lamb", rich_help_panel=LEARNING)
    ] = "sgd",
) -> None:
    """The options of a job, common ones first: only the signature counts."""


def list_defaults() -> dict[str, Any]:
    """A job with every option at its default."""
    return {name: parameter.default for name, parameter in inspect.signature(_job).parameters.items()}


def takes_job(
    verb: Callable[..., None] | None = None,
    *,
    leave_out: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    help: Mapping[str, str] | None = None,
) -> Callable[..., Any]:
    """Give a verb the options of a job, which it gets as the dictionary `job`, with the options of its own.

    `leave_out`: options that this command does not have; `job` holds their defaults. `defaults` and `help`: what is
    different for this command, by the option's name (`batch_size`). Options are shown panel by panel.
    """
    if verb is None:
        return functools.partial(takes_job, leave_out=leave_out, defaults=defaults, help=help)
    function, values, texts = verb, list_defaults() | dict(defaults or {}), dict(help or {})
    if unknown := (set(leave_out) | set(values) | set(texts)) - set(list_defaults()):
        raise TypeError(f"no options of a job: {', '.join(sorted(unknown))}")
    hints = get_type_hints(_job, include_extras=True)
    for name, text in texts.items():
        kind, info = get_args(hints[name])
        info = copy.copy(info)
        info.help = text
        hints[name] = Annotated[kind, info]
    shared = [
        parameter.replace(default=values[name])
        for name, parameter in inspect.signature(_job).parameters.items()
        if name not in leave_out
    ]
    own = [parameter for name, parameter in inspect.signature(function).parameters.items() if name != "job"]

    @functools.wraps(function)
    def run(**given: Any) -> None:
        job = values | {parameter.name: given.pop(parameter.name) for parameter in shared}
        function(job=job, **given)

    hints |= get_type_hints(function, include_extras=True)
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in (*shared, *own)
    ]
    parameters.sort(key=lambda parameter: _find_panel(parameter.annotation))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # type: ignore[attr-defined]  # or the signature of the verb itself would be read
    return run


def _find_panel(hint: Any) -> int:
    info = get_args(hint)[1] if get_origin(hint) is Annotated else None
    panel = info.rich_help_panel if isinstance(info, OptionInfo) else None
    return PANELS.index(panel) if panel in PANELS else 0


# -- what was typed ----------------------------------------------------------------------------------------------------


def read_given(context: typer.Context) -> list[str]:
    """The names of the options that were typed, rather than left at their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def read_drops(text: str | None) -> tuple[float, ...]:
    try:
        return () if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"--lr-drops {text!r} is not understood: use shares of the run, such as 0.5,0.75") from None


def read_one(text: str | None, flag: str) -> int | None:
    """The one number that was typed, or None."""
    if text is None:
        return None
    counts = parse_counts(text, flag)
    if len(counts) != 1:
        raise ConfigError(f"{flag} {text}: one number is needed here")
    return counts[0]


def read_world(ranks: str | None, default: int) -> tuple[int, ...]:
    """The numbers of ranks that were typed and that the launched world, if there is one, can be."""
    from paceline.runtime.environment import is_launched, read_place

    launched = read_place().world_size if is_launched() else 1
    if ranks is None:
        return (launched if is_launched() else default,)
    counts = parse_counts(ranks, "--ranks")
    if launched > 1 and counts != (launched,):
        raise ConfigError(f"--ranks {ranks} in a launched world of {launched}: leave out --ranks, or launch as many")
    return counts


def build_settings(job: dict[str, Any], ranks: int, batch_size: int | None, **more: Any) -> TrainSettings:
    """What was typed, as settings."""
    from paceline.training.settings import TrainSettings

    values = dict(job) | {"backend": canonical_backend(job["backend"])} | more
    values["ranks"], values["batch_size"] = ranks, batch_size
    if job["channels"] is not None:
        # One by one: a list of counts has no repeats, and two layers may well be alike.
        values["channels"] = tuple(parse_counts(part, "--channels")[0] for part in job["channels"].split(","))
    if job["plan"] is not None:
        values["plan"] = str(job["plan"])
    return TrainSettings(**values)


def build_bare_settings(job: dict[str, Any]) -> TrainSettings:
    """The job as one rank computes it alone; refuses what would then change nothing."""
    if (launched := read_world(None, 1)[0]) > 1:
        raise ConfigError(f"layers are timed on one rank, and {launched} were launched: run it without a launcher")
    if job["wrapper"] not in ("paceline", "none") or job["plan"] is not None:
        flag, value = ("--plan", job["plan"]) if job["plan"] is not None else ("--wrapper", job["wrapper"])
        raise ConfigError(f"{flag} {value}: layers are timed on the bare model, which sends nothing; leave it out")
    if job["accumulate"] not in (None, 1):
        raise ConfigError(f"--accumulate {job['accumulate']}: layers are timed over one micro-batch; leave it out")
    return build_settings(job, 1, read_one(job["batch_size"], "--batch-size"), wrapper="none")


def check_counts(**counts: int | None) -> None:
    """Refuse numbers of repetitions that cannot be, by the names of their flags; None was not given."""
    for name, count in counts.items():
        least = 0 if name == "warmup" else 1
        if count is not None and count < least:
            raise ConfigError(f"--{name} {count}: at least {least} is needed")
