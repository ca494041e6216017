"""The wrapper in torch's own `torch.distributed.algorithms.Join`, together with other parts that can join.

`DataParallel.join` needs none of this, and no message in a step in which all have data.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from paceline.parallel.steps import Steps

__all__ = ["TorchJoinable"]


class TorchJoinable(Joinable):
    """What torch's `Join` asks of those that it is given."""

    @property
    def _ready(self) -> Steps:
        raise NotImplementedError

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        raise NotImplementedError

    @property
    def join_device(self) -> torch.device:
        return self._ready.channel.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        return self.process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Shadow(self, kwargs.get("divide_by_initial_world_size", True))


class _Shadow(JoinHook):
    """Takes part in the steps of the ranks that still have data."""

    def __init__(self, model: TorchJoinable, divide_by_world: bool) -> None:
        self._model, self._steps = model, model._ready
        # torch tells those who are done in forward; here it is known when backward begins that they are needed.
        self._context = self._steps.joining(divide_by_world, announce=lambda: Join.notify_join_context(model))
        self._context.__enter__()

    def main_hook(self) -> None:
        self._steps.mirror()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._steps.even_out()
        self._context.__exit__(None, None, None)
        self._model._join_config = _JoinConfig.construct_disabled_join_config()
