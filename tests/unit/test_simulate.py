"""Invariants of the simulator for any plan, curve and machine, and comparisons with manual sums."""

from __future__ import annotations

import inspect
import itertools
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan import plan_like_torch
from paceline.predict import simulate as simulator
from paceline.predict.curves import MeasuredCurve
from paceline.predict.job import Job
from paceline.predict.search import estimate_caps
from paceline.predict.simulate import Contention, Layout, Load, MachineCosts, Schedule, simulate
from tests.unit.made_jobs import line, make_job

positive = st.floats(1e-6, 1.0)
rates = st.floats(0.05, 1.0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Job, MachineCosts]:
    count = draw(st.integers(1, 8))
    sizes = draw(st.lists(st.integers(1, 10**7), min_size=count, max_size=count))
    ready = sorted(draw(st.lists(st.floats(0, 0.1), min_size=count, max_size=count)))
    total_s = ready[-1] + draw(st.floats(0, 0.05))
    costs = MachineCosts(
        curve=line(draw(st.floats(1e-6, 1e-2)), draw(st.floats(1e7, 1e12))),
        servers=draw(st.integers(1, 3)),
        launch_s=draw(st.floats(0, 1e-3)),
        gather_s_per_byte=draw(st.floats(0, 1e-10)),
        contention=Contention((1,), (draw(rates),), (draw(rates),)),
        pair_rate=draw(rates),
        finish_s=draw(st.floats(0, 1e-3)),
    )
    return make_job(sizes, ready, total_s), costs


def each(job: Job) -> range:
    """One bucket per gradient."""
    return range(1, len(job.sizes) + 1)


@given(steps())
def test_a_step_is_never_shorter_than_its_parts(case):
    job, costs = case
    step = simulate(job, each(job), costs)
    near = 1e-9
    assert step.over_s >= job.backward_s - near
    assert step.backward_s >= job.backward_s - near
    if costs.servers == 1:
        assert step.over_s >= job.ready_s[0] + sum(map(costs.curve.estimate_s, job.sizes)) - near
    for bucket in step.buckets:
        assert bucket.ready_s <= bucket.launch_s <= bucket.start_s + near <= bucket.done_s + 2 * near
        assert bucket.done_s <= step.over_s + near
    for earlier, later in itertools.pairwise(step.buckets):
        assert earlier.launch_s <= later.launch_s and earlier.start_s <= later.start_s
    under_way = [(bucket.start_s, bucket.done_s) for bucket in step.buckets]
    for moment, _ in under_way:
        assert sum(start <= moment + near and moment < done - near for start, done in under_way) <= costs.servers


@given(steps(), st.floats(1.0, 10.0))
def test_slower_messages_never_make_a_step_shorter(case, factor):
    job, costs = case
    quick = MachineCosts(curve=costs.curve, launch_s=costs.launch_s)
    slow = line(costs.curve.alpha_s * factor, costs.curve.bytes_per_s / factor)
    slower = MachineCosts(curve=slow, launch_s=costs.launch_s)
    assert simulate(job, each(job), slower).over_s >= simulate(job, each(job), quick).over_s - 1e-9


@given(steps())
def test_a_free_network_leaves_the_local_backward(case):
    job, _ = case
    step = simulate(job, each(job), MachineCosts(curve=line(0.0, 1e30)))
    assert step.over_s == pytest.approx(job.backward_s, abs=1e-9)


@given(steps())
def test_one_bucket_is_complete_with_the_last_gradient_and_followed_by_its_message(case):
    job, costs = case
    step = simulate(job, [len(job.sizes)], MachineCosts(curve=costs.curve))
    message_s = costs.curve.estimate_s(job.num_bytes)
    assert step.over_s == pytest.approx(max(job.backward_s, job.ready_s[-1] + message_s), rel=1e-9)


@given(steps(), st.data())
def test_cuts_a_plan_and_a_layout_are_the_same_step(case, data):
    job, costs = case
    count = len(job.sizes)
    cuts = sorted({*data.draw(st.sets(st.integers(1, count))), count})
    caps = [sum(job.sizes[start:end]) for start, end in itertools.pairwise([0, *cuts])]
    # torch's rule depends on bucket sizes; the plan may list gradients in any order.
    back = list(reversed(job.gradients))
    plan = plan_like_torch(back, reversed(range(count)), caps)
    layout = Layout(tuple(caps), tuple(job.ready_s[cut - 1] for cut in cuts))
    by_cuts = simulate(job, cuts, costs)
    assert by_cuts == simulate(job, plan, costs) == simulate(job, layout, costs)


def test_a_timeline_by_hand():
    """Two buckets of 1 s transfer each; the first ready at 1 s, the second at 1.5 s, backward ends at 2 s."""
    job = make_job([10, 10], [1.0, 1.5], 2.0)
    one = simulate(job, [1, 2], MachineCosts(curve=line(0.0, 10.0)))
    assert [(b.start_s, b.done_s) for b in one.buckets] == [(1.0, 2.0), (2.0, 3.0)]
    assert (one.backward_s, one.over_s, one.exposed_s) == (2.0, 3.0, 1.0)
    assert one.buckets[1].queue_s == 0.5
    two = simulate(job, [1, 2], MachineCosts(curve=line(0.0, 10.0), servers=2))
    assert [(b.start_s, b.done_s) for b in two.buckets] == [(1.0, 2.0), (1.5, 2.5)]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_job_without_gradients_sends_nothing(servers):
    job = Job((), (), backward_s=1.0, before_s=2.0, after_s=3.0)
    assert simulate(job, (), MachineCosts(curve=line(0.5, 10.0), servers=servers)).step_s == 6.0


def test_contention_by_hand():
    """While a message is in flight, the rank computes at half speed, and the message moves at half of its own."""
    costs = MachineCosts(curve=line(0.0, 10.0), contention=Contention((1,), (0.5,), (0.5,)))
    step = simulate(make_job([10], [1.0], 2.0), [1], costs)
    # From 1 s on: the remaining second takes 2 s, and the 1 s message takes 2 s as well.
    assert (step.backward_s, step.over_s) == (3.0, 3.0)


def test_copies_launches_and_the_end_by_hand():
    costs = MachineCosts(curve=line(0.25, 10.0), launch_s=0.5, gather_s_per_byte=0.01, finish_s=2.0)
    step = simulate(make_job([10], [1.0], 1.0, before_s=5.0, after_s=7.0), [1], costs)
    assert step.buckets[0].launch_s == pytest.approx(1.6)
    assert step.buckets[0].done_s == pytest.approx(1.6 + 0.25 + 1.0)
    assert step.over_s == pytest.approx(2.85 + 2.0)
    assert step.step_s == pytest.approx(5.0 + step.over_s + 7.0)


def test_a_bucket_waits_for_earlier_ones():
    step = simulate(make_job([1, 1], [2.0, 1.0], 2.0), [1, 2], MachineCosts(curve=line(0.0, 1e9)))
    assert step.buckets[1].ready_s == 2.0


@pytest.mark.parametrize(
    ("device", "is_on_host", "spare_cores", "rate"),
    [("cpu", True, 0.0, 0.5), ("cpu", True, 0.5, 0.75), ("cpu", True, 3.0, 1.0), ("cpu", False, 0.0, 1.0),
     ("", True, 0.0, 1.0)],
)  # fmt: skip
def test_assumed_contention(device, is_on_host, spare_cores, rate):
    assumed = Contention.assume(device, is_on_host, spare_cores)
    assert assumed.rates(10) == (rate, rate) and assumed.basis.startswith("assumed: ")
    assert ("half of a rank's core" in assumed.basis) == (device == "cpu" and is_on_host)


@pytest.mark.parametrize("is_on_host", [True, False])
def test_contention_on_a_gpu_is_assumed_from_published_numbers_and_drawn(is_on_host):
    """arXiv 2507.03114: while messages move, compute takes 18.9 % longer on average and at most 40 %."""
    assumed = Contention.assume("cuda", is_on_host)
    assert assumed.rates(10) == pytest.approx((1 / 1.189, 0.6)) and "2507.03114" in assumed.basis
    source = random.Random(1)
    rates = [Contention.assume("cuda", is_on_host, source=source).rates(10) for _ in range(4000)]
    drawn = [1 / compute - 1 for compute, _ in rates]
    assert 0.35 <= min(message for _, message in rates) < 0.4 and 0.8 < max(message for _, message in rates) <= 0.85
    assert statistics.fmean(drawn) == pytest.approx(0.189, abs=0.005) and 0 <= min(drawn) < max(drawn) <= 0.40


@pytest.mark.parametrize("is_on_host", [True, False])
def test_an_assumed_share_of_a_core_is_drawn_around_its_value(is_on_host):
    source, assumed = random.Random(1), Contention.assume("cpu", is_on_host)
    drawn = [Contention.assume("cpu", is_on_host, source=source) for _ in range(400)]
    rates = [one.rates(10)[0] for one in drawn]
    assert all(0 < rate <= 1 for rate in rates) and min(rates) < assumed.rates(10)[0] - 0.1
    assert statistics.fmean(rates) == pytest.approx(assumed.rates(10)[0], abs=0.02 if is_on_host else 0.15)
    assert is_on_host or {one.rates(10)[1] for one in drawn} == {1.0}


def test_on_a_slower_link_a_message_costs_the_same_compute_over_a_longer_time():
    # A message of 100 bytes takes 2 s on an idle machine and 4 s next to arithmetic, which then loses 1 s.
    found = Contention((100,), (0.75,), (0.5,), alone_s=(2.0,))
    assert found.spread_over(line(0.0, 50.0)).rates(100) == pytest.approx((0.75, 0.5))
    slow = found.spread_over(line(0.0, 5.0))  # takes 20 s
    assert slow.rates(100) == pytest.approx((1 - 1 / 22, 20 / 22)) and not slow.alone_s
    assert found.spread_over(line(0.0, 500.0)).rates(100) == pytest.approx((0.75, 0.5))  # unchanged on a faster link
    assert Contention().spread_over(line(0.0, 5.0)) == Contention()


def test_contention_by_bytes_ignores_latency():
    found = Contention.assume("cuda", is_on_host=False)
    curve = line(1e-3, 2**30)  # 1 MiB takes about a millisecond more than its latency
    for place, rate in enumerate(found.rates(1)):
        small, half, large = (1 - found.spread_over(curve).rates(size)[place] for size in (4096, 2**20, 2**32))
        assert (small, half, large) == pytest.approx((0.0, (1 - rate) / 2, 1 - rate), abs=0.01)
    free = found.spread_over(line(0.0, 1e30))
    assert all(0 < rate <= 1 for rate in free.compute_rates)


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
    assert not curve.explain(points[-1][0] * 2)[1] and curve.explain(points[-1][0] * 2.5)[1]


@pytest.mark.parametrize(
    ("size", "rates"),
    [(1, (0.2, 0.1)), (10, (0.2, 0.1)), (100, (0.5, 0.3)), (31.622776601683793, (0.35, 0.2)), (10**9, (0.5, 0.3))],
)
def test_contention_is_interpolated_on_a_log_axis_and_constant_beyond(size, rates):
    assert Contention((10, 100), (0.2, 0.5), (0.1, 0.3)).rates(size) == pytest.approx(rates)


class Halves(Schedule):
    """Sends each bucket as two messages and computes for a second between them."""

    def list_messages(self, gradients):
        return tuple(Load(sum(gradient.num_bytes for gradient in gradients) // 2) for _ in range(2))

    def list_works(self, num_bytes, count):
        return [0.0, 1.0, 0.0]


class Sixth(Schedule):
    """A schedule that ignores the buckets and simulates its own step."""

    has_buckets = False

    def simulate(self, job, buckets, costs):
        return replace(super().simulate(job, [len(job.sizes)], replace(costs, sending=None)), before_s=6.0)


def test_a_strategy_is_added_without_changing_the_simulator():
    job, costs = make_job([20, 20], [1.0, 3.0], 3.0), MachineCosts(line(0.5, 10.0))
    step = simulate(job, [2], replace(costs, sending=Halves()))
    assert step.over_s == pytest.approx(3.0 + 2 * (0.5 + 20 / 10) + 1.0)
    plain_s = simulate(job, [1, 2], costs).over_s
    assert simulate(job, [1, 2], replace(costs, sending=Schedule())).over_s == pytest.approx(plain_s)
    own = replace(costs, sending=Sixth())
    assert simulate(job, [1, 2], own).step_s == pytest.approx(6.0 + 3.0 + 0.5 + 40 / 10)
    assert len(estimate_caps(job, own).points) == 1 < len(estimate_caps(job, costs).points)
    assert "paceline.strategy" not in inspect.getsource(simulator)
