"""The options of all commands, how what was typed becomes the arguments of a verb, and how a result is printed."""

from __future__ import annotations

import importlib
import inspect
import json as encoder
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from paceline.errors import ConfigError, refuse
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


_MOST_TEXT, _MOST_NAME = 4096, 255  # of a path on Linux, and of a name in it


def check_typed(value: Any, flag: str) -> None:
    """Refuse a text that no file system takes for a path, and no list or number needs to be."""
    for item in value if isinstance(value, list | tuple) else (value,):
        text = str(item) if isinstance(item, str | Path) else ""
        shown = f"{flag} {text[:40]!r}..."
        refuse(
            (len(text) > _MOST_TEXT, f"{shown} has {len(text)} characters: at most {_MOST_TEXT} are understood"),
            (isinstance(item, Path) and any(len(os.fsencode(part)) > _MOST_NAME for part in item.parts),
             f"{shown} has a name of more than {_MOST_NAME} bytes, which no file can have: check the path"),
            ("\0" in text, f"{shown} has a character of code 0, which no file or name can have: leave it out"),
        )  # fmt: skip


@dataclass(frozen=True)
class Option:
    """`value`: the type, or a default, which is shown and never passed on: the verb has it. `flags`: where they are not
    the verb's keyword; "argument": it has none. `read`: from the value and flag to the argument of the verb."""

    panel: str
    help: str
    value: Any = str
    flags: str = ""
    read: Callable[[Any, str], Any] | None = None

    @property
    def default(self) -> Any:
        return None if isinstance(self.value, type | GenericAlias) else self.value

    def build_info(self, name: str) -> Any:
        if self.flags == "argument":
            return typer.Argument(None, help=self.help)
        flags = (self.flags or find_flag(name)).split()
        return typer.Option(self.default, *flags, help=self.help, rich_help_panel=self.panel)


def find_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_NETWORKS = (
    "nvlink, pcie4, hdr, 100gbe, 10gbe, ..., bandwidth and latency (10Gb/s,50us), or one that was measured: a100-hdr, "
    "h100-rdma, gh200-slingshot, ..."
)
_BACKENDS = "gloo, shm (shared memory) or nccl; several are measured in turns: gloo,shm"

# By the keyword of the verb; after a colon, what is other than usual in some command.
OPTIONS = {
    "model": Option(JOB, "mlp, cnn, resnet18, gpt2-tiny, ..., hf:NAME, or FILE.py:FUNCTION", "cnn"),
    "model:small": Option(JOB, "cnn, resnet18, ..., hf:NAME, or FILE.py:FUNCTION. Default: a small cnn.", "cnn"),
    "data:study": Option(JOB, "As for train. Default: synthetic:noisy, or with a --model synthetic.", str),
    "data": Option(JOB, "synthetic, mnist, mrpc, text, ... with :PATH of it, or FILE.py:FUNCTION", "synthetic"),
    "ranks": Option(JOB, "Number of ranks. Default: the launched world's, else 2.", read=read_one),
    "ranks:train": Option(JOB, "One, or several: 1,2. Default: the launched world's, else 1.", read=parse_counts),
    "ranks:one": Option(JOB, "Number of ranks. Default: the launched world's, else 1.", read=read_one),
    "ranks:layers": Option(JOB, "Only 1 is accepted: layers are timed on one rank.", read=read_one),
    "ranks:table": Option(JOB, "Numbers of ranks.", "2,4,8,64", read=parse_counts),
    "ranks:predict": Option(JOB, "Numbers of ranks.", "8,64,1024,16384", read=parse_counts),
    "ranks:bench": Option(JOB, "Numbers of ranks: 2,4,6. Default: the launched world's, else 2.", read=parse_counts),
    "ranks:phases": Option(JOB, "Numbers of ranks: 1,2,4. Default: the launched world's, else 2.", read=parse_counts),
    "ranks:scale": Option(JOB, "Numbers of ranks. Default: 1,2,4,... up to the cores, or GPUs.", read=parse_counts),
    "batch_size": Option(JOB, "Samples per rank in a micro-batch. Default: 32.", read=read_one),
    "batch_size:phases": Option(JOB, "Samples per rank in a micro-batch: 32,128. Default: 32.", read=parse_counts),
    "batch_size:wrappers": Option(JOB, "Samples per rank in a step. Default: the model's own.", read=read_one),
    "batch_size:batch": Option(JOB, "Batch sizes.", "32,128,512,2048", read=parse_counts),
    "batch_size:scale": Option(JOB, "Samples per rank (weak scaling).", "8,32", read=parse_counts),
    "batch_size:large": Option(JOB, "What a rank computes at once; larger batches accumulate.", "512", read=read_one),
    "batch_size:tune": Option(JOB, "Samples per rank; small, so that little hides buckets.", "4", read=read_one),
    "global_batch_size": Option(JOB, "Samples of one step over all ranks: 1024,8192", read=parse_counts),
    "global_batch_size:train": Option(JOB, "Samples of one step over all ranks.", int),
    "base_batch_size": Option(JOB, "The baseline: the global batch that --lr is right for.", 16),
    "accumulate": Option(JOB, "Micro-batches per step; gradients travel with the last.", int),
    "precision": Option(JOB, "fp32, bf16 or fp16 (autocast)", "fp32"),
    "wrapper": Option(JOB, "paceline, torch, none or dp", "paceline"),
    "wrapper:scale": Option(JOB, "paceline, torch or dp; several are compared in turns", "paceline,torch"),
    "backend": Option(JOB, "auto, gloo, shm (shared memory) or nccl", "auto"),
    "backend:bench": Option(JOB, _BACKENDS, "gloo"),
    "backend:predict": Option(JOB, _BACKENDS),
    "backend:scale": Option(JOB, f"auto, {_BACKENDS}", "auto"),
    "backend:faults": Option(JOB, "gloo, shm, or both", "gloo,shm"),
    "ranks:faults": Option(JOB, "Number of ranks.", "2", read=read_one),
    "faults": Option(
        MEASUREMENT, "all, or some: kill, stop, gil, loop, nan, oom, link-down, disk-full, stall, ...",
        "kill,stop,gil,loop,exception,term,stall",
    ),
    "systems": Option(MEASUREMENT, "train, script (with Paceline's wrapper), torch, attached", "train,script,torch"),
    "trials": Option(MEASUREMENT, "How often each fault is done. Default: 1, or as the resumed run.", int),
    "patience": Option(MEASUREMENT, "Seconds to wait for a fault to be named, and of noise.", 30.0),
    "on_fault:faults": Option(JOB, "What train does then: stop, restart, spare, shrink; or several in turns.", "stop"),
    "restart": Option(MEASUREMENT, "Restart each job from its newest checkpoint, and time that.", False),
    "state": Option(JOB, "Model and optimizer of the job: 100MB. Default: a small one."),
    "mtbf:train": Option(
        OUTPUT, "With --save-every auto: mean time between faults of the job: 3h, 2d. Default: 1d for each host."),
    "save_every:goodput": Option(JOB, "Ask for this interval between saves: 10s, 5min, 2h. Default: the best one."),
    "mtbf": Option(JOB, "Mean time between faults of the whole job: 3h, 120s, 2d"),
    "mtbf_per_rank": Option(JOB, "Instead: mean time between faults of one rank."),
    "ranks:goodput": Option(JOB, "Ranks of the job. Default: those of the training run.", read=read_one),
    "runs:goodput": Option(JOB, "Folders of training runs, and of `faults --restart`.", list[Path], flags="argument"),
    "step_seconds": Option(MEASUREMENT, "Seconds of a step, instead of those measured; likewise below.", float),
    "save_seconds": Option(MEASUREMENT, "How long steps wait for a save.", float),
    "detect_seconds": Option(MEASUREMENT, "Until a fault is known.", float),
    "restart_seconds": Option(MEASUREMENT, "From there until a restarted job makes steps again.", float),
    "spare_seconds": Option(MEASUREMENT, "Or until a spare has taken the place of the lost rank.", float),
    "shrink_seconds": Option(MEASUREMENT, "Or until the others continue without it.", float),
    "all_lost": Option(JOB, "Share of the faults that leaves no replica, and needs a checkpoint.", "5%"),
    "repair": Option(JOB, "How long the place of a lost rank cannot be used.", "0s"),
    "horizon": Option(JOB, "Length of the job, for the 90 % interval.", "30d"),
    "device": Option(JOB, "auto, cpu or cuda", "auto"),
    "device:faults": Option(JOB, "cpu or cuda", "cpu"),
    "threads": Option(JOB, "Torch's threads per rank, on the CPU.", int),
    "threads:wrappers": Option(JOB, "Torch's threads per rank, on the CPU.", 1),
    "compile": Option(JOB, "Compile the model, block by block.", False),
    "sync_batchnorm": Option(JOB, "BatchNorm over the whole global batch.", False),
    "plan": Option(JOB, "Buckets from this file, which `tune` writes.", Path, read=lambda path, _: str(path)),
    "strategy": Option(JOB, "bf16, int8, int4, topk:0.01, powersgd:4, diloco:100+int8, zero1, ...", "dense"),
    "strategy:several": Option(JOB, "Compare strategies: all, or some: bf16,powersgd:4,diloco:100+int8"),
    "ranks:study": Option(JOB, "Number of ranks, instead of --workers. Default: none.", read=read_one),
    "strategies": Option(JOB, "all, or some: int8,topk:0.01,... dense and bf16 are always there."),
    "workers:study": Option(JOB, "Replicas in one process that exchange as ranks would. Default: 4.", int),
    "target": Option(MEASUREMENT, "A test accuracy (0 to 1), or loss: when does each strategy reach it?", float),
    "workers": Option(JOB, "Replicas in one process that exchange as ranks would, to study accuracy.", 1),
    "seed": Option(JOB, "Of the model, the order of the data, and dropout.", 1),
    "command:run": Option(JOB, "The command, behind --: -- python train.py", list[str], flags="argument"),
    "hosts": Option(JOB, "Over ssh: hosts with their ranks, a:8,b:8. Default ranks: the host's GPUs, else 1."),
    "hosts:doctor": Option(JOB, "Check these hosts instead, over ssh: a,b"),
    "slurm": Option(JOB, "Write an sbatch script, show it and submit it.", False),
    "kubernetes": Option(JOB, "Print a manifest; nothing is submitted.", False),
    "nodes": Option(JOB, "Slurm, Kubernetes: number of hosts.", 1),
    "ranks_per_node:run": Option(JOB, "Slurm, Kubernetes: ranks on each host.", 1),
    "time": Option(JOB, "Slurm: time limit, as 1:00:00"),
    "partition": Option(JOB, "Slurm: partition."),
    "gpus_per_node": Option(JOB, "Slurm, Kubernetes: GPUs of each host.", int),
    "sbatch": Option(JOB, "Slurm: further options of sbatch, as '--qos=high --mem=0'"),
    "image": Option(JOB, "Kubernetes: container image."),
    "kind": Option(JOB, "Kubernetes: job (plain, with its Service) or trainjob (Kubeflow)", "job"),
    "volume": Option(JOB, "Kubernetes: CLAIM:/PATH, a PersistentVolumeClaim and where it is mounted."),
    "name": Option(JOB, "Name of the job. With --hosts: of the run's folder, which is resumed where it exists."),
    "folder:run": Option(JOB, "Folder on the hosts to run in. Default: this one."),
    "env": Option(JOB, "A variable for the ranks: NAME=VALUE, or NAME for its value here.", list[str]),
    "grace": Option(JOB, "Seconds that ranks get to save when they are asked to stop.", 60.0),
    "interface": Option(JOB, "Network interface between the hosts. Default: that of the route between them."),
    "port": Option(JOB, "Port of the first host on which ranks meet. Default: one that is free.", int),
    "python": Option(JOB, "Python on the hosts. Default: the path of this one."),
    "ssh": Option(JOB, "How to call ssh, as 'ssh -p 2222'", "ssh"),
    "check_timeout": Option(JOB, "Seconds that the checks of all hosts may take.", 5.0),
    "wait": Option(JOB, "Slurm: show what the job prints until it ends; its exit code is this one's.", False),
    "dry_run": Option(JOB, "Slurm: only print the script.", False),
    "sizes": Option(JOB, "Sizes to measure.", "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"),
    "min_size": Option(JOB, "First size of a range: 8B", flags="--min-size -b"),
    "max_size": Option(JOB, "Last size of a range: 128MiB", flags="--max-size -e"),
    "factor": Option(JOB, "Factor of a range. Default: 2.", float, flags="--factor -f"),
    "collective": Option(JOB, "all_reduce, all_gather, reduce_scatter or broadcast", "all_reduce"),
    "op": Option(JOB, "sum, avg, min, max or prod", "sum"),
    "dtype": Option(JOB, "float32, bfloat16, int64, ...", "float32"),
    "memory": Option(JOB, "Where vectors are: ordinary, shared (backend shm alone), or both, in turns.", "ordinary"),
    "memory:trace": Option(MEASUREMENT, "What memory holds over a step, and its peak.", False, flags="--memory-use"),
    "total": Option(JOB, "Bytes reduced in all (240MB is 60 million floats).", "240MB"),
    "chunks": Option(JOB, "Chunk sizes: 40kB,4MB,... Default: 10 thousand elements up to all."),
    "models": Option(JOB, "Models: mlp,cnn,gpt2-tiny,... Default: five small ones.", list[str], flags="--model"),
    "wrappers": Option(JOB, "bare,torch,paceline,... Default: all but paceline-tuned.", list[str], flags="--wrapper"),
    "profile": Option(JOB, "A run of `profile layers`: its folder.", Path, flags="--model-profile"),
    "traces": Option(JOB, "Traces of your job by torch.profiler: a file for each rank.", list[Path], flags="--trace"),
    "profile:train": Option(MEASUREMENT, "Time forward, backward and optimizer of each step.", False),
    "runs": Option(JOB, "Finished studies. Default: measure all three.", list[Path], flags="argument"),
    "network": Option(JOB, _NETWORKS),
    "network:table": Option(JOB, _NETWORKS, "nvlink,pcie4,hdr,10gbe"),
    "network:tune": Option(MEASUREMENT, _NETWORKS),
    "network:scale": Option(MEASUREMENT, _NETWORKS, "10gbe,100gbe"),
    "csv": Option(JOB, "Instead: a folder with layer-sizes, layer-times and allreduce-times.", Path),
    "measured": Option(JOB, "With --csv: a table of bucket_size and step_s or backward_s to compare with.", Path),
    "allreduce": Option(JOB, "All-reduce: a run, nccl-tests' output, or a CSV; beyond its ranks it is scaled.", Path),
    "ranks_per_node": Option(JOB, "Ranks that share a node, and its link. Default: 1, or the sweep's.", int),
    "inside": Option(JOB, "The network inside a node. Default: the sweep of --allreduce, else nvlink."),
    "algorithm": Option(JOB, "auto, ring, tree, two-level, gloo or shared", "auto"),
    "gradients": Option(JOB, "fp32 or bf16. Default: the profile's."),
    "straggler": Option(JOB, "How much ranks differ: 3% (standard deviation), or profile.", "0%"),
    "profiles": Option(JOB,
        "Instead of a model: a run of `profile layers`; several make one table.", list[Path], flags="--model-profile"),
    "curves": Option(JOB, "A run of `bench allreduce` whose curve is used, too.", list[Path], flags="--curve"),
    "samples": Option(DATA, "Use the first N samples; synthetic: make N.", int),
    "context": Option(DATA, "Tokens per sequence.", int),
    "tokenizer": Option(DATA, "auto (the model's own, or bytes), bytes, or a folder", "auto"),
    "tail": Option(DATA, "The smaller last batch of an epoch: keep, drop, or pad with first samples.", "keep"),
    "augment": Option(DATA, "Crop and flip images. Default: CIFAR-10 only.", bool, flags="--augment/--no-augment"),
    "cutout": Option(DATA, "Side of the square hidden in augmented images, in pixels.", 0),
    "test_samples": Option(DATA, "Evaluate on the first N samples. Default: all.", int),
    "channels": Option(MODEL, "Channels of the cnn's convolutions: 32 64 128", read=_read_each),
    "hidden": Option(MODEL, "Width of the hidden layer.", int),
    "dropout": Option(MODEL, "Dropout rate, where a model has one.", float),
    "ghost_batchnorm": Option(MODEL, "BatchNorm over N samples at a time.", int),
    "optimizer": Option(LEARNING, "sgd, adamw, lars or lamb", "sgd"),
    "epochs": Option(LEARNING, "How many times each sample is seen.", 1),
    "epochs:batch": Option(LEARNING, "How many times each sample is seen.", 3),
    "epochs:large": Option(LEARNING, "How many times each sample is seen.", 6),
    "epochs:study": Option(LEARNING, "How many times each sample is seen. Default: 6.", int),
    "steps": Option(LEARNING, "Optimizer steps, instead of --epochs.", int),
    "steps:attach": Option(MEASUREMENT, "Steps of your program that are observed; 0: all.", 48),
    "stop": Option(MEASUREMENT, "End your program after these steps, on all ranks.", False),
    "steps:tune": Option(MEASUREMENT, "Of a program behind --: steps that are observed first. Default: 48.", int),
    "every": Option(MEASUREMENT, "Of a command: a line every N steps. Default: 50.", int),
    "command:watch": Option(JOB, "The folder of a training run, or a command behind --", list[str], flags="argument"),
    "runs:report": Option(JOB, "Folders of runs; several are compared.", list[Path], flags="argument"),
    "steps:trace": Option(MEASUREMENT, "Steps that are recorded.", 3),
    "batch_growth": Option(LEARNING, "SHARE:FACTOR,...: from that share of the run on, FACTOR times the batch.",
        read=lambda text, _: parse_growths(text)),
    "grow": Option(LEARNING, "What grows on a rank: accumulate (more micro-batches) or batch-size.", "accumulate"),
    "clip": Option(LEARNING, "Largest norm of the gradients.", float),
    "lr": Option(LEARNING, "Learning rate (its peak).", 0.05),
    "lr:study": Option(LEARNING, "Learning rate.", 0.02),
    "lr:large": Option(LEARNING, "Learning rate (its peak).", 0.005),
    "momentum": Option(LEARNING, "Momentum of sgd (Nesterov) or lars.", 0.9),
    "trust_coefficient": Option(LEARNING, "Of lars: a layer's step, as a share of its weights.", float),
    "weight_decay": Option(LEARNING, "Of matrices and filters, not of biases and norms.", 0.0),
    "schedule": Option(LEARNING, "constant, cosine or linear (to 0 at the end), piecewise", "constant"),
    "schedule:large": Option(LEARNING, "constant, linear, cosine (the default), piecewise (with --lr-drops)", str),
    "lr_warmup": Option(LEARNING, "Steps in which the learning rate climbs.", 0),
    "lr_drops": Option(LEARNING, "Where piecewise divides by 10, as shares of the run: 0.5,0.75", read=_read_drops),
    "label_smoothing": Option(LEARNING, "Share of a target that is spread over all classes.", 0.0),
    "recipes": Option(LEARNING, "none, or switches joined by +, each with a number if wanted: lars:0.2+warmup"),
    "quick": Option(MEASUREMENT, "Fewer bucket sizes and rounds: about a minute.", False),
    "confirm": Option(MEASUREMENT,
        "Predict only: the job is never run under a plan.", False, flags="--no-confirm", read=lambda *_: False),
    "caps": Option(MEASUREMENT, "Bucket sizes to run: 1MiB,4MiB,25MiB. Default: a range."),
    "budget": Option(MEASUREMENT, "Seconds that the race of plans takes at most. Default: 60, with --quick 30.", float),
    "network_ranks": Option(MEASUREMENT, "Ranks on the network, this one included. Default: 8.", int),
    "predict_ranks": Option(MEASUREMENT, "Predict the curve for these ranks.", "64,1024", read=parse_counts),
    "seeds": Option(MEASUREMENT, "Runs of each recipe.", 3),
    "updates": Option(MEASUREMENT, "Also runs of N updates; 0: none. Default: twice those of the largest batch.", int),
    "evaluations": Option(MEASUREMENT, "Evaluations during a run.", 6),
    "at_once": Option(MEASUREMENT, "Runs that share the machine. Default: 1, or as the resumed study.", int),
    "iters": Option(MEASUREMENT, "Timed repetitions. Default: as the time allows, up to 100.", int, flags="--iters -n"),
    "warmup": Option(MEASUREMENT,
        "Repetitions before the timed ones. Default: as the time allows, up to 3.", int, flags="--warmup -w"),
    "limit": Option(MEASUREMENT, "Measure what memory could do, too, and print each row's fraction of it.", False),
    "compare": Option(MEASUREMENT, "Compare with another run, or with a table: CSV, Markdown.", Path),
    "compare:train": Option(MEASUREMENT, "Train nothing: compare two runs (folders).", tuple[Path, Path]),
    "shapes": Option(MEASUREMENT, "Record the shapes of operators' inputs, too.", False),
    "strict": Option(MEASUREMENT, "Exit with 1 where a result is too noisy, and say why.", False),
    "plot": Option(OUTPUT, "Draw one step of all ranks.", False),
    "resume": Option(OUTPUT, "Resume the interrupted run in this folder.", Path),
    "save_every": Option(
        OUTPUT, "When a checkpoint is due: epoch, 10s, 5min, 2h, 100steps or auto (see --mtbf)", "60s"),
    "on_fault": Option(JOB,
        "After a fault of a rank: stop, restart, spare (a warm one takes its place) or shrink.", "stop"),
    "max_faults": Option(JOB, "Faults after which a run recovers no more.", 10),
    "spares": Option(JOB, "Warm processes, with --on-fault spare.", 1),
    "hang_timeout": Option(JOB,
        "How long a rank may hang in a step before it is ended; it is named within seconds. Default: 10min.", str),
    "keep": Option(OUTPUT, "How many checkpoints are kept.", 3),
    "watch": Option(OUTPUT, "Show it on a live page; its address is printed.", False),
    "port:watch": Option(OUTPUT, "Port of the page. Default: one that is free.", int),
    "browser": Option(OUTPUT,
        "Open the page. Default: where there is a display.", bool, flags="--browser/--no-browser"),
    "page": Option(OUTPUT, "The file to write. Default: report.html in the folder of the run, of several here.", Path),
    "tensorboard": Option(OUTPUT, "Write event files for TensorBoard, too.", False),
    "out": Option(OUTPUT, "Folder in which the run gets its own folder.", Path("runs")),
    "json": Option(OUTPUT, "Print one JSON document and nothing else on stdout.", False),
    "wide": Option(OUTPUT, "Print every column of the tables, however wide.", False),
}  # fmt: skip
# A job, common ones first.
JOB_OPTIONS = (
    "model data ranks batch_size accumulate precision wrapper backend device threads compile sync_batchnorm plan seed "
    "samples context tokenizer channels hidden dropout optimizer"
)


def add_command(
    app: typer.Typer, name: str, verb: str | Callable[..., Any], names: str, help: str, **always: Any
) -> None:
    """Add a command with the options `names`, in this order in each panel; "-name" takes one away again. Without a
    name it is what a group of commands does where none of them is named.

    `verb` ("room.module:function" of the package, or a function) gets what was typed, and `always` unless it was typed;
    the other defaults are its own.
    """
    options: dict[str, Option] = {}
    for key in [*names.split(), "out", "json", "wide"]:
        options |= {key.partition(":")[0]: OPTIONS[key.removeprefix("-")]}
    options = {n: option for n, option in options.items() if f"-{n}" not in options and not n.startswith("-")}
    parameters = [inspect.Parameter("context_", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for n, option in sorted(options.items(), key=lambda item: PANELS.index(item[1].panel)):
        kind = option.value | None if option.default is None else type(option.default)
        kind = Path if isinstance(option.default, Path) else kind  # older versions of typer know no PosixPath
        info = option.build_info(n)
        parameters.append(inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind))

    def run(context_: typer.Context, **values: Any) -> None:
        given = dict(always)
        for name, option in options.items():
            source = context_.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                if option.flags != "argument" or name != "command":  # what is behind -- is the user's own
                    check_typed(values[name], find_flag(name))
                given[name] = option.read(values[name], find_flag(name)) if option.read else values[name]
        if (command := context_.invoked_subcommand) is not None:
            flags = ", ".join(map(find_flag, given))
            refuse((flags, f"{flags} before {command} has no effect: give the options of {command} behind it"))
            return
        json, wide, strict = (given.pop(name, False) for name in ("json", "wide", "strict"))
        if "resume" in given and isinstance(verb, str) and verb.startswith("studies."):
            jobs = importlib.import_module("paceline.verbs.jobs")  # here: it takes as long as the verb
            typed = [name for name in given if name not in ("resume", "at_once", "trials", "runs")]
            jobs.check_resume({find_flag(name).removeprefix("--"): True for name in typed})
        if "out" in options and "resume" not in given:
            given.setdefault("out", values["out"])
        if isinstance(verb, str):
            module, _, function = verb.partition(":")
            result = getattr(importlib.import_module(f"paceline.{module}"), function)(progress=True, **given)
        else:
            result = verb(progress=True, **given)
        raise typer.Exit(print_result(result, json, wide, strict))

    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    added = app.command(name, cls=_Command, help=help) if name else app.callback(invoke_without_command=True, help=help)
    added(run)


_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # of click, or of the copy in typer


class _Command(TyperCommand):
    """A command whose errors all say how it is used: where a value is missing, the parser does not know for which."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            error.ctx = error.ctx or ctx
            raise


def print_result(result: Result, json: bool, wide: bool = False, strict: bool = False) -> int:
    """Print a result on the rank that leads; the exit code is 1 for a failure or, with `strict`, for noise."""
    from paceline.runtime.environment import read_place

    try:
        leads = read_place().rank == 0
    except ConfigError:  # half of a launcher's variables: nobody else would print
        leads = True
    if leads:
        if json:
            print(encoder.dumps(result.to_json(), indent=1, allow_nan=False))
        else:  # as wide as the terminal, or COLUMNS; output that goes elsewhere is not cut
            print(result.text(None if wide else shutil.get_terminal_size((0, 0)).columns or None))
    reasons: Sequence[str] = [result.failure] if result.failure else result.noise if strict else []
    for reason in reasons if leads else []:
        print(f"paceline: failed{'' if result.failure else ' (--strict)'}: {reason}", file=sys.stderr)
    return 1 if reasons else 0
