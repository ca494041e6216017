"""Tables of scaling studies: columns for people, rows for JSON and CSV. Nothing here is measured or predicted.

What the numbers mean is in `records.steps` and `records.training`. Matrices are in
`scaling_matrices`, predictions in `predicted_tables`, sentences in `scaling_findings`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.records.kinds import CollectiveRecord
from paceline.records.samples import Ratio
from paceline.records.steps import ScalePoint, StepRecord, Utilisation, compare_points, find_use
from paceline.records.training import BatchRecord, LargeBatchRecord, RecipeSummary, Spread, find_knee
from paceline.report.tables import Column
from paceline.units import MIB, format_bytes, format_ms, format_rate, format_speed

__all__ = [
    "BandwidthLine",
    "BatchLine",
    "ScaleLine",
    "bandwidth_row",
    "bandwidth_table",
    "batch_row",
    "batch_table",
    "communication_row",
    "communication_table",
    "compare_with_torch",
    "is_split",
    "list_bandwidths",
    "mark_knee",
    "pick_run",
    "recipe_row",
    "recipe_table",
    "say_ratio",
    "scale_row",
    "scale_table",
]


def _maybe(value: float | None, render: Callable[[float], str]) -> str:
    return "" if value is None else render(value)


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _pick(item: Any, names: str) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names.split()}


# One rank by itself, at several batch sizes.


@dataclass(frozen=True)
class BatchLine:
    """A batch size of a sweep, and whether it is the knee of it."""

    record: BatchRecord
    is_knee: bool


def mark_knee(records: Sequence[BatchRecord]) -> list[BatchLine]:
    knee = find_knee(records)
    return [BatchLine(record, record is knee) for record in records]


def _epoch_noise(record: BatchRecord) -> float | None:
    """One epoch tells nothing about its noise."""
    return None if record.timing is None or record.timing.count < 2 else record.timing.noise


batch_table: Sequence[Column] = (
    Column("model", lambda b: b.record.model, False),
    Column("data", lambda b: b.record.data, False),
    Column("device", lambda b: b.record.device, False),
    Column("precision", lambda b: b.record.precision, False),
    Column("batch size", lambda b: str(b.record.batch_size)),
    Column("steps per epoch", lambda b: str(b.record.num_steps), is_optional=True),
    Column("epoch (s)", lambda b: _maybe(b.record.epoch_s, lambda s: f"{s:.3f}")),
    Column("step (ms)", lambda b: _maybe(b.record.step_s, format_ms)),
    Column("samples/s", lambda b: _maybe(b.record.samples_per_s, format_speed)),
    Column("data wait (s)", lambda b: _maybe(b.record.data_wait_s, lambda s: f"{s:.3f}"), is_optional=True),
    Column("peak memory (MiB)", lambda b: f"{b.record.peak_bytes / MIB:,.0f}" if b.record.peak_bytes else ""),
    Column("noise", lambda b: _maybe(_epoch_noise(b.record), _percent), is_optional=True),
    Column("mark", lambda b: b.record.failure or ("knee" if b.is_knee else ""), False),
    Column("source", lambda b: b.record.source, False),
)


def batch_row(line: BatchLine) -> dict[str, Any]:
    """One batch size for JSON and CSV; times are of epochs, without the wait for data and without warm-ups."""
    record = line.record
    return _pick(record, "model data device precision threads batch_size num_samples num_steps") | {
        "epoch_s": record.epoch_s,
        "epoch_p10_s": record.timing and record.timing.p10_s,
        "epoch_p90_s": record.timing and record.timing.p90_s,
        "noise": _epoch_noise(record),
        "step_s": record.step_s,
        "samples_per_s": record.samples_per_s,
        "data_wait_s": record.data_wait_s,
        "peak_bytes": record.peak_bytes or None,
        "is_knee": line.is_knee,
        "failure": record.failure,
        "num_epochs": record.timing.count if record.timing else 0,
        "source": record.source,
    }


# Ranks beside one rank, and wrappers beside torch's.


@dataclass(frozen=True)
class ScaleLine:
    """A point beside torch's wrapper on the same backend and on gloo: my efficiency over torch's, which is above 1
    where mine is better; None where torch's did not run."""

    point: ScalePoint
    to_torch: Ratio | None = None
    to_torch_on_gloo: Ratio | None = None


def compare_with_torch(points: Sequence[ScalePoint]) -> list[ScaleLine]:
    """Each point in the given order, with the ratios to torch's wrapper in its cell."""
    known = {(p.record.cell, p.record.world_size, p.record.wrapper, p.record.backend): p for p in points}

    def beside(point: ScalePoint, backend: str) -> Ratio | None:
        torch = known.get((point.record.cell, point.record.world_size, "torch", backend))
        return None if torch is None else compare_points(point, torch)

    return [
        ScaleLine(p) if p.record.world_size == 1 else ScaleLine(p, beside(p, p.record.backend), beside(p, "gloo"))
        for p in points
    ]


def say_ratio(ratio: Ratio) -> str:
    """The ratio with its noise, and in words whether it is 1 within that."""
    if ratio.noise is None:
        return f"{ratio.value:.3f} (one repetition)"
    return f"{ratio.value:.3f} ± {ratio.noise:.3f}{'' if ratio.is_clear else ' (inside the noise)'}"


def _beside(ratio: Ratio | None) -> str:
    return "" if ratio is None else "1" if ratio == Ratio(1.0, 0.0) else say_ratio(ratio)


def _efficiency(point: ScalePoint) -> str:
    noise = point.efficiency_noise
    return f"{point.efficiency:.3f}" + ("" if not noise else f" ± {noise:.3f}")


scale_table: Sequence[Column] = (
    Column("model", lambda s: s.point.record.model, False),
    Column("device", lambda s: s.point.record.device, False),
    Column("mode", lambda s: s.point.record.mode, False),
    Column("samples per rank", lambda s: str(s.point.record.batch_size * s.point.record.accumulate)),
    Column("global batch", lambda s: str(s.point.record.global_batch_size)),
    Column("ranks", lambda s: str(s.point.record.world_size)),
    Column("wrapper", lambda s: s.point.record.variant, False),
    Column("step (ms)", lambda s: format_ms(s.point.record.timing.median_s)),
    Column(
        "p10 to p90 (ms)",
        lambda s: f"{format_ms(s.point.record.timing.p10_s)} to {format_ms(s.point.record.timing.p90_s)}",
        is_optional=True,
    ),
    Column("samples/s", lambda s: format_speed(s.point.record.samples_per_s)),
    Column("speed-up", lambda s: f"{s.point.speedup:.2f}"),
    Column("ideal", lambda s: str(s.point.record.world_size), is_optional=True),
    Column("efficiency", lambda s: _efficiency(s.point)),
    Column("/ torch", lambda s: _beside(s.to_torch), is_optional=True),
    Column("/ torch on gloo", lambda s: _beside(s.to_torch_on_gloo), is_optional=True),
    Column("source", lambda s: s.point.record.source, False),
)


def is_split(record: StepRecord) -> bool:
    """Whether steps without communication were timed, so that compute and exposed can be told apart."""
    return record.world_size > 1 and record.no_comm is not None


_SCALE = (
    "mode cell_size model data wrapper backend device precision threads world_size batch_size accumulate "
    "global_batch_size"
)


def _ratio_fields(ratio: Ratio | None, name: str) -> dict[str, float | None]:
    return {
        f"efficiency_over_{name}": None if ratio is None else ratio.value,
        f"efficiency_over_{name}_noise": None if ratio is None else ratio.noise,
    }


def scale_row(line: ScaleLine) -> dict[str, Any]:
    """One number of ranks for JSON and CSV. `cell_size` counts samples per rank (weak) or over all ranks (strong);
    `alone_s` is one rank's step in the same cell; efficiencies are fractions of 1."""
    point, record = line.point, line.point.record
    return _pick(record, _SCALE) | {
        "step_s": record.timing.median_s,
        "step_p10_s": record.timing.p10_s,
        "step_p90_s": record.timing.p90_s,
        "alone_s": point.alone.timing.median_s,
        "samples_per_s": record.samples_per_s,
        "speedup": point.speedup,
        "ideal_speedup": record.world_size,
        "efficiency": point.efficiency,
        "efficiency_noise": point.efficiency_noise,
        "compute_slowdown": point.slowdown if is_split(record) else None,
        **_ratio_fields(line.to_torch, "torch"),
        **_ratio_fields(line.to_torch_on_gloo, "torch_on_gloo"),
        "num_repetitions": record.timing.count,
        "source": record.source,
    }


# Computation and communication.

communication_table: Sequence[Column] = (
    Column("wrapper", lambda r: r.variant, False),
    Column("mode", lambda r: r.mode, False),
    Column("ranks", lambda r: str(r.world_size)),
    Column("samples per rank", lambda r: str(r.batch_size * r.accumulate)),
    Column("step (ms)", lambda r: format_ms(r.timing.median_s)),
    Column("compute (ms)", lambda r: format_ms(r.compute_s) if is_split(r) else ""),
    Column("exposed (ms)", lambda r: format_ms(r.exposed_s) if is_split(r) else ""),
    Column("± (ms)", lambda r: _maybe(r.exposed_noise_s, format_ms), is_optional=True),
    Column("of step", lambda r: _percent(r.overhead) if is_split(r) else ""),
    Column("busy (ms)", lambda r: _maybe(r.busy_s, format_ms)),
    # A rank also waits for others to arrive, so a step may expose more than its messages take: nothing is hidden then.
    Column("overlap", lambda r: _maybe(r.overlap, lambda v: _percent(v) if v > 0 else "none") if is_split(r) else ""),
    Column("source", lambda r: r.source, False),
)


def communication_row(record: StepRecord) -> dict[str, Any]:
    """Where a step's time goes, for JSON and CSV; null where no steps without communication were timed. The share is
    that of exposed in compute and exposed together."""
    split = is_split(record)
    return _pick(record, _SCALE) | {
        "step_s": record.timing.median_s,
        "compute_s": record.compute_s if split else None,
        "exposed_s": record.exposed_s if split else None,
        "exposed_noise_s": record.exposed_noise_s,
        "exposed_share": record.overhead if split else None,
        "busy_s": record.busy_s,
        "overlap": record.overlap if split else None,
        "num_repetitions": record.timing.count,
        "source": record.source,
    }


@dataclass(frozen=True)
class BandwidthLine:
    """A step's messages, and how much of the measured peak they used; None where nobody measured a peak."""

    record: StepRecord
    use: Utilisation | None


def list_bandwidths(records: Sequence[StepRecord], collectives: Sequence[CollectiveRecord]) -> list[BandwidthLine]:
    """The records whose messages were timed; MeasurementError where one is above the peak."""
    return [
        BandwidthLine(record, find_use(record, collectives))
        for record in records
        if record.busbw_bytes_per_s is not None
    ]


bandwidth_table: Sequence[Column] = (
    Column("wrapper", lambda b: b.record.variant, False),
    Column("mode", lambda b: b.record.mode, False),
    Column("ranks", lambda b: str(b.record.world_size)),
    Column("samples per rank", lambda b: str(b.record.batch_size * b.record.accumulate)),
    Column("sent per step", lambda b: format_bytes(b.record.num_bytes)),
    Column("messages per step", lambda b: str(b.record.num_messages)),
    Column("busy (ms)", lambda b: _maybe(b.record.busy_s, format_ms)),
    Column("busbw (GB/s)", lambda b: format_rate(b.record.busbw_bytes_per_s)),
    Column("peak (GB/s)", lambda b: "" if b.use is None else format_rate(b.use.peak_bytes_per_s)),
    Column("of peak", lambda b: "" if b.use is None else _percent(b.use.share)),
    Column("source", lambda b: b.record.source, False),
)


def bandwidth_row(line: BandwidthLine) -> dict[str, Any]:
    """The bus bandwidth of a step's messages for JSON and CSV, in bytes per second."""
    record = line.record
    return _pick(record, _SCALE) | {
        "num_bytes": record.num_bytes,
        "num_messages": record.num_messages,
        "busy_s": record.busy_s,
        "busbw_bytes_per_s": record.busbw_bytes_per_s,
        "peak_bytes_per_s": None if line.use is None else line.use.peak_bytes_per_s,
        "peak_share": None if line.use is None else line.use.share,
        "source": record.source,
    }


# Training runs with large batches.


def pick_run(summary: RecipeSummary) -> LargeBatchRecord:
    """The run that speaks for all seeds: the first that finished, or the first."""
    return (summary.finished or summary.runs)[0]


def _spread(spread: Spread | None, render: Callable[[float], str]) -> str:
    if spread is None:
        return ""
    return render(spread.mean) + ("" if spread.deviation is None else f" ± {render(spread.deviation)}")


recipe_table: Sequence[Column] = (
    Column("model", lambda s: s.first.model, False),
    Column("data", lambda s: s.first.data, False),
    Column("budget", lambda s: s.first.budget, False),
    Column("global batch", lambda s: str(s.first.global_batch_size)),
    Column("recipe", lambda s: s.first.recipe, False),
    Column("updates", lambda s: str(pick_run(s).num_updates)),
    Column("epochs", lambda s: f"{round(pick_run(s).epochs, 2):g}"),
    Column("lr", lambda s: f"{s.first.lr:g}", is_optional=True),
    Column("test accuracy (%)", lambda s: _spread(s.accuracy, lambda x: f"{100 * x:.2f}")),
    Column("gap (points)", lambda s: _maybe(s.gap, lambda x: f"{100 * x:.2f}")),
    Column("test loss", lambda s: _spread(s.test_loss, lambda x: f"{x:.4f}"), is_optional=True),
    Column("train loss", lambda s: _spread(s.train_loss, lambda x: f"{x:.4f}"), is_optional=True),
    Column("seeds", lambda s: str(len(s.runs))),
    Column("failed", lambda s: str(s.num_failed)),
    Column("source", lambda s: ", ".join(sorted({run.source for run in s.runs})), False),
)


def recipe_row(summary: RecipeSummary) -> dict[str, Any]:
    """All seeds of one recipe for JSON and CSV. Accuracies and the gap are fractions of 1, deviations those of a
    sample; what no run finished is null."""
    run = pick_run(summary)
    row = _pick(
        run,
        "budget model data device precision world_size batch_size global_batch_size largest_batch_size recipe "
        "configuration num_updates epochs lr",
    )
    for name, spread in (
        ("test_accuracy", summary.accuracy),
        ("test_loss", summary.test_loss),
        ("train_loss", summary.train_loss),
    ):
        row |= {name: spread and spread.mean, f"{name}_deviation": spread and spread.deviation}
    return row | {
        "gap": summary.gap,
        "baseline_batch_size": summary.baseline.first.global_batch_size if summary.baseline else None,
        "num_seeds": len(summary.runs),
        "num_failed": summary.num_failed,
        "run_s": statistics.fmean(each.seconds for each in summary.finished) if summary.finished else None,
        "source": ", ".join(sorted({each.source for each in summary.runs})),
    }
