"""Shared memory between the ranks of one host, as the torch.distributed backend `shm` (alias: `paceline`)."""

import contextlib
import functools
from datetime import timedelta
from typing import Any


def why_not() -> str:
    """Why ranks on this machine cannot share memory; empty if they can."""
    from paceline.transport.native import why_not  # not at module level, where it would add 20 ms to importing torch

    return why_not()


def register() -> None:
    """Register `shm` and its alias `paceline` with torch.distributed. Later calls do nothing. Does not load the C core.

    torch calls this on import (entry point `torch.backends`), and the import must not fail because of it.
    """
    with contextlib.suppress(Exception):
        import torch.distributed as dist

        if dist.is_available() and not hasattr(dist.Backend, "SHM"):

            def make(options: Any, backend_options: Any) -> Any:
                from paceline.transport.group import PacelineGroup

                return PacelineGroup(options, backend_options)

            for name in ("shm", "paceline"):
                dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])
            _patch_monitored_barrier(dist)


def _patch_monitored_barrier(dist: Any) -> None:
    """torch allows `monitored_barrier` only for gloo groups; ours contains one."""
    from torch.distributed import distributed_c10d

    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        chosen: Any = dist.group.WORLD if group is None else group
        if isinstance(chosen, dist.ProcessGroup) and chosen.name() == "shm":
            limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
            return chosen.monitored_barrier(limit, wait_all_ranks)
        return original(group, timeout, wait_all_ranks)

    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
