"""Batches that grow: every window against a walk over the samples, one at a time, in exact fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.training.schedules import BatchSchedule, check_growths, format_growths, parse_growths
from paceline.workloads.data.sharding import EpochOrder


@st.composite
def growths(draw):
    """Shares as people write them, in hundredths, with factors that rise."""
    shares = sorted(draw(st.sets(st.integers(1, 99), max_size=4)))
    factors = sorted(draw(st.sets(st.integers(2, 20), min_size=len(shares), max_size=len(shares))))
    return tuple((share / 100, factor) for share, factor in zip(shares, factors, strict=True))


schedules = st.builds(
    BatchSchedule,
    global_batch_size=st.integers(1, 30),
    num_samples=st.integers(1, 300),
    epochs=st.integers(1, 5),
    growths=growths(),
    tail=st.sampled_from(["keep", "drop", "pad"]),
)


def walk(schedule):
    """Of each epoch, the windows as (start, size, samples that it holds); all by counting samples one by one."""
    total = schedule.epochs * schedule.num_samples
    place, epochs = 0, []
    for _ in range(schedule.epochs):
        windows = []
        for offset in range(schedule.num_samples):
            if not windows or windows[-1][2] == windows[-1][1]:
                factor = 1
                for share, grown in schedule.growths:
                    if place * 100 >= round(share * 100) * total:
                        factor = grown
                windows.append([offset, schedule.global_batch_size * factor, 0])
            windows[-1][2] += 1
            place += 1
        epochs.append(windows)
    return epochs


@given(schedules)
def test_windows_and_steps_are_those_of_a_walk_over_the_samples(schedule):
    epochs, steps, first = walk(schedule), 0, {}
    for epoch, windows in enumerate(epochs):
        assert schedule.window_sizes(epoch) == tuple(size for _, size, _ in windows)
        taken = [w for w in windows if schedule.tail != "drop" or w[2] == w[1]]
        assert schedule.count_steps(epoch) == len(taken)
        for start, size, _ in windows:
            assert schedule.size_at(epoch, start) == size
        for _, size, _ in taken:
            first.setdefault(size, steps)
            steps += 1
    assert schedule.num_steps == steps
    assert schedule.growth_steps == tuple(first.get(g * schedule.global_batch_size) for _, g in schedule.growths)


@given(schedules, st.integers(0, 3))
def test_the_windows_of_an_epoch_are_its_permutation(schedule, seed):
    for epoch in range(schedule.epochs):
        whole = EpochOrder(schedule.num_samples, schedule.num_samples, seed, epoch).window(0)
        order = EpochOrder(schedule.num_samples, schedule.window_sizes(epoch), seed, epoch)
        windows = [order.window(number).tolist() for number in range(order.num_windows)]
        assert [index for window in windows for index in window] == whole.tolist()


@given(st.integers(1, 60), st.integers(1, 200), st.integers(1, 4), st.sampled_from(["keep", "drop", "pad"]))
def test_without_growths_steps_are_those_of_a_constant_batch(size, count, epochs, tail):
    schedule = BatchSchedule(global_batch_size=size, num_samples=count, epochs=epochs, tail=tail)
    wanted = count // size if tail == "drop" else -(-count // size)
    assert (schedule.count_steps(0), schedule.num_steps, schedule.marks) == (wanted, epochs * wanted, ())
    schedule.check()


def test_an_example_by_hand():
    """Half of 200 samples is the second epoch's begin; three quarters are inside it, where a step is under way."""
    schedule = BatchSchedule(global_batch_size=6, num_samples=100, epochs=2, growths=((0.5, 2), (0.75, 4)))
    assert schedule.marks == ((100, 12), (150, 24))
    assert schedule.window_sizes(0) == (6,) * 17
    assert schedule.window_sizes(1) == (12,) * 5 + (24, 24)
    assert (schedule.num_steps, schedule.growth_steps) == (24, (17, 22))
    assert [schedule.size_at(1, offset) for offset in (0, 49, 50)] == [12, 12, 24]
    schedule.check()


@pytest.mark.parametrize(("share", "total"), [(0.1, 30), (0.3, 10), (0.7, 10), (0.07, 100), (0.57, 100)])
def test_a_share_is_what_was_typed_and_not_what_a_float_makes_of_it(share, total):
    schedule = BatchSchedule(global_batch_size=1, num_samples=total, epochs=1, growths=((share, 2),))
    assert schedule.marks[0][0] == Fraction(str(share)) * total


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0.5:4,0.75:16", ((0.5, 4), (0.75, 16))),
        (" .25 : 2 ", ((0.25, 2),)),
        ("0.5:2, 0.6:3", ((0.5, 2), (0.6, 3))),
    ],
)
def test_growths_are_read_and_written(text, wanted):
    assert parse_growths(text) == wanted
    assert parse_growths(format_growths(wanted)) == wanted


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "--batch-growth '' is not understood"),
        ("0.5", "'0.5' is not understood at '0.5': use SHARE:FACTOR, as in 0.5:4,0.75:16"),
        ("0.5:4,", "is not understood at ''"),
        ("50%:4", "is not understood at '50%:4'"),
        ("0.5:1.5", "is not understood at '0.5:1.5'"),
        ("-0.5:2", "is not understood at '-0.5:2'"),
        ("0:4", "--batch-growth 0.0:4: 0.0 is not a share of the run; above 0 and below 1"),
        ("1:4", "1.0 is not a share of the run"),
        ("0.5:1", "1 times the first batch comes after 1 times"),
        ("0.5:4,0.5:8", "0.5 comes after 0.5"),
        ("0.5:4,0.4:8", "0.4 comes after 0.5"),
        ("0.5:4,0.75:4", "4 times the first batch comes after 4 times"),
    ],
)
def test_what_is_no_growth_is_refused(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_growths(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("factor", [2.0, True, "2"])
def test_a_factor_is_a_whole_number(factor):
    with pytest.raises(ConfigError, match="an integer is needed"):
        check_growths(((0.5, factor),))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"growths": ((0.5, 17),)}, "17 times the global batch of 6 is more than the 100 samples of an epoch"),
        ({"growths": ((0.99, 2),)}, "of 100 samples in all, no step has the growth at 0.99"),
        ({"growths": ((0.5, 2), (0.52, 4))}, "no step has the growth at 0.5:"),
        ({"growths": ((0.9, 4),), "tail": "drop"}, "no step has the growth at 0.9"),
    ],
)
def test_a_growth_that_would_never_be_is_refused(values, words):
    schedule = BatchSchedule(global_batch_size=6, num_samples=100, epochs=1, **values)
    with pytest.raises(ConfigError) as caught:
        schedule.check()
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["global_batch_size", "num_samples", "epochs"])
def test_a_run_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match="at least 1 of each"):
        BatchSchedule(**{"global_batch_size": 1, "num_samples": 1, "epochs": 1, name: 0})
