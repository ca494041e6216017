"""The wrapper on CUDA, on one GPU: NCCL in a world of one, and gloo ranks that share the GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import DDP, CollectiveError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# (backend, ranks); gloo ranks share one GPU.
WORLDS = [("nccl", 1), ("gloo", 2)]
# More than the number of steps in which control words are read immediately.
STEPS = 14


class Net(nn.Module):
    """Gradients large enough to be reduced in place, small ones, BatchNorm, and a layer that can be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(64, 4096), nn.BatchNorm1d(4096)
        self.spare, self.last = nn.Linear(4096, 64), nn.Linear(4096, 64)

    def forward(self, x: torch.Tensor, spare: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.wide(x)))
        return self.last(hidden) + (self.spare(hidden) if spare else 0)


def draw(rank: int, step: int, device: torch.device) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)


def train(backend: str, options: dict[str, Any]) -> None:
    with paceline.init(backend, "cuda", announce=None) as world:
        torch.backends.cuda.matmul.allow_tf32 = False
        model = DDP(Net().to(world.device), **options)
        alone = copy.deepcopy(model.module)
        own = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9) for net in (model, alone)]
        for step in range(STEPS):
            model(draw(world.rank, step, world.device)).square().mean().backward()
            for rank in range(world.world_size):
                (alone(draw(rank, step, world.device)).square().mean() / world.world_size).backward()
            for optimizer in own:
                optimizer.step()
                optimizer.zero_grad()
        for (name, ours), theirs in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name} {text}")
        mine = [tensor.double().sum().item() for tensor in model.module.state_dict().values()]
        assert all(other == mine for other in world.share(mine))


@pytest.mark.parametrize(("backend", "ranks"), WORLDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0.1},
        {"average": "samples"},
        {"reducer": "simple"},
    ],
    ids=str,
)
def test_training_is_as_on_one_process(on_ranks, backend, ranks, options):
    on_ranks(ranks, train, backend, options, timeout_s=120)


def leave_out(backend: str, step_without: int) -> tuple[str, int]:
    """Train, and skip a layer in one step, on the last rank only."""
    with paceline.init(backend, "cuda", announce=None) as world:
        model = DDP(Net().to(world.device))
        for step in range(STEPS + 2):
            is_odd = step == step_without and world.rank == world.world_size - 1
            try:
                model(draw(world.rank, step, world.device), spare=not is_odd).square().mean().backward()
            except CollectiveError as error:
                return str(error), step
            model.zero_grad()
    return "", -1


@pytest.mark.parametrize(("backend", "ranks"), WORLDS)
def test_a_missing_gradient_is_named_in_its_iteration_at_first_and_before_the_next_later(on_ranks, backend, ranks):
    for step_without, step_found in ((2, 2), (12, 13)):
        answers = on_ranks(ranks, leave_out, backend, step_without, timeout_s=120)
        where = "any rank" if ranks == 1 else "rank 1"
        assert {found for _, found in answers} == {step_found}
        assert len({text for text, _ in answers}) == 1 and f"spare.weight on {where}" in answers[0][0]


def hold(backend: str) -> tuple[int, int, int]:
    with paceline.init(backend, "cuda", announce=None) as world:
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated()
        model = DDP(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).to(world.device))
        params = torch.cuda.memory_allocated() - before
        for _ in range(4):
            model(torch.randn(4, 1024, device=world.device)).sum().backward()
            torch.cuda.synchronize()
            with_gradients = torch.cuda.memory_allocated() - before
            model.zero_grad()
        return params, with_gradients, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize(("backend", "ranks"), WORLDS)
def test_gradients_are_held_once(on_ranks, backend, ranks):
    (params, with_gradients, zeroed), *_ = on_ranks(ranks, hold, backend, timeout_s=120)
    assert with_gradients < 2.05 * params
    # Memory reduced in place is free again after zero_grad; only small gradients have a buffer.
    assert zeroed < 1.2 * params


def inspect(backend: str) -> str:
    with paceline.init(backend, "cuda", announce=None) as world:
        model = DDP(Net().to(world.device), bucket_cap_mb=0.5)
        for step in range(6):
            model(draw(world.rank, step, world.device)).square().mean().backward()
            model.zero_grad()
        report = model.report()
        assert report.times is not None and all(bucket.done_s > 0 for bucket in report.times.buckets)
        return str(report)


@pytest.mark.parametrize(("backend", "ranks"), WORLDS)
def test_a_report_has_the_times_of_the_device(on_ranks, backend, ranks):
    assert "backward ends at" in on_ranks(ranks, inspect, backend, timeout_s=120)[0]


def go_forward_twice(backend: str, training: bool) -> None:
    """The second backward needs the running statistics as its forward saw them."""
    with paceline.init(backend, "cuda", announce=None) as world:
        model = DDP(Net().to(world.device)).train(training)
        for step in range(STEPS if training else 5):
            inputs = [draw(world.rank, 2 * step + number, world.device) for number in range(2)]
            one, two = (model(x).square().mean() for x in inputs)
            one.backward()
            two.backward()
            model.zero_grad()
            means = world.share(model.module.norm.running_mean.tolist())
            assert all(mean == means[0] for mean in means), step


@pytest.mark.parametrize(("backend", "ranks"), WORLDS)
@pytest.mark.parametrize("training", [True, False])
def test_two_forwards_come_before_the_first_backward(on_ranks, backend, ranks, training):
    on_ranks(ranks, go_forward_twice, backend, training, timeout_s=120)


def write_on_one_rank() -> None:
    """Control words are read late here: only the GPU knows that a single rank's statistics are in the sum."""
    with paceline.init("gloo", "cuda", announce=None) as world:
        model = DDP(Net().to(world.device))
        norm = model.module.norm
        mine = norm.running_mean.clone()
        for step in range(2 * STEPS):
            if step == STEPS and world.rank == 1:
                norm.eval()
            model(draw(world.rank, step, world.device)).square().mean().backward()
            model.zero_grad()
            means = world.share(norm.running_mean.tolist())
            assert means[0] == means[1], step
            if step >= STEPS and world.rank == 0:
                torch.testing.assert_close(norm.running_mean, mine)
            with torch.no_grad():  # the effect of the next step on rank 0's statistics
                hidden = model.module.wide(draw(0, step + 1, world.device))
                mine = 0.9 * norm.running_mean + 0.1 * hidden.mean(0)


def test_statistics_are_those_of_the_ranks_that_wrote(on_ranks):
    on_ranks(2, write_on_one_rank)


class Words(nn.Module):
    """An embedding table shared with a head: its gradient has a dense part and rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner, self.head = nn.Embedding(4096, 64), nn.Linear(64, 64), nn.Linear(64, 4096, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.words(ids))))


def send_rows(how: str) -> list[str]:
    with paceline.init("gloo", "cuda", announce=None) as world:
        torch.backends.cuda.matmul.allow_tf32 = False
        model = DDP(Words().to(world.device), embeddings=how, bucket_cap_mb=0.1)
        alone = copy.deepcopy(model.module)
        for step in range(STEPS):
            model.zero_grad()
            alone.zero_grad()
            for rank in range(world.world_size):
                ids = torch.randint(0, 4096, (4, 16), generator=torch.Generator().manual_seed(100 * step + rank))
                (alone(ids.to(world.device)).square().mean() / world.world_size).backward()
                if rank == world.rank:
                    model(ids.to(world.device)).square().mean().backward()
            for mine, other in zip(model.module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-7)
        return list(model.report().embeddings)


def test_lookups_send_rows_on_request(on_ranks):
    assert "in the buckets" in on_ranks(2, send_rows, "rows", timeout_s=120)[0][0]
    assert "is sent whole: on a GPU" in on_ranks(2, send_rows, "auto", timeout_s=120)[0][0]
