"""Steps that are asked how long their messages were under way, in our wrapper and in torch's.

When such steps are taken is decided by whoever measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.parallel import DataParallel
from paceline.training.step import Learner

__all__ = ["AskedSteps"]


class _TimedMessages:
    """A communication hook for torch's wrapper that does what it does without one, and notes from when to when."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._world_size = group, dist.get_world_size(group)
        self.spans: list[tuple[float, float]] = []

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        begin_s = time.perf_counter()
        buffer = bucket.buffer().div_(self._world_size)
        future = dist.all_reduce(buffer, group=self._group, async_op=True).get_future()

        def note(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self.spans.append((begin_s, time.perf_counter()))
            return done.value()[0]

        timed: torch.futures.Future[torch.Tensor] = future.then(note)
        return timed

    def take_busy_s(self) -> float:
        """How long at least one message was under way since this was asked last."""
        spans, self.spans = sorted(self.spans), []
        busy_s, until_s = 0.0, 0.0
        for begin_s, end_s in spans:
            busy_s += max(0.0, end_s - max(begin_s, until_s))
            until_s = max(until_s, end_s)
        return busy_s


class AskedSteps:
    """A learner whose steps can be asked: call `begin` before one, `take_busy_s` after it.

    `build` makes another learner in the same wrapper: torch's takes a hook only before its first step. On a GPU torch's
    messages cannot be asked this way, and `take_busy_s` is None.
    """

    def __init__(self, learner: Learner, build: Callable[[], Learner], group: dist.ProcessGroup | None = None) -> None:
        self.learner = learner
        self._messages: _TimedMessages | None = None
        if isinstance(learner.model, DistributedDataParallel) and learner.device.type == "cpu":
            self.learner = build()
            messages = self._messages = _TimedMessages(group)
            assert isinstance(self.learner.model, DistributedDataParallel)
            # torch compares annotations with types, and ours are strings: a lambda has none.
            self.learner.model.register_comm_hook(None, lambda state, bucket: messages.send(bucket))
        self.learner.model.train()

    def begin(self) -> None:
        if isinstance(self.learner.model, DataParallel):
            self.learner.model.time_next_step()

    def take_busy_s(self) -> float | None:
        """Seconds in which at least one message of the last step was under way."""
        if self._messages is not None:
            return self._messages.take_busy_s()
        if isinstance(self.learner.model, DataParallel):
            asked = self.learner.model.report().times
            return 0.0 if asked is None else asked.busy_s
        return None

    def close(self) -> None:
        if isinstance(self.learner.model, DataParallel):
            self.learner.model.stop()
