"""Strategies at run time: the exchanges of a codec between ranks, and the hook that gives it each bucket."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import ConfigError
from paceline.parallel.channel import Channel, alias, open_group
from paceline.parallel.codecs import GATHER, SUM, Codec, Exchange, build_codec
from paceline.strategy import Message, Strategy


class Exchanges:
    """Runs exchanges while backward goes on: when a message has arrived, a callback computes the next one.

    Every rank must start its messages in the same order, and callbacks run in any. So the first messages of all
    exchanges have a group, the second ones another, and in each an exchange waits for those that began before it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._groups = channel, [channel.group]
        if channel.world_size > 1 and (other := open_group(channel, self)) is not None:
            self._groups.append(other)
        self._lock = threading.RLock()
        self._reached: dict[int, float] = {}  # of each exchange under way: how many messages it has started
        self._waiting: dict[int, tuple[str, torch.Tensor, Exchange, Any]] = {}
        self._count = 0
        self.num_messages = self.sent_bytes = 0
        self.computing_s = 0.0  # in codecs, on the host

    def start(self, exchange: Exchange) -> torch.futures.Future[None]:
        """Begin an exchange. Its Future is complete when it is over, or has the error of this rank."""
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
        return None, tensor[None] if kind == GATHER else tensor
    if kind == SUM:
        return group.allreduce([alias(tensor)], _sum_options()), tensor
    # As bytes: not every backend moves every dtype.
    rows = tensor.contiguous()
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
    """What `strategy_hook` needs: the codec and its memory, by names of parameters. Collective: call on all ranks."""

    def __init__(self, strategy: Strategy, names: Mapping[int, str], channel: Channel) -> None:
        self.strategy, self._names = strategy, names
        self.codec: Codec = build_codec(strategy, channel.rank, channel.world_size)
        self.exchanges, self.step = Exchanges(channel), 0

    def average(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer, grads = bucket.buffer(), bucket.gradients()
        names = [self._names[id(param)] for param in bucket.parameters()]
        exchange = self.codec.average(names, grads, self.step)
        self.step += bucket.is_last()
        future: torch.futures.Future[torch.Tensor] = self.exchanges.start(exchange).then(lambda done: _result(done, buffer))
        return future


def _result(done: torch.futures.Future[None], buffer: torch.Tensor) -> torch.Tensor:
    done.value()
    return buffer


def strategy_hook(state: StrategyState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A communication hook, for this wrapper and for torch's."""
    return state.average(bucket)


strategy_hook.__annotations__.clear()  # torch compares them with classes, and here they are text


def comm_hook(strategy: str | Strategy, model: nn.Module, group: dist.ProcessGroup | None = None) -> tuple[Any, Any]:
    """`(state, hook)` for `register_comm_hook` of torch's DistributedDataParallel. Collective: call on all ranks."""
    parsed = Strategy.parse(strategy)
    if parsed.outer or parsed.is_sharded or parsed.between_hosts:
        text = "does more than a communication hook can do: use paceline.DDP"
        raise ConfigError(f"strategy {parsed.text!r} {text}", code="strategy")
    params = [param for param in model.parameters() if param.requires_grad]
    channel = Channel(group or dist.group.WORLD, params[0].device if params else torch.device("cpu"))
    return StrategyState(parsed, name_parameters(model), channel), strategy_hook


def name_parameters(model: nn.Module) -> dict[int, str]:
    """Each trained parameter's first name, without the prefix of a wrapper, by its id."""
    named: Iterable[tuple[str, nn.Parameter]] = model.named_parameters()
    return {id(param): name.removeprefix("module.") for name, param in named if param.requires_grad}
