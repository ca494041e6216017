"""Communication hooks in torch's form, `hook(state, bucket) -> Future`, and the bucket object that they work on.

The hooks themselves are torch's, or the user's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import ConfigError

__all__ = ["CommHook", "HookedBucket", "check_hook", "start_hook"]


@dataclass(frozen=True)
class CommHook:
    """A hook and the state that it is called with."""

    state: object
    call: Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


class HookedBucket:
    """One bucket, with the methods of `torch.distributed.GradBucket`. The hook divides by the number of ranks."""

    def __init__(
        self,
        index: int,
        num_buckets: int,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
    ) -> None:
        self._index, self._num_buckets, self._buffer = index, num_buckets, buffer
        self._gradients, self._params = list(gradients), list(params)

    def index(self) -> int:
        """Its place in the order of launch."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last to be launched in this step."""
        return self._index == self._num_buckets - 1

    def buffer(self) -> torch.Tensor:
        """All its gradients as one vector."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace what `buffer` returns."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Its gradients, as views of the vector in the shapes of their parameters."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients`."""
        return self._params


def check_hook(hook: object) -> None:
    """Refuse what torch refuses: not callable, not two arguments, or annotated as something else."""
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable, and this is {hook!r}")
    parameters = list(inspect.signature(hook).parameters.values())
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(needed) > 2 or (len(parameters) < 2 and not takes_any):
        raise ConfigError(f"a communication hook takes (state, bucket), and this one takes {inspect.signature(hook)}")
    if len(parameters) > 1 and parameters[1].annotation not in (
        inspect.Parameter.empty, dist.GradBucket, HookedBucket, Any, "dist.GradBucket", "GradBucket", "Any",
        "dist._GradBucket", "HookedBucket", "torch.distributed.GradBucket",
    ):  # fmt: skip
        raise ConfigError(f"a communication hook's bucket is a GradBucket, not {parameters[1].annotation!r}")


def start_hook(hook: CommHook, bucket: HookedBucket) -> torch.futures.Future[Any]:
    future = hook.call(hook.state, bucket)
    if isinstance(future, torch.Tensor):
        raise ConfigError("a communication hook must return a Future of a tensor, and this one returned the tensor")
    if not hasattr(future, "wait"):
        raise ConfigError(f"a communication hook must return a Future of a tensor, not {type(future).__name__}")
    return future
