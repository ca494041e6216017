"""A strategy against the plain all-reduce of float32: steps of both in turns, with the same buckets.

python benchmarks/strategy_against_dense.py [--strategy bf16] [--models mlp,gpt2-mini] [--ranks 2] [--steps 100]
    [--backend shm]

Prints a line per model: both medians, and the ratio of the steps with the noise of the median. A step is forward,
backward and the averages; the optimizer is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time

import paceline
from paceline.records.samples import compare_times
from paceline.training.build import load_sets
from paceline.training.loader import load_windows
from paceline.training.settings import TrainSettings
from paceline.workloads.data.sharding import EpochOrder
from paceline.workloads.models import compute_outcome
from paceline.workloads.registry import build_model

WARM_STEPS = 5


def measure(settings: TrainSettings, strategy: str, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each step of this rank, by strategy."""
    with paceline.init(settings.backend, "cpu", announce=None) as world:
        data, _ = load_sets(settings, world)
        models = {
            text: paceline.DDP(build_model(settings.model, data.form, settings.model_options), strategy=text)
            for text in ("dense", strategy)
        }
        order = EpochOrder(len(data), settings.batch_size * world.world_size, 0, 0)
        window = next(load_windows(data, order, 0, world.rank, world.world_size, settings.batch_size, world.device))
        batch = window.batches[0].batch
        steps: dict[str, list[float]] = {text: [] for text in models}
        for number in range(num_steps + WARM_STEPS):
            for text in list(models) if number % 2 else reversed(models):
                world.barrier()
                begin_s = time.perf_counter()
                compute_outcome(models[text], batch, data.form).loss_sum.backward()
                end_s = time.perf_counter()
                models[text].zero_grad()
                if number >= WARM_STEPS:
                    steps[text].append(end_s - begin_s)
        return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="bf16")
    parser.add_argument("--models", default="cnn,mlp,gpt2-mini")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--backend", default="shm")
    asked = parser.parse_args()
    for model in asked.models.split(","):
        settings = TrainSettings(
            model=model, ranks=asked.ranks, backend=asked.backend, batch_size=asked.batch_size, samples=64, threads=1
        )
        results = paceline.run_ranks(measure, asked.ranks, (settings, asked.strategy, asked.steps))
        # A step takes as long as on the slowest rank.
        dense, other = ([max(row) for row in zip(*(found[text] for found in results), strict=True)]
                        for text in ("dense", asked.strategy))  # fmt: skip
        ratio = compare_times(other, dense)
        noise = "" if ratio.noise is None else f" +- {ratio.noise:.1%}"
        before, after = (statistics.median(times) * 1e3 for times in (dense, other))
        print(f"{model}: {before:.2f} ms dense, {after:.2f} ms with {asked.strategy}: {ratio.value:.1%}{noise}")


if __name__ == "__main__":
    main()
