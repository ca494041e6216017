"""When each bucket of a step was ready, sent and done, and the report that a person reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.plan import Plan
from paceline.report.table import Column, Table
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
    """One step. `begin_s` is the reading of `time.perf_counter` when backward began; other times count from it."""

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
    """Records the times of a step; `last` is the last one sampled, `sample_next` samples the next in any case."""

    def __init__(self, bucket_bytes: Sequence[int], device: torch.device) -> None:
        self._bytes, self._on_gpu = tuple(bucket_bytes), device.type == "cuda"
        self.num_steps, self.sample_next = 0, False
        self.last: StepTimes | None = None
        self._exposed_s: float | None = None
        self._now, self._marks = StepTimes([]), False

    def begin(self) -> None:
        sampled = self.sample_next or self.num_steps < _FIRST or self.num_steps % _EVERY == 0
        self.sample_next = False
        self._now = StepTimes([BucketTimes(num_bytes) for num_bytes in self._bytes], is_sampled=sampled)
        self._marks = self._on_gpu and sampled
        self._now.begin_s = time.perf_counter()
        self._mark("begin")

    def _mark(self, name: str, number: int = 0) -> None:
        if self._marks:
            event = self._now.events[f"{name} {number}"] = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()

    def ready(self, number: int) -> None:
        self._now.buckets[number].ready_s = time.perf_counter() - self._now.begin_s
        if self._marks:
            self._mark("ready", number)

    def leaving(self, number: int) -> None:
        """Before the message is started: after that it may be half done, where cores are few."""
        self._now.buckets[number].launch_s = time.perf_counter() - self._now.begin_s

    def launched(self, number: int, work: Any) -> None:
        if not self._now.is_sampled or work is None or self._on_gpu:
            return
        times, begin_s = self._now.buckets[number], self._now.begin_s

        def note(_: Any) -> None:
            times.done_s = times.done_s or time.perf_counter() - begin_s

        (work if isinstance(work, torch._C.Future) else work.get_future()).add_done_callback(note)

    def backward_over(self) -> None:
        self._now.backward_s = time.perf_counter() - self._now.begin_s
        self._mark("backward")

    def waiting(self, number: int) -> None:
        self._now.buckets[number].waited_s = -time.perf_counter()

    def done(self, number: int) -> None:
        times, now_s = self._now.buckets[number], time.perf_counter()
        times.waited_s += now_s
        if self._marks:
            self._mark("done", number)
        if self._now.is_sampled:
            # The waiting thread may know it before the thread that completes Futures.
            times.done_s = times.done_s or now_s - self._now.begin_s

    def over(self) -> None:
        self._now.over_s = time.perf_counter() - self._now.begin_s
        self.num_steps += 1
        if self._now.is_sampled:
            self.last = self._now
        if not self._on_gpu:
            self._exposed_s = self._now.exposed_s

    @property
    def exposed_s(self) -> float | None:
        """Of the last step; on a GPU, of the last sampled step that is over. Does not wait."""
        if self._on_gpu and self.last is not None and all(event.query() for event in self.last.events.values()):
            step = self.read()
            self._exposed_s = None if step is None else step.exposed_s
        return self._exposed_s

    def read(self) -> StepTimes | None:
        """The last sampled step. On a GPU this waits for its events."""
        step = self.last
        if step is None or not step.events:
            return step
        for event in step.events.values():
            event.synchronize()
        at_s = {name: step.events["begin 0"].elapsed_time(event) / 1e3 for name, event in step.events.items()}
        # The stream waits for the buckets in order: for each from the end of the one before, or of backward.
        step.backward_s = step.over_s = at_s["backward 0"]
        for number, times in enumerate(step.buckets):
            times.ready_s = times.launch_s = at_s[f"ready {number}"]
            times.done_s = at_s[f"done {number}"]
            times.waited_s = max(0.0, times.done_s - step.over_s)
            step.over_s = max(step.over_s, times.done_s)
        step.events = {}
        return step


_COLUMNS = (
    Column("bucket", lambda row: row[0], "number"),
    Column("size", lambda row: row[1].num_bytes, "bytes"),
    Column("ready", lambda row: row[1].ready_s, "ms"),
    Column("launch", lambda row: row[1].launch_s, "ms"),
    Column("done", lambda row: row[1].done_s, "ms"),
    Column("waited", lambda row: row[1].waited_s, "ms"),
)


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

    def __str__(self) -> str:
        num_buckets, times = len(self.plan.buckets), self.times
        head = f"rank {self.rank} of {self.world_size} on {self.backend}, {self.num_steps} synchronised steps; "
        head += f"buckets: {num_buckets}, {format_bytes(self.plan.num_bytes)} ({self.plan.rule})"
        if times is None:
            return f"{head}\nno step has been timed yet"
        table = Table("buckets", "", _COLUMNS, list(enumerate(times.buckets))).terminal(None)
        over, averaged, exposed = map(format_ms, (times.backward_s, times.over_s, times.exposed_s))
        ends = f"backward over at {over} ms, all gradients averaged at {averaged} ms: {exposed} ms exposed"
        return "\n".join([head, table, ends, self.advice])

    @property
    def advice(self) -> str:
        """One sentence on what limits the step; empty where none was timed."""
        if (times := self.times) is None:
            return ""
        if self.world_size == 1:
            return "one rank: there is no communication"
        if times.exposed_s < 0.02 * times.backward_s:
            return "communication is hidden behind backward: only less computation could make the step faster"
        last, has_several = times.buckets[-1], len(times.buckets) > 1
        tail_s = max(0.0, last.done_s - max(last.launch_s, times.backward_s))
        if tail_s > 0.7 * times.exposed_s and has_several:
            exposed = f"the last bucket ({format_bytes(last.num_bytes)}) is exposed for {format_ms(tail_s)} ms"
            return f"{exposed}: a smaller one, or one before it that is sent earlier, would shorten the step"
        if times.buckets[0].ready_s > 0.5 * times.backward_s and has_several:
            return "the first bucket is ready only in the second half of backward: smaller ones would start sooner"
        if times.busy_s > times.backward_s:
            busy, backward = format_ms(times.busy_s), format_ms(times.backward_s)
            found = f"communication takes {busy} ms and backward {backward} ms: no plan can hide it all"
            return f"{found}; accumulate, send fewer bytes (a bf16 hook), or use a faster transport"
        return "communication starts too late to be hidden: more, smaller buckets would start sooner"
