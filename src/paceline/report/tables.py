"""Tables of the reports that do not yet use `table`: a list of columns for people, and rows for programs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import rich.box
import rich.table


@dataclass(frozen=True)
class Column:
    """A header and how to write one record's cell under it."""

    name: str
    cell: Callable[[Any], str]
    is_number: bool = True
    is_optional: bool = False  # left out first where the terminal is narrow


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
