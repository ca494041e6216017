"""The type of all findings: causes of slow steps or unreliable measurements, each with a remedy.

`find_doubts`, the quality check of every verb, uses the records and the machine's load.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.records.environment import Environment
from paceline.records.kinds import ChunksRecord, CollectiveRecord, MemoryBounds, MemoryRecord, Record
from paceline.records.layers import LayerProfileRecord
from paceline.records.samples import UNSTABLE, Samples
from paceline.records.steps import RACED, RankRecord, StepRecord
from paceline.records.training import BatchRecord
from paceline.units import format_bytes, format_duration, format_ms, format_number_of

# With `--strict` these count as failures: another run may give a different answer.
NOISY = ("inconclusive", "unstable", "drifting", "few")
# Up to this many doubtful measurements are listed by name; beyond that, only their number and the worst one.
_MOST_NAMES = 3
# Limits on the fraction of CPU time stolen by the hypervisor and on the load per core before a run.
_MOST_STOLEN, _MOST_LOAD = 0.1, 0.5
_MOST_UNCERTAIN = 0.25  # as a fraction of the median step of an observed program
# Evidence and remedy (empty if there is none), most serious first. `_KINDS` merges kinds that differ only in their
# text.
_TEXTS = {
    "wrong": ("WRONG DATA at {}", "do not use this backend for these messages"),
    "parameters": ("WRONG PARAMETERS of {}: replicas differ from each other or from torch's wrapper", ""),
    "above": (
        "above the memory bandwidth of one core per rank at {}: several cores shared the work, or the "
        "measurement was disturbed",
        "",
    ),
    "unstable": ("unstable at {} (p10 to p90)", "repeat on a quiet machine or for longer"),
    "epochs": ("unstable at {} (p10 to p90 of epochs)", "repeat on a quiet machine or with more --epochs"),
    "drifting": ("still drifting at {} (second half compared with the first)", "warm up for longer"),
    "few": ("fewer than 5 repetitions at {}: the median is not reliable", ""),
    "skewed": ("ranks arrive far apart at {}: over half of the time is spent waiting for the last rank", ""),
}
_KINDS = {"parameters": "wrong", "epochs": "unstable"}


# The name of each cause in a verdict.
_SUBJECTS = {
    "data": "data loading", "late rank": "a late rank", "buckets": "the bucket size", "backend": "the gloo backend",
    "batch": "the small batch", "network": "exposed communication", "host": "the host", "accumulate": "communication",
    "compress": "the message size", "copies": "copying", "optimizer": "the optimizer", "launches": "kernel launching",
    "tensor cores": "arithmetic without tensor cores", "threads": "CPU oversubscription",
    "changing late rank": "variation between ranks", "shared cores": "core contention", "throttling": "CPU throttling",
    "collectives": "communication outside DDP", "unused parameters": "the search for unused parameters",
    "buffers": "the broadcast of buffers",
    "replicated optimizer": "the replicated optimizer",
    "evaluation": "evaluation between steps", "checkpoint": "saving checkpoints",
}  # fmt: skip
HEALTHY = ("healthy", "computing", "bound")  # kinds without a remedy


@dataclass(frozen=True)
class Finding:
    """A cause, named by `kind`, with its evidence and any remedy, both as clauses. `line` is the remedy as code to
    paste or as a command, and `operator` the operator that is slower on a late `rank`. `gain_s` is the possible saving
    per step of `step_s`, and `certainty` says how it was derived: `measured`, `computed` from the trace, `at most` (a
    bound), `estimated` (under an assumption that the text states), or `withdrawn` (the machine was too busy to claim a
    gain)."""

    kind: str
    evidence: str
    cure: str = ""
    gain_s: float = 0.0
    certainty: str = "computed"
    step_s: float = 0.0
    rank: int | None = None
    gain_interval_s: tuple[float, float] | None = None
    line: str = ""
    operator: str = ""

    @property
    def text(self) -> str:
        return f"{self.evidence}: {self.cure}" if self.cure else self.evidence

    @property
    def sentences(self) -> str:
        evidence = f"{self.evidence[:1].upper()}{self.evidence[1:]}"
        return f"{evidence}. To fix it, {self.cure}." if self.cure else f"{evidence}."

    @property
    def subject(self) -> str:
        where = "" if self.rank is None else f" (rank {self.rank})"
        return f"{_SUBJECTS.get(self.kind, self.kind)}{where}"

    @property
    def share(self) -> float:
        """The gain as a fraction of the step."""
        return self.gain_s / self.step_s if self.step_s else 0.0

    def is_worth(self, share: float) -> bool:
        """Whether the gain is at least this fraction of the step, with an interval that excludes 0."""
        return self.share >= share and (self.gain_interval_s is None or self.gain_interval_s[0] > 0)

    @property
    def gain(self) -> str:
        """The gain as text, with its interval and certainty."""
        if not self.gain_s or not self.step_s:
            return "none is claimed" if self.certainty == "withdrawn" else "none"
        is_bound = self.certainty == "at most"
        gain_s = self.most_s if is_bound else self.gain_s
        text = f"{gain_s / self.step_s:.1%} of a step ({format_ms(gain_s)} of {format_ms(self.step_s)} ms)"
        text = f"up to {text}" if is_bound else f"{text}, {self.certainty}"
        if self.gain_interval_s is not None:
            low, high = (end / self.step_s for end in self.gain_interval_s)
            text += f", {95 if self.certainty == 'measured' else 90} %: {low:.1%} to {high:.1%}"
        return text

    @property
    def most_s(self) -> float:
        """The upper end of the gain."""
        return min(self.step_s, max(self.gain_s, *(self.gain_interval_s or (0.0,))))

    @property
    def verdict(self) -> str:
        """The cause and its gain, as a clause."""
        if self.kind in HEALTHY:
            return "healthy"
        if not (self.gain_s and self.step_s):
            return f"{self.subject} is the bottleneck"
        saved = f"{self.share:.0%}" if self.certainty != "at most" else f"up to {self.most_s / self.step_s:.0%}"
        saves = f"; fixing it saves {saved} of a step"
        return f"{self.subject} is the bottleneck{saves}"

    @property
    def card(self) -> dict[str, str]:
        """The answer in four lines: the verdict, the cure, the gain, and the evidence as `why`."""
        cure = "; ".join(filter(None, (self.line, self.cure))) or "none needed" * (self.kind in HEALTHY)
        verdict = f"{self.verdict[:1].upper()}{self.verdict[1:]}"
        return {"verdict": verdict, "cure": cure, "gain": self.gain, "why": self.evidence}

    @property
    def card_lines(self) -> list[str]:
        return list_card(self.card)

    @property
    def factor(self) -> float:
        return self.step_s / max(self.step_s - self.gain_s, 1e-12) if self.gain_s else 1.0

    def withdraw(self, doubt: Finding) -> Finding:
        """The same finding without its gain, because the machine was too busy. Measured gains stay, because their
        intervals already include such noise."""
        if self.certainty == "measured":
            return self
        cure = doubt.cure or self.cure
        return replace(self, gain_s=0.0, gain_interval_s=None, certainty="withdrawn", cure=cure, line="")

    def to_json(self) -> dict[str, Any]:
        interval_s = None if self.gain_interval_s is None else list(self.gain_interval_s)
        return asdict(self) | {"gain_interval_s": interval_s, "text": self.text, "factor": self.factor}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Finding:
        """Load a saved document. The oldest documents have a single `text`."""
        given = {"evidence": found["text"]} | {name: found[name] for name in cls.__dataclass_fields__ if name in found}
        # Older documents have the speed-up instead of the step.
        factor = found.get("factor", 1.0)
        if not given.get("step_s") and factor > 1:
            given["step_s"] = found["gain_s"] * factor / (factor - 1)
        return cls(**given)


def list_card(card: Mapping[str, str]) -> list[str]:
    return [f"{name.capitalize()}: {text}" for name, text in card.items() if text]


# -- doubts -----------------------------------------------------------------------------------------------------------

_Step = StepRecord | LayerProfileRecord | BatchRecord
_Timed = CollectiveRecord | MemoryRecord | ChunksRecord | _Step
_Reason = tuple[str, float, str]  # kind, severity and details
_Doubted = tuple[_Timed, list[_Reason]]


def _name(record: _Timed) -> str:
    """A name that distinguishes this record from others on the same backend and ranks."""
    if isinstance(record, StepRecord) and record.role == "together":
        return f"{record.model}, {format_number_of(record.world_size, 'rank')} without messages"
    if isinstance(record, StepRecord):
        return f"{record.model} in {record.wrapper}{f', {record.label}' if record.label else ''}"
    if isinstance(record, LayerProfileRecord | BatchRecord):
        return f"{record.model}, batch {record.batch_size}"
    if isinstance(record, ChunksRecord):
        return format_bytes(record.chunk_bytes)
    if isinstance(record, MemoryRecord):
        return f"{format_bytes(record.num_bytes)} ({record.operation})"
    return format_bytes(record.num_bytes) + (" in shared memory" if record.memory == "shared" else "")


def _find_reasons(r: _Timed, timing: Samples, bounds: MemoryBounds, is_observed: bool) -> Iterator[_Reason]:
    """Reasons to doubt a record. Steps of an observed program vary, so only the uncertainty of their median counts."""
    unstable = max(UNSTABLE, _MOST_UNCERTAIN / 2 * math.sqrt(timing.count)) if is_observed else UNSTABLE
    fraction = bounds.fraction_of(r) if isinstance(r, CollectiveRecord) else None
    spread = f"{format_duration(timing.p10_s)} to {format_duration(timing.p90_s)}"
    if num_wrong := getattr(r, "num_wrong", None):
        kind, what = ("parameters", "parameters") if isinstance(r, StepRecord) else ("wrong", "elements")
        yield kind, num_wrong, f"{num_wrong} of {getattr(r, 'num_checked', None)} {what}"
    if fraction is not None and fraction > 1.1:  # up to this, the noise of both times may explain it
        yield "above", fraction, f"{fraction:.2f}x"
    if isinstance(r, BatchRecord):  # a repetition is an epoch, so even a few have many steps
        if timing.noise > UNSTABLE:
            yield "epochs", timing.noise, spread
    elif timing.count < 5:
        yield "few", -timing.count, ""
    elif timing.noise > unstable:
        yield "unstable", timing.noise, spread
    elif abs(timing.drift) > 0.25:
        yield "drifting", abs(timing.drift), f"{timing.drift:+.0%}"
    # Passes over memory and steps without messages do not wait for other ranks.
    waits = not isinstance(r, MemoryRecord) and getattr(r, "role", "") != "together"
    if waits and (timing.skew_s or 0.0) > 0.5 * timing.median_s:
        yield "skewed", (timing.skew_s or 0.0) / timing.median_s, ""


def describe_load(environment: Environment) -> tuple[list[str], list[str]]:
    """The CPU time stolen by the hypervisor during the run and the load before it; empty unless too high."""
    stolen, load, cores = environment.stolen or 0.0, environment.load_average or 0.0, environment.cores
    took = f"the hypervisor stole {stolen:.0%} of CPU time"
    worked = f"load {load:.1f} on {format_number_of(cores, 'core')}"
    return [took] if stolen > _MOST_STOLEN else [], [worked] if load > _MOST_LOAD * cores else []


def find_doubts(records: Sequence[Record], environment: Environment) -> list[Finding]:
    """Every reason to doubt the measured records, most serious first. An environment without a load belongs to a run
    that timed nothing or does not depend on the load. Steps of a plan comparison are excluded, because its intervals
    include their noise."""
    compared = [r for r in records if isinstance(r, StepRecord) and r.note == RACED]
    records = [r for r in records if r not in compared]
    bounds, is_observed = MemoryBounds(records), any(isinstance(r, RankRecord) for r in records)
    timed = [
        (r, list(_find_reasons(r, r.timing, bounds, is_observed)))
        for r in records
        if isinstance(r, _Timed) and isinstance(r.timing, Samples)
    ]
    crowded: set[int] = set()
    if environment.details.get("hosts", 1) == 1:
        counts = {_count_ranks(r) for r, _ in timed if r.device == "cpu"}
        crowded = {world_size for world_size in counts if world_size > environment.cores}
    doubts = _join_reasons(timed)
    if crowded:
        many = f"{', '.join(map(str, sorted(crowded)))} ranks share {format_number_of(environment.cores, 'core')}"
        doubts.append(Finding("crowded", f"{many}: their times include waiting for a core"))
    causes, load = describe_load(environment)
    causes = [*_find_unstable_steps(timed, crowded), *causes]
    because = ", ".join([*causes, *load])
    if causes:
        evidence = f"the machine was too busy to measure ({because})"
        if compared:
            busy = Finding("inconclusive", f"{evidence}: predictions may be off; plan comparisons allow for the noise")
        else:
            cure = "repeat on a quiet machine, because nothing can be concluded from the times"
            busy = Finding("inconclusive", evidence, cure)
        doubts.insert(sum(doubt.kind == "wrong" for doubt in doubts), busy)
    elif load:
        before = f"the machine was busy before the run ({because})"
        doubts.append(Finding("busy", f"{before}: the times may include other work"))
    return doubts


def _count_ranks(record: _Timed) -> int:
    return getattr(record, "world_size", 1)


def _join_reasons(timed: Sequence[_Doubted]) -> list[Finding]:
    """One finding per kind, backend and number of ranks, with the affected records."""
    found: dict[tuple[str, str, int], list[tuple[float, str]]] = defaultdict(list)
    totals: Counter[tuple[str, int]] = Counter()
    for r, reasons in timed:
        where = "memory" if isinstance(r, MemoryRecord) else getattr(r, "backend", ""), _count_ranks(r)
        totals[where] += 1
        for kind, badness, details in reasons:
            found[kind, *where].append((badness, _name(r) + (f" ({details})" if details else "")))
    doubts = []
    for (kind, backend, n), places in sorted(found.items(), key=lambda item: list(_TEXTS).index(item[0][0])):
        names = ", ".join(name for _, name in places)
        if len(places) > _MOST_NAMES and _KINDS.get(kind, kind) != "wrong":  # list all wrong data
            names = f"{len(places)} of {totals[backend, n]} measurements, the worst {max(places)[1]}"
        place = (f"{backend}, " if backend else "") + format_number_of(n, "rank")
        evidence, cure = _TEXTS[kind]
        doubts.append(Finding(_KINDS.get(kind, kind), f"{place}: {evidence.format(names)}", cure))
    return doubts


def _find_unstable_steps(timed: Sequence[_Doubted], crowded: set[int]) -> list[str]:
    """Whether most variants of the step are unstable, and not just for lack of cores."""
    steps = [(r, reasons) for r, reasons in timed if isinstance(r, _Step)]
    # The conclusion of a tuning run depends on the steps of its candidates.
    steps = [(r, reasons) for r, reasons in steps if getattr(r, "role", "") == "job"] or steps
    unstable = [r for r, reasons in steps if any(_KINDS.get(kind, kind) == "unstable" for kind, *_ in reasons)]
    if 2 * len(unstable) <= len(steps) or all(_count_ranks(r) in crowded for r in unstable):
        return []
    many = f"{len(unstable)} of {len(steps)} variants of the step are unstable"
    return [many if len(steps) > 1 else "the step is unstable"]


def is_busy(doubts: Sequence[Finding]) -> bool:
    """Whether the machine was too busy to trust predictions from this run."""
    return any(doubt.kind in ("inconclusive", "busy") for doubt in doubts)


def add_busy(doubt: str, names: Sequence[str]) -> str:
    """Extend a prediction's warning by the inputs that were measured on a busy machine."""
    busy = f"measured on a busy machine: {', '.join(names)}" if names else ""
    return "; ".join(filter(None, (doubt, busy)))
