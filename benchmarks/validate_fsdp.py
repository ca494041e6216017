#!/usr/bin/env python
"""Compare predicted and measured steps of fully sharded data parallelism, next to torch's DistributedDataParallel.

    benchmarks/validate_fsdp.py [--backend gloo|nccl] [--ranks 2,4] [--models gpt2-mini,...] [--rounds N]

Measures for each number of ranks: an all-reduce sweep, a profile of one rank, and interleaved steps without a wrapper,
with torch's DistributedDataParallel, and with torch's `fully_shard` (one unit per block). The predictions use only the
sweep and the profile. For NCCL ranks that share a GPU, set PACELINE_SHARE_GPUS=1 and start CUDA MPS.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.predict.curves import DRAWS
from paceline.predict.fully_sharded import Blocks, FullySharded
from paceline.predict.job import draw_jobs
from paceline.predict.whatif import simulate_what_if
from paceline.report.table import Column, Table

SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"


class Stack(nn.Module):
    """Residual blocks of two matrices each, with most of the parameters, as in a transformer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def build(width: int, layers: int, samples: int, device: str) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    torch.manual_seed(0)
    module = Stack(width, layers).to(device)
    inputs = torch.randn(samples, width, device=device)
    optimizers: dict[nn.Module, torch.optim.Optimizer] = {}

    def step(model: nn.Module) -> None:
        if model not in optimizers:
            optimizers[model] = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        model(inputs).square().mean().backward()
        optimizers[model].step()
        optimizers[model].zero_grad()

    return module, step


def shard(module: nn.Module, mesh: object) -> nn.Module:
    for block in module.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def measure(asked: tuple[int, int, int], backend: str, device: str, rounds: int) -> dict[str, list[float]]:
    """Measure the seconds of each wrapper's steps on the slowest rank."""
    with paceline.init(backend, device, announce=None, threads=1) as world:
        mesh = init_device_mesh(world.device.type, (world.world_size,))
        wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
            "none": lambda module: module,
            "ddp": DistributedDataParallel,
            "fsdp": lambda module: shard(module, mesh),
        }
        jobs = {}
        for name, wrap in wraps.items():
            module, step = build(*asked, str(world.device))
            jobs[name] = wrap(module), step
        times: dict[str, list[float]] = {name: [] for name in jobs}
        for number in range(rounds + 3):
            for name, (model, step) in jobs.items():
                dist.barrier()
                if world.device.type == "cuda":
                    torch.cuda.synchronize()
                begin_s = time.perf_counter()
                step(model)
                if world.device.type == "cuda":
                    torch.cuda.synchronize()
                took_s = max(world.share(time.perf_counter() - begin_s))
                if number >= 3:
                    times[name].append(took_s)
        return times


def profile_alone(asked: tuple[int, int, int], device: str) -> paceline.Result:
    torch.set_num_threads(1)
    return paceline.profile(*build(*asked, device), kind="layers", device=device, threads=1, progress=False)


def predict(profile: paceline.Result, sweep: paceline.Result, ranks: int) -> dict[str, tuple[float, float, float]]:
    found = paceline.predict(profile, allreduce=sweep, ranks=ranks)
    blocks = Blocks.read(found.profile)
    rows = {"ddp": found.rows[0]}
    draws = draw_jobs(found.profile, found.job, DRAWS)
    (rows["fsdp"],) = simulate_what_if(
        found.job, draws, found.fabrics[0], [ranks], **found.scenario,
        send=lambda count, *_: FullySharded(blocks, count),
    )  # fmt: skip
    return {name: (row.step_s, row.low_s, row.high_s) for name, row in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sizes", default="256x4x64,512x6x64,1024x4x32", help="width x layers x samples")
    given = parser.parse_args()
    device = "cuda" if given.backend == "nccl" else "cpu"
    rows = []
    for ranks in map(int, given.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            sweep = paceline.bench.allreduce(
                ranks=ranks, backend=given.backend, device=device, sizes=SIZES, out=folder, progress=False
            )
            for size in given.sizes.split(","):
                width, layers, samples = map(int, size.split("x"))
                asked = width, layers, samples
                (profile,) = paceline.run_ranks(profile_alone, 1, (asked, device))
                times = paceline.run_ranks(measure, ranks, (asked, given.backend, device, given.rounds))[0]
                for name, (step_s, low_s, high_s) in predict(profile, sweep, ranks).items():
                    measured_s = statistics.median(times[name])
                    rows.append(
                        (size, ranks, name, measured_s, step_s, low_s, high_s, statistics.median(times["none"]))
                    )
    columns = (
        Column("width x layers x samples", "0", is_key=True), Column("ranks", "1", "count", is_key=True),
        Column("wrapper", "2", is_key=True), Column("without messages", "7", "ms"), Column("measured", "3", "ms"),
        Column("predicted", "4", "ms"), Column("90 % low", "5", "ms"), Column("90 % high", "6", "ms"),
        Column("error", lambda row: row[4] / row[3] - 1, "{:+.1%}".format),
        Column("inside", lambda row: row[5] <= row[3] <= row[6], "yes"),
    )  # fmt: skip
    print(Table("fsdp", f"fully sharded data parallel on {given.backend}", columns, rows).markdown())


if __name__ == "__main__":
    main()
