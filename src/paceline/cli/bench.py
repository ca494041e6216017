"""`paceline bench`: all-reduce and its kin, and what chunking costs; wrappers are in `bench_wrappers`.

The measuring is done in `measure`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import (
    COMPARE_HELP,
    Backend,
    Device,
    Dtype,
    Iters,
    Json,
    Out,
    Ranks,
    Strict,
    Warmup,
    group_options,
    split_names,
)
from paceline.errors import ConfigError
from paceline.units import parse_size, parse_sizes, size_range

if TYPE_CHECKING:
    from paceline.cli.session import Session
    from paceline.predict.curves import AlphaBeta
    from paceline.records import ChunksRecord, CollectiveRecord, Run

__all__ = ["allreduce", "app", "chunks"]

app = typer.Typer(help="Measure collectives and wrappers on this machine or cluster.", no_args_is_help=True)

_DEFAULT_SIZES = "64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
_MAX_IMPORTED = 6  # curves beside the measured ones, before a chart becomes a thicket
_DEFAULT_CHUNK_ELEMENTS = (10**4, 3 * 10**4, 10**5, 3 * 10**5, 10**6, 3 * 10**6, 10**7, 3 * 10**7)


def _read_sizes(
    sizes: str | None, first: str | None, last: str | None, factor: float | None, item_bytes: int
) -> tuple[int, ...]:
    if sizes is not None and (first, last, factor) != (None, None, None):
        raise ConfigError("--sizes contradicts --min-size, --max-size and --factor: give a list or a range")
    if first is None and last is None and factor is None:
        return parse_sizes(_DEFAULT_SIZES if sizes is None else sizes)
    if first is None or last is None:
        raise ConfigError("a range of sizes needs --min-size (-b) and --max-size (-e)")
    return size_range(parse_size(first), parse_size(last), 2.0 if factor is None else factor, item_bytes)


def _read_memories(memory: str) -> tuple[str, ...]:
    """The kinds of memory that were asked for, ordinary first."""
    names = split_names(memory)
    return ("ordinary", "shared") if "both" in names else tuple(sorted(names))


@app.command()
def allreduce(
    backend: Backend = "gloo",
    ranks: Ranks = None,
    sizes: Annotated[str | None, typer.Option("--sizes", help=f"Sizes: {_DEFAULT_SIZES}")] = None,
    min_size: Annotated[str | None, typer.Option("--min-size", "-b", help="First size of a range: 8B")] = None,
    max_size: Annotated[str | None, typer.Option("--max-size", "-e", help="Last size of a range: 128MiB")] = None,
    factor: Annotated[float | None, typer.Option("--factor", "-f", help="Factor of a range. Default: 2.")] = None,
    collective: Annotated[
        str, typer.Option("--collective", help="all_reduce, all_gather, reduce_scatter or broadcast")
    ] = "all_reduce",
    dtype: Dtype = "float32",
    op: Annotated[str, typer.Option("--op", help="sum, avg, min, max or prod")] = "sum",
    device: Device = "auto",
    memory: Annotated[
        str,
        typer.Option(
            "--memory", help="Where vectors lie: ordinary, shared (backend paceline's own), or both, in turns."
        ),
    ] = "ordinary",
    limit: Annotated[
        bool, typer.Option("--limit", help="Measure what memory could do, too, and print each row's fraction of it.")
    ] = False,
    iters: Iters = None,
    warmup: Warmup = None,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", help=COMPARE_HELP),
    ] = None,
    out: Out = Path("runs"),
    json: Json = False,
    strict: Strict = False,
) -> None:
    """How fast is all-reduce here? Backends x ranks x sizes in one run, every element checked."""
    from paceline.cli.session import run_measurement
    from paceline.measure.settings import CollectiveSettings
    from paceline.records.exchange import load_table
    from paceline.records.kinds import ITEM_BYTES

    num_bytes = _read_sizes(sizes, min_size, max_size, factor, ITEM_BYTES.get(dtype, 1))
    settings = CollectiveSettings(
        sizes=num_bytes, collective=collective, op=op, memories=_read_memories(memory), limit=limit,
        **group_options(backend, ranks, dtype, device, iters, warmup),
    )  # fmt: skip
    settings.check()
    theirs = load_table(compare) if compare is not None else []
    if theirs and not any(record.collective == collective for record in theirs):
        raise ConfigError(f"{compare} holds {theirs[0].collective} and no {collective}: nothing to compare")

    def load() -> Callable[..., Any]:
        from paceline.measure.collectives import measure_collectives

        return measure_collectives

    def report(session: Session, run: Run) -> None:
        warnings = [*run.warnings, *(_find_differences(run, compare) if compare is not None else ())]
        _report_collectives(session, run, theirs, warnings, json)

    raise typer.Exit(run_measurement("bench allreduce", settings, out, strict, load, report))


def _find_differences(run: Run, compare: Path) -> list[str]:
    """What makes this run and the compared one incomparable; a table that is no run does not say."""
    from paceline.records import load_run

    if not (compare.is_dir() or compare.suffix == ".json"):
        return []
    return [
        f"compared with another {difference}"
        for difference in run.environment.differences(load_run(compare).environment)
    ]


def _report_collectives(
    session: Session, run: Run, theirs: Sequence[CollectiveRecord], warnings: Sequence[str], json: bool
) -> None:
    from paceline.cli.session import describe_machine, print_json, stdout
    from paceline.predict.curves import fit_collectives
    from paceline.records import CollectiveRecord
    from paceline.records.bounds import MemoryBounds
    from paceline.records.exchange import export_allreduce_times
    from paceline.report import plots, tables

    assert session.folder is not None
    records, bounds = [r for r in run.records if isinstance(r, CollectiveRecord)], MemoryBounds.of(run.records)
    folder, fits = session.folder, fit_collectives(records)
    rows, columns = [tables.collective_row(r, bounds) for r in records], tables.choose_columns(records, bounds)
    session.write_tables(columns, records, rows)
    if records[0].collective == "all_reduce":
        folder.write("allreduce-times.csv", export_allreduce_times(records))
    pairs = _pair_up(records, theirs)
    if theirs:
        folder.write("comparison.md", tables.render_markdown(tables.compare_table, pairs))
    subtitle = f"{describe_machine()}; {records[0].dtype}, {records[0].op}"
    drawn = [*records, *_choose_drawn(records, theirs)]
    session.write_figure("time", plots.plot_time(drawn, subtitle, bounds.records))
    session.write_figure("bandwidth", plots.plot_bandwidth(drawn, subtitle))

    if json:
        document: dict[str, Any] = {
            "rows": rows,
            "fits": [_fit_row(*fit) for fit in fits],
            "run": str(folder.path),
            "warnings": list(warnings),
        }
        if theirs:
            document["comparison"] = [
                {
                    "here": here and tables.collective_row(here, bounds),
                    "there": there and tables.collective_row(there),
                }
                for here, there in pairs
            ]
        print_json(document)
        return
    console = stdout()
    console.print(tables.render_terminal(columns, records, records[0].collective, console.width))
    for record, fit in fits:
        console.print(_fit_line(record, fit))
    if theirs:
        console.print()
        console.print(tables.render_terminal(tables.compare_table, pairs, "beside the other table", console.width))
    session.print_closing(warnings)


def _fit_row(record: CollectiveRecord, fit: AlphaBeta) -> dict[str, Any]:
    return {
        "collective": record.collective,
        "backend": record.backend,
        "memory": record.memory,
        "device": record.device,
        "world_size": record.world_size,
        "alpha_s": fit.alpha_s,
        "beta_bytes_per_s": fit.beta_bytes_per_s,
        "max_rel_residual": fit.max_rel_residual,
        "min_bytes": fit.min_bytes,
        "max_bytes": fit.max_bytes,
        "residuals": list(fit.residuals),
    }


def _fit_line(record: CollectiveRecord, fit: AlphaBeta) -> str:
    from paceline.units import format_bytes, format_duration, format_rate

    n = record.world_size
    backend = record.backend if record.memory == "ordinary" else f"{record.backend} in {record.memory} memory"
    check = (
        f"off by at most {fit.max_rel_residual:.0%}" if len(fit.residuals) > 2 else "through two sizes, so unchecked,"
    )
    return (
        f"fit: {backend}, {n} rank{'s' if n > 1 else ''}: time = {format_duration(fit.alpha_s)} + size / "
        f"{format_rate(fit.beta_bytes_per_s)} GB/s, {check} "
        f"from {format_bytes(fit.min_bytes)} to {format_bytes(fit.max_bytes)}"
    )


def _choose_drawn(ours: Sequence[CollectiveRecord], theirs: Sequence[CollectiveRecord]) -> Sequence[CollectiveRecord]:
    """The imported curves that a chart can hold: all of a few, else those of a backend and ranks that we measured."""
    if (
        len({(record.backend, record.memory, record.device, record.world_size, record.note) for record in theirs})
        <= _MAX_IMPORTED
    ):
        return theirs
    known = {(record.backend, record.world_size) for record in ours}
    return [record for record in theirs if (record.backend, record.world_size) in known]


def _pair_up(
    ours: Sequence[CollectiveRecord], theirs: Sequence[CollectiveRecord]
) -> list[tuple[CollectiveRecord | None, CollectiveRecord | None]]:
    """Rows that measure the same thing side by side; rows of one table alone stand among their kin."""

    def is_same(here: CollectiveRecord, there: CollectiveRecord) -> bool:
        # What an imported table does not say ("unknown") is taken to agree.
        same_type = here.dtype == there.dtype or "unknown" in (here.dtype, there.dtype)
        exact = ("collective", "backend", "memory", "device", "world_size", "num_bytes", "op")
        return same_type and all(getattr(here, name) == getattr(there, name) for name in exact)

    pairs: list[tuple[CollectiveRecord | None, CollectiveRecord | None]] = []
    for here in ours:
        matches = [there for there in theirs if is_same(here, there)]
        pairs += [(here, there) for there in matches] or [(here, None)]
    pairs += [(None, there) for there in theirs if not any(is_same(here, there) for here in ours)]

    def place(pair: tuple[CollectiveRecord | None, CollectiveRecord | None]) -> tuple[str, str, int, int]:
        record = pair[0] or pair[1]
        assert record is not None
        return record.backend, record.memory, record.world_size, record.num_bytes

    return sorted(pairs, key=place)


@app.command()
def chunks(
    backend: Backend = "gloo",
    ranks: Ranks = None,
    total: Annotated[str, typer.Option("--total", help="Bytes reduced in all (240MB is 60 million floats).")] = "240MB",
    chunk_sizes: Annotated[
        str | None,
        typer.Option("--chunks", help="Chunk sizes: 40kB,4MB,... Default: 10 thousand floats up to all."),
    ] = None,
    dtype: Dtype = "float32",
    device: Device = "auto",
    iters: Iters = None,
    warmup: Warmup = None,
    out: Out = Path("runs"),
    json: Json = False,
    strict: Strict = False,
) -> None:
    """Does cutting one message into chunks hurt? Total time against elements per all-reduce."""
    from paceline.cli.session import run_measurement
    from paceline.measure.settings import ChunkSettings
    from paceline.records.kinds import ITEM_BYTES

    total_bytes = parse_size(total)
    if chunk_sizes is not None:
        sizes = parse_sizes(chunk_sizes)
    else:
        steps = [count * ITEM_BYTES.get(dtype, 4) for count in _DEFAULT_CHUNK_ELEMENTS]
        sizes = (*(step for step in steps if step < total_bytes), total_bytes)
    settings = ChunkSettings(
        total_bytes=total_bytes, chunks=sizes, **group_options(backend, ranks, dtype, device, iters, warmup)
    )

    def load() -> Callable[..., Any]:
        from paceline.measure.chunks import measure_chunks

        return measure_chunks

    def report(session: Session, run: Run) -> None:
        _report_chunks(session, run, json)

    raise typer.Exit(run_measurement("bench chunks", settings, out, strict, load, report))


def _report_chunks(session: Session, run: Run, json: bool) -> None:
    from paceline.cli.session import describe_machine, print_json, stdout
    from paceline.report import plots, tables
    from paceline.units import format_bytes

    assert session.folder is not None
    records: Sequence[ChunksRecord] = run.records  # type: ignore[assignment]
    rows = [tables.chunk_row(record) for record in records]
    session.write_tables(tables.chunk_table, records, rows)
    session.write_figure("chunks", plots.plot_chunks(records, f"{describe_machine()}; {records[0].dtype}, sum"))
    if json:
        print_json({"rows": rows, "run": str(session.folder.path), "warnings": list(run.warnings)})
        return
    console = stdout()
    title = f"{format_bytes(records[0].total_bytes)} in chunks"
    console.print(tables.render_terminal(tables.chunk_table, records, title, console.width))
    session.print_closing(run.warnings)
