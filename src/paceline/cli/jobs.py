"""The options that describe a training job, written once for every verb that trains or profiles one.

What a verb does with a job is in its own module.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from paceline.cli.options import MODEL_HELP, WRAPPER_HELP, Backend, BatchSize, Device, Ranks, Threads
from paceline.errors import ConfigError
from paceline.units import parse_counts

if TYPE_CHECKING:
    from paceline.training.settings import TrainSettings

__all__ = [
    "build_bare_settings",
    "build_settings",
    "check_counts",
    "check_job",
    "list_defaults",
    "read_one",
    "read_world",
    "takes_job",
]

Model = Annotated[str, typer.Option("--model", help=MODEL_HELP)]
Data = Annotated[
    str, typer.Option("--data", help="synthetic, or mnist, fashion-mnist, cifar10, mrpc, text with :PATH of the files.")
]
Accumulate = Annotated[
    int | None, typer.Option("--accumulate", help="Micro-batches per step; gradients travel with the last.")
]
Precision = Annotated[str, typer.Option("--precision", help="fp32, bf16 or fp16 (by autocast)")]
Compile = Annotated[bool, typer.Option("--compile", help="Compile the model, block by block.")]
Optimizer = Annotated[str, typer.Option("--optimizer", help="sgd, adamw, lars or lamb")]
Wrapper = Annotated[str, typer.Option("--wrapper", help=WRAPPER_HELP)]
SyncBatchNorm = Annotated[bool, typer.Option("--sync-batchnorm", help="BatchNorm over the whole global batch.")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="Buckets from a file of a plan.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the model, the order of the data, and dropout.")]
NumSamples = Annotated[
    int | None, typer.Option("--samples", help="Train on the first so many; how many to make if synthetic.")
]
Context = Annotated[int | None, typer.Option("--context", help="Tokens per sequence.")]
Tokenizer = Annotated[str, typer.Option("--tokenizer", help="auto (the model's own, or bytes), bytes, or a folder")]
Channels = Annotated[str | None, typer.Option("--channels", help="Channels of the cnn's convolutions: 32 64 128")]
Hidden = Annotated[int | None, typer.Option("--hidden", help="Width of the hidden layer.")]
Dropout = Annotated[float | None, typer.Option("--dropout", help="Share that is dropped, where a model can.")]


def _job(
    model: Model = "cnn",
    data: Data = "synthetic",
    ranks: Ranks = None,
    batch_size: BatchSize = None,
    accumulate: Accumulate = None,
    precision: Precision = "fp32",
    compile: Compile = False,
    optimizer: Optimizer = "sgd",
    wrapper: Wrapper = "paceline",
    sync_batchnorm: SyncBatchNorm = False,
    plan: PlanFile = None,
    seed: Seed = 1,
    samples: NumSamples = None,
    context: Context = None,
    tokenizer: Tokenizer = "auto",
    channels: Channels = None,
    hidden: Hidden = None,
    dropout: Dropout = None,
    backend: Backend = "auto",
    device: Device = "auto",
    threads: Threads = None,
) -> None:
    """The options of a job: only the signature counts."""


def list_defaults() -> dict[str, Any]:
    """A job of which nothing was typed."""
    return {name: parameter.default for name, parameter in inspect.signature(_job).parameters.items()}


def takes_job(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of a job, which it gets as the dictionary `job`, beside the options of its own."""
    shared = inspect.signature(_job).parameters
    own = [parameter for name, parameter in inspect.signature(verb).parameters.items() if name != "job"]

    @functools.wraps(verb)
    def run(**values: Any) -> None:
        job = {name: values.pop(name) for name in shared}
        verb(job=job, **values)

    hints = get_type_hints(_job, include_extras=True) | get_type_hints(verb, include_extras=True)
    hints = {name: hint for name, hint in hints.items() if name not in ("job", "return")}
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in (*shared.values(), *own)
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = hints
    del run.__wrapped__  # type: ignore[attr-defined]  # or the signature of the verb itself would be read
    return run


def read_one(text: str | None, flag: str) -> int | None:
    """The one number that was typed, or None."""
    if text is None:
        return None
    counts = parse_counts(text, flag)
    if len(counts) != 1:
        raise ConfigError(f"{flag} {text}: one number is needed here")
    return counts[0]


def read_world(ranks: str | None, default: int) -> tuple[int, ...]:
    """The numbers of ranks that were asked for, and that the launched world, if there is one, can be."""
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

    values = dict(job) | more
    values["ranks"], values["batch_size"] = ranks, batch_size
    if job["channels"] is not None:
        # One by one: a list of counts has no repeats, and two layers may well be alike.
        values["channels"] = tuple(parse_counts(part, "--channels")[0] for part in job["channels"].split(","))
    if job["plan"] is not None:
        values["plan"] = str(job["plan"])
    return TrainSettings(**values)


def build_bare_settings(job: dict[str, Any]) -> TrainSettings:
    """The job as one rank computes it by itself; refuses what would then change nothing."""
    if (launched := read_world(None, 1)[0]) > 1:
        raise ConfigError(f"layers are timed on one rank, and {launched} were launched: run it without a launcher")
    if job["wrapper"] not in ("paceline", "none") or job["plan"] is not None:
        flag, value = ("--plan", job["plan"]) if job["plan"] is not None else ("--wrapper", job["wrapper"])
        raise ConfigError(f"{flag} {value}: layers are timed on the bare model, which sends nothing; leave it out")
    if job["accumulate"] not in (None, 1):
        raise ConfigError(f"--accumulate {job['accumulate']}: layers are timed over one micro-batch; leave it out")
    return build_settings(job, 1, read_one(job["batch_size"], "--batch-size"), wrapper="none")


def check_counts(**counts: int | None) -> None:
    """Refuse numbers of repetitions that cannot be, by the names of their flags; None was not asked for."""
    for name, count in counts.items():
        least = 0 if name == "warmup" else 1
        if count is not None and count < least:
            raise ConfigError(f"--{name} {count}: at least {least} is needed")


def check_job(settings: TrainSettings) -> None:
    """Everything that can be refused before a rank starts."""
    from paceline.training.settings import build_model_options, check_requests
    from paceline.workloads.registry import default_form

    settings.check()
    check_requests(settings)
    if settings.context is not None and settings.data == "synthetic":
        kind = default_form(settings.model, build_model_options(settings)).kind
        if kind not in ("pairs", "tokens"):
            raise ConfigError(f"--context {settings.context}: {settings.model} is trained on {kind} here; leave it out")
