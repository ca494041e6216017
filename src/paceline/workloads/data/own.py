"""A user's own data: a map-style data set, an iterable data set, or a loader.

`training.loader` assigns samples to ranks. Random numbers that the data draws depend only on the seed: they are the
same on all ranks and independent of the model's.
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

# Types that a checksum includes besides tensors.
_VALUES = (numpy.ndarray, numpy.generic, str, bytes, int, float)
# Options copied from a user's loader when Paceline builds its own.
_OPTIONS = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
)
UNKNOWN = -1
OWN_FORM = DataForm("own", (1,))


@dataclass(eq=False, kw_only=True)
class OwnData:
    """One split of the data from a user's function.

    A map-style data set, or a plain loader over one, is read by index: Paceline forms the batches, so an epoch uses
    every sample once on any number of ranks. Anything else is a stream of batches: all ranks read the same stream and
    share its batches round-robin, unless it `is_sharded` and each rank reads a separate shard.
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
    head: OwnBatch = field(default_factory=lambda: OwnBatch(()))  # the first sample, or a stream's first batch
    num_batches: int | None = None  # batches per epoch of a stream, once all ranks have agreed on the number
    checksum: int = 0  # of the first sample and, by index, also the middle and last ones

    def __len__(self) -> int:
        """Samples per epoch; 0 if unknown."""
        return self._num_batches * (self.batch_size or 0) if self.is_stream else len(self.items)

    @property
    def _num_batches(self) -> int:
        if self.num_batches is not None:
            return self.num_batches
        with contextlib.suppress(TypeError, NotImplementedError):
            return len(self.items)
        return 0

    def count_windows(self, parts: int, world_size: int) -> int:
        """Steps per epoch of a stream with `parts` batches per rank and step; 0 if unknown."""
        return self._num_batches // (parts * (1 if self.is_sharded else world_size))

    def first(self, num_samples: int) -> Self:
        """Truncate to the first `num_samples` samples, if there are more."""
        what = f"the first {num_samples} samples of {self.describe()}: cannot truncate a stream; leave out --samples"
        refuse((self.is_stream, what), code="stream")
        return replace(self, items=Subset(self.items, range(min(num_samples, len(self)))))

    def at(self, batch_size: int) -> Self:
        """The same data with batches of this size."""
        if not self.is_stream or batch_size == self.batch_size:
            return self
        dataset: Any = getattr(self.items, "dataset", None)
        can_change = type(self.items) is DataLoader and isinstance(dataset, IterableDataset) and self.batch_size
        what = f"data {self.name} has batches of {self.batch_size} samples, but the job needs {batch_size}"
        advice = "return the data set itself, or let the function take batch_size as an argument"
        refuse((not can_change, f"{what}: {advice}"), code="batch-size")
        loader = DataLoader(dataset, batch_size=batch_size, drop_last=self.drops_last, **self.options)
        return replace(self, items=loader, batch_size=batch_size)

    def take(self, indices: torch.Tensor) -> OwnBatch:
        """Load the samples at these indices in this process."""
        here = {"num_workers": 0, "prefetch_factor": None, "timeout": 0, "multiprocessing_context": None}
        return OwnBatch(next(self.load([indices.tolist()], 0, **here)))

    def prepare(self, batch: Batch, indices: torch.Tensor, epoch: int) -> Batch:
        return batch

    def cut(self, size: int, rank: int, world_size: int, device: torch.device) -> Iterator[Batch]:
        """Yield this rank's share of all samples, on `device`, in batches of about `size`, for evaluation."""
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
        """Describe the data to the user in one line."""
        count = f"{len(self):,} samples" if len(self) else "samples"
        stream = "a stream per rank" if self.is_sharded else "a stream"
        how = f"in {stream}" if self.is_stream else "by index"
        return f"{self.name}, {self.split}: {count} {how}"

    def load(self, batches: Iterable[Sequence[int]], epoch: int, **changes: Any) -> Generator[Any, None, None]:
        """Yield the collated batches for these lists of indices, in order, from any worker processes of the loader."""
        options, apart = self.options | changes, OwnRandom(0)
        dataset = _Seeded(self.items, self.seed, epoch)
        with own_errors(self.name, "data", always=True), apart:
            loaded = iter(DataLoader(dataset, batch_sampler=batches, **options))  # type: ignore[arg-type]
        for (content,) in self._take(loaded, 1, apart):
            yield content

    def read(self, epoch: int, size: int) -> Generator[list[Any], None, None]:
        """Yield the batches of a stream's epoch in order, `size` at a time; the last group may be smaller."""
        apart = OwnRandom(derive_seed("stream", self.seed, epoch))
        with own_errors(self.name, "data", always=True), apart:
            for part in (self.items, *(getattr(self.items, n, None) for n in ("sampler", "batch_sampler", "dataset"))):
                getattr(part, "set_epoch", lambda epoch: None)(epoch)
            if isinstance(self.items, DataLoader):
                self.items._iterator = None  # its persistent workers ended with the previous epoch
            batches = iter(self.items)
        yield from self._take(batches, size, apart)

    def _take(self, items: Iterator[Any], size: int, apart: "OwnRandom") -> Generator[list[Any], None, None]:
        try:
            while True:
                with own_errors(self.name, "data", always=True), apart:
                    found = list(itertools.islice(items, size))
                if not found:
                    return
                yield found
        finally:  # close now: an error's traceback would keep worker processes alive
            getattr(items, "_shutdown_workers", lambda: None)()


class OwnRandom:
    """A context with a separate random state for torch (CPU), numpy and random. The state starts from a seed and
    continues in the next context; the outer state does not change."""

    def __init__(self, seed: int) -> None:
        self._other: Any = seed  # the inactive state, or its seed

    def __enter__(self) -> None:
        # Swap numpy's generator itself: copying its state takes longer than loading a small sample.
        before = torch.get_rng_state(), mtrand.get_bit_generator(), random.getstate()
        if isinstance(self._other, int):
            mtrand.set_bit_generator(numpy.random.MT19937())
            _seed_all(self._other)
        else:
            torch.set_rng_state(self._other[0])
            mtrand.set_bit_generator(self._other[1])
            random.setstate(self._other[2])
        self._other = before

    def __exit__(self, *_: object) -> None:
        self.__enter__()


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


class _Seeded(torch.utils.data.Dataset[Any]):
    """A map-style data set whose random numbers depend only on the seed, the epoch and the sample's index, not on the
    number of ranks or workers, or on resuming."""

    def __init__(self, dataset: Any, seed: int, epoch: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        if hasattr(dataset, "__getitems__"):  # reads a whole batch, seeded by its first index
            self.__getitems__ = self._get_items

    def __getitem__(self, index: int) -> Any:
        _seed_all(derive_seed("sample", self._seed, self._epoch, index))
        return self._dataset[index]

    def _get_items(self, indices: list[int]) -> Any:
        _seed_all(derive_seed("sample", self._seed, self._epoch, indices[0]))
        return self._dataset.__getitems__(indices)


def digest(value: Any) -> int:
    """Compute a checksum of nested tensors, arrays, numbers and strings; ignores other values."""
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
    """Wrap the data from a user's function. `is_sharded`: the function takes the rank. `batch_size` applies to iterable
    data sets."""
    shared: dict[str, Any] = {"name": name, "split": split, "seed": seed}
    kind = type(found).__name__
    needed = "return a data set with __getitem__ and __len__, an IterableDataset, or a loader"
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
        (not is_iterable, f"data {name} returned a {kind}: {needed}"),
        (hasattr(found, "__next__"), f"data {name} returned a {kind}, which can only be read once: {needed}"),
        code="own-type",
    )
    return _look(OwnData(items=found, is_stream=True, is_sharded=is_sharded, **shared))


def _look(data: OwnData) -> OwnData:
    """Read the first sample or batch, check it, and compute the checksum."""
    found: Any = data.items
    if data.is_stream:
        with contextlib.closing(data.read(0, 1)) as batches:
            found = next(batches, [])
    refuse((len(found) == 0, f"data {data.name}, {data.split}: it has no samples; return at least one"), code="empty")
    places = torch.tensor([[0], [len(data) // 2], [len(data) - 1]])
    data.head = OwnBatch(found[0]) if data.is_stream else data.take(places[0])
    leaves = list(list_leaves(data.head.content))
    _check_batch(data, leaves)
    if data.is_stream:
        data.batch_size = data.batch_size or len(data.head)
    # Checksum a single sample, because the batch size may change on resume; but shards may start with equal samples.
    if not data.is_sharded:
        leaves = [leaf[:1] if is_tensor(leaf) and leaf.dim() else leaf for leaf in leaves]
    data.checksum = digest([leaves, *(data.take(place).content for place in places[1:] if not data.is_stream)])
    return data


def _check_batch(data: OwnData, leaves: Sequence[Any]) -> None:
    """Reject batches whose tensors cannot be found and moved to a device."""
    others = [leaf for leaf in leaves if not is_tensor(leaf) and not isinstance(leaf, _VALUES)]
    hidden = [leaf for leaf in others if any(map(is_tensor, getattr(leaf, "__dict__", {}).values()))]
    if len(others) == len(leaves):
        hidden = [data.head.content]
    if hidden:
        kind = type(hidden[0]).__name__
        what = f"data {data.name}, {data.split}: cannot find the tensors in a {kind}, part of a batch"
        advice = "use dicts, lists, tuples or dataclasses of tensors, or give the class a to(device) method"
        raise ConfigError(f"{what}: {advice}", code="batch")


def find_form(data: OwnData) -> DataForm:
    """Find the data form of the batches; kind `own` if it is not a built-in kind."""
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


# Attributes of data sets with the number of classes or ids, and functions to read them.
_SAID: dict[str, Callable[[Any], int]] = {
    "vocabulary": int,
    "num_classes": int,
    "classes": len,
    "targets": lambda labels: int(torch.as_tensor(labels).max()) + 1,
}
_CLASSES = ("num_classes", "classes", "targets")


def _ask(dataset: Any, *names: str) -> int:
    """Read the first of these attributes that the data set has, else the maximum over its component data sets."""
    for name in names:
        with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):  # absent, or of another type
            return _SAID[name](getattr(dataset, name))
    parts: list[Any] = [getattr(dataset, "dataset", None)]
    if isinstance(dataset, torch.utils.data.ConcatDataset):
        parts = dataset.datasets
    found = [UNKNOWN if part is None else _ask(part, *names) for part in parts]
    return UNKNOWN if UNKNOWN in found else max(found)
