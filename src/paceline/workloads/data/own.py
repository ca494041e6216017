"""Data of a user's own: a map-style data set, an iterable one, or a loader.

Which rank takes what is decided in `training.loader`. Random numbers of the data follow from the seed alone: they are
the same on all ranks, and do not depend on what the model draws.
"""

import contextlib
import itertools
import random
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy
import torch
from numpy.random import mtrand
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler, Subset

from paceline.errors import ConfigError, refuse
from paceline.workloads.data import Batch, DataForm, OwnBatch, is_tensor, list_leaves
from paceline.workloads.data.sharding import cut_range, derive_seed
from paceline.workloads.external import own_errors

# What a batch may hold next to tensors and counts in a checksum.
_VALUES = (numpy.ndarray, numpy.generic, str, bytes, int, float)
# What is kept of a loader whose batches are made here.
_OPTIONS = (
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "prefetch_factor",
)  # fmt: skip
UNKNOWN = -1
OWN_FORM = DataForm("own", (1,))


@dataclass(eq=False, kw_only=True)
class OwnData:
    """A split of the data that a user's function returned.

    Either samples by index, of a data set, or of a loader that only shuffles one: batches are made here, so every
    sample is used once in an epoch, on any number of ranks. Or a stream of batches, of an iterable data set or of any
    other loader: all ranks read the same stream and take batches in turns, unless it `is_sharded`: then each rank's
    stream is its own part.
    """

    name: str
    split: str
    items: Any
    seed: int
    is_stream: bool = False
    batch_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    shuffles: bool = True
    drops_last: bool = False
    is_sharded: bool = False
    form: DataForm = OWN_FORM
    head: OwnBatch = field(default_factory=lambda: OwnBatch(()))  # the first sample, or the first batch of a stream
    num_batches: int | None = None  # of a stream's epoch, where all ranks agreed on it
    checksum: int = 0  # of the first sample, in a set also of the middle and the last one: another set has another

    def __len__(self) -> int:
        """Samples of an epoch; 0 where they are not known."""
        return self._num_batches * (self.batch_size or 0) if self.is_stream else len(self.items)

    @property
    def _num_batches(self) -> int:
        if self.num_batches is not None:
            return self.num_batches
        with contextlib.suppress(TypeError, NotImplementedError):
            return len(self.items)
        return 0

    def count_windows(self, parts: int, world_size: int) -> int:
        """Steps of an epoch of a stream, of `parts` batches of each rank; 0 where they are not known."""
        return self._num_batches // (parts * (1 if self.is_sharded else world_size))

    def first(self, num_samples: int) -> Self:
        """The first `num_samples` samples, or all where there are fewer."""
        what = f"the first {num_samples} samples of {self.describe()}: a stream is used as it is; leave the number out"
        refuse((self.is_stream, what), code="stream")
        return replace(self, items=Subset(self.items, range(min(num_samples, len(self)))))

    def at(self, batch_size: int) -> Self:
        """The same data with batches of this size."""
        if not self.is_stream or batch_size == self.batch_size:
            return self
        dataset: Any = getattr(self.items, "dataset", None)
        can_change = type(self.items) is DataLoader and isinstance(dataset, IterableDataset) and self.batch_size
        what = f"data {self.name} has batches of {self.batch_size} samples, and {batch_size} are needed"
        advice = "return the data set itself, or let the function take batch_size and use it"
        refuse((not can_change, f"{what}: {advice}"), code="batch-size")
        loader = DataLoader(dataset, batch_size=batch_size, drop_last=self.drops_last, **self.options)
        return replace(self, items=loader, batch_size=batch_size)

    def take(self, indices: torch.Tensor | int) -> OwnBatch:
        """The samples of these indices, in this process."""
        here = {"num_workers": 0, "prefetch_factor": None, "timeout": 0, "multiprocessing_context": None}
        return OwnBatch(next(self.load([torch.as_tensor(indices).reshape(-1).tolist()], 0, **here)))

    def prepare(self, batch: Batch, indices: torch.Tensor, epoch: int) -> Batch:
        return batch

    def cut(self, size: int, rank: int, world_size: int, device: torch.device) -> Iterator[Batch]:
        """This rank's share of all samples on a device, in batches of about `size`, to evaluate a model."""
        counts: Iterator[int | None] = itertools.repeat(None)
        if self.is_stream:
            turn, others = (0, 1) if self.is_sharded else (rank, world_size)
            found = (content for number, (content,) in enumerate(self.read(0, 1)) if number % others == turn)
        else:
            starts = cut_range(range(0, len(self), size), rank, world_size)
            parts = [range(start, min(start + size, len(self))) for start in starts]
            found, counts = self.load(parts, 0), map(len, parts)
        yield from (OwnBatch(content, count=count).to(device) for content, count in zip(found, counts, strict=False))

    def describe(self) -> str:
        """One line for people."""
        count = f"{len(self):,} samples" if len(self) else "samples"
        how = f"in a stream{' of each rank' if self.is_sharded else ''}" if self.is_stream else "by index"
        return f"{self.name}, {self.split}: {count} {how}"

    def load(self, batches: Iterable[Sequence[int]], epoch: int, **changes: Any) -> Generator[Any, None, None]:
        """What these lists of indices become, collated, in order; in the loader's worker processes if it has them."""
        options, apart = self.options | changes, _OwnRandom(0)
        dataset = _Seeded(self.items, self.seed, epoch)
        with own_errors(self.name, "data", always=True), apart:
            loaded = iter(DataLoader(dataset, batch_sampler=batches, **options))  # type: ignore[arg-type]
        for (content,) in self._take(loaded, 1, apart):
            yield content

    def read(self, epoch: int, size: int) -> Generator[list[Any], None, None]:
        """The batches of a stream's epoch in order, `size` at a time; the last may be fewer."""
        apart = _OwnRandom(derive_seed("stream", self.seed, epoch))
        with own_errors(self.name, "data", always=True), apart:
            for part in (self.items, *(getattr(self.items, n, None) for n in ("sampler", "batch_sampler", "dataset"))):
                getattr(part, "set_epoch", lambda epoch: None)(epoch)
            if isinstance(self.items, DataLoader):
                self.items._iterator = None  # of persistent workers, which ended with the last epoch
            batches = iter(self.items)
        yield from self._take(batches, size, apart)

    def _take(self, items: Iterator[Any], size: int, apart: "_OwnRandom") -> Generator[list[Any], None, None]:
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
        self._other: Any = seed

    def __enter__(self) -> None:
        self._other = _swap_random(self._other)

    def __exit__(self, *_: object) -> None:
        self._other = _swap_random(self._other)


def _swap_random(state: Any) -> Any:
    """Begin at a state, or at a seed; returns the state before."""
    # Of numpy the generator itself: to copy its state takes longer than many a sample.
    before = torch.get_rng_state(), mtrand.get_bit_generator(), random.getstate()
    if isinstance(state, int):
        mtrand.set_bit_generator(numpy.random.MT19937())
        _seed_all(state)
    else:
        torch.set_rng_state(state[0])
        mtrand.set_bit_generator(state[1])
        random.setstate(state[2])
    return before


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


def digest(value: Any) -> int:
    """A checksum of nested values: equal samples have equal ones. What is neither a tensor, an array, a number nor a
    text does not count."""
    found = 0
    for leaf in list_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        if isinstance(leaf, numpy.ndarray):
            found = zlib.crc32(leaf.tobytes(), found)
        elif isinstance(leaf, _VALUES):
            found = zlib.crc32(repr(leaf).encode(), found)
    return found


def open_data(found: Any, name: str, split: str, *, seed: int, batch_size: int, is_sharded: bool) -> OwnData:
    """What a user's function returned as a split. `is_sharded`: its function takes the rank. `batch_size` is that of an
    iterable data set."""
    shared: dict[str, Any] = {"name": name, "split": split, "seed": seed}
    kind, needed = type(found).__name__, "a data set with __getitem__ and __len__, an IterableDataset, or a loader"
    if isinstance(found, IterableDataset):
        found = DataLoader(found, batch_size=batch_size)
    if isinstance(found, DataLoader):
        sampler = found.sampler
        shared["options"] = {option: getattr(found, option) for option in _OPTIONS}
        shared |= {"batch_size": found.batch_size, "drops_last": found.drop_last}
        draws = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)
        draws |= type(sampler) is DistributedSampler and sampler.shuffle
        is_plain = type(found) is DataLoader and found.batch_size is not None
        if is_plain and (draws or type(sampler) in (SequentialSampler, DistributedSampler)):
            return _look(OwnData(items=found.dataset, shuffles=draws, **shared))
    elif hasattr(found, "__getitem__") and hasattr(found, "__len__") and not isinstance(found, Mapping | str | bytes):
        return _look(OwnData(items=found, shuffles=split == "train", **shared))
    is_iterable = hasattr(found, "__iter__") and not isinstance(found, Mapping | str | bytes)
    refuse(
        (not is_iterable, f"data {name} returned a {kind}: {needed} is needed"),
        (hasattr(found, "__next__"), f"data {name} returned a {kind}, which can be read once: {needed} is needed"),
        code="own-type",
    )
    return _look(OwnData(items=found, is_stream=True, is_sharded=is_sharded, **shared))


def _look(data: OwnData) -> OwnData:
    """The data with the first of it, and its checksum."""
    found: Any = data.items
    if data.is_stream:
        with contextlib.closing(data.read(0, 1)) as batches:
            found = next(batches, [])
    refuse(
        (len(found) == 0, f"data {data.name}, {data.split}: it is empty, and at least one sample is needed"),
        code="empty",
    )
    data.head = OwnBatch(found[0]) if data.is_stream else data.take(0)
    _check_batch(data)
    data.batch_size = data.batch_size or (len(data.head) if data.is_stream else None)
    places = () if data.is_stream else (len(data) // 2, len(data) - 1)
    # Batches may have another size when a run is resumed; parts of a stream may begin with equal samples.
    first = list(list_leaves(data.head.content))
    if not data.is_sharded:
        first = [leaf[:1] if is_tensor(leaf) and leaf.dim() else leaf for leaf in first]
    data.checksum = digest([first, *(data.take(place).content for place in places)])
    return data


def _check_batch(data: OwnData) -> None:
    """Refuse batches whose tensors would neither be found nor moved."""
    leaves = list(list_leaves(data.head.content))
    others = [leaf for leaf in leaves if not is_tensor(leaf) and not isinstance(leaf, _VALUES)]
    hidden = [leaf for leaf in others if any(map(is_tensor, getattr(leaf, "__dict__", {}).values()))]
    hidden = [data.head.content] if len(others) == len(leaves) else hidden
    kind = " ".join(type(leaf).__name__ for leaf in hidden[:1])
    what = f"data {data.name}, {data.split}: a batch holds a {kind}, in which no tensors are found"
    advice = "put tensors into dicts, lists, tuples or dataclasses, or give the class a method to(device)"
    refuse((hidden, f"{what}: {advice}"), code="batch")


def find_form(data: OwnData) -> DataForm:
    """What a model must take and give for such batches; `own` where they are of no known kind."""
    try:
        inputs, targets = data.head.split()
    except ConfigError:
        return OWN_FORM
    num_targets, count = max(1, targets.numel() // max(1, len(data.head))), 0
    if not targets.is_floating_point():
        count = _ask(data.items, *_CLASSES)
    if isinstance(inputs, torch.Tensor):
        shape = tuple(inputs.shape[1:])
        if inputs.is_floating_point() and len(shape) in (1, 3) and num_targets == 1:
            return DataForm("images" if len(shape) == 3 else "numbers", shape, count)
        if not inputs.is_floating_point() and len(shape) == 1 and targets.shape == inputs.shape:
            vocabulary = _ask(data.items, "vocabulary", *_CLASSES)
            return DataForm("tokens", shape, vocabulary, vocabulary)
    return DataForm("own", (num_targets,), count)


# How a data set says a number, by the name of the attribute.
_SAID: dict[str, Callable[[Any], int]] = {
    "vocabulary": int,
    "num_classes": int,
    "classes": len,
    "targets": lambda labels: int(torch.as_tensor(labels).max()) + 1,
}
_CLASSES = ("num_classes", "classes", "targets")


def _ask(dataset: Any, *names: str) -> int:
    """The first of these that a data set says; else the largest of what all sets say that it is made of."""
    for name in names:
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):  # none, or of another meaning
            return _SAID[name](getattr(dataset, name))
    parts = (
        dataset.datasets if isinstance(dataset, torch.utils.data.ConcatDataset) else [getattr(dataset, "dataset", None)]
    )
    found = [UNKNOWN if part is None else _ask(part, *names) for part in parts]
    return UNKNOWN if UNKNOWN in found else max(found)
