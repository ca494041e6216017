"""What the process group builds on: tensors as the core sees them, the lanes that reduce them, and torch's `Work`.

Which operation goes where does not belong here (`group`).
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from paceline.errors import ConfigError, PacelineError
from paceline.transport import native

# -- tensors -----------------------------------------------------------------------------------------------------------

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


def as_run_in_place(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], Any] | None]:
    """The same for a tensor that is written, with the function that copies the result back if there is a copy."""
    run = as_run(tensor)
    if run is not tensor and torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            "a tensor whose elements share memory (such as an expanded one) cannot hold a result: clone it first"
        )
    # Through `data`: as with every backend, what a collective writes does not count as a change that autograd sees.
    return run, None if run is tensor else functools.partial(tensor.data.copy_, run)


# -- lanes -------------------------------------------------------------------------------------------------------------

_MOST, _ALLOWED = 4, 16
# Waking another thread costs tens of microseconds.
_LANE_BYTES = 512 << 10
_LINE_BYTES = 128


def choose_lanes(cores: Sequence[int], requested: str = "") -> int:
    """The number of lanes for ranks of one host that have `cores` each: one where no core is spare.

    `requested` is PACELINE_LANES on the first of them, which counts for all.
    """
    if requested:
        if requested not in map(str, range(1, _ALLOWED + 1)):
            raise ConfigError(f"PACELINE_LANES={requested!r}: use a number from 1 to {_ALLOWED}")
        return int(requested)
    return max(1, min(_MOST, min(cores) // len(cores)))


class Lanes:
    """Several native groups side by side, so that several cores of each rank reduce one long vector.

    One core waits for memory most of the time. Where a host has more cores than ranks, the vector is cut, and each
    piece goes through a group of its own with a thread of its own. The sums do not depend on it: every element is added
    up in rank order wherever the cuts are. A ticket is one number per lane that the operation uses, from the first on.
    """

    def __init__(self, groups: Sequence[native.NativeGroup]) -> None:
        self._groups = list(groups)
        self._first = self._groups[0]

    def run(self, operation: native.Operation, timeout_s: float = 0.0) -> None:
        """One operation, from its beginning to its end. A time limit of 0 is the group's."""
        first, *others = self._cut(operation)
        started = self._submit(self._groups[1:], others, timeout_s)
        try:
            self._first.run(first, timeout_s)
            for group, number in started:
                group.wait(number)
        except native.TransportError:
            self._fail_all(started)
            raise

    def submit(self, operation: native.Operation, timeout_s: float = 0.0) -> tuple[int, ...]:
        """Start an operation behind those before it; its ticket."""
        return tuple(number for _, number in self._submit(self._groups, self._cut(operation), timeout_s))

    def wait(self, ticket: Sequence[int], timeout_s: float | None = None) -> None:
        """Wait for a ticket; unless it only takes longer, nothing of it runs any more after an error, in any lane."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        started = list(zip(self._groups, ticket, strict=False))
        try:
            for group, number in started:
                group.wait(number, None if deadline is None else max(0.0, deadline - time.monotonic()))
        except native.TransportError:
            if deadline is None or time.monotonic() < deadline:
                self._fail_all(started)
            raise

    def _submit(
        self, groups: Sequence[native.NativeGroup], pieces: Sequence[native.Operation], timeout_s: float
    ) -> list[tuple[native.NativeGroup, int]]:
        started: list[tuple[native.NativeGroup, int]] = []
        try:
            for group, piece in zip(groups, pieces, strict=False):
                started.append((group, group.submit(piece, timeout_s)))
        except native.TransportError:
            self._fail_all(started)
            raise
        return started

    def _fail_all(self, started: Sequence[tuple[native.NativeGroup, int]]) -> None:
        """One lane has failed, and so must the others: none may write later to memory that the caller has freed."""
        for failed in self._groups:
            for group in self._groups:
                group.fail_like(failed)
        for group, number in started:
            with contextlib.suppress(native.TransportError):
                group.wait(number)

    def is_done(self, ticket: Sequence[int]) -> bool:
        return all(group.is_done(number) for group, number in zip(self._groups, ticket, strict=False))

    def add_arena(self, serial: int, address: int, part_bytes: int) -> bool:
        return all([group.add_arena(serial, address, part_bytes) for group in self._groups])

    def remove_arena(self, serial: int) -> None:
        for group in self._groups:
            group.remove_arena(serial)

    def close(self) -> None:
        for group in self._groups:
            group.close()

    def _cut(self, operation: native.Operation) -> list[native.Operation]:
        """A long all-reduce in as many pieces as there are lanes; anything else as it is."""
        kind, dtype, op, root, source, target, count = operation
        item = native.ITEM_BYTES[dtype]
        if kind != native.ALL_REDUCE or len(self._groups) == 1 or count * item < 2 * _LANE_BYTES:
            return [operation]
        number = min(len(self._groups), count * item // _LANE_BYTES)
        line = _LINE_BYTES // item
        each = -(-count // (number * line)) * line
        return [
            (kind, dtype, op, root, source + at * item, target + at * item, min(each, count - at))
            for at in range(0, count, each)
        ]


# -- works and futures -------------------------------------------------------------------------------------------------


class TensorWork(Work):
    """A Work whose result is tensors; subclasses have `wait`, `is_completed` and `exception`."""

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
    """An operation that had finished when the call returned."""

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
    """Tickets of operations that belong together. `after` is what is left to do here when they have finished; the first
    caller that looks does it.

    `kept` holds this Work, and with it all memory that the operations need, until then, whether or not the caller does.
    """

    def __init__(
        self,
        native: Lanes,
        tickets: Sequence[tuple[int, ...]],
        result: Sequence[torch.Tensor],
        futures: Futures,
        after: Sequence[Callable[[], Any]],
        memory: Any,
        kept: dict[int, NativeWork],
    ) -> None:
        super().__init__(result)
        self._native, self._tickets, self._futures = native, tickets, futures
        self._after, self._memory, self._kept = list(after), memory, kept
        self._finishing, self._future_lock = threading.Lock(), threading.Lock()
        self._error: Exception | None = None
        self._future: torch.futures.Future | None = None
        kept[id(self)] = self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() or None
        try:
            for ticket in self._tickets:
                self._native.wait(ticket, limit_s)
        except RuntimeError:
            if self.is_finished():
                self._kept.pop(id(self), None)
            raise
        self._finish()
        if self._error is not None:
            raise self._error
        return True

    def is_finished(self) -> bool:
        """Whether the operations have finished or failed; what comes after them may be left to do."""
        return all(self._native.is_done(ticket) for ticket in self._tickets)

    def is_completed(self) -> bool:
        if not self.is_finished():
            return False
        self.exception()
        return True

    def exception(self) -> Exception | None:
        """The error, if the operations have finished with one."""
        if self.is_finished():
            try:
                self.wait()
            except Exception as error:
                return error
        return None

    def get_future(self) -> torch.futures.Future:
        with self._future_lock:
            if self._future is None:
                self._future = self._futures.create(self, self._result)
        return self._future

    def _finish(self) -> None:
        """Do what is left, once; other callers wait for it."""
        with self._finishing:
            after, self._after, self._memory = self._after, [], None
            try:
                for action in after:
                    action()
            except Exception as error:
                self._error = error
        self._kept.pop(id(self), None)


class Futures:
    """Completes torch's Futures in the order of their operations.

    One thread waits for operations. A callback of a Future may itself wait for a later one, so another thread waits
    while it runs; threads start when none is free.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Work, torch.futures.Future, list[torch.Tensor]] | None]
        self._waiting = queue.SimpleQueue()
        self._turn, self._lock = threading.Lock(), threading.Lock()
        self._threads: list[threading.Thread] = []
        self._num_free = 0  # threads that wait, or will when it is their turn
        self._is_closed = False

    def create(self, work: Work, tensors: list[torch.Tensor]) -> torch.futures.Future:
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
            thread = threading.Thread(target=self._run, name="paceline-futures", daemon=True)
            self._threads.append(thread)
            self._num_free += 1
            thread.start()

    def _run(self) -> None:
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
    """As `set_exception`, but each caller gets an error of its own: the frames in the traceback of a shared one would
    hold this Future and the caller's group, and neither could ever be freed."""
    kind: Any = type(error)
    text, options = str(error), {"code": error.code} if isinstance(error, PacelineError) else {}

    def raise_anew(_: Any) -> None:
        raise kind(text, **options)

    future._set_unwrap_func(raise_anew)  # type: ignore[attr-defined]
    future.set_result([])
