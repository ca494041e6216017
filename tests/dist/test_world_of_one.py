"""A group of one rank sends nothing: its sums are what they are, over when they start, and gradients are the rank's."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
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
def test_a_sum_of_one_is_over_when_it_starts(on_ranks, backend):
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
            assert first.expired()  # the plan moved the gradients: nothing may hold the memory of the first step
        model.stop()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-5}, {"average": "samples"}], ids=str)
def test_gradients_of_one_are_its_own(on_ranks, backend, options):
    on_ranks(2, functools.partial(train_alone, backend, **options))
