"""Replicas on NCCL are bit-identical after every step, in every strategy, and match a run without delays, no matter
which stream or rank is late."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.parallel import DDP
from paceline.parallel.streams import SideStream
from paceline.runtime.ranks.place import read_place
from tests.dist.test_levels import on_hosts
from tests.dist.wrapped import describe
from tests.gpu.conftest import DEVICE
from tests.gpu.delays import MUTANTS, PLACES, Delays, on_side_streams
from tests.gpu.gpu_ranks import KeptGroups

RANKS = (2, 4, 8)
REPETITIONS = 50
STEPS = 6
FAMILIES = {
    "codecs": ("dense", "bf16", "int8", "int4", "topk:0.1", "topk:0.05,dgc,warmup=4", "powersgd:2"),
    "hosts": ("dense+hosts", "bf16+hosts", "int8+hosts", "topk:0.1+hosts", "powersgd:2+hosts"),
    "schedules": (
        "localsgd:2", "localsgd:4,after=3", "slowmo:2", "slowmo:4+bf16", "diloco:2", "diloco:4+int8",
        "diloco:4,fragments=2,delay=3+int8",
    ),
    "sharded": ("zero1", "zero1 overlapped", "zero1+bf16"),
}  # fmt: skip


class Net(nn.Module):
    """One gradient that is reduced in place, and small ones; running statistics; a delay in backward."""

    def __init__(self, delays: Delays) -> None:
        super().__init__()
        self.first, self.norm, self.wide = nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Linear(512, 512)
        self.last, self._delays = nn.Linear(512, 10), delays

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.wide(torch.tanh(self.norm(self.first(x)))))
        hidden.register_hook(lambda _: self._delays.at("in backward"))
        return self.last(hidden)


def find_digests(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Digests of each tensor's bits, on the stream and at the time at which a program would read them."""
    found = {}
    for name, value in values.items():
        bits = value.detach().reshape(-1).view(torch.int32).long()
        found[name] = (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum()
    return found


def read_common(model: DDP, strategy: str) -> dict[str, torch.Tensor]:
    """The state that all ranks must share after a step: between two syncs of a schedule, the result of the last
    sync."""
    if not any(name in strategy for name in ("localsgd", "slowmo", "diloco")):
        return model.state_dict()
    outer = model._strategy.outer
    return dict(zip(outer.names, outer.start, strict=True)) | {f"momentum of {k}": v for k, v in outer.momentum.items()}


def train(strategy: str, delays: Delays, without: str, world: paceline.World) -> dict[str, int]:
    """The digests after each step, by step and name."""
    text, _, overlap = strategy.partition(" ")
    torch.manual_seed(0)
    model = DDP(Net(delays), strategy=text, bucket_cap_mb=0.2, check_replicas_every=0)
    options: Any = {"lr": 0.05} | ({} if "dgc" in text else {"momentum": 0.9})
    if "zero1" in text:
        optimizer: Any = model.shard_optimizer(torch.optim.SGD, overlap=bool(overlap), **options)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **options)
    digests = {}
    with on_side_streams(lambda: delays.at("side streams"), without):
        for step in range(STEPS):
            batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + world.rank))
            loss = model(batch.to(world.device)).square().mean()
            delays.at("host")
            delays.at("before backward")
            loss.backward()
            delays.at("before the step")
            optimizer.step()
            if step % 2 or not overlap:  # reading waits for whatever overlaps with the next forward
                digests[step] = find_digests(read_common(model, text))
            optimizer.zero_grad()
        model.sync_parameters()
        digests[STEPS] = find_digests(model.state_dict())
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    model.stop()
    return {f"{name} after step {step + 1}": int(value) for step, f in digests.items() for name, value in f.items()}


def repeat(strategies: tuple[str, ...], repetitions: int, *, without: str = "", own_stream: bool = False) -> list[str]:
    """Differences between ranks or from the run without delays, with the strategy, the repetition and its delay.

    `without`: a wait to leave out where there are delays. `own_stream`: the program trains on a stream other than the
    default one.
    """
    found: list[str] = []
    per_host = max(1, read_place().world_size // 2)  # two hosts, for strategies with two levels
    with on_hosts(per_host), paceline.init(announce=None, timeout_s=30) as world, KeptGroups() as groups:
        undelayed: dict[str, int] = {}
        for strategy, number in itertools.product(strategies, range(repetitions + 1)):
            groups.restart()
            seed = f"{strategy} {number}" if number else ""
            delays = Delays(seed, world.rank, world.world_size, world.device)
            error, digests = "", {}
            own = torch.cuda.Stream() if own_stream and world.device.type == "cuda" else None
            try:
                with torch.cuda.stream(own):
                    digests = train(strategy, delays, without if seed else "", world)
            except Exception as raised:
                error = ": ".join(describe(raised))
            undelayed = digests if number == 0 else undelayed
            label = f"{strategy}, repetition {number} ({delays})"
            errors, everyone = zip(*world.share((error, digests)), strict=True)
            found += [f"{label}: rank {rank}: {text}" for rank, text in enumerate(errors) if text]
            if any(errors):
                return found  # the ranks may be out of sync
            unequal = [name for name in digests if len({other[name] for other in everyone}) > 1]
            changed = [name for name in digests if digests[name] != undelayed[name]]
            for names, what in ((unequal, "between ranks"), (changed, "from the run without delays")):
                if names:
                    found.append(f"{label}: {len(names)} differ {what}, first {names[0]}")
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("family", FAMILIES)
def test_replicas_are_equal_after_every_step_whichever_rank_is_late(on_nccl, family, ranks):
    found = on_nccl(ranks, repeat, FAMILIES[family], REPETITIONS, timeout_s=400)
    assert not found[0], "\n".join(["", *found[0]])


@pytest.mark.parametrize("ranks", RANKS)
def test_replicas_are_equal_where_the_program_has_a_stream_of_its_own(on_nccl, ranks):
    strategies = ("dense", "bf16", "int8", "powersgd:2", "slowmo:2", "zero1")
    found = on_nccl(ranks, functools.partial(repeat, own_stream=True), strategies, 2 * len(PLACES), timeout_s=400)
    assert not found[0], "\n".join(["", *found[0]])


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has no streams")
@pytest.mark.parametrize("wait", MUTANTS)
def test_without_one_of_the_waits_the_tests_above_fail(on_nccl, wait):
    found = on_nccl(2, functools.partial(repeat, without=wait), ("bf16", "int8"), 3 * len(PLACES), timeout_s=400)
    assert any("differ" in line for line in found[0]), found[0]


def complete_on_callers_stream(self: SideStream, future: Any, result: torch.Tensor) -> None:
    with torch.cuda.stream(torch.cuda.default_stream()):
        future.set_result(result)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CPU has no streams")
@pytest.mark.parametrize(
    ("wait", "mutant"), [("lead_caller", lambda self: None), ("complete", complete_on_callers_stream)]
)
def test_the_caller_waits_for_what_a_side_stream_computes_for_it(monkeypatch, wait, mutant):
    def read() -> float:
        side, value = SideStream(torch.device("cuda", 0)), torch.zeros(1000, device="cuda")
        future = side.create_future()
        side.follow_caller()
        with side.borrowed() if wait == "lead_caller" else side.current():
            torch.cuda._sleep(100_000_000)
            value.fill_(1.0)
            side.complete(future, value)
        if wait == "complete":
            future.wait()
        return float(value.clone().sum())

    assert read() == 1000.0
    monkeypatch.setattr(SideStream, wait, mutant)
    assert read() == 0.0
