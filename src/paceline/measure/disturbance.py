"""Steps that messages disturb: traffic that leaves when gradients are ready, as buckets do, and nobody waits for.

On several ranks the messages are real. On one rank a thread does what a collective does with as many bytes, and on a
GPU a stream of its own. `predict.predictor` fits how computing and messages slow each other.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from paceline.measure.engine import synchronize
from paceline.measure.steps import Probe, Variant
from paceline.parallel.channel import Channel
from paceline.runtime.moments import between_s, mark
from paceline.runtime.world import World
from paceline.training.step import PhaseClock, Phases, PhaseTimes

# Messages leave together at up to this many moments of backward, and must be over before the next ones start: they are
# slowed by up to this factor. What one rank does in their place is so short that it is repeated to fill this share of
# backward: else the noise of a step would hide what it costs.
_MOST_BURSTS, _SLOWEST, _SHARE = 4, 6.0, 0.25
_CHUNK = 1 << 18  # elements that a collective moves at once


class Traffic:
    """Messages in `memory`, of which `send` starts some and returns at once with their span: its begin and, when `wait`
    is over, its end, as moments of the device. `is_free`: to time them does not slow the step."""

    is_free = True

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.device, self._sent = memory, memory.device, 0

    def count_most(self, num_bytes: int) -> int:
        """How many messages of this size can leave together."""
        return max(1, self.memory.nbytes // num_bytes)

    def send(self, num_bytes: int, count: int, is_timed: bool = True) -> list[Any]:
        raise NotImplementedError

    def wait(self) -> None:
        """For all that was sent; on a GPU, whose work is awaited with its step, nothing is left."""

    def close(self) -> None:
        self.wait()

    def _take(self, num_bytes: int) -> torch.Tensor:
        """The next part of the memory: buckets lie one after the other."""
        elements = max(1, num_bytes // self.memory.element_size())
        start = self._sent * elements % max(1, self.memory.numel() - elements + 1)
        self._sent += 1
        return self.memory[start : start + elements]


class _Messages(Traffic):
    """Real messages between all ranks, one at a time. Collective: every rank must send the same ones."""

    def __init__(self, channel: Channel, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self._channel, self.is_free = channel, channel.is_nccl
        self._works: list[tuple[dist.Work, list[Any]]] = []
        self._side = torch.cuda.Stream(self.device) if channel.is_nccl else None  # type: ignore[no-untyped-call]

    def count_most(self, num_bytes: int) -> int:
        return 1

    def send(self, num_bytes: int, count: int, is_timed: bool = True) -> list[Any]:
        span = [mark(self.device), None]
        work = self._channel.start_sum(self._take(num_bytes))
        if self._side is not None:
            with torch.cuda.stream(self._side):
                work.wait()  # the stream does, and not this thread
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
    """A thread of its own, as that of a backend: reads, adds and copies the bytes. numpy holds no lock meanwhile."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self._total, self._pending = np.zeros(_CHUNK, dtype=np.float32), queue.Queue[Any]()
        self._thread = threading.Thread(target=self._work, name="paceline-traffic", daemon=True)
        self._thread.start()

    def send(self, num_bytes: int, count: int, is_timed: bool = True) -> list[Any]:
        span: list[Any] = [time.perf_counter(), None]
        self._pending.put(([self._take(num_bytes).numpy() for _ in range(count)], span))
        return span

    def wait(self) -> None:
        self._pending.join()

    def close(self) -> None:
        self._pending.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._pending.get()) is not None:
            parts, span = item
            for part in parts:
                for start in range(0, len(part), _CHUNK):
                    piece = part[start : start + _CHUNK]
                    total = self._total[: len(piece)]
                    np.add(total, piece, out=total)
                    np.copyto(piece, total)
            span[1] = time.perf_counter()
            self._pending.task_done()


class _Kernels(Traffic):
    """Kernels on a stream of its own that read, add and copy the bytes. One launch stands for several messages: the
    host must not be what slows the step."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__(memory)
        self._total, self._side = torch.zeros_like(memory), torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

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
    """What disturbs the steps of this world; None where gloo would copy from a GPU. Collective on several ranks."""
    if world.world_size > 1:
        return _Messages(channel, memory) if memory.device.type == "cpu" or channel.is_nccl else None
    return _Copies(memory) if memory.device.type == "cpu" else _Kernels(memory)


class Disturbance(Probe):
    """Messages of one size that leave when certain gradients are ready, as buckets do, and nobody waits for.

    Where timing them would disturb, too (`Traffic.is_free`), that is done in steps of another kind, `messages`. `look`
    says after how many seconds of backward each gradient was ready, by its place among the parameters, and how long
    backward took. Each time messages are timed alone, too: a profile has no sweep of them.
    """

    def __init__(
        self, world: World, traffic: Traffic, variant: Variant, look: Callable[[], tuple[Mapping[int, float], float]]
    ) -> None:
        self._world, self._traffic, self._variant, self._look = world, traffic, variant, look
        self._num_bytes, self._num_bursts, self._num_each = int(variant.labels["message_bytes"]), 0, 0
        variant.kinds, variant.probe = ("marked",) if traffic.is_free else ("messages", "marked"), self

    def begin(self, kind: str, hooks: contextlib.ExitStack) -> Phases | None:
        """Hooks that send messages at evenly spaced moments of backward."""
        self._is_timed, self._spans = kind == self._variant.kinds[0], list[list[Any]]()
        ready_s, total_s = self._look()
        if not self._num_bursts:
            alone_s = min(self._time_alone() for _ in range(3))
            # One gradient sends one burst.
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
        places = self._world.share(places)[0]  # all ranks at the same gradients, by the times of rank 0
        assert self._variant.replica is not None
        params = self._variant.replica.parameters
        # Nodes are held with their hooks: one that nobody holds is made anew by the forward, without any.
        self._nodes = [get_gradient_edge(params[index]).node for index in places]
        for node in self._nodes:
            hooks.callback(node.register_hook(self._fire).remove)
        self._clock = _KeptClock(self._variant.replica.device)
        return self._clock

    def _time_alone(self) -> float:
        """Seconds of one message, of as many as leave together. Collective: every rank must call this."""
        count = self._num_each or self._traffic.count_most(self._num_bytes)
        span = self._traffic.send(self._num_bytes, count)
        synchronize(self._traffic.device)
        self._traffic.wait()
        return max(1e-9, between_s(*span) / count)

    def _fire(self, *grads: Any) -> None:
        self._spans.append(self._traffic.send(self._num_bytes, self._num_each, self._is_timed))

    def end(self, kind: str, end_s: float, phases_s: dict[str, float]) -> None:
        """Wait for all; the mean seconds of a message from start to end, and of that before the end of backward."""
        self._traffic.wait()
        if self._is_timed:
            pairs = itertools.pairwise(self._clock.kept.moments)
            *_, over = (moment for (phase, _), (_, moment) in pairs if phase == "backward")
            count = max(1, len(self._spans)) * self._num_each
            before = (max(0.0, min(between_s(begin, end), between_s(begin, over))) for begin, end in self._spans)
            self._variant.note("under_way", sum(between_s(*span) for span in self._spans) / count)
            self._variant.note("overlapped", sum(before) / count)


class _KeptClock(PhaseClock):
    """Keeps the moments of its step."""

    kept = PhaseTimes()

    def end(self) -> PhaseTimes:
        self.kept = super().end()
        return self.kept


def _note_end(span: list[Any]) -> None:
    span[1] = span[1] or time.perf_counter()
