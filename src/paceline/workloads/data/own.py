"""Data of a user's own: a map-style data set, an iterable one, or a loader.

Which rank takes what is decided in `training.loader`. Random numbers of the data follow from the seed alone: they are
the same on all ranks, and do not depend on what the model draws.
"""

import contextlib
import functools
import itertools
import random
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    default_collate,
)

from paceline.errors import ConfigError, refuse
from paceline.workloads.data import DataForm, OwnBatch, list_leaves
from paceline.workloads.data.sharding import cut_range, derive_seed
from paceline.workloads.external import own_errors

# What is kept of a loader whose batches are made here.
_OPTIONS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
)
_MOST_ELEMENTS = 1024  # of a tensor that are read for a checksum
UNKNOWN = -1
OWN_FORM = DataForm("own", (1,))


@dataclass(eq=False, kw_only=True)
class OwnData:
    """A split of the data that a user's function returned. Its `kind`:

    `map`: samples by index, of a data set, or of a loader that only shuffles one. Batches are made here, so every
    sample is used once in an epoch, on any number of ranks. `samples` and `batches`: streams, of an iterable data set
    and of any other loader. All ranks read the same stream and take their shares of it, unless it `is_sharded`: then
    each rank's stream is its own part.
    """

    name: str
    split: str
    kind: str
    items: Any
    seed: int
    batch_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    shuffles: bool = True
    drops_last: bool = False
    is_sharded: bool = False
    limit: int | None = None
    form: DataForm = OWN_FORM
    reopen: Callable[[int], Any] | None = None  # the split again, with another batch size
    digest: int = 0  # of what a stream has given in this epoch
    expected: int | None = None  # the digest at which a run resumes

    def __len__(self) -> int:
        """Samples of an epoch; 0 where they are not known."""
        if self.kind == "batches":
            return (self.batch_size or 0) * self.num_batches
        count = len(self.items) if hasattr(self.items, "__len__") else 0
        return count if self.limit is None else min(self.limit, count or self.limit)

    @property
    def is_stream(self) -> bool:
        return self.kind != "map"

    @property
    def num_batches(self) -> int:
        """What a loader says of its epochs; 0 where it does not."""
        with contextlib.suppress(TypeError, NotImplementedError):
            return len(self.items)
        return 0

    def count_windows(self, global_batch_size: int, parts: int, world_size: int) -> int:
        """Steps of an epoch of a stream, of `parts` batches of each rank; 0 where they are not known."""
        shared = 1 if self.is_sharded else world_size
        if self.kind == "batches":
            return self.num_batches // (parts * shared)
        own_size = global_batch_size * shared // world_size
        return len(self) // own_size if self.drops_last or self.is_sharded else -(-len(self) // own_size)

    def first(self, num_samples: int) -> Self:
        """The first `num_samples` samples, or all where there are fewer."""
        return replace(self, limit=num_samples if self.limit is None else min(num_samples, self.limit))

    def at(self, batch_size: int) -> "OwnData":
        """The same data with batches of this size."""
        if self.kind != "batches" or batch_size == self.batch_size:
            return self
        if type(self.items) is DataLoader and isinstance(self.items.dataset, IterableDataset) and self.batch_size:
            loader = DataLoader(self.items.dataset, batch_size=batch_size, drop_last=self.drops_last, **self.options)
            return replace(self, items=loader, batch_size=batch_size)
        found = None if self.reopen is None else self.reopen(batch_size)
        if isinstance(found, OwnData) and found.batch_size == batch_size:
            return found
        advice = "let the function take batch_size and use it, or return the data set"
        raise ConfigError(
            f"data {self.name} has batches of {self.batch_size} samples, and {batch_size} are needed: {advice}",
            code="batch-size",
        )

    def take(self, indices: torch.Tensor) -> OwnBatch:
        """The samples of these indices, in this process."""
        refuse((self.is_stream, f"data {self.name} is a stream: samples by index are needed"), code="stream")
        here = {"num_workers": 0, "prefetch_factor": None, "timeout": 0, "multiprocessing_context": None}
        return OwnBatch(next(self.load([indices.tolist()], 0, **here)))

    def prepare(self, batch: OwnBatch, indices: torch.Tensor, epoch: int) -> OwnBatch:
        return batch

    def cut(self, size: int, rank: int, world_size: int) -> Iterator[tuple[torch.Tensor, OwnBatch]]:
        """This rank's share of all samples, in batches of about `size`, to evaluate a model."""
        nothing = torch.empty(0, dtype=torch.int64)
        if not self.is_stream:
            starts = cut_range(range(0, len(self), size), rank, world_size)
            parts = (list(range(start, min(start + size, len(self)))) for start in starts)
            yield from ((nothing, OwnBatch(content)) for content in self.load(parts, 0))
            return
        step, first = (1, 0) if self.is_sharded else (world_size, rank)
        left = self.limit
        for number, group in enumerate(self.read(0, 1 if self.kind == "batches" else size)):
            content = group[0] if self.kind == "batches" else self.collate(group)
            if number % step == first:
                yield nothing, OwnBatch(content)
            left = None if left is None else left - len(OwnBatch(content))
            if left is not None and left <= 0:
                return

    @functools.cached_property
    def checksum(self) -> int:
        """Of the first, the middle and the last sample: another set has another. 0 for a stream."""
        if self.is_stream:
            return 0
        places = (0, len(self) // 2, len(self) - 1)
        return digest(tuple(self.take(torch.tensor([place])).content for place in places))

    def describe(self) -> str:
        """One line for people."""
        count = f"{len(self):,} samples" if len(self) else "samples"
        what = {"map": "by index", "samples": "in a stream", "batches": "in batches of a loader"}[self.kind]
        return f"{self.name}, {self.split}: {count} {what}{', sharded by itself' if self.is_sharded else ''}"

    def load(self, batches: Iterable[Sequence[int]], epoch: int, **changes: Any) -> Generator[Any, None, None]:
        """What these lists of indices become, collated, in order; in the loader's worker processes if it has them."""
        options, apart = self.options | changes, _OwnRandom(0)
        dataset = _Seeded(self.items, self.seed, epoch)
        with own_errors(self.name, "data", always=True), apart:
            loaded = iter(DataLoader(dataset, batch_sampler=batches, **options))  # type: ignore[arg-type]
        for (content,) in self._take(loaded, 1, apart):
            yield content

    def read(self, epoch: int, size: int) -> Generator[list[Any], None, None]:
        """The items of a stream's epoch in order, `size` at a time; the last may be fewer."""
        apart = _OwnRandom(derive_seed("stream", self.seed, epoch))
        with own_errors(self.name, "data", always=True), apart:
            parts = (self.items, *(getattr(self.items, name, None) for name in ("sampler", "batch_sampler", "dataset")))
            for part in parts:
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
            items = iter(self.items)
        yield from self._take(items, size, apart)

    def collate(self, samples: Sequence[Any]) -> Any:
        with own_errors(self.name, "data", always=True):
            return default_collate(list(samples))

    def _take(self, items: Iterator[Any], size: int, apart: "_OwnRandom") -> Iterator[list[Any]]:
        try:
            while True:
                with own_errors(self.name, "data", always=True), apart:
                    found = list(itertools.islice(items, size))
                if not found:
                    return
                yield found
        finally:  # now: the traceback of an error would keep worker processes
            getattr(items, "_shutdown_workers", lambda: None)()


class _OwnRandom:
    """Random numbers of the data alone. Inside, torch on the CPU, numpy and random begin at a seed and continue where
    the last context ended; outside, they are as if nothing had been drawn inside."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: Any = None

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
        if self._inside is None:
            _seed_all(self._seed)
        else:
            _set_all(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = torch.get_rng_state(), numpy.random.get_state(), random.getstate()
        _set_all(self._outside)


def _set_all(state: Any) -> None:
    torch.set_rng_state(state[0])
    numpy.random.set_state(state[1])
    random.setstate(state[2])


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


class _Seeded(torch.utils.data.Dataset[Any]):
    """A map-style data set in which what a sample draws follows from the seed, the epoch and its index alone: not from
    the number of ranks and workers, and not from where a run was resumed."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        if hasattr(dataset, "__getitems__"):  # it reads a batch at once; what it draws follows from the first of them
            self.__getitems__ = self._get_items

    def __getitem__(self, index: int) -> Any:
        _seed_all(derive_seed("sample", self._seed, self._epoch, index))
        return self._dataset[index]

    def _get_items(self, indices: list[int]) -> Any:
        _seed_all(derive_seed("sample", self._seed, self._epoch, indices[0]))
        return self._dataset.__getitems__(indices)


class NoBatches:
    """In place of data, for a step that loads its own."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat((None,))


def digest(value: Any, found: int = 0) -> int:
    """A checksum of nested values, of a part of each tensor: equal samples have equal ones. What is neither a tensor,
    an array, a number nor a text does not count."""
    for leaf in list_leaves(value):
        if isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biufc":
            leaf = torch.from_numpy(numpy.ascontiguousarray(leaf))
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            flat = leaf.detach().reshape(-1)
            some = flat[:: max(1, len(flat) // _MOST_ELEMENTS)].cpu().contiguous()
            found = zlib.crc32(some.view(torch.uint8).numpy().data, zlib.crc32(repr(leaf.shape).encode(), found))
        elif isinstance(leaf, str | bytes | int | float | numpy.generic):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


def open_data(found: Any, name: str, split: str, *, seed: int, world_size: int, is_sharded: bool) -> OwnData:
    """What a user's function returned as a split. `is_sharded`: its function takes the rank."""
    shared: dict[str, Any] = {"name": name, "split": split, "seed": seed, "is_sharded": is_sharded}
    kind = type(found).__name__
    if isinstance(found, DataLoader):
        sampler, is_iterable = found.sampler, isinstance(found.dataset, IterableDataset)
        shared["options"] = {option: getattr(found, option) for option in _OPTIONS}
        shared |= {"batch_size": found.batch_size, "drops_last": found.drop_last}
        if isinstance(sampler, DistributedSampler):
            shared["is_sharded"] = True
            what = f"data {name} has a DistributedSampler for {sampler.num_replicas} ranks, and there are {world_size}"
            refuse((sampler.num_replicas != world_size, f"{what}: leave it out, and ranks get their shares"))
        only_draws = (
            type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)
        )
        is_plain = type(found) is DataLoader and found.batch_size is not None and not is_iterable
        if is_plain and (only_draws or type(sampler) is SequentialSampler):
            return OwnData(kind="map", items=found.dataset, shuffles=only_draws, **shared | {"is_sharded": False})
        return OwnData(kind="batches", items=found, **shared)
    if isinstance(found, IterableDataset):
        return OwnData(kind="samples", items=found, **shared)
    needed = "a data set with __getitem__ and __len__, an IterableDataset, or a loader is needed"
    refuse(
        (isinstance(found, Mapping | str | bytes) or found is None, f"data {name} returned a {kind}: {needed}"),
        (hasattr(found, "__next__"), f"data {name} returned a {kind}, which can be read once: {needed}"),
        code="own-type",
    )
    if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
        refuse((len(found) == 0, f"data {name} returned a {kind} without samples"), code="own-type")
        return OwnData(kind="map", items=found, shuffles=split == "train", **shared | {"is_sharded": False})
    refuse((not hasattr(found, "__iter__"), f"data {name} returned a {kind}: {needed}"), code="own-type")
    return OwnData(kind="batches", items=found, **shared)


def peek(data: OwnData) -> OwnBatch:
    """The first sample, or the first batch of a loader."""
    if not data.is_stream:
        return data.take(torch.tensor([0]))
    with contextlib.closing(data.read(0, 1)) as items:
        for (item,) in items:
            return OwnBatch(item if data.kind == "batches" else data.collate([item]))
    raise ConfigError(f"data {data.name} gave nothing: at least one sample is needed", code="empty")


def find_form(batch: OwnBatch, items: Any) -> DataForm:
    """What a model must take and give for such batches; `own` where they are of no known kind."""
    try:
        pair = batch.as_pair()
    except ConfigError:
        return OWN_FORM
    inputs, targets = pair.inputs, pair.targets
    num_targets, count = max(1, targets.numel() // max(1, len(targets))), 0
    if not targets.is_floating_point():
        dataset = getattr(items, "dataset", items)
        classes, labels = getattr(dataset, "classes", None), getattr(dataset, "targets", None)
        known = len(classes) if classes is not None else int(max(labels)) + 1 if labels is not None else UNKNOWN
        count = int(getattr(dataset, "num_classes", known))
    if isinstance(inputs, torch.Tensor):
        shape, vocabulary = tuple(inputs.shape[1:]), int(getattr(items, "vocabulary", count))
        if inputs.is_floating_point() and len(shape) in (1, 3) and num_targets == 1:
            return DataForm("images" if len(shape) == 3 else "numbers", shape, count)
        if not inputs.is_floating_point() and len(shape) == 1 and targets.shape == inputs.shape:
            return DataForm("tokens", shape, vocabulary, vocabulary)
    return DataForm("own", (num_targets,), count)
