"""The result of `paceline faults`: how soon each fault was named, rightly or not, and what it cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from paceline.records.kinds import FaultRecord
from paceline.records.samples import group_by
from paceline.report.result import Result
from paceline.report.table import Column, Table, raw_columns, text_columns
from paceline.units import format_duration, format_number_of

_NAMES = {
    "train": "paceline train",
    "script": "script, paceline",
    "torch": "script, torch",
    "attached": "script, attached",
}


# The faults whose times stand in the answer.
_TIMED = ("kill ", "stop ", "gil ", "loop ", "link-down ")


def _format_s(seconds: float) -> str:
    return f"{seconds:.2f}"


def _find_p95(values: Sequence[float | None]) -> float | None:
    """Of all of them: where more than one in twenty is missing, there is none."""
    known, place = sorted(one for one in values if one is not None), math.ceil(0.95 * len(values)) - 1
    return known[place] if known and place < len(known) else None


def _find_median(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return statistics.median(known) if known else None


class _Row:
    """All trials of one fault on one backend under one system, with one policy."""

    def __init__(self, trials: Sequence[FaultRecord]) -> None:
        self.trials, first = trials, trials[0]
        self.fault, self.backend, self.system = first.fault, first.backend, _NAMES[first.system]
        self.limit_s, self.is_pause = first.limit_s, first.steps_lost is None
        self.num_trials, self.num_right = len(trials), sum(one.is_right for one in trials)
        self.num_ended = sum(one.ended_s is not None for one in trials)
        self.left_over = sum(bool(one.left_over) for one in trials)
        detected_s = [one.detected_s for one in trials]
        self.median_s, self.p95_s = _find_median(detected_s), _find_p95(detected_s)
        # Of those that were restarted, which is not done to every trial.
        restart_s = [one.restart_s for one in trials if one.restart_s is not None]
        self.restart_s, self.restart_p95_s = _find_median(restart_s), _find_p95(restart_s)
        # From the verdict to the end of the next step, of the trials after which the run went on.
        recovered_s = [one.recovered_s for one in trials if one.recovered_s is not None]
        self.recovered_s, self.recovered_p95_s = _find_median(recovered_s), _find_p95(recovered_s)

    @property
    def steps_lost(self) -> float | None:
        return max((one.steps_lost for one in self.trials if one.steps_lost is not None), default=None)

    @property
    def policy(self) -> str:
        found = sorted({one.policy for one in self.trials} - {"stop"})
        return ", ".join(found)

    @property
    def ended(self) -> str:
        return "all" if self.num_ended == self.num_trials else f"{self.num_ended} of {self.num_trials}"

    @property
    def right(self) -> str:
        return f"{self.num_right} of {self.num_trials}"

    @property
    def step_right(self) -> str:
        """Of the trials whose rank and cause were named, where the step can be."""
        found = [one.names_step for one in self.trials if one.names_step is not None]
        return f"{sum(found)} of {len(found)}" if found else ""


class FaultsResult(Result):
    """One record for each fault that was done."""

    @property
    def rows(self) -> list[_Row]:
        groups = group_by(self.only(FaultRecord), lambda one: (one.fault, one.backend, one.system, one.on_fault))
        return [_Row(trials) for trials in groups.values()]

    @property
    def answer(self) -> str:
        parts = []
        for system in _NAMES:
            trials = [one for one in self.only(FaultRecord) if one.system == system]
            if faults := [one for one in trials if one.steps_lost is not None]:
                parts.append(f"{_NAMES[system]}: {_count(faults)} named rightly")
            if pauses := [one for one in trials if one.steps_lost is None]:
                wrong, what = sum(not one.is_right for one in pauses), format_number_of(len(pauses), "pause")
                noise_s = sum(one.ended_s or 0.0 for one in pauses if one.fault == "noise")
                took = f" ({format_duration(noise_s)} of noise)" if noise_s else ""
                parts.append(f"{_NAMES[system]}: {wrong} of {what}{took} taken for a fault")
        skipped = "".join(f" {name} was not done: {why}." for name, why in self.run.config.get("skipped", {}).items())
        return "; ".join(parts) + "." + skipped

    @property
    def findings(self) -> Sequence[str]:
        """What all trials under Paceline say together."""
        ours = [one for one in self.only(FaultRecord) if one.system != "torch"]
        faults = [one for one in ours if one.steps_lost is not None]
        stepped = [one for one in faults if one.names_step is not None]
        lines = []
        if faults:
            right = sum(one.is_right for one in faults) / len(faults)
            text = f"with Paceline rank and cause were right in {_count(faults)} ({right:.1%})"
            steps = sum(bool(one.names_step) for one in stepped)
            text += f", and the step in {steps} of the {len(stepped)} that name one" if stepped else ""
            lines.append(text)
        times = [
            (fault, backend, _find_p95([one.detected_s for one in trials]))
            for (fault, backend), trials in group_by(faults, lambda one: (one.fault, one.backend)).items()
        ]
        known = [f"{fault} {p95_s:.2f} s on {backend}" for fault, backend, p95_s in times if p95_s is not None]
        if shown := [one for one in known if one.startswith(_TIMED)]:
            lines.append(f"p95 until it was named: {', '.join(shown)}")
        if faults := [one for one in ours if one.left_over]:
            lines.append(f"{format_number_of(len(faults), 'trial')} left something behind: {faults[0].left_over[0]}")
        return lines

    @property
    def failure(self) -> str:
        for one in self.only(FaultRecord):
            if one.system != "torch" and not one.is_right:
                return f"{one.fault} on {one.backend} under {_NAMES[one.system]}: {one.said}"
        return ""

    def tables(self) -> list[Table]:
        columns = (
            *text_columns("fault", "backend", "system", is_key=True),
            Column("right", "right", str, key="named_right", priority=2),
            Column("median (s)", "median_s", _format_s, key="detected_median_s", priority=2),
            Column("p95 (s)", "p95_s", _format_s, key="detected_p95_s", priority=2),
            Column("ended", "ended", str, key="ended"),
            Column("steps lost", "steps_lost", "number", key="steps_lost", priority=1),
            Column("restart (s)", "restart_s", _format_s, key="restart_s"),
            Column("restart p95 (s)", "restart_p95_s", _format_s, key="restart_p95_s", priority=-1),
            Column("then", "policy", "text", key="policy", priority=1),
            Column("recovered (s)", "recovered_s", _format_s, key="recovered_s", priority=1),
            Column("recovered p95 (s)", "recovered_p95_s", _format_s, key="recovered_p95_s", priority=1),
            Column("left over", "left_over", "number", key="left_over", priority=1),
            Column("step right", "step_right", str, key="step_right", priority=-1),
            *raw_columns("num_trials", "num_right"),
        )
        title = "Seconds until a fault was named, and from there until the job had recovered"
        return [Table("faults", title, columns, self.rows)]


def _count(faults: Sequence[FaultRecord]) -> str:
    return f"{sum(one.is_right for one in faults)} of {format_number_of(len(faults), 'fault')}"
