"""Statistics of timed repetitions and invalid samples."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RecordError
from paceline.records.samples import Samples, Summary, quantile

TIMES = st.lists(st.floats(0, 1e3), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0], 0.25, 1.25),
        ([5.0], 0.9, 5.0),
        (list(range(11)), 0.1, 1.0),
        (list(range(11)), 0.9, 9.0),
        ([4, 1, 3], 0.0, 1),
        ([4, 1, 3], 1.0, 4),
    ],
)
def test_quantile_interpolates_between_neighbors(values, q, expected):
    assert quantile(values, q) == pytest.approx(expected)


@given(TIMES, st.floats(0, 1))
def test_quantile_stays_inside_the_values_and_agrees_with_the_median(values, q):
    slack = 1e-9 * max(values)
    assert min(values) - slack <= quantile(values, q) <= max(values) + slack
    assert quantile(values, 0.5) == pytest.approx(statistics.median(values))


@pytest.mark.parametrize(("reducer", "reduced"), [("max", (3.0, 5.0)), ("min", (1.0, 4.0)), ("mean", (2.0, 4.5))])
def test_a_reducer_combines_the_times_of_all_ranks(reducer, reduced):
    samples = Samples(seconds=((1.0, 3.0), (5.0, 4.0)), warmup_seconds=((99.0, 99.0),), reducer=reducer)
    assert samples.reduced_s == reduced
    assert (samples.count, samples.num_ranks) == (2, 2)


def test_the_default_reducer_waits_for_the_last_rank():
    assert Samples(seconds=((1.0, 3.0, 2.0),)).median_s == 3.0


def test_statistics_of_the_reduced_times(build_samples):
    samples = build_samples(*(float(i) for i in (7, 0, 10, 3, 5, 1, 9, 2, 8, 4, 6)))
    assert (samples.median_s, samples.p10_s, samples.p90_s, samples.mean_s) == (5.0, 1.0, 9.0, 5.0)
    assert samples.stdev_s == pytest.approx(statistics.stdev(range(11)))
    assert samples.noise == pytest.approx(0.8)
    assert (samples.center_s, samples.statistic) == (5.0, "median")


def test_one_repetition_has_no_spread(build_samples):
    samples = build_samples(2.0)
    assert (samples.stdev_s, samples.noise, samples.drift) == (0.0, 0.0, 0.0)
    assert samples.p10_s == samples.p90_s == samples.median_s == 2.0


def test_times_of_zero_have_neither_noise_nor_drift(build_samples):
    samples = build_samples(0.0, 0.0, 0.0, 0.0)
    assert (samples.noise, samples.drift) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("times_s", "drift"),
    [
        ((2.0, 2.0, 3.0, 3.0), 0.5),
        ((4.0, 4.0, 2.0, 2.0), -0.5),
        ((1.0, 1.0, 50.0, 2.0, 4.0), 2.0),  # with an odd count, the middle sample belongs to neither half
        ((1.0, 9.0, 9.0), 0.0),  # too few samples to split
    ],
)
def test_drift_compares_the_halves(build_samples, times_s, drift):
    assert build_samples(*times_s).drift == pytest.approx(drift)


def test_arrivals_give_skew_and_the_time_from_the_last_arrival():
    samples = Samples(seconds=((1.0, 0.6), (1.0, 1.2), (3.0, 1.0)), arrivals_s=((0.0, 0.5), (0.1, 0.0), (0.0, 2.0)))
    assert samples.skew_s == 0.5
    assert samples.from_last_arrival_s == pytest.approx((0.6, 1.1, 1.0))


def test_without_a_common_clock_there_is_no_skew(build_samples):
    assert build_samples().skew_s is None
    assert build_samples().from_last_arrival_s is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"seconds": ()}, "at least one repetition"),
        ({"seconds": ((),)}, "same number of ranks"),
        ({"seconds": ((1.0, 2.0), (1.0,))}, "same number of ranks"),
        ({"seconds": ((1.0, 2.0),), "warmup_seconds": ((1.0,),)}, "same number of ranks"),
        ({"seconds": ((1.0, 2.0),), "arrivals_s": ((0.0,),)}, "same number of ranks"),
        ({"seconds": ((1.0,), (1.0,)), "arrivals_s": ((0.0,),)}, "1 arrivals for 2 repetitions"),
        ({"seconds": ((-1e-9,),)}, "seconds is -1e-09"),
        ({"seconds": ((1.0,),), "warmup_seconds": ((float("nan"),),)}, "warmup_seconds is nan"),
        ({"seconds": ((float("inf"),),)}, "seconds is inf"),
        ({"seconds": ((1.0,),), "reducer": "median"}, "reducer is 'median'; it must be one of max"),
    ],
)
def test_impossible_samples_are_refused(fields, reason):
    with pytest.raises(RecordError, match=reason):
        Samples(**fields)


@pytest.mark.parametrize(
    ("fields", "center_s", "statistic"),
    [
        ({"mean_s": 2.0}, 2.0, "mean"),
        ({"median_s": 3.0}, 3.0, "median"),
        ({"mean_s": 2.0, "median_s": 3.0}, 3.0, "median"),
        ({"mean_s": 2.0, "median_s": 0.0}, 0.0, "median"),
    ],
)
def test_a_summary_prefers_its_median(fields, center_s, statistic):
    summary = Summary(**fields)
    assert (summary.center_s, summary.statistic) == (center_s, statistic)
    assert summary.p10_s is None
    assert summary.p90_s is None


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"min_s": 1.0, "max_s": 2.0},
        {"mean_s": -1.0},
        {"mean_s": 1.0, "stdev_s": -1.0},
        {"median_s": float("nan")},
        {"mean_s": 1.0, "min_s": -1.0},
        {"mean_s": 1.0, "max_s": float("nan")},
        {"mean_s": float("inf")},
    ],
)
def test_an_impossible_summary_is_refused(fields):
    with pytest.raises(RecordError):
        Summary(**fields)
