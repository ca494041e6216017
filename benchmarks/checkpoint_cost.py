"""Measure the cost of a checkpoint every 10 s: train on two ranks in alternating rounds with and without a save.

python benchmarks/checkpoint_cost.py [--model resnet18] [--ranks 2] [--spell 10] [--pairs 6]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import paceline
from paceline.records.samples import compare_times
from paceline.training.build import build_job
from paceline.training.checkpoints import RunFiles
from paceline.training.journal import Position
from paceline.training.loader import load_windows
from paceline.training.step import NoPhases, find_bad_parameter, take_step
from paceline.training.train_settings import TrainSettings


def measure(settings: TrainSettings, spell_s: float, pairs: int) -> tuple[list[float], list[float], list[float]]:
    """Measure the seconds per round with and without a save and the seconds that each save blocks training."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-checkpoint-cost-"))
    with paceline.init(announce=None) as world:
        job = build_job(settings, world)
        files = RunFiles(folder if world.rank == 0 else None, settings, world)
        window = next(load_windows(job.train, job.order(0), 0, world.rank, world.world_size, 8, world.device))

        def train(num_steps: int) -> None:
            for _ in range(num_steps):
                take_step(job.learner, window.batches, window.num_samples, 0.01, NoPhases())

        step = 0

        def save() -> None:
            nonlocal step
            step += 1
            assert not find_bad_parameter(job.learner.module)
            files.save(job, Position(0, 0, step))

        train(5)
        save()  # the first save allocates the buffers
        files.close()
        begin_s = time.perf_counter()
        train(10)
        num_steps = max(world.share(max(1, int(10 * spell_s / (time.perf_counter() - begin_s)))))
        times: dict[bool, list[float]] = {True: [], False: []}
        held_s = []
        for number in range(2 * pairs):
            saves = number % 4 in (0, 3)  # in the order A B B A, machine drift affects both equally
            world.barrier()
            begin_s = time.perf_counter()
            if saves:
                save()
                held_s.append(time.perf_counter() - begin_s)
            train(num_steps)
            times[saves].append(time.perf_counter() - begin_s)
        files.close()
        return times[True], times[False], held_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spell", type=float, default=10.0, help="seconds per round")
    parser.add_argument("--pairs", type=int, default=6)
    asked = parser.parse_args()
    settings = TrainSettings(model=asked.model, ranks=asked.ranks, batch_size=8, samples=64)
    with_s, without_s, held_s = paceline.run_ranks(measure, asked.ranks, (settings, asked.spell, asked.pairs))[0]
    ratio = compare_times(with_s, without_s)
    noise = "" if ratio.noise is None else f" +- {ratio.noise:.2%}"
    print(
        f"{asked.model} on {asked.ranks} ranks, torch {torch.__version__}: a checkpoint every "
        f"{statistics.median(without_s):.1f} s costs {ratio.value - 1:+.2%}{noise} ({len(with_s)} pairs of rounds); "
        f"each save blocks training for {statistics.median(held_s) * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
