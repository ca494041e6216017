"""A table: one list of columns, rendered for a terminal and as Markdown, CSV, HTML and JSON rows."""

from __future__ import annotations

import csv
import html
import io
import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline import units
from paceline.records.samples import group_by

# Formatters for people, by unit. For the units in `_HEADED` the header names the unit, not the cells.
_FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "words": str,
    "number": lambda value: str(value) if isinstance(value, int) else f"{value:.4g}",
    "count": units.format_count,
    "bytes": units.format_bytes,
    "ms": units.format_ms,
    "s": lambda value: f"{value:.1f}",
    "GB/s": units.format_rate,
    "ratio": lambda value: f"{value:.2f}",
    "percent": lambda value: f"{value:.0%}",
    "percent.1": lambda value: f"{value:.1%}",
    "yes": lambda value: "yes" if value else "no",
    "bar": lambda share: "█" * max(1, round(_BAR * share)),
}
# Printed under tables with ratios.
_RATIO_NOTE = (
    "Ratios are medians over interleaved repetitions ± 95 %; = marks no clear difference, ? a single repetition."
)
_HEADED = ("ms", "s", "GB/s")
_GAP = 2
_BAR = 28  # length of the longest bar
_MIN_WORDS = 24  # minimum width of a wrapped column of words


@dataclass(frozen=True)
class Column:
    """One column, defined once for all output formats of a table. `value` is a function of a row, or the dotted path of
    an attribute or item; it may return None. `unit` is a key of `_FORMATS`, or a function. `key` names the column in
    JSON and CSV, which contain the raw value (rates in GB/s). A column without a key is only for people, and one
    without a name only for programs. A narrow terminal drops columns, lowest priority first and from the right among
    equals, but never a key column (`is_key`)."""

    name: str | None
    value: Callable[[Any], Any] | str
    unit: str | Callable[[Any], str] = "text"
    key: str | None = None
    is_key: bool = False
    priority: int = 0

    @property
    def header(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit in _HEADED else self.name or ""

    @property
    def is_number(self) -> bool:
        return self.unit not in ("text", "words", "yes", "bar")

    def cell(self, row: Any) -> str:
        """A row's value as shown to people; empty if there is none."""
        value = self.find(row)
        if value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
            return ""
        return (_FORMATS[self.unit] if isinstance(self.unit, str) else self.unit)(value)

    def raw(self, row: Any) -> Any:
        """A row's value for programs. Infinity becomes None because JSON has none."""
        value = self.find(row)
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value / units.GB if self.unit == "GB/s" and value is not None else value

    def find(self, row: Any) -> Any:
        if callable(self.value):
            return self.value(row)
        for name in self.value.split("."):
            if isinstance(row, Mapping):
                row = row.get(name)
            elif row is not None:
                row = row[int(name)] if name.isdigit() else getattr(row, name)
        return row


def raw_columns(*paths: str, **named: str) -> list[Column]:
    """Columns for programs only: the attribute at each dotted path, under the path's last part or a specified name."""
    keys = {path.split(".")[-1]: path for path in paths} | named
    return [Column(None, path, key=key) for key, path in keys.items()]


SIMULATED = Column(None, lambda row: "simulated", key="source")


def text_columns(*paths: str, **options: Any) -> list[Column]:
    """Text columns for people and programs: the attribute at each dotted path, named after the path's last part."""
    return [Column(path.split(".")[-1], path, key=path.split(".")[-1], **options) for path in paths]


def ratio_columns(name: str | None, path: str, key: str, noise_key: str = "", priority: int = -1) -> list[Column]:
    """Columns of a `Ratio`: one that shows it with its noise (unless `name` is None), and both numbers for programs."""
    shown = [] if name is None else [Column(name, path, format_ratio, priority=priority)]
    return [*shown, *raw_columns(**{key: f"{path}.value", noise_key or f"{key}_noise": f"{path}.noise"})]


def format_ratio(ratio: Any) -> str:
    """Format a ratio. `=` marks a ratio that is 1 within the noise, and `?` a single repetition."""
    if ratio.noise is None:
        return f"{ratio.value:.3f} ?"
    is_itself = (ratio.value, ratio.noise) == (1.0, 0.0)
    return "1" if is_itself else f"{ratio.value:.3f} ± {ratio.noise:.3f}{'' if ratio.is_clear else ' ='}"


def describe_change(ratio: Any, of: str) -> str:
    """Describe how much more or less time something takes than its baseline, and whether the difference is
    significant."""
    if ratio.noise is None:
        return f"{ratio.value - 1:+.1%} {of} (one repetition)"
    return f"{ratio.value - 1:+.1%} ± {ratio.noise:.1%} {of}{'' if ratio.is_clear else ', within the noise'}"


def count_clear(ratios: Sequence[Any]) -> tuple[int, int, int]:
    """The numbers of ratios shown to be below 1, above 1, and neither."""
    below, above = (sum(r.is_clear and (r.value < 1) is side for r in ratios) for side in (True, False))
    return below, above, len(ratios) - below - above


def build_row(columns: Sequence[Column], row: Any) -> dict[str, Any]:
    return {column.key: column.raw(row) for column in columns if column.key}


@dataclass(frozen=True)
class Table:
    """Rows under columns. `name` is used for its files, and `key` for its rows in JSON (the name by default). `shown`
    limits the rows on a terminal; an empty list makes a table for files only."""

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    key: str = ""
    shown: Sequence[Any] | None = None
    ratio_note: str = _RATIO_NOTE

    def pivot(self, rows: Sequence[str], by: str, values: Sequence[str]) -> Table:
        """The same numbers as a matrix: one row per distinct combination of the columns `rows`, with the columns
        `values` repeated for each cell of the column `by`. All are named columns of this table."""
        named = {column.name: column for column in self.columns}
        read = named[by].cell
        groups = group_by(self.rows, lambda row: tuple(named[name].cell(row) for name in rows))

        def pick(column: Column, cell: str | None = None) -> Callable[[Sequence[Any]], Any]:
            """Select a value from a group: from the row with this cell, or from any row."""
            return lambda group: next((column.find(row) for row in group if cell in (None, read(row))), None)

        columns = [replace(named[name], value=pick(named[name])) for name in rows]
        for cell in dict.fromkeys(map(read, self.rows)):
            label = f"{cell} {by}" if named[by].is_number else cell
            for column in (named[name] for name in values):
                key = column.key and f"{column.key}_{label}".replace(" ", "_")
                name = f"{label}: {column.name}"
                columns.append(replace(column, name=name, value=pick(column, cell), key=key))
        return Table(f"{self.name}_by_{by}", self.title, columns, list(groups.values()))

    def rows_json(self) -> list[dict[str, Any]]:
        return [build_row(self.columns, row) for row in self.rows]

    def csv(self) -> str:
        """The rows as CSV at full precision, in the units of the JSON."""
        text = io.StringIO()
        keys = [column.key for column in self.columns if column.key]
        writer = csv.DictWriter(text, fieldnames=keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows_json())
        return text.getvalue()

    def markdown(self) -> str:
        """All columns for people that are not empty."""
        shown = self._show(self.rows)
        rule = "|" + "|".join("--:" if one.column.is_number else "---" for one in shown) + "|"
        head, *body = ("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in _list_rows(shown))
        return "\n".join([head, rule, *body]) + "\n"

    def html(self) -> str:
        """All columns for people, for pages and notebooks; text that is the same in every row moves to the caption."""
        title, shown = self._name_common(self._show(self.rows))
        sides = ["right" if one.column.is_number else "left" for one in shown]
        caption = f"<caption>{html.escape(title)}</caption>" if title else ""
        lines = []
        for number, row in enumerate(_list_rows(shown)):
            tag = "td" if number else "th"
            parts = [f'<{tag} style="text-align:{s}">{html.escape(c)}</{tag}>' for c, s in zip(row, sides, strict=True)]
            lines.append(f"<tr>{''.join(parts)}</tr>")
        return f"<table>{caption}{''.join(lines)}</table>"

    _repr_html_ = html

    def terminal(self, width: int | None = 80) -> str:
        """The table for a terminal of this width; None shows every column, however wide. Text that is the same in every
        row moves to the title. Cells are never cut and numbers never wrapped: columns are dropped until the rest fits,
        and if even the key columns do not fit, each row becomes several lines."""
        rows = self.rows if self.shown is None else self.shown
        if not rows:
            return ""
        title, columns = self._name_common(self._show(rows))
        kept = list(columns)
        if width is not None:
            for one in sorted(reversed(columns), key=lambda one: one.column.priority):
                if _measure(kept) > width and not one.column.is_key:
                    kept.remove(one)
        if width is not None and _measure(kept) > width:
            lines = _stack_rows(columns, width)
        else:
            hidden = len(self.rows) - len(rows)
            dropped = [one.column.name or "" for one in columns if one not in kept]
            dropped += [f"{hidden} of {len(self.rows)} rows"] if hidden else []
            lines = _lay_out(kept, width)
            lines += wrap(f"(not shown: {', '.join(dropped)}; --details shows all)" if dropped else "", width)
        has_ratios = any(mark in cell for one in kept for cell in one.cells for mark in (" ± ", " ?"))
        return "\n".join([*wrap(title, width), *lines, *wrap(self.ratio_note if has_ratios else "", width)])

    def _name_common(self, shown: Sequence[_Shown]) -> tuple[str, list[_Shown]]:
        """The title, extended with text that is the same in every row, and the remaining columns."""
        same = [one for one in shown if one.column.unit == "text" and len(set(one.cells)) == 1]
        same = same[len(same) == len(shown) :]
        common = ", ".join(one.cells[0] for one in same)
        title = f"{self.title} ({common})" if common and self.title else common or self.title
        return title, [one for one in shown if one not in same]

    def _show(self, rows: Sequence[Any]) -> list[_Shown]:
        """The non-empty columns of the human-readable table."""
        named = [column for column in self.columns if column.name is not None]
        shown = [_Shown(column, [column.cell(row) for row in rows]) for column in named]
        return [one for one in shown if not rows or any(one.cells)]


@dataclass(frozen=True, eq=False)
class _Shown:
    """A column with its formatted cells."""

    column: Column
    cells: list[str]

    @property
    def width(self) -> int:
        return max(map(len, (self.column.header, *self.cells)))

    @property
    def least(self) -> int:
        return min(self.width, _MIN_WORDS) if self.column.unit == "words" else self.width


def _list_rows(columns: Sequence[_Shown]) -> list[tuple[str, ...]]:
    """The headers, followed by the cells of each row."""
    return list(zip(*((one.column.header, *one.cells) for one in columns), strict=True))


def wrap(text: str, width: int | None, indent: str = "") -> list[str]:
    """Lines of at most this width, broken between words; a word, such as a path, is never broken."""
    if width is None:
        return [text] if text else []
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def join_words(words: Iterable[str]) -> str:
    """`a, b and c`."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _measure(columns: Sequence[_Shown]) -> int:
    """The minimum width of these columns."""
    return sum(one.least + _GAP for one in columns)


def _lay_out(columns: Sequence[_Shown], width: int | None) -> list[str]:
    spare = math.inf if width is None else width - _measure(columns)
    widths = []
    for one in columns:  # columns of words get the remaining width
        widths.append(int(min(one.width, one.least + max(0, spare))))
        spare -= widths[-1] - one.least

    def build_line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(size) if one.column.is_number else cell.ljust(size)
            for cell, size, one in zip(cells, widths, columns, strict=True)
        ]
        return (" " * _GAP + (" " * _GAP).join(parts)).rstrip()

    rule = " " * _GAP + "─" * (sum(widths) + _GAP * (len(widths) - 1))
    head, *rows = _list_rows(columns)
    lines = [build_line(head), rule]
    for row in rows:
        wrapped = [
            wrap(cell, size) if one.column.unit == "words" else [cell]
            for cell, size, one in zip(row, widths, columns, strict=True)
        ]
        lines += [build_line(cells) for cells in itertools.zip_longest(*wrapped, fillvalue="")]
    return lines


def _stack_rows(columns: Sequence[_Shown], width: int) -> list[str]:
    """Each row as lines of `name: value`, key columns first."""
    ordered = sorted(columns, key=lambda one: not one.column.is_key)
    lines = []
    for row in zip(*(one.cells for one in ordered), strict=True):
        filled = [f"{one.column.header}: {cell}" for one, cell in zip(ordered, row, strict=True) if cell]
        for number, line in enumerate(filled):
            lines += wrap(f"{'    ' if number else '  '}{line}", width, indent="      ")
    return lines
