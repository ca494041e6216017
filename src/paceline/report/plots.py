"""What all pictures share: the style of a chart, its axes and its legend, and how it becomes PNG and SVG.

A legend says whether its numbers were measured, imported or predicted, and never covers them.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable with any kind of colour vision, and in print (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_FEW_LINES = 4


def new_figure(title: str, subtitle: str) -> tuple[Figure, Axes]:
    """An empty chart in the house's style."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=8.5, color="#555555")
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def label_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """A log axis of sizes as people write them, with ticks only at sizes that were measured."""
    axes.set(xscale="log", xlabel="size")
    least, most = min(sizes), max(sizes)
    apart = max(1.3, (most / least) ** (1 / 14))  # closer neighbours would print over each other
    shown: list[int] = []
    for size in sorted(set(sizes)):
        if not shown or size >= shown[-1] * apart:
            shown.append(size)
    axes.set_xticks(shown, [format_bytes(size) for size in shown])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", labelsize=8.5, rotation=30 if len(shown) > 7 else 0)


def label_times(axes: Axes, top_s: float, least_s: float) -> None:
    """A log axis of times as people write them, with ticks between the powers of ten where there are few of those."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    between = (1.0, 2.0, 5.0) if top_s / least_s < 100 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def place_legend(figure: Figure, *axes: Axes) -> None:
    """Outside of the axes, where it covers no data: below a few lines, else to the right of them."""
    found = [one.get_legend_handles_labels() for one in axes]
    handles, labels = [h for pair in found for h in pair[0]], [label for pair in found for label in pair[1]]
    if len(handles) <= _FEW_LINES:
        columns = 2 if max(map(len, labels), default=0) < 45 else 1
        figure.legend(handles, labels, fontsize=8.5, frameon=False, loc="outside lower center", ncols=columns)
        return
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + 2.8, max(height, 1.6 + 0.22 * len(handles)))
    figure.legend(handles, labels, fontsize=8.5, frameon=False, loc="outside right center")


def render_png(figure: Figure) -> bytes:
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=150)
    return data.getvalue()


def render_svg(figure: Figure) -> bytes:
    import matplotlib

    data = io.BytesIO()
    # Without a date and with fixed ids, equal records give equal files.
    with matplotlib.rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "none"}):
        figure.savefig(data, format="svg", metadata={"Date": None})
    return data.getvalue()
