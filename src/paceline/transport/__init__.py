"""Shared memory between the ranks of one host, as the torch.distributed backend `shm` (alias: `paceline`).

torch registers it by itself where Paceline is installed; elsewhere `register` does.
"""

from __future__ import annotations

import contextlib
import functools
from datetime import timedelta
from typing import Any

from paceline.transport.native import load_library, why_not

__all__ = ["describe_kernels", "register", "why_not"]


def register() -> None:
    """Register `shm` and its alias `paceline` with torch.distributed; does nothing the second time. Loads no C yet.

    torch calls this at its own import (entry point `torch.backends`), which must go on whatever happens here: a torch
    that works otherwise then does not know the backend, and says so to whoever asks for it.
    """
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and "SHM" not in dist.Backend._plugins:
            for name in ("shm", "paceline"):
                dist.Backend.register_backend(name, _make_group, extended_api=True, devices=["cpu"])
            _let_in_monitored_barrier(dist)


def describe_kernels() -> str:
    """Which of the core's kernels this processor got."""
    name: bytes = load_library().pln_cpu()
    return name.decode()


def _make_group(options: Any, backend_options: Any) -> Any:
    from paceline.transport.group import PacelineGroup

    return PacelineGroup(options, backend_options)


def _let_in_monitored_barrier(dist: Any) -> None:
    """torch allows `monitored_barrier` for groups named gloo only; ours has a gloo that does it."""
    from torch.distributed import distributed_c10d

    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        chosen: Any = distributed_c10d._get_default_group() if group is None else group
        if isinstance(chosen, dist.ProcessGroup) and chosen.name() == "shm":
            limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
            return chosen.monitored_barrier(limit, wait_all_ranks)
        return original(group, timeout, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
