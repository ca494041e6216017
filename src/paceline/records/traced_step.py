"""Steps of any data-parallel program, as recorded in a profiler trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from paceline.records.checked import Checked, PositiveCount, Seconds
from paceline.records.kinds import Record

# Messages that a backend transfers at the same time; 1 where it is not known.
SERVERS = {"gloo": 2}


@dataclass(frozen=True)
class TracedMessage(Checked):
    """One all-reduce of gradients: its launch, the start of the transfer, and its end, in seconds since backward
    began."""

    num_bytes: PositiveCount
    launch_s: float
    start_s: float
    done_s: float

    def find_faults(self) -> Iterator[str]:
        if not self.launch_s <= self.start_s <= self.done_s < math.inf:
            yield f"launched at {self.launch_s} s, started at {self.start_s} s and ended at {self.done_s} s"


@dataclass(frozen=True, kw_only=True)
class TracedStepRecord(Record):
    """One step of one rank. Its last backward begins after `before_s`, and the other times count from there. The rank's
    own backward ends at `backward_s`; the last message ends at `over_s`, and the step `after_s` later. `ready_s` and
    `gradient_bytes` list the gradients in ready order. `alone_s` are the backwards under `no_sync`, which send nothing.
    `launch_s` is the host time to launch a message; 0 where the device computes meanwhile. `are_sizes_known` is False
    if the trace has only the sizes of messages, not those of gradients. A step without messages sent nothing.
    `num_other` counts all-reduces inside backward that were not of gradients.

    On a GPU, `idle_s` is its idle time without exposed communication. Kernels that overlapped messages took `beside_s`,
    against `without_s` for the same kernels without messages; only kernels that ran both ways in this step count."""

    kind: ClassVar[str] = "traced_step"
    rank: int
    world_size: int
    device: str
    backend: str
    host: str
    number: int
    before_s: Seconds
    backward_s: Seconds
    after_s: Seconds
    gradient_bytes: tuple[int, ...]
    ready_s: tuple[Seconds, ...]
    messages: tuple[TracedMessage, ...]
    alone_s: tuple[Seconds, ...] = ()
    launch_s: Seconds = 0.0
    are_sizes_known: bool = True
    num_other: int = 0
    idle_s: Seconds = 0.0
    beside_s: Seconds = 0.0
    without_s: Seconds = 0.0

    @property
    def place(self) -> str:
        return f"step {self.number} of rank {self.rank}"

    def find_faults(self) -> Iterator[str]:
        if len(self.ready_s) != len(self.gradient_bytes) or not self.ready_s or max(self.ready_s) > self.backward_s:
            yield "gradients outside of its backward"
        if not self.backward_s:
            yield "a backward of 0 s"

    @property
    def over_s(self) -> float:
        """When the last gradient was reduced."""
        return max([self.backward_s, *(message.done_s for message in self.messages)])

    @property
    def step_s(self) -> float:
        return self.before_s + self.over_s + self.after_s

    @property
    def exposed_s(self) -> float:
        """From the end of the rank's own backward to that of the last message."""
        return self.over_s - self.backward_s

    @property
    def layout(self) -> tuple[int, ...]:
        return tuple(message.num_bytes for message in self.messages)
