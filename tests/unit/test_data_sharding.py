"""Sharding of samples: each one once, the same global batches in every world, and matching micro-batches."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.workloads.data.sharding import EpochOrder, cut_range, derive_seed, split_window

counts = st.integers(1, 200)
batches = st.integers(1, 70)
worlds = st.integers(1, 9)
micros = st.integers(1, 20)


def join(lists):
    return list(chain.from_iterable(lists))


def windows(order):
    return [order.window(number).tolist() for number in range(order.num_windows)]


@given(counts, batches, worlds, micros, st.integers(0, 3))
def test_every_sample_is_counted_once_over_ranks_and_windows(count, batch, world, micro, epoch):
    order = EpochOrder(count, batch, seed=1, epoch=epoch)
    counted = []
    for number in range(order.num_windows):
        for rank in range(world):
            for part in split_window(order.window(number), rank, world, micro):
                counted += part.indices[: part.num_counted].tolist()
    assert sorted(counted) == list(range(count))


@given(counts, batches)
def test_tails_are_dropped_and_padded_explicitly(count, batch):
    kept = windows(EpochOrder(count, batch, 3, 0))
    padded = windows(EpochOrder(count, batch, 3, 0, tail="pad"))
    samples = join(kept)
    assert [len(window) for window in padded] == [batch] * len(kept)
    missing = batch * len(kept) - count
    assert join(padded) == samples + [samples[place % count] for place in range(missing)]
    if count < batch:
        with pytest.raises(ConfigError, match=f"{count} samples .*batch of {batch}"):
            EpochOrder(count, batch, 3, 0, tail="drop")
    else:
        assert windows(EpochOrder(count, batch, 3, 0, tail="drop")) == [w for w in kept if len(w) == batch]


@st.composite
def cuts(draw):
    """A number of samples and window sizes; only the last window may exceed the remaining samples."""
    sizes = draw(st.lists(batches, min_size=1, max_size=8))
    return sum(sizes) - draw(st.integers(0, sizes[-1] - 1)), tuple(sizes)


@given(cuts(), st.integers(0, 3))
def test_windows_of_different_sizes_cut_the_same_order(cut, epoch):
    count, sizes = cut
    order = EpochOrder(count, sizes, 3, epoch)
    samples = join(windows(EpochOrder(count, 7, 3, epoch)))
    kept = windows(order)
    missing = sum(sizes) - count
    assert [len(window) for window in kept] == [*sizes[:-1], sizes[-1] - missing]
    assert join(kept) == samples
    padded = windows(EpochOrder(count, sizes, 3, epoch, tail="pad"))
    assert [len(window) for window in padded] == list(sizes)
    assert join(padded) == samples + [samples[place % count] for place in range(missing)]
    if missing and len(sizes) == 1:
        with pytest.raises(ConfigError, match=f"{count} samples .*batch of {sizes[0]}"):
            EpochOrder(count, sizes, 3, epoch, tail="drop")
    else:
        assert windows(EpochOrder(count, sizes, 3, epoch, tail="drop")) == kept[: len(sizes) - (missing > 0)]


@given(counts, batches, st.sampled_from(["keep", "pad"]))
def test_windows_of_one_size_are_those_of_a_constant_batch(count, batch, tail):
    sizes = (batch,) * -(-count // batch)
    assert windows(EpochOrder(count, sizes, 3, 1, tail)) == windows(EpochOrder(count, batch, 3, 1, tail))


@given(counts, batches, worlds, micros)
def test_a_window_is_its_shares_in_the_order_of_ranks(count, batch, world, micro):
    window = EpochOrder(count, batch, 5, 2).window(0)
    parts = [split_window(window, rank, world, micro) for rank in range(world)]
    counted = [[part.indices[: part.num_counted].tolist() for part in share] for share in parts]
    assert join(join(share) for share in counted) == window.tolist()
    sizes = [sum(len(part) for part in share) for share in counted]
    assert max(sizes) - min(sizes) <= 1
    assert {len(share) for share in parts} == {-(-max(sizes) // micro)}
    for share in counted:
        assert max(map(len, share)) <= micro
        assert max(map(len, share)) - min(map(len, share)) <= 1


@given(st.integers(1, 12), worlds, micros)
def test_a_micro_batch_without_samples_holds_one_that_does_not_count(count, world, micro):
    window = torch.arange(100, 100 + count)
    for rank in range(world):
        for part in split_window(window, rank, world, micro):
            assert part.num_counted in (0, len(part.indices))
            assert len(part.indices) >= 1 and set(part.indices.tolist()) <= set(window.tolist())
            assert part.num_counted or len(part.indices) == 1


def test_more_ranks_than_samples():
    shares = [split_window(torch.tensor([7, 8]), rank, 4, 1) for rank in range(4)]
    assert [[part.num_counted for part in share] for share in shares] == [[0], [1], [0], [1]]


@given(counts, batches, st.integers(0, 5))
def test_a_resumed_epoch_continues_identically(count, batch, epoch):
    order = EpochOrder(count, batch, 9, epoch)
    middle = order.num_windows // 2
    again = EpochOrder(count, batch, 9, epoch)
    rest = [again.window(number).tolist() for number in range(middle, again.num_windows)]
    assert rest == windows(order)[middle:]


def test_order_follows_only_from_seed_and_epoch():
    torch.manual_seed(0)
    first = windows(EpochOrder(50, 8, 1, 0))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert windows(EpochOrder(50, 8, 1, 0)) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert join(windows(EpochOrder(50, 13, 1, 0))) == join(first)
    others = [windows(EpochOrder(50, 8, seed, epoch)) for seed, epoch in ((1, 1), (2, 0), (0, 1), (0, 2))]
    assert all(other != first for other in others) and others[0] != others[1] != others[2]
    assert join(first) != list(range(50))


def test_neighboring_seeds_do_not_collide():
    seeds = {derive_seed(purpose, seed, epoch) for purpose in "ab" for seed in range(20) for epoch in range(20)}
    assert len({seed & 0xFFFFFFFF for seed in seeds}) == 800


@given(st.integers(0, 300), worlds)
def test_parts_of_a_range_are_every_number_once(count, world):
    whole = range(0, 7 * count, 7)
    shares = [cut_range(whole, rank, world) for rank in range(world)]
    assert join(shares) == list(whole)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("number", [-1, 3])
def test_a_window_that_does_not_exist(number):
    with pytest.raises(IndexError, match=f"batch {number}"):
        EpochOrder(10, 4, 0, 0).window(number)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: EpochOrder(10, 4, 0, 0, tail="cut"), "tail 'cut' is unknown: use keep, drop, pad"),
        (lambda: EpochOrder(0, 4, 0, 0), "0 samples in global batches of 4"),
        (lambda: EpochOrder(4, 0, 0, 0), "4 samples in global batches of 0"),
        (lambda: EpochOrder(4, (4, 0), 0, 0), "4 samples in global batches of"),
        (lambda: EpochOrder(4, (), 0, 0), "4 samples in global batches of"),
        (lambda: EpochOrder(10, (4, 4), 0, 0), "global batches of 8 samples in all, the last of 4, for 10"),
        (lambda: EpochOrder(10, (4, 6, 4), 0, 0), "global batches of 14 samples in all"),
    ],
)
def test_impossible_values_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
