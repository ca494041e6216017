"""BatchNorm over parts of a batch, as many small ranks would see them. Over several ranks it is in `batchnorm`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import ConfigError
from paceline.parallel.layer_swaps import replace_batchnorms

__all__ = ["GhostBatchNorm"]


def _is_channels_last(x: Tensor) -> bool:
    if x.dim() not in (4, 5) or x.is_contiguous():
        return False
    return x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _fold(x: Tensor, parts: int) -> Tensor:
    """(parts * n, C, ...) as (n, parts * C, ...), in the same layout."""
    if _is_channels_last(x):
        last = x.movedim(1, -1).view(parts, -1, *x.shape[2:], x.shape[1])
        return last.movedim(0, -2).flatten(-2).movedim(-1, 1)
    return x.reshape(parts, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def _unfold(x: Tensor, parts: int) -> Tensor:
    """What `_fold` did, undone."""
    if _is_channels_last(x):
        last = x.movedim(1, -1).view(len(x), *x.shape[2:], parts, -1)
        return last.movedim(-2, 0).flatten(0, 1).movedim(-1, 1)
    return x.reshape(len(x), parts, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)


class GhostBatchNorm(_BatchNorm):
    """torch's BatchNorm for inputs (N, C, ...), with statistics over `ghost_size` samples at a time (Hoffer 2017).

    In training a batch is cut, in order, into sub-batches of `ghost_size` samples, and each is normalised by itself: a
    large batch on one rank then sees the statistics of many ranks with small ones. A last, smaller sub-batch stands by
    itself or, with a single value per channel, joins the one before it. Running statistics move once per forward, to
    the average over the sub-batches by their samples. Evaluation, and a batch of at most `ghost_size` samples, are
    torch's BatchNorm, and so are the names in `state_dict`.
    """

    def __init__(
        self,
        num_features: int,
        ghost_size: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: Any = None,
        **options: Any,  # what newer versions of torch add
    ) -> None:
        _check_ghost_size(ghost_size)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.ghost_size = ghost_size

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        whole, rest = divmod(len(input), self.ghost_size)
        if rest and rest * input[0, 0].numel() < 2:
            whole, rest = whole - 1, rest + self.ghost_size
        if not self.training or whole + (rest > 0) < 2:
            return super().forward(input)
        outs, means, variances = [], [], []
        for x, parts in ((input[: len(input) - rest], whole), (input[len(input) - rest :], 1)):
            if len(x) == 0:
                continue
            out, mean, variance = self._normalize(x, parts)
            outs.append(out)
            if mean is not None and variance is not None:
                share = len(x) / len(input)
                means.append(mean * share)
                variances.append(variance * share)
        if self.track_running_stats:
            self._track(means, variances)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _normalize(self, x: Tensor, parts: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The sub-batches of a batch, each normalised, and the averages of their means and unbiased variances."""
        mean = variance = None
        if self.running_mean is not None and self.running_var is not None:
            # With a momentum of 1 torch leaves in them what it found.
            mean = self.running_mean.new_zeros(parts * self.num_features)
            variance = self.running_var.new_zeros(parts * self.num_features)
        # Sub-batches as channels: one call of torch's kernel serves all of them.
        weight, bias = (None if values is None else values.repeat(parts) for values in (self.weight, self.bias))
        out = F.batch_norm(_fold(x, parts), mean, variance, weight, bias, True, 1.0, self.eps)
        means, variances = (None if values is None else values.view(parts, -1).mean(0) for values in (mean, variance))
        return _unfold(out, parts), means, variances

    @torch.no_grad()
    def _track(self, means: list[Tensor], variances: list[Tensor]) -> None:
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if factor is None else factor
        for running, values in ((self.running_mean, means), (self.running_var, variances)):
            if running is not None:
                running.lerp_(torch.stack(values).sum(0), factor or 0.0)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected an input (N, {self.num_features}, ...), got {tuple(input.shape)}")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_size={self.ghost_size}"

    @classmethod
    def convert(cls, module: torch.nn.Module, ghost_size: int) -> torch.nn.Module:
        """Replace every BatchNorm below the module and return it, or the new layer where it is itself a BatchNorm.

        The new layers hold the same parameters, buffers and hooks; a layer used twice stays one layer.
        """
        _check_ghost_size(ghost_size)

        def settle(layer: GhostBatchNorm) -> None:
            layer.ghost_size = ghost_size

        return replace_batchnorms(module, cls, settle)


def _check_ghost_size(ghost_size: int) -> None:
    if ghost_size < 2:
        raise ConfigError(f"ghost_size {ghost_size}: at least 2 samples are needed")
