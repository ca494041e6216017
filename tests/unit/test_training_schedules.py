"""Learning rates against arithmetic written another way."""

import itertools
import math

import pytest

from paceline.errors import ConfigError
from paceline.training.schedules import SCHEDULES, Schedule

PEAK, STEPS = 0.4, 10


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


@pytest.mark.parametrize("shape", SCHEDULES)
def test_warmup_climbs_to_the_peak_and_then_the_shape_begins(shape):
    found = rates(shape, warmup=4)
    assert found[:4] == pytest.approx([PEAK / 4, PEAK / 2, 3 * PEAK / 4, PEAK])
    assert found[4:] == pytest.approx(rates(shape, steps=STEPS - 4))


@pytest.mark.parametrize("shape", SCHEDULES)
@pytest.mark.parametrize("warmup", [STEPS, STEPS + 5])
def test_a_run_that_ends_in_its_warmup_only_climbs(shape, warmup):
    found = rates(shape, warmup)[:STEPS]
    assert found == pytest.approx([PEAK * (step + 1) / warmup for step in range(STEPS)])


@pytest.mark.parametrize("shape", SCHEDULES)
def test_no_rate_is_negative_after_the_end(shape):
    schedule = Schedule(shape=shape, peak=PEAK, num_steps=STEPS)
    assert schedule.rate(STEPS + 7) == pytest.approx(PEAK if shape == "constant" else 0.0)


def test_an_unknown_shape_is_refused():
    with pytest.raises(ConfigError, match="unknown schedule 'square': known are constant, cosine, linear"):
        Schedule(shape="square", peak=1.0, num_steps=1)
