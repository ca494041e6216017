"""The process group as the wrapper uses it: asynchronous reductions, object exchange, and errors for lost peers."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from paceline.errors import CollectiveError, LaunchError
from paceline.runtime.faults import pulse
from paceline.runtime.faults.recovery import RECOVERS
from paceline.runtime.ranks import messages
from paceline.runtime.ranks.world import find_departed_ranks, has_lost_rank, keep_groups
from paceline.torch_internals import broadcast_coalesced, find_counter, get_default_store, new_local_group
from paceline.transport import proof
from paceline.transport.group import PacelineGroup
from paceline.transport.works import FinishedWork

_BROADCAST_BYTES = 64 << 20
# Two ranks exchange messages of at least this size with concurrent sends. The tag is one that programs do not use.
_CROSSING_BYTES, _TAG = 16 << 10, 0x70616365
# The shortest and the longest pause between two store requests while waiting for other ranks.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.002, 0.1
_WORD_BITS = 62  # a store's counters have 64 bits


class Sent(NamedTuple):
    """A rank's gradient messages: their number and the bytes of their gradients."""

    num_messages: int
    num_bytes: int


class Channel:
    """A process group and the device of its messages."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        if group is None or not dist.is_initialized():
            raise LaunchError("no process group is open: call paceline.init() first")
        self.group, self.device, self.has_own_group = group, device, False
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.backend = str(dist.get_backend(group))
        # NCCL reduces many tensors in one launch, and can average. Other backends take one tensor per message.
        self.is_nccl = device.type == "cuda" and "nccl" in self.backend
        # On a GPU, gloo writes the result with torch's own copy, some time after the call.
        self._writes_late = device.type == "cuda" and not self.is_nccl
        if self._writes_late:  # the copy stream does not wait for other ranks
            pulse.watch_device(torch.cuda.current_stream(device).query)
        self._computed = torch.cuda.Event() if self.is_nccl and self.world_size > 1 else None  # type: ignore[no-untyped-call]
        self.waits_for_gpu = self._computed is not None and os.environ.get(RECOVERS) == "1"
        self.sent = Sent(0, 0)  # totals of all gradient messages so far
        self.timeout_s: float | None = None  # None: the group's own timeout
        # Keyed by whether to average.
        self._one = {average: _build_options(dist.AllreduceOptions(), average) for average in (False, True)}
        self._many = {average: _build_options(dist.AllreduceCoalescedOptions(), average) for average in (False, True)}

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocate zeros, in memory that ranks share if the backend supports that. Collective."""
        if device.type == "cpu" and isinstance(self.group, PacelineGroup) and self.group.shares_memory:
            return self.group.allocate(numel * dtype.itemsize).view(dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def _count(self, gradient_bytes: int) -> None:
        self.sent = Sent(self.sent.num_messages + 1, self.sent.num_bytes + gradient_bytes)

    def use_own_group(self) -> None:
        """Switch to a dedicated group. Collective."""
        if not self.has_own_group:
            self.group = open_group(self, self)
            self.has_own_group = True

    def _store(self, what: str) -> dist.Store:
        return dist.PrefixStore(f"paceline-{what}-{self.group.group_name}", get_default_store())

    @property
    def _failures(self) -> dist.Store:
        return self._store("failures")

    def wait_for_ranks(self, name: str, limit_s: float) -> list[int]:
        """Wait, through the store and without messages, until every rank has called this with the same name. Use each
        name only once. Returns the ranks that missed the limit; a rank that calls this later gets the same list."""
        if self.world_size == 1:
            return []
        store, until_s = self._store(f"meeting-{name}"), time.monotonic() + limit_s
        word, bit = divmod(self.rank, _WORD_BITS)
        store.add(f"arrived/{word}", 1 << bit)
        if store.add("count", 1) == self.world_size:
            store.compare_set("end", "", "all")
        # Hundreds of ranks may share one store, so minimize requests: pauses grow, and each rank sets its bit in a
        # counter, so finding the late ranks takes one request per counter, not per rank.
        pause_s = _MIN_PAUSE_S
        while not store.check(["end"]):
            if time.monotonic() <= until_s:
                time.sleep(pause_s)
                pause_s = min(_MAX_PAUSE_S, 1.5 * pause_s)
            else:
                words = [store.add(f"arrived/{word}", 0) for word in range(-(-self.world_size // _WORD_BITS))]
                arrived = [bool(word >> bit & 1) for word in words for bit in range(_WORD_BITS)]
                absent = [str(rank) for rank in range(self.world_size) if not arrived[rank]]
                store.compare_set("end", "", " ".join(absent) or "all")
        end = store.get("end").decode()
        return [] if end == "all" else [int(rank) for rank in end.split()]

    def report_failure(self, step: object) -> None:
        """Report in the store that this rank failed, since others may wait for messages that it never sends."""
        with contextlib.suppress(RuntimeError):  # the rank that hosts the store has exited
            self._failures.set(str(step), "")

    def has_failure(self, step: object) -> bool:
        try:
            return self._failures.check([str(step)])
        except RuntimeError:
            return True

    def start_sum(self, *tensors: torch.Tensor, average: bool = False, gradient_bytes: int = 0) -> dist.Work:
        """Start summing over all ranks, in place (or averaging, if the backend supports it). `gradient_bytes` counts
        the gradients in the message, without control words, statistics or padding. Only NCCL takes several tensors."""
        if self.world_size == 1:
            return FinishedWork(list(tensors))  # a backend call would take as long as with many ranks
        if gradient_bytes:
            self._count(gradient_bytes)
        real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
        if self.is_nccl:  # torch rejects channels_last strides here, though NCCL only needs dense memory
            real = [t if t.is_contiguous() else t.as_strided((t.numel(),), (1,), t.storage_offset()) for t in real]
        if self._writes_late:
            # An alias hides the backend's late write from the tensor's version counter.
            real = [alias(tensor) for tensor in real]
        if len(real) > 1:
            return self.group.allreduce_coalesced(real, self._many[average])
        return self.group.allreduce(real, self._one[average])

    def start_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> dist.Work:
        """Start gathering one tensor per rank, all of the same size, into `output` in rank order."""
        if self.world_size == 1:
            return FinishedWork([output.copy_(tensor)])
        self._count(tensor.nbytes)
        work = start_exchange(output.view(self.world_size, -1), tensor.view(-1), self.group)
        return cast(dist.Work, work)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks reduce CPU vectors in memory that they share."""
        is_cpu = self.device.type == "cpu"
        return is_cpu and isinstance(self.group, PacelineGroup) and self.group.shares_memory

    def start_rounded(self, tensor: torch.Tensor, words: torch.Tensor, gradient_bytes: int) -> dist.Work:
        """Start averaging float32 values in bfloat16, in place, and summing control words. Requires `shares_memory`."""
        self._count(gradient_bytes)
        group: Any = self.group
        return cast(dist.Work, group.average_rounded(tensor, words, self._one[False]))

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for a message. A backend error becomes a `peer-lost` error that names `what`."""
        with naming_lost_peers(f"{what} cannot be reduced"):
            if self.timeout_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=self.timeout_s))

    def mark_computed(self) -> None:
        """Record the end of backward for the monitor: up to here, GPU work does not depend on other ranks."""
        if self._computed is not None and pulse.is_open():
            self._computed.record()
            pulse.watch_device(self._computed.query, find_counter(self.group))

    def settle(self) -> None:
        """Raise if a rank was lost and messages were aborted: their results must not be applied. If ranks may continue
        without it, the host waits for the GPU here (`waits_for_gpu`). Otherwise an optimizer step that is already
        queued behind an aborted message would run."""
        if self.waits_for_gpu:
            torch.cuda.current_stream(self.device).synchronize()
        if has_lost_rank():
            raise _build_lost("this step cannot be completed")

    @pulse.waits
    def share(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Collective: every rank must call this."""
        device = self.device if self.is_nccl else torch.device("cpu")
        with naming_lost_peers("the ranks cannot exchange their settings"):
            return messages.share(value, self.group, device)

    @pulse.waits
    def broadcast(self, tensors: Iterable[torch.Tensor], source: int = 0) -> None:
        """Broadcast the values of rank `source` of this group. Collective: every rank must call this."""
        if self.world_size == 1:
            return
        # A complex tensor is sent as two real ones, because it may be conjugated. gloo does not support bool.
        real = [part for t in tensors if t.numel() for part in ((t.real, t.imag) if t.is_complex() else (t,))]
        known = [part.detach().view(torch.uint8) if part.dtype == torch.bool else part.detach() for part in real]
        if self.rank == source:  # torch writes to the source too, which must not count as a change to the tensor
            known = [alias(part.resolve_neg()) for part in known]
        with torch.no_grad(), naming_lost_peers(f"the values of rank {source} cannot be broadcast"):
            if known:
                broadcast_coalesced(self.group, known, _BROADCAST_BYTES, source)


class PairExchange:
    """Messages that two ranks send to each other at the same time. Has the interface of torch's `Work`."""

    def __init__(self, parts: Sequence[dist.Work], end: dist.Work) -> None:
        self._parts, self._end = parts, end

    def wait(self, *limit: timedelta) -> None:
        for work in (self._end, *self._parts):
            work.wait(*limit)

    def get_future(self) -> torch.futures.Future[None]:
        def finish(done: torch.futures.Future[Any]) -> None:
            done.value()
            for work in self._parts:  # already finished, because `end` was sent after them
                work.wait()

        return self._end.get_future().then(finish)


def start_exchange(rows: torch.Tensor, given: torch.Tensor, group: Any) -> Any:
    """Start an all-gather of a vector into `rows` or, for a matrix, an all-to-all of its rows."""
    one, is_gather = rows[0], given.dim() == 1
    if len(rows) == 2 and one.nbytes >= _CROSSING_BYTES and _is_gloo_on_cpu(rows, group):
        # gloo sends its data before it tells the peer that it is ready to receive, and that notice queues behind the
        # data, so the two ranks would send one after the other. Posting the receive first avoids this. The all-to-all
        # follows on the same connection, so it ends after the messages; unlike them, it has a Future.
        rank, peer = group.rank(), 1 - group.rank()
        parts = [group.recv([rows[peer]], peer, _TAG), group.send([given if is_gather else given[peer]], peer, _TAG)]
        end = group.alltoall_base(*torch.zeros(2, 2, dtype=torch.uint8), [], [])
        rows[rank] = given if is_gather else given[rank]
        return PairExchange(parts, end)
    into, flat = rows.view(-1), given.view(-1)
    return group._allgather_base(into, flat) if is_gather else group.alltoall_base(into, flat, [], [])


def _is_gloo_on_cpu(rows: torch.Tensor, group: Any) -> bool:
    if rows.device.type != "cpu" or isinstance(group, PacelineGroup):
        return False
    return isinstance(group._get_backend(rows.device), dist.ProcessGroupGloo)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with a separate version counter, to count writes or to hide them."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def open_group(like: Channel, owner: object) -> dist.ProcessGroup:
    """Another group of the same ranks that lives as long as `owner`. Collective."""
    if like.world_size < dist.get_world_size():
        group = new_local_group(dist.get_process_group_ranks(like.group), like.backend)
    else:
        group = dist.new_group(backend=like.backend)
    return _own(group, like.device, owner)


def open_part(ranks: Sequence[Sequence[int]], backend: str, device: torch.device, owner: object) -> dist.ProcessGroup:
    """Open the groups in `ranks` and return this rank's, which lives as long as `owner`. Collective over the whole
    world."""
    group, _ = dist.new_subgroups_by_enumeration([list(each) for each in ranks], backend=backend)
    return _own(group, device, owner)


def _own(group: Any, device: torch.device, owner: object) -> dist.ProcessGroup:
    proof.check_group(group)
    if "nccl" in str(dist.get_backend(group)) and dist.get_world_size(group) > 1:
        # NCCL connects in the first message. If a rank failed earlier, the others would wait there, where they cannot
        # check for failures.
        group.allreduce([torch.zeros(1, device=device)]).wait()
    weakref.finalize(owner, _destroy_group, group).atexit = False
    return cast(dist.ProcessGroup, group)


def _destroy_group(group: dist.ProcessGroup) -> None:
    with contextlib.suppress(ValueError, RuntimeError, AssertionError):  # destroyed along with its world
        if not isinstance(group, PacelineGroup):
            keep_groups([group])  # `owner` may have been freed on a thread of the group itself
        dist.destroy_process_group(group)


@contextlib.contextmanager
def naming_lost_peers(what: str) -> Iterator[None]:
    """Turn a backend error into a `peer-lost` error that begins with `what`. An aborted message leaves arbitrary values
    without raising; it is reported in the same way."""
    try:
        yield
    except Exception as error:
        if has_lost_rank():
            raise _build_lost(what) from error
        if isinstance(error, RuntimeError):
            raise _explain(error, what) from error
        raise
    if has_lost_rank():
        raise _build_lost(what)


def _build_lost(what: str) -> CollectiveError:
    return CollectiveError(f"{what}: another rank was lost", code="peer-lost")


def _explain(error: RuntimeError, what: str) -> CollectiveError:
    departed = find_departed_ranks()
    if not departed:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        return CollectiveError(f"{what}, another rank has left or is stuck: {first_line}", code="peer-lost")
    who = "; ".join(f"rank {rank} {how}" for rank, how in departed.items())
    if any("closed" in how for how in departed.values()):
        who += ": if ranks have different numbers of batches, train inside `with model.join():`"
    return CollectiveError(f"{what}: {who}", code="peer-lost")


def _build_options(options: Any, average: bool) -> Any:
    options.asyncOp = True
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG if average else dist.ReduceOp.SUM)
    return options
