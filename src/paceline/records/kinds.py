"""The base of all records, the records of collectives and imported layers, and how records become JSON.

Nothing here measures or prints. Derived numbers are properties and are never stored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.errors import RecordError
from paceline.records.samples import Samples, Summary

# The element types that records name, and their bytes.
ITEM_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1, "int8": 1,
}  # fmt: skip

SOURCES = ("measured", "simulated", "emulated", "imported")
# Where a message is: in a tensor of the rank, or in memory that the ranks share and reduce in.
MEMORIES = ("ordinary", "shared")
# What a rank does to a vector to read it once and write it once.
_PASSES = ("add", "copy")

# busbw = algbw * factor(n), as nccl-tests defines it: what the slowest link must carry per byte of the message.
COLLECTIVES = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}


def bus_factor(collective: str, world_size: int) -> float:
    """busbw / algbw of a collective over `world_size` ranks."""
    if collective not in COLLECTIVES:
        raise RecordError(f"unknown collective {collective!r}: known are {', '.join(COLLECTIVES)}")
    return float(COLLECTIVES[collective](world_size))


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured thing. `source` says whether it was measured, simulated, emulated or imported."""

    kind: ClassVar[str]
    # Fields that are tuples of dataclasses, and the class of each.
    parts: ClassVar[dict[str, type]] = {}
    source: str = "measured"
    note: str = ""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise RecordError(f"unknown source {self.source!r}: known are {', '.join(SOURCES)}")


@dataclass(frozen=True, kw_only=True)
class CollectiveRecord(Record):
    """One collective at one size. `num_bytes` is nccl-tests' size: the full vector, not one rank's share of it.

    `memory` is `ordinary`, or `shared` if the ranks reduce the vector in place, in memory that they share.
    `num_wrong` counts the wrong elements over all ranks and repetitions (warm-ups too) out of `num_checked`;
    both are None if the result was not checked.
    """

    kind: ClassVar[str] = "collective"
    collective: str
    backend: str
    device: str
    world_size: int
    num_bytes: int
    dtype: str
    op: str
    timing: Samples | Summary
    memory: str = "ordinary"
    num_wrong: int | None = None
    num_checked: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        bus_factor(self.collective, 1)
        if self.memory not in MEMORIES:
            raise RecordError(f"unknown memory {self.memory!r}: known are {', '.join(MEMORIES)}")
        if self.world_size < 1 or self.num_bytes < 1:
            raise RecordError(
                f"a collective of {self.num_bytes} bytes on {self.world_size} ranks: both must be positive"
            )
        if self.time_s <= 0:
            raise RecordError(
                f"a collective takes {self.time_s} s; it must be positive (was the table rounded too far?)"
            )

    @property
    def time_s(self) -> float:
        return self.timing.center_s

    @property
    def num_elements(self) -> int:
        """Elements of the full vector; 4 bytes each if an imported table does not name the type."""
        return self.num_bytes // ITEM_BYTES.get(self.dtype, 4)

    @property
    def algbw_bytes_per_s(self) -> float:
        return self.num_bytes / self.time_s

    @property
    def busbw_bytes_per_s(self) -> float:
        return self.algbw_bytes_per_s * bus_factor(self.collective, self.world_size)

    @property
    def key(self) -> tuple[str, str, str, str, int, str, str]:
        """Records with the same key belong to one curve."""
        return self.collective, self.backend, self.memory, self.device, self.world_size, self.dtype, self.op


@dataclass(frozen=True, kw_only=True)
class MemoryRecord(Record):
    """One pass over memory: every rank at once reads a vector of `num_bytes` of its own once and writes one once.

    `operation` is `add` (a number is added in place) or `copy` (into another vector). `MemoryBounds` derives from it
    how fast an all-reduce could be.
    """

    kind: ClassVar[str] = "memory"
    operation: str
    device: str
    world_size: int
    num_bytes: int
    dtype: str
    timing: Samples
    num_wrong: int | None = None
    num_checked: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.operation not in _PASSES:
            raise RecordError(f"unknown pass over memory {self.operation!r}: known are {', '.join(_PASSES)}")
        if self.world_size < 1 or self.num_bytes < 1 or self.time_s <= 0:
            raise RecordError(
                f"a pass over {self.num_bytes} bytes on {self.world_size} ranks in {self.time_s} s is not valid"
            )

    @property
    def time_s(self) -> float:
        return self.timing.center_s


@dataclass(frozen=True)
class MemoryBounds:
    """The least time that memory allows for each device, number of ranks, size and type measured."""

    records: tuple[MemoryRecord, ...]

    @classmethod
    def of(cls, records: Sequence[Record]) -> MemoryBounds:
        """The bounds of a run: the faster of the passes over the same bytes."""
        fastest: dict[tuple[str, int, int, str], MemoryRecord] = {}
        for record in records:
            if isinstance(record, MemoryRecord):
                known = fastest.setdefault(_find_memory_key(record), record)
                if record.time_s < known.time_s:
                    fastest[_find_memory_key(record)] = record
        return cls(tuple(fastest.values()))

    def bound_s(self, record: CollectiveRecord) -> float | None:
        """The least time for this all-reduce. None where it was not measured, for the other collectives, and for one
        rank, which need not touch its vector."""
        if record.collective != "all_reduce" or record.world_size == 1:
            return None
        key = _find_memory_key(record)
        return next((bound.time_s for bound in self.records if _find_memory_key(bound) == key), None)

    def fraction_of(self, record: CollectiveRecord) -> float | None:
        """The bound over this record's time: 1 is as fast as memory."""
        bound_s = self.bound_s(record)
        return None if bound_s is None else bound_s / record.time_s


def _find_memory_key(record: CollectiveRecord | MemoryRecord) -> tuple[str, int, int, str]:
    return record.device, record.world_size, record.num_bytes, record.dtype


@dataclass(frozen=True, kw_only=True)
class ChunksRecord(Record):
    """A fixed number of bytes, all-reduced in chunks that are all launched before the first wait."""

    kind: ClassVar[str] = "chunks"
    backend: str
    device: str
    world_size: int
    total_bytes: int
    chunk_bytes: int
    dtype: str
    timing: Samples | Summary
    num_wrong: int | None = None
    num_checked: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.world_size < 1 or not 1 <= self.chunk_bytes <= self.total_bytes or self.time_s <= 0:
            raise RecordError(
                f"{self.total_bytes} bytes in chunks of {self.chunk_bytes} on {self.world_size} ranks "
                f"in {self.time_s} s are not valid"
            )

    @property
    def time_s(self) -> float:
        return self.timing.center_s

    @property
    def chunk_elements(self) -> int:
        return self.chunk_bytes // ITEM_BYTES.get(self.dtype, 4)

    @property
    def num_messages(self) -> int:
        return math.ceil(self.total_bytes / self.chunk_bytes)

    @property
    def algbw_bytes_per_s(self) -> float:
        return self.total_bytes / self.time_s

    @property
    def busbw_bytes_per_s(self) -> float:
        return self.algbw_bytes_per_s * bus_factor("all_reduce", self.world_size)


@dataclass(frozen=True, kw_only=True)
class LayerSizeRecord(Record):
    """The number of parameters of one layer, in the order of the model's definition."""

    kind: ClassVar[str] = "layer_size"
    layer: str
    num_params: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_params < 0:
            raise RecordError(f"layer {self.layer!r} has {self.num_params} parameters")


@dataclass(frozen=True, kw_only=True)
class LayerTimeRecord(Record):
    """The time of one layer's backward, or of one phase of the step (`forward`, `backward`, `step`)."""

    kind: ClassVar[str] = "layer_time"
    layer: str
    timing: Samples | Summary


@dataclass(frozen=True, kw_only=True)
class CheckRecord(Record):
    """One thing that `paceline doctor` looked at: `status` is ok, warn or fail; `advice` says how to fix it."""

    kind: ClassVar[str] = "check"
    name: str
    status: str
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.status not in ("ok", "warn", "fail"):
            raise RecordError(f"check {self.name!r} has the status {self.status!r}: known are ok, warn, fail")


KINDS: dict[str, type[Record]] = {
    cls.kind: cls
    for cls in (CheckRecord, CollectiveRecord, MemoryRecord, ChunksRecord, LayerSizeRecord, LayerTimeRecord)
}
# Kinds of older files: the kind that replaced each, and a function that renames its values.
UPGRADES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {}


def record_to_json(record: Record) -> dict[str, Any]:
    """The record as plain JSON values, without derived numbers."""
    document: dict[str, Any] = {"kind": record.kind}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Samples | Summary):
            # `timing` is written as `samples` or `summary`, other samples under the name of their field.
            name = "samples" if isinstance(value, Samples) else "summary"
            document[name if field.name == "timing" else field.name] = dataclasses.asdict(value)
        elif field.name in record.parts:
            document[field.name] = [dataclasses.asdict(part) for part in value]
        else:
            document[field.name] = value
    return document


def _build(cls: type, values: dict[str, Any]) -> Any:
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise RecordError(f"{cls.__name__} has no field {', '.join(unknown)}")
    plain = {"str": str, "int": int}
    for field in dataclasses.fields(cls):
        kind = plain.get(str(field.type))
        if kind is not None and field.name in values and type(values[field.name]) is not kind:
            raise RecordError(f"{cls.__name__}.{field.name} is {values[field.name]!r}; it must be {kind.__name__}")
    try:
        return cls(**values)
    except TypeError as error:
        raise RecordError(f"{cls.__name__}: {error}") from None


def _rows(value: Any, name: str) -> tuple[tuple[float, ...], ...]:
    try:
        return tuple(tuple(float(x) for x in row) for row in value)
    except (TypeError, ValueError):
        raise RecordError(f"{name} is not a list of lists of numbers") from None


def _build_samples(value: Any, where: str) -> Samples:
    if not isinstance(value, dict):
        raise RecordError(f"{where} must be a JSON object of samples, not {type(value).__name__}")
    raw = ("seconds", "warmup_seconds", "arrivals_s")
    values = {name: _rows(rows, f"{where}.{name}") if name in raw else rows for name, rows in value.items()}
    built: Samples = _build(Samples, values)
    return built


def record_from_json(document: dict[str, Any]) -> Record:
    """The record that `record_to_json` wrote, or an older kind of it. RecordError for an unknown kind or field."""
    if not isinstance(document, dict):
        raise RecordError(f"a record must be a JSON object, not {type(document).__name__}")
    values = dict(document)
    kind = values.pop("kind", None)
    if isinstance(kind, str) and kind in UPGRADES:
        kind, upgrade = UPGRADES[kind]
        try:
            values = upgrade(values)
        except KeyError as error:
            raise RecordError(f"{document['kind']} lacks {error}") from None
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise RecordError(f"unknown kind of record {kind!r}: known are {', '.join(KINDS)}")
    samples, summary = values.pop("samples", None), values.pop("summary", None)
    if isinstance(samples, dict):
        values["timing"] = _build_samples(samples, "samples")
    elif isinstance(summary, dict):
        values["timing"] = _build(Summary, summary)
    for field in dataclasses.fields(cls):
        is_samples = field.type in ("Samples", "Samples | None") and field.name != "timing"
        if is_samples and values.get(field.name) is not None:
            values[field.name] = _build_samples(values[field.name], field.name)
    for name, part in cls.parts.items():
        items = values.get(name, [])
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise RecordError(f"{name} must be a list of JSON objects, not {items!r:.40}")
        values[name] = tuple(_build(part, item) for item in items)
    record = _build(cls, values)
    assert isinstance(record, Record)
    return record
