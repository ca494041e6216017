"""Where a wrapper works: on which device, in which group, and whether cores are left for its messages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError
from paceline.machine import count_cores
from paceline.runtime.world import current_world

__all__ = ["destroy_group", "has_spare_cores", "only_computing", "open_group", "settle_devices", "settle_group"]


def settle_devices(module: nn.Module, device_ids: Sequence[int | torch.device] | None) -> list[int] | None:
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise ConfigError(f"device_ids={list(device_ids)}: one process drives one device here; give one, or none")
    first = device_ids[0]
    device = torch.device("cuda", first) if isinstance(first, int) else torch.device(first)
    elsewhere = {str(param.device) for param in module.parameters() if param.device != device}
    if elsewhere:
        raise ConfigError(
            f"device_ids={list(device_ids)}, but the module has parameters on {', '.join(sorted(elsewhere))}: "
            f"move it to {device} first, or leave device_ids out"
        )
    return [device.index or 0]


def open_group(like: dist.ProcessGroup, backend: str) -> dist.ProcessGroup | None:
    """Another group of the same ranks; None where torch cannot make one. Collective: every rank must call this."""
    if like is dist.group.WORLD:
        return cast(dist.ProcessGroup, dist.new_group(backend=backend))
    try:
        # Without the ranks outside; torch then names a group by its ranks, and has one of a name.
        ranks = dist.get_process_group_ranks(like)
        return cast(dist.ProcessGroup, dist.new_group(ranks, backend=backend, use_local_synchronization=True))
    except ValueError:
        return None


def destroy_group(group: dist.ProcessGroup) -> None:
    """Let go of a group, unless it went with its world already."""
    with contextlib.suppress(ValueError, RuntimeError, AssertionError):
        dist.destroy_process_group(group)


def settle_group(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if group is not None and mesh is not None:
        raise ConfigError("process_group and device_mesh are both given: give one of them")
    if mesh is None:
        return group
    if mesh.ndim != 1:
        raise ConfigError(
            f"a device mesh of {mesh.ndim} dimensions is given: take the one for data, such as mesh['dp']"
        )
    return mesh.get_group()


_computing: list[int] = []


@contextlib.contextmanager
def only_computing(num_ranks: int) -> Iterator[None]:
    """Wrappers that are built inside count so many ranks on this host; the others wait, and take no core."""
    _computing.append(num_ranks)
    try:
        yield
    finally:
        _computing.pop()


def has_spare_cores(world_size: int) -> bool:
    """Whether this host has a core for each local rank beside those that compute."""
    world = current_world()
    local = world.local_world_size if world is not None else int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return count_cores() >= min([local, *_computing]) * (torch.get_num_threads() + 1)
