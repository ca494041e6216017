#!/usr/bin/env python
"""Are the minima of large batches sharper, and does that explain worse generalization? An MLP on MNIST, minutes on a
CPU.

    benchmarks/sharpness.py MNIST_FOLDER > results/MACHINE/sharpness.md

Trains with a small batch, and with a large batch without a recipe and with a linearly scaled rate and warm-up. Reports
for each solution, over three seeds (mean and range):

- sharpness: the largest eigenvalue of the Hessian of the training loss, by power iteration;
- rise: the average increase in training loss along random directions, with a length in each layer of a tenth of the
  norm of its weights.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

SMALL, LARGE, RATE, EPOCHS = 32, 2048, 0.05, 12
SAMPLES, PROBED, SEEDS = 12_000, 4_096, 3
POWER_STEPS, DIRECTIONS, LENGTH = 40, 20, 0.1


def read(folder: Path, prefix: str, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    images = np.frombuffer((folder / f"{prefix}-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((folder / f"{prefix}-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    inputs = torch.tensor(images.reshape(-1, 784)[:limit] / 255, dtype=torch.float32)
    return inputs, torch.tensor(labels[:limit].astype(np.int64))


def train(inputs: torch.Tensor, targets: torch.Tensor, seed: int, batch: int, rate: float, updates: int, warmup: int):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    order = torch.randperm(len(inputs))
    place = 0
    for step in range(updates):
        optimizer.param_groups[0]["lr"] = (
            rate * min(1.0, (step + 1) / max(1, warmup)) * (1 + math.cos(math.pi * step / updates)) / 2
        )
        if place + batch > len(inputs):
            order, place = torch.randperm(len(inputs)), 0
        chosen = order[place : place + batch]
        place += batch
        optimizer.zero_grad()
        cross_entropy(model(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return model


def find_sharpness(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> float:
    params = list(model.parameters())
    grads = torch.autograd.grad(loss_of(), params, create_graph=True)
    vector = [torch.randn_like(param) for param in params]
    value = 0.0
    for _ in range(POWER_STEPS):
        norm = math.sqrt(sum(part.square().sum().item() for part in vector))
        unit = [part / norm for part in vector]
        vector = list(torch.autograd.grad(grads, params, grad_outputs=unit, retain_graph=True))
        value = sum((one * other).sum().item() for one, other in zip(unit, vector, strict=True))
    return value


@torch.no_grad()
def find_rise(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> float:
    flat, rises = loss_of().item(), []
    start = [param.clone() for param in model.parameters()]
    for _ in range(DIRECTIONS):
        for param, own in zip(model.parameters(), start, strict=True):
            away = torch.randn_like(own)
            param.copy_(own + away * (LENGTH * own.norm() / away.norm()))
        rises.append(loss_of().item() - flat)
    for param, own in zip(model.parameters(), start, strict=True):
        param.copy_(own)
    return statistics.fmean(rises)


def describe(values: list[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    inputs, targets = read(folder, "train", SAMPLES)
    tested, labels = read(folder, "t10k", 10_000)
    few, many = (EPOCHS * (SAMPLES // batch) for batch in (LARGE, SMALL))
    cases = [
        ("none", SMALL, RATE, many, 0),
        ("none", LARGE, RATE, few, 0),
        ("linear and warm-up", LARGE, RATE * 16, few, few // 5),
    ]
    print("| batch | recipe | rate | updates | training loss | test accuracy (%) | sharpness | rise |")
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    for recipe, batch, rate, updates, warmup in cases:
        losses, accuracies, sharpness, rises = [], [], [], []
        for seed in range(SEEDS):
            model = train(inputs, targets, seed, batch, rate, updates, warmup)

            def loss_of(model: nn.Module = model) -> torch.Tensor:
                return cross_entropy(model(inputs[:PROBED]), targets[:PROBED])

            losses.append(loss_of().item())
            accuracies.append((model(tested).argmax(1) == labels).float().mean().item() * 100)
            sharpness.append(find_sharpness(model, loss_of))
            rises.append(find_rise(model, loss_of))
        found = (losses, 4), (accuracies, 2), (sharpness, 2), (rises, 4)
        print(
            f"| {batch} | {recipe} | {rate} | {updates} | {' | '.join(describe(*one) for one in found)} |", flush=True
        )


if __name__ == "__main__":
    main()
