"""The base class of records, the records of collectives, hosts and faults, and JSON conversion for all records.

Nothing here measures or prints. Derived numbers are properties and are never stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from paceline.errors import RecordError
from paceline.records.checked import Checked, Count, PositiveCount, Rule, Seconds, check_type, decode, one_of
from paceline.records.samples import Samples, Summary

# Bytes per element of each dtype that a record may have.
ITEM_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1, "int8": 1,
}  # fmt: skip
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
SOURCES = ("measured", "simulated", "emulated", "imported")
# Where the message is stored: in an ordinary tensor, or in memory that the ranks share and reduce in place.
MEMORIES = ("ordinary", "shared")

# busbw = algbw * factor(n), as nccl-tests defines it: the bytes that each link carries per byte of the message.
COLLECTIVES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
KINDS: dict[str, type[Record]] = {}
IS_POSITIVE = Rule(
    lambda timing: timing.center_s > 0,
    "it must be positive (was a table rounded too far?)",
    lambda timing: f"{timing.center_s} s",
)
Timing = Annotated[Samples | Summary, IS_POSITIVE]
Timed = Annotated[Samples, IS_POSITIVE]


def bus_factor(collective: str, world_size: int) -> float:
    """busbw / algbw of a collective over `world_size` ranks."""
    return COLLECTIVES[collective](world_size)


@dataclass(frozen=True, kw_only=True)
class Record(Checked):
    """One measurement. `source` says whether it was measured, simulated, emulated or imported."""

    kind: ClassVar[str]
    source: Annotated[str, one_of(SOURCES)] = "measured"
    note: str = ""

    def __init_subclass__(cls) -> None:
        if "kind" in vars(cls):
            KINDS[cls.kind] = cls

    def find_uneven(self, *names: str) -> Iterator[str]:
        """The samples whose repetitions or ranks differ from those of `timing`."""
        for name in names:
            found = getattr(self, name)
            if found is not None and found.shape != self.timing.shape:  # type: ignore[attr-defined]
                yield f"{name} differs from the steps in repetitions or ranks"


@dataclass(frozen=True, kw_only=True)
class _Timed(Record):
    """An operation of all ranks. `num_wrong` counts wrong elements out of `num_checked`, over all ranks and repetitions
    including warm-ups; both are None if the result was not checked."""

    size_field: ClassVar[str] = "num_bytes"
    device: str
    world_size: PositiveCount
    dtype: str
    timing: Timing
    num_wrong: int | None = None
    num_checked: int | None = None

    @property
    def _moved_bytes(self) -> int:
        return int(getattr(self, self.size_field))

    @property
    def time_s(self) -> float:
        return self.timing.center_s

    @property
    def num_elements(self) -> int:
        """Elements of the full vector; 4 bytes each if an imported table does not name the dtype."""
        return self._moved_bytes // ITEM_BYTES.get(self.dtype, 4)

    @property
    def algbw_bytes_per_s(self) -> float:
        return self._moved_bytes / self.time_s

    @property
    def busbw_bytes_per_s(self) -> float:
        return self.algbw_bytes_per_s * bus_factor(getattr(self, "collective", "all_reduce"), self.world_size)


@dataclass(frozen=True, kw_only=True)
class CollectiveRecord(_Timed):
    """One collective at one size, which counts the full vector, as in nccl-tests, not a rank's shard. `memory` is
    `shared` if the ranks reduce in place in shared memory. `nodes` is the number of nodes, 0 if unknown."""

    kind: ClassVar[str] = "collective"
    collective: Annotated[str, one_of(COLLECTIVES)]
    backend: str
    num_bytes: PositiveCount
    op: str
    memory: Annotated[str, one_of(MEMORIES)] = "ordinary"
    nodes: Count = 0

    @property
    def key(self) -> tuple[str, str, str, str, int, str, str]:
        """The curve that the record belongs to."""
        return self.collective, self.backend, self.memory, self.device, self.world_size, self.dtype, self.op


@dataclass(frozen=True, kw_only=True)
class MemoryRecord(_Timed):
    """One pass over memory: at the same time, every rank reads its own vector of `num_bytes` once and writes it once,
    in place (`add`) or to another vector (`copy`)."""

    kind: ClassVar[str] = "memory"
    operation: Annotated[str, one_of(("add", "copy"))]
    num_bytes: PositiveCount


class MemoryBounds:
    """The lower bound of memory bandwidth on an all-reduce, by device, number of ranks, size and dtype."""

    def __init__(self, records: Sequence[Record]) -> None:
        passes = sorted((r for r in records if isinstance(r, MemoryRecord)), key=lambda r: r.time_s, reverse=True)
        self._fastest = {(r.device, r.world_size, r.num_bytes, r.dtype): r for r in passes}
        self.records = tuple(self._fastest.values())

    def bound_s(self, record: CollectiveRecord) -> float | None:
        """The lower bound for this all-reduce. None if it was not measured, for other collectives, and for a single
        rank, which need not touch its vector."""
        found = self._fastest.get((record.device, record.world_size, record.num_bytes, record.dtype))
        is_bound = record.collective == "all_reduce" and record.world_size > 1
        return found.time_s if is_bound and found is not None else None

    def fraction_of(self, record: CollectiveRecord) -> float | None:
        """The bound divided by the measured time: 1 means as fast as memory."""
        bound_s = self.bound_s(record)
        return None if bound_s is None else bound_s / record.time_s


@dataclass(frozen=True, kw_only=True)
class ChunksRecord(_Timed):
    """A fixed number of bytes, all-reduced in chunks that are all launched before the first wait."""

    kind: ClassVar[str] = "chunks"
    size_field: ClassVar[str] = "total_bytes"
    backend: str
    total_bytes: PositiveCount
    chunk_bytes: PositiveCount

    @property
    def chunk_elements(self) -> int:
        return self.chunk_bytes // ITEM_BYTES.get(self.dtype, 4)

    @property
    def num_messages(self) -> int:
        return math.ceil(self.total_bytes / self.chunk_bytes)


@dataclass(frozen=True, kw_only=True)
class CheckRecord(Record):
    """One check of `paceline doctor`. `status` is ok, warn or fail, and `advice` says how to fix a problem."""

    kind: ClassVar[str] = "check"
    name: str
    status: Annotated[str, one_of(("ok", "warn", "fail"))]
    found: str
    advice: str = ""

    @classmethod
    def build(cls, name: str, found: str, advice: str = "", status: str = "warn") -> CheckRecord:
        """Build the result of a check; its status is `ok` if there is no advice."""
        return cls(name=name, status=status if advice else "ok", found=found, advice=advice)


@dataclass(frozen=True, kw_only=True)
class LinkRecord(Record):
    """Messages from one host to another over one TCP connection, each timed until its one-byte reply. `short` has the
    times of one-byte messages."""

    kind: ClassVar[str] = "link"
    sender: str
    receiver: str
    interface: str
    num_bytes: int
    timing: Samples
    short: Samples

    @property
    def latency_s(self) -> float:
        """One-way latency: half the round trip of a one-byte message."""
        return self.short.median_s / 2

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.timing.median_s


@dataclass(frozen=True, kw_only=True)
class FaultRecord(Record):
    """One fault injected into a job, in step `step` on rank `rank`, and its outcome. Times count from the injection.
    `detected_s`: until the rank and the cause were reported; None if that took longer than `limit_s`. `is_right`:
    whether the report was correct; for a pause, whether nothing was reported. `ended_s`: until the command exited.
    `steps_lost`: steps since the newest checkpoint, or the steps that a recovered run repeated. `restart_s`: from a
    restart until the lost steps were repeated. `said`: the line that reported the fault, or the last line. `policy` was
    applied, and `on_fault` requested. `recovered_s`: from detection to the end of the next step."""

    kind: ClassVar[str] = "fault"
    fault: str
    system: str
    backend: str
    ranks: int
    trial: int
    rank: int
    step: int
    detected_s: float | None
    is_right: bool
    ended_s: float | None
    limit_s: float
    steps_lost: int | None
    restart_s: float | None
    left_over: tuple[str, ...]
    said: str
    policy: str = "stop"
    recovered_s: float | None = None
    on_fault: str = "stop"
    names_step: bool | None = None


COSTS = ("step", "save", "write", "detect", "restart", "spare", "shrink")


@dataclass(frozen=True, kw_only=True)
class CostRecord(Record):
    """The measured durations of one cost that determines goodput. `name`: a training `step`; the stall of a `save`, and
    the background `write` of the checkpoint; the time to `detect` a fault, and from there to the next step after a
    `restart`, with a `spare`, or on fewer ranks (`shrink`). `source` is `imported` if the user typed it."""

    kind: ClassVar[str] = "cost"
    name: Annotated[str, one_of(COSTS)]
    seconds: tuple[Seconds, ...]

    def find_faults(self) -> Iterator[str]:
        if not self.seconds:
            yield "no times: expected at least one"


def record_to_json(record: Record) -> dict[str, Any]:
    """The record as plain JSON values, without derived numbers. `timing` is written as `samples` or `summary`."""
    written = {Samples: "samples", Summary: "summary"}.get(type(getattr(record, "timing", None)), "timing")
    fields = dataclasses.asdict(record).items()
    return {"kind": record.kind} | {written if name == "timing" else name: value for name, value in fields}


def record_from_json(document: dict[str, Any]) -> Record:
    """The inverse of `record_to_json`. RecordError for an unknown kind or field."""
    check_type(dict, document, "a record")
    values = dict(document)
    kind = str(values.pop("kind", None))
    if kind not in KINDS:
        raise RecordError(f"unknown kind of record {kind!r}: use one of {', '.join(KINDS)}")
    for name, cls in (("summary", Summary), ("samples", Samples)):
        if (timing := values.pop(name, None)) is not None:
            values["timing"] = decode(cls, timing, name)
    record: Record = decode(KINDS[kind], values)
    return record
