"""Reasons not to believe a measurement, found in its records and its environment. Nothing here measures or prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.records.bounds import MemoryBounds
from paceline.records.environment import Environment
from paceline.records.kinds import ChunksRecord, CollectiveRecord, MemoryRecord, Record
from paceline.records.samples import Samples
from paceline.records.steps import StepRecord
from paceline.units import format_bytes, format_duration

__all__ = ["NOISY", "Doubt", "find_doubts"]

# Half of p90 - p10 over the median, and second half over first half, above which a median is not to be believed.
_MAX_NOISE, _MAX_DRIFT = 0.25, 0.25
# Of the memory bound; a little more is the noise of both.
_MAX_FRACTION = 1.1
# The wait for the last rank as a share of the time, above which the time is mostly that wait.
_MAX_SKEW = 0.5
_FEW = 5
# The kinds of doubt that `--strict` turns into a failure: another run may give another answer.
NOISY = ("unstable", "drifting", "few")
# What is told in other words but means the same to a program.
_KIND_OF = {"astray": "wrong"}


@dataclass(frozen=True)
class Doubt:
    """One reason, as one line for people; `kind` is for programs."""

    kind: str
    text: str


_Timed = CollectiveRecord | MemoryRecord | ChunksRecord | StepRecord


def _name(record: _Timed) -> str:
    """What tells this record from the others on the same backend and ranks."""
    match record:
        case StepRecord():
            return f"{record.model} in {record.wrapper}"
        case MemoryRecord():
            return f"{format_bytes(record.num_bytes)} ({record.operation})"
        case ChunksRecord():
            return format_bytes(record.chunk_bytes)
        case CollectiveRecord():
            where = " in shared memory" if record.memory == "shared" else ""
            return format_bytes(record.num_bytes) + where


def _backend(record: _Timed) -> str:
    return "memory" if isinstance(record, MemoryRecord) else record.backend


def find_doubts(records: Sequence[Record], environment: Environment) -> list[Doubt]:
    """Everything that speaks against the measured records, the gravest first."""
    timed: list[_Timed] = [r for r in records if isinstance(r, _Timed) and isinstance(r.timing, Samples)]
    bounds = MemoryBounds.of(records)
    found: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for r in timed:
        assert isinstance(r.timing, Samples)
        name, backend = _name(r), _backend(r)
        if r.num_wrong and isinstance(r, StepRecord):
            found["astray", backend, r.world_size].append(f"{name} ({r.num_wrong} of {r.num_checked} parameters)")
        elif r.num_wrong:
            found["wrong", backend, r.world_size].append(f"{name} ({r.num_wrong} of {r.num_checked} elements)")
        fraction = bounds.fraction_of(r) if isinstance(r, CollectiveRecord) else None
        if fraction is not None and fraction > _MAX_FRACTION:
            found["above", backend, r.world_size].append(f"{name} ({fraction:.2f} of memory)")
        if r.timing.count < _FEW:
            found["few", backend, r.world_size].append(name)
        elif r.timing.noise > _MAX_NOISE:
            spread = f"{format_duration(r.timing.p10_s)} to {format_duration(r.timing.p90_s)}"
            found["unstable", backend, r.world_size].append(f"{name} ({spread})")
        elif abs(r.timing.drift) > _MAX_DRIFT:
            found["drifting", backend, r.world_size].append(f"{name} ({r.timing.drift:+.0%})")
        skew_s = None if isinstance(r, MemoryRecord) else r.timing.skew_s  # a pass over memory waits for nobody
        if skew_s is not None and skew_s > _MAX_SKEW * r.timing.median_s:
            found["skewed", backend, r.world_size].append(name)
    words = {
        "wrong": "WRONG DATA at {}: do not use this backend for these messages",
        "astray": "WRONG PARAMETERS of {}: replicas differ, or are not those of torch's wrapper",
        "above": "faster than one core per rank passes over memory at {}: several did it, or the bound was disturbed",
        "unstable": "unstable at {} (p10 to p90): repeat on a quiet machine or with more --iters",
        "drifting": "not settled at {} (second half against first): raise --warmup",
        "few": "fewer than 5 repetitions at {}: a median of so few says little",
        "skewed": "ranks arrive far apart at {}: over half of the time is waiting for the last one",
    }
    doubts = [
        Doubt(
            _KIND_OF.get(kind, kind),
            f"{backend}, {n} rank{'s' if n > 1 else ''}: {text.format(', '.join(found[kind, backend, n]))}",
        )
        for kind, text in words.items()
        for kind_found, backend, n in found
        if kind_found == kind
    ]
    on_cpu = {r.world_size for r in timed if r.device == "cpu"}
    if (environment.details.get("hosts", 1)) == 1 and (crowded := sorted(n for n in on_cpu if n > environment.cores)):
        which = ", ".join(map(str, crowded))
        doubts.append(
            Doubt(
                "crowded",
                f"{which} ranks share {environment.cores} cores: their times include waiting for a core",
            )
        )
    if any(r.world_size == 1 and isinstance(r, CollectiveRecord | ChunksRecord) for r in timed):
        doubts.append(Doubt("alone", "1 rank: nothing is sent, so busbw is 0 and the time is the call's own cost"))
    if environment.load_average is not None and environment.load_average > 0.5 * environment.cores:
        doubts.append(
            Doubt("busy", f"the machine was busy before the run (load {environment.load_average:.1f} on "
                          f"{environment.cores} cores): other work may be in the times")
        )  # fmt: skip
    return doubts
