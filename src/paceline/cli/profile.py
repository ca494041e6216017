"""`paceline profile`: where the time of training goes. The measuring is done in `measure`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.jobs import (
    build_bare_settings,
    build_settings,
    check_counts,
    check_job,
    read_one,
    read_world,
    takes_job,
)
from paceline.cli.options import COMPARE_HELP, NETWORK_HELP, Iters, Json, Out, Warmup
from paceline.errors import ConfigError
from paceline.units import parse_counts

__all__ = ["app"]

app = typer.Typer(help="See where the time of training steps goes.", no_args_is_help=False)


@app.callback(invoke_without_command=True)
def _profile(
    context: typer.Context,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option("--compare", help=COMPARE_HELP),
    ] = None,
    json: Json = False,
) -> None:
    if context.invoked_subcommand is not None:
        verb = context.invoked_subcommand
        if compare is not None:
            raise ConfigError(f"--compare stands alone: leave out {verb}")
        if json:
            raise ConfigError(f"--json before {verb} says nothing to it: write profile {verb} --json")
        return
    if compare is None:
        print(context.get_help())
        raise typer.Exit(2)
    from paceline.cli.profile_compare import compare_profiles

    compare_profiles(*compare, json)


@app.command("phases")
@takes_job(
    help={
        "ranks": "Numbers of ranks: 1,2,4. Default: the launched world's, else 2.",
        "batch_size": "Samples per rank in a micro-batch: 32,128. Default: 32.",
    }
)
def phases(
    job: dict[str, Any], iters: Iters = None, warmup: Warmup = None, out: Out = Path("runs"), json: Json = False
) -> None:
    """Data wait, forward, backward, optimizer, and communication: exposed (against steps without) and busy."""
    from paceline.cli.profiling import open_run, run_on_ranks, show_cells

    check_counts(iters=iters, warmup=warmup)
    counts = read_world(job["ranks"], 2)
    sizes = parse_counts(job["batch_size"], "--batch-size") if job["batch_size"] is not None else (32,)
    asked = [build_settings(job, count, sizes[0]) for count in counts]
    for settings in asked:
        check_job(settings)
    with open_run("profile phases", asked[0], out) as run:

        def load() -> Callable[..., Any]:
            from paceline.measure.phases import measure_phases

            return measure_phases

        records: list[Any] = []
        grid = {"batch_sizes": list(sizes), "ranks": list(counts)}
        try:
            with show_cells("profile phases", len(asked)) as show:
                for number, settings in enumerate(asked):

                    def hear(message: Any, number: int = number) -> None:
                        records.extend(message.records)
                        show(number, message)

                    run_on_ranks(settings, load, (settings, sizes, iters, warmup), hear)
        except BaseException:
            if records and run is not None:
                run.save(records, ["broken off: the cells that were finished"], grid)
            raise
        if run is None:
            return
        from paceline.report.phase_tables import describe_phases, phase_row, phase_table

        notes = [line for record in records for line in describe_phases(record)]
        run.save(records, notes, grid)
        run.write_table("table", phase_table, records, [phase_row(record) for record in records])
        if json:
            run.print_json({"records": [phase_row(record) for record in records]})
            return
        run.print_table(phase_table, records, "phases")
        run.close(notes)


@app.command("layers")
@takes_job
def layers(
    job: dict[str, Any], iters: Iters = None, warmup: Warmup = None, out: Out = Path("runs"), json: Json = False
) -> None:
    """When each gradient is ready, and forward and backward of each block, on one rank."""
    from paceline.cli.profiling import open_run, run_on_ranks, show_share

    check_counts(iters=iters, warmup=warmup)
    if job["ranks"] not in (None, "1"):
        raise ConfigError(f"--ranks {job['ranks']}: layers are timed on one rank, where no message disturbs them")
    settings = build_bare_settings(job)
    check_job(settings)
    with open_run("profile layers", settings, out) as run:

        def load() -> Callable[..., Any]:
            from paceline.measure.training_traces import measure_job_layers

            return measure_job_layers

        with show_share("profile layers") as show:
            record = run_on_ranks(settings, load, (settings, iters or 20, 3 if warmup is None else warmup), show)
        assert run is not None
        from paceline.records.exchange import export_layer_sizes, export_layer_times
        from paceline.report import layer_tables
        from paceline.report.layer_plots import plot_ready

        notes = layer_tables.describe_profile(record)
        run.save([record], notes, {})
        blocks, parameters = layer_tables.block_lines(record), layer_tables.parameter_lines(record)
        block_rows = [layer_tables.block_row(line) for line in blocks]
        parameter_rows = [layer_tables.parameter_row(line) for line in parameters]
        run.write_table("blocks", layer_tables.block_table, blocks, block_rows)
        run.write_table("parameters", layer_tables.parameter_table, parameters, parameter_rows)
        run.folder.write("layer-sizes.csv", export_layer_sizes(record.layer_sizes))
        run.folder.write("layer-times.csv", export_layer_times(record.layer_times))
        run.write_figure("ready", plot_ready(record, run.machine))
        if json:
            run.print_json({"blocks": block_rows, "parameters": parameter_rows, "notes": notes})
            return
        run.print_table(layer_tables.block_table, blocks, f"{record.model}, blocks")
        run.close(notes)


@app.command("trace")
@takes_job
def trace(
    job: dict[str, Any],
    steps: Annotated[int, typer.Option("--steps", help="Steps that are recorded.")] = 3,
    warmup: Warmup = None,
    memory: Annotated[bool, typer.Option("--memory-use", help="Record allocations, too.")] = False,
    shapes: Annotated[bool, typer.Option("--shapes", help="Record the shapes of operators' inputs, too.")] = False,
    plot: Annotated[bool, typer.Option("--plot", help="Draw one step of all ranks.")] = False,
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """Record steps on every rank as one Perfetto trace, and say with numbers what would make them faster."""
    from paceline.cli.profiling import open_run, run_on_ranks, show_share

    check_counts(steps=steps)
    if warmup == 0:
        raise ConfigError("--warmup 0: torch's profiler starts in a warm-up; at least 1 is needed")
    check_counts(warmup=warmup)
    counts = read_world(job["ranks"], 2)
    if len(counts) != 1:
        raise ConfigError(f"--ranks {job['ranks']}: a trace is of one number of ranks")
    settings = build_settings(job, counts[0], read_one(job["batch_size"], "--batch-size"))
    check_job(settings)
    extras = tuple(name for name, wanted in (("memory", memory), ("shapes", shapes)) if wanted)
    with open_run("profile trace", settings, out) as run:

        def load() -> Callable[..., Any]:
            from paceline.measure.training_traces import trace_job

            return trace_job

        with show_share("profile trace") as show:
            traced = run_on_ranks(settings, load, (settings, 3 if warmup is None else warmup, steps, extras), show)
        if run is None:
            return
        from paceline.cli.profile_trace import report_trace

        report_trace(run, settings, traced, plot, json)


@app.command("comm-table")
@takes_job
def comm_table(
    job: dict[str, Any],
    network: Annotated[str, typer.Option("--network", help=NETWORK_HELP)] = "nvlink,pcie4,hdr,10gbe",
    curve: Annotated[
        list[Path] | None, typer.Option("--curve", help="A run of `bench allreduce` whose curve is used, too.")
    ] = None,
    iters: Iters = None,
    warmup: Warmup = None,
    out: Out = Path("runs"),
    json: Json = False,
) -> None:
    """What gradients cost on given networks, beside the measured computation of a step: predicted overheads."""
    from paceline.cli.profile_networks import report_networks

    check_counts(iters=iters, warmup=warmup)
    counts = parse_counts(job["ranks"], "--ranks") if job["ranks"] is not None else (2, 4, 8, 64)
    settings = build_bare_settings(job)
    check_job(settings)
    report_networks(settings, counts, network, curve or [], iters or 10, 2 if warmup is None else warmup, out, json)
