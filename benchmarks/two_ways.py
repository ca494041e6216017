#!/usr/bin/env python
"""Measure the cost of a strategy: alternate steps with and without it.

    benchmarks/two_ways.py STRATEGY [--model gpt2-mini] [--ranks 2] [--steps 60] [--backend shm] [--rate 1gbit]

`--rate` puts the two ranks into network namespaces of this machine, joined by a link of that rate (`limited_link.py`;
needs root, `ip` and `tc`).
Times are medians for the slowest rank; ratios are medians of the ratios within each round, with their intervals.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
from limited_link import run_again

import paceline
from paceline.records.samples import compare_times
from paceline.training.build import load_sets
from paceline.training.loader import load_windows
from paceline.training.train_settings import TrainSettings
from paceline.workloads.data.sharding import EpochOrder
from paceline.workloads.models import compute_outcome
from paceline.workloads.registry import build_model

WARMUP = 5
PARTS = ("forward and backward", "the optimizer", "the step")


def build(strategy: str, net: torch.nn.Module) -> tuple[paceline.DDP, Any]:
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = paceline.DDP(net, strategy=strategy)
    return model, model.shard_optimizer(optimizer) if strategy == "zero1" else optimizer


def measure(settings: TrainSettings, strategy: str, num_steps: int) -> str:
    """Measure the strategy and return the result as text. Collective: call on every rank."""
    ways = ("dense", strategy)
    with paceline.init(settings.backend, "cpu", announce=None) as world:
        (data, _), _ = load_sets(settings, world)
        models, optimizers = {}, {}
        for way in ways:
            torch.manual_seed(0)
            net = build_model(settings.model, data.form, settings.model_options)
            models[way], optimizers[way] = build(way, net)
        order = EpochOrder(len(data), settings.batch_size * world.world_size, 0, 0)
        window = next(load_windows(data, order, 0, world.rank, world.world_size, settings.batch_size, world.device))
        batch = window.batches[0].batch
        mine: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
        for number in range(num_steps + WARMUP):
            for way in ways if number % 2 else reversed(ways):
                world.barrier()
                begin_s = time.perf_counter()
                compute_outcome(models[way], batch, data.form).loss_sum.backward()
                middle_s = time.perf_counter()
                optimizers[way].step()
                optimizers[way].zero_grad()
                end_s = time.perf_counter()
                if number >= WARMUP:
                    mine[way].append((middle_s - begin_s, end_s - middle_s, end_s - begin_s))
        # The slowest rank determines the time of a step.
        shared, times = world.share(mine), dict[str, list[list[float]]]()
        for way in ways:
            rounds = zip(*(found[way] for found in shared), strict=True)
            times[way] = [[max(part) for part in zip(*ranks, strict=True)] for ranks in rounds]
        lines = [f"{settings.model}, {world.world_size} ranks, {settings.backend}, torch {torch.__version__}"]
        for place, part in enumerate(PARTS):
            before, after = ([one[place] for one in times[way]] for way in ways)
            ratio = compare_times(after, before)
            noise = "" if ratio.noise is None else f" ± {ratio.noise:.1%}"
            medians = [
                f"{statistics.median(found) * 1e3:.2f} ms {way}"
                for found, way in zip((before, after), ways, strict=True)
            ]
            lines.append(f"{part}: {', '.join(medians)}: {ratio.value:.1%}{noise}")
        held = [sum(v.nbytes for state in optimizers[way].state.values() for v in state.values()) for way in ways]
        lines.append(f"optimizer state on this rank: {held[1] / held[0]:.1%} of {held[0] / 2**20:.1f} MiB")
        is_equal = all(map(torch.equal, *(list(models[way].module.parameters()) for way in ways)))
        lines.append(f"parameters are {'bit-identical' if is_equal else 'different'}")
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy")
    parser.add_argument("--model", default="gpt2-mini")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--backend", default="shm")
    parser.add_argument("--rate", help="rate of a link between two hosts, such as 1gbit; implies --backend gloo")
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    settings = TrainSettings(
        model=asked.model, ranks=asked.ranks, backend="gloo" if asked.rate else asked.backend,
        batch_size=asked.batch_size, samples=64, threads=1, hidden=asked.hidden,
    )  # fmt: skip
    if asked.is_rank:
        torch.set_num_threads(1)
        answer = measure(settings, asked.strategy, asked.steps)
        if os.environ["RANK"] == "0":
            print(answer)
    elif asked.rate:
        run_again(asked.rate)
    else:
        print(paceline.run_ranks(measure, asked.ranks, (settings, asked.strategy, asked.steps))[0])


if __name__ == "__main__":
    main()
