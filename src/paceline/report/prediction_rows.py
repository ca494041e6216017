"""The rows of all predictions as tables and figures: one list of columns for each kind and the comparison of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paceline.predict.predictor import Prediction
from paceline.predict.race import Interval, Race
from paceline.predict.search import CapPoint
from paceline.predict.strategy_costs import describe_update
from paceline.predict.tuning import DEFAULT
from paceline.records.samples import group_by
from paceline.report.plots import COLORS, draw_line
from paceline.report.table import SIMULATED, Column, raw_columns, text_columns
from paceline.units import MIB, format_bytes, format_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The label of the traced buckets, which are the baseline.
TRACED = "traced"
_NAMED = ("contention ", "interval: ", "measured: ")  # prefixes of lines that already name their source


def advise_size(row: Prediction) -> str:
    return "the default" if row.keeps_default else join_sizes(*row.plateau)


def join_sizes(low_bytes: int, high_bytes: int) -> str:
    return f"{format_bytes(low_bytes)} to {format_bytes(high_bytes)}"


def format_interval(ratio: Interval, percent: str = "{:+.1%}") -> str:
    """Format a ratio as a percentage difference, with its interval."""
    if ratio.low == ratio.high:
        return "0"
    value, low, high = (percent.format(end - 1) for end in (ratio.value, ratio.low, ratio.high))
    return f"{value} ({f'{low} to {high}' if ratio.is_known else 'too few rounds'})"


def describe_rows(rows: Sequence[Prediction], assumed: Iterable[str], prefix: str) -> list[str]:
    lines = [line if line.startswith(_NAMED) else f"{prefix}: {line}" for line in dict.fromkeys(assumed)]
    for doubt, same in group_by((row for row in rows if row.doubt), lambda row: row.doubt).items():
        places = ", ".join(f"{row.network} on {row.world_size:,} ranks" for row in same)
        lines.append(f"doubtful: {places if len(same) < len(rows) else 'all rows'}: {doubt}")
    return lines


def pick(**priorities: int) -> list[Column]:
    """The prediction columns with these names, each with its priority."""
    return [replace(_COLUMNS[name], priority=priority) for name, priority in priorities.items()]


# Columns that several tables of predictions share.
_COLUMNS = {
    "step": Column("step", "step_s", "ms", "step_s"),
    "predicted": Column("predicted", "step_s", "ms", "predicted_s"),
    "interval": Column("90 % (ms)", lambda r: f"{format_ms(r.low_s)} to {format_ms(r.high_s)}", str),
    "measured": Column("measured", "measured_s", "ms", "measured_s"),
    "exposed": Column("exposed", "exposed_s", "ms", "exposed_s"),
    "buckets": Column("buckets", "num_buckets", "count", "num_buckets"),
    "strategy": Column("strategy", "strategy.text", key="strategy", is_key=True),
    "update": Column("update", lambda r: describe_update(r.strategy), key="update"),
    "sent": Column("sent", "sent_bytes", lambda size: format_bytes(round(size)), "sent_bytes"),
}
PLACE = (*text_columns("network", is_key=True), Column("ranks", "world_size", "{:,}".format, "world_size", is_key=True))
WHAT_IF = (
    *PLACE,
    *text_columns("algorithm", priority=1),
    *pick(step=9, interval=8),
    Column("efficiency", "efficiency", "percent.1", "efficiency", priority=7),
    Column("doubtful", lambda r: bool(r.doubt) or None, "yes", priority=6),
    *pick(exposed=5),
    Column("of step", "exposed_share", "percent.1", "exposed_share"),
    Column("slowest rank", lambda r: r.straggler_s or None, "ms"),
    Column("bucket size", advise_size, str, priority=4),
    *pick(buckets=0),
    Column("saves", lambda r: max(0.0, r.gain), "percent.1", priority=3),
    Column("bound by", "bound", str, "bound", priority=2),
    *raw_columns("low_s", "high_s", efficiency_low="efficiency_bounds.0", efficiency_high="efficiency_bounds.1"),
    *raw_columns("straggler_s", best_cap_bytes="cap_bytes"),
    *raw_columns(plateau_low_bytes="plateau.0", plateau_high_bytes="plateau.1"),
    *raw_columns("default_step_s", "gain", "keeps_default"),
    *raw_columns("doubt", "source", "neighbours_s", local_step_s="local_s"),
    Column("source", lambda r: f"{r.source}{', doubtful' if r.doubt else ''}", "text"),
)


def name_buckets(row: Prediction) -> str:
    return f"bucket_cap_mb={format_cap(row.cap_mib)}" if row.cap_mib else row.label or "another"


def format_cap(cap_mib: float) -> str:
    """The shortest decimal that torch converts to the same number of bytes."""
    shorter = (float(f"{cap_mib:.{digits}g}") for digits in range(1, 18))
    return repr(next(cap for cap in shorter if int(cap * MIB) == round(cap_mib * MIB))).removesuffix(".0")


def get_saved(row: Prediction) -> tuple[float, float, float]:
    """The fraction of the traced step that a prediction saves, with bounds."""
    return row.ratios[TRACED].saved


CAPS = (
    Column("bucket_cap_mb", "cap_mib", format_cap, "bucket_cap_mb", is_key=True),
    Column("", "label", str, "label", is_key=True),
    *pick(buckets=2, step=6, interval=3),
    Column("saves", lambda r: get_saved(r)[0], "{:+.1%}".format, "gain", priority=5),
    Column("90 %", lambda r: "{:+.1%} to {:+.1%}".format(*get_saved(r)[1:]), str, priority=4),
    *pick(exposed=1),
    Column("beyond the trace", lambda r: bool(r.doubt) or None, "yes", priority=1),
    Column(None, lambda r: get_saved(r)[1], key="gain_low"),
    Column(None, lambda r: get_saved(r)[2], key="gain_high"),
    *raw_columns("low_s", "high_s", "cap_bytes"),
    Column(None, lambda r: bool(r.doubt), key="is_beyond"),
    *raw_columns("source"),
)
MESSAGES = (
    Column("bucket", "0", "count", "bucket", is_key=True),
    Column("size", "1.num_bytes", "bytes", "num_bytes", is_key=True),
    Column("launched", "1.launch_s", "ms", "launch_s", priority=2),
    Column("started", "1.start_s", "ms", "start_s", priority=1),
    Column("done", "1.done_s", "ms", "done_s", priority=2),
    Column("in flight", lambda row: row[1].done_s - row[1].start_s, "ms", priority=3),
    Column("after backward", lambda row: max(0.0, row[1].done_s - row[2]), "ms", priority=3),
    Column("source", lambda row: "measured", key="source"),
)


def _format_exposed(seconds: float) -> str:
    """Format milliseconds. A step that is faster with communication than without it is within the noise."""
    return format_ms(seconds) if seconds > 0 else "within the noise"


GRID = (
    Column("bucket size", "cap_bytes", "bytes", "cap_bytes", is_key=True),
    *pick(buckets=2, predicted=5, interval=1, measured=5),
    Column("error", "error", "{:+.1%}".format, priority=4),
    Column("predicted exposed (ms)", "exposed_s", _format_exposed, "predicted_exposed_s"),
    Column("measured exposed (ms)", "measured_exposed_s", _format_exposed, "measured_exposed_s"),
    *raw_columns("low_s", "high_s", "same_layout"),
    Column("source", lambda p: p.source if p.measured is None else p.measured.source, key="source"),
)
BUCKETS = (
    Column("bucket", "0", "count", "bucket", is_key=True),
    Column("size", "1.num_bytes", "bytes", "num_bytes", is_key=True),
    Column("ready", "1.ready_s", "ms", "ready_s", priority=3),
    *raw_columns("1.launch_s", "1.start_s"),
    Column("queued", "1.queue_s", "ms"),
    Column("in flight", lambda row: row[1].done_s - row[1].start_s, "ms", priority=2),
    Column("done", "1.done_s", "ms", "done_s", priority=3),
    Column("after backward", lambda row: max(0.0, row[1].done_s - row[2]), "ms", priority=1),
    replace(SIMULATED, name="source"),
)


RACE = (
    Column("plan", "label", key="plan", is_key=True),
    Column(None, "strategy.text", key="strategy"),
    *pick(buckets=1, predicted=3, interval=0, measured=4),
    Column("compared with the default", lambda r: r.ratios[DEFAULT], format_interval, priority=5),
    Column("rounds", lambda r: len(r.measured.turns_s), "count", "num_rounds", priority=2),
    Column("", "status", key="status", priority=4),
    Column(None, lambda r: r.ratios[DEFAULT].value, key="ratio"),
    *raw_columns("low_s", "high_s"),
    Column(None, lambda r: r.ratios[DEFAULT].low if r.ratios[DEFAULT].is_known else None, key="ratio_low"),
    Column(None, lambda r: r.ratios[DEFAULT].high if r.ratios[DEFAULT].is_known else None, key="ratio_high"),
)


PREDICTED = (
    *pick(strategy=0, update=2, sent=3, buckets=0, predicted=5, interval=1),
    *raw_columns("low_s", "high_s"),
    *pick(measured=4),
)


def compare_plans(race: Race, candidates: Sequence[Prediction], whole: Race | None = None) -> list[Prediction]:
    """The plans that ran, each compared with the default. With `whole`, also includes plans that change the update."""
    rows = []
    for one in candidates:
        ratio, status = (whole or race).to_default[one.label], ""
        if one.label in race.to_default:
            status = _find_status(race, one.label)
        elif ratio.is_flat or ratio.is_clear:  # it changes the update and is therefore never chosen automatically
            status = "within 1 %" if ratio.is_flat else "faster" if ratio.high < 1 else "slower"
        rows.append(replace(one, ratios={DEFAULT: ratio}, status=status))
    return rows


def _find_status(race: Race, label: str) -> str:
    if label == race.winner:
        return "keep" if label == race.default else "use"
    if label == race.default:
        return "beaten"
    if race.to_default[label].is_flat:
        return "within 1 %"
    if label in race.left:
        return ""
    # A plan may be shown to be slower than another plan, but not slower than the default.
    return "slower" if race.to_default[label].low > 1 else "beaten"


def draw_caps(
    axes: Axes,
    points: Sequence[CapPoint],
    of: Callable[[CapPoint], float],
    best: tuple[int, float],
    alone_s: float,
    rows: Sequence[Prediction] = (),
) -> None:
    """Plot times against bucket sizes (flat over each interval of caps), the best size, the time without communication,
    and the intervals of `rows`. Caps beyond the model's bytes give the same buckets as the last point."""
    sizes = [best[0], *(row.cap_bytes for row in rows)]
    least, *inner, most = [size for point in points for size in (point.low_bytes, point.high_bytes)]
    xs = [size / MIB for size in (min(least, *sizes), *inner, max(most, *sizes))]
    ys = [of(point) * 1e3 for point in points for _ in range(2)]
    axes.plot(xs, ys, color=COLORS[0], label="predicted for every bucket size")
    axes.plot([best[0] / MIB], [best[1] * 1e3], "D", color=COLORS[2], markersize=8, label="best predicted")
    axes.axhline(alone_s * 1e3, color=COLORS[6], ls=":", lw=1, label="without communication")
    axes.set(xscale="log", xlabel="bucket size (MiB)")
    if rows:
        caps, low, high = zip(*((r.cap_bytes / MIB, r.low_s * 1e3, r.high_s * 1e3) for r in rows), strict=True)
        axes.fill_between(caps, low, high, color=COLORS[0], alpha=0.15, linewidth=0, label="90 % interval")


def draw_measured(axes: Axes, points: Sequence[Sequence[Any]], label: str, **style: Any) -> None:
    """Plot measured times in ms against sizes in MiB, each with its low and high end, and a star at the best."""
    draw_line(axes, 1, points, label, marker="o", **style)
    size, best_ms, *_ = min(points, key=lambda point: point[1])
    axes.plot([size], [best_ms], "*", color=COLORS[1], markersize=15, label="best measured")
