"""BatchNorm over the global batch (`SyncBatchNorm`) and over sub-batches (`GhostBatchNorm`), on CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.lazy import LazyModuleMixin

from paceline.errors import ConfigError
from paceline.parallel.channel import naming_lost_peers
from paceline.torch_internals import BatchNorm

# torch 2.13 renamed this function; 2.11 has only the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _AnyInputBatchNorm(BatchNorm):
    """Base class of both layers: accepts inputs (N, C, ...), and updates running statistics once per forward."""

    _replaceable: tuple[Callable[..., Any], ...] = (BatchNorm.forward,)  # forward methods that `convert` may replace

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected an input (N, {self.num_features}, ...), got {tuple(input.shape)}")

    @torch.no_grad()
    def _track(self, mean: Tensor | None, variance: Tensor | None) -> None:
        """Count the batch and update the running statistics; None only counts, as torch does for an empty batch."""
        factor = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1 / float(self.num_batches_tracked) if factor is None else factor
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            if running is not None and value is not None:
                running.lerp_(value.to(running.dtype), factor or 0.0)

    @classmethod
    def _replace_in(cls, module: nn.Module, name_of_setting: str, setting: Any) -> nn.Module:
        """Replace every BatchNorm with a layer that shares its parameters, buffers and hooks. If it raises, nothing is
        replaced. Sets the given attribute on each new layer; None keeps the value of layers that already have one."""
        replaced: dict[nn.Module, _AnyInputBatchNorm] = {}
        for name, layer in module.named_modules():
            if not isinstance(layer, BatchNorm):
                continue
            where = f"{name or 'the module'} ({type(layer).__name__})"
            if isinstance(layer, LazyModuleMixin):
                text = f"{where} has no channels yet: run one batch through it, then convert"
                raise ConfigError(text, code="lazy-layer")
            if not isinstance(layer, cls) and type(layer).forward not in cls._replaceable:
                text = f"{where} overrides forward, which would be lost: replace it manually"
                raise ConfigError(text, code="custom-forward")
            new = replaced[layer] = layer if isinstance(layer, cls) else cls.__new__(cls)
            # Share the dicts of parameters, buffers and hooks, so that an existing hook's handle still removes it.
            new.__dict__.update(layer.__dict__)
        for new in replaced.values():
            if setting is not None or name_of_setting not in new.__dict__:
                setattr(new, name_of_setting, setting)
        for parent in list(module.modules()):
            for name, child in parent._modules.items():
                if child in replaced:
                    parent._modules[name] = replaced[child]
        return replaced.get(module, module)


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Reshape C values to broadcast over an (N, C, ...) tensor."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _gather_statistics(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and sum of squared deviations per channel of the global batch, and its number of values per channel, in
    float64. Every rank computes the same result from the gathered messages. Collective, even with an empty batch."""
    channels, axes = x.shape[1], [0, *range(2, x.dim())]
    message = x.new_zeros(2 * channels + 1, dtype=_statistics_dtype(x))
    if x.numel():  # the mean of an empty batch is nan; with a count of 0 these zeros drop out below
        # Two plain passes: as accurate as torch.var_mean and, on a CPU, 3 to 6 times as fast.
        mean = x.mean(axes, dtype=message.dtype)
        message[:channels], message[-1] = mean, x.numel() // channels
        message[channels:-1] = (x - _per_channel(mean, x)).square_().sum(axes)
    gathered = message.new_empty(dist.get_world_size(group) * message.numel())
    with naming_lost_peers("the statistics of a SyncBatchNorm cannot be gathered"):
        _all_gather(gathered, message, group)
    means, squares, counts = gathered.view(-1, message.numel()).double().split([channels, channels, 1], dim=1)
    total = counts.sum()
    # Chan's parallel formula: deviations are taken from means, so a large mean does not cancel the variance.
    mean = (counts * means).sum(0) / total.clamp(min=1)
    return mean, squares.sum(0) + (counts * (means - mean) ** 2).sum(0), total


class _Normalize(torch.autograd.Function):
    """Normalize with global statistics. The gradient accounts for their dependence on every rank's input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: tuple[Tensor, ...], group: Any
    ) -> Tensor:
        mean, invstd, total = (value.to(_statistics_dtype(x)) for value in statistics)
        scale = invstd if weight is None else invstd * weight
        ctx.save_for_backward(x, mean, invstd, total, scale)
        ctx.group = group
        out = (x - _per_channel(mean, x)).mul_(_per_channel(scale, x))
        if bias is not None:
            out.add_(_per_channel(bias, x))
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, invstd, total, scale = ctx.saved_tensors
        axes = [0, *range(2, x.dim())]
        centered = x - _per_channel(mean, x)
        # The local gradients of weight and bias. Their sums over the ranks are needed for the input's gradient.
        sums = torch.stack([grad_out.sum(axes, dtype=mean.dtype), (grad_out * centered).sum(axes) * invstd])
        grad_bias, grad_weight = sums.unbind()
        grad_x = None
        if ctx.needs_input_grad[0]:
            global_sums = sums.clone()
            with naming_lost_peers("the gradient of a SyncBatchNorm cannot be reduced"):
                dist.all_reduce(global_sums, group=ctx.group)
            mean_dy, mean_dy_xhat = global_sums / total
            grad_x = centered.mul_(_per_channel(-invstd * mean_dy_xhat, x)).sub_(_per_channel(mean_dy, x))
            grad_x = grad_x.add_(grad_out).mul_(_per_channel(scale, x)).to(x.dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return grad_x, grad_weight if needs_weight else None, grad_bias if needs_bias else None, None, None


class SyncBatchNorm(_AnyInputBatchNorm):
    """torch's BatchNorm for inputs (N, C, ...), with statistics over the batches of all ranks of a process group.

    Collective in training: every rank must run forward and then backward through the layers in the same order, and its
    loss must depend on the output. Batches may differ in size or be empty. The input must need a gradient on all ranks
    or on none. Gradients of weight and bias cover the rank's own batch only. Not twice differentiable. In evaluation,
    without a process group, or with a single rank, it is torch's BatchNorm. `process_group=None` is the default group.
    """

    _replaceable = (BatchNorm.forward, nn.SyncBatchNorm.forward)

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True,
        track_running_stats: bool = True, process_group: dist.ProcessGroup | None = None, *rest: Any, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_features, eps, momentum, affine, track_running_stats, *rest, **options)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not dist.is_initialized() or (size := dist.get_world_size(self.process_group)) == 1:
            return super().forward(input)
        if size < 1:
            text = "trains a SyncBatchNorm but is not in its process group: give every rank a group that it belongs to"
            raise ConfigError(f"rank {dist.get_rank()} {text}", code="not-in-group")
        self._check_input_dim(input)
        mean, squares, total = _gather_statistics(input.detach(), self.process_group)
        # Reading the total waits for a GPU. A rank with at least two values need not read it. If all ranks together
        # have fewer than two values, every rank reads the total, so that either all ranks raise or none does.
        known = int(total) if input.numel() < 2 * self.num_features else None
        if known == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got 1 on {size} ranks")
        if self.track_running_stats:
            self._track(*((None, None) if known == 0 else (mean, squares / (total - 1))))
        total = total.clamp(min=1)
        statistics = mean, torch.rsqrt(squares / total + self.eps), total
        return _Normalize.apply(input, self.weight, self.bias, statistics, self.process_group)  # type: ignore[no-any-return]

    @classmethod
    def convert(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """Replace every BatchNorm, and return the module (or the new layer, if it is a BatchNorm). Layers of torch's
        SyncBatchNorm keep their group unless you pass one."""
        return cls._replace_in(module, "process_group", process_group)

    convert_sync_batchnorm = convert  # torch's name


SYNC_LAYERS = (SyncBatchNorm, nn.SyncBatchNorm)


def syncs_in_forward(module: nn.Module) -> bool:
    return any(isinstance(layer, SYNC_LAYERS) for layer in module.modules())


def _fold(x: Tensor, parts: int, back: bool = False) -> Tensor:
    """Reshape (parts * n, C, ...) to (n, parts * C, ...) in the same memory format; `back` does the reverse."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats and not x.is_contiguous() and x.is_contiguous(memory_format=formats[x.dim()]):
        last = x.movedim(1, -1)
        if back:
            return last.view(len(x), *x.shape[2:], parts, -1).movedim(-2, 0).flatten(0, 1).movedim(-1, 1)
        return last.view(parts, -1, *x.shape[2:], x.shape[1]).movedim(0, -2).flatten(-2).movedim(-1, 1)
    if back:
        return x.reshape(len(x), parts, -1, *x.shape[2:]).transpose(0, 1).flatten(0, 1)
    return x.reshape(parts, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


class GhostBatchNorm(_AnyInputBatchNorm):
    """torch's BatchNorm for inputs (N, C, ...), with statistics over `ghost_size` samples at a time (Hoffer 2017).

    In training each sub-batch of `ghost_size` consecutive samples is normalized separately. So is a smaller last
    sub-batch, unless it has a single value per channel. Running statistics move once per forward, toward the average
    over the sub-batches weighted by size. In evaluation, and for batches of at most `ghost_size`, this is torch's
    layer.
    """

    def __init__(self, num_features: int, ghost_size: int, *args: Any, **options: Any) -> None:
        super().__init__(num_features, *args, **options)
        self.ghost_size = self._check_size(ghost_size)

    @staticmethod
    def _check_size(ghost_size: int) -> int:
        if ghost_size < 2:
            raise ConfigError(f"ghost_size={ghost_size}: must be at least 2 samples")
        return ghost_size

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        whole, rest = divmod(len(input), self.ghost_size)
        if rest and rest * input[0, 0].numel() < 2:
            whole, rest = whole - 1, rest + self.ghost_size
        if not self.training or whole + (rest > 0) < 2:
            return super().forward(input)
        edge = len(input) - rest
        pieces = [(x, parts) for x, parts in ((input[:edge], whole), (input[edge:], 1)) if len(x)]
        outs, *both = zip(*(self._normalize(x, parts, len(x) / len(input)) for x, parts in pieces), strict=True)
        if self.track_running_stats:
            self._track(*(None if values[0] is None else sum(values) for values in both))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _normalize(self, x: Tensor, parts: int, share: float) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Normalize equal sub-batches. Returns the output and their contributions to the mean and unbiased variance."""
        # With a momentum of 1, torch writes the batch statistics into these tensors.
        own = self.running_mean, self.running_var
        mean, variance = (None if value is None else value.new_zeros(parts * self.num_features) for value in own)
        # Sub-batches become channels, so a single call of torch's kernel handles all of them.
        weight, bias = (None if values is None else values.repeat(parts) for values in (self.weight, self.bias))
        out = F.batch_norm(_fold(x, parts), mean, variance, weight, bias, True, 1.0, self.eps)
        mean, variance = (None if v is None else v.view(parts, -1).mean(0) * share for v in (mean, variance))
        return _fold(out, parts, back=True), mean, variance

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_size={self.ghost_size}"

    @classmethod
    def convert(cls, module: nn.Module, ghost_size: int) -> nn.Module:
        """Replace every BatchNorm in the module, and return the module (or the new layer, if it is a BatchNorm)."""
        return cls._replace_in(module, "ghost_size", cls._check_size(ghost_size))
