"""Training runs as records: batch sizes and their knee, large batches over seeds, the noise scale, epochs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RecordError
from paceline.records import CurvePoint
from paceline.records.kinds import record_from_json, record_to_json
from paceline.records.training import NoiseProbe, estimate_noise_scale, summarize_epochs
from paceline.studies.batch_sizes import find_knee
from paceline.studies.training_grid import summarize_seeds

from .made_scaling import SEEDS, make_batch, make_batches, make_rng, make_run, make_runs, slowest
from .made_training import EPOCH_ROWS, build_epoch_row, build_known, build_noise

# -- batch sizes -------------------------------------------------------------------------------------------------------


@given(SEEDS, st.integers(1, 5000), st.integers(1, 10**6), st.floats(1e-3, 1e3))
def test_epoch_step_and_rate_of_a_batch_size_follow_from_the_epochs(rng, batch_size, num_samples, epoch_s):
    record = make_batch(rng, batch_size, epoch_s, num_samples)
    middle_s = sorted(row[0] for row in record.timing.seconds)[1]
    assert record.epoch_s == middle_s
    assert record.step_s / batch_size == pytest.approx(middle_s / num_samples)
    assert record.samples_per_s * middle_s == pytest.approx(num_samples)


def test_a_batch_that_does_not_fit_has_no_times():
    record = make_batch(make_rng(), 64, failure="out of memory")
    assert (record.epoch_s, record.step_s, record.samples_per_s) == (None,) * 3
    assert record_from_json(record_to_json(record)) == record


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failure": "out of memory", "epoch_s": 1.0}, "either times or a failure"),
        ({}, "either times or a failure"),
        ({"epoch_s": 1.0, "num_steps": 0}, "num_steps is 0"),
    ],
)
def test_an_impossible_batch_is_refused(changes, reason):
    with pytest.raises(RecordError, match=reason):
        make_batch(make_rng(), 64, **changes)


@given(SEEDS, st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_the_knee_is_the_smallest_batch_with_nine_tenths_of_the_best_rate_unless_it_is_the_largest(rng, epochs):
    records = [make_batch(rng, 2**i, epoch_s) for i, epoch_s in enumerate(epochs)]
    rates = {r.batch_size: r.num_samples / float(np.median(slowest(r.timing))) for r in records}
    expected = min(size for size, rate in rates.items() if rate >= 0.9 * max(rates.values()))
    rng.shuffle(records)
    knee = find_knee(records)
    assert (knee and knee.batch_size) == (expected if expected < max(rates) else None)


def test_a_sweep_in_which_nothing_fits_has_no_knee():
    assert find_knee([make_batch(make_rng(), 64, failure="out of memory")]) is None
    assert find_knee(make_batches(make_rng())).batch_size == 512
    assert find_knee(make_batches(make_rng())[:3]) is None  # still growing at 512, the largest size


# -- large batches -----------------------------------------------------------------------------------------------------


def test_a_run_survives_json_whether_it_failed_or_not():
    run = make_run(accuracy=0.8)
    failed = replace(run, failure="loss is nan")
    for each in (run, failed, replace(failed, curve=())):
        assert record_from_json(record_to_json(each)) == each


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"budget": "hours"}, "budget is 'hours'"),
        ({"curve": ()}, "nothing was evaluated"),
        ({"curve": (CurvePoint(1, 1, 1.0, math.nan, 0.5),)}, "NaN or infinite"),
    ],
)
def test_an_impossible_run_is_refused(changes, reason):
    with pytest.raises(RecordError, match=reason):
        make_run(**changes)


SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=6)


@given(SHARES)
def test_mean_and_deviation_over_seeds_are_those_of_a_sample(values):
    (summary,) = summarize_seeds([make_run(seed=seed, accuracy=value) for seed, value in enumerate(values)])
    n = len(values)
    mean = sum(values) / n
    assert summary.accuracy.mean == pytest.approx(mean)
    if n == 1:
        assert summary.accuracy.deviation is None
    else:
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
        assert summary.accuracy.deviation == pytest.approx(deviation, abs=1e-9)
    assert (summary.test_loss.mean, summary.train_loss.mean) == (pytest.approx(0.55), pytest.approx(0.5))


@given(SHARES, SHARES)
def test_the_gap_is_the_baselines_mean_minus_the_recipes(base, mine):
    runs = [make_run(128, "none", seed, value) for seed, value in enumerate(base)]
    runs += [make_run(512, "lars", seed, value) for seed, value in enumerate(mine)]
    baseline, summary = summarize_seeds(runs)
    assert baseline.gap is None
    assert summary.gap == pytest.approx(sum(base) / len(base) - sum(mine) / len(mine), abs=1e-12)


def test_the_baseline_is_the_smallest_batch_without_a_recipe_of_the_same_budget():
    runs = [
        make_run(512), make_run(256), make_run(64, "lars"), make_run(512, "lars"), make_run(1024, budget="updates"),
        make_run(2048, budget="updates"),
    ]  # fmt: skip
    summaries = {s.first.cell: s for s in summarize_seeds(runs)}
    assert [s.baseline and s.baseline.first.cell for s in summaries.values()] == [
        ("epochs", 256, "none"), None, ("epochs", 256, "none"), ("epochs", 256, "none"), None,
        ("updates", 1024, "none"),
    ]  # fmt: skip
    assert list(summaries) == [run.cell for run in runs]


def test_without_a_plain_run_there_is_no_gap():
    (summary,) = summarize_seeds([make_run(512, "lars")])
    assert (summary.baseline, summary.gap) == (None, None)


def test_failed_seeds_are_counted_and_left_out():
    runs = [
        make_run(seed=0, accuracy=0.5),
        make_run(seed=1, failure="nan", accuracy=0.1),
        make_run(seed=2, accuracy=0.7),
    ]
    (summary,) = summarize_seeds(runs)
    assert (summary.num_failed, len(summary.runs), summary.accuracy.mean) == (1, 3, pytest.approx(0.6))
    (none_left,) = summarize_seeds(runs[1:2])
    assert (none_left.accuracy, none_left.test_loss, none_left.train_loss) == (None, None, None)


def test_a_baseline_of_which_no_seed_finished_gives_no_gap():
    base, summary = summarize_seeds([make_run(128, failure="nan", curve=()), make_run(512)])
    assert (base.accuracy, summary.baseline, summary.gap) == (None, base, None)


def test_a_seed_that_appears_twice_is_refused():
    with pytest.raises(RecordError, match=r"128.*twice"):
        summarize_seeds([make_run(128), make_run(128)])


def test_the_made_study_has_what_the_tests_of_tables_need():
    summaries = summarize_seeds(make_runs(make_rng()))
    assert [s.num_failed for s in summaries] == [0, 0, 0, 1, 0]


# -- the gradient noise scale ------------------------------------------------------------------------------------------


def draw_probes(rng, num_probes, num_small, b, gradient, deviations):
    """Probes of samples with normally distributed gradients: mean `gradient`, and these deviations along the axes."""
    noise = rng.standard_normal((num_probes, num_small, len(gradient))) * deviations / math.sqrt(b)
    grads = gradient + noise
    small, big = (grads**2).sum(-1), (grads.mean(1) ** 2).sum(-1)
    return [NoiseProbe(tuple(map(float, row)), float(square)) for row, square in zip(small, big, strict=True)]


def test_the_algebra_of_two_batch_sizes_is_exact():
    """b = 4 and B = 12: |G|^2 = (12 * 5 - 4 * 9) / 8 = 3, and tr = (9 - 5) / (1/4 - 1/12) = 24."""
    estimate = estimate_noise_scale([NoiseProbe((8.0, 9.0, 10.0), 5.0)], 4)
    assert estimate.gradient_square == pytest.approx(3.0)
    assert estimate.noise_trace == pytest.approx(24.0)
    assert estimate.noise_scale == pytest.approx(8.0)
    assert estimate.interval is None


def test_probes_are_averaged_before_the_ratio_is_taken():
    """|G|^2 of 3 and 1, tr of 24 and 48: the ratio of means is 18, the mean of ratios 28."""
    estimate = estimate_noise_scale([NoiseProbe((8.0, 9.0, 10.0), 5.0), NoiseProbe((13.0,) * 3, 5.0)], 4)
    assert (estimate.gradient_square, estimate.noise_trace) == pytest.approx((2.0, 36.0))
    assert estimate.noise_scale == pytest.approx(18.0)


def test_gradients_without_noise_have_the_noise_scale_0():
    estimate = estimate_noise_scale([NoiseProbe((2.0, 2.0), 2.0)] * 4, 16)
    assert (estimate.gradient_square, estimate.noise_scale, estimate.interval) == (2.0, 0.0, (0.0, 0.0))


@pytest.mark.parametrize(("b", "num_small"), [(1, 2), (4, 8), (32, 3)])
def test_estimates_are_unbiased(b, num_small):
    """Over many probes, the mean is within four standard errors of the true value."""
    rng = np.random.default_rng(1)
    gradient, deviations = rng.standard_normal(20), rng.uniform(1, 5, 20)
    probes = draw_probes(rng, 6000, num_small, b, gradient, deviations)
    each = [estimate_noise_scale([probe], b) for probe in probes]
    for found, truth in (
        ([e.gradient_square for e in each], (gradient**2).sum()),
        ([e.noise_trace for e in each], (deviations**2).sum()),
    ):
        assert abs(np.mean(found) - truth) < 4 * np.std(found) / math.sqrt(len(found))
    noise_scale = estimate_noise_scale(probes, b).noise_scale
    assert noise_scale == pytest.approx((deviations**2).sum() / (gradient**2).sum(), rel=0.2)


@pytest.mark.parametrize(
    ("num_probes", "strength"),
    [(4, 1.0), (8, 0.1), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((8, 1.0), (30, 1.0), (20, 0.02)))],
)
def test_nine_of_ten_intervals_contain_the_truth(num_probes, strength):
    """This holds even with few probes; if noise dominates the gradient, intervals have no upper bound."""
    rng = np.random.default_rng(2)
    gradient, deviations = strength * rng.standard_normal(30), rng.uniform(1, 3, 30)
    truth = (deviations**2).sum() / (gradient**2).sum()
    trials, held = 1000, 0
    for _ in range(trials):
        low, high = estimate_noise_scale(draw_probes(rng, num_probes, 4, 2, gradient, deviations), 2).interval
        held += low <= truth <= high
    assert 0.86 <= held / trials <= 0.97


def test_a_gradient_lost_in_noise_is_bounded_from_below():
    """|g_B|^2 is half of |g_b|^2 for two small batches: everything is noise."""
    probes = [NoiseProbe((s, s), s / 2 * d) for s, d in ((8.0, 0.9), (9.0, 1.0), (7.0, 0.95), (8.0, 0.98))]
    estimate = estimate_noise_scale(probes, 10)
    assert estimate.gradient_square < 0 and estimate.noise_scale is None
    low, high = estimate.interval
    assert 10 < low < math.inf and high == math.inf
    assert build_noise(tuple(probes)).noise_scale is None


def test_a_square_that_is_surely_below_0_still_bounds_from_below():
    """One probe in twenty is an outlier, and a job may draw only outliers."""
    probes = [NoiseProbe((8.0, 8.0), big) for big in (3.8, 3.81, 3.79)]
    low, high = estimate_noise_scale(probes, 10).interval
    assert 10 < low < math.inf and high == math.inf


def test_more_probes_narrow_the_interval():
    rng = np.random.default_rng(3)
    probes = draw_probes(rng, 200, 4, 2, np.ones(30), np.full(30, 2.0))
    widths = [high - low for low, high in (estimate_noise_scale(probes[:n], 2).interval for n in (3, 20, 200))]
    assert widths[0] > widths[1] > widths[2]


def test_a_record_has_the_noise_scale_of_its_probes():
    record = build_known(840.0)
    assert record.big_batch_size == 16 and record.noise_scale == pytest.approx(840)


def test_only_what_was_measured_is_written():
    record = build_noise(note="linear")
    assert record.estimate.noise_scale is not None  # values computed before saving are not saved either
    document = record_to_json(record)
    fields = {"kind", "source", "note", "model", "data", "device", "world_size", "precision", "step", "epoch", "seed"}
    assert set(document) == fields | {"small_batch_size", "probes"}
    assert set(document["probes"][0]) == {"small_squares", "big_square"}
    assert record_from_json(json.loads(json.dumps(document, allow_nan=False))) == record


@pytest.mark.parametrize(
    ("squares", "big", "reason"),
    [
        ((1.0,), 1.0, "at least 2"),
        ((1.0, 2.0), 1.6, "1.6"),
        ((1.0, -1.0), 1.0, "small_squares is -1.0"),
        ((1.0, math.nan), 1.0, "small_squares is nan"),
        ((1.0, 2.0), math.inf, "big_square is inf"),
    ],
)
def test_an_impossible_probe_is_refused(squares, big, reason):
    with pytest.raises(RecordError, match=reason):
        NoiseProbe(squares, big)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"small_batch_size": 0}, "small_batch_size is 0"),
        ({"world_size": 0}, "world_size is 0"),
        ({"step": -1}, "step is -1"),
        ({"epoch": math.nan}, "epoch is nan"),
        ({"probes": (NoiseProbe((1.0, 1.0), 1.0), NoiseProbe((1.0,) * 3, 1.0))}, r"probes of \[2, 3\] small"),
        ({"source": "guessed"}, "source is 'guessed'"),
    ],
)
def test_an_impossible_record_is_refused(changes, reason):
    with pytest.raises(RecordError, match=reason):
        build_noise(**changes)


def test_a_record_without_probes_is_refused():
    with pytest.raises(RecordError, match="probe"):
        replace(build_noise(), probes=())


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_averages_weigh_every_sample_equally():
    """A tail of a single sample with a large loss counts as one sample, not as a third."""
    first, second = summarize_epochs(EPOCH_ROWS)
    assert (first.epoch, first.num_steps, first.num_samples) == (0, 3, 25)
    assert first.loss == pytest.approx((12 * 3 + 12 * 1 + 13) / 25)
    assert first.accuracy == pytest.approx((12 * 0.25 + 12 * 0.5 + 1) / 25)
    assert (first.test_loss, first.test_accuracy) == (1.5, 0.4)
    assert (second.epoch, second.num_steps, second.loss) == (1, 1, 0.5)


def test_times_add_up_and_untimed_steps_count_as_average():
    first, _ = summarize_epochs(EPOCH_ROWS)
    assert first.seconds == pytest.approx(1.5)
    assert first.samples_per_s == pytest.approx(25 / 1.5)
    assert first.exposed_comm_s == pytest.approx(0.3)
    assert first.exposed_share == pytest.approx(0.2)
    assert first.data_wait_share == pytest.approx(0.1)


def test_unmeasured_values_are_none():
    (epoch,) = summarize_epochs([build_epoch_row(1, accuracy=None, exposed_comm_s=None)])
    assert (epoch.accuracy, epoch.exposed_comm_s, epoch.exposed_share) == (None, None, None)
    assert (epoch.test_loss, epoch.test_accuracy) == (None, None)


def test_rows_in_any_order_of_epochs_and_none_at_all():
    assert [epoch.epoch for epoch in summarize_epochs([build_epoch_row(4, 1), build_epoch_row(1, 0)])] == [0, 1]
    assert summarize_epochs([]) == []


def test_a_missing_time_gives_no_rate():
    (epoch,) = summarize_epochs([build_epoch_row(1, step_s=0.0)])
    assert (epoch.samples_per_s, epoch.exposed_share, epoch.data_wait_share) == (0.0, None, 0.0)
