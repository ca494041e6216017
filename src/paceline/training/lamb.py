"""LAMB: Adam in which each layer steps in proportion to its own weights (You 2020).

What it shares with LARS is in `trust_ratios`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.training.trust_ratios import LayerwiseOptimizer, check_number, compute_norms, compute_ratios

__all__ = ["LAMB"]


class LAMB(LayerwiseOptimizer):
    """Adam with a trust ratio for each parameter, for batches so large that one rate does not fit all.

        m, v = the running means of g and g * g, by betas, each divided by 1 - beta ** step
        r = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * |w| / |r| * r

    The ratio |w| / |r| is 1 where |w| or |r| is 0, and in groups with `adapt=False`, which then learn as with torch's
    AdamW: for biases and norms (`split_parameters`). The norm of w is not bounded: the paper's phi is the identity.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("lr", "weight_decay", "eps"):
            check_number("LAMB", name, group[name])
        if not isinstance(group["betas"], tuple | list) or len(group["betas"]) != 2:
            raise ConfigError(f"LAMB: betas {group['betas']!r}: two numbers are needed")
        for beta in group["betas"]:
            check_number("LAMB", "a beta of", beta, below=1)

    def _move(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        firsts, seconds, steps = [], [], []
        for param in params:
            state = self.state[param]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            # A number on the host, each parameter's own: one that had no gradient for a while is behind.
            state["step"] += 1
            steps.append(state["step"])
            firsts.append(state["exp_avg"])
            seconds.append(state["exp_avg_sq"])
        torch._foreach_lerp_(firsts, grads, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)
        scales = torch._foreach_sqrt(seconds)
        torch._foreach_div_(scales, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_mul_(scales, [1 - beta1**step for step in steps])
        moves = torch._foreach_div(firsts, scales)
        if group["weight_decay"]:
            torch._foreach_add_(moves, params, alpha=group["weight_decay"])
        if group["adapt"]:
            torch._foreach_mul_(moves, compute_ratios(compute_norms(params), compute_norms(moves)))
        torch._foreach_add_(params, moves, alpha=-group["lr"])
