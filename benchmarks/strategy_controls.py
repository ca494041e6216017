#!/usr/bin/env python
"""Train with two broken strategies and, for comparison, with all gradients averaged.

    benchmarks/strategy_controls.py --data cifar10:FOLDER --model resnet18 --device cuda --precision bf16 \
        --epochs 30 --batch-size 512 --lr 0.4 --weight-decay 0.0005 --lr-warmup 490 --seeds 5

- dense: averages every gradient, as usual.
- places: keeps each rank's largest gradients, so an all-reduce adds up values at different indices.
- gradients: averages gradients only in every 8th step, and never the parameters.

Prints the test accuracy of each seed and their mean. Four workers run in one process.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from paceline.parallel.codecs import SUM, Codec, Exchange, build_codec
from paceline.records import LargeBatchRecord
from paceline.strategy import count_kept
from paceline.studies.training_grid import TrainingCell
from paceline.studies.training_runs import train_cell
from paceline.training.build import build_job, open_world
from paceline.training.train_settings import TrainSettings
from paceline.training.workers import build_workers

WORKERS, DENSITY, EVERY = 4, 0.01, 8


class OtherPlaces(Codec):
    """Adds up each rank's largest values as if they had the same indices."""

    def average(self, names: Sequence[str], grads: Sequence[torch.Tensor], step: int) -> Exchange:
        for grad in grads:
            flat = grad.reshape(-1)
            place = flat.abs().topk(count_kept(flat.numel(), DENSITY)).indices.sort().values
            total = yield SUM, flat[place] / self.world_size
            grad.copy_(torch.zeros_like(flat).index_copy_(0, place, total).view(grad.shape))


class SomeGradients(Codec):
    """Averages gradients every few steps, but never the parameters."""

    def average(self, names: Sequence[str], grads: Sequence[torch.Tensor], step: int) -> Exchange:
        if step % EVERY == 0:
            for grad in grads:
                total = yield SUM, grad.reshape(-1) / self.world_size
                grad.copy_(total.view(grad.shape))


CONTROLS: dict[str, Any] = {"dense": build_codec, "places": OtherPlaces, "gradients": SomeGradients}


def train(settings: TrainSettings, control: str, evaluations: int) -> LargeBatchRecord:
    with open_world(settings) as world:
        job = build_job(dataclasses.replace(settings, wrapper="none"), world)
        learner = build_workers(job.learner, WORKERS, settings.parsed_strategy, CONTROLS[control])
        cell = TrainingCell(settings, "epochs", control, settings.batches.global_batch_size)
        record = train_cell(dataclasses.replace(job, learner=learner), cell, evaluations)[0]
        assert isinstance(record, LargeBatchRecord)
        return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--test-samples", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--channels", type=int, nargs="+")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--lr-warmup", type=int, default=0)
    given = vars(parser.parse_args())
    seeds = given.pop("seeds")
    for control in CONTROLS:
        found = []
        for seed in range(1, seeds + 1):
            record = train(TrainSettings(**given, schedule="cosine", seed=seed), control, 5)
            accuracy = record.curve[-1].test_accuracy if record.curve else None
            print(f"{control}, seed {seed}: {record.failure or f'{accuracy:.2%}'}", flush=True)
            found += [accuracy] if accuracy is not None and not record.failure else []
        if found:
            print(f"{control}: {statistics.fmean(found):.2%} over {len(found)} of {seeds} seeds")


if __name__ == "__main__":
    main()
