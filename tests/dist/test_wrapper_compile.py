"""torch.compile of a block, of the model inside the wrapper, and of the wrapper itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import paceline
from paceline.parallel import DDP
from paceline.training.build import _compile_blocks
from paceline.workloads.models import ResNet18
from tests.dist.wrapped import REDUCERS, STEPS, Net, average_alone, check, describe, loss


def compile_parts(kind: str, reducers: tuple[dict[str, Any], ...], backend: str = "aot_eager") -> None:
    compile_ = functools.partial(torch.compile, backend=backend)
    with paceline.init(announce=None) as world:
        for reducer in reducers:
            torch._dynamo.reset()
            net = plain = Net()
            if kind == "block":
                net.left, net.last = compile_(net.left), compile_(net.last)
            model = DDP(compile_(net) if kind == "model" else net, **reducer)
            outside = compile_(model) if kind == "wrapper" else model
            for step in range(STEPS):
                model.zero_grad()
                # The compiled module's parameters are those of the plain one, under the same or longer names.
                wanted = average_alone(plain, functools.partial(loss, step=step), world.world_size)
                loss(outside, world.rank, step).backward()
                check(world, plain, wanted, (reducer, step))


@pytest.mark.parametrize(
    ("kind", "reducers"),
    [
        ("model", REDUCERS[2:]),
        pytest.param("model", REDUCERS[1:2], marks=pytest.mark.slow),
        pytest.param("block", REDUCERS[1:], marks=pytest.mark.slow),
        pytest.param("wrapper", REDUCERS[1:], marks=pytest.mark.slow),
    ],
)
def test_compiled_gradients_are_averaged(on_ranks, kind, reducers):
    on_ranks(2, compile_parts, kind, reducers)


class Small(torch.nn.Module):
    """Dynamo does not compile a torch layer by itself, but it compiles a program's code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def compile_around(kind: str) -> dict[str, tuple[list[int], list[float]]]:
    """The sizes of the graphs that torch.compile creates for a program around the wrapper, and the losses."""
    found = {}
    with paceline.init(announce=None) as world:
        for wrap in (DDP, torch.nn.parallel.DistributedDataParallel):
            torch._dynamo.reset()
            sizes: list[int] = []

            def note(graph: torch.fx.GraphModule, inputs: object, sizes: list[int] = sizes) -> object:
                sizes.append(len(graph.graph.nodes))
                return graph.forward

            torch.manual_seed(0)
            model = wrap(Small())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            outside = torch.compile(model, backend=note) if kind == "wrapper" else model

            def step(x: torch.Tensor, model: torch.nn.Module = outside) -> torch.Tensor:
                value = model(x).square().mean()
                value.backward()
                return value

            take = torch.compile(step, backend=note) if kind == "step" else step
            losses = []
            for number in range(4):
                optimizer.zero_grad()
                losses.append(take(torch.full((3, 4), 0.1 * (number + world.rank))).item())
                optimizer.step()
            found[wrap.__name__] = sizes, losses
    return found


@pytest.mark.parametrize("kind", ["wrapper", pytest.param("step", marks=pytest.mark.slow)])
def test_the_compiler_makes_the_same_graphs_as_with_torchs_wrapper(on_ranks, kind):
    (ours, losses), (theirs, others) = on_ranks(1, compile_around, kind)[0].values()
    assert ours == theirs and ours and losses == pytest.approx(others, rel=1e-6)


def compile_in_buckets() -> list[int]:
    counts = []
    with paceline.init(announce=None) as world:
        for cap_mb in (25, 1, 1e-4):
            torch._dynamo.reset()
            graphs = []

            def count(graph: torch.fx.GraphModule, inputs: object, graphs: list = graphs) -> object:
                graphs.append(graph)
                return graph.forward

            # Layers of 1 MiB, the smallest size that torch splits.
            net = torch.nn.Sequential(torch.nn.Linear(4, 512), *(torch.nn.Linear(512, 512) for _ in range(3)))
            model = DDP(torch.compile(net, backend=count), bucket_cap_mb=cap_mb)
            for step in range(2):
                model.zero_grad()
                loss(model, world.rank, step).backward()
            counts.append(len(graphs))
    return counts


@pytest.mark.slow
def test_a_compiled_model_is_split_at_the_buckets(on_ranks):
    for few, several, unsplit in on_ranks(2, compile_in_buckets):
        assert unsplit == 1 < few < several


def compile_and_break() -> tuple[str, str]:
    with paceline.init(announce=None) as world:
        model = DDP(torch.compile(Net(), backend="eager"))
        for step in range(2):
            model.zero_grad()
            loss(model, world.rank, step).backward()
        model.zero_grad()
        try:
            loss(model, world.rank, use="left" if world.rank else "left right").backward()
        except paceline.CollectiveError as error:
            return describe(error)
        return "", ""


def test_an_unused_parameter_is_named_where_the_model_is_compiled(on_ranks):
    first, second = on_ranks(2, compile_and_break)
    assert first == second
    assert first[0] == "CollectiveError missing-gradient"
    assert "right.weight on rank 1" in first[1]


def compile_alike() -> dict[str, int]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    module = ResNet18()
    _compile_blocks(module, backend="eager")
    for is_training in (True, False):
        for size in (4, 3, 2):
            module.train(is_training)(torch.zeros(size, 3, 8, 8))
    return dict(counters["frames"])


@pytest.mark.slow
def test_blocks_that_are_alike_are_all_compiled(on_ranks):
    (frames,) = on_ranks(1, compile_alike)
    assert frames["ok"] == frames["total"] > 16  # ten blocks, for training and for evaluation
