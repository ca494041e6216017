"""`tune` as a result: the answer, the table of bucket sizes, predicted and measured, and the plan.

What is concluded is in `predict.tuning`; nothing here decides anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.plan import Plan
from paceline.predict.predictor import GridPoint
from paceline.predict.search import enumerate_caps
from paceline.predict.simulate import SimulatedStep, simulate
from paceline.predict.tuning import Tuning, load_tuning
from paceline.records import StepRecord
from paceline.records.samples import Ratio
from paceline.report.plots import COLORS, new_figure, place_legend
from paceline.report.result import Result
from paceline.report.table import Column, Table
from paceline.units import MIB, format_bytes, format_ms, format_number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COMPUTE, _FIRST_LANE = 1, 2


def _interval(point: GridPoint) -> str:
    return f"{format_ms(point.estimate.low_s)} to {format_ms(point.estimate.high_s)}"


GRID = (
    Column("bucket size", lambda p: p.cap_bytes, "bytes", "cap_bytes", is_key=True),
    Column("buckets", lambda p: p.estimate.num_buckets, "count", "num_buckets", priority=2),
    Column("predicted", lambda p: p.estimate.step_s, "ms", "predicted_s", priority=5),
    Column("90 % (ms)", _interval, "text", priority=1),
    Column(None, lambda p: p.estimate.low_s, "s", "low_s"),
    Column(None, lambda p: p.estimate.high_s, "s", "high_s"),
    Column("measured", lambda p: p.measured_s, "ms", "measured_s", priority=5),
    Column("error", lambda p: p.error, lambda error: f"{error:+.1%}", priority=4),
    Column("added, predicted", lambda p: p.estimate.exposed_s, "ms", "predicted_exposed_s"),
    Column("added, measured", lambda p: p.exposed_s, "ms", "measured_exposed_s"),
    Column(None, lambda p: p.same_layout, "yes", "same_layout"),
    Column("source", lambda p: "simulated" if p.measured is None else p.measured.source, "text", "source"),
)
BUCKETS = (
    Column("bucket", lambda row: row[0], "count", "bucket", is_key=True),
    Column("size", lambda row: row[1].num_bytes, "bytes", "num_bytes", is_key=True),
    Column("ready", lambda row: row[1].ready_s, "ms", "ready_s", priority=3),
    Column(None, lambda row: row[1].launch_s, "s", "launch_s"),
    Column(None, lambda row: row[1].start_s, "s", "start_s"),
    Column("queued", lambda row: row[1].queue_s, "ms"),
    Column("in flight", lambda row: row[1].transfer_s, "ms", priority=2),
    Column("done", lambda row: row[1].done_s, "ms", "done_s", priority=3),
    Column("after backward", lambda row: max(0.0, row[1].done_s - row[2]), "ms", priority=1),
)


class TuneResult(Result):
    """`tune`: `plan` is the answer, `gain` the measured ratio of its step to the default's (None if not confirmed),
    `verdict` is "use" or "keep", `candidates` are the bucket sizes with what was predicted and measured."""

    verbs = ("tune",)

    @cached_property
    def tuning(self) -> Tuning:
        file = None if self.folder is None else self.folder / "plan.json"
        return load_tuning(self.config, self.records, file.read_text() if file is not None and file.exists() else None)

    @property
    def plan(self) -> Plan:
        return self.tuning.plan

    @property
    def gain(self) -> Ratio | None:
        return self.tuning.judgement.gain

    @property
    def verdict(self) -> str:
        return "keep" if self.tuning.keeps_default else "use"

    @property
    def candidates(self) -> Sequence[GridPoint]:
        return self.tuning.judgement.points

    @property
    def step(self) -> StepRecord:
        """A record of the run, for what they all share."""
        return next(record for record in self.records if isinstance(record, StepRecord))

    @property
    def title(self) -> str:
        settings, step = self.tuning.settings, self.step
        ranks = format_number_of(step.world_size, "rank")
        where = f"{settings.network}, {settings.network_ranks} ranks, emulated" if settings.network else ranks
        return f"{step.model} on {where}, wrapper {step.wrapper}, backend {step.backend}"

    @property
    def answer(self) -> str:
        return f"{self.title}: {describe_answer(self.tuning)}."

    @property
    def findings(self) -> Sequence[str]:
        tuning = self.tuning
        doubts = tuning.model.estimate_doubts(tuning.choice.estimate.cuts)
        listed = ", ".join(f"{name} {share:.1%}" for name, share in doubts.items())
        return [
            *describe_errors(tuning),
            f"standard deviation of the predicted step by input: {listed}; to reduce it, measure {next(iter(doubts))} "
            "again",
            *tuning.model.assumptions,
            describe_torch(tuning),
        ]

    def tables(self) -> list[Table]:
        choice = self.tuning.choice
        step = choice.estimate.step
        rows = [(number, bucket, step.backward_s) for number, bucket in enumerate(step.buckets)]
        title = "the default plan (simulated)" if choice.is_default else "the plan predicted best (simulated)"
        return [Table("grid", "step by bucket size", GRID, self.candidates), Table("buckets", title, BUCKETS, rows)]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        title = f"Step time against bucket size: {self.title}"
        return {"tuning": lambda: plot_tuning(self.tuning, title, self.run.environment.machine)}

    def files(self) -> dict[str, str | bytes]:
        tuning = self.tuning
        default = tuning.model.estimate(tuning.model.cut_like(tuning.default_plan.bucket_bytes)).step
        steps = {"the default": default}
        if not tuning.choice.is_default:
            steps["the plan predicted best"] = tuning.choice.estimate.step
        return {"plan.json": tuning.plan.to_json(), "simulated-timeline.json": render_timeline(steps)}

    @property
    def next_steps(self) -> Sequence[str]:
        if self.folder is None or self.config.get("data") is None:
            return ("paceline.DDP(model, plan=result.plan)",)
        model, ranks = f"--model {self.step.model}", f"--ranks {self.step.world_size}"
        if self.verdict == "use":
            return (f"paceline train {model} {ranks} --plan {self.folder / 'plan.json'}",)
        return (f"paceline profile phases {model} {ranks}", f"paceline tune {model} --network 1gbe --network-ranks 8")

    def to_json(self) -> dict[str, Any]:
        tuning, judgement, step = self.tuning, self.tuning.judgement, self.step
        times = {label: record.timing.median_s for label, record in judgement.confirmed.items()}
        best = judgement.best_measured
        settings = tuning.settings
        return super().to_json() | {
            "model": step.model,
            "wrapper": step.wrapper,
            "backend": step.backend,
            "world_size": settings.network_ranks if settings.network else step.world_size,
            "mape": judgement.mape,
            "max_error": judgement.max_error,
            "exposed_error": judgement.exposed_error,
            "exposed_step_error": judgement.exposed_step_error,
            "coverage": judgement.coverage,
            "kendall_tau": judgement.kendall_tau,
            "flat": judgement.is_flat,
            "noise": judgement.noise,
            "best_predicted_cap_bytes": judgement.best_predicted.cap_bytes,
            "best_measured_cap_bytes": None if best is None else best.cap_bytes,
            "regret": judgement.regret,
            "keeps_default": tuning.keeps_default,
            "predicted_gain": tuning.choice.gain,
            "plan": None if self.folder is None else str(self.folder / "plan.json"),
            "plan_measured_s": times.get("default" if tuning.keeps_default else judgement.recommended),
            "recommended_measured_s": times.get(judgement.recommended),
            "default_measured_s": times.get("default"),
            "verdict": self.answer,
        }


def describe_errors(tuning: Tuning) -> list[str]:
    """How right the prediction was, in sentences."""
    judgement = tuning.judgement
    lines = []
    if judgement.mape is not None:
        tau = judgement.kendall_tau
        lines.append(
            f"predicted steps are {judgement.mape:.1%} off on average, {judgement.max_error:.1%} at most; the time "
            f"that communication adds, by {judgement.exposed_error:.0%} of it or {judgement.exposed_step_error:.1%} "
            f"of a step; {judgement.coverage:.0%} of the measured points are in their 90 % intervals; rank correlation "
            f"{'unknown' if tau is None else format(tau, '.2f')}; noise {judgement.noise:.1%}"
        )
    odd = [format_bytes(point.cap_bytes) for point in judgement.points if not point.same_layout]
    return [*lines, f"the wrapper's buckets differ from the simulated ones at {', '.join(odd)}"] if odd else lines


def describe_answer(tuning: Tuning) -> str:
    """The answer in one sentence, without its end."""
    choice, judgement = tuning.choice, tuning.judgement
    count = format_number_of(choice.estimate.num_buckets, "bucket")
    gain = judgement.gain
    if choice.is_default or (gain is None and tuning.keeps_default):
        times = [p.measured_s if p.measured_s is not None else p.estimate.step_s for p in judgement.points]
        sizes = f"all bucket sizes lie within {max(times) / min(times) - 1:.1%}"
        if judgement.is_flat:
            noise = f", the noise being {judgement.noise:.1%}" if judgement.noise else ", predicted"
            return f"flat: keep the default, {count}: {sizes}{noise}"
        regret = "" if judgement.regret is None else f" (regret {judgement.regret:.1%})"
        return f"keep the default, {count}: no plan is predicted to gain more than the noise; {sizes}{regret}"
    cap = f"bucket size {format_bytes(choice.cap_bytes)}" if choice.cap_bytes else "the plan"
    if gain is None:
        return f"use {cap}, {count}: predicted {choice.gain:.1%} less than the default"
    noise = "" if gain.noise is None else f" ± {gain.noise:.1%}"
    predicted = f"{cap}, {count}, was predicted to take {choice.gain:.1%} less"
    if not gain.is_clear:
        return f"keep the default: {predicted}, and measured {1 - gain.value:.1%}{noise} less, within the noise"
    if gain.value > 1:
        return f"keep the default: {predicted}, and takes {gain.value - 1:.1%}{noise} more: a wrong prediction"
    return (
        f"use {cap}, {count}: it takes {1 - gain.value:.1%}{noise} less than the default, measured in turns; predicted "
        f"{choice.gain:.1%}, regret {judgement.regret:.1%}"
    )


def describe_torch(tuning: Tuning) -> str:
    """The same plan for torch's own wrapper."""
    if tuning.keeps_default and tuning.settings.wrapper == "torch":
        return "for torch's own wrapper: DistributedDataParallel(model), without options"
    try:
        arguments = tuning.plan.as_torch_kwargs()
    except ConfigError as error:
        return f"no arguments for torch's wrapper: {error}"
    listed = ", ".join(f"{name}={value}" for name, value in arguments.items())
    needs = " (torch 2.13 or newer)" if "bucket_cap_mb_list" in arguments else ""
    return f"for torch's own wrapper: DistributedDataParallel(model, {listed}){needs}"


def plot_tuning(tuning: Tuning, title: str, subtitle: str) -> Figure:
    """Step time against bucket size: predicted for every cap, measured for some."""
    judgement, model = tuning.judgement, tuning.model
    sources = {point.measured.source for point in judgement.measured if point.measured} or {"simulated"}
    figure, axes = new_figure(title, f"{subtitle}; predicted is simulated, points are {', '.join(sorted(sources))}")
    points = judgement.points
    least, most = min(p.cap_bytes for p in points) / 1.5, max(p.cap_bytes for p in points) * 1.5
    xs: list[float] = []
    ys: list[float] = []
    for interval in enumerate_caps(model.job.sizes):
        if interval.high_bytes >= least and interval.low_bytes <= most:
            xs += [max(interval.low_bytes, least) / MIB, min(interval.high_bytes, most) / MIB]
            ys += [simulate(model.job, interval.cuts, model.costs).step_s * 1e3] * 2
    axes.plot(xs, ys, color=COLORS[0], linewidth=1.5, label="predicted, every bucket size")
    sizes = [point.cap_bytes / MIB for point in points]
    axes.fill_between(
        sizes, [p.estimate.low_s * 1e3 for p in points], [p.estimate.high_s * 1e3 for p in points],
        color=COLORS[0], alpha=0.15, linewidth=0, label="90 % interval",
    )  # fmt: skip
    measured = [(p.cap_bytes / MIB, p.measured.timing) for p in points if p.measured is not None]
    if measured:
        centers = [timing.median_s * 1e3 for _, timing in measured]
        below = [max(0.0, c - timing.p10_s * 1e3) for c, (_, timing) in zip(centers, measured, strict=True)]
        above = [max(0.0, timing.p90_s * 1e3 - c) for c, (_, timing) in zip(centers, measured, strict=True)]
        axes.errorbar(
            [size for size, _ in measured], centers, yerr=[below, above], fmt="o-", capsize=3, color=COLORS[1],
            linewidth=1, label="measured: median, p10 to p90",
        )  # fmt: skip
        place, least_ms = min(zip([size for size, _ in measured], centers, strict=True), key=lambda pair: pair[1])
        axes.plot([place], [least_ms], "*", color=COLORS[1], markersize=15, label="best measured")
    best = judgement.best_predicted
    axes.plot(
        [best.cap_bytes / MIB], [best.estimate.step_s * 1e3], "D", color=COLORS[2], markersize=8, label="best predicted"
    )
    axes.axhline(points[0].plain_s * 1e3, color=COLORS[6], linestyle=":", linewidth=1, label="without communication")
    axes.set_xscale("log")
    axes.set_xlabel("bucket size (MiB)")
    axes.set_ylabel("step (ms)")
    place_legend(figure, axes)
    return figure


def render_timeline(steps: Mapping[str, SimulatedStep]) -> str:
    """Simulated steps as a trace for Perfetto: a process for each, its phases on one track, each bucket on another."""
    events: list[dict[str, Any]] = []

    def name_track(pid: int, tid: int, kind: str, name: str) -> None:
        events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}})

    def add_span(pid: int, tid: int, name: str, start_s: float, length_s: float) -> None:
        if length_s > 0:
            times = {"ts": round(start_s * 1e6, 3), "dur": round(length_s * 1e6, 3)}
            events.append({"ph": "X", "name": name, "pid": pid, "tid": tid, **times})

    for pid, (name, step) in enumerate(steps.items(), 1):
        name_track(pid, 0, "process_name", f"{name} (simulated)")
        name_track(pid, _COMPUTE, "thread_name", "this rank")
        begin = step.before_s
        add_span(pid, _COMPUTE, "data and forward", 0.0, begin)
        add_span(pid, _COMPUTE, "backward", begin, step.backward_s)
        add_span(pid, _COMPUTE, "exposed communication", begin + step.backward_s, step.over_s - step.backward_s)
        add_span(pid, _COMPUTE, "optimizer", begin + step.over_s, step.after_s)
        for number, bucket in enumerate(step.buckets):
            lane, size = _FIRST_LANE + number, format_bytes(bucket.num_bytes)
            name_track(pid, lane, "thread_name", f"bucket {number}, {size}")
            add_span(pid, lane, f"gathered, {size}", begin + bucket.ready_s, bucket.launch_s - bucket.ready_s)
            add_span(pid, lane, f"queued, {size}", begin + bucket.launch_s, bucket.start_s - bucket.launch_s)
            add_span(pid, lane, f"in flight, {size}", begin + bucket.start_s, bucket.done_s - bucket.start_s)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=None) + "\n"
