"""`tune` as a result: the answer, the table of bucket sizes, predicted and measured, and the plan.

What is concluded is in `predict.tuning`; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.plan import Plan
from paceline.predict.search import estimate_caps
from paceline.predict.tuning import GridPoint, Tuning, load_tuning
from paceline.records import StepRecord
from paceline.records.samples import Ratio
from paceline.report.plots import COLORS, draw_line, new_figure, place_legend
from paceline.report.predictions import draw_caps, mark_best
from paceline.report.result import Result, describe_job
from paceline.report.table import Column, Table, raw_columns
from paceline.units import MIB, format_bytes, format_ms, format_number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Below this share of a step, nothing is gained by measuring an input again.
_LEAST_DOUBT = 0.001
GRID = (
    Column("bucket size", "cap_bytes", "bytes", "cap_bytes", is_key=True),
    Column("buckets", "estimate.num_buckets", "count", "num_buckets", priority=2),
    Column("predicted", "estimate.step_s", "ms", "predicted_s", priority=5),
    Column("90 % (ms)", lambda p: f"{format_ms(p.estimate.low_s)} to {format_ms(p.estimate.high_s)}", str, priority=1),
    Column("measured", "measured_s", "ms", "measured_s", priority=5),
    Column("error", "error", "{:+.1%}".format, priority=4),
    Column("predicted exposed", "estimate.exposed_s", "ms", "predicted_exposed_s"),
    Column("measured exposed", "exposed_s", "ms", "measured_exposed_s"),
    *raw_columns("estimate.low_s", "estimate.high_s", "same_layout"),
    Column("source", lambda p: "simulated" if p.measured is None else p.measured.source, key="source"),
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


class TuneResult(Result):
    """`tune`: `plan` is the answer, `gain` the measured ratio of its step to the default's (None if not confirmed),
    `verdict` is "use" or "keep", `candidates` are the bucket sizes with what was predicted and measured."""

    @cached_property
    def tuning(self) -> Tuning:
        file = None if self.folder is None else self.folder / "plan.json"
        return load_tuning(self.config, self.records, file.read_text() if file is not None and file.exists() else None)

    @property
    def plan(self) -> Plan:
        return self.tuning.plan

    @property
    def gain(self) -> Ratio | None:
        return self.tuning.gain

    @property
    def verdict(self) -> str:
        return "keep" if self.tuning.keeps_default else "use"

    @property
    def candidates(self) -> Sequence[GridPoint]:
        return self.tuning.points

    @property
    def step(self) -> StepRecord:
        """A record of the run, for what they all share."""
        return self.only(StepRecord)[0]

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
        first, most = next(iter(doubts.items()))
        listed = ", ".join(f"{name} {share:.1%}" for name, share in doubts.items())
        advice = f"; to reduce it, measure {first} again" if most >= _LEAST_DOUBT else ""
        return [
            *describe_errors(tuning),
            f"standard deviation of the predicted step by input: {listed}{advice}",
            f"contention: {tuning.model.costs.contention.basis}",
            describe_torch(tuning),
        ]

    def tables(self) -> list[Table]:
        choice = self.tuning.choice
        step = choice.estimate.step
        rows = [(number, bucket, step.backward_s) for number, bucket in enumerate(step.buckets)]
        title = "the default plan" if choice.is_default else "the plan predicted best"
        return [Table("grid", "step by bucket size", GRID, self.candidates), Table("buckets", title, BUCKETS, rows)]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        title = f"Step time against bucket size: {self.title}"
        return {"tuning": lambda: plot_tuning(self.tuning, title, self.run.environment.machine)}

    def files(self) -> dict[str, str | bytes]:
        return {"plan.json": self.tuning.plan.to_json()}

    @property
    def next_steps(self) -> Sequence[str]:
        if self.folder is None or self.config.get("data") is None:
            return ("paceline.DDP(model, plan=result.plan)",)
        job = describe_job({"model": self.step.model, "wrapper": self.step.wrapper} | self.config)
        # An emulated network has one rank here: its plan is for the ranks of the real one, which a launcher starts.
        ranks = "" if self.tuning.settings.network else f" --ranks {self.step.world_size}"
        if self.verdict == "use":
            return (f"paceline train {job}{ranks} --plan {self.folder / 'plan.json'}",)
        return (f"paceline tune {job}{' --ranks 2' if not ranks else ' --network 1gbe --network-ranks 8'}",)

    def to_json(self) -> dict[str, Any]:
        tuning, step = self.tuning, self.step
        times = {label: record.timing.median_s for label, record in tuning.confirmed.items()}
        best = tuning.best_measured
        return super().to_json() | tuning.scores | {
            **{name: getattr(step, name) for name in ("model", "wrapper", "backend")},
            **{name: getattr(tuning, name) for name in ("noise", "regret")},
            "world_size": tuning.settings.network_ranks if tuning.settings.network else step.world_size,
            "flat": tuning.is_flat,
            "best_predicted_cap_bytes": tuning.best_predicted.cap_bytes,
            "best_measured_cap_bytes": None if best is None else best.cap_bytes,
            "keeps_default": tuning.keeps_default,
            "predicted_gain": tuning.choice.gain,
            "plan": None if self.folder is None else str(self.folder / "plan.json"),
            "plan_measured_s": times.get("default" if tuning.keeps_default else tuning.recommended),
            "recommended_measured_s": times.get(tuning.recommended),
            "default_measured_s": times.get("default"),
            "verdict": self.answer,
        }  # fmt: skip


def describe_errors(tuning: Tuning) -> list[str]:
    """How right the prediction was, in sentences."""
    lines = []
    if tuning.measured:
        scores = tuning.scores

        def say(name: str, how: str) -> str:
            return "unknown" if (score := scores[name]) is None else format(score, how)

        lines.append(
            f"predicted steps are {say('mape', '.1%')} off on average, {say('max_error', '.1%')} at most; the time "
            f"that communication adds, by {say('exposed_error', '.0%')} of it or {say('exposed_step_error', '.1%')} of "
            f"a step; {say('coverage', '.0%')} of the measured points are in their 90 % intervals; rank correlation "
            f"{say('kendall_tau', '.2f')}; noise {tuning.noise:.1%}"
        )
    odd = [format_bytes(point.cap_bytes) for point in tuning.points if not point.same_layout]
    return [*lines, f"the wrapper's buckets differ from the simulated ones at {', '.join(odd)}"] if odd else lines


def describe_answer(tuning: Tuning) -> str:
    """The answer in one sentence, without its end."""
    choice, gain = tuning.choice, tuning.gain
    count = format_number_of(choice.estimate.num_buckets, "bucket")
    if choice.is_default or (gain is None and tuning.keeps_default):
        sure = f"the noise being {tuning.noise:.1%}" if tuning.noise else "predicted"
        sizes = f"all bucket sizes lie within {tuning.spread:.1%}, {sure}"
        if tuning.is_flat:
            return f"flat: keep the default, {count}: {sizes}"
        regret = "" if tuning.regret is None else f" (regret {tuning.regret:.1%})"
        return f"keep the default, {count}: no plan is predicted to gain more than the noise; {sizes}{regret}"
    cap = f"bucket size {format_bytes(choice.cap_bytes)}" if choice.cap_bytes else "the plan"
    predicted = f"predicted {choice.gain:.1%} less than the default"
    if gain is None:
        return f"use {cap}, {count}: {predicted}"
    noise = "" if gain.noise is None else f" ± {gain.noise:.1%}"
    took = f"took {abs(1 - gain.value):.1%}{noise} {'less' if gain.value <= 1 else 'more'}, measured in turns"
    if gain.is_clear and gain.value <= 1:
        return f"use {cap}, {count}: {predicted}, and {took}; regret {tuning.regret:.1%}"
    why = "a wrong prediction" if gain.is_clear else "within the noise"
    return f"keep the default: {cap}, {count}, was {predicted}, and {took}: {why}"


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
    points = tuning.points
    sources = {point.measured.source for point in points if point.measured} or {"simulated"}
    figure, axes = new_figure(title, f"{subtitle}; predicted is simulated, points are {', '.join(sorted(sources))}")
    least, most = min(p.cap_bytes for p in points) / 1.5, max(p.cap_bytes for p in points) * 1.5
    caps = estimate_caps(tuning.model.job, tuning.model.costs).points
    caps = tuple(cap for cap in caps if cap.high_bytes >= least and cap.low_bytes <= most)
    draw_caps(axes, caps, [cap.step.step_s for cap in caps], "predicted, every bucket size")
    axes.set(xlim=(least / MIB, most / MIB), ylabel="step (ms)")
    low, high = [p.estimate.low_s * 1e3 for p in points], [p.estimate.high_s * 1e3 for p in points]
    sizes = [point.cap_bytes / MIB for point in points]
    axes.fill_between(sizes, low, high, color=COLORS[0], alpha=0.15, linewidth=0, label="90 % interval")
    timings = [(p.cap_bytes / MIB, p.measured.timing) for p in points if p.measured is not None]
    measured = [(size, *(1e3 * s for s in (t.median_s, t.p10_s, t.p90_s))) for size, t in timings]
    if measured:
        draw_line(axes, 1, measured, "measured: median, p10 to p90", marker="o", lw=1)
        best_ms, size = min((median_ms, size) for size, median_ms, *_ in measured)
        axes.plot([size], [best_ms], "*", color=COLORS[1], markersize=15, label="best measured")
    best = tuning.best_predicted
    mark_best(axes, best.cap_bytes, best.estimate.step_s, tuning.model.plain_s, "without communication")
    place_legend(figure, axes)
    return figure
