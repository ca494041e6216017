"""The line through the times of a collective: exact where the data is, and refused where there is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import MeasurementError
from paceline.predict.costs import AlphaBeta, fit_alpha_beta, fit_collectives
from paceline.records import Summary


@given(
    alpha_s=st.floats(1e-6, 1e-1),
    knee_bytes=st.integers(64, 2**30),  # where latency and bandwidth cost the same
    steps=st.sets(st.integers(-4, 6), min_size=2),
    shuffle=st.randoms(use_true_random=False),
)
def test_a_noiseless_line_is_recovered_exactly(alpha_s, knee_bytes, steps, shuffle):
    beta = knee_bytes / alpha_s
    sizes = sorted({round(knee_bytes * 2.0**step) for step in steps})
    points = [(size, alpha_s + size / beta) for size in sizes]
    shuffle.shuffle(points)
    fit = fit_alpha_beta(points)
    assert fit.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert fit.beta_bytes_per_s == pytest.approx(beta, rel=1e-6)
    assert (fit.min_bytes, fit.max_bytes) == (sizes[0], sizes[-1])
    assert fit.max_rel_residual < 1e-9
    assert fit.estimate_s(3 * knee_bytes) == pytest.approx(4 * alpha_s, rel=1e-6)


def test_a_negative_latency_is_clipped_to_the_best_line_through_the_origin():
    points = [(100, 0.5), (1000, 10.0), (10000, 110.0)]
    fit = fit_alpha_beta(points)
    assert fit.alpha_s == 0.0

    def error(beta):
        return sum(((size / beta - t) / t) ** 2 for size, t in points)

    best = error(fit.beta_bytes_per_s)
    assert best < error(fit.beta_bytes_per_s * 1.01)
    assert best < error(fit.beta_bytes_per_s * 0.99)


def test_errors_are_weighted_relative_to_the_time():
    """With absolute errors the one long time that is off would drown the latency that the short ones agree on."""
    points = [(2**k, 1e-3 + 2**k / 1e9) for k in range(4, 14)] + [(10**9, 1.5 * (1e-3 + 1.0))]
    fit = fit_alpha_beta(points)
    assert fit.alpha_s == pytest.approx(1e-3, rel=0.02)
    assert max(abs(r) for r in fit.residuals[:-1]) < 0.05


@given(st.floats(1e-3, 1e3), st.lists(st.floats(0.5, 2.0), min_size=4, max_size=4))
def test_the_unit_of_time_does_not_change_the_fit(unit, noise):
    points = [(4**k, (1 + 4**k / 64) * n) for k, n in zip(range(1, 8, 2), noise, strict=True)]
    try:
        one = fit_alpha_beta(points)
    except MeasurementError:
        return
    other = fit_alpha_beta([(size, t * unit) for size, t in points])
    assert other.residuals == pytest.approx(one.residuals, abs=1e-6)


def test_residuals_are_signed_and_in_order_of_size():
    fit = fit_alpha_beta([(4000, 4.0), (1000, 1.2), (2000, 2.0), (3000, 2.8)])
    assert [r > 0 for r in fit.residuals] == [
        fit.estimate_s(size) > t for size, t in [(1000, 1.2), (2000, 2.0), (3000, 2.8), (4000, 4.0)]
    ]
    assert fit.residuals[1] == pytest.approx((fit.estimate_s(2000) - 2.0) / 2.0)
    assert fit.max_rel_residual == max(map(abs, fit.residuals))


def test_the_largest_residual_has_no_sign():
    assert AlphaBeta(0.0, 1.0, 1, 2, (0.1, -0.3, 0.2)).max_rel_residual == 0.3


@pytest.mark.parametrize(
    ("points", "reason"),
    [
        ([], "at least two sizes, got 0"),
        ([(1024, 1.0)], "at least two sizes, got 1"),
        ([(1024, 1.0), (1024, 2.0)], "at least two sizes, got 1"),
        ([(1024, 0.0), (2048, 1.0)], "time of 0 s"),
        ([(1024, 2.0), (2048, 1.0)], "do not grow"),
        ([(1024, 1.0), (2048, 1.0)], "do not grow"),
    ],
)
def test_points_without_a_line_are_refused(points, reason):
    with pytest.raises(MeasurementError, match=reason):
        fit_alpha_beta(points)


@given(st.floats(1e-6, 1.0), st.integers(2, 10))
def test_equal_times_have_no_bandwidth_whatever_the_rounding(seconds, count):
    with pytest.raises(MeasurementError, match="do not grow"):
        fit_alpha_beta([(4**k, seconds) for k in range(3, 3 + count)])


def test_records_are_fitted_one_curve_at_a_time(build_collective):
    def curve(alpha_s, beta, sizes=(2**10, 2**15, 2**20), **labels):
        return [build_collective(num_bytes=x, timing=Summary(mean_s=alpha_s + x / beta), **labels) for x in sizes]

    fast = curve(1e-5, 1e10, backend="nccl", device="cuda")
    slow = curve(1e-3, 1e8)
    more_ranks = curve(2e-3, 1e8, world_size=4)
    half = curve(3e-3, 1e8, dtype="float16")
    alone = curve(1e-3, 1e8, sizes=(2**20,), op="max")  # one size has no line
    mixed = [r for rows in zip(fast, slow, more_ranks, half, strict=True) for r in rows]
    fits = fit_collectives([*mixed, *alone])
    assert [record.key for record, _ in fits] == [rows[0].key for rows in (fast, slow, more_ranks, half)]
    assert [fit.alpha_s for _, fit in fits] == pytest.approx([1e-5, 1e-3, 2e-3, 3e-3])
    assert [fit.beta_bytes_per_s for _, fit in fits] == pytest.approx([1e10, 1e8, 1e8, 1e8])
