"""The memory of a step on a GPU: totals equal those of torch's allocator at the start, the peak and the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it, which sets an environment variable
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.measure.recorder import record_trace
from paceline.measure.step_bench import Replica
from paceline.predict.memory_use import build_memory
from paceline.report.profiles import TraceResult, list_memory
from paceline.runtime.ranks.world import join_world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WIDTH, BATCH = 1024, 512
WEIGHTS, ROUNDED = 2 * WIDTH * WIDTH * 4, 4096  # bytes; the maximum added by rounding each block to 512 bytes


def build(wrapper: str) -> tuple[nn.Module, nn.Module, Any]:
    """Two layers without biases, a ReLU between them, momentum, and a step that creates its own inputs."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, False)).cuda()
    wrap = {"torch": DistributedDataParallel, "paceline": paceline.DDP, "none": lambda module: module}[wrapper]
    model, x = wrap(module), torch.randn(BATCH, WIDTH, device="cuda")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def step(phases: Any) -> None:
        phases.enter("forward")
        loss = model(x).square().mean()
        phases.enter("backward")
        loss.backward()
        phases.enter("optimizer")
        optimizer.step()
        optimizer.zero_grad()

    return model, module, step


@pytest.mark.parametrize(("wrapper", "backend"), [("none", "gloo"), ("torch", "nccl"), ("paceline", "nccl")])
def test_the_sum_is_the_allocators_and_the_categories_are_known(wrapper, backend):
    with join_world(backend, "cuda") as world:
        model, module, step = build(wrapper)
        counted: list[tuple[int, int, int]] = []

        def run(_: Any, phases: Any) -> None:
            torch.cuda.reset_peak_memory_stats()
            begin = torch.cuda.memory_allocated()
            step(phases)
            counted.append((begin, torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()))

        replica = Replica(model, module, next(module.parameters()).device, run)
        trace = record_trace(world, replica, 1, 2, ("memory",))
        assert trace.memory is not None
        rows = {row.category: row for row in list_memory(build_memory(trace.events, trace.memory))}
        if isinstance(model, paceline.DDP):
            model.stop()
    begin, peak, end = counted[-1]
    assert (rows["total"].begin_bytes, rows["total"].peak_bytes, rows["total"].end_bytes) == (begin, peak, end)
    assert WEIGHTS <= rows["parameters"].begin_bytes <= WEIGHTS + ROUNDED
    assert WEIGHTS <= rows["optimizer"].begin_bytes <= WEIGHTS + ROUNDED
    assert rows["data"].begin_bytes == BATCH * WIDTH * 4
    # ReLU's result and the output, which square() saves; the loss is small.
    activations = 2 * BATCH * WIDTH * 4
    assert activations <= rows["activations"].largest_bytes <= activations + ROUNDED
    assert rows["gradients"].largest_bytes + rows["buckets"].largest_bytes >= WEIGHTS
    assert rows["gradients"].end_bytes == 0 and (rows["buckets"].begin_bytes > 0) == (wrapper != "none")


def test_a_trace_of_a_module_on_a_gpu_says_what_makes_the_peak(tmp_path):
    module = build("none")[1]
    optimizer, x = torch.optim.Adam(module.parameters()), torch.randn(BATCH, WIDTH, device="cuda")

    def step(model: nn.Module) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(module)  # creates the optimizer's state and the libraries' workspaces
    held = torch.cuda.memory_allocated()
    result = paceline.trace(module, step, steps=1, warmup=1, memory=True, wrapper="none", out=tmp_path)
    # The copies used to restore values are not counted.
    assert abs(result.table("memory").rows_json()[-1]["begin_bytes"] - held) < WEIGHTS / 2
    assert isinstance(result, TraceResult) and "memory: peak " in result.text()
    assert result.folder is not None and (result.folder / "memory.png").exists()
    assert paceline.load_result(result.folder).table("memory").rows_json() == result.table("memory").rows_json()
