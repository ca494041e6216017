"""Micro-batches on the device: gathered, pinned and copied ahead of time on CUDA, in place on the CPU.

Which samples belong to which rank is decided in `workloads.data.sharding`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.workloads.data import Batch
from paceline.workloads.data.sets import DataSet
from paceline.workloads.data.sharding import EpochOrder, MicroBatch, split_window

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
    data: DataSet, order: EpochOrder, start: int, rank: int, world_size: int, batch_size: int | tuple[int, ...],
    device: torch.device,
) -> Generator[Window, None, None]:  # fmt: skip
    """This rank's share of every window of the epoch, from window `start` on.

    `batch_size` is the most samples of a micro-batch, in all windows or in each.
    """

    def split() -> Iterator[_Share]:
        for number in range(start, order.num_windows):
            indices = order.window(number)
            most = batch_size[number] if isinstance(batch_size, tuple) else batch_size
            yield number, len(indices), split_window(indices, rank, world_size, most)

    def prepare(micro: MicroBatch, batch: Batch) -> LoadedBatch:
        return LoadedBatch(data.prepare(batch, micro.indices, order.epoch), micro.num_counted)

    if device.type != "cuda" or data.inputs.device.type != "cpu":
        for number, num_samples, micros in split():
            yield Window(number, num_samples, tuple(prepare(micro, data.take(micro.indices)) for micro in micros))
        return
    stopped = threading.Event()
    ready: queue.Queue[Any] = queue.Queue(2)  # windows that are prepared ahead
    thread = threading.Thread(
        target=_copy_ahead, args=(data, split(), device, ready, stopped), name="paceline-loader", daemon=True
    )
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            (number, num_samples, micros), batches, arrived = item
            current = torch.cuda.current_stream(device)
            current.wait_event(arrived)
            for batch in batches:
                for tensor in (batch.inputs, batch.targets, batch.mask):
                    if tensor is not None:
                        tensor.record_stream(current)  # its memory was allocated on the other stream
            yield Window(number, num_samples, tuple(map(prepare, micros, batches)))
    finally:
        stopped.set()
        thread.join()


def _copy_ahead(
    data: DataSet, shares: Iterator[_Share], device: torch.device, ready: queue.Queue[Any], stopped: threading.Event
) -> None:
    """Gather into pinned memory and copy on a stream of its own. Puts (share, batches, event), and last an error or
    None."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def put(item: Any) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    try:
        for share in shares:
            with torch.cuda.stream(stream):
                pinned = (data.take(micro.indices).map(_pin) for micro in share[2])
                batches = [batch.to(device, non_blocking=True) for batch in pinned]
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(stream)
            put((share, batches, arrived))
            if stopped.is_set():
                return
        put(None)
    except BaseException as error:
        put(error)


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    # Contiguous: a part of each row (of tokens, of padded pairs) would first be copied into pageable memory.
    return tensor.contiguous().pin_memory()
