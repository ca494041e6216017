"""When each bucket of a step was ready, sent and done, and the report that a person reads.

Reading a clock costs nothing. A callback at the end of a message costs some microseconds, so those are sampled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.plan import Plan
from paceline.units import format_bytes, format_ms

# Steps in which the end of each message is timed: the first 4 with a plan, then every 32nd.
_FIRST, _EVERY = 4, 32


@dataclass
class BucketTimes:
    """Seconds since backward began. `done_s` is the end of the reduction, `waited_s` the time that the host waited."""

    num_bytes: int
    ready_s: float = 0.0
    launch_s: float = 0.0
    done_s: float = 0.0
    waited_s: float = 0.0


@dataclass
class StepTimes:
    """One step: its buckets, when the local backward was over, and when all gradients were averaged.

    `begin_s` is the reading of `time.perf_counter` when backward began. The other times count from it.
    """

    buckets: list[BucketTimes]
    backward_s: float = 0.0
    over_s: float = 0.0
    is_sampled: bool = False
    events: dict[str, Any] = field(default_factory=dict)
    begin_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """How long at least one bucket was in flight."""
        busy_s, until_s = 0.0, 0.0
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.launch_s):
            busy_s += max(0.0, bucket.done_s - max(bucket.launch_s, until_s))
            until_s = max(until_s, bucket.done_s)
        return busy_s

    @property
    def exposed_s(self) -> float:
        """Communication after the end of backward."""
        return max(0.0, self.over_s - self.backward_s)


class Timeline:
    """Records the times of the current step; `last` is the last complete step that was sampled."""

    def __init__(self, bucket_bytes: Sequence[int], device: torch.device) -> None:
        self._bytes, self._on_gpu = tuple(bucket_bytes), device.type == "cuda"
        self.num_steps = 0
        self.last: StepTimes | None = None
        self._exposed_s: float | None = None
        self.sample_next = False  # whether the next step is sampled in any case
        self._now = StepTimes([])
        self._begin_s = 0.0

    def begin(self) -> None:
        sampled = self.sample_next or self.num_steps < _FIRST or self.num_steps % _EVERY == 0
        self.sample_next = False
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
        """Before the message is started: after that it may be half done, where cores are few."""
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
            # The waiting thread may know it before the thread that completes Futures.
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
        """Of the last step; on a GPU, of the last sampled step that is over. Does not wait."""
        if self._on_gpu and self.last is not None:
            events = self.last.events
            if all(event.query() for event in events.values()):
                step = self.read()
                self._exposed_s = None if step is None else step.exposed_s
        return self._exposed_s

    def read(self) -> StepTimes | None:
        """The last sampled step. On a GPU this waits for its events."""
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
        # The stream waits for the buckets in order: for each from the end of the one before, or of backward.
        passed = step.backward_s
        for times in step.buckets:
            times.waited_s = max(0.0, times.done_s - passed)
            passed = max(passed, times.done_s)
        step.over_s = passed
        step.events = {}
        return step


@dataclass(frozen=True)
class Report:
    """The plan, the times of one synchronised step on this rank, and what limits it."""

    rank: int
    world_size: int
    backend: str
    num_steps: int
    plan: Plan
    times: StepTimes | None

    @property
    def exposed_s(self) -> float | None:
        """Communication after the end of this rank's backward."""
        return None if self.times is None else self.times.exposed_s

    @property
    def advice(self) -> str:
        """One sentence on what limits the step; empty where none was timed."""
        return "" if self.times is None else _advise(self.times, self.world_size)

    def __str__(self) -> str:
        head = (
            f"rank {self.rank} of {self.world_size} on {self.backend}, {self.num_steps} synchronised steps; "
            f"{len(self.plan.buckets)} {'buckets' if len(self.plan.buckets) > 1 else 'bucket'}, "
            f"{format_bytes(self.plan.num_bytes)} ({self.plan.rule})"
        )
        if self.times is None:
            return f"{head}\nno step has been timed yet"
        rows: list[tuple[str, ...]] = [("bucket", "bytes", "ready ms", "launch ms", "done ms", "waited ms")]
        for number, times in enumerate(self.times.buckets):
            moments = (times.ready_s, times.launch_s, times.done_s, times.waited_s)
            rows.append((str(number), format_bytes(times.num_bytes), *(format_ms(moment) for moment in moments)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        ends = (
            f"backward over at {format_ms(self.times.backward_s)} ms, all gradients averaged at "
            f"{format_ms(self.times.over_s)} ms: {format_ms(self.times.exposed_s)} ms of communication exposed"
        )
        return "\n".join([head, *table, ends, self.advice])


def _advise(times: StepTimes, world_size: int) -> str:
    if world_size == 1:
        return "one rank: there is no communication"
    if times.exposed_s < 0.02 * times.backward_s:
        return "communication is hidden behind backward: only less computation could make the step faster"
    busy_s = sum(max(0.0, bucket.done_s - bucket.launch_s) for bucket in times.buckets)
    last = times.buckets[-1]
    tail_s = max(0.0, last.done_s - max(last.launch_s, times.backward_s))
    if tail_s > 0.7 * times.exposed_s and len(times.buckets) > 1:
        return (
            f"the last bucket ({format_bytes(last.num_bytes)}) is exposed for {format_ms(tail_s)} ms: a smaller last "
            "bucket, or one before it that is sent earlier, would shorten the step"
        )
    if times.buckets[0].ready_s > 0.5 * times.backward_s and len(times.buckets) > 1:
        return "the first bucket is ready only in the second half of backward: smaller early buckets would start sooner"
    if busy_s > times.backward_s:
        return (
            f"communication takes {format_ms(busy_s)} ms and backward {format_ms(times.backward_s)} ms: no plan can "
            "hide it all; accumulate over more micro-batches, send fewer bytes (a bf16 hook), or use a faster transport"
        )
    return "communication starts too late to be hidden: more, smaller buckets would start sooner"
