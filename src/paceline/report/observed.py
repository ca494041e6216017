"""Results for a user's own program, traced (`predict --trace`) or observed: buckets, bottleneck, and code to paste."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from paceline.errors import RecordError
from paceline.plan import TORCH_CAP_BYTES, Plan, plan_by_cuts, plan_like_torch
from paceline.predict.accounting import (
    RankRow,
    account_steps,
    average_data,
    average_parts,
    build_rank_row,
    estimate_mean,
    find_slow_part,
    list_waits,
)
from paceline.predict.advice import (
    REMOVABLE,
    WORTH,
    blame_changing_rank,
    blame_data,
    blame_host,
    blame_messages,
    blame_rank,
    rank_findings,
    remove_recording,
)
from paceline.predict.causes import Evidence, find_causes, find_critical
from paceline.predict.networks import AssumedFabric, Fabric, find_network, find_networks
from paceline.predict.predictor import Prediction
from paceline.predict.race import Interval, Limit, Race, judge, judge_race
from paceline.predict.search import PLATEAU, choose_caps, enumerate_caps, estimate_caps, find_cuts
from paceline.predict.traced_job import TracedJob
from paceline.predict.traces import Lateness, find_late
from paceline.predict.whatif import describe_scenario, simulate_what_if
from paceline.records import CapTimeRecord, RankRecord, StepRecord, TracedStepRecord
from paceline.records.findings import Finding, list_card
from paceline.records.samples import find_noise, group_by
from paceline.records.steps import RACED
from paceline.records.training import list_ranks, pick_like_last
from paceline.report import table
from paceline.report.plots import COLORS, Drawings, Figure, build_panels, new_figure, place_legend
from paceline.report.prediction_rows import (
    CAPS,
    MESSAGES,
    RACE,
    TRACED,
    WHAT_IF,
    compare_plans,
    describe_rows,
    draw_caps,
    format_cap,
    get_saved,
    name_buckets,
)
from paceline.report.result import Result
from paceline.report.table import SIMULATED, Column, Table, raw_columns
from paceline.units import MIB, format_bytes, format_duration, format_ms, format_number_of

_NUM_CAPS = 8
# Steps that vary by more than this fraction were disturbed by other load.
_NOISY = 0.15
_MOST_WORKERS = 16  # per rank, to suggest
_COMPUTES = 0.8  # share of a core above which loading a batch computes rather than waits
_OFTEN = 0.8  # fraction of steps in which a rank must be last to be called late
_MOST_MESSAGES = 12  # last messages shown on the terminal; the CSV has all


class TracedResult(Result):
    """Result of `predict --trace`. `best` is the bucket size to use and `now` are the traced buckets, with their
    predicted steps. `verdict` is "use", "keep" (no bucket size is predicted to save more than 1 %), "flat" (all
    intervals are within 1 %, or `limit` shows that none can save as much) or "undecided" (the best prediction saves
    more than 1 %, but its interval includes 0). `rows` are bucket sizes,
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
        self.traced, self.measured = TracedJob(self.only(TracedStepRecord)), self.only(CapTimeRecord)
        if self.measured:  # the profiler slows down the traced steps
            job, model = self.traced.fit.job, self.traced.predictor
            changes = [one.timing.center_s / model.predict(job.cut(one.cap_bytes)).step_s for one in self.measured]
            step_s = statistics.geometric_mean(changes) * self.traced.step_s
            self.traced = TracedJob(remove_recording(self.only(TracedStepRecord), step_s))
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
        # A model that does not reproduce the traced step cannot bound the gain.
        self.limit = Limit() if self.traced.is_off else self.model.limit_gain(self._now_cuts)
        ratios, ratio = [row.ratios[TRACED] for row in self.rows], self.candidate.ratios[TRACED]
        self.verdict = judge(ratios, _is_sure(ratio), self.limit).replace("default", "keep")
        if self.verdict == "undecided" and ratio.value >= 1 - PLATEAU:
            self.verdict = "keep"  # the best prediction is not worth a comparison
        self.best = self.candidate if self.verdict == "use" else self.now
        self.elsewhere = self._predict_elsewhere()

    def build_row(self, label: str, cuts: tuple[int, ...]) -> Prediction:
        row, own = self.model.predict(cuts), self.config.get("cap_bytes", 0)
        low, high = min(self.traced.layout), max(self.traced.layout)
        is_beyond = 2 * min(row.bucket_bytes) < low or max(row.bucket_bytes) > 2 * high
        cap_bytes = round_cap(*self._caps[cuts]) if cuts in self._caps else 0
        cap_bytes = TORCH_CAP_BYTES if label == "default" else own if own and cuts == self._now_cuts else cap_bytes
        ratio = self.model.compare(row, self._base)
        if self.traced.is_off and cuts != self._now_cuts:  # widen by the model's error on the traced step
            off = abs(self.traced.fit.error)
            ratio = replace(ratio, low=max(0.0, ratio.low - off), high=ratio.high + off)
        return replace(
            row,
            label=label,
            cap_bytes=cap_bytes,
            ratios={TRACED: ratio},
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
        """The recommended buckets: the traced ones unless others are better. Uses one cap per bucket, which torch 2.13
        accepts, if that is better and equally certain. Gradients are in ready order."""
        cuts, label = self.best.cuts, "traced"
        if self.verdict == "use":
            free, label = find_cuts(self.job, self.costs), "from a trace"
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
        other = self.candidate
        saves = "{} would save {:.1%} (90 %: {:.1%} to {:.1%})".format(name_buckets(other), *get_saved(other))
        saves = "no other bucket size is predicted to be faster" if other.cuts == now.cuts else saves
        reason = {
            "keep": f"no bucket size saves more than 1 %: {saves}",
            "flat": str(self.limit) if self.limit.is_nothing else f"all bucket sizes are within 1 %: {saves}",
            "undecided": f"{saves}, but this is uncertain",
        }[self.verdict]
        added = f"communication adds {format_ms(max(0.0, now.exposed_s))} of {format_ms(now.step_s)} ms"
        return f"{where}: {kept}{'' if self.verdict == 'keep' else f' ({self.verdict})'}: {reason}; {added}. Simulated."

    @cached_property
    def rows(self) -> list[Prediction]:
        """Bucket sizes over the whole range, each with different buckets: first the traced ones, then a selection that
        includes torch's default and the best."""
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
        why = "excluded because they have different buckets or are missing on some ranks"
        without = f"; {left_out} {why}" if left_out else ""
        off = f"{abs(traced.fit.error):.1%} {'longer' if traced.fit.error > 0 else 'shorter'}"
        free = self.model.predict(self.model.cut_like(plan.bucket_bytes))
        spread = f"median ±{self.model.noise:.1%}{', assumed' if traced.is_short else ''}"
        lines = [
            f"traced: {format_number_of(count, 'step')} of rank {traced.rank}{without}; {format_ms(traced.step_s)} ms "
            f"each ({spread}), with {format_ms(traced.exposed_s)} ms of communication after backward",
            f"self-check: with the traced buckets, the simulated step is {off} than the traced one; message times are "
            f"multiplied by {traced.fit.factor:.2f} to match it",
            *traced.notes,
            f"{self._describe_overhead()}; copies are assumed to cost the same for every bucket size",
            "interval: 90 % (spread of the steps, assumptions, and a model error of 10 % of exposed communication)",
        ]
        if free.step_s < (1 - PLATEAU) * self.best.step_s:
            lines.append(
                f"with one cap per bucket ({len(plan.buckets)}; bucket_cap_mb_list of torch 2.13), a step takes "
                f"{format_ms(free.step_s)} ms; the list is in the JSON and in `result.plan`"
            )
        if traced.spread > _NOISY:
            lines.append(f"doubtful: the traced steps vary by {traced.spread:.0%}; trace again on an idle machine")
        if traced.is_off:
            lines.append(
                f"doubtful: even scaling message times by {traced.fit.factor:g}, the maximum, does not reproduce the "
                "traced step; trace more steps, on all ranks"
            )
        if any(row.doubt for row in self.rows):
            sizes = [format_bytes(size) for size in (min(traced.layout), max(traced.layout))]
            lines.append(
                f"extrapolated: traced messages range from {sizes[0]} to {sizes[1]}; trace another bucket size as well"
            )
        if self.elsewhere:
            assumed = [line for fabric in self.fabrics for line in fabric.assumptions]
            assumed += describe_scenario(self.job, self.fabrics, known=traced.rank_costs)
            lines += describe_rows(self.elsewhere, assumed, "elsewhere")
        return lines

    def _describe_overhead(self) -> str:
        if not self.measured:
            return "assumed: all times include the profiler's overhead"
        steps = ", ".join(f"{format_ms(m.timing.center_s)} ms at {format_bytes(m.cap_bytes)}" for m in self.measured)
        return f"fitted: all times are scaled to the steps measured without the profiler ({steps})"

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
        asked = () if self.measured else ("paceline predict --trace FILE... --measured 25MiB=724ms",)
        return () if self.elsewhere else (*asked, "paceline predict --trace FILE... --network 10gbe --ranks 8,64")


def _is_sure(ratio: Interval) -> bool:
    return ratio.high < 1 and ratio.value < 1 - PLATEAU


def round_cap(low_bytes: int, high_bytes: int) -> int:
    """The roundest cap between two: the cap with the fewest digits in MiB, torch's unit."""
    for digits in range(1, 12):
        scale = 10 ** (digits - 1 - math.floor(math.log10(high_bytes / MIB)))
        cap_bytes = int(math.floor(high_bytes / MIB * scale) / scale * MIB)
        if cap_bytes >= low_bytes:
            return cap_bytes
    return high_bytes


def plot_traced(result: TracedResult) -> Figure:
    """Plot the predicted step time for every cap, with intervals, and the traced steps as points."""
    title = f"Step time against bucket size: the traced job on {result.traced.where}"
    figure, axes = new_figure(title, f"simulated from {len(result.traced.steps)} traced steps; band: 90 %")
    rows = sorted((row for row in result.rows if row.cap_bytes), key=lambda row: row.cap_bytes)
    points, best = estimate_caps(result.job, result.costs).points, result.candidate
    points = tuple(point for point in points if point.high_bytes >= rows[0].cap_bytes) or points[-1:]
    ends = best.cap_bytes, best.step_s
    draw_caps(axes, points, lambda point: point.step_s, ends, result.job.local_s, rows)
    seconds, where = [step.step_s * 1e3 for step in result.traced.steps], max(result.traced.layout) / MIB
    axes.plot([where] * len(seconds), seconds, ".", color=COLORS[1], alpha=0.5, label="traced steps (measured)")
    axes.axhline(result.traced.step_s * 1e3, color=COLORS[1], lw=1, label="traced: median")
    axes.set(xlim=(rows[0].cap_bytes / MIB / 1.2, None), ylim=(0, None), ylabel="step (ms)")
    place_legend(figure, axes)
    return figure


# -- attached programs -------------------------------------------------------------------------------------------------

# The parts of a step in a row of metrics, and the maximum number of ranks to draw: those with the longest steps.
PARTS, _MOST_RANKS = ("step_s", "data_wait_s", "forward_s", "backward_s", "optimizer_s", "exposed_comm_s"), 16
# Label of the program's own buckets in a plan comparison.
NOW = "as it is"
_ASKED = {"network": None, "ranks": None, "inside": None, "ranks_per_node": None, "algorithm": "auto"}
# Names of the parts of a step in sentences.
_PARTS = {
    "data_s": "data", "forward_s": "forward", "backward_s": "backward", "waiting_s": "waiting for other ranks",
    "exposed_s": "exposed communication", "optimizer_s": "optimizer", "rest_s": "the rest",
}  # fmt: skip
_PART_COLORS = (COLORS[4], COLORS[0], COLORS[5], COLORS[3], COLORS[1], COLORS[2], "#dddddd")


WHERE = (
    Column("rank", "rank", "number", "rank", is_key=True),
    Column("step", "step_s", "ms", "step_s", is_key=True),
    Column("data", "data_s", "ms", "data_s", priority=3),
    Column("forward", "forward_s", "ms", "forward_s", priority=2),
    Column("backward", "backward_s", "ms", "backward_s", priority=2),
    Column("waiting", "waiting_s", "ms", "waiting_s", priority=3),
    Column("exposed", "exposed_s", "ms", "exposed_s", priority=3),
    Column("optimizer", "optimizer_s", "ms", "optimizer_s", priority=1),
    Column("rest", "rest_s", "ms", "rest_s", priority=1),
    Column("source", lambda row: "measured", key="source", priority=-1),
)


def _order_columns(rows: Sequence[RankRow]) -> list[Column]:
    """The columns of `WHERE`. A narrow terminal keeps those of the largest parts of a step."""

    def is_large(name: str) -> bool:
        return any((getattr(row, name) or 0.0) > row.step_s / 5 for row in rows)

    return [replace(one, priority=4) if one.key in _PARTS and is_large(one.key) else one for one in WHERE]


_GAIN = raw_columns(gain="saves.0", gain_low="saves.1", gain_high="saves.2")


class AttachedResult(Result):
    """Result of `profile`, `tune` and `watch` of a command. `step_s` is the median unrecorded step, in GPU time if
    there is a GPU; `rows` breaks it down by rank, and `bottleneck` is what limits it. `exposed_s` and `idle_s` (the
    time a GPU waits for the host) come from the recorded steps.

    `buckets` is the prediction from the recorded steps, None if nothing was sent, and `race` compares the plans that
    the program ran with. `verdict` comes from `race` if there is one, otherwise from `buckets`. `rival` is the bucket
    size to compare with the current one, and `saves` the fraction of a step that it saves, with bounds. `cap_mib` is
    the recommended `bucket_cap_mb`, None to keep the current buckets.
    """

    json_columns = (
        *raw_columns("step_s", "exposed_s", "idle_s", "verdict", "steps.world_size", "steps.backend", "steps.device"),
        *raw_columns("lines", bucket_cap_mb="cap_mib", bucket_cap_mb_list="cap_list", bottleneck="bottleneck.kind"),
        *raw_columns(num_steps="steps.timing.count"),
        Column(None, lambda result: result.race is None, key="is_predicted"),
        Column(None, lambda result: [one.to_json() for one in result.bottlenecks], key="bottlenecks"),
        *raw_columns("card", "step_noise"),
        Column(None, lambda result: result.busy is not None, key="is_inconclusive"),
    )

    def _derive(self) -> None:
        timed = self.only(StepRecord)
        self.steps = next(record for record in timed if record.note != RACED)
        self.waits = self.steps.phase("data_wait")
        by_rank = zip(*self.steps.timing.seconds, strict=True)
        self._ranks_s = [statistics.median(times) for times in by_rank]
        recorded = remove_recording(self.only(TracedStepRecord), max(self._ranks_s))
        self.rows = self._list_rows(recorded)
        self.step_s = self.critical.step_s
        self.busy = next((one for one in self.doubts if one.kind == "inconclusive"), None)
        self.buckets: TracedResult | None = None
        self.doubt, self.note, self.race, self.exposed_s = "", "", None, None
        self.verdict, self.saves, self.cap_mib = "", (0.0, 0.0, 0.0), None
        if any(record.messages for record in recorded):
            try:
                config = _ASKED | {"cap_bytes": self.steps.cap_bytes}
                self.buckets = TracedResult(replace(self.run, config=config, records=tuple(recorded), warnings=()))
            except RecordError as error:
                self.doubt = f"no prediction: {error}"
        if self.buckets is not None:
            self.exposed_s, self.verdict = self.critical.exposed_s, self.buckets.verdict
            self.rival = self.buckets.candidate
            self.saves = get_saved(self.rival)
            if self.busy is not None and self.verdict == "use":
                self.verdict = "undecided"
            self.cap_mib = self.buckets.best.cap_mib if self.verdict == "use" else None
        self.raced = {record.label: record for record in timed if record.note == RACED}
        if self.raced:
            turns_s = {label: record.turns_s for label, record in self.raced.items()}
            self.race = judge_race(turns_s, NOW, Limit() if self.buckets is None else self.buckets.limit)
            self.verdict, self.saves = self.race.verdict, self.race.gain.saved
            self.cap_mib = self.config["plans"][self.race.winner]
        self.idle_s = self._find_idle(recorded)
        self.step_noise = self._estimate_noise()
        found = self._list_findings(recorded)
        if self.busy is not None:  # no gain is claimed, so rank uncertain ones as well
            found = (replace(one, gain_interval_s=None) for one in found)
        ranked = rank_findings(found, self.step_s, self.step_noise)
        self.bottlenecks = ranked if self.busy is None else [one.withdraw(self.busy) for one in ranked]
        self.bottleneck = self.bottlenecks[0]

    def _estimate_noise(self) -> float:
        """The relative uncertainty of the median step. Excludes waits for data, which vary because a loader may deliver
        several batches at once."""
        both = zip(self.steps.timing.seconds, self.waits.seconds, strict=True)
        own_s = [max(0.0, max(step_s - wait_s for step_s, wait_s in zip(*row, strict=True))) for row in both]
        return 2 * find_noise(own_s) / math.sqrt(len(own_s))

    @property
    def _since(self) -> int:
        """The first step after a lasting change of the step time; 0 without a change."""
        return max((one.since for one in self.only(RankRecord)), default=0)

    @property
    def _change(self) -> float:
        """How much longer a step takes since then, as a fraction; negative if it takes less."""
        before_s = max((one.before_s for one in self.only(RankRecord)), default=0.0)
        return max(self._ranks_s) / before_s - 1 if before_s else 0.0

    @property
    def critical(self) -> RankRow:
        """The row of the rank that limits the step: the one that waits least for the others."""
        return find_critical(self.rows)

    def _list_findings(self, recorded: Sequence[TracedStepRecord]) -> Iterator[Finding]:
        waits = [row.data_s for row in self.rows]
        yield self._blame_loader(waits)
        cores = self.run.environment.cores or 1
        causes = list(find_causes(Evidence(self.rows, self.only(RankRecord), recorded, self.idle_s, cores)))
        steps = self._list_waits(recorded)
        late = find_late([one] for one in steps)
        if late is not None:
            yield from self._blame_late(late, steps, waits, causes)
        yield blame_host(self.idle_s, self.step_s)
        yield from causes
        saved_s = 0.0
        verdicts = ("use",) if self.busy is None else ("use", "undecided")
        if self.buckets is not None and (self.race or self.buckets).verdict in verdicts:
            saved_s, low_s, high_s = (self.step_s * share for share in self.saves)
            interval_s = (low_s, high_s) if math.isfinite(low_s) else None  # infinite after too few rounds
            certainty = "estimated" if self.race is None else "measured"
            sent = f"the step sends {format_number_of(self.buckets.now.num_buckets, 'bucket')}"
            saves = f"{sent}; other bucket sizes would save {format_duration(saved_s)}"
            yield Finding(
                "buckets", saves, "change the bucket size", saved_s, certainty,
                gain_interval_s=interval_s, line=self._torch_line,
            )  # fmt: skip
        # Messages that can be removed would not be sent in another way.
        exposed_s = (self.exposed_s or 0.0) - sum(one.gain_s for one in causes if one.kind in REMOVABLE)
        # Changing buckets takes only one argument, so it comes first if it hides much of the communication.
        if self.buckets is not None and exposed_s > 0 and saved_s < max(WORTH * self.step_s, exposed_s / 3):
            yield from blame_messages(
                self.buckets.model, self.buckets.now.cuts, self.steps.backend, exposed_s, self.step_s,
                on_host=self.buckets.traced.is_on_host, is_ours=self.steps.wrapper == "paceline",
                fixed_s=self._find_fixed(exposed_s), spread=self._find_spread(recorded),
            )  # fmt: skip

    def _blame_late(
        self, late: Lateness, steps: Sequence[Mapping[int, float]], waits: Sequence[float], causes: Sequence[Finding]
    ) -> Iterator[Finding]:
        """The finding for one late rank or for a changing late rank. A slightly slower core only leads to a note."""
        is_one, rank = late.share > _OFTEN, self.critical.rank
        slow = find_slow_part(self.only(TracedStepRecord), late.rank if is_one else None)
        # A rank may be late because it waits for its data.
        own_s = waits[late.rank] - min(waits) if late.rank < len(waits) else 0.0
        if slow is not None and slow.is_core and self.steps.device != "cuda":
            if is_one and late.mean_s - own_s > WORTH * self.step_s:
                who = f"rank {late.rank} is {format_duration(late.mean_s)} late"
                self.note = f"{who}, in all of its operators, because its core is {slow.slower:.2f} times as slow"
        elif is_one:
            share = 1 - slow.diffuse if slow is not None and slow.is_named else 1.0
            late_s = [statistics.fmean(s for r, s in one.items() if r != late.rank) - one[late.rank] for one in steps]
            gain_s = share * max(0.0, late.mean_s - own_s)
            interval_s = estimate_mean([share * (s - own_s) for s in late_s], gain_s)
            uneven = (one for one in causes if one.kind == "uneven batches" and one.rank == late.rank)
            others = max(1, len(self.rows) - 1) / len(self.rows)  # equal batches save this fraction of the delay
            if all(2 * one.gain_s < others * gain_s for one in uneven):  # otherwise the batches explain it
                yield blame_rank(late, gain_s, interval_s, slow, self._since if self._change > 0 else 0)
        else:
            # The last rank of a step waits only for the transfer itself.
            excess_s = [one[rank] - min(one.values()) for one in steps if rank in one]
            yield from blame_changing_rank(excess_s, late, self.step_s, slow)

    def _blame_loader(self, waits: Sequence[float]) -> Finding:
        """The finding for the rank that loses the most time to its data loader, without transfers of ready batches."""
        ranks = {one.rank: one for one in self.only(RankRecord)}
        shares = [1 - ranks[place].delivered_share if place in ranks else 1.0 for place in range(len(waits))]
        lost_s = [share * wait_s for share, wait_s in zip(shares, waits, strict=True)]
        place = lost_s.index(data_s := max(lost_s))
        rank = None if min(lost_s) > data_s / 2 else self.rows[place].rank
        interval_s = estimate_mean([shares[place] * row[place] for row in self.waits.seconds], data_s)
        return blame_data(data_s, self.step_s, rank, self._count_workers(ranks.get(place), data_s), interval_s)

    def _count_workers(self, loader: RankRecord | None, data_s: float) -> int:
        """The number of workers that load a batch as fast as a step computes. If loading computes, too, at most one per
        spare core. Suggests a change: persistent workers come before more of them."""
        compute_s = max(self.step_s - data_s, self.step_s / _MOST_WORKERS)
        if loader is not None and loader.num_workers:
            if not loader.are_workers_persistent:
                return loader.num_workers
            # As long as steps wait for data, all workers are busy.
            return max(loader.num_workers + 1, math.ceil(loader.num_workers * self.step_s / compute_s))
        needed = math.ceil(data_s / compute_s)
        share = max(1, (self.run.environment.cores or 1) // self.steps.world_size)
        return max(1, min(needed, share) if loader is None or loader.cpu_share > _COMPUTES else needed)

    def _find_spread(self, recorded: Sequence[TracedStepRecord]) -> tuple[float, float]:
        """The confidence interval of the mean exposed communication, as multiples of that mean."""
        steps = account_steps([step for step in recorded if step.messages]).get(self.critical.rank, ())
        times = [parts["exposed_s"] for parts in steps]
        low_s, high_s = (times and estimate_mean(times, mean_s := statistics.fmean(times))) or (1.0, 1.0)
        return (low_s / mean_s, high_s / mean_s) if times and mean_s > 0 and len(times) > 1 else (1.0, 1.0)

    def _find_fixed(self, exposed_s: float) -> float:
        """The part of a step that does not depend on the batch, or 0 if it is at most half of the part that does."""
        row = self.critical
        fixed_s = exposed_s + (row.optimizer_s or 0.0)
        return fixed_s if fixed_s > ((row.forward_s or 0.0) + (row.backward_s or 0.0)) / 2 else 0.0

    def _list_waits(self, recorded: Sequence[TracedStepRecord]) -> Sequence[Mapping[int, float]]:
        """How long each rank waits for the others in each step with known waits."""
        return list_waits(recorded)

    def _find_idle(self, recorded: Sequence[TracedStepRecord]) -> float:
        """The longest idle GPU time of any rank, excluding waits for data, which are a separate bottleneck."""
        waits = {row.rank: row.data_s for row in self.rows}
        by_rank = group_by(recorded, lambda step: step.rank)
        idle = (statistics.median(s.idle_s for s in steps) - waits.get(rank, 0.0) for rank, steps in by_rank.items())
        return max([0.0, *idle])

    def _list_rows(self, recorded: Sequence[TracedStepRecord]) -> list[RankRow]:
        parts, shares = account_steps([step for step in recorded if step.messages]), self._data_shares
        names = [field for field in _PARTS if field not in ("data_s", "rest_s")]
        rows = []
        for rank, step_s in enumerate(self._ranks_s):
            mean = average_parts(parts.get(rank, ()))
            known = {name: mean[name] for name in names} if mean else {}
            rows.append(build_rank_row(rank, step_s, shares[rank] * step_s, known, mean.get("rest_s", 0.0)))
        return rows

    @property
    def _data_shares(self) -> list[float]:
        return average_data(self.steps.timing, self.waits)

    @cached_property
    def cap_list(self) -> list[float]:
        """One cap per bucket (`bucket_cap_mb_list` of torch 2.13), if that is predicted to be better than a single
        cap."""
        plan = None if self.buckets is None or self.cap_mib is None else self.buckets.plan
        if plan is None or not plan.fits_torch or "bucket_cap_mb_list" not in plan.as_torch_kwargs():
            return []
        ends = ((bucket.num_bytes - bucket.pieces[-1].num_bytes + 1, bucket.num_bytes) for bucket in plan.buckets)
        return [round_cap(*each) / MIB for each in ends]

    @property
    def _torch_line(self) -> str:
        return f"DistributedDataParallel(model, bucket_cap_mb={format_cap(self.cap_mib or self.rival.cap_mib or 0.0)})"

    @cached_property
    def lines(self) -> dict[str, str]:
        """Code to paste, by framework."""
        if self.cap_mib is None:
            return {}
        cap, lines = f"bucket_cap_mb={format_cap(self.cap_mib)}", {"torch": self._torch_line}
        if self.cap_list:
            caps = f"bucket_cap_mb_list=[{', '.join(map(format_cap, self.cap_list))}]"
            lines["torch 2.13, predicted"] = f"DistributedDataParallel(model, {caps})"
        return lines | {
            "transformers": f"TrainingArguments(..., ddp_{cap})",
            "Accelerate": f"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({cap})])",
            "Lightning": f"Trainer(strategy=DDPStrategy({cap}))",
        }

    @property
    def verdict_text(self) -> str:
        """The verdict as a sentence, the evidence and the remedy. Doubts about the machine come first."""
        verdict = self.bottleneck.verdict
        if self.busy is not None and self.bottleneck.certainty != "measured":  # that interval contains the noise
            is_healthy = self.bottleneck.kind == "healthy"
            most = "no bottleneck was found" if is_healthy else f"the likely bottleneck is {self.bottleneck.subject}"
            verdict = f"no conclusion: {self.busy.evidence}; {most}"
        return f"{verdict[:1].upper()}{verdict[1:]}. {self.bottleneck.sentences}"

    @property
    def headline(self) -> str:
        return f"{self.verdict_text} {self.summary}"

    @property
    def card(self) -> dict[str, str]:
        """The answer in four lines, or that the program failed."""
        verdict = self.verdict_text.partition(". ")[0]
        if self.failure:
            code = self.failure.rpartition(" ")[2]
            failed = f"The program failed with exit code {code}: its own output says why"
            return {"verdict": failed, "why": f"until then: {verdict[:1].lower()}{verdict[1:]}"}
        return self.bottleneck.card | {"verdict": verdict}

    @property
    def answer(self) -> str:
        return "\n".join([*list_card(self.card), self.summary])

    @property
    def summary(self) -> str:
        """The step time on the critical rank and the verdict on other bucket sizes."""
        steps, row = self.steps, self.critical
        ranks = format_number_of(steps.world_size, "rank")
        text = f"A step of {steps.model} on {ranks} ({steps.backend}, {steps.device}) takes {format_ms(row.step_s)} ms"
        if self._since and self._change:
            text += f" since step {self._since} ({abs(self._change):.0%} {'more' if self._change > 0 else 'less'})"
        if row.backward_s is not None:
            shares = {name: getattr(row, name) / row.step_s for name in _PARTS}
            parts = ", ".join(f"{_PARTS[name]} {share:.0%}" for name, share in shares.items() if share >= 0.005)
            text += f" on rank {row.rank}, which waits least: {parts}"
        return f"{text}. {self._describe_buckets()}".strip()

    @property
    def _is_worth_comparing(self) -> bool:
        """Whether other buckets might save enough to measure them."""
        return self.saves[0] >= WORTH

    def _describe_buckets(self) -> str:
        if self.buckets is None or (self.busy is not None and self.race is None):
            return ""
        race, gain = self.race, _format_gain(self.saves)
        basis = "predicted, 90 %"
        if race is not None:
            basis = f"measured over {format_number_of(race.num_rounds, 'alternating round')}, 95 %"
        if self.verdict == "use":
            return f"With bucket_cap_mb={format_cap(self.cap_mib or 0)} a step is {gain} faster ({basis})."
        if self.verdict == "flat" and self.buckets.limit.is_nothing and not (race and race.is_level):
            return f"Flat: {self.buckets.limit} (predicted, 90 %)."
        if self.verdict == "flat":
            return f"Flat: all other bucket sizes are within 1 % ({basis})."
        if self.verdict in ("keep", "default"):
            return f"Keep the current buckets: no others save more than 1 % ({basis})."
        if not self._is_worth_comparing and race is None:
            return ""
        if race is None:
            name = name_buckets(self.rival)
            return f"Undecided: {name} may save {gain} ({basis}); measure it with `paceline tune --`."
        return f"Undecided after {race.num_rounds} rounds; about {race.rounds_to_decide} more would decide."

    @property
    def findings(self) -> Sequence[str]:
        lines = [f"also: {one.text}{f' ({one.gain})' if one.gain_s else ''}" for one in self.bottlenecks[1:]]
        if (host := self.steps.host) is not None:
            spread = f"{format_ms(host.p10_s)} to {format_ms(host.p90_s)} ms"
            lines.append(f"clock: times are from the GPU; the host takes {spread} per step and may run ahead")
        if self.buckets is not None:
            lines += self.buckets.findings[1:]  # the first line has one rank's times with profiler overhead
        return [*lines, *filter(None, (self.note, self.doubt))]

    def tables(self) -> list[Table]:
        found = [Table("where", "time per step", _order_columns(self.rows), self.rows)]
        if self.buckets is None:
            return found
        if self.race is not None:
            rows = self._list_race(self.race)
            title = "plan comparison; baseline: your current buckets; ratios: medians of adjacent turns"
            found.append(Table("race", title, RACE, rows))
        caps, *others = self.buckets.tables()
        return [*found, replace(caps, rows=[self._anchor(row) for row in caps.rows]), *others]

    def _anchor(self, row: Prediction) -> Prediction:
        """Scale a predicted step to the measured one. Only exposed communication depends on the buckets."""
        assert self.buckets is not None
        row = row.stretch(self.step_s / self.buckets.now.step_s)
        return replace(row, exposed_s=max(0.0, (self.exposed_s or 0.0) + row.step_s - self.step_s))

    def _list_race(self, race: Race) -> list[Prediction]:
        assert self.buckets is not None
        # The machine may differ between runs, so predictions are scaled to the step with the current buckets in the
        # plan comparison.
        rows, factor = [], self.raced[NOW].timing.median_s / self.buckets.now.step_s
        for label, record in self.raced.items():
            row = self.buckets.build_row(label, self.buckets.model.cut_like(record.bucket_bytes))
            rows.append(replace(row.stretch(factor), measured=record))
        return compare_plans(race, rows)

    def figures(self) -> Drawings:
        return {"step": lambda: plot_parts(self.rows, self.machine)} | (
            {} if self.buckets is None else self.buckets.figures()
        )

    @cached_property
    def step_rows(self) -> list[dict[str, Any]]:
        """One row per step, as in training metrics. For a saved run: the timed steps, counted from 1."""
        by_step = zip(self.steps.timing.seconds, self.waits.seconds, strict=True)
        return [build_row(number, *times) for number, times in enumerate(by_step, 1)]

    def page_figures(self) -> Drawings:
        first, *others = self.figures().items()
        return dict([first, ("ranks", lambda: plot_ranks(self.step_rows, self.machine)), *others])

    @property
    def next_steps(self) -> Sequence[str]:
        """The commands that follow from the verdict."""
        again = f"-- {shlex.join(self.config['command'])}" if "command" in self.config else ""
        if self.busy is not None and self.race is None:
            return [f"paceline profile {again}  # on a quiet machine"] if again else []
        if self.bottleneck.kind == "buckets":
            return [f"{line}  # {where}" for where, line in self.lines.items()]
        if self.bottleneck.line:
            return [self.bottleneck.line]
        is_open = self.verdict == "undecided" and self.race is None and self._is_worth_comparing
        return [f"paceline tune {again}"] if is_open and again else []

    @property
    def failure(self) -> str:
        return str(self.config.get("failure") or "") or super().failure

    def to_json(self) -> dict[str, Any]:
        predicted = {} if self.buckets is None else self.buckets.to_json()
        return predicted | super().to_json() | (table.build_row(_GAIN, self) if self.verdict else {})


def build_row(step: int, *times: Sequence[float]) -> dict[str, Any]:
    """A row of metrics: the first one of `PARTS` on each rank and its maximum over ranks."""
    ranks = {name: list(of) for name, of in zip(PARTS, times, strict=False)}
    return {"step": step, "ranks": ranks} | {name: max(of) for name, of in ranks.items()}


def _format_gain(gain: tuple[float, float, float]) -> str:
    return f"{gain[0]:.1%} ({gain[1]:.1%} to {gain[2]:.1%})"


def plot_parts(rows: Sequence[RankRow], subtitle: str) -> Figure:
    """Plot the parts of a step as one stacked bar per rank. With many ranks, shows those with the longest steps."""
    shown = sorted(sorted(rows, key=lambda row: -row.step_s)[:_MOST_RANKS], key=lambda row: row.rank)
    figure, axes = new_figure("Where a step's time goes, by rank", f"{subtitle}; measured")
    places, ends = range(len(shown)), [0.0] * len(shown)
    for number, (field, name) in enumerate(_PARTS.items()):
        widths = [max(0.0, 1e3 * (getattr(row, field) or 0.0)) for row in shown]
        if any(width > 1e-3 * sum(ends) + 1e-6 for width in widths):
            axes.barh(places, widths, 0.7, ends, label=name, color=_PART_COLORS[number], ec="white", lw=0.5)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    axes.set_yticks(places, [f"rank {row.rank}" for row in shown])
    axes.set(xlabel="ms", ylim=(len(shown) - 0.4, -0.6))
    width, _ = figure.get_size_inches()
    figure.set_size_inches(width, 1.7 + 0.42 * len(shown))
    place_legend(figure, axes)
    return figure


def plot_ranks(rows: Sequence[dict[str, Any]], subtitle: str) -> Figure:
    """Plot the times of every step on each rank, from rows of metrics. A line's `gid` names its row field."""
    rows = pick_like_last(rows)
    names = [name for name in PARTS if name in rows[-1]]
    panels = [name.removesuffix("_s").replace("_", " ").replace("comm", "communication") for name in names]
    figure, grid = build_panels(panels, "Step times by rank", f"{subtitle}; measured")
    steps = [row["step"] for row in rows]
    taken = list(zip(*(list_ranks(row, "step_s") for row in rows), strict=True))
    for axes, name in zip(grid, names, strict=True):
        ranks = list(zip(*(list_ranks(row, name) for row in rows), strict=True))
        for rank in sorted(sorted(range(len(taken)), key=lambda rank: -sum(taken[rank]))[:_MOST_RANKS]):
            times = [math.nan if seconds is None else 1e3 * seconds for seconds in ranks[rank]]
            color, place = COLORS[rank % len(COLORS)], f"ms:ranks.{name}.{rank}"
            axes.plot(steps, times, lw=0.9, alpha=0.8, color=color, label=f"rank {rank}", gid=place)
        axes.set_xlabel("step", fontsize=9)
    # The first step builds buckets and warms caches; scaling to it would flatten all others.
    grid[0].set_ylim(0, 1.05e3 * (max(max(times[1:] or times) for times in taken) or 1e-3))
    grid[0].set_ylabel("ms")
    return figure
