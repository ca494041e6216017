#!/usr/bin/env python
"""Compare two-rank collectives over a link: gloo's, ours, and an all-reduce of the same size.

    benchmarks/crossing.py [--rate 1gbit] [--rounds 20]

The ranks run in network namespaces of this machine, joined by a link of that rate (`limited_link.py`; needs root, `ip`
and `tc`). All variants alternate. In each round, one rank is a millisecond late, as in a training step. Times are
medians for the slower rank.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from limited_link import run_again

import paceline
from paceline.parallel.channel import start_exchange
from paceline.units import MIB, format_bytes

SIZES = (MIB // 4, MIB, 4 * MIB, 8 * MIB)
LATE_S = 0.001


def start_own(kind: str, rows: torch.Tensor, given: torch.Tensor, group: Any) -> Any:
    into, flat = rows.view(-1), given.view(-1)
    return group._allgather_base(into, flat) if kind == "all-gather" else group.alltoall_base(into, flat, [], [])


def measure(rounds: int) -> str:
    """Measure all sizes and return one line per size, on rank 0. Collective: call on every rank."""
    with paceline.init("gloo", "cpu", announce=None) as world:
        group, lines = dist.group.WORLD, []
        for size in SIZES:
            row = torch.zeros(size, dtype=torch.uint8)
            pair, rows, numbers = row.repeat(2, 1), row.repeat(2, 1), torch.zeros(size // 4)
            ways: dict[str, Callable[[], Any]] = {"all-reduce": partial(group.allreduce, [numbers])}
            for kind, given in (("all-to-all", pair), ("all-gather", row)):
                ways[f"gloo's {kind}"] = partial(start_own, kind, rows, given, group)
                ways[f"our {kind}"] = partial(start_exchange, rows, given, group)
            mine: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(rounds + 1):
                for way, start in ways.items():
                    world.barrier()
                    time.sleep(LATE_S * (number % 2 == world.rank))
                    begin_s = time.perf_counter()
                    start().wait()
                    mine[way].append(time.perf_counter() - begin_s)
            shared, medians = world.share(mine), []
            for way in ways:
                times = zip(*(found[way][1:] for found in shared), strict=True)
                medians.append(f"{way} {1e3 * statistics.median(map(max, times)):.1f}")
            lines.append(f"{format_bytes(size)} each way (ms): {', '.join(medians)}")
        return "\n".join(lines) if world.rank == 0 else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.is_rank:
        run_again(asked.rate)
    if answer := measure(asked.rounds):
        print(answer)


if __name__ == "__main__":
    main()
