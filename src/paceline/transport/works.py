"""What an operation in shared memory returns: torch's `Work`, and a Future for those who ask."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from paceline.transport.native import NativeGroup

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
        native: NativeGroup,
        ticket: int,
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


class _Promise(torch.futures.Future):
    """A Future on which one may wait in the callback of another, on the very thread that completes them."""

    def __init__(self, promises: Promises) -> None:
        super().__init__()
        self._promises = promises

    def wait(self) -> Any:
        self._promises.help(self)
        return super().wait()

    def fail(self, error: Exception) -> None:
        """As `set_exception`, but each who asks gets an error of its own: the frames in the traceback of a shared one
        would hold this Future and the caller's group, and nobody could ever free them."""
        kind, words = type(error), str(error)

        def raise_anew(_: Any) -> None:
            raise kind(words)

        self._set_unwrap_func(raise_anew)
        self.set_result([])


class Promises:
    """Completes Futures in the order of their operations, on a thread that starts with the first one."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[NativeWork, _Promise, list[torch.Tensor]] | None]
        self._waiting = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock, self._is_closed = threading.Lock(), False

    def promise(self, work: NativeWork, tensors: list[torch.Tensor]) -> torch.futures.Future:
        future = _Promise(self)
        with self._lock:
            if not self._is_closed:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._keep, name="paceline-promises", daemon=True)
                    self._thread.start()
                self._waiting.put((work, future, tensors))
                return future
        _complete(work, future, tensors)  # in a closed group nothing runs that would have to be waited for
        return future

    def close(self) -> None:
        with self._lock:
            self._is_closed, thread = True, self._thread
        if thread is not None:
            self._waiting.put(None)
            if thread is not threading.current_thread():  # a callback of a Future may close the group
                thread.join()

    def help(self, future: torch.futures.Future) -> None:
        """On the thread that completes Futures: go on with that, in order, until this one is done."""
        if threading.current_thread() is self._thread:
            while not future.done():
                entry = self._waiting.get()
                if entry is None:
                    self._waiting.put(None)  # for `_keep`
                    return
                _complete(*entry)

    def _keep(self) -> None:
        while (entry := self._waiting.get()) is not None:
            _complete(*entry)


def _complete(work: NativeWork, future: _Promise, tensors: list[torch.Tensor]) -> None:
    try:
        work.wait()
    except Exception as error:
        future.fail(error)
    else:
        future.set_result(tensors)
