"""The simulator keeps to what must hold for any plan, any curve and any machine; and to sums done by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan import Gradient, plan_like_torch
from paceline.predict.costs import AlphaBeta
from paceline.predict.curves import LineCurve, MeasuredCurve
from paceline.predict.simulate import Backward, Contention, MachineCosts, simulate_backward, simulate_buckets


def line(alpha_s: float, bytes_per_s: float) -> LineCurve:
    return LineCurve(AlphaBeta(alpha_s, bytes_per_s, 1, 10**9, (0.0,)))


positive = st.floats(1e-6, 1.0)
rates = st.floats(0.05, 1.0)


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[int], list[float], Backward, MachineCosts]:
    count = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(1, 10**7), min_size=count, max_size=count))
    ready = sorted(draw(st.lists(st.floats(0, 0.1), min_size=count, max_size=count)))
    total_s = ready[-1] + draw(st.floats(0, 0.05))
    costs = MachineCosts(
        curve=line(draw(st.floats(1e-6, 1e-2)), draw(st.floats(1e7, 1e12))),
        servers=draw(st.integers(1, 3)),
        launch_s=draw(st.floats(0, 1e-3)),
        gather_s_per_byte=draw(st.floats(0, 1e-10)),
        scatter_s_per_byte=draw(st.floats(0, 1e-10)),
        contention=Contention.uniform(draw(rates), draw(rates)),
        pair_rate=draw(rates),
        late_s=draw(st.floats(0, 1e-3)),
        finish_s=draw(st.floats(0, 1e-3)),
    )
    return sizes, ready, Backward(tuple(ready), total_s), costs


@given(passes())
def test_a_step_is_never_shorter_than_its_parts(case):
    sizes, ready, backward, costs = case
    step = simulate_buckets(sizes, ready, backward, costs)
    near = 1e-9
    assert step.over_s >= backward.total_s - near
    assert step.backward_s >= backward.total_s - near
    if costs.servers == 1:
        assert step.over_s >= ready[0] + sum(costs.curve.estimate_s(size) for size in sizes) - near
    for bucket in step.buckets:
        assert bucket.ready_s <= bucket.launch_s <= bucket.start_s + near <= bucket.done_s + 2 * near
        assert bucket.done_s <= step.over_s + near
    for earlier, later in itertools.pairwise(step.buckets):
        assert earlier.launch_s <= later.launch_s and earlier.start_s <= later.start_s
    under_way = [(bucket.start_s, bucket.done_s) for bucket in step.buckets]
    for moment, _ in under_way:
        assert sum(start <= moment + near and moment < done - near for start, done in under_way) <= costs.servers


@given(passes(), st.floats(1.0, 10.0))
def test_slower_messages_never_make_a_step_shorter(case, factor):
    sizes, ready, backward, costs = case
    if costs.contention.rates(1)[0] < 1 or costs.servers > 1:
        costs = MachineCosts(curve=costs.curve, launch_s=costs.launch_s, late_s=costs.late_s)
    slow = line(costs.curve.line.alpha_s * factor, costs.curve.line.beta_bytes_per_s / factor)
    slower = MachineCosts(curve=slow, launch_s=costs.launch_s, late_s=costs.late_s)
    quick = MachineCosts(curve=costs.curve, launch_s=costs.launch_s, late_s=costs.late_s)
    assert (
        simulate_buckets(sizes, ready, backward, slower).over_s
        >= simulate_buckets(sizes, ready, backward, quick).over_s - 1e-9
    )


@given(passes())
def test_with_a_network_that_takes_no_time_the_backward_is_the_local_one(case):
    sizes, ready, backward, _ = case
    costs = MachineCosts(curve=line(0.0, 1e30))
    assert simulate_buckets(sizes, ready, backward, costs).over_s == pytest.approx(backward.total_s, abs=1e-9)


@given(passes())
def test_one_bucket_is_the_local_backward_and_its_message(case):
    sizes, ready, backward, costs = case
    alone = MachineCosts(curve=costs.curve)
    step = simulate_buckets([sum(sizes)], [backward.total_s], backward, alone)
    assert step.over_s == pytest.approx(backward.total_s + costs.curve.estimate_s(sum(sizes)), rel=1e-9)
    assert ready[-1] <= backward.total_s


def test_a_timeline_by_hand():
    """Two buckets, 1 s of transfer each; the first ready at 1 s, the second at 1.5 s, backward over at 2 s."""
    backward = Backward((1.0, 1.5), 2.0)
    one = simulate_buckets([10, 10], [1.0, 1.5], backward, MachineCosts(curve=line(0.0, 10.0)))
    assert [(b.start_s, b.done_s) for b in one.buckets] == [(1.0, 2.0), (2.0, 3.0)]
    assert (one.backward_s, one.over_s, one.exposed_s) == (2.0, 3.0, 1.0)
    assert one.buckets[1].queue_s == 0.5
    two = simulate_buckets([10, 10], [1.0, 1.5], backward, MachineCosts(curve=line(0.0, 10.0), servers=2))
    assert [(b.start_s, b.done_s) for b in two.buckets] == [(1.0, 2.0), (1.5, 2.5)]


def test_contention_by_hand():
    """While a message is under way the rank computes at half its speed, and the message moves at half of its own."""
    backward = Backward((1.0,), 2.0)
    costs = MachineCosts(curve=line(0.0, 10.0), contention=Contention.uniform(0.5, 0.5))
    step = simulate_buckets([10], [1.0], backward, costs)
    # From 1 s on: the second that is left takes 2 s, and the message of 1 s takes 2 s as well.
    assert (step.backward_s, step.over_s) == (3.0, 3.0)


def test_copies_launches_and_the_end_by_hand():
    backward = Backward((1.0,), 1.0, before_s=5.0, after_s=7.0)
    costs = MachineCosts(
        curve=line(0.25, 10.0),
        launch_s=0.5,
        gather_s_per_byte=0.01,
        scatter_s_per_byte=0.02,
        late_s=0.125,
        finish_s=2.0,
    )
    step = simulate_buckets([10], [1.0], backward, costs)
    assert step.buckets[0].launch_s == pytest.approx(1.6)
    assert step.buckets[0].done_s == pytest.approx(1.6 + 0.25 + 1.0 + 0.125)
    assert step.over_s == pytest.approx(2.975 + 0.2 + 2.0)
    assert step.step_s == pytest.approx(5.0 + step.over_s + 7.0)


def test_a_bucket_waits_for_the_ones_in_front_of_it():
    step = simulate_buckets([1, 1], [2.0, 1.0], Backward((2.0, 1.0), 2.0), MachineCosts(curve=line(0.0, 1e9)))
    assert step.buckets[1].ready_s == 2.0


def test_a_plan_is_simulated_by_its_gradients():
    gradients = [Gradient("a", 40), Gradient("b", 80), Gradient("c", 120)]
    plan = plan_like_torch(gradients, [2, 1, 0], [120])
    backward = Backward((3.0, 2.0, 1.0), 3.0)
    step = simulate_backward(plan, backward, MachineCosts(curve=line(0.0, 120.0)))
    assert [b.num_bytes for b in step.buckets] == [120, 120]
    assert [b.ready_s for b in step.buckets] == [1.0, 3.0]
    assert step.over_s == 4.0
    with pytest.raises(ConfigError, match="2 ready times for 3 gradients"):
        simulate_backward(plan, Backward((1.0, 2.0), 3.0), MachineCosts(curve=line(0.0, 1.0)))


@pytest.mark.parametrize("broken", [{"servers": 0}, {"pair_rate": -1.0}])
def test_costs_that_cannot_be_are_refused(broken):
    with pytest.raises(ConfigError):
        MachineCosts(curve=line(0.0, 1.0), **broken)


def test_a_gradient_after_the_end_of_backward_is_refused():
    with pytest.raises(ConfigError, match="outside backward"):
        Backward((2.0,), 1.0)


@given(st.lists(st.tuples(st.integers(1, 2**40), positive), min_size=2, max_size=10, unique_by=lambda p: p[0]))
def test_a_measured_curve_passes_through_its_points_and_stays_between_them(points):
    points = sorted(points)
    curve = MeasuredCurve(tuple(x for x, _ in points), tuple(t for _, t in points))
    for size, seconds in points:
        assert curve.estimate_s(size) == pytest.approx(seconds)
    for (x0, t0), (x1, t1) in itertools.pairwise(points):
        between = curve.estimate_s((x0 + x1) / 2)
        assert min(t0, t1) * (1 - 1e-9) <= between <= max(t0, t1) * (1 + 1e-9)
    assert curve.estimate_s(points[-1][0] * 3) > points[-1][1]
    assert not curve.describe_doubt(points[-1][0] * 2) and curve.describe_doubt(points[-1][0] * 2.5)


@pytest.mark.parametrize(
    ("size", "rates"),
    [(1, (0.2, 0.1)), (10, (0.2, 0.1)), (100, (0.5, 0.3)), (31.622776601683793, (0.35, 0.2)), (10**9, (0.5, 0.3))],
)
def test_contention_is_interpolated_on_a_log_axis_and_constant_beyond(size, rates):
    assert Contention((10, 100), (0.2, 0.5), (0.1, 0.3)).rates(size) == pytest.approx(rates)


@pytest.mark.parametrize(
    "broken", [((), (), ()), ((2, 1), (1.0, 1.0), (1.0, 1.0)), ((1,), (0.0,), (1.0,)), ((1,), (1.0,), (1.5,))]
)
def test_contention_that_cannot_be_is_refused(broken):
    with pytest.raises(ConfigError):
        Contention(*broken)
