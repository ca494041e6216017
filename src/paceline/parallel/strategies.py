"""Strategies at run time: the exchanges of a codec between ranks, and the hook that gives it each bucket."""

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

from paceline.errors import ConfigError, LaunchError
from paceline.parallel.channel import Channel, Sent, alias, open_group, start_exchange
from paceline.parallel.codecs import GATHER, SUM, BFloat16, Codec, Exchange, build_codec
from paceline.parallel.levels import NUM_STAGES, SCATTER, Inside, Levels
from paceline.parallel.replicas import Replica, read_replica
from paceline.parallel.streams import SideStream
from paceline.parallel.timeline import StrategyCosts
from paceline.strategy import DENSE, Message, Strategy


class Exchanges:
    """Runs exchanges while backward goes on: when a message has arrived, the next one is computed, on a side stream.

    Every rank must start its messages in the same order. On NCCL a stream can wait for a Work as soon as it is started,
    so an exchange is queued as a whole. Elsewhere callbacks continue it, in any order: so the first messages of all
    exchanges have a group, the second ones another, and in each an exchange waits for those that began before it.
    With two levels there are two more, inside a host. After an error nothing more is sent: it would be taken for what
    is missing.
    """

    def __init__(self, channel: Channel, levels: Levels | None = None) -> None:
        self._channel = channel
        self._levels = levels if levels is not None and levels.are_two else None
        # As it is now: later the channel may have a group of its own, for the control words, which report errors.
        self._groups: list[tuple[dist.ProcessGroup, int]] = [(channel.group, channel.world_size)]
        self._is_open = False
        self._lock = threading.RLock()
        self._reached: dict[int, int] = {}  # of each exchange under way: the stage of its next message, or a later one
        self._waiting: dict[int, tuple[str, torch.Tensor, Exchange, Any]] = {}
        self._count = 0
        self._error: Exception | None = None
        self.side = SideStream(channel.device)
        self.num_messages = self.num_bytes = self.sent_bytes = 0
        self.encode_s = self.decode_s = 0.0  # on the host: until the first message of an exchange, and after it

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        return [group for group, _ in self._groups]

    @property
    def can_interleave(self) -> bool:
        """Whether other messages may be started while an exchange is under way."""
        return len(self._groups) > 1 or self._channel.world_size == 1 or self._channel.is_nccl

    def open(self) -> None:
        """Open the groups that are needed, the first time. Collective."""
        if not self._is_open and self._levels is not None:
            self._groups = self._levels.open_groups(self._channel, self)
        elif not self._is_open and not self.can_interleave:
            other = open_group(self._channel, self)
            self._groups += [] if other is None else [(other, self._channel.world_size)]
        self._is_open = True

    def start(self, exchange: Exchange, result: torch.Tensor | None = None) -> torch.futures.Future[Any]:
        """Begin an exchange. Its Future completes with `result` when the exchange is over, or has the error of this
        rank. The first call is collective."""
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
        """Compute the next message of an exchange from the result of the last, and start all whose turn it is."""
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
        """Of a message that is sent now."""
        self.num_messages += 1
        self.num_bytes += num_bytes
        self.sent_bytes += Message(kind, num_bytes).sent_bytes(num_ranks)

    def _fail(self, error: Exception, number: int, end: Any) -> None:
        """Keep the error for what follows; what waits gets it, too."""
        with self._lock:
            self._error = self._error or error
            waiting = [end, *(item[-1] for item in self._waiting.values())]
            for ended in (number, *self._waiting):
                self._reached.pop(ended, None)
            self._waiting.clear()
        for future, _ in waiting:
            future.set_exception(error)

    def _find_stage(self, number: int) -> int:
        """Of the message that waits."""
        reached, last = self._reached[number], NUM_STAGES - 1
        if self._levels is None:
            return reached
        if isinstance(self._waiting[number][0], Inside):
            return last if reached else 0
        return min(reached, last - 1)

    def _is_turn(self, number: int) -> bool:
        stage, is_alone = self._find_stage(number), len(self._groups) == 1
        return all(not is_alone and reached > stage for other, reached in self._reached.items() if other < number)

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
    """Start a collective: its work (None if there is nothing to wait for), and the tensor that its result is in."""
    if world_size == 1:
        return None, tensor[None] if kind == GATHER else tensor[0] if kind == SCATTER else tensor
    if kind == SUM:
        return group.allreduce([alias(tensor)], _sum_options()), tensor
    # As bytes: not every backend moves every dtype.
    rows = tensor.contiguous()
    if kind == SCATTER:
        result = torch.empty_like(rows[0])
        return group._reduce_scatter_base(result, rows.view(-1)), result
    shape = (world_size, *rows.shape) if kind == GATHER else rows.shape
    result = rows.new_empty(shape)
    into = result.view(-1).view(torch.uint8).view(world_size, -1)
    given = rows.view(-1).view(torch.uint8)
    return start_exchange(into, given if kind == GATHER else given.view(world_size, -1), group), result


def _sum_options() -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return options


def check_states(states: Sequence[Mapping[str, Any]], strategy: Strategy) -> None:
    """Refuse states of another strategy. Those of a dense model are empty."""
    texts = [state.get("strategy", DENSE.text) for state in states]
    if found := [text for text in texts if Strategy.parse(text) != strategy]:
        text = f"the state is of strategy {found[0]!r}, and this is {strategy.text!r}"
        raise ConfigError(f"{text}: use that one, or start without its state", code="strategy")


class StrategyState:
    """What `strategy_hook` needs: the codec and its memory, by names of parameters. It continues where `before` was.

    An error is in units of gradients: where an optimizer's learning rate changes from a to b, it is multiplied by a/b.
    Of a scaled loss it is in units of scaled gradients, and follows the scale of torch's GradScaler.
    """

    def __init__(
        self, strategy: Strategy, replica: Replica, channel: Channel, before: StrategyState | None = None
    ) -> None:
        self.strategy, self._world_size, self._rank = strategy, channel.world_size, channel.rank
        self._names = {id(param): names[0] for param, names in zip(replica.params, replica.names, strict=True)}
        self._shapes = {names[0]: layout[0] for names, layout in zip(replica.names, replica.layouts, strict=True)}
        # Errors are in the order of memory, as gradients are in a bucket: of channels_last, say, in another than usual.
        self._strides = {} if strategy.outer else {
            names[0]: list(strides)
            for param, names in zip(replica.params, replica.names, strict=True)
            if (strides := torch.empty_like(param, device="meta").stride()) != _usual_strides(param.size())
        }  # fmt: skip
        for param, names in zip(replica.params, replica.names, strict=True):
            if param.is_complex() and strategy.codec != "dense":
                text = f"strategy {strategy.text!r}: {names[0]} is complex, and only real numbers are sent by it"
                raise ConfigError(f"{text}: use strategy='dense'", code="strategy")
        self.levels = levels = Levels.find(strategy, channel)
        if levels is not None and levels.are_two:
            self.codec: Codec = build_codec(strategy, levels.places[channel.rank][0], len(levels.hosts))
        else:
            runs = DENSE if levels is not None and len(levels.hosts) == 1 else strategy
            self.codec = build_codec(runs, channel.rank, channel.world_size)
        # In shared memory ranks can round while they add up float32, which is as fast as not to round.
        is_float32 = all(dtype == torch.float32 for _, dtype, _ in replica.layouts)
        is_shared = channel.shares_memory and channel.world_size > 1
        self.rounds = strategy.codec == "bf16" and levels is None and is_shared and is_float32
        if isinstance(self.codec, BFloat16) and self.codec.world_size == channel.world_size:
            # In shared memory ranks add in float32 and round once. gloo and NCCL round at every hop of a ring.
            self.codec.sums_precisely = channel.shares_memory
        self.exchanges, self.step = Exchanges(channel, levels), 0
        self._rates: dict[str, Any] = {}  # of each parameter, the learning rate that its error belongs to
        # Of each parameter: the optimizer that stepped it last, and its group there, which has the next rate.
        self._steppers: dict[str, tuple[Callable[[], Optimizer | None], int]] = {}
        self._scale: Any = None  # of the loss, that errors belong to; None: it was not scaled
        self._scaler: Callable[[], Any] = lambda: None
        self._is_first = True  # the next bucket is the first of a step
        if before is not None and before._world_size == self._world_size:
            self._follow(before)
        self._end: Callable[[], object] = lambda: None
        if strategy.outer or strategy.codec in ("dense", "bf16"):
            return  # there are no errors of gradients
        _watch_scalers()
        _states.add(self)
        own = weakref.ref(self)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (me := own()) is not None:
                me._before_step(optimizer)

        self._end = weakref.finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def stop(self) -> None:
        """Remove the hooks on optimizers."""
        self._end()
        _states.discard(self)

    def _before_step(self, optimizer: Optimizer) -> None:
        """Note the rates of this step, and refuse a second momentum."""
        for number, group in enumerate(optimizer.param_groups):
            if not (names := self._find_names(group)):
                continue
            momentum = group.get("momentum") or (group.get("betas") or (0,))[0]
            if self.strategy.dgc and momentum:
                twice = f"momentum would be applied twice: {type(optimizer).__name__} has {momentum:g}, and dgc"
                text = f"strategy {self.strategy.text!r}: {twice} {self.strategy.dgc:g}"
                text += "; use an optimizer without it, or leave out dgc"
                raise ConfigError(text, code="strategy")
            self._note_rate(names, group.get("lr", 0.0))
            self._steppers |= dict.fromkeys(names, (weakref.ref(optimizer), number))

    def _find_names(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[id(param)] for param in group["params"] if id(param) in self._names]

    def _note_rate(self, names: Sequence[str], rate: Any) -> None:
        """From now on their errors belong to this rate, if it is above 0."""
        if isinstance(rate, torch.Tensor) and rate.is_cuda:  # without waiting for it
            with self.exchanges.side.borrowed():
                self._rates |= {name: torch.where(rate > 0, rate, self._rates.get(name, rate)) for name in names}
        elif rate > 0:
            self._rates |= dict.fromkeys(names, float(rate))

    def _follow_rates(self) -> None:
        """Before the first exchange of a step: rescale errors that belong to another rate than that of the step."""
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
        """A scaler has looked at gradients; if they are of these parameters, it is their scale."""
        if any(map(self._find_names, optimizer.param_groups)):
            self._scaler = weakref.ref(scaler)
            if self._scale is None:
                with self.exchanges.side.borrowed():
                    self._scale = _read_scale(scaler)

    def _follow_scale(self) -> None:
        """Before the first exchange of a step: rescale what belongs to another scale of the loss."""
        if self._scale is None:
            return
        if (scaler := self._scaler()) is None:  # of a state that was loaded, or the program has another one now
            found = [s for s in gc.get_objects() if issubclass(type(s), torch.amp.GradScaler) and s.is_enabled()]
            if len(found) > 1:
                return  # the next step shows which
            scaler = found[0] if found else None
            self._scaler = (lambda: None) if scaler is None else weakref.ref(scaler)
        new = 1.0 if scaler is None else _read_scale(scaler)
        if new is not None and (isinstance(new, torch.Tensor) or new != self._scale):
            self.rescale(new / self._scale)
        self._scale = None if scaler is None else self._scale if new is None else new

    def rescale(self, factor: Any) -> None:
        """Gradients are in another unit from now on: so is all that is kept, a momentum, too."""
        with self.exchanges.side.borrowed():
            self.codec.rescale(list(self.codec.errors), factor)

    def state(self) -> dict[str, Any]:
        """`common` is the same on all ranks, `rank` is this rank's part."""
        # Copies, which later steps do not change.
        with self.exchanges.side.borrowed():
            memory = self.codec.common, self.codec.errors
        common, errors = ({name: value.clone() for name, value in kept.items()} for kept in memory)
        rates = {name: float(rate) for name, rate in self._rates.items()}
        scale = None if self._scale is None else float(self._scale)
        counts = {"strategy": self.strategy.text, "step": self.step, "rates": rates, "scale": scale}
        counts |= {"strides": dict(self._strides)} if self._strides else {}
        counts |= {} if self.levels is None else {"place": self.levels.places[self._rank]}
        return {**counts, "common": common, "rank": errors}

    @property
    def sent(self) -> Sent:
        """The messages so far, and the bytes that were passed to them."""
        return Sent(self.exchanges.num_messages, self.exchanges.num_bytes)

    @property
    def memory_bytes(self) -> int:
        return self.codec.memory_bytes

    def compute_costs(self, channel: Channel, num_steps: int, held_bytes: int = 0) -> StrategyCosts:
        """Of a step, in the mean over all since the model was wrapped; `channel` has sent what passed no codec."""
        exchanges, steps = self.exchanges, max(1, num_steps)
        plain = Message(SUM, channel.sent.num_bytes).sent_bytes(channel.world_size)
        sent, memory = (exchanges.sent_bytes + plain) // steps, self.memory_bytes + held_bytes
        return StrategyCosts(
            self.strategy.text, sent, sent, memory, exchanges.encode_s / steps, exchanges.decode_s / steps
        )

    def load(self, states: Sequence[dict[str, Any]], *optimizers: Optimizer) -> None:
        """Continue from the states of all ranks. Of another number of ranks, every rank gets the mean of their errors:
        what is applied is the mean of gradients and errors, so nothing is lost or counted twice. `optimizers`: those
        that step the parameters; without them, errors follow a learning rate only from the second step on."""
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
        """On the same hosts each rank has its own part, also of what ranks of one number have alike. On others the mean
        over the hosts is cut anew."""
        places = [tuple(state["place"]) for state in states]
        if places == levels.places:
            self._take(states[self._rank], states[self._rank]["rank"])
            return
        by_host = [[rank for rank, place in enumerate(places) if place[0] == host] for host in dict(places)]
        before = replace(levels, hosts=tuple(map(tuple, by_host)))
        errors = before.join([state["rank"] for state in states], self._shapes)
        if errors and len(levels.hosts) == 1:
            text = f"the state of strategy {self.strategy.text!r} has errors of {len(by_host)} hosts"
            raise ConfigError(f"{text}, which one host never sends: use several, or start without it", code="strategy")
        self._take(states[0], levels.cut(errors, self._shapes))

    def _fits(self, name: str, error: torch.Tensor) -> bool:
        """Whether this is an error of a parameter that the model has, or of this rank's part of it."""
        shape = self._shapes.get(name.rpartition(" ")[2])
        if shape is not None and self.levels is not None:
            shape = torch.Size(self.strategy.cut(shape, self.levels.per_host)[0])
        return shape is not None and shape.numel() == error.numel()

    def _follow(self, before: StrategyState) -> None:
        """Continue where the state before the model was read again was, with what still fits the parameters."""
        found = StrategyState.state(before)
        kept = {part: {n: v for n, v in found[part].items() if n in self._shapes} for part in ("common", "rates")}
        errors = {name: error for name, error in found["rank"].items() if self._fits(name, error)}
        self._keep({**found, **kept}, errors)
        self._scaler = before._scaler
        self._steppers = {name: stepper for name, stepper in before._steppers.items() if name in self._shapes}

    def _take(self, common: Mapping[str, Any], errors: Mapping[str, torch.Tensor]) -> None:
        for name, error in errors.items():
            if not self._fits(name, error):
                text = f"the state of strategy {self.strategy.text!r} has an error of {error.numel()} elements"
                raise ConfigError(f"{text} for {name}, which this model does not have", code="strategy")
        self._keep(common, errors)

    def _keep(self, found: Mapping[str, Any], errors: Mapping[str, torch.Tensor]) -> None:
        # Copies: a step changes neither what was given nor what `state` returned. A checkpoint is often on the CPU.
        saved, device = found.get("strides", {}), self.exchanges.side.device
        with self.exchanges.side.borrowed():
            errors = {name: error.detach().to(device) for name, error in errors.items()}
            self.codec.errors = {name: self._reorder(name, error, saved) for name, error in errors.items()}
            self.codec.common = {n: value.detach().to(device, copy=True) for n, value in found["common"].items()}
        self._rates, self._scale = dict(found["rates"]), found.get("scale")
        self.step = found["step"]

    def _reorder(self, name: str, error: torch.Tensor, saved: Mapping[str, Sequence[int]]) -> torch.Tensor:
        """A copy in the order of this model's memory; a part of a parameter, as it is."""
        name = name.rpartition(" ")[2]
        shape, old, new = self._shapes[name], saved.get(name), self._strides.get(name)
        if old == new or self.levels is not None:
            return error.clone()
        value = error.reshape(-1).as_strided(shape, old or _usual_strides(shape))
        twin = torch.empty_strided(shape, new or _usual_strides(shape), dtype=error.dtype, device=error.device)
        return twin.copy_(value).as_strided(error.shape, error.stride())

    def discard(self, params: Sequence[torch.Tensor] | None) -> None:
        """The averages of the step are not applied, or not those of these parameters."""
        self.codec.discard(None if params is None else [self._names[id(param)] for param in params])

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer, grads, params = bucket.buffer(), bucket.gradients(), bucket.parameters()
        if any(id(param) not in self._names for param in params):
            raise ConfigError("comm_hook() was given another model than the one that is wrapped", code="strategy")
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


_states: weakref.WeakSet[StrategyState] = weakref.WeakSet()  # whose errors depend on the scale of a loss


def _usual_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _read_scale(scaler: Any) -> Any:
    """On a GPU a copy there, so that nothing waits for it; None before its first loss."""
    scale = scaler._scale
    return scale if scale is None else scale.clone() if scale.is_cuda else float(scale)


@functools.cache
def _watch_scalers() -> None:
    """Let torch's GradScaler show which optimizer's gradients it unscales, also inside fused optimizers."""
    kind: Any = torch.amp.GradScaler
    original = kind._unscale_grads_

    @functools.wraps(original)
    def unscale(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        for state in list(_states):
            state.note_scaler(self, optimizer)
        return original(self, optimizer, *args, **kwargs)

    kind._unscale_grads_ = unscale


def strategy_hook(state: StrategyState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, for this wrapper and for torch's."""
    return state.average(bucket)


strategy_hook.__annotations__.clear()  # torch compares them with classes, and here they are text


def _world() -> dist.ProcessGroup:
    if dist.group.WORLD is None:
        raise LaunchError("no process group is open: call paceline.init() first")
    return dist.group.WORLD


def comm_hook(strategy: str | Strategy, model: nn.Module, group: dist.ProcessGroup | None = None) -> tuple[Any, Any]:
    """A communication hook for torch's DistributedDataParallel. Collective: call on all ranks.

    Args:
        strategy: What to send, such as "int8" (`docs/strategies.md`).
        model: The module that is wrapped.
        group: Its process group; None is the default group.

    Returns:
        `(state, hook)`, the arguments of `register_comm_hook`.
    """
    parsed = Strategy.parse(strategy)
    if not parsed.is_hook:
        text = "does more than a communication hook can do: use paceline.DDP"
        raise ConfigError(f"strategy {parsed.text!r} {text}", code="strategy")
    params = [param for param in model.parameters() if param.requires_grad]
    channel = Channel(group if group is not None else _world(), params[0].device if params else torch.device("cpu"))
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return StrategyState(parsed, read_replica(model), channel), strategy_hook


def find_hook_state(model: nn.Module) -> StrategyState | None:
    """The state of `comm_hook` that torch's wrapper was given, if any."""
    hooks = getattr(model, "_comm_hooks", ()) if isinstance(model, DistributedDataParallel) else ()
    return next((state for _, state in hooks if isinstance(state, StrategyState)), None)
