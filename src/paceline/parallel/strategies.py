"""Strategies at run time: a codec's exchanges between ranks, and the communication hook that passes buckets to the
codec."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from paceline.errors import ConfigError
from paceline.parallel.channel import Channel, Sent, alias, open_group, start_exchange
from paceline.parallel.codecs import GATHER, SCATTER, SUM, BFloat16, Codec, Exchange, build_codec
from paceline.parallel.graph import WeakHook
from paceline.parallel.levels import NUM_STAGES, Inside, Levels
from paceline.parallel.replicas import Replica, find_strides, read_replica
from paceline.parallel.streams import SideStream
from paceline.parallel.timeline import StrategyCosts
from paceline.strategy import DENSE, Message, Strategy

_SUM_OPTIONS = dist.AllreduceOptions()
_SUM_OPTIONS.asyncOp = True


class Exchanges:
    """Runs exchanges during backward. When a message arrives, the next one is computed on a side stream.

    Every rank must start its messages in the same order. With NCCL, a stream can wait for a Work as soon as it has been
    started, so the whole exchange is queued at once. Other backends continue an exchange in callbacks, which run in any
    order. With those backends, the first messages of all exchanges share one group and the second messages another, and
    in each group an exchange waits for earlier ones. With two levels there are two more groups, inside each host. After
    an error nothing more is sent, because peers would mistake it for a message they are waiting for.
    """

    def __init__(self, channel: Channel, levels: Levels | None = None, kinds: Sequence[str] = ()) -> None:
        self._channel, self._kinds = channel, kinds
        self._levels = levels if levels is not None and levels.are_two else None
        # The current group: the channel may later switch to its own, for control words that report errors.
        self._groups: list[tuple[dist.ProcessGroup, int]] = [(channel.group, channel.world_size)]
        self._is_open = False
        self._lock = threading.RLock()
        self._reached: dict[int, int] = {}  # for each exchange in flight: lower bound on the stage of its next message
        self._waiting: dict[int, tuple[str, torch.Tensor, Exchange, Any]] = {}
        self._count = 0
        self._error: Exception | None = None
        self.side = SideStream(channel.device, channel.is_nccl)
        self.num_messages = self.num_bytes = self.sent_bytes = 0
        self.encode_s = self.decode_s = 0.0  # on the host, before and after the first message of an exchange

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [group for group, _ in self._groups]

    def open(self) -> None:
        """On the first call, open and connect the required groups. Collective."""
        channel = self._channel
        if self._is_open or channel.world_size == 1:
            return
        if self._levels is not None:
            self._groups = self._levels.open_groups(channel, self)
        elif not channel.is_nccl:
            self._groups.append((open_group(channel, self), channel.world_size))
        if channel.is_nccl:
            # NCCL connects in the first collective of each kind, and blocks the host meanwhile. If a rank failed before
            # that, the others could not check for failures.
            for group, size in self._groups:
                for kind in self._kinds:
                    work, _ = start_message(kind, torch.zeros(size, 4, device=channel.device), group, size)
                    if work is not None:
                        work.wait()
        self._is_open = True

    def start(self, exchange: Exchange, result: torch.Tensor | None = None) -> torch.futures.Future[Any]:
        """Begin an exchange. Its Future completes with `result` when the exchange ends, or with this rank's error. The
        first call is collective."""
        if self._error is not None:
            raise self._error
        self.open()
        future = self.side.create_future()
        with self._lock:
            number = self._count
            self._count += 1
            self._reached[number] = 0
        self.side.follow_caller()
        self._resume(number, exchange, None, None, (future, result))
        return future

    def _resume(self, number: int, exchange: Exchange, work: Any, value: Any, end: Any) -> None:
        """Compute an exchange's next message from the last result, and start all messages that may start now."""
        begin_s = time.perf_counter()
        with torch.no_grad(), self.side.current():
            try:
                self.side.receive(work)
                kind, tensor = exchange.send(value)
            except StopIteration:
                with self._lock:
                    self._reached.pop(number)
                self.side.complete(*end)
            except Exception as error:
                self._fail(error, number, end)
            else:
                with self._lock:
                    self._waiting[number] = kind, tensor, exchange, end
            with self._lock:
                if value is None:
                    self.encode_s += time.perf_counter() - begin_s
                else:
                    self.decode_s += time.perf_counter() - begin_s
                for other in sorted(self._waiting):
                    if other in self._waiting and self._is_turn(other):
                        self._send(other)

    def count(self, kind: str, num_bytes: int, num_ranks: int) -> None:
        """Count a message that is about to be sent."""
        self.num_messages += 1
        self.num_bytes += num_bytes
        self.sent_bytes += Message(kind, num_bytes).sent_bytes(num_ranks)

    def _fail(self, error: Exception, number: int, end: Any) -> None:
        """Record the error and fail this exchange and all waiting ones."""
        with self._lock:
            self._error = self._error or error
            waiting = [end, *(item[-1] for item in self._waiting.values())]
            for ended in (number, *self._waiting):
                self._reached.pop(ended, None)
            self._waiting.clear()
        for future, _ in waiting:
            future.set_exception(error)

    def _find_stage(self, number: int) -> int:
        """The stage of the waiting message."""
        reached, last = self._reached[number], NUM_STAGES - 1
        if self._levels is None:
            return reached
        if isinstance(self._waiting[number][0], Inside):
            return last if reached else 0
        return min(reached, last - 1)

    def _is_turn(self, number: int) -> bool:
        stage = self._find_stage(number)
        return all(reached > stage for other, reached in self._reached.items() if other < number)

    def _send(self, number: int) -> None:
        stage = self._find_stage(number)
        kind, tensor, exchange, end = self._waiting.pop(number)
        group, size = self._groups[min(stage, len(self._groups) - 1)]
        self._reached[number] = stage + 1
        try:
            if self._error is not None:
                raise self._error
            work, result = start_message(kind, tensor, group, size)
        except Exception as error:
            self._fail(error, number, end)
            return
        self.count(kind, tensor.nbytes, size)

        def go_on(done: Any) -> None:
            try:
                done.value()
            except Exception as error:
                self._fail(error, number, end)
                return
            self._resume(number, exchange, work, result, end)

        if work is None or self._channel.is_nccl:
            self._resume(number, exchange, work, result, end)
        else:
            work.get_future().add_done_callback(go_on)


def start_message(kind: str, tensor: torch.Tensor, group: Any, world_size: int) -> tuple[Any, torch.Tensor]:
    """Start a collective. Returns its work (None if there is nothing to wait for) and its result tensor."""
    if world_size == 1:
        return None, tensor[None] if kind == GATHER else tensor[0] if kind == SCATTER else tensor
    if kind == SUM:
        return group.allreduce([alias(tensor)], _SUM_OPTIONS), tensor
    # Sent as bytes, because not every backend supports every dtype.
    rows = tensor.contiguous()
    if kind == SCATTER:
        result = torch.empty_like(rows[0])
        return group._reduce_scatter_base(result, rows.view(-1)), result
    shape = (world_size, *rows.shape) if kind == GATHER else rows.shape
    result = rows.new_empty(shape)
    into = result.view(-1).view(torch.uint8).view(world_size, -1)
    given = rows.view(-1).view(torch.uint8)
    return start_exchange(into, given if kind == GATHER else given.view(world_size, -1), group), result


def check_states(states: Sequence[Mapping[str, Any]], strategy: Strategy) -> None:
    """Reject the state of another strategy. The state of a dense model is empty."""
    texts = [state.get("strategy", DENSE.text) for state in states]
    if found := [text for text in texts if Strategy.parse(text) != strategy]:
        text = f"the state belongs to strategy {found[0]!r}, but this model uses {strategy.text!r}"
        raise ConfigError(f"{text}: use that strategy, or start without its state", code="strategy")


class StrategyState:
    """State of `strategy_hook`: the codec and its memory, by parameter name. Continues where `before` stopped.

    Residuals have the scale of gradients: when an optimizer's learning rate changes from a to b, they are multiplied by
    a/b. With a scaled loss they have the scale of scaled gradients, and follow the scale of torch's GradScaler.
    """

    def __init__(
        self, strategy: Strategy, replica: Replica, channel: Channel, before: StrategyState | None = None
    ) -> None:
        self.strategy, self._world_size, self._rank = strategy, channel.world_size, channel.rank
        self._names = {id(param): names[0] for param, names in zip(replica.params, replica.names, strict=True)}
        self._shapes = {names[0]: layout[0] for names, layout in zip(replica.names, replica.layouts, strict=True)}
        self._strides = {names[0]: find_strides(p) for p, names in zip(replica.params, replica.names, strict=True)}
        for param, names in zip(replica.params, replica.names, strict=True):
            if param.is_complex() and strategy.codec != "dense":
                text = f"strategy {strategy.text!r}: {names[0]} is complex, but this strategy sends only real numbers"
                raise ConfigError(f"{text}: use strategy='dense'", code="strategy")
        self.levels = levels = Levels.find(strategy, channel)
        if levels is not None and levels.are_two:
            self.codec: Codec = build_codec(strategy, levels.places[channel.rank][0], len(levels.hosts))
        else:
            runs = DENSE if levels is not None and len(levels.hosts) == 1 else strategy
            self.codec = build_codec(runs, channel.rank, channel.world_size)
        # With shared memory, ranks can round while they sum in float32, which is as fast as not rounding.
        is_float32 = all(dtype == torch.float32 for _, dtype, _ in replica.layouts)
        is_shared = channel.shares_memory and channel.world_size > 1
        self.rounds = strategy.codec == "bf16" and levels is None and is_shared and is_float32
        if isinstance(self.codec, BFloat16) and self.codec.world_size == channel.world_size:
            # With shared memory, ranks sum in float32 and round once. gloo and NCCL round at every hop of a ring.
            self.codec.sums_precisely = channel.shares_memory
        self.exchanges = Exchanges(channel, levels, self.codec.kinds)
        self.step = 0
        self._rates: dict[str, Any] = {}  # by parameter: the learning rate that its residual refers to
        # By parameter: the optimizer that stepped it last, and the index of its group, which has the next rate.
        self._steppers: dict[str, tuple[Callable[[], Optimizer | None], int]] = {}
        self._scale: Any = None  # loss scale of the residuals; None: not scaled
        self._scaler: Callable[[], Any] = lambda: None
        self._is_first = True  # the next bucket is the first of a step
        if before is not None and before._world_size == self._world_size:
            self._follow(before)
        self._end: Callable[[], object] = lambda: None
        if strategy.outer or strategy.codec in ("dense", "bf16"):
            return  # gradients have no residuals
        watch_unscaling(_note_scaler)
        _states.add(self)
        self._end = weakref.finalize(self, register_optimizer_step_pre_hook(WeakHook(self._before_step)).remove)

    def stop(self) -> None:
        """Remove the hooks on optimizers."""
        self._end()
        _states.discard(self)

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        """Record the learning rates of this step and refuse a second momentum."""
        for number, group in enumerate(optimizer.param_groups):
            if not (names := self._find_names(group)):
                continue
            momentum = group.get("momentum") or (group.get("betas") or (0,))[0]
            if self.strategy.dgc and momentum:
                twice = f"{type(optimizer).__name__} has momentum {momentum:g} and dgc has {self.strategy.dgc:g}"
                text = f"strategy {self.strategy.text!r} would apply momentum twice: {twice}"
                text += "; use an optimizer without momentum, or leave out dgc"
                raise ConfigError(text, code="strategy")
            self._note_rate(names, group.get("lr", 0.0))
            self._steppers |= dict.fromkeys(names, (weakref.ref(optimizer), number))

    def _find_names(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[id(param)] for param in group["params"] if id(param) in self._names]

    def _note_rate(self, names: Sequence[str], rate: Any) -> None:
        """Record that these residuals now refer to this learning rate, if it is above 0."""
        if isinstance(rate, torch.Tensor) and rate.is_cuda:  # avoids waiting for the GPU
            with self.exchanges.side.borrowed():
                self._rates |= {name: torch.where(rate > 0, rate, self._rates.get(name, rate)) for name in names}
        elif rate > 0:
            self._rates |= dict.fromkeys(names, float(rate))

    def _follow_rates(self) -> None:
        """Before the first exchange of a step, rescale residuals that refer to another learning rate."""
        for name, (find, number) in self._steppers.items():
            optimizer = find()
            if optimizer is None or number >= len(optimizer.param_groups):
                continue
            new = optimizer.param_groups[number].get("lr", 0.0)
            old = self._rates.get(name, new)
            if isinstance(new, torch.Tensor) and new.is_cuda:
                self.codec.rescale([name], torch.where((new > 0) & (old > 0), old / new, 1.0))
            elif new > 0 and new != old > 0:
                self.codec.rescale([name], float(old) / float(new))
            self._note_rate([name], new)

    def note_scaler(self, scaler: Any, optimizer: Optimizer) -> None:
        """Record the GradScaler that unscales the gradients of these parameters."""
        if any(map(self._find_names, optimizer.param_groups)):
            self._scaler = weakref.ref(scaler)
            if self._scale is None:
                with self.exchanges.side.borrowed():
                    self._scale = _read_scale(scaler)

    def _follow_scale(self) -> None:
        """Before the first exchange of a step, rescale residuals that refer to another loss scale."""
        if self._scale is None:
            return
        if (scaler := self._scaler()) is None:  # the state was loaded, or the program now uses another one
            found = [s for s in gc.get_objects() if issubclass(type(s), torch.amp.GradScaler) and s.is_enabled()]
            if len(found) > 1:
                return  # the next step shows which one is used
            scaler = found[0] if found else None
            self._scaler = (lambda: None) if scaler is None else weakref.ref(scaler)
        new = 1.0 if scaler is None else _read_scale(scaler)
        if new is not None and (isinstance(new, torch.Tensor) or new != self._scale):
            self.rescale(new / self._scale)
        self._scale = None if scaler is None else self._scale if new is None else new

    def rescale(self, factor: Any) -> None:
        """Multiply all stored state, including momentum, by the factor by which the scale of the gradients changes."""
        with self.exchanges.side.borrowed():
            self.codec.rescale(list(self.codec.errors), factor)

    def state(self) -> dict[str, Any]:
        """`common` is the same on all ranks, and `rank` is this rank's part."""
        with self.exchanges.side.borrowed():
            common, errors = self.codec.common, self.codec.errors
        # Copy on the caller's stream, so that later steps do not change the returned state.
        common = {name: value.clone() for name, value in common.items()}
        errors = {name: self._reorder(name, error, is_saved=False) for name, error in errors.items()}
        rates = {name: float(rate) for name, rate in self._rates.items()}
        scale = None if self._scale is None else float(self._scale)
        counts = {"strategy": self.strategy.text, "step": self.step, "rates": rates, "scale": scale}
        counts |= {} if self.levels is None else {"place": self.levels.places[self._rank]}
        return {**counts, "common": common, "rank": errors}

    @property
    def sent(self) -> Sent:
        """The number of messages so far and their total bytes."""
        return Sent(self.exchanges.num_messages, self.exchanges.num_bytes)

    @property
    def memory_bytes(self) -> int:
        return self.codec.memory_bytes

    def compute_costs(self, channel: Channel, num_steps: int, held_bytes: int = 0) -> StrategyCosts:
        """Mean costs of a step since the model was wrapped, including messages of `channel` that bypassed the codec."""
        exchanges, steps = self.exchanges, max(1, num_steps)
        plain = Message(SUM, channel.sent.num_bytes).sent_bytes(channel.world_size)
        sent, memory = (exchanges.sent_bytes + plain) // steps, self.memory_bytes + held_bytes
        encode_s, decode_s = exchanges.encode_s / steps, exchanges.decode_s / steps
        return StrategyCosts(self.strategy.text, sent, memory, encode_s, decode_s)

    def load(self, states: Sequence[dict[str, Any]], *optimizers: Optimizer) -> None:
        """Continue from the states of all ranks. If the number of ranks has changed, every rank gets the mean of the
        residuals: the update is the mean of gradients and residuals, so nothing is lost or counted twice. `optimizers`
        are those that step the parameters; without them, residuals follow learning rates only from the second step."""
        check_states(states, self.strategy)
        if not states:
            return
        self._steppers = {
            name: (weakref.ref(optimizer), number)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for name in self._find_names(group)
        }
        if self.levels is not None:
            self._load_parts(states, self.levels)
            return
        if len(states) == self._world_size:
            self._take(states[0], states[self._rank]["rank"])
            return
        names = {name for state in states for name in state["rank"]}
        mean = {}
        for name in names:
            parts = [state["rank"][name].cpu().double() for state in states if name in state["rank"]]
            mean[name] = (torch.stack(parts).sum(0) / len(states)).to(states[0]["rank"][name].dtype)
        self._take(states[0], mean)

    def _load_parts(self, states: Sequence[dict[str, Any]], levels: Levels) -> None:
        """On the same hosts, each rank loads its own part, including the state shared by ranks with the same local
        rank. On other hosts, the mean over the hosts is split again."""
        places = [tuple(state["place"]) for state in states]
        if places == levels.places:
            self._take(states[self._rank], states[self._rank]["rank"])
            return
        by_host = [[rank for rank, place in enumerate(places) if place[0] == host] for host in dict(places)]
        before = replace(levels, hosts=tuple(map(tuple, by_host)))
        errors = before.join([state["rank"] for state in states], self._shapes)
        if errors and len(levels.hosts) == 1:
            text = f"the state of strategy {self.strategy.text!r} has residuals of {len(by_host)} hosts"
            text += ", which a single host never sends: use several hosts, or start without the state"
            raise ConfigError(text, code="strategy")
        self._take(states[0], levels.cut(errors, self._shapes))

    def _fits(self, name: str, error: torch.Tensor) -> bool:
        """Whether the size of this residual matches its parameter, or this rank's part of it."""
        shape = self._shapes.get(name.rpartition(" ")[2])
        if shape is not None and self.levels is not None:
            shape = torch.Size(self.strategy.cut(shape, self.levels.per_host)[0])
        return shape is not None and shape.numel() == error.numel()

    def _follow(self, before: StrategyState) -> None:
        """Continue from the state before the model was rescanned, as far as it still fits the parameters."""
        found = StrategyState.state(before)
        kept = {part: {n: v for n, v in found[part].items() if n in self._shapes} for part in ("common", "rates")}
        errors = {name: error for name, error in found["rank"].items() if self._fits(name, error)}
        self._keep({**found, **kept}, errors)
        self._scaler = before._scaler
        self._steppers = {name: stepper for name, stepper in before._steppers.items() if name in self._shapes}

    def _take(self, common: Mapping[str, Any], errors: Mapping[str, torch.Tensor]) -> None:
        for name, error in errors.items():
            if not self._fits(name, error):
                text = f"the state of strategy {self.strategy.text!r} has a residual of {error.numel()} elements"
                raise ConfigError(f"{text} for {name}, which does not match this model", code="strategy")
        self._keep(common, errors)

    def _keep(self, found: Mapping[str, Any], errors: Mapping[str, torch.Tensor]) -> None:
        # Copies, so that steps change neither the input nor what `state` returned. Checkpoints are often on the CPU.
        device = self.exchanges.side.device
        with self.exchanges.side.borrowed():
            errors = {name: error.detach().to(device) for name, error in errors.items()}
            self.codec.errors = {name: self._reorder(name, error, is_saved=True) for name, error in errors.items()}
            self.codec.common = {n: value.detach().to(device, copy=True) for n, value in found["common"].items()}
        self._rates = dict(found["rates"])
        self._scale = found.get("scale")
        self.step = found["step"]

    def _reorder(self, name: str, error: torch.Tensor, is_saved: bool) -> torch.Tensor:
        """Copy a residual and change its memory order: codecs use that of the parameter, such as channels_last, and
        saved states the contiguous one. Part of a parameter is copied unchanged."""
        if self.levels is not None or self.strategy.outer:
            return error.clone()
        name = name.rpartition(" ")[2]
        shape, strides = self._shapes[name], self._strides[name]
        usual = torch.empty(shape, device="meta").stride()
        old, new = (usual, strides) if is_saved else (strides, usual)
        value = torch.empty_strided(shape, new, dtype=error.dtype, device=error.device)
        return value.copy_(error.as_strided(shape, old)).as_strided(error.shape, error.stride())

    def discard(self, params: Sequence[torch.Tensor] | None) -> None:
        """Undo the step for these parameters (default: all), because its averages are not applied."""
        self.codec.discard(None if params is None else [self._names[id(param)] for param in params])

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer, grads, params = bucket.buffer(), bucket.gradients(), bucket.parameters()
        if any(id(param) not in self._names for param in params):
            raise ConfigError("comm_hook() got a different model from the wrapped one", code="strategy")
        names = [self._names[id(param)] for param in params]
        if self._is_first:
            with self.exchanges.side.borrowed():
                self._follow_rates()
                self._follow_scale()
        if self.levels is not None and self.levels.are_two:
            exchange = self.levels.average(self.codec, names, grads, self.step)
        else:
            exchange = self.codec.average(names, grads, self.step)
        self._is_first = bucket.is_last()
        self.step += self._is_first
        return self.exchanges.start(exchange, buffer)


_states: weakref.WeakSet[StrategyState] = weakref.WeakSet()  # states with residuals, which depend on the loss scale


def _read_scale(scaler: Any) -> Any:
    """The loss scale; None before the first loss. On a GPU it is a device copy, to avoid a synchronization."""
    scale = scaler._scale
    return scale if scale is None else scale.clone() if scale.is_cuda else float(scale)


@functools.cache
def watch_unscaling(call: Callable[[Any, Any, torch.Tensor, Any], Any]) -> None:
    """Call `call(scaler, optimizer, found_inf, flags)` whenever a GradScaler has unscaled an optimizer's gradients. It
    may return other flags: for each device, a tensor that is above 0 if a gradient overflowed."""
    kind: Any = torch.amp.GradScaler
    original = kind._unscale_grads_

    @functools.wraps(original)
    def unscale(self: Any, optimizer: Any, inv_scale: Any, found_inf: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        flags = original(self, optimizer, inv_scale, found_inf, *args, **kwargs)
        return call(self, optimizer, found_inf, flags) or flags

    kind._unscale_grads_ = unscale


def _note_scaler(scaler: Any, optimizer: Optimizer, *_: object) -> None:
    for state in list(_states):
        state.note_scaler(scaler, optimizer)


def strategy_hook(state: StrategyState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, for this wrapper and for torch's."""
    return state.average(bucket)


strategy_hook.__annotations__.clear()  # torch expects classes, but these annotations are strings


def comm_hook(strategy: str | Strategy, model: nn.Module, group: dist.ProcessGroup | None = None) -> tuple[Any, Any]:
    """A communication hook for torch's DistributedDataParallel. Collective: call on all ranks.

    Args:
        strategy: A strategy such as "int8" (`docs/strategies.md`).
        model: The wrapped module.
        group: Its process group; None means the default group.

    Returns:
        `(state, hook)`, the arguments of `register_comm_hook`.
    """
    parsed = Strategy.parse(strategy)
    if not parsed.is_hook:
        text = "needs more than a communication hook can do: use paceline.DDP"
        raise ConfigError(f"strategy {parsed.text!r} {text}", code="strategy")
    params = [param for param in model.parameters() if param.requires_grad]
    device = params[0].device if params else torch.device("cpu")
    channel = Channel(dist.group.WORLD if group is None else group, device)
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return StrategyState(parsed, read_replica(model), channel), strategy_hook


def find_hook_state(model: nn.Module) -> StrategyState | None:
    """The state of the `comm_hook` registered with torch's wrapper, if any."""
    hooks = getattr(model, "_comm_hooks", ()) if isinstance(model, DistributedDataParallel) else ()
    return next((state for _, state in hooks if isinstance(state, StrategyState)), None)
