"""The rank program of the tests with two hosts: `python two_hosts.py VICTIM`, with torchrun's variables.

Checks run one after another, because starting ranks takes longer than all of them. Rank VICTIM is killed at the end.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.transport import register

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)


def open_world() -> None:
    """Open torch's own world on the backend, after checking the test's assumptions about hosts."""
    register()
    dist.init_process_group("shm", timeout=timedelta(seconds=40))
    group = dist.group.WORLD
    assert not group.shares_memory
    assert len(group._here) == int(os.environ["LOCAL_WORLD_SIZE"])


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(count) * 7 + rank * 3) % 11 - 5).to(dtype)


def combine(op: str, count: int, dtype: torch.dtype) -> torch.Tensor:
    """The expected result, exact in every type."""
    parts = torch.stack([numbers(rank, count, torch.float64) for rank in range(SIZE)])
    total = {"SUM": parts.sum(0), "AVG": parts.sum(0) / SIZE, "MIN": parts.amin(0), "MAX": parts.amax(0)}[op]
    return (total if dtype.is_floating_point else total.trunc()).to(dtype)


def collectives() -> None:
    """Every reduction with counts around the size of a piece, and collectives that only gloo runs."""
    for dtype in TYPES:
        piece = (1 << 20) // dtype.itemsize
        counts = (0, 1, 5, 1000, piece - 1, piece, 3 * piece + 7) if dtype == torch.float32 else (0, 1, 70_001)
        for count in counts:
            for op in ("SUM", "AVG", "MIN", "MAX"):
                value = numbers(RANK, count, dtype)
                dist.all_reduce(value, getattr(dist.ReduceOp, op))
                torch.testing.assert_close(value, combine(op, count, dtype), msg=lambda t: f"{op} {count} {dtype}: {t}")  # noqa: B023
    values = [numbers(RANK, count, torch.float32) for count in (3, 300_000, 1) * 4]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    after = works[1].get_future().then(lambda future: future.value()[0] * 2)
    turned = numbers(RANK, 12, torch.float32).view(3, 4).t()
    dist.all_reduce(turned)
    for work, value in zip(works, values, strict=True):
        assert work.wait() and work.is_completed()
        assert torch.equal(value, combine("SUM", len(value), torch.float32))
    assert torch.equal(after.wait(), 2 * combine("SUM", 300_000, torch.float32))
    assert torch.equal(turned, combine("SUM", 12, torch.float32).view(3, 4).t())
    everyone: list[Any] = [None] * SIZE
    dist.all_gather_object(everyone, RANK)
    received = numbers(RANK, 9, torch.float32)
    dist.broadcast(received, SIZE - 1)
    assert everyone == list(range(SIZE)) and torch.equal(received, numbers(SIZE - 1, 9, torch.float32))
    pair = dist.new_group([0, SIZE - 1])  # across two hosts, one rank on each
    if RANK in (0, SIZE - 1):
        value = torch.ones(4)
        dist.all_reduce(value, group=pair)
        assert value.tolist() == [2.0] * 4
        dist.destroy_process_group(pair)
    dist.barrier()


def draw(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 300, generator=torch.Generator().manual_seed(100 * step + rank))


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(300, 1500), nn.Tanh(), nn.Linear(1500, 3))


def train(model: nn.Module, ranks: range) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.cat([draw(rank, step) for rank in ranks])).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def training() -> None:
    """Compare two wrappers with one process on the whole batch, and ranks with each other."""
    with paceline.init("paceline", "cpu", announce=None, timeout_s=40) as world:
        assert not dist.group.WORLD.shares_memory
        wrappers = [DistributedDataParallel, paceline.DataParallel]
        if 2 * int(os.environ["LOCAL_WORLD_SIZE"]) == SIZE:
            wrappers.append(functools.partial(paceline.DataParallel, strategy="hosts"))
        for wrap in wrappers:
            found = train(wrap(build(RANK)), range(RANK, RANK + 1))
            for param, wanted in zip(found, train(build(0), range(SIZE)), strict=True):
                torch.testing.assert_close(param, wanted)
            sums = world.share([param.double().sum().item() for param in found])
            assert all(other == sums[0] for other in sums)


def lose(victim: int) -> None:
    """Kill a busy rank; each survivor prints its error and how long it took to appear."""
    if victim == RANK:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            dist.all_reduce(torch.ones(500_000))
            began = time.monotonic()
    except RuntimeError as error:
        print(json.dumps({"rank": RANK, "error": str(error), "after_s": time.monotonic() - began}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    training()
    print(f"rank {RANK} has trained", flush=True)
    open_world()
    collectives()
    print(f"rank {RANK} has reduced", flush=True)
    lose(int(sys.argv[1]))
