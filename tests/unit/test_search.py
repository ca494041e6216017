"""Every partition that a cap can make is found once, and free plans are at least as good as all of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.plan import Gradient, plan_like_torch
from paceline.predict.costs import AlphaBeta
from paceline.predict.curves import LineCurve
from paceline.predict.search import (
    choose_caps,
    cut_by_cap,
    enumerate_caps,
    find_best_cuts,
    find_cuts,
    plan_by_cuts,
    simulate_cuts,
)
from paceline.predict.simulate import Backward, Contention, MachineCosts

sizes_lists = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


def line(alpha_s: float, bytes_per_s: float) -> LineCurve:
    return LineCurve(AlphaBeta(alpha_s, bytes_per_s, 1, 10**9, (0.0,)))


def evenly_ready(sizes: list[int], total_s: float) -> list[float]:
    return [total_s * (place + 1) / len(sizes) for place in range(len(sizes))]


@given(sizes_lists, st.integers(1, 15_000))
def test_a_cap_cuts_as_torch_does(sizes, cap):
    gradients = [Gradient(str(index), 4 * size) for index, size in enumerate(sizes)]
    plan = plan_like_torch(gradients, range(len(sizes)), [cap])
    cuts = cut_by_cap([0, *itertools.accumulate(g.num_bytes for g in gradients)], cap)
    assert plan_by_cuts(gradients, range(len(sizes)), cuts, "").partition == plan.partition


@given(sizes_lists)
def test_every_distinct_partition_is_found_once_and_its_caps_are_right(sizes):
    totals = [0, *itertools.accumulate(sizes)]
    intervals = enumerate_caps(sizes)
    by_trying = {}
    for cap in range(1, totals[-1] + 2):
        by_trying.setdefault(cut_by_cap(totals, cap), []).append(cap)
    assert [interval.cuts for interval in intervals] == list(by_trying)
    for interval in intervals[:-1]:
        caps = by_trying[interval.cuts]
        assert (interval.low_bytes, interval.high_bytes) == (caps[0], caps[-1])


@given(sizes_lists, st.integers(2, 9))
def test_caps_to_try_differ_in_their_buckets_and_span_the_range(sizes, count):
    totals = [0, *itertools.accumulate(sizes)]
    caps = choose_caps(sizes, count)
    cuts = [cut_by_cap(totals, cap) for cap in caps]
    assert 1 <= len(caps) <= count and list(caps) == sorted(set(caps))
    assert len(set(cuts)) == len(cuts)
    assert cuts[-1] == (len(sizes),) and cuts[0] == cut_by_cap(totals, max(1, round(totals[-1] / 100)))


def test_caps_to_try_are_even_on_a_log_axis_where_gradients_allow_it():
    assert choose_caps([1] * 10_000, 5) == (100, 316, 1000, 3162, 10_000)
    assert choose_caps([5], 8) == (1,)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=7),
    st.floats(0, 1.0),
    st.floats(10, 1e5),
    st.floats(0, 0.3),
    st.randoms(use_true_random=False),
)
def test_without_contention_the_dynamic_programme_is_exact(sizes, alpha_s, rate, overhead_s, random):
    ready = sorted(random.uniform(0, 1) for _ in sizes)
    backward = Backward(tuple(ready), ready[-1])
    # The overhead of a launch is counted in the message here: the programme knows no computing that it delays.
    costs = MachineCosts(curve=line(alpha_s + overhead_s, rate))
    count = len(sizes)
    best_s = min(
        simulate_cuts(sizes, ready, [*chosen, count], backward, costs).over_s
        for length in range(count)
        for chosen in itertools.combinations(range(1, count), length)
    )
    found = simulate_cuts(sizes, ready, find_cuts(sizes, ready, line(alpha_s, rate), overhead_s), backward, costs)
    assert found.over_s == pytest.approx(best_s, rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=40)
@given(sizes_lists, st.floats(0, 0.1), st.floats(100, 1e6), st.floats(0.2, 1), st.integers(1, 2))
def test_a_free_plan_is_as_good_as_every_cap(sizes, alpha_s, rate, compute_rate, servers):
    ready = evenly_ready(sizes, 1.0)
    backward = Backward(tuple(ready), 1.0)
    costs = MachineCosts(
        curve=line(alpha_s, rate), contention=Contention.uniform(compute_rate, 1.0), servers=servers, launch_s=1e-3
    )
    intervals = enumerate_caps(sizes)
    by_cap = {i.cuts: simulate_cuts(sizes, ready, i.cuts, backward, costs).step_s for i in intervals}
    best_cap = min(by_cap, key=lambda cuts: by_cap[cuts])
    cuts, step = find_best_cuts(sizes, ready, backward, costs, seeds=[best_cap])
    assert step.step_s <= by_cap[best_cap] + 1e-12
    assert cuts[-1] == len(sizes) and list(cuts) == sorted(set(cuts))


def test_dtypes_do_not_share_a_bucket():
    gradients = [Gradient("a", 8), Gradient("b", 8, 2, "bfloat16"), Gradient("c", 8)]
    plan = plan_by_cuts(gradients, [0, 1, 2], [3], "all at once")
    assert plan.partition == ((0, 2), (1,))
