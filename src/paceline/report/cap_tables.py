"""Tables and pictures of backward time against bucket size. The numbers are simulated, and marked so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.predict.search import CapCurve, CapPoint, Change
from paceline.report.plots import COLORS, new_figure
from paceline.report.tables import Column
from paceline.units import MIB, format_bytes, format_ms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Neighbours whose times differ by less are one row for people; the CSV has them all.
_SAME = 0.002


def _range(low_bytes: int, high_bytes: int) -> str:
    return f"{format_bytes(low_bytes)} to {format_bytes(high_bytes)}"


def merge_points(points: Sequence[CapPoint]) -> list[list[CapPoint]]:
    """Runs of neighbours that take the same time."""
    runs: list[list[CapPoint]] = []
    for point in points:
        if runs and abs(point.backward_s / runs[-1][0].backward_s - 1) < _SAME:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


cap_table: Sequence[Column] = (
    Column("bucket size", lambda run: _range(run[0].low_bytes, run[-1].high_bytes), False),
    Column("buckets", lambda run: _between(run[-1].num_buckets, run[0].num_buckets)),
    Column("backward (ms)", lambda run: format_ms(min(point.backward_s for point in run))),
    Column("exposed (ms)", lambda run: format_ms(min(point.exposed_s for point in run))),
    Column("source", lambda run: "simulated", False),
)


def _between(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def cap_row(point: CapPoint) -> dict[str, Any]:
    """One distinct partition for JSON and CSV."""
    return {
        "low_bytes": point.low_bytes,
        "high_bytes": point.high_bytes,
        "num_buckets": point.num_buckets,
        "backward_s": point.backward_s,
        "exposed_s": point.exposed_s,
        "source": "simulated",
    }


change_table: Sequence[Column] = (
    Column("changed", lambda c: c.what, False),
    Column("by", lambda c: f"x {c.factor:g}"),
    Column("best bucket size", lambda c: _range(*c.curve.plateau), False),
    Column("buckets", lambda c: str(c.curve.best.num_buckets)),
    Column("backward (ms)", lambda c: format_ms(c.curve.best.backward_s)),
    Column("exposed (ms)", lambda c: format_ms(c.curve.best.exposed_s)),
    Column("source", lambda c: "simulated", False),
)


def change_row(change: Change) -> dict[str, Any]:
    low, high = change.curve.plateau
    return {
        "changed": change.what,
        "factor": change.factor,
        "plateau_low_bytes": low,
        "plateau_high_bytes": high,
        "best": cap_row(change.curve.best),
    }


def _steps(points: Sequence[CapPoint]) -> tuple[list[float], list[float]]:
    """The step function: caps on a log axis, times between."""
    xs: list[float] = []
    ys: list[float] = []
    for point in points:
        xs += [point.low_bytes / MIB, point.high_bytes / MIB]
        ys += [point.backward_s * 1e3] * 2
    return xs, ys


def plot_caps(curve: CapCurve, title: str, subtitle: str) -> Figure:
    """Backward time against bucket size, with the plateau of the best, and what one rank takes alone."""
    figure, axes = new_figure(title, f"{subtitle}; simulated")
    least = max(curve.points[0].high_bytes, 1) / MIB
    axes.plot(*_steps(curve.points), color=COLORS[0], label="predicted")
    low, high = curve.plateau
    axes.axvspan(max(low / MIB, least), high / MIB, color=COLORS[2], alpha=0.15, label="within 1 % of the best")
    best = curve.best
    axes.plot([best.high_bytes / MIB], [best.backward_s * 1e3], "o", color=COLORS[2], label="best predicted")
    axes.axhline(curve.local_s * 1e3, color=COLORS[6], linestyle=":", linewidth=1, label="one rank alone")
    axes.set_xscale("log")
    axes.set_xlim(left=least)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("bucket size (MiB)")
    axes.set_ylabel("backward with communication (ms)")
    axes.legend(fontsize=8.5, frameon=False)
    return figure


def plot_sensitivity(changes: Sequence[Change], title: str, subtitle: str) -> Figure:
    """Where the best bucket size lies when one input is multiplied: a bar from end to end of each plateau."""
    figure, axes = new_figure(title, f"{subtitle}; simulated")
    names = [f"{change.what} x {change.factor:g}" for change in changes]
    colors = {"B": COLORS[0], "alpha": COLORS[1], "beta": COLORS[2]}
    for row, change in enumerate(changes):
        low, high = (size / MIB for size in change.curve.plateau)
        axes.barh(row, high - low, left=low, height=0.6, color=colors[change.what])
        axes.plot([change.curve.best.high_bytes / MIB], [row], "o", color="black", markersize=4)
    axes.set_yticks(range(len(changes)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("best bucket size and what is within 1 % of it (MiB)")
    return figure
