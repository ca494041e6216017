"""The options of all commands, how what was typed becomes the arguments of a verb, and how a result is printed."""

from __future__ import annotations

import importlib
import inspect
import json as encoder
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paceline.errors import ConfigError
from paceline.training.schedules import parse_growths
from paceline.units import parse_counts

if TYPE_CHECKING:
    from paceline.report.result import Result

# Panels of the help, in this order.
PANELS = JOB, DATA, MODEL, LEARNING, MEASUREMENT, OUTPUT = "Job", "Data", "Model", "Learning", "Measurement", "Output"


def read_one(text: str, flag: str) -> int:
    """The one number that was typed."""
    counts = parse_counts(text, flag)
    if len(counts) != 1:
        raise ConfigError(f"{flag} {text}: one number is needed here")
    return counts[0]


def _read_each(text: str, flag: str) -> tuple[int, ...]:
    """One by one: a list of counts has no repeats, and two layers may well be alike."""
    return tuple(read_one(part, flag) for part in text.split(","))


def _read_drops(text: str, flag: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is not understood: use shares of the run, such as 0.5,0.75") from None


@dataclass(frozen=True)
class Option:
    """An option. `default` is shown, and never passed on: the verb has it. `kind` is the type without one.

    `flags`: where they are not the verb's keyword; "argument": it has none. `read`: from the value and flag to the
    argument of the verb.
    """

    panel: str
    help: str
    kind: Any = str
    default: Any = None
    flags: str = ""
    read: Callable[[Any, str], Any] | None = None

    def build_info(self, name: str) -> Any:
        flags = (self.flags or find_flag(name)).split()
        return typer.Option(self.default, *flags, help=self.help, rich_help_panel=self.panel)


def find_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


NETWORK_HELP = "Networks: nvlink,pcie4,hdr,100gbe,10gbe,1gbe, or bandwidth and latency such as 10Gb/s,50us."
BACKENDS = Option(JOB, "gloo, shm (shared memory) or nccl; several are measured in turns: gloo,shm", default="gloo")
RANKS = Option(JOB, "Numbers of ranks: 2,4,6. Default: the launched world's, else 2.", read=parse_counts)

# By the keyword of the verb. A command may have one of its own under the same name.
OPTIONS = {
    "model": Option(JOB, "mlp, cnn, resnet18, gpt2-tiny, ..., hf:NAME, or FILE.py:FUNCTION", default="cnn"),
    "data": Option(
        JOB, "synthetic, or mnist, fashion-mnist, cifar10, mrpc, text with :PATH of the files.", default="synthetic"
    ),
    "ranks": Option(JOB, "Number of ranks. Default: the launched world's, else 2.", read=read_one),
    "batch_size": Option(JOB, "Samples per rank in a micro-batch. Default: 32.", read=read_one),
    "global_batch_size": Option(JOB, "Samples of one step over all ranks: 1024,8192", read=parse_counts),
    "base_batch_size": Option(JOB, "The baseline: the global batch that --lr is right for.", default=16),
    "accumulate": Option(JOB, "Micro-batches per step; gradients travel with the last.", int),
    "precision": Option(JOB, "fp32, bf16 or fp16 (autocast)", default="fp32"),
    "wrapper": Option(JOB, "paceline, torch, none or dp", default="paceline"),
    "backend": Option(JOB, "auto, gloo, shm (shared memory) or nccl", default="auto"),
    "device": Option(JOB, "auto, cpu or cuda", default="auto"),
    "threads": Option(JOB, "Torch's threads per rank, on the CPU.", int),
    "compile": Option(JOB, "Compile the model, block by block.", default=False),
    "sync_batchnorm": Option(JOB, "BatchNorm over the whole global batch.", default=False),
    "plan": Option(JOB, "Buckets from this file, which `tune` writes.", Path, read=lambda path, _: str(path)),
    "seed": Option(JOB, "Of the model, the order of the data, and dropout.", default=1),
    "sizes": Option(JOB, "Sizes to measure: 64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"),
    "min_size": Option(JOB, "First size of a range: 8B", flags="--min-size -b"),
    "max_size": Option(JOB, "Last size of a range: 128MiB", flags="--max-size -e"),
    "factor": Option(JOB, "Factor of a range. Default: 2.", float, flags="--factor -f"),
    "collective": Option(JOB, "all_reduce, all_gather, reduce_scatter or broadcast", default="all_reduce"),
    "op": Option(JOB, "sum, avg, min, max or prod", default="sum"),
    "dtype": Option(JOB, "float32, bfloat16, int64, ...", default="float32"),
    "total": Option(JOB, "Bytes reduced in all (240MB is 60 million floats).", default="240MB"),
    "chunks": Option(JOB, "Chunk sizes: 40kB,4MB,... Default: 10 thousand elements up to all."),
    "models": Option(
        JOB, "Built-in models: mlp,cnn,gpt2-tiny,... Default: five small ones.", list[str], flags="--model",
        read=lambda names, _: ",".join(names),
    ),
    "wrappers": Option(
        JOB, "Wrappers: bare,torch,torch-tuned,paceline,paceline-flat,... Default: all.", list[str], flags="--wrapper",
        read=lambda names, _: ",".join(names),
    ),
    "profile": Option(JOB, "A run of `profile layers`: its folder.", Path, flags="--model-profile"),
    "network": Option(JOB, NETWORK_HELP),
    "csv": Option(JOB, "Instead: a folder with layer-sizes, layer-times and allreduce-times.", Path),
    "allreduce": Option(JOB, "A run of `bench allreduce`; beyond its ranks it is scaled.", Path),
    "ranks_per_node": Option(JOB, "Ranks that share a node, and its link.", default=1),
    "inside": Option(JOB, "The network inside a node. Default: nvlink."),
    "algorithm": Option(JOB, "auto, ring, tree, two-level, gloo or shared", default="auto"),
    "gradients": Option(JOB, "fp32 or bf16. Default: the profile's."),
    "straggler": Option(JOB, "How much ranks differ: 3% (standard deviation), or profile.", default="0%"),
    "curves": Option(JOB, "A run of `bench allreduce` whose curve is used, too.", list[Path], flags="--curve"),
    "samples": Option(DATA, "Use the first N samples; synthetic: make N.", int),
    "context": Option(DATA, "Tokens per sequence.", int),
    "tokenizer": Option(DATA, "auto (the model's own, or bytes), bytes, or a folder", default="auto"),
    "tail": Option(DATA, "The smaller last batch of an epoch: keep, drop, or pad with first samples.", default="keep"),
    "augment": Option(DATA, "Crop and flip images. Default: CIFAR-10 only.", bool, flags="--augment/--no-augment"),
    "cutout": Option(DATA, "Side of the square hidden in augmented images, in pixels.", default=0),
    "test_samples": Option(DATA, "Evaluate on the first N samples. Default: all.", int),
    "channels": Option(MODEL, "Channels of the cnn's convolutions: 32 64 128", read=_read_each),
    "hidden": Option(MODEL, "Width of the hidden layer.", int),
    "dropout": Option(MODEL, "Dropout rate, where a model has one.", float),
    "ghost_batchnorm": Option(MODEL, "BatchNorm over N samples at a time.", int),
    "optimizer": Option(LEARNING, "sgd, adamw, lars or lamb", default="sgd"),
    "epochs": Option(LEARNING, "How many times each sample is seen.", default=1),
    "steps": Option(LEARNING, "Optimizer steps, instead of --epochs.", int),
    "batch_growth": Option(
        LEARNING, "SHARE:FACTOR,...: from that share of the run on, FACTOR times the batch.",
        read=lambda text, _: parse_growths(text),
    ),
    "grow": Option(
        LEARNING, "What grows on a rank: accumulate (more micro-batches) or batch-size.", default="accumulate"
    ),
    "clip": Option(LEARNING, "Largest norm of the gradients.", float),
    "lr": Option(LEARNING, "Learning rate (its peak).", default=0.05),
    "momentum": Option(LEARNING, "Momentum of sgd (Nesterov) or lars.", default=0.9),
    "trust_coefficient": Option(LEARNING, "Of lars: a layer's step, as a share of its weights.", float),
    "weight_decay": Option(LEARNING, "Of matrices and filters, not of biases and norms.", default=0.0),
    "schedule": Option(LEARNING, "constant, cosine or linear (to 0 at the end), piecewise", default="constant"),
    "lr_warmup": Option(LEARNING, "Steps in which the learning rate climbs.", default=0),
    "lr_drops": Option(LEARNING, "Where piecewise divides by 10, as shares of the run: 0.5,0.75", read=_read_drops),
    "label_smoothing": Option(LEARNING, "Share of a target that is spread over all classes.", default=0.0),
    "recipes": Option(LEARNING, "none, or switches joined by +, each with a number if wanted: lars:0.2+warmup"),
    "quick": Option(MEASUREMENT, "Fewer bucket sizes and rounds: about a minute.", default=False),
    "confirm": Option(
        MEASUREMENT, "Predict only: the job is never run under a plan.", default=False, flags="--no-confirm",
        read=lambda *_: False,
    ),
    "caps": Option(MEASUREMENT, "Bucket sizes to run: 1MiB,4MiB,25MiB. Default: a range."),
    "network_ranks": Option(MEASUREMENT, "Ranks on the network, this one included. Default: 8.", int),
    "predict_ranks": Option(
        MEASUREMENT, "Predict the curve for these numbers of ranks: 64,1024", default="64,1024", read=parse_counts
    ),
    "seeds": Option(MEASUREMENT, "Runs of each recipe.", default=3),
    "updates": Option(
        MEASUREMENT, "Also runs of this many updates. Default: twice those of the largest batch; 0: none.", int
    ),
    "evaluations": Option(MEASUREMENT, "Evaluations during a run.", default=6),
    "at_once": Option(MEASUREMENT, "Runs that share the machine; accuracy does not depend on it.", default=1),
    "iters": Option(MEASUREMENT, "Timed repetitions. Default: as the time allows, up to 100.", int, flags="--iters -n"),
    "warmup": Option(
        MEASUREMENT, "Repetitions before the timed ones. Default: as the time allows, up to 3.", int,
        flags="--warmup -w",
    ),
    "limit": Option(
        MEASUREMENT, "Measure what memory could do, too, and print each row's fraction of it.", default=False
    ),
    "compare": Option(MEASUREMENT, "Compare with another run, or with a table: CSV, Markdown.", Path),
    "shapes": Option(MEASUREMENT, "Record the shapes of operators' inputs, too.", default=False),
    "strict": Option(MEASUREMENT, "Exit with 1 where a result is too noisy, and say why.", default=False),
    "plot": Option(OUTPUT, "Draw one step of all ranks.", default=False),
    "resume": Option(OUTPUT, "Resume the interrupted run in this folder.", Path),
    "save_every": Option(OUTPUT, "When a checkpoint is due: epoch, 10s, 5min or 100steps", default="60s"),
    "keep": Option(OUTPUT, "How many checkpoints are kept.", default=3),
    "tensorboard": Option(OUTPUT, "Write event files for TensorBoard, too.", default=False),
    "out": Option(OUTPUT, "Folder in which the run gets its own folder.", default=Path("runs")),
    "json": Option(OUTPUT, "Print one JSON document and nothing else on stdout.", default=False),
    "wide": Option(OUTPUT, "Print every column of the tables, however wide.", default=False),
}  # fmt: skip
# A job, common ones first.
JOB_OPTIONS = (
    "model data ranks batch_size accumulate precision wrapper backend device threads compile sync_batchnorm plan seed "
    "samples context tokenizer channels hidden dropout optimizer"
)


def add_command(
    app: typer.Typer,
    name: str,
    verb: str | Callable[..., Any],
    help: str,
    names: str,
    always: Mapping[str, Any] | None = None,
    without: str = "",
    **own: Option,
) -> None:
    """Add a command with the options `names`, in this order in each panel, less those `without`.

    `verb` ("module:function" of `paceline.verbs`, or a function) gets what was typed, and `always` unless it was typed;
    the other defaults are its own. `own`: options of this command alone, or other than usual.
    """
    listed = dict.fromkeys([*names.split(), *own, "out", "json", "wide"])
    options = {n: own[n] if n in own else OPTIONS[n] for n in listed if n not in without.split()}
    parameters = [inspect.Parameter("context_", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for n, option in sorted(options.items(), key=lambda item: PANELS.index(item[1].panel)):
        kind = option.kind | None if option.default is None else type(option.default)
        info = option.build_info(n) if option.flags != "argument" else typer.Argument(None, help=option.help)
        parameters.append(inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind))

    def run(context_: typer.Context, **values: Any) -> None:
        given = dict(always or {})
        for name, option in options.items():
            source = context_.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                given[name] = option.read(values[name], find_flag(name)) if option.read else values[name]
        json, wide, strict = (given.pop(name, False) for name in ("json", "wide", "strict"))
        if "out" in options and "resume" not in given:
            given.setdefault("out", values["out"])
        if isinstance(verb, str):
            module, _, function = verb.partition(":")
            result = getattr(importlib.import_module(f"paceline.verbs.{module}"), function)(progress=True, **given)
        else:
            result = verb(progress=True, **given)
        raise typer.Exit(print_result(result, json, wide, strict))

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.command(name, help=help)(run)


# -- output ------------------------------------------------------------------------------------------------------------


def print_result(result: Result, json: bool, wide: bool = False, strict: bool = False) -> int:
    """Print a result on the rank that leads; the exit code is 1 for a failure or, with `strict`, for noise."""
    if is_leading():
        if json:
            print(encoder.dumps(result.to_json(), indent=1, allow_nan=False))
        else:  # as wide as the terminal, or COLUMNS; output that goes elsewhere is not cut
            print(result.text(None if wide else shutil.get_terminal_size((0, 0)).columns or None))
    reasons: Sequence[str] = [result.failure] if result.failure else result.noise if strict else []
    for reason in reasons if is_leading() else []:
        print(f"paceline: failed{'' if result.failure else ' (--strict)'}: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def is_leading() -> bool:
    """Whether this process prints: every plain one, and rank 0 of a launched world."""
    from paceline.runtime.environment import is_launched, read_place

    try:
        return not is_launched() or read_place().rank == 0
    except ConfigError:  # half of a launcher's variables: nobody else would say so
        return True
