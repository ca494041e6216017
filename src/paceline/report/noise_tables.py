"""The table, the words and the picture of the gradient noise scale. What it means is in `records.training`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.records.training import NoiseRecord
from paceline.report.plots import COLORS, new_figure
from paceline.report.tables import Column

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["describe_noise", "noise_row", "noise_table", "plot_noise"]

# A batch that is "far beyond" the noise scale, where nobody asks about another.
_FAR = 10


def _samples(value: float) -> str:
    """A number of samples, no finer than it is known."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _scale(record: NoiseRecord) -> str:
    interval = record.estimate.interval
    if record.noise_scale is not None:
        return _samples(record.noise_scale)
    return "" if interval is None else f"> {_samples(interval[0])}"


def _interval(record: NoiseRecord) -> str:
    if record.estimate.interval is None:
        return ""
    low, high = record.estimate.interval
    return f"{_samples(low)} to {_samples(high)}" if high < math.inf else f"from {_samples(low)}"


def _epoch(record: NoiseRecord) -> str:
    return f"{record.epoch:.3g}"


noise_table: Sequence[Column] = (
    Column("model", lambda r: r.model, False),
    Column("data", lambda r: r.data, False),
    Column("recipe", lambda r: r.note, False),
    Column("device", lambda r: r.device, False),
    Column("precision", lambda r: r.precision, False),
    Column("ranks", lambda r: str(r.world_size), is_optional=True),
    Column("step", lambda r: str(r.step)),
    Column("epoch", _epoch),
    Column("batches", lambda r: f"{r.small_batch_size}, {r.big_batch_size}", is_optional=True),
    Column("probes", lambda r: str(len(r.probes)), is_optional=True),
    Column("norm(G)^2", lambda r: f"{r.estimate.gradient_square:.3g}"),
    Column("tr(Sigma)", lambda r: f"{r.estimate.noise_trace:.3g}"),
    Column("noise scale", _scale),
    Column("90 %", _interval),
    Column("source", lambda r: r.source, False),
)


def noise_row(record: NoiseRecord) -> dict[str, Any]:
    """One record for JSON and CSV. The noise scale is null where it is only bounded from below, and its upper end
    where it has none."""
    names = (
        "model", "data", "note", "device", "precision", "world_size", "step", "epoch", "seed", "small_batch_size",
        "big_batch_size",
    )  # fmt: skip
    low, high = record.estimate.interval or (None, None)
    return {name: getattr(record, name) for name in names} | {
        "num_probes": len(record.probes),
        "gradient_square": record.estimate.gradient_square,
        "noise_trace": record.estimate.noise_trace,
        "noise_scale": record.noise_scale,
        "noise_scale_low": None if low == math.inf else low,
        "noise_scale_high": None if high == math.inf else high,
        "source": record.source,
    }


def describe_noise(records: Sequence[NoiseRecord], batch_size: int | None = None) -> list[str]:
    """One sentence for each job: its last noise scale, and what a global batch of `batch_size` would cost by it."""
    return [_describe(series, batch_size) for series in _group(records).values()]


def _group(records: Sequence[NoiseRecord]) -> dict[tuple[str, ...], list[NoiseRecord]]:
    """The records of each job, in the order of its steps."""
    jobs: dict[tuple[str, ...], list[NoiseRecord]] = {}
    for record in sorted(records, key=lambda r: r.step):
        jobs.setdefault((record.model, record.data, record.note, record.precision, str(record.seed)), []).append(record)
    return jobs


def _describe(series: Sequence[NoiseRecord], batch_size: int | None) -> str:
    told = [record for record in series if record.noise_scale is not None]
    first, last, end = series[0], (told or series)[-1], series[-1]
    who = f"{last.model}{', ' + last.note if last.note else ''}: "
    place = f"at epoch {_epoch(last)}"
    if first is not last and first.noise_scale is not None:
        place += f" ({_samples(first.noise_scale)} at epoch {_epoch(first)})"
    scale, interval = last.noise_scale, last.estimate.interval
    if scale is None:
        bound = f"above {_samples(interval[0])} (90 %) " if interval is not None else "not to be told "
        return f"{who}gradient noise scale {bound}{place}: the gradient is lost in the noise"
    later = ""
    if end is not last:
        bound = "" if end.estimate.interval is None else f"above {_samples(end.estimate.interval[0])} "
        later = f"; {bound}at epoch {_epoch(end)}, where the gradient is lost in the noise"
    sure = "" if interval is None else f" (90 %: {_interval(last)})"
    text = f"{who}gradient noise scale {_samples(scale)}{sure} {place}"
    if interval is not None and interval[1] == math.inf:
        return f"{text}: it may be far larger{later}"
    if scale <= 0:
        return text + later
    size = 2 ** round(math.log2(_FAR * scale)) if batch_size is None else batch_size
    steps, samples = 1 + scale / size, 1 + size / scale
    why = "far beyond it buy few steps" if size >= 2 * scale else "up to about it cost few samples more"
    cost = f"{samples:.1f} times the fewest samples for {steps:.1f} times the fewest steps"
    return f"{text}: batches {why}: at {size}, {cost}{later}"


def plot_noise(records: Sequence[NoiseRecord], title: str, machine: str) -> Figure:
    """The noise scale over epochs, a line for each job, with its 90 % interval; a triangle where that has no end."""
    figure, axes = new_figure(title, f"{machine}; {', '.join(sorted({r.source for r in records}))}")
    axes.set_yscale("log")
    several_seeds = len({record.seed for record in records}) > 1
    for number, series in enumerate(_group(records).values()):
        first, color = series[0], COLORS[number % len(COLORS)]
        label = ", ".join(filter(None, (first.model, first.note, f"seed {first.seed}" if several_seeds else "")))
        known = [(r.epoch, r.noise_scale) for r in series if r.noise_scale]
        axes.plot([e for e, _ in known], [s for _, s in known], color=color, marker="o", ms=5, lw=1.6, label=label)
        for record in series:
            low, high = record.estimate.interval or (0.0, 0.0)
            top = high if high < math.inf else record.noise_scale or low
            if 0 < low < math.inf:
                axes.plot([record.epoch] * 2, [low, top], color=color, lw=3, alpha=0.3, solid_capstyle="butt")
            if high == math.inf and 0 < top < math.inf:
                axes.plot([record.epoch], [top], color=color, marker="^", ms=9)
    axes.set_xlabel("epoch")
    axes.set_ylabel("gradient noise scale (samples), line: 90 %")
    axes.legend(fontsize=8.5, frameon=False)
    return figure
