"""`DDP`: a drop-in for torch's DistributedDataParallel, which averages a module's gradients over all ranks.

This file is the public interface: options, forward, saving, copying, and torch's names. The backward pass is in
`backward`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import profiler
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel.distributed import DistributedDataParallel

from paceline.errors import ConfigError
from paceline.parallel.backward import BucketedReducer, GradientSync, JoinOptions
from paceline.parallel.batchnorm import syncs_in_forward
from paceline.parallel.buffers import SharedBuffers
from paceline.parallel.channel import Channel, Sent, open_group
from paceline.parallel.control import ControlWords
from paceline.parallel.graph import find_tensors, move_tensors
from paceline.parallel.hooks import CommHook, check_hook
from paceline.parallel.outer import OuterState
from paceline.parallel.replicas import (
    Options,
    StructureWatch,
    check_plan,
    check_same_model,
    read_replica,
    verify_values,
)
from paceline.parallel.rows import EmbeddingRows
from paceline.parallel.simple import SimpleReducer
from paceline.parallel.strategies import StrategyState, check_states, strategy_hook
from paceline.parallel.timeline import Report, StepTimes
from paceline.parallel.zero import ShardedOptimizer, Sharding, shard
from paceline.plan import TORCH_CAP_BYTES, TORCH_FIRST_CAP_BYTES, Plan, plan_torch_start
from paceline.strategy import DENSE, Strategy
from paceline.torch_internals import BufferHookLocation, JoinConfig, StopRecomputation, is_recording, keep_versions
from paceline.transport.works import keep_from_compiler
from paceline.units import MIB

# All wrappers in this process. Each one after the first uses a separate process group.
_wrappers: weakref.WeakSet[DDP] = weakref.WeakSet()
# Attributes that are None in a copied wrapper until it is set up.
_NOT_COPIED = ("_sync", "_watch", "_finalizer", "_group", "_gradient_group", "_strategy", "_sharding")
# Process groups, and objects that may contain one, cannot be copied, so a copied wrapper shares them.
_SHARED = ("_group", "_comm_hook", "_buffer_hook", "device_mesh")
_PRECISE = (torch.float32, torch.float64, torch.complex64, torch.complex128)
_CPP_DTYPES = {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}


class DDP(DistributedDataParallel):
    """Wrap a module so that each backward averages its gradients over all ranks.

    This is a subclass of torch's wrapper because frameworks check for that class. It keeps torch's names but not its
    implementation, so the constructor does not call torch's. The constructor is collective: call it on every rank,
    like every method marked "Collective".

    Args:
        module: The module whose gradients are averaged.
        device_ids: This and the arguments up to `lazy_bucket_allocation` have the same names and meaning as in torch's
            DistributedDataParallel, unless `docs/ddp.md` says otherwise.
        reducer: `bucketed`, or `simple`: one message per parameter, after backward.
        plan: The buckets to use, instead of a bucket cap.
        init: `broadcast` rank 0's values, `verify` that all ranks have equal values, or `none`.
        average: `ranks` weights ranks equally. `samples` weights them by their number of samples.
        samples_of: `samples_of(*args, **kwargs)` counts the samples in a forward. The default is the first dimension of
            the first tensor.
        manual: Average gradients only in `sync_gradients()`.
        check_replicas_every: Compare the parameters of the ranks every N synchronized steps (0: never).
        statistics_every: Average BatchNorm's running statistics every N synchronized steps (0: never).
        ignore: Full names of parameters and buffers not to synchronize.
        embeddings: `auto` sends embedding gradients as rows where that pays off, and `dense` never does. `rows` also
            sends rows on a GPU (where the host then waits for the row counts in each step), between ranks that share
            memory, and for tied weights whose dense part is sent last anyway.
        strategy: What to send and when, such as `bf16`, `powersgd:4` or `diloco:100+int8` (`docs/strategies.md`).
    """

    logger = mixed_precision = None
    is_multi_device_module = False
    require_forward_param_sync = True
    should_finalize_after_backward = False

    def __init__(
        self, module: nn.Module, device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None, dim: int = 0, broadcast_buffers: bool = True,
        init_sync: bool = True, process_group: dist.ProcessGroup | None = None, bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False, check_reduction: bool = False, gradient_as_bucket_view: bool = False,
        static_graph: bool = False, delay_all_reduce_named_params: None = None, param_to_hook_all_reduce: None = None,
        mixed_precision: None = None, device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False, bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False, forward_sync_buffers: bool | None = None, lazy_bucket_allocation: bool = False,
        *,
        reducer: str = "bucketed", plan: Plan | None = None, init: str | None = None, average: str = "ranks",
        samples_of: Callable[..., int] | None = None, manual: bool = False, check_replicas_every: int = 100,
        statistics_every: int | None = None, ignore: Iterable[str] = (), strategy: str | Strategy | None = None,
        embeddings: str = "auto",
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        Joinable.__init__(self)
        _patch_torch_wrapper()
        if not isinstance(module, nn.Module):
            raise ConfigError(f"the model must be an nn.Module, not {type(module).__name__}: pass an instance")
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(f"the model is already wrapped in {type(module).__name__}: wrap its .module instead")
        unsupported = {
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
            "mixed_precision": mixed_precision,
        }
        if given := [name for name, value in unsupported.items() if value is not None]:
            names = " and ".join(given)
            raise ConfigError(f"{names}: not supported: leave it out (for mixed precision, use torch.autocast)")
        if init is not None and not init_sync and init != "none":
            raise ConfigError(f"init_sync=False conflicts with init={init!r}: pass only one")
        sync_buffers = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        if statistics_every and not sync_buffers:
            name = "broadcast" if forward_sync_buffers is None else "forward_sync"
            raise ConfigError(f"{name}_buffers=False conflicts with statistics_every={statistics_every}")
        self.module, self.dim, self.device_ids = module, dim, _check_devices(module, device_ids)
        self.output_device = None if self.device_ids is None else self.device_ids[0]
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.broadcast_buffers = self.forward_sync_buffers = sync_buffers
        self.gradient_as_bucket_view, self.batched_grad_copy = gradient_as_bucket_view, batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.lazy_bucket_allocation = lazy_bucket_allocation
        known = {name for name, _ in [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]}
        ignored = set(ignore)
        if unknown := ignored - known:
            raise ConfigError(f"ignore={sorted(unknown)}: the module has no parameter or buffer with this name")
        # As in torch, the module's attribute may list names that do not exist.
        self.parameters_to_ignore = ignored | known & set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        if not sync_buffers and forward_sync_buffers is None:  # as in torch, not even broadcast at construction
            self.parameters_to_ignore |= {name for name, _ in module.named_buffers()}
        self._assign_modules_buffers()
        self._samples_of = samples_of or _count_samples
        self._comm_hook: CommHook | None = None
        self._strategy: StrategyState | None = None
        self._sharding: Sharding | None = None  # set for a sharded optimizer
        self._buffer_hook: tuple[object, Callable[[Any, dict[str, torch.Tensor]], Any], bool] | None = None
        self._has_own_keys = True
        self._options = Options(
            reducer=reducer, average=average, plan=plan, manual=manual, bucket_cap_mb=bucket_cap_mb,
            init=init or ("broadcast" if init_sync else "none"), check_every=check_replicas_every,
            bucket_cap_mb_list=None if bucket_cap_mb_list is None else tuple(bucket_cap_mb_list),
            allow_missing=find_unused_parameters or static_graph or skip_all_reduce_unused_params,
            statistics_every=(1 if statistics_every is None else statistics_every) if sync_buffers else 0,
            strategy=Strategy.parse(strategy), embeddings=embeddings,
        )  # fmt: skip
        # The requested cap. `plan` shows the actual buckets.
        self.bucket_bytes_cap = int(max(self._options.caps, default=TORCH_CAP_BYTES / MIB) * MIB)
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in bucket_cap_mb_list or ()]
        self.bucket_bytes_cap_default = not self._options.caps
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._group = _find_group(process_group, device_mesh)
        self._gradient_group: dist.ProcessGroup | None = None
        self._sync: GradientSync | None = None
        self.rebuild()

    def rebuild(self) -> None:
        """Rescan the module after parameters were added, frozen, unfrozen or moved. Collective."""
        if self._sync is not None and self._sync.join is not None:
            raise ConfigError("rebuild() does not work inside join(): ranks without data cannot take part")
        if self._sync is not None:
            self._sync.check_last_step()
            self._sync.sync_parameters()
        replica = read_replica(self.module, self.parameters_to_ignore)
        channel = self._open_channel()
        # torch can create only one extra group for a subset of ranks, so users who need several must pass them in.
        is_shared = self._group is None and any(other is not self for other in _wrappers)
        if self._gradient_group is None and any(channel.share(syncs_in_forward(self.module) or is_shared)):
            # Ranks may send a bucket at different times, so no other messages may come between them.
            self._gradient_group = open_group(channel, self)
            channel = self._open_channel()
        check_same_model(replica, self._options, channel)
        if self._options.init == "verify":
            verify_values(replica, channel)
        if self._sharding is not None:
            self._sharding.wait()
        if self._options.init == "broadcast":
            channel.broadcast(replica.tensors().values())
        if (schedule := self._set_up().schedule) is not None:
            schedule.open_groups()
        _wrappers.add(self)

    def _open_channel(self) -> Channel:
        # The first trained parameter determines the device of all messages.
        first = next((p.device for p in self.module.parameters() if p.requires_grad), torch.device("cpu"))
        return Channel(self._gradient_group or self.process_group, first)

    def _set_up(self) -> GradientSync:
        """Build everything that this rank needs for its steps. Sends no messages, so a single rank can load or copy a
        model."""
        do_sync = self._sync is None or self._sync.do_sync
        total = None if self._sync is None else self._sync.expected_total
        self._detach()
        self._sync = None  # if the setup fails, the wrapper must not appear to average gradients
        channel, options, ignored = self._open_channel(), self._options, self.parameters_to_ignore
        replica = read_replica(self.module, ignored)
        is_precise = all(param.dtype in _PRECISE for param in replica.params)
        buffers = SharedBuffers(self.module, ignored, channel.device, options.statistics_every, is_precise)
        num_used = len(replica.params) if options.allow_missing else 0
        rows = EmbeddingRows(self.module, replica, channel, self._why_dense(channel), options.embeddings == "rows")
        control = ControlWords(channel.rank, channel.world_size, num_used, buffers.num_words, len(rows.tables))
        hook, schedule, rounds = self._comm_hook, None, False
        if options.strategy.outer:
            schedule = OuterState(options, self.module, replica, channel, control.num_words, self._strategy)
            self._strategy = schedule
        elif not options.strategy.is_dense:
            self._strategy = StrategyState(options.strategy, replica, channel, self._strategy)
            rounds = self._strategy.rounds
            hook = None if rounds else (self._strategy, strategy_hook)
        sharding = None
        if options.strategy.is_sharded:
            sharding = self._sharding = self._sharding or Sharding(options.strategy)
            sharding.use(replica, channel, rounds)
            hook = (sharding, Sharding.scatter) if sharding.needs_hook else None
            assert self._strategy is not None
            self._strategy.exchanges = sharding.exchanges  # the strategy's statistics include these messages
        self._needs_whole = hook is not None and sharding is None
        codec = hook[0] if hook is not None and isinstance(hook[0], StrategyState) else None
        reducer: BucketedReducer | SimpleReducer
        if options.reducer == "simple":
            reducer = SimpleReducer(replica, channel, control.num_words, rows)
        else:
            planner = options.make_planner(channel, replica.gradients, hook is not None, self._needs_whole)
            reducer = BucketedReducer(replica, channel, control.num_words, planner, rows, hook, sharding, rounds)
            reducer.is_weighted = options.average == "samples"
        if self._comm_hook is not None:
            options = replace(options, check_every=0)  # some hooks let replicas differ on purpose, such as local SGD
        self._sync = GradientSync(reducer, control, buffers, options, syncs_in_forward(self.module), schedule, codec)
        self._sync.do_sync = do_sync
        if options.average == "samples" and total is not None:  # a codec's residuals are scaled by this total
            self._sync.expected_total = total
        if sharding is not None:
            sharding.sync = weakref.ref(self._sync)
            sharding.watch(self.module)
        self._watch = StructureWatch(replica, ignored)
        # Hooks on parameters must not outlive the wrapper, because the module may be wrapped again.
        self._finalizer = weakref.finalize(self, self._sync.stop)
        return self._sync

    def _why_dense(self, channel: Channel) -> str:
        """Why embedding gradients are not sent as rows; empty if they may be."""
        options = self._options
        reasons = {
            "embeddings='dense'": options.embeddings == "dense",
            "a communication hook needs all gradients": self._comm_hook is not None,
            f"strategy {options.strategy.text!r}": options.strategy != DENSE,
            f"reducer {options.reducer!r}": options.reducer != "bucketed",
            "on a GPU the host would wait for the row counts": channel.device.type != "cpu"
            and options.embeddings == "auto",
        }
        return next((why for why, is_so in reasons.items() if is_so), "")

    @property
    def _ready(self) -> GradientSync:
        """Set up on first use after loading or copying."""
        return self._sync if self._sync is not None else self._set_up()

    def stop(self) -> None:
        """Remove all hooks from the module, which ends synchronization."""
        self._detach()
        _wrappers.discard(self)  # otherwise the next wrapper would use a separate group

    def _detach(self) -> None:
        if self._sync is not None:
            self._finalizer()
        if self._strategy is not None:
            self._strategy.stop()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not is_recording():  # a profiler range costs time even when nothing records it
            return self._run_forward(args, kwargs)
        with profiler.record_function("DistributedDataParallel.forward"):
            return self._run_forward(args, kwargs)

    def _run_forward(self, args: Any, kwargs: Any) -> Any:
        if self.device_ids is not None:
            args, kwargs = move_tensors((args, kwargs), torch.device("cuda", self.device_ids[0]))
        if not torch.is_grad_enabled():
            if self._sync is not None and self._sync.schedule is not None and not self.training:
                self._sync.schedule.warn_of_drift()
            return self.module(*args, **kwargs)
        sync = self._begin_forward()
        if sync is None:
            return self.module(*args, **kwargs)
        try:
            samples = operator.index(self._samples_of(*args, **kwargs)) if self._options.average == "samples" else 0
            self._call_buffer_hook(sync, is_before=True)
            # torch.compile reads the bucket size of the active wrapper and rejects one below that of the first bucket.
            is_split = "torch._dynamo" in sys.modules and self.bucket_bytes_cap >= TORCH_FIRST_CAP_BYTES
            inside = self._inside_ddp_forward() if is_split else contextlib.nullcontext()
            with inside, sync.reducer.rows.watch():
                output = self.module(*args, **kwargs)
            self._wait_for_parameters()
            self._call_buffer_hook(sync, is_before=False)
        except StopRecomputation:  # raised by checkpointing once it has recomputed enough of the forward
            raise
        except Exception as error:
            # In evaluation the other ranks may not be in a step.
            if self.training:
                sync.fail(error)
            raise
        sync.after_forward(output, samples, self.module.training)
        return output

    def _begin_forward(self) -> GradientSync | None:
        """Prepare for a forward. Returns None if every parameter is frozen, as in a teacher."""
        known = self._sync.replica.params if self._sync is not None else ()
        if not any(param.requires_grad for params in (known, self.module.parameters()) for param in params):
            return None
        if self._ready and self._sharding is not None and self._sharding.optimizer is None and self.training:
            text = "this rank holds only its shard of the averaged gradients: use the optimizer from shard_optimizer()"
            raise ConfigError(f"strategy={self._options.strategy.text!r}: {text}", code="strategy")
        self._ready.before_forward(self._watch.find_change(self.module), self.training)
        return self._sync

    @property
    def do_sync(self) -> bool:
        """Whether the next backward is synchronized. Read when backward begins, not during forward."""
        return self._ready.do_sync

    @do_sync.setter
    def do_sync(self, value: bool) -> None:
        self._ready.do_sync = value

    require_backward_grad_sync = do_sync  # torch's name, set by other libraries

    def enable_grad_sync(self) -> None:
        """Synchronize from the next backward onward."""
        self.do_sync = True

    def disable_grad_sync(self) -> None:
        """Accumulate locally from the next backward onward."""
        self.do_sync = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in this context. The forward may run outside it, and contexts may be nested."""
        sync = self._ready
        before, sync.do_sync = sync.do_sync, False
        try:
            yield
        finally:
            sync.do_sync = before

    def sync_gradients(self) -> None:
        """Average accumulated gradients that are not synchronized yet, if `do_sync` is set. Collective."""
        sync = self._ready
        # In manual mode a rank without a backward also takes part, so that the others do not wait for it.
        if sync.do_sync and (sync.is_pending or self._options.manual):
            sync.synchronize()

    def check_last_step(self) -> None:
        """Raise errors that other ranks reported in the last step, which on a GPU are otherwise raised one step later.
        Call this before your own collectives between steps. Collective: every rank must call this."""
        self._ready.check_last_step()

    def sync_parameters(self) -> None:
        """Average the parameters now and begin a new round, for strategies that average them every few steps. Call this
        at the end of training, and before evaluation, export, or a checkpoint without `strategy_state`. Does nothing if
        all ranks already hold the same model. Collective: every rank must call this."""
        self._ready.sync_parameters()

    @contextlib.contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Iterator[None]:
        """Train with uneven numbers of batches in this context: a rank without data contributes zeros.

        With `average='samples'` every sample has the same weight. With `average='ranks'` the sum is divided by the
        number of ranks or, with `divide_by_initial_world_size=False`, by the number that still have data. At the end,
        all ranks get the parameters of a rank that had data until the last step. Collective: every rank must enter and
        leave.
        """
        if not enable:
            yield
            return
        sync = self._ready
        self._refuse_join()
        sync.join = JoinOptions(divide_by_initial_world_size, throw_on_early_termination)
        try:
            yield
            while not sync.step_without_data():
                pass
            sync.broadcast_final()
        finally:
            sync.join = None

    def _refuse_join(self) -> None:
        if self._options.strategy.outer:
            text = f"strategy={self._options.strategy.text!r} averages parameters after equal numbers of steps"
            raise ConfigError(f"{text}, which join() does not guarantee: drop the last batches", code="strategy")
        if self._sharding is not None:
            text = "every rank must take every optimizer step, even without data: give ranks the same number of batches"
            raise ConfigError(f"strategy={self._options.strategy.text!r}: {text}", code="strategy")

    def shard_optimizer(
        self,
        optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer],
        params: Any = None,
        *,
        overlap: bool = False,
        **options: Any,
    ) -> ShardedOptimizer:
        """Build the optimizer for `strategy="zero1"`. Each rank stores optimizer state only for its own shard.

        Pass an optimizer class with its options (and `params`, by default all trained parameters), or an optimizer that
        has not taken a step, which is modified. `step` and `state_dict` of the result are collective. The parameters
        are gathered in `step` or, with `overlap=True`, during the next forward. A program that reads them earlier and
        outside the wrapper (for a moving average, say) must first call `wait()` on the optimizer. Collective.
        """
        self._ready  # noqa: B018
        sharding = self._sharding
        if sharding is None:
            raise ConfigError('shard_optimizer() needs DDP(..., strategy="zero1")', code="strategy")
        if isinstance(optimizer, type):
            given = [param for param in self.module.parameters() if param.requires_grad] if params is None else params
            optimizer = optimizer(given, **options)
        elif options or params is not None:
            raise ConfigError("shard_optimizer(): params and options need a class, not an existing optimizer")
        sharding.wait()
        sharding.overlaps = overlap
        sharding.optimizer = sharded = shard(sharding, optimizer)
        sharding.watch(self.module)
        return sharded

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients by their total norm, and return the norm. With a sharded optimizer, only this rank's shard
        is averaged, and torch's function would also count the unaveraged gradients. Collective."""
        if self._sharding is None:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)
        return self._sharding.clip(max_norm, norm_type, error_if_nonfinite)

    @property
    def _planned(self) -> BucketedReducer | SimpleReducer | None:
        """The reducer, once it has made its plan."""
        reducer = self._ready.reducer
        return reducer if reducer.is_planned else None

    @property
    def plan(self) -> Plan | None:
        """The buckets in use; None before the first synchronized step."""
        return None if self._planned is None else self._planned.plan

    @property
    def exposed_s(self) -> float | None:
        """Seconds of communication after this rank's backward, in a recent step; None if it was not measured."""
        return None if self._planned is None else self._planned.timeline.exposed_s

    def read_recorded(self) -> tuple[int, StepTimes] | None:
        """The last step whose messages were timed, and its age in steps; None with a strategy, or if no step was timed.
        On a GPU this waits for that step."""
        timeline = None if self._planned is None or self._strategy is not None else self._planned.timeline
        age = None if timeline is None else timeline.age
        times = None if timeline is None or age is None else timeline.read()
        return None if age is None or times is None else (age, times)

    def time_next_step(self) -> None:
        """Record bucket times in the next synchronized step. By default only some steps are recorded."""
        if self._planned is not None:
            self._planned.timeline.sample_next = True

    def count_sent(self) -> Sent:
        """Count gradient messages since the wrapper was built or rebuilt, except those of a communication hook."""
        sent = self._ready.channel.sent
        more = Sent(0, 0) if self._strategy is None else self._strategy.sent
        return Sent(sent.num_messages + more.num_messages, sent.num_bytes + more.num_bytes)

    @property
    def bucket_memory(self) -> list[torch.Tensor]:
        """This rank's message buffers. A gradient may be a view into one."""
        return self._ready.reducer.memory

    def report(self) -> Report:
        """Report where a recent step spent its time on this rank. This is cheap and sends no messages."""
        sync = self._ready
        channel, reducer = sync.channel, sync.reducer
        times = reducer.timeline.read() if reducer.is_planned else None
        costs = None
        if self._strategy is not None:
            held_bytes = 0 if self._sharding is None else self._sharding.held_bytes
            costs = self._strategy.compute_costs(channel, sync.num_steps, held_bytes)
        rows = tuple(reducer.rows.describe())
        return Report(
            channel.rank, channel.world_size, channel.backend, sync.num_steps, reducer.plan, times, costs, rows
        )

    def strategy_state(self) -> dict[str, Any]:
        """The state that the strategy needs to resume exactly: `rank` is this rank's part; the rest is the same on all
        ranks."""
        plan = self.plan
        if self._strategy is None:
            return {}
        unit = {"samples": self._ready.expected_total} if self._options.average == "samples" else {}
        return {**self._strategy.state(), "plan": None if plan is None else plan.to_json(), **unit}

    def load_strategy_state(self, states: Sequence[dict[str, Any]], *optimizers: torch.optim.Optimizer) -> None:
        """Continue from the `strategy_state` of all ranks, in rank order, before the first step. If the number of
        ranks has changed, every rank gets the mean of the residuals. `optimizers` are those that step the model:
        residuals scale with their learning rates. Collective: every rank must call this."""
        reducer = self._ready.reducer
        check_states(states, self._options.strategy)
        if self._strategy is None or not states:
            return
        self._strategy.load(states, *optimizers)
        if self._options.average == "samples":
            self._ready.expected_total = states[0].get("samples", self._ready.expected_total)
        # Buckets determine which values are rounded together.
        if states[0]["plan"] is not None and isinstance(reducer, BucketedReducer):
            plan = Plan.from_json(states[0]["plan"])
            reducer.adopt(check_plan(plan, reducer.replica.gradients, self._needs_whole))

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket, as in torch. Call it on all ranks, before the first step."""
        check_hook(hook)
        if self._options.reducer != "bucketed":
            raise ConfigError(f"a communication hook needs reducer='bucketed', not {self._options.reducer!r}")
        if self._comm_hook is not None:
            raise ConfigError("a communication hook is already registered: a wrapper takes one")
        if not self._options.strategy.is_dense:
            raise ConfigError(f"strategy={self._options.strategy.text!r} conflicts with a communication hook: use one")
        if self.plan is not None:  # another rank may already be sending its buckets
            raise ConfigError("a communication hook cannot be registered after a step: call rebuild() first")
        if self._options.plan is not None:
            check_plan(self._options.plan, self._ready.replica.gradients, needs_whole=True)
        self._comm_hook = (state, hook)
        self._set_up()

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: BufferHookLocation = BufferHookLocation.POST_FORWARD,
    ) -> None:
        """Let `hook(state, buffers)` synchronize the buffers in each synchronized forward, instead of the wrapper. It
        may return Futures, which backward waits for. Call this on all ranks, before the first step."""
        if not callable(hook):
            raise TypeError(f"a buffer hook must be callable, not {hook!r}")
        self._buffer_hook = (state, hook, comm_hook_location is BufferHookLocation.PRE_FORWARD)
        self._options = replace(self._options, statistics_every=0)
        self._set_up()

    def _call_buffer_hook(self, sync: GradientSync, is_before: bool) -> None:
        if self._buffer_hook is None:
            return
        state, hook, wanted = self._buffer_hook
        self._assign_modules_buffers()
        if wanted is is_before and self.will_sync_module_buffers():
            with torch.no_grad(), keep_versions(tuple(self.modules_buffers)):
                sync.futures += hook(state, self.named_module_buffers) or ()
        if not is_before:
            self.require_forward_param_sync = sync.do_sync  # as in torch: whether the last forward was synchronized

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):  # a copy under construction, or a lookup by Python
                raise
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        try:
            value = getattr(module, name)  # methods and attributes of the user's model
        except AttributeError as cause:
            text += f", nor has its module ({type(module).__name__})"
            raise AttributeError(text, name=name, obj=self) from cause
        if name.startswith("_"):
            raise AttributeError(f"{text}, but its module has: write .module.{name}", name=name, obj=self)
        return value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state with the prefix `module.`, as in torch. If a framework wrapped this model again (`_new`), it treats
        this wrapper as the bare model, and gets the state without the prefix."""
        if self._has_own_keys or _is_distributed_checkpoint():
            return super().state_dict(*args, **kwargs)
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict whose keys may have or lack the prefix `module.`."""
        if state_dict and self._lacks_prefix(state_dict):
            return self.module.load_state_dict(state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Called by torch if the wrapper is a submodule of the loaded model. Also accepts both kinds of keys."""
        if self._lacks_prefix(state_dict, prefix):
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[no-untyped-call]

    def _lacks_prefix(self, state_dict: Mapping[str, Any], prefix: str = "") -> bool:
        return super().state_dict(prefix=prefix).keys().isdisjoint(state_dict)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._wait_for_parameters()
        return super().named_parameters(*args, **kwargs)

    def _wait_for_parameters(self) -> None:
        """Wait for new parameter values that other ranks may still be sending."""
        if (sharding := self.__dict__.get("_sharding")) is not None:
            sharding.wait()

    def __getstate__(self) -> dict[str, Any]:
        self._wait_for_parameters()
        if self._group is not None:
            text = "a wrapper with its own process group cannot be pickled: save its state_dict instead"
            raise ConfigError(text, code="not-picklable")
        return {name: value for name, value in self.__dict__.items() if name not in _NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]
        _patch_torch_wrapper()
        self.__dict__.update(dict.fromkeys(_NOT_COPIED))

    def __deepcopy__(self, memo: dict[int, Any]) -> DDP:
        self._wait_for_parameters()
        clone = memo[id(self)] = self.__class__.__new__(self.__class__)
        state = {name: value for name, value in self.__dict__.items() if name not in (*_NOT_COPIED, *_SHARED)}
        clone.__dict__.update(copy.deepcopy(state, memo))
        clone.__dict__.update(dict.fromkeys(_NOT_COPIED))
        clone.__dict__.update({name: self.__dict__[name] for name in _SHARED if name in self.__dict__})
        return clone

    # -- attributes and private methods of torch's wrapper that other programs use ------------------------------------

    @property
    def device(self) -> torch.device:
        first: torch.Tensor = next(self.module.parameters())
        return first.device

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def process_group(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        """The group passed to the constructor. If it is also used for other messages, gradients use a separate
        group."""
        return dist.group.WORLD if self._group is None else self._group

    @property
    def reducer(self) -> _TorchReducer:  # type: ignore[override]
        return _TorchReducer(self)

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self._planned is not None

    @property
    def join_device(self) -> torch.device:
        return self._ready.channel.device

    join_process_group = process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook for torch's `Join([model, optimizer])`; our own `join` does not use it."""
        self._refuse_join()
        return _TorchJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    def _set_static_graph(self) -> None:
        """Set `static_graph=True` after wrapping. Call it on all ranks, before the first step."""
        if self.static_graph:
            warnings.warn("static_graph is already set", stacklevel=2)
            return
        if self._ready.num_steps:
            raise ConfigError("_set_static_graph() must be called before the first step: wrap with static_graph=True")
        self.static_graph, self._options = True, replace(self._options, allow_missing=True)
        self._set_up()

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Switch to another group from the next step onward, for example in a new world. Call it on all its ranks."""
        self._group, self._gradient_group = new_process_group, None
        self._set_up()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        name, known = getattr(comm_hook_type, "name", str(comm_hook_type)), dist.BuiltinCommHookType.__members__
        if name not in known:
            raise ConfigError(f"{comm_hook_type} is not a built-in hook: use {', '.join(known)}")
        self.register_comm_hook(self.process_group, getattr(default_hooks, f"{name.lower()}_hook"))

    def _register_fused_optim(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError("_register_fused_optim: not supported, use an optimizer that steps after backward")

    @property
    def require_manual_backward_finalization(self) -> bool:
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self.finalize_backward()

    def finalize_backward(self) -> None:
        raise ConfigError("manual finalization of backward: not supported, gradients are final when backward returns")

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """The fields of torch's logger that apply here. See `report` for timings."""
        sync, planned = self._ready, self._planned
        gradients = sync.replica.gradients
        flags = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "is_multi_device_module")
        data: dict[str, str | int] = {
            "module_name": type(self.module).__name__, "device_ids": _join(self.device_ids or ()),
            "output_device": -1 if self.output_device is None else self.output_device,
            "backend_name": sync.channel.backend, "rank": sync.channel.rank, "world_size": sync.channel.world_size,
            "dtypes": _join(dict.fromkeys(_CPP_DTYPES.get(gradient.dtype, gradient.dtype) for gradient in gradients)),
            "bucket_sizes": _join(plan_torch_start(gradients).bucket_bytes), "bucket_cap_bytes": self.bucket_bytes_cap,
            "iteration": sync.num_steps, "num_parameter_tensors": len(gradients),
            "total_parameter_size_bytes": sum(gradient.num_bytes for gradient in gradients),
            "has_sync_bn": int(syncs_in_forward(self.module)),
            **{name: int(getattr(self, name)) for name in flags},
            **({"static_graph": 1} if self.static_graph else {}),
        }  # fmt: skip
        if planned is not None:
            data["has_rebuilt_buckets"] = 1
            data["rebuilt_bucket_sizes"] = _join(planned.plan.bucket_bytes)
            indices = (" ".join(map(str, bucket)) for bucket in planned.plan.partition)
            data["rebuilt_per_bucket_param_indices"] = _join(indices)
            data["prev_iteration_grad_ready_order_indices"] = _join(planned.ready_order)
        return data


DataParallel = DDP


def is_torchs(model: object) -> TypeGuard[DistributedDataParallel]:
    """Whether this is torch's own wrapper rather than ours, which is a subclass of it."""
    return isinstance(model, DistributedDataParallel) and not isinstance(model, DDP)


class _TorchReducer:
    """Methods of torch's reducer that frameworks call around their own backward."""

    def __init__(self, model: DDP) -> None:
        self._model = model

    def prepare_for_backward(self, outputs: object) -> None:
        """Prepare for a backward, which may not start from the output of a forward."""
        self._model._ready.expect_backward()

    def _rebuild_buckets(self) -> bool:
        return False  # buckets are made at the end of the first step

    def _delay_all_reduce(self) -> None:
        """A no-op: gradients are averaged when backward returns, in the first step too."""

    _check_reducer_finalized = _delay_all_reduce

    def _remove_autograd_hooks(self) -> None:
        self._model.stop()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"reducer.{name}: this is paceline.DDP, which has no torch reducer", name=name, obj=self)


_swap_options: dict[str, Any] | None = None  # options of `swap_wrapper`; None: not swapped
_BUCKETS = frozenset({"plan", "bucket_cap_mb", "bucket_cap_mb_list"})  # mutually exclusive options


def swap_wrapper(enable: bool = True, **options: Any) -> None:
    """Make torch's DistributedDataParallel build a `paceline.DDP` from now on.

    This works regardless of when, and under what name, a program or framework imported the class. It does not affect
    subclasses, existing models, or torch's `replicate`.

    Args:
        enable: False restores torch's wrapper.
        options: Arguments of `DDP` for every model. They override the program's.
    """
    global _swap_options
    if unknown := options.keys() - (inspect.signature(DDP.__init__).parameters.keys() - {"self", "module"}):
        raise ConfigError(f"swap_wrapper({_join(sorted(unknown))}): not an option of paceline.DDP")
    _swap_options = options if enable else None
    if enable:
        _patch_torch_wrapper()


class _SwappedDDP(DDP):
    """The class that torch's wrapper builds after `swap_wrapper`. Its constructor turns it into a plain `DDP`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__class__ = DDP  # type: ignore[assignment]
        options = _swap_options or {}
        given = inspect.signature(DDP.__init__).bind(self, *args, **kwargs).arguments
        unused = _BUCKETS if _BUCKETS & options.keys() else frozenset()
        DDP.__init__(**{**{name: value for name, value in given.items() if name not in unused}, **options})


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    """`DistributedDataParallel.__new__`. Wrapping a `DDP` again returns it: frameworks wrap every model that they are
    given, and two wrappers around one model would both average its gradients."""
    if cls is not DistributedDataParallel or not (args or kwargs):  # no arguments: a copy under construction
        return object.__new__(cls)
    module = args[0] if args else kwargs.get("module")
    if isinstance(module, DDP):
        signature = inspect.signature(DDP.__init__)
        given = signature.bind(module, *args, **kwargs).arguments.items()
        differs = {name for name, value in given if name in kwargs or value != signature.parameters[name].default}
        if unused := sorted(differs - {"self", "module", "device_ids", "output_device"}):
            text = f"the model is already wrapped in paceline.DDP: the second wrapper's {_join(unused)} is ignored"
            warnings.warn(text, stacklevel=2)
        module._has_own_keys = False
        # Python calls `__init__` on the returned object, which may belong to a program's own subclass.
        kind = type(module)
        done = {"__init__": lambda self, *_, **__: setattr(self, "__class__", kind)}
        module.__class__ = type(kind.__name__, (kind,), done)
        return module
    # torch's `replicate` wraps a bare ParameterList and calls private methods.
    is_swapped = _swap_options is not None and not isinstance(module, nn.ParameterList)
    return object.__new__(_SwappedDDP if is_swapped else cls)


def _patch_torch_wrapper() -> None:
    """Make torch's class call `_new`, once one of our wrappers is built or requested, but not on import. This is never
    undone: a class that has had a `__new__` refuses arguments without it."""
    if "__new__" in vars(DistributedDataParallel):
        return
    _new.__wrapped__ = DistributedDataParallel.__init__  # type: ignore[attr-defined]  # for `inspect.signature`
    DistributedDataParallel.__new__ = staticmethod(_new)  # type: ignore[method-assign, assignment]


def _is_distributed_checkpoint() -> bool:
    """Whether the caller is torch's distributed checkpoint, which expects the wrapper's prefix and removes it."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


class _TorchJoinHook(JoinHook):
    """Takes part in the steps of ranks that still have data, in torch's own `Join`."""

    def __init__(self, model: DDP, divide_by_world: bool) -> None:
        self._model, self._sync = model, model._ready
        model._refuse_join()
        # torch announces a step in forward. We know only in backward whether ranks without data must take part.
        self._sync.join = JoinOptions(divide_by_world, announce=lambda: Join.notify_join_context(model))

    def main_hook(self) -> None:
        self._sync.step_without_data(keep_gradients=True)

    def post_hook(self, is_last_joiner: bool) -> None:
        self._sync.broadcast_final()
        self._sync.join = None
        self._model._join_config = JoinConfig.construct_disabled_join_config()


def _join(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items))


def _check_devices(module: nn.Module, device_ids: Sequence[int | torch.device] | None) -> list[int] | None:
    if not device_ids:
        return None
    if len(device_ids) > 1:
        raise ConfigError(f"device_ids={list(device_ids)}: a process uses one device; pass one, or none")
    first = device_ids[0]
    device = torch.device("cuda", first) if isinstance(first, int) else torch.device(first)
    if elsewhere := {str(param.device) for param in module.parameters() if param.device != device}:
        where = f"the module has parameters on {', '.join(sorted(elsewhere))}"
        raise ConfigError(f"device_ids={list(device_ids)}, but {where}: move it to {device}, or leave device_ids out")
    return [device.index or 0]


def _find_group(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    if mesh is None:
        return group
    if group is not None:
        raise ConfigError("process_group and device_mesh are mutually exclusive: pass one")
    if mesh.ndim != 1:
        raise ConfigError(f"the device mesh has {mesh.ndim} dimensions: pass the one for data, such as mesh['dp']")
    return mesh.get_group()


def _count_samples(*args: Any, **kwargs: Any) -> int:
    """The first dimension of the first tensor."""
    for tensor in find_tensors((args, kwargs)):
        if tensor.dim():
            return tensor.size(0)
    raise ConfigError("average='samples' found no input tensor with a first dimension: pass samples_of")


# Both functions call the module, which may be compiled, so exclude only the functions themselves from compilation.
keep_from_compiler(DDP.forward, DDP._run_forward, with_calls=False)
keep_from_compiler(DDP._begin_forward, DDP._call_buffer_hook, _count_samples)
