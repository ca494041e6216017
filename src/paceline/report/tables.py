"""Tables of records: columns once, rendered for the terminal, as Markdown, as CSV and as JSON rows."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import rich.box
import rich.table

from paceline.records import ChunksRecord, CollectiveRecord
from paceline.records.bounds import MemoryBounds
from paceline.records.samples import Samples
from paceline.units import GB, format_bytes, format_count, format_ms, format_rate

__all__ = [
    "Column",
    "chunk_row",
    "chunk_table",
    "choose_columns",
    "collective_row",
    "collective_table",
    "compare_table",
    "render_csv",
    "render_markdown",
    "render_terminal",
]


@dataclass(frozen=True)
class Column:
    """A header and how to write one record's cell under it."""

    name: str
    cell: Callable[[Any], str]
    is_number: bool = True
    is_optional: bool = False  # left out first where the terminal is narrow


def _maybe(value: float | None, render: Callable[[float], str]) -> str:
    return "" if value is None else render(value)


def _name_backend(record: CollectiveRecord) -> str:
    return record.backend if record.memory == "ordinary" else f"{record.backend} ({record.memory})"


# nccl-tests' column names where it has them; `ranks`, `backend`, `iters` and `source` are ours.
collective_table: Sequence[Column] = (
    Column("backend", lambda r: r.backend, False),
    Column("device", lambda r: r.device, False),
    Column("ranks", lambda r: str(r.world_size)),
    Column("size", lambda r: format_bytes(r.num_bytes)),
    Column("count", lambda r: format_count(r.num_elements), is_optional=True),
    Column("type", lambda r: r.dtype, False),
    Column("redop", lambda r: r.op, False),
    Column("time (ms)", lambda r: format_ms(r.time_s)),
    Column("p10 (ms)", lambda r: _maybe(r.timing.p10_s, format_ms), is_optional=True),
    Column("p90 (ms)", lambda r: _maybe(r.timing.p90_s, format_ms), is_optional=True),
    Column("algbw (GB/s)", lambda r: format_rate(r.algbw_bytes_per_s)),
    Column("busbw (GB/s)", lambda r: format_rate(r.busbw_bytes_per_s)),
    Column("#wrong", lambda r: "" if r.num_wrong is None else str(r.num_wrong)),
    Column("iters", lambda r: _maybe(r.timing.count, str), is_optional=True),
    Column("source", lambda r: r.source, False),
)


def choose_columns(records: Sequence[CollectiveRecord], bounds: MemoryBounds) -> Sequence[Column]:
    """The columns for these records: `collective_table`, with the memory of each where not all is ordinary, and with
    what memory allows where that was measured."""
    columns = list(collective_table)
    if any(record.memory != "ordinary" for record in records):
        columns.insert(1, Column("memory", lambda r: r.memory, False))
    if bounds.records:
        names = [column.name for column in columns]
        columns[names.index("#wrong") : names.index("#wrong")] = [
            Column("bound (ms)", lambda r: _maybe(bounds.bound_s(r), format_ms), is_optional=True),
            Column("of memory", lambda r: _maybe(bounds.fraction_of(r), lambda fraction: f"{fraction:.0%}")),
        ]
    return columns


chunk_table: Sequence[Column] = (
    Column("backend", lambda r: r.backend, False),
    Column("device", lambda r: r.device, False),
    Column("ranks", lambda r: str(r.world_size)),
    Column("elements per all-reduce", lambda r: format_count(r.chunk_elements)),
    Column("chunk", lambda r: format_bytes(r.chunk_bytes)),
    Column("messages", lambda r: format_count(r.num_messages)),
    Column("total time (ms)", lambda r: format_ms(r.time_s)),
    Column("p10 (ms)", lambda r: _maybe(r.timing.p10_s, format_ms), is_optional=True),
    Column("p90 (ms)", lambda r: _maybe(r.timing.p90_s, format_ms), is_optional=True),
    Column("algbw (GB/s)", lambda r: format_rate(r.algbw_bytes_per_s)),
    Column("#wrong", lambda r: "" if r.num_wrong is None else str(r.num_wrong)),
    Column("iters", lambda r: _maybe(r.timing.count, str), is_optional=True),
    Column("source", lambda r: r.source, False),
)

Pair = tuple[CollectiveRecord | None, CollectiveRecord | None]

compare_table: Sequence[Column] = (
    Column("backend", lambda p: _name_backend(p[0] or p[1]), False),
    Column("ranks", lambda p: str((p[0] or p[1]).world_size)),
    Column("size", lambda p: format_bytes((p[0] or p[1]).num_bytes)),
    Column("here (ms)", lambda p: _maybe(p[0] and p[0].time_s, format_ms)),
    Column("there (ms)", lambda p: _maybe(p[1] and p[1].time_s, format_ms)),
    Column("here / there", lambda p: f"{p[0].time_s / p[1].time_s:.2f}" if p[0] and p[1] else ""),
    Column("here busbw (GB/s)", lambda p: _maybe(p[0] and p[0].busbw_bytes_per_s, format_rate)),
    Column("there busbw (GB/s)", lambda p: _maybe(p[1] and p[1].busbw_bytes_per_s, format_rate)),
    Column("there is", lambda p: f"{p[1].source}, {p[1].timing.statistic}" if p[1] else "", False),
    Column("from", lambda p: p[1].note if p[1] else "", False),
)


def _measured_fields(record: CollectiveRecord | ChunksRecord) -> dict[str, Any]:
    """What every timed row ends with. `statistic` is `mean` where an imported table has no median, and
    `median_s` then holds that mean."""
    return {
        "median_s": record.time_s,
        "p10_s": record.timing.p10_s,
        "p90_s": record.timing.p90_s,
        "algbw_gbps": record.algbw_bytes_per_s / GB,
        "busbw_gbps": record.busbw_bytes_per_s / GB,
        "nwrong": record.num_wrong,
        "iters": record.timing.count,
        "statistic": record.timing.statistic,
        "skew_s": record.timing.skew_s if isinstance(record.timing, Samples) else None,
        "source": record.source,
    }


def collective_row(record: CollectiveRecord, bounds: MemoryBounds | None = None) -> dict[str, Any]:
    """One row of `bench allreduce --json` and of table.csv. Rates are in GB/s (10^9 bytes). What memory allows is null
    where nobody measured it."""
    bounds = bounds or MemoryBounds(())
    return {
        "collective": record.collective,
        "backend": record.backend,
        "memory": record.memory,
        "device": record.device,
        "world_size": record.world_size,
        "num_bytes": record.num_bytes,
        "dtype": record.dtype,
        "op": record.op,
        **_measured_fields(record),
        "memory_bound_s": bounds.bound_s(record),
        "fraction_of_memory": bounds.fraction_of(record),
    }


def chunk_row(record: ChunksRecord) -> dict[str, Any]:
    """One row of `bench chunks --json` and of its table.csv."""
    return {
        "backend": record.backend,
        "device": record.device,
        "world_size": record.world_size,
        "total_bytes": record.total_bytes,
        "chunk_bytes": record.chunk_bytes,
        "num_messages": record.num_messages,
        "dtype": record.dtype,
        **_measured_fields(record),
    }


def render_terminal(columns: Sequence[Column], records: Iterable[Any], title: str, width: int) -> rich.table.Table:
    """A table for a terminal of this width. A word that is the same in every row is told once, in the title."""
    rows = [[column.cell(record) for column in columns] for record in records]
    same = {i for i, column in enumerate(columns) if not column.is_number and len({row[i] for row in rows}) == 1}
    common = ", ".join(rows[0][i] for i in sorted(same) if rows[0][i]) if rows else ""
    kept = [i for i in range(len(columns)) if i not in same]

    def needed() -> int:
        return 1 + sum(3 + max(len(columns[i].name), *(len(row[i]) for row in rows), 0) for i in kept)

    for i in reversed(kept):
        if needed() > width and columns[i].is_optional:
            kept.remove(i)
    table = rich.table.Table(
        title=f"{title} ({common})" if common else title, box=rich.box.SIMPLE_HEAD, title_justify="left"
    )
    for i in kept:
        table.add_column(columns[i].name, justify="right" if columns[i].is_number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    return table


def render_markdown(columns: Sequence[Column], records: Iterable[Any]) -> str:
    """The same table as Markdown, every column kept."""
    lines = [
        "| " + " | ".join(column.name for column in columns) + " |",
        "|" + "|".join("--:" if column.is_number else "---" for column in columns) + "|",
    ]
    lines += [
        "| " + " | ".join(column.cell(record).replace("|", "\\|") for column in columns) + " |" for record in records
    ]
    return "\n".join(lines) + "\n"


def render_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as CSV with full precision, in the units of the JSON."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
