"""This process among the ranks: `get`, the typed `Ranks`, and seeds."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ConfigError, LaunchError
from paceline.runtime.world import current_world


@dataclass(frozen=True)
class Ranks:
    """This process among the others. On a mesh, `rank` (-1 outside of it) and `world_size` count inside its group."""

    rank: int
    world_size: int
    global_rank: int
    local_rank: int


def _need_world() -> None:
    if not dist.is_initialized():
        raise LaunchError("no process group is open: call paceline.init() first")


def _find_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of exactly the mesh's ranks; a mesh of several dimensions has one only if it is the world."""
    long = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if len(long) <= 1:
        return mesh.get_group(long[0] if long else 0)
    if sorted(mesh.mesh.flatten().tolist()) == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return None


def ranks(mesh: DeviceMesh | None = None) -> Ranks:
    """This process's ranks, in the world or inside a mesh (all of it, whatever its dimensions)."""
    _need_world()
    mesh, world = get.mesh if mesh is None else mesh, current_world()
    text = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
    local_rank = world.local_rank if world is not None else int(text) if text.isdigit() else 0
    rank = global_rank = dist.get_rank()
    if mesh is None:
        return Ranks(rank, dist.get_world_size(), global_rank, local_rank)
    members = mesh.mesh.flatten().tolist()
    rank = members.index(global_rank) if global_rank in members else -1
    if rank >= 0 and (group := _find_group(mesh)) is not None:
        rank = dist.get_rank(group)  # as collectives count, whatever the order of the mesh
    return Ranks(rank, len(members), global_rank, local_rank)


_FACTS = {"ws": "world_size", "rank": "rank", "grank": "global_rank", "lrank": "local_rank"}


class _Get:
    """`get(what, mesh=None)`: one fact about this process.

    `ws`: ranks in the mesh, or in the world. `rank`: this process's number inside the mesh, or in the world.
    `grank`: its number in the world. `lrank`: its number on its host, whatever the mesh.
    `pg`: the process group of the mesh, or None for the world, as torch's calls take it.
    """

    def __init__(self) -> None:
        self._mesh: DeviceMesh | None = None
        self._world: dist.ProcessGroup | None = None

    @property
    def mesh(self) -> DeviceMesh | None:
        """The registered mesh, while the world that it was registered in is open."""
        return self._mesh if dist.is_initialized() and self._world is dist.group.WORLD else None

    def __call__(self, what: str, mesh: DeviceMesh | None = None) -> Any:
        mesh = self.mesh if mesh is None else mesh
        if what in _FACTS:
            return getattr(ranks(mesh), _FACTS[what])
        if what != "pg":
            raise ConfigError(f"get({what!r}) is unknown: use 'ws', 'rank', 'grank', 'lrank' or 'pg'")
        _need_world()
        if mesh is None:
            return None
        if (rank := dist.get_rank()) not in mesh.mesh.flatten().tolist():
            raise ConfigError(f"rank {rank} is not part of the mesh {mesh.mesh.tolist()}: it has no group there")
        if (group := _find_group(mesh)) is None:
            text = f"a mesh of shape {tuple(mesh.mesh.shape)} has one group per dimension and none for the whole"
            raise ConfigError(f"{text}: use one dimension, such as mesh[{(mesh.mesh_dim_names or (0,))[0]!r}]")
        return group

    def register_mesh(self, mesh: DeviceMesh | None) -> _Get:
        """Use this mesh whenever none is given; None goes back to the world."""
        _need_world()
        self._mesh, self._world = mesh, dist.group.WORLD
        return self


get = _Get()


def set_seed(seed: int, per_rank: bool = False) -> int:
    """Seed torch (every device), numpy and random, and return the seed used.

    `per_rank` adds the global rank, for noise that must differ between ranks; the default makes equal models.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed {seed}: numpy takes 0 to 2^32 - 1")
    if per_rank:
        _need_world()
        seed = (seed + dist.get_rank()) % 2**32
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    return seed
