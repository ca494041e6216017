"""`paceline scale`: what was typed, as the arguments of `paceline.scale`."""

from __future__ import annotations

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
from paceline.cli.options import JOB, LEARNING, MEASUREMENT, NETWORK_HELP, Iters, Json, Out, Wide, print_result
from paceline.errors import ConfigError
from paceline.units import parse_counts

app = typer.Typer(help="Does it scale? Batch sizes, ranks, large batches.", no_args_is_help=True)

GlobalBatchSizes = Annotated[
    str | None,
    typer.Option("--global-batch-size", help="Samples of one step over all ranks: 1024,8192", rich_help_panel=JOB),
]
# What may be typed with --resume.
_ALWAYS = ("resume", "json", "wide", "at_once", "runs")
_COUNTS = ("ranks", "batch_size", "global_batch_size", "predict_ranks")


def _read(context: typer.Context, values: dict[str, Any], resume: Path | None) -> dict[str, Any]:
    """What was typed, as arguments of a verb; the verb has the defaults of the rest."""
    given = read_given(context)
    changed = [name for name in given if name not in _ALWAYS]
    if resume is not None and changed:
        raise ConfigError(
            f"--{changed[0].replace('_', '-')} with --resume: a study is resumed as it was started; leave it out",
            code="resume",
        )
    found = {name: value for name, value in values.items() if name in given}
    for name in _COUNTS:
        if name in found:
            found[name] = parse_counts(found[name], f"--{name.replace('_', '-')}")
    if "channels" in found:  # one by one: a list of counts has no repeats, and two layers may be alike
        found["channels"] = tuple(parse_counts(part, "--channels")[0] for part in found["channels"].split(","))
    if "lr_drops" in found:
        found["lr_drops"] = read_drops(found["lr_drops"])
    if "plan" in found:
        found["plan"] = str(found["plan"])
    return found | {"out": None if resume is not None else values["out"], "resume": resume, "progress": True}


@app.command("batch")
@takes_job(
    leave_out=("ranks", "accumulate", "wrapper", "backend", "sync_batchnorm", "plan"),
    help={"batch_size": "Batch sizes: 32,128,512,2048 (the default)"},
)
def batch(
    context_: typer.Context,
    job: dict[str, Any],
    epochs: Epochs = 3,
    resume: Resume = None,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Which batch size keeps one rank busy? Whole epochs at each size: time, samples/s and memory.

    The first epoch is a warm-up.
    """
    from paceline.verbs import scale

    arguments = _read(context_, job | {"epochs": epochs, "out": out}, resume)
    raise typer.Exit(print_result(scale.batch(**arguments), json, wide))


@app.command("ranks")
@takes_job(
    leave_out=("sync_batchnorm", "plan"),
    defaults={"wrapper": "paceline,torch"},
    help={
        "ranks": "Numbers of ranks: 1,2,4. Default: 1,2,4,... up to the cores or GPUs, or to the launched world.",
        "batch_size": "Samples per rank (weak scaling): 8,32 (the default)",
        "wrapper": "paceline, torch or dp; several are compared in turns",
        "backend": "auto, gloo, shm (shared memory) or nccl; several are compared in turns: gloo,shm",
    },
)
def ranks(
    context_: typer.Context,
    job: dict[str, Any],
    global_batch_size: GlobalBatchSizes = None,
    network: Annotated[str, typer.Option("--network", help=NETWORK_HELP, rich_help_panel=MEASUREMENT)] = "10gbe,100gbe",
    predict_ranks: Annotated[
        str,
        typer.Option(
            "--predict-ranks", help="Predict the curve for these numbers of ranks: 64,1024", rich_help_panel=MEASUREMENT
        ),
    ] = "64,1024",
    iters: Iters = None,
    resume: Resume = None,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Do more ranks help? Weak and strong scaling of all wrappers: speed-up, communication, bandwidth, prediction."""
    from paceline.verbs import scale

    own = {
        "global_batch_size": global_batch_size, "network": network, "predict_ranks": predict_ranks, "iters": iters,
        "out": out,
    }  # fmt: skip
    raise typer.Exit(print_result(scale.ranks(**_read(context_, job | own, resume)), json, wide))


@app.command("large-batch")
@takes_job(
    leave_out=("accumulate",),
    help={
        "model": "cnn, resnet18, gpt2-tiny, ..., hf:NAME, or FILE.py:FUNCTION. Default: a small cnn.",
        "ranks": "Number of ranks. Default: the launched world's, else 1.",
        "batch_size": "What a rank computes at once; larger batches accumulate. Default: 512.",
    },
)
def large_batch(
    context_: typer.Context,
    job: dict[str, Any],
    base_batch_size: Annotated[
        int,
        typer.Option(
            "--base-batch-size", help="The baseline: the global batch that --lr is right for.", rich_help_panel=JOB
        ),
    ] = 16,
    global_batch_size: GlobalBatchSizes = None,
    recipes: Annotated[
        str | None,
        typer.Option(
            "--recipes",
            help="none, or switches joined by +, each with a number if wanted: lars:0.2+warmup",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="Runs of each recipe.", rich_help_panel=MEASUREMENT)] = 3,
    epochs: Epochs = 6,
    updates: Annotated[
        int | None,
        typer.Option(
            "--updates",
            help="Also runs of this many updates. Default: twice those of the largest batch; 0: none.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    lr: Lr = 0.005,
    momentum: Momentum = 0.9,
    weight_decay: WeightDecay = 0.0,
    schedule: ScheduleName = "cosine",
    lr_drops: LrDrops = None,
    tail: Tail = "keep",
    augment: Augment = None,
    cutout: Cutout = 0,
    test_samples: TestSamples = None,
    evaluations: Annotated[
        int, typer.Option("--evaluations", help="Evaluations during a run.", rich_help_panel=MEASUREMENT)
    ] = 6,
    at_once: Annotated[
        int,
        typer.Option(
            "--at-once",
            help="Runs that share the machine; accuracy does not depend on it.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = 1,
    resume: Resume = None,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """What does a large global batch cost in test accuracy, and which recipe repairs it? Several seeds each."""
    from paceline.verbs import scale

    own = {
        "base_batch_size": base_batch_size, "global_batch_size": global_batch_size, "recipes": recipes, "seeds": seeds,
        "epochs": epochs, "updates": updates, "lr": lr, "momentum": momentum, "weight_decay": weight_decay,
        "schedule": schedule, "lr_drops": lr_drops, "tail": tail, "augment": augment, "cutout": cutout,
        "test_samples": test_samples, "evaluations": evaluations, "at_once": at_once, "out": out,
    }  # fmt: skip
    arguments = _read(context_, job | own, resume)
    for name in ("ranks", "batch_size"):
        if name in arguments:
            arguments[name] = read_one(job[name], f"--{name.replace('_', '-')}")
    raise typer.Exit(print_result(scale.large_batch(**arguments), json, wide))


@app.command("report")
def report(
    context_: typer.Context,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Finished runs of scale batch, ranks or large-batch. Default: measure all three."),
    ] = None,
    resume: Resume = None,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """The whole study on one page: tables, figures and findings, from finished runs or measured here with defaults."""
    from paceline.verbs import scale

    arguments = _read(context_, {"runs": runs or (), "out": out}, resume)
    raise typer.Exit(print_result(scale.report(**arguments), json, wide))
