"""Learning rates against arithmetic written another way."""

import itertools
import math

import pytest

from paceline.errors import ConfigError
from paceline.training.schedules import SCHEDULES, Schedule, scale_rate

PEAK, STEPS = 0.4, 10
SMOOTH = tuple(shape for shape in SCHEDULES if shape != "piecewise")


def rates(shape, warmup=0, steps=STEPS):
    schedule = Schedule(shape=shape, peak=PEAK, num_steps=steps, warmup_steps=warmup)
    return [schedule.rate(step) for step in range(steps + 1)]


def test_constant_is_constant():
    assert rates("constant") == [PEAK] * (STEPS + 1)


def test_linear_falls_in_equal_steps_to_zero():
    found = rates("linear")
    assert found[0] == PEAK and found[-1] == 0.0
    assert [a - b for a, b in itertools.pairwise(found)] == pytest.approx([PEAK / STEPS] * STEPS)


def test_cosine_goes_half_round_a_circle():
    """A point that turns by equal angles: its height over the lowest place, as a share of the diameter."""
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
    with pytest.raises(ConfigError, match="unknown schedule 'square': known are constant, cosine, linear, piecewise"):
        Schedule(shape="square", peak=1.0, num_steps=1)


def test_piecewise_drops_at_shares_of_the_run():
    schedule = Schedule(shape="piecewise", peak=PEAK, num_steps=20, drops=(0.5, 0.75, 0.9))
    wanted = [PEAK] * 10 + [PEAK / 10] * 5 + [PEAK / 100] * 3 + [PEAK / 1000] * 5
    assert [schedule.rate(step) for step in range(23)] == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("num_steps", [7, 100, 1000])
def test_a_drop_is_at_the_first_step_that_is_not_before_its_share(num_steps):
    """Shares k/100 as they are typed, against whole numbers: 0.55 * 100 is above 55 in binary."""
    for percent in range(1, 100):
        schedule = Schedule(shape="piecewise", peak=1.0, num_steps=num_steps, drops=(percent / 100,))
        found = [schedule.rate(step) for step in range(num_steps)]
        assert found == [0.1 if 100 * step >= percent * num_steps else 1.0 for step in range(num_steps)]


def test_drops_count_from_the_start_of_the_run():
    schedule = Schedule(shape="piecewise", peak=0.8, num_steps=10, warmup_steps=4, drops=(0.6,))
    wanted = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.08, 0.08, 0.08, 0.08]
    assert [schedule.rate(step) for step in range(10)] == pytest.approx(wanted)


class Groups:
    """All that a schedule needs of an optimizer."""

    def __init__(self):
        self.param_groups = [{"lr": 7.0}, {"lr": 8.0, "weight_decay": 0.1}]


def test_a_schedule_sets_the_rate_of_all_groups():
    optimizer = Groups()
    assert Schedule(shape="linear", peak=PEAK, num_steps=STEPS).apply(optimizer, 5) == pytest.approx(PEAK / 2)
    assert optimizer.param_groups == [{"lr": PEAK / 2}, {"lr": PEAK / 2, "weight_decay": 0.1}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peak": -0.1}, "peak -0.1: a finite number from 0"),
        ({"peak": math.nan}, "peak nan"),
        ({"num_steps": 0}, "0 steps, 0 of warm-up"),
        ({"warmup_steps": -1}, "10 steps, -1 of warm-up"),
        ({"drops": ()}, "schedule piecewise with drops .*: drops belong to piecewise, which needs them"),
        ({"shape": "cosine"}, "schedule cosine with drops"),
        ({"drops": (0.5, 0.4)}, "drops 0.5,0.4: increasing shares"),
        ({"drops": (0.0,)}, "drops 0.0: increasing shares"),
        ({"warmup_steps": 6}, "a drop at 0.5 of 10 steps, inside the warm-up of 6"),
    ],
)
def test_what_cannot_be_is_refused(changes, words):
    fields = {"shape": "piecewise", "peak": PEAK, "num_steps": STEPS, "drops": (0.5,)}
    Schedule(**fields)
    with pytest.raises(ConfigError, match=words):
        Schedule(**(fields | changes))


@pytest.mark.parametrize(("rule", "wanted"), [("none", 0.1), ("linear", 3.2), ("sqrt", 0.1 * 2**2.5)])
def test_rates_follow_the_batch(rule, wanted):
    assert scale_rate(0.1, 8192, 256, rule) == pytest.approx(wanted, rel=1e-14)
    assert scale_rate(wanted, 256, 8192, rule) == pytest.approx(0.1, rel=1e-14)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0.1, 2, 1, "cubic"), "unknown scaling rule 'cubic': known are none, linear, sqrt"),
        ((-0.1, 2, 1, "none"), "rate -0.1"),
        ((0.1, 0, 1, "none"), "a batch of 0 from a batch of 1"),
        ((0.1, 1, 0, "linear"), "a batch of 1 from a batch of 0"),
    ],
)
def test_bad_scaling_is_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        scale_rate(*arguments)
