"""Micro-batches on the device: gathered, pinned and copied ahead of time on CUDA, in place on the CPU.

Which samples belong to which rank is decided in `workloads.data.sharding`.
"""

import collections
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from paceline.workloads.data import Batch
from paceline.workloads.data.sets import DataSet
from paceline.workloads.data.sharding import EpochOrder, MicroBatch, split_window

_AHEAD = 3  # windows that are copied ahead of time


@dataclass(frozen=True)
class LoadedBatch:
    """A micro-batch on the device. `num_counted` is 0 for a filler, so that all ranks have equally many."""

    batch: Batch
    num_counted: int


@dataclass(frozen=True)
class Window:
    """One global batch as this rank sees it; `num_samples` counts those of all ranks."""

    number: int
    num_samples: int
    batches: tuple[LoadedBatch, ...]


def load_windows(
    data: DataSet, order: EpochOrder, start: int, rank: int, world_size: int, batch_size: int | tuple[int, ...],
    device: torch.device,
) -> Generator[Window, None, None]:  # fmt: skip
    """This rank's share of every window of the epoch, from window `start` on.

    `batch_size` is the most samples of a micro-batch, in all windows or in each.
    """

    def split(number: int) -> tuple[int, Sequence[MicroBatch]]:
        indices = order.window(number)
        most = batch_size[number] if isinstance(batch_size, tuple) else batch_size
        return len(indices), split_window(indices, rank, world_size, most)

    def prepare(micro: MicroBatch, batch: Batch) -> LoadedBatch:
        return LoadedBatch(data.prepare(batch, micro.indices, order.epoch), micro.num_counted)

    numbers = range(start, order.num_windows)
    if device.type != "cuda" or data.inputs.device.type != "cpu":
        for number in numbers:
            num_samples, micros = split(number)
            yield Window(number, num_samples, tuple(prepare(micro, data.take(micro.indices)) for micro in micros))
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy(number: int) -> tuple[int, Sequence[MicroBatch], list[Batch], torch.cuda.Event]:
        """Gather into pinned memory and copy on a stream of its own."""
        num_samples, micros = split(number)
        with torch.cuda.stream(stream):
            # Contiguous: a part of each row (of tokens, of padded pairs) would first be copied into pageable memory.
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
                        tensor.record_stream(current)  # its memory was allocated on the other stream
            yield Window(number, num_samples, tuple(map(prepare, micros, batches)))
    finally:
        thread.shutdown(cancel_futures=True)
