"""One backward pass, from the preceding forward to averaged gradients. Read it from top to bottom.

`GradientSync` holds the step logic: which backward passes are synchronized, when one ends, what ranks report to each
other, and how they react. `BucketedReducer` sends the gradients in buckets while backward runs. Only the step logic
calls the reducer, never the reverse: the reducer returns its results, including failures.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch

from paceline.errors import CollectiveError, ConfigError
from paceline.parallel import streams
from paceline.parallel.buffers import SharedBuffers
from paceline.parallel.channel import Channel
from paceline.parallel.control import ERRORS, ControlWords, Finding, RankReport, Status, build_step_error
from paceline.parallel.flat import FlatGradients, LiveBucket, choose_separate
from paceline.parallel.graph import Arrivals, WeakHook, find_tensors, is_nested, on_gradient, will_accumulate
from paceline.parallel.hooks import IN_FORWARD, IN_HOOK, CommHook, Failure, HookBucket, HookCalls, agree_on_hook
from paceline.parallel.outer import OuterState
from paceline.parallel.replicas import MakePlan, Options, Replica, build_drift_error, digest_replica, find_strides
from paceline.parallel.rows import EmbeddingRows
from paceline.parallel.simple import SimpleReducer
from paceline.parallel.strategies import StrategyState
from paceline.parallel.timeline import Timeline
from paceline.parallel.zero import Sharding
from paceline.plan import Plan, plan_torch_start
from paceline.runtime.faults import pulse
from paceline.torch_internals import count_storage_uses, current_graph_task, engine
from paceline.transport.works import keep_from_compiler

_get_grad = operator.attrgetter("grad")
# On a GPU, reading the control words blocks the host until the step has finished. They are read immediately during the
# first steps, and for this many steps after a buffer changed. Otherwise they are read at the end of the next backward:
# by then the host is a whole step ahead, and the GPU never runs out of work.
_EAGER_STEPS = 10
# How long a failed rank waits for the others to receive its report. The shorter limit applies if they may be waiting
# inside forward, where they notice the failure only when this rank exits.
_REPORT_S, _SHORT_REPORT_S = 60.0, 5.0
# On a CPU, a gradient of at least this size is copied into its view as it arrives, while it is still in the cache.
_SEPARATE_BYTES = 256 << 10
# Maximum number of times to record the ready order again. If the graph changes in every step, recording does not help.
_MAX_RECORDS = 5


class JoinOptions(NamedTuple):
    """How `join` treats ranks that have run out of data."""

    divide_by_world: bool  # as in torch: divide by all ranks, not only by those that still have data
    raise_early: bool = False
    announce: Callable[[], object] | None = None  # for torch's Join: tells ranks without data that a step follows


class _Forward:
    """A forward whose backward has not begun. Only the autograd graph refers to it, so it is freed with the output."""

    def __init__(self, samples: int, is_training: bool) -> None:
        self.samples, self.is_training = samples, is_training


class GradientSync:
    """The step logic. `syncs`: some layers communicate in forward, such as SyncBatchNorm."""

    def __init__(
        self,
        reducer: BucketedReducer | SimpleReducer,
        control: ControlWords,
        buffers: SharedBuffers,
        options: Options,
        syncs: bool,
        schedule: OuterState | None = None,
        codec: StrategyState | None = None,
    ) -> None:
        self.schedule = schedule  # averages parameters instead of gradients, possibly after some initial steps
        self.codec = codec  # compresses gradients and keeps residuals
        self.replica, self.channel, self.reducer, self.control = reducer.replica, reducer.channel, reducer, control
        self.buffers, self.options, self.syncs_in_forward = buffers, options, syncs
        self.num_steps, self.do_sync = 0, True
        self.is_pending = False  # accumulated gradients have not been synchronized yet
        self.join: JoinOptions | None = None
        self.futures: list[torch.futures.Future[Any]] = []  # returned by a buffer hook; backward waits for them
        self._is_announced, self._all_finished = False, False
        self._last_active = 0  # the lowest rank that still has data
        self._weight = 1  # this rank's weight in the average
        self.expected_total = self.channel.world_size  # assumed total weight of all ranks: that of the last step
        self._task: int | None = None  # autograd's ID of the running backward
        self._syncing, self._warned, self._is_stopped = False, False, False
        self._completes = False
        self._change = ""  # how the model has changed since wrapping
        self._unread: tuple[torch.Tensor, torch.cuda.Event, list[int]] | None = None
        self._can_defer = self.channel.device.type == "cuda"
        self._eager_until = _EAGER_STEPS  # the last step that reads control words immediately
        self._unusable = ""  # why the ranks are permanently out of sync, if they are
        self._open: weakref.WeakSet[_Forward] = weakref.WeakSet()
        self._samples: int | None = None  # number of samples since the last step; None: no backward has begun
        self._last_samples = 0  # samples of the last step, for another backward through the same graph
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        # If the tensors in a forward's output cannot be found, hooks on these two parameters detect the backward.
        self._hook({self.replica.params[0], self.replica.params[-1]})

    def _hook(self, params: Collection[torch.Tensor]) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = [on_gradient(param, WeakHook(self._begin_backward, None)) for param in params]

    def stop(self) -> None:
        """Stop synchronizing, even for a backward whose forward has already run."""
        self._is_stopped = True
        self._hook(())
        self.reducer.stop()
        self.reducer.rows.stop()
        if self.schedule is not None:
            self.schedule.stop()

    @property
    def _local(self) -> OuterState | None:
        """The schedule while it averages parameters, so that steps send no gradients; otherwise None."""
        return self.schedule if self.schedule is not None and self.schedule.outer.is_local else None

    def sync_parameters(self) -> None:
        """Average the parameters now if they may differ between ranks. Collective."""
        if self.schedule is None:
            return
        self.schedule.run()
        if self.schedule.outer.has_drifted:
            self._completes = True
            try:
                self._exchange_control(self.schedule, Status.OK)
                self.schedule.complete()
            finally:
                self._completes = False

    def before_forward(self, change: str, is_training: bool = True) -> None:
        """Finish the last step's pending work. `change` describes a change to the model, which the next step reports to
        every rank."""
        if self.schedule is not None:
            self._unusable = self._unusable or self.schedule.unusable
        if self._unusable:
            text = f"{self._unusable}; the ranks are out of sync: restart them"
            raise CollectiveError(text, code="unusable")
        pulse.enter(pulse.FORWARD)
        self.reducer.free_memory()
        if self.schedule is not None and is_training:
            self.schedule.run()
            self.schedule.outer.begin_round()
        elif self.schedule is not None:  # if only some ranks evaluate, a sync here would hang: leave it to backward
            self.schedule.is_overdue = self.schedule.is_due
        if self._task is not None and current_graph_task() == -1:
            was_interrupted = self._syncing
            self._task, self._syncing = None, False
            if was_interrupted:
                self.fail(CollectiveError("the backward before this forward failed", code="unfinished-backward"))
        self._change = change

    def after_forward(self, output: Any, samples: int, is_training: bool) -> None:
        """Detect when a backward passes through the output."""
        pulse.enter(pulse.BETWEEN)
        if isinstance(output, torch.Tensor) and not output.requires_grad:
            return  # no backward will follow, as for a frozen teacher
        forward = _Forward(samples, is_training)
        self._open.add(forward)
        nodes = {tensor.grad_fn for tensor in find_tensors(output) if tensor.grad_fn is not None}
        for node in nodes:
            node.register_prehook(WeakHook(self._begin_backward, forward))
        if not nodes:
            self._samples = (self._samples or 0) + samples
            self.expect_backward()

    def expect_backward(self) -> None:
        """Prepare for a backward that cannot be detected from an output: it may reach any parameter first."""
        if len(self._handles) < len(self.replica.params):
            self._hook([param for param in self.replica.params if param.requires_grad])

    def fail(self, error: Exception) -> None:
        """Report that this rank's forward raised, by taking part in the other ranks' step, so that they do not hang.
        Raises one error on all ranks if only some failed. Returns if all failed or the others cannot be reached."""
        if self.channel.world_size == 1:
            return
        self.channel.timeout_s = _SHORT_REPORT_S if self.syncs_in_forward else _REPORT_S
        try:
            if (local := self._local) is not None:
                local.report_failure()
                self._exchange_control(local, Status.FAILED, Failure(error, IN_FORWARD))
                return
            self._announce_step()
            self._run_step(Status.FAILED, take_part=False, failure=Failure(error, IN_FORWARD))
        except CollectiveError as found:
            if found.code != "peer-lost":
                raise
            self._unusable = f"{type(error).__name__} on this rank, which could not be reported to the others: {error}"
        finally:
            self.channel.timeout_s = None

    def _begin_backward(self, forward: _Forward | None, _: object) -> None:
        """Autograd hook: a backward has reached the output of a forward, or a parameter."""
        if forward is not None and forward in self._open:
            self._open.discard(forward)
            self._samples = (self._samples or 0) + forward.samples
        self._on_backward(is_certain=forward is None)

    def _on_backward(self, is_certain: bool) -> None:
        """Decide whether to synchronize the backward that has reached this model, and queue a callback for its end."""
        task = current_graph_task()
        if self._is_stopped or task == self._task:
            return
        is_later = self._task is not None and task > self._task
        if is_later and is_nested():
            return  # re-entrant checkpointing: only the outer backward counts
        rows = self.reducer.rows
        rows.refuse_grad()
        if not (is_certain or self._change or will_accumulate(self.replica.params) or rows.will_arrive()):
            return
        if is_later and self._syncing:
            text = "the previous backward ended with an error: run a forward to report it to all ranks"
            raise CollectiveError(text, code="unfinished-backward")
        if is_certain and is_nested():
            text = "re-entrant checkpointing, but the output hides its tensors: use checkpoint(use_reentrant=False)"
            raise ConfigError(text, code="reentrant-checkpoint")
        syncing = self.do_sync and not self.options.manual
        if syncing:
            self._announce_step()
        self._task = rows.task = task
        self._syncing = syncing
        pulse.enter(pulse.BACKWARD)
        if syncing and self._local is None:
            if torch.is_grad_enabled() and not self._warned:
                self._warned = True
                text = "averaged gradients have no graph; for a gradient penalty, use torch.autograd.grad"
                warnings.warn(f"backward(create_graph=True): {text}", stacklevel=2)
            self._weight = self._count_weight()
            self.reducer.begin(self._factor)
        engine.queue_callback(functools.partial(self._on_backward_over, task))

    def _on_backward_over(self, task: int) -> None:
        if self._task != task:
            return
        syncing = self._syncing
        self._task, self._syncing = None, False
        while self.futures:
            self.futures.pop().wait()
        if syncing:
            self._end_step()
        else:
            self.reducer.rows.fold()
            self.is_pending = True
        pulse.enter(pulse.BETWEEN)

    def synchronize(self) -> None:
        """Average the gradients now. Collective: every rank must call this."""
        self._announce_step()
        self._weight = self._count_weight()
        self._end_step()

    def _end_step(self) -> None:
        if (local := self._local) is not None:
            self.num_steps += 1
            self.is_pending, self._samples = False, None
            if local.must_exchange_control():
                self._exchange_control(local, Status.OK)
            return
        self._run_step(Status.OK, take_part=True)
        if self.schedule is not None:
            self.schedule.outer.count()

    def _exchange_control(self, schedule: OuterState, status: Status, failure: Failure | None = None) -> None:
        """Exchange control words in a step that sends no gradients. Collective. After an error the round restarts."""
        try:
            self._run_step(status, take_part=False, failure=failure)
        except Exception:
            schedule.restart()
            raise
        if failure is not None:  # every rank has failed
            schedule.restart()

    def _count_weight(self) -> int:
        """This rank's weight: 1, or its samples in all forwards since the last step, even if their backward has not run
        yet."""
        if self.options.average == "ranks":
            return 1
        ahead = [forward.samples for forward in self._open if forward.is_training]
        if self._samples is None and not ahead:
            return self._last_samples
        return (self._samples or 0) + sum(ahead)

    @property
    def _factor(self) -> float:
        """The factor for this rank's gradients that makes the sum over ranks the average if the total weight is as
        expected."""
        return self._weight / self.expected_total

    def step_without_data(self, keep_gradients: bool = False) -> bool:
        """Take part in a step with zeros. Returns True once no rank has data left. Collective. `keep_gradients` also
        leaves the averaged gradients on this rank: in torch's Join, other optimizers may step with them."""
        if keep_gradients:
            for param in self.replica.params:
                param.grad = None
        self._run_step(Status.FINISHED, take_part=keep_gradients)
        return self._all_finished

    def broadcast_final(self) -> None:
        """Broadcast the values of a rank that had data until the end. Collective: every rank must call this."""
        self.channel.broadcast(self.replica.tensors().values(), self._last_active)

    def _announce_step(self) -> None:
        if self.join and self.join.announce and not self._is_announced:
            self.join.announce()
            self._is_announced = True

    def _run_step(self, status: Status, take_part: bool, failure: Failure | None = None) -> None:
        """Send the remaining buckets with this rank's report, wait, and act on all reports. Collective. A `status` of
        FAILED or FINISHED means that this rank has no data. `take_part=False` leaves `.grad` unchanged."""
        has_data = status == Status.OK
        every, local = self.options.check_every, self._local
        reducer: BucketedReducer | SimpleReducer | OuterState = self.reducer if local is None else local
        try:
            late = self._await_deferred()
            self.channel.mark_computed()
            if local is not None:
                digest = local.digest(every) if has_data else 0
            else:
                digest = digest_replica(self.replica) if has_data and every and self.num_steps % every == 0 else 0
            words, missing, found = reducer.collect(self._factor, take_part)
            failure = failure or found
            if has_data:
                weight = self._weight if local is None else local.position
                report = RankReport(self._find_status(missing), weight, digest)
            else:
                report = RankReport(status, samples=0 if local is None else local.position)
                missing = []
            if failure is not None:
                report = report._replace(status=report.status | Status.FAILED)
                take_part = False
            absent = missing if has_data and failure is None else list(range(len(self.replica.params)))
            control, buffers = self.control, self.buffers
            with torch.no_grad():
                control.write(words, report, self.reducer.rows.counts, absent)
                if control.num_statistics:
                    writes, hold = (bool(report.status & bit) for bit in (Status.STATISTICS, Status.HOLD))
                    buffers.write(control.statistics(words), writes, hold)
            reducer.exchange()
            if late is not None:  # only now, because some of this step's messages were already sent during backward
                self._act_on(*late, None, is_late=True)
            self.num_steps += local is None
            self.is_pending = False
            if take_part:
                self._samples, self._last_samples = None, self._weight
            slots = words[: control.num_read_words]
            with torch.no_grad():
                if (do_all_read := self._must_read_now()) or failure is not None:
                    calls = self.reducer.hook_calls
                    values = slots.tolist() if calls is None else calls.read(slots)
                    reports = control.read_reports(values)
                    if not do_all_read:
                        self._send_empty()
                    if local is not None:  # ranks may have stopped at different steps: report the last one on all
                        self.num_steps += max(r.samples for r in reports) - report.samples
                    is_applied = False
                    try:
                        is_applied = self._act_on(reports, missing, failure)
                    finally:
                        if not is_applied and self.codec is not None:
                            self.codec.discard(None)  # its residuals must not count these averages as applied
                    if not is_applied:
                        if failure is not None and failure.place != IN_FORWARD:  # forward's error is already raised
                            raise failure.error
                        return
                    if control.num_tables and isinstance(self.reducer, BucketedReducer):
                        self.reducer.exchange_rows(control.read_counts(values), take_part)
                    self._complete(reports, words, absent, take_part)
                else:
                    self._unread = *streams.copy_to_host(slots), missing
                    is_turn = buffers.is_turn(self.num_steps - 1) and not report.status & Status.HOLD
                    if control.num_statistics and is_turn:
                        buffers.read(control.statistics(words), is_valid=False)
        finally:
            # A raised error refers to this frame. A reference back to it would keep the model and its group alive.
            failure = found = None
            self._is_announced = False
        self.channel.settle()
        reducer.learn()

    def _find_status(self, missing: Sequence[int]) -> Status:
        status = Status.OK
        if missing and not self.options.allow_missing:
            status |= Status.MISSING
        if self._change:
            status |= Status.CHANGED
        if (local := self._local) is not None and not local.has_finite_gradients():
            status |= Status.SKIPS
        # A pending backward needs the current buffers. Evaluation outputs do not count, because they may be kept
        # forever.
        if any(forward.is_training for forward in self._open):
            return status | Status.HOLD
        if self.buffers.are_due(self.num_steps if local is None else 0, in_training=not self._completes):
            status |= Status.STATISTICS
        if self.buffers.every and self.buffers.have_changed():
            status |= Status.BUFFERS
        return status

    def _must_read_now(self) -> bool:
        """Whether ranks that have not failed read this step's control words immediately. Returns the same value on all
        ranks."""
        options, reducer = self.options, self.reducer
        has_option = options.average == "samples" or options.allow_missing or self.buffers.need_message
        has_digest = options.check_every and (self.num_steps - 1) % options.check_every == 0
        is_special = self.join or reducer.rows.is_used
        # These cases send other messages before the next control words, and a failed rank would not send them.
        others = self.schedule, reducer.sharding, reducer.hook_calls
        sends_more = self.syncs_in_forward or any(other is not None for other in others)
        is_early = self.num_steps <= self._eager_until or self.channel.waits_for_gpu
        return bool(not self._can_defer or is_early or has_option or has_digest or is_special or sends_more)

    def _await_deferred(self) -> tuple[list[RankReport], list[int]] | None:
        """The reports of the last step, if they are still unread, and the gradients that were missing on this rank."""
        if self._unread is None:
            return None
        (slots, event, missing), self._unread = self._unread, None
        with pulse.within(pulse.WAIT):
            event.synchronize()
        return self.control.read_reports(slots.tolist()), missing

    def _send_empty(self) -> None:
        """Take part in one more step with zeros. Ranks that read control words one step late react to an error only
        after they have sent the next step's messages, and every rank must send the same ones."""
        words, _, _ = self.reducer.collect(self._factor, take_part=False)
        with torch.no_grad():
            self.control.write_report(words, RankReport(Status.FAILED))
        self.reducer.exchange()

    def check_last_step(self) -> None:
        """Act on the last step's reports now, if they are still unread: call it before your own collectives, which a
        failed rank would not join. Collective if a rank has failed."""
        if (late := self._await_deferred()) is not None:
            if any(report.status & ERRORS for report in late[0]):
                self._send_empty()
            self._act_on(*late, None, is_late=True)

    def _act_on(
        self, reports: list[RankReport], missing: list[int], failure: Failure | None, is_late: bool = False
    ) -> bool:
        """Raise the errors reported by any rank on every rank and broadcast changed buffers. Returns False if every
        rank has failed."""
        together = functools.reduce(operator.or_, (report.status for report in reports))
        active = [rank for rank, report in enumerate(reports) if not report.status & Status.FINISHED]
        self._all_finished = not active
        self._last_active = active[0] if active else self._last_active
        if together & ERRORS:
            self._raise_for_all(missing, failure)
            return False
        if self.join and self.join.raise_early and 0 < len(active) < len(reports):
            done = ", ".join(str(rank) for rank in range(len(reports)) if rank not in active)
            text = f"step {self.num_steps}: rank {done} has run out of data, but other ranks have not"
            raise CollectiveError(text, code="uneven-inputs")
        if (local := self._local) is not None and len(counts := sorted({report.samples for report in reports})) > 1:
            made = f"ranks have taken {', '.join(map(str, counts))} steps since the last sync"
            text = f"step {self.num_steps}: {made}: give every rank the same number of batches"
            raise CollectiveError(text, code="uneven-inputs")
        if len({reports[rank].digest for rank in active}) > 1:
            replica = self.replica if local is None else local.as_replica()
            raise build_drift_error(replica, self.channel, self.num_steps)
        if together & Status.BUFFERS and is_late:  # another forward has used them: the next step reports them again
            self._eager_until = self.num_steps + _EAGER_STEPS
        elif together & Status.BUFFERS and not together & Status.HOLD:
            self.buffers.broadcast(self.channel, active[0])
        return True

    def _raise_for_all(self, missing: list[int], failure: Failure | None) -> None:
        """Exchange the problems found by each rank and raise one error with the same text on all ranks."""
        params = self.replica.params
        error, place = failure or (None, "")
        text = "" if error is None else f"{place}: {type(error).__name__}: {error}"
        text = text.partition("\n\n")[0]  # without the traceback that a Future's error contains
        frozen = tuple(index for index in missing if not params[index].requires_grad)
        for index in missing:
            params[index].grad = None
        findings = self.channel.share(Finding(text, place == IN_HOOK, self._change, tuple(missing), frozen))
        if error is not None and all(finding.error for finding in findings):
            return  # each rank raises its own error
        if any(finding.in_hook for finding in findings):
            self._unusable = str(build_step_error(findings, self.num_steps, self.replica))
        # Built inline: a local name for the raised error would create a reference cycle.
        raise build_step_error(findings, self.num_steps, self.replica) from error

    def _complete(self, reports: list[RankReport], words: torch.Tensor, absent: list[int], take_part: bool) -> None:
        """Store averaged statistics, drop gradients that no rank has, and rescale to the actual total."""
        if (local := self._local) is not None:
            local.agree(any(report.status & Status.SKIPS for report in reports))
        writes = [bool(report.status & Status.STATISTICS) for report in reports]
        if any(writes) and not any(report.status & Status.HOLD for report in reports):
            if self.buffers.need_message:
                self.buffers.average(self.channel, writes[self.channel.rank])
            else:
                self.buffers.read(self.control.statistics(words), is_valid=True)
        if self.control.num_used and absent:
            used = self.control.used(words).tolist()
            unused = [index for index in absent if not used[index]]
            if self.codec is not None:
                self.codec.discard([self.replica.params[index] for index in unused])
            for index in unused if take_part else ():
                self.replica.params[index].grad = None
        by_samples = self.options.average == "samples"
        total = sum(report.samples for report in reports)
        if not by_samples and (self.join is None or self.join.divide_by_world):
            total = self.channel.world_size
        if total not in (0, self.expected_total) and take_part:
            self.reducer.multiply(self.expected_total / total)
        if by_samples and total:
            if self.codec is not None and total != self.expected_total:  # residuals follow the new total
                self.codec.rescale(self.expected_total / total)
            self.expected_total = total


class BucketedReducer:
    """Averages the gradients of one step: `begin`, hooks during backward, `collect`, and `exchange`. Every rank always
    sends the same messages in the same order: missing gradients are sent as zeros.

    Buckets are sent in plan order, each as soon as it is complete. With a plan, only one hook per bucket runs: on the
    parameter that arrives last in the recorded ready order. The hook checks that the other gradients have arrived, and
    the end of backward checks that none arrived later.
    """

    def __init__(
        self,
        replica: Replica,
        channel: Channel,
        num_words: int,
        make_plan: MakePlan,
        rows: EmbeddingRows,
        hook: CommHook | None,
        sharding: Sharding | None,
        rounds: bool,
    ) -> None:
        self.replica, self.channel, self.num_words, self.sharding = replica, channel, num_words, sharding
        self.rows = rows  # embedding gradients that are sent as rows
        # Parameters whose gradient has arrived in several parts, on any rank: re-entrant checkpointing used them in
        # several segments. Their buckets wait for the end of backward.
        self._in_parts: set[int] = set()
        self._rounds = rounds  # the reduction itself divides, then rounds to bfloat16
        self.is_weighted = False  # ranks may scale their gradients by different factors
        self._make_plan = make_plan
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._failure: Failure | None = None  # this step's failure, until `exchange`
        self.hook_calls = None if hook is None else HookCalls(hook, channel)
        self._active, self._next, self._factor = False, 0, 1.0
        self._before: dict[int, int] = {}  # versions of the uncopied gradients before backward
        self._taken: dict[int, tuple[torch.Tensor, int]] = {}  # separate gradients and their versions when taken
        self._is_recording, self._records_left = True, _MAX_RECORDS
        self._arrivals = Arrivals(replica.params)
        # Until the ready order is known, there is one bucket per dtype, as in torch, sent at the end of backward.
        self.is_planned = self._has_agreed = False
        self._lay_out()

    @property
    def memory(self) -> list[torch.Tensor]:
        return self._flat.messages

    @property
    def ready_order(self) -> list[int]:
        return self._arrivals.ready_order

    def begin(self, factor: float, records: bool = True) -> None:
        """Prepare for a backward. Each rank multiplies its gradients by `factor`, and the products are summed."""
        self._active, self._next, self._failure = True, 0, None
        self._factor = factor
        if self.hook_calls is not None:
            self.hook_calls.begin()
        if self.hook_calls is not None or self._rounds:
            self._factor *= self.channel.world_size  # as in torch, the hook divides by the number of ranks
        self._taken.clear()
        self.rows.begin()
        if self.sharding is not None and (error := self.sharding.find_misuse()) is not None:
            self._fail(error)
        self._note_versions()
        if self._is_recording and records:
            self._arrivals.record()
        self.free_memory()
        for bucket in self._buckets:
            bucket.version, bucket.work, bucket.seen = bucket.range._version, None, []
        self.timeline.begin()

    def free_memory(self) -> None:
        """Free message memory that gradients no longer use, for example after `zero_grad`."""
        for pack in self._packs:
            pack.free()

    def _note_versions(self) -> None:
        """Record the versions of gradients before backward, after moving gradients into their views."""
        self._before.clear()
        params, views = self.replica.params, self._flat.views
        if all(map(operator.is_, map(_get_grad, params), repeat(None))):
            return  # there are no gradients, for example after `zero_grad`
        try:
            with torch.no_grad():
                for index, param in enumerate(params):
                    grad, view = param.grad, views.get(index)
                    if grad is not None and view is not None and grad is not view:
                        param.grad = view.copy_(grad)
                    elif grad is not None and view is None:
                        self._before[index] = grad._version
        except Exception as error:
            self._fail(error)

    def _on_large(self, index: int, param: torch.Tensor) -> None:
        if self._active and self._failure is None and index not in self._taken:
            try:
                with torch.no_grad():
                    self._copy(index, self._factor)
            except Exception as error:
                self._fail(error)

    def _on_trigger(self, param: torch.Tensor) -> None:
        """Hook for the parameter expected last in its bucket: send all complete buckets, in plan order."""
        if not self._active or self._failure is not None:
            return
        # The last bucket waits for the end of backward, when the control words are known.
        while self._next < len(self._buckets) - 1 and self._is_complete(self._buckets[self._next]):
            bucket = self._buckets[self._next]
            self._start(bucket, *self._fill(bucket))

    def _is_complete(self, bucket: LiveBucket) -> bool:
        if bucket.in_parts:
            return False
        if self._before or bucket.copied:
            if not all(map(self._has_arrived, bucket.separate)):
                return False
        elif any(map(operator.is_, map(_get_grad, bucket.uncopied_params), repeat(None))):
            return False
        grads = bucket.read_grads()
        if any(map(operator.is_, grads, repeat(None))):
            return False
        # A gradient that was a view before backward is accumulated in place, and each write increments its version.
        in_place = sum(map(operator.is_, grads, bucket.views))
        return in_place == 0 or bucket.range._version - bucket.version == in_place

    def _has_arrived(self, index: int) -> bool:
        if index in self._flat.views:
            return index in self._taken
        grad = self.replica.params[index].grad
        return grad is not None and (index not in self._before or grad._version != self._before[index])

    def _fail(self, error: Exception) -> None:
        """Record the error, or its cause if a gradient turns out to be invalid."""
        self._failure = Failure(error)
        try:
            for index, param in enumerate(self.replica.params):
                if param.grad is not None and index not in self.plan.alone:
                    self.replica.check(index, param.grad)
        except ConfigError as reason:
            self._failure = Failure(reason)

    def _fill(
        self, bucket: LiveBucket, zeros: FlatGradients | None = None
    ) -> tuple[FlatGradients, list[torch.Tensor], bool]:
        """Gather one bucket, or take it from `zeros` if `.grad` must not change. Returns its buffers, the gradients to
        send from outside them, and whether the backend averages."""
        self._next = bucket.number + 1
        self.timeline.mark("ready", bucket.number)
        flat = zeros or self._flat
        # NCCL can average as it reduces. All ranks must request the same operation, so their factors must be equal.
        # The control words must stay integers, so the last bucket is scaled beforehand.
        is_equal = self.channel.is_nccl and not self.is_weighted
        averages = is_equal and self._next < len(self._buckets) and not bucket.copied
        factor = 1.0 if averages else self._factor
        uncopied: list[torch.Tensor] = []
        with torch.no_grad():
            try:
                if zeros is None and self._failure is None:
                    for index in bucket.copied:
                        if index not in self._taken:  # it did not arrive in this backward, or arrived in parts
                            self._copy(index, factor)
                    bucket.gather(factor)
                    packed = [] if bucket.pack is None else [bucket.pack.fill(factor)]
                    uncopied = packed + [self._take_uncopied(index, factor) for index in bucket.in_place]
            except Exception as error:
                self._fail(error)
            if zeros is not None or self._failure is not None:
                flat.ranges[bucket.number].zero_()
                packed = [] if bucket.pack is None else [bucket.pack.build_zeros()]
                uncopied = packed + [self.replica.zeros(index) for index in bucket.in_place]
        bucket.version = bucket.range._version
        return flat, uncopied, averages and self.channel.world_size > 1

    def _start(self, bucket: LiveBucket, flat: FlatGradients, uncopied: list[torch.Tensor], average: bool) -> None:
        number = bucket.number
        self.timeline.mark("launch", number)  # before the call, which may return late if cores are scarce
        if self.hook_calls is not None:
            bucket.work = self.hook_calls.start(HookBucket(number, flat, self.plan, self.replica.params))
            self._failure = self._failure or self.hook_calls.failure
        elif self._rounds:
            words = flat.words if number == len(self._buckets) - 1 else flat.words[:0]
            bucket.work = self.channel.start_rounded(flat.ranges[number], words, flat.bucket_bytes[number])
        else:
            message = flat.messages[number]
            tensors = [message, *uncopied] if message.numel() and not bucket.sends_words else uncopied
            if tensors:
                bucket.work = self.channel.start_sum(
                    *tensors, average=average, gradient_bytes=flat.bucket_bytes[number]
                )
        self.timeline.follow(number, bucket.work)

    def _copy(self, index: int, factor: float) -> None:
        param, view = self.replica.params[index], self._flat.views[index]
        if param.grad is None:
            view.zero_()
        else:
            torch.mul(param.grad, factor, out=view)
        param.grad = view
        self._taken[index] = view, view._version

    def _take_uncopied(self, index: int, factor: float) -> torch.Tensor:
        """The gradient itself, or a copy if it shares memory with other tensors or its strides differ between ranks."""
        if index not in self._taken:
            param = self.replica.params[index]
            grad = param.grad
            if grad is None:
                grad = param.grad = self.replica.zeros(index)
            else:
                self.replica.check(index, grad)
                # Two references are expected: from the gradient and from this query.
                is_shared = count_storage_uses(grad.untyped_storage()._cdata) > 2
                if grad.requires_grad or grad.stride() != self._uncopied_strides[index] or is_shared:
                    grad = param.grad = self.replica.zeros(index).copy_(grad)
            if factor != 1.0:
                grad.mul_(factor)
            self._taken[index] = grad, grad._version
        return self._taken[index][0]

    def collect(self, factor: float, take_part: bool) -> tuple[torch.Tensor, list[int], Failure | None]:
        """After backward, send everything except the message with the control words. Returns the control words, for
        the caller to fill (`exchange` turns them into sums), the parameters without a gradient, and a failure.
        Collective. `factor` applies if `begin` was not called. `take_part=False` sends zeros and keeps `.grad`."""
        missing = self._find_missing()
        if not self._has_agreed:
            agree_on_hook(self.hook_calls is not None, self.channel)
            self._has_agreed = True
        if not (was_active := self._active):
            self.begin(factor, records=False)
        elif take_part and self._failure is None and (late := self._find_late()):
            self._failure = Failure(self.replica.build_late_error(late))
        self.timeline.backward_over()
        self._was_late = was_active and self._next < len(self._buckets) - 1
        take_part = take_part and self._failure is None
        self._collect_rows(take_part)
        zeros = None
        if not take_part:
            flat = self._flat
            zeros = FlatGradients(self.replica, self.plan, self.num_words, flat.uncopied, flat.separate)
        for bucket in self._buckets[self._next : -1]:
            self._start(bucket, *self._fill(bucket, zeros))
        self._last = self._fill(self._buckets[-1], zeros)
        if self.hook_calls is not None:
            # A hook may compress or keep its input, and may fail, so the control words follow in their own message.
            self._start(self._buckets[-1], *self._last)
            self._finish(take_part)
            self._failure, self.hook_calls.failure = self._failure or self.hook_calls.failure, None
        self._active = False
        return self._buckets[-1].find_words(*self._last[:2]), missing, self._failure

    def _collect_rows(self, take_part: bool) -> None:
        try:
            self.rows.collect(self._factor, take_part)
        except Exception as error:
            self._fail(error)

    def _find_missing(self) -> list[int]:
        params, has_rows = self.replica.params, self.rows.find_arrived()
        if not self._active:
            return [index for index, param in enumerate(params) if param.grad is None]
        # Buckets that have already been sent were complete.
        missing = [index for index in self.plan.alone if params[index].grad is None]
        for bucket in self._buckets[self._next :]:
            if any(map(operator.is_, bucket.read_grads(), repeat(None))):
                missing += [index for index in bucket.fused if params[index].grad is None]
            missing += [index for index in bucket.separate if params[index].grad is None]
        return sorted(set(missing) - has_rows)

    def _find_late(self) -> list[int]:
        late: list[int] = []  # parameters whose gradient changed after it was sent or taken
        for bucket in self._buckets[: self._next]:
            replaced = any(map(operator.is_not, map(_get_grad, bucket.params), bucket.views))
            if replaced or bucket.range._version != bucket.version:
                late += bucket.fused
            if bucket.pack is not None:
                late += [bucket.uncopied[place] for place in bucket.pack.find_changed()]
        for index, (grad, version) in self._taken.items():
            if grad._version != version or self.replica.params[index].grad is not grad:
                late.append(index)
        return late

    def exchange(self) -> None:
        """Send the control words, wait for all messages, and leave the sums in `.grad`. Collective."""
        self._failure = None
        if self.hook_calls is None:
            self._start(self._buckets[-1], *self._last)
            self._finish(True)
        else:
            self.channel.wait(self.channel.start_sum(self._last[0].words), "the control words")
        del self._last
        self._taken.clear()  # lets `zero_grad` free the gradients
        for pack in self._packs:
            pack.end_step()
        if not self.plan.rows:
            self.timeline.over()

    def exchange_rows(self, counts: list[list[int]], take_part: bool) -> None:
        """Send embedding rows after `exchange` and add the rows of all ranks to `.grad`. Collective."""
        self.timeline.mark("rows")
        self.rows.exchange(counts, take_part)
        if self.plan.rows:
            self.timeline.mark("rows done")
            self.timeline.over()

    def _finish(self, take_part: bool) -> None:
        for bucket in self._buckets:
            self._wait(bucket, take_part)

    def _wait(self, bucket: LiveBucket, take_part: bool) -> None:
        self.timeline.mark("wait", bucket.number)
        pulse.enter(pulse.WAIT, bucket.number)
        work, bucket.work = bucket.work, None
        if self.hook_calls is not None:
            self.hook_calls.finish(work, bucket.range if take_part else None)
        elif work is not None:
            index, *others = bucket.indices
            several = f"bucket {bucket.number} of {len(self._buckets)}"
            self.channel.wait(work, several if others else f"the gradient of {self.replica.name(index)}")
        self.timeline.mark("waited", bucket.number)

    def multiply(self, factor: float) -> None:
        """Scale all gradients. Call after `exchange`."""
        self._flat.multiply(factor)
        self.rows.multiply(factor)
        for index in self._uncopied_strides:
            if (grad := self.replica.params[index].grad) is not None:
                grad.mul_(factor)

    def learn(self) -> None:
        """Make the plan after the first step (collective). Later, record the ready order again if it has changed."""
        if self.rows.drop_misfits():
            # From now on these gradients are sent dense and become ready last, so make a new plan.
            self.is_planned, self._is_recording = False, True
            self.stop()
            self._lay_out()
            self._note_versions()
        elif self._is_recording:
            self._is_recording = False
            self._arrivals.stop()
            if not self.is_planned:
                self._agree_on_plan()
            self._set_triggers()
        elif self._was_late and self._records_left and not any(bucket.in_parts for bucket in self._buckets):
            self._records_left -= 1
            self._is_recording = True
        if self.sharding is not None:
            self.sharding.attach()

    def _agree_on_plan(self) -> None:
        # Every rank uses rank 0's plan, which follows the ready order on rank 0.
        mine = ""
        rows = self.rows.choose(set(self._arrivals.places), len(self.replica.params))
        if self.channel.rank == 0:
            order = self.rows.delay(self.ready_order, rows)
            mine = self.rows.limit(self._make_plan(order, rows)).to_json()
        shared = self.channel.share((mine, self._arrivals.find_parts()))
        self._in_parts.update(*(found for _, found in shared))
        self.adopt(Plan.from_json(shared[0][0]))

    def adopt(self, plan: Plan) -> None:
        """Use this plan from the next step onward. Collective: every rank must call this, with the same plan."""
        self.is_planned = True
        self._lay_out(Plan(self.replica.gradients, plan.buckets, plan.rule, plan.rows))
        self._note_versions()  # moves the gradients, which frees the memory of the first step

    def _lay_out(self, plan: Plan | None = None) -> None:
        # A communication hook needs one contiguous vector.
        stays = self.channel.is_nccl and self.hook_calls is None
        if plan is None:  # the first step; while a message is packed its gradients exist twice, so its size is limited
            is_limited = stays and self.sharding is None
            plan = plan_torch_start(self.replica.gradients, self.rows.choose_first(), is_limited)
        self.plan = plan
        least = 0 if stays else _SEPARATE_BYTES if self.channel.device.type == "cpu" else math.inf
        uncopied, separate = choose_separate(plan, least, stays)
        allocate = self.channel.allocate if self.is_planned else torch.zeros  # only long-lived buffers are shared
        self._flat = FlatGradients(self.replica, plan, self.num_words, uncopied, separate, allocate)
        params = self.replica.params
        self._uncopied_strides = {index: find_strides(params[index]) for index in uncopied}
        packs = self.channel.world_size > 1
        self._buckets = [LiveBucket(number, self._flat, params, packs) for number in range(len(plan.buckets))]
        self._packs = [bucket.pack for bucket in self._buckets if bucket.pack is not None]
        self.rows.use(plan, self.is_planned)
        self.timeline = Timeline(plan.bucket_bytes, self.channel.device)
        if self.sharding is not None:
            self.sharding.lay_out(self._flat, plan, self.is_planned)

    def stop(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _set_triggers(self) -> None:
        """Hook the large parameters, and in each bucket the parameter that arrived last on this rank."""
        self.stop()
        params = self.replica.params
        places = self._arrivals.places
        self._in_parts |= self._arrivals.find_parts()
        copied = {index for bucket in self._buckets for index in bucket.copied}
        for index in sorted(copied - self._in_parts):
            self._handles.append(on_gradient(params[index], functools.partial(self._on_large, index)))
        for bucket in self._buckets[:-1]:
            bucket.in_parts = not self._in_parts.isdisjoint(bucket.indices)
            if arrived := [index for index in bucket.indices if index in places]:
                # Registered after the hook that copies this gradient, if there is one.
                self._handles.append(on_gradient(params[max(arrived, key=places.__getitem__)], self._on_trigger))


keep_from_compiler(GradientSync, BucketedReducer, WeakHook, GradientSync._begin_backward)
