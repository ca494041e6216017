"""Pictures of records, as PNG and SVG. Each legend says whether its numbers were measured, imported or else."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.records import ChunksRecord, CollectiveRecord, WrapperRecord
from paceline.units import GB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_bandwidth", "plot_chunks", "plot_time", "plot_wrappers", "render_png", "render_svg"]

# Distinguishable with any kind of colour vision, and in print (Okabe and Ito).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def _new_figure(title: str, subtitle: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=8.5, color="#555555")
    axes.grid(True, which="major", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _label_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """Sizes under the axis as people write them, and only the sizes that were measured."""
    axes.set_xscale("log")
    least, most = min(sizes), max(sizes)
    apart = max(1.3, (most / least) ** (1 / 14))  # closer neighbours would print over each other
    shown: list[int] = []
    for size in sorted(set(sizes)):
        if not shown or size >= shown[-1] * apart:
            shown.append(size)
    axes.set_xticks(shown, [format_bytes(size) for size in shown])
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="x", labelsize=8.5, rotation=30 if len(shown) > 7 else 0)


def _series(records: Sequence[Any]) -> dict[tuple[str, str, int, str, str], list[Any]]:
    series: dict[tuple[str, str, int, str, str], list[Any]] = {}
    for r in records:
        series.setdefault((r.backend, r.device, r.world_size, r.source, r.note), []).append(r)
    return series


def _draw(
    axes: Axes,
    records: Sequence[Any],
    x: Callable[[Any], float],
    y: Callable[[Any, float], float],
) -> None:
    """One line per backend, number of ranks and source, with a band from p10 to p90 where there are samples."""
    backends = list(dict.fromkeys((r.backend, r.device, r.note) for r in records))
    counts = sorted({r.world_size for r in records})
    for (backend, device, n, source, note), rows in sorted(_series(records).items()):
        rows = sorted(rows, key=x)
        # One backend alone: colours tell the ranks apart; several: colours are backends, and markers the ranks.
        index = counts.index(n) if len(backends) == 1 else backends.index((backend, device, note))
        color, marker = _COLORS[index % len(_COLORS)], _MARKERS[counts.index(n) % len(_MARKERS)]
        where = f" {device}" if len({d for b, d, _ in backends if b == backend}) > 1 else ""
        kind = source if rows[0].timing.statistic == "median" else f"{source}, {rows[0].timing.statistic}"
        label = f"{backend}{where}, {n} rank{'s' if n > 1 else ''} ({kind}{': ' + note if note else ''})"
        style = "-" if source == "measured" else "--"
        xs = [x(r) for r in rows]
        axes.plot(xs, [y(r, r.time_s) for r in rows], style, color=color, marker=marker, ms=5, lw=1.6, label=label)
        if all(r.timing.p10_s is not None for r in rows):
            low, high = [y(r, r.timing.p10_s) for r in rows], [y(r, r.timing.p90_s) for r in rows]
            axes.fill_between(xs, low, high, color=color, alpha=0.15, lw=0)
    axes.legend(fontsize=8.5, frameon=False)


def plot_time(records: Sequence[CollectiveRecord], subtitle: str) -> Figure:
    """Time against size, both on log axes, grouped by backend and ranks."""
    figure, axes = _new_figure(f"{records[0].collective}: time", subtitle)
    _draw(axes, records, lambda r: r.num_bytes, lambda r, seconds: seconds * 1e3)
    axes.set_yscale("log")
    axes.set_ylabel("time (ms), median, band p10 to p90")
    axes.set_xlabel("size")
    _label_sizes(axes, [r.num_bytes for r in records])
    return figure


def plot_bandwidth(records: Sequence[CollectiveRecord], subtitle: str) -> Figure:
    """Bus bandwidth against size, grouped by backend and ranks; algorithm bandwidth for one rank, which has no bus."""
    alone = all(r.world_size == 1 for r in records)
    name = "algbw" if alone else "busbw"
    figure, axes = _new_figure(f"{records[0].collective}: {name}", subtitle)

    def rate(record: CollectiveRecord, seconds: float) -> float:
        bus = record.busbw_bytes_per_s / record.algbw_bytes_per_s
        return record.num_bytes / seconds * (1.0 if alone else bus) / GB

    _draw(axes, records, lambda r: r.num_bytes, rate)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{name} (GB/s)")
    axes.set_xlabel("size")
    _label_sizes(axes, [r.num_bytes for r in records])
    return figure


def plot_chunks(records: Sequence[ChunksRecord], subtitle: str) -> Figure:
    """Total time against elements per all-reduce, both on log axes, per backend."""
    total = format_bytes(records[0].total_bytes)
    figure, axes = _new_figure(f"{total} all-reduced in chunks", subtitle)
    _draw(axes, records, lambda r: r.chunk_elements, lambda r, seconds: seconds * 1e3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("elements per all-reduce")
    axes.set_ylabel("total time (ms), median, band p10 to p90")
    return figure


def plot_wrappers(records: Sequence[WrapperRecord], subtitle: str) -> Figure:
    """Step time of each wrapper, one panel for each model, backend and number of ranks; a line from p10 to p90."""
    from matplotlib.figure import Figure

    panels: dict[tuple[Any, ...], list[WrapperRecord]] = {}
    for record in records:
        panels.setdefault(record.cell, []).append(record)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    wrappers = list(dict.fromkeys(record.wrapper for record in records))
    figure = Figure(figsize=(2.2 + 3.2 * columns, 1.1 + rows * (1.0 + 0.3 * len(wrappers))), layout="constrained")
    figure.suptitle("step time of data-parallel wrappers", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(f"step (ms), median, line p10 to p90. {subtitle}", fontsize=8.5, color="#555555")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels.values(), strict=False):
        first = panel[0]
        where = f"{first.backend}, {first.world_size} rank{'s' if first.world_size > 1 else ''}"
        axes.set_title(f"{first.model} ({where}, {first.source})", loc="left", fontsize=9)
        for record in panel:
            place, color = wrappers.index(record.wrapper), _COLORS[wrappers.index(record.wrapper) % len(_COLORS)]
            low, middle, high = (1e3 * s for s in (record.timing.p10_s, record.timing.median_s, record.timing.p90_s))
            axes.plot([low, high], [place, place], color=color, lw=2, alpha=0.5)
            axes.plot([middle], [place], color=color, marker=_MARKERS[place % len(_MARKERS)], ms=6)
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(wrappers)), wrappers, fontsize=8.5)
        axes.set_ylim(len(wrappers) - 0.5, -0.5)
        axes.grid(True, axis="x", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8.5)
    return figure


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
