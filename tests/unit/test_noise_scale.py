"""The gradient noise scale from squared norms: exact algebra, unbiased estimates, honest intervals, and the words."""

import dataclasses
import json
import math

import numpy
import pytest

from paceline.errors import RecordError
from paceline.records.kinds import record_from_json, record_to_json
from paceline.records.training import NoiseProbe, NoiseRecord, estimate_noise_scale
from paceline.report.noise_tables import describe_noise, noise_row, noise_table, plot_noise
from paceline.report.plots import render_svg
from paceline.report.tables import render_csv, render_markdown


def build_record(probes=None, **changes):
    fields = {
        "model": "cnn", "data": "mnist", "device": "cpu", "world_size": 2, "precision": "fp32", "step": 40,
        "epoch": 5.0, "seed": 1, "small_batch_size": 8,
        "probes": probes or (NoiseProbe((6.0, 4.0), 3.0), NoiseProbe((5.0, 7.0), 4.0), NoiseProbe((4.0, 4.0), 2.0)),
    }  # fmt: skip
    return NoiseRecord(**{**fields, **changes})


def build_known(noise_scale, **changes):
    """A record whose noise scale is this one: |G|^2 is 1, and b is 8 of 16."""
    small, big = 1 + noise_scale / 8, 1 + noise_scale / 16
    return build_record(tuple(NoiseProbe((small + s, small + s), big) for s in (-0.03, 0.0, 0.03)), **changes)


def draw_probes(rng, num_probes, num_small, b, gradient, deviations):
    """Probes of samples whose gradients are normal: mean `gradient`, and these deviations along the axes."""
    noise = rng.standard_normal((num_probes, num_small, len(gradient))) * deviations / math.sqrt(b)
    grads = gradient + noise
    small, big = (grads**2).sum(-1), (grads.mean(1) ** 2).sum(-1)
    return [NoiseProbe(tuple(map(float, row)), float(square)) for row, square in zip(small, big, strict=True)]


# -- the estimate ------------------------------------------------------------------------------------------------------


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
    record = build_record((NoiseProbe((2.0, 2.0), 2.0),) * 4)
    assert (record.steps_factor(64), record.samples_factor(64)) == (1.0, math.inf)


@pytest.mark.parametrize(("b", "num_small"), [(1, 2), (4, 8), (32, 3)])
def test_estimates_are_unbiased(b, num_small):
    """The mean over many probes comes to the truth within four of its own deviations."""
    rng = numpy.random.default_rng(1)
    gradient, deviations = rng.standard_normal(20), rng.uniform(1, 5, 20)
    probes = draw_probes(rng, 6000, num_small, b, gradient, deviations)
    each = [estimate_noise_scale([probe], b) for probe in probes]
    for found, truth in (
        ([e.gradient_square for e in each], (gradient**2).sum()),
        ([e.noise_trace for e in each], (deviations**2).sum()),
    ):
        assert abs(numpy.mean(found) - truth) < 4 * numpy.std(found) / math.sqrt(len(found))
    noise_scale = estimate_noise_scale(probes, b).noise_scale
    assert noise_scale == pytest.approx((deviations**2).sum() / (gradient**2).sum(), rel=0.2)


@pytest.mark.parametrize(("num_probes", "strength"), [(4, 1.0), (8, 1.0), (30, 1.0), (8, 0.1), (20, 0.02)])
def test_nine_of_ten_intervals_hold_the_truth(num_probes, strength):
    """Also of few probes, and where the gradient drowns in noise: those intervals have no upper end."""
    rng = numpy.random.default_rng(2)
    gradient, deviations = strength * rng.standard_normal(30), rng.uniform(1, 3, 30)
    truth = (deviations**2).sum() / (gradient**2).sum()
    trials, held = 1000, 0
    for _ in range(trials):
        low, high = estimate_noise_scale(draw_probes(rng, num_probes, 4, 2, gradient, deviations), 2).interval
        held += low <= truth <= high
    assert 0.86 <= held / trials <= 0.97


def test_a_gradient_lost_in_noise_is_bounded_from_below():
    """|g_B|^2 is half of |g_b|^2 for two small batches: all of it is noise."""
    probes = [NoiseProbe((s, s), s / 2 * d) for s, d in ((8.0, 0.9), (9.0, 1.0), (7.0, 0.95), (8.0, 0.98))]
    estimate = estimate_noise_scale(probes, 10)
    assert estimate.gradient_square < 0 and estimate.noise_scale is None
    low, high = estimate.interval
    assert 10 < low < math.inf and high == math.inf
    record = build_record(tuple(probes))
    assert (record.critical_batch_size, record.steps_factor(8), record.samples_factor(8)) == (None, None, None)


def test_a_square_that_is_surely_below_0_still_bounds_from_below():
    """One probe in twenty is unlucky, and a job may have unlucky ones alone."""
    probes = [NoiseProbe((8.0, 8.0), big) for big in (3.8, 3.81, 3.79)]
    low, high = estimate_noise_scale(probes, 10).interval
    assert 10 < low < math.inf and high == math.inf


def test_more_probes_narrow_the_interval():
    rng = numpy.random.default_rng(3)
    probes = draw_probes(rng, 200, 4, 2, numpy.ones(30), numpy.full(30, 2.0))
    widths = [high - low for low, high in (estimate_noise_scale(probes[:n], 2).interval for n in (3, 20, 200))]
    assert widths[0] > widths[1] > widths[2]


# -- the record --------------------------------------------------------------------------------------------------------


def test_costs_follow_from_the_noise_scale():
    record = build_known(840.0)
    assert record.big_batch_size == 16
    assert record.noise_scale == record.critical_batch_size == pytest.approx(840)
    assert record.steps_factor(840) == record.samples_factor(840) == pytest.approx(2)
    assert record.samples_factor(8192) == pytest.approx(10.75, abs=0.01)
    assert record.steps_factor(8192) == pytest.approx(1.10, abs=0.01)


def test_only_what_was_measured_is_written():
    record = build_record(note="linear")
    assert record.estimate.noise_scale is not None  # and what was computed before writing is not written either
    document = record_to_json(record)
    fields = {"kind", "source", "note", "model", "data", "device", "world_size", "precision", "step", "epoch", "seed"}
    assert set(document) == fields | {"small_batch_size", "probes"}
    assert set(document["probes"][0]) == {"small_squares", "big_square"}
    assert record_from_json(json.loads(json.dumps(document, allow_nan=False))) == record


@pytest.mark.parametrize(
    ("squares", "big", "reason"),
    [
        ((), 1.0, "at least 2"),
        ((1.0,), 1.0, "at least 2"),
        (3.0, 1.0, "at least 2"),
        ((1.0, -1.0), 1.0, "squared norm -1.0"),
        ((1.0, math.nan), 1.0, "squared norm nan"),
        ((1.0, 2.0), math.inf, "squared norm inf"),
        ((1.0, "2"), 1.0, "squared norm '2'"),
        ((1.0, 2.0), 1.6, "a mean cannot be longer"),
    ],
)
def test_an_impossible_probe_is_refused(squares, big, reason):
    with pytest.raises(RecordError, match=reason):
        NoiseProbe(squares, big)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"small_batch_size": 0}, "batches of 0"),
        ({"world_size": 0}, "on 0 ranks"),
        ({"step": -1}, "after -1 steps"),
        ({"epoch": math.nan}, "the epoch is nan"),
        ({"epoch": "5"}, "the epoch is '5'"),
        ({"probes": (NoiseProbe((1.0, 1.0), 1.0), NoiseProbe((1.0,) * 3, 1.0))}, r"probes of \[2, 3\] small"),
        ({"source": "guessed"}, "unknown source"),
    ],
)
def test_an_impossible_record_is_refused(changes, reason):
    with pytest.raises(RecordError, match=reason):
        build_record(**changes)


@pytest.mark.parametrize(("probes", "b"), [([], 4), ([NoiseProbe((1.0, 1.0), 1.0)], 0)])
def test_nothing_is_estimated_from_nothing(probes, b):
    with pytest.raises(RecordError, match="at least 1 of each"):
        estimate_noise_scale(probes, b)


def test_a_record_without_probes_is_refused():
    with pytest.raises(RecordError, match="at least one probe"):
        dataclasses.replace(build_record(), probes=())


# -- the words ---------------------------------------------------------------------------------------------------------

LOST = build_record(tuple(NoiseProbe((s, s), s * d) for s, d in ((8.0, 0.45), (9.0, 0.5), (7.0, 0.48))), epoch=6.0)
UNSURE = build_record(tuple(NoiseProbe((8.0, 8.0), big) for big in (3.0, 4.5, 6.0)))


def test_the_table_has_what_was_found_and_how_sure_it_is():
    text = render_markdown(noise_table, [build_known(840.0), LOST])
    assert len({line.count("|") for line in text.splitlines()}) == 1
    known, lost = text.splitlines()[2:]
    assert "| 840 |" in known and "| 1 | 840 |" in known
    low = LOST.estimate.interval[0]
    assert f"| > {low:,.0f} | from {low:,.0f} |" in lost


def test_a_row_has_no_infinite_number():
    rows = [noise_row(record) for record in (build_known(840.0), LOST)]
    assert rows[0]["noise_scale_low"] < rows[0]["noise_scale"] < rows[0]["noise_scale_high"]
    assert rows[1]["noise_scale"] is rows[1]["noise_scale_high"] is None
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert render_csv(rows).count("\n") == 3


def test_a_sentence_says_what_a_big_batch_costs():
    first, last = build_known(45.0, step=1, epoch=1.0), build_known(840.0)
    (text,) = describe_noise([last, first])
    low, high = last.estimate.interval
    assert text == (
        f"cnn: gradient noise scale 840 (90 %: {low:,.0f} to {high:,.0f}) at epoch 5 (45 at epoch 1): batches far "
        "beyond it buy few steps: at 8192, 10.8 times the fewest samples for 1.1 times the fewest steps"
    )
    (text,) = describe_noise([last], batch_size=84)
    assert text.endswith("cost few samples more: at 84, 1.1 times the fewest samples for 11.0 times the fewest steps")


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([LOST], ["the gradient is lost in the noise"]),
        ([UNSURE], ["it may be far larger"]),
        ([build_known(9.0, step=1, epoch=1.0), LOST], ["noise scale 9 (90 %"]),
        (
            [build_known(9.0, step=1, epoch=1.0), LOST],
            ["steps; above 96 at epoch 6, where the gradient is lost in the noise"],
        ),
        ([build_record(LOST.probes[:1])], ["noise scale not to be told at epoch 5"]),
        ([build_record((NoiseProbe((2.0, 2.0), 2.0),) * 3)], ["noise scale 0 (90 %: 0 to 0) at epoch 5"]),
        ([build_known(9.0, note="a"), build_known(90.0, note="b")], ["cnn, a: gradient", "cnn, b: gradient"]),
    ],
)
def test_each_job_has_one_sentence(records, words):
    found = describe_noise(records)
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_the_picture_draws_every_job():
    records = [build_known(9.0, note="a", epoch=1), build_known(90.0, note="a"), build_known(50.0, note="b", seed=2)]
    svg = render_svg(plot_noise([*records, LOST, UNSURE, build_record(LOST.probes[:1])], "noise", "a laptop")).decode()
    for text in ("cnn, a, seed 1", "cnn, b, seed 2", "a laptop; measured"):
        assert text in svg
