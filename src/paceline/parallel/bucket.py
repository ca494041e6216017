"""One bucket of the plan while its gradients arrive and travel. When it is sent does not belong here (`bucketed`)."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LiveBucket"]

_get_grad = operator.attrgetter("grad")

# Below this mean size, one fused copy and one pass for the factor beat a call per gradient.
_LARGE_BYTES = 64 << 10


class LiveBucket:
    """One bucket of the plan at run time, by indices of parameters.

    `gathered` ones are copied together when all are there, `placed` ones by themselves as they arrive; `loose` ones are
    reduced where autograd left them.
    """

    def __init__(self, number: int, span: torch.Tensor) -> None:
        self.number, self.range = number, span
        self.gathered: list[int] = []
        self.placed: list[int] = []
        self.loose: list[int] = []
        self.in_parts = False  # some gradient arrives several times: only the end of backward is safe
        self.version = 0  # of the range when backward began, later when it was sent
        self.work: dist.Work | None = None  # with a communication hook, its Future

    def close(self, params: Sequence[torch.Tensor], views: dict[int, torch.Tensor]) -> None:
        self.params = [params[index] for index in self.gathered]
        self.views = [views[index] for index in self.gathered]
        self.alone = self.placed + self.loose
        self.seen: list[Any] = []
        self.is_large = sum(view.nbytes for view in self.views) >= _LARGE_BYTES * max(1, len(self.views))

    def look(self) -> list[Any]:
        """The gradients of the gathered parameters, kept until they are gathered: asking costs for each one."""
        self.seen = list(map(_get_grad, self.params))
        return self.seen
