"""Results of attaching to a user's program: where a step's time goes, its bottleneck, and code to paste."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from paceline.errors import RecordError
from paceline.plan import TORCH_CAP_BYTES
from paceline.predict.advice import blame_buckets
from paceline.predict.bottlenecks import find_late_rank, list_bottlenecks, remove_recording
from paceline.predict.predictor import Prediction
from paceline.predict.race import Limit, Race, judge_race
from paceline.predict.traces import Lateness
from paceline.records import StepRecord, TracedStepRecord
from paceline.records.samples import group_by
from paceline.records.steps import RACED
from paceline.records.training import list_ranks, pick_like_last
from paceline.report import table
from paceline.report.plots import COLORS, Drawings, Figure, build_panels
from paceline.report.prediction_rows import RACE, compare_plans, get_saved, name_buckets
from paceline.report.result import Result
from paceline.report.table import Column, Table, raw_columns
from paceline.report.trace_predictions import TracedResult, round_cap
from paceline.units import MIB, format_ms, format_number_of

# Subject of the verdict for each kind of bottleneck.
_WORDS = {
    "data": "Data loading", "late rank": "A late rank", "buckets": "The bucket size",
    "batch": "The small batch", "network": "Exposed communication", "host": "The host",
}  # fmt: skip
# The parts of a step in a row of metrics. With more ranks than this, those with the longest steps are drawn.
PARTS, _MOST_RANKS = ("step_s", "data_wait_s", "forward_s", "backward_s", "optimizer_s", "exposed_comm_s"), 16
# Label of the program's own buckets in a plan comparison.
NOW = "as it is"
_ASKED = {"network": None, "ranks": None, "inside": None, "ranks_per_node": None, "algorithm": "auto"}


@dataclass(frozen=True)
class RankRow:
    """Where the time of a step goes on one rank: medians in seconds, None if not recorded."""

    rank: int
    step_s: float
    data_s: float
    forward_s: float | None = None
    backward_s: float | None = None
    exposed_s: float | None = None
    after_s: float | None = None


WHERE = (
    Column("rank", "rank", "number", "rank", is_key=True),
    Column("step", "step_s", "ms", "step_s", is_key=True),
    Column("data", "data_s", "ms", "data_s", priority=3),
    Column("forward", "forward_s", "ms", "forward_s", priority=2),
    Column("backward", "backward_s", "ms", "backward_s", priority=2),
    Column("exposed", "exposed_s", "ms", "exposed_s", priority=3),
    Column("optimizer, rest", "after_s", "ms", "after_s", priority=1),
    Column("source", lambda row: "measured", key="source", priority=-1),
)


_GAIN = raw_columns(gain="saves.0", gain_low="saves.1", gain_high="saves.2")


class AttachedResult(Result):
    """Result of `profile`, `tune` and `watch` of a command. `step_s` is the median of the unrecorded steps, by the
    GPU's clock if there is one; `rows` shows where it goes on each rank, and `bottleneck` what bounds it. `exposed_s`
    and `idle_s` (the time in which a GPU waits for the host) are measured in the recorded steps.

    `buckets` is the prediction from the recorded steps, None if nothing was sent, and `race` compares the plans that
    the program ran with. `verdict` is that of `race`, otherwise that of `buckets`. `rival` is the bucket size to
    compare with the current one, and `saves` the share of a step that it saves, with its bounds. `cap_mib` is the
    recommended `bucket_cap_mb`, None to keep the current buckets.
    """

    json_columns = (
        *raw_columns("step_s", "exposed_s", "idle_s", "verdict", "steps.world_size", "steps.backend", "steps.device"),
        *raw_columns("lines", bucket_cap_mb="cap_mib", bucket_cap_mb_list="cap_list", bottleneck="bottleneck.kind"),
        *raw_columns(num_steps="steps.timing.count"),
        Column(None, lambda result: result.race is None, key="is_predicted"),
        Column(None, lambda result: [one.to_json() for one in result.bottlenecks], key="bottlenecks"),
    )

    def _derive(self) -> None:
        timed = self.only(StepRecord)
        self.steps = next(record for record in timed if record.note != RACED)
        self.step_s, self.waits = self.steps.timing.median_s, self.steps.phase("data_wait")
        recorded = remove_recording(self.only(TracedStepRecord), self.step_s)
        self.buckets: TracedResult | None = None
        self.doubt, self.race, self.exposed_s = "", None, None
        self.verdict, self.saves, self.cap_mib = "", (0.0, 0.0, 0.0), None
        if any(record.messages for record in recorded):
            try:
                self.buckets = TracedResult(replace(self.run, config=_ASKED, records=tuple(recorded), warnings=()))
            except RecordError as error:
                self.doubt = f"no prediction: {error}"
        if self.buckets is not None:
            self.exposed_s, self.verdict = self.buckets.traced.exposed_s, self.buckets.verdict
            self.rival = self.buckets.candidate if self.verdict == "use" else self.buckets.find_rival()
            self.saves = get_saved(self.rival)
            self.cap_mib = self.buckets.best.cap_mib if self.verdict == "use" else None
        self.raced = {record.label: record for record in timed if record.note == RACED}
        if self.raced:
            turns_s = {label: record.turns_s for label, record in self.raced.items()}
            self.race = judge_race(turns_s, NOW, Limit() if self.buckets is None else self.buckets.limit)
            self.verdict, self.saves = self.race.verdict, self.race.gain.saved
            self.cap_mib = self.config["plans"][self.race.winner]
        self.rows = self._list_rows(recorded)
        saved = None
        if self.buckets is not None and self.verdict in ("use", "undecided"):  # also what is likely but not certain
            cap = self.cap_mib or self.rival.cap_mib or TORCH_CAP_BYTES / MIB
            gain_s, low_s, high_s = (self.step_s * share for share in self.saves)
            interval_s = (low_s, high_s) if math.isfinite(low_s) else None  # not after few rounds
            certainty = "estimated" if self.race is None else "measured"
            saved = blame_buckets(f"bucket_cap_mb={_write_cap(cap)}", gain_s, interval_s, certainty)
        late, messages = self._find_late(recorded), self._find_messages()
        self.idle_s = self._find_idle(recorded)
        self.bottlenecks = list_bottlenecks(self.step_s, self.waits, late, saved, messages, self.idle_s)
        self.bottleneck = self.bottlenecks[0]

    def _find_late(self, recorded: Sequence[TracedStepRecord]) -> Lateness | None:
        return find_late_rank(recorded)

    def _find_idle(self, recorded: Sequence[TracedStepRecord]) -> float:
        """Of the rank with the most idle GPU, without the wait for data, which is a separate bottleneck."""
        waits = {row.rank: row.data_s for row in self.rows}
        by_rank = group_by(recorded, lambda step: step.rank)
        idle = (statistics.median(s.idle_s for s in steps) - waits.get(rank, 0.0) for rank, steps in by_rank.items())
        return max([0.0, *idle])

    def _find_messages(self) -> tuple[float, float, float] | None:
        if self.buckets is None:
            return None
        best, curve = self.buckets.best, self.buckets.costs.curve
        took_s = sum(curve.estimate_s(bucket.num_bytes) for bucket in best.step.buckets)
        job = self.buckets.job  # the part that grows with the batch, without the optimizer
        computes_s = max(0.0, job.before_s + job.backward_s - self.waits.median_s)
        return took_s, max(0.0, best.exposed_s), computes_s

    def _list_rows(self, recorded: Sequence[TracedStepRecord]) -> list[RankRow]:
        by_rank, rows = group_by((step for step in recorded if step.messages), lambda step: step.rank), []
        for rank in range(self.steps.timing.num_ranks):
            both = (self.steps.timing, self.waits)
            step_s, data_s = (statistics.median(row[rank] for row in samples.seconds) for samples in both)
            parts: list[float] = []
            if own := by_rank.get(rank):
                names = ("before_s", "backward_s", "exposed_s", "after_s")
                parts = [statistics.median(getattr(step, name) for step in own) for name in names]
                parts[0] = max(0.0, parts[0] - data_s)
            rows.append(RankRow(rank, step_s, data_s, *parts))
        return rows

    @cached_property
    def cap_list(self) -> list[float]:
        """One cap per bucket (`bucket_cap_mb_list` of torch 2.13), if that is predicted to be better than a single
        cap."""
        plan = None if self.buckets is None or self.cap_mib is None else self.buckets.plan
        if plan is None or not plan.fits_torch or "bucket_cap_mb_list" not in plan.as_torch_kwargs():
            return []
        ends = ((bucket.num_bytes - bucket.pieces[-1].num_bytes + 1, bucket.num_bytes) for bucket in plan.buckets)
        return [round_cap(*each) / MIB for each in ends]

    @cached_property
    def lines(self) -> dict[str, str]:
        """Code to paste, by framework."""
        if self.cap_mib is None:
            return {}
        cap = f"bucket_cap_mb={_write_cap(self.cap_mib)}"
        lines = {"torch": f"DistributedDataParallel(model, {cap})"}
        if self.cap_list:
            caps = f"bucket_cap_mb_list=[{', '.join(map(_write_cap, self.cap_list))}]"
            lines["torch 2.13, predicted"] = f"DistributedDataParallel(model, {caps})"
        return lines | {
            "transformers": f"TrainingArguments(..., ddp_{cap})",
            "Accelerate": f"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({cap})])",
            "Lightning": f"Trainer(strategy=DDPStrategy({cap}))",
        }

    @property
    def verdict_text(self) -> str:
        """One sentence that names the bottleneck, and one that says what helps."""
        if self.bottleneck.kind not in _WORDS:
            return "There is no bottleneck besides compute."
        return f"{_WORDS[self.bottleneck.kind]} is the bottleneck: {self.bottleneck.sentences}"

    @property
    def headline(self) -> str:
        return f"{self.verdict_text} {self.answer}"

    @property
    def answer(self) -> str:
        steps, ranks = self.steps, format_number_of(self.steps.world_size, "rank")
        text = f"A step of {steps.model} on {ranks} ({steps.backend}, {steps.device}) takes {format_ms(self.step_s)} ms"
        if self.exposed_s is not None:
            text += f", of which {format_ms(self.exposed_s)} ms ({self.exposed_s / self.step_s:.0%}) is exposed "
            text += "communication"
        first, rest = self.bottleneck.text[:1].upper(), self.bottleneck.text[1:]
        return f"{text}. Bottleneck: {self.bottleneck.kind}. {first}{rest}. {self._describe_buckets()}".strip()

    def _describe_buckets(self) -> str:
        if self.buckets is None:
            return ""
        race, gain = self.race, _format_gain(self.saves)
        basis = "predicted, 90 %"
        if race is not None:
            basis = f"measured over {format_number_of(race.num_rounds, 'alternating round')}, 95 %"
        if self.verdict == "use":
            return f"With bucket_cap_mb={_write_cap(self.cap_mib or 0)} a step is {gain} faster ({basis})."
        if self.verdict == "flat" and self.buckets.limit.is_nothing and not (race and race.is_level):
            return f"Flat: {self.buckets.limit} (predicted, 90 %)."
        if self.verdict == "flat":
            return f"Flat: all other bucket sizes are within 1 % ({basis})."
        if self.verdict in ("keep", "default"):
            return f"Keep the current buckets: no others save more than 1 % ({basis})."
        if race is None:
            return (
                f"Undecided: {name_buckets(self.rival)} may save {gain} ({basis}); measure it with `paceline tune --`."
            )
        return f"Undecided after {race.num_rounds} rounds; about {race.rounds_to_decide} more would decide."

    @property
    def findings(self) -> Sequence[str]:
        lines = [f"also: {one.text}" for one in self.bottlenecks[1:] if one.gain_s > 0]
        if (host := self.steps.host) is not None:
            spread = f"{format_ms(host.p10_s)} to {format_ms(host.p90_s)} ms"
            lines.append(f"clock: times are from the GPU; the host takes {spread} per step and may run ahead")
        if self.buckets is not None:
            lines += self.buckets.findings
        return [*lines, self.doubt] if self.doubt else lines

    def tables(self) -> list[Table]:
        found = [Table("where", "time per step", WHERE, self.rows)]
        if self.buckets is None:
            return found
        if self.race is not None:
            rows = self._list_race(self.race)
            found.append(Table("race", "plan comparison; baseline: your current buckets", RACE, rows))
        return [*found, *self.buckets.tables()]

    def _list_race(self, race: Race) -> list[Prediction]:
        assert self.buckets is not None
        # The machine may differ between two runs, so predictions are scaled to the current buckets in the comparison's
        # run.
        rows, factor = [], self.raced[NOW].timing.median_s / self.buckets.now.step_s
        for label, record in self.raced.items():
            row = self.buckets.build_row(label, self.buckets.model.cut_like(record.bucket_bytes))
            rows.append(replace(row.stretch(factor), measured=record))
        return compare_plans(race, rows)

    def figures(self) -> Drawings:
        return {} if self.buckets is None else self.buckets.figures()

    @cached_property
    def step_rows(self) -> list[dict[str, Any]]:
        """One row per step, as in training metrics. For a saved run: the timed steps, counted from 1."""
        by_step = zip(self.steps.timing.seconds, self.waits.seconds, strict=True)
        return [build_row(number, *times) for number, times in enumerate(by_step, 1)]

    def page_figures(self) -> Drawings:
        return {"ranks": lambda: plot_ranks(self.step_rows, self.machine), **self.figures()}

    @property
    def next_steps(self) -> Sequence[str]:
        return [f"{where}: {line}" for where, line in self.lines.items()]

    @property
    def failure(self) -> str:
        return str(self.config.get("failure") or "") or super().failure

    def to_json(self) -> dict[str, Any]:
        predicted = {} if self.buckets is None else self.buckets.to_json()
        return predicted | super().to_json() | (table.build_row(_GAIN, self) if self.verdict else {})


def build_row(step: int, *times: Sequence[float]) -> dict[str, Any]:
    """A row of metrics: the first of `PARTS` on each rank, and their maximum over ranks."""
    ranks = {name: list(of) for name, of in zip(PARTS, times, strict=False)}
    return {"step": step, "ranks": ranks} | {name: max(of) for name, of in ranks.items()}


def _format_gain(gain: tuple[float, float, float]) -> str:
    return f"{gain[0]:.1%} ({gain[1]:.1%} to {gain[2]:.1%})"


def _write_cap(cap_mib: float) -> str:
    """The shortest decimal that torch converts to the same number of bytes."""
    shorter = (float(f"{cap_mib:.{digits}g}") for digits in range(1, 18))
    return repr(next(cap for cap in shorter if int(cap * MIB) == round(cap_mib * MIB))).removesuffix(".0")


def plot_ranks(rows: Sequence[dict[str, Any]], subtitle: str) -> Figure:
    """The times of every step on each rank, from rows of metrics. The `gid` of a line names the field of a row that it
    shows."""
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
