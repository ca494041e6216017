"""The process group as the wrapper uses it: sums that are started and waited for, objects shared, errors that name.

What is sent, and when, does not belong here.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paceline.errors import CollectiveError
from paceline.parallel.placement import destroy_group, open_group
from paceline.runtime.world import find_departed_ranks
from paceline.transport.group import PacelineGroup
from paceline.transport.works import FinishedWork

__all__ = ["Channel", "LostPeerError", "Sent", "naming_the_lost"]

_BROADCAST_BYTES = 64 << 20


class LostPeerError(CollectiveError):
    """Another rank has gone or does not answer."""


class Sent(NamedTuple):
    """What a rank handed to all-reduce: the calls, and the bytes of gradients in them."""

    num_messages: int
    num_bytes: int


class Channel:
    """A process group, and the device on which its messages live; `sent` adds up all messages of gradients."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, is_own: bool = False) -> None:
        self.group, self.device, self._is_own = group, device, is_own
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.backend = str(dist.get_backend(group))
        # NCCL takes many tensors in one launch and averages as it reduces; elsewhere a message is one tensor.
        self.is_nccl = device.type == "cuda" and "nccl" in self.backend
        # On a GPU, gloo writes the result by torch's own copy, some time after the call.
        self._writes_late = device.type == "cuda" and not self.is_nccl
        self.sent = Sent(0, 0)
        self.patience_s: float | None = None  # None: as long as the group's own timeout
        self._sum = dist.AllreduceOptions()
        self._sum.asyncOp = True
        self._average = dist.AllreduceOptions()
        self._average.asyncOp = True
        self._average.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
        self._many = dist.AllreduceCoalescedOptions()
        self._many.asyncOp = True
        self._many_average = dist.AllreduceCoalescedOptions()
        self._many_average.asyncOp = True
        self._many_average.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros, reduced where they lie if the backend has such memory. Collective: every rank must call this."""
        if device.type == "cpu" and isinstance(self.group, PacelineGroup) and self.group.shares_memory:
            return self.group.allocate(numel * dtype.itemsize).view(dtype)
        return torch.zeros(numel, dtype=dtype, device=device)

    def separate(self) -> None:
        """From now on use a group that nobody else does, where torch can make one.

        Collective: every rank must call this.
        """
        if not self._is_own and (group := open_group(self.group, self.backend)) is not None:
            self.group, self._is_own = group, True
            weakref.finalize(self, destroy_group, group).atexit = False

    @property
    def _alarms(self) -> dist.Store:
        store = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"paceline-alarms-{self.group.group_name}", store)

    def alarm(self, step: int) -> None:
        """Tell ranks that wait for something else than a message of ours that it may never come in this step."""
        with contextlib.suppress(RuntimeError):  # the store went with the rank that kept it
            self._alarms.set(str(step), "")

    def is_alarmed(self, step: int) -> bool:
        try:
            return self._alarms.check([str(step)])
        except RuntimeError:
            return True

    def start_sum(self, tensor: torch.Tensor, average: bool = False, rider_bytes: int = 0) -> dist.Work:
        """Start the sum over all ranks (or the average, where the backend folds it in), in place.

        `rider_bytes` of it are no gradients: words, statistics, gaps between gradients.
        """
        if self.world_size == 1:
            return FinishedWork([tensor])  # not even a call of the backend, which takes as long as on many ranks
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if self._writes_late:
            # Through an alias, so that its writing does not count as somebody's change of the tensor.
            alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor = alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        self._count(tensor.nbytes - rider_bytes)
        return self.group.allreduce([tensor], self._average if average else self._sum)

    def start_sums(self, tensors: Sequence[torch.Tensor], average: bool = False, rider_bytes: int = 0) -> dist.Work:
        """The same for many tensors in one launch; NCCL only."""
        if len(tensors) == 1 or self.world_size == 1:
            return self.start_sum(tensors[0], average, rider_bytes)
        real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
        self._count(sum(tensor.nbytes for tensor in tensors) - rider_bytes)
        return self.group.allreduce_coalesced(real, self._many_average if average else self._many)

    def _count(self, num_bytes: int) -> None:
        if num_bytes:  # a message of riders alone carries no gradient
            self.sent = Sent(self.sent.num_messages + 1, self.sent.num_bytes + num_bytes)

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for a message; an error of the backend becomes one that says what was awaited and who has left."""
        try:
            if self.patience_s is None:
                work.wait()
            else:
                work.wait(timedelta(seconds=self.patience_s))
        except RuntimeError as error:
            raise _explain(error, f"{what} cannot be reduced") from error

    def share(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order. Collective: every rank must call this."""
        values: list[Any] = [None] * self.world_size
        # Object collectives use the current GPU under NCCL, and hang on a wrong one.
        here = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        with here, naming_the_lost("the ranks cannot tell each other what they hold"):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Give every rank the values of the rank `source` of this group. Collective: every rank must call this."""
        root = dist.get_global_rank(self.group, source)
        families: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            families.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
        with torch.no_grad(), naming_the_lost(f"the values of rank {source} cannot be broadcast"):
            for family in families.values():
                for batch in _batches(family):
                    flat = torch.cat([tensor.reshape(-1) for tensor in batch])
                    real = torch.view_as_real(flat) if flat.is_complex() else flat
                    # gloo knows no bool.
                    dist.broadcast(real.view(torch.uint8) if real.dtype == torch.bool else real, root, self.group)
                    if self.rank != source:
                        for tensor, part in zip(batch, torch.split(flat, [t.numel() for t in batch]), strict=True):
                            tensor.copy_(part.view(tensor.shape))


@contextlib.contextmanager
def naming_the_lost(what: str) -> Iterator[None]:
    """An error of the backend in here becomes one that begins with `what` and says who has left."""
    try:
        yield
    except RuntimeError as error:
        raise _explain(error, what) from error


def _explain(error: RuntimeError, what: str) -> LostPeerError:
    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
    departed = find_departed_ranks()
    if departed:
        who = "; ".join(f"rank {rank} {how}" for rank, how in departed.items())
        hint = ": where ranks have different numbers of batches, train inside `with model.join():`"
        hint = hint if any("closed" in how for how in departed.values()) else ""
        return LostPeerError(f"{what}: {who}{hint}")
    return LostPeerError(f"{what}, another rank has gone or is stuck: {first_line}")


def _batches(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Runs of tensors of about `_BROADCAST_BYTES` together."""
    batches: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        if not batches or tensor.nbytes > room:
            batches.append([])
            room = _BROADCAST_BYTES
        batches[-1].append(tensor)
        room -= tensor.nbytes
    return [batch for batch in batches if sum(tensor.numel() for tensor in batch)]
