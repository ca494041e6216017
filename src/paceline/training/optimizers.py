"""LARS and LAMB, the optimizers for large batches, and the parameter groups that every optimizer gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import ConfigError

_LOW_PRECISION = (torch.float16, torch.bfloat16)


def check_number(owner: str, name: str, value: Any, *, below: float = math.inf, is_open: bool = False) -> None:
    """Refuse what is not a plain finite number from 0 (above 0 where `is_open`) and below `below`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (is_open and value == 0) or value >= below:
        end = "" if below == math.inf else f" and below {below:g}"
        raise ConfigError(
            f"{owner}: {name} {value!r}: a finite number {'above' if is_open else 'from'} 0{end} is needed"
        )


def compute_norms(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norms of tensors of one device and dtype, as one tensor there; of low precision, summed in float32."""
    dtype = torch.float32 if tensors[0].dtype in _LOW_PRECISION else None
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def compute_ratios(wanted: Tensor, found: Tensor) -> tuple[Tensor, ...]:
    """`wanted / found` of each layer, and 1 where one of the two is 0; they stay on the device."""
    return torch.where((wanted > 0) & (found > 0), wanted / found, 1.0).unbind()


class LayerwiseOptimizer(Optimizer):
    """An optimizer that works on lists of tensors: no loop over parameters, no wait for a GPU.

    A group's key `adapt` says whether its layers have trust ratios. Gradients that are None are skipped, and sparse
    ones refused. A child checks a group's numbers in `_check` and moves the tensors of one device and dtype in `_move`.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "adapt": True})

    def _check(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def _move(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        group = {**self.defaults, **param_group}
        if not isinstance(group["adapt"], bool):
            raise ConfigError(f"{type(self).__name__}: adapt {group['adapt']!r}: True or False is needed")
        self._check(group)
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it here, and the state would differ from what was saved
        for group in self.param_groups:
            for name, value in self.defaults.items():  # the state of torch's optimizers has fewer
                group.setdefault(name, value)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step; `closure` recomputes the loss and its gradients, and the loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for params, grads in self._find_gradients(group["params"]):
                self._move(params, grads, group)
        return loss

    def _find_gradients(self, params: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Parameters that have a gradient, and these, by device and dtype: an operation takes one of each."""
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for param in params:
            if param.grad is None:
                continue
            if param.grad.layout is not torch.strided:
                raise ConfigError(
                    f"{type(self).__name__}: the gradient of a parameter of shape {tuple(param.shape)} is "
                    f"{param.grad.layout}: a dense one is needed (sparse=False of an embedding)"
                )
            some = alike.setdefault((param.device, param.dtype), ([], []))
            some[0].append(param)
            some[1].append(param.grad)
        yield from alike.values()


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


class LAMB(LayerwiseOptimizer):
    """Adam with a trust ratio for each parameter, for batches so large that one rate does not fit all layers.

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
            # A number on the host for each parameter: one without gradients for some steps has taken fewer.
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


def split_parameters(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: matrices and filters with decay and trust ratios, biases and norms with neither.

    Frozen parameters are left out, and so is a group that has none. Only LARS and LAMB read `adapt`; the optimizers of
    torch carry it along.
    """
    params = [param for param in module.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": weight_decay, "adapt": True},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]
