"""Plan comparison: its tests, its intervals, dropped plans, and its error rate on synthetic noise."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from paceline.predict.race import Interval, Limit, Race, estimate_ratio, is_look, judge_race, list_looks, spend


def make_times(source, factors, rounds, noise=0.1, spell=0.3):
    """Times of plans with true step times of these multiples of 10 ms. A slow spell affects all plans of a round."""
    times = {label: [] for label in factors}
    slow = 0.0
    for _ in range(rounds):
        slow = 0.9 * slow + source.gauss(0, spell)
        for label, factor in factors.items():
            hiccup = 3.0 if source.random() < 0.02 else 1.0
            times[label].append(0.010 * factor * math.exp(slow + source.gauss(0, noise)) * hiccup)
    return times


def race_live(times, default="default"):
    """Compare plans as in a real run: test at intervals until decided; a dropped plan takes no further turns."""
    running, rounds = dict.fromkeys(times, True), len(times[default])
    taken = {label: [] for label in times}
    for number in range(1, rounds + 1):
        for label in (label for label, runs in running.items() if runs):
            taken[label].append(times[label][number - 1])
        if is_look(number):
            race = judge_race(taken, default)
            running = {label: label in (*race.left, default) for label in times}
            if race.is_decided:
                return race, taken
    return judge_race(taken, default), taken


def alternate(values):
    """The same values, alternating between those below and those above their median."""
    half = len(values) // 2
    pairs = zip(values[:half], values[-half:], strict=True)
    return [value for pair in pairs for value in pair] + list(values[half : len(values) - half])


def test_looks_double_and_the_end_is_one():
    assert list_looks(0) == []
    assert list_looks(5) == [5]
    assert list_looks(16) == [16]
    assert list_looks(70) == [16, 32, 64, 70]
    assert [number for number in range(1, 130) if is_look(number)] == [16, 32, 64, 128]


@pytest.mark.parametrize("num_pairs", [1, 5])
def test_all_looks_together_spend_five_percent(num_pairs):
    spent = sum(2 * num_pairs * spend(look, num_pairs) for look in range(1, 100_000))
    assert spent == pytest.approx(0.05, rel=1e-4) and spent < 0.05


def test_an_interval_consists_of_order_statistics():
    mine, theirs = [math.exp(k / 100) for k in alternate(range(-10, 11))], [1.0] * 21
    # Among 21 fair coins, at most 5 are heads in 1.33 % of cases, and at most 6 in 3.9 %.
    found = estimate_ratio(mine, theirs, 0.0134)
    assert found.value == pytest.approx(1.0)
    assert (found.low, found.high) == pytest.approx((math.exp(-0.05), math.exp(0.05)))
    wider = estimate_ratio(mine, theirs, 0.0132)
    assert (wider.low, wider.high) == pytest.approx((math.exp(-0.06), math.exp(0.06)))
    assert estimate_ratio(mine[::-1], theirs, 0.0134) == found
    assert estimate_ratio(sorted(mine), theirs, 0.0134).high > found.high  # with drift, fewer of them are independent


def test_correlated_noise_widens_the_interval():
    """Without a wider interval, 41 % of these comparisons declare a winner."""
    source, false, count = random.Random(5), 0, 60
    for _ in range(count):
        lasting, times = {"default": 0.0, "twin": 0.0}, {"default": [], "twin": []}
        for _ in range(256):
            for label in times:
                lasting[label] = 0.8 * lasting[label] + 0.6 * source.gauss(0, 0.03)
                times[label].append(math.exp(lasting[label] + source.gauss(0, 0.03)))
        false += race_live(times)[0].to_default["twin"].is_clear
    assert false / count < 0.25


def test_too_few_rounds_give_no_interval():
    found = estimate_ratio([1.0, 1.1], [1.0, 1.0], 0.01)
    assert (found.low, found.high) == (0.0, math.inf) and not found.is_clear and not found.is_flat
    race = judge_race({"default": [1.0, 1.0], "a": [0.5, 0.5]}, "default")
    assert race.verdict == "undecided" and race.winner == "default" and race.rounds_to_decide >= 16
    assert race.regret[2] == math.inf


@pytest.mark.parametrize("n", [1000, 1001])
def test_many_rounds_have_the_interval_of_the_normal_distribution(n):
    found = estimate_ratio([math.exp(k / n) for k in alternate(range(n))], [1.0] * n, 0.025)
    half = 1.96 / 2 / math.sqrt(n)
    assert math.log(found.low) == pytest.approx(0.5 - half, abs=3 / n)
    assert math.log(found.high) == pytest.approx(0.5 + half, abs=3 / n)


def test_intervals_cover_the_true_median_as_often_as_promised():
    source = random.Random(1)
    held = 0
    for _ in range(2000):
        mine = [math.exp(source.expovariate(5)) for _ in range(31)]  # skewed; the true median is log(2) / 5
        found = estimate_ratio(mine, [1.0] * 31, 0.025)
        held += math.log(found.low) <= math.log(2) / 5 <= math.log(found.high)
    assert 0.945 <= held / 2000 <= 0.985


def test_a_slower_plan_is_dropped_and_the_default_runs_on():
    source = random.Random(2)
    times = make_times(source, {"default": 1.3, "fast": 1.0, "slow": 2.0}, 64, noise=0.05)
    race, taken = race_live(times)
    assert race.verdict == "use" and race.winner == race.leader == "fast" and race.left == ("fast",)
    assert 1 - race.gain.value == pytest.approx(1 - 1 / 1.3, abs=0.05) and race.gain.high < 1
    assert race.regret == (0.0, 0.0, 0.0)
    assert len(taken["default"]) == len(taken["fast"]) == 16


def test_the_comparison_continues_after_the_default_is_beaten():
    source = random.Random(3)
    times = make_times(source, {"default": 1.5, "a": 1.0, "b": 1.03}, 2000, noise=0.05)
    race, taken = race_live(times)
    assert race.verdict == "use" and race.winner == "a" and "default" not in race.left
    assert len(taken["default"]) == race.num_rounds > 16
    assert race.is_decided and race.regret[2] < 0.02


def test_equal_plans_are_flat_once_that_is_shown():
    source = random.Random(4)
    times = make_times(source, dict.fromkeys(("default", "a", "b"), 1.0), 3000, noise=0.05)
    early = judge_race({label: found[:16] for label, found in times.items()}, "default")
    assert early.verdict == "undecided" and not early.is_decided and early.rounds_to_decide > 100
    race, _ = race_live(times)
    assert race.verdict == "flat" and race.winner == "default" and race.regret[2] <= 0.011
    assert all(interval.is_flat for interval in race.to_default.values())


def test_the_default_is_best_where_all_others_are_slower():
    source = random.Random(5)
    race, _ = race_live(make_times(source, {"default": 1.0, "a": 1.2, "b": 1.4}, 400))
    assert race.verdict == "default" and race.winner == "default" and race.regret == (0.0, 0.0, 0.0)


def test_the_same_steps_decide_the_same_again():
    source = random.Random(6)
    times = make_times(source, {"default": 1.1, "a": 1.0, "b": 1.05, "c": 1.4}, 600)
    race, taken = race_live(times)
    assert judge_race(taken, "default") == race


def test_a_single_plan_is_flat():
    race = judge_race({"default": [1.0] * 20}, "default")
    assert race.verdict == "flat" and race.is_decided and race.gain == Interval(1.0, 1.0, 1.0)


def make_race(a=(0.97, 0.95, 1.01), left=("default", "a"), limit=Limit()):
    """A comparison led by `a` after 100 rounds."""
    same, there = Interval(1.0, 1.0, 1.0), Interval(*a)
    ratios = {("default", "default"): same, ("a", "a"): same, ("a", "default"): there}
    return Race("default", "a", left, ratios | {("default", "a"): Interval(1 / a[0], 1 / a[2], 1 / a[1])}, 100, limit)


def test_undecided_says_how_far_from_the_best_the_default_may_be():
    race = make_race()
    assert race.verdict == "undecided" and race.winner == "default"
    assert race.regret == pytest.approx((1 / 0.97 - 1, 0.0, 1 / 0.95 - 1))
    # The half-width must shrink from 3.06 % to the 3.05 % of the difference.
    assert race.rounds_to_decide == 16
    unclear = make_race(a=(1.0, 0.95, 1.05))
    assert unclear.rounds_to_decide == pytest.approx(100 * ((0.05 / 0.00995) ** 2 - 1), rel=0.01)


def test_a_default_that_is_best_within_one_percent_has_a_regret_within_it():
    race = make_race(a=(0.999, 0.992, 1.03))
    assert race.verdict == "default" and race.regret[2] == pytest.approx(1 / 0.992 - 1) and race.regret[2] < 0.01


def test_a_decision_at_a_look_is_final():
    """For 16 rounds the plan is 10 % faster; then come uninformative rounds and a stricter test."""
    early = {"default": [1.0] * 16, "a": [0.9] * 16}
    assert judge_race(early, "default").verdict == "use"
    later = {"default": [1.0] * 17, "a": [0.9] * 16 + [1.2]}
    race = judge_race(later, "default")
    assert race.verdict == "use" and race.left == ("a",) and race.gain.high < 1


def test_a_dropped_plan_keeps_its_result():
    source = random.Random(9)
    race, taken = race_live(make_times(source, {"default": 1.0, "a": 1.005, "slow": 1.5}, 1500, noise=0.05))
    assert len(taken["slow"]) < race.num_rounds and race.ratios["slow", "default"].low > 1


def test_equal_plans_are_rarely_distinguished():
    """False winners between equal plans: the promise is at most 5 %."""
    source, wrong = random.Random(7), 0
    for _ in range(100):
        race, _ = race_live(make_times(source, dict.fromkeys(("default", "a", "b"), 1.0), 128))
        wrong += race.verdict == "use"
    assert wrong <= 5


def test_a_true_gain_is_found():
    """5 % faster in noise of 10 %: at least 38 of 40 are decided within 1,024 rounds."""
    source, found, gains = random.Random(8), 0, []
    for _ in range(40):
        race, _ = race_live(make_times(source, {"default": 1.0, "better": 0.95, "worse": 1.05}, 1024))
        if race.verdict == "use" and race.winner == "better":
            found += 1
            gains.append(1 - race.gain.value)
            assert race.gain.low <= 0.97
    assert found >= 38
    assert statistics.median(gains) == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize(
    ("share", "a", "verdict"),
    [
        (0.008, (1.0, 0.95, 1.05), "flat"),
        (0.02, (1.0, 0.95, 1.05), "undecided"),  # another plan could gain
        (0.008, (0.97, 0.95, 1.01), "undecided"),  # the comparison makes that look unlikely
        (0.008, (0.97, 0.95, 0.99), "use"),  # the comparison shows otherwise
        (0.008, (1.05, 1.02, 1.08), "default"),  # and that the other plan is slower
        (0.008, (1.005, 1.001, 1.02), "flat"),
        (0.02, (1.005, 1.001, 1.02), "default"),
    ],
)
def test_few_rounds_are_flat_if_no_plan_can_save_one_percent(share, a, verdict):
    race = make_race(a, limit=Limit(share, 0.015))
    assert race.verdict == verdict and not race.is_level
    assert "0.8%" in str(Limit(0.008, 0.015)) and "1.5%" in str(Limit(0.008, 0.015))
