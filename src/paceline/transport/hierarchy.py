"""All-reduce over several hosts: in shared memory inside each host, and over gloo between the leaders of the hosts.

The operation is pipelined: while the leaders exchange one piece, the hosts reduce the next. Each leader broadcasts the
results inside its host. A rank that fails stores the reason and closes its host's group, so that no rank on any host
waits for it.
"""

import contextlib
import json
import queue
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.torch_internals import c10d
from paceline.transport import native, proof
from paceline.transport.works import DTYPES

_PIECE_BYTES = 1 << 20
_POLL_S = 0.25  # how often a waiting leader checks whether another host has failed
_REPORT_S = 1.0  # how long a leader that lost its connection waits for a report that names the lost rank
_REDUCE: dict[int, Any] = {native.SUM: dist.ReduceOp.SUM, native.MIN: dist.ReduceOp.MIN, native.MAX: dist.ReduceOp.MAX}


class _AllReduce(threading.Event):
    """One all-reduce of a contiguous tensor, in place; set once it has finished. `op` is a constant of the core."""

    def __init__(self, flat: torch.Tensor, op: int, timeout_s: float) -> None:
        super().__init__()
        self.flat, self.op, self.timeout_s = flat, op, timeout_s
        self.error: Exception | None = None


class TwoLevels:
    """Ranks on several `hosts`, listed in rank order. The ranks of this host share memory in `inside`. Collective.

    `names` are the rank numbers in error messages. All-reduces run one after another on a thread. The interface is that
    of `native.Lanes`, with tensors instead of addresses.
    """

    def __init__(
        self,
        store: Any,
        inside: native.Lanes,
        hosts: list[str],
        rank: int,
        names: list[int],
        timeout: timedelta,
        name: str = "",
    ) -> None:
        self._inside, self._size = inside, len(names)
        leaders = [hosts.index(host) for host in dict.fromkeys(hosts)]  # the first rank of each host
        mine = hosts.index(hosts[rank])
        self._others = " or ".join(str(names[leader]) for leader in leaders if leader != mine)
        # A separate connection, because another thread may be waiting on the group's.
        self._reports = dist.PrefixStore("hosts", store.clone())
        self._between: Any = None
        if rank == mine:
            numbered = dist.PrefixStore("leaders", store)
            self._between = c10d.ProcessGroupGloo(numbered, leaders.index(rank), len(leaders), timeout=timeout)
            proof.check_pairs(self._between, f"{name}/leaders")
        self._works: queue.SimpleQueue[_AllReduce | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._is_closing = False
        self._lock = threading.Lock()  # guards the flag and the end of the queue
        self._thread = threading.Thread(target=self._run, name="paceline-hosts", daemon=True)
        self._thread.start()

    def run(self, operation: Any, timeout_s: float) -> None:
        self.wait(self.submit(operation, timeout_s))

    def submit(self, operation: Any, timeout_s: float) -> _AllReduce:
        _, _, op, _, tensor, _, _ = operation
        work = _AllReduce(tensor.view(-1), op, timeout_s)
        with self._lock:
            if self._is_closing:
                raise _closed()
            self._works.put(work)
        return work

    def wait(self, work: _AllReduce, timeout_s: float | None = None) -> None:
        if not work.wait(timeout_s):
            message = f"an all-reduce over several hosts took longer than {timeout_s:g} s"
            raise native.TransportError(message, code="timeout")
        if work.error is not None:
            raise work.error

    def is_done(self, work: _AllReduce) -> bool:
        return work.is_set()

    try_finish = is_done

    def close(self) -> None:
        """Leave the group. Operations that have not run yet fail."""
        with self._lock:
            self._is_closing = True
            self._works.put(None)  # after all operations, so that the thread runs these before it ends
        self._inside.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._between = None

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            if self._failure is None:
                try:
                    self._all_reduce(work)
                except Exception as error:
                    self._failure = self._report_failure(error)
            work.error = self._failure
            work.set()

    def _all_reduce(self, work: _AllReduce) -> None:
        """Reduce inside each host, reduce between hosts, and broadcast inside each host. Ranks of a host run the same
        operations in order."""
        op = native.SUM if work.op == native.AVG else work.op
        opts = c10d.AllreduceOptions()
        opts.reduceOp = _REDUCE[op]
        if work.timeout_s:  # otherwise the group's own timeout
            opts.timeout = timedelta(seconds=work.timeout_s)
        before: tuple[torch.Tensor, Any] | None = None
        for piece in work.flat.split(max(1, _PIECE_BYTES // work.flat.element_size())):
            self._run_inside(work, piece, native.ALL_REDUCE, DTYPES[piece.dtype], op, piece.numel())
            between = None if self._between is None else self._between.allreduce([piece], opts)
            if before is not None:
                self._spread(work, *before)
            before = piece, between
        assert before is not None  # even an empty tensor is one piece
        self._spread(work, *before)

    def _spread(self, work: _AllReduce, piece: torch.Tensor, between: Any) -> None:
        if between is not None:
            self._await(between)
            if work.op == native.AVG:
                piece.div_(self._size, rounding_mode=None if piece.is_floating_point() else "trunc")
        self._run_inside(work, piece, native.BROADCAST, native.BYTES, 0, piece.nbytes)

    def _run_inside(self, work: _AllReduce, piece: torch.Tensor, kind: int, dtype: int, op: int, count: int) -> None:
        if self._is_closing:
            raise _closed()
        operation = kind, dtype, op, 0, piece.data_ptr(), piece.data_ptr(), count
        self._inside.run(operation, work.timeout_s)

    def _await(self, work: Any) -> None:
        """Wait for the other hosts, unless one of them fails."""
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=_POLL_S))
            except RuntimeError:
                if self._is_closing:
                    raise _closed() from None
                if reason := self._read_reason():
                    raise reason from None
        try:
            work.wait()
        except RuntimeError as error:
            # gloo's error contains only an address, but a rank on the lost rank's host knows its number.
            deadline = time.monotonic() + _REPORT_S
            while not (reason := self._read_reason()) and time.monotonic() < deadline:
                time.sleep(_POLL_S / 5)
            lost = f"the connection to the host of rank {self._others} failed: {str(error).splitlines()[0]}"
            raise (reason or native.TransportError(lost, code="peer-lost")) from error

    def _report_failure(self, error: Exception) -> Exception:
        """Report the reason to all hosts and leave this host's group. Returns the first error."""
        if self._is_closing:
            return error
        reason = self._read_reason()
        if not reason:
            with contextlib.suppress(RuntimeError):  # the rank that hosts the store has exited
                self._reports.set("reason", json.dumps([str(error), getattr(error, "code", "")]))
        self._inside.close()
        return reason or error

    def _read_reason(self) -> native.TransportError | None:
        """Why another rank failed; None if no rank has."""
        with contextlib.suppress(RuntimeError):
            if self._reports.check(["reason"]):
                text, code = json.loads(self._reports.get("reason"))
                return native.TransportError(text, code=code)
        return None


def _closed() -> native.TransportError:
    return native.TransportError("the process group is closed", code="closed")
