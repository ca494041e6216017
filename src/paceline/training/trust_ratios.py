"""What LARS and LAMB share: which gradients a step takes, and how far each layer may go.

How a step is made of them is in `lars` and `lamb`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import ConfigError

__all__ = ["LayerwiseOptimizer", "check_number", "compute_norms", "compute_ratios"]

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
    """An optimizer whose steps are operations on lists of tensors: no loop over parameters, no wait for a GPU.

    A group's key `adapt` says whether its layers have trust ratios. Gradients that are None are passed over, and sparse
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
        self.defaults.pop("differentiable", None)  # torch adds it here, and a state would not be what was saved
        for group in self.param_groups:
            for name, value in self.defaults.items():  # the state of torch's own optimizer knows fewer
                group.setdefault(name, value)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step; `closure` computes the loss and its gradients anew, and the loss is returned."""
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
