"""All-reduce over several hosts: inside each in shared memory, between one leader per host over gloo, piece by piece.

While the leaders exchange one piece, the next is reduced inside the hosts; the result comes back by a broadcast inside.
A rank that fails leaves the reason in the store and closes its group inside, so that none waits for it on any host.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.transport import native
from paceline.transport.works import DTYPES, After, Futures, Tensors, TensorWork

_PIECE_BYTES = 1 << 20
_LOOK_S = 0.25  # how often a leader that waits for other hosts checks whether one of them has failed
_REPORT_S = 1.0  # how long a leader that lost its connection waits for a report that names the rank
_REDUCE: dict[int, Any] = {native.SUM: dist.ReduceOp.SUM, native.MIN: dist.ReduceOp.MIN, native.MAX: dist.ReduceOp.MAX}


class HostsWork(TensorWork):
    """An all-reduce of a contiguous tensor in place; `op` is the core's number."""

    def __init__(
        self, run: torch.Tensor, op: int, timeout: timedelta, result: Tensors, futures: Futures, after: After
    ) -> None:
        super().__init__(result, futures)
        self.flat, self.op, self.timeout, self.after = run.view(-1), op, timeout, after
        self._is_finished = threading.Event()
        self._error: Exception | None = None

    def conclude(self, error: Exception | None) -> None:
        self._error = error
        self._is_finished.set()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() or None
        if not self._is_finished.wait(limit_s):
            message = f"an all-reduce over several hosts took longer than {limit_s:g} s"
            raise native.TransportError(message, code="timeout")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._is_finished.is_set()

    def exception(self) -> Exception | None:
        return self._error


class TwoLevels:
    """Ranks whose `hosts` these are, in rank order; those of this host share memory in `inside`. Collective.

    `names` are the ranks in error messages. Operations run one after the other, on a thread.
    """

    def __init__(
        self, store: Any, inside: native.Lanes, hosts: list[str], rank: int, names: list[int], timeout: timedelta
    ) -> None:
        self._inside, self._size = inside, len(names)
        leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]  # the first rank of each host
        mine = hosts.index(hosts[rank])
        self._others = " or ".join(str(names[leader]) for leader in leaders if leader != mine)
        # A connection of its own: another thread may be waiting on the group's.
        self._reports = dist.PrefixStore("hosts", store.clone())
        self._between: Any = None
        if rank == mine:
            numbered = dist.PrefixStore("leaders", store)
            self._between = c10d.ProcessGroupGloo(numbered, leaders.index(rank), len(leaders), timeout=timeout)
        self._works: queue.SimpleQueue[HostsWork | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="paceline-hosts", daemon=True)
        self._thread.start()

    def start(self, work: HostsWork) -> None:
        if self._is_closing:
            work.conclude(_closed())
        else:
            self._works.put(work)

    def close(self) -> None:
        """Leave; what has not run fails."""
        self._is_closing = True
        self._inside.close()
        if self._thread is not threading.current_thread():
            self._works.put(None)
            self._thread.join()
            while not self._works.empty():  # put there meanwhile
                if (work := self._works.get()) is not None:
                    work.conclude(_closed())
        self._between = None

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            if self._failure is None:
                try:
                    self._all_reduce(work)
                    if work.after is not None:
                        work.after()
                except Exception as error:
                    self._failure = self._report_failure(error)
            work.conclude(self._failure)

    def _all_reduce(self, work: HostsWork) -> None:
        """Inside, between, inside; every rank of a host goes through the same operations inside, in the same order."""
        op = native.SUM if work.op == native.AVG else work.op
        opts = c10d.AllreduceOptions()
        opts.reduceOp, opts.timeout = _REDUCE[op], work.timeout
        before: tuple[torch.Tensor, Any] | None = None
        for piece in work.flat.split(max(1, _PIECE_BYTES // work.flat.element_size())):
            self._run_inside(work, piece, native.ALL_REDUCE, DTYPES[piece.dtype], op, piece.numel())
            between = None if self._between is None else self._between.allreduce([piece], opts)
            if before is not None:
                self._spread(work, *before)
            before = piece, between
        assert before is not None  # even of nothing there is one piece
        self._spread(work, *before)

    def _spread(self, work: HostsWork, piece: torch.Tensor, between: Any) -> None:
        if between is not None:
            self._await(between)
            if work.op == native.AVG:
                piece.div_(self._size, rounding_mode=None if piece.is_floating_point() else "trunc")
        self._run_inside(work, piece, native.BROADCAST, native.BYTES, 0, piece.nbytes)

    def _run_inside(self, work: HostsWork, piece: torch.Tensor, kind: int, dtype: int, op: int, count: int) -> None:
        if self._is_closing:
            raise _closed()
        operation = kind, dtype, op, 0, piece.data_ptr(), piece.data_ptr(), count
        self._inside.run(operation, max(0.0, work.timeout.total_seconds()))

    def _await(self, work: Any) -> None:
        """Wait for the other hosts, as long as none of them has failed."""
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=_LOOK_S))
            except RuntimeError:
                if self._is_closing:
                    raise _closed() from None
                if reason := self._read_reason():
                    raise reason from None
        try:
            work.wait()
        except RuntimeError as error:
            # gloo names an address; a rank on the host of the lost one knows its number.
            deadline = time.monotonic() + _REPORT_S
            while not (reason := self._read_reason()) and time.monotonic() < deadline:
                time.sleep(_LOOK_S / 5)
            lost = f"the connection to the host of rank {self._others} failed: {str(error).splitlines()[0]}"
            raise (reason or native.TransportError(lost, code="peer-lost")) from error

    def _report_failure(self, error: Exception) -> Exception:
        """Report the reason to all hosts and leave the group of this one; returns the first error."""
        if self._is_closing:
            return error
        reason = self._read_reason()
        if not reason:
            with contextlib.suppress(RuntimeError):  # the store is gone with the rank that served it
                self._reports.set("reason", json.dumps([str(error), getattr(error, "code", "")]))
        self._inside.close()
        return reason or error

    def _read_reason(self) -> native.TransportError | None:
        """Why another rank failed; None if none has."""
        with contextlib.suppress(RuntimeError):
            if self._reports.check(["reason"]):
                text, code = json.loads(self._reports.get("reason"))
                return native.TransportError(text, code=code)
        return None


def _closed() -> native.TransportError:
    return native.TransportError("the process group is closed", code="closed")
