"""A tuning for people: the table of caps, the picture of predicted and measured, the verdict in one sentence, JSON.

What is concluded is in `predict`; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.report.plots import COLORS, new_figure
from paceline.report.tables import Column
from paceline.units import MIB, format_bytes, format_ms, format_number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "bucket_table",
    "describe_doubts",
    "describe_errors",
    "grid_row",
    "grid_table",
    "plot_tuning",
    "say_verdict",
    "tuning_row",
]


def _maybe_ms(seconds: float | None) -> str:
    return "" if seconds is None else format_ms(seconds)


def _percent(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.1%}"


grid_table: Sequence[Column] = (
    Column("bucket size", lambda p: format_bytes(p.cap_bytes)),
    Column("buckets", lambda p: str(p.estimate.num_buckets)),
    Column("predicted (ms)", lambda p: format_ms(p.estimate.step_s)),
    Column("90 % (ms)", lambda p: f"{format_ms(p.estimate.low_s)} to {format_ms(p.estimate.high_s)}"),
    Column("measured (ms)", lambda p: _maybe_ms(p.measured_s)),
    Column("error", lambda p: _percent(p.error, "+")),
    Column("added: predicted (ms)", lambda p: format_ms(p.estimate.exposed_s)),
    Column("measured (ms)", lambda p: _maybe_ms(p.exposed_s)),
    Column("source", lambda p: "simulated" if p.measured is None else p.measured.source, False),
)

bucket_table: Sequence[Column] = (
    Column("bucket", lambda row: str(row[0])),
    Column("size", lambda row: format_bytes(row[1].num_bytes)),
    Column("ready (ms)", lambda row: format_ms(row[1].ready_s)),
    Column("in the queue (ms)", lambda row: format_ms(row[1].queue_s)),
    Column("under way (ms)", lambda row: format_ms(row[1].transfer_s)),
    Column("done (ms)", lambda row: format_ms(row[1].done_s)),
    Column("after backward (ms)", lambda row: format_ms(max(0.0, row[1].done_s - row[2]))),
    Column("source", lambda row: "simulated", False),
)


def grid_row(point: Any) -> dict[str, Any]:
    """One cap for JSON and CSV."""
    return {
        "cap_bytes": point.cap_bytes,
        "num_buckets": point.estimate.num_buckets,
        "predicted_s": point.estimate.step_s,
        "low_s": point.estimate.low_s,
        "high_s": point.estimate.high_s,
        "measured_s": point.measured_s,
        "predicted_exposed_s": point.estimate.exposed_s,
        "measured_exposed_s": point.exposed_s,
        "same_layout": point.same_layout,
        "source": "simulated" if point.measured is None else point.measured.source,
    }


def describe_errors(judgement: Any) -> list[str]:
    """How right the prediction was, in lines."""
    lines = []
    if judgement.mape is not None:
        tau = judgement.kendall_tau
        lines.append(
            f"predicted steps are {judgement.mape:.1%} off on average, {judgement.max_error:.1%} at most; what "
            f"communication adds, {judgement.exposed_error:.0%} of it or {judgement.exposed_step_error:.1%} of a step; "
            f"{judgement.coverage:.0%} of the measured points lie in their 90 %; rank correlation "
            f"{'unknown' if tau is None else format(tau, '.2f')}; noise {judgement.noise:.1%}"
        )
    odd = [format_bytes(point.cap_bytes) for point in judgement.points if not point.same_layout]
    if odd:
        lines.append(f"the wrapper's buckets are not the simulated ones at {', '.join(odd)}")
    return lines


def describe_doubts(doubts: dict[str, float]) -> str:
    """Which input the prediction hangs on, in a line."""
    listed = ", ".join(f"{name} {share:.1%}" for name, share in doubts.items())
    return (
        f"standard deviation of the predicted step by input: {listed}; measure {next(iter(doubts))} again to be surer"
    )


def say_verdict(tuning: Any, job: str) -> str:
    """The answer in one sentence."""
    choice, judgement = tuning.choice, tuning.judgement
    count = format_number_of(choice.estimate.num_buckets, "bucket")
    gain = judgement.gain
    if choice.is_default or (gain is None and tuning.keeps_default):
        times = [p.measured_s if p.measured_s is not None else p.estimate.step_s for p in judgement.points]
        spread = max(times) / min(times) - 1
        sizes = f"all bucket sizes lie within {spread:.1%}"
        if judgement.is_flat:
            noise = f", the noise being {judgement.noise:.1%}" if judgement.noise else ", predicted"
            return f"{job}: flat: keep the default, {count}: {sizes}{noise}"
        regret = "" if judgement.regret is None else f" (regret {judgement.regret:.1%})"
        return f"{job}: keep the default, {count}: no plan is predicted to gain more than the noise; {sizes}{regret}"
    cap = f"bucket size {format_bytes(choice.cap_bytes)}" if choice.cap_bytes else "the plan"
    if gain is None:
        return f"{job}: use {cap}, {count}: predicted {choice.gain:.1%} less than the default"
    noise = "" if gain.noise is None else f" ± {gain.noise:.1%}"
    measured = f"{1 - gain.value:.1%}{noise}"
    if not gain.is_clear:
        return (
            f"{job}: keep the default: {cap}, {count}, was predicted to take {choice.gain:.1%} less, and measured "
            f"{measured} less, within the noise"
        )
    if gain.value > 1:
        return (
            f"{job}: keep the default: {cap}, {count}, was predicted to take {choice.gain:.1%} less, and takes "
            f"{gain.value - 1:.1%}{noise} more: a wrong prediction"
        )
    return (
        f"{job}: use {cap}, {count}: it takes {measured} less than the default, measured in turns; predicted "
        f"{choice.gain:.1%}, regret {judgement.regret:.1%}"
    )


def tuning_row(tuning: Any, plan_path: str, verdict: str) -> dict[str, Any]:
    """The tuning as one JSON document. Errors and regret are fractions."""
    judgement = tuning.judgement
    best_measured = judgement.best_measured
    steps = [r for r in tuning.records if r.kind == "step"]
    times = {label: record.timing.median_s for label, record in judgement.confirmed.items()}
    answer = "default" if tuning.keeps_default else judgement.recommended
    return {
        "model": steps[0].model,
        "wrapper": steps[0].wrapper,
        "backend": steps[0].backend,
        "world_size": steps[0].world_size,
        "grid": [grid_row(point) for point in judgement.points],
        "mape": judgement.mape,
        "max_error": judgement.max_error,
        "exposed_error": judgement.exposed_error,
        "exposed_step_error": judgement.exposed_step_error,
        "coverage": judgement.coverage,
        "kendall_tau": judgement.kendall_tau,
        "flat": judgement.is_flat,
        "noise": judgement.noise,
        "best_predicted_cap_bytes": judgement.best_predicted.cap_bytes,
        "best_measured_cap_bytes": None if best_measured is None else best_measured.cap_bytes,
        "regret": judgement.regret,
        "keeps_default": tuning.keeps_default,
        "predicted_gain": tuning.choice.gain,
        "plan": plan_path,
        "plan_measured_s": times.get(answer),
        "recommended_measured_s": times.get(judgement.recommended),
        "default_measured_s": times.get("default"),
        "verdict": verdict,
    }


def plot_tuning(tuning: Any, title: str, subtitle: str, caps: Sequence[tuple[int, int, float]]) -> Figure:
    """Step time against bucket size: predicted for every cap (`caps`: low, high, seconds), measured for some."""
    sources = {point.measured.source for point in tuning.judgement.measured} or {"simulated"}
    figure, axes = new_figure(title, f"{subtitle}; predicted is simulated, points are {', '.join(sorted(sources))}")
    points = tuning.judgement.points
    least, most = min(p.cap_bytes for p in points) / 1.5, max(p.cap_bytes for p in points) * 1.5
    xs: list[float] = []
    ys: list[float] = []
    for low, high, seconds in caps:
        if high >= least and low <= most:
            xs += [max(low, least) / MIB, min(high, most) / MIB]
            ys += [seconds * 1e3] * 2
    axes.plot(xs, ys, color=COLORS[0], linewidth=1.5, label="predicted, every bucket size")
    sizes = [point.cap_bytes / MIB for point in points]
    axes.fill_between(
        sizes, [p.estimate.low_s * 1e3 for p in points], [p.estimate.high_s * 1e3 for p in points],
        color=COLORS[0], alpha=0.15, linewidth=0, label="90 % interval",
    )  # fmt: skip
    measured = [point for point in points if point.measured is not None]
    if measured:
        centers = [point.measured_s * 1e3 for point in measured]
        below = [c - p.measured.timing.p10_s * 1e3 for c, p in zip(centers, measured, strict=True)]
        above = [p.measured.timing.p90_s * 1e3 - c for c, p in zip(centers, measured, strict=True)]
        places = [point.cap_bytes / MIB for point in measured]
        axes.errorbar(
            places, centers, yerr=[[max(0.0, v) for v in below], [max(0.0, v) for v in above]], fmt="o-", capsize=3,
            color=COLORS[1], linewidth=1, label="measured: median, p10 to p90",
        )  # fmt: skip
        best = tuning.judgement.best_measured
        axes.plot(
            [best.cap_bytes / MIB], [best.measured_s * 1e3], "*", color=COLORS[1], markersize=15, label="best measured"
        )
    best = tuning.judgement.best_predicted
    axes.plot(
        [best.cap_bytes / MIB], [best.estimate.step_s * 1e3], "D", color=COLORS[2], markersize=8, label="best predicted"
    )
    axes.axhline(points[0].plain_s * 1e3, color=COLORS[6], linestyle=":", linewidth=1, label="without communication")
    axes.set_xscale("log")
    axes.set_xlabel("bucket size (MiB)")
    axes.set_ylabel("step (ms)")
    axes.legend(fontsize=8.5, frameon=False)
    return figure
