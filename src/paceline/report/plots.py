"""Pictures of records, as PNG and SVG. Each legend says whether its numbers were measured, imported or else."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.records import ChunksRecord, CollectiveRecord, MemoryRecord, StepRecord
from paceline.units import GB, format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLORS",
    "new_figure",
    "plot_bandwidth",
    "plot_chunks",
    "plot_time",
    "plot_wrappers",
    "render_png",
    "render_svg",
]

# Distinguishable with any kind of colour vision, and in print (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_FEW_LINES = 4
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


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


def _label_times(axes: Axes, top_s: float, least_s: float) -> None:
    """Times beside a log axis as people write them, and between the powers of ten where there are few of those."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    between = (1.0, 2.0, 5.0) if top_s / least_s < 100 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=between))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _place_legend(figure: Figure, axes: Axes) -> None:
    """Among the lines where there are few, else beside them, where it hides none."""
    lines = len(axes.get_legend_handles_labels()[0])
    if lines <= _FEW_LINES:
        axes.legend(fontsize=8.5, frameon=False)
        return
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + 2.8, max(height, 1.6 + 0.22 * lines))
    axes.legend(fontsize=8.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _memory(record: Any) -> str:
    return getattr(record, "memory", "ordinary")


def _series(records: Sequence[Any]) -> dict[tuple[str, str, str, int, str, str], list[Any]]:
    series: dict[tuple[str, str, str, int, str, str], list[Any]] = {}
    for r in records:
        series.setdefault((r.backend, r.device, _memory(r), r.world_size, r.source, r.note), []).append(r)
    return series


def _draw(
    axes: Axes,
    records: Sequence[Any],
    x: Callable[[Any], float],
    y: Callable[[Any, float], float],
) -> None:
    """One line per backend, memory, number of ranks and source, with a band from p10 to p90 where there are samples."""
    backends = list(dict.fromkeys((r.backend, r.device, _memory(r), r.note) for r in records))
    counts = sorted({r.world_size for r in records})
    for (backend, device, memory, n, source, note), rows in sorted(_series(records).items()):
        rows = sorted(rows, key=x)
        # One backend alone: colours tell the ranks apart; several: colours are backends, and markers the ranks.
        index = counts.index(n) if len(backends) == 1 else backends.index((backend, device, memory, note))
        color, marker = COLORS[index % len(COLORS)], _MARKERS[counts.index(n) % len(_MARKERS)]
        kin = [(d, m) for b, d, m, _ in backends if b == backend]
        where = f" {device}" if len({d for d, _ in kin}) > 1 else ""
        where += f", {memory} memory" if any(m != "ordinary" for _, m in kin) else ""
        kind = source if rows[0].timing.statistic == "median" else f"{source}, {rows[0].timing.statistic}"
        label = f"{backend}{where}, {_ranks(n)} ({kind}{': ' + note if note else ''})"
        style = "-" if source == "measured" else "--"
        xs = [x(r) for r in rows]
        axes.plot(xs, [y(r, r.time_s) for r in rows], style, color=color, marker=marker, ms=5, lw=1.6, label=label)
        if all(r.timing.p10_s is not None for r in rows):
            low, high = [y(r, r.timing.p10_s) for r in rows], [y(r, r.timing.p90_s) for r in rows]
            axes.fill_between(xs, low, high, color=color, alpha=0.15, lw=0)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def plot_time(records: Sequence[CollectiveRecord], subtitle: str, bounds: Sequence[MemoryRecord] = ()) -> Figure:
    """Time against size, both on log axes, grouped by backend, memory and ranks; `bounds` are what memory allows."""
    figure, axes = new_figure(f"{records[0].collective}: time", subtitle)
    _draw(axes, records, lambda r: r.num_bytes, lambda r, seconds: seconds * 1e3)
    counts, places = sorted({r.world_size for r in records}), sorted({(r.device, r.world_size) for r in bounds})
    for device, n in places:
        rows = sorted((r for r in bounds if (r.device, r.world_size) == (device, n)), key=lambda r: r.num_bytes)
        where = f" {device}" if len({device for device, _ in places}) > 1 else ""
        axes.plot(
            [r.num_bytes for r in rows],
            [r.time_s * 1e3 for r in rows],
            ":",
            color="#000000",
            marker=_MARKERS[counts.index(n) % len(_MARKERS)],
            ms=3.5,
            lw=1.4,
            label=f"memory bound{where}, {_ranks(n)} ({rows[0].source})",
        )
    _place_legend(figure, axes)
    times = [r.time_s for r in records] + [r.time_s for r in bounds]
    _label_times(axes, max(times), min(times))
    axes.set_ylabel("time (ms), median, band p10 to p90")
    axes.set_xlabel("size")
    _label_sizes(axes, [r.num_bytes for r in records])
    return figure


def plot_bandwidth(records: Sequence[CollectiveRecord], subtitle: str) -> Figure:
    """Bus bandwidth against size, grouped by backend and ranks; algorithm bandwidth for one rank, which has no bus."""
    alone = all(r.world_size == 1 for r in records)
    name = "algbw" if alone else "busbw"
    figure, axes = new_figure(f"{records[0].collective}: {name}", subtitle)

    def rate(record: CollectiveRecord, seconds: float) -> float:
        bus = record.busbw_bytes_per_s / record.algbw_bytes_per_s
        return record.num_bytes / seconds * (1.0 if alone else bus) / GB

    _draw(axes, records, lambda r: r.num_bytes, rate)
    _place_legend(figure, axes)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{name} (GB/s)")
    axes.set_xlabel("size")
    _label_sizes(axes, [r.num_bytes for r in records])
    return figure


def plot_chunks(records: Sequence[ChunksRecord], subtitle: str) -> Figure:
    """Total time against elements per all-reduce, both on log axes, per backend."""
    total = format_bytes(records[0].total_bytes)
    figure, axes = new_figure(f"{total} all-reduced in chunks", subtitle)
    _draw(axes, records, lambda r: r.chunk_elements, lambda r, seconds: seconds * 1e3)
    _place_legend(figure, axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("elements per all-reduce")
    axes.set_ylabel("total time (ms), median, band p10 to p90")
    return figure


def plot_wrappers(records: Sequence[StepRecord], subtitle: str) -> Figure:
    """Step time of each wrapper and backend, one panel for each model and number of ranks; a line from p10 to p90."""
    from matplotlib.figure import Figure

    panels: dict[tuple[Any, ...], list[StepRecord]] = {}
    for record in records:
        panels.setdefault((record.job, record.cell), []).append(record)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    backends = list(dict.fromkeys(record.backend for record in records))
    wrappers = list(dict.fromkeys(record.wrapper for record in records))
    # One wrapper's backends stand together, so that the eye compares them.
    lines = [(w, b) for w in wrappers for b in backends if any((r.wrapper, r.backend) == (w, b) for r in records)]
    names = [f"{wrapper} on {backend}" if len(backends) > 1 else wrapper for wrapper, backend in lines]
    width, height = 2.2 + 3.2 * columns + (0.8 if len(backends) > 1 else 0), 1.1 + rows * (1.0 + 0.3 * len(lines))
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle("step time of data-parallel wrappers", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(f"step (ms), median, line p10 to p90. {subtitle}", fontsize=8.5, color="#555555")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels.values(), strict=False):
        first = panel[0]
        on = f"{first.backend}, " if len(backends) == 1 else ""
        axes.set_title(f"{first.model} ({on}{_ranks(first.world_size)}, {first.source})", loc="left", fontsize=9)
        for record in panel:
            place, number = lines.index((record.wrapper, record.backend)), wrappers.index(record.wrapper)
            color, marker = COLORS[number % len(COLORS)], _MARKERS[number % len(_MARKERS)]
            low, middle, high = (1e3 * s for s in (record.timing.p10_s, record.timing.median_s, record.timing.p90_s))
            axes.plot([low, high], [place, place], color=color, lw=2, alpha=0.5)
            axes.plot([middle], [place], color=color, marker=marker, ms=6)
        axes.set_xlim(left=0)
        axes.set_yticks(range(len(lines)), names, fontsize=8.5)
        axes.set_ylim(len(lines) - 0.5, -0.5)
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
