"""Shared code for figures: chart style, axes, legend, and rendering to PNG and SVG.

Legends state whether numbers are measured, imported or predicted, and never cover data.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # matplotlib is imported when a figure is drawn
    Axes = Figure = Any
Drawings = dict[str, Callable[[], "Figure"]]  # functions that draw the figures, by file name

# Distinguishable with any color vision and in print (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def _measure(text: str, points: float, weight: str = "normal") -> float:
    """Width of one line of text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=points, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 72


def _fit(text: str, width: float, points: float, weight: str = "normal") -> str:
    """The text wrapped to this width in inches; words that are too long are split."""
    lines, most = [text], len(text)
    while (widest := max(_measure(line, points, weight) for line in lines)) > width and most > 1:
        most = min(most - 1, int(max(map(len, lines)) * width / widest))
        lines = textwrap.wrap(text, max(1, most))
    return "\n".join(lines)


def build_panels(titles: Sequence[str], title: str, subtitle: str, height: float = 3.3) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per title, at most three in a row, with a shared y axis."""
    from matplotlib.figure import Figure

    columns = min(3, len(titles))
    rows, width = -(-len(titles) // columns), max(7.6, 1.2 + 3.6 * columns)
    figure = Figure(figsize=(width, 1.5 + height * rows), layout="constrained")
    figure.suptitle(_fit(title, 0.97 * width, 12, "bold"), x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(_fit(subtitle, 0.97 * width, 8.5), fontsize=8.5, color="#555555")
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axes, name in zip(grid, titles, strict=False):
        axes.set_title(_fit(name, width / columns - 0.6, 9.5), loc="left", fontsize=9.5)
        axes.grid(True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8.5)
    for axes in grid[len(titles) :]:
        axes.set_visible(False)
    return figure, grid[: len(titles)]


def new_figure(title: str, subtitle: str) -> tuple[Figure, Axes]:
    """An empty chart with a single panel."""
    figure, (axes,) = build_panels([""], title, subtitle)
    return figure, axes


def label_values(axes: Axes, values: Sequence[float], label: Callable[[Any], str] = "{:,}".format) -> None:
    """A log axis with ticks at the measured values; ticks without enough room are omitted."""
    found = sorted(set(values))
    apart = max(1.1, (found[-1] / found[0]) ** (1 / 12)) - 1e-9
    shown = found[-1:]
    for value in reversed(found[:-1]):
        if shown[0] / value >= apart and (value == found[0] or value / found[0] >= apart):
            shown.insert(0, value)
    labels = [label(value) for value in shown]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, labels, fontsize=8.5, rotation=30 if sum(map(len, labels)) > 45 else 0)
    axes.set_xticks([], minor=True)
    if len(found) == 1:
        axes.set_xlim(found[0] / 2, found[0] * 2)


def place_legend(figure: Figure, *axes: Axes) -> None:
    """One legend for all axes, to their right, where it covers no data."""
    found: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    width, height = figure.get_size_inches()
    longest = max((_measure(label, 8.5) for label in found), default=0.0)
    figure.set_size_inches(width + 0.9 + longest, max(height, 1.6 + 0.22 * len(found)))
    figure.legend(list(found.values()), list(found), loc="outside right center", fontsize=8.5, frameon=False)


def draw_line(
    axes: Axes, number: int, points: Iterable[Sequence[Any]], label: str, ls: str = "-", **style: Any
) -> None:
    """Draw line `number` through points of x, y, low and high, with a band from low to high (a bar for a single point)
    unless they are None. `style` overrides the marker and other properties."""
    color = COLORS[number % len(COLORS)]
    look: dict[str, Any] = {"marker": MARKERS[number % len(MARKERS)], "ms": 5, "lw": 1.6} | style
    xs, ys, lows, highs = zip(*points, strict=True)
    axes.plot(xs, ys, ls, color=color, label=label, **look)
    if len(xs) == 1 and None not in lows:  # a band would have no width
        axes.plot(xs * 2, lows + highs, color=color, marker="_", ms=7, lw=1.2)
    elif None not in lows:
        axes.fill_between(xs, lows, highs, color=color, alpha=0.15, lw=0)


def render_png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    data = io.BytesIO()
    figure.dpi = 150
    FigureCanvasAgg(figure).print_png(data)
    _keep_layout(figure)
    return data.getvalue()


def render_svg(figure: Figure) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    data = io.BytesIO()
    # Without a date and with fixed ids, equal records produce identical files.
    with matplotlib.rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_svg(data, metadata={"Date": None})
    _keep_layout(figure)
    return data.getvalue()


def _keep_layout(figure: Figure) -> None:
    """Freeze the layout: another format then renders in a third of the time, because `savefig` need not lay it out."""
    figure.set_layout_engine("none")
