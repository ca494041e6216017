"""Helpers for the wrapper's tests: a small model, batches, expected gradients, and checks."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.parallel import DDP
from paceline.runtime.ranks.world import current_world

# Both reducers, and the default one with one bucket per layer of `Net`.
REDUCERS: tuple[dict[str, Any], ...] = (
    {"reducer": "simple"},
    {"reducer": "bucketed"},
    {"reducer": "bucketed", "bucket_cap_mb": 7e-5},
)
# The first step records the order, the second is the first with a plan, and the third shows that the plan persists.
STEPS = 4
Loss = Callable[[Any, int], torch.Tensor]


def here() -> torch.device:
    """The device of the open world. Batches are drawn on the CPU, which gives the same numbers everywhere."""
    world = current_world()
    return torch.device("cpu") if world is None else world.device


def draw(rank: int, step: int = 0, size: int = 3) -> torch.Tensor:
    """A batch that differs on every rank and in every step."""
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(1000 * step + rank)).to(here())


class Net(nn.Module):
    """Four layers; a forward can skip some of them. Every rank deliberately starts from different values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, use: str = "left right") -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        for name in use.split():
            hidden = hidden + torch.tanh(getattr(self, name)(hidden))
        return self.last(hidden)


def loss(model: Any, rank: int, step: int = 0, **options: Any) -> torch.Tensor:
    """A loss that is a mean over the samples of a batch."""
    return model(draw(rank, step), **options).square().mean()


def average_alone(
    module: nn.Module, loss_of: Loss, num_ranks: int, weights: Sequence[float] | None = None
) -> dict[str, torch.Tensor | None]:
    """The average over the ranks of their local gradients, computed here on copies, without a wrapper."""
    total: dict[str, torch.Tensor | None] = dict.fromkeys(dict(module.named_parameters()))
    for rank in range(num_ranks):
        alone = copy.deepcopy(module)
        alone.zero_grad()
        loss_of(alone, rank).backward()
        weight = 1 / num_ranks if weights is None else weights[rank] / sum(weights)
        for name, param in alone.named_parameters():
            if param.grad is not None:
                share = param.grad.detach() * weight
                total[name] = share if (before := total[name]) is None else before + share
    return total


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    module = model.module if isinstance(model, DDP) else model
    return {name: param.grad for name, param in module.named_parameters()}


def check_close(model: nn.Module, wanted: dict[str, torch.Tensor | None], what: object = "") -> None:
    for name, grad in gradients(model).items():
        want = wanted[name]
        assert (grad is None) == (want is None), f"{what}: {name} has {grad}, wanted {want}"
        if grad is not None and want is not None:
            torch.testing.assert_close(grad.detach(), want, msg=lambda text, name=name: f"{what}: {name}: {text}")


def check_equal(world: Any, tensors: Iterable[torch.Tensor | None], what: object = "") -> None:
    """Check that tensors are bit-identical on all ranks. Collective: every rank must call this."""
    values = [None if t is None else t.detach().cpu().contiguous().numpy() for t in tensors]
    mine = [None if value is None else hashlib.sha256(value.data).hexdigest() for value in values]
    everyone = world.share(mine)
    assert all(other == everyone[0] for other in everyone), f"{what}: differs between the ranks"


def check(world: Any, model: nn.Module, wanted: dict[str, torch.Tensor | None], what: object = "") -> None:
    """Check that gradients are close to the expected ones, and equal on all ranks. Collective."""
    check_close(model, wanted, what)
    check_equal(world, gradients(model).values(), what)


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """The `describe` output for a call's error; two empty strings if it raises none."""
    try:
        call()
    except Exception as error:
        return describe(error)
    return "", ""


def describe(error: Exception) -> tuple[str, str]:
    """An error's type, followed by its code if it has one, and its text."""
    return " ".join(filter(None, (type(error).__name__, getattr(error, "code", "")))), str(error)
