"""Records when each bucket of a step was ready, launched and done, and reports it to the user."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline import torch_internals
from paceline.plan import Plan
from paceline.records.findings import Finding
from paceline.report.table import Column, Table
from paceline.strategy import Strategy
from paceline.units import format_bytes, format_ms

# Recorded steps: the first 4 with a plan, then every 32nd.
_FIRST, _EVERY = 4, 32


@dataclass
class BucketTimes:
    """Seconds since backward began. `done_s` is the end of the reduction, `waited_s` how long the host waited."""

    num_bytes: int
    ready_s: float = 0.0
    launch_s: float = 0.0
    done_s: float = 0.0
    waited_s: float = 0.0


@dataclass
class StepTimes:
    """Times of one step, relative to the start of backward, `begin_s` (by `time.perf_counter()`)."""

    buckets: list[BucketTimes]
    backward_s: float
    over_s: float
    begin_s: float
    rows_s: tuple[float, float] | None = None  # when embedding rows were sent, and when those of all ranks were added

    @property
    def busy_s(self) -> float:
        """The time during which at least one message was in flight."""
        busy_s, until_s = 0.0, 0.0
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.launch_s):
            busy_s += max(0.0, bucket.done_s - max(bucket.launch_s, until_s))
            until_s = max(until_s, bucket.done_s)
        return busy_s + (0.0 if self.rows_s is None else self.rows_s[1] - self.rows_s[0])

    @property
    def exposed_s(self) -> float:
        """Communication time after the end of backward."""
        return max(0.0, self.over_s - self.backward_s)


class Timeline:
    """Records the times of some steps, on a GPU as stream events. `sample_next` forces recording of the next step."""

    def __init__(self, bucket_bytes: Sequence[int], device: torch.device) -> None:
        self._bytes, self._on_gpu = tuple(bucket_bytes), device.type == "cuda"
        self._num_steps, self.sample_next = 0, False
        self._begin_s = self._backward_s = 0.0
        # Seconds or events by name and bucket: of this step if it is recorded, and of the last recorded step.
        self._marks: dict[tuple[str, int], Any] | None = None
        self._unread: tuple[float, dict[tuple[str, int], Any]] | None = None
        self._last: StepTimes | None = None
        self._recorded = -1  # number of the last recorded step
        self._exposed_s: float | None = None

    def begin(self) -> None:
        is_recorded = self.sample_next or self._num_steps < _FIRST or self._num_steps % _EVERY == 0
        self.sample_next = False
        self._marks = {} if is_recorded else None
        self._begin_s = time.perf_counter()
        self.mark("begin")

    def mark(self, name: str, number: int = 0) -> None:
        """Record the current time for this event of a bucket."""
        if self._marks is None:
            return
        if self._on_gpu:
            event = self._marks[name, number] = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        else:
            self._marks[name, number] = time.perf_counter() - self._begin_s

    def follow(self, number: int, work: Any) -> None:
        """Record when this message ends."""
        if self._marks is not None and work is not None and not self._on_gpu:
            marks, begin_s = self._marks, self._begin_s
            future = work if isinstance(work, torch_internals.Future) else work.get_future()
            future.add_done_callback(lambda _: marks.setdefault(("done", number), time.perf_counter() - begin_s))

    def backward_over(self) -> None:
        self._backward_s = time.perf_counter()
        self.mark("backward")

    def over(self) -> None:
        self._num_steps += 1
        if not self._on_gpu:
            self._exposed_s = time.perf_counter() - self._backward_s
        if self._marks is not None:
            self.mark("over")
            self._recorded = self._num_steps
            self._unread = self._begin_s, self._marks

    @property
    def exposed_s(self) -> float | None:
        """Exposed time of the last step or, on a GPU, of the last recorded step that has finished. Does not wait."""
        if self._on_gpu and self._unread is not None and all(event.query() for event in self._unread[1].values()):
            step = self.read()
            self._exposed_s = None if step is None else step.exposed_s
        return self._exposed_s

    @property
    def age(self) -> int | None:
        """How many steps ago the last recorded step was (0: the last step); None if no step was recorded."""
        return self._num_steps - self._recorded if self._recorded >= 0 else None

    def read(self) -> StepTimes | None:
        """The last recorded step. On a GPU this waits for its events."""
        if self._unread is not None:
            (begin_s, at_s), self._unread = self._unread, None
            if self._on_gpu:
                for event in at_s.values():
                    event.synchronize()
                at_s = {key: at_s["begin", 0].elapsed_time(event) / 1e3 for key, event in at_s.items()}
            rows_s = (at_s["rows", 0], at_s["rows done", 0]) if ("rows done", 0) in at_s else None
            self._last = StepTimes([], at_s["backward", 0], at_s["over", 0], begin_s, rows_s)
            for number, num_bytes in enumerate(self._bytes):
                ready_s, launch_s, wait_s, waited_s = (at_s[k, number] for k in ("ready", "launch", "wait", "waited"))
                # The waiting thread may notice the end before the thread that completes Futures.
                done_s = min(waited_s, at_s.get(("done", number), waited_s))
                self._last.buckets.append(BucketTimes(num_bytes, ready_s, launch_s, done_s, waited_s - wait_s))
        return self._last


_COLUMNS = (
    Column("bucket", lambda row: row[0], "number"),
    Column("size", lambda row: row[1].num_bytes, "bytes"),
    Column("ready", lambda row: row[1].ready_s, "ms"),
    Column("launch", lambda row: row[1].launch_s, "ms"),
    Column("done", lambda row: row[1].done_s, "ms"),
    Column("waited", lambda row: row[1].waited_s, "ms"),
)


@dataclass(frozen=True)
class StrategyCosts:
    """Cost of a strategy on a rank: mean bytes sent (the same number is received) and host seconds per step.
    `memory_bytes` counts all state that it keeps, including a sharded optimizer's state on this rank."""

    text: str
    sent_bytes: int
    memory_bytes: int
    encode_s: float
    decode_s: float

    def __str__(self) -> str:
        sent, memory = format_bytes(self.sent_bytes), format_bytes(self.memory_bytes)
        spent = f"encoding takes {format_ms(self.encode_s)} ms, decoding {format_ms(self.decode_s)} ms; memory {memory}"
        return f"strategy {self.text}: {sent} sent and {sent} received per step, {spent}"


@dataclass(frozen=True)
class Report:
    """The plan, the times of one synchronized step on this rank, and what limits the step."""

    rank: int
    world_size: int
    backend: str
    num_steps: int
    plan: Plan
    times: StepTimes | None
    strategy: StrategyCosts | None = None  # None: plain all-reduce
    embeddings: tuple[str, ...] = ()  # how each embedding is sent

    @property
    def exposed_s(self) -> float | None:
        """Communication time after the end of this rank's backward."""
        return None if self.times is None else self.times.exposed_s

    def __str__(self) -> str:
        num_buckets, times = len(self.plan.buckets), self.times
        head = f"rank {self.rank} of {self.world_size} on {self.backend}, {self.num_steps} synchronized steps; "
        head += f"buckets: {num_buckets}, {format_bytes(self.plan.num_bytes)} ({self.plan.rule})"
        head += f"\n{self.strategy}" if self.strategy is not None else ""
        head = "\n".join([head, *self.embeddings])
        if times is None and self.strategy is not None and Strategy.parse(self.strategy.text).outer:
            return f"{head}\nthis strategy averages parameters, so there are no buckets to time"
        if times is None:
            return f"{head}\nno step has been timed yet"
        table = Table("buckets", "", _COLUMNS, list(enumerate(times.buckets))).terminal(None)
        over, averaged, exposed = map(format_ms, (times.backward_s, times.over_s, times.exposed_s))
        ends = f"backward ends at {over} ms, all gradients averaged at {averaged} ms: {exposed} ms exposed"
        if times.rows_s is not None:
            sent, added = map(format_ms, times.rows_s)
            ends = f"embedding rows sent at {sent} ms, added at {added} ms\n{ends}"
        return "\n".join([head, table, ends, self.advice])

    @property
    def advice(self) -> str:
        """What limits the step, as one line; empty if no step was timed."""
        return "" if self.finding is None else self.finding.text

    @property
    def finding(self) -> Finding | None:
        """What limits the step; None if no step was timed."""
        if (times := self.times) is None:
            return None
        if self.world_size == 1:
            return Finding("computing", "one rank", "there is no communication")
        if times.exposed_s < 0.02 * times.backward_s:
            hidden = "communication is hidden behind backward"
            return Finding("computing", hidden, "only faster computation would shorten the step")
        kind, evidence, cure = self._find_exposed(times)
        return Finding(kind, evidence, cure, times.exposed_s, "at most", times.over_s, self.rank)

    def _find_exposed(self, times: StepTimes) -> tuple[str, str, str]:
        """Why communication is exposed and what would hide it."""
        last, has_several = times.buckets[-1], len(times.buckets) > 1
        tail_s = max(0.0, last.done_s - max(last.launch_s, times.backward_s))
        if tail_s > 0.7 * times.exposed_s and has_several:
            exposed = f"the last bucket ({format_bytes(last.num_bytes)}) is exposed for {format_ms(tail_s)} ms"
            cure = "a smaller last bucket, or sending an earlier bucket sooner, would shorten the step"
            return "buckets", exposed, cure
        if times.buckets[0].ready_s > 0.5 * times.backward_s and has_several:
            late = "the first bucket is ready only in the second half of backward"
            return "buckets", late, "smaller buckets would start sooner"
        if times.busy_s > times.backward_s:
            busy, backward = format_ms(times.busy_s), format_ms(times.backward_s)
            fewer = "send fewer bytes (strategy='bf16')" if self.strategy is None else "send fewer bytes"
            takes = f"communication takes {busy} ms and backward {backward} ms, so no plan can hide all of it"
            return "network", takes, f"accumulate gradients, {fewer}, or use a faster transport"
        late = "communication starts too late to be hidden"
        return "buckets", late, "more, smaller buckets would start sooner"
