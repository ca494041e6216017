"""Random delays on GPU streams or on the host: code that fails to wait for them reads or writes at the wrong time."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paceline.parallel.streams import SideStream
from tests.gpu.gpu_ranks import patched

LONGEST_S = 0.002
_CYCLES_PER_S = 1.8e9  # approximate clock rate of the GPUs tested
# Where a repetition delays: on the host, on the program's stream, or on every other stream that the wrapper uses.
PLACES = ("host", "before backward", "in backward", "before the step", "side streams")


class Delays:
    """Delays one rank, or all of them (-1), at one place. All ranks draw the same rank and place from the seed; without
    a seed, nothing is delayed."""

    def __init__(self, seed: str, rank: int, world_size: int, device: torch.device) -> None:
        draw = random.Random(seed)
        self.place, self.rank = draw.choice(PLACES) if seed else "", draw.randrange(-1, world_size)
        self._draw = random.Random(f"{seed} {rank}")
        self._is_here, self._device = self.rank in (-1, rank), device

    def __str__(self) -> str:
        return f"delay at {self.place!r} on {'all ranks' if self.rank < 0 else f'rank {self.rank}'}"

    def at(self, place: str) -> None:
        """Delay here if this is the place."""
        if place != self.place or not self._is_here:
            return
        seconds = self._draw.uniform(0, LONGEST_S)
        if place == "host" or self._device.type == "cpu":
            time.sleep(seconds)
        else:
            torch.cuda._sleep(int(seconds * _CYCLES_PER_S))


@contextlib.contextmanager
def on_side_streams(delay: Callable[[], None], without: str = "") -> Iterator[None]:
    """Call `delay` on every stream that the wrapper switches to. `without`: the wait of `SideStream` to leave out."""
    enter = torch.cuda.StreamContext.__enter__

    def enter_late(self: Any) -> None:
        enter(self)
        if self.stream is not None and _is_called_by_wrapper():
            delay()

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(torch.cuda.StreamContext, "__enter__", enter_late))
        if without:
            stack.enter_context(patched(SideStream, without, MUTANTS[without]))
        yield


def _is_called_by_wrapper() -> bool:
    """Whether the caller of this function was called by the wrapper's code."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("paceline.parallel")


# Waits of an exchange, each with a replacement that does not wait.
MUTANTS: dict[str, Callable[..., None]] = {
    "follow_caller": lambda self: None,
    "receive": lambda self, work: None,
}
