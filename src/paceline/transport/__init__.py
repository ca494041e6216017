"""Shared memory between the ranks of one host, as a torch.distributed backend named `paceline`.

Importing this registers the backend; torch does so by itself where Paceline is installed.
"""

from __future__ import annotations

from typing import Any

from paceline.transport.native import load_library, why_not

__all__ = ["describe_kernels", "register", "why_not"]


def register() -> None:
    """Make `paceline` known to torch.distributed; does nothing the second time. The core is loaded when first used."""
    import torch.distributed as dist

    if not dist.is_available() or "PACELINE" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("paceline", _make_group, extended_api=True, devices=["cpu"])
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

    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        chosen: Any = distributed_c10d._get_default_group() if group is None else group
        if getattr(chosen, "getBackendName", str)() == "paceline":
            return chosen.monitored_barrier(timeout, wait_all_ranks)
        return original(group, timeout, wait_all_ranks)

    monitored_barrier.__doc__ = original.__doc__
    distributed_c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
