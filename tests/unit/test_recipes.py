"""Runs of a large-batch study together: mean and deviation over seeds, and the gap to the baseline."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RecordError
from paceline.records.training import RecipeSummary, Spread, summarize_recipes

from .made_scaling import make_rng, make_run, make_runs

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=6)


@given(SHARES)
def test_mean_and_deviation_over_seeds_are_those_of_a_sample(values):
    (summary,) = summarize_recipes([make_run(seed=seed, accuracy=value) for seed, value in enumerate(values)])
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
def test_the_gap_is_the_baselines_mean_minus_mine(base, mine):
    runs = [make_run(128, "none", seed, value) for seed, value in enumerate(base)]
    runs += [make_run(512, "lars", seed, value) for seed, value in enumerate(mine)]
    baseline, summary = summarize_recipes(runs)
    assert baseline.gap is None
    assert summary.gap == pytest.approx(sum(base) / len(base) - sum(mine) / len(mine), abs=1e-12)


def test_the_baseline_is_the_smallest_batch_without_a_recipe_of_the_same_budget():
    runs = [
        make_run(512), make_run(256), make_run(64, "lars"), make_run(512, "lars"), make_run(1024, budget="updates"),
        make_run(2048, budget="updates"),
    ]  # fmt: skip
    summaries = {s.first.cell: s for s in summarize_recipes(runs)}
    assert [s.baseline and s.baseline.first.cell for s in summaries.values()] == [
        ("epochs", 256, "none"), None, ("epochs", 256, "none"), ("epochs", 256, "none"), None,
        ("updates", 1024, "none"),
    ]  # fmt: skip
    assert list(summaries) == [run.cell for run in runs]


def test_without_a_plain_run_there_is_no_gap():
    (summary,) = summarize_recipes([make_run(512, "lars")])
    assert (summary.baseline, summary.gap) == (None, None)


def test_failed_seeds_are_counted_and_left_out():
    runs = [
        make_run(seed=0, accuracy=0.5),
        make_run(seed=1, failure="nan", accuracy=0.1),
        make_run(seed=2, accuracy=0.7),
    ]
    (summary,) = summarize_recipes(runs)
    assert (summary.num_failed, len(summary.runs), summary.accuracy.mean) == (1, 3, pytest.approx(0.6))
    (none_left,) = summarize_recipes(runs[1:2])
    assert (none_left.accuracy, none_left.test_loss, none_left.train_loss) == (None, None, None)


def test_a_baseline_of_which_no_seed_finished_gives_no_gap():
    base, summary = summarize_recipes([make_run(128, failure="nan", curve=()), make_run(512)])
    assert (base.accuracy, summary.baseline, summary.gap) == (None, base, None)


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ((make_run(128), make_run(256, seed=1)), "several cells"),
        ((make_run(128), make_run(128, "lars", seed=1)), "several cells"),
        ((make_run(128), make_run(128)), "a seed is there twice"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(runs, reason):
    with pytest.raises(RecordError, match=reason):
        RecipeSummary(runs)


def test_the_made_study_has_what_the_tests_of_tables_need():
    summaries = summarize_recipes(make_runs(make_rng()))
    assert [s.num_failed for s in summaries] == [0, 0, 0, 1, 0]
    assert Spread.of([1.0]) == Spread(1.0, None)
