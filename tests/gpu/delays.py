"""Random delays on the streams of a GPU or on the host: what does not wait for them reads or writes at a wrong time."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.gpu.gpu_ranks import patched

LONGEST_S = 0.002
_CYCLES_PER_S = 1.8e9  # roughly, on the GPUs at hand
# Where a repetition delays: on the host, on the stream of the program, or on every other stream that the wrapper uses.
PLACES = ("host", "before backward", "in backward", "before the step", "side streams")


class Delays:
    """Delays one rank, or all of them (-1), at one place. All ranks draw the same rank and place from the seed."""

    def __init__(self, seed: str, rank: int, world_size: int, device: torch.device) -> None:
        draw = random.Random(seed)
        self.place, self.rank = draw.choice(PLACES), draw.randrange(-1, world_size)
        self._draw = random.Random(f"{seed} {rank}")
        self._is_here, self._device = self.rank in (-1, rank), device

    def __str__(self) -> str:
        return f"delay at {self.place!r} on {'all ranks' if self.rank < 0 else f'rank {self.rank}'}"

    def at(self, place: str) -> None:
        """Delay here, if this is the place."""
        if place != self.place or not self._is_here:
            return
        seconds = self._draw.uniform(0, LONGEST_S)
        if place == "host" or self._device.type == "cpu":
            time.sleep(seconds)
        else:
            torch.cuda._sleep(int(seconds * _CYCLES_PER_S))


@contextlib.contextmanager
def on_side_streams(delay: Callable[[], None], without_waits: bool = False) -> Iterator[None]:
    """Call `delay` on every stream that the wrapper switches to. `without_waits`: streams do not wait for each other
    where the wrapper says that they should."""
    enter = torch.cuda.StreamContext.__enter__

    def enter_late(self: Any) -> None:
        enter(self)
        if self.stream is not None and _is_called_by_wrapper():
            delay()

    def pass_by(wait: Callable[..., None]) -> Callable[..., None]:
        def wait_unless_called_by_wrapper(*args: Any) -> None:
            if not _is_called_by_wrapper():
                wait(*args)

        return wait_unless_called_by_wrapper

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(torch.cuda.StreamContext, "__enter__", enter_late))
        if without_waits:
            for owner, name in (
                (torch.cuda.Stream, "wait_stream"),
                (torch.cuda.Stream, "wait_event"),
                (torch.cuda.Event, "wait"),
            ):
                stack.enter_context(patched(owner, name, pass_by(getattr(owner, name))))
        yield


def _is_called_by_wrapper() -> bool:
    """Whether the function that calls this one was called by the wrapper's code."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("paceline.parallel")
