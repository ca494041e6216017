"""LARS and LAMB, optimizers for large batches, and the parameter groups for all optimizers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import ConfigError, refuse

_LOW_PRECISION = (torch.float16, torch.bfloat16)
# A group's numeric settings, with their exclusive upper bounds.
_LIMITS = {"lr": math.inf, "weight_decay": math.inf, "eps": math.inf, "trust_coefficient": math.inf, "momentum": 1.0}


def _compute_norms(params: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norms of tensors on one device and of one dtype, as one tensor; low precision is summed in float32.

    `tensors` are the parameters or one tensor for each, such as its gradient.
    """
    dtype = torch.float32 if tensors[0].dtype in _LOW_PRECISION else None
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype))


def _compute_ratios(wanted: Tensor, found: Tensor) -> tuple[Tensor, ...]:
    """`wanted / found` for each layer, or 1 if either is 0. The ratios stay on the device."""
    return torch.where((wanted > 0) & (found > 0), wanted / found, 1.0).unbind()


class _LayerwiseOptimizer(Optimizer):
    """An optimizer based on foreach operations: it never waits for the GPU.

    A group's key `adapt` enables trust ratios for its layers. Skips gradients that are None and rejects sparse ones.
    Subclasses implement `_update` for tensors of one device and dtype.
    """

    # Sharded optimizers replace this, because a rank has only ranges of the parameters.
    compute_norms: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor] = staticmethod(_compute_norms)

    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        owner = type(self).__name__
        group = {**self.defaults, **param_group}
        betas = group.get("betas", (0.0, 0.0))
        is_pair = isinstance(betas, tuple | list) and len(betas) == 2
        is_still = group.get("nesterov") and group.get("momentum") == 0
        refuse(
            (not isinstance(group["adapt"], bool), f"{owner}: adapt {group['adapt']!r}: must be True or False"),
            (not is_pair, f"{owner}: betas {betas!r}: must be two numbers"),
            (is_still, f"{owner}: nesterov with momentum 0: set a momentum, or leave out nesterov"),
        )
        numbers = [(name, group[name], below) for name, below in _LIMITS.items() if name in group]
        for name, value, below in (*numbers, *(("a beta of", beta, 1.0) for beta in betas)):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_open = name == "trust_coefficient"
            if not is_number or not 0 <= value < below or (is_open and value == 0):
                kind = f"finite, {'above' if is_open else 'at least'} 0{'' if below == math.inf else ', below 1'}"
                raise ConfigError(f"{owner}: {name} {value!r}: must be {kind}")
        super().add_param_group(param_group)

    def _find_buffers(self, params: Sequence[Tensor], name: str) -> list[Tensor]:
        """Each parameter's state tensor of this name, initialized to zeros."""
        for param in params:
            if self.state[param].get(name) is None:
                self.state[param][name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return [self.state[param][name] for param in params]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds this key, which the saved state lacks
        for group in self.param_groups:
            for name, value in self.defaults.items():  # the state of torch's optimizers lacks some keys
                group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step. The optional `closure` recomputes the gradients and returns the loss, which is passed on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # Group by device and dtype, as foreach operations require.
            alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.layout is not torch.strided:
                    raise ConfigError(
                        f"{type(self).__name__}: the gradient of a parameter of shape {tuple(param.shape)} is "
                        f"{param.grad.layout}: must be dense (use sparse=False for an embedding)"
                    )
                params, grads = alike.setdefault((param.device, param.dtype), ([], []))
                params.append(param)
                grads.append(param.grad)
            for params, grads in alike.values():
                self._update(params, grads, group)
        return loss


class LARS(_LayerwiseOptimizer):
    """SGD with momentum and a trust ratio per parameter, for very large batches, where layers need different rates.

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
        u = momentum * u + ratio * (g + weight_decay * w)
        w = w - lr * u

    The ratio is 1 if `|w|` or `|g|` is 0. It is also 1 in groups with `adapt=False`, which behave as in torch's SGD;
    use them for biases and norms (`split_parameters`). With `nesterov`, w moves by momentum * u + ratio * (...).

    The learning rate is not part of u, unlike in the paper's v = momentum * v + lr * ratio * (...). A new rate
    therefore applies to all of u at once and needs no momentum correction (Goyal 2017). At a constant rate both forms
    are equivalent.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0,
        trust_coefficient: float = 0.001, nesterov: bool = False, eps: float = 1e-8,
    ) -> None:  # fmt: skip
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient,
            "nesterov": nesterov, "eps": eps, "adapt": True,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        momentum = group["momentum"]
        moves = torch._foreach_add(grads, params, alpha=decay) if decay else list(grads)
        if group["adapt"]:
            norms = self.compute_norms(params, params)
            wanted = group["trust_coefficient"] * norms
            found = self.compute_norms(params, grads)
            # A zero gradient gets a ratio of 1, because only weight decay would determine the direction.
            found = torch.where(found > 0, found + decay * norms + group["eps"], 0.0)
            ratios = _compute_ratios(wanted, found)
            # Not in place: without weight decay, `moves` are the gradients themselves.
            moves = torch._foreach_mul(moves, ratios)
        if momentum:
            velocities = self._find_buffers(params, "momentum_buffer")
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_add_(velocities, moves)
            moves = torch._foreach_add(moves, velocities, alpha=momentum) if group["nesterov"] else velocities
        torch._foreach_add_(params, moves, alpha=-group["lr"])


class LAMB(_LayerwiseOptimizer):
    """Adam with a trust ratio per parameter, for very large batches, where layers need different rates.

        m, v = running means of g and g * g with decay rates betas, each divided by 1 - beta ** step
        r = m / (sqrt(v) + eps) + weight_decay * w
        w = w - lr * |w| / |r| * r

    The ratio `|w| / |r|` is 1 if `|w|` or `|r|` is 0. It is also 1 in groups with `adapt=False`, which behave as in
    torch's AdamW; use them for biases and norms (`split_parameters`). The norm of w is not clipped (the paper's phi is
    the identity).
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True})

    def _update(self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        for param in params:
            # Count on the host and per parameter, because steps without a gradient do not count.
            self.state[param]["step"] = self.state[param].get("step", 0) + 1
        steps = [self.state[param]["step"] for param in params]
        firsts = self._find_buffers(params, "exp_avg")
        seconds = self._find_buffers(params, "exp_avg_sq")
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
            norms = self.compute_norms(params, params), self.compute_norms(params, moves)
            torch._foreach_mul_(moves, _compute_ratios(*norms))
        torch._foreach_add_(params, moves, alpha=-group["lr"])


def match_strides(optimizer: Optimizer) -> None:
    """Give an optimizer's state tensors the strides of their parameters.

    Checkpoint files store contiguous tensors, which fused optimizers reject for `channels_last` parameters.
    """
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.stride() != param.stride():
                state[name] = torch.empty_like(param, dtype=value.dtype).copy_(value)


def split_parameters(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Build optimizer groups: matrices and filters with weight decay and trust ratios, biases and norms with neither.

    Omits frozen parameters and empty groups. Only LARS and LAMB read `adapt`; torch's optimizers ignore it.
    """
    params = [param for param in module.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": weight_decay, "adapt": True},
        {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]
