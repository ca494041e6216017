"""Run test functions unmodified in GPU ranks, with their world, models and batches on the GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

import paceline
from paceline.parallel import DDP
from tests.dist.wrapped import here


def run_on_device(backend: str, device: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a rank where worlds open on this backend and device, and models move there when they are
    wrapped. Tensors return to the CPU. Convolutions are deterministic, and float32 is not rounded to TF32."""
    init, wrap, wrap_torchs = paceline.init, DDP.__init__, DistributedDataParallel.__init__
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True

    @functools.wraps(init)
    def init_here(*_: Any, **options: Any) -> Any:
        return init(**options | {"backend": backend, "device": device})

    def move_and(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def wrap_here(self: Any, module: Any, *args: Any, **options: Any) -> None:
            original(self, module.to(here()), *args, **options)

        return wrap_here

    paceline.init = init_here  # type: ignore[assignment]
    # type: ignore[method-assign]
    DDP.__init__, DistributedDataParallel.__init__ = move_and(wrap), move_and(wrap_torchs)
    try:
        # The requesting process must not open the GPU.
        return tree_map(lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, fn(*args))
    finally:
        paceline.init = init  # type: ignore[assignment]
        DDP.__init__, DistributedDataParallel.__init__ = wrap, wrap_torchs  # type: ignore[method-assign]


class KeptGroups(contextlib.AbstractContextManager["KeptGroups"]):
    """Models reuse the process groups of earlier models. Creating an NCCL communicator takes longer than training
    one of these models.

    After `restart`, groups are handed out in creation order, so all ranks agree no matter when each one
    garbage-collects its old models.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}
        self._groups: list[Any] = []
        self._count = 0
        self._stack = contextlib.ExitStack()

    def restart(self) -> None:
        self._count = 0

    def reuse(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that each call reuses the groups of the previous one."""

        def call(*args: Any) -> Any:
            self.restart()
            return fn(*args)

        return call

    def __enter__(self) -> KeptGroups:
        for name in ("new_group", "new_subgroups_by_enumeration"):
            self._stack.enter_context(patched(dist, name, self._keep(name, getattr(dist, name))))
        destroy = dist.destroy_process_group

        def destroy_others(group: Any = None) -> None:
            if all(group is not kept for kept in self._groups):
                destroy(group)

        self._stack.enter_context(patched(dist, "destroy_process_group", destroy_others))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _keep(self, name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def find(*args: Any, **options: Any) -> Any:
            key = self._count, name, repr(args), repr(options)
            self._count += 1
            if key not in self._kept:
                made = self._kept[key] = make(*args, **options)
                self._groups.append(made[0] if isinstance(made, tuple) else made)
            return self._kept[key]

        return find


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
