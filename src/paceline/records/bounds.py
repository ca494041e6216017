"""What memory allows: an all-reduce beside the time that reading and writing its bytes once takes on every rank.

Nothing here prints; what one record says by itself belongs to `kinds`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.records.kinds import CollectiveRecord, MemoryRecord, Record

__all__ = ["MemoryBounds"]


@dataclass(frozen=True)
class MemoryBounds:
    """The least time that memory allows for each device, number of ranks, size and type that was measured."""

    records: tuple[MemoryRecord, ...]

    @classmethod
    def of(cls, records: Sequence[Record]) -> MemoryBounds:
        """The bounds of a run: of the passes over the same bytes, the faster one."""
        fastest: dict[tuple[str, int, int, str], MemoryRecord] = {}
        for record in records:
            if isinstance(record, MemoryRecord):
                known = fastest.setdefault(_place(record), record)
                if record.time_s < known.time_s:
                    fastest[_place(record)] = record
        return cls(tuple(fastest.values()))

    def bound_s(self, record: CollectiveRecord) -> float | None:
        """The least time for this all-reduce. None where nobody measured it, for the other collectives, and for one
        rank, which need not touch its vector."""
        if record.collective != "all_reduce" or record.world_size == 1:
            return None
        return next((bound.time_s for bound in self.records if _place(bound) == _place(record)), None)

    def fraction_of(self, record: CollectiveRecord) -> float | None:
        """The bound over this record's time: 1 is as fast as memory."""
        bound_s = self.bound_s(record)
        return None if bound_s is None else bound_s / record.time_s


def _place(record: CollectiveRecord | MemoryRecord) -> tuple[str, int, int, str]:
    return record.device, record.world_size, record.num_bytes, record.dtype
