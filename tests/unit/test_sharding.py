"""Ownership of elements with a sharded optimizer, and optimizers that cannot be sharded. No ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it, and importing it sets an environment variable; do that before any test
from torch import nn

from paceline.errors import ConfigError
from paceline.parallel.flat import FlatGradients
from paceline.parallel.replicas import read_replica
from paceline.parallel.zero import cut_plan, find_blocks, shard
from paceline.plan import Plan, plan_like_torch, plan_torch_start
from paceline.strategy import count_each
from paceline.workloads.registry import build_model, default_form
from tests.unit.made_plans import plan_in_pieces


class Shapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = ((), (0, 3), (1,), (7, 3), (1000,), (33, 65), (2, 3, 5, 5))
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        self.parts.append(nn.Parameter(torch.zeros(11, dtype=torch.bfloat16)))


def list_plans(gradients: Any) -> list[Plan]:
    order = range(len(gradients) - 1, -1, -1)
    caps = (1, 400, 5000, 10**9)
    return [
        plan_torch_start(gradients),
        *(plan_like_torch(gradients, order, [cap]) for cap in caps),
        plan_in_pieces(gradients, order, cap_bytes=600, tail_bytes=20),
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_element_has_one_owner(world_size):
    replica = read_replica(Shapes())
    for plan in list_plans(replica.gradients):
        flat = FlatGradients(replica, plan, num_words=3)
        owners = [torch.zeros(param.numel(), dtype=torch.int64) for param in replica.params]
        empty = []
        for rank in range(world_size):
            for number, bucket in enumerate(cut_plan(flat, plan, rank, world_size)):
                each = count_each(flat.ranges[number].numel(), flat.ranges[number].element_size(), world_size)
                assert sum(part.end - part.start for part in bucket) <= each
                for part in bucket:
                    owners[part.param][part.start : part.end] += 1
                    empty += [part.param] if part.start == part.end else []
        assert all(bool((owner == 1).all()) for owner in owners), plan.rule
        assert empty == [1]  # owned by one rank: its state is then saved like any other


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_ranks_have_equal_shards_of_a_model(world_size):
    torch.manual_seed(0)
    from paceline.training.train_settings import TrainSettings

    options = TrainSettings(model="gpt2-mini").model_options
    replica = read_replica(build_model("gpt2-mini", default_form("gpt2-mini"), options))
    order = range(len(replica.params) - 1, -1, -1)
    total = sum(param.numel() for param in replica.params)
    for cap in (2**20, 25 * 2**20):
        plan = plan_like_torch(replica.gradients, order, [cap])
        flat = FlatGradients(replica, plan, num_words=3)
        for rank in range(world_size):
            cut = cut_plan(flat, plan, rank, world_size)
            assert sum(part.end - part.start for bucket in cut for part in bucket) <= (1 / world_size + 0.02) * total


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (torch.optim.Adafactor, "whole parameters"),
        (torch.optim.LBFGS, "whole parameters"),
        (lambda params: _step(torch.optim.AdamW(params)), "already has state"),
        (lambda params: _schedule(torch.optim.SGD(params, lr=1.0)), "a scheduler already uses"),
    ],
)
def test_optimizers_that_cannot_be_sharded(make, text):
    optimizer = make([nn.Parameter(torch.ones(3))])
    kind = type(optimizer)
    with pytest.raises(ConfigError, match=text) as caught:
        shard(None, optimizer)  # type: ignore[arg-type]
    assert caught.value.code == "strategy"
    assert type(optimizer) is kind


def _step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer


def test_blocks_are_the_outermost_members_of_lists():
    net = nn.Module()
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    net.embed, net.body = nn.Embedding(3, 2), nn.Module()
    net.body.blocks = nn.ModuleList([inner, nn.Linear(2, 2)])
    assert find_blocks(net) == [inner, net.body.blocks[1]]
