"""`paceline scale`: what was typed becomes the settings of a study. Running and reporting it is in `scale_studies`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline import machine
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
    list_defaults,
    read_drops,
    read_given,
    takes_job,
)
from paceline.cli.options import JOB, NETWORK_HELP, Iters, Json, Out, split_names
from paceline.errors import ConfigError
from paceline.units import parse_counts

if TYPE_CHECKING:
    from paceline.cli.studies import StudyRun
    from paceline.measure.large_batch_settings import LargeBatchSettings
    from paceline.measure.scale_settings import BatchSweepSettings, ScaleSettings

__all__ = ["app"]

app = typer.Typer(help="Does it scale? Batch size, ranks, large batches.", no_args_is_help=True)

GlobalBatchSizes = Annotated[
    str | None,
    typer.Option("--global-batch-size", help="Samples of one step over all ranks: 1024,8192", rich_help_panel=JOB),
]
# What a study that goes on may be told anew.
_ALWAYS = ("resume", "json", "at_once")
_BATCH_SIZES = (32, 128, 512, 2048)
_EPOCHS = 3
_RANK_BATCH_SIZES = (8, 32)
_PREDICTED = "64,1024"
# A large-batch study of which nothing was typed.
_BASE_BATCH_SIZE, _SEEDS, _TRAINED_EPOCHS, _LR, _EVALUATIONS = 16, 3, 6, 0.005, 6
_RECIPES = "none,sqrt,linear,linear+warmup,linear+warmup+smoothing,lars+warmup,lamb+warmup,grow"
_NORM_RECIPES = ",linear+warmup+ghost"


def _check_resume(context: typer.Context, resume: Path | None) -> list[str]:
    asked = read_given(context)
    changed = [name for name in asked if name not in _ALWAYS]
    if resume is not None and changed:
        raise ConfigError(
            f"--{changed[0].replace('_', '-')} beside --resume: a study goes on as it was begun; leave it out"
        )
    return asked


@app.command("batch")
@takes_job
def batch(
    context_: typer.Context,
    job: dict[str, Any],
    epochs: Epochs = _EPOCHS,
    resume: Resume = None,
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """Time per epoch, samples/s and memory on one rank over batch sizes; the first epoch is a warm-up."""
    from paceline.cli import scale_studies as studies

    asked = _check_resume(context_, resume)
    _refuse_launched("batch sizes are compared on one rank")
    settings = studies.load_batch(resume) if resume is not None else build_batch(job, epochs, asked)
    with _opened("scale batch", settings, out, resume, json) as run:
        studies.finish(run, lambda: studies.make_batch(run, settings), json)


def _refuse_options(asked: Sequence[str], names: Sequence[str], why: str) -> None:
    """An option that would change nothing is refused, not passed over."""
    typed = next((name for name in names if name in asked), None)
    if typed is not None:
        raise ConfigError(f"--{typed.replace('_', '-')}: {why}; leave it out")


def build_batch(job: dict[str, Any], epochs: int = _EPOCHS, asked: Sequence[str] = ()) -> BatchSweepSettings:
    from paceline.measure.scale_settings import BatchSweepSettings

    _refuse_options(
        asked, ("wrapper", "backend", "plan", "sync_batchnorm", "accumulate"), "one rank computes its batch by itself"
    )
    sizes = parse_counts(job["batch_size"], "--batch-size") if job["batch_size"] else _BATCH_SIZES
    if job["ranks"] not in (None, "1"):
        raise ConfigError(f"--ranks {job['ranks']}: batch sizes are compared on one rank; see `scale ranks`")
    settings = BatchSweepSettings(
        job=build_settings(job, 1, sizes[0], wrapper="none", plan=None, device=_choose_device(job["device"])),
        batch_sizes=sizes,
        epochs=epochs,
    )
    settings.check()
    for size in sizes:
        check_job(dataclasses.replace(settings.job, batch_size=size))
    return settings


def _refuse_launched(why: str) -> None:
    from paceline.runtime.environment import is_launched, read_place

    if is_launched() and read_place().world_size > 1:
        raise ConfigError(f"in a launched world of {read_place().world_size}: {why}; start it without torchrun")


@app.command("ranks")
@takes_job
def ranks(
    context_: typer.Context,
    job: dict[str, Any],
    global_batch_size: GlobalBatchSizes = None,
    network: Annotated[str, typer.Option("--network", help=NETWORK_HELP)] = "10gbe,100gbe",
    predict_ranks: Annotated[
        str, typer.Option("--predict-ranks", help="Continue the curve to so many ranks, simulated: 64,1024")
    ] = _PREDICTED,
    iters: Iters = None,
    resume: Resume = None,
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """Weak and strong scaling, wrappers side by side: speed-up, efficiency, communication, bandwidth, prediction."""
    from paceline.cli import scale_studies as studies

    asked = _check_resume(context_, resume)
    if resume is not None:
        settings, beyond = studies.load_ranks(resume)
    else:
        settings = build_ranks(job, asked, global_batch_size, iters)
        beyond = studies.Beyond(network, predict_ranks)
        beyond.check()
    with _opened("scale ranks", settings, out, resume, json, dataclasses.asdict(beyond)) as run:
        studies.finish(run, lambda: studies.make_ranks(run, settings), json)


def build_ranks(
    job: dict[str, Any], asked: Sequence[str] = (), global_batch_size: str | None = None, iters: int | None = None
) -> ScaleSettings:
    from paceline.measure.scale_settings import Contestant, ScaleSettings
    from paceline.runtime.environment import is_launched, read_place

    launched = read_place().world_size if is_launched() else None
    counts = _choose_counts(job["ranks"], launched)
    sizes = parse_counts(job["batch_size"], "--batch-size") if job["batch_size"] else _RANK_BATCH_SIZES
    device = _choose_device(job["device"])
    wrappers = split_names(job["wrapper"]) if "wrapper" in asked else ("paceline", "torch")
    backends = split_names(job["backend"]) if job["backend"] != "auto" else _choose_backends(device, max(counts))
    contestants = [Contestant(w, b) for b in backends for w in wrappers if w != "dp"]
    contestants += [Contestant("dp", backends[0])] if "dp" in wrappers else []
    if global_batch_size:
        strong = parse_counts(global_batch_size, "--global-batch-size")
    else:  # the least from twice the largest batch on that all of them can share
        shares = math.lcm(*counts) * (job["accumulate"] or 1)
        strong = (shares * -(-2 * max(sizes) // shares),)
    # As many threads for a rank alone as for one of many: a rank is a rank, with what belongs to one.
    threads = job["threads"] or max(1, machine.count_cores() // max(counts))
    _refuse_options(asked, ("plan",), "wrappers are compared as they are")
    _refuse_options(asked, ("sync_batchnorm",), "ranks that are not part of a turn would be waited for")
    train = build_settings(
        job, 1, sizes[0], wrapper="none", backend="gloo", device=device, threads=threads, plan=None,
        samples=job["samples"] or _count_samples(job, max(max(sizes) * max(counts), *strong, 0)),
    )  # fmt: skip
    settings = ScaleSettings(
        job=train, ranks=counts, contestants=tuple(contestants), batch_sizes=sizes, global_batch_sizes=strong,
        iters=iters,
    )  # fmt: skip
    settings.check()
    check_job(train)
    return settings


def _count_samples(job: dict[str, Any], least: int) -> int | None:
    """Synthetic samples are made as many as one global batch needs; a data set has as many as it has."""
    accumulate = job["accumulate"] or 1
    return max(2048, least * accumulate) if job["data"].startswith("synthetic") else None


def _choose_counts(text: str | None, launched: int | None) -> tuple[int, ...]:
    """1, 2, 4, ... up to the cores (or GPUs), or to the launched world; one rank is always there to compare with."""
    most = launched or max(2, machine.count_gpus() or machine.count_cores())
    counts = parse_counts(text, "--ranks") if text else tuple(2**k for k in range(most.bit_length()))
    if launched and max(counts) > launched:
        raise ConfigError(f"--ranks {text} in a launched world of {launched}: use at most that many")
    return tuple(sorted({1, *counts}))


def _choose_device(device: str) -> str:
    return device if device != "auto" else "cuda" if machine.count_gpus() else "cpu"


def _choose_backends(device: str, most: int) -> tuple[str, ...]:
    if device == "cuda":
        return ("nccl",) if machine.count_gpus() >= most else ("gloo",)
    return ("gloo", "shm")


@app.command("large-batch")
@takes_job
def large_batch(
    context_: typer.Context,
    job: dict[str, Any],
    base_batch_size: Annotated[
        int, typer.Option("--base-batch-size", help="The global batch that --lr was found for: the baseline.")
    ] = _BASE_BATCH_SIZE,
    global_batch_size: GlobalBatchSizes = None,
    recipes: Annotated[
        str | None,
        typer.Option("--recipes", help="none, and switches joined by +, each perhaps with its number: lars:0.2+warmup"),
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", help="How many runs each recipe gets.")] = _SEEDS,
    epochs: Epochs = _TRAINED_EPOCHS,
    updates: Annotated[
        int | None,
        typer.Option("--updates", help="Also runs of so many updates. Default: twice the largest batch's; 0: none."),
    ] = None,
    lr: Lr = _LR,
    momentum: Momentum = 0.9,
    weight_decay: WeightDecay = 0.0,
    schedule: ScheduleName = "cosine",
    lr_drops: LrDrops = None,
    tail: Tail = "keep",
    augment: Augment = None,
    cutout: Cutout = 0,
    test_samples: TestSamples = None,
    evaluations: Annotated[
        int, typer.Option("--evaluations", help="How often a run is evaluated on its way.")
    ] = _EVALUATIONS,
    at_once: Annotated[int, typer.Option("--at-once", help="Runs that share the machine; accuracy does not mind.")] = 1,
    resume: Resume = None,
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """Test accuracy against global batch size, and what repairs it: recipes one by one, several seeds."""
    from paceline.cli import scale_studies as studies

    asked = _check_resume(context_, resume)
    if at_once < 1:
        raise ConfigError(f"--at-once {at_once}: at least 1 is needed")
    if resume is not None:
        settings = studies.load_large_batch(resume)
    else:
        learning = {
            "epochs": epochs, "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "schedule": schedule,
            "lr_drops": read_drops(lr_drops), "tail": tail, "augment": augment, "cutout": cutout,
            "test_samples": test_samples,
        }  # fmt: skip
        settings = build_large_batch(
            job, asked, learning, base_batch_size, global_batch_size, recipes, seeds, updates, evaluations
        )
    with _opened("scale large-batch", settings, out, resume, json) as run:
        run.at_once = at_once
        studies.finish(run, lambda: studies.make_large_batch(run, settings), json)


def build_large_batch(
    job: dict[str, Any],
    asked: Sequence[str],
    learning: dict[str, Any],
    base_batch_size: int,
    global_batch_size: str | None,
    recipes: str | None,
    num_seeds: int,
    updates: int | None,
    evaluations: int,
) -> LargeBatchSettings:
    from paceline.cli.jobs import read_one, read_world
    from paceline.measure.large_batch_settings import LargeBatchSettings
    from paceline.training.recipes import NO_RECIPE, Recipe

    job = dict(job)
    if not {"model", "channels", "hidden"} & set(asked):
        job |= {"channels": "8,16", "hidden": 64}  # small, so that a first study takes minutes
    if job["data"] == "synthetic" and job["samples"] is None:
        job["samples"] = 1024
    sizes = parse_counts(global_batch_size, "--global-batch-size") if global_batch_size else (16 * base_batch_size,)
    counts = read_world(job["ranks"], 1)
    if len(counts) != 1:
        raise ConfigError(f"--ranks {job['ranks']}: one number of ranks; the study is of batches")
    if job["accumulate"] is not None:
        raise ConfigError("--accumulate follows from the batches here: give --batch-size, what a rank computes at once")
    if num_seeds < 1:
        raise ConfigError(f"--seeds {num_seeds}: at least 1 is needed")
    most = read_one(job["batch_size"], "--batch-size") or 512
    train = build_settings(job, counts[0], None, global_batch_size=base_batch_size, **learning)
    typed = split_names(recipes if recipes is not None else _default_recipes(train))
    names = tuple(dict.fromkeys(Recipe.parse(text).text for text in typed))
    if NO_RECIPE not in names:
        names = (NO_RECIPE, *names)  # what the others are held against
    settings = LargeBatchSettings(
        job=train, base_batch_size=base_batch_size, global_batch_sizes=sizes, recipes=names,
        seeds=tuple(train.seed + number for number in range(num_seeds)),
        updates=updates, most_at_once=most, evaluations=evaluations,
    )  # fmt: skip
    settings.check()
    check_job(train)
    return settings


def _default_recipes(train: Any) -> str:
    """All that this job can have: what changes BatchNorm only where there is one, as far as is known here."""
    has_norm = train.model.startswith("resnet")
    several = ",linear+warmup+sync" if has_norm and train.ranks > 1 else ""
    return _RECIPES + (_NORM_RECIPES if has_norm else "") + several


@app.command("report")
def report(
    context_: typer.Context,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(help="Finished runs of scale batch, ranks, large-batch. Default: make all."),
    ] = None,
    resume: Resume = None,
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """The whole study on one page: tables, figures, and what they say; from finished runs, or made here by defaults."""
    from paceline.cli import scale_studies as studies

    if runs and resume is not None:
        raise ConfigError(f"--resume {resume} beside runs: a page of finished runs has nothing to go on with")
    _check_resume(context_, resume)
    _refuse_launched("a report starts the ranks of its studies itself")
    if runs:
        studies.report_runs(runs, out, json)
        return
    blank = list_defaults()
    learning = {"epochs": _TRAINED_EPOCHS, "lr": _LR, "schedule": "cosine"}
    studies.report_all(
        build_batch(blank),
        build_ranks(blank),
        build_large_batch(blank, (), learning, _BASE_BATCH_SIZE, None, None, _SEEDS, None, _EVALUATIONS),
        out,
        resume,
        json,
    )


@contextlib.contextmanager
def _opened(
    verb: str, settings: Any, out: Path, resume: Path | None, json: bool, more: dict[str, Any] | None = None
) -> Iterator[StudyRun]:
    from paceline.cli.studies import open_study

    with open_study(verb, settings.to_json() | (more or {}), out, resume, json) as run:
        yield run
