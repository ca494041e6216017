"""Causes of slow steps beside data, late ranks and messages: a table of detectors, each with its cure.

A detector reads the evidence of a profile and returns the `Loss` that it explains, if any. `find_causes` makes findings
of them; `advice.rank_findings` drops those below the noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.predict.accounting import RankRow
from paceline.records.findings import Finding
from paceline.records.steps import RankRecord, TracedStepRecord
from paceline.units import format_duration, format_number_of

_Interval = tuple[float, float]


@dataclass(frozen=True)
class Evidence:
    """What a profile knows about a program: `rows` has each rank's parts of a step, `ranks` what each did beside its
    steps, and `recorded` the steps that the profiler recorded. `idle_s` is the GPU's wait for the host."""

    rows: Sequence[RankRow]
    ranks: Sequence[RankRecord]
    recorded: Sequence[TracedStepRecord] = ()
    idle_s: float = 0.0

    @property
    def critical(self) -> RankRow:
        return find_critical(self.rows)

    @property
    def step_s(self) -> float:
        """A step with the pauses beside it, on average."""
        return self.critical.step_s + sum(map(statistics.fmean, self.list_pauses().values()))

    def list_pauses(self) -> dict[str, list[float]]:
        """The pauses of each timed step, by kind: all ranks wait for the longest one."""
        found = {}
        for name in ("collected_s", "evaluated_s", "saved_s"):
            times = zip(*(getattr(rank, name) for rank in self.ranks), strict=True)
            found[name] = [max(row) for row in times] or [0.0]
        return found


class Loss(NamedTuple):
    """Time that a step loses to a cause, with its 90 % interval. `cure` and `line` replace those of the table."""

    gain_s: float
    evidence: str
    interval_s: _Interval | None = None
    rank: int | None = None
    cure: str = ""
    line: str = ""


class Cause(NamedTuple):
    kind: str
    certainty: str
    find: Callable[[Evidence], Loss | None]
    cure: str
    line: str


def find_critical(rows: Sequence[RankRow]) -> RankRow:
    """The row of the rank that waits least for the others, which is the one that limits the step."""
    return min(rows, key=lambda row: (row.waiting_s or 0.0, -row.step_s))


def find_causes(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.ranks:  # a run of an older version, or of `paceline train`
        return
    for cause in CAUSES:
        if (loss := cause.find(evidence)) is not None and loss.gain_s > 0:
            yield Finding(
                cause.kind, loss.evidence, loss.cure or cause.cure, loss.gain_s, cause.certainty, evidence.step_s,
                loss.rank, loss.interval_s, loss.line or cause.line,
            )  # fmt: skip


# -- pauses -----------------------------------------------------------------------------------------------------------


def _find_pauses(name: str, what: str) -> Callable[[Evidence], Loss | None]:
    def find(evidence: Evidence) -> Loss | None:
        times = evidence.list_pauses()[name]
        found = [time for time in times if time > 0]
        if not found:
            return None
        gain_s = statistics.fmean(times)
        if name == "collected_s" and evidence.ranks[0].device == "cuda":
            gain_s = min(gain_s, evidence.idle_s)  # the GPU works on what the host has launched
        # One more or one fewer may fall into as many steps.
        low, high = (gain_s * count / len(found) for count in (max(0.5, len(found) - 1), len(found) + 1))
        by_rank = {rank.rank: sum(getattr(rank, name)) for rank in evidence.ranks}
        most = max(by_rank, key=by_rank.__getitem__)
        is_alone = len(by_rank) > 1 and by_rank[most] > 0.9 * sum(by_rank.values())
        where = f" on rank {most}, for which the others wait" if is_alone else ""
        times_text = f"{format_number_of(len(found), 'time')} in {format_number_of(len(times), 'step')}"
        evidence_text = f"{what} takes {format_duration(statistics.median(found))}{where}, {times_text}"
        return Loss(gain_s, evidence_text, (low, high), most if is_alone else None)

    return find


# -- the table ---------------------------------------------------------------------------------------------------------

CAUSES = (
    Cause(
        "garbage collection", "at most", _find_pauses("collected_s", "a full garbage collection"),
        "exclude what stays alive from collections, and collect at the same step on all ranks",
        "gc.collect(); gc.freeze(); gc.disable()  # before the loop; in it, gc.collect() every 1000 steps",
    ),
    Cause(
        "evaluation", "at most", _find_pauses("evaluated_s", "evaluation between steps"),
        "evaluate less often or on fewer samples, and share them among all ranks",
        "if step % 1000 == 0: evaluate(model)",
    ),
    Cause(
        "checkpoint", "at most", _find_pauses("saved_s", "torch.save between steps"),
        "save less often (`paceline predict goodput` computes how often) or in the background",
        "torch.distributed.checkpoint.async_save(state, checkpoint_id=path)",
    ),
)  # fmt: skip
