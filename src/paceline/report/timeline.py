"""A picture of one step on all ranks: what each computes, and when its buckets are ready, on their way and done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.units import format_bytes, format_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BucketSpan", "PhaseSpan", "StepLane", "plot_timeline"]

MAX_RANKS = 8
_PHASE_COLORS = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#009E73"}
_OTHER, _WAITING, _MOVING, _EXPOSED = "#BBBBBB", "#F5D9A8", "#E69F00", "#D55E00"


@dataclass(frozen=True)
class PhaseSpan:
    """A phase of the step, such as `forward`; seconds of the picture's clock."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class BucketSpan:
    """A bucket: when it was ready, left and was done, in seconds of the picture's clock."""

    num_bytes: int
    ready_s: float
    launch_s: float
    done_s: float


@dataclass(frozen=True)
class StepLane:
    """One step of one rank. All ranks of a picture share one clock; `backward_end_s` is None if there was none."""

    rank: int
    phases: tuple[PhaseSpan, ...]
    buckets: tuple[BucketSpan, ...]
    backward_end_s: float | None
    end_s: float

    @property
    def exposed_s(self) -> float:
        """From the end of backward to the end of the last message."""
        last_s = max((bucket.done_s for bucket in self.buckets), default=0.0)
        return 0.0 if self.backward_end_s is None else max(0.0, last_s - self.backward_end_s)


def plot_timeline(lanes: Sequence[StepLane], title: str, subtitle: str, source: str = "measured") -> Figure:
    """For each rank a lane of phases and one of buckets, in ms; what moves after the end of backward is hatched."""
    from matplotlib.figure import Figure

    if not 1 <= len(lanes) <= MAX_RANKS:
        raise ConfigError(f"{len(lanes)} ranks cannot be drawn: choose 1 to {MAX_RANKS} of them")
    rows = sum(1.15 + 0.2 * _num_rows(lane) for lane in lanes)
    figure = Figure(figsize=(9.6, 1.7 + 0.62 * rows), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{title}\n", loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.0, f"{source}. {subtitle}", transform=axes.transAxes, fontsize=8.5, color="#555555", va="bottom")
    end_ms = max(lane.end_s for lane in lanes) * 1e3
    ticks: list[tuple[float, str]] = []
    top = 0.0
    for lane in lanes:
        height = 1.15 + 0.2 * _num_rows(lane)
        ticks.append((top + 0.2, f"rank {lane.rank}"))
        _draw_phases(axes, lane, top, end_ms)
        if lane.buckets:
            ticks.append((top + 0.5 + 0.1 * _num_rows(lane), "buckets"))
            _draw_buckets(axes, lane, top + 0.47, end_ms)
        if lane is not lanes[-1]:
            axes.axhline(top + height - 0.12, color="#DDDDDD", lw=0.8)
        top += height
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(top - 0.1, -0.12)
    axes.set_xlim(0, end_ms * 1.01)
    axes.set_xlabel("ms since the first rank began the step")
    axes.grid(True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _place_legend(axes, lanes)
    return figure


def _rows(lane: StepLane) -> list[int]:
    """A row for each bucket, so that none is drawn over another."""
    free_at: list[float] = []
    rows = []
    for bucket in lane.buckets:
        row = next((number for number, free_s in enumerate(free_at) if free_s <= bucket.ready_s), len(free_at))
        free_at[row : row + 1] = [bucket.done_s]
        rows.append(row)
    return rows


def _num_rows(lane: StepLane) -> int:
    return max(_rows(lane), default=-1) + 1


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
    if lane.backward_end_s is not None and lane.buckets:
        bottom = top + 0.47 + 0.2 * _num_rows(lane)
        axes.plot([lane.backward_end_s * 1e3] * 2, [top, bottom], color="#000000", lw=0.9, ls=":")


def _draw_buckets(axes: Axes, lane: StepLane, top: float, end_ms: float) -> None:
    free_s = float("inf") if lane.backward_end_s is None else lane.backward_end_s
    rows = _rows(lane)
    for bucket, row in zip(lane.buckets, rows, strict=True):
        place = (top + 0.2 * row, 0.17)
        hidden_s = min(max(bucket.launch_s, free_s), bucket.done_s)
        for first_s, last_s, options in (
            (bucket.ready_s, bucket.launch_s, {"facecolors": _WAITING}),
            (bucket.launch_s, hidden_s, {"facecolors": _MOVING}),
            (hidden_s, bucket.done_s, {"facecolors": "white", "edgecolors": _EXPOSED, "hatch": "//////", "lw": 0.8}),
        ):
            if last_s > first_s:
                axes.broken_barh([(first_s * 1e3, (last_s - first_s) * 1e3)], place, **options)
        # Beside the bar, so that hatching does not cross it; few enough to be read.
        if len(rows) <= 12:
            axes.text(
                bucket.done_s * 1e3 + 0.004 * end_ms, place[0] + 0.085, format_bytes(bucket.num_bytes), fontsize=6.5,
                va="center", color="#333333",
            )  # fmt: skip


def _place_legend(axes: Axes, lanes: Sequence[StepLane]) -> None:
    from matplotlib.patches import Patch

    names = dict.fromkeys(phase.name for lane in lanes for phase in lane.phases)
    entries = [Patch(facecolor=_PHASE_COLORS.get(name, _OTHER), label=name) for name in names]
    if any(lane.buckets for lane in lanes):
        exposed = ", ".join(format_ms(lane.exposed_s) for lane in lanes)
        entries += [
            Patch(facecolor=_WAITING, label="bucket ready, waits for its turn"),
            Patch(facecolor=_MOVING, label="bucket on its way"),
            Patch(facecolor="white", edgecolor=_EXPOSED, hatch="//////", label=f"exposed ({exposed} ms)"),
        ]
    axes.legend(
        handles=entries, fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(entries)
    )
