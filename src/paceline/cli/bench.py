"""`paceline bench`: how fast collectives and data-parallel wrappers are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.options import (
    JOB,
    MEASUREMENT,
    Backend,
    Device,
    Dtype,
    Iters,
    Json,
    Out,
    Ranks,
    Strict,
    Threads,
    Warmup,
    Wide,
    print_result,
    read_counts,
)
from paceline.errors import ConfigError
from paceline.units import parse_size, parse_sizes, size_range

app = typer.Typer(help="Measure collectives and wrappers on this machine or cluster.", no_args_is_help=True)

_SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"


def _read_sizes(
    sizes: str | None, first: str | None, last: str | None, factor: float | None, dtype: str
) -> tuple[int, ...]:
    from paceline.records.kinds import ITEM_BYTES

    if sizes is not None and (first, last, factor) != (None, None, None):
        raise ConfigError("--sizes contradicts --min-size, --max-size and --factor: give a list or a range")
    if first is None and last is None and factor is None:
        return parse_sizes(_SIZES if sizes is None else sizes)
    if first is None or last is None:
        raise ConfigError("a range of sizes needs --min-size (-b) and --max-size (-e)")
    multiple = ITEM_BYTES.get(dtype, 1)
    return size_range(parse_size(first), parse_size(last), 2.0 if factor is None else factor, multiple)


@app.command()
def allreduce(
    ranks: Ranks = None,
    backend: Backend = "gloo",
    sizes: Annotated[
        str | None, typer.Option("--sizes", help=f"Sizes to measure: {_SIZES}", rich_help_panel=JOB)
    ] = None,
    min_size: Annotated[
        str | None, typer.Option("--min-size", "-b", help="First size of a range: 8B", rich_help_panel=JOB)
    ] = None,
    max_size: Annotated[
        str | None, typer.Option("--max-size", "-e", help="Last size of a range: 128MiB", rich_help_panel=JOB)
    ] = None,
    factor: Annotated[
        float | None, typer.Option("--factor", "-f", help="Factor of a range. Default: 2.", rich_help_panel=JOB)
    ] = None,
    collective: Annotated[
        str,
        typer.Option("--collective", help="all_reduce, all_gather, reduce_scatter or broadcast", rich_help_panel=JOB),
    ] = "all_reduce",
    op: Annotated[str, typer.Option("--op", help="sum, avg, min, max or prod", rich_help_panel=JOB)] = "sum",
    dtype: Dtype = "float32",
    device: Device = "auto",
    memory: Annotated[
        str,
        typer.Option(
            "--memory",
            help="Where vectors are: ordinary, shared (backend shm alone), or both, in turns.",
            rich_help_panel=JOB,
        ),
    ] = "ordinary",
    iters: Iters = None,
    warmup: Warmup = None,
    limit: Annotated[
        bool,
        typer.Option(
            "--limit",
            help="Measure what memory could do, too, and print each row's fraction of it.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare", help="Compare with another run, or with a table: CSV, Markdown.", rich_help_panel=MEASUREMENT
        ),
    ] = None,
    strict: Strict = False,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """How fast is all-reduce here? Backends x ranks x sizes in one run, every element checked."""
    from paceline.verbs import bench

    result = bench.allreduce(
        ranks=read_counts(ranks),
        sizes=_read_sizes(sizes, min_size, max_size, factor, dtype),
        backend=backend,
        collective=collective,
        op=op,
        dtype=dtype,
        device=device,
        memory=memory,
        limit=limit,
        iters=iters,
        warmup=warmup,
        compare=compare,
        out=out,
        progress=True,
    )
    raise typer.Exit(print_result(result, json, wide, strict))


@app.command()
def chunks(
    ranks: Ranks = None,
    backend: Backend = "gloo",
    total: Annotated[
        str,
        typer.Option("--total", help="Bytes reduced in all (240MB is 60 million floats).", rich_help_panel=JOB),
    ] = "240MB",
    chunk_sizes: Annotated[
        str | None,
        typer.Option(
            "--chunks",
            help="Chunk sizes: 40kB,4MB,... Default: 10 thousand elements up to all.",
            rich_help_panel=JOB,
        ),
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    iters: Iters = None,
    warmup: Warmup = None,
    strict: Strict = False,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """What does cutting one message into chunks cost? Total time by elements per all-reduce."""
    from paceline.verbs import bench

    result = bench.chunks(
        ranks=read_counts(ranks),
        total=total,
        chunks=chunk_sizes,
        backend=backend,
        dtype=dtype,
        device=device,
        iters=iters,
        warmup=warmup,
        out=out,
        progress=True,
    )
    raise typer.Exit(print_result(result, json, wide, strict))


@app.command()
def wrappers(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", help="Built-in models: mlp,cnn,gpt2-tiny,... Default: five small ones.", rich_help_panel=JOB
        ),
    ] = None,
    wrapper: Annotated[
        list[str] | None,
        typer.Option(
            "--wrapper",
            help="Wrappers: bare,torch,torch-tuned,paceline,paceline-flat,... Default: all.",
            rich_help_panel=JOB,
        ),
    ] = None,
    backend: Backend = "gloo",
    ranks: Ranks = None,
    batch_size: Annotated[
        str | None,
        typer.Option("--batch-size", help="Samples per rank in a step. Default: the model's own.", rich_help_panel=JOB),
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    threads: Threads = 1,
    iters: Iters = None,
    warmup: Warmup = None,
    strict: Strict = False,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Is Paceline's wrapper faster than torch's, here? Replicas of a model take steps in turns, one per wrapper."""
    from paceline.cli.jobs import read_one
    from paceline.measure.settings import DEFAULT_MODELS, WRAPPERS
    from paceline.verbs import bench

    result = bench.wrappers(
        models=DEFAULT_MODELS if model is None else ",".join(model),
        wrappers=WRAPPERS if wrapper is None else ",".join(wrapper),
        ranks=read_counts(ranks),
        backend=backend,
        batch_size=read_one(batch_size, "--batch-size"),
        dtype=dtype,
        device=device,
        threads=threads or 1,
        iters=iters,
        warmup=warmup,
        out=out,
        progress=True,
    )
    raise typer.Exit(print_result(result, json, wide, strict))
