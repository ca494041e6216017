"""Figures of batch sizes and ranks; each legend says whether its numbers were measured or simulated.

The same numbers as tables are in `scaling`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import RecordError
from paceline.predict.scaling import PredictedPoint
from paceline.records.steps import ScalePoint, StepRecord
from paceline.records.training import BatchRecord, find_knee
from paceline.report.plots import COLORS, MARKERS, new_figure
from paceline.report.scaling import is_split
from paceline.units import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREY = "#555555"
_MOST_TICKS = 12


def label_counts(axes: Axes, counts: Sequence[int]) -> None:
    """Batch sizes or ranks on a log axis, as they were measured; those for which there is no room are not named."""
    found = sorted(set(counts))
    apart = (found[-1] / found[0]) ** (1 / _MOST_TICKS) - 1e-9
    shown = found[-1:]
    for count in reversed(found[:-1]):
        if shown[0] / count >= apart and (count == found[0] or count / found[0] >= apart):
            shown.insert(0, count)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown, [f"{count:,}" for count in shown])
    axes.set_xticks([], minor=True)
    if len(found) == 1:
        axes.set_xlim(found[0] / 2, found[0] * 2)


def build_panels(titles: Sequence[str], title: str, subtitle: str) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each title, at most three beside each other, and one y axis for all."""
    from matplotlib.figure import Figure

    if not titles:
        raise RecordError(f"{title}: no record to draw")
    columns = min(3, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(max(7.6, 1.2 + 3.6 * columns), 1.5 + 3.3 * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(subtitle, fontsize=8.5, color=_GREY)
    grid = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
    for axes, name in zip(grid, titles, strict=False):
        axes.set_title(name, loc="left", fontsize=9.5)
        axes.grid(True, alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8.5)
    for axes in grid[len(titles) :]:
        axes.set_visible(False)
    return figure, grid[: len(titles)]


def join_legends(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, beside them, where it hides nothing."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + 0.6 + 0.067 * max(map(len, found)), max(height, 1.6 + 0.22 * len(found)))
    figure.legend(list(found.values()), list(found), loc="outside right upper", fontsize=8.5, frameon=False)


def draw_line(
    axes: Axes,
    number: int,
    xs: Sequence[float],
    ys: Sequence[float],
    errors: Sequence[float],
    label: str,
    ls: str = "-",
) -> None:
    """The line of this number, with error bars."""
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    axes.errorbar(xs, ys, errors, color=color, marker=marker, ms=5, lw=1.6, capsize=3, ls=ls, label=label)


def plot_batches(records: Sequence[BatchRecord], subtitle: str) -> Figure:
    """Samples/s and peak memory against batch size, with the knee, and a cross where a batch did not fit."""
    source = ", ".join(dict.fromkeys(record.source for record in records))
    figure, axes = new_figure(f"{records[0].model} on one rank: batch size", subtitle)
    timed = sorted((r for r in records if r.timing), key=lambda r: r.batch_size)
    xs, rates = [r.batch_size for r in timed], [r.samples_per_s or 0.0 for r in timed]
    slow, fast = ([r.num_samples / getattr(r.timing, name) for r in timed] for name in ("p90_s", "p10_s"))
    below = [rate - low for rate, low in zip(rates, slow, strict=True)]
    above = [high - rate for rate, high in zip(rates, fast, strict=True)]
    axes.errorbar(xs, rates, [below, above], color=COLORS[0], marker="o", capsize=3, label=f"samples/s ({source})")
    axes.set_ylim(0, 1.2 * max(rates, default=1.0))
    axes.set_xlabel("batch size")
    axes.set_ylabel("samples/s, line p10 to p90")
    knee = find_knee(records)
    if knee is not None:
        axes.axvline(knee.batch_size, color=_GREY, ls=":", lw=1.2, label=f"knee: {knee.batch_size}")
    failed = [r.batch_size for r in records if r.failure]
    if failed:
        axes.plot(failed, [0] * len(failed), "x", color=COLORS[1], ms=9, mew=2, clip_on=False, label="does not fit")
    handles, labels = axes.get_legend_handles_labels()
    if any(r.peak_bytes for r in timed):
        beside, peaks = axes.twinx(), [r.peak_bytes / MIB for r in timed]
        beside.plot(xs, peaks, "--", color=COLORS[2], marker="s", ms=4, label=f"peak memory ({source})")
        beside.set_ylim(0, 1.2 * max(peaks))
        beside.set_ylabel("peak memory (MiB)")
        beside.spines[["top"]].set_visible(False)
        more = beside.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    axes.legend(handles, labels, fontsize=8.5, frameon=False, loc="upper center", ncols=2)
    label_counts(axes, [r.batch_size for r in records])
    return figure


def plot_ranks(
    mode: str, points: Sequence[ScalePoint], subtitle: str, predicted: Sequence[PredictedPoint] = ()
) -> Figure:
    """Weak-scaling efficiency, or strong-scaling speed-up on log axes, against ranks: a panel for each batch size, with
    the ideal line and predictions."""
    is_weak = mode == "weak"
    kept = [p for p in points if p.record.mode == mode and p.record.world_size > 1]
    beyond = [q for q in predicted if q.mode == mode]
    sizes = sorted({p.record.cell_size for p in kept} | {q.cell_size for q in beyond})
    names = list(dict.fromkeys([p.record.variant for p in kept] + [q.variant for q in beyond]))
    where = "per rank" if is_weak else "over all ranks"
    figure, panels = build_panels([f"{size:,} samples {where}" for size in sizes], f"{mode} scaling", subtitle)
    for axes, size in zip(panels, sizes, strict=True):
        here = [p for p in kept if p.record.cell_size == size]
        there = [q for q in beyond if q.cell_size == size]
        counts = sorted({1, *(p.record.world_size for p in here), *(q.world_size for q in there)})
        axes.plot(counts, [1 if is_weak else n for n in counts], ":", color="#000000", lw=1.2, label="ideal")
        _draw_ranks(axes, here, there, names, is_weak)
        axes.set_xlabel("ranks", fontsize=9)
        label_counts(axes, counts)
    # All panels share the y axis, so that the highest point of all decides.
    if is_weak:
        panels[0].set_ylim(0, max([1.1, *(1.05 * (p.efficiency + (p.efficiency_noise or 0.0)) for p in kept)]))
    else:
        panels[0].set_yscale("log", base=2)
        panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].set_ylabel(f"{'efficiency' if is_weak else 'speed-up'} T(1)/T(n), ± 95 %")
    join_legends(figure, panels)
    return figure


def _draw_ranks(
    axes: Axes, points: Sequence[ScalePoint], predicted: Sequence[PredictedPoint], names: Sequence[str], is_weak: bool
) -> None:
    """A line for each variant, from one rank alone on. Predictions of measured ranks are crosses; those of more ranks
    go on, dashed and with their interval, from the best variant's line: all of them would hide each other."""

    def value(point: ScalePoint | PredictedPoint) -> float:
        return point.efficiency if is_weak else point.speedup

    beyond = sorted((q for q in predicted if q.measured is None), key=lambda q: q.world_size)
    leader = max(beyond, key=lambda q: (q.world_size, value(q))).variant if beyond else ""
    for number, name in enumerate(names):
        color = COLORS[number % len(COLORS)]
        found = sorted((p for p in points if p.record.variant == name), key=lambda p: p.record.world_size)
        for source in dict.fromkeys(p.record.source for p in found):
            line = [p for p in found if p.record.source == source]
            noises = [(p.efficiency_noise if is_weak else p.ratio.noise) or 0.0 for p in line]
            xs, ys = [1, *(p.record.world_size for p in line)], [1.0, *map(value, line)]
            draw_line(axes, number, xs, ys, [0.0, *noises], f"{name} ({source})", "-" if source == "measured" else "-.")
        for q in (q for q in predicted if q.variant == name and q.measured is not None):
            axes.plot(q.world_size, value(q), "x", color=color, ms=6, mew=1.4)
        networks = dict.fromkeys(q.network for q in beyond) if name == leader else {}
        for style, network in zip(("--", "-.", ":") * len(networks), networks, strict=False):
            curve = [q for q in beyond if (q.variant, q.network) == (name, network)]
            joined = [(p.record.world_size, value(p)) for p in found[-1:]] + [(q.world_size, value(q)) for q in curve]
            label = f"{name}, {network} ({curve[0].source})"
            axes.plot(*zip(*joined, strict=True), style, color=color, marker=".", ms=3, lw=1.1, label=label)
            lows, highs = zip(*(q.band(value(q)) for q in curve), strict=True)
            axes.fill_between([q.world_size for q in curve], lows, highs, color=color, alpha=0.13, lw=0)
    if len(beyond) < len(predicted):
        axes.plot([], [], "x", color=_GREY, label="predicted from half the ranks (simulated)")


def plot_communication(records: Sequence[StepRecord], subtitle: str) -> Figure:
    """Compute and exposed communication of a step, stacked, a bar for each ranks and batch size; a panel for each
    variant and mode."""
    groups: dict[str, list[StepRecord]] = {}
    for record in sorted(filter(is_split, records), key=lambda r: (r.cell_size, r.world_size)):
        groups.setdefault(f"{record.variant}, {record.mode} ({record.source})", []).append(record)
    figure, panels = build_panels(list(groups), "where the time of a step goes", subtitle)
    source = ", ".join(dict.fromkeys(r.source for group in groups.values() for r in group))
    for axes, group in zip(panels, groups.values(), strict=True):
        sizes = list(dict.fromkeys(r.cell_size for r in group))
        # A gap between batch sizes, so that the eye compares ranks at one size.
        xs = [place + 0.6 * sizes.index(r.cell_size) for place, r in enumerate(group)]
        compute, exposed = [1e3 * r.compute_s for r in group], [1e3 * r.exposed_s for r in group]
        noise = [1e3 * (r.exposed_noise_s or 0.0) for r in group]
        axes.bar(xs, compute, 0.8, color=COLORS[0], label=f"compute ({source})")
        axes.bar(xs, exposed, 0.8, bottom=compute, color=COLORS[1], label=f"exposed communication ({source}), ± 95 %")
        tops = [low + high for low, high in zip(compute, exposed, strict=True)]
        axes.errorbar(xs, tops, noise, ls="none", color="#000000", capsize=2, lw=1)
        style: dict[str, Any] = {"textcoords": "offset points", "ha": "center"}
        for x, top, error, record in zip(xs, tops, noise, group, strict=True):
            axes.annotate(f"{record.overhead:.0%}", (x, top + error), (0, 2), fontsize=7.5, **style)
        axes.set_xticks(xs, [f"{r.world_size}" for r in group])
        for size in sizes:
            middle = statistics.fmean(x for x, r in zip(xs, group, strict=True) if r.cell_size == size), 0
            style["xycoords"] = axes.get_xaxis_transform()
            axes.annotate(f"{size:,}", middle, (0, -20), va="top", fontsize=8.5, **style)
        where = "per rank" if group[0].mode == "weak" else "over all ranks"
        axes.set_xlabel(f"ranks, and samples {where}", fontsize=9, labelpad=17)
        axes.set_xlim(-0.7, max(xs[-1], 3.0) + 0.7)
        axes.margins(y=0.12)
        axes.grid(False, axis="x")
    panels[0].set_ylabel("step (ms); exposed in % of it")
    join_legends(figure, panels)
    return figure
