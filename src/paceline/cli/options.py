"""The options of all commands, their conversion into the arguments of a verb, and the printing of results."""

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

# Help panels, in this order.
PANELS = JOB, DATA, MODEL, LEARNING, MEASUREMENT, OUTPUT = "Job", "Data", "Model", "Learning", "Measurement", "Output"


def read_one(text: str, flag: str) -> int:
    """Parse a single number."""
    counts = parse_counts(text, flag)
    if len(counts) != 1:
        raise ConfigError(f"{flag} {text}: one number is needed here")
    return counts[0]


def _read_each(text: str, flag: str) -> tuple[int, ...]:
    """Parse a list of numbers that may repeat, unlike `parse_counts`: two layers may have the same size."""
    return tuple(read_one(part, flag) for part in text.split(","))


def _read_drops(text: str, flag: str) -> tuple[float, ...]:
    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{flag} {text!r} is not understood: use fractions of the run, such as 0.5,0.75") from None


_MOST_TEXT = 4096  # longest path on Linux
_MOST_NAME = 255  # longest name in a path


def check_typed(value: Any, flag: str) -> None:
    """Refuse text that is not a valid path, and is longer than any list or number needs to be."""
    for item in value if isinstance(value, list | tuple) else (value,):
        text = str(item) if isinstance(item, str | Path) else ""
        shown = f"{flag} {text[:40]!r}..."
        refuse(
            (len(text) > _MOST_TEXT, f"{shown} has {len(text)} characters: use at most {_MOST_TEXT}"),
            (isinstance(item, Path) and any(len(os.fsencode(part)) > _MOST_NAME for part in item.parts),
             f"{shown} has a file name longer than {_MOST_NAME} bytes: check the path"),
            ("\0" in text, f"{shown} contains a null character: remove it"),
        )  # fmt: skip


@dataclass(frozen=True)
class Option:
    """A command-line option. `value` is its type, or a default, which is shown in the help but not passed on, because
    the verb has the same. `flags` are needed if they differ from the verb's keyword; "argument" makes it positional.
    `read` converts the value, given the flag, to the verb's argument."""

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
    "nvlink, pcie4, hdr, 100gbe, 10gbe, ..., bandwidth and latency (10Gb/s,50us), or a measured cluster: a100-hdr, "
    "h100-rdma, gh200-slingshot, ..."
)
_BACKENDS = "gloo, shm (shared memory) or nccl; several are interleaved: gloo,shm"

# Options by the verb's keyword. A suffix after a colon marks a variant for certain commands.
OPTIONS = {
    "model": Option(JOB, "mlp, cnn, resnet18, gpt2-tiny, ..., hf:NAME, or FILE.py:FUNCTION", "cnn"),
    "model:small": Option(JOB, "cnn, resnet18, ..., hf:NAME, or FILE.py:FUNCTION. Default: a small cnn.", "cnn"),
    "data:study": Option(JOB, "As for train. Default: synthetic:noisy; with --model, synthetic.", str),
    "data": Option(JOB, "synthetic, mnist, mrpc, text, ..., each with an optional :PATH, or FILE.py:FUNCTION",
        "synthetic"),
    "ranks": Option(JOB, "Number of ranks. Default: the launched world's, else 2.", read=read_one),
    "ranks:train": Option(JOB, "Number of ranks, or several: 1,2. Default: the launched world's, else 1.",
        read=parse_counts),
    "ranks:one": Option(JOB, "Number of ranks. Default: the launched world's, else 1.", read=read_one),
    "ranks:layers": Option(JOB, "Must be 1: layers are timed on one rank.", read=read_one),
    "ranks:table": Option(JOB, "Numbers of ranks.", "2,4,8,64", read=parse_counts),
    "ranks:predict": Option(JOB, "Numbers of ranks.", "8,64,1024,16384", read=parse_counts),
    "ranks:bench": Option(JOB, "Numbers of ranks: 2,4,6. Default: the launched world's, else 2.", read=parse_counts),
    "ranks:phases": Option(JOB, "Numbers of ranks: 1,2,4. Default: the launched world's, else 2.", read=parse_counts),
    "ranks:scale": Option(JOB, "Numbers of ranks. Default: 1,2,4,... up to the number of cores or GPUs.",
        read=parse_counts),
    "batch_size": Option(JOB, "Samples per rank in a micro-batch. Default: 32.", read=read_one),
    "batch_size:phases": Option(JOB, "Samples per rank in a micro-batch: 32,128. Default: 32.", read=parse_counts),
    "batch_size:wrappers": Option(JOB, "Samples per rank in a step. Default: the model's own.", read=read_one),
    "batch_size:batch": Option(JOB, "Batch sizes.", "32,128,512,2048", read=parse_counts),
    "batch_size:scale": Option(JOB, "Samples per rank (weak scaling).", "8,32", read=parse_counts),
    "batch_size:large": Option(JOB, "Largest micro-batch per rank; larger batches are accumulated.", "512",
        read=read_one),
    "batch_size:tune": Option(JOB, "Samples per rank; kept small so compute does not hide communication.", "4",
        read=read_one),
    "global_batch_size": Option(JOB, "Samples per step over all ranks: 1024,8192", read=parse_counts),
    "global_batch_size:train": Option(JOB, "Samples per step over all ranks.", int),
    "base_batch_size": Option(JOB, "Baseline: the global batch size that --lr is tuned for.", 16),
    "accumulate": Option(JOB, "Micro-batches per step; gradients are sent with the last one.", int),
    "precision": Option(JOB, "fp32, bf16 or fp16 (autocast)", "fp32"),
    "wrapper": Option(JOB, "paceline, torch, none or dp", "paceline"),
    "wrapper:scale": Option(JOB, "paceline, torch or dp; several are interleaved", "paceline,torch"),
    "backend": Option(JOB, "auto, gloo, shm (shared memory) or nccl", "auto"),
    "backend:bench": Option(JOB, _BACKENDS, "gloo"),
    "backend:predict": Option(JOB, _BACKENDS),
    "backend:scale": Option(JOB, f"auto, {_BACKENDS}", "auto"),
    "backend:faults": Option(JOB, "gloo, shm, or both", "gloo,shm"),
    "ranks:faults": Option(JOB, "Number of ranks.", "2", read=read_one),
    "faults": Option(
        MEASUREMENT, "all, or a list: kill, stop, gil, loop, nan, oom, link-down, disk-full, stall, ...",
        "kill,stop,gil,loop,exception,term,stall",
    ),
    "systems": Option(MEASUREMENT, "train, script (with Paceline's wrapper), torch, attached", "train,script,torch"),
    "trials": Option(MEASUREMENT, "Number of trials per fault. Default: 1, or as in the resumed run.", int),
    "patience": Option(MEASUREMENT, "Seconds to wait for a fault to be identified, and to disturb the job.", 30.0),
    "on_fault:faults": Option(JOB, "Recovery policy of train: stop, restart, spare, shrink; several are interleaved.",
        "stop"),
    "restart": Option(MEASUREMENT, "Restart each job from its newest checkpoint, and time it.", False),
    "state": Option(JOB, "Size of the model and optimizer: 100MB. Default: small."),
    "mtbf:train": Option(
        OUTPUT, "With --save-every auto: mean time between faults of the job: 3h, 2d. Default: 1d for each host."),
    "save_every:goodput": Option(JOB, "Evaluate this save interval: 10s, 5min, 2h. Default: the best one."),
    "mtbf": Option(JOB, "Mean time between faults of the whole job: 3h, 120s, 2d"),
    "mtbf_per_rank": Option(JOB, "Mean time between faults of one rank, instead of --mtbf."),
    "ranks:goodput": Option(JOB, "Number of ranks. Default: as in the training run.", read=read_one),
    "runs:goodput": Option(JOB, "Folders of training runs, and of `faults --restart`.", list[Path], flags="argument"),
    "step_seconds": Option(MEASUREMENT, "Seconds per step. This and the options below override measurements.", float),
    "save_seconds": Option(MEASUREMENT, "Seconds that each save stalls training.", float),
    "detect_seconds": Option(MEASUREMENT, "Seconds until a fault is detected.", float),
    "restart_seconds": Option(MEASUREMENT, "Seconds from detection until a restarted job takes steps again.", float),
    "spare_seconds": Option(MEASUREMENT, "Seconds from detection until a spare replaces the lost rank.", float),
    "shrink_seconds": Option(MEASUREMENT, "Seconds from detection until the other ranks continue.", float),
    "all_lost": Option(JOB, "Fraction of faults that leave no replica and need a checkpoint.", "5%"),
    "repair": Option(JOB, "How long the slot of a lost rank stays unavailable.", "0s"),
    "horizon": Option(JOB, "Length of the job, for the 90 % interval.", "30d"),
    "device": Option(JOB, "auto, cpu or cuda", "auto"),
    "device:faults": Option(JOB, "cpu or cuda", "cpu"),
    "threads": Option(JOB, "CPU threads per rank for torch.", int),
    "threads:wrappers": Option(JOB, "CPU threads per rank for torch.", 1),
    "compile": Option(JOB, "Compile the model, block by block.", False),
    "sync_batchnorm": Option(JOB, "Compute BatchNorm statistics over the whole global batch.", False),
    "plan": Option(JOB, "Bucket plan, a file that `tune` writes.", Path, read=lambda path, _: str(path)),
    "strategy": Option(JOB, "bf16, int8, int4, topk:0.01, powersgd:4, diloco:100+int8, zero1, ...", "dense"),
    "strategy:several": Option(JOB, "Compare strategies: all, or a list: bf16,powersgd:4,diloco:100+int8"),
    "ranks:study": Option(JOB, "Number of ranks, instead of --workers. Default: none.", read=read_one),
    "strategies": Option(JOB, "all, or a list: int8,topk:0.01,... dense and bf16 are always included."),
    "workers:study": Option(JOB, "Replicas in one process that exchange data as ranks would. Default: 4.", int),
    "target": Option(MEASUREMENT, "Report when each strategy reaches this test accuracy (0 to 1) or loss.", float),
    "workers": Option(JOB, "Replicas in one process that exchange data as ranks would, to study accuracy.", 1),
    "seed": Option(JOB, "Seed for the model, data order and dropout.", 1),
    "command:run": Option(JOB, "The command, after --: -- python train.py", list[str], flags="argument"),
    "hosts": Option(JOB, "Hosts to use over ssh, with ranks: a:8,b:8. Default ranks: the host's GPUs, else 1."),
    "hosts:doctor": Option(JOB, "Check these hosts over ssh instead: a,b"),
    "slurm": Option(JOB, "Write an sbatch script, show it and submit it.", False),
    "kubernetes": Option(JOB, "Print a manifest without submitting it.", False),
    "nodes": Option(JOB, "Slurm, Kubernetes: number of hosts.", 1),
    "ranks_per_node:run": Option(JOB, "Slurm, Kubernetes: ranks on each host.", 1),
    "time": Option(JOB, "Slurm: time limit, such as 1:00:00"),
    "partition": Option(JOB, "Slurm: partition."),
    "gpus_per_node": Option(JOB, "Slurm, Kubernetes: GPUs per host.", int),
    "sbatch": Option(JOB, "Slurm: additional sbatch options, such as '--qos=high --mem=0'"),
    "image": Option(JOB, "Kubernetes: container image."),
    "kind": Option(JOB, "Kubernetes: job (plain, with its Service) or trainjob (Kubeflow)", "job"),
    "volume": Option(JOB, "Kubernetes: CLAIM:/PATH, a PersistentVolumeClaim and its mount path."),
    "name": Option(JOB, "Name of the job. With --hosts: name of the run's folder, which is resumed if it exists."),
    "folder:run": Option(JOB, "Working folder on the hosts. Default: this one."),
    "env": Option(JOB, "Variable for the ranks: NAME=VALUE, or NAME to pass its value from here.", list[str]),
    "grace": Option(JOB, "Seconds that ranks get to save after a request to stop.", 60.0),
    "interface": Option(JOB, "Network interface between the hosts. Default: chosen by the route between them."),
    "port": Option(JOB, "Rendezvous port on the first host. Default: a free one.", int),
    "python": Option(JOB, "Python on the hosts. Default: the path of this one."),
    "ssh": Option(JOB, "The ssh command, such as 'ssh -p 2222'", "ssh"),
    "check_timeout": Option(JOB, "Timeout in seconds for the checks of all hosts.", 5.0),
    "wait": Option(JOB, "Slurm: show the job's output until it ends, and return its exit code.", False),
    "dry_run": Option(JOB, "Slurm: only print the script.", False),
    "sizes": Option(JOB, "Sizes to measure.", "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"),
    "min_size": Option(JOB, "Smallest size of a range: 8B", flags="--min-size -b"),
    "max_size": Option(JOB, "Largest size of a range: 128MiB", flags="--max-size -e"),
    "factor": Option(JOB, "Factor between the sizes of a range. Default: 2.", float, flags="--factor -f"),
    "collective": Option(JOB, "all_reduce, all_gather, reduce_scatter or broadcast", "all_reduce"),
    "op": Option(JOB, "sum, avg, min, max or prod", "sum"),
    "dtype": Option(JOB, "float32, bfloat16, int64, ...", "float32"),
    "memory": Option(JOB, "Memory of the vectors: ordinary, shared (only with backend shm), or both, interleaved.",
        "ordinary"),
    "memory:trace": Option(MEASUREMENT, "Show what uses memory over a step, and its peak.", False,
        flags="--memory-use"),
    "total": Option(JOB, "Total bytes to reduce (240MB is 60 million floats).", "240MB"),
    "chunks": Option(JOB, "Chunk sizes: 40kB,4MB,... Default: from 10,000 elements to all of them."),
    "models": Option(JOB, "Models: mlp,cnn,gpt2-tiny,... Default: five small ones.", list[str], flags="--model"),
    "wrappers": Option(JOB, "bare,torch,paceline,... Default: all but paceline-tuned.", list[str], flags="--wrapper"),
    "profile": Option(JOB, "Folder of a run of `profile layers`.", Path, flags="--model-profile"),
    "traces": Option(JOB, "Traces of your job from torch.profiler: one file per rank.", list[Path], flags="--trace"),
    "profile:train": Option(MEASUREMENT, "Time the forward, backward and optimizer of each step.", False),
    "runs": Option(JOB, "Finished studies. Default: measure all three.", list[Path], flags="argument"),
    "network": Option(JOB, _NETWORKS),
    "network:table": Option(JOB, _NETWORKS, "nvlink,pcie4,hdr,10gbe"),
    "network:tune": Option(MEASUREMENT, _NETWORKS),
    "network:scale": Option(MEASUREMENT, _NETWORKS, "10gbe,100gbe"),
    "csv": Option(JOB, "Folder with layer-sizes, layer-times and allreduce-times, instead of a profile.", Path),
    "measured": Option(JOB, "With --csv: a table of bucket_size and step_s or backward_s to compare with.", Path),
    "allreduce": Option(JOB, "All-reduce times: a run, nccl-tests output, or a CSV; scaled beyond its ranks.", Path),
    "ranks_per_node": Option(JOB, "Ranks that share a node and its link. Default: 1, or as in the sweep.", int),
    "inside": Option(JOB, "The network inside a node. Default: the sweep of --allreduce, else nvlink."),
    "algorithm": Option(JOB, "auto, ring, tree, two-level, gloo or shared", "auto"),
    "gradients": Option(JOB, "fp32 or bf16. Default: as in the profile."),
    "straggler": Option(JOB, "Variation between ranks: 3% (standard deviation), or profile.", "0%"),
    "profiles": Option(JOB,
        "A run of `profile layers`, instead of a model; several make one table.", list[Path], flags="--model-profile"),
    "curves": Option(JOB, "A run of `bench allreduce`, as an additional network.", list[Path], flags="--curve"),
    "samples": Option(DATA, "Use the first N samples; for synthetic data, generate N.", int),
    "context": Option(DATA, "Tokens per sequence.", int),
    "tokenizer": Option(DATA, "auto (the model's own, or bytes), bytes, or a folder", "auto"),
    "tail": Option(DATA, "A smaller last batch of an epoch: keep, drop, or pad it with the first samples.", "keep"),
    "augment": Option(DATA, "Crop and flip images. Default: CIFAR-10 only.", bool, flags="--augment/--no-augment"),
    "cutout": Option(DATA, "Side length in pixels of the square hidden in augmented images.", 0),
    "test_samples": Option(DATA, "Evaluate on the first N samples. Default: all.", int),
    "channels": Option(MODEL, "Channels of the cnn's convolutions: 32 64 128", read=_read_each),
    "hidden": Option(MODEL, "Width of the hidden layer.", int),
    "dropout": Option(MODEL, "Dropout rate, for models that have dropout.", float),
    "ghost_batchnorm": Option(MODEL, "Compute BatchNorm statistics over N samples at a time.", int),
    "optimizer": Option(LEARNING, "sgd, adamw, lars or lamb", "sgd"),
    "epochs": Option(LEARNING, "Number of passes over the data.", 1),
    "epochs:batch": Option(LEARNING, "Number of passes over the data.", 3),
    "epochs:large": Option(LEARNING, "Number of passes over the data.", 6),
    "epochs:study": Option(LEARNING, "Number of passes over the data. Default: 6.", int),
    "steps": Option(LEARNING, "Optimizer steps, instead of --epochs.", int),
    "steps:attach": Option(MEASUREMENT, "Number of steps of your program to observe; 0: all.", 48),
    "stop": Option(MEASUREMENT, "Stop your program after these steps, on all ranks.", False),
    "steps:tune": Option(MEASUREMENT, "For a command after --: number of steps to observe first. Default: 48.", int),
    "every": Option(MEASUREMENT, "For a command: print a line every N steps. Default: 50.", int),
    "command:watch": Option(JOB, "Folder of a training run, or a command after --", list[str], flags="argument"),
    "runs:report": Option(JOB, "Folders of runs; several are compared.", list[Path], flags="argument"),
    "steps:trace": Option(MEASUREMENT, "Number of steps to record.", 3),
    "batch_growth": Option(LEARNING, "SHARE:FACTOR,...: multiply the batch by FACTOR from this fraction of the run on.",
        read=lambda text, _: parse_growths(text)),
    "grow": Option(LEARNING, "What grows on a rank: accumulate (more micro-batches) or batch-size.", "accumulate"),
    "clip": Option(LEARNING, "Clip gradients to this norm.", float),
    "lr": Option(LEARNING, "Peak learning rate.", 0.05),
    "lr:study": Option(LEARNING, "Learning rate.", 0.02),
    "lr:large": Option(LEARNING, "Peak learning rate.", 0.005),
    "momentum": Option(LEARNING, "Momentum of sgd (Nesterov) or lars.", 0.9),
    "trust_coefficient": Option(LEARNING, "lars: size of a layer's step relative to its weights.", float),
    "weight_decay": Option(LEARNING, "Weight decay of matrices and filters; biases and norms have none.", 0.0),
    "schedule": Option(LEARNING, "constant, cosine or linear (to 0 at the end), piecewise", "constant"),
    "schedule:large": Option(LEARNING, "constant, linear, cosine (the default), piecewise (with --lr-drops)", str),
    "lr_warmup": Option(LEARNING, "Number of steps to warm up the learning rate.", 0),
    "lr_drops": Option(LEARNING, "Where piecewise divides by 10, as fractions of the run: 0.5,0.75", read=_read_drops),
    "label_smoothing": Option(LEARNING, "Fraction of a target that is spread over all classes.", 0.0),
    "recipes": Option(LEARNING, "none, or switches joined by +, each with an optional number: lars:0.2+warmup"),
    "quick": Option(MEASUREMENT, "Fewer bucket sizes and rounds: about a minute.", False),
    "confirm": Option(MEASUREMENT,
        "Only predict; do not run the job with the plans.", False, flags="--no-confirm", read=lambda *_: False),
    "caps": Option(MEASUREMENT, "Bucket sizes to run: 1MiB,4MiB,25MiB. Default: a range."),
    "budget": Option(MEASUREMENT, "Time limit for comparing plans, in seconds. Default: 60, with --quick 30.", float),
    "network_ranks": Option(MEASUREMENT, "Ranks on the network, including this one. Default: 8.", int),
    "predict_ranks": Option(MEASUREMENT, "Predict scaling for these numbers of ranks.", "64,1024", read=parse_counts),
    "seeds": Option(MEASUREMENT, "Runs of each recipe.", 3),
    "updates": Option(MEASUREMENT, "Also run with N updates; 0: never. Default: twice as many as the largest batch.",
        int),
    "evaluations": Option(MEASUREMENT, "Evaluations during a run.", 6),
    "at_once": Option(MEASUREMENT, "Number of concurrent runs. Default: 1, or as in the resumed study.", int),
    "iters": Option(MEASUREMENT, "Timed repetitions. Default: as time allows, up to 100.", int, flags="--iters -n"),
    "warmup": Option(MEASUREMENT,
        "Warm-up repetitions before timing. Default: as time allows, up to 3.", int, flags="--warmup -w"),
    "limit": Option(MEASUREMENT, "Also measure memory bandwidth, and print each row's fraction of it.", False),
    "compare": Option(MEASUREMENT, "Compare with another run, or with a table: CSV, Markdown.", Path),
    "compare:train": Option(MEASUREMENT, "Compare two runs (folders) without training.", tuple[Path, Path]),
    "shapes": Option(MEASUREMENT, "Also record the shapes of operator inputs.", False),
    "strict": Option(MEASUREMENT, "Exit with 1 if a result is too noisy, and say why.", False),
    "plot": Option(OUTPUT, "Draw one step of all ranks.", False),
    "resume": Option(OUTPUT, "Resume the interrupted run in this folder.", Path),
    "save_every": Option(
        OUTPUT, "When a checkpoint is due: epoch, 10s, 5min, 2h, 100steps or auto (see --mtbf)", "60s"),
    "on_fault": Option(JOB,
        "When a rank fails: stop, restart, spare (a warm spare replaces it) or shrink.", "stop"),
    "max_faults": Option(JOB, "Maximum number of faults to recover from.", 10),
    "spares": Option(JOB, "Number of warm spare processes, with --on-fault spare.", 1),
    "hang_timeout": Option(JOB,
        "How long a rank may hang in a step before it is killed; hangs are reported within seconds. Default: 10min.",
        str),
    "keep": Option(OUTPUT, "Number of checkpoints to keep.", 3),
    "watch": Option(OUTPUT, "Serve a live page, and print its address.", False),
    "port:watch": Option(OUTPUT, "Port of the page. Default: a free one.", int),
    "browser": Option(OUTPUT,
        "Open the page. Default: if there is a display.", bool, flags="--browser/--no-browser"),
    "page": Option(OUTPUT, "File to write. Default: report.html in the run's folder, or here for several runs.", Path),
    "tensorboard": Option(OUTPUT, "Also write event files for TensorBoard.", False),
    "out": Option(OUTPUT, "Folder in which to create the run's folder.", Path("runs")),
    "json": Option(OUTPUT, "Print one JSON document and nothing else on stdout.", False),
    "wide": Option(OUTPUT, "Print all table columns, however wide.", False),
}  # fmt: skip
# The options of a training job, most common first.
JOB_OPTIONS = (
    "model data ranks batch_size accumulate precision wrapper backend device threads compile sync_batchnorm plan seed "
    "samples context tokenizer channels hidden dropout optimizer"
)


def add_command(
    app: typer.Typer, name: str, verb: str | Callable[..., Any], names: str, help: str, **always: Any
) -> None:
    """Add a command with the options `names`, in this order in each panel; "-name" removes one again. Without a `name`
    it becomes the default command of a group.

    `verb` ("room.module:function" of the package, or a function) gets the options that the user gave, on top of
    `always`; for all others it uses its own defaults.
    """
    options: dict[str, Option] = {}
    for key in [*names.split(), "out", "json", "wide"]:
        options |= {key.partition(":")[0]: OPTIONS[key.removeprefix("-")]}
    options = {n: option for n, option in options.items() if f"-{n}" not in options and not n.startswith("-")}
    parameters = [inspect.Parameter("context_", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for n, option in sorted(options.items(), key=lambda item: PANELS.index(item[1].panel)):
        kind = option.value | None if option.default is None else type(option.default)
        kind = Path if isinstance(option.default, Path) else kind  # older versions of typer do not support PosixPath
        info = option.build_info(n)
        parameters.append(inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind))

    def run(context_: typer.Context, **values: Any) -> None:
        given = dict(always)
        for name, option in options.items():
            source = context_.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                if option.flags != "argument" or name != "command":  # a command after -- is passed on unchecked
                    check_typed(values[name], find_flag(name))
                given[name] = option.read(values[name], find_flag(name)) if option.read else values[name]
        if (command := context_.invoked_subcommand) is not None:
            flags = ", ".join(map(find_flag, given))
            refuse((flags, f"{flags} before {command} has no effect: put options after {command}"))
            return
        json, wide, strict = (given.pop(name, False) for name in ("json", "wide", "strict"))
        if "resume" in given and isinstance(verb, str) and verb.startswith("studies."):
            jobs = importlib.import_module("paceline.verbs.jobs")  # imported late, because it is slow
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


_USAGE_ERROR: Any = typer.BadParameter.__bases__[0]  # click's class, or the copy in typer


class _Command(TyperCommand):
    """A command whose errors always show its usage: for a missing value, the parser does not set the context."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except _USAGE_ERROR as error:
            error.ctx = error.ctx or ctx
            raise


def print_result(result: Result, json: bool, wide: bool = False, strict: bool = False) -> int:
    """Print a result on rank 0. Returns the exit code: 1 for a failure or, with `strict`, for noise; else 0."""
    from paceline.runtime.environment import read_place

    try:
        leads = read_place().rank == 0
    except ConfigError:  # only some of a launcher's variables are set: no other rank would print
        leads = True
    if leads:
        if json:
            print(encoder.dumps(result.to_json(), indent=1, allow_nan=False))
        else:  # fit the terminal, or COLUMNS; redirected output is not limited
            print(result.text(None if wide else shutil.get_terminal_size((0, 0)).columns or None))
    reasons: Sequence[str] = [result.failure] if result.failure else result.noise if strict else []
    for reason in reasons if leads else []:
        print(f"paceline: failed{'' if result.failure else ' (--strict)'}: {reason}", file=sys.stderr)
    return 1 if reasons else 0
