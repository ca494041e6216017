"""The rows of all predictions as tables and figures: one list of columns for each kind, and the comparison of plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.predict.predictor import Prediction
from paceline.predict.race import Interval, Race
from paceline.predict.search import CapPoint
from paceline.predict.strategy_costs import describe_update
from paceline.predict.tuning import DEFAULT
from paceline.report.plots import COLORS
from paceline.report.table import Column, raw_columns, text_columns
from paceline.units import MIB, format_bytes, format_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The traced buckets, with which others are compared.
TRACED = "traced"


def advise_size(row: Prediction) -> str:
    return "the default" if row.keeps_default else join_sizes(*row.plateau)


def join_sizes(low_bytes: int, high_bytes: int) -> str:
    return f"{format_bytes(low_bytes)} to {format_bytes(high_bytes)}"


def say_interval(row: Prediction) -> str:
    return f"{format_ms(row.low_s)} to {format_ms(row.high_s)}"


def say_ratio(ratio: Interval, percent: str = "{:+.1%}") -> str:
    """A ratio as a percentage difference, with its interval."""
    if ratio.low == ratio.high:
        return "0"
    value, low, high = (percent.format(end - 1) for end in (ratio.value, ratio.low, ratio.high))
    return f"{value} ({f'{low} to {high}' if ratio.is_known else 'too few rounds'})"


def interval_column(priority: int) -> Column:
    return Column("90 % (ms)", say_interval, str, priority=priority)


WHAT_IF = (
    *text_columns("network", is_key=True),
    Column("ranks", "world_size", "{:,}".format, "world_size", is_key=True),
    *text_columns("algorithm", priority=1),
    Column("step", "step_s", "ms", "step_s", priority=9),
    interval_column(8),
    Column("efficiency", "efficiency", "percent.1", "efficiency", priority=7),
    Column("doubtful", lambda r: bool(r.doubt) or None, "yes", priority=6),
    Column("exposed", "exposed_s", "ms", "exposed_s", priority=5),
    Column("of step", "exposed_share", "percent.1", "exposed_share"),
    Column("slowest rank", lambda r: r.straggler_s or None, "ms"),
    Column("bucket size", advise_size, str, priority=4),
    Column("buckets", "num_buckets", "count", "num_buckets"),
    Column("saves", lambda r: max(0.0, r.gain), "percent.1", priority=3),
    Column("bound by", "bound", str, "bound", priority=2),
    *raw_columns("low_s", "high_s"),
    Column(None, lambda r: r.efficiency_bounds[0], key="efficiency_low"),
    Column(None, lambda r: r.efficiency_bounds[1], key="efficiency_high"),
    *raw_columns("straggler_s", best_cap_bytes="cap_bytes"),
    Column(None, lambda r: r.plateau[0], key="plateau_low_bytes"),
    Column(None, lambda r: r.plateau[1], key="plateau_high_bytes"),
    *raw_columns("default_step_s", "gain", "keeps_default"),
    *raw_columns("doubt", "source", "neighbours_s", local_step_s="local_s"),
    Column("source", lambda r: f"{r.source}{', doubtful' if r.doubt else ''}", "text"),
)


def name_buckets(row: Prediction) -> str:
    return f"bucket_cap_mb={row.cap_mib:g}" if row.cap_bytes else row.label or "another"


def get_saved(row: Prediction) -> tuple[float, float, float]:
    """The share of the traced step that it saves, with its bounds."""
    return row.ratios[TRACED].saved


CAPS = (
    Column("bucket_cap_mb", "cap_mib", "{:.4g}".format, "bucket_cap_mb", is_key=True),
    Column("", "label", str, "label", is_key=True),
    Column("buckets", "num_buckets", "count", "num_buckets", priority=2),
    Column("step", "step_s", "ms", "step_s", priority=6),
    interval_column(3),
    Column("saves", lambda r: get_saved(r)[0], "{:+.1%}".format, "gain", priority=5),
    Column("90 %", lambda r: "{:+.1%} to {:+.1%}".format(*get_saved(r)[1:]), str, priority=4),
    Column("exposed", "exposed_s", "ms", "exposed_s", priority=1),
    Column("beyond the trace", lambda r: bool(r.doubt) or None, "yes", priority=1),
    Column(None, lambda r: get_saved(r)[1], key="gain_low"),
    Column(None, lambda r: get_saved(r)[2], key="gain_high"),
    *raw_columns("low_s", "high_s", "cap_bytes"),
    Column(None, lambda r: bool(r.doubt), key="is_beyond"),
    *raw_columns("source"),
)
MESSAGES = (
    Column("bucket", lambda row: row[0], "count", "bucket", is_key=True),
    Column("size", lambda row: row[1].num_bytes, "bytes", "num_bytes", is_key=True),
    Column("launched", lambda row: row[1].launch_s, "ms", "launch_s", priority=2),
    Column("begun", lambda row: row[1].start_s, "ms", "start_s", priority=1),
    Column("done", lambda row: row[1].done_s, "ms", "done_s", priority=2),
    Column("in flight", lambda row: row[1].done_s - row[1].start_s, "ms", priority=3),
    Column("after backward", lambda row: max(0.0, row[1].done_s - row[2]), "ms", priority=3),
    Column("source", lambda row: "measured", key="source"),
)


def _say_exposed(seconds: float) -> str:
    """A step that is faster with communication than without it is noise, not a gain."""
    return format_ms(seconds) if seconds > 0 else "within the noise"


GRID = (
    Column("bucket size", "cap_bytes", "bytes", "cap_bytes", is_key=True),
    Column("buckets", "num_buckets", "count", "num_buckets", priority=2),
    Column("predicted", "step_s", "ms", "predicted_s", priority=5),
    interval_column(1),
    Column("measured", "measured_s", "ms", "measured_s", priority=5),
    Column("error", "error", "{:+.1%}".format, priority=4),
    Column("predicted exposed (ms)", "exposed_s", _say_exposed, "predicted_exposed_s"),
    Column("measured exposed (ms)", "measured_exposed_s", _say_exposed, "measured_exposed_s"),
    *raw_columns("low_s", "high_s", "same_layout"),
    Column("source", lambda p: p.source if p.measured is None else p.measured.source, key="source"),
)
BUCKETS = (
    Column("bucket", lambda row: row[0], "count", "bucket", is_key=True),
    Column("size", lambda row: row[1].num_bytes, "bytes", "num_bytes", is_key=True),
    Column("ready", lambda row: row[1].ready_s, "ms", "ready_s", priority=3),
    Column(None, lambda row: row[1].launch_s, key="launch_s"),
    Column(None, lambda row: row[1].start_s, key="start_s"),
    Column("queued", lambda row: row[1].queue_s, "ms"),
    Column("in flight", lambda row: row[1].done_s - row[1].start_s, "ms", priority=2),
    Column("done", lambda row: row[1].done_s, "ms", "done_s", priority=3),
    Column("after backward", lambda row: max(0.0, row[1].done_s - row[2]), "ms", priority=1),
    Column("source", lambda row: "simulated", key="source"),
)


RACE = (
    Column("plan", "label", key="plan", is_key=True),
    Column(None, "strategy.text", key="strategy"),
    Column("buckets", "num_buckets", "count", "num_buckets", priority=1),
    Column("predicted", "step_s", "ms", "predicted_s", priority=3),
    interval_column(0),
    Column("measured", "measured_s", "ms", "measured_s", priority=4),
    Column("compared with the default", lambda r: r.ratios[DEFAULT], say_ratio, priority=5),
    Column("rounds", lambda r: len(r.measured.turns_s), "count", "num_rounds", priority=2),
    Column("", "status", key="status", priority=4),
    Column(None, lambda r: r.ratios[DEFAULT].value, key="ratio"),
    *raw_columns("low_s", "high_s"),
    Column(None, lambda r: r.ratios[DEFAULT].low if r.ratios[DEFAULT].is_known else None, key="ratio_low"),
    Column(None, lambda r: r.ratios[DEFAULT].high if r.ratios[DEFAULT].is_known else None, key="ratio_high"),
)


PREDICTED = (
    Column("strategy", "strategy.text", key="strategy", is_key=True),
    Column("update", lambda r: describe_update(r.strategy), key="update", priority=2),
    Column("sent", "sent_bytes", lambda size: format_bytes(round(size)), "sent_bytes", priority=3),
    Column("buckets", "num_buckets", "count", "num_buckets"),
    Column("predicted", "step_s", "ms", "predicted_s", priority=5),
    interval_column(1),
    *raw_columns("low_s", "high_s"),
    Column("measured", "measured_s", "ms", "measured_s", priority=4),
)


def compare_plans(race: Race, candidates: Sequence[Prediction], whole: Race | None = None) -> list[Prediction]:
    """The plans that ran, each compared with the default; `whole` also has those that change the update."""
    rows = []
    for one in candidates:
        ratio = (whole or race).to_default[one.label]
        status = _say_status(race, one.label) if one.label in race.to_default else _say_offer(ratio)
        rows.append(replace(one, ratios={DEFAULT: ratio}, status=status))
    return rows


def _say_status(race: Race, label: str) -> str:
    if label == race.winner:
        return "keep" if label == race.default else "use"
    if label == race.default:
        return "beaten"
    if race.to_default[label].is_flat:
        return "within 1 %"
    return "" if label in race.left else "slower"


def _say_offer(ratio: Interval) -> str:
    """Status of a strategy that changes the update and is therefore never chosen automatically."""
    return "within 1 %" if ratio.is_flat else "faster" if ratio.high < 1 else "slower" if ratio.low > 1 else ""


def draw_caps(
    axes: Axes, points: Sequence[CapPoint], of: Callable[[CapPoint], float], best: tuple[int, float], alone_s: float
) -> None:
    """Times against bucket sizes (flat over each interval of caps), the best size, and the time without
    communication."""
    xs = [size / MIB for point in points for size in (point.low_bytes, point.high_bytes)]
    ys = [of(point) * 1e3 for point in points for _ in range(2)]
    axes.plot(xs, ys, color=COLORS[0], label="predicted for every bucket size")
    axes.plot([best[0] / MIB], [best[1] * 1e3], "D", color=COLORS[2], markersize=8, label="best predicted")
    axes.axhline(alone_s * 1e3, color=COLORS[6], ls=":", lw=1, label="without communication")
    axes.set(xscale="log", xlabel="bucket size (MiB)")
