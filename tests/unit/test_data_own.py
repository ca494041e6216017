"""A user's own data: accepted types, sharding of samples, random numbers, and refusals."""

from __future__ import annotations

import itertools
import random
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from paceline.errors import ConfigError
from paceline.training.loader import load_windows
from paceline.workloads.data import Batch, DataForm, OwnBatch, list_leaves
from paceline.workloads.data.own import OWN_FORM, UNKNOWN, digest, find_form, open_data
from paceline.workloads.data.sharding import EpochOrder

CPU = torch.device("cpu")


class Numbers:
    """Samples that return their index and the random numbers they drew."""

    def __init__(self, count: int = 22) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return index, float(torch.rand(())), float(numpy.random.rand()), random.random()


class Batched(Numbers):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, float(torch.rand(()))) for index in indices]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Samples in random order."""

    def __init__(self, count: int = 22, part: int = 0, parts: int = 1) -> None:
        self.count, self.part, self.parts = count, part, parts

    def __iter__(self) -> Any:
        return iter(torch.randperm(self.count).tolist()[self.part :: self.parts])


class Loader:
    """An iterable of batches that is not a torch DataLoader."""

    def __init__(self, count: int = 7, size: int = 3) -> None:
        self.count, self.size, self.epochs = count, size, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        return iter({"x": torch.arange(self.size) + self.size * number} for number in range(self.count))


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


class Loaded(IterableDataset):  # type: ignore[type-arg]
    """Samples that are whole batches."""

    def __iter__(self) -> Any:
        return iter(Loader(11, 2))


class Drawing(IterableDataset):  # type: ignore[type-arg]
    """Random samples from the global generators of torch, numpy and random."""

    def __iter__(self) -> Any:
        return ((float(torch.rand(())), float(numpy.random.rand()), random.random()) for _ in range(8))


def open_own(found: Any, split: str = "train", batch_size: int = 2, is_sharded: bool = False) -> Any:
    return open_data(found, "own.py:load", split, seed=3, batch_size=batch_size, is_sharded=is_sharded)


def list_windows(data: Any, world_size: int = 1, size: int = 2, accumulate: int = 1, **more: Any) -> list[list[Any]]:
    """The windows of every rank."""
    total, start = size * accumulate * world_size, more.pop("start", 0)
    agree = more.pop("agree", None)
    count = total if data.is_stream else len(data)
    order = EpochOrder(count, total, 3, more.pop("epoch", 0), more.pop("tail", "keep"), data.shuffles)
    return [list(load_windows(data, order, start, r, world_size, size, CPU, agree)) for r in range(world_size)]


def read(windows: list[Any]) -> list[int]:
    """One rank's counted samples, in order."""
    found = []
    for loaded in (loaded for window in windows for loaded in window.batches):
        content = loaded.batch.content
        first = content["x"] if isinstance(content, dict) else content[0] if isinstance(content, list) else content
        found += first.tolist()[: loaded.num_counted]
    return found


@pytest.mark.parametrize(
    ("found", "is_stream", "batch_size", "in_order"),
    [
        (Numbers(), False, None, False),
        ([(index, 0) for index in range(22)], False, None, False),
        (DataLoader(Numbers(), batch_size=4), False, 4, True),
        (DataLoader(Numbers(), batch_size=4, shuffle=True), False, 4, False),
        (DataLoader(Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), 2, 0)), False, 4, False),
        (DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 2, 0, shuffle=False)), False, 4, True),
        (Stream(), True, 2, False),
        (DataLoader(Stream(), batch_size=4), True, 4, False),
        (DataLoader(Numbers(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 22, 22)), True, 4, False),
        (Loader(11, 2), True, 2, True),
        (DataLoader(Loaded(), batch_size=None), True, 2, True),
    ],
)
def test_what_a_function_may_return(found, is_stream, batch_size, in_order):
    data = open_own(found)
    assert (data.is_stream, data.batch_size, data.split) == (is_stream, batch_size, "train")
    windows = [list_windows(data, size=batch_size or 2, epoch=epoch)[0] for epoch in (0, 1)]
    assert [len(loaded.batch) for window in windows[0][:-1] for loaded in window.batches] == [batch_size or 2] * (
        len(windows[0]) - 1
    )
    first, second = map(read, windows)
    assert (first == sorted(first), first == second) == (in_order, in_order)
    is_drawn_again = isinstance(getattr(found, "sampler", None), WeightedRandomSampler)
    assert len(set(first)) < 22 if is_drawn_again else set(first) == set(second) == set(range(22))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "own.py:load returned a NoneType"),
        ({"train": Numbers()}, "returned a dict"),
        (iter([1]), "returned a list_iterator, which can only be read once"),
        (7, "returned a int"),
    ],
)
def test_values_that_are_not_data_are_refused_by_type(found, words):
    with pytest.raises(ConfigError, match=words) as caught:
        open_own(found)
    assert caught.value.code == "own-type"


@pytest.mark.parametrize("found", [Numbers(), DataLoader(Numbers(), batch_size=4, shuffle=True), Batched()])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_sample_of_a_set_is_used_once_on_any_number_of_ranks(found, world_size):
    ranks = list_windows(open_own(found), world_size, size=6 // world_size)
    assert sorted(itertools.chain(*map(read, ranks))) == list(range(22))
    alone = list_windows(open_own(found), 1, size=6)[0]
    for number, window in enumerate(alone):  # the same global batches
        assert sorted(read([window])) == sorted(itertools.chain(*(read([rank[number]]) for rank in ranks)))
        assert window.is_last == (number == 3) == ranks[-1][number].is_last


def test_a_loader_that_does_not_shuffle_keeps_its_order_and_its_collate_function():
    def collate(samples):
        return {"x": torch.tensor([10 * sample[0] for sample in samples])}

    data = open_own(DataLoader(Numbers(), batch_size=4, collate_fn=collate, drop_last=True))
    assert data.drops_last and read(list_windows(data, size=4)[0]) == [10 * index for index in range(22)]


def test_what_a_sample_draws_follows_from_its_index_and_leaves_the_models_random_numbers_alone():
    def draws(windows):
        found = {}
        for loaded in (loaded for window in windows for loaded in window.batches):
            found |= {int(row[0]): tuple(map(float, row[1:])) for row in zip(*loaded.batch.content, strict=True)}
        return found

    data = open_own(Numbers())
    torch.manual_seed(1), numpy.random.seed(1), random.seed(1)
    wanted = torch.rand(2), numpy.random.rand(2), [random.random() for _ in range(2)]
    torch.manual_seed(1), numpy.random.seed(1), random.seed(1)
    first = torch.rand(1), numpy.random.rand(1), random.random()
    whole = draws(list_windows(data, size=6)[0])
    assert torch.equal(torch.cat([first[0], torch.rand(1)]), wanted[0])
    assert [first[1][0], numpy.random.rand()] == list(wanted[1]) and [first[2], random.random()] == wanted[2]
    assert len(set(whole.values())) == 22
    ranks = list_windows(data, 2, size=3, start=2)
    # resumed on a different number of ranks
    assert {k: v for r in ranks for k, v in draws(r).items()}.items() <= whole.items()
    assert draws(list_windows(data, size=6, epoch=1)[0])[5] != whole[5]


def test_what_a_stream_draws_does_not_depend_on_what_others_draw_in_between():
    data = open_own(Drawing(), batch_size=4)
    alone = [[part.tolist() for part in content] for (content,) in data.read(0, 1)]
    mixed, generator = [], numpy.random.get_bit_generator()
    for (content,) in data.read(0, 1):
        mixed.append([part.tolist() for part in content])
        assert numpy.random.get_bit_generator() is generator
        torch.rand(3), numpy.random.rand(3), random.random()
    assert len(alone) == 2 and mixed == alone
    assert all(len(set(map(str, drawn))) == 2 for drawn in zip(*alone, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_share_one_stream_of_samples_and_draw_the_same_order(world_size):
    data = open_own(Stream(), batch_size=6 // world_size)
    ranks = list_windows(data, world_size, size=6 // world_size)
    assert sorted(itertools.chain(*map(read, ranks))) == list(range(22))
    alone = list_windows(open_own(Stream(), batch_size=6), 1, size=6)[0]
    assert [list(itertools.chain(*(read([rank[n]]) for rank in ranks))) for n in range(4)] == [
        read([window]) for window in alone
    ]
    assert [window.num_samples for window in alone] == [6, 6, 6, 4] and [w.is_last for w in alone][-2:] == [False, True]
    other = list_windows(data, 1, size=6, epoch=1)[0]
    assert sorted(read(other)) == list(range(22)) and read(other) != read(alone)


def test_an_epoch_of_a_stream_ends_with_the_last_step_for_which_every_rank_has_a_batch():
    ranks = list_windows(open_own(Stream(9), batch_size=2), 2, size=2)  # batches of 2, 2, 2, 2, 1
    assert [[window.num_samples for window in rank] for rank in ranks] == [[4, 4], [4, 4]] and ranks[0][-1].is_last


def test_ranks_share_the_batches_of_a_loader_and_end_together():
    loader = Loader(7)
    data = open_own(loader)
    ranks = list_windows(data, 2, size=3, epoch=4)
    assert loader.epochs == [0, 4, 4]  # the first call probes the loader's batches
    assert [read(rank) for rank in ranks] == [[0, 1, 2, 6, 7, 8, 12, 13, 14], [3, 4, 5, 9, 10, 11, 15, 16, 17]]
    assert [window.num_samples for window in ranks[0]] == [6, 6, 6] and ranks[0][-1].is_last
    (window,) = list_windows(data, 2, size=3, accumulate=3)[1]
    assert read([window]) == [3, 4, 5, 9, 10, 11, 15, 16, 17] and len(window.batches) == 3


def test_streams_that_are_sharded_end_when_the_first_rank_has_nothing_left():
    data, asked = open_own(Stream(12, 0, 2), is_sharded=True), []

    def agree(count):
        asked.append(count)
        return 4 if len(asked) < 3 else 0

    (windows,) = list_windows(data, size=2, agree=agree)
    assert asked == [2, 2, 2] and len(read(windows)) == 4 and windows[-1].is_last
    assert [window.num_samples for window in windows] == [4, 4]
    alone = list_windows(data, 2, size=2)[0]  # without other ranks, all shards are assumed to be alike
    assert [window.num_samples for window in alone] == [4, 4, 4]


def test_a_resumed_stream_is_read_up_to_its_place():
    data = open_own(Stream()).at(4)
    whole = list_windows(data, size=4)[0]
    assert read(list_windows(data, size=4, start=2)[0]) == read(whole[2:])
    with pytest.raises(ConfigError, match="batch 3 of 4") as caught:
        list_windows(open_own(Stream(5), batch_size=4), size=4, start=2)
    assert caught.value.code == "empty"


def test_workers_that_would_persist_read_another_epoch():
    data = open_own(DataLoader(Stream(5), batch_size=2, num_workers=1, persistent_workers=True))
    assert [sorted(read(list_windows(data, epoch=epoch)[0])) for epoch in (0, 1)] == [list(range(5))] * 2


def test_an_empty_stream_is_refused():
    with pytest.raises(ConfigError, match="batch 1 of 8 samples") as caught:
        list_windows(open_own(Loader(1, 4)), 2, size=4)
    assert caught.value.code == "empty"


@pytest.mark.parametrize("found", [Numbers(0), Stream(0), [], DataLoader([], 4), DataLoader(Numbers(0), 4), Loader(0)])
def test_data_without_samples_is_refused_by_its_split(found):
    with pytest.raises(ConfigError, match=r"own.py:load, test") as caught:
        open_own(found, "test")
    assert caught.value.code == "empty"


def test_batches_have_another_size_where_they_can():
    assert not open_own(Numbers()).at(5).is_stream and open_own(Stream()).at(5).items.batch_size == 5
    data = open_own(DataLoader(Stream(), batch_size=4)).at(7)
    assert data.batch_size == 7 and data.items.batch_size == 7
    fixed = open_own(Loader())
    assert fixed.at(3) is fixed
    with pytest.raises(ConfigError, match=r"3 samples.*8") as caught:
        fixed.at(8)
    assert caught.value.code == "batch-size"


def test_steps_of_an_epoch_are_counted_if_the_stream_has_a_length():
    assert open_own(Stream()).count_windows(1, 2) == len(open_own(Stream())) == 0
    whole, part = open_own(Sized(22), batch_size=4), open_own(Sized(22), batch_size=4, is_sharded=True)
    assert [data.count_windows(1, 2) for data in (whole, part)] == [3, 6] and whole.count_windows(2, 2) == 1


@pytest.mark.parametrize("found", [Numbers(10), Stream(10), Loader(5, 2)])
def test_a_test_set_is_cut_into_shares_that_contain_each_sample_once(found):
    data = open_own(found, "test")
    seen = []
    for rank in range(3):
        for batch in data.cut(2, rank, 3, CPU):
            content = batch.content
            seen += (
                content["x"] if isinstance(content, dict) else content[0] if len(content) > 2 else content
            ).tolist()
    assert sorted(seen) == list(range(10))
    if data.is_stream:
        with pytest.raises(ConfigError, match="4 samples") as caught:
            data.first(4)
        assert caught.value.code == "stream"
    else:
        assert sum(len(batch) for batch in data.first(4).cut(2, 0, 1, CPU)) == len(data.first(4)) == 4


class Point(NamedTuple):
    x: torch.Tensor
    y: Any = 0


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "a"


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    rest: Any = None


class Plain:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Movable(Plain):
    def to(self, device: torch.device) -> Movable:
        return Movable(self.x.to(device))


class Graph(Movable):
    batch_size = 2


class Open(dict):  # type: ignore[type-arg]
    """A dict that has every attribute, like those of some libraries."""

    def __getattr__(self, name: str) -> Any:
        return Open()


X = torch.arange(6.0).reshape(3, 2)
OBJECTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "named tuple": lambda x: Point(x, Record(x)),
    "frozen dataclass": Record,
    "dataclass with slots": lambda x: Slotted(x, [Record(x)]),
    "mapping that cannot change": lambda x: MappingProxyType({"x": x}),
    "object with to": Movable,
    "object with to in a list": lambda x: [Movable(x), "a"],
    "dict of a user": lambda x: UserDict({"x": x, "y": ["a", None]}),
    "dict with all attributes": lambda x: Open(x=x),
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS.keys())
def test_tensors_of_a_batch_that_is_an_object_are_found_and_moved(make):
    content, other = make(X), make(X + 1)
    one, two = (open_own(DataLoader(Loaded(), batch_size=None, collate_fn=lambda _, c=c: c)) for c in (content, other))
    assert len(one.head) == one.batch_size == 3 and one.checksum != two.checksum
    moved = OwnBatch(content).to(torch.device("meta")).content
    tensors = [leaf for leaf in list_leaves(moved) if isinstance(leaf, torch.Tensor)]
    assert type(moved) is type(content) and {leaf.device.type for leaf in tensors} == {"meta"}
    assert X is next(list_leaves(content))  # unchanged


def test_an_object_is_moved_by_its_own_method():
    packed = OwnBatch(pack_sequence([X, X[:1]])).to(torch.device("meta")).content
    assert (packed.data.device.type, packed.batch_sizes.device.type) == ("meta", "cpu")


@pytest.mark.parametrize("content", [Plain(X), [Plain(X), X], object(), {"a": [object()]}, ()])
def test_a_batch_whose_tensors_are_not_found_is_refused(content):
    with pytest.raises(ConfigError, match=r"to\(device\) method") as caught:
        open_own(DataLoader(Loaded(), batch_size=None, collate_fn=lambda _: content))
    assert caught.value.code == "batch"


def test_batches_of_any_form_are_counted_and_changed():
    nested = {"a": [torch.zeros(3, 2), "text"], "b": Point(torch.ones(3), Record(torch.ones(3)))}
    batch = OwnBatch(nested)
    moved = batch.map(lambda tensor: tensor + 1).content
    assert float(moved["b"].x[0]) == float(moved["b"].y.x[0]) == 2 and moved["a"][1] == "text"
    assert type(moved["b"]) is Point and float(nested["b"].x[0]) == 1
    sizes = {3: batch, 2: OwnBatch(Graph(X)), 1: OwnBatch(torch.tensor(1.0)), 5: OwnBatch([X], count=5)}
    assert {size: len(found) for size, found in sizes.items()} == {size: size for size in sizes}
    for texts in (["a", "b"], {"text": ["a", "b"]}, (["a", "b"], ["c", "d"]), Record("ab", ["a", "b"])):
        assert len(OwnBatch(texts)) == 2


def test_inputs_and_targets_of_a_batch_for_our_own_loss():
    x, y = torch.zeros(4, 2), torch.ones(4, dtype=torch.float64)
    inputs, targets = OwnBatch([x, y]).split()
    assert inputs is x and targets.dtype == torch.float32
    assert OwnBatch((x, x, y)).split()[0] == (x, x)
    inputs, targets = OwnBatch({"ids": x, "labels": y.int()}).split()
    assert inputs == {"ids": x} and targets.dtype == torch.int64
    assert Batch(x, y).content == (x, y) and Batch(x, y, y).content == (x, y, y)
    for odd in ({"ids": x}, x, [x], (x, "label"), (("a", "b"), y), {"text": ["a"], "labels": y}, ["a", "b"]):
        with pytest.raises(ConfigError) as caught:
            OwnBatch(odd).split()
        assert caught.value.code == "batch"


def test_the_form_of_a_set_is_found_in_its_first_sample():
    images = TensorDataset(torch.zeros(6, 3, 8, 8), torch.arange(6))
    assert find_form(open_own(images)) == DataForm("images", (3, 8, 8), UNKNOWN)
    images.classes = list("abcdefg")  # type: ignore[attr-defined]
    assert find_form(open_own(images)).num_classes == find_form(open_own(DataLoader(images))).num_classes == 7
    assert find_form(open_own(TensorDataset(torch.zeros(6, 5), torch.zeros(6)))) == DataForm("numbers", (5,))
    others = TensorDataset(torch.zeros(6, 3, 8, 8), torch.arange(6))
    others.targets = [0, 8, 3]  # type: ignore[attr-defined]
    both = ConcatDataset([images, Subset(others, range(3))])
    made = {7: Subset(Subset(images, range(5)), range(3)), 9: DataLoader(Subset(both, range(8)), 2)}
    made[UNKNOWN] = ConcatDataset([images, TensorDataset(torch.zeros(6, 3, 8, 8), torch.arange(6))])
    assert {number: find_form(open_own(data)).num_classes for number, data in made.items()} == {n: n for n in made}
    others.num_classes = "many"  # type: ignore[attr-defined]
    assert find_form(open_own(others)).num_classes == 9
    tokens = TensorDataset(torch.zeros(6, 5).long(), torch.zeros(6, 5).long())
    tokens.vocabulary = 11  # type: ignore[attr-defined]
    assert find_form(open_own(tokens)) == DataForm("tokens", (5,), 11, 11)
    several = TensorDataset(torch.zeros(4, 2), torch.zeros(4, 3), torch.zeros(4, 6))
    assert find_form(open_own(several)) == DataForm("own", (6,))
    assert find_form(open_own([{"x": torch.zeros(2)}])) == find_form(open_own(Loader())) == OWN_FORM


def test_checksums_distinguish_samples_and_skip_unknown_types():
    big = torch.arange(100_000)
    assert digest([big, "a"]) == digest((big.clone(), "a", object())) != digest([big + 1, "a"])
    assert digest(numpy.arange(4)) == digest(torch.arange(4)) != digest(torch.arange(5))
    parts = [open_own(DataLoader(Stream(), batch_size=size), is_sharded=size < 4).checksum for size in (2, 3, 4, 5)]
    assert parts[2] == parts[3] and len(set(parts)) == 3  # for a subset, the whole first batch
    assert open_own(Numbers(9)).checksum == open_own(Numbers(9)).checksum != open_own(Numbers(10)).checksum
    assert digest(torch.zeros(2, dtype=torch.bool)) and digest(torch.zeros(()))
