"""The simple reducer: one all-reduce per parameter after backward, as in a tutorial on data parallelism."""

from __future__ import annotations

import torch

from paceline.parallel.channel import Channel
from paceline.parallel.hooks import Failure
from paceline.parallel.replicas import Replica
from paceline.parallel.rows import EmbeddingRows
from paceline.parallel.timeline import Timeline
from paceline.plan import Bucket, Piece, Plan
from paceline.runtime.faults import pulse


class SimpleReducer:
    """Averages the gradients of one step: `collect` after backward, then `exchange`. It has the same methods as
    `BucketedReducer`, and serves as its reference in tests."""

    hook_calls = sharding = None
    is_planned = True

    def __init__(self, replica: Replica, channel: Channel, num_words: int, rows: EmbeddingRows) -> None:
        self.replica, self.channel = replica, channel
        self.rows = rows  # without tables: every gradient is sent whole
        self.ready_order = list(range(len(replica.params)))
        buckets = (Bucket((Piece(index, 0, one.num_bytes),)) for index, one in enumerate(replica.gradients))
        self.plan = Plan(replica.gradients, tuple(buckets), "one bucket per gradient")
        self.timeline = Timeline(self.plan.bucket_bytes, channel.device)
        self.memory: list[torch.Tensor] = []
        self._words = torch.zeros(num_words, device=channel.device)
        self._is_timed = False
        self._failure: Failure | None = None  # this step's failure, until `exchange`

    def begin(self, factor: float) -> None:
        self.timeline.begin()
        self._is_timed = True

    @torch.no_grad()
    def collect(self, factor: float, take_part: bool) -> tuple[torch.Tensor, list[int], Failure | None]:
        """Replace each gradient by the sum over all ranks of `factor` times their gradients. A rank without a gradient,
        or with an invalid one, sends zeros, so that no other rank waits for it. Collective."""
        if not self._is_timed:  # no backward announced this step
            self.timeline.begin()
        self.timeline.backward_over()
        self._is_timed = False
        params = self.replica.params
        missing = [index for index, param in enumerate(params) if param.grad is None]
        for index, param in enumerate(params):
            total = self.replica.zeros(index)
            if take_part and param.grad is not None:
                self._scale(index, param.grad, factor, total)
            self._sum(index, total)
            if take_part and self._failure is None:
                param.grad = total
        return self._words, missing, self._failure

    def _scale(self, index: int, grad: torch.Tensor, factor: float, into: torch.Tensor) -> None:
        try:
            self.replica.check(index, grad)
            torch.mul(grad, factor, out=into)
        except Exception as error:
            self._failure = self._failure or Failure(error)

    def _sum(self, index: int, total: torch.Tensor) -> None:
        self.timeline.mark("ready", index)
        self.timeline.mark("launch", index)
        work = self.channel.start_sum(total, gradient_bytes=total.nbytes)
        self.timeline.follow(index, work)
        self.timeline.mark("wait", index)
        pulse.enter(pulse.WAIT, index)
        self.channel.wait(work, f"the gradient of {self.replica.name(index)}")
        self.timeline.mark("waited", index)

    def exchange(self) -> None:
        """Sum the control words, which the caller has filled. Collective."""
        self._failure = None
        self.channel.wait(self.channel.start_sum(self._words), "the control words")
        self.timeline.over()

    def multiply(self, factor: float) -> None:
        """Scale all gradients. Call after `exchange`."""
        for param in self.replica.params:
            if param.grad is not None:
                param.grad.mul_(factor)

    def free_memory(self) -> None:
        """No memory is kept between steps."""

    def learn(self) -> None:
        """The plan does not depend on the first step."""

    def stop(self) -> None:
        """There are no hooks on parameters."""
