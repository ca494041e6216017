"""A picture of one step on all ranks: what each computes, and when its buckets are ready, on their way and done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.predict.overview import StepLane
from paceline.units import format_bytes, format_duration, format_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_RANKS = 8
# The height of a row of buckets, the width of a label as a share of the step, and how many labels can be read.
_ROW, _LABEL_WIDTH, _MAX_LABELS = 0.22, 0.065, 16
_PHASE_COLORS = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73"}
_OTHER, _WAITING, _MOVING, _EXPOSED = "#BBBBBB", "#F5D9A8", "#E69F00", "#D55E00"


def plot_timeline(lanes: Sequence[StepLane], title: str, subtitle: str, source: str = "measured") -> Figure:
    """For each rank a lane of phases and one of buckets, in ms; what moves after the end of backward is hatched."""
    from matplotlib.figure import Figure

    if not 1 <= len(lanes) <= MAX_RANKS:
        raise ConfigError(f"{len(lanes)} ranks cannot be drawn: choose 1 to {MAX_RANKS} of them")
    end_ms = max(lane.end_s for lane in lanes) * 1e3
    rows = {lane.rank: _choose_rows(lane, end_ms / 1e3) for lane in lanes}
    heights = {rank: 0.65 + _ROW * (max(places, default=-1) + 1) for rank, places in rows.items()}
    figure = Figure(figsize=(9.6, 1.7 + 0.8 * sum(heights.values())), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.0, f"{source}. {subtitle}", transform=axes.transAxes, fontsize=8.5, color="#555555", va="bottom")
    ticks: list[tuple[float, str]] = []
    top = 0.0
    for lane in lanes:
        bottom = top + heights[lane.rank]
        ticks.append((top + 0.2, f"rank {lane.rank}"))
        _draw_phases(axes, lane, top, end_ms)
        if lane.buckets:
            ticks.append(((top + bottom) / 2 + 0.15, "buckets"))
            _draw_buckets(axes, lane, rows[lane.rank], top + 0.47, end_ms)
            if lane.backward_end_s is not None:
                axes.plot([lane.backward_end_s * 1e3] * 2, [top, bottom - 0.2], color="#000000", lw=0.9, ls=":")
        if lane is not lanes[-1]:
            axes.axhline(bottom - 0.1, color="#DDDDDD", lw=0.8)
        top = bottom
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(top - 0.1, -0.12)
    axes.set_xlim(0, end_ms * 1.01)
    axes.set_xlabel("ms since the first rank began the step")
    axes.grid(True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _place_legend(figure, lanes)
    return figure


def _choose_rows(lane: StepLane, end_s: float) -> list[int]:
    """A row for each bucket, so that neither it nor its label is drawn over another."""
    free_at: list[float] = []
    rows = []
    for bucket in lane.buckets:
        row = next((number for number, free_s in enumerate(free_at) if free_s <= bucket.ready_s), len(free_at))
        free_at[row : row + 1] = [bucket.done_s + (_LABEL_WIDTH * end_s if _has_labels(lane) else 0.0)]
        rows.append(row)
    return rows


def _has_labels(lane: StepLane) -> bool:
    return len(lane.buckets) <= _MAX_LABELS


def _draw_phases(axes: Axes, lane: StepLane, top: float, end_ms: float) -> None:
    for phase in lane.phases:
        start_ms, width_ms = phase.start_s * 1e3, (phase.end_s - phase.start_s) * 1e3
        color = _PHASE_COLORS.get(phase.name, _OTHER)
        axes.broken_barh([(start_ms, width_ms)], (top, 0.4), facecolors=color)
        words = f"{phase.name} {format_ms(phase.end_s - phase.start_s)}"
        if width_ms > 0.011 * len(words) * end_ms:
            axes.text(
                start_ms + width_ms / 2, top + 0.2, words, ha="center", va="center", fontsize=7.5,
                color="white" if phase.name == "backward" else "black",
            )  # fmt: skip


def _draw_buckets(axes: Axes, lane: StepLane, rows: Sequence[int], top: float, end_ms: float) -> None:
    free_s = float("inf") if lane.backward_end_s is None else lane.backward_end_s
    for bucket, row in zip(lane.buckets, rows, strict=True):
        place = (top + _ROW * row, 0.85 * _ROW)
        hidden_s = min(max(bucket.launch_s, free_s), bucket.done_s)
        for first_s, last_s, options in (
            (bucket.ready_s, bucket.launch_s, {"facecolors": _WAITING}),
            (bucket.launch_s, hidden_s, {"facecolors": _MOVING}),
            (hidden_s, bucket.done_s, {"facecolors": "white", "edgecolors": _EXPOSED, "hatch": "//////", "lw": 0.8}),
        ):
            if last_s > first_s:
                axes.broken_barh([(first_s * 1e3, (last_s - first_s) * 1e3)], place, **options)
        if _has_labels(lane):  # beside the bar, where hatching does not cross it
            axes.text(
                bucket.done_s * 1e3 + 0.004 * end_ms, place[0] + 0.42 * _ROW, format_bytes(bucket.num_bytes),
                fontsize=6.5, va="center", color="#333333",
            )  # fmt: skip


def _place_legend(figure: Figure, lanes: Sequence[StepLane]) -> None:
    from matplotlib.patches import Patch

    names = dict.fromkeys(phase.name for lane in lanes for phase in lane.phases)
    entries = [Patch(facecolor=_PHASE_COLORS.get(name, _OTHER), label=name) for name in names]
    if any(lane.buckets for lane in lanes):
        exposed = dict.fromkeys(format_duration(pick(lane.exposed_s for lane in lanes)) for pick in (min, max))
        entries += [
            Patch(facecolor=_WAITING, label="bucket ready, gathered"),
            Patch(facecolor=_MOVING, label="bucket on its way"),
            Patch(facecolor="white", edgecolor=_EXPOSED, hatch="//////", label=f"exposed ({' to '.join(exposed)})"),
        ]
    # Outside of the axes and by the figure's own measure, so that it keeps its distance at any height.
    figure.legend(handles=entries, fontsize=8, frameon=False, loc="outside lower center", ncols=len(entries))
