"""All-reduce over sizes as the wrapper uses it, once per round of something larger. Benchmarks are in `collectives`."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from paceline.parallel.channel import Channel
from paceline.records import ChunksRecord, CollectiveRecord, Record, Samples
from paceline.runtime.world import World

__all__ = ["Sweep"]

_SMALLEST_BYTES, _DENSE_BYTES = 4 << 10, 64 << 10
_PAIR_BYTES = (64 << 10, 1 << 20, 4 << 20)


class Sweep:
    """The wrapper's own messages, from small to all gradients at once; pairs; and what else a step sends.

    `extra` is a collective and its bytes, 0 for none. Collective: every rank must make the same calls.
    """

    def __init__(self, channel: Channel, world: World, num_bytes: int, extra: tuple[str, int]) -> None:
        self._channel, self._world, self._extra = channel, world, extra
        self._memory = channel.allocate(max(1, num_bytes // 4), torch.float32, world.device)
        is_alone = world.world_size == 1
        self._singles: dict[int, list[float]] = {} if is_alone else {size: [] for size in _choose_sizes(num_bytes)}
        pairs = [size for size in _PAIR_BYTES if 2 * size <= num_bytes]
        self._pairs: dict[int, list[float]] = {} if is_alone else {size: [] for size in pairs}
        self._extras: list[float] = []

    def run_once(self) -> None:
        for size, times in self._singles.items():
            times.append(self._time([self._memory[: size // 4]]))
        for size, times in self._pairs.items():
            count = size // 4
            times.append(self._time([self._memory[:count], self._memory[count : 2 * count]]))
        collective, num_bytes = self._extra
        if num_bytes and self._singles:
            part = torch.zeros(max(1, num_bytes // 4), device=self._world.device)
            self._meet()
            begin_s = time.perf_counter()
            if collective == "broadcast":
                dist.broadcast(part, 0, self._channel.group)
            else:
                self._channel.wait(self._channel.start_sum(part), "a message that is timed")
            self._extras.append(time.perf_counter() - begin_s)

    def _meet(self) -> None:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        dist.barrier(group=self._world.control)

    def _time(self, parts: list[torch.Tensor]) -> float:
        self._meet()
        begin_s = time.perf_counter()
        works = [self._channel.start_sum(part) for part in parts]
        for work in works:
            self._channel.wait(work, "a message that is timed")
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter() - begin_s

    def build_records(self, num_warmup: int) -> Iterator[Record]:
        world = self._world
        where = {"backend": world.backend, "device": world.device.type, "world_size": world.world_size}

        def samples(mine: list[float]) -> Samples:
            rows = tuple(zip(*world.share(mine), strict=True))
            return Samples(seconds=rows[num_warmup:], warmup_seconds=rows[:num_warmup])

        for size, times in self._singles.items():
            yield CollectiveRecord(
                collective="all_reduce", num_bytes=size, dtype="float32", op="sum", timing=samples(times), **where
            )
        for size, times in self._pairs.items():
            yield ChunksRecord(
                total_bytes=2 * size, chunk_bytes=size, dtype="float32", timing=samples(times), **where
            )
        collective, num_bytes = self._extra
        if self._extras:
            yield CollectiveRecord(
                collective=collective, num_bytes=num_bytes, dtype="float32", op="sum", timing=samples(self._extras),
                note="buffers", **where,
            )  # fmt: skip


def _choose_sizes(num_bytes: int) -> list[int]:
    sizes, size = [], _SMALLEST_BYTES
    while size < num_bytes * 0.75:
        sizes.append(size)
        size *= 4 if size < _DENSE_BYTES else 2
    return [*sizes, num_bytes // 4 * 4]
