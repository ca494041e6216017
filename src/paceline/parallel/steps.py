"""One synchronised step: when it begins and ends, what every rank tells the others, and what follows from that.

How gradients travel is the reducer's affair (`ladder`, `bucketed`); this decides that they do, and by which weights.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.errors import CollectiveError, ConfigError
from paceline.parallel.buffers import SharedBuffers
from paceline.parallel.channel import Channel, LostPeerError
from paceline.parallel.forwards import Forwards
from paceline.parallel.ladder import Reducer, on_gradient
from paceline.parallel.passes import is_nested, will_accumulate
from paceline.parallel.replicas import Members, digest_replica, locate_drift
from paceline.parallel.verdicts import Finding, judge, list_names
from paceline.parallel.words import Notice, Status, Tail

__all__ = ["StepOptions", "Steps"]

_engine = torch.autograd.Variable._execution_engine
# On a GPU, reading the words makes the host wait: done at once in the first steps, and at the next step later on.
_EAGER_STEPS = 10
# How long a rank that has failed waits for the others to hear of it; and where they may wait for it inside forward,
# so that they hear only when it leaves.
_FAREWELL_S, _SHORT_FAREWELL_S = 60.0, 5.0
_ALARMS = Status.MISSING | Status.FAILED | Status.CHANGED


@dataclass(frozen=True)
class StepOptions:
    """`average` by `ranks` or by `samples`; `check_every` steps the replicas are compared (0: never)."""

    average: str = "ranks"
    allow_missing: bool = False
    check_every: int = 100
    manual: bool = False
    meets_in_forward: bool = False  # layers have messages of their own there


class Steps:
    """Watches forwards and backwards of one model on one rank and synchronises the gradients of those that count."""

    def __init__(
        self,
        members: Members,
        channel: Channel,
        reducer: Reducer,
        tail: Tail,
        buffers: SharedBuffers,
        options: StepOptions,
    ) -> None:
        self.members, self.channel, self.reducer, self.tail = members, channel, reducer, tail
        self.buffers, self.options = buffers, options
        self.num_steps = 0
        self.do_sync = True
        self.is_pending = False  # gradients were accumulated that no step has synchronised
        self.divide_by_world = True  # in `join`, as torch: divide by all ranks, not by those that still have data
        self.throw_early = False
        self.is_joining = False
        self._announce: Callable[[], object] | None = None  # in torch's Join: tell those who are done of a step
        self._is_announced = False
        self._last_active: list[int] = []
        self._expected_total: int | None = None
        self._step_weight = 1
        self._task: int | None = None
        self._syncing = False
        self._structure_changed = ""
        self._forward_error: BaseException | None = None
        self._unread: tuple[torch.Tensor, torch.cuda.Event, list[int]] | None = None
        self._warned = False
        self._all_finished = False
        self._is_stopped = False
        self._forwards = Forwards()
        self._broken = ""  # by what: a failure after which the ranks cannot match their messages any more
        # Where a forward's output hides its tensors, these two tell that a backward has begun.
        ends = {id(param): param for param in (members.params[0], members.params[-1])}
        own = weakref.ref(self)

        def begin(is_certain: bool = False) -> None:
            if (me := own()) is not None:
                me._on_backward(is_certain)

        self._begin = begin
        self._handles = [on_gradient(param, lambda _: begin(True)) for param in ends.values()]

    def stop(self) -> None:
        """From now on nothing is synchronised, not even the backward of a forward that was."""
        self._is_stopped = True
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.reducer.stop()

    # -- forward ------------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Settle what the last step left open, and notice a backward that never came to its end."""
        if self._broken:
            raise CollectiveError(f"{self._broken}; messages no longer match since then: start the ranks anew")
        if self._unread is not None:
            self._read_unread()
        if self._task is not None and torch._C._current_graph_task_id() == -1:
            broken_off = self._syncing
            self._task, self._syncing = None, False
            if broken_off:
                self.fail(CollectiveError("the backward before this forward ended with an error"))

    def _read_unread(self) -> None:
        if self._unread is not None:
            words, event, missing = self._unread
            self._unread = None
            event.synchronize()
            self._act_on(self.tail.read_slots(words.tolist()), missing)

    def after_forward(self, output: Any, samples: int, is_training: bool) -> None:
        """Be told when a backward passes through the output."""
        is_seen = self._forwards.watch(output, samples, is_training, self._begin)
        # Where the output hides its tensors, any parameter may be the first that is heard of a backward.
        if not is_seen and len(self._handles) < len(self.members.params):
            for handle in self._handles:
                handle.remove()
            begin, trained = self._begin, [param for param in self.members.params if param.requires_grad]
            self._handles = [on_gradient(param, lambda _: begin(True)) for param in trained]

    def note_structure(self, change: str) -> None:
        """A change that would leave gradients out; every rank is told in the next step."""
        self._structure_changed = change

    def fail(self, error: Exception) -> None:
        """This rank's forward raised: take part in the step that the others are in, so that none waits for it.

        Raises one CollectiveError on all ranks where only some failed; returns where all did, or where nobody hears.
        """
        if self.channel.world_size == 1:
            return
        self._forward_error = error
        self.channel.patience_s = _SHORT_FAREWELL_S if self.options.meets_in_forward else _FAREWELL_S
        try:
            self._open_step()
            self._synchronize(Notice(Status.FAILED, 0), take_part=False)
        except LostPeerError:
            self._broken = f"{type(error).__name__} on this rank, of which the others did not hear: {error}"
        finally:
            self._forward_error, self.channel.patience_s = None, None

    # -- backward -----------------------------------------------------------------------------------------------------

    def _on_backward(self, is_certain: bool = False) -> None:
        """A backward reaches this model: decide now whether it is synchronised, and be called when it is over."""
        task = torch._C._current_graph_task_id()
        if self._is_stopped or task == self._task:
            return
        if self._task is not None and task > self._task and is_nested():
            return  # re-entrant checkpointing: the outer one counts
        if not is_certain and not self._structure_changed and not will_accumulate(self.members.params):
            return
        if self._task is not None and task > self._task and self._syncing:
            raise CollectiveError(
                "the backward before this one ended with an error and was never finished: run a forward first, which "
                "tells the other ranks"
            )
        if is_certain and is_nested():
            raise ConfigError(
                "re-entrant checkpointing, and an output that hides its tensors: the end of backward cannot be seen; "
                "use checkpoint(..., use_reentrant=False), or return tensors in tuples, dicts or objects with fields"
            )
        syncing = self.do_sync and not self.options.manual
        if syncing:
            self._open_step()
        self._task, self._syncing = task, syncing
        if torch.is_grad_enabled() and not self._warned and self._syncing:
            self._warned = True
            warnings.warn(
                "backward(create_graph=True): the averaged gradients carry no graph; for a penalty on gradients take "
                "them from torch.autograd.grad",
                stacklevel=2,
            )
        if self._syncing:
            self._step_weight = self._weight()
            self.reducer.begin(self._factor())
        _engine.queue_callback(lambda: self._on_backward_over(task))

    def _on_backward_over(self, task: int) -> None:
        if self._task != task:
            return
        self._task, syncing, self._syncing = None, self._syncing, False
        if syncing:
            self._end_step()
        else:
            self.is_pending = True

    def _weight(self) -> int:
        return 1 if self.options.average == "ranks" else self._forwards.count_samples()

    def _factor(self) -> float:
        """What this rank's gradients are multiplied by, so that the sum is the average if the total is as expected."""
        total = self._expected_total or self.channel.world_size
        return self._step_weight / total

    def synchronize(self) -> None:
        """Average the gradients now. Collective: every rank must call this."""
        self._open_step()
        self._step_weight = self._weight()
        self._end_step()

    def _end_step(self) -> None:
        failure = self.reducer.failure
        late = self.reducer.find_late()
        if late and failure is None:
            failure = CollectiveError(
                f"the gradient of {list_names(self.members, late)} changed after it had been sent: the graph is not "
                "what it was in the steps before; reducer='flat' always waits for the end of backward"
            )
        missing = self.reducer.find_missing()
        status = Status.FINE
        if failure is not None:
            self.reducer.failure = failure
            status |= Status.FAILED
        if missing and not self.options.allow_missing:
            status |= Status.MISSING
        if self._structure_changed:
            status |= Status.CHANGED
        if self._forwards.need_buffers:
            status |= Status.HOLD
        else:
            if self.buffers.are_due(self.num_steps):
                status |= Status.STATISTICS
            if self.buffers.every and self.buffers.have_changed():
                status |= Status.BUFFERS
        check = self.options.check_every and self.num_steps % self.options.check_every == 0
        digest = digest_replica(self.members) if check else 0
        notice = Notice(status, self._step_weight, digest)
        self._synchronize(notice, take_part=failure is None, missing=missing)

    def shadow(self) -> bool:
        """A step of a rank without data; True when no rank has any more. Collective: every rank must call this."""
        self._synchronize(Notice(Status.FINISHED, 0), take_part=False)
        return self._all_finished

    def mirror(self) -> None:
        """The same in torch's Join, where the averaged gradients are left here, too: others may step with them."""
        for param in self.members.params:
            param.grad = None
        self._synchronize(Notice(Status.FINISHED, 0), take_part=True)

    def even_out(self) -> None:
        """Give all ranks the values of one that had data to the end. Collective: every rank must call this."""
        self.channel.broadcast(self.members.tensors(), self._last_active[0] if self._last_active else 0)

    @contextlib.contextmanager
    def joining(
        self, divide_by_world: bool, throw_early: bool = False, announce: Callable[[], object] | None = None
    ) -> Iterator[None]:
        self.is_joining, self.divide_by_world, self.throw_early = True, divide_by_world, throw_early
        self._announce, self._last_active = announce, []
        try:
            yield
        finally:
            self.is_joining, self.divide_by_world, self.throw_early = False, True, False
            self._announce = None

    def _open_step(self) -> None:
        if self._announce is not None and not self._is_announced:
            self._announce()
            self._is_announced = True

    def _synchronize(self, notice: Notice, take_part: bool, missing: Iterable[int] = ()) -> None:
        missing = list(missing)
        has_data = take_part and not notice.status & Status.FINISHED
        absent = missing if has_data else list(range(len(self.members.params)))
        self._read_unread()

        def write(region: torch.Tensor) -> None:
            failed = Status.FAILED if self.reducer.failure is not None else Status.FINE
            self.tail.write_slots(region, replace(notice, status=notice.status | failed))
            if self.tail.num_used:
                self.tail.write_used(region, absent)
            if self.tail.num_statistics:
                wrote, hold = (bool(notice.status & bit) for bit in (Status.STATISTICS, Status.HOLD))
                self.buffers.write(self.tail.statistics(region), wrote, hold)

        try:
            region = self.reducer.finish(write, self._factor(), take_part)
            self.num_steps += 1
            self.is_pending = False
            if take_part:
                self._forwards.settle(self._step_weight)
            if region.device.type != "cuda" or self._must_read_now(notice):
                peers = self.tail.read_slots(region[: self.tail.num_slots].tolist())
                if not self._act_on(peers, missing):
                    return
                self._complete(peers, region, absent, take_part)
            else:
                self._read_later(region, notice, missing)
        finally:
            self.reducer.failure, self._is_announced = None, False
        self.reducer.settle()

    # -- what the words say -------------------------------------------------------------------------------------------

    def _must_read_now(self, notice: Notice) -> bool:
        opted = self.options.average == "samples" or self.options.allow_missing or self.buffers.need_message
        odd = self.reducer.failure or notice.status & (Status.FAILED | Status.FINISHED) or notice.digest
        return bool(self.num_steps <= _EAGER_STEPS or opted or odd or self.is_joining)

    def _read_later(self, region: torch.Tensor, notice: Notice, missing: list[int]) -> None:
        words = torch.empty(self.tail.num_slots, dtype=region.dtype, pin_memory=True)
        words.copy_(region[: self.tail.num_slots], non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._unread = words, event, missing
        if self.tail.num_statistics and self.buffers.have_turn(self.num_steps - 1) and not notice.status & Status.HOLD:
            with torch.no_grad():
                self.buffers.read_unseen(self.tail.statistics(region))

    def _act_on(self, peers: list[Notice], missing: list[int]) -> bool:
        """Raise on every rank what any of them has found; and make changed buffers equal again.

        False where every rank's forward failed: each is about to raise its own error.
        """
        together = Status.FINE
        for peer in peers:
            together |= peer.status
        active = [rank for rank, peer in enumerate(peers) if not peer.status & Status.FINISHED]
        self._all_finished = not active
        self._last_active = active or self._last_active
        if together & _ALARMS:
            self._raise_together(missing)
            return False
        if self.throw_early and 0 < len(active) < len(peers):
            done = [str(rank) for rank in range(len(peers)) if rank not in active]
            raise CollectiveError(f"step {self.num_steps}: rank {', '.join(done)} has no more data, and others have")
        if len({peer.digest for peer in peers if not peer.status & Status.FINISHED}) > 1:
            raise locate_drift(self.members, self.channel, self.num_steps)
        if together & Status.BUFFERS and not together & Status.HOLD:
            self.buffers.broadcast(self.channel, active[0])
        return True

    def _complete(self, peers: list[Notice], region: torch.Tensor, absent: list[int], take_part: bool) -> None:
        """Weigh by the true total, drop gradients that no rank has, and take the averaged statistics."""
        with torch.no_grad():
            writers = sum(bool(peer.status & Status.STATISTICS) for peer in peers)
            if any(peer.status & Status.HOLD for peer in peers):
                writers = 0
            if writers and self.tail.num_statistics:
                self.buffers.read(self.tail.statistics(region)[:-1], writers)
            elif writers:
                mine = bool(peers[self.channel.rank].status & Status.STATISTICS)
                self.buffers.average(self.channel, mine, writers)
            if self.tail.num_used and take_part and absent:
                used = self.tail.used(region).tolist()
                for index in absent:
                    if not used[index]:
                        self.members.params[index].grad = None
            total = sum(peer.samples for peer in peers)
            expected = self._expected_total or self.channel.world_size
            if self.options.average == "ranks" and self.divide_by_world:
                total = self.channel.world_size
            if total not in (0, expected) and take_part:
                self.reducer.multiply(expected / total)
            if self.options.average == "samples" and total:
                self._expected_total = total

    def _raise_together(self, missing: list[int]) -> None:
        """Collect from every rank what is wrong there, and raise one error with the same text everywhere."""
        error = self._forward_error or self.reducer.failure
        place = "forward" if self._forward_error is not None else self.reducer.failed_in
        params = self.members.params
        mine = Finding(
            # Without the traceback that a Future's error brings along.
            error=f"{place}: {type(error).__name__}: {error}".partition("\n\n")[0] if error is not None else "",
            change=self._structure_changed,
            missing=tuple(missing),
            frozen=tuple(index for index in missing if not params[index].requires_grad),
            in_hook=error is not None and "hook" in place,
        )
        for index in missing:
            params[index].grad = None
        findings = self.channel.share(mine)
        if error is not None and all(finding.error for finding in findings):
            # Every rank failed: each raises its own error, unchanged; one of a forward is on its way already.
            if self._forward_error is None:
                raise error
            return
        verdict = judge(findings, self.num_steps, self.members)
        if any(finding.in_hook for finding in findings):
            self._broken = str(verdict)
        raise verdict from error
