"""The picture of a layer profile: how many bytes of gradients are ready when. Tables of it are in `layer_tables`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.records import LayerProfileRecord
from paceline.units import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_ready"]

_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#555555"  # as in `plots`
_NEAR = 0.04  # of an axis: labels of points that are closer would print over each other


def plot_ready(profile: LayerProfileRecord, subtitle: str) -> Figure:
    """Bytes ready against the time since backward began, by medians; a mark where the last of each block is ready."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(f"{profile.model}: gradients ready during backward\n", loc="left", fontsize=12, fontweight="bold")
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=8.5, color=_GREY)
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    end_s = profile.profiled_backward.median_s
    points = [(0.0, 0), *profile.timeline]
    xs = [*(time_s * 1e3 for time_s, _ in points), end_s * 1e3]
    ys = [*(num_bytes / MIB for _, num_bytes in points), points[-1][1] / MIB]
    axes.step(xs, ys, where="post", color=_BLUE, lw=1.6, label=f"ready ({profile.source}, median)")
    axes.axvline(end_s * 1e3, color=_GREY, lw=1, ls="--", label="end of backward")
    marks = _find_marks(profile)
    xs, ys = [x for x, _, _ in marks], [y for _, y, _ in marks]
    axes.plot(xs, ys, "o", color=_ORANGE, ms=4.5, label="last of a block")
    for x, y, text in _join_labels(marks, end_s * 1e3):
        # The curve only rises, so that the upper left of a point is free.
        is_left = x < 0.06 * end_s * 1e3
        axes.annotate(
            text,
            (x, y),
            xytext=(4 if is_left else -5, 3),
            textcoords="offset points",
            fontsize=7.5,
            ha="left" if is_left else "right",
        )
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1.06 * profile.num_bytes / MIB)
    axes.set_xlabel("time since backward began (ms)")
    axes.set_ylabel("gradients ready (MiB)")
    axes.legend(fontsize=8.5, frameon=False, loc="lower right", bbox_to_anchor=(0.94, 0.0))
    return figure


def _find_marks(profile: LayerProfileRecord) -> list[tuple[float, float, str]]:
    """(ms, MiB ready by then, block) for the last gradient of each block, in the order of time."""
    ready_bytes = dict(profile.timeline)  # of several at one moment, the last
    found = [(profile.ready_of(block.name), block.name) for block in profile.blocks]
    return sorted((time_s * 1e3, ready_bytes[time_s] / MIB, name) for time_s, name in found if time_s is not None)


def _join_labels(marks: list[tuple[float, float, str]], width: float) -> list[tuple[float, float, str]]:
    """One label for marks that lie close together: the last of them, and how many more there are."""
    if not marks:
        return []
    height = marks[-1][1]
    groups: list[list[tuple[float, float, str]]] = []
    for mark in marks:
        near = (
            bool(groups) and mark[0] - groups[-1][0][0] < _NEAR * width and mark[1] - groups[-1][0][1] < _NEAR * height
        )
        if near:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return [
        (x, y, name + (f" +{len(group) - 1}" if len(group) > 1 else ""))
        for group in groups
        for x, y, name in group[-1:]
    ]
