"""What programs ask torch's DistributedDataParallel for beside its documented methods, answered for our wrapper.

Names that mean something here belong in `wrapper`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import DistributedDataParallel

from paceline.errors import ConfigError
from paceline.parallel.bucketed import Bucketed
from paceline.parallel.joinable import TorchJoinable
from paceline.parallel.options import Options
from paceline.parallel.steps import Steps
from paceline.plan import TORCH_CAP_BYTES, plan_torch_start
from paceline.units import MIB

__all__ = ["TorchNames"]

_BUILT_IN: dict[str, Callable[..., Any]] = {
    "ALLREDUCE": default_hooks.allreduce_hook,
    "FP16_COMPRESS": default_hooks.fp16_compress_hook,
}
# As C++ calls them.
_DTYPES = {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}


class TorchNames(TorchJoinable, nn.Module):
    """The attributes and private methods of torch's wrapper that others read, set and call."""

    module: nn.Module
    device_ids: list[int] | None
    logger = None
    mixed_precision = None
    is_multi_device_module = False
    require_forward_param_sync = True
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    broadcast_buffers: bool
    _options: Options
    _ignored: frozenset[str]
    _group: dist.ProcessGroup | None

    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    )

    def _set_up(self) -> Steps:
        raise NotImplementedError

    def _take_down(self) -> None:
        raise NotImplementedError

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def output_device(self) -> int | None:
        return None if self.device_ids is None else self.device_ids[0]

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that was given; where messages of others could come in between, gradients travel in another one."""
        return dist.group.WORLD if self._group is None else self._group

    @property
    def parameters_to_ignore(self) -> set[str]:
        return set(self._ignored)

    @property
    def bucket_bytes_cap(self) -> int:
        """The cap that was asked for; `plan` tells which buckets are in use."""
        caps = [cap for cap in (self._options.bucket_cap_mb, *self._options.caps_list) if cap is not None]
        return int(max(caps) * MIB) if caps else TORCH_CAP_BYTES

    @property
    def require_backward_grad_sync(self) -> bool:
        """torch's name for `do_sync`, which other libraries set."""
        return self._ready.do_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._ready.do_sync = value

    def _set_static_graph(self) -> None:
        """`static_graph=True` after wrapping. Call it on all ranks, before the first step."""
        if self.static_graph:
            warnings.warn("static_graph is set already", stacklevel=2)
            return
        if self._ready.num_steps:
            raise ConfigError("_set_static_graph() comes too late after a step: wrap with static_graph=True")
        self._take_down()
        self.static_graph, self._options = True, replace(self._options, allow_missing=True)
        self._set_up()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        name = getattr(comm_hook_type, "name", str(comm_hook_type))
        if name not in _BUILT_IN:
            raise ConfigError(f"{comm_hook_type} is no built-in communication hook: use {', '.join(_BUILT_IN)}")
        self.register_comm_hook(self.process_group, _BUILT_IN[name])

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """What torch's logger would tell, as far as it exists here; for times see `report`."""
        steps = self._ready
        channel, reducer, gradients = steps.channel, steps.reducer, steps.members.gradients
        dtypes = dict.fromkeys(_DTYPES.get(gradient.dtype, gradient.dtype) for gradient in gradients)
        data: dict[str, str | int] = {
            "module_name": type(self.module).__name__,
            "backend_name": channel.backend,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "dtypes": ", ".join(dtypes),
            "bucket_sizes": _join(plan_torch_start(gradients).bucket_bytes),
            "rank": channel.rank,
            "world_size": channel.world_size,
            "iteration": steps.num_steps,
            "output_device": -1 if self.output_device is None else self.output_device,
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "num_parameter_tensors": len(gradients),
            "total_parameter_size_bytes": sum(gradient.num_bytes for gradient in gradients),
            "broadcast_buffers": int(self.broadcast_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "has_sync_bn": int(any("SyncBatchNorm" in type(layer).__name__ for layer in self.module.modules())),
            "is_multi_device_module": 0,
        }
        if self.static_graph:
            data["static_graph"] = 1
        if isinstance(reducer, Bucketed) and reducer.is_planned:
            data["has_rebuilt_buckets"] = 1
            data["rebuilt_bucket_sizes"] = _join(reducer.plan.bucket_bytes)
            data["rebuilt_per_bucket_param_indices"] = _join(
                " ".join(map(str, indices)) for indices in reducer.plan.partition
            )
            data["prev_iteration_grad_ready_order_indices"] = _join(reducer.ready_order)
        return data


def _join(items: Any) -> str:
    return ", ".join(map(str, items))
