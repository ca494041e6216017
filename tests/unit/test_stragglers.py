"""The slowest of many: closed forms where there are any, and what must hold for any spread."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.predict.stragglers import estimate_maximum, estimate_spread, estimate_wait


@pytest.mark.parametrize("count", [1, 2, 8, 1000, 16384])
def test_the_largest_of_uniform_and_of_exponential_values(count):
    assert estimate_maximum(lambda p: p, count) == pytest.approx(count / (count + 1), rel=1e-3)
    harmonic = math.fsum(1 / number for number in range(1, count + 1))
    assert estimate_maximum(lambda p: -math.log1p(-p), count) == pytest.approx(harmonic, rel=2e-3)


def test_a_lognormal_wait_is_what_drawing_it_gives():
    sigma = 0.05
    spread = math.sqrt((math.exp(sigma**2) - 1) * math.exp(sigma**2))
    source = random.Random(1)
    drawn = [max(source.lognormvariate(0, sigma) for _ in range(32)) for _ in range(4000)]
    expected = statistics.fmean(drawn) - math.exp(sigma**2 / 2)
    assert estimate_wait(spread, 32) == pytest.approx(expected, rel=0.02)


@given(st.floats(0, 0.5), st.floats(0, 0.4), st.integers(1, 5000), st.integers(0, 5000))
def test_a_wait_grows_with_the_spread_and_with_the_ranks(spread, more, count, others):
    wait = estimate_wait(spread, count)
    assert wait >= 0 and estimate_wait(spread, 1) == 0 == estimate_wait(0.0, count)
    assert wait <= estimate_wait(spread, count + others) + 1e-12
    assert wait <= estimate_wait(spread + more, count) + 1e-12


@pytest.mark.parametrize(("call", "words"), [((0.1, 0), "largest of 0"), ((-0.1, 2), "-10%"), ((1.0, 2), "100%")])
def test_an_impossible_spread_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        estimate_wait(*call)


def test_a_spread_comes_from_repetitions_and_not_from_one_outlier():
    source = random.Random(2)
    times = [source.gauss(1.0, 0.02) for _ in range(4000)]
    assert estimate_spread(times) == pytest.approx(0.02, rel=0.1)
    assert estimate_spread([*times, 100.0]) == pytest.approx(0.02, rel=0.1)
