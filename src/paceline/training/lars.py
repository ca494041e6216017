"""LARS: SGD with momentum in which each layer steps in proportion to its own weights (You 2017).

What it shares with LAMB is in `trust_ratios`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.training.trust_ratios import LayerwiseOptimizer, check_number, compute_norms, compute_ratios

__all__ = ["LARS"]


class LARS(LayerwiseOptimizer):
    """SGD with momentum and a trust ratio for each parameter, for batches so large that one rate does not fit all.

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
        u = momentum * u + ratio * (g + weight_decay * w)
        w = w - lr * u

    The ratio is 1 where |w| or |g| is 0, and in groups with `adapt=False`, which then learn as with torch's SGD: for
    biases and norms (`split_parameters`). With `nesterov`, w moves by momentum * u + ratio * (...).

    The rate is not in u, as it is in the paper's v = momentum * v + lr * ratio * (...). So a rate that changes applies
    to all of u at once, and the momentum correction of Goyal 2017, which scales v by the new rate over the old, is not
    needed. At a constant rate the two are the same.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        nesterov: bool = False,
        eps: float = 1e-8,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient,
            "nesterov": nesterov, "eps": eps,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay", "eps"):
            check_number("LARS", name, group[name])
        check_number("LARS", "momentum", group["momentum"], below=1)
        check_number("LARS", "trust_coefficient", group["trust_coefficient"], is_open=True)
        if group["nesterov"] and group["momentum"] == 0:
            raise ConfigError("LARS: nesterov with momentum 0: give a momentum, or leave out nesterov")

    def _move(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        moves = torch._foreach_add(grads, params, alpha=decay) if decay else list(grads)
        if group["adapt"]:
            norms = compute_norms(params)
            wanted, found = group["trust_coefficient"] * norms, compute_norms(grads)
            # A gradient of 0 has no direction of its own to trust, whatever the decay adds to it.
            found = torch.where(found > 0, found + decay * norms + group["eps"], 0.0)
            ratios = compute_ratios(wanted, found)
            # Not in place: without decay these are the gradients themselves.
            moves = torch._foreach_mul(moves, ratios)
        if momentum:
            velocities = []
            for param in params:
                state = self.state[param]
                if state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                velocities.append(state["momentum_buffer"])
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, moves)
            moves = torch._foreach_add(moves, velocities, alpha=momentum) if group["nesterov"] else velocities
        torch._foreach_add_(params, moves, alpha=-group["lr"])
