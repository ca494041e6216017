"""How right a prediction was, against arithmetic by hand."""

from __future__ import annotations

import math
import statistics

import pytest

from paceline.predict.judgement import GridPoint, judge, kendall_tau
from paceline.predict.plans import Estimate
from paceline.predict.simulate import SimulatedBucket, SimulatedStep
from paceline.units import MIB
from tests.unit.made_tuning import MadeJob

PLAIN_S = 0.5
# Two ranks a row; the medians are 1, 2 and 4.
TIMES_S = {1: (0.9, 1.0, 1.1), 2: (1.9, 2.0, 2.3), 4: (4.0, 4.0, 4.0)}


def guess(step_s, low_s=None, high_s=None, sizes=(MIB,)):
    step = SimulatedStep(tuple(map(SimulatedBucket, sizes)), 0.0, step_s, 0.0, 0.0, 0.0)
    low_s, high_s = step_s * 0.95 if low_s is None else low_s, step_s * 1.05 if high_s is None else high_s
    return Estimate((1,), step_s, low_s, high_s, step_s - PLAIN_S, step)


def measure(label, times_s, sizes=(MIB,)):
    return MadeJob().build_plan_step(label, times_s, bucket_bytes=sizes)


def point(cap_bytes, step_s, times_s=None, **limits):
    measured = None if times_s is None else measure(f"cap {cap_bytes}", times_s)
    return GridPoint(cap_bytes, guess(step_s, **limits), PLAIN_S, measured)


@pytest.fixture
def judged():
    return judge([point(1, 1.1, TIMES_S[1]), point(2, 1.8, TIMES_S[2]), point(4, 4.2, TIMES_S[4])])


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [
        ([(1, 1), (2, 2), (3, 3)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        ([(1, 1), (2, 3), (3, 2)], 1 / 3),
        # Of 6 pairs, the first with each other agree, 1 is a tie, and 2 disagree.
        ([(1, 1), (2, 2), (3, 2), (4, 1.5)], (3 - 2) / math.sqrt(6 * 5)),
        ([(1, 5), (2, 5), (3, 5)], None),
        ([(2, 1), (2, 2), (2, 3)], None),
        ([(1, 1)], None),
        ([], None),
    ],
)
def test_rank_correlation_by_hand(pairs, tau):
    assert kendall_tau(pairs) == (None if tau is None else pytest.approx(tau))
    assert kendall_tau([(y, x) for x, y in pairs]) == kendall_tau(pairs)


def test_ties_in_both_orders_count_once_on_each_side():
    # 10 pairs: one tie in x alone, one in y alone, one in both; of the other 7, 5 agree.
    pairs = [(1, 1), (1, 2), (2, 3), (2, 3), (3, 2)]
    assert kendall_tau(pairs) == pytest.approx((5 - 2) / math.sqrt((10 - 2) * (10 - 2)))


def test_errors_of_steps_and_of_what_communication_adds(judged):
    assert judged.errors == pytest.approx([0.1, -0.1, 0.05])
    assert judged.mape == pytest.approx(0.25 / 3)
    assert judged.max_error == pytest.approx(0.1)
    # Measured, communication adds 0.5, 1.5 and 3.5; predicted 0.6, 1.3 and 3.7.
    assert judged.exposed_error == pytest.approx((0.1 + 0.2 + 0.2) / 5.5)
    assert judged.exposed_step_error == pytest.approx((0.1 + 0.2 + 0.2) / 7.0)
    assert judged.kendall_tau == pytest.approx(1.0)


def test_coverage_is_the_share_of_points_in_their_intervals():
    points = [
        point(1, 1.1, TIMES_S[1], low_s=1.0, high_s=1.2),  # at its border
        point(2, 1.8, TIMES_S[2], low_s=1.7, high_s=1.9),
        point(4, 4.2, TIMES_S[4], low_s=3.0, high_s=5.0),
        point(8, 9.0),
    ]
    assert judge(points).coverage == pytest.approx(2 / 3)
    assert [p.is_covered for p in points] == [True, False, True, None]


def test_noise_is_the_half_width_of_a_median(judged):
    def by_hand(times_s):
        return 1.96 * 1.25 * statistics.stdev(times_s) / math.sqrt(3) / statistics.median(times_s)

    assert judged.noise == pytest.approx(sorted(map(by_hand, TIMES_S.values()))[1])
    assert judge([point(1, 1.0, (1.0,))]).noise == 0.0


@pytest.mark.parametrize(
    ("centers", "is_flat"), [((1.0, 1.0), True), ((1.0, 1.02), True), ((1.0, 1.2), False), ((1.2, 1.0, 1.1), False)]
)
def test_a_sweep_is_flat_within_twice_the_noise(centers, is_flat):
    # Noise of a median: 1.96 * 1.25 * 0.02 / sqrt(3) = 2.8 %.
    points = [
        point(number, 1.0, (0.98 * center, center, 1.02 * center)) for number, center in enumerate(centers, start=1)
    ]
    assert judge(points).noise == pytest.approx(1.96 * 1.25 * 0.02 / math.sqrt(3))
    assert judge(points).is_flat == is_flat


@pytest.mark.parametrize(("share", "is_flat"), [(0.02, False), (0.06, True)])
def test_without_measured_steps_the_intervals_say_what_is_flat(share, is_flat):
    points = [point(number, s, low_s=s * (1 - share), high_s=s * (1 + share)) for number, s in enumerate((1.0, 1.1))]
    judged = judge(points)
    assert judged.is_flat == is_flat
    assert judged.noise == 0.0 and judged.measured == [] and judged.best_measured is None
    for name in ("mape", "max_error", "exposed_error", "exposed_step_error", "coverage", "kendall_tau", "regret"):
        assert getattr(judged, name) is None, name
    assert judged.gain is None


def test_the_best_of_each_and_what_the_choice_of_one_for_the_other_costs():
    judged = judge([point(1, 1.5, (1.0,) * 3), point(2, 1.2, (1.3,) * 3), point(4, 1.9, (2.0,) * 3)])
    assert (judged.best_predicted.cap_bytes, judged.best_measured.cap_bytes) == (2, 1)
    assert judged.regret == pytest.approx(0.3)


def test_confirmation_decides_regret_and_gain_step_by_step():
    confirmed = [
        measure("default", (1.0, 2.0, 4.0)), measure("recommended", (0.9, 1.8, 3.6)), measure("cap 1", (1.0, 1.6, 4.0)),
    ]  # fmt: skip
    judged = judge([point(1, 1.0, TIMES_S[1])], confirmed, "recommended")
    assert judged.regret == pytest.approx(1.8 / 1.6 - 1)
    # Each step against its neighbour: the spread from 1 to 4 is none of theirs.
    assert judged.gain.value == pytest.approx(0.9) and judged.gain.noise == pytest.approx(0.0)
    kept = judge([point(1, 1.0, TIMES_S[1])], confirmed)
    assert kept.gain is None and kept.regret == pytest.approx(2.0 / 1.6 - 1)


def test_a_layout_is_the_simulated_one_or_not():
    same, other = (
        GridPoint(1, guess(1.0, sizes=(MIB, 4)), PLAIN_S, measure("", (1.0,), sizes)) for sizes in ((MIB, 4), (MIB,))
    )
    assert same.same_layout and not other.same_layout
    assert point(1, 1.0).same_layout
    assert (point(1, 1.0).error, point(1, 1.0).exposed_s, point(1, 1.0).measured_s) == (None, None, None)
