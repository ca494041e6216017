"""A table: one list of columns, rendered for a terminal, as Markdown, CSV, HTML and as JSON rows."""

from __future__ import annotations

import csv
import html
import io
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from paceline.units import (
    GB,
    format_bytes,
    format_count,
    format_duration,
    format_memory,
    format_ms,
    format_rate,
    format_speed,
)

# How a person reads a value of this unit. Headers of the units in `_HEADED` name the unit, the cells do not.
_FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "words": str,
    "number": lambda value: str(value) if isinstance(value, int) else f"{value:.4g}",
    "count": format_count,
    "bytes": format_bytes,
    "memory": format_memory,
    "ms": format_ms,
    "s": lambda value: f"{value:.1f}",
    "duration": format_duration,
    "GB/s": format_rate,
    "samples/s": format_speed,
    "ratio": lambda value: f"{value:.2f}",
    "factor": lambda value: f"{value:.2f}x",
    "percent": lambda value: f"{value:.0%}",
    "percent.1": lambda value: f"{value:.1%}",
    "percent.2": lambda value: f"{value:.2%}",
    "yes": lambda value: "yes" if value else "no",
}
_HEADED = ("ms", "s", "GB/s", "samples/s")
_GAP = 2
_MIN_WORDS = 24  # a column of words is wrapped, but not below this width


@dataclass(frozen=True)
class Column:
    """One column, written once for every form of a table.

    `value(row)` is the raw number or text, None where there is none. `unit` says how people read it: a name of
    `_FORMATS`, or a function. `key` names the column in JSON and CSV, where the raw value is written (rates in GB/s);
    without a key it is for people alone, without a name for programs alone. A narrow terminal drops columns, those of
    the lowest priority first and the rightmost of equal ones; a key column (`is_key`) is never dropped.
    """

    name: str | None
    value: Callable[[Any], Any]
    unit: str | Callable[[Any], str] = "text"
    key: str | None = None
    is_key: bool = False
    priority: int = 0

    @property
    def header(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit in _HEADED else self.name or ""

    @property
    def is_number(self) -> bool:
        return self.unit not in ("text", "words", "yes")

    def cell(self, row: Any) -> str:
        """The value of a row as people read it; empty where there is none."""
        value = self.value(row)
        if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
            return ""
        return (_FORMATS[self.unit] if isinstance(self.unit, str) else self.unit)(value)

    def raw(self, row: Any) -> Any:
        """The value of a row for programs. JSON has no infinity, which is None here."""
        value = self.value(row)
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value / GB if self.unit == "GB/s" and value is not None else value


def raw_columns(*paths: str) -> list[Column]:
    """Columns for programs alone: the attribute at each dotted path, under its last name."""
    return [Column(None, attrgetter(path), key=path.split(".")[-1]) for path in paths]


@dataclass(frozen=True)
class Table:
    """Rows under columns. `name` is that of its files, `key` that of its rows in JSON (the same unless given).

    `shown` are the rows that a terminal shows where that is not all of them: none, for a table of files alone.
    `note` is a line below the table.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    key: str = ""
    shown: Sequence[Any] | None = None
    note: str = ""

    @property
    def json_key(self) -> str:
        return self.key or self.name

    def rows_json(self) -> list[dict[str, Any]]:
        """The rows as JSON objects, in full precision."""
        return [{column.key: column.raw(row) for column in self.columns if column.key} for row in self.rows]

    def csv(self) -> str:
        """The rows as CSV in full precision, in the units of the JSON."""
        text = io.StringIO()
        keys = [column.key for column in self.columns if column.key]
        writer = csv.DictWriter(text, fieldnames=keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows_json())
        return text.getvalue()

    def markdown(self) -> str:
        """All columns for people that hold anything."""
        columns = self._named_columns(self.rows)
        lines = [
            "| " + " | ".join(column.header for column in columns) + " |",
            "|" + "|".join("--:" if column.is_number else "---" for column in columns) + "|",
        ]
        lines += [
            "| " + " | ".join(column.cell(row).replace("|", "\\|") for column in columns) + " |" for row in self.rows
        ]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        """All columns for people, for a notebook."""
        columns = self._named_columns(self.rows)
        align = ["right" if column.is_number else "left" for column in columns]
        head = "".join(
            f'<th style="text-align:{side}">{html.escape(column.header)}</th>'
            for side, column in zip(align, columns, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="text-align:{side}">{html.escape(column.cell(row))}</td>'
                for side, column in zip(align, columns, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def terminal(self, width: int | None = 80) -> str:
        """The table for a terminal of this width; None shows every column, however wide.

        A word that is the same in every row is said once, in the title. No cell is cut and no number is wrapped:
        columns are dropped until the rest fits, and where the key columns alone do not fit, rows become lines.
        """
        rows = self.rows if self.shown is None else self.shown
        if not rows:
            return ""
        columns = self._named_columns(rows)
        same = [c for c in columns if c.unit == "text" and len({c.cell(row) for row in rows}) == 1]
        if len(same) == len(columns):
            same = same[1:]
        common = ", ".join(column.cell(rows[0]) for column in same)
        title = f"{self.title} ({common})" if common and self.title else common or self.title
        kept = [column for column in columns if column not in same]
        dropped = [] if width is None else _drop_columns(kept, rows, width)
        kept = [column for column in kept if column not in dropped]
        if width is not None and _measure(kept, rows) > width:
            lines = _stack_rows([column for column in columns if column not in same], rows, width)
            dropped = []
        else:
            lines = _lay_out(kept, rows, width)
        if dropped:
            lines += _wrap(f"(not shown: {', '.join(c.name or '' for c in dropped)}; --wide shows all columns)", width)
        if self.note:
            lines += _wrap(self.note, width)
        return "\n".join([*_wrap(title, width), *lines])

    def _named_columns(self, rows: Sequence[Any]) -> list[Column]:
        """The columns for people in which some row has a value."""
        return [c for c in self.columns if c.name is not None and (not rows or any(c.cell(row) for row in rows))]


def _wrap(text: str, width: int | None, indent: str = "") -> list[str]:
    """Lines of at most this width, broken between words; a word (a path, say) is never broken."""
    if not text:
        return []
    if width is None:
        return [text]
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _find_width(column: Column, rows: Sequence[Any]) -> int:
    return max(len(column.header), *(len(column.cell(row)) for row in rows))


def _measure(columns: Sequence[Column], rows: Sequence[Any]) -> int:
    """The least width of these columns: columns of words are wrapped to no less than `_MIN_WORDS`."""
    widths = [
        min(_find_width(column, rows), _MIN_WORDS) if column.unit == "words" else _find_width(column, rows)
        for column in columns
    ]
    return sum(widths) + _GAP * len(widths)


def _drop_columns(columns: Sequence[Column], rows: Sequence[Any], width: int) -> list[Column]:
    """The columns to leave out, so that the others fit; never a key column."""
    dropped: list[Column] = []
    order = sorted(range(len(columns)), key=lambda place: (columns[place].priority, -place))
    for place in order:
        if _measure([column for column in columns if column not in dropped], rows) <= width:
            break
        if not columns[place].is_key:
            dropped.append(columns[place])
    return [column for column in columns if column in dropped]


def _lay_out(columns: Sequence[Column], rows: Sequence[Any], width: int | None) -> list[str]:
    widths = [_find_width(column, rows) for column in columns]
    if width is not None:
        for place, column in enumerate(columns):
            if column.unit == "words":
                others = sum(widths) - widths[place] + _GAP * len(widths)
                widths[place] = min(widths[place], max(_MIN_WORDS, width - others))

    def build_line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(size) if column.is_number else cell.ljust(size)
            for cell, size, column in zip(cells, widths, columns, strict=True)
        ]
        return (" " * _GAP + (" " * _GAP).join(parts)).rstrip()

    rule = " " * _GAP + "─" * (sum(widths) + _GAP * (len(widths) - 1))
    lines = [build_line([column.header for column in columns]), rule]
    for row in rows:
        cells = [
            _wrap(column.cell(row), size) or [""] if column.unit == "words" else [column.cell(row)]
            for column, size in zip(columns, widths, strict=True)
        ]
        lines += [
            build_line([cell[number] if number < len(cell) else "" for cell in cells])
            for number in range(max(map(len, cells)))
        ]
    return lines


def _stack_rows(columns: Sequence[Column], rows: Sequence[Any], width: int) -> list[str]:
    """Each row as lines `name: value`, its key columns first."""
    lines = []
    for row in rows:
        ordered = [c for c in columns if c.is_key] + [c for c in columns if not c.is_key]
        filled = [(column.header, column.cell(row)) for column in ordered if column.cell(row)]
        for number, (name, cell) in enumerate(filled):
            lines += _wrap(f"{'  ' if not number else '    '}{name}: {cell}", width, indent="      ")
    return lines
