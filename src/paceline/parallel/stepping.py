"""Steps the parameters of each bucket as soon as it is averaged, while other buckets are still in flight.

This is exact if a parameter's new value depends only on its own gradient, value and state. Whatever needs all gradients
first (clipping by a global norm, a scaler that may skip the step) is refused, at the latest in `optimizer.step()`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from paceline.errors import ConfigError

_KNOWN = ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD")


class BucketSteps:
    """Steps `optimizer` bucket by bucket. Its own `step` then skips these parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer) not in [getattr(torch.optim, name) for name in _KNOWN]:
            text = f"{type(optimizer).__name__} may need all gradients for one update: use one of {', '.join(_KNOWN)}"
            raise ConfigError(f"overlap_optimizer(): {text}", code="optimizer")
        self.optimizer = optimizer
        self._parts: dict[tuple[int, ...], Any] = {}  # one optimizer per bucket
        self._stepped: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}  # gradient and its version, by parameter
        self._values: list[dict[str, Any]] = []  # group options when the first bucket was stepped
        self._aside: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step), optimizer.register_step_post_hook(self._after_step)
        ]  # fmt: skip

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()

    def find_misuse(self) -> ConfigError | None:
        """The error for a backward that must not step now, if any."""
        if not self._stepped:
            return None
        text = "a second synchronised backward before optimizer.step(): accumulate inside `with model.no_sync():`"
        return ConfigError(f"overlap_optimizer(): {text}", code="optimizer")

    def step(self, params: Sequence[torch.Tensor]) -> None:
        """Step these parameters, whose gradients are averaged."""
        optimizer, key = self.optimizer, tuple(map(id, params))
        if not self._stepped:
            self._values = [_read_values(group) for group in optimizer.param_groups]
        if key not in self._parts:
            self._parts[key] = copy.copy(optimizer)  # without its hooks
        wanted, part = set(params), self._parts[key]
        groups = ({**group, "params": [p for p in group["params"] if p in wanted]} for group in optimizer.param_groups)
        part.state, part.param_groups = optimizer.state, [group for group in groups if group["params"]]
        mine = [param for group in part.param_groups for param in group["params"] if param.grad is not None]
        if mine:
            part.step()
        self._stepped |= {param: (param.grad, param.grad._version) for param in mine}

    def end(self) -> None:
        """Record where the gradients now live: after the first step they move to the memory of a new plan."""
        self._stepped = {param: (param.grad, param.grad._version) for param in self._stepped if param.grad is not None}

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if args[1:] or kwargs.get("closure") is not None:
            raise ConfigError(
                "overlap_optimizer(): step() does not support a closure: call backward() before it", code="optimizer"
            )
        stepped, self._stepped = self._stepped, {}
        if not stepped:
            return
        is_changed = any(
            param.grad is not grad or grad._version != version for param, (grad, version) in stepped.items()
        )
        if is_changed or getattr(optimizer, "grad_scale", None) is not None:
            text = "gradients changed between backward() and step(), after they were applied"
            advice = "do not clip gradients or use a GradScaler"
            raise ConfigError(f"overlap_optimizer(): {text}: {advice}", code="optimizer")
        if [_read_values(group) for group in optimizer.param_groups[: len(self._values)]] != self._values:
            text = "optimizer options changed between backward() and step(): change them after step()"
            raise ConfigError(f"overlap_optimizer(): {text}", code="optimizer")
        self._aside = [(param, grad) for param, (grad, _) in stepped.items()]
        for param, _ in self._aside:
            param.grad = None

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        aside, self._aside = self._aside, []
        for param, grad in aside:
            param.grad = grad


def _read_values(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, with tensors replaced by their values."""
    return {
        name: value.item() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
