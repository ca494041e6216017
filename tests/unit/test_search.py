"""The search finds every partition of a cap exactly once, and free plans are at least as good."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import astuple, replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan import cut_by_cap
from paceline.predict import search
from paceline.predict import simulate as simulator
from paceline.predict.curves import MeasuredCurve
from paceline.predict.job import Job, Lookup
from paceline.predict.search import (
    choose_caps,
    enumerate_caps,
    estimate_caps,
    estimate_least_s,
    find_best_cuts,
    find_cuts,
)
from paceline.predict.simulate import Contention, MachineCosts, simulate, simulate_cuts
from tests.unit.made_jobs import line, make_job
from tests.unit.test_simulate import steps

sizes_lists = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


def evenly_ready(sizes: list[int], total_s: float) -> list[float]:
    return [total_s * (place + 1) / len(sizes) for place in range(len(sizes))]


@given(sizes_lists)
def test_every_distinct_partition_is_found_once_and_its_caps_are_right(sizes):
    totals = [0, *itertools.accumulate(sizes)]
    intervals = enumerate_caps(tuple(sizes))
    by_trying = {}
    for cap in range(1, totals[-1] + 2):
        by_trying.setdefault(cut_by_cap(totals, cap), []).append(cap)
    assert list(intervals) == list(by_trying)
    for cuts, (low_bytes, high_bytes) in list(intervals.items())[:-1]:
        caps = by_trying[cuts]
        assert (low_bytes, high_bytes) == (caps[0], caps[-1])


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


@st.composite
def one_at_a_time(draw: st.DrawFn) -> tuple[Job, MachineCosts]:
    """A step with one message in flight at a time, possibly with contention and with rows of a tied tensor."""
    job, costs = draw(steps())
    compute = draw(st.tuples(st.floats(0.4, 1.0), st.floats(0.4, 1.0)))
    message = [max(1 - rate, draw(st.floats(0.3, 1.0))) for rate in compute]
    contention = draw(st.sampled_from([Contention(), Contention((1000, 10**6), compute, tuple(message))]))
    if draw(st.booleans()):  # neither convex nor monotone
        seconds = draw(st.lists(st.floats(1e-6, 1e-2), min_size=4, max_size=4))
        costs = replace(costs, curve=MeasuredCurve((1000, 30_000, 10**6, 3 * 10**7), tuple(seconds)))
    if draw(st.booleans()):
        lookup = Lookup(job.gradients[-1].name, 10, 40, draw(st.floats(0, job.backward_s)))
        job = replace(job, lookups=(lookup,)).split(8)
    return job, replace(costs, servers=1, contention=contention, finish_s=draw(st.floats(-1e-3, 1e-3)))


def list_partitions(job: Job) -> list[tuple[int, ...]]:
    count = len(job.sizes)
    found = [(*chosen, count) for length in range(count) for chosen in itertools.combinations(range(1, count), length)]
    return found[::-1]


@given(one_at_a_time())
def test_the_closed_form_agrees_with_the_events_in_every_bucket_and_for_many_partitions(case):
    job, costs = case
    partitions = list_partitions(job)
    with mock.patch.object(simulator, "_MANY_BUCKETS", 1):
        found = [simulate(job, cuts, costs) for cuts in partitions]
    many_s = simulate_cuts(job, partitions, costs)
    with mock.patch.object(simulator, "has_closed_form", return_value=False):
        events = [simulate(job, cuts, costs) for cuts in partitions]
    near = functools.partial(pytest.approx, rel=1e-9, abs=1e-11)
    assert many_s == near([step.over_s for step in events])
    for mine, theirs in zip(found, events, strict=True):
        assert (mine.step_s, mine.backward_s, mine.over_s) == near((theirs.step_s, theirs.backward_s, theirs.over_s))
        for here, there in zip((*mine.buckets, *mine.tail), (*theirs.buckets, *theirs.tail), strict=True):
            assert astuple(here) == near(astuple(there))


@given(one_at_a_time(), st.booleans())
def test_no_partition_beats_the_one_found(case, is_free):
    job, costs = case
    costs = replace(costs, launch_s=0.0 if is_free else costs.launch_s)
    best_s = min(simulate(job, cuts, costs).over_s for cuts in list_partitions(job))
    found_s = simulate(job, find_cuts(job, costs), costs).over_s
    # Launches that follow a message at the end of backward slow it down a little longer; the search ignores this.
    assert best_s - 1e-9 <= found_s <= best_s + 1e-9 + costs.launch_s * len(job.sizes)


def test_the_search_simulates_only_the_answer(monkeypatch):
    """Timing would measure the machine, so this counts simulations; one at a time, 400 gradients needed thousands."""
    source, simulated = random.Random(3), []
    sizes, ready = ([source.uniform(*ends) for _ in range(400)] for ends in ((3, 7), (0, 0.3)))
    job = make_job([round(10**size) for size in sizes], sorted(ready), 0.3)
    costs = MachineCosts(line(1e-3, 1e9), contention=Contention((1000, 10**7), (0.6, 0.8), (0.5, 0.7)), launch_s=1e-4)

    def count(*inputs):
        simulated.append(inputs)
        return simulate(*inputs)

    monkeypatch.setattr(search, "simulate", count)
    curve = estimate_caps(job, costs)
    cuts, step = find_best_cuts(job, costs, [curve.best.cuts])
    assert len(curve.points) > 1000 and len(simulated) == 1
    assert step.over_s <= curve.best.backward_s and cuts[-1] == 400
    assert curve.best.step.over_s == pytest.approx(curve.best.backward_s, rel=1e-9)


@given(sizes_lists, st.floats(0, 0.1), st.floats(100, 1e6), st.floats(0.2, 1), st.integers(1, 2))
def test_a_free_plan_is_as_good_as_every_cap(sizes, alpha_s, rate, compute_rate, servers):
    job = make_job(sizes, evenly_ready(sizes, 1.0), 1.0)
    costs = MachineCosts(
        curve=line(alpha_s, rate), contention=Contention((1,), (compute_rate,), (1.0,)), servers=servers, launch_s=1e-3
    )
    by_cap = {cuts: simulate(job, cuts, costs).step_s for cuts in enumerate_caps(tuple(sizes))}
    best_cap = min(by_cap, key=lambda cuts: by_cap[cuts])
    cuts, step = find_best_cuts(job, costs, seeds=[best_cap])
    assert step.step_s <= by_cap[best_cap] + 1e-12
    assert cuts[-1] == len(sizes) and list(cuts) == sorted(set(cuts))


@given(steps(), st.lists(st.floats(1e-6, 1e-2), min_size=4, max_size=4), st.booleans())
def test_no_buckets_beat_the_lower_bound(case, seconds, is_measured):
    job, costs = case
    if is_measured:  # neither convex nor monotone
        costs = replace(costs, curve=MeasuredCurve((1000, 30_000, 10**6, 3 * 10**7), tuple(seconds)))
    least_s, count = estimate_least_s(job, costs), len(job.sizes)
    for length in range(count):
        for chosen in itertools.combinations(range(1, count), length):
            assert simulate(job, [*chosen, count], costs).step_s >= least_s - 1e-9


def test_the_lower_bound_is_reached():
    job = make_job([10, 10], [0.0, 1.0], 1.0)
    slow, quick = MachineCosts(line(0.0, 1.0)), MachineCosts(line(0.5, 100.0))
    assert estimate_least_s(job, slow) == pytest.approx(20.0) == simulate(job, (1, 2), slow).step_s
    assert estimate_least_s(job, quick) == pytest.approx(1.6) == simulate(job, (1, 2), quick).step_s
