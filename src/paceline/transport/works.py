"""What an operation in shared memory returns: torch's `Work`, and a Future for those who ask.

What an operation is does not belong here (`group`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from paceline.errors import PacelineError
from paceline.transport.lanes import Lanes

__all__ = ["FinishedWork", "NativeWork", "Promises", "TensorWork"]


class TensorWork(Work):
    """What all of ours have in common: a result of tensors. `wait`, `is_completed` and `exception` are each one's."""

    def __init__(self, result: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._result = list(result)

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> list[torch.Tensor]:
        return self._result


class FinishedWork(TensorWork):
    """An operation that was over when the call returned."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._result)
        return future


class NativeWork(TensorWork):
    """Tickets of operations that belong together. `after` is what is left to do here when they are through, which
    whoever looks first does.

    `kept` holds this Work, and with it all memory that the operations need, until then, whether or not the caller does.
    """

    def __init__(
        self,
        native: Lanes,
        tickets: Sequence[tuple[int, ...]],
        result: Sequence[torch.Tensor],
        promises: Promises,
        after: Sequence[Callable[[], Any]],
        memory: Any,
        kept: dict[int, NativeWork],
    ) -> None:
        super().__init__(result)
        self._native, self._tickets, self._promises = native, tickets, promises
        self._after, self._memory, self._kept = list(after), memory, kept
        self._finishing, self._promising = threading.Lock(), threading.Lock()
        self._error: Exception | None = None
        self._future: torch.futures.Future | None = None
        kept[id(self)] = self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() or None
        try:
            for ticket in self._tickets:
                self._native.wait(ticket, limit_s)
        except RuntimeError:
            if self.is_through():
                self._kept.pop(id(self), None)
            raise
        self._finish()
        if self._error is not None:
            raise self._error
        return True

    def is_through(self) -> bool:
        """Whether the operations are over, well or not; what is to be done after them may be left."""
        return all(self._native.is_done(ticket) for ticket in self._tickets)

    def is_completed(self) -> bool:
        if not self.is_through():
            return False
        self.exception()
        return True

    def exception(self) -> Exception | None:
        """What went wrong, if it is over."""
        if self.is_through():
            try:
                self.wait()
            except Exception as error:
                return error
        return None

    def get_future(self) -> torch.futures.Future:
        with self._promising:
            if self._future is None:
                self._future = self._promises.promise(self, self._result)
        return self._future

    def _finish(self) -> None:
        """Do what is left, once; whoever comes meanwhile waits for it."""
        with self._finishing:
            after, self._after, self._memory = self._after, [], None
            try:
                for action in after:
                    action()
            except Exception as error:
                self._error = error
        self._kept.pop(id(self), None)


class Promises:
    """Completes Futures in the order of their operations.

    One thread waits for operations. What was to follow a Future may itself wait for a later one, so while it runs
    another thread waits; threads start when there is none to do so.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Work, torch.futures.Future, list[torch.Tensor]] | None]
        self._waiting = queue.SimpleQueue()
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_free = 0  # threads that wait, or will when it is their turn
        self._is_closed = False

    def promise(self, work: Work, tensors: list[torch.Tensor]) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        with self._lock:
            is_late = self._is_closed
            if not is_late:
                self._provide_thread()
                self._waiting.put((work, future, tensors))
        if is_late:  # so is the operation, one way or the other
            _complete(future, tensors, _outcome(work))
        return future

    def close(self) -> None:
        with self._lock:
            threads, self._threads = self._threads, []
            self._is_closed = True
            self._waiting.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _provide_thread(self) -> None:
        if not self._num_free:
            thread = threading.Thread(target=self._keep, name="paceline-promises", daemon=True)
            self._threads.append(thread)
            self._num_free += 1
            thread.start()

    def _keep(self) -> None:
        while True:
            with self._turn:
                entry = self._waiting.get()
                if entry is None:
                    self._waiting.put(None)  # for the next thread
                    return
                work, future, tensors = entry
                error = _outcome(work)
            with self._lock:
                self._num_free -= 1
                self._provide_thread()
            _complete(future, tensors, error)
            with self._lock:
                self._num_free += 1


def _outcome(work: Work) -> Exception | None:
    try:
        work.wait()
    except Exception as error:
        return error
    return None


def _complete(future: torch.futures.Future, tensors: list[torch.Tensor], error: Exception | None) -> None:
    if error is None:
        future.set_result(tensors)
    else:
        _fail(future, error)


def _fail(future: torch.futures.Future, error: Exception) -> None:
    """As `set_exception`, but each who asks gets an error of its own: the frames in the traceback of a shared one would
    hold this Future and the caller's group, and nobody could ever free them."""
    kind: Any = type(error)
    text, options = str(error), {"code": error.code} if isinstance(error, PacelineError) else {}

    def raise_anew(_: Any) -> None:
        raise kind(text, **options)

    future._set_unwrap_func(raise_anew)  # type: ignore[attr-defined]
    future.set_result([])
