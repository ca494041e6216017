"""On the paceline backend, averaged gradients are bit-identical on every rank, in every run and for every bucket
plan."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.parallel.channel import Channel
from paceline.parallel.replicas import read_replica
from paceline.transport import why_not
from tests.unit.made_plans import plan_by_cap, plan_in_pieces

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no shared memory between ranks: {why_not()}")

STEPS = 3  # the first learns the order; from the second on, buckets are sent during backward
CAPS_BYTES = (1, 1000, 20_000, 200_000, 10_000_000)


class Layers(nn.Module):
    """Tensors from a single element to several chunks per rank."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        sizes = (11, 5001, 3, 1)
        layers = [nn.Linear(*pair, dtype=dtype) for pair in itertools.pairwise(sizes)]
        self.layers, self.scale = nn.ModuleList(layers), nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def list_plans(module: nn.Module) -> dict[str, dict[str, Any]]:
    gradients = read_replica(module).gradients
    backwards = range(len(gradients) - 1, -1, -1)
    caps: dict[str, Any] = {f"cap of {cap} bytes": {"bucket_cap_mb": cap / 2**20} for cap in CAPS_BYTES}
    return caps | {
        "default": {},
        "in 7 KB": {"plan": plan_in_pieces(gradients, backwards, cap_bytes=7000, tail_bytes=20)},
        "in 50 KB": {"plan": plan_in_pieces(gradients, backwards, cap_bytes=50_000, tail_bytes=5000)},
        "in forward order": {"plan": plan_by_cap(gradients, range(len(gradients)), cap_bytes=20_000)},
        "simple": {"reducer": "simple"},
        "one bucket": {"bucket_cap_mb": 1000},
    }


@contextlib.contextmanager
def buckets_elsewhere() -> Iterator[None]:
    """Gradients in private memory, which the transport must copy to reduce."""
    allocate = Channel.allocate
    Channel.allocate = lambda self, numel, dtype, device: torch.zeros(numel, dtype=dtype, device=device)
    try:
        yield
    finally:
        Channel.allocate = allocate


def find_bits(rank: int, dtype: torch.dtype, options: dict[str, Any]) -> list[str]:
    """The bits of all gradients, by step. Every rank draws its own numbers, which reveal the order of summation."""
    torch.manual_seed(1)
    model = paceline.DDP(Layers(dtype), **options)
    bits = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + rank)
        model.zero_grad()
        model(torch.randn(2, 11, dtype=dtype)).square().mean().backward()
        grads = [param.grad.contiguous().reshape(-1).view(torch.uint8) for param in model.parameters()]
        bits.append(hashlib.sha256(torch.cat(grads).numpy().tobytes()).hexdigest())
    model.stop()
    return bits


def collect(dtype: torch.dtype, is_full: bool) -> dict[str, list[str]]:
    found = {}
    with paceline.init("paceline", "cpu", announce=None, threads=1, timeout_s=60) as world:
        for name, options in list_plans(Layers(dtype)).items():
            found[name] = find_bits(world.rank, dtype, options)
            if is_full or name in FETCHED:
                with buckets_elsewhere():
                    found[f"{name}, not in shared memory"] = find_bits(world.rank, dtype, options)
        # One more run, for the default only.
        found["again"] = find_bits(world.rank, dtype, {})
    return found

    # Private memory takes different paths for a single message, for many, and for pieces of gradients.


FETCHED = ("default", "in 7 KB", "one bucket")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "is_full"),
    [
        pytest.param(2, torch.float32, False, marks=SLOW),  # the order of two summands does not matter
        (3, torch.bfloat16, False),
        pytest.param(3, torch.float32, True, marks=SLOW),
        pytest.param(4, torch.bfloat16, True, marks=SLOW),
    ],
)
def test_averages_are_bit_identical(on_ranks, num_ranks, dtype, is_full):
    runs = on_ranks(num_ranks, collect, dtype, is_full)
    if is_full:
        runs += on_ranks(num_ranks, collect, dtype, is_full)
    wanted = runs[0]["default"]
    assert len(set(wanted)) == STEPS
    different = {name for found in runs for name, bits in found.items() if bits != wanted}
    assert not different
