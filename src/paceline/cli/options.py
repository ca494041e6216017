"""The options that several verbs share: one name and one meaning each, and how what was typed is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.units import parse_counts

__all__ = [
    "BACKEND_HELP",
    "COMPARE_HELP",
    "MODEL_HELP",
    "NETWORK_HELP",
    "STEPS_HELP",
    "WRAPPER_HELP",
    "Backend",
    "BatchSize",
    "Device",
    "Dtype",
    "Iters",
    "Json",
    "Out",
    "Ranks",
    "Strict",
    "Threads",
    "Warmup",
    "group_options",
    "read_ranks",
    "split_names",
]

BACKEND_HELP = "gloo, paceline or nccl; a benchmark takes several, in turns: gloo,paceline"
NETWORK_HELP = "Networks: nvlink,pcie4,hdr,100gbe,10gbe,1gbe, or 10Gb/s,50us by itself."
STEPS_HELP = "How many optimizer steps: of a run, instead of --epochs; of a trace, those that are recorded."
Backend = Annotated[str, typer.Option("--backend", help=BACKEND_HELP)]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        help="Number of ranks; a benchmark takes several: 2,4,6. Default: the launched world's, else 2 (train: 1).",
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, int64, ...")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda")]
BatchSize = Annotated[
    str | None,
    typer.Option(
        "--batch-size",
        help="Samples per rank in a micro-batch; a profile takes several: 32,128. Default: 32, or the model's.",
    ),
]
Threads = Annotated[int | None, typer.Option("--threads", help="Torch's threads per rank, on the CPU.")]
Iters = Annotated[
    int | None, typer.Option("--iters", "-n", help="Timed repetitions. Default: as the time allows, up to 100.")
]
Warmup = Annotated[
    int | None, typer.Option("--warmup", "-w", help="Repetitions before. Default: as the time allows, up to 3.")
]
Out = Annotated[Path, typer.Option("--out", help="Folder in which the run gets its own folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else on stdout.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit 1 when a result is too noisy to be believed.")]
COMPARE_HELP = "Put runs side by side: bench one (or a table: CSV, Markdown) beside its own, profile two of a kind."
# One meaning in all verbs: a benchmark takes a list, training one of them.
MODEL_HELP = "mlp, cnn, resnet18, gpt2-tiny, ..., hf:NAME or FILE.py:FUNCTION; a benchmark takes several names: mlp,cnn"
WRAPPER_HELP = "paceline, torch, none or dp; a benchmark takes several, in turns: bare,torch,torch-tuned,paceline"


def split_names(names: str) -> tuple[str, ...]:
    """The names of a comma-separated list, without repeats."""
    return tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def read_ranks(ranks: str | None) -> tuple[int, ...]:
    """The numbers of ranks that were asked for, or else the launched world's."""
    from paceline.runtime.environment import is_launched, read_place

    if ranks is not None:
        return parse_counts(ranks, "--ranks")
    return (read_place().world_size,) if is_launched() else (2,)


def group_options(
    backend: str, ranks: str | None, dtype: str, device: str, iters: int | None, warmup: int | None
) -> dict[str, Any]:
    """What was typed, as the arguments that the settings of every benchmark of a process group share."""
    return {
        "backends": split_names(backend), "ranks": read_ranks(ranks), "dtype": dtype, "device": device,
        "iters": iters, "warmup": warmup,
    }  # fmt: skip
