"""Runs as one self-contained HTML page: the verdict, interactive figures, and tables. Also renders Markdown.

The results provide the content: sentences, tables, and the artists of their matplotlib figures, which `page.js` redraws
at the width of the screen. All text is escaped, including the names of runs.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from paceline import __version__
from paceline.errors import ConfigError
from paceline.records import TracedStepRecord
from paceline.records.store import write_new
from paceline.report.plots import COLORS, Drawings
from paceline.report.result import Result
from paceline.report.table import Table
from paceline.units import format_number_of

PAGE_FILE = "report.html"
_GENERATOR = '<meta name="generator" content="paceline'
# Longer tables are collapsed.
_LONG = 24
_DIGITS = 9
_TRACES = ("trace.json.gz", "trace.json")
# Grays of the figures by role, so that the page can replace them in dark mode.
_GREYS = {"#000000": "ink", "#333333": "ink", "#555555": "muted", "#dddddd": "line", "#ffffff": "paper"}
Marks = list[dict[str, Any]]


class Numbers:
    """The numbers of all figures. Equal lists are stored once, because the lines of a panel often share x values."""

    def __init__(self) -> None:
        self.lists: list[list[float | None]] = []
        self._known: dict[tuple[float | None, ...], int] = {}

    def add(self, values: Iterable[Any]) -> int:
        found = tuple(_round(value) for value in values)
        if found not in self._known:
            self._known[found] = len(self.lists)
            self.lists.append(list(found))
        return self._known[found]


def _round(value: Any) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    number = float(f"{value:.{_DIGITS}g}")
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


def read_figure(name: str, figure: Any, numbers: Numbers) -> dict[str, Any]:
    """The contents of a figure as data: panels with axes and marks. Nothing is rendered."""
    panels: Marks = []
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        marks = _read_marks(axes, numbers)
        if panels and axes.yaxis.get_label_position() == "right":  # a second axis of the previous panel
            panels[-1]["right"] = _read_axis(axes.yaxis)
            panels[-1]["marks"] += [mark | {"right": 1} for mark in marks]
            continue
        about = {"title": axes.get_title("left"), "x": _read_axis(axes.xaxis), "y": _read_axis(axes.yaxis)}
        panels.append({**about, "marks": marks})
    words = (_join(getattr(figure, "get_" + part)()) for part in ("suptitle", "supxlabel"))
    return {"name": name, **dict(zip(("title", "subtitle"), words, strict=True)), "panels": panels}


def _join(text: str) -> str:
    return " ".join(text.split())


def _read_axis(axis: Any) -> dict[str, Any]:
    from matplotlib.ticker import FixedLocator

    lim = [float(end) for end in axis.get_view_interval()]  # reversed if the axis is inverted
    found: dict[str, Any] = {"label": _join(axis.get_label().get_text()), "lim": lim}
    if axis.get_scale() != "linear":
        found["log"] = 1
    if isinstance(axis.get_major_locator(), FixedLocator):
        places = [float(place) for place in axis.get_majorticklocs()]
        labels = axis.get_major_formatter().format_ticks(places)
        found["ticks"] = [[place, label] for place, label in zip(places, labels, strict=True)]
    return found


def _read_marks(axes: Any, numbers: Numbers) -> Marks:
    """The artists of one pair of axes as lines, areas and labels in data coordinates; `fx` and `fy` mark coordinates
    that are fractions of the panel instead."""
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.colors import to_hex

    named = {id(part): whole.get_label() for whole in axes.containers for part in _list_parts(whole)}
    marks: Marks = []

    def add(artist: Any, kind: str, color: Any, points: Any, **more: Any) -> None:
        hexed = to_hex(color).lower()
        places = {known.lower(): f"c{number}" for number, known in enumerate(COLORS)} | _GREYS
        label = str(artist.get_label() or "")
        label = str(named.get(id(artist), "") or "") if label.startswith("_") or not label else label
        is_data = artist.get_transform().contains_branch_seperately(axes.transData)
        mark = {"kind": kind, "color": places.get(hexed, hexed), **more}
        if not label.startswith("_") and label:
            mark["label"] = label
        for axis, is_free, values in zip("xy", is_data, zip(*points, strict=True), strict=True):
            mark |= {axis: numbers.add(values), **({} if is_free else {f"f{axis}": 1})}
        if (alpha := artist.get_alpha()) is not None:
            mark["alpha"] = float(alpha)
        marks.append(mark)

    for line in axes.get_lines():
        if points := list(zip(*line.get_data(orig=False), strict=True)):
            add(line, "line", line.get_color(), points, **_read_style(line))
    for group in axes.collections:
        if isinstance(group, LineCollection):
            for segment in group.get_segments():
                add(group, "line", group.get_colors()[0], segment, w=1.2, quiet=1)
        elif isinstance(group, PolyCollection):
            hatch = {"hatch": 1} if group.get_hatch() else {}
            color = group.get_edgecolor() if hatch else group.get_facecolor()
            for path in group.get_paths():
                add(group, "area", color[0], path.vertices, **hatch)
    for patch in axes.patches:
        hatch = {"hatch": 1} if patch.get_hatch() else {}
        path = patch.get_patch_transform().transform_path(patch.get_path())
        add(patch, "area", patch.get_facecolor(), path.vertices[:-1], **hatch)
    for text in axes.texts:
        # An annotation is anchored in the data, with its text offset from there in points.
        is_note = hasattr(text, "xy")
        (x, y), (dx, dy) = text.xy if is_note else text.get_position(), (0.0, 0.0)
        if getattr(text, "anncoords", "") == "offset points":
            dx, dy = text.xyann
        if is_note and not dx and not dy:
            continue
        mark = {"kind": "text", "color": "ink", "x": numbers.add([x]), "y": numbers.add([y])}
        mark |= {"text": text.get_text(), "side": text.get_ha(), "dx": dx, "dy": dy}
        is_data = text.get_transform().contains_branch_seperately(axes.transData)[1]
        marks.append(mark if is_note or is_data else mark | {"fy": 1})
    return marks


def _read_style(line: Any) -> dict[str, Any]:
    """The style of a line: its width (0 for only markers), dashes, markers and steps, and the field that it shows."""
    from matplotlib.colors import to_hex

    none = ("", "None", "none", None)
    style = {
        "dash": line.get_linestyle() if line.get_linestyle() in ("--", ":", "-.") else "",
        "step": int("steps" in line.get_drawstyle()),
        "gid": line.get_gid(),
    }
    if line.get_marker() not in none:
        every = line.get_markevery()
        style |= {"marker": str(line.get_marker()), "ms": float(line.get_markersize())}
        style |= {"hollow": int(to_hex(line.get_markerfacecolor(), True)[:7] == "#ffffff")}
        style |= {"every": list(every) if isinstance(every, list) else None}
    width = 0.0 if line.get_linestyle() in none else float(line.get_linewidth())
    return {"w": width} | {name: value for name, value in style.items() if value}


def _list_parts(container: Any) -> Iterable[Any]:
    for part in container:
        if isinstance(part, tuple | list):
            yield from part
        elif part is not None:
            yield part


def _escape(text: Any) -> str:
    return html.escape(str(text))


def _mark_code(text: Any) -> str:
    """The escaped text, with code between backticks marked as code, and percent signs kept with their numbers."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _escape(text)).replace(" %", "\u00a0%")


def split_verdict(text: str) -> tuple[str, str]:
    """Split a text into its first sentence and the rest."""
    first, _, rest = re.sub(r"([.!?]) (?=\w)", r"\1\n", text, count=1).partition("\n")
    return first, rest


def _render_list(lines: Sequence[str], kind: str) -> str:
    items = f'<ul class="{kind}">{"".join(f"<li>{_mark_code(line)}</li>" for line in lines)}</ul>' if lines else ""
    if len(lines) < 3:
        return items
    return f"<details><summary>{len(lines)} {kind}</summary>{items}</details>"


def render_table(table: Table) -> str:
    """A table that scrolls if it is too wide, with its data as CSV."""
    if not table.rows:
        return ""
    name = table.title or table.name.replace("_", " ")
    body = f'<div class="wide" tabindex="0" role="region" aria-label="{_escape(name)}">{table.html()}</div>'
    data = base64.b64encode(table.csv().encode()).decode()
    link = f'<a class="data" download="{_escape(table.name)}.csv" href="data:text/csv;base64,{data}">CSV</a>'
    if len(table.rows) > _LONG:
        body = f"<details><summary>{_escape(name)}: {len(table.rows)} rows</summary>{body}</details>"
    return f'<div class="table">{body}{link}</div>'


def _render_figure(number: int, figure: dict[str, Any], trace: str) -> str:
    link = f'<a class="data" href="#" data-figure="{number}" download="{_escape(figure["name"])}.csv">Data (CSV)</a>'
    if trace and figure["name"] == "timeline":
        link += f' <a class="data" href="{_escape(trace)}" download>Trace for ui.perfetto.dev</a>'
    return (
        f'<figure id="figure-{number}"><figcaption><b>{_escape(figure["title"])}</b></figcaption>'
        f'<ul class="legend"></ul><div class="panels"></div><p class="sub">{_escape(figure["subtitle"])}</p>'
        f"{link}</figure>"
    )


def _find_trace(folder: Path | None, page: Path | None) -> str:
    """Relative link from the page to a run's trace."""
    found = next((folder / name for name in _TRACES if (folder / name).exists()), None) if folder else None
    if found is None:
        return ""
    return quote(os.path.relpath(found.absolute(), page.absolute().parent if page else Path.cwd()))


def _render_origin(result: Result) -> str:
    environment, run = result.run.environment, result.run
    facts = {
        "command": environment.command_line,
        "run": result.folder,
        "saved": run.created if result.records else "",
        "machine": environment.machine_and_torch,
        "commit": environment.git_commit,
    }
    rows = "".join(f"<dt>{name}</dt><dd>{_escape(value)}</dd>" for name, value in facts.items() if value)
    return f"<details><summary>Run details</summary><dl>{rows}</dl></details>"


def _list_drawings(result: Result) -> Drawings:
    """The figures of a result, with the timeline of one recorded step."""
    from paceline.report.profiles import MAX_RANKS, build_step_lanes, plot_timeline

    found = result.page_figures()
    observed = getattr(result, "observed", None) or result
    lanes = build_step_lanes(observed.only(TracedStepRecord))[:MAX_RANKS]
    if "timeline" in found or not lanes:
        return found
    title = "One recorded step: compute above, messages below"
    curves = {name: found.pop(name) for name in ("caps",) if name in found}
    return found | {"timeline": lambda: plot_timeline(lanes, title, result.machine)} | curves


def _fold(tables: Sequence[str]) -> str:
    if not tables:
        return ""
    return f"<details><summary>{format_number_of(len(tables), 'more table')}</summary>{''.join(tables)}</details>"


def _render_step(step: str) -> str:
    return f'<p class="next">next: <code>{_escape(step)}</code> <button type="button" class="copy">Copy</button></p>'


def render_page(
    results: Sequence[Result], page: Path | None = None, live: dict[str, Any] | None = None, now: str = ""
) -> str:
    """Render the page of these results; the first one provides the verdict. Links to traces are relative to its path,
    `page`. With `live`, the page follows a run and starts with the table `now`."""
    numbers, figures, sections = Numbers(), list[dict[str, Any]](), []
    for place, result in enumerate(results):
        verdict, rest = map(_mark_code, split_verdict(result.headline))
        trace = _find_trace(result.folder, page)
        drawn = [read_figure(name, draw(), numbers) for name, draw in _list_drawings(result).items()]
        for figure in drawn:  # some charts have the answer as their title, which is already the headline
            if figure["title"] and figure["title"] in result.headline:
                figure["title"] = ""
        shown = [_render_figure(len(figures) + number, figure, trace) for number, figure in enumerate(drawn)]
        figures += drawn
        if place:
            head = f"<h2>{_escape(result.caption)}</h2><p>{verdict} {rest}</p>"
        else:
            head = f'<p class="kicker">{_escape(result.caption)}</p><h1 id="verdict">{verdict}</h1>'
            head += f'<p id="rest">{rest}</p>'
        link = f'<p><a href="{_escape(trace)}" download>The trace</a>, for ui.perfetto.dev</p>' if trace else ""
        tables = [text for table in result.page_tables() if (text := render_table(table))]
        sections.append(
            f"<section>{head}"
            + (f'<p id="status" role="status" class="{live["how"]}">{_escape(live["status"])}</p>' if live else "")
            + (f'<div id="now">{now}</div>' if live else "")
            + _render_list([line for line in result.warnings if line not in result.headline], "warnings")
            # The first screen has the verdict, its picture and what to do next.
            + "".join([*shown[:1], *map(_render_step, result.next_steps), *shown[1:], link, *tables[:1]])
            + _render_list(result.findings, "findings")
            + _fold(tables[1:])
            + f"{_render_origin(result)}</section>"
        )
    data = {"lists": numbers.lists, "figures": figures, "live": live}
    packed = gzip.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), mtime=0)
    script, style = ((Path(__file__).parent / name).read_text() for name in ("page.js", "page.css"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; img-src data:"
    policy += "; connect-src 'self'" if live else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{_GENERATOR} {__version__}">'
        f'<link rel="icon" href="data:,"><title>{_escape(results[0].caption)}</title><style>{style}</style></head>'
        f'<body><main>{"".join(sections)}</main><div id="tip" role="tooltip" hidden></div>'
        f"<noscript>Figures need JavaScript; the tables do not.</noscript>"
        f'<script type="text/plain" id="data">{base64.b64encode(packed).decode()}</script>'
        f"<script>{script}</script></body></html>\n"
    )


def render_markdown(results: Sequence[Result]) -> str:
    """Markdown for a pull-request comment or a CI job summary: the answer, the main table, and the other tables
    folded."""
    parts = []
    for result in results:
        verdict, rest = split_verdict(result.headline)
        tables = [_render_markdown(table) for table in result.tables() if table.rows]
        parts += [f"### {verdict}", rest, *tables[:1]]
        parts += [f"> warning: {warning}" for warning in result.warnings[:1]]
        parts += [f"Next: `{step}`" for step in result.next_steps[:1]]
        said = "\n".join(f"- {line}" for line in (*result.findings, *result.warnings[1:]))
        folded = [*tables[1:], said]
        parts += ["<details><summary>details</summary>", *folded, "</details>"] if any(folded) else []
        parts.append(f"<sub>{_escape(result.caption)}; {_escape(result.machine)}</sub>")
    return "\n\n".join(filter(None, parts)) + "\n"


def _render_markdown(table: Table) -> str:
    title = f"**{table.title}**\n\n" if table.title else ""
    return f"{title}{table.markdown().rstrip()}"


def save_page(results: Sequence[Result], page: Path) -> Path:
    """Write the page of these results. Replaces an existing page, but no other file."""
    if page.is_dir():
        page = page / PAGE_FILE
    if page.exists() and _GENERATOR not in page.read_text(errors="replace")[:2000]:
        raise ConfigError(f"{page} is not a Paceline page and is not overwritten: choose another name", code="exists")
    write_new(page, render_page(results, page), replace=True)
    return page
