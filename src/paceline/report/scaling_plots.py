"""Figures of batch sizes and ranks; each legend says whether its numbers were measured or simulated.

The same numbers as tables are in `scaling`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.predict.scaling import PredictedPoint
from paceline.records.steps import ScalePoint, StepRecord
from paceline.records.training import BatchRecord, find_knee
from paceline.report.plots import COLORS, MARKERS, build_panels, label_values, new_figure, place_legend
from paceline.report.scaling import is_split
from paceline.units import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREY = "#555555"


def draw_line(axes: Axes, number: int, points: Sequence[tuple[float, float, float]], label: str, ls: str = "-") -> None:
    """The line of this number through points of x, y and the error of y."""
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    xs, ys, errors = zip(*points, strict=True)
    axes.errorbar(xs, ys, errors, color=color, marker=marker, ms=5, lw=1.6, capsize=3, ls=ls, label=label)


def plot_batches(records: Sequence[BatchRecord], subtitle: str) -> Figure:
    """Samples/s and peak memory against batch size, with the knee, and a cross where a batch did not fit."""
    source = ", ".join(dict.fromkeys(record.source for record in records))
    figure, axes = new_figure(f"{records[0].model} on one rank: batch size", subtitle)
    timed = sorted((r for r in records if r.timing), key=lambda r: r.batch_size)
    xs, rates = [r.batch_size for r in timed], [r.samples_per_s or 0.0 for r in timed]
    ends = [[r.num_samples / getattr(r.timing, name) for r in timed] for name in ("p90_s", "p10_s")]
    errors = [[abs(end - rate) for end, rate in zip(one, rates, strict=True)] for one in ends]
    axes.errorbar(xs, rates, errors, color=COLORS[0], marker="o", capsize=3, label=f"samples/s ({source})")
    axes.set(ylim=(0, 1.2 * max(rates, default=1.0)), xlabel="batch size", ylabel="samples/s, line p10 to p90")
    knee = find_knee(records)
    if knee is not None:
        axes.axvline(knee.batch_size, color=_GREY, ls=":", lw=1.2, label=f"knee: {knee.batch_size}")
    failed = [r.batch_size for r in records if r.failure]
    if failed:
        axes.plot(failed, [0] * len(failed), "x", color=COLORS[1], ms=9, mew=2, clip_on=False, label="does not fit")
    if any(r.peak_bytes for r in timed):
        beside, peaks = axes.twinx(), [r.peak_bytes / MIB for r in timed]
        beside.plot(xs, peaks, "--", color=COLORS[2], marker="s", ms=4, label=f"peak memory ({source})")
        beside.set(ylim=(0, 1.2 * max(peaks)), ylabel="peak memory (MiB)")
        beside.spines[["top"]].set_visible(False)
    place_legend(figure, *figure.axes)
    label_values(axes, [r.batch_size for r in records])
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
        label_values(axes, counts)
    # All panels share the y axis, so that the highest point of all decides.
    if is_weak:
        panels[0].set_ylim(0, max([1.1, *(1.05 * (p.efficiency + (p.efficiency_noise or 0.0)) for p in kept)]))
    else:
        panels[0].set_yscale("log", base=2)
        panels[0].yaxis.set_major_formatter("{x:g}")
    panels[0].set_ylabel(f"{'efficiency' if is_weak else 'speed-up'} T(1)/T(n), ± 95 %")
    place_legend(figure, *panels)
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
            drawn = [(p.record.world_size, value(p), noise) for p, noise in zip(line, noises, strict=True)]
            style = "-" if source == "measured" else "-."
            draw_line(axes, number, [(1, 1.0, 0.0), *drawn], f"{name} ({source})", style)
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
        axes.bar(xs, compute, 0.8, color=COLORS[0], label=f"compute ({source})")
        style: dict[str, Any] = {"color": COLORS[1], "label": f"exposed communication ({source}), ± 95 %"}
        noise = [1e3 * (r.exposed_noise_s or 0.0) for r in group]
        bars = axes.bar(xs, exposed, 0.8, bottom=compute, yerr=noise, capsize=2, **style)
        axes.bar_label(bars, [f"{r.overhead:.0%}" for r in group], fontsize=7.5, padding=2)
        axes.set_xticks(xs, [f"{r.world_size}\n{r.cell_size:,}" for r in group])
        where = "per rank" if group[0].mode == "weak" else "over all ranks"
        axes.set_xlabel(f"ranks, and samples {where}", fontsize=9)
        axes.set_xlim(-0.7, max(xs[-1], 3.0) + 0.7)
        axes.margins(y=0.12)
        axes.grid(False, axis="x")
    panels[0].set_ylabel("step (ms); exposed in % of it")
    place_legend(figure, *panels)
    return figure
