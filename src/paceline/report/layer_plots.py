"""The picture of a layer profile: how many bytes of gradients are ready when. Tables of it are in `layer_tables`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.records import LayerProfileRecord
from paceline.units import MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_ready"]

_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#555555"  # as in `plots`
_MAX_LABELS = 16


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
    ready_at = dict(profile.timeline)  # of several at one moment, the last
    marks = sorted(
        (ready_s, block.name) for block in profile.blocks if (ready_s := profile.ready_of(block.name)) is not None
    )
    if marks:
        heights = [ready_at[ready_s] / MIB for ready_s, _ in marks]
        axes.plot([ready_s * 1e3 for ready_s, _ in marks], heights, "o", color=_ORANGE, ms=4.5, label="last of a block")
        every = -(-len(marks) // _MAX_LABELS)
        for number, ((ready_s, name), height) in enumerate(zip(marks, heights, strict=True)):
            if number % every == 0 or number == len(marks) - 1:
                axes.annotate(
                    name, (ready_s * 1e3, height), xytext=(5, -4), textcoords="offset points", fontsize=7.5, va="top"
                )
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time since backward began (ms)")
    axes.set_ylabel("gradients ready (MiB)")
    axes.legend(fontsize=8.5, frameon=False, loc="upper left")
    return figure
