"""Cost curves: fits of lines and families are exact on exact data, and refused without data."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, MeasurementError
from paceline.predict.curves import (
    FAMILIES,
    FamilyCurve,
    MeasuredCurve,
    Resample,
    check_algorithm,
    choose_best,
    draw,
    find_interval,
    fit_collectives,
    fit_family,
    fit_line,
    interpolate_sizes,
    join_levels,
    scale_curve,
)
from paceline.records import Summary


@given(
    alpha_s=st.floats(1e-6, 1e-1),
    knee_bytes=st.integers(64, 2**30),  # latency and bandwidth cost the same here
    steps=st.sets(st.integers(-4, 6), min_size=2),
    shuffle=st.randoms(use_true_random=False),
)
def test_a_noiseless_line_is_recovered_exactly(alpha_s, knee_bytes, steps, shuffle):
    beta = knee_bytes / alpha_s
    sizes = sorted({round(knee_bytes * 2.0**step) for step in steps})
    points = [(size, alpha_s + size / beta) for size in sizes]
    shuffle.shuffle(points)
    fit = fit_line(points)
    assert fit.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert fit.bytes_per_s == pytest.approx(beta, rel=1e-6)
    assert (fit.min_bytes, fit.max_bytes) == (sizes[0], sizes[-1])
    assert fit.max_rel_residual < 1e-9
    assert fit.estimate_s(3 * knee_bytes) == pytest.approx(4 * alpha_s, rel=1e-6)


def test_a_negative_latency_is_clipped_to_the_best_line_through_the_origin():
    points = [(100, 0.5), (1000, 10.0), (10000, 110.0)]
    fit = fit_line(points)
    assert fit.alpha_s == 0.0

    def error(beta):
        return sum(((size / beta - t) / t) ** 2 for size, t in points)

    best = error(fit.bytes_per_s)
    assert best < error(fit.bytes_per_s * 1.01)
    assert best < error(fit.bytes_per_s * 0.99)


def test_errors_are_weighted_relative_to_the_time():
    """With absolute errors, the one long outlier would outweigh the latency on which the short messages agree."""
    points = [(2**k, 1e-3 + 2**k / 1e9) for k in range(4, 14)] + [(10**9, 1.5 * (1e-3 + 1.0))]
    fit = fit_line(points)
    assert fit.alpha_s == pytest.approx(1e-3, rel=0.02)
    assert max(abs(r) for r in fit.residuals[:-1]) < 0.05


@given(st.floats(1e-3, 1e3), st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_the_unit_of_time_does_not_change_the_fit(unit, noise):
    points = [(4**k, (1 + 4**k / 64) * n) for k, n in zip(range(1, 8, 2), noise, strict=True)]
    try:
        one = fit_line(points)
    except MeasurementError:
        return
    other = fit_line([(size, t * unit) for size, t in points])
    assert other.residuals == pytest.approx(one.residuals, abs=1e-6)


def test_residuals_are_signed_and_in_order_of_size():
    fit = fit_line([(4000, 4.0), (1000, 1.2), (2000, 2.0), (3000, 2.8)])
    assert [r > 0 for r in fit.residuals] == [
        fit.estimate_s(size) > t for size, t in [(1000, 1.2), (2000, 2.0), (3000, 2.8), (4000, 4.0)]
    ]
    assert fit.residuals[1] == pytest.approx((fit.estimate_s(2000) - 2.0) / 2.0)
    assert fit.max_rel_residual == max(map(abs, fit.residuals))


def test_the_largest_residual_has_no_sign():
    assert FamilyCurve("line", 2, 0.0, 1.0, residuals=(0.1, -0.3, 0.2)).max_rel_residual == 0.3


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([], "two or more sizes.* got 0"),
        ([(1024, 1.0)], "two or more sizes"),
        ([(1024, 1.0), (1024, 2.0)], "two or more sizes"),
        ([(1024, 0.0), (2048, 1.0)], "time that is 0"),
        ([(1024, 2.0), (2048, 1.0)], "do not grow"),
        ([(1024, 1.0), (2048, 1.0)], "do not grow"),
    ],
)
def test_points_that_do_not_define_a_line_are_refused(points, reason):
    with pytest.raises(MeasurementError, match=reason):
        fit_line(points)


@given(st.floats(1e-6, 1.0), st.integers(2, 10))
def test_equal_times_have_no_bandwidth_whatever_the_rounding(seconds, count):
    with pytest.raises(MeasurementError, match="do not grow"):
        fit_line([(4**k, seconds) for k in range(3, 3 + count)])


def test_records_are_fitted_one_curve_at_a_time(build_collective):
    def curve(alpha_s, beta, sizes=(2**10, 2**15, 2**20), **labels):
        return [build_collective(num_bytes=x, timing=Summary(mean_s=alpha_s + x / beta), **labels) for x in sizes]

    fast = curve(1e-5, 1e10, backend="nccl", device="cuda")
    slow = curve(1e-3, 1e8)
    more_ranks = curve(2e-3, 1e8, world_size=4)
    half = curve(3e-3, 1e8, dtype="float16")
    alone = curve(1e-3, 1e8, sizes=(2**20,), op="max")  # a single size does not define a line
    mixed = [r for rows in zip(fast, slow, more_ranks, half, strict=True) for r in rows]
    fits = fit_collectives([*mixed, *alone])
    assert [record.key for record, _ in fits] == [rows[0].key for rows in (fast, slow, more_ranks, half)]
    assert [fit.alpha_s for _, fit in fits] == pytest.approx([1e-5, 1e-3, 2e-3, 3e-3])
    assert [fit.bytes_per_s for _, fit in fits] == pytest.approx([1e10, 1e8, 1e8, 1e8])


MIB = 2**20
names = st.sampled_from(sorted(FAMILIES))
ranks = st.integers(2, 20_000)
sizes = st.integers(1, 2**36)
latencies = st.floats(0, 1e-3)
rates = st.floats(1e6, 1e13)


@pytest.mark.parametrize(
    ("algorithm", "num_bytes", "world_size", "seconds"),
    [
        ("ring", 1000, 4, 6 * 1e-3 + 1.5),
        ("ring", 1000, 2, 2 * 1e-3 + 1.0),
        ("tree", 1000, 2, 2 * 1e-3 + 1.0),
        ("tree", 1000, 8, 6 * 1e-3 + 2.0),
        ("tree", 1000, 9, 8 * 1e-3 + 2.0),
        ("gloo", 1000, 4, 4 * 2 * 1e-3 + 1.5),
        # Up to 2 MiB per rank, a chunk has two segments; beyond that, one per MiB.
        ("gloo", 8 * MIB, 4, 4 * 2 * 1e-3 + 1.5 * 8 * MIB / 1000),
        ("gloo", 12 * MIB, 4, 4 * 3 * 1e-3 + 1.5 * 12 * MIB / 1000),
        ("shared", 1000, 4, 6 * 1e-3 + 7.0),
        ("ring", 1000, 1, 0.0),
        ("shared", 0, 4, 0.0),
    ],
)
def test_a_family_by_hand(algorithm, num_bytes, world_size, seconds):
    assert FamilyCurve(algorithm, world_size, 1e-3, 1000.0).estimate_s(num_bytes) == pytest.approx(seconds)


def test_what_a_data_sheet_leaves_out_is_added_by_hand():
    exact = FamilyCurve("ring", 2, 1e-3, 1000.0)  # 2 latencies, and the bytes once
    assert replace(exact, overhead_s=5e-3).estimate_s(1000) == pytest.approx(7e-3 + 1.0)
    assert replace(exact, overhead_s=5e-3, ramp=0.5).estimate_s(1000) == pytest.approx(7e-3 + 1.0 + math.sqrt(7e-3))
    assert replace(exact, overhead_s=5e-3, ramp=0.5).estimate_s(0) == 0


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(0, 1.0), (100, 1.0), (1000, 2.0), (10_000, 3.0), (100_000, 3.0), (10**9, 3.0)]
)
def test_a_number_by_size_lies_on_lines_over_its_logarithm(num_bytes, expected):
    values = ((100, 1.0), (10_000, 3.0), (10**6, 3.0))
    assert interpolate_sizes(values, num_bytes) == pytest.approx(expected)
    assert interpolate_sizes(values[:1], num_bytes) == 1.0


def test_two_levels_by_hand():
    # Inside 4 ranks: 6 latencies of 1 ms and 3/2 of the bytes. Between 2 nodes: 2 of 10 ms and all the bytes.
    curve = join_levels(FamilyCurve("ring", 4, 1e-3, 1e4), FamilyCurve("ring", 2, 1e-2, 1e3))
    # A byte takes 0.15 ms and 1 ms: part of any message's latency. The other transfers overlap in part.
    latency_s = 6e-3 + 0.15e-3 + 2e-2 + 1e-3
    assert curve.estimate_s(1) == pytest.approx(latency_s)
    assert curve.estimate_s(1000) == pytest.approx(latency_s + math.hypot(0.15, 1.0) * 0.999)
    assert curve.explain(1000)[0] == "two-level (ring)"


@given(st.sampled_from(["ring", "tree"]), ranks, st.integers(0, 5000), sizes, st.integers(0, 2**36), latencies, rates)
def test_more_ranks_and_more_bytes_never_cost_less(name, few, more, small, larger, alpha_s, rate):
    here = FamilyCurve(name, few, alpha_s, rate)
    there = FamilyCurve(name, few + more, alpha_s, rate)
    near = 1 + 1e-12
    assert here.estimate_s(small) <= there.estimate_s(small) * near
    assert here.estimate_s(small) <= here.estimate_s(small + larger) * near


@given(ranks, sizes, latencies, rates)
def test_the_best_curve_is_the_fastest_and_names_itself(world_size, num_bytes, alpha_s, rate):
    curves = tuple(FamilyCurve(name, world_size, alpha_s, rate) for name in ("ring", "tree", "gloo"))
    best = choose_best(curves)
    assert best.estimate_s(num_bytes) == min(curve.estimate_s(num_bytes) for curve in curves)
    (winner,) = [curve for curve in curves if curve.algorithm == best.explain(num_bytes)[0]]
    assert winner.estimate_s(num_bytes) == best.estimate_s(num_bytes)


def test_many_ranks_take_the_tree_for_small_messages_and_few_the_ring_for_large():
    def choose(world_size: int, num_bytes: int) -> str:
        curves = tuple(FamilyCurve(name, world_size, 1e-6, 1e10) for name in ("ring", "tree"))
        return choose_best(curves).explain(num_bytes)[0]

    assert (choose(1024, 1000), choose(4, 10**9)) == ("tree", "ring")


@given(names, st.floats(1e-7, 1e-2), st.floats(1e6, 1e12), st.lists(st.integers(2, 64), min_size=1, max_size=4))
def test_a_fit_recovers_its_parameters(name, alpha_s, rate, worlds):
    truth = {world: FamilyCurve(name, world, alpha_s, rate) for world in worlds}
    # Sizes at which latency and bandwidth both matter; otherwise one of them could not be identified.
    middle = alpha_s * rate
    points = [
        (size, world, curve.estimate_s(size))
        for world, curve in truth.items()
        for size in (max(1, int(middle / 100)), max(2, int(middle)), max(3, int(middle * 100)))
    ]
    fit = fit_family(points, name)
    assert fit.error < 1e-6
    for size, world, seconds in points:
        assert replace(fit, world_size=world).estimate_s(size) == pytest.approx(seconds, rel=1e-6)
    assert replace(fit, world_size=100).estimate_s(10**8) == pytest.approx(
        FamilyCurve(name, 100, alpha_s, rate).estimate_s(10**8), rel=1e-4
    )


def test_a_fit_has_residuals_and_no_negative_latency():
    fit = fit_family([(1000, 2, 0.5), (2000, 2, 2.0), (4000, 2, 4.0)], "ring")
    assert fit.alpha_s == 0 and len(fit.residuals) == 3 and fit.error > 0.1


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([(1000, 2, 1.0)], "two or more sizes"),
        ([(1000, 1, 1.0), (2000, 1, 2.0)], "got 0 points"),
        ([(1000, 2, 0.0), (2000, 2, 2.0)], "time that is 0"),
        ([(1000, 2, 5.0), (10**6, 2, 1.0)], "do not grow"),
    ],
)
def test_points_without_a_fit_are_refused(points, reason):
    with pytest.raises(MeasurementError, match=reason):
        fit_family(points, "ring")


def test_an_estimate_beyond_the_measurements_has_a_warning():
    fit = fit_family([(1000, 2, 1.0), (2000, 2, 2.0), (2000, 8, 4.0)], "ring")
    assert replace(fit, world_size=16).explain(4000)[1] == ""
    assert "17 ranks are over twice" in replace(fit, world_size=17).explain(4000)[1]
    both = replace(fit, world_size=17).explain(4001)[1]
    assert "17 ranks" in both and "largest measured size" in both
    assert FamilyCurve("ring", 10**6, 1e-6, 1e9).explain(2**50)[1] == ""  # assumed, not measured


def test_shared_memory_has_a_limit_of_ranks():
    with pytest.raises(ConfigError, match="1,024"):
        FamilyCurve("shared", 1024, 1e-6, 1e9)


@given(st.floats(1, 2**24), st.integers(2, 5000))
def test_a_scaled_curve_is_the_measured_one_at_home_and_grows_as_its_family(num_bytes, world_size):
    measured = MeasuredCurve((4, 2**20, 2**24), (1e-4, 3e-3, 9e-3))
    there = FamilyCurve("ring", 2, 1e-5, 1e9)
    home = scale_curve(measured, there, 2, 2)
    assert home.estimate_s(num_bytes) == pytest.approx(measured.estimate_s(num_bytes))
    assert home.explain(num_bytes)[0] == "measured"
    here = FamilyCurve("ring", world_size, 1e-5, 1e9)
    away = scale_curve(measured, there, 2, world_size)
    assert away.estimate_s(num_bytes) >= home.estimate_s(num_bytes) * (1 - 1e-12)
    assert away.estimate_s(4) == pytest.approx(1e-4 * here.estimate_s(4) / there.estimate_s(4))


def test_below_a_table_times_follow_its_first_two_points():
    curve = MeasuredCurve((10_000, 20_000, 80_000), (3e-3, 4e-3, 8e-3))
    assert [curve.estimate_s(size) for size in (5000, 0)] == pytest.approx([2.5e-3, 0.0])
    assert curve.estimate_s(1) == pytest.approx(2e-3, rel=1e-3)
    assert "4.88 KiB is extrapolated" in curve.explain(4999)[1] and not curve.explain(5000)[1]
    # Two points that suggest a negative latency give a small one; decreasing times carry no information.
    assert MeasuredCurve((10_000, 20_000), (1e-3, 9e-3)).estimate_s(1) == pytest.approx(1e-5, rel=0.02)
    assert MeasuredCurve((10_000, 20_000), (3e-3, 2e-3)).estimate_s(1) == 3e-3


def test_a_part_of_the_latency_is_a_launch_that_does_not_grow_with_the_ranks():
    points = [(size, 2, 2 * 1e-5 + size / 1e9) for size in (1000, 10**5, 10**7)]
    plain, launched = (fit_family(points, "ring", launch) for launch in (0.0, 0.7))
    assert plain.estimate_s(10**6) == pytest.approx(launched.estimate_s(10**6))
    there = [replace(fit, world_size=4).estimate_s(1) for fit in (plain, launched)]
    assert there == pytest.approx([6e-5, 1.4e-5 + 0.3 * 6e-5], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "hint"), [("rign", "did you mean ring"), ("twolevel", "two-level"), ("x", "use one of")]
)
def test_an_unknown_algorithm_is_refused_with_the_nearest(name, hint):
    with pytest.raises(ConfigError, match=hint):
        check_algorithm(name)


def test_the_interval_of_two_equally_large_errors_covers_90_percent():
    names = ("error", "noise", "shift", "slowdown", "latency")
    normal = statistics.NormalDist()
    _, draws = draw(lambda resample: [getattr(resample, name) for name in names])
    for one, other in itertools.combinations(range(len(names)), 2):
        sums = [(errors[one] + errors[other]) / math.sqrt(2) for errors in draws]
        low, high = find_interval(0.0, sums)
        assert 0.87 <= normal.cdf(high) - normal.cdf(low) <= 0.93
    for column in range(len(names)):
        low, high = find_interval(0.0, [errors[column] for errors in draws])
        assert (low, high) == pytest.approx((normal.inv_cdf(0.05), normal.inv_cdf(0.95)), rel=0.01)


def test_the_interval_of_few_draws_is_their_range():
    assert find_interval(2.0, []) == (2.0, 2.0)
    assert find_interval(2.0, [3.0]) == (2.0, 3.0)
    assert find_interval(2.0, [3.0, 1.0]) == (1.0, 3.0)


def test_series_of_equal_length_share_a_draw_and_without_a_source_all_repetitions_count():
    everything = Resample()
    assert everything.take((3.0, 1.0, 2.0)) == (3.0, 1.0, 2.0)
    first, again, other = (Resample(random.Random(seed)) for seed in (3, 3, 4))
    numbers = range(9)
    drawn = first.take(numbers)
    assert drawn == again.take(numbers) == first.take(numbers) != other.take(numbers) and set(drawn) <= set(numbers)
    assert Resample(random.Random(0)).take((5.0,)) == (5.0,)
