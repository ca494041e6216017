"""The results of `paceline scale`: tables, what they say in sentences, and the page of a study.

Figures are in `scaling_plots`. What the numbers mean is in `records.steps` and `records.training`.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import MeasurementError, PacelineError
from paceline.predict.networks import find_networks
from paceline.predict.scaling import PredictedPoint, ScalingEvidence, describe_assumptions, simulate_scaling
from paceline.records import BatchRecord, CollectiveRecord, LargeBatchRecord, Record, StepRecord
from paceline.records.environment import Environment
from paceline.records.layers import LayerProfileRecord
from paceline.records.samples import Ratio
from paceline.records.steps import (
    ScalePoint,
    Straggler,
    Utilisation,
    compare_points,
    find_straggler,
    find_use,
    list_points,
)
from paceline.records.store import Run
from paceline.records.training import find_knee
from paceline.report.result import Result, load_result
from paceline.report.table import Column, Table
from paceline.units import (
    MIB,
    format_memory,
    format_ms,
    format_number_of,
    format_rate,
    format_speed,
    parse_counts,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE = "report.md"
NO_PREDICTION = "No prediction for"
STUDIES = ("scale batch", "scale ranks", "scale large-batch")
_NEAR = 0.1  # a prediction that is called good
_MOST_RANKS = 4  # numbers of ranks in one sentence about a prediction
_FAR = 10  # a batch that is far above the noise scale, as a multiple of it

R = TypeVar("R", bound=Record)


def only(records: Sequence[Record], kind: type[R]) -> list[R]:
    return [record for record in records if isinstance(record, kind)]


def build_fields(names: str, of: Callable[[Any], Any] = lambda row: row) -> list[Column]:
    """Columns for programs alone: attributes under their own names."""
    return [Column(None, lambda row, name=name: getattr(of(row), name), key=name) for name in names.split()]  # type: ignore[misc]


_three, _two = "{:.3f}".format, "{:.2f}".format


# -- batch sizes on one rank -------------------------------------------------------------------------------------------


def build_batch_table(records: Sequence[BatchRecord]) -> Table:
    """Times are of epochs, without the wait for data and without warm-ups."""
    knee = find_knee(records)

    def noise(record: BatchRecord) -> float | None:  # one epoch says nothing about its noise
        return None if record.timing is None or record.timing.count < 2 else record.timing.noise

    columns = [
        Column("model", lambda r: r.model, key="model"),
        Column("data", lambda r: r.data, key="data"),
        Column("device", lambda r: r.device, key="device"),
        Column("precision", lambda r: r.precision, key="precision"),
        *build_fields("threads num_samples"),
        Column("batch size", lambda r: r.batch_size, "number", "batch_size", is_key=True),
        Column("steps per epoch", lambda r: r.num_steps, "number", "num_steps", priority=-1),
        Column("epoch (s)", lambda r: r.epoch_s, _three, "epoch_s", priority=1),
        Column(None, lambda r: r.timing and r.timing.p10_s, key="epoch_p10_s"),
        Column(None, lambda r: r.timing and r.timing.p90_s, key="epoch_p90_s"),
        Column("step", lambda r: r.step_s, "ms", "step_s", priority=2),
        Column("samples/s", lambda r: r.samples_per_s, format_speed, "samples_per_s", priority=3),
        Column("data wait (s)", lambda r: r.data_wait_s, _three, "data_wait_s", priority=-1),
        Column(
            "peak memory (MiB)", lambda r: r.peak_bytes or None, lambda v: f"{v / MIB:,.0f}", "peak_bytes", priority=2
        ),
        Column("noise", noise, "percent.1", "noise", priority=-1),
        Column("mark", lambda r: r.failure or ("knee" if r is knee else ""), "words", is_key=True),
        *build_fields("failure"),
        Column(None, lambda r: r is knee, key="is_knee"),
        Column(None, lambda r: r.timing.count if r.timing else 0, key="num_epochs"),
        Column("source", lambda r: r.source, key="source"),
    ]
    return Table("batch", "batch sizes on one rank", columns, records)


def describe_batches(records: Sequence[BatchRecord]) -> list[str]:
    """Up to which batch size throughput grows, what that costs, and which batch sizes do not fit."""
    knee, lines = find_knee(records), []
    if knee is not None:
        rates = {record.batch_size: record.samples_per_s for record in records if record.samples_per_s}
        best, here = max(rates, key=lambda size: rates[size]), knee.batch_size
        reached = f"{rates[here] / rates[best]:.0%} of the best {format_speed(rates[best])} samples/s (at {best})"
        if len(rates) == 1:
            lines.append(f"Batch size {here}, the only one measured, reaches {format_speed(rates[here])} samples/s.")
        elif here == min(rates):
            lines.append(f"The batch size hardly matters: {here}, the smallest, reaches {reached}.")
        elif here == max(rates):
            lines.append(f"Throughput grows up to batch size {here}, the largest measured: try larger ones.")
        else:
            lines.append(f"Throughput grows up to batch size {here} (the knee), which reaches {reached}.")
        memory = f" and the process peaks at {knee.peak_bytes / MIB:,.0f} MiB" if knee.peak_bytes else ""
        lines.append(f"At batch size {here} a step takes {format_ms(knee.step_s or 0.0)} ms{memory}.")
    return lines + [f"Batch size {r.batch_size} does not fit: {r.failure}." for r in records if r.failure]


# -- ranks -------------------------------------------------------------------------------------------------------------


def is_split(record: StepRecord) -> bool:
    """Whether steps without communication were timed, so that compute and exposed communication are known."""
    return record.world_size > 1 and record.no_comm is not None


@dataclass(frozen=True)
class ScaleLine:
    """A point compared with torch's wrapper on the same backend and on gloo: its efficiency over torch's, which is
    above 1 where it is better; None where torch's was not measured."""

    point: ScalePoint
    to_torch: Ratio | None = None
    to_torch_on_gloo: Ratio | None = None


def compare_with_torch(points: Sequence[ScalePoint]) -> list[ScaleLine]:
    """Each point in the given order, with the ratios to torch's wrapper in its cell."""
    known = {(p.record.cell, p.record.world_size, p.record.wrapper, p.record.backend): p for p in points}

    def compare(point: ScalePoint, backend: str) -> Ratio | None:
        torch = known.get((point.record.cell, point.record.world_size, "torch", backend))
        return None if torch is None else compare_points(point, torch)

    return [
        ScaleLine(p) if p.record.world_size == 1 else ScaleLine(p, compare(p, p.record.backend), compare(p, "gloo"))
        for p in points
    ]


def say_ratio(ratio: Ratio | None) -> str | None:
    """The ratio with its noise, and whether it is 1 within that."""
    if ratio is None or ratio == Ratio(1.0, 0.0):
        return None if ratio is None else "1"
    if ratio.noise is None:
        return f"{ratio.value:.3f} (one repetition)"
    return f"{ratio.value:.3f} ± {ratio.noise:.3f}{'' if ratio.is_clear else ' (within the noise)'}"


def _say_cell(record: StepRecord | PredictedPoint) -> str:
    return f"{record.cell_size} {'per rank' if record.mode == 'weak' else 'in all'}"


def _keys(of: Callable[[Any], StepRecord]) -> list[Column]:
    """What says which step a row is about. `cell_size` counts samples per rank (weak) or over all ranks (strong)."""
    return [
        Column("model", lambda row: of(row).model, key="model"),
        Column("device", lambda row: of(row).device, key="device"),
        Column("mode", lambda row: of(row).mode, key="mode", priority=-2),
        *build_fields("data precision threads accumulate batch_size cell_size wrapper backend", of),
        Column("samples", lambda row: _say_cell(of(row)), is_key=True),
        Column("global batch", lambda row: of(row).global_batch_size, "number", "global_batch_size", priority=-2),
        Column("ranks", lambda row: of(row).world_size, "number", "world_size", is_key=True),
        Column("wrapper", lambda row: of(row).variant, is_key=True),
    ]


def _closing(of: Callable[[Any], StepRecord]) -> list[Column]:
    return [
        Column(None, lambda row: of(row).timing.count, key="num_repetitions"),
        Column("source", lambda row: of(row).source, key="source", priority=-2),
    ]


def _ratio_columns(name: str, key: str, of: Callable[[ScaleLine], Ratio | None]) -> list[Column]:
    return [
        Column(name, lambda line: say_ratio(of(line)), str, priority=-1),
        Column(None, lambda line: (ratio := of(line)) and ratio.value, key=key),
        Column(None, lambda line: (ratio := of(line)) and ratio.noise, key=f"{key}_noise"),
    ]


# Efficiencies are fractions of 1, `alone_s` is one rank's step in the same cell.
SCALING = (
    *_keys(lambda line: line.point.record),
    Column("step", lambda s: s.point.record.timing.median_s, "ms", "step_s", priority=2),
    Column("p10", lambda s: s.point.record.timing.p10_s, "ms", "step_p10_s", priority=-2),
    Column("p90", lambda s: s.point.record.timing.p90_s, "ms", "step_p90_s", priority=-2),
    Column(None, lambda s: s.point.alone.timing.median_s, key="alone_s"),
    Column("samples/s", lambda s: s.point.record.samples_per_s, format_speed, "samples_per_s", priority=0),
    Column("speed-up", lambda s: s.point.speedup, "ratio", "speedup", priority=3),
    Column("ideal", lambda s: s.point.record.world_size, "number", "ideal_speedup", priority=-2),
    Column("efficiency", lambda s: s.point.efficiency, _three, "efficiency", priority=4),
    Column("±", lambda s: s.point.efficiency_noise, _three, "efficiency_noise", priority=1),
    Column(None, lambda s: s.point.slowdown if is_split(s.point.record) else None, key="compute_slowdown"),
    *_ratio_columns("/ torch", "efficiency_over_torch", lambda line: line.to_torch),
    *_ratio_columns("/ torch on gloo", "efficiency_over_torch_on_gloo", lambda line: line.to_torch_on_gloo),
    *_closing(lambda line: line.point.record),
)

# Null where no steps without communication were timed.
COMMUNICATION = (
    *_keys(lambda r: r),
    Column("step", lambda r: r.timing.median_s, "ms", "step_s", priority=0),
    Column("compute", lambda r: r.compute_s if is_split(r) else None, "ms", "compute_s", priority=2),
    Column("exposed", lambda r: r.exposed_s if is_split(r) else None, "ms", "exposed_s", priority=3),
    Column("±", lambda r: r.exposed_noise_s, "ms", "exposed_noise_s", priority=-1),
    Column("of step", lambda r: r.overhead if is_split(r) else None, "percent.1", "exposed_share", priority=4),
    Column("busy", lambda r: r.busy_s, "ms", "busy_s", priority=-1),
    # A rank also waits for others to arrive, so a step may expose more than its messages take: nothing is hidden then.
    Column(
        "overlap", lambda r: r.overlap if is_split(r) else None, lambda v: f"{v:.1%}" if v > 0 else "none", "overlap",
        priority=1,
    ),
    *_closing(lambda r: r),
)  # fmt: skip


@dataclass(frozen=True)
class BandwidthLine:
    """A step's messages, and the share of the measured peak that they used; None where no peak was measured."""

    record: StepRecord
    use: Utilisation | None


def list_bandwidths(records: Sequence[StepRecord], collectives: Sequence[CollectiveRecord]) -> list[BandwidthLine]:
    """The records whose messages were timed; MeasurementError where one is above the peak."""
    return [BandwidthLine(r, find_use(r, collectives)) for r in records if r.busbw_bytes_per_s is not None]


BANDWIDTH = (
    *_keys(lambda line: line.record),
    Column("sent per step", lambda b: b.record.num_bytes, "bytes", "num_bytes", priority=0),
    Column("messages", lambda b: b.record.num_messages, "number", "num_messages", priority=-1),
    Column("busy", lambda b: b.record.busy_s, "ms", "busy_s", priority=-1),
    Column("busbw (GB/s)", lambda b: b.record.busbw_bytes_per_s, format_rate, "busbw_bytes_per_s", priority=3),
    Column("peak (GB/s)", lambda b: b.use and b.use.peak_bytes_per_s, format_rate, "peak_bytes_per_s", priority=1),
    Column("of peak", lambda b: b.use and b.use.share, "percent.1", "peak_share", priority=2),
    *_closing(lambda line: line.record),
)


@dataclass(frozen=True)
class PredictedLine:
    """A prediction, and the point that was measured there, where one was."""

    predicted: PredictedPoint
    point: ScalePoint | None

    @property
    def step_s(self) -> float | None:
        """The measured step."""
        return None if self.point is None else self.point.record.timing.median_s

    @property
    def error(self) -> float | None:
        """The predicted step over the measured one, minus 1."""
        return None if self.step_s is None else self.predicted.step_s / self.step_s - 1

    @property
    def is_covered(self) -> bool | None:
        """Whether the measured step lies in the predicted interval."""
        return None if self.step_s is None else self.predicted.low_s <= self.step_s <= self.predicted.high_s

    @property
    def efficiency_band(self) -> tuple[float, float]:
        """The efficiency at the slowest and at the fastest step of the interval."""
        ideal_s = self.predicted.efficiency * self.predicted.step_s
        return ideal_s / self.predicted.high_s, ideal_s / self.predicted.low_s

    @property
    def speedup_band(self) -> tuple[float, float]:
        low, high = self.efficiency_band
        return low * self.predicted.world_size, high * self.predicted.world_size

    @property
    def sources(self) -> str:
        measured = "" if self.point is None else f" and {self.point.record.source}"
        return f"{self.predicted.source}{measured}{', doubtful' if self.predicted.doubt else ''}"


def match_predictions(predicted: Sequence[PredictedPoint], points: Sequence[ScalePoint]) -> list[PredictedLine]:
    """Each prediction in the given order, with what was measured for the same variant, cell and ranks."""
    known = {(p.record.variant, p.record.cell, p.record.world_size): p for p in points}
    return [PredictedLine(p, known.get((p.variant, (p.mode, p.cell_size), p.world_size))) for p in predicted]


# `source` is that of the prediction.
PREDICTED = (
    Column("wrapper", lambda q: q.predicted.variant, key="variant", is_key=True),
    Column("network", lambda q: q.predicted.network, key="network", is_key=True),
    Column("samples", lambda q: _say_cell(q.predicted), is_key=True),
    *build_fields("mode cell_size alone_s", lambda q: q.predicted),
    Column("ranks", lambda q: q.predicted.world_size, "{:,}".format, "world_size", is_key=True),
    Column("predicted step", lambda q: q.predicted.step_s, "ms", "step_s", priority=2),
    Column("low", lambda q: q.predicted.low_s, "ms", "low_s", priority=-1),
    Column("high", lambda q: q.predicted.high_s, "ms", "high_s", priority=-1),
    Column("measured step", lambda q: q.step_s, "ms", "measured_step_s", priority=1),
    Column("error", lambda q: q.error, "{:+.1%}".format, "error", priority=3),
    Column("predicted speed-up", lambda q: q.predicted.speedup, "ratio", "speedup", priority=-2),
    Column("predicted efficiency", lambda q: q.predicted.efficiency, _three, "efficiency", priority=0),
    Column(None, lambda q: q.efficiency_band[0], key="efficiency_low"),
    Column(None, lambda q: q.efficiency_band[1], key="efficiency_high"),
    Column("measured efficiency", lambda q: q.point and q.point.efficiency, _three, "measured_efficiency", priority=-1),
    Column(None, lambda q: q.point and q.point.record.source, key="measured_source"),
    *build_fields("is_covered"),
    *build_fields("doubt source", lambda q: q.predicted),
    Column("source", lambda q: q.sources, priority=-2),
)


def render_matrices(
    items: Sequence[Any], of: Callable[[Any], StepRecord], cells: Sequence[tuple[str, Callable[[Any], str]]]
) -> str:
    """Ranks against batch sizes, with these cells in each place: a matrix for each variant, mode and source."""
    groups: dict[str, list[Any]] = {}
    for item in items:
        record = of(item)
        groups.setdefault(f"{record.variant}, {record.mode} scaling ({record.source})", []).append(item)
    parts = []
    for heading, group in groups.items():
        known = {(of(item).world_size, of(item).cell_size): item for item in group}
        sizes = sorted({of(item).cell_size: _say_cell(of(item)) for item in group}.items())

        def read(ranks: int, size: int, cell: Callable[[Any], str], known: dict[Any, Any] = known) -> str:
            return cell(known[ranks, size]) if (ranks, size) in known else ""

        columns = [Column("ranks", lambda ranks: ranks, "number")]
        columns += [
            Column(f"{name}: {label}", lambda ranks, size=size, cell=cell, read=read: read(ranks, size, cell), str)  # type: ignore[misc]
            for size, name in sizes
            for label, cell in cells
        ]
        table = Table("", "", columns, sorted({ranks for ranks, _ in known}))
        parts.append(f"{heading}:\n\n{table.markdown()}")
    return "\n".join(parts)


def render_speedups(points: Sequence[ScalePoint]) -> str:
    several = [point for point in points if point.record.world_size > 1]
    cells = (
        ("speed-up", lambda p: f"{p.speedup:.2f}"),
        ("efficiency", lambda p: f"{p.efficiency:.2f}"),
    )
    return render_matrices(several, lambda point: point.record, cells)


def render_communication(records: Sequence[StepRecord]) -> str:
    split = [record for record in records if is_split(record)]
    cells = (("compute (ms)", lambda r: format_ms(r.compute_s)), ("exposed (ms)", lambda r: format_ms(r.exposed_s)))
    return render_matrices(split, lambda record: record, cells)


def render_bandwidths(lines: Sequence[BandwidthLine]) -> str:
    cells = (
        ("busbw (GB/s)", lambda line: format_rate(line.record.busbw_bytes_per_s)),
        ("of peak", lambda line: "" if line.use is None else f"{line.use.share:.1%}"),
    )
    return render_matrices(lines, lambda line: line.record, cells)


def _place(record: StepRecord) -> str:
    source = "" if record.source == "measured" else f" ({record.source})"
    return f"{format_number_of(record.world_size, 'rank')} with {_say_samples(record)}{source}"


def _say_samples(record: StepRecord | PredictedPoint) -> str:
    return f"{record.cell_size} samples {'per rank' if record.mode == 'weak' else 'in all'}"


def _say_efficiency(point: ScalePoint) -> str:
    noise = point.efficiency_noise
    text = f"efficiency {point.efficiency:.2f}" + (" (one repetition)" if noise is None else f" ± {noise:.2f}")
    return text if point.record.mode == "weak" else f"speed-up {point.speedup:.2f} of {point.record.world_size}, {text}"


def _say_cause(point: ScalePoint) -> str:
    """The larger of the two reasons for an efficiency below 1; empty where it is not known."""
    record = point.record
    if 1 - point.efficiency <= (point.efficiency_noise or 0.0):
        return " There is no loss beyond the noise."
    if not is_split(record):
        return ""
    share = 1 if record.mode == "weak" else record.world_size
    exposed = f"exposed communication is {record.overhead:.0%} of the step"
    if record.exposed_s >= record.compute_s - point.alone.timing.median_s / share:
        return f" The cause: {exposed}." if record.exposed_s > 0 else ""
    if record.mode == "weak":
        why = f"ranks slow each other down, computing takes {point.slowdown:.2f} times as long as on one rank"
    else:
        why = f"a rank's share of the batch takes {point.slowdown:.2f} times its share of one rank's time"
    return f" The cause: {why} ({exposed})."


def describe_points(points: Sequence[ScalePoint]) -> list[str]:
    """How well each number of ranks does, and the larger cause of what is lost."""
    return [
        f"{_place(p.record)} in {p.record.variant}: {_say_efficiency(p)}.{_say_cause(p)}"
        for p in points
        if p.record.world_size > 1
    ]


def pick_leaders(points: Sequence[ScalePoint]) -> list[ScalePoint]:
    """The best variant of each cell on the most ranks, and the worst point of all, so that findings stay few."""
    several = [point for point in points if point.record.world_size > 1]
    chosen = []
    for cell in dict.fromkeys(point.record.cell for point in several):
        here = [point for point in several if point.record.cell == cell]
        most = max(point.record.world_size for point in here)
        chosen.append(max((p for p in here if p.record.world_size == most), key=lambda point: point.efficiency))
    worst = min(several, key=lambda point: point.efficiency, default=None)
    return chosen if worst is None or worst in chosen else [*chosen, worst]


def describe_stragglers(records: Sequence[StepRecord]) -> list[str]:
    """Cells that one slow rank disturbed, once for each number of ranks."""
    worst: dict[tuple[str, int], Straggler] = {}
    for found in filter(None, map(find_straggler, records)):
        place = _place(found.record), found.rank
        worst[place] = max(found, worst.get(place, found), key=lambda straggler: straggler.excess)
    return [
        f"{place}: do not use this cell. Rank {rank} was the slowest in {straggler.share:.0%} of the steps, "
        f"{straggler.excess:.0%} slower than the others even without communication: another process used its core. "
        "Measure again."
        for (place, rank), straggler in worst.items()
    ]


def _where(record: StepRecord) -> tuple[object, ...]:
    """Records that were timed in turns on the same ranks."""
    return record.cell, record.job, record.world_size, record.source


def describe_contests(lines: Sequence[ScaleLine]) -> list[str]:
    """Each variant compared with torch's wrapper over all undisturbed cells: how often it is better or worse."""
    disturbed = {_where(line.point.record) for line in lines if find_straggler(line.point.record)}
    found: dict[tuple[str, str], list[Ratio]] = {}
    for line in lines:
        record = line.point.record
        if record.world_size == 1 or record.wrapper == "torch" or _where(record) in disturbed:
            continue
        on_same = line.to_torch if record.backend != "gloo" else None
        for ratio, backend in ((on_same, record.backend), (line.to_torch_on_gloo, "gloo")):
            if ratio is not None:
                found.setdefault((record.variant, f"torch on {backend}"), []).append(ratio)
    texts = []
    for (mine, theirs), ratios in found.items():
        better, worse = (
            sum(ratio.is_clear and (ratio.value > 1) is side for ratio in ratios) for side in (True, False)
        )
        values = [ratio.value for ratio in ratios]
        texts.append(
            f"{mine} compared with {theirs}, by efficiency: better in {better} of "
            f"{format_number_of(len(ratios), 'cell')}, worse in {worse}, within the noise in "
            f"{len(ratios) - better - worse}; ratios from {min(values):.2f} to {max(values):.2f}"
            + (f" ({len(disturbed)} disturbed left out)." if disturbed else ".")
        )
    return texts


def describe_limits(points: Sequence[ScalePoint]) -> list[str]:
    """Where strong scaling ends: the number of ranks with the largest speed-up, and what messages alone allow."""
    groups: dict[tuple[object, ...], list[ScalePoint]] = {}
    for point in points:
        record = point.record
        if record.mode == "strong" and record.world_size > 1:
            groups.setdefault((record.variant, record.cell, record.job, record.source), []).append(point)
    lines = []
    for group in groups.values():
        group.sort(key=lambda point: point.record.world_size)
        best, last = max(group, key=lambda point: point.speedup), group[-1]
        record = best.record
        text = f"Strong scaling with {_say_samples(record)} in {record.variant}: "
        if best.speedup <= 1:
            text += f"no number of ranks is faster than one, the best is {best.speedup:.2f} on {record.world_size}"
        elif best is last:
            text += f"the speed-up grows up to {record.world_size} ranks, the most measured: {best.speedup:.2f}"
        else:
            text += f"the speed-up ends at {best.speedup:.2f} on {record.world_size} ranks, "
            text += f"{last.record.world_size} ranks reach {last.speedup:.2f}"
        if record.busy_s:
            limit = best.alone.timing.median_s / record.busy_s
            text += f"; while messages take {format_ms(record.busy_s)} ms of a step, it stays below about {limit:.1f}"
        lines.append(f"{text}.")
    return lines


def describe_bandwidths(lines: Sequence[BandwidthLine]) -> list[str]:
    """Of each variant, the step that comes closest to the peak."""
    best: dict[str, tuple[float, str]] = {}
    for line in lines:
        if line.use is not None:
            rate, peak = format_rate(line.use.busbw_bytes_per_s), format_rate(line.use.peak_bytes_per_s)
            text = f"messages reach at most {rate} GB/s, {line.use.share:.0%} of the measured peak of {peak} GB/s"
            name = line.record.variant
            best[name] = max(best.get(name, (0.0, "")), (line.use.share, f"{name}: {text} ({_place(line.record)})."))
    return [text for _, text in best.values()]


def describe_errors(lines: Sequence[PredictedLine]) -> list[str]:
    """How right predictions were where steps were measured that they had not seen."""
    known = [(abs(line.error), line) for line in lines if line.error is not None]
    if not known:
        return []
    worst, line = max(known, key=lambda pair: pair[0])
    mean, inside = statistics.fmean(error for error, _ in known), sum(bool(line.is_covered) for _, line in known)
    near = sum(error <= _NEAR for error, _ in known)
    ranks = ", ".join(str(n) for n in sorted({line.predicted.world_size for _, line in known}))
    return [
        f"Predicted from half the ranks, {format_number_of(len(known), 'step')} on {ranks} ranks are off by {mean:.1%} "
        f"on average and by {worst:.1%} at most ({line.predicted.variant}, {_say_samples(line.predicted)}); "
        f"{near} by at most {_NEAR:.0%}, and {inside} lie in their 90 % intervals."
    ]


def describe_predictions(lines: Sequence[PredictedLine]) -> list[str]:
    """What predictions say about ranks that were not measured."""
    groups: dict[tuple[str, str, int, str], list[PredictedLine]] = {}
    for line in lines:
        p = line.predicted
        if line.point is None:
            groups.setdefault((p.variant, p.mode, p.cell_size, p.network), []).append(line)
    texts = []
    for group in groups.values():
        group.sort(key=lambda line: line.predicted.world_size)
        p, last = group[0].predicted, len(group) - 1
        shown = (
            group if last < _MOST_RANKS else [group[round(i * last / (_MOST_RANKS - 1))] for i in range(_MOST_RANKS)]
        )
        found = []
        for line in shown:
            band, value, word = line.efficiency_band, line.predicted.efficiency, "efficiency"
            if p.mode == "strong":
                band, value, word = line.speedup_band, line.predicted.speedup, "speed-up"
            found.append(f"{word} {value:.2f} ({band[0]:.2f} to {band[1]:.2f}) on {line.predicted.world_size:,} ranks")
        doubt = p.doubt or group[-1].predicted.doubt  # more ranks are not less doubtful
        network = f" ({p.network})" if p.network else ""
        texts.append(
            f"More ranks ({p.source}), {p.variant}, {_say_samples(p)}{network}: {', '.join(found)}"
            f"{f'; doubtful: {doubt}' if doubt else ''}."
        )
    return texts


def _is_leading(one: PredictedPoint, predicted: Sequence[PredictedPoint]) -> bool:
    """Whether it is of the largest cell of its mode, and of the variant that is best there."""
    others = [p for p in predicted if p.network and p.mode == one.mode]
    if not one.network or one.cell_size != max(p.cell_size for p in others):
        return False
    rivals = [p for p in others if (p.cell_size, p.network) == (one.cell_size, one.network)]
    most = max(p.world_size for p in rivals)
    return one.variant == max((p for p in rivals if p.world_size == most), key=lambda p: p.efficiency).variant


# -- the page ----------------------------------------------------------------------------------------------------------

_DEFINITIONS = (
    ("weak scaling", "the samples per rank stay the same; efficiency is T(1) / T(n)"),
    ("strong scaling", "the samples over all ranks stay the same; speed-up is T(1) / T(n), efficiency is that over n"),
    ("speed-up", "samples/s of n ranks over those of one; T(1) is one rank alone, without a wrapper"),
    ("compute", "the step with communication off"),
    ("exposed", "the step minus the same step with communication off; of step: exposed over compute plus exposed"),
    ("busy", "how long at least one message was in flight in a step; overlap is 1 - exposed / busy"),
    ("bandwidth", "busbw = 2(n-1)/n * bytes / t, with the bytes that a rank hands to all-reduce and t = busy"),
    ("peak", "the largest busbw of an all-reduce alone, on the same backend and number of ranks"),
    ("knee", "the smallest batch size with nine tenths of the best samples/s"),
    ("gap", "the mean test accuracy of the baseline (the smallest batch without a recipe) minus this one's, in points"),
    ("±", "of times: half the 95 % interval of the median over paired repetitions; of accuracies: the standard "
     "deviation over seeds"),
    ("measured, emulated, simulated", "timed here; timed here on an emulated slower network; computed by the model"),
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """One part of a page: what was found, tables (caption, Markdown), figures (caption, name) and the sources."""

    title: str
    findings: Sequence[str]
    tables: Sequence[tuple[str, str]]
    figures: Sequence[tuple[str, str]] = ()
    sources: Sequence[str] = ("measured",)


def describe_machine(environment: Environment) -> str:
    """The machine and the software of a run in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    parts = (
        f"{environment.host}: {environment.cpu}, {environment.cores} cores, {format_memory(environment.memory_bytes)}",
        f"{environment.system}, Python {environment.python}, {versions}",
        ", ".join(f"{name} {value}" for name, value in environment.details.items()),
        f"`{environment.command_line}`",
        f"commit {environment.git_commit}" if environment.git_commit else "",
    )
    return "; ".join(part for part in parts if part)


def render_page(
    title: str,
    sections: Sequence[tuple[str, Section]],
    machines: Sequence[str] = (),
    assumptions: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> str:
    """Findings first, then tables and figures, the machine and definitions. A section comes with the folder of its
    figures, as seen from the page."""
    blocks = [f"# {title}", "## Findings"]
    for _, section in sections:
        origin = f"Source: {', '.join(section.sources)}."
        findings = section.findings or ["These records show nothing to report."]
        blocks += [f"**{section.title}.** {origin}", "\n".join(f"- {line}" for line in findings)]
    for folder, section in sections:
        blocks += [f"## {section.title}", f"Source: {', '.join(section.sources)}."]
        place = f"{folder}/" if folder else ""
        blocks += [f"![{caption}]({place}{name}.png)" for caption, name in section.figures]
        for caption, table in section.tables:
            blocks += [f"### {caption}", table.strip()]
    for heading, lines in (
        ("Machine", list(dict.fromkeys(machines))),
        ("Definitions", [f"*{word}*: {meaning}." for word, meaning in _DEFINITIONS]),
        ("Assumptions of predictions", assumptions),
        ("Warnings", warnings),
    ):
        if lines:
            blocks += [f"## {heading}", "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(blocks) + "\n"


def find_sources(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record.source for record in records))


def name_jobs(records: Iterable[BatchRecord | StepRecord | LargeBatchRecord]) -> str:
    return "; ".join(dict.fromkeys(f"{r.model} on {r.data}, {r.precision} on {r.device}" for r in records))


# -- results -----------------------------------------------------------------------------------------------------------


class StudyResult(Result):
    """What the results of all scaling studies share: sections, and the page that is made of them."""

    @property
    def sections(self) -> list[Section]:
        """The parts of the page; the first finding of the first one is the answer."""
        return []

    @property
    def assumptions(self) -> list[str]:
        """Those of the predictions."""
        return []

    @property
    def answer(self) -> str:
        lines = [line for section in self.sections for line in section.findings]
        return lines[0] if lines else "Nothing was measured that says how the job scales."

    @property
    def findings(self) -> list[str]:
        return [line for section in self.sections for line in section.findings][1:]

    @property
    def subtitle(self) -> str:
        """The machine, for figures; its GPU only where it was used."""
        is_on_gpu = any(getattr(record, "device", "cpu") == "cuda" for record in self.records)
        machine, gpu = self.run.environment.machine, self.run.environment.details.get("gpu")
        return machine if is_on_gpu or not gpu else machine.removesuffix(f", {gpu}")

    @property
    def places(self) -> list[str]:
        page = [] if self.folder is None else [f"page: {self.folder / PAGE}"]
        return [*page, *super().places]

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"assumptions": self.assumptions}

    def files(self) -> dict[str, str | bytes]:
        here = [("", section) for section in self.sections]
        machine = describe_machine(self.run.environment)
        return {PAGE: render_page(self.run.verb, here, [machine], self.assumptions, self.warnings)}


class BatchResult(StudyResult):
    """`scale batch`: epochs on one rank at several batch sizes."""

    verbs = ("scale batch",)

    @cached_property
    def rows(self) -> list[BatchRecord]:
        return only(self.records, BatchRecord)

    def tables(self) -> list[Table]:
        return [build_batch_table(self.rows)]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        from paceline.report.scaling_plots import plot_batches

        if not any(record.timing is not None for record in self.rows):
            return {}
        return {"batch": lambda: plot_batches(self.rows, self.subtitle)}

    @cached_property
    def sections(self) -> list[Section]:  # type: ignore[override]
        return [
            Section(
                f"Batch size on one rank: {name_jobs(self.rows)}",
                describe_batches(self.rows),
                [("Epochs by batch size", self.table().markdown())],
                [("Throughput and memory by batch size", name) for name in self.figures()],
                find_sources(self.rows),
            )
        ]

    @property
    def next_steps(self) -> list[str]:
        knee = find_knee(self.rows)
        return [] if knee is None else [f"paceline scale ranks --model {knee.model} --batch-size {knee.batch_size}"]


class RanksResult(StudyResult):
    """`scale ranks`: weak and strong scaling of all wrappers, and the curve predicted for more ranks."""

    verbs = ("scale ranks",)

    @cached_property
    def steps(self) -> list[StepRecord]:
        return only(self.records, StepRecord)

    @cached_property
    def points(self) -> list[ScalePoint]:
        return list_points(self.steps)

    @cached_property
    def _bandwidths(self) -> tuple[list[BandwidthLine], str]:
        """The lines of the table, or why there are none."""
        try:
            return list_bandwidths(self.steps, only(self.records, CollectiveRecord)), ""
        except MeasurementError as error:
            return [], str(error)

    @property
    def failure(self) -> str:
        return super().failure or self._bandwidths[1]

    @cached_property
    def _predictions(self) -> tuple[list[PredictedPoint], list[str]]:
        """More ranks, from all that was measured; and the largest measured number from half as many, to compare it with
        its measurement. Nothing where no layers were profiled."""
        several = [record for record in self.steps if record.world_size > 1]
        if not several or not only(self.records, LayerProfileRecord):
            return [], []
        networks = find_networks(self.config["network"])
        most = max(record.world_size for record in several)
        counts = [n for n in parse_counts(self.config["predict_ranks"], "--predict-ranks") if n > most]
        points: list[PredictedPoint] = []
        notes: dict[str, None] = {}
        for mode, size, wrapper, backend in dict.fromkeys((*r.cell, r.wrapper, r.backend) for r in several):
            if wrapper == "dp":
                continue
            cores = self.run.environment.cores // several[0].threads
            at_hand = most if several[0].device == "cuda" else max(cores, most)
            ranks = [n for n in counts if mode == "weak" or size % n == 0]
            try:
                evidence = ScalingEvidence.sort(self.records, wrapper, backend, (mode, size), at_hand)
                found = simulate_scaling(evidence.calibrated_up_to(most // 2), [most])
                found += simulate_scaling(evidence, ranks, networks) if ranks else []
                lines = describe_assumptions(evidence, networks)
            except PacelineError as error:  # times that no model fits, such as on a busy machine
                found, lines = [], [f"{NO_PREDICTION} {wrapper} on {backend}, {mode} {size}: {error}"]
            points += found
            notes |= dict.fromkeys(lines)
        return points, list(notes)

    @property
    def assumptions(self) -> list[str]:
        return self._predictions[1]

    @cached_property
    def predictions(self) -> list[PredictedLine]:
        return match_predictions(self._predictions[0], self.points)

    def tables(self) -> list[Table]:
        several = [record for record in self.steps if record.world_size > 1]
        lines = self.predictions
        tables = [
            Table("scaling", "ranks", SCALING, compare_with_torch(self.points)),
            Table("communication", "compute and communication", COMMUNICATION, several),
            Table("bandwidth", "bandwidth and its measured peak", BANDWIDTH, self._bandwidths[0]),
            # A terminal shows the predictions that can be compared; the findings have the others.
            Table("predicted", "predicted", PREDICTED, lines, shown=[line for line in lines if line.point is not None]),
        ]
        return [table for table in tables if table.rows]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        from paceline.report import scaling_plots as plots

        modes = {point.record.mode for point in self.points if point.record.world_size > 1}
        drawn: dict[str, Callable[[], Figure]] = {}
        if "weak" in modes:
            drawn["weak"] = lambda: plots.plot_weak(self.points, self.subtitle, self._predictions[0])
        if "strong" in modes:
            drawn["strong"] = lambda: plots.plot_strong(self.points, self.subtitle, self._predictions[0])
        if any(map(is_split, self.steps)):
            drawn["communication"] = lambda: plots.plot_communication(self.steps, self.subtitle)
        return drawn

    @cached_property
    def sections(self) -> list[Section]:  # type: ignore[override]
        rates, leaders = self._bandwidths[0], pick_leaders(self.points)
        strong = {point.record.variant for point in leaders if point.record.mode == "strong"}
        findings = [
            *self._summarize(),
            *describe_stragglers(self.steps),
            *describe_points(leaders),
            *describe_contests(compare_with_torch(self.points)),
            *describe_limits([point for point in self.points if point.record.variant in strong]),
            *describe_bandwidths(rates),
            *[f"{line}." for line in self.assumptions if line.startswith(NO_PREDICTION)][:1],
        ]
        named = {table.name: table.markdown() for table in self.tables()}
        tables = [
            ("Speed-up by batch size and ranks", render_speedups(self.points)),
            ("Compute and exposed communication by ranks and batch size", render_communication(self.steps)),
            ("Bandwidth by ranks and batch size", render_bandwidths(rates)),
            ("Every number of ranks and wrapper", named.get("scaling", "")),
            ("Where the time of a step goes", named.get("communication", "")),
            ("What messages use of the peak", named.get("bandwidth", "")),
        ]
        captions = {"weak": "Weak scaling", "strong": "Strong scaling"}
        figures = [(captions.get(name, "Compute and exposed communication"), name) for name in self.figures()]
        sources = find_sources([*self.steps, *only(self.records, CollectiveRecord)])
        shown = [(caption, text) for caption, text in tables if text]
        first = Section(f"Ranks: {name_jobs(self.steps)}", findings, shown, figures, sources)
        return [first, *([self._predicted_section(named["predicted"])] if self.predictions else [])]

    def _predicted_section(self, table: str) -> Section:
        # Of ranks that nobody has, the best variant of the largest cell of each mode says enough.
        leading = [line for line in self.predictions if _is_leading(line.predicted, self._predictions[0])]
        sources = [q.predicted.source for q in self.predictions]
        sources += [q.point.record.source for q in self.predictions if q.point]
        return Section(
            "More ranks than measured",
            [*describe_errors(self.predictions), *describe_predictions(leading)],
            [("Predicted and measured", table)],
            sources=list(dict.fromkeys(sources)),
        )

    def _summarize(self) -> list[str]:
        """The best of the most ranks in one sentence."""
        several = [point for point in self.points if point.record.world_size > 1]
        disturbed = {_where(record) for record in self.steps if find_straggler(record)}
        several = [point for point in several if _where(point.record) not in disturbed] or several
        if not several:
            return []
        most = max(point.record.world_size for point in several)
        parts = []
        for mode in ("weak", "strong"):
            here = [p for p in several if p.record.mode == mode and p.record.world_size == most]
            if here:
                best = max(here, key=lambda p: p.efficiency)
                value = f"{best.efficiency:.0%} efficiency" if mode == "weak" else f"{best.speedup:.2f} times the speed"
                parts.append(f"{value} in {mode} scaling ({best.record.variant}, {_say_samples(best.record)})")
        return [f"{format_number_of(most, 'rank').capitalize()} reach {' and '.join(parts)}."]

    @property
    def next_steps(self) -> list[str]:
        most = max((record.world_size for record in self.steps), default=1)
        return [] if most == 1 else [f"paceline tune --model {self.steps[0].model} --ranks {most}"]


class ReportResult(StudyResult):
    """`scale report`: several studies on one page. Its run names them (`config["runs"]`, relative to its folder)."""

    verbs = ("scale report",)

    def __init__(self, run: Run, folder: Path | None = None, parts: Sequence[Result] | None = None) -> None:
        super().__init__(run, folder)
        if parts is None:
            parts = [load_result((folder or Path()) / path) for path in run.config["runs"]]
        self.parts = [part for part in parts if isinstance(part, StudyResult)]

    @property
    def answer(self) -> str:
        return " ".join(part.answer for part in self.parts)

    @property
    def findings(self) -> list[str]:
        return [line for part in self.parts for line in part.findings]

    @property
    def assumptions(self) -> list[str]:
        return [line for part in self.parts for line in part.assumptions]

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(f"`{part.run.verb}`: {line}" for part in self.parts for line in part.warnings)

    @property
    def failure(self) -> str:
        return next((part.failure for part in self.parts if part.failure), "")

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {
            "page": None if self.folder is None else str(self.folder / PAGE),
            "runs": [None if part.folder is None else str(part.folder) for part in self.parts],
            "tables": {
                str(part.folder or part.run.verb): {table.name: table.rows_json() for table in part.tables()}
                for part in self.parts
            },
        }

    def files(self) -> dict[str, str | bytes]:
        sections = [
            (os.path.relpath(part.folder, self.folder) if part.folder and self.folder else "", section)
            for part in self.parts
            for section in part.sections
        ]
        machines = [describe_machine(part.run.environment) for part in self.parts]
        page = render_page("Does it scale?", sections, machines, self.assumptions, self.warnings)
        return {PAGE: page, "report.json": json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"}
