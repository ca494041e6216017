"""Faults of NCCL ranks that share one GPU: identified as on gloo, and followed by a run that continues.

Processes take turns on the GPU here. PACELINE_TEST_MPS=1 uses MPS instead, which is faster, but leaves the other
clients of its server in an undefined state when one of them is killed in a kernel.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline import machine
from paceline.errors import CollectiveError
from paceline.parallel.channel import Channel
from paceline.runtime.ranks import world
from paceline.runtime.ranks.launch import RankPool
from paceline.runtime.ranks.world import init
from paceline.studies.fault_trials import Trial, measure_fault
from tests.dist.test_recovery import check_equal, check_samples, run

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a GPU and a build of torch with NCCL"
)
# A model with gradients that do not depend on a GPU's summation order.
DENSE = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3072, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
    )
"""
ON_NCCL = {"backend": "nccl", "device": "cuda"}


@pytest.fixture(autouse=True)
def _shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {machine.SHARE_GPUS: "1"}
    if os.environ.get("PACELINE_TEST_MPS", "0") != "0":
        variables |= request.getfixturevalue("shared_gpu").variables
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("fault", ["kill", "stop", "exception", "endless-kernel", "extra-collective"])
def test_the_rank_at_fault_is_named(fault, ranks):
    record = measure_fault(Trial(fault, "train", "nccl", ranks, limit_s=60.0, device="cuda"))
    assert record.is_right and not record.left_over and record.ended_s is not None, record


@pytest.mark.parametrize("fault", ["kill", "stop", "exception", "endless-kernel", "extra-collective"])
def test_the_same_in_a_script(fault):
    record = measure_fault(Trial(fault, "script", "nccl", limit_s=60.0, device="cuda"))
    assert record.is_right and not record.left_over and record.ended_s is not None, record


@pytest.mark.parametrize(
    ("policy", "fault", "ranks"),
    [
        ("restart", "kill", 2), ("spare", "kill", 2), ("spare", "stop", 4), ("shrink", "kill", 4),
        ("shrink", "endless-kernel", 2), ("spare", "extra-collective", 2),
    ],
)  # fmt: skip
def test_the_run_continues(policy, fault, ranks):
    record = measure_fault(Trial(fault, "train", "nccl", ranks, limit_s=120.0, policy=policy, device="cuda"))
    assert record.is_right and not record.left_over and record.policy == policy, record
    assert record.recovered_s is not None and (policy == "restart" or record.steps_lost == 0), record


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(machine.SHARE_GPUS, "1")
        assert run(folder, "restart", [], source=DENSE, **ON_NCCL) == []
    return folder


@pytest.mark.parametrize("place", ["begin", "optimizer"])
def test_the_weights_equal_those_of_a_run_without_a_fault(undisturbed, tmp_path, place):
    (found,) = run(tmp_path / "run", "spare", [(11, 1, "kill", place)], source=DENSE, **ON_NCCL)
    assert (found.rank, found.policy, found.steps_lost, found.ranks_after) == (1, "spare", 0, 2)
    check_equal(tmp_path / "run", undisturbed)
    check_samples(tmp_path / "run")


def abort_and_go_on(path: str) -> list[Any]:
    """Rank 0 waits for a sum that rank 1 never starts, and is told to abort. Then both continue in a new group."""
    found: list[Any] = []
    with init(**ON_NCCL, announce=None) as first:
        channel, ones = Channel(dist.group.WORLD, first.device), torch.ones(1 << 20, device=first.device)
        channel.wait(channel.start_sum(ones), "a sum that works")
        found.append(ones[0].item())
        if first.rank == 0:
            found.append(wait_for_nobody(channel, ones))
        first.barrier()
        world.abandon()
    assert not dist.is_initialized()
    dist.init_process_group("nccl", store=dist.FileStore(path, 2), rank=first.rank, world_size=2)
    dist.all_reduce(ones.fill_(2.0))
    square = torch.ones(8, 8, device=first.device)
    found += [ones.sum().item(), (square @ square).sum().item()]
    dist.destroy_process_group()
    return found


def wait_for_nobody(channel: Channel, ones: torch.Tensor) -> tuple[str, bool]:
    work = channel.start_sum(ones)
    told = threading.Timer(0.5, world.abort_collectives)  # as the monitor does
    told.start()
    work.wait()
    torch.cuda.current_stream().synchronize()  # until the abort
    told.join()
    try:
        channel.settle()
    except CollectiveError as error:
        return error.code, world.has_lost_rank()
    return "", world.has_lost_rank()


def test_after_an_abort_the_gpu_and_new_communicators_work(tmp_path):
    with RankPool(2) as pool:
        found = pool.run(abort_and_go_on, (str(tmp_path / "store"),), timeout_s=120.0)
    expected = float(4 << 20)
    assert found == [[2.0, ("peer-lost", True), expected, 512.0], [2.0, expected, 512.0]]
