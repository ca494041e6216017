"""Strategies at run time: the exchanges of a codec between ranks, and the hook that gives it each bucket."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ConfigError, LaunchError
from paceline.parallel.channel import Channel, alias, open_group
from paceline.parallel.codecs import GATHER, SUM, Codec, Exchange, build_codec
from paceline.parallel.replicas import Replica, read_replica
from paceline.strategy import Message, Strategy

# Where the backend has it: the sum of the ranks' rows of this rank's number.
SCATTER = "reduce-scatter"


class Exchanges:
    """Runs exchanges while backward goes on: when a message has arrived, a callback computes the next one.

    Every rank must start its messages in the same order, and callbacks run in any. So the first messages of all
    exchanges have a group, the second ones another, and in each an exchange waits for those that began before it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._groups: list[dist.ProcessGroup] = []
        self._lock = threading.RLock()
        self._reached: dict[int, float] = {}  # of each exchange under way: how many messages it has started
        self._waiting: dict[int, tuple[str, torch.Tensor, Exchange, Any]] = {}
        self._count = 0
        self.num_messages = self.sent_bytes = 0
        self.computing_s = 0.0  # in codecs, on the host

    def start(self, exchange: Exchange) -> torch.futures.Future[None]:
        """Begin an exchange. Its Future is complete when it is over, or has the error of this rank. The first call is
        collective."""
        if not self._groups:
            other = open_group(self._channel, self) if self._channel.world_size > 1 else None
            self._groups = [self._channel.group, *([] if other is None else [other])]
        device = self._channel.device
        future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)  # type: ignore[var-annotated]
        with self._lock:
            number = self._count
            self._count += 1
            self._reached[number] = 0
        self._resume(number, exchange, None, future)
        return future

    def _resume(self, number: int, exchange: Exchange, value: Any, future: Any) -> None:
        """Compute the next message of an exchange, and start all whose turn it is."""
        begin_s, is_over = time.perf_counter(), False
        try:
            with torch.no_grad():
                kind, tensor = exchange.send(value)
        except StopIteration:
            is_over = True
            future.set_result(None)
        except Exception as error:
            is_over = True
            future.set_exception(error)
        with self._lock:
            self.computing_s += time.perf_counter() - begin_s
            if is_over:
                self._reached.pop(number)
            else:
                self._waiting[number] = kind, tensor, exchange, future
            for other in sorted(self._waiting):
                if other in self._waiting and self._is_turn(other):
                    self._send(other)

    def _is_turn(self, number: int) -> bool:
        stage = self._reached[number]
        several = len(self._groups) > 1
        return all(reached > stage if several else False for other, reached in self._reached.items() if other < number)

    def _send(self, number: int) -> None:
        kind, tensor, exchange, future = self._waiting.pop(number)
        group = self._groups[min(int(self._reached[number]), len(self._groups) - 1)]
        self._reached[number] += 1
        try:
            work, result = start_message(kind, tensor, group, self._channel.world_size)
        except Exception as error:
            self._reached.pop(number)
            future.set_exception(error)
            return
        self.num_messages += 1
        self.sent_bytes += Message(kind, tensor.nbytes).sent_bytes(self._channel.world_size)

        def go_on(done: Any) -> None:
            try:
                done.value()
            except Exception as error:
                with self._lock:
                    self._reached.pop(number, None)
                future.set_exception(error)
                return
            self._resume(number, exchange, result, future)

        if work is None:
            self._resume(number, exchange, result, future)
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
    into, given = result.view(-1).view(torch.uint8), rows.view(-1).view(torch.uint8)
    work = group._allgather_base(into, given) if kind == GATHER else group.alltoall_base(into, given, [], [])
    return work, result


def _sum_options() -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = True
    return options


class StrategyState:
    """What `strategy_hook` needs: the codec and its memory, by names of parameters. It goes on where `before` was."""

    def __init__(
        self, strategy: Strategy, replica: Replica, channel: Channel, before: StrategyState | None = None
    ) -> None:
        self.strategy, self._world_size, self._rank = strategy, channel.world_size, channel.rank
        self._names = {id(param): names[0] for param, names in zip(replica.params, replica.names, strict=True)}
        self._shapes = {names[0]: layout[0] for names, layout in zip(replica.names, replica.layouts, strict=True)}
        self.codec: Codec = build_codec(strategy, channel.rank, channel.world_size)
        self.exchanges, self.step = Exchanges(channel), 0
        if before is not None and before._world_size == self._world_size:
            self._take({"common": before.codec.common, "step": before.step}, before.codec.errors)

    def state(self) -> dict[str, Any]:
        """`common` is the same on all ranks, `rank` is this rank's part."""
        common, step = dict(self.codec.common), self.step
        return {"strategy": self.strategy.text, "step": step, "common": common, "rank": dict(self.codec.errors)}

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from the states of all ranks. Of another number of ranks, every rank gets the mean of their errors:
        what is applied is the mean of gradients and errors, so nothing is lost or counted twice."""
        if found := [state["strategy"] for state in states if state["strategy"] != self.strategy.text]:
            text = f"the state is of strategy {found[0]!r}, and this is {self.strategy.text!r}"
            raise ConfigError(f"{text}: use that one, or start without its state", code="strategy")
        if len(states) == self._world_size:
            self._take(states[0], states[self._rank]["rank"])
            return
        names = {name for state in states for name in state["rank"]}
        mean = {}
        for name in names:
            parts = [state["rank"][name].cpu().double() for state in states if name in state["rank"]]
            mean[name] = (torch.stack(parts).sum(0) / len(states)).float()
        self._take(states[0], mean)

    def _take(self, common: Mapping[str, Any], errors: Mapping[str, torch.Tensor]) -> None:
        for name, error in errors.items():
            shape = self._shapes.get(name.rpartition(" ")[2])
            if shape is None or shape.numel() != error.numel():
                text = (
                    f"the state of strategy {self.strategy.text!r} has an error of {error.numel()} elements for {name}"
                )
                raise ConfigError(f"{text}, which this model does not have", code="strategy")
        # Copies: a step changes neither what was given nor what `state` returned.
        self.codec.errors = {name: error.detach().clone() for name, error in errors.items()}
        self.codec.common = {name: value.detach().clone() for name, value in common["common"].items()}
        self.step = common["step"]

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer, grads = bucket.buffer(), bucket.gradients()
        names = [self._names[id(param)] for param in bucket.parameters()]
        exchange = self.codec.average(names, grads, self.step)
        self.step += bucket.is_last()
        future: torch.futures.Future[torch.Tensor] = self.exchanges.start(exchange).then(
            lambda done: _result(done, buffer)
        )
        return future


def _result(done: torch.futures.Future[None], buffer: torch.Tensor) -> torch.Tensor:
    done.value()
    return buffer


def strategy_hook(state: StrategyState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, for this wrapper and for torch's."""
    return state.average(bucket)


strategy_hook.__annotations__.clear()  # torch compares them with classes, and here they are text


def _world() -> dist.ProcessGroup:
    if dist.group.WORLD is None:
        raise LaunchError("no process group is open: call paceline.init() first")
    return dist.group.WORLD


def comm_hook(strategy: str | Strategy, model: nn.Module, group: dist.ProcessGroup | None = None) -> tuple[Any, Any]:
    """`(state, hook)` for `register_comm_hook` of torch's DistributedDataParallel. Collective: call on all ranks."""
    parsed = Strategy.parse(strategy)
    if not parsed.is_hook:
        text = "does more than a communication hook can do: use paceline.DDP"
        raise ConfigError(f"strategy {parsed.text!r} {text}", code="strategy")
    params = [param for param in model.parameters() if param.requires_grad]
    channel = Channel(group if group is not None else _world(), params[0].device if params else torch.device("cpu"))
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return StrategyState(parsed, read_replica(model), channel), strategy_hook
