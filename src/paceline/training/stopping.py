"""SIGTERM and Ctrl-C as a wish: noted when they come, granted by the trainer between two steps.

Which ranks know of a signal, and when all of them stop, is settled in `journal`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

__all__ = ["ECHO_S", "StopWish", "catch_stop"]

# A signal that comes so soon after the first is the same wish: a whole process group is told at once, as `timeout` and
# service managers do, and a launcher that was told passes it on to ranks that were.
ECHO_S = 0.3


@dataclass
class StopWish:
    """The number of the signal that came first; 0 before any has."""

    number: int = 0


@contextlib.contextmanager
def catch_stop() -> Iterator[StopWish]:
    """Note SIGTERM and SIGINT instead of dying of them. The second one acts as it would have without this.

    A rank of our own launcher ignores SIGINT, and keeps ignoring it: its parent passes the wish on as SIGTERM.
    """
    wish, came_s = StopWish(), 0.0
    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    numbers = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal came_s
        if not wish.number:
            wish.number, came_s = number, time.monotonic()
        elif time.monotonic() - came_s > ECHO_S:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

    for number in numbers:
        signal.signal(number, note)
    try:
        yield wish
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
