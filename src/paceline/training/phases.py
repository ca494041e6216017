"""The phases of a step on this rank's clock, or on the GPU's by events that are read when the step is long over.

What is concluded from phases is in `measure.phases`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["NoPhases", "PhaseClock", "PhaseTimes", "Phases", "StepClock"]


class PhaseTimes:
    """Seconds of each phase of one step; a phase that came several times is added up."""

    def __init__(self, moments: Sequence[tuple[str, Any]] = ()) -> None:
        self._moments = moments

    def read(self) -> dict[str, float]:
        """On a GPU the step must be over: what is asked is when, not whether."""
        seconds: dict[str, float] = {}
        for (phase, begin), (_, end) in itertools.pairwise(self._moments):
            took_s = end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3
            seconds[phase] = seconds.get(phase, 0.0) + took_s
        return seconds


class Phases(Protocol):
    """Is told which phase of a step begins: `forward`, `backward` (with its waits), `optimizer`; and of the end."""

    def enter(self, phase: str) -> None: ...

    def end(self) -> PhaseTimes: ...


class NoPhases:
    """Times nothing."""

    def enter(self, phase: str) -> None:
        pass

    def end(self) -> PhaseTimes:
        return PhaseTimes()


class PhaseClock:
    """Notes the moment at which each phase begins, without making the host wait for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._moments: list[tuple[str, Any]] = []

    def enter(self, phase: str) -> None:
        if not self._on_gpu:
            self._moments.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._moments.append((phase, event))

    def end(self) -> PhaseTimes:
        self.enter("end")
        moments, self._moments = self._moments, []
        return PhaseTimes(moments)


class StepClock:
    """The time from step to step. On a GPU the device's own: the host may be steps ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._clock = PhaseClock(device)

    def start(self) -> None:
        """The next step begins now, and not where the last one ended."""
        self._clock.end()
        self._clock.enter("step")

    def lap(self) -> PhaseTimes:
        """The step that ends now, as `step`; the next one begins."""
        times = self._clock.end()
        self._clock.enter("step")
        return times
