"""Result of `predict --trace`: the best bucket size for a traced job, and its predicted cost elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from paceline.plan import TORCH_CAP_BYTES, Plan, plan_by_cuts, plan_like_torch
from paceline.predict.networks import AssumedFabric, Fabric, find_network, find_networks
from paceline.predict.predictor import Prediction
from paceline.predict.race import Interval, Limit, judge
from paceline.predict.search import PLATEAU, choose_caps, enumerate_caps, estimate_caps, find_cuts
from paceline.predict.traced_job import TracedJob
from paceline.predict.whatif import describe_scenario, simulate_what_if
from paceline.records.steps import TracedStepRecord
from paceline.report.plots import COLORS, Drawings, Figure, new_figure, place_legend
from paceline.report.prediction_rows import (
    CAPS,
    MESSAGES,
    TRACED,
    WHAT_IF,
    describe_rows,
    draw_caps,
    get_saved,
    name_buckets,
)
from paceline.report.result import Result
from paceline.report.table import SIMULATED, Column, Table, raw_columns
from paceline.units import MIB, format_bytes, format_ms, format_number_of

_NUM_CAPS = 8
# Steps that vary by more than this share were disturbed by other load.
_NOISY = 0.15
_MOST_MESSAGES = 12  # last messages shown on the terminal; the CSV has all


class TracedResult(Result):
    """Result of `predict --trace`. `best` is the bucket size to use and `now` are the traced buckets, with their
    predicted steps. `verdict` is "use", "keep" (no bucket size saves more than 1 %, given its interval), "flat" (all
    intervals are within 1 %, or `limit` shows that none can save as much) or "undecided". `rows` are bucket sizes,
    `elsewhere` are networks and rank counts."""

    json_columns = (
        *raw_columns("verdict", best_bucket_cap_mb="best.cap_mib", best_cap_bytes="best.cap_bytes"),
        *raw_columns(step_s="best.step_s", traced_step_s="traced.step_s", traced_exposed_s="traced.exposed_s"),
        *(
            Column(None, f"best.ratios.{TRACED}.saved.{place}", key=key)
            for place, key in enumerate(("gain", "gain_low", "gain_high"))
        ),
        *raw_columns(self_check="traced.fit.error", factor="traced.fit.factor"),
        *raw_columns("traced.world_size", "traced.backend", "traced.device", "traced.rank"),
        Column(None, lambda result: len(result.traced.steps), key="num_steps"),
        Column(None, lambda result: result.plan.as_torch_kwargs() if result.plan.fits_torch else {}, key="plan"),
        SIMULATED,
    )

    def _derive(self) -> None:
        self.traced = TracedJob(self.only(TracedStepRecord))
        self.model = self.traced.predictor
        self.job, self.costs = self.model.job, self.model.costs
        self._caps = enumerate_caps(self.job.sizes)
        default = plan_like_torch(self.job.gradients, range(len(self.job.gradients)))
        self._now_cuts, self._default_cuts = map(self.model.cut_like, (self.traced.layout, default.bucket_bytes))
        self._base = self.model.predict(self._now_cuts)
        self.is_default = self._now_cuts == self._default_cuts
        self.now = self.build_row("traced, default" if self.is_default else "traced", self._now_cuts)
        choice = self.model.choose(self._now_cuts, only_caps=True)
        self.candidate = self.build_row("best", choice.best.cuts)
        # A model that does not reproduce the traced step gives no limit.
        self.limit = Limit() if self.traced.is_off else self.model.limit_gain(self._now_cuts)
        ratios = [row.ratios[TRACED] for row in self.rows]
        self.verdict = judge(ratios, _is_sure(self.candidate.ratios[TRACED]), self.limit).replace("default", "keep")
        if self.verdict == "use" and self.traced.is_off:
            self.verdict = "undecided"
        self.best = self.candidate if self.verdict == "use" else self.now
        self.elsewhere = self._predict_elsewhere()

    def build_row(self, label: str, cuts: tuple[int, ...]) -> Prediction:
        row = self.model.predict(cuts)
        low, high = min(self.traced.layout), max(self.traced.layout)
        is_beyond = 2 * min(row.bucket_bytes) < low or max(row.bucket_bytes) > 2 * high
        return replace(
            row,
            label=label,
            cap_bytes=round_cap(*self._caps[cuts]) if cuts in self._caps else 0,
            ratios={TRACED: self.model.compare(row, self._base)},
            doubt="beyond the trace" if is_beyond else "",
        )

    @cached_property
    def fabrics(self) -> list[Fabric]:
        config, per_node = self.config, self.config["ranks_per_node"] or 1
        if config["network"] is None:
            given = config["ranks_per_node"] or 0
            return [self.traced.build_fabric(config["algorithm"], given)] if config["ranks"] else []
        inside, algorithm = find_network(config["inside"] or "nvlink"), config["algorithm"]
        return [AssumedFabric(network, inside, per_node, algorithm) for network in find_networks(config["network"])]

    def _predict_elsewhere(self) -> list[Prediction]:
        ranks = self.config["ranks"] or [self.traced.world_size]
        draws, known = [one.job for one in self.model.draws], self.traced.rank_costs
        found = (simulate_what_if(self.job, draws, fabric, ranks, known=known) for fabric in self.fabrics)
        return [row for rows in found for row in rows]

    @cached_property
    def plan(self) -> Plan:
        """The recommended buckets: the traced ones if they stay, otherwise the best ones. One cap per bucket, which
        torch 2.13 accepts, is used if that is better and as certain. Gradients are in ready order."""
        cuts, label = self.best.cuts, "traced"
        if self.verdict == "use":
            free, label = tuple(find_cuts(self.job, self.costs.curve, self.costs.launch_s)), "from a trace"
            other = self.build_row(label, free)
            if other.step_s < self.best.step_s and _is_sure(other.ratios[TRACED]):
                cuts, label = free, "free, from a trace"
        return plan_by_cuts(self.job.gradients, range(len(self.job.gradients)), cuts, label)

    @property
    def answer(self) -> str:
        now, best, (gain, low, high) = self.now, self.best, get_saved(self.best)
        where = f"The traced job on {self.traced.where}"
        if self.verdict == "use":
            return (
                f"{where}: use {name_buckets(best)} "
                f"({format_number_of(best.num_buckets, 'bucket')}): a step takes "
                f"{format_ms(best.step_s)} ms, {gain:.1%} less than with the traced buckets (90 %: "
                f"{low:.1%} to {high:.1%}). Simulated."
            )
        kept = f"keep its {format_number_of(now.num_buckets, 'bucket')}{', the default' if self.is_default else ''}"
        other = self.find_rival()
        saves = "{} would save {:.1%} (90 %: {:.1%} to {:.1%})".format(name_buckets(other), *get_saved(other))
        reason = {
            "keep": f"no bucket size saves more than 1 %: {saves}",
            "flat": str(self.limit) if self.limit.is_nothing else f"all bucket sizes are within 1 %: {saves}",
            "undecided": f"{saves}, which is not certain",
        }[self.verdict]
        added = f"communication adds {format_ms(max(0.0, now.exposed_s))} of {format_ms(now.step_s)} ms"
        return f"{where}: {kept}{'' if self.verdict == 'keep' else f' ({self.verdict})'}: {reason}; {added}. Simulated."

    def find_rival(self) -> Prediction:
        """The alternative bucket size with the largest possible saving."""
        return max(self.rows[1:], key=lambda row: get_saved(row)[2], default=self.now)

    @cached_property
    def rows(self) -> list[Prediction]:
        """Bucket sizes over the whole range, each with different buckets: the traced ones first, then others that
        include torch's default and the best."""
        rows = {self.candidate.cuts: self.candidate} | {self._now_cuts: self.now}
        caps = (TORCH_CAP_BYTES, *choose_caps(self.job.sizes, _NUM_CAPS))
        for cuts in (self._default_cuts, *map(self.job.cut, caps)):
            if cuts not in rows:
                rows[cuts] = self.build_row("default" if cuts == self._default_cuts else "", cuts)
        rows = {self._now_cuts: self.now} | rows
        first, *others = rows.values()
        return [first, *sorted(others, key=lambda row: row.cap_bytes)]

    @property
    def findings(self) -> Sequence[str]:
        traced, plan = self.traced, self.plan
        count, left_out = len(traced.steps), traced.num_left_out
        without = f"; {left_out} excluded because of other buckets or missing ranks" if left_out else ""
        off = f"{abs(traced.fit.error):.1%} {'longer' if traced.fit.error > 0 else 'shorter'}"
        free = self.model.predict(self.model.cut_like(plan.bucket_bytes))
        spread = f"median ±{self.model.noise:.1%}{', assumed' if traced.is_short else ''}"
        lines = [
            f"traced: {format_number_of(count, 'step')} of rank {traced.rank}{without}; {format_ms(traced.step_s)} ms "
            f"each ({spread}), with {format_ms(traced.exposed_s)} ms of communication after backward",
            f"self-check: with the traced buckets, the simulated step is {off} than the traced one; message times are "
            f"multiplied by {traced.fit.factor:.2f} to match it",
            *traced.notes,
            "assumed: all times include the profiler's overhead; copies cost the same for every bucket size",
            "interval: 90 %, from the spread of the steps, the assumptions, and 10 % of exposed communication",
        ]
        if free.step_s < (1 - PLATEAU) * self.best.step_s:
            lines.append(
                f"with one cap per bucket ({len(plan.buckets)}; bucket_cap_mb_list of torch 2.13), a step takes "
                f"{format_ms(free.step_s)} ms: the JSON and `result.plan` have the list"
            )
        if traced.spread > _NOISY:
            lines.append(f"doubtful: the traced steps vary by {traced.spread:.0%}; trace again on an idle machine")
        if traced.is_off:
            lines.append(
                f"doubtful: even message times multiplied by {traced.fit.factor:g}, the limit, do not reproduce the "
                "traced step; trace more steps, and all ranks"
            )
        if any(row.doubt for row in self.rows):
            sizes = [format_bytes(size) for size in (min(traced.layout), max(traced.layout))]
            lines.append(
                f"beyond the trace: its messages have {sizes[0]} to {sizes[1]}; trace another bucket size as well"
            )
        if self.elsewhere:
            assumed = [line for fabric in self.fabrics for line in fabric.assumptions]
            assumed += describe_scenario(self.job, self.fabrics, known=traced.rank_costs)
            lines += describe_rows(self.elsewhere, assumed, "elsewhere")
        return lines

    def tables(self) -> list[Table]:
        step = self.traced.steps[-1]
        messages = [(number, message, step.backward_s) for number, message in enumerate(step.messages)]
        found = [Table("caps", "step time by bucket size", CAPS, self.rows)]
        if self.elsewhere:
            found.append(
                Table("elsewhere", "other networks and rank counts at their best bucket size", WHAT_IF, self.elsewhere)
            )
        title, shown = "messages of the last traced step", messages[-_MOST_MESSAGES:]
        return [*found, Table("messages", title, MESSAGES, messages, shown=shown)]

    def figures(self) -> Drawings:
        return {"caps": lambda: plot_traced(self)}

    @property
    def next_steps(self) -> Sequence[str]:
        if self.verdict == "use":
            return (f"DistributedDataParallel(model, {name_buckets(self.best)})",)
        return () if self.elsewhere else ("paceline predict --trace FILE... --network 10gbe --ranks 8,64",)


def _is_sure(ratio: Interval) -> bool:
    return ratio.high < 1 and ratio.value < 1 - PLATEAU


def round_cap(low_bytes: int, high_bytes: int) -> int:
    """The roundest cap between the two: the one with the fewest digits in MiB, torch's unit."""
    for digits in range(1, 12):
        scale = 10 ** (digits - 1 - math.floor(math.log10(high_bytes / MIB)))
        cap_bytes = int(math.floor(high_bytes / MIB * scale) / scale * MIB)
        if cap_bytes >= low_bytes:
            return cap_bytes
    return high_bytes


def plot_traced(result: TracedResult) -> Figure:
    """Predicted step time for every cap, with intervals, and the traced steps as points."""
    title = f"Step time against bucket size: the traced job on {result.traced.where}"
    figure, axes = new_figure(title, f"simulated from {len(result.traced.steps)} traced steps; band: 90 %")
    rows = sorted((row for row in result.rows if row.cap_bytes), key=lambda row: row.cap_bytes)
    points, best = estimate_caps(result.job, result.costs).points, result.candidate
    points = tuple(point for point in points if point.high_bytes >= rows[0].cap_bytes)
    ends = best.cap_bytes, best.step_s
    draw_caps(axes, points, lambda point: point.step.step_s, ends, result.job.local_s, rows)
    seconds, where = [step.step_s * 1e3 for step in result.traced.steps], max(result.traced.layout) / MIB
    axes.plot([where] * len(seconds), seconds, ".", color=COLORS[1], alpha=0.5, label="traced steps (measured)")
    axes.axhline(result.traced.step_s * 1e3, color=COLORS[1], lw=1, label="traced: median")
    axes.set(xlim=(rows[0].cap_bytes / MIB / 1.2, None), ylim=(0, None), ylabel="step (ms)")
    place_legend(figure, axes)
    return figure
