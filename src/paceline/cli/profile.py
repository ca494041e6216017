"""`paceline profile`: where the time of training steps goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.jobs import build_bare_settings, build_settings, read_one, takes_job
from paceline.cli.options import (
    JOB,
    MEASUREMENT,
    NETWORK_HELP,
    OUTPUT,
    Iters,
    Json,
    Out,
    Warmup,
    Wide,
    print_result,
    read_counts,
)
from paceline.errors import ConfigError
from paceline.units import parse_counts

app = typer.Typer(help="See where the time of training steps goes.", no_args_is_help=False)


@app.callback(invoke_without_command=True)
def _profile(
    context: typer.Context,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Compare two runs of one kind of profile.")
    ] = None,
    json: Json = False,
    wide: Wide = False,
) -> None:
    if context.invoked_subcommand is not None:
        verb = context.invoked_subcommand
        if compare is not None:
            raise ConfigError(f"--compare stands alone: leave out {verb}")
        for flag in [name for name, given in (("--json", json), ("--wide", wide)) if given]:
            raise ConfigError(f"{flag} before {verb} has no effect: write profile {verb} {flag}")
        return
    if compare is None:
        print(context.get_help())
        raise typer.Exit(2)
    from paceline.verbs import profile

    raise typer.Exit(print_result(profile.compare(*compare), json, wide))


def _read_job(settings: Any) -> dict[str, Any]:
    """What was typed of a job, as the arguments of a verb."""
    return {name: value for name, value in settings.to_json().items() if name not in ("ranks", "batch_size")}


@app.command("phases")
@takes_job(
    help={
        "ranks": "Numbers of ranks: 1,2,4. Default: the launched world's, else 2.",
        "batch_size": "Samples per rank in a micro-batch: 32,128. Default: 32.",
    }
)
def phases(
    job: dict[str, Any],
    iters: Iters = None,
    warmup: Warmup = None,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Data wait, forward, backward, optimizer, and communication: exposed (compared with steps without) and busy."""
    from paceline.verbs import profile

    result = profile.phases(
        ranks=read_counts(job["ranks"]),
        batch_size=None if job["batch_size"] is None else parse_counts(job["batch_size"], "--batch-size"),
        iters=iters,
        warmup=warmup,
        out=out,
        progress=True,
        **_read_job(build_settings(job, 1, None)),
    )
    raise typer.Exit(print_result(result, json, wide))


@app.command("layers")
@takes_job
def layers(
    job: dict[str, Any],
    iters: Iters = None,
    warmup: Warmup = None,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """When each gradient is ready, and forward and backward of each block, on one rank."""
    from paceline.verbs import profile

    profile.check_counts(iters=iters, warmup=warmup)
    if job["ranks"] not in (None, "1"):
        raise ConfigError(f"--ranks {job['ranks']}: layers are timed on one rank, where no message disturbs them")
    options = _read_bare_job(job)
    result = profile.layers(iters=iters, warmup=warmup, out=out, progress=True, **options)
    raise typer.Exit(print_result(result, json, wide))


def _read_bare_job(job: dict[str, Any]) -> dict[str, Any]:
    """The same of a job as one rank computes it alone."""
    settings = build_bare_settings(job)
    options = _read_job(settings) | {"batch_size": settings.batch_size}
    del options["wrapper"]
    return options


@app.command("trace")
@takes_job
def trace(
    job: dict[str, Any],
    steps: Annotated[int, typer.Option("--steps", help="Steps that are recorded.", rich_help_panel=MEASUREMENT)] = 3,
    warmup: Warmup = None,
    memory: Annotated[
        bool, typer.Option("--memory-use", help="Record allocations, too.", rich_help_panel=MEASUREMENT)
    ] = False,
    shapes: Annotated[
        bool, typer.Option("--shapes", help="Record the shapes of operators' inputs, too.", rich_help_panel=MEASUREMENT)
    ] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw one step of all ranks.", rich_help_panel=OUTPUT)] = False,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Record steps on every rank as one Perfetto trace, and say with numbers what would make them faster."""
    from paceline.verbs import profile

    result = profile.trace(
        ranks=read_counts(job["ranks"]),
        batch_size=read_one(job["batch_size"], "--batch-size"),
        warmup=warmup,
        memory=memory,
        shapes=shapes,
        plot=plot,
        out=out,
        progress=True,
        **_read_job(build_settings(job, 1, None)) | {"steps": steps},  # not those of a training run
    )
    raise typer.Exit(print_result(result, json, wide))


@app.command("comm-table")
@takes_job
def comm_table(
    job: dict[str, Any],
    network: Annotated[
        str, typer.Option("--network", help=NETWORK_HELP, rich_help_panel=JOB)
    ] = "nvlink,pcie4,hdr,10gbe",
    curve: Annotated[
        list[Path] | None,
        typer.Option("--curve", help="A run of `bench allreduce` whose curve is used, too.", rich_help_panel=JOB),
    ] = None,
    iters: Iters = None,
    warmup: Warmup = None,
    out: Out = Path("runs"),
    json: Json = False,
    wide: Wide = False,
) -> None:
    """What gradients cost on given networks, compared with the measured computation of a step."""
    from paceline.verbs import profile

    profile.check_counts(iters=iters, warmup=warmup)
    counts = read_counts(job["ranks"]) or (2, 4, 8, 64)
    result = profile.comm_table(
        network=network,
        curves=curve or (),
        ranks=counts,
        iters=iters,
        warmup=warmup,
        out=out,
        progress=True,
        **_read_bare_job(job),
    )
    raise typer.Exit(print_result(result, json, wide))
