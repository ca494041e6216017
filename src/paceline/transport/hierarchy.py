"""All-reduce over several hosts: inside each in shared memory, between one leader per host over gloo, piece by piece.

While the leaders exchange one piece, the next is reduced inside the hosts; the result comes back by a broadcast inside.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Work

from paceline.transport import native
from paceline.transport.lanes import Lanes

__all__ = ["TwoLevels"]

_PIECE_BYTES = 1 << 20
_REDUCE: dict[int, Any] = {
    native.SUM: dist.ReduceOp.SUM, native.AVG: dist.ReduceOp.SUM, native.MIN: dist.ReduceOp.MIN,
    native.MAX: dist.ReduceOp.MAX,
}  # fmt: skip


class _ThreadWork(Work):
    """An operation on the thread below."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)
        self._future: torch.futures.Future = torch.futures.Future()
        self._is_over = threading.Event()
        self._error: Exception | None = None

    def conclude(self, error: Exception | None) -> None:
        self._error = error
        self._is_over.set()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        limit_s = timeout.total_seconds() or None
        if not self._is_over.wait(limit_s):
            raise native.TransportError(f"Timed out waiting {limit_s:g} s for an all-reduce over several hosts")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._is_over.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future:
        return self._future


class TwoLevels:
    """`leaders` are the first ranks of each host, `mine` this one's ranks. Collective: every rank must make one."""

    def __init__(
        self,
        store: dist.Store,
        inside: Lanes,
        leaders: Sequence[int],
        rank: int,
        mine: Sequence[int],
        size: int,
        timeout: timedelta,
    ) -> None:
        self._inside, self._size = inside, size
        self._between: Any = None
        if rank == mine[0]:
            numbered = dist.PrefixStore("leaders", store)
            self._between = c10d.ProcessGroupGloo(numbered, list(leaders).index(rank), len(leaders), timeout=timeout)
        self._jobs: queue.SimpleQueue[tuple[_ThreadWork, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start_all_reduce(self, tensor: torch.Tensor, dtype: int, op: int, asynchronous: bool) -> Work:
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="paceline-hosts", daemon=True)
            self._thread.start()
        work = _ThreadWork([tensor])
        self._jobs.put((work, lambda: self._all_reduce(tensor.view(-1), dtype, op)))
        if not asynchronous:
            work.wait()
        return work

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self._between is not None:
            self._between.shutdown()

    def _keep(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, run = job
            error: Exception | None = None
            try:
                run()
            except Exception as caught:
                error = caught
                if self._between is not None:
                    self._between.shutdown()  # or the other hosts would wait for this one until their time is up
            work.conclude(error)

    def _all_reduce(self, flat: torch.Tensor, dtype: int, op: int) -> None:
        """Inside, between, inside; every rank of a host goes through the same operations inside, in the same order."""
        inside = native.SUM if op == native.AVG else op
        pieces = flat.split(max(1, _PIECE_BYTES // flat.element_size()))
        between: list[Any] = []
        for number, piece in enumerate(pieces):
            self._on_piece(native.ALL_REDUCE, piece, dtype, inside)
            if self._between is not None:
                opts = c10d.AllreduceOptions()
                opts.reduceOp = _REDUCE[op]
                between.append(self._between.allreduce([piece], opts))
            if number:
                self._spread(pieces[number - 1], between, number - 1, op)
        self._spread(pieces[-1], between, len(pieces) - 1, op)

    def _spread(self, piece: torch.Tensor, between: Sequence[Any], number: int, op: int) -> None:
        if between:
            between[number].wait()
            if op == native.AVG:
                piece.div_(self._size, rounding_mode=None if piece.is_floating_point() else "trunc")
        self._on_piece(native.BROADCAST, piece, native.BYTES, 0)

    def _on_piece(self, kind: int, piece: torch.Tensor, dtype: int, op: int) -> None:
        count = piece.nbytes if dtype == native.BYTES else piece.numel()
        self._inside.run((kind, dtype, op, 0, piece.data_ptr(), piece.data_ptr(), count))
