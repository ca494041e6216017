"""Hierarchical averaging: gradients are averaged inside each host, then a codec runs between the hosts.

Every gradient is split into equal parts, one per rank of a host. Each rank gets the host's average of its part,
averages it through a codec with the ranks that have the same local rank on other hosts, and gathers the other parts
from its host. All ranks therefore take part in the encoding, and a residual belongs to part of a parameter, not of a
bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline import machine
from paceline.errors import ConfigError
from paceline.parallel.channel import Channel, open_part
from paceline.parallel.codecs import GATHER, Codec, Exchange, reduce_scatter
from paceline.strategy import Strategy
from paceline.torch_internals import get_default_store
from paceline.transport import register, why_not

# Messages per bucket, each in its own group: one inside the host, up to two for the codec, one more inside the host.
NUM_STAGES = 4


class Inside(str):
    """The name of a collective between the ranks of one host."""


@dataclass(frozen=True)
class Levels:
    """The ranks of each host in group order and this rank. All hosts have the same number of ranks."""

    strategy: Strategy
    hosts: tuple[tuple[int, ...], ...]
    rank: int
    scatters: bool  # the backend inside a host has a reduce-scatter that rounds once

    @property
    def places(self) -> list[tuple[int, int]]:
        """The host index and local rank of each rank."""
        found = {rank: (host, at) for host, ranks in enumerate(self.hosts) for at, rank in enumerate(ranks)}
        return [found[rank] for rank in range(len(found))]

    @property
    def per_host(self) -> int:
        return len(self.hosts[0])

    @property
    def are_two(self) -> bool:
        return len(self.hosts) > 1 and self.per_host > 1

    def open_groups(self, channel: Channel, owner: object) -> list[tuple[dist.ProcessGroup, int]]:
        """A group and its size for each stage. Collective."""
        register()
        inside = "shm" if self._shares_memory(channel) else channel.backend
        between = "gloo" if channel.device.type == "cpu" else channel.backend
        ranks = dist.get_process_group_ranks(channel.group)
        here = [[ranks[rank] for rank in host] for host in self.hosts]
        across = list(zip(*here, strict=True))
        asked: list[tuple[Any, str]] = [(here, inside), (across, between), (across, between), (here, inside)]
        return [(open_part(parts, backend, channel.device, owner), len(parts[0])) for parts, backend in asked]

    @staticmethod
    def _shares_memory(channel: Channel) -> bool:
        return channel.device.type == "cpu" and not why_not()

    @classmethod
    def find(cls, strategy: Strategy, channel: Channel) -> Levels | None:
        """Determine, through the store, which ranks share a host. Without messages, a rank can do this on its own."""
        if not strategy.between_hosts:
            return None
        store = dist.PrefixStore("paceline-hosts", get_default_store())
        store.set(str(dist.get_rank()), machine.name_host())
        names = store.multi_get([str(rank) for rank in dist.get_process_group_ranks(channel.group)])
        hosts = tuple(tuple(r for r, name in enumerate(names) if name == one) for one in dict.fromkeys(names))
        levels = cls(strategy, hosts, channel.rank, channel.is_nccl or cls._shares_memory(channel))
        text = f"strategy {strategy.text!r}: "
        if len(counts := dict.fromkeys(map(len, hosts))) > 1:
            found = f"hosts have {' and '.join(map(str, counts))} ranks"
            text += f"{found}, but +hosts needs the same number on each: start equal numbers, or leave out +hosts"
            raise ConfigError(text, code="strategy")
        if len(hosts) == 1 and strategy.dgc:
            text += "dgc needs a codec, which does not run on a single host: leave out dgc or +hosts"
            raise ConfigError(text, code="strategy")
        if levels.are_two and channel.world_size < dist.get_world_size():
            text += f"a group with {channel.world_size} of {dist.get_world_size()} ranks cannot be split by host"
            raise ConfigError(f"{text}: use all ranks, or leave out +hosts", code="strategy")
        return levels

    def average(self, codec: Codec, names: Sequence[str], grads: Sequence[torch.Tensor], step: int) -> Exchange:
        """Average `grads`, the gradients of one bucket, over all ranks, in place."""
        num = self.per_host
        shapes = [self.strategy.cut(grad.shape, num)[0] for grad in grads]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        if not sum(sizes):
            return
        is_full = all(num * size == grad.numel() for grad, size in zip(grads, sizes, strict=True))
        rows = (grads[0].new_empty if is_full else grads[0].new_zeros)(num, sum(sizes))
        for grad, piece in zip(grads, rows.split(sizes, 1), strict=True):
            for part, into in _match(self._flatten(grad), piece):
                torch.mul(part, 1 / num, out=into)
        mine = yield from reduce_scatter(rows, self.scatters, Inside)
        parts = [part.view(shape) for part, shape in zip(mine.split(sizes), shapes, strict=True)]
        yield from codec.average(names, parts, step)
        gathered = yield Inside(GATHER), mine
        codec.check(gathered)  # another part may not be finite, and either all ranks keep their residuals or none does
        for grad, piece in zip(grads, gathered.split(sizes, 1), strict=True):
            flat = self._flatten(grad)
            for part, value in _match(flat, piece):
                part.copy_(value)
            if flat.data_ptr() != grad.data_ptr():
                grad.copy_(self._restore(flat, grad.shape))

    def _is_transposed(self, shape: Sequence[int]) -> bool:
        return self.strategy.cut(shape, self.per_host)[1]

    def _flatten(self, value: torch.Tensor) -> torch.Tensor:
        """The elements in the order in which they are split; a view if possible."""
        return (value.flatten(1).t() if self._is_transposed(value.shape) else value).reshape(-1)

    def _restore(self, flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        return (flat.view(-1, shape[0]).t() if self._is_transposed(shape) else flat).reshape(shape)

    def cut(self, whole: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
        """This rank's part of each value. Keys end with the name of a parameter."""
        num, at = self.per_host, self.places[self.rank][1]
        found = {}
        for name, value in whole.items():
            shape = shapes[name.rpartition(" ")[2]]
            rows = value.new_zeros(num, torch.Size(self.strategy.cut(shape, num)[0]).numel())
            for part, into in _match(self._flatten(value.view(shape)), rows):
                into.copy_(part)
            found[name] = rows[at].clone()
        return found

    def join(
        self, parts: Sequence[Mapping[str, torch.Tensor]], shapes: Mapping[str, torch.Size]
    ) -> dict[str, torch.Tensor]:
        """The mean over hosts of each parameter's values, joined from the `parts` of their ranks. Missing entries count
        as zeros."""
        mean = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            shape = shapes.get(name.rpartition(" ")[2])
            like = next(part[name] for part in parts if name in part)
            if shape is None or torch.Size(self.strategy.cut(shape, self.per_host)[0]).numel() != like.numel():
                text = f"the state of strategy {self.strategy.text!r} has {like.numel()} elements for {name}"
                raise ConfigError(f"{text}, which does not match this model", code="strategy")
            total = torch.zeros(shape, dtype=torch.float64)
            for host in self.hosts:
                rows = torch.stack([parts[rank].get(name, torch.zeros_like(like)).cpu() for rank in host])
                total += self._restore(rows.view(-1)[: shape.numel()], shape)
            mean[name] = (total / len(self.hosts)).to(like.dtype)
        return mean


def _match(flat: torch.Tensor, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pair the parts of a vector with their places in `rows`."""
    each = rows.size(1)
    full, rest = divmod(flat.numel(), each) if each else (0, 0)
    if full:
        yield flat[: full * each].view(full, each), rows[:full]
    if rest:
        yield flat[full * each :], rows[full, :rest]
