"""Several native groups side by side, so that a long vector is reduced by several cores of each rank at once.

One core waits for lines of memory most of the time. Where a host has more cores than ranks, the vector is cut, and each
piece goes through a group of its own with a thread of its own. The sums do not depend on it: every element is added up
in rank order wherever the cuts are. Tensors do not belong here (`group`).
"""

from __future__ import annotations

import contextlib
import time
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
        if asked not in map(str, range(1, _ALLOWED + 1)):
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
        first, *others = self._cut(asked)
        started = self._submit(self._groups[1:], others, timeout_s)
        try:
            self._first.run(first, timeout_s)
            for group, number in started:
                group.wait(number)
        except native.TransportError:
            self._let_go(started)
            raise

    def submit(self, asked: native.Asked, timeout_s: float = 0.0) -> tuple[int, ...]:
        """Start an operation behind those before it; its ticket."""
        return tuple(number for _, number in self._submit(self._groups, self._cut(asked), timeout_s))

    def wait(self, ticket: Sequence[int], timeout_s: float | None = None) -> None:
        """Wait for a ticket; unless it only takes longer, nothing of it runs any more after an error, in any lane."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        started = list(zip(self._groups, ticket, strict=False))
        try:
            for group, number in started:
                group.wait(number, None if deadline is None else max(0.0, deadline - time.monotonic()))
        except native.TransportError:
            if deadline is None or time.monotonic() < deadline:
                self._let_go(started)
            raise

    def _submit(
        self, groups: Sequence[native.NativeGroup], pieces: Sequence[native.Asked], timeout_s: float
    ) -> list[tuple[native.NativeGroup, int]]:
        started: list[tuple[native.NativeGroup, int]] = []
        try:
            for group, piece in zip(groups, pieces, strict=False):
                started.append((group, group.submit(piece, timeout_s)))
        except native.TransportError:
            self._let_go(started)
            raise
        return started

    def _let_go(self, started: Sequence[tuple[native.NativeGroup, int]]) -> None:
        """One lane has failed, and so do the others: none may write later to memory that is somebody else's by then."""
        for broken in self._groups:
            for group in self._groups:
                group.break_too(broken)
        for group, number in started:
            with contextlib.suppress(native.TransportError):
                group.wait(number)

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
