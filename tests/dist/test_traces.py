"""Traces of real ranks: recorded, merged and read, on both backends and with both wrappers."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.errors import ConfigError
from paceline.measure.traces import record_trace
from paceline.predict.overview import CATEGORIES, build_lanes, build_overview, find_lateness
from paceline.predict.traces import RankTrace, find_messages, find_steps, merge_traces
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

        def step() -> None:
            loss = model(torch.randn(4, 64)).square().mean()
            if world.rank == 1:
                time.sleep(LATE_S)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        begin_ns = time.time_ns()
        trace = record_trace(
            step, warmup=2, active=ACTIVE, rank=world.rank, world_size=world.world_size, model=model,
            extras=("memory",), meet=dist.barrier,
        )  # fmt: skip
        end_ns = time.time_ns()
        if wrapper == "paceline":
            assert model.report().times is not None  # the wrapper's own timeline is in its place again
        return trace, begin_ns, end_ns


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
        assert "aten::addmm" in {row.name for row in overview.operators} and overview.peak_bytes
    # Rank 0 stood in its message while rank 1 slept.
    assert build_overview(traces[0]).seconds("communication") > 0.8 * LATE_S
    lateness = find_lateness(traces)
    assert lateness is not None and (lateness.rank, lateness.share) == (1, 1.0)
    assert lateness.mean_s > 0.8 * LATE_S
    assert check_trace(merge_traces(traces)) == []
    lanes = build_lanes(traces)
    assert [len(lane.phases) for lane in lanes] == [3, 3]
    if wrapper == "paceline":
        buckets = lanes[0].buckets
        assert sum(bucket.num_bytes for bucket in buckets) >= 3 * (64 * 64 + 64) * 4
        assert all(b.ready_s <= b.launch_s <= b.done_s <= lanes[0].end_s for b in buckets)
        assert lanes[0].exposed_s > 0.8 * LATE_S


@pytest.mark.parametrize("asked", [{"warmup": 0}, {"active": 0}, {"extras": ("stack",)}])
def test_what_cannot_be_recorded_is_refused_before_any_step(asked: dict) -> None:
    def step() -> None:
        raise AssertionError("a step was taken")

    with pytest.raises(ConfigError):
        record_trace(step, **asked)


def record_alone() -> RankTrace:
    layer = torch.nn.Linear(4, 4)
    return record_trace(lambda: layer(torch.ones(2, 4)).sum().backward(), warmup=1, active=1, extras=("shapes",))


def test_one_process_alone_needs_no_group(on_ranks) -> None:
    (trace,) = on_ranks(1, record_alone)  # in a rank, for torch's profiler changes the environment of its process
    assert any(event.get("args", {}).get("Input Dims") for event in trace.events)
    assert build_overview(trace).world_size == 1
