"""What was seen of a user's own program: where the time of a step goes, what bounds it, and the lines to paste."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.errors import RecordError
from paceline.predict.attached import Bottleneck, find_late_rank, list_bottlenecks, remove_recording
from paceline.predict.race import Interval, Race, judge_race
from paceline.records import StepRecord, TracedStepRecord
from paceline.records.samples import Samples, group_by
from paceline.records.steps import RACED
from paceline.report.result import Result
from paceline.report.table import Column, Table, raw_columns
from paceline.report.traced import TracedResult, round_cap
from paceline.units import MIB, format_ms, format_number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The plan of the program itself, in a race.
NOW = "as it is"
_ASKED = {"network": None, "ranks": None, "inside": None, "ranks_per_node": None, "algorithm": "auto"}


@dataclass(frozen=True)
class RankRow:
    """Where a step of one rank goes: medians of its steps, in seconds. What was not recorded is None."""

    rank: int
    step_s: float
    data_s: float
    forward_s: float | None = None
    backward_s: float | None = None
    exposed_s: float | None = None
    after_s: float | None = None


@dataclass(frozen=True)
class PlanRow:
    """A plan of the race: its step, and its time over that of the program as it is."""

    label: str
    record: StepRecord
    ratio: Interval
    is_winner: bool


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
RACE = (
    Column("plan", "label", key="label", is_key=True),
    Column("buckets", lambda r: r.record.num_buckets or None, "count", "num_buckets", priority=2),
    Column("step", lambda r: r.record.timing.median_s, "ms", "step_s", is_key=True),
    Column("to now", lambda r: r.ratio.value, "{:.3f}".format, "ratio", priority=4),
    Column("95 %", lambda r: f"{r.ratio.low:.3f} to {r.ratio.high:.3f}" if r.ratio.is_known else "", str, priority=3),
    Column("", lambda r: "use" if r.is_winner else "", str, priority=3),
    *raw_columns("is_winner", ratio_low="ratio.low", ratio_high="ratio.high"),
    Column("source", lambda row: "measured", key="source", priority=-1),
)


class AttachedResult(Result):
    """`profile`, `tune` and `watch` of a command. `step_s` is the median of the steps that were not recorded, `rows`
    where it goes on each rank, and `bottleneck` what bounds it (`.kind`, `.gain_s`, `.text`).

    `buckets` is what the recorded steps predict, as of `predict_trace`; None where nothing was sent. `race` is that of
    the plans that the program ran with. `verdict` is "use" (`caps`), "flat" or "undecided", or that of the
    race; empty without either. `caps` are the arguments of torch's wrapper, and `lines` what to paste for it and for
    frameworks.
    """

    def _derive(self) -> None:
        timed = self.only(StepRecord)
        self.steps = next(record for record in timed if record.note != RACED)
        self.step_s = self.steps.timing.median_s
        self.race = self._judge({record.label: record for record in timed if record.note == RACED})
        recorded = remove_recording(self.only(TracedStepRecord), self.step_s)
        self.buckets, self.doubt = None, ""
        if any(record.messages for record in recorded):
            try:
                self.buckets = TracedResult(replace(self.run, config=_ASKED, records=tuple(recorded), warnings=()))
            except RecordError as error:
                self.doubt = f"nothing is predicted: {error}"
        self.rows = self._list_rows(recorded)
        self.bottlenecks = list_bottlenecks(
            self.step_s, self.waits, find_late_rank(recorded), self._find_gain(), self._find_messages()
        )

    def _judge(self, raced: Mapping[str, StepRecord]) -> Race | None:
        if NOW not in raced or len(raced) < 2:
            return None
        return judge_race({label: record.turns_s for label, record in raced.items()}, NOW)

    def _find_gain(self) -> tuple[str, float] | None:
        """What buckets save: as measured by a race, else as predicted where that is sure."""
        if self.race is not None:
            gain = max(0.0, 1 - self.race.gain.value) * self.step_s
            return (_write_call(self.caps), gain) if self.verdict == "use" else None
        if self.buckets is None or self.buckets.verdict != "use":
            return None
        return _write_call(self.caps), self.buckets.best.gain[0] * self.step_s

    def _find_messages(self) -> tuple[float, float, float] | None:
        if self.buckets is None:
            return None
        best, curve = self.buckets.best.estimate, self.buckets.costs.curve
        took_s = sum(curve.estimate_s(bucket.num_bytes) for bucket in best.step.buckets)
        job = self.buckets.job  # what grows with a batch: not the optimizer
        computes_s = max(0.0, job.before_s + job.backward_s - self.waits.median_s)
        return took_s, max(0.0, best.exposed_s), computes_s

    def _list_rows(self, recorded: Sequence[TracedStepRecord]) -> list[RankRow]:
        by_rank = group_by((record for record in recorded if record.messages), lambda record: record.rank)
        rows = []
        for rank in range(self.steps.timing.num_ranks):
            step_s, data_s = (_take(samples, rank) for samples in (self.steps.timing, self.waits))
            own = by_rank.get(rank)
            if own is None:
                rows.append(RankRow(rank, step_s, data_s))
                continue
            names = ("before_s", "backward_s", "exposed_s", "after_s")
            before_s, *others = (statistics.median(getattr(step, name) for step in own) for name in names)
            rows.append(RankRow(rank, step_s, data_s, max(0.0, before_s - data_s), *others))
        return rows

    @property
    def waits(self) -> Samples:
        """How long each rank waits in data loaders."""
        return self.steps.phase("data_wait")

    @property
    def bottleneck(self) -> Bottleneck:
        return self.bottlenecks[0]

    @property
    def exposed_s(self) -> float | None:
        """Measured in the recorded steps: from the end of a rank's backward to that of the last message."""
        return None if self.buckets is None else self.buckets.traced.exposed_s

    @property
    def verdict(self) -> str:
        return self.race.verdict if self.race is not None else "" if self.buckets is None else self.buckets.verdict

    @cached_property
    def caps(self) -> dict[str, Any]:
        """Of torch's wrapper: `bucket_cap_mb`; empty where it should stay as it is."""
        if self.buckets is None or self.verdict != "use":
            return {}
        if self.race is not None:
            return dict(self.config["plans"][self.race.winner])
        return {"bucket_cap_mb": self.buckets.best.cap_mib}

    @cached_property
    def cap_list(self) -> dict[str, Any]:
        """The same with a cap for each bucket, `bucket_cap_mb_list` of torch 2.13, where that is predicted better."""
        plan = None if self.buckets is None or self.verdict != "use" else self.buckets.plan
        if plan is None or not plan.fits_torch or "bucket_cap_mb_list" not in plan.as_torch_kwargs():
            return {}
        ends = ((bucket.num_bytes - bucket.pieces[-1].num_bytes + 1, bucket.num_bytes) for bucket in plan.buckets)
        return {"bucket_cap_mb_list": [round_cap(*each) / MIB for each in ends]}

    @property
    def lines(self) -> dict[str, str]:
        """What to paste, by where."""
        if not self.caps:
            return {}
        if self.steps.wrapper == "paceline":
            return {"paceline": f"paceline.DDP(model, {_write_arguments(self.caps)})"}
        lines = {"torch": _write_call(self.caps)}
        if self.cap_list:
            lines["torch 2.13"] = _write_call(self.cap_list)
        if "bucket_cap_mb" in self.caps:
            cap = _write_arguments(self.caps)
            lines["transformers"] = f"TrainingArguments(..., ddp_{cap})"
            lines["Accelerate"] = f"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({cap})])"
        lines["Lightning"] = f"Trainer(strategy=DDPStrategy({_write_arguments(self.caps)}))"
        return lines

    @property
    def where(self) -> str:
        steps, ranks = self.steps, format_number_of(self.steps.world_size, "rank")
        return f"{steps.model} on {ranks} ({steps.backend}, {steps.device})"

    @property
    def answer(self) -> str:
        text = f"A step of {self.where} takes {format_ms(self.step_s)} ms"
        if self.exposed_s is not None:
            text += f", of which {format_ms(self.exposed_s)} ms ({self.exposed_s / self.step_s:.0%}) is exposed "
            text += "communication"
        text += f". Bottleneck: {self.bottleneck.kind}. {_capitalize(self.bottleneck.text)}."
        return f"{text} {self._describe_buckets()}".strip()

    def _describe_buckets(self) -> str:
        if self.buckets is None:
            return ""
        if self.race is not None:
            return self._describe_race(self.race)
        gain, low, high = self.buckets.candidate.gain
        if self.verdict == "use":
            step_s = self.step_s * (1 - gain)
            return (
                f"With {_write_arguments(self.caps)} a step is predicted to take {format_ms(step_s)} ms, "
                f"{gain:.1%} less (90 %: {low:.1%} to {high:.1%})."
            )
        if self.verdict == "flat":
            return "Flat: no bucket_cap_mb is predicted to save more than 1 %."
        cap, said = self.buckets.candidate.cap_mib, f"{gain:.1%} (90 %: {low:.1%} to {high:.1%})"
        return f"Undecided: bucket_cap_mb={cap:g} is predicted to save {said}; `paceline tune --` measures it."

    def _describe_race(self, race: Race) -> str:
        saved, rounds = 1 - race.gain.value, format_number_of(race.num_rounds, "round")
        known = f" (95 %: {1 - race.gain.high:.1%} to {1 - race.gain.low:.1%})" if race.gain.is_known else ""
        if race.verdict == "use":
            return f"With {_write_arguments(self.caps)} it takes {saved:.1%} less{known}, measured in {rounds}."
        if race.verdict == "flat":
            return f"Flat: no buckets that ran differ by 1 % from those it has, measured in {rounds}."
        if race.verdict == "default":
            return f"Keep its buckets: none that ran is better, measured in {rounds}."
        return f"Undecided after {rounds}: about {race.rounds_to_decide} more would decide."

    @property
    def findings(self) -> Sequence[str]:
        lines = [f"also: {one.text}" for one in self.bottlenecks[1:] if one.gain_s > 0]
        if self.race is not None and self.buckets is not None:
            gain, low, high = self.buckets.candidate.gain
            cap = self.buckets.candidate.cap_mib
            said = f"{gain:.1%} (90 %: {low:.1%} to {high:.1%})"
            lines.append(f"predicted before the race: bucket_cap_mb={cap:g} saves {said}")
        if self.buckets is not None:
            lines += self.buckets.findings
        if self.doubt:
            lines.append(self.doubt)
        return lines

    def tables(self) -> list[Table]:
        found = [Table("where", "where a step goes", WHERE, self.rows)]
        if self.race is not None:
            raced = {record.label: record for record in self.only(StepRecord) if record.note == RACED}
            ratios, winner = self.race.to_default, self.race.winner
            rows = [PlanRow(label, record, ratios[label], label == winner) for label, record in raced.items()]
            found.append(Table("race", "the race of the plans", RACE, rows))
        return found if self.buckets is None else [*found, *self.buckets.tables()]

    def figures(self) -> dict[str, Callable[[], Figure]]:
        return {} if self.buckets is None else self.buckets.figures()

    @property
    def next_steps(self) -> Sequence[str]:
        return [f"{where}: {line}" for where, line in self.lines.items()]

    @property
    def failure(self) -> str:
        return str(self.config.get("failure") or "") or super().failure

    def to_json(self) -> dict[str, Any]:
        predicted = {} if self.buckets is None else self.buckets.to_json()
        gain = self.buckets.candidate.gain if self.buckets is not None else (None, None, None)
        measured = None if self.race is None else self.race.gain
        return predicted | super().to_json() | {
            "step_s": self.step_s, "exposed_s": self.exposed_s, "world_size": self.steps.world_size,
            "backend": self.steps.backend, "device": self.steps.device, "num_steps": self.steps.timing.count,
            "bottleneck": self.bottleneck.kind, "bottlenecks": [one._asdict() for one in self.bottlenecks],
            "verdict": self.verdict, "arguments": self.caps, "plan": self.cap_list or self.caps, "lines": self.lines,
            "gain": gain[0], "gain_low": gain[1], "gain_high": gain[2],
            "predicted_step_s": None if gain[0] is None else self.step_s * (1 - gain[0]),
            "measured_gain": None if measured is None else 1 - measured.value,
        }  # fmt: skip


def _write_cap(cap_mib: float) -> str:
    """The shortest number of which torch makes the same bytes."""
    shorter = (float(f"{cap_mib:.{digits}g}") for digits in range(1, 18))
    return repr(next(cap for cap in shorter if int(cap * MIB) == round(cap_mib * MIB))).removesuffix(".0")


def _write_arguments(caps: Mapping[str, Any]) -> str:
    def write(value: Any) -> str:
        return f"[{', '.join(map(_write_cap, value))}]" if isinstance(value, list) else _write_cap(value)

    return ", ".join(f"{name}={write(value)}" for name, value in caps.items())


def _write_call(caps: Mapping[str, Any]) -> str:
    return f"DistributedDataParallel(model, {_write_arguments(caps)})"


def _take(samples: Samples, rank: int) -> float:
    return statistics.median(row[rank] for row in samples.seconds)


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
