"""`paceline bench wrappers`: data-parallel wrappers against each other. The measuring is done in `measure`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.jobs import read_one
from paceline.cli.options import (
    JOB,
    MODEL_HELP,
    Backend,
    BatchSize,
    Device,
    Dtype,
    Iters,
    Json,
    Out,
    Ranks,
    Strict,
    Threads,
    Warmup,
    group_options,
    split_names,
)

if TYPE_CHECKING:
    from paceline.cli.session import Session
    from paceline.records import Run, StepRecord

__all__ = ["wrappers"]


def wrappers(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", help=f"{MODEL_HELP}; several: mlp,cnn", rich_help_panel=JOB),
    ] = None,
    wrapper: Annotated[
        list[str] | None,
        typer.Option("--wrapper", help="In turns: bare,torch,torch-tuned,paceline,dp", rich_help_panel=JOB),
    ] = None,
    backend: Backend = "gloo",
    ranks: Ranks = None,
    batch_size: BatchSize = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    threads: Threads = 1,
    iters: Iters = None,
    warmup: Warmup = None,
    out: Out = Path("runs"),
    json: Json = False,
    strict: Strict = False,
) -> None:
    """Is my wrapper faster than torch's, here? Replicas of a model step in turns, one for each wrapper."""
    from paceline.cli.session import run_measurement
    from paceline.measure.wrapper_settings import DEFAULT_MODELS, WRAPPERS, WrapperSettings

    settings = WrapperSettings(
        models=DEFAULT_MODELS if model is None else split_names(",".join(model)),
        wrappers=WRAPPERS if wrapper is None else split_names(",".join(wrapper)),
        batch_size=read_one(batch_size, "--batch-size"),
        threads=threads or 1,
        **group_options(backend, ranks, dtype, device, iters, warmup),
    )

    def load() -> Callable[..., Any]:
        from paceline.measure.wrappers import measure_wrappers

        return measure_wrappers

    def report(session: Session, run: Run) -> None:
        _report(session, run, json)

    raise typer.Exit(run_measurement("bench wrappers", settings, out, strict, load, report))


def _report(session: Session, run: Run, json: bool) -> None:
    from paceline.cli.session import describe_machine, print_json, stdout
    from paceline.records.steps import compare_wrappers
    from paceline.report import plots, tables
    from paceline.report.wrapper_tables import choose_columns, wrapper_row

    assert session.folder is not None
    records: Sequence[StepRecord] = run.records  # type: ignore[assignment]
    standings = compare_wrappers(records)
    rows, columns = [wrapper_row(standing) for standing in standings], choose_columns(standings)
    session.write_tables(columns, standings, rows)
    session.write_figure("wrappers", plots.plot_wrappers(records, f"{describe_machine()}; {records[0].precision}"))
    if json:
        print_json({"rows": rows, "run": str(session.folder.path), "warnings": list(run.warnings)})
        return
    console = stdout()
    for job in dict.fromkeys((record.job, record.cell) for record in records):
        mine = [standing for standing in standings if (standing.record.job, standing.record.cell) == job]
        n = mine[0].record.world_size
        title = f"{n} rank{'s' if n > 1 else ''}, {mine[0].record.batch_size} samples each"
        told = ("ranks", "batch")  # in the title
        filled = [c for c in columns if c.name not in told and any(c.cell(standing) for standing in mine)]
        console.print(tables.render_terminal(filled, mine, title, console.width))
        for standing in mine:
            if standing.record.wrapper == "torch-tuned":
                where = f" on {standing.record.backend}" if len({s.record.backend for s in mine}) > 1 else ""
                console.print(f"torch-tuned{where}: {standing.record.configuration}; {standing.record.note}\n")
    console.print("[dim]ratios are medians of step / step in the same repetition, ± 95 %; = is 1 within that[/]")
    session.print_closing(run.warnings)
