"""A network that does not exist: a communication hook whose buckets are done when a model of it says so.

No byte is sent and no core is used: plans, simulator and wrapper can be held against each other for any network. What
such a network costs is in `predict.fabrics`.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel import DDP
from paceline.predict.curves import CostCurve

__all__ = ["EmulatedNetwork"]

# A thread that wakes up must not wait long for the interpreter.
_SWITCH_S = 1e-4
_CYCLES = 50_000_000


class EmulatedNetwork:
    """First in, first out, one message at a time, each taking as long as the curve says; no curve: no time at all."""

    def __init__(self, curve: CostCurve | None) -> None:
        self._curve = curve
        self._free_s = 0.0
        self._pending: queue.SimpleQueue[tuple[float, Any, torch.Tensor] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._switch_s = sys.getswitchinterval()
        self._stream: torch.cuda.Stream | None = None
        self._cycles_per_s = 0.0

    def attach(self, model: nn.Module) -> None:
        """Send the model's buckets here; before its first step."""
        if self._curve is not None and self._thread is None:
            sys.setswitchinterval(_SWITCH_S)
            self._thread = threading.Thread(target=self._work, name="paceline-emulated-network", daemon=True)
            self._thread.start()
        assert isinstance(model, DDP | DistributedDataParallel)
        # torch compares annotations with types, and a lambda has none.
        model.register_comm_hook(None, lambda state, bucket: self._send(bucket.buffer()))

    def close(self) -> None:
        """End the thread; nothing may be under way."""
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join()
            self._thread = None
            sys.setswitchinterval(self._switch_s)

    def _send(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        if self._curve is None:
            future.set_result(buffer)
            return future
        if buffer.is_cuda:
            return self._send_on_gpu(buffer, self._curve.estimate_s(buffer.nbytes))
        start_s = max(time.perf_counter(), self._free_s)
        self._free_s = start_s + self._curve.estimate_s(buffer.nbytes)
        self._pending.put((self._free_s, future, buffer))
        return future

    def _send_on_gpu(self, buffer: torch.Tensor, seconds: float) -> torch.futures.Future[torch.Tensor]:
        """A kernel that only waits, on a stream of its own, behind the work that fills the buffer."""
        device = buffer.device
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._cycles_per_s = _count_cycles(device)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device])
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(max(1, int(seconds * self._cycles_per_s)))
            future.set_result(buffer)
        return future

    def _work(self) -> None:
        while (item := self._pending.get()) is not None:
            done_s, future, buffer = item
            left_s = done_s - time.perf_counter()
            if left_s > 0:
                time.sleep(left_s)
            future.set_result(buffer)


def _count_cycles(device: torch.device) -> float:
    """The cycles that the GPU's waiting kernel counts in a second, the best of a few: clocks rise from rest."""
    rates = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        torch.cuda._sleep(_CYCLES)
        end.record()
        torch.cuda.synchronize(device)
        rates.append(_CYCLES / (begin.elapsed_time(end) / 1e3))
    return float(max(rates))
