"""`get` and `ranks` in the world and on one- and two-dimensional meshes; and seeds."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import paceline
from paceline import ConfigError, LaunchError, get


def ask_everything() -> dict:
    with paceline.init(device="cpu", announce=None) as world:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        flat = DeviceMesh("cpu", [[0, 1, 2, 3]])
        pair = DeviceMesh("cpu", [3, 1])  # in descending order, but the group is ascending
        answers = {
            "world": (get("rank"), get("ws"), get("grank"), get("lrank"), get("pg")),
            "mesh": (get("rank", mesh), get("ws", mesh), get("grank", mesh), get("pg", mesh) is dist.group.WORLD),
            "inner": (get("rank", mesh["inner"]), get("ws", mesh["inner"]), get("grank", mesh["inner"])),
            "outer": (get("rank", mesh["outer"]), get("ws", mesh["outer"])),
            "flat": (get("rank", flat), get("ws", flat), dist.get_world_size(get("pg", flat))),
            "pair": (get("rank", pair), get("ws", pair), get("lrank", pair)),
            "pair agrees": get("rank", pair) in (-1, world.rank not in (1, 3) or dist.get_rank(get("pg", pair))),
            "typed": paceline.ranks(mesh["inner"]),
        }
        get.register_mesh(mesh["inner"])
        answers["registered"] = (get("rank"), get("ws"), get("grank"), dist.get_world_size(get("pg")))
        answers["given wins"] = get("ws", flat)
        get.register_mesh(None)
        answers["unregistered"] = get("ws")
        get.register_mesh(mesh["outer"])  # deliberately left registered: it must not outlive this world
        assert world.rank == get("grank")
    return answers


def test_get_on_a_two_dimensional_mesh(on_ranks):
    for rank, answers in enumerate(on_ranks(4, ask_everything)):
        outer, inner = divmod(rank, 2)
        assert answers["world"] == (rank, 4, rank, rank, None)
        assert answers["mesh"] == (rank, 4, rank, True)
        assert answers["inner"] == (inner, 2, rank)
        assert answers["outer"] == (outer, 2)
        assert answers["flat"] == (rank, 4, 4)
        assert answers["pair"] == ({1: 0, 3: 1}.get(rank, -1), 2, rank)
        assert answers["pair agrees"]
        assert answers["typed"] == paceline.Ranks(rank=inner, world_size=2, global_rank=rank, local_rank=rank)
        assert answers["registered"] == (inner, 2, rank, 2)
        assert answers["given wins"] == 4 and answers["unregistered"] == 4


def ask_after_another_world() -> int:
    with paceline.init(device="cpu", announce=None):
        return get("ws")


def test_a_registered_mesh_does_not_outlive_its_world(on_ranks):
    on_ranks(4, ask_everything)
    assert on_ranks(4, ask_after_another_world) == [4] * 4


def ask_for_the_group_of_a_part() -> str:
    with paceline.init(device="cpu", announce=None):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        assert get("pg", mesh["a"]).size() == 2
        pair = DeviceMesh("cpu", [0, 1])
        if get("grank") > 1:
            with pytest.raises(ConfigError, match="mesh"):
                get("pg", pair)
        try:
            get("nothing")
        except ConfigError as error:
            return str(error)
    return ""


def test_an_unknown_fact_lists_the_known_ones(on_ranks):
    assert "'ws', 'rank', 'grank', 'lrank' or 'pg'" in on_ranks(4, ask_for_the_group_of_a_part)[0]


@pytest.mark.parametrize("what", ["ws", "rank", "grank", "lrank", "pg"])
def test_get_without_a_world_is_an_error(what):
    with pytest.raises(LaunchError, match=r"paceline.init\(\)"):
        get(what)


def draw(per_rank: bool, seed: int = 42) -> tuple[float, float, float]:
    with paceline.init(device="cpu", announce=None):
        paceline.set_seed(seed, per_rank=per_rank)
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))


def test_seeds_are_equal_or_per_rank(on_ranks):
    alike, other = on_ranks(2, draw, False), on_ranks(2, draw, True)
    assert alike[0] == alike[1] == other[0]
    assert all(a != b for a, b in zip(other[0], other[1], strict=True))
    later = on_ranks(2, draw, True, 43)  # an increasing seed must not repeat another rank's numbers
    assert len({*alike, *other, *later}) == 4


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_cannot_take_is_refused(seed):
    with pytest.raises(ConfigError, match="seed"):
        paceline.set_seed(seed)
