"""Building blocks of the process group: tensors in the form that the core needs, and torch's `Work` and `Future`."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
from torch.autograd.profiler import record_function

from paceline.errors import PacelineError
from paceline.torch_internals import c10d, extend_range, has_internal_overlap, is_recording, skip_frames
from paceline.transport import native

Tensors = Sequence[torch.Tensor]
# An action to run when an operation has finished.
After = Callable[[], Any] | None
Actions = Sequence[Callable[[], Any]]

_NAMES = {
    native.ALL_REDUCE: "all_reduce", native.REDUCE_SCATTER: "reduce_scatter", native.ALL_GATHER: "all_gather",
    native.BROADCAST: "broadcast", native.BARRIER: "barrier",
}  # fmt: skip
DTYPES = {
    torch.float32: native.F32, torch.float64: native.F64, torch.bfloat16: native.BF16, torch.float16: native.F16,
    torch.int32: native.I32, torch.int64: native.I64,
}  # fmt: skip


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor wraps others, as a DTensor does, so that its own memory is meaningless."""
    return bool(type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__)


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's data is in this process's CPU memory and it does not wrap other tensors."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and not is_wrapper_subclass(tensor)


def is_reducible(tensor: torch.Tensor) -> bool:
    """Whether the core can reduce this tensor."""
    return tensor.dtype in DTYPES and is_movable(tensor)


def as_run(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy, because the tensors of other ranks may be contiguous and all ranks must take
    the same path."""
    if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.data)


def as_run_in_place(tensor: torch.Tensor) -> tuple[torch.Tensor, After]:
    """`as_run` for an output tensor, with a function that copies the result back if a copy was made."""
    run = as_run(tensor)
    if run is not tensor and has_internal_overlap(tensor) == 1:
        raise ValueError("the elements of an expanded tensor share memory and cannot hold a result: clone it first")
    # `data` hides the write from autograd, as with every backend.
    return run, None if run is tensor else functools.partial(tensor.data.copy_, run)


class TensorWork(c10d.Work):  # type: ignore[name-defined, misc]
    """A Work whose result is tensors. Subclasses implement `wait`, `is_completed` and `exception`."""

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
        """Wait until the operations end, and return the error, if any."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None


class FinishedWork(TensorWork):
    """A Work that had already finished when the call returned."""

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
    """Operations that belong together, in `Lanes` or `TwoLevels`. The first caller to check runs the `after` actions.

    Until then `kept` refers to this Work, so that the `memory` of its operations stays alive.
    """

    future: torch.futures.Future | None = None  # created by `Futures` on first use

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
            with self._finishing:  # runs once; other callers wait
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
        """Whether the operations have finished or failed. The `after` actions may not have run yet."""
        return all(map(self._lanes.is_done, self.tickets))

    def try_finish(self) -> bool:
        """Whether the operations have finished or failed. Finishes them here if that requires no waiting."""
        return all(map(self._lanes.try_finish, self.tickets))

    def is_completed(self) -> bool:
        if self.is_finished():
            self.find_error()
            return True
        return False

    def exception(self) -> Exception | None:
        """The error, if the operations have finished with one."""
        return self.find_error() if self.is_finished() else None


def record_operation(start: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for methods that start operations: record each in a profiler range that ends with it, as gloo does."""

    @functools.wraps(start)
    def wrapped(group: Any, operations: Any, *args: Any) -> Any:
        if not is_recording():
            return start(group, operations, *args)
        kind = operations[0] if isinstance(operations, tuple) else operations[0][0]
        with record_function(f"shm:{_NAMES[kind]}") as span:
            work = start(group, operations, *args)
            if isinstance(work, NativeWork):
                extend_range(span, work.get_future())
        return work

    return wrapped


def keep_from_compiler(*items: Any, with_calls: bool = True) -> None:
    """Exclude functions, and the methods of classes, from torch.compile, with or without the functions that they call.
    Otherwise it also compiles code called during a compiled step, even from torch's C++, and fails on objects such as
    process groups."""
    for item in items:
        if isinstance(item, FunctionType):
            item._torchdynamo_disable = True  # type: ignore[attr-defined]  # for code that is traced through its caller
        for function in (item, *vars(item).values()):
            if isinstance(function, FunctionType):
                skip_frames(function.__code__, with_calls)


keep_from_compiler(TensorWork, FinishedWork, NativeWork)


class Futures:
    """Completes torch's Futures in the order of their operations, on a thread that waits for the operations.

    A Future's callback may wait for a later Future, so another thread takes over while callbacks run.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[NativeWork | None] = queue.SimpleQueue()
        self._turn = threading.Lock()  # held by the only thread that waits
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_free = 0  # threads that are waiting, or queueing for `_turn`
        self._num_open = 0  # incomplete Futures
        self._is_closed = False

    def create(self, work: NativeWork) -> torch.futures.Future:
        """The Future of a Work, shared by all callers."""
        with self._lock:
            if work.future is not None:
                return work.future
            future = work.future = torch.futures.Future()
            # After `close` every operation has ended. Otherwise a thread waits for this one, unless it is finished.
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
                    self._waiting.put(None)  # wakes the next thread
                    return
                error = work.find_error()
            with self._lock:
                self._num_free -= 1
                self._provide_thread()
            assert work.future is not None
            _complete(work.future, work.result(), error)
            del work, error  # otherwise both would live until the next operation
            with self._lock:
                self._num_free += 1
                self._num_open -= 1


def _complete(future: torch.futures.Future, tensors: list[torch.Tensor], error: Exception | None) -> None:
    """Complete a Future with a result or an error. Unlike `set_exception`, each caller gets its own exception: the
    traceback of a shared one would keep this Future and the caller's group alive forever."""
    if error is None:
        future.set_result(tensors)
        return
    kind: Any = type(error)
    text, options = str(error), {"code": error.code} if isinstance(error, PacelineError) else {}

    def raise_copy(_: Any) -> None:
        raise kind(text, **options)

    future._set_unwrap_func(raise_copy)  # type: ignore[attr-defined]
    future.set_result([])
