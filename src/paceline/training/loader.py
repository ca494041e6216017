"""Micro-batches on the device: gathered, pinned and copied ahead of time on CUDA, in place on the CPU.

Which samples belong to which rank is decided in `workloads.data.sharding`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.workloads.data import Batch
from paceline.workloads.data.sets import DataSet
from paceline.workloads.data.sharding import EpochOrder, MicroBatch, split_window

# How many windows are prepared ahead on a GPU.
_AHEAD = 2
# The number of a window, its samples on all ranks, and this rank's micro-batches.
_Share = tuple[int, int, Sequence[MicroBatch]]


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
    data: DataSet,
    order: EpochOrder,
    start: int,
    rank: int,
    world_size: int,
    batch_size: int | tuple[int, ...],
    device: torch.device,
) -> Generator[Window, None, None]:
    """This rank's share of every window of the epoch, from window `start` on.

    `batch_size` is the most samples of a micro-batch, in all windows or in each.
    """

    def split() -> Iterator[_Share]:
        for number in range(start, order.num_windows):
            indices = order.window(number)
            most = batch_size[number] if isinstance(batch_size, tuple) else batch_size
            yield number, len(indices), split_window(indices, rank, world_size, most)

    if device.type == "cuda" and data.inputs.device.type == "cpu":
        yield from _load_ahead(data, order.epoch, split(), device)
        return
    for number, num_samples, micros in split():
        batches = tuple(
            LoadedBatch(data.prepare(data.take(micro.indices), micro.indices, order.epoch), micro.num_counted)
            for micro in micros
        )
        yield Window(number, num_samples, batches)


@dataclass(frozen=True)
class _PendingWindow:
    """A window that is being copied to the GPU on another stream."""

    number: int
    num_samples: int
    parts: tuple[tuple[MicroBatch, Batch], ...]
    arrived: torch.cuda.Event


def _load_ahead(
    data: DataSet, epoch: int, shares: Iterator[_Share], device: torch.device
) -> Generator[Window, None, None]:
    """A thread gathers into pinned memory and copies on a stream of its own, a few windows ahead."""
    ready: queue.Queue[_PendingWindow | BaseException | None] = queue.Queue(_AHEAD)
    stopped = threading.Event()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def put(item: _PendingWindow | BaseException | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for number, num_samples, micros in shares:
                parts = []
                with torch.cuda.stream(stream):
                    for micro in micros:
                        batch = _pin(data.take(micro.indices))
                        parts.append((micro, batch.to(device, non_blocking=True)))
                    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    arrived.record(stream)
                if not put(_PendingWindow(number, num_samples, tuple(parts), arrived)):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="paceline-loader", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            current = torch.cuda.current_stream(device)
            current.wait_event(item.arrived)
            batches = []
            for micro, batch in item.parts:
                for tensor in (batch.inputs, batch.targets, batch.mask):
                    if tensor is not None:
                        tensor.record_stream(current)  # its memory was allocated on the other stream
                batches.append(LoadedBatch(data.prepare(batch, micro.indices, epoch), micro.num_counted))
            yield Window(item.number, item.num_samples, tuple(batches))
    finally:
        stopped.set()
        thread.join()


def _pin(batch: Batch) -> Batch:
    # Contiguous: a part of each row (of tokens, of padded pairs) would first be copied into pageable memory.
    mask = None if batch.mask is None else batch.mask.contiguous().pin_memory()
    return Batch(batch.inputs.contiguous().pin_memory(), batch.targets.contiguous().pin_memory(), mask)
