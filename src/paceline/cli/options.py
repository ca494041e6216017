"""The options that several commands share, how what was typed is read, and how a result is printed."""

from __future__ import annotations

import json as encoder
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.units import parse_counts

if TYPE_CHECKING:
    from paceline.report.result import Result

# Panels of the help, in this order.
PANELS = JOB, DATA, MODEL, LEARNING, MEASUREMENT, OUTPUT = "Job", "Data", "Model", "Learning", "Measurement", "Output"

BACKEND_HELP = "gloo, shm (shared memory) or nccl; several are measured in turns: gloo,shm"
NETWORK_HELP = "Networks: nvlink,pcie4,hdr,100gbe,10gbe,1gbe, or bandwidth and latency such as 10Gb/s,50us."
MODEL_HELP = "mlp, cnn, resnet18, gpt2-tiny, ..., hf:NAME, or FILE.py:FUNCTION"

Backend = Annotated[str, typer.Option("--backend", help=BACKEND_HELP, rich_help_panel=JOB)]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        help="Numbers of ranks: 2,4,6. Default: the launched world's, else 2.",
        rich_help_panel=JOB,
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, int64, ...", rich_help_panel=JOB)]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda", rich_help_panel=JOB)]
BatchSize = Annotated[
    str | None,
    typer.Option(
        "--batch-size",
        help="Samples per rank. Default: the model's.",
        rich_help_panel=JOB,
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Torch's threads per rank, on the CPU.", rich_help_panel=JOB)
]
Iters = Annotated[
    int | None,
    typer.Option(
        "--iters",
        "-n",
        help="Timed repetitions. Default: as the time allows, up to 100.",
        rich_help_panel=MEASUREMENT,
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        "-w",
        help="Repetitions before the timed ones. Default: as the time allows, up to 3.",
        rich_help_panel=MEASUREMENT,
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Exit with 1 where a result is too noisy, and say why.", rich_help_panel=MEASUREMENT),
]
Out = Annotated[
    Path, typer.Option("--out", help="Folder in which the run gets its own folder.", rich_help_panel=OUTPUT)
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document and nothing else on stdout.", rich_help_panel=OUTPUT),
]
Wide = Annotated[
    bool, typer.Option("--wide", help="Print every column of the tables, however wide.", rich_help_panel=OUTPUT)
]


def read_counts(ranks: str | None) -> tuple[int, ...] | None:
    """The numbers of ranks that were typed, None where none were."""
    return None if ranks is None else parse_counts(ranks, "--ranks")


# -- output ------------------------------------------------------------------------------------------------------------


def find_width() -> int | None:
    """The columns of the terminal (or COLUMNS); None where the output goes elsewhere, and need not be cut."""
    return shutil.get_terminal_size((0, 0)).columns or None


def print_result(result: Result, json: bool, wide: bool = False, strict: bool = False) -> int:
    """Print a result on the rank that leads, and return the exit code: 1 for a failure or, with `strict`, for noise."""
    if is_leading():
        if json:
            print(encoder.dumps(result.to_json(), indent=1, allow_nan=False))
        else:
            print(result.text(None if wide else find_width()))
    return find_exit_code(result, strict)


def find_exit_code(result: Result, strict: bool = False) -> int:
    """1 for a failure or, with `strict`, for noise, which stderr explains; else 0."""
    reasons: Sequence[str] = [result.failure] if result.failure else result.noise if strict else []
    if is_leading():
        for reason in reasons:
            print(f"paceline: failed{'' if result.failure else ' (--strict)'}: {reason}", file=sys.stderr)
    return 1 if reasons else 0


def is_leading() -> bool:
    """Whether this process prints: every plain one, and rank 0 of a launched world."""
    from paceline.errors import ConfigError
    from paceline.runtime.environment import is_launched, read_place

    try:
        return not is_launched() or read_place().rank == 0
    except ConfigError:  # half of a launcher's variables: nobody else would say so
        return True
