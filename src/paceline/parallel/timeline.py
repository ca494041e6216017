"""When each bucket was ready, left and was done, in one step: what `report()` shows. Reducing does not belong here.

Reading a clock costs nothing; asking a message when it was done costs some microseconds, so that is sampled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["BucketTimes", "StepTimes", "Timeline"]

# Steps whose messages are asked when they were done: the first few of a plan, then every so many.
_FIRST, _EVERY = 4, 32


@dataclass
class BucketTimes:
    """Seconds since backward began. `done_s` is when the reduction was over, `waited_s` how long the host stood."""

    num_bytes: int
    ready_s: float = 0.0
    launch_s: float = 0.0
    done_s: float = 0.0
    waited_s: float = 0.0


@dataclass
class StepTimes:
    """One step: its buckets, when the local backward was over, and when all gradients were there.

    `begin_s` is the moment of `time.perf_counter` at which backward began, from which the others count.
    """

    buckets: list[BucketTimes]
    backward_s: float = 0.0
    over_s: float = 0.0
    is_sampled: bool = False
    events: dict[str, Any] = field(default_factory=dict)
    begin_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """How long at least one bucket was under way."""
        busy_s, until_s = 0.0, 0.0
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.launch_s):
            busy_s += max(0.0, bucket.done_s - max(bucket.launch_s, until_s))
            until_s = max(until_s, bucket.done_s)
        return busy_s

    @property
    def exposed_s(self) -> float:
        """Communication that backward did not hide."""
        return max(0.0, self.over_s - self.backward_s)


class Timeline:
    """Notes the times of the current step; `last` is the last whole step in which messages were asked."""

    def __init__(self, bucket_bytes: Sequence[int], device: torch.device) -> None:
        self._bytes, self._on_gpu = tuple(bucket_bytes), device.type == "cuda"
        self.num_steps = 0
        self.last: StepTimes | None = None
        self._exposed_s: float | None = None
        self.is_asked = False  # whether the next step is to be sampled, whatever its turn
        self._now = StepTimes([])
        self._begin_s = 0.0

    def begin(self) -> None:
        sampled = self.is_asked or self.num_steps < _FIRST or self.num_steps % _EVERY == 0
        self.is_asked = False
        self._now = StepTimes([BucketTimes(num_bytes) for num_bytes in self._bytes], is_sampled=sampled)
        self._begin_s = self._now.begin_s = time.perf_counter()
        if sampled and self._on_gpu:
            self._mark("begin")

    def _mark(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._now.events[name] = event

    def ready(self, number: int) -> None:
        self._now.buckets[number].ready_s = time.perf_counter() - self._begin_s
        if self._now.is_sampled and self._on_gpu:
            self._mark(f"ready {number}")

    def leaving(self, number: int) -> None:
        """Before the message is started: behind that, it may be half over, where cores are few."""
        self._now.buckets[number].launch_s = time.perf_counter() - self._begin_s

    def launched(self, number: int, work: Any) -> None:
        times = self._now.buckets[number]
        if not self._now.is_sampled or work is None or self._on_gpu:
            return
        future = work if isinstance(work, torch._C.Future) else work.get_future()
        begin_s = self._begin_s

        def note(_: Any) -> None:
            times.done_s = times.done_s or time.perf_counter() - begin_s

        future.add_done_callback(note)

    def backward_over(self) -> None:
        self._now.backward_s = time.perf_counter() - self._begin_s
        if self._now.is_sampled and self._on_gpu:
            self._mark("backward")

    def waiting(self, number: int) -> None:
        self._now.buckets[number].waited_s = -time.perf_counter()

    def done(self, number: int) -> None:
        times, now_s = self._now.buckets[number], time.perf_counter()
        times.waited_s += now_s
        if self._now.is_sampled and self._on_gpu:
            self._mark(f"done {number}")
        elif self._now.is_sampled:
            # Whoever waited may know before the thread that completes Futures.
            times.done_s = times.done_s or now_s - self._begin_s

    def over(self) -> None:
        self._now.over_s = time.perf_counter() - self._begin_s
        self.num_steps += 1
        if self._now.is_sampled:
            self.last = self._now
        if not self._on_gpu:
            self._exposed_s = self._now.exposed_s

    @property
    def exposed_s(self) -> float | None:
        """Of the last step; on a GPU, of the last that was sampled and is over. Waits for nothing."""
        if self._on_gpu and self.last is not None:
            events = self.last.events
            if all(event.query() for event in events.values()):
                step = self.read()
                self._exposed_s = None if step is None else step.exposed_s
        return self._exposed_s

    def read(self) -> StepTimes | None:
        """The last sampled step; on a GPU its events are resolved now, which waits for them."""
        step = self.last
        if step is None or not step.events:
            return step
        begin = step.events["begin"]
        for event in step.events.values():
            event.synchronize()

        def since(name: str) -> float:
            return float(begin.elapsed_time(step.events[name])) / 1e3

        step.backward_s = since("backward")
        for number, times in enumerate(step.buckets):
            times.ready_s, times.done_s = since(f"ready {number}"), since(f"done {number}")
            times.launch_s = times.ready_s
        # The stream passes the buckets in order: a bucket holds it up from the one before, or the end of backward.
        passed = step.backward_s
        for times in step.buckets:
            times.waited_s = max(0.0, times.done_s - passed)
            passed = max(passed, times.done_s)
        step.over_s = passed
        step.events = {}
        return step
