"""Memory of one step: one row per category, a sentence about the peak, and a figure."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.predict.memory_use import HeldMemory, MemoryUse
from paceline.predict.traces import PHASES
from paceline.records.samples import group_by
from paceline.report.plots import Figure, new_figure, place_legend
from paceline.report.table import Column
from paceline.units import MIB, format_bytes, format_duration

_COLORS = {
    "parameters": "#0072B2",
    "optimizer": "#009E73",
    "buckets": "#E69F00",
    "gradients": "#D55E00",
    "data": "#F0E442",
    "activations": "#56B4E9",
    "temporary": "#CC79A7",
    "other": "#999999",
}


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one category at moments of the step, and the share of the peak; `largest_bytes` is at its own moment.
    `by_phase` is the largest of each phase."""

    category: str
    begin_bytes: int
    peak_bytes: int
    end_bytes: int
    largest_bytes: int
    share: float
    by_phase: dict[str, int]


def list_memory(memory: MemoryUse) -> list[MemoryRow]:
    """The categories, and the total: the sum of each column except for the largest, which is that of the sum."""
    peak, by_phase = memory.peak, group_by(memory.phases, lambda phase: phase.name)
    return [
        MemoryRow(
            category=one.category,
            begin_bytes=one.num_bytes[0],
            peak_bytes=one.num_bytes[peak],
            end_bytes=one.num_bytes[-1],
            largest_bytes=one.largest_bytes,
            share=one.num_bytes[peak] / max(1, memory.peak_bytes),
            by_phase={name: max(phase.largest_bytes[number] for phase in same) for name, same in by_phase.items()},
        )
        for number, one in enumerate((*memory.held, HeldMemory("total", tuple(memory.totals))))
    ]


MEMORY = (
    Column("memory", "category", key="category", is_key=True),
    Column("at begin", "begin_bytes", "bytes", "begin_bytes", is_key=True),
    Column("at peak", "peak_bytes", "bytes", "peak_bytes", is_key=True),
    Column("of peak", "share", "percent.1", "share_of_peak"),
    Column("at end", "end_bytes", "bytes", "end_bytes", is_key=True),
    Column("largest", "largest_bytes", "bytes", "largest_bytes"),
    *(Column(f"in {p}", lambda r, p=p: r.by_phase.get(p), "bytes", f"{p}_bytes", priority=-1) for p in PHASES),  # type: ignore[misc]
)


def describe_memory(memory: MemoryUse) -> str:
    """The peak, and when it occurs; the table shows what contributes to it."""
    moment = format_duration(memory.times_s[memory.peak])
    where = f"in {memory.peak_phase}, {moment} after the step began" if memory.peak else "at the start of the step"
    by = f" ({memory.operator})" if memory.operator else ""
    return f"memory: peak {format_bytes(memory.peak_bytes)} {where}{by}"


def plot_memory(memory: MemoryUse, title: str, subtitle: str) -> Figure:
    """Stacked areas per category in MiB against ms, with the phases and the peak marked."""
    figure, axes = new_figure(title, f"measured. {subtitle}")
    end_ms, peak, totals = memory.times_s[-1] * 1e3, memory.peak, memory.totals
    shown = [one for one in memory.held if one.largest_bytes]
    axes.stackplot(
        [time_s * 1e3 for time_s in memory.times_s],
        [[num_bytes / MIB for num_bytes in one.num_bytes] for one in shown],
        labels=[one.category for one in shown],
        colors=[_COLORS[one.category] for one in shown],
        step="post",
        lw=0,
    )
    top = 1.15 * totals[peak] / MIB
    for phase in memory.phases:
        axes.axvline(phase.begin_s * 1e3, color="#555555", lw=0.8, ls=":")
        has_room = (phase.end_s - phase.begin_s) * 1e3 > 0.009 * len(phase.name) * end_ms
        if has_room or phase is memory.phases[-1]:  # there is room to the right of the last phase
            at_ms, side = ((phase.begin_s + phase.end_s) * 500, "center") if has_room else (phase.begin_s * 1e3, "left")
            axes.text(at_ms, 1.01, phase.name, ha=side, fontsize=8, transform=axes.get_xaxis_transform())
    at_ms = memory.times_s[peak] * 1e3
    axes.plot([at_ms], [totals[peak] / MIB], "v", color="black", ms=6)
    offset, side = (8, "left") if at_ms < 0.5 * end_ms else (-8, "right")
    words = f"peak {format_bytes(totals[peak])}"
    axes.annotate(words, (at_ms, totals[peak] / MIB), (offset, 4), textcoords="offset points", ha=side, fontsize=8.5)
    axes.set(xlim=(0, end_ms or 1), ylim=(0, top or 1), xlabel="ms since the step began", ylabel="allocated (MiB)")
    place_legend(figure, axes)
    return figure
