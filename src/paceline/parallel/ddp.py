"""`DDP`: a module whose gradients are averaged over all ranks, in place of torch's DistributedDataParallel.

This file is the outside: options, forward, saving and copying, torch's names. A backward pass is in `backward`.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import DistributedDataParallel
from torch.utils.checkpoint import _StopRecomputationError

from paceline.errors import ConfigError, LaunchError
from paceline.machine import count_cores
from paceline.parallel.backward import BucketedReducer, GradientSync, find_tensors
from paceline.parallel.batchnorm import SyncBatchNorm
from paceline.parallel.buffers import SharedBuffers
from paceline.parallel.channel import Channel, Sent, destroy_group, open_group
from paceline.parallel.control import ControlWords
from paceline.parallel.hooks import CommHook, check_hook
from paceline.parallel.reducers import FlatReducer, OverlapReducer, PerParameterReducer, Reducer
from paceline.parallel.replicas import StructureWatch, check_same_model, read_replica, verify_values
from paceline.parallel.timeline import Report
from paceline.plan import (
    TORCH_CAP_BYTES,
    TORCH_FIRST_CAP_BYTES,
    Gradient,
    Plan,
    plan_like_torch,
    plan_torch_start,
)
from paceline.runtime.world import current_world
from paceline.units import MIB

REDUCERS = ("bucketed", "overlap", "flat", "per_parameter")
_SIMPLE = {"per_parameter": PerParameterReducer, "flat": FlatReducer, "overlap": OverlapReducer}
# On gloo a message needs about this size per rank to be as fast per byte as a larger one.
_GLOO_BYTES_PER_RANK = 4 * MIB
# On NCCL the host pays for each bucket: few, and none so large that everything waits for the last one.
_NCCL_BUCKETS, _NCCL_CAP_BYTES = 16, 256 * MIB

# All in this process: each but the first uses its own group.
_wrappers: weakref.WeakSet[DDP] = weakref.WeakSet()
_SYNC_LAYERS = (SyncBatchNorm, nn.SyncBatchNorm)
_PRECISE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_BUILT_IN_HOOKS: dict[str, Callable[..., Any]] = {
    "ALLREDUCE": default_hooks.allreduce_hook,
    "FP16_COMPRESS": default_hooks.fp16_compress_hook,
}
_CPP_DTYPES = {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that all ranks must share. `check_every` and `statistics_every` count synchronised steps."""

    reducer: str = "bucketed"
    init: str = "broadcast"
    average: str = "ranks"
    plan: Plan | None = None
    bucket_cap_mb: float | None = None
    bucket_cap_mb_list: tuple[float, ...] | None = None
    allow_missing: bool = False
    manual: bool = False
    check_every: int = 100
    statistics_every: int = 1

    def __post_init__(self) -> None:
        for what, value, known in (
            ("reducer", self.reducer, REDUCERS),
            ("init", self.init, ("broadcast", "verify", "none")),
            ("average", self.average, ("ranks", "samples")),
        ):
            if value not in known:
                raise ConfigError(f"{what}={value!r} is unknown: use {', '.join(known)}")
        if self.bucket_cap_mb_list is not None and not self.bucket_cap_mb_list:
            raise ConfigError("bucket_cap_mb_list=[] is empty: give at least one cap in MiB")
        caps = [("bucket_cap_mb", self.bucket_cap_mb), *(("bucket_cap_mb_list", cap) for cap in self.caps_list)]
        for what, cap in caps:
            if cap is not None and not (isinstance(cap, int | float) and math.isfinite(cap) and cap > 0):
                raise ConfigError(f"{what}={cap!r}: must be a number of MiB above 0")
        given = [name for name in ("plan", "bucket_cap_mb", "bucket_cap_mb_list") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} contradict each other: give one")
        if given and self.reducer != "bucketed":
            raise ConfigError(f"{given[0]} contradicts reducer={self.reducer!r}, which has no buckets to plan")
        for what, every in (("check_replicas_every", self.check_every), ("statistics_every", self.statistics_every)):
            if every < 0:
                raise ConfigError(f"{what}={every}: must be a number of steps, or 0 for never")

    @property
    def caps_list(self) -> tuple[float, ...]:
        return self.bucket_cap_mb_list or ()

    def make_planner(
        self, *, on_nccl: bool, with_hook: bool, world_size: int, has_spare_cores: bool
    ) -> Callable[[Sequence[Gradient], Sequence[int]], Plan]:
        """The function that makes a plan from gradients and their ready order."""
        if self.plan is not None:
            plan = self.plan
            return lambda gradients, order: _check_plan(plan, gradients, with_hook)
        if on_nccl and self.bucket_cap_mb is None and not self.caps_list:
            return _plan_for_nccl
        if self.bucket_cap_mb is not None or self.caps_list:
            given = self.caps_list if self.bucket_cap_mb is None else (self.bucket_cap_mb,)
            caps = [max(1, int(cap * MIB)) for cap in given]
        elif with_hook:
            return plan_like_torch
        elif has_spare_cores:
            # Small buckets are sent early, where cores are free to carry them. Elsewhere they only cost.
            caps = [TORCH_FIRST_CAP_BYTES, min(world_size * _GLOO_BYTES_PER_RANK, TORCH_CAP_BYTES)]
        else:
            caps = [TORCH_CAP_BYTES]
        return lambda gradients, order: plan_like_torch(gradients, order, caps)

    def describe(self) -> dict[str, Any]:
        """What the ranks compare."""
        plan = "" if self.plan is None else self.plan.to_json()
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "plan": plan}


def _plan_for_nccl(gradients: Sequence[Gradient], order: Sequence[int]) -> Plan:
    total = sum(gradient.num_bytes for gradient in gradients)
    cap = min(max(total // _NCCL_BUCKETS, TORCH_CAP_BYTES), _NCCL_CAP_BYTES)
    return plan_like_torch(gradients, order, [cap])


def _check_plan(plan: Plan, gradients: Sequence[Gradient], with_hook: bool) -> Plan:
    """The given plan, if it is one for this model."""
    if len(plan.gradients) != len(gradients):
        text = f"the plan is for {len(plan.gradients)} gradients, and the model has {len(gradients)}"
        raise ConfigError(text, code="plan")
    for index, (planned, real) in enumerate(zip(plan.gradients, gradients, strict=True)):
        if (planned.num_bytes, planned.dtype) != (real.num_bytes, real.dtype):
            raise ConfigError(
                f"the plan is for another model: gradient {index} is {planned.name} ({planned.num_bytes} bytes "
                f"{planned.dtype}) there, and {real.name} ({real.num_bytes} bytes {real.dtype}) here",
                code="plan",
            )
    if plan.is_split and with_hook:
        raise ConfigError("the plan splits a gradient over buckets, and a communication hook needs whole ones")
    return Plan(tuple(gradients), plan.buckets, plan.rule)


_computing: list[int] = []


@contextlib.contextmanager
def only_computing(num_ranks: int) -> Iterator[None]:
    """Wrappers that are built inside count `num_ranks` ranks on this host: the others wait and use no core."""
    _computing.append(num_ranks)
    try:
        yield
    finally:
        _computing.pop()


def has_spare_cores(world_size: int) -> bool:
    """Whether this host has a core for each local rank in addition to those that compute."""
    world = current_world()
    local = world.local_world_size if world is not None else int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return count_cores() >= min([local, *_computing]) * (torch.get_num_threads() + 1)


class DDP(Joinable, nn.Module):
    """Wraps a module. After each backward its gradients are the average over all ranks.

    The arguments up to `forward_sync_buffers` are those of torch's DistributedDataParallel, and mean the same unless
    `docs/ddp.md` says otherwise. These are added:

    `reducer`: `bucketed`, or a simpler one: `overlap`, `flat`, `per_parameter`.
    `plan`: the buckets, instead of a cap.
    `init`: `broadcast` rank 0's values, `verify` that all are equal, or `none`.
    `average`: `ranks` gives ranks equal weights. `samples` weights them by their samples, which
    `samples_of(*args, **kwargs)` counts (by default the first dimension of the first tensor).
    `manual`: gradients are averaged only by `sync_gradients()`.
    `check_replicas_every`: compare the parameters of the ranks every N synchronised steps (0: never).
    `statistics_every`: average BatchNorm's running statistics every N synchronised steps (0: never).
    `ignore`: full names of parameters and buffers that are not synchronised.
    Collective: every rank must call this, and every method that says so.
    """

    logger = None
    mixed_precision = None
    is_multi_device_module = False
    require_forward_param_sync = True
    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    )

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reducer: str = "bucketed",
        plan: Plan | None = None,
        init: str | None = None,
        average: str = "ranks",
        samples_of: Callable[..., int] | None = None,
        manual: bool = False,
        check_replicas_every: int = 100,
        statistics_every: int | None = None,
        ignore: Iterable[str] = (),
    ) -> None:
        super().__init__()
        refused = {
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
        }
        for name, value in refused.items():
            if value is not None:
                raise ConfigError(f"{name} is not supported: leave it out (for mixed precision, use torch.autocast)")
        if init is not None and not init_sync and init != "none":
            raise ConfigError(f"init_sync=False contradicts init={init!r}: give one of them")
        sync_buffers = all(value is not False for value in (broadcast_buffers, forward_sync_buffers))
        if statistics_every and not sync_buffers:
            raise ConfigError(f"broadcast_buffers=False contradicts statistics_every={statistics_every}")
        self.module = module
        self.dim = dim
        self.device_ids = _check_devices(module, device_ids)
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.broadcast_buffers = gradient_as_bucket_view, sync_buffers
        # As in torch, its attribute may hold names that the module does not have.
        known = {name for name, _ in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]}
        self._ignored = frozenset(ignore) | known & set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._samples_of = samples_of or _count_samples
        self._comm_hook: CommHook | None = None
        self._options = Options(
            reducer=reducer,
            init=init or ("broadcast" if init_sync else "none"),
            average=average,
            plan=plan,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=None if bucket_cap_mb_list is None else tuple(bucket_cap_mb_list),
            allow_missing=find_unused_parameters or static_graph or skip_all_reduce_unused_params,
            manual=manual,
            check_every=check_replicas_every,
            statistics_every=(1 if statistics_every is None else statistics_every) if sync_buffers else 0,
        )
        self._group = _find_group(process_group, device_mesh)
        self._gradient_group: dist.ProcessGroup | None = None
        self._sync: GradientSync | None = None
        self.rebuild()

    # -- setting up ---------------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Read the module again, after parameters were added, frozen, unfrozen or moved.

        Collective: every rank must call this.
        """
        if self._sync is not None and self._sync.is_joining:
            raise ConfigError("rebuild() inside join(): ranks without data cannot take part in it")
        replica = read_replica(self.module, self._ignored)
        channel = self._open_channel()
        # torch can make only one more group of a part of the ranks: who needs several must pass them.
        is_shared = self._group is None and any(other is not self for other in _wrappers)
        if self._gradient_group is None and any(channel.share(self._syncs_in_forward() or is_shared)):
            # Ranks may send a bucket at different times: messages of others must not come in between.
            self._gradient_group = open_group(channel.group, channel.backend)
            if self._gradient_group is not None:
                weakref.finalize(self, destroy_group, self._gradient_group).atexit = False
            channel = self._open_channel()
        check_same_model(replica, self._options.describe(), channel)
        if self._options.init == "verify":
            verify_values(replica, channel)
        elif self._options.init == "broadcast" and channel.world_size > 1:
            channel.broadcast(replica.tensors())
        self.stop()
        self._set_up()
        _wrappers.add(self)

    def _syncs_in_forward(self) -> bool:
        return any(isinstance(layer, _SYNC_LAYERS) for layer in self.module.modules())

    def _open_channel(self) -> Channel:
        group = self._gradient_group or (dist.group.WORLD if self._group is None else self._group)
        if not dist.is_initialized() or group is None:
            raise LaunchError("no process group is open: call paceline.init() first")
        # A module on one GPU sends from there.
        first = next((p.device for p in self.module.parameters() if p.requires_grad), torch.device("cpu"))
        return Channel(group, first)

    def _set_up(self) -> GradientSync:
        """Build everything that this rank needs for its steps. Sends nothing: one rank can load or copy a model."""
        replica = read_replica(self.module, self._ignored)
        channel, options = self._open_channel(), self._options
        buffers = SharedBuffers(self.module, self._ignored, channel.device, options.statistics_every)
        is_precise = options.reducer in ("per_parameter", "overlap") or all(p.dtype in _PRECISE for p in replica.params)
        control = ControlWords(
            channel.rank,
            channel.world_size,
            num_used=len(replica.params) if options.allow_missing else 0,
            num_statistics=buffers.num_words(is_precise),
        )
        reducer: Reducer
        if options.reducer == "bucketed":
            planner = options.make_planner(
                on_nccl=channel.is_nccl,
                with_hook=self._comm_hook is not None,
                world_size=channel.world_size,
                has_spare_cores=channel.device.type != "cpu" or has_spare_cores(channel.world_size),
            )
            reducer = BucketedReducer(replica, channel, control.num_words, planner, self._comm_hook)
        else:
            reducer = _SIMPLE[options.reducer](replica, channel, control.num_words)
        do_sync = self._sync.do_sync if self._sync is not None else True
        self._sync = GradientSync(
            replica,
            channel,
            reducer,
            control,
            buffers,
            average=options.average,
            allow_missing=options.allow_missing,
            # A hook may keep replicas different on purpose, as local SGD does.
            check_every=options.check_every if self._comm_hook is None else 0,
            manual=options.manual,
            syncs_in_forward=self._syncs_in_forward(),
        )
        self._sync.do_sync = do_sync
        self._watch = StructureWatch(replica, self._ignored)
        # Hooks on the parameters must not outlive the wrapper: the module may be wrapped again.
        self._finalizer = weakref.finalize(self, self._sync.stop)
        return self._sync

    @property
    def _ready(self) -> GradientSync:
        """Set up on first use after loading or copying."""
        return self._sync if self._sync is not None else self._set_up()

    def stop(self) -> None:
        """Remove all hooks from the module: nothing is synchronised from now on."""
        if self._sync is not None:
            self._finalizer()

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.device_ids is not None:
            args, kwargs = _move_inputs((args, kwargs), torch.device("cuda", self.device_ids[0]))
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        known = self._sync.replica.params if self._sync is not None else ()
        if not any(param.requires_grad for params in (known, self.module.parameters()) for param in params):
            return self.module(*args, **kwargs)  # everything is frozen, as in a teacher
        sync = self._ready
        sync.before_forward(self._watch.find_change(self.module))
        try:
            samples = operator.index(self._samples_of(*args, **kwargs)) if self._options.average == "samples" else 0
            output = self.module(*args, **kwargs)
        except _StopRecomputationError:  # how checkpointing ends a forward that it has repeated far enough
            raise
        except Exception as error:
            # In evaluation the other ranks may not be in a step.
            if self.training:
                sync.fail(error)
            raise
        sync.after_forward(output, samples, self.module.training)
        return output

    # -- which backwards are synchronised -----------------------------------------------------------------------------

    @property
    def do_sync(self) -> bool:
        """Whether the next backward is synchronised. Read when backward begins, not in forward."""
        return self._ready.do_sync

    def enable_grad_sync(self) -> None:
        """Synchronise from the next backward on."""
        self._ready.do_sync = True

    def disable_grad_sync(self) -> None:
        """Accumulate on each rank alone from the next backward on."""
        self._ready.do_sync = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on each rank alone. The forward may be outside, and it may be nested."""
        sync = self._ready
        before, sync.do_sync = sync.do_sync, False
        try:
            yield
        finally:
            sync.do_sync = before

    def sync_gradients(self) -> None:
        """Average gradients that no step has synchronised yet. Does nothing without `do_sync`, or where there are none.

        Collective: every rank must call this.
        """
        sync = self._ready
        # In manual mode a rank without a backward takes part, too, so that the others do not wait.
        if sync.do_sync and (sync.is_pending or self._options.manual):
            sync.synchronize()

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train inside with different numbers of batches: a rank without data takes part with zeros.

        With `average='samples'` every sample has the same weight. By ranks, the sum is divided by all of them, or with
        `divide_by_initial_world_size=False` by those that still have data. At the end all ranks have the parameters of
        one that was active last. Collective: every rank must enter and leave.
        """
        if not enable:
            yield
            return
        sync = self._ready
        with sync.joining(divide_by_initial_world_size, throw_on_early_termination):
            yield
            while not sync.step_without_data():
                pass
            sync.broadcast_final()

    # -- plans, hooks and times ---------------------------------------------------------------------------------------

    @property
    def _planned(self) -> BucketedReducer | None:
        """The reducer, if it has buckets and has made its plan."""
        reducer = self._ready.reducer
        return reducer if isinstance(reducer, BucketedReducer) and reducer.is_planned else None

    @property
    def plan(self) -> Plan | None:
        """The buckets in use; None before the first synchronised step, and for reducers without buckets."""
        return None if self._planned is None else self._planned.plan

    @property
    def exposed_s(self) -> float | None:
        """Seconds of communication after this rank's backward, in a recent step; None where it was not measured."""
        return None if self._planned is None else self._planned.timeline.exposed_s

    def time_next_step(self) -> None:
        """Time the end of every bucket in the next synchronised step, which is otherwise done in few steps only."""
        if self._planned is not None:
            self._planned.timeline.sample_next = True

    def count_sent(self) -> Sent:
        """All messages of gradients since the wrapper was made or rebuilt, except those of a communication hook."""
        return self._ready.channel.sent

    def report(self) -> Report:
        """Where the time of a recent step went, on this rank. Cheap, and sends no message."""
        sync = self._ready
        channel, reducer = sync.channel, sync.reducer
        if not isinstance(reducer, BucketedReducer):
            raise ConfigError(f"reducer={self._options.reducer!r} records no times: only 'bucketed' does")
        times = reducer.timeline.read() if reducer.is_planned else None
        return Report(channel.rank, channel.world_size, channel.backend, sync.num_steps, reducer.plan, times)

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket, as in torch. All ranks call it, before the first step."""
        check_hook(hook)
        if self._options.reducer != "bucketed":
            raise ConfigError(f"a communication hook needs buckets, and reducer={self._options.reducer!r} has none")
        if self._comm_hook is not None:
            raise ConfigError("a communication hook is already registered: a wrapper takes one")
        if self.plan is not None:  # another rank may already be sending buckets by it
            raise ConfigError(
                "a communication hook cannot be registered after a synchronised step: call rebuild() first"
            )
        if self._options.plan is not None and self._options.plan.is_split:
            raise ConfigError("the plan splits a gradient over buckets, and a communication hook needs whole ones")
        self.stop()
        self._comm_hook = CommHook(state, hook)
        self._set_up()

    # -- being a module -----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):  # a copy that is being made, or a lookup by Python
                raise
        advice = f"nor has its module, {type(module).__name__}"
        try:
            value = getattr(module, name)  # methods and attributes of the user's own model
            if not name.startswith("_"):
                return value
            advice = f"but its module, {type(module).__name__}, has: write .module.{name}"
            raise AttributeError(name)
        except AttributeError as error:
            text = f"{type(self).__name__!r} object has no attribute {name!r}, {advice}"
            raise AttributeError(text, name=name, obj=self) from error

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes the keys of the wrapper as well as those of the module."""
        if not self.state_dict().keys().isdisjoint(state_dict) or not state_dict:
            return super().load_state_dict(state_dict, strict, assign)
        return self.module.load_state_dict(state_dict, strict, assign)

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            text = "a wrapper with its own process group cannot be pickled: save its state_dict instead"
            raise ConfigError(text, code="not-picklable")
        return self._plain_state()

    def _plain_state(self) -> dict[str, Any]:
        left_out = ("_sync", "_watch", "_finalizer", "_group", "_gradient_group")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._group, self._gradient_group, self._sync = None, None, None

    def __deepcopy__(self, memo: dict[int, Any]) -> DDP:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        hook, state = self._comm_hook, self._plain_state()
        state.pop("_comm_hook")
        twin.__dict__.update(copy.deepcopy(state, memo))
        # A group, and a hook that may hold one, are shared: a process cannot copy them.
        twin._group, twin._gradient_group = self._group, None
        twin._comm_hook, twin._sync = hook, None
        return twin

    # -- attributes and private methods of torch's wrapper that other programs use ------------------------------------

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
        """The group that was given. Where others send in it, too, gradients travel in another one."""
        return dist.group.WORLD if self._group is None else self._group

    @property
    def parameters_to_ignore(self) -> set[str]:
        return set(self._ignored)

    @property
    def bucket_bytes_cap(self) -> int:
        """The cap that was given; `plan` shows the buckets in use."""
        caps = [cap for cap in (self._options.bucket_cap_mb, *self._options.caps_list) if cap is not None]
        return int(max(caps) * MIB) if caps else TORCH_CAP_BYTES

    @property
    def require_backward_grad_sync(self) -> bool:
        """torch's name for `do_sync`, which other libraries set."""
        return self._ready.do_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._ready.do_sync = value

    @property
    def join_device(self) -> torch.device:
        return self._ready.channel.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        return self.process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For torch's `Join([model, optimizer])`; `join` needs none of this."""
        return _TorchJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    def _set_static_graph(self) -> None:
        """`static_graph=True` after wrapping. Call it on all ranks, before the first step."""
        if self.static_graph:
            warnings.warn("static_graph is already set", stacklevel=2)
            return
        if self._ready.num_steps:
            raise ConfigError("_set_static_graph() must be called before the first step: wrap with static_graph=True")
        self.stop()
        self.static_graph, self._options = True, replace(self._options, allow_missing=True)
        self._set_up()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        name = getattr(comm_hook_type, "name", str(comm_hook_type))
        if name not in _BUILT_IN_HOOKS:
            raise ConfigError(
                f"{comm_hook_type} is not a built-in communication hook: use {', '.join(_BUILT_IN_HOOKS)}"
            )
        self.register_comm_hook(self.process_group, _BUILT_IN_HOOKS[name])

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """The fields of torch's logger that exist here. `report` has the times."""
        sync = self._ready
        channel, gradients = sync.channel, sync.replica.gradients
        dtypes = dict.fromkeys(_CPP_DTYPES.get(gradient.dtype, gradient.dtype) for gradient in gradients)
        data: dict[str, str | int] = {
            "module_name": type(self.module).__name__,
            "backend_name": channel.backend,
            "device_ids": _join(self.device_ids or ()),
            "dtypes": _join(dtypes),
            "bucket_sizes": _join(plan_torch_start(gradients).bucket_bytes),
            "rank": channel.rank,
            "world_size": channel.world_size,
            "iteration": sync.num_steps,
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
        if (reducer := self._planned) is not None:
            data["has_rebuilt_buckets"] = 1
            data["rebuilt_bucket_sizes"] = _join(reducer.plan.bucket_bytes)
            data["rebuilt_per_bucket_param_indices"] = _join(
                " ".join(map(str, indices)) for indices in reducer.plan.partition
            )
            data["prev_iteration_grad_ready_order_indices"] = _join(reducer.ready_order)
        return data


DataParallel = DDP


class _TorchJoinHook(JoinHook):
    """Takes part in the steps of the ranks that still have data, in torch's own `Join`."""

    def __init__(self, model: DDP, divide_by_world: bool) -> None:
        self._model, self._sync = model, model._ready
        # torch announces a step in forward. Here it is known when backward begins that ranks without data are needed.
        self._context = self._sync.joining(divide_by_world, announce=lambda: Join.notify_join_context(model))
        self._context.__enter__()

    def main_hook(self) -> None:
        self._sync.step_without_data(keep_gradients=True)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._sync.broadcast_final()
        self._context.__exit__(None, None, None)
        self._model._join_config = _JoinConfig.construct_disabled_join_config()


def _join(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))


# -- arguments and inputs ---------------------------------------------------------------------------------------------


def _check_devices(module: nn.Module, device_ids: Sequence[int | torch.device] | None) -> list[int] | None:
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise ConfigError(f"device_ids={list(device_ids)}: one process drives one device here; give one, or none")
    first = device_ids[0]
    device = torch.device("cuda", first) if isinstance(first, int) else torch.device(first)
    elsewhere = {str(param.device) for param in module.parameters() if param.device != device}
    if elsewhere:
        raise ConfigError(
            f"device_ids={list(device_ids)}, but the module has parameters on {', '.join(sorted(elsewhere))}: "
            f"move it to {device} first, or leave device_ids out"
        )
    return [device.index or 0]


def _find_group(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is None:
        return group
    if group is not None:
        raise ConfigError("process_group and device_mesh are both given: give one of them")
    if mesh.ndim != 1:
        raise ConfigError(f"the device mesh has {mesh.ndim} dimensions: pass the one for data, such as mesh['dp']")
    return mesh.get_group()


def _move_inputs(value: Any, device: torch.device) -> Any:
    """The same nested value with every tensor on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move_inputs(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_move_inputs(item, device) for item in value)
    if isinstance(value, dict):
        moved = value.copy()
        for key, item in value.items():
            moved[key] = _move_inputs(item, device)
        return moved
    if is_dataclass(value) and not isinstance(value, type):
        changes = {f.name: _move_inputs(getattr(value, f.name), device) for f in fields(value) if f.init}
        return replace(value, **changes)
    return value


def _count_samples(*args: Any, **kwargs: Any) -> int:
    """The first dimension of the first tensor."""
    for tensor in find_tensors((args, kwargs)):
        if tensor.dim():
            return tensor.size(0)
    raise ConfigError("average='samples' finds no tensor with a first dimension in the inputs: pass samples_of")
