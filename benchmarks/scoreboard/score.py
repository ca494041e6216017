"""Score a tool's answer against the problem planted in a program and the gain from fixing it.

Pure functions of the raw results that `run.py` writes, one document per program. Needs no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

HEALTHY = ("healthy", "computing", "bound")  # kinds without a fix
LEAST_GAIN = 0.03  # a planted problem that costs less on this machine is not scored
MOST_ERROR = 0.05  # of a predicted gain, as a share of a step
MOST_STOLEN = 0.05  # share of a run's CPU time that the hypervisor may give to other guests
PACELINE = "Paceline"
TOOLS = (PACELINE, "TraceML", "torch.profiler", "HTA")


@dataclass(frozen=True)
class Answer:
    """A tool's first answer. Peers have verdicts of their own, which may stand for several `causes`; an empty tuple
    means no answer. `gain` is a share of the step. An inconclusive answer names what stands out, but claims nothing."""

    causes: tuple[str, ...] = ()
    rank: int | None = None
    gain: float | None = None
    text: str = ""
    is_conclusive: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Answer:
        return cls(**{**found, "causes": tuple(found["causes"])})


@dataclass(frozen=True)
class Score:
    """A tool's score for one program. A field is None if it does not apply: no culprit, no fix, or no baseline run.

    An inconclusive answer is wrong about a planted problem unless it names it, and no false finding in a healthy
    program."""

    is_cause: bool
    is_rank: bool | None = None
    is_gain: bool | None = None
    gain_error: float | None = None
    overhead: float | None = None
    is_conclusive: bool = True


def read_answer(document: Mapping[str, Any]) -> Answer:
    """Paceline's first finding, from the JSON document of `paceline profile`."""
    first = document["bottlenecks"][0]
    gain = first["gain_s"] / first["step_s"] if first.get("step_s") and first["gain_s"] else None
    text = " ".join(f"{name}: {line}." for name, line in document["card"].items() if line)
    return Answer((first["kind"],), first.get("rank"), gain, text, not document["is_inconclusive"])


def is_healthy(facts: Mapping[str, Any]) -> bool:
    return set(facts["causes"]) <= set(HEALTHY)


def find_mean(run: Mapping[str, Any]) -> float:
    """Mean seconds per sample."""
    return statistics.fmean(run["steps_s"]) / run["samples"]


def compare_runs(runs: Mapping[str, Sequence[Any]], name: str) -> float | None:
    """Mean step time of these runs relative to the plain ones, in the median round; None unless both exist."""
    both = list(zip(runs.get(name, ()), runs.get("plain", ()), strict=False))
    return statistics.median(find_mean(one) / find_mean(plain) for one, plain in both) if both else None


def find_gain(document: Mapping[str, Any]) -> float | None:
    """The share of a step that the fix saved when it was applied."""
    ratio = compare_runs(document["runs"], "cured")
    return None if ratio is None or is_healthy(document) else 1 - ratio


def find_reason(document: Mapping[str, Any]) -> str:
    """Why a program is not scored; empty if it is."""
    gain = find_gain(document)
    if document.get("skipped"):
        return str(document["skipped"])
    return f"its cure saves only {gain:.1%} on this machine" if gain is not None and gain < LEAST_GAIN else ""


def score_answer(document: Mapping[str, Any], tool: str, gain: float | None = None) -> Score | None:
    """A tool's score for one program; None if it did not run. `gain` is what the fix saves, if another document for
    the same program measured it."""
    given = document["answers"].get(tool)
    if given is None:
        return None
    answer, culprit = Answer.from_json(given), document["culprit"]
    expected = HEALTHY if is_healthy(document) else tuple(document["causes"])
    is_cause = bool(set(expected) & set(answer.causes))
    ratio = compare_runs(document["runs"], tool)
    overhead = None if ratio is None else ratio - 1
    known = {"overhead": overhead, "is_conclusive": answer.is_conclusive}
    if is_healthy(document):
        return Score(is_cause or not answer.is_conclusive, **known)
    is_rank = None if culprit is None else is_cause and answer.rank == culprit
    real = find_gain(document) if gain is None else gain
    if real is None:
        return Score(is_cause, is_rank, **known)
    error = None if answer.gain is None else answer.gain - real
    # The gain predicted for a different cause says nothing about this fix.
    is_gain = is_cause and error is not None and abs(error) <= MOST_ERROR
    return Score(is_cause, is_rank, is_gain, error if is_cause else None, **known)


def count(values: Sequence[bool | None]) -> tuple[int, int]:
    """Number of correct answers, and number of answers that can be scored."""
    known = [value for value in values if value is not None]
    return sum(known), len(known)
