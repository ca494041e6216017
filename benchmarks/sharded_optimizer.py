"""The optimizer of zero1 against the unsharded one: steps of both in turns, on ranks that share memory.

python benchmarks/sharded_optimizer.py [--model gpt2-mini] [--ranks 2] [--steps 60] [--backend shm]
"""

from __future__ import annotations

import argparse
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

PLAIN, SHARDED = "unsharded", "zero1"
Times = dict[str, list[float]]


def measure(settings: TrainSettings, num_steps: int) -> tuple[Times, Times, dict[str, int], bool]:
    """Seconds of the optimizer and of whole steps, bytes of its state here, and whether all parameters are equal."""
    with paceline.init(settings.backend, "cpu", announce=None) as world:
        data, _ = load_sets(settings, world)
        models, optimizers = {}, {}
        for kind in (PLAIN, SHARDED):
            torch.manual_seed(0)
            net = build_model(settings.model, data.form, settings.model_options)
            models[kind] = paceline.DDP(net, strategy="zero1" if kind == SHARDED else None)
            optimizers[kind] = torch.optim.AdamW(net.parameters(), lr=1e-3)
        optimizers[SHARDED] = models[SHARDED].shard_optimizer(optimizers[SHARDED])
        order = EpochOrder(len(data), settings.batch_size * world.world_size, 0, 0)
        window = next(load_windows(data, order, 0, world.rank, world.world_size, settings.batch_size, world.device))
        batch = window.batches[0].batch
        steps: Times = {kind: [] for kind in models}
        updates: Times = {kind: [] for kind in models}
        for number in range(num_steps + 5):
            for kind in (PLAIN, SHARDED) if number % 2 else (SHARDED, PLAIN):
                world.barrier()
                begin_s = time.perf_counter()
                compute_outcome(models[kind], batch, data.form).loss_sum.backward()
                middle_s = time.perf_counter()
                optimizers[kind].step()
                optimizers[kind].zero_grad()
                end_s = time.perf_counter()
                if number >= 5:
                    steps[kind].append(end_s - begin_s)
                    updates[kind].append(end_s - middle_s)
        held = {
            kind: sum(v.nbytes for state in optimizer.state.values() for v in state.values())
            for kind, optimizer in optimizers.items()
        }
        pairs = zip(models[PLAIN].parameters(), models[SHARDED].parameters(), strict=True)
        return updates, steps, held, all(torch.equal(a, b) for a, b in pairs)


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
    results = paceline.run_ranks(measure, asked.ranks, (settings, asked.steps))
    updates, steps, held, is_equal = results[0]
    for what, times in (("the optimizer", updates), ("the step", steps)):
        ratio = compare_times(times[SHARDED], times[PLAIN])
        noise = "" if ratio.noise is None else f" +- {ratio.noise:.1%}"
        before, after = (statistics.median(times[kind]) * 1e3 for kind in (PLAIN, SHARDED))
        print(f"{what}: {before:.2f} ms unsharded, {after:.2f} ms with zero1: {ratio.value:.1%}{noise}")
    shares = [f"{found[2][SHARDED] / found[2][PLAIN]:.2%}" for found in results]
    print(f"the optimizer's state on each rank: {', '.join(shares)} of {held[PLAIN] / 2**20:.1f} MiB")
    same = "equal to the bit" if is_equal else "DIFFERENT"
    print(f"{asked.model}, {asked.ranks} ranks, {asked.backend}, torch {torch.__version__}: parameters are {same}")


if __name__ == "__main__":
    main()
