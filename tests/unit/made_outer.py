"""Replicas of one model in one process, synchronized by an outer schedule."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch._dynamo  # optimizers import it, and importing it sets an environment variable; do that before any test
from torch import nn

from paceline.parallel.codecs import build_codec, run_together
from paceline.parallel.outer import Outer
from paceline.strategy import Strategy


def draw(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(97 * step + rank)).to(dtype)


def build_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


class Replicas:
    """Replicas with their own model, optimizer and batches, and the schedule that synchronizes them."""

    def __init__(
        self,
        text: str,
        optimizer: Any = torch.optim.SGD,
        lr: float = 0.05,
        dtype=torch.float64,
        num: int = 3,
        **options,
    ) -> None:
        self.strategy, self.lr = Strategy.parse(text), lr
        model, self.num = build_model(dtype), num
        self.models = [copy.deepcopy(model) for _ in range(num)]
        self.optimizers = [optimizer(model.parameters(), lr=lr, **options) for model in self.models]
        self.outers = [self._make_outer(rank) for rank in range(num)]
        self.step = 0

    def _make_outer(self, rank: int) -> Outer:
        names, params = zip(*self.models[rank].named_parameters(), strict=True)
        return Outer(self.strategy, names, params, build_codec(self.strategy, rank, self.num))

    def compute_gradients(self) -> None:
        for rank, model in enumerate(self.models):
            model.zero_grad()
            model(draw(rank, self.step, next(model.parameters()).dtype)).square().mean().backward()

    def train(self, steps: int) -> Replicas:
        for _ in range(steps):
            self.compute_gradients()
            for outer in self.outers:
                outer.begin_round()
            if not self.outers[0].is_local:
                for params in zip(*(model.parameters() for model in self.models), strict=True):
                    mean = sum(param.grad * (1 / self.num) for param in params)
                    for param in params:
                        param.grad = mean.clone()
            for optimizer in self.optimizers:
                optimizer.step()
            for outer in self.outers:
                outer.count()
            run_together([outer.advance([self.lr] * len(outer.names)) for outer in self.outers])
            self.step += 1
        return self

    def complete(self) -> Replicas:
        run_together([outer.complete([self.lr] * len(outer.names)) for outer in self.outers])
        return self

    def vector(self, rank: int = 0) -> torch.Tensor:
        return torch.cat([param.detach().reshape(-1) for param in self.models[rank].parameters()])

    @property
    def are_equal(self) -> bool:
        return all(torch.equal(self.vector(), self.vector(rank)) for rank in range(1, self.num))
