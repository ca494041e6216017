"""Learning rates and global batches are pure functions of the step."""

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.training.schedules import (
    SCHEDULES,
    BatchSchedule,
    Schedule,
    check_growths,
    format_growths,
    parse_growths,
)
from paceline.workloads.data.sharding import EpochOrder

PEAK, STEPS = 0.4, 10
SMOOTH = tuple(shape for shape in SCHEDULES if shape != "piecewise")


def rates(shape, warmup=0, steps=STEPS):
    schedule = Schedule(shape=shape, peak=PEAK, num_steps=steps, warmup_steps=warmup)
    return [schedule.rate(step) for step in range(steps + 1)]


def test_a_rate_is_set_in_every_parameter_group():
    schedule = Schedule(shape="linear", peak=PEAK, num_steps=STEPS)
    optimizer = SimpleNamespace(param_groups=[{"lr": 1.0}, {"lr": 7.0}])
    assert schedule.apply(optimizer, 4) == schedule.rate(4)
    assert [group["lr"] for group in optimizer.param_groups] == [schedule.rate(4)] * 2


def test_a_constant_rate_stays_constant():
    assert rates("constant") == [PEAK] * (STEPS + 1)


def test_linear_falls_in_equal_steps_to_zero():
    found = rates("linear")
    assert found[0] == PEAK and found[-1] == 0.0
    assert [a - b for a, b in itertools.pairwise(found)] == pytest.approx([PEAK / STEPS] * STEPS)


def test_cosine_follows_half_a_circle():
    """A point turning by equal angles: its height above the lowest point, as a fraction of the diameter."""
    turn, point = complex(math.cos(math.pi / STEPS), math.sin(math.pi / STEPS)), 1 + 0j
    for rate in rates("cosine"):
        assert rate == pytest.approx(PEAK * (point.real + 1) / 2, abs=1e-12)
        point *= turn


@pytest.mark.parametrize("shape", SMOOTH)
def test_warmup_climbs_to_the_peak_and_then_the_shape_begins(shape):
    found = rates(shape, warmup=4)
    assert found[:4] == pytest.approx([PEAK / 4, PEAK / 2, 3 * PEAK / 4, PEAK])
    assert found[4:] == pytest.approx(rates(shape, steps=STEPS - 4))


@pytest.mark.parametrize("shape", SMOOTH)
@pytest.mark.parametrize("warmup", [STEPS, STEPS + 5])
def test_a_run_that_ends_in_its_warmup_only_climbs(shape, warmup):
    found = rates(shape, warmup)[:STEPS]
    assert found == pytest.approx([PEAK * (step + 1) / warmup for step in range(STEPS)])


@pytest.mark.parametrize("shape", SMOOTH)
def test_no_rate_is_negative_after_the_end(shape):
    schedule = Schedule(shape=shape, peak=PEAK, num_steps=STEPS)
    assert schedule.rate(STEPS + 7) == pytest.approx(PEAK if shape == "constant" else 0.0)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ConfigError, match=r"'square'.*constant, cosine, linear, piecewise"):
        Schedule(shape="square", peak=1.0, num_steps=1)


def test_piecewise_drops_at_shares_of_the_run():
    schedule = Schedule(shape="piecewise", peak=PEAK, num_steps=20, drops=(0.5, 0.75, 0.9))
    wanted = [PEAK] * 10 + [PEAK / 10] * 5 + [PEAK / 100] * 3 + [PEAK / 1000] * 5
    assert [schedule.rate(step) for step in range(23)] == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("num_steps", [7, 100, 1000])
def test_a_drop_is_at_the_first_step_that_is_not_before_its_share(num_steps):
    """Compare fractions k/100, as users type them, with integers: 0.55 * 100 is above 55 in binary."""
    for percent in range(1, 100):
        schedule = Schedule(shape="piecewise", peak=1.0, num_steps=num_steps, drops=(percent / 100,))
        found = [schedule.rate(step) for step in range(num_steps)]
        assert found == [0.1 if 100 * step >= percent * num_steps else 1.0 for step in range(num_steps)]


def test_drops_count_from_the_start_of_the_run():
    schedule = Schedule(shape="piecewise", peak=0.8, num_steps=10, warmup_steps=4, drops=(0.6,))
    wanted = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.08, 0.08, 0.08, 0.08]
    assert [schedule.rate(step) for step in range(10)] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak": -0.1}, "peak -0.1: must be finite and at least 0"),
        ({"peak": math.nan}, "peak nan"),
        ({"num_steps": 0}, "0 steps with 0 warm-up"),
        ({"warmup_steps": -1}, "10 steps with -1 warm-up"),
        ({"drops": ()}, "drops none with schedule piecewise"),
        ({"shape": "cosine"}, "drops 0.5 with schedule cosine"),
        ({"drops": (0.5, 0.4)}, "drops 0.5,0.4: must be increasing fractions"),
        ({"drops": (0.0,)}, "drops 0.0: must be increasing fractions"),
        ({"warmup_steps": 6}, "a drop at 0.5 of 10 steps, inside the warm-up of 6"),
    ],
)
def test_impossible_values_are_refused(changes, words):
    fields = {"shape": "piecewise", "peak": PEAK, "num_steps": STEPS, "drops": (0.5,)}
    Schedule(**fields)
    with pytest.raises(ConfigError, match=words):
        Schedule(**(fields | changes))


@st.composite
def growths(draw):
    """Fractions of a run as people write them, in hundredths, with increasing factors."""
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
    """The windows of each epoch as (start, size, samples it holds), all by counting samples one by one."""
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


def test_the_growths_of_a_run_of_a_million_steps():
    schedule = BatchSchedule(global_batch_size=8, num_samples=50_000, epochs=300, growths=((0.3, 2), (0.6, 4)))
    assert schedule.growth_steps == (562_500, 843_750) and schedule.num_steps == 1_031_310


def test_an_example_by_hand():
    """Half of 200 samples is the start of the second epoch; three quarters lie in the middle of one of its steps."""
    schedule = BatchSchedule(global_batch_size=6, num_samples=100, epochs=2, growths=((0.5, 2), (0.75, 4)))
    assert schedule.marks == ((100, 12), (150, 24))
    assert schedule.window_sizes(0) == (6,) * 17
    assert schedule.window_sizes(1) == (12,) * 5 + (24, 24)
    assert (schedule.num_steps, schedule.growth_steps) == (24, (17, 22))
    schedule.check()


@pytest.mark.parametrize(("share", "total"), [(0.1, 30), (0.3, 10), (0.7, 10), (0.07, 100), (0.57, 100)])
def test_a_share_is_the_typed_decimal_and_not_its_float(share, total):
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
        ("", "--batch-growth '' cannot be parsed"),
        ("0.5", "'0.5' cannot be parsed at '0.5': use SHARE:FACTOR, as in 0.5:4,0.75:16"),
        ("0.5:4,", "cannot be parsed at ''"),
        ("50%:4", "cannot be parsed at '50%:4'"),
        ("0.5:1.5", "cannot be parsed at '0.5:1.5'"),
        ("-0.5:2", "cannot be parsed at '-0.5:2'"),
        ("0:4", "--batch-growth 0.0:4: 0.0 is not a fraction of the run"),
        ("1:4", "1.0 is not a fraction of the run"),
        ("0.5:1", "factor 1 comes after 1"),
        ("0.5:4,0.5:8", "0.5 comes after 0.5"),
        ("0.5:4,0.4:8", "0.4 comes after 0.5"),
        ("0.5:4,0.75:4", "factor 4 comes after 4"),
    ],
)
def test_malformed_growths_are_refused(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_growths(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("factor", [2.0, True, "2"])
def test_a_factor_is_a_whole_number(factor):
    with pytest.raises(ConfigError, match="integer"):
        check_growths(((0.5, factor),))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"growths": ((0.5, 17),)}, "17 x 6 is more than the 100 samples of an epoch"),
        ({"growths": ((0.99, 2),)}, "the growth at 0.99 never"),
        ({"growths": ((0.5, 2), (0.52, 4))}, "the growth at 0.5 never"),
        ({"growths": ((0.9, 4),), "tail": "drop"}, "the growth at 0.9 never"),
    ],
)
def test_a_growth_that_never_takes_effect_is_refused(values, words):
    schedule = BatchSchedule(global_batch_size=6, num_samples=100, epochs=1, **values)
    with pytest.raises(ConfigError) as caught:
        schedule.check()
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["global_batch_size", "num_samples", "epochs"])
def test_an_empty_run_is_refused(name):
    with pytest.raises(ConfigError, match="at least 1"):
        BatchSchedule(**{"global_batch_size": 1, "num_samples": 1, "epochs": 1, name: 0})
