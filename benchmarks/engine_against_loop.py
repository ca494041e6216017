"""Compare the engine of `bench allreduce` with a hand-written loop and print the exact ratio.

    python benchmarks/engine_against_loop.py [--sizes 4KiB,1MiB,16MiB] [--ranks 2] [--rounds 8] [--threads 1] [--json]

In every round, the engine and a plain loop around `dist.all_reduce` measure the same size on the same group, one after
the other. The loop has no barrier, check or fresh data. With more than one thread per rank, the engine's fill and check
wake OpenMP's threads and disturb the measurement, so `paceline bench` uses a single thread by default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import paceline
from paceline.measure.collectives import Pattern
from paceline.measure.engine import Timed, time_interleaved
from paceline.records.samples import quantile
from paceline.units import format_bytes, format_ms, parse_sizes


def time_loop(vector: torch.Tensor, iters: int) -> list[float]:
    """Time all-reduces in the hand-written loop."""
    seconds = []
    dist.barrier()
    for _ in range(iters):
        start_s = time.perf_counter()
        dist.all_reduce(vector)
        seconds.append(time.perf_counter() - start_s)
    return seconds


class AllReduce(Timed):
    """An all-reduce of the loop's vector, for the engine to fill, time and check."""

    def __init__(self, vector: torch.Tensor, world: paceline.World) -> None:
        self.vector, self.rank, self.device, self.num_elements = vector, world.rank, vector.device, vector.numel()
        self.pattern = Pattern(world.world_size, vector.dtype, "sum", vector.device)

    def prepare(self, repetition: int) -> None:
        self.pattern.fill(self.vector, self.rank, repetition)

    def call(self) -> None:
        dist.all_reduce(self.vector)

    def check(self, repetition: int) -> int:
        return self.pattern.count_wrong(self.vector, repetition)


def time_engine(vector: torch.Tensor, iters: int, world: paceline.World) -> list[float]:
    """Time the same number of repetitions in the engine, with its barrier, fresh data and check."""
    timed = AllReduce(vector, world)
    time_interleaved([timed], world.control, iters, 0)
    return timed.timing.seconds


def compare(sizes: tuple[int, ...], rounds: int, iters: int, threads: int = 1) -> list[dict[str, Any]]:
    """Compare medians over all rounds, with the slowest rank per repetition. Collective: call on every rank."""
    rows = []
    with paceline.init("gloo", "cpu", threads=threads, announce=None) as world:
        for size in sizes:
            vector = torch.zeros(size // 4)
            time_loop(vector, 3)
            engine, loop = [], []
            for _ in range(rounds):
                engine.append(world.share(time_engine(vector, iters, world)))
                vector.zero_()
                loop.append(world.share(time_loop(vector, iters)))
            reduced = {
                name: [[max(row) for row in zip(*ranks, strict=True)] for ranks in rounds_of_ranks]
                for name, rounds_of_ranks in (("engine", engine), ("loop", loop))
            }
            pairs = zip(reduced["engine"], reduced["loop"], strict=True)
            ratios = [statistics.median(e) / statistics.median(b) for e, b in pairs]
            rows.append({
                "num_bytes": size,
                "world_size": world.world_size,
                "engine_median_s": statistics.median(t for one in reduced["engine"] for t in one),
                "loop_median_s": statistics.median(t for one in reduced["loop"] for t in one),
                "ratio": statistics.median(ratios),
                "ratio_p10": quantile(ratios, 0.1),
                "ratio_p90": quantile(ratios, 0.9),
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4KiB,1MiB,16MiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1, help="torch threads per rank")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    job = (parse_sizes(options.sizes), options.rounds, options.iters, options.threads)
    rows = paceline.run_ranks(compare, options.ranks, job, timeout_s=600)[0]
    if options.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    print(f"{'size':>10} {'engine (ms)':>12} {'loop (ms)':>12} {'engine / loop':>14}  p10 to p90 over rounds")
    for row in rows:
        times = f"{format_ms(row['engine_median_s']):>12} {format_ms(row['loop_median_s']):>12}"
        spread = f"{row['ratio_p10']:.2f} to {row['ratio_p90']:.2f}"
        print(f"{format_bytes(row['num_bytes']):>10} {times} {row['ratio']:>14.3f}  {spread}")


if __name__ == "__main__":
    main()
