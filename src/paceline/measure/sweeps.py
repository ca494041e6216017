"""All-reduce over sizes as the wrapper uses it, once per round of something larger. Benchmarks are in `collectives`."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from paceline.measure.engine import build_samples, synchronize
from paceline.parallel.channel import Channel
from paceline.records import ChunksRecord, CollectiveRecord, Record, Samples
from paceline.runtime.world import World

__all__ = ["SMALLEST_BYTES", "Sweep"]

# With less than twice this there is no curve.
SMALLEST_BYTES = 4 << 10
_DENSE_BYTES = 64 << 10
_PAIR_BYTES = (64 << 10, 1 << 20, 4 << 20)


class Sweep:
    """The wrapper's own messages, from small to all gradients at once; pairs; and what else a step sends.

    `memory` is where the wrapper's buckets would lie, and `extra` a collective and its bytes, 0 for none. Collective:
    every rank must make the same calls.
    """

    def __init__(
        self,
        channel: Channel,
        world: World,
        control: dist.ProcessGroup,
        memory: torch.Tensor,
        extra: tuple[str, int],
    ) -> None:
        self._channel, self._world, self._control, self._extra = channel, world, control, extra
        self._memory, num_bytes = memory, memory.nbytes
        is_alone = world.world_size == 1
        self._singles: dict[int, list[float]] = {} if is_alone else {size: [] for size in _choose_sizes(num_bytes)}
        pairs = [size for size in _PAIR_BYTES if 2 * size <= num_bytes]
        self._pairs: dict[int, list[float]] = {} if is_alone else {size: [] for size in pairs}
        self._extras: list[float] = []
        self._tasks = list(self._build_tasks())

    def run_part(self, place: int, num_places: int, repetition: int) -> None:
        """The part of a round that belongs to one of its places; which, changes from round to round."""
        tasks = self._tasks
        for index in range(len(tasks)):
            if (index + repetition) % num_places == place:
                tasks[index]()

    def _build_tasks(self) -> Iterator[Callable[[], None]]:
        for size, times in self._singles.items():
            yield functools.partial(self._time, (size,), times)
        for size, times in self._pairs.items():
            yield functools.partial(self._time, (size, size), times)
        if self._extra[1] and self._singles:
            yield self._time_extra

    def _time_extra(self) -> None:
        collective, num_bytes = self._extra
        part = torch.zeros(max(1, num_bytes // 4), device=self._world.device)
        self._meet()
        begin_s = time.perf_counter()
        if collective == "broadcast":
            dist.broadcast(part, 0, self._channel.group)
        else:
            self._channel.wait(self._channel.start_sum(part), "a message that is timed")
        synchronize(self._world.device)
        self._extras.append(time.perf_counter() - begin_s)

    def _meet(self) -> None:
        synchronize(self._world.device)
        dist.barrier(group=self._control)

    def _time(self, sizes: tuple[int, ...], times: list[float]) -> None:
        parts = torch.split(self._memory[: sum(sizes) // 4], [size // 4 for size in sizes])
        for part in parts:
            part.fill_(1.0)  # a bucket was written just before it leaves
        self._meet()
        begin_s = time.perf_counter()
        works = [self._channel.start_sum(part) for part in parts]
        for work in works:
            self._channel.wait(work, "a message that is timed")
        synchronize(self._world.device)
        times.append(time.perf_counter() - begin_s)

    def build_records(self, num_warmup: int) -> Iterator[Record]:
        world = self._world
        where: dict[str, Any] = {
            "backend": world.backend,
            "device": world.device.type,
            "world_size": world.world_size,
        }

        def samples(mine: list[float]) -> Samples:
            return build_samples(world.share(mine), num_warmup)

        for size, times in self._singles.items():
            yield CollectiveRecord(
                collective="all_reduce", num_bytes=size, dtype="float32", op="sum", timing=samples(times), **where
            )
        for size, times in self._pairs.items():
            yield ChunksRecord(total_bytes=2 * size, chunk_bytes=size, dtype="float32", timing=samples(times), **where)
        collective, num_bytes = self._extra
        if self._extras:
            yield CollectiveRecord(
                collective=collective, num_bytes=num_bytes, dtype="float32", op="sum", timing=samples(self._extras),
                note="buffers", **where,
            )  # fmt: skip


def _choose_sizes(num_bytes: int) -> list[int]:
    sizes, size = [], SMALLEST_BYTES
    while size < num_bytes * 0.75:
        sizes.append(size)
        size *= 4 if size < _DENSE_BYTES else 2
    return [*sizes, num_bytes // 4 * 4]
