"""Traces of real ranks: recorded, merged and read, on both backends and with both wrappers."""

from __future__ import annotations

import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.measure.recorder import record_trace
from paceline.measure.step_bench import Replica
from paceline.predict.memory_use import MemoryUse
from paceline.predict.traces import (
    CATEGORIES,
    RankTrace,
    build_lanes,
    build_overview,
    find_lateness,
    find_messages,
    find_steps,
    merge_traces,
)
from paceline.report.profiles import list_memory
from tests.conftest import BACKEND
from tests.unit.made_traces import check_trace

ACTIVE = 2
LATE_S = 0.2


def record_here(backend: str, wrapper: str) -> tuple[RankTrace, int, int]:
    """A trace of this rank, and the Unix time before and after it. Rank 1 is late in every backward."""
    with paceline.init(backend, announce=None) as world:
        torch.manual_seed(world.rank)
        module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
        model = DistributedDataParallel(module) if wrapper == "torch" else paceline.DataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run(given, phases) -> None:
            phases.enter("forward")
            loss = model(torch.randn(4, 64)).square().mean()
            if world.rank == 1:
                time.sleep(LATE_S)
            phases.enter("backward")
            loss.backward()
            phases.enter("optimizer")
            optimizer.step()
            optimizer.zero_grad()

        begin_ns = time.time_ns()
        trace = record_trace(world, Replica(model, module, world.device, run), 2, ACTIVE, ("memory",))
        end_ns = time.time_ns()
        if wrapper == "paceline":
            assert model.report().times is not None  # the wrapper's own timeline has been restored
        return trace, begin_ns, end_ns


def check_memory(memory: MemoryUse, backend: str, wrapper: str) -> None:
    rows, num_bytes = {row.category: row for row in list_memory(memory)}, 3 * (64 * 64 + 64) * 4
    assert rows["parameters"].begin_bytes == rows["parameters"].end_bytes == num_bytes
    # A wrapper's buckets also exist between steps: torch's hold exactly the gradients, ours also control words.
    assert num_bytes <= rows["buckets"].begin_bytes == rows["buckets"].end_bytes
    assert wrapper == "paceline" or rows["buckets"].begin_bytes == num_bytes
    # Gradients exist before they are copied into buckets; torch's wrapper keeps its averages next to them.
    assert 0 < rows["gradients"].largest_bytes <= num_bytes and rows["gradients"].end_bytes == 0
    assert wrapper == "paceline" or rows["gradients"].largest_bytes == num_bytes
    assert rows["activations"].largest_bytes >= 3 * 4 * 64 * 4 and rows["activations"].end_bytes <= 8
    assert memory.peak_phase == "backward" and memory.operator.startswith("aten::")
    assert [phase.name for phase in memory.phases] == ["data", "forward", "backward", "optimizer"]


@pytest.mark.parametrize(
    ("backend", "wrapper"), [("gloo", "torch"), *dict.fromkeys([("gloo", "paceline"), (BACKEND, "paceline")])]
)
def test_two_ranks_in_one_trace(on_ranks, backend: str, wrapper: str) -> None:
    answers = on_ranks(2, record_here, backend, wrapper)
    traces = [trace for trace, _, _ in answers]
    for rank, (trace, begin_ns, end_ns) in enumerate(answers):
        assert (trace.rank, trace.world_size, trace.device) == (rank, 2, "cpu")
        steps = find_steps(trace.events)
        assert [step["name"] for step in steps] == [f"step {number}" for number in range(ACTIVE)]
        for event in [*steps, *find_messages(trace.events)]:
            moment_ns = trace.origin_ns + event["ts"] * 1e3
            assert begin_ns <= moment_ns and moment_ns + event["dur"] * 1e3 <= end_ns
        overview = build_overview(trace)
        assert sum(overview.share(name) for name in CATEGORIES) == pytest.approx(1)
        assert overview.message_s > 0 and {"forward", "backward", "optimizer"} <= overview.phases_s.keys()
        assert "aten::addmm" in {row.name for row in overview.operators} and overview.memory
        check_memory(overview.memory, backend, wrapper)
    # Rank 0 waited in its message while rank 1 slept, unless the machine is busy.
    assert build_overview(traces[0]).seconds("communication") > 0
    lateness = find_lateness(traces)
    assert lateness is None or lateness.mean_s > 0
    assert check_trace(merge_traces(traces)) == []
    lanes = build_lanes(traces)
    assert [len(lane.phases) for lane in lanes] == [3, 3]
    if wrapper == "paceline":
        buckets = lanes[0].buckets
        assert sum(bucket.num_bytes for bucket in buckets) >= 3 * (64 * 64 + 64) * 4
        assert all(b.ready_s <= b.launch_s <= b.done_s <= lanes[0].end_s for b in buckets)
        assert lanes[0].exposed_s > 0
