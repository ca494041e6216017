"""`profile --` and `tune --` of CUDA programs that never wait for their GPU: the times are those of the GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline
from paceline.records.steps import RACED, StepRecord
from paceline.report.observed import AttachedResult

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# As a user would write it, except that NCCL is told that each rank has its own host, because all ranks share one GPU.
PROGRAM = """
import argparse, json, os, statistics, time

rank = int(os.environ.get("RANK", 0))
os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--synchronize", default="", help="time each step by the host's clock, and write the median here")
args = parser.parse_args()
torch.cuda.set_device(0)
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]
model = torch.nn.Sequential(*layers).cuda()
if args.backend:
    dist.init_process_group(args.backend)
    model = DistributedDataParallel(model, bucket_cap_mb=20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs, times = torch.randn(16384, 2048, device="cuda"), []
for _ in range(args.steps):
    begin_s = time.perf_counter()
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    if args.synchronize:
        torch.cuda.synchronize()
    times.append(time.perf_counter() - begin_s)
torch.cuda.synchronize()
if args.synchronize and rank == 0:
    with open(args.synchronize, "w") as file:
        json.dump(statistics.median(times[8:]), file)
if args.backend:
    dist.destroy_process_group()
"""
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    """The file of the program, in an environment where torch finds our entry point, installed or not."""
    found = importlib.metadata.entry_points(group="torch.backends")
    paths = [str(Path(paceline.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    if not any(point.value.startswith("paceline.autoload") for point in found):
        about = tmp_path / "site" / "paceline_entry-0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline-entry\nVersion: 0\n")
        (about / "entry_points.txt").write_text("[torch.backends]\npaceline_autoload = paceline.autoload:start\n")
        paths.insert(0, str(about.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    return file


def build_command(program: Path, backend: str, *more: str) -> list[str]:
    launcher = TORCHRUN if backend else []
    return [sys.executable, *launcher, str(program), *(["--backend", backend] if backend else []), *more]


def time_synchronized(program: Path, backend: str) -> float:
    """The median step of the same program, unattached, when it waits for the GPU after each step."""
    file = program.with_name("step.json")
    command = build_command(program, backend, "--steps", "40", "--synchronize", str(file))
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return float(json.loads(file.read_text()))


def expect_no_doubt_about_times(result: AttachedResult) -> None:
    """Warnings may name other work on the machine, but not unstable steps."""
    kinds = [doubt.kind for doubt in result.doubts]
    assert not {"unstable", "drifting"} & set(kinds), result.warnings
    assert not [text for text in result.warnings if "unstable" in text], result.warnings
    if result.buckets is not None:
        # Work from before the recording would make its first step many times as long as the others.
        assert result.buckets.traced.spread < 0.5


@pytest.mark.parametrize("backend", ["", "gloo", "nccl"])
def test_the_step_of_a_program_that_never_waits_is_that_of_the_gpu(program, backend):
    result = paceline.attach(build_command(program, backend), steps=48, stop=True, progress=False)
    assert result.failure == "" and result.steps.device == "cuda"
    assert result.steps.timing.num_ranks == (2 if backend else 1) and result.steps.timing.count >= 30
    assert result.steps.host is not None
    if backend != "gloo":  # gloo waits for its messages on the host
        # otherwise this test is meaningless: the host did not run ahead
        assert result.steps.host.p10_s < result.step_s / 2
    expect_no_doubt_about_times(result)
    assert 0.5 < result.step_s / time_synchronized(program, backend) < 2
    if backend:
        assert result.buckets is not None, result.warnings
        traced = result.buckets.traced
        assert (traced.device, traced.backend, traced.world_size) == ("cuda", backend, 2)
        assert 0.5 < traced.step_s / result.step_s < 2 and len(traced.steps) >= 6
        assert all(0 < step.backward_s <= step.over_s < step.step_s for step in traced.steps)


def test_the_program_continues_while_the_gpu_is_behind_and_times_arrive_later(program):
    command = build_command(program, "nccl", "--steps", "60")
    result = paceline.attach(command, steps=24, progress=False)
    assert result.failure == "" and not any("error" in text for text in result.warnings)
    assert result.steps.timing.count >= 8
    expect_no_doubt_about_times(result)


def test_plans_are_compared_by_gpu_times(program):
    result = paceline.attach(build_command(program, "nccl"), race=True, steps=24, caps="4MiB", progress=False)
    assert result.race is not None and result.race.num_rounds == 14, result.warnings
    now, other = result.table("race").rows_json()
    assert other["num_buckets"] > now["num_buckets"] and result.verdict in ("use", "default", "flat", "undecided")
    for record in result.only(StepRecord):
        assert record.host is not None
        if record.note == RACED:
            assert 0.2 < record.timing.median_s / result.step_s < 5
    expect_no_doubt_about_times(result)
