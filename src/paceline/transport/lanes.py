"""Several native groups side by side, so that a long vector is reduced by several cores of each rank at once.

One core waits for lines of memory most of the time. Where a host has more cores than ranks, the vector is cut, and each
piece goes through a group of its own with a thread of its own. The sums do not depend on it: every element is added up
in rank order wherever the cuts are.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import ConfigError
from paceline.transport import native

__all__ = ["Lanes", "choose_lanes"]

_MOST, _ALLOWED = 4, 16
# Waking another thread costs tens of microseconds.
_PIECE_BYTES = 512 << 10
_LINE_BYTES = 128


def choose_lanes(cores: Sequence[int], asked: str = "") -> int:
    """How many lanes ranks with so many cores each, on one host, should have: one where cores are not spare.

    `asked` is what PACELINE_LANES says on the first of them, which counts for all.
    """
    if asked:
        if not asked.isdigit() or not 1 <= int(asked) <= _ALLOWED:
            raise ConfigError(f"PACELINE_LANES={asked!r}: a number from 1 to {_ALLOWED}")
        return int(asked)
    return max(1, min(_MOST, min(cores) // len(cores)))


class Lanes:
    """A native group by its methods. A ticket is one number per lane that the operation uses, from the first on."""

    def __init__(self, groups: Sequence[native.NativeGroup]) -> None:
        self._groups = list(groups)
        self._first = self._groups[0]

    def run(self, asked: native.Asked, timeout_s: float = 0.0) -> None:
        """One operation, from its beginning to its end. A time limit of 0 is the group's."""
        pieces = self._cut(asked)
        others = zip(self._groups[1:], pieces[1:], strict=False)
        tickets = [(group, group.submit(piece, timeout_s)) for group, piece in others]
        self._first.run(pieces[0], timeout_s)
        for group, ticket in tickets:
            group.wait(ticket)

    def submit(self, asked: native.Asked, timeout_s: float = 0.0) -> tuple[int, ...]:
        """Start an operation behind those before it; its ticket."""
        pieces = self._cut(asked)
        return tuple(group.submit(piece, timeout_s) for group, piece in zip(self._groups, pieces, strict=False))

    def wait(self, ticket: Sequence[int], timeout_s: float | None = None) -> None:
        for group, number in zip(self._groups, ticket, strict=False):
            group.wait(number, timeout_s)

    def is_done(self, ticket: Sequence[int]) -> bool:
        return all(group.is_done(number) for group, number in zip(self._groups, ticket, strict=False))

    def add_arena(self, serial: int, address: int, part_bytes: int) -> bool:
        return all([group.add_arena(serial, address, part_bytes) for group in self._groups])

    def remove_arena(self, serial: int) -> None:
        for group in self._groups:
            group.remove_arena(serial)

    def close(self) -> None:
        for group in self._groups:
            group.close()

    def _cut(self, asked: native.Asked) -> list[native.Asked]:
        """A long all-reduce in as many pieces as there are lanes; anything else as it is."""
        kind, dtype, op, root, source, target, count = asked
        item = native.ITEM_BYTES[dtype]
        if kind != native.ALL_REDUCE or len(self._groups) == 1 or count * item < 2 * _PIECE_BYTES:
            return [asked]
        number = min(len(self._groups), count * item // _PIECE_BYTES)
        line = _LINE_BYTES // item
        each = -(-count // (number * line)) * line
        return [
            (kind, dtype, op, root, source + at * item, target + at * item, min(each, count - at))
            for at in range(0, count, each)
        ]
