"""An optimizer that steps each bucket when it is averaged against one that steps after backward: steps in turns.

    python benchmarks/overlap_optimizer.py [--model gpt2-mini] [--ranks 2] [--steps 60] [--backend shm]

Where ranks are launched (torchrun, or `limited_link.py` for a link of a given rate) it runs on them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

import paceline
from paceline.records.samples import compare_times
from paceline.training.build import load_sets
from paceline.training.loader import load_windows
from paceline.training.settings import TrainSettings
from paceline.workloads.data.sharding import EpochOrder
from paceline.workloads.models import compute_outcome
from paceline.workloads.registry import build_model

AFTER, INSIDE = "after backward", "bucket by bucket"


def measure(settings: TrainSettings, num_steps: int) -> str:
    """Collective: every rank must call this. The answer in words, from the slowest rank of each step."""
    with paceline.init(settings.backend, "cpu", announce=None) as world:
        data, _ = load_sets(settings, world)
        models, optimizers = {}, {}
        for kind in (AFTER, INSIDE):
            torch.manual_seed(0)
            net = build_model(settings.model, data.form, settings.model_options)
            models[kind] = paceline.DDP(net)
            optimizers[kind] = torch.optim.AdamW(net.parameters(), lr=1e-3)
        models[INSIDE].overlap_optimizer(optimizers[INSIDE])
        order = EpochOrder(len(data), settings.batch_size * world.world_size, 0, 0)
        window = next(load_windows(data, order, 0, world.rank, world.world_size, settings.batch_size, world.device))
        batch = window.batches[0].batch
        mine: dict[str, list[float]] = {kind: [] for kind in models}
        for number in range(num_steps + 5):
            for kind in (AFTER, INSIDE) if number % 2 else (INSIDE, AFTER):
                world.barrier()
                begin_s = time.perf_counter()
                compute_outcome(models[kind], batch, data.form).loss_sum.backward()
                optimizers[kind].step()
                optimizers[kind].zero_grad()
                if number >= 5:
                    mine[kind].append(time.perf_counter() - begin_s)
        all_of = world.share(mine)
        times = {kind: [max(row) for row in zip(*(rank[kind] for rank in all_of), strict=True)] for kind in models}
        pairs = zip(models[AFTER].parameters(), models[INSIDE].parameters(), strict=True)
        same = "equal to the bit" if all(torch.equal(a, b) for a, b in pairs) else "DIFFERENT"
        ratio = compare_times(times[INSIDE], times[AFTER])
        noise = "" if ratio.noise is None else f" +- {ratio.noise:.1%}"
        before, after = (statistics.median(times[kind]) * 1e3 for kind in (AFTER, INSIDE))
        where = f"{settings.model}, {world.world_size} ranks, {settings.backend}, torch {torch.__version__}"
        return f"{where}\nstep: {before:.1f} ms {AFTER}, {after:.1f} ms {INSIDE}: {ratio.value:.1%}{noise}; {same}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt2-mini")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--backend", default="shm")
    asked = parser.parse_args()
    settings = TrainSettings(
        model=asked.model, ranks=asked.ranks, backend=asked.backend, batch_size=4, samples=64, threads=1
    )
    if "RANK" in os.environ:
        answer = measure(settings, asked.steps)
        if os.environ["RANK"] == "0":
            print(answer)
    else:
        print(paceline.run_ranks(measure, asked.ranks, (settings, asked.steps))[0])


if __name__ == "__main__":
    main()
