"""Loads micro-batches onto the device: gathered, pinned and prefetched on CUDA, used in place on the CPU.

`workloads.data.sharding` assigns the samples of a data set to ranks; this module divides streams.
"""

import collections
import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import refuse
from paceline.workloads.data import Batch, OwnBatch
from paceline.workloads.data.own import OwnData
from paceline.workloads.data.sets import DataSet
from paceline.workloads.data.sharding import EpochOrder, MicroBatch, split_window

_AHEAD = 3  # windows to prefetch

# Maps this rank's number of samples in the next window to the total over all ranks, or to 0 if any rank has none left.
Agree = Callable[[int], int]


@dataclass(frozen=True)
class LoadedBatch:
    """A micro-batch on the device. `num_counted` is 0 for a filler, which equalizes micro-batch counts across ranks."""

    batch: Batch
    num_counted: int


@dataclass(frozen=True)
class Window:
    """This rank's part of one global batch; `num_samples` is the total over all ranks."""

    number: int
    num_samples: int
    batches: tuple[LoadedBatch, ...]
    is_last: bool = False


def load_windows(
    data: DataSet | OwnData, order: EpochOrder, start: int, rank: int, world_size: int,
    batch_size: int | tuple[int, ...], device: torch.device, agree: Agree | None = None,
) -> Generator[Window, None, None]:  # fmt: skip
    """Yield this rank's part of every window of the epoch, starting with window `start`.

    `batch_size` is the maximum size of a micro-batch: one value for all windows, or one per window. `agree` lets ranks
    with separate streams end their epochs together; it is called per window on every rank.
    """

    def split(number: int) -> tuple[int, Sequence[MicroBatch]]:
        indices = order.window(number)
        most = batch_size[number] if isinstance(batch_size, tuple) else batch_size
        return len(indices), split_window(indices, rank, world_size, most)

    def prepare(micro: MicroBatch, batch: Batch) -> LoadedBatch:
        return LoadedBatch(data.prepare(batch, micro.indices, order.epoch), micro.num_counted)

    if data.is_stream:
        assert isinstance(data, OwnData) and isinstance(batch_size, int)
        yield from _load_stream(data, order, start, rank, world_size, batch_size, device, agree)
        return
    last, numbers = order.num_windows - 1, range(start, order.num_windows)
    if isinstance(data, OwnData):
        parts = (micro.indices.tolist() for number in numbers for micro in split(number)[1])
        with contextlib.closing(data.load(parts, order.epoch)) as contents:
            for number in numbers:
                num_samples, micros = split(number)
                loaded = (LoadedBatch(OwnBatch(next(contents)).to(device), micro.num_counted) for micro in micros)
                yield Window(number, num_samples, tuple(loaded), number == last)
        return
    if device.type != "cuda" or data.inputs.device.type != "cpu":
        for number in numbers:
            num_samples, micros = split(number)
            prepared = tuple(prepare(micro, data.take(micro.indices)) for micro in micros)
            yield Window(number, num_samples, prepared, number == last)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(number: int) -> tuple[int, Sequence[MicroBatch], list[Batch], torch.cuda.Event]:
        """Gather a window into pinned memory and copy it on a separate stream."""
        num_samples, micros = split(number)
        with torch.cuda.stream(stream):
            # Make slices of rows (tokens, padded pairs) contiguous: otherwise they pass through pageable memory.
            pinned = [data.take(micro.indices).map(lambda part: part.contiguous().pin_memory()) for micro in micros]
            batches = [batch.to(device, non_blocking=True) for batch in pinned]
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(stream)
        return num_samples, micros, batches, arrived

    thread = ThreadPoolExecutor(1, "paceline-loader")
    try:
        ahead = collections.deque(thread.submit(copy, number) for number in numbers[:_AHEAD])
        for number in numbers:
            num_samples, micros, batches, arrived = ahead.popleft().result()
            if number + _AHEAD in numbers:
                ahead.append(thread.submit(copy, number + _AHEAD))
            current = torch.cuda.current_stream(device)
            current.wait_event(arrived)
            for batch in batches:
                for tensor in (batch.inputs, batch.targets, batch.mask):
                    if tensor is not None:
                        tensor.record_stream(current)  # allocated on the other stream
            yield Window(number, num_samples, tuple(map(prepare, micros, batches)), number == last)
    finally:
        thread.shutdown(cancel_futures=True)


def _load_stream(
    data: OwnData, order: EpochOrder, start: int, rank: int, world_size: int, batch_size: int, device: torch.device,
    agree: Agree | None,
) -> Generator[Window, None, None]:  # fmt: skip
    """Yield the windows of a stream, skipping those before `start`. An epoch ends with the last step for which every
    rank has all its batches."""
    size = order.global_batch_size
    assert isinstance(size, int)
    offset, stride = (0, 1) if data.is_sharded else (rank, world_size)
    count = size // (batch_size * world_size) * stride
    number = -1

    def read() -> Generator[tuple[int, list[Any]], None, None]:
        """Yield each window's number of samples over all ranks, and the batches that this rank read."""
        with contextlib.closing(data.read(order.epoch, count)) as found:
            while True:
                group = next(found, [])
                total = sum(len(OwnBatch(content)) for content in group) if len(group) == count else 0
                if data.is_sharded:  # without `agree`, assume equal shards
                    total = total * world_size if agree is None else agree(total)
                if not total:
                    return
                yield total, group

    with contextlib.closing(read()) as groups:
        ahead = next(groups, None)  # look one window ahead to recognize the last one
        while ahead is not None:
            num_samples, group = ahead
            ahead = next(groups, None)
            number += 1
            if number >= start:
                mine = (OwnBatch(content).to(device) for content in group[offset::stride])
                yield Window(number, num_samples, tuple(LoadedBatch(b, len(b)) for b in mine), ahead is None)
    what = f"data {data.name}, epoch {order.epoch + 1}: the stream ended before global batch {start + 1} of {size}"
    refuse((number < start, f"{what} samples on {world_size} ranks; use a smaller batch or fewer ranks"), code="empty")
