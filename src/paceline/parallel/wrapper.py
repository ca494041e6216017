"""`DataParallel`: a module whose gradients are averaged over all ranks, in place of torch's DistributedDataParallel.

This file is the outside: arguments, forward, saving and copying. A backward pass is in `steps` and `bucketed`.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import _StopRecomputationError

from paceline.errors import ConfigError, LaunchError
from paceline.parallel.batchnorm import SyncBatchNorm
from paceline.parallel.bucketed import Bucketed
from paceline.parallel.buffers import SharedBuffers
from paceline.parallel.channel import Channel
from paceline.parallel.comm_hooks import CommHook, check_hook
from paceline.parallel.inputs import count_samples, move_inputs
from paceline.parallel.insight import Insight
from paceline.parallel.ladder import Flat, Overlap, PerParameter, Reducer
from paceline.parallel.options import Options
from paceline.parallel.placement import destroy_group, has_spare_cores, open_group, settle_devices, settle_group
from paceline.parallel.replicas import check_alike, find_members, verify
from paceline.parallel.steps import StepOptions, Steps
from paceline.parallel.structure import StructureWatch
from paceline.parallel.torch_names import TorchNames
from paceline.parallel.words import Tail
from paceline.plan import Plan

__all__ = ["DataParallel"]

_SIMPLE = {"per_parameter": PerParameter, "flat": Flat, "overlap": Overlap}
# All that live in this process; a second one gets a group of its own.
_wrappers: weakref.WeakSet[DataParallel] = weakref.WeakSet()
_MEETING = (SyncBatchNorm, nn.SyncBatchNorm)
_PRECISE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class DataParallel(Insight, TorchNames):
    """Wraps a module; after each backward its gradients are the average over all ranks.

    The arguments up to `forward_sync_buffers` are those of torch's DistributedDataParallel, and mean the same here
    unless said otherwise; `docs/ddp.md` has the list. Ours:

    `reducer`: `bucketed`, or a simpler rung of the ladder: `overlap`, `flat`, `per_parameter`.
    `plan`: the buckets, instead of a cap. `init`: `broadcast` rank 0's values, `verify` that all are equal, or `none`.
    `average`: `ranks` weighs ranks alike; `samples` weighs them by their samples, which `samples_of(*args, **kwargs)`
    counts (by default the first dimension of the first tensor).
    `manual`: gradients are averaged only by `sync_gradients()`.
    `check_replicas_every`: so many synchronised steps, parameters are compared (0: never).
    `statistics_every`: so many synchronised steps, BatchNorm's running statistics are averaged (0: never).
    Collective: every rank must call this, and every method that says so.
    """

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
        self.device_ids = settle_devices(module, device_ids)
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.broadcast_buffers = gradient_as_bucket_view, sync_buffers
        # torch does not mind names in its attribute that the module does not have.
        known = {name for name, _ in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]}
        self._ignored = frozenset(ignore) | known & set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._samples_of = samples_of or count_samples
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
        self._group = settle_group(process_group, device_mesh)
        self._gradient_group: dist.ProcessGroup | None = None
        self._steps: Steps | None = None
        self.rebuild()

    # -- setting up ---------------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Look at the module anew, after parameters were added, frozen, unfrozen or moved.

        Collective: every rank must call this.
        """
        if self._steps is not None and self._steps.is_joining:
            raise ConfigError("rebuild() inside join(): ranks that are done cannot take part in it")
        members = find_members(self.module, self._ignored)
        channel = self._open_channel()
        # Among some ranks only, torch can make but one group more: whoever needs several passes them.
        crowded = self._group is None and any(other is not self for other in _wrappers)
        if self._gradient_group is None and any(channel.share(self._meets() or crowded)):
            # Where a bucket leaves may differ from rank to rank: messages of others must not come in between.
            self._gradient_group = open_group(channel.group, channel.backend)
            if self._gradient_group is not None:
                weakref.finalize(self, destroy_group, self._gradient_group).atexit = False
            channel = self._open_channel()
        check_alike(members, self._options.describe(), channel)
        if self._options.init == "verify":
            verify(members, channel)
        elif self._options.init == "broadcast" and channel.world_size > 1:
            channel.broadcast(members.tensors())
        self._take_down()
        self._set_up()
        _wrappers.add(self)

    def _meets(self) -> bool:
        return any(isinstance(layer, _MEETING) for layer in self.module.modules())

    def _open_channel(self) -> Channel:
        group = self._gradient_group or (dist.group.WORLD if self._group is None else self._group)
        if not dist.is_initialized() or group is None:
            raise LaunchError("no process group is open: call paceline.init() first")
        # Where the messages live: a module on one GPU sends from there.
        first = next((p.device for p in self.module.parameters() if p.requires_grad), torch.device("cpu"))
        return Channel(group, first)

    def _set_up(self) -> Steps:
        """Everything that this rank needs for its steps. Sends nothing, so that one rank can load or copy a model."""
        members = find_members(self.module, self._ignored)
        channel, options = self._open_channel(), self._options
        buffers = SharedBuffers(self.module, self._ignored, channel.device, options.statistics_every)
        precise = options.reducer in ("per_parameter", "overlap") or all(p.dtype in _PRECISE for p in members.params)
        tail = Tail(
            channel.rank,
            channel.world_size,
            num_used=len(members.params) if options.allow_missing else 0,
            num_statistics=buffers.num_words(precise),
        )
        reducer: Reducer
        if options.reducer == "bucketed":
            planner = options.make_planner(
                on_nccl=channel.is_nccl,
                with_hook=self._comm_hook is not None,
                world_size=channel.world_size,
                has_spare_cores=channel.device.type != "cpu" or has_spare_cores(channel.world_size),
            )
            reducer = Bucketed(members, channel, tail.num_words, planner, self._comm_hook)
        else:
            reducer = _SIMPLE[options.reducer](members, channel, tail.num_words)
        step_options = StepOptions(
            average=options.average,
            allow_missing=options.allow_missing,
            # A hook may keep replicas apart on purpose, as local SGD does.
            check_every=options.check_every if self._comm_hook is None else 0,
            manual=options.manual,
            meets_in_forward=self._meets(),
        )
        do_sync = self._steps.do_sync if self._steps is not None else True
        self._steps = Steps(members, channel, reducer, tail, buffers, step_options)
        self._steps.do_sync = do_sync
        self._watch = StructureWatch(members, self._ignored)
        # Hooks on the parameters must not outlive the wrapper: the module may be wrapped again.
        self._finalizer = weakref.finalize(self, self._steps.stop)
        return self._steps

    def _take_down(self) -> None:
        if self._steps is not None:
            self._finalizer()

    @property
    def _ready(self) -> Steps:
        return self._steps if self._steps is not None else self._set_up()

    def stop(self) -> None:
        """Take all hooks off the module: from now on nothing is synchronised."""
        self._take_down()

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.device_ids is not None:
            args, kwargs = move_inputs((args, kwargs), torch.device("cuda", self.device_ids[0]))
        if not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        known = self._steps.members.params if self._steps is not None else ()
        if not any(param.requires_grad for params in (known, self.module.parameters()) for param in params):
            return self.module(*args, **kwargs)  # all is frozen, as in a teacher: there is nothing to synchronise
        steps = self._ready
        steps.before_forward()
        steps.note_structure(self._watch.find_change(self.module))
        try:
            samples = operator.index(self._samples_of(*args, **kwargs)) if self._options.average == "samples" else 0
            output = self.module(*args, **kwargs)
        except _StopRecomputationError:  # how checkpointing ends a forward that it has repeated far enough
            raise
        except Exception as error:
            # In evaluation the others may be doing something else.
            if self.training:
                steps.fail(error)
            raise
        steps.after_forward(output, samples, self.module.training)
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
        """Accumulate on each rank by itself from the next backward on."""
        self._ready.do_sync = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on each rank by itself. It need not hold the forward, and may be nested."""
        steps = self._ready
        before, steps.do_sync = steps.do_sync, False
        try:
            yield
        finally:
            steps.do_sync = before

    def sync_gradients(self) -> None:
        """Average gradients that no step has synchronised yet; nothing happens without `do_sync`, or where none are.

        Collective: every rank must call this.
        """
        steps = self._ready
        # In manual mode a rank that had no backward takes part, too, so that the others do not wait.
        if steps.do_sync and (steps.is_pending or self._options.manual):
            steps.synchronize()

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Train inside with different numbers of batches: a rank that is done takes part with nothing to add.

        With `average='samples'` each sample counts alike, whatever the ranks; by ranks, the sum is divided by all of
        them, or with `divide_by_initial_world_size=False` by those that still have data. At the end all ranks have the
        parameters of one that was active last. Collective: every rank must enter and leave.
        """
        if not enable:
            yield
            return
        steps = self._ready
        with steps.joining(divide_by_initial_world_size, throw_on_early_termination):
            yield
            while not steps.shadow():
                pass
            steps.even_out()

    # -- plans, hooks and what happened -------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket, as torch's does. All ranks call it, before the first step."""
        check_hook(hook)
        if self._options.reducer != "bucketed":
            raise ConfigError(f"a communication hook needs buckets, and reducer={self._options.reducer!r} has none")
        if self._comm_hook is not None:
            raise ConfigError("a communication hook is registered already: a wrapper takes one")
        if self.plan is not None:  # another rank may be sending buckets by it already
            raise ConfigError("a communication hook comes too late after a synchronised step: call rebuild() first")
        if self._options.plan is not None and self._options.plan.is_split:
            raise ConfigError("the plan splits a gradient over buckets, and a communication hook needs whole ones")
        self._take_down()
        self._comm_hook = CommHook(state, hook)
        self._set_up()

    # -- being a module -----------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):  # a copy in the making, or a question of Python's own
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
        """Takes the keys of the wrapper and those of the module alike."""
        if not self.state_dict().keys().isdisjoint(state_dict) or not state_dict:
            return super().load_state_dict(state_dict, strict, assign)
        return self.module.load_state_dict(state_dict, strict, assign)

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise ConfigError("a wrapper with a process group of its own cannot be saved: save its state_dict instead")
        return self._plain_state()

    def _plain_state(self) -> dict[str, Any]:
        left_out = ("_steps", "_watch", "_finalizer", "_group", "_gradient_group")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._group, self._gradient_group, self._steps = None, None, None

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        hook, state = self._comm_hook, self._plain_state()
        state.pop("_comm_hook")
        twin.__dict__.update(copy.deepcopy(state, memo))
        # A group, and a hook that may hold one, are shared: they are not this process's to copy.
        twin._group, twin._gradient_group = self._group, None
        twin._comm_hook, twin._steps = hook, None
        return twin
