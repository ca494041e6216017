"""Disturbs steps with messages that are sent when gradients are ready, like buckets, without the step waiting for them.

On several ranks the messages are real. On one rank a thread, or a separate stream on a GPU, moves the same number of
bytes as a collective. `predict.predictor` fits how much computation and messages slow each other down.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.measure.engine import synchronize
from paceline.measure.step_bench import Probe, Variant, hook_gradients
from paceline.parallel.channel import Channel
from paceline.runtime.ranks.moments import between_s, mark
from paceline.runtime.ranks.world import World
from paceline.training.step import Phases, PhaseTimes

_MOST_BURSTS = 4  # maximum number of bursts of messages during backward
_SLOWEST = 6.0  # assumed slowdown of messages during a step, so that each burst ends before the next one starts
# Fraction of backward to fill with messages. On one rank a message is short, so it is repeated: otherwise step noise
# would hide its cost.
_SHARE = 0.25
_CHUNK = 1 << 18  # elements per copy, as in a collective


class Traffic:
    """Sends messages from `memory`. `send` starts a burst and immediately returns its start and end as device
    timestamps; the end is valid once `wait` has returned. `is_free` means that timing the messages does not slow the
    step."""

    is_free = True

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.device = memory.device
        self._sent = 0

    def count_most(self, num_bytes: int) -> int:
        """Maximum number of messages of this size in a burst."""
        return max(1, self.memory.nbytes // num_bytes)

    def send(self, num_bytes: int, count: int, is_timed: bool = True) -> list[Any]:
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for all messages. A no-op on a GPU, where the end of the step includes them."""

    def close(self) -> None:
        self.wait()

    def _take(self, num_bytes: int) -> torch.Tensor:
        """The next contiguous slice of the memory, like a bucket's."""
        elements = max(1, num_bytes // self.memory.element_size())
        start = self._sent * elements % max(1, self.memory.numel() - elements + 1)
        self._sent += 1
        return self.memory[start : start + elements]


class _Messages(Traffic):
    """Real messages between all ranks, one at a time. Collective: every rank must send the same messages.

    With NCCL a side stream waits for each message, to time it. A GPU has few hardware queues, fewer still under MPS: if
    the side stream shared a queue with the compute stream, this wait would stall the step.
    """

    is_free = False

    def __init__(self, channel: Channel, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self._channel = channel
        self._works: list[tuple[dist.Work, list[Any]]] = []
        self._side = torch.cuda.Stream(self.device) if channel.is_nccl else None  # type: ignore[no-untyped-call]

    def count_most(self, num_bytes: int) -> int:
        return 1

    def send(self, num_bytes: int, count: int, is_timed: bool = True) -> list[Any]:
        span = [mark(self.device), None]
        work = self._channel.start_sum(self._take(num_bytes))
        if is_timed and self._side is not None:
            with torch.cuda.stream(self._side):
                work.wait()  # blocks the stream, not this thread
                span[1] = mark(self.device)
        elif is_timed:
            work.get_future().add_done_callback(lambda _: _note_end(span))
        self._works.append((work, span))
        return span

    def wait(self) -> None:
        for work, span in self._works:
            if self._side is None:
                self._channel.wait(work, "a timed message")
                _note_end(span)
        self._works.clear()


class _Copies(Traffic):
    """A separate thread, like a backend's, that reads, adds and copies the bytes. numpy releases the GIL meanwhile."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self._total = np.zeros(_CHUNK, dtype=np.float32)
        self._thread = ThreadPoolExecutor(1, "paceline-traffic")
        self._pending: list[Future[None]] = []

    def send(self, num_bytes: int, count: int, is_timed: bool = True) -> list[Any]:
        span: list[Any] = [time.perf_counter(), None]
        parts = [self._take(num_bytes).numpy() for _ in range(count)]
        self._pending.append(self._thread.submit(self._copy, parts, span))
        return span

    def wait(self) -> None:
        for future in self._pending:
            future.result()
        self._pending.clear()

    def close(self) -> None:
        self._thread.shutdown()

    def _copy(self, parts: list[Any], span: list[Any]) -> None:
        for part in parts:
            for start in range(0, len(part), _CHUNK):
                piece = part[start : start + _CHUNK]
                total = self._total[: len(piece)]
                np.add(total, piece, out=total)
                np.copyto(piece, total)
        span[1] = time.perf_counter()


class _Kernels(Traffic):
    """Kernels on a separate stream that read, add and copy the bytes. One launch represents several messages, to keep
    the host from slowing the step."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self._total = torch.zeros_like(memory)
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def send(self, num_bytes: int, count: int, is_timed: bool = True) -> list[Any]:
        part = self._take(num_bytes * count)
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            span = [mark(self.device)]
            total = self._total[: part.numel()]
            torch.add(total, part, out=total)
            part.copy_(total)
            return [*span, mark(self.device)]


def build_traffic(world: World, channel: Channel, memory: torch.Tensor) -> Traffic | None:
    """Traffic for this world, or None if gloo would have to copy from a GPU. Collective: call on every rank."""
    if world.world_size > 1:
        return _Messages(channel, memory) if memory.device.type == "cpu" or channel.is_nccl else None
    return _Copies(memory) if memory.device.type == "cpu" else _Kernels(memory)


class Disturbance(Probe):
    """Sends messages of one size when certain gradients are ready, like buckets. The step does not wait for messages.

    If timing the messages would slow the step (`Traffic.is_free`), they are timed in separate steps of kind `messages`.
    `read_ready_times` returns each gradient's ready time in seconds since the start of backward, by parameter index,
    and the duration of backward. Messages are also timed alone before each step, because a profile includes no sweep.
    """

    def __init__(
        self, world: World, traffic: Traffic, variant: Variant,
        read_ready_times: Callable[[], tuple[Mapping[int, float], float]],
    ) -> None:  # fmt: skip
        self._world = world
        self._traffic = traffic
        self._variant = variant
        self._read_ready_times = read_ready_times
        self._num_bytes = int(variant.labels["message_bytes"])
        self._num_bursts = 0
        self._num_each = 0  # number of messages per burst
        variant.kinds = ("marked",) if traffic.is_free else ("messages", "marked")
        variant.probe = self

    def begin(self, kind: str, hooks: contextlib.ExitStack) -> Phases | None:
        """Add hooks that send messages at evenly spaced times of backward."""
        self._is_timed = kind == self._variant.kinds[0]
        self._spans: list[list[Any]] = []
        ready_s, total_s = self._read_ready_times()
        if not self._num_bursts:
            alone_s = min(self._time_alone() for _ in range(3))
            # At most one burst per gradient.
            bursts = max(1, min(_MOST_BURSTS, len(ready_s), int(total_s / (_SLOWEST * alone_s))))
            each = min(self._traffic.count_most(self._num_bytes), int(_SHARE * total_s / (bursts * alone_s)))
            agreed = self._world.share((bursts, max(1, each)))
            self._num_bursts, self._num_each = (min(values) for values in zip(*agreed, strict=True))
            self._variant.labels["num_messages"] = self._num_bursts * self._num_each
        if self._is_timed:
            self._variant.note("alone", self._time_alone())
        places: list[int] = []
        for number in range(min(self._num_bursts, len(ready_s))):
            wanted_s = total_s * (number + 0.5) / self._num_bursts
            left = (index for index in ready_s if index not in places)
            places.append(min(left, key=lambda index: abs(ready_s[index] - wanted_s)))
        places = self._world.share(places)[0]  # rank 0 chooses the gradients for all ranks
        assert self._variant.replica is not None
        params = self._variant.replica.parameters
        hook_gradients([params[index] for index in places], hooks, self._fire)
        return None

    def _time_alone(self) -> float:
        """Seconds per message in one burst outside a step. Collective: call on every rank."""
        count = self._num_each or self._traffic.count_most(self._num_bytes)
        span = self._traffic.send(self._num_bytes, count)
        synchronize(self._traffic.device)
        self._traffic.wait()
        return max(1e-9, between_s(*span) / count)

    def _fire(self, *grads: Any) -> None:
        self._spans.append(self._traffic.send(self._num_bytes, self._num_each, self._is_timed))

    def end(self, kind: str, times: PhaseTimes) -> None:
        """Wait for all messages; record their mean duration and how much of it overlapped backward."""
        self._traffic.wait()
        if self._is_timed:
            pairs = itertools.pairwise(times.moments)
            *_, over = (moment for (phase, _), (_, moment) in pairs if phase == "backward")
            count = max(1, len(self._spans)) * self._num_each
            before = (max(0.0, min(between_s(begin, end), between_s(begin, over))) for begin, end in self._spans)
            self._variant.note("under_way", sum(between_s(*span) for span in self._spans) / count)
            self._variant.note("overlapped", sum(before) / count)


def _note_end(span: list[Any]) -> None:
    span[1] = span[1] or time.perf_counter()
