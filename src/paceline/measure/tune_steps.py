"""The steps that a tuning takes in turns: their sorts, what is noted in them, and the wrapper around them.

Whose turn it is, and what becomes of the times, is in `tuning`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.measure.layer_moments import LayerHooks, Moments
from paceline.parallel import DataParallel
from paceline.parallel.channel import Channel
from paceline.plan import Plan
from paceline.training.step import Learner, PhaseClock
from paceline.units import MIB

__all__ = ["PHASES", "Candidate", "Disturbance", "ReadyPhases", "Variant", "time_alone", "wrap"]

PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Candidate:
    """A way to cut the job's gradients: a cap, a plan, or neither, which is the wrapper's own default."""

    label: str
    cap_bytes: int = 0
    plan: Plan | None = None


@dataclass
class Variant:
    """Steps of one sort on this rank."""

    role: str
    label: str
    learner: Learner
    cap_bytes: int = 0
    message_bytes: int = 0
    num_messages: int = 0
    step_s: list[float] = field(default_factory=list)
    phases_s: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    under_way_s: list[float] = field(default_factory=list)
    overlapped_s: list[float] = field(default_factory=list)


class ReadyPhases(PhaseClock):
    """Notes when each gradient is ready, besides the phases."""

    def __init__(self, device: torch.device, hooks: LayerHooks, moments: Moments) -> None:
        super().__init__(device)
        self._hooks, self._marks = hooks, moments
        self.borders: list[int] = []

    def enter(self, phase: str) -> None:
        if phase == "backward":
            self.borders = [self._marks.mark()]
            self._hooks.begin_backward(self.borders[0])
        elif phase == "optimizer":
            self.borders.append(self._marks.mark())
        super().enter(phase)


class Disturbance:
    """Messages of one size that leave when certain gradients are ready, as buckets do, and nobody waits for."""

    def __init__(self, channel: Channel, memory: torch.Tensor, num_bytes: int, is_asked: bool) -> None:
        self._channel, self._memory, self._num_bytes, self._is_asked = channel, memory, num_bytes, is_asked
        self._works: list[dist.Work] = []
        self._spans: list[list[float]] = []

    def fire(self, *grads: Any) -> None:
        span = [time.perf_counter(), 0.0]
        number = len(self._works)
        elements = self._num_bytes // self._memory.element_size()
        start = number * elements % max(1, self._memory.numel() - elements + 1)
        work = self._channel.start_sum(self._memory[start : start + elements])
        self._works.append(work)
        self._spans.append(span)
        if not self._is_asked:
            return

        def note(_: Any) -> None:
            span[1] = span[1] or time.perf_counter()

        work.get_future().add_done_callback(note)

    def finish(self, backward_end_s: float) -> tuple[float, float]:
        """Wait for all; the mean seconds from start to end, and of that before the end of backward."""
        for work, span in zip(self._works, self._spans, strict=True):
            work.wait()
            span[1] = span[1] or time.perf_counter()
        count = max(1, len(self._spans))
        under_way_s = sum(end - begin for begin, end in self._spans) / count
        before_s = sum(max(0.0, min(end, backward_end_s) - begin) for begin, end in self._spans) / count
        return under_way_s, before_s


def time_alone(channel: Channel, memory: torch.Tensor, num_bytes: int) -> float:
    """Seconds of one message, the quicker of a few. Collective: every rank must call this."""
    part = memory[: max(1, num_bytes // memory.element_size())]
    times = []
    for _ in range(3):
        begin_s = time.perf_counter()
        channel.wait(channel.start_sum(part), "a message that is timed")
        times.append(time.perf_counter() - begin_s)
    return min(times)


def wrap(module: nn.Module, wrapper: str, candidate: Candidate, group: dist.ProcessGroup | None) -> nn.Module:
    cap: dict[str, Any] = {"bucket_cap_mb": candidate.cap_bytes / MIB} if candidate.cap_bytes else {}
    if wrapper == "paceline":
        return DataParallel(module, process_group=group, plan=candidate.plan, **cap)
    kwargs: dict[str, Any] = candidate.plan.as_torch_kwargs() if candidate.plan is not None else dict(cap)
    return DistributedDataParallel(module, process_group=group, **kwargs)
