"""Communication hooks with torch's interface, `hook(state, bucket) -> Future`: buckets, results and failures."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from paceline import torch_internals
from paceline.errors import CollectiveError, ConfigError
from paceline.parallel.channel import Channel, alias
from paceline.parallel.flat import FlatGradients
from paceline.parallel.streams import copy_to_host
from paceline.plan import Plan
from paceline.runtime.ranks.world import abort_groups
from paceline.units import name_ranks

IN_FORWARD, IN_BACKWARD, IN_HOOK = "forward", "backward", "the communication hook"
# Intervals, while a rank waits for a hook's result, for checking whether another rank's hook failed and polling the
# GPU.
_CHECK_S, _POLL_S = 0.5, 5e-5
CommHook = tuple[object, Callable[[Any, Any], "torch.futures.Future[Any]"]]  # state and function


class Failure(NamedTuple):
    """An error on this rank, and where it happened: `IN_FORWARD`, `IN_BACKWARD` or `IN_HOOK`."""

    error: Exception
    place: str = IN_BACKWARD


class HookBucket:
    """A bucket of the plan with the methods of `torch.distributed.GradBucket`. The hook divides by the world size."""

    def __init__(self, number: int, flat: FlatGradients, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        self._index, self._is_last = number, number == len(plan.buckets) - 1
        # A separate version counter, so that a write by the hook does not count as a late change of a gradient.
        buffer = self._buffer = alias(flat.ranges[number])
        # As in torch: contiguous in memory order, regardless of the parameter's strides.
        views = [flat.views[index] for index in plan.partition[number]]
        self._gradients = [
            buffer.as_strided((view.numel(),), (1,), view.storage_offset()).view(view.size()) for view in views
        ]
        self._params = [params[index] for index in plan.partition[number]]

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        return self._params


def check_hook(hook: object) -> None:
    """Reject the same hooks as torch: those that are not callable, or that do not take (state, bucket)."""
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable, not {hook!r}")
    signature = inspect.signature(hook)
    parameters = list(signature.parameters.values())
    try:
        signature.bind(None, None)
    except TypeError:
        raise ConfigError(f"a communication hook must take (state, bucket), not {signature}") from None
    annotation = parameters[1].annotation if len(parameters) > 1 else Any
    if annotation not in (inspect.Parameter.empty, Any, "Any") and "Bucket" not in str(annotation):
        raise ConfigError(f"a communication hook must take a GradBucket, not {annotation!r}")


def agree_on_hook(is_hooked: bool, channel: Channel) -> None:
    """Before the first message, check that either every rank has a hook or none has. Collective. With hooks, control
    words use a dedicated group, because a hook may send any messages in its own group."""
    if channel.world_size == 1:
        return
    marks = torch.zeros(channel.world_size, device=channel.device)
    marks[channel.rank] = is_hooked
    # A gather implemented as a sum, so that `channel.timeout_s` applies.
    channel.wait(channel.start_sum(marks), "the check for communication hooks")
    hooked = [rank for rank, mark in enumerate(marks.tolist()) if mark]
    others = [rank for rank in range(channel.world_size) if rank not in hooked]
    if hooked and others:
        where = f"is registered on {name_ranks(hooked)} but not on {name_ranks(others)}"
        text = f"a communication hook {where}: call register_comm_hook on all ranks, before the first step"
        raise ConfigError(text, code="mismatch")
    if hooked:
        channel.use_own_group()


class HookCalls:
    """Calls the hook for each bucket of a step, and waits for the results; `failure` is this rank's, if any. A failed
    hook may not have sent messages that other ranks are waiting for, so the failure is reported in the store, which
    they check. With NCCL, their streams are blocked along with everything queued on them: to continue, they must abort
    the hook's messages."""

    def __init__(self, hook: CommHook, channel: Channel) -> None:
        self._hook, self._channel, self._step = hook, channel, 0
        self._group = channel.group  # the group of a user's hook; the control words may use another one later
        self.failure: Failure | None = None
        self.is_over = False  # the hook failed in this step, here or on another rank
        self._is_aborted = False  # the hook's groups were aborted

    def begin(self) -> None:
        self._step += 1
        self.is_over, self.failure = False, None
        if self._is_aborted:
            text = "its group was aborted when it failed in an earlier step: restart the ranks"
            self._fail(CollectiveError(text, code="unusable"))

    def start(self, bucket: Any) -> Any:
        """Call the hook, unless it has failed: peers would mistake its next message for the one that it failed to
        send."""
        if self.is_over:
            return None
        try:
            state, call = self._hook
            future = call(state, bucket)
            if not isinstance(future, torch_internals.Future):
                raise ConfigError(f"a communication hook must return a Future, not {type(future).__name__}")
            return future
        except Exception as error:
            self._fail(error)

    def finish(self, future: Any, into: torch.Tensor | None) -> None:
        """Wait for a result and copy it into the bucket. Return without a result if any rank has failed."""
        if future is None or self.is_over:
            return
        try:
            if not future.done():
                done = threading.Event()
                future.add_done_callback(lambda _: done.set())
                while not done.wait(_CHECK_S):
                    if self._channel.has_failure(self._step):
                        self.is_over = True
                        return
            result = future.wait()
            result = result[0] if isinstance(result, list | tuple) else result
            if into is not None and result.data_ptr() != into.data_ptr():
                into.copy_(result.view_as(into))
        except Exception as error:
            self._fail(error)

    def read(self, words: torch.Tensor) -> list[float]:
        """Copy words, which were received after the hook's messages, to the host."""
        if not self._channel.is_nccl or self._channel.world_size == 1:
            return words.tolist()  # type: ignore[no-any-return]
        kept, event = copy_to_host(words)
        checked_s = time.monotonic()
        while not event.query():
            time.sleep(_POLL_S)
            if not self._is_aborted and time.monotonic() - checked_s > _CHECK_S:
                checked_s = time.monotonic()
                if self._channel.has_failure(self._step):
                    self.is_over = self._is_aborted = True
                    # Do not abort the group of these words: the ranks still have to agree on the error.
                    exchanges = getattr(self._hook[0], "exchanges", self._hook[0])
                    abort_groups(getattr(exchanges, "groups", [self._group]))
        return kept.tolist()  # type: ignore[no-any-return]

    def _fail(self, error: Exception) -> None:
        self.failure = Failure(error, IN_HOOK)
        self.is_over = True
        self._channel.report_failure(self._step)
