"""Micro-batches on the device: gathered, pinned and copied ahead of time on CUDA, in place on the CPU.

Which samples of a set belong to which rank is decided in `workloads.data.sharding`, and of a stream here.
"""

import collections
import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from paceline.errors import ConfigError
from paceline.workloads.data import AnyBatch, Batch, OwnBatch
from paceline.workloads.data.own import OwnData, digest
from paceline.workloads.data.sets import DataSet
from paceline.workloads.data.sharding import EpochOrder, MicroBatch, split_window

_AHEAD = 3  # windows that are copied ahead of time

# From the samples of this rank in its next window (0: there is none) to those of all; 0 where some rank has none.
Agree = Callable[[int], int]


@dataclass(frozen=True)
class LoadedBatch:
    """A micro-batch on the device. `num_counted` is 0 for a filler, so that all ranks have equally many."""

    batch: AnyBatch
    num_counted: int


@dataclass(frozen=True)
class Window:
    """One global batch as this rank sees it; `num_samples` counts those of all ranks."""

    number: int
    num_samples: int
    batches: tuple[LoadedBatch, ...]
    is_last: bool = False


def load_windows(
    data: DataSet | OwnData, order: EpochOrder, start: int, rank: int, world_size: int,
    batch_size: int | tuple[int, ...], device: torch.device, agree: Agree | None = None,
) -> Generator[Window, None, None]:  # fmt: skip
    """This rank's share of every window of the epoch, from window `start` on.

    `batch_size` is the most samples of a micro-batch, in all windows or in each. With `agree`, ranks that have streams
    of their own end their epochs together; it is called for each window, on every rank.
    """

    def split(number: int) -> tuple[int, Sequence[MicroBatch]]:
        indices = order.window(number)
        most = batch_size[number] if isinstance(batch_size, tuple) else batch_size
        return len(indices), split_window(indices, rank, world_size, most)

    def prepare(micro: MicroBatch, batch: Batch) -> LoadedBatch:
        return LoadedBatch(data.prepare(batch, micro.indices, order.epoch), micro.num_counted)  # type: ignore[arg-type]

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
            yield Window(number, num_samples, tuple(map(prepare, micros, batches)), number == last)
    finally:
        thread.shutdown(cancel_futures=True)


# Of one window of a stream: the samples of all ranks, as far as this one knows, this rank's batches with how many of
# each count, and a checksum.
_Group = tuple[int, list[tuple[OwnBatch, int]], int]


def _load_stream(
    data: OwnData, order: EpochOrder, start: int, rank: int, world_size: int, batch_size: int, device: torch.device,
    agree: Agree | None,
) -> Generator[Window, None, None]:  # fmt: skip
    """The windows of a stream. It has to be read up to the window `start`, and must give what it gave before."""
    data.digest, place = 0, f"data {data.name}, epoch {order.epoch + 1}"
    groups = _group_stream(data, order, rank, world_size, batch_size)
    if data.is_sharded and agree is not None:
        groups = _agree_on_groups(groups, agree)
    number = -1
    with contextlib.closing(groups):
        # Read one window ahead, to know the last one.
        ahead = next(groups, None)
        while ahead is not None:
            (num_samples, mine, found), ahead, number = ahead, next(groups, None), number + 1
            if data.is_sharded and agree is None:  # nobody asks: as if all had as many
                num_samples *= world_size
            if number == start:
                _check_replay(data, place)
            data.digest = digest(found, data.digest)
            if number >= start:
                batches = tuple(LoadedBatch(batch.to(device), counted) for batch, counted in mine)
                yield Window(number, num_samples, batches, ahead is None)
    if number < start:
        data.digest = -1  # what came after this place is not there any more
        _check_replay(data, place)
    if number < 0:
        what = f"one whole global batch of {order.global_batch_size} on {world_size} ranks"
        raise ConfigError(
            f"{place}: the stream is shorter than {what}; use a smaller batch or fewer ranks", code="empty"
        )


def _check_replay(data: OwnData, place: str) -> None:
    """Refuse a stream that a resumed run has read up to its place, and that was another one there."""
    expected, data.expected = data.expected, None
    if expected not in (None, data.digest):
        raise ConfigError(
            f"{place}: the stream does not repeat what the interrupted run read, so it cannot be resumed inside this "
            "epoch: make the stream follow from the seed and the epoch, or save at ends of epochs (--save-every epoch)",
            code="mismatch",
        )


def _group_stream(
    data: OwnData, order: EpochOrder, rank: int, world_size: int, batch_size: int
) -> Generator[_Group, None, None]:
    assert isinstance(order.global_batch_size, int)
    num_parts = order.global_batch_size // (batch_size * world_size)
    if data.is_sharded:
        rank, world_size = 0, 1
    if data.kind == "batches":
        # An epoch ends with the last step for which every rank has all its batches.
        for group in data.read(order.epoch, num_parts * world_size):
            if len(group) == num_parts * world_size:
                sizes = [len(OwnBatch(content)) for content in group]
                mine = [(OwnBatch(group[place]), sizes[place]) for place in range(rank, len(group), world_size)]
                yield sum(sizes), mine, digest(group)
        return
    size = num_parts * world_size * batch_size
    for samples in data.read(order.epoch, size):
        if len(samples) == size or (order.tail == "keep" and not data.is_sharded):
            micros = split_window(torch.arange(len(samples)), rank, world_size, batch_size)
            mine = [(OwnBatch(data.collate([samples[i] for i in m.indices.tolist()])), m.num_counted) for m in micros]
            yield len(samples), mine, digest(samples)


def _agree_on_groups(groups: Iterator[_Group], agree: Agree) -> Generator[_Group, None, None]:
    """Until some rank has none left, with the samples of all ranks."""
    while True:
        group = next(groups, None)
        total = agree(0 if group is None else group[0])
        if not total or group is None:
            return
        _, mine, found = group
        yield total, mine, found
