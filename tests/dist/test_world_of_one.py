"""A group of one rank sends nothing: sums complete immediately, and gradients are the rank's own."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import paceline
from paceline.parallel import DDP
from paceline.parallel.channel import Channel
from paceline.transport import why_not
from tests.dist.wrapped import Net, average_alone, check_close, loss

BACKENDS = ["gloo", *(["paceline"] if not why_not() else [])]


class Unreachable:
    """A group that must not be called."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"{name} of a group of one rank was called")


def open_alone(world: paceline.World) -> dist.ProcessGroup:
    groups = [dist.new_group([rank], backend=world.backend) for rank in range(world.world_size)]
    group: dist.ProcessGroup = groups[world.rank]
    return group


def sum_alone(backend: str) -> None:
    with paceline.init(backend=backend, announce=None) as world:
        channel = Channel(open_alone(world), world.device)
        channel.group = Unreachable()  # type: ignore[assignment]
        for values in (torch.arange(5.0), torch.tensor([1 + 2j, 3j]), torch.tensor([3, 4])):
            tensor = values.clone()
            for work in (channel.start_sum(tensor), channel.start_sum(tensor, average=True)):
                assert work.is_completed() and work.is_success() and work.wait()
                assert work.get_future().wait()[0] is tensor
            channel.wait(channel.start_sum(tensor, tensor.clone()), "nothing")
            assert torch.equal(tensor, values)
        both = Channel(dist.group.WORLD, world.device)  # type: ignore[arg-type]
        tensor = torch.ones(3)
        both.wait(both.start_sum(tensor), "a sum")
        assert (tensor == 2).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sum_over_one_rank_finishes_when_it_starts(on_ranks, backend):
    on_ranks(2, sum_alone, backend)


def train_alone(backend: str, **options: object) -> None:
    with paceline.init(backend=backend, announce=None) as world:
        net = Net()
        model = DDP(net, process_group=open_alone(world), **options)
        first = StorageWeakRef(model._sync.reducer._flat.words.untyped_storage())
        for step in range(3):
            wanted = average_alone(net, lambda m, _, step=step: loss(m, world.rank, step), 1)
            model.zero_grad()
            loss(model, world.rank, step).backward()
            check_close(model, wanted, step)
            assert first.expired()  # the plan moved the gradients: nothing may keep the memory of the first step alive
        model.stop()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-5}, {"average": "samples"}], ids=str)
def test_gradients_of_a_single_rank_are_its_own(on_ranks, backend, options):
    on_ranks(2, functools.partial(train_alone, backend, **options))


class Decaying(nn.Module):
    """A model with an output that depends on a buffer, which every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale.mul_(0.9)


def go_back_twice() -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Decaying(), process_group=open_alone(world))
        output = model(torch.randn(2, 3)).square().mean()
        output.backward(retain_graph=True)
        output.backward()
        assert model.report().num_steps == 2


def test_a_changed_buffer_does_not_prevent_a_second_backward(on_ranks):
    on_ranks(2, go_back_twice)


def broadcast_from_one() -> None:
    with paceline.init(announce=None) as world:
        channel = Channel(dist.group.WORLD, world.device)  # type: ignore[arg-type]
        draw = torch.Generator().manual_seed(world.rank)
        tensors = [
            torch.randn(3, generator=draw), torch.randn(4, 5, generator=draw).t(), torch.empty(0),
            torch.randn(3, dtype=torch.complex64, generator=draw),
            torch.randn(3, dtype=torch.complex64, generator=draw).conj(),
            torch.randn(3, dtype=torch.complex64, generator=draw).conj().imag,
            torch.randn(9, generator=draw) > 0,
        ]  # fmt: skip
        wanted, versions = world.share([tensor.clone() for tensor in tensors])[1], [t._version for t in tensors]
        channel.broadcast(tensors, source=1)
        for tensor, value, version in zip(tensors, wanted, versions, strict=True):
            assert torch.equal(tensor, value)
            assert tensor._version == version or world.rank == 0  # the source was not modified


def test_a_source_of_values_is_not_changed(on_ranks):
    on_ranks(2, broadcast_from_one)
