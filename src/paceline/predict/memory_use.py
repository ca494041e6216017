"""Memory over one step: allocated bytes over time by category, and the peak.

Recording (`measure.recorder`) sets marks in a step and lists the live tensors and their categories at each. In between,
torch reports allocations and frees as `[memory]` events of the trace. A block has the category that any mark lists for
it. Blocks that no mark lists are activations if forward allocates and keeps them, temporary if they are freed by the
end of the step, and other in all remaining cases.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

CATEGORIES = ("parameters", "optimizer", "buckets", "gradients", "data", "activations", "temporary", "other")
MARK = "memory mark"  # name of a mark in the trace, followed by its number
# Categories by precedence: a gradient may be a view of a bucket.
_SEEN_FIRST = ("parameters", "buckets", "gradients", "optimizer")
_MAX_INTERVALS = 300  # maximum number of intervals in a stored timeline
_DEVICE_TYPES = {"cpu": 0, "cuda": 1}  # torch's numbers

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MemoryMark:
    """A moment in the step: the phase that begins there (or empty), and tensors as (address, bytes, category)."""

    phase: str
    blocks: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class MemoryMarks:
    """The marks of one step, from start to end, and the GPU allocator's bytes at the start; None on the CPU."""

    device: str
    index: int
    allocated_bytes: int | None
    marks: tuple[MemoryMark, ...]


@dataclass(frozen=True)
class MemoryPhase:
    """A phase of the step, with the peak of each category within it and then that of their sum."""

    name: str
    begin_s: float
    end_s: float
    largest_bytes: tuple[int, ...]


@dataclass(frozen=True)
class HeldMemory:
    """The bytes of one category at each time of a timeline."""

    category: str
    num_bytes: tuple[int, ...]

    @property
    def largest_bytes(self) -> int:
        return max(self.num_bytes)


@dataclass(frozen=True)
class MemoryUse:
    """Allocated memory over one step, with times since its start. A timeline of many allocations keeps only the highest
    and the last point of each short interval. `operator`, if any, made the last allocation before the peak."""

    times_s: tuple[float, ...]
    phases: tuple[MemoryPhase, ...]
    held: tuple[HeldMemory, ...]
    operator: str = ""

    @property
    def totals(self) -> list[int]:
        return [sum(parts) for parts in zip(*(one.num_bytes for one in self.held), strict=True)]

    @property
    def peak(self) -> int:
        totals = self.totals
        return totals.index(max(totals))

    @property
    def peak_bytes(self) -> int:
        return max(self.totals)

    @property
    def peak_phase(self) -> str:
        at_s = self.times_s[self.peak]
        return next((phase.name for phase in reversed(self.phases) if phase.begin_s <= at_s), "")


@dataclass
class _Block:
    num_bytes: int
    begin_us: float
    phase: int  # index of its phase, from 1; 0 is before the step
    end_us: float = math.inf
    seen: set[str] = field(default_factory=set)


def build_memory(events: Sequence[dict[str, Any]], marks: MemoryMarks) -> MemoryUse:
    """The memory timeline of the marked step. Earlier events of the trace show the memory allocated before it."""
    marked = [e for e in events if e["name"].startswith(MARK) and e.get("cat") == "user_annotation"]
    marked.sort(key=_find_number)
    changes = _find_changes(events, marks)
    begin_us, end_us = marked[0]["ts"], marked[-1]["ts"]
    blocks, phases = _follow(changes, marked, marks)
    inside = [event for event in changes if begin_us < event["ts"] < end_us]
    points = np.unique([begin_us, *(event["ts"] for event in inside), end_us])
    held: Ints = np.zeros((len(CATEGORIES), len(points)), dtype=np.int64)
    for block in blocks:
        if block.end_us > begin_us and block.begin_us < end_us:
            row = held[CATEGORIES.index(_find_category(block, phases))]
            row[np.searchsorted(points, max(begin_us, block.begin_us))] += block.num_bytes
            if block.end_us <= end_us:
                row[np.searchsorted(points, block.end_us)] -= block.num_bytes
    held = np.cumsum(held, axis=1)
    if marks.allocated_bytes is not None:
        totals: Ints = np.full(len(points), marks.allocated_bytes, dtype=np.int64)
        counted = [event["args"]["Total Allocated"] for event in inside]
        totals[np.searchsorted(points, [event["ts"] for event in inside])] = counted
        totals[-1] = counted[-1] if counted else totals[0]
        held[-1] = np.maximum(0, totals - held[:-1].sum(axis=0))
    peak = int(np.argmax(held.sum(axis=0)))
    kept = _thin(held)
    # Listing tensors takes time that belongs to no phase.
    starts_us, spent_us = [e["ts"] for e in marked], np.cumsum([0.0, *(e["dur"] for e in marked)])

    def at_s(moments_us: Any) -> Any:
        passed_us = moments_us - begin_us - spent_us[np.searchsorted(starts_us, moments_us)]
        return np.maximum.accumulate(np.atleast_1d(passed_us)) * 1e-6

    edges_us = np.array([moment_us for _, moment_us in phases])
    edges_s, names = at_s(edges_us).tolist(), [name for name, _ in phases[:-1]]
    firsts = np.searchsorted(points, edges_us, side="right") - 1  # memory held when a phase begins counts there
    lasts = np.maximum(firsts[:-1] + 1, np.searchsorted(points, edges_us[1:]))
    both = np.vstack([held, held.sum(axis=0)])
    largest = [tuple(both[:, a:b].max(axis=1).tolist()) for a, b in zip(firsts[:-1], lasts, strict=True)]
    return MemoryUse(
        times_s=tuple(at_s(points)[kept].tolist()),
        phases=tuple(map(MemoryPhase, names, edges_s[:-1], edges_s[1:], largest)),
        held=tuple(HeldMemory(name, tuple(row[kept].tolist())) for name, row in zip(CATEGORIES, held, strict=True)),
        operator=_find_operator(events, next((e for e in inside if e["ts"] == points[peak]), None)),
    )


def _find_number(mark: dict[str, Any]) -> int:
    return int(mark["name"].removeprefix(MARK))


def _find_changes(events: Iterable[dict[str, Any]], marks: MemoryMarks) -> list[dict[str, Any]]:
    """Allocations and frees on the marks' device, in order."""
    kind = _DEVICE_TYPES[marks.device]
    found = [e for e in events if e["name"] == "[memory]" and e["args"].get("Device Type") == kind]
    found = [e for e in found if not kind or e["args"].get("Device Id") == marks.index]
    return sorted(found, key=lambda event: float(event["ts"]))


def _follow(
    changes: Sequence[dict[str, Any]], marked: Sequence[dict[str, Any]], marks: MemoryMarks
) -> tuple[list[_Block], list[tuple[str, float]]]:
    """Every block of memory with its lifetime and categories, and the phases with their start times."""
    blocks: list[_Block] = []
    held: dict[int, _Block] = {}  # by address
    freed_us: dict[int, float] = {}
    phases: list[tuple[str, float]] = []

    def add(address: int, block: _Block) -> _Block:
        blocks.append(block)
        return held.setdefault(address, block)

    both: list[tuple[Any, MemoryMark | None]] = [(event, None) for event in changes]
    both += [(event, marks.marks[_find_number(event)]) for event in marked]
    for event, mark in sorted(both, key=lambda one: float(one[0]["ts"])):
        at_us = event["ts"]
        if mark is None:
            address, size = event["args"]["Addr"], event["args"]["Bytes"]
            if address in held:  # freed now, or allocated again after an untraced thread freed it
                held.pop(address).end_us = at_us
            if size > 0:
                add(address, _Block(size, at_us, len(phases)))
            freed_us[address] = at_us
            continue
        phases += [(mark.phase, at_us)] if mark.phase else []
        for address, size, category in mark.blocks:
            # Allocated before the trace or by an untraced thread, but after the previous block here was freed.
            old = held.get(address) or add(address, _Block(size, freed_us.get(address, -math.inf), 0))
            old.seen.add(category)
    return blocks, phases


def _find_category(block: _Block, phases: Sequence[tuple[str, float]]) -> str:
    for category in _SEEN_FIRST:
        if category in block.seen:
            return category
    name, end_us = (phases[block.phase - 1][0], phases[block.phase][1]) if 0 < block.phase < len(phases) else ("", 0.0)
    is_left = bool(name) and block.end_us > end_us
    if name == "forward" and is_left:
        return "activations"
    if "data" in block.seen or (name == "data" and is_left):
        return "data"
    return "temporary" if name and block.end_us <= phases[-1][1] else "other"


def _thin(held: Ints) -> Ints:
    """The points to keep: both ends, the maximum of each category and of the total, and the highest and the last point
    of each interval. Without the last, a plot would show freed memory as held until the next interval."""
    totals, count = held.sum(axis=0), held.shape[1]
    intervals = np.array_split(np.arange(count), min(count, _MAX_INTERVALS))
    highest = [int(part[np.argmax(totals[part])]) for part in intervals]
    return np.unique([0, *np.argmax(held, axis=1), np.argmax(totals), *highest, *(part[-1] for part in intervals)])


def _find_operator(events: Iterable[dict[str, Any]], change: dict[str, Any] | None) -> str:
    if change is None:
        return ""
    at_us, place = change["ts"], (change.get("pid"), change.get("tid"))
    own = (e for e in events if e.get("cat") == "cpu_op" and (e.get("pid"), e.get("tid")) == place)
    around = [event for event in own if event["ts"] <= at_us <= event["ts"] + event["dur"]]
    return str(max(around, key=lambda event: float(event["ts"]))["name"]) if around else ""
