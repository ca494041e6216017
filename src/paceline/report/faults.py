"""The result of `paceline faults`: how soon each fault was named, rightly or not, and what it cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from paceline.records.kinds import FaultRecord
from paceline.records.samples import group_by
from paceline.report.result import Result
from paceline.report.table import Column, Table, text_columns
from paceline.units import format_number_of

_NAMES = {
    "train": "paceline train",
    "script": "script, paceline",
    "torch": "script, torch",
    "attached": "script, attached",
}


class _Row:
    """All trials of one fault on one backend under one system."""

    def __init__(self, trials: Sequence[FaultRecord]) -> None:
        self.trials, first = trials, trials[0]
        self.fault, self.backend, self.system = first.fault, first.backend, _NAMES[first.system]
        self.limit_s, self.is_pause = first.limit_s, first.steps_lost is None
        self.num_trials, self.num_right = len(trials), sum(one.is_right for one in trials)
        self.num_ended = sum(one.ended_s is not None for one in trials)
        self.left_over = sum(bool(one.left_over) for one in trials)

    @property
    def _detected_s(self) -> list[float]:
        return sorted(one.detected_s for one in self.trials if one.detected_s is not None)

    @property
    def median_s(self) -> float | None:
        return statistics.median(self._detected_s) if self._detected_s else None

    @property
    def p95_s(self) -> float | None:
        """Of all trials: where more than one in twenty was not detected, there is none."""
        place = math.ceil(0.95 * self.num_trials) - 1
        return self._detected_s[place] if place < len(self._detected_s) else None

    @property
    def steps_lost(self) -> float | None:
        lost = [one.steps_lost for one in self.trials if one.steps_lost is not None]
        return max(lost) if lost else None

    @property
    def restart_s(self) -> float | None:
        times = [one.restart_s for one in self.trials if one.restart_s is not None]
        return statistics.median(times) if times else None

    @property
    def recovered_p95_s(self) -> float | None:
        """From the verdict to the end of the next step, of the trials after which the run went on."""
        times = sorted(one.recovered_s for one in self.trials if one.recovered_s is not None)
        return times[math.ceil(0.95 * len(times)) - 1] if times else None

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


class FaultsResult(Result):
    """One record for each fault that was done."""

    @property
    def rows(self) -> list[_Row]:
        groups = group_by(self.only(FaultRecord), lambda one: (one.fault, one.backend, one.system))
        return [_Row(trials) for trials in groups.values()]

    @property
    def answer(self) -> str:
        parts = []
        for system in _NAMES:
            trials = [one for one in self.only(FaultRecord) if one.system == system]
            if faults := [one for one in trials if one.steps_lost is not None]:
                right = sum(one.is_right for one in faults)
                parts.append(f"{_NAMES[system]}: {right} of {format_number_of(len(faults), 'fault')} named rightly")
            if pauses := [one for one in trials if one.steps_lost is None]:
                wrong = sum(not one.is_right for one in pauses)
                parts.append(f"{_NAMES[system]}: {wrong} of {format_number_of(len(pauses), 'pause')} taken for a fault")
        skipped = "".join(f" {name} was not done: {why}." for name, why in self.run.config.get("skipped", {}).items())
        return "; ".join(parts) + "." + skipped

    @property
    def failure(self) -> str:
        for one in self.only(FaultRecord):
            if one.system != "torch" and not one.is_right:
                return f"{one.fault} on {one.backend} under {_NAMES[one.system]}: {one.said}"
        return ""

    def tables(self) -> list[Table]:
        columns = (
            *text_columns("fault", "backend", "system", is_key=True),
            Column("named", "right", "text", key="named_right"),
            Column("median", "median_s", "s", key="detected_median_s"),
            Column("p95", "p95_s", "s", key="detected_p95_s"),
            Column("ended", "ended", "text", key="ended"),
            Column("lost", "steps_lost", "number", key="steps_lost"),
            Column("restart", "restart_s", "s", key="restart_s"),
            Column("then", "policy", "text", key="policy"),
            Column("recovered", "recovered_p95_s", "s", key="recovered_p95_s"),
            Column("left", "left_over", "number", key="left_over"),
        )
        title = "Seconds until rank and cause were named; steps lost; recovery (p95), from there; what was left"
        return [Table("faults", title, columns, self.rows)]
