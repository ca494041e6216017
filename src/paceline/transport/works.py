"""What an operation in shared memory returns: torch's `Work`, and a Future for those who ask."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from paceline.transport.lanes import Lanes

__all__ = ["FinishedWork", "NativeWork", "Promises"]


class FinishedWork(Work):
    """An operation that was over when the call returned."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def synchronize(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class NativeWork(Work):
    """A ticket. `after`, if any, is what is left to do here when it is through; whoever looks first does it.

    The tensors are kept until then, whether or not the caller keeps them.
    """

    def __init__(
        self,
        native: Lanes,
        ticket: tuple[int, ...],
        tensors: Sequence[torch.Tensor],
        promises: Promises,
        after: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._native, self._ticket, self._tensors, self._promises = native, ticket, list(tensors), promises
        self._after, self._lock = after, threading.Lock()
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._native.wait(self._ticket, timeout.total_seconds() or None)
        self._finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._native.is_done(self._ticket):
            return False
        if self._after is not None and self.exception() is None:
            self._finish()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        if self._native.is_done(self._ticket):
            try:
                self._native.wait(self._ticket)
            except RuntimeError as error:
                return error
        return None

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        with self._lock:
            if self._future is None:
                self._future = self._promises.promise(self, self._tensors)
        return self._future

    def _finish(self) -> None:
        if self._after is not None:
            with self._lock:
                after, self._after = self._after, None
                if after is not None:
                    after()


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
    kind, words = type(error), str(error)

    def raise_anew(_: Any) -> None:
        raise kind(words)

    future._set_unwrap_func(raise_anew)  # type: ignore[attr-defined]
    future.set_result([])
