"""Goodput: the formulas against a simulation, their limits, and the best interval."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.predict.goodput import (
    Faults,
    Policy,
    average_costs,
    build_policies,
    count_spares,
    estimate_goodput,
    estimate_save_interval,
    is_ahead,
    simulate_faults,
)
from paceline.records.kinds import CostRecord

RESTART = Policy("restart", mtbf_s=300.0, save_s=0.5, step_s=0.25, restart_s=9.0)
COSTS = {"step": 0.2, "save": 0.5, "write": 2.0, "detect": 0.5, "restart": 10.0, "spare": 2.0, "shrink": 1.0}


def make_costs(**changes):
    """Costs that the user typed, which carry no uncertainty."""
    return [
        CostRecord(name=name, seconds=(seconds,), source="imported")
        for name, seconds in (COSTS | changes).items()
        if seconds is not None
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"write_s": 4.0},
        {"write_s": 20.0},  # longer than the interval: the next save waits for it
        {"write_s": 40.0, "mtbf_s": 60.0},  # after a restart, the first save does not wait
        {"write_s": 40.0, "mtbf_s": 60.0, "lost": 0.3, "takeover_s": 2.0},
        {"detect_s": 3.0, "wait_s": 30.0},
        {"mtbf_s": 30.0, "detect_s": 1.0},  # faults often hit the recovery
        {"lost": 0.1, "takeover_s": 2.0, "detect_s": 0.5, "write_s": 4.0},
        {"lost": 0.3, "takeover_s": 5.0, "slower_s": 3.0, "mtbf_s": 40.0},
        {"lost": 0.5, "takeover_s": 1.0, "step_s": 5.0, "save_s": 3.0, "mtbf_s": 60.0},
    ],
    ids=str,
)
def test_the_sums_agree_with_a_simulation(changes):
    policy, interval_s = replace(RESTART, **changes), 15.0
    source = random.Random(7)
    runs = [simulate_faults(policy, interval_s, 1000 * policy.mtbf_s, source) for _ in range(20)]
    shares = [run.share for run in runs]
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    assert abs(statistics.fmean(shares) - policy.estimate_share(interval_s)) < 3.5 * error
    assert error < 0.01


@pytest.mark.parametrize(
    "changes", [{}, {"write_s": 4.0}, {"mtbf_s": 20.0, "write_s": 4.0}, {"write_s": 40.0}], ids=str
)
def test_the_work_lost_by_a_fault_agrees_with_a_simulation(changes):
    policy, interval_s = replace(RESTART, restart_s=0.0, **changes), 15.0  # no fault can occur during a restart
    run = simulate_faults(policy, interval_s, 20_000 * policy.mtbf_s, random.Random(3))
    assert policy.estimate_lost_s(interval_s) == pytest.approx(run.lost_s / run.num_faults, rel=0.03)


def test_without_a_background_write_it_is_dalys_formula():
    policy, interval_s = replace(RESTART, mtbf_s=100.0), 12.0
    mtbf_s, save_s, restart_s = 100.0, 0.5, 9.0
    period_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + save_s) / mtbf_s)
    assert policy.estimate_share(interval_s) == pytest.approx(interval_s / period_s, rel=1e-12)


def test_with_rare_faults_only_saves_cost_time():
    policy = replace(RESTART, mtbf_s=1e15, write_s=3.0, detect_s=1.0)
    assert policy.estimate_share(10.0) == pytest.approx(10.0 / 10.5, rel=1e-9)
    assert replace(policy, lost=0.05, takeover_s=2.0).estimate_share(10.0) == pytest.approx(10.0 / 10.5, rel=1e-9)
    shares = [replace(RESTART, mtbf_s=10.0**n).estimate_share(60.0) for n in range(1, 12)]
    assert shares == sorted(shares) and shares[-1] < 60.0 / 60.5
    best = replace(RESTART, mtbf_s=1e12)
    assert 1 - 1e-5 < best.estimate_share(best.find_best_interval()) < 1


@pytest.mark.parametrize("mtbf_s", [1e-9, 1e-3, 0.1, 1.0])
@pytest.mark.parametrize("lost", [1.0, 0.05])
def test_frequent_faults_leave_no_progress_and_do_not_overflow(mtbf_s, lost):
    policy = replace(RESTART, mtbf_s=mtbf_s, lost=lost, takeover_s=2.0, restart_s=1000.0)
    assert 0 <= policy.estimate_share(policy.find_best_interval()) < 0.3


@pytest.mark.parametrize(
    "changes",
    [{}, {"mtbf_s": 20.0}, {"mtbf_s": 1e6}, {"lost": 0.05, "takeover_s": 3.0}, {"lost": 0.2, "mtbf_s": 60.0}],
    ids=str,
)
def test_the_best_interval_agrees_with_a_search(changes):
    policy = replace(RESTART, write_s=1.0, **changes)
    best_s = policy.find_best_interval()
    tried = [policy.write_s * 1.01**n for n in range(2000)]
    assert best_s == pytest.approx(max(tried, key=policy.estimate_share), rel=0.011)
    low_s, high_s = policy.find_good_intervals(best_s)
    assert low_s < best_s < high_s
    assert all(policy.estimate_share(x) >= policy.estimate_share(best_s) - 0.00101 for x in (low_s, high_s))


def test_the_best_interval_depends_only_on_the_stall_and_the_faults():
    best_s = RESTART.find_best_interval()
    for changes in ({"restart_s": 100.0}, {"detect_s": 5.0}, {"write_s": 3.0}, {"wait_s": 50.0}):
        assert replace(RESTART, **changes).find_best_interval() == pytest.approx(best_s, rel=1e-3)
    assert estimate_save_interval([0.4, 0.6], 0.0, 300.0) == pytest.approx(best_s, rel=1e-3)
    x = best_s / 300.0
    assert 1 - x == pytest.approx(math.exp(-x - 0.5 / 300.0), rel=1e-4)  # the derivative is 0 here
    rare = replace(RESTART, mtbf_s=1e9)
    assert rare.find_best_interval() == pytest.approx(math.sqrt(2 * 0.5 * 1e9), rel=1e-3)  # Young's formula


def test_saves_are_rarer_if_few_faults_need_a_checkpoint():
    often_s, rarely_s = (estimate_save_interval([0.5], 0.0, 1e7, lost) for lost in (1.0, 0.05))
    assert rarely_s == pytest.approx(often_s * math.sqrt(20), rel=0.01)
    policy = Policy("spare", 1e7, 0.5, lost=0.05, takeover_s=5.0, detect_s=1.0, restart_s=60.0)
    assert policy.find_best_interval() == pytest.approx(rarely_s, rel=1e-3)


def test_ranks_that_cannot_share_the_batch_wait_with_shrink():
    all_others, half = (
        next(
            one
            for one in build_policies(COSTS, Faults(7200.0, 1024, repair_s=90.0, usable=usable))
            if one.name == "shrink"
        )
        for usable in (None, 512)
    )
    assert all_others.slower_s == pytest.approx(100.0 / 1024 + 1.0) and half.slower_s == pytest.approx(51.0)


def test_a_save_does_not_wait_for_the_previous_one():
    assert estimate_save_interval([1e-6], 5.0, 10.0) == pytest.approx(5.0, rel=1e-3)


def test_enough_spares_that_nearly_every_fault_finds_one():
    assert count_spares(Faults(3600.0, 8), 10.0) == 1
    assert count_spares(Faults(3600.0, 8, repair_s=3600.0), 0.0) == 5  # P(N <= 4) is 99.6 % at a mean of 1
    assert count_spares(Faults(1.0, 8, repair_s=10_000.0), 0.0) == pytest.approx(10_233, abs=2)


def test_policies_need_their_costs_and_a_replica():
    faults = Faults(300.0, 8)
    assert [policy.name for policy in build_policies(COSTS, faults)] == ["restart", "spare", "shrink"]
    assert [policy.name for policy in build_policies(COSTS, replace(faults, ranks=1))] == ["restart"]
    only = {name: seconds for name, seconds in COSTS.items() if name != "spare"}
    assert [policy.name for policy in build_policies(only, faults)] == ["restart", "shrink"]


@pytest.mark.parametrize(
    ("ranks", "repair_s", "shrink_s", "winner"),
    [(8192, 0.0, 20.0, "spare"), (2, 0.0, None, "restart"), (64, 3600.0, 20.0, "shrink")],
)
def test_which_policy_wins_depends_on_ranks_and_repair(ranks, repair_s, shrink_s, winner):
    rows = estimate_goodput(make_costs(shrink=shrink_s), Faults(7200.0, ranks, repair_s=repair_s), 30 * 86400.0)
    assert rows[0].policy.name == winner and is_ahead(rows[0], rows[1])
    assert [row.of_ranks for row in rows] == sorted((row.of_ranks for row in rows), reverse=True)
    for row in rows:
        assert row.low <= row.share <= row.high < 1
        assert row.share + row.saving + row.failing == pytest.approx(1)


def test_the_interval_is_of_the_costs_and_of_the_faults_of_the_horizon():
    faults = Faults(7200.0, 8)

    def find_width(records, horizon_s):
        row = next(row for row in estimate_goodput(records, faults, horizon_s) if row.policy.name == "restart")
        return row.high - row.low

    exact = [find_width(make_costs(), days * 86400.0) for days in (1, 30, 3000)]
    assert exact[0] > 3 * exact[1] > 9 * exact[2] > 0
    once = [replace(record, source="measured") for record in make_costs()]
    often = [replace(record, seconds=record.seconds * 20) for record in once]
    assert find_width(once, 1e12) > 10 * find_width(often, 1e12)


def test_equal_policies_are_not_ahead_of_each_other():
    spare, shrink = estimate_goodput(make_costs(), Faults(7200.0, 8), 1e6)[:2]
    assert not is_ahead(spare, replace(spare, policy=shrink.policy))


def test_a_step_counts_by_its_median_and_the_rest_on_average():
    records = [CostRecord(name=name, seconds=(1.0, 2.0, 9.0)) for name in ("step", "save")]
    assert average_costs(records) == {"step": 2.0, "save": 4.0}
    assert 1.0 <= average_costs(records, random.Random(1))["save"] <= 9.0


@pytest.mark.parametrize("bad", [{"mtbf_s": 0.0}, {"mtbf_s": math.inf}, {"all_lost": 0.0}, {"all_lost": 1.5}])
def test_impossible_faults_are_refused(bad):
    with pytest.raises(ConfigError):
        Faults(**({"mtbf_s": 60.0, "ranks": 2} | bad))
