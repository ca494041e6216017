"""Micro-batches of all ranks together: every sample of a window once, and equal numbers of them on every rank."""

import pytest
import torch

from paceline.training.loader import load_windows
from paceline.workloads.data import DataForm
from paceline.workloads.data.sets import DataSet, ImageData, TokenData
from paceline.workloads.data.sharding import EpochOrder

CPU = torch.device("cpu")


def build_numbers(count):
    """Sample k is the number k, and so is its target."""
    rows = torch.arange(count, dtype=torch.float32)[:, None]
    return DataSet(
        name="n", form=DataForm(kind="numbers", shape=(1,), num_classes=0), split="train", source="made",
        inputs=rows, targets=rows,
    )  # fmt: skip


def load(data, order, rank=0, world_size=1, batch_size=4, start=0):
    return list(load_windows(data, order, start, rank, world_size, batch_size, CPU))


def counted(windows):
    """One rank's counted samples, by window."""
    return [
        [int(x) for loaded in window.batches if loaded.num_counted for x in loaded.batch.inputs] for window in windows
    ]


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 12), (1, 5), (2, 6), (2, 2), (3, 4), (3, 1), (5, 3)])
def test_ranks_divide_every_window(tail, world_size, batch_size):
    """25 samples in windows of 12: the tail is a single sample."""
    data, order = build_numbers(25), EpochOrder(25, 12, 7, 0, tail)
    by_rank = [load(data, order, rank, world_size, batch_size) for rank in range(world_size)]
    for windows in zip(*by_rank, strict=True):
        number = windows[0].number
        wanted = order.window(number).tolist()
        assert [k for rank in windows for k in counted([rank])[0]] == wanted
        assert {window.num_samples for window in windows} == {len(wanted)}
        assert len({len(window.batches) for window in windows}) == 1, "a rank would wait for a backward that never is"
        for loaded in (loaded for window in windows for loaded in window.batches):
            assert 1 <= len(loaded.batch) <= batch_size and loaded.num_counted in (0, len(loaded.batch))
            assert torch.equal(loaded.batch.inputs, loaded.batch.targets)
    epoch = [k for windows in zip(*by_rank, strict=True) for rank in windows for k in counted([rank])[0]]
    assert len(epoch) == {"keep": 25, "drop": 24, "pad": 36}[tail]
    assert tail == "drop" or set(epoch) == set(range(25))


def test_the_samples_of_a_window_are_the_same_on_any_number_of_ranks():
    data, order = build_numbers(25), EpochOrder(25, 12, 7, 3)
    alone = counted(load(data, order, batch_size=12))
    pairs = zip(*(counted(load(data, order, rank, 2, 6)) for rank in range(2)), strict=True)
    assert [a + b for a, b in pairs] == alone


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_an_epoch_continues_where_it_stopped(start):
    data, order = build_numbers(25), EpochOrder(25, 12, 7, 0)
    windows = load(data, order, start=start)
    assert [window.number for window in windows] == list(range(start, 3))
    assert counted(windows) == counted(load(data, order))[start:]


def test_epochs_have_other_orders_and_seeds_too():
    data = build_numbers(25)
    orders = [
        counted(load(data, EpochOrder(25, 25, seed, epoch), batch_size=25)) for seed, epoch in ((1, 0), (1, 1), (2, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_batches_come_prepared():
    images = ImageData(
        name="i", form=DataForm(kind="images", shape=(1, 2, 2), num_classes=2), split="train", source="made",
        inputs=torch.full((4, 1, 2, 2), 255, dtype=torch.uint8), targets=torch.zeros(4, dtype=torch.int64),
        mean=(0.5,), std=(0.25,),
    )  # fmt: skip
    batch = load(images, EpochOrder(4, 4, 0, 0))[0].batches[0].batch
    assert torch.equal(batch.inputs, torch.full((4, 1, 2, 2), 2.0))
    blocks = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    tokens = TokenData(
        name="t", form=DataForm(kind="tokens", shape=(3,), num_classes=12, vocabulary=12), split="train",
        source="made", inputs=blocks, targets=blocks,
    )  # fmt: skip
    batch = load(tokens, EpochOrder(3, 3, 0, 0))[0].batches[0].batch
    assert batch.inputs.dtype == torch.int64 and torch.equal(batch.targets, batch.inputs + 1)
