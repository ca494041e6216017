"""What the process group builds on: tensors as the core sees them, and torch's `Work` and `Future`."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch_internals import c10d, has_internal_overlap, skip_frames
from paceline.transport import native

Tensors = Sequence[torch.Tensor]
# What is left to do when an operation has finished.
After = Callable[[], Any] | None
Actions = Sequence[Callable[[], Any]]

DTYPES = {
    torch.float32: native.F32, torch.float64: native.F64, torch.bfloat16: native.BF16, torch.float16: native.F16,
    torch.int32: native.I32, torch.int64: native.I64,
}  # fmt: skip


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor only stands for others (DTensor, say), so that its own memory means nothing."""
    return bool(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor has bytes in this process's memory, and does not only stand for others."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not is_wrapper_subclass(tensor)


def is_reducible(tensor: torch.Tensor) -> bool:
    """Whether the core can add up a tensor's numbers."""
    return tensor.dtype in DTYPES and is_movable(tensor)


def as_run(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy of one that is not: on another rank it may be, and both must take one path."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.data)


def as_run_in_place(tensor: torch.Tensor) -> tuple[torch.Tensor, After]:
    """The same for a tensor that is written, with the function that copies the result back if there is a copy."""
    run = as_run(tensor)
    if run is not tensor and has_internal_overlap(tensor) == 1:
        raise ValueError("a tensor whose elements share memory (an expanded one) cannot hold a result: clone it first")
    # Through `data`: as with every backend, what a collective writes does not count as a change that autograd sees.
    return run, None if run is tensor else functools.partial(tensor.data.copy_, run)


class TensorWork(c10d.Work):  # type: ignore[name-defined, misc]
    """A Work whose result is tensors; subclasses have `wait`, `is_completed` and `exception`."""

    def __init__(self, result: Tensors) -> None:
        super().__init__()
        self.tensors = result

    def synchronize(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> list[torch.Tensor]:
        return list(self.tensors)

    def find_error(self) -> Exception | None:
        """Wait for the end, and return the error if there is one."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None


class FinishedWork(TensorWork):
    """An operation that had finished when the call returned."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future


class NativeWork(TensorWork):
    """Operations that belong together, in `Lanes` or `TwoLevels`. The first caller that looks does what comes `after`.

    `kept` holds this Work, and with it all `memory` that the operations need, until then.
    """

    future: torch.futures.Future | None = None  # made by `Futures` for the first caller that needs it

    def __init__(
        self, lanes: Any, result: Tensors, futures: Futures, after: Actions, memory: Any,
        kept: dict[int, NativeWork], tickets: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        super().__init__(result)
        self._futures = futures
        self.tickets = tickets
        self._lanes, self._after, self._memory, self._kept = lanes, after, memory, kept
        self._finishing = threading.Lock() if after else None
        self._error: Exception | None = None
        kept[id(self)] = self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() or None
        try:
            for ticket in self.tickets:
                self._lanes.wait(ticket, limit_s)
        except RuntimeError:
            if self.is_finished():
                self._kept.pop(id(self), None)
            raise
        if self._finishing is not None:
            with self._finishing:  # once; other callers wait for it
                after, self._after = self._after, ()
                try:
                    for action in after:
                        action()
                except Exception as error:
                    self._error = error
        self.tickets, self._memory = (), None
        self._kept.pop(id(self), None)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future:
        return self._futures.create(self)

    def is_finished(self) -> bool:
        """Whether the operations have finished or failed; what comes after them may be left to do."""
        return all(map(self._lanes.is_done, self.tickets))

    def try_finish(self) -> bool:
        """The same, but nothing goes on in the background because of the question."""
        return all(map(self._lanes.try_finish, self.tickets))

    def is_completed(self) -> bool:
        if self.is_finished():
            self.find_error()
            return True
        return False

    def exception(self) -> Exception | None:
        """The error, if the operations have finished with one."""
        return self.find_error() if self.is_finished() else None


def keep_from_compiler(*items: Any, with_calls: bool = True) -> None:
    """torch.compile compiles what is called while a compiled step runs, also by torch's own C++, and fails on an object
    such as a process group. These functions and the methods of these classes run as they are, with all that they call
    or without it."""
    for item in items:
        if isinstance(item, FunctionType):
            item._torchdynamo_disable = True  # type: ignore[attr-defined]  # where torch traces what calls it
        for function in (item, *vars(item).values()):
            if isinstance(function, FunctionType):
                skip_frames(function.__code__, with_calls)


keep_from_compiler(TensorWork, FinishedWork, NativeWork)


class Futures:
    """Completes torch's Futures in the order of their operations, on a thread that waits for these.

    A callback of a Future may itself wait for a later one, so another thread waits while it runs.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[NativeWork | None] = queue.SimpleQueue()
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_free = 0  # threads that wait, or will when it is their turn
        self._num_open = 0  # Futures that are not complete
        self._is_closed = False

    def create(self, work: NativeWork) -> torch.futures.Future:
        """The Future of a Work, one for all callers."""
        with self._lock:
            if work.future is not None:
                return work.future
            future = work.future = torch.futures.Future()
            # After `close` it is over, one way or the other. Else a thread waits, unless there is nothing to wait for.
            if not self._is_closed and (self._num_open or not work.try_finish()):
                self._num_open += 1
                self._provide_thread()
                self._waiting.put(work)
                return future
        _complete(future, work.result(), work.find_error())
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
            thread = threading.Thread(target=self._run, name="paceline-futures", daemon=True)
            self._threads.append(thread)
            self._num_free += 1
            thread.start()

    def _run(self) -> None:
        while True:
            with self._turn:
                work = self._waiting.get()
                if work is None:
                    self._waiting.put(None)  # for the next thread
                    return
                error = work.find_error()
            with self._lock:
                self._num_free -= 1
                self._provide_thread()
            assert work.future is not None
            _complete(work.future, work.result(), error)
            del work, error  # or they would live until the next operation
            with self._lock:
                self._num_free += 1
                self._num_open -= 1


def _complete(future: torch.futures.Future, tensors: list[torch.Tensor], error: Exception | None) -> None:
    """As `set_exception` where there is an error, but each caller gets one of its own: the frames in the traceback of a
    shared one would hold this Future and the caller's group, and neither could ever be freed."""
    if error is None:
        future.set_result(tensors)
        return
    kind: Any = type(error)
    text, options = str(error), {"code": error.code} if isinstance(error, PacelineError) else {}

    def raise_anew(_: Any) -> None:
        raise kind(text, **options)

    future._set_unwrap_func(raise_anew)  # type: ignore[attr-defined]
    future.set_result([])
