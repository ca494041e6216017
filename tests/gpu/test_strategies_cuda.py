"""Strategies on CUDA, on one GPU: a world of one, gloo ranks that share the GPU, and workers in one process."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import DDP
from paceline.parallel import codecs
from paceline.parallel.codecs import build_codec, run_together
from paceline.records.training import load_metrics
from paceline.strategy import Strategy
from paceline.training import loop
from paceline.training.train_settings import TrainSettings
from tests.dist.test_training_resume import SMALL, STEPS, copy_until
from tests.dist.wrapped import check_equal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WORLDS = [("nccl", 1), ("gloo", 2)]
LOSSY = ("int8", "int4", "topk:0.1", "powersgd:2")
STRATEGIES = (
    "dense", "bf16", *LOSSY, "topk:0.05,dgc,warmup=4", "localsgd:4", "localsgd:4,after=3", "slowmo:4+bf16", "diloco:4",
    "diloco:4+int8", "diloco:4,fragments=2,delay=3+int8", "zero1", "zero1+bf16",
)  # fmt: skip


def build(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 16, 40), nn.Linear(40, 40)
    return nn.Sequential(*layers).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def loss(model: Any, rank: int, step: int, device: torch.device) -> torch.Tensor:
    x = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(1000 * step + rank))
    return model(x.to(device)).square().mean()


def train(backend: str) -> None:
    """Every codec: equal replicas, nothing lost, non-finite values leave residuals unchanged, bit-identical resumes."""
    with paceline.init(backend, "cuda", announce=None) as world:
        n, device = world.world_size, world.device
        for text in LOSSY:
            model = DDP(build(device), strategy=text, bucket_cap_mb=0.01, check_replicas_every=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            given: dict[str, Any] = {}
            applied: dict[str, Any] = {}
            for step in range(4):
                for rank in range(n):
                    alone = copy.deepcopy(model.module)
                    loss(alone, rank, step, device).backward()
                    for name, param in alone.named_parameters():
                        given[name] = given.get(name, 0) + param.grad.double() / n
                optimizer.zero_grad()
                loss(model, world.rank, step, device).backward()
                for name, param in model.module.named_parameters():
                    applied[name] = applied.get(name, 0) + param.grad.double()
                check_equal(world, [param.grad for param in model.module.parameters()], (text, step))
                optimizer.step()
            state = model.strategy_state()
            for name, want in given.items():
                errors = [found["rank"].get(name) for found in world.share({"rank": {
                    key: value.cpu() for key, value in state["rank"].items()}})]  # fmt: skip
                have = applied[name]
                if errors[0] is not None:
                    left = sum(error.double() for error in errors).to(device) / n
                    have = have + left.view(have.size())
                torch.testing.assert_close(have, want, rtol=0, atol=1e-4, msg=f"{text}: {name}")
            optimizer.zero_grad()
            loss(model, world.rank, 9, device).mul(torch.inf if world.rank == n - 1 else 1).backward()
            assert not all(torch.isfinite(param.grad).all() for param in model.parameters()), text
            after = model.strategy_state()
            for part in ("rank", "common"):
                assert all(torch.equal(after[part][name], value) for name, value in state[part].items()), text
            model.stop()


@pytest.mark.parametrize(("backend", "num_ranks"), WORLDS)
def test_every_codec_loses_nothing(on_ranks, backend, num_ranks):
    on_ranks(num_ranks, train, backend, timeout_s=120)


def shard(backend: str) -> None:
    with paceline.init(backend, "cuda", announce=None) as world:
        found = []
        for strategy in (None, "zero1"):
            model = DDP(build(world.device), strategy=strategy)
            kind, options = torch.optim.AdamW, {"lr": 0.01}
            optimizer = kind(model.parameters(), **options) if strategy is None else model.shard_optimizer(
                kind, **options, overlap=True)  # fmt: skip
            for step in range(3):
                loss(model, world.rank, step, world.device).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([value.clone() for value in model.state_dict().values()])
            model.stop()
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("backend", "num_ranks"), WORLDS)
def test_a_sharded_optimizer_is_the_unsharded_one(on_ranks, backend, num_ranks):
    on_ranks(num_ranks, shard, backend, timeout_s=120)


@pytest.mark.parametrize("text", ["dense", "bf16", *LOSSY, "topk:0.05,dgc"])
def test_workers_on_a_gpu_compute_what_they_do_on_the_cpu(text, monkeypatch):
    """The results are approximately equal: PowerSGD computes bases differently, and sums have a different order."""
    monkeypatch.setattr(codecs, "_library", lambda: None)
    shapes, results = ((64, 48), (64, 48), (33, 5), (301,), (64,), ()), []
    for device in ("cpu", "cuda"):
        ranks = [build_codec(Strategy.parse(text), rank, 3) for rank in range(3)]
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            grads = [[torch.randn(s, generator=generator).to(device) for s in shapes] for _ in ranks]
            names = [str(index) for index in range(len(shapes))]
            run_together([codec.average(names, own, step) for codec, own in zip(ranks, grads, strict=True)])
            assert all(torch.equal(a, b) for own in grads[1:] for a, b in zip(own, grads[0], strict=True))
        results.append([grad.cpu() for grad in grads[0]])
    limit = 0.05 if text in ("int8", "int4") else 1e-4  # a number halfway between two steps may be rounded either way
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit * 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bf16_takes_no_memory_besides_its_message(dtype):
    flat = torch.randn(1 << 20, device="cuda").to(dtype)
    grads, codec = [flat[: 1 << 19].view(1024, -1), flat[1 << 19 :]], build_codec(Strategy.parse("bf16"), 0, 2)
    wanted = ((flat.float() / 2).bfloat16() * 2).to(dtype)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    exchange = codec.average(("a", "b"), grads, 0)
    _, sent = exchange.send(None)
    sent *= 2
    with pytest.raises(StopIteration):
        exchange.send(sent)
    peak = torch.cuda.max_memory_allocated()  # before the comparison, which allocates memory itself
    assert torch.equal(flat, wanted)
    message = 2 * flat.numel() if dtype == torch.float32 else 0
    assert peak - before <= message + 4096


def train_and_resume(settings: TrainSettings, folder: Path, resume: bool) -> int:
    return loop.train(settings, folder, resume).step


@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize(("backend", "num_ranks"), WORLDS)
def test_every_strategy_trains_and_resumes_in_mid_round(on_ranks, tmp_path, backend, num_ranks, text):
    changes = {
        "ranks": num_ranks,
        "backend": backend,
        "device": "cuda",
        "strategy": text,
        "batch_size": 12 // num_ranks,
    }
    settings, whole = TrainSettings(**(SMALL | changes)), tmp_path / "whole"
    whole.mkdir()
    assert on_ranks(num_ranks, train_and_resume, settings, whole, False) == [STEPS] * num_ranks
    folder = copy_until(6, whole, tmp_path / "broken")
    assert on_ranks(num_ranks, train_and_resume, settings, folder, True) == [STEPS] * num_ranks
    rows, others = ([row["loss"] for row in load_metrics(path / "metrics.jsonl")] for path in (whole, folder))
    assert len(rows) == STEPS and rows == pytest.approx(others, rel=1e-3)  # GPU sums have no fixed order


@pytest.mark.parametrize(("backend", "num_ranks"), WORLDS)
def test_the_command_trains_with_a_schedule_and_a_codec(tmp_path, backend, num_ranks):
    command = [
        *(sys.executable, "-m", "paceline", "train", "--model", "mlp", "--samples", "64", "--batch-size", "8"),
        *("--steps", "6", "--device", "cuda", "--backend", backend, "--ranks", str(num_ranks)),
        *("--strategy", "diloco:3+int8", "--out", str(tmp_path)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (config,) = tmp_path.glob("*/config.json")
    assert json.loads(config.read_text())["settings"]["strategy"] == "diloco:3+int8"
