"""Steps that are asked how long their messages were under way and what was in them, in our wrapper and in torch's.

When such steps are taken is decided by whoever measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import MeasurementError
from paceline.parallel import DataParallel
from paceline.parallel.channel import Sent
from paceline.training.step import Learner

__all__ = ["AskedSteps", "agree_on_sent"]


class _TimedMessages:
    """A communication hook for torch's wrapper that does what it does without one, and notes from when to when."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group, self._world_size = group, dist.get_world_size(group)
        self.spans: list[tuple[float, float]] = []
        self.sent = Sent(0, 0)

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        begin_s = time.perf_counter()
        buffer = bucket.buffer().div_(self._world_size)
        self.sent = Sent(self.sent.num_messages + 1, self.sent.num_bytes + buffer.nbytes)
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
    """A learner whose steps can be asked: call `begin` before one, `take_busy_s` and `count_sent` after it.

    `build` makes another learner in the same wrapper: torch's takes a hook only before its first step. On a GPU torch's
    messages cannot be asked this way, and both are None.
    """

    def __init__(self, learner: Learner, build: Callable[[], Learner], group: dist.ProcessGroup | None = None) -> None:
        self.learner = learner
        self._messages: _TimedMessages | None = None
        self._before: Sent | None = None
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
        self._before = self._count_all()

    def take_busy_s(self) -> float | None:
        """Seconds in which at least one message of the last step was under way."""
        if self._messages is not None:
            return self._messages.take_busy_s()
        if isinstance(self.learner.model, DataParallel):
            asked = self.learner.model.report().times
            return 0.0 if asked is None else asked.busy_s
        return None

    def count_sent(self) -> Sent | None:
        """Messages of gradients since `begin`, as this rank handed them to all-reduce.

        Gradients alone count, each byte as often as it was handed over: not what rides with them or goes by itself
        (control words, BatchNorm's statistics, torch's map of used parameters), which no plan of buckets knows.
        """
        before, now = self._before, self._count_all()
        if before is None or now is None:
            return None
        return Sent(now.num_messages - before.num_messages, now.num_bytes - before.num_bytes)

    def _count_all(self) -> Sent | None:
        if self._messages is not None:
            return self._messages.sent
        return self.learner.model.count_sent() if isinstance(self.learner.model, DataParallel) else None

    def close(self) -> None:
        if isinstance(self.learner.model, DataParallel):
            self.learner.model.stop()


def agree_on_sent(by_rank: Sequence[Sequence[Sent]], planned: Sent, who: str) -> Sent:
    """What every rank sent in every step, where that is one thing and what was planned; `planned` if nobody counted."""
    for number, step in enumerate(zip(*by_rank, strict=True), start=1):
        for rank, sent in enumerate(step):
            other, of_whom = (step[0], "rank 0 sent") if sent != step[0] else (planned, "the plan says")
            if sent != other:
                raise MeasurementError(
                    f"{who}: in step {number} rank {rank} sent {_describe(sent)} and {of_whom} {_describe(other)}: "
                    "messages are not counted or not sent as they should be, and no bandwidth follows from them; "
                    "report this as a bug"
                )
    counted = [sent for steps in by_rank for sent in steps]
    return counted[0] if counted else planned


def _describe(sent: Sent) -> str:
    return f"{sent.num_bytes} bytes of gradients in {sent.num_messages} messages"
