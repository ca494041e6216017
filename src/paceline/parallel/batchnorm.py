"""BatchNorm over the global batch, on CPU and GPU. How gradients are averaged does not belong here.

One layer's forward is one message, in which every rank tells its own mean, squared deviations and count; its backward
is one message with the two sums that the gradient of the input needs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import ConfigError
from paceline.parallel.channel import naming_the_lost
from paceline.parallel.layer_swaps import replace_batchnorms

__all__ = ["SyncBatchNorm"]

# torch 2.13 renames it; 2.11 has only the older name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """The C values, so shaped that they broadcast over a (N, C, ...) tensor."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _all_but_channel(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _gather_statistics(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and sum of squared deviations per channel of the global batch, and its values per channel, in float64.

    Collective: every rank of the group must call this, also with an empty batch. Every rank computes the same from the
    same gathered messages, so the results are equal to the last bit.
    """
    channels, axes = x.shape[1], _all_but_channel(x)
    message = x.new_zeros(2 * channels + 1, dtype=_statistics_dtype(x))
    if x.numel():  # the mean of nothing is nan; a count of 0 takes these zeros out of the sums below
        # Two plain passes: as exact as torch.var_mean and, on a CPU, 3 to 6 times as fast.
        mean = x.mean(axes, dtype=message.dtype)
        message[:channels], message[-1] = mean, x.numel() // channels
        message[channels:-1] = (x - _per_channel(mean, x)).square_().sum(axes)
    gathered = message.new_empty(dist.get_world_size(group) * message.numel())
    with naming_the_lost("the statistics of a SyncBatchNorm cannot be gathered"):
        _all_gather(gathered, message, group)
    means, squares, counts = gathered.view(-1, message.numel()).double().split([channels, channels, 1], dim=1)
    total = counts.sum()
    # Chan's formula for many parts: deviations are taken from means, so a large mean does not cancel the variance.
    mean = (counts * means).sum(0) / total.clamp(min=1)
    return mean, squares.sum(0) + (counts * (means - mean) ** 2).sum(0), total


class _Normalize(torch.autograd.Function):
    """Normalise with statistics that depend on the input of every rank; the gradient knows that they do."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: tuple[Tensor, ...], group: Any
    ) -> Tensor:
        mean, invstd, total = (value.to(_statistics_dtype(x)) for value in statistics)
        ctx.save_for_backward(x, weight, mean, invstd, total)
        ctx.group = group
        scale = invstd if weight is None else invstd * weight
        out = (x - _per_channel(mean, x)).mul_(_per_channel(scale, x))
        if bias is not None:
            out.add_(_per_channel(bias, x))
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, total = ctx.saved_tensors
        axes = _all_but_channel(x)
        centered = x - _per_channel(mean, x)
        # Of the rank's own batch: what weight and bias get, and what is summed over the ranks for the input's gradient.
        sums = torch.stack([grad_out.sum(axes, dtype=mean.dtype), (grad_out * centered).sum(axes) * invstd])
        grad_bias, grad_weight = sums.unbind()
        grad_x = None
        if ctx.needs_input_grad[0]:
            global_sums = sums.clone()
            with naming_the_lost("the gradient of a SyncBatchNorm cannot be reduced"):
                dist.all_reduce(global_sums, group=ctx.group)
            mean_dy, mean_dy_xhat = global_sums / total
            scale = invstd if weight is None else invstd * weight
            grad_x = centered.mul_(_per_channel(-invstd * mean_dy_xhat, x)).sub_(_per_channel(mean_dy, x))
            grad_x = grad_x.add_(grad_out).mul_(_per_channel(scale, x)).to(x.dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return grad_x, grad_weight if needs_weight else None, grad_bias if needs_bias else None, None, None


class SyncBatchNorm(_BatchNorm):
    """torch's BatchNorm for inputs (N, C, ...), with statistics over the batches of all ranks of a process group.

    Collective in training: every rank must call forward, and then backward, in the same order of layers; batches may
    differ in size, and some may be empty. The backward has a message where the input needs a gradient, which must be so
    on all ranks or none; a rank whose loss does not depend on its output (an empty one has a sum too) never joins it,
    and the others wait. Gradients of weight and bias are of the rank's own batch, for a data-parallel wrapper to
    reduce. Not twice differentiable.

    Evaluation calls no collective: it takes the running statistics or, without any, those of the rank's own batch.
    Without a process group, or in one of one rank, it is torch's BatchNorm. None is the default group.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,  # what newer versions of torch add
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype, **options)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or (size := self._group_size()) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        mean, squares, total = _gather_statistics(input.detach(), self.process_group)
        # Reading the total waits for a GPU. Two values on this rank already tell enough; one or none in all means
        # that every rank reads, and all of them raise.
        known = int(total) if input.numel() < 2 * self.num_features else None
        if known == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got 1 on all {size} ranks together"
            )
        if self.track_running_stats:
            self._track(mean, squares / (total - 1), empty=known == 0)
        total = total.clamp(min=1)
        statistics = mean, torch.rsqrt(squares / total + self.eps), total
        return _Normalize.apply(input, self.weight, self.bias, statistics, self.process_group)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased_var: Tensor, empty: bool) -> None:
        """Move the running statistics; as in torch, an empty batch is counted and moves nothing."""
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if factor is None else factor
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased_var)):
            if running is not None and not empty:
                running.lerp_(value.to(running.dtype), factor or 0.0)

    def _group_size(self) -> int:
        size = dist.get_world_size(self.process_group)
        if size < 1:
            raise ConfigError(
                f"rank {dist.get_rank()} trains a SyncBatchNorm and is not in its process group: "
                "give every rank a group that it belongs to"
            )
        return size

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected an input (N, {self.num_features}, ...), got {tuple(input.shape)}")

    @classmethod
    def convert(cls, module: torch.nn.Module, process_group: dist.ProcessGroup | None = None) -> torch.nn.Module:
        """Replace every BatchNorm below the module and return it, or the new layer where it is itself a BatchNorm.

        The new layers hold the same parameters, buffers and hooks; a layer used twice stays one layer. Layers that
        have a group (torch's SyncBatchNorm) keep it unless one is given.
        """

        def settle(layer: SyncBatchNorm) -> None:
            if process_group is not None or "process_group" not in layer.__dict__:
                layer.process_group = process_group

        return replace_batchnorms(module, cls, settle, (torch.nn.SyncBatchNorm.forward,))

    convert_sync_batchnorm = convert  # torch's name
