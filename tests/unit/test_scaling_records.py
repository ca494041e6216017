"""Records of scaling studies: what follows from their raw seconds, and what cannot be."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import RecordError
from paceline.records import CurvePoint, Samples
from paceline.records.kinds import record_from_json, record_to_json

from .made_scaling import make_batch, make_rng, make_run, make_samples, make_scale

SEEDS = st.integers(0, 10**6).map(make_rng)


def slowest(samples):
    """Each repetition's slowest rank, by hand."""
    return np.array([sorted(row)[-1] for row in samples.seconds])


def interval(ratios):
    """The farther end of the 95 % interval of the median: the k-th value from either end, k from the binomial."""
    ordered, n = np.sort(ratios), len(ratios)
    k = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    middle = float(np.median(ordered))
    return middle, max(float(ordered[-1 - k]) - middle, middle - float(ordered[k]))


@given(SEEDS, st.integers(1, 5000), st.integers(1, 10**6), st.floats(1e-3, 1e3))
def test_epoch_step_and_rate_of_a_batch_size_follow_from_the_epochs(rng, batch_size, num_samples, epoch_s):
    record = make_batch(rng, batch_size, epoch_s, num_samples)
    middle_s = sorted(row[0] for row in record.timing.seconds)[1]
    assert record.epoch_s == middle_s
    assert record.step_s / batch_size == pytest.approx(middle_s / num_samples)
    assert record.samples_per_s * middle_s == pytest.approx(num_samples)
    assert record.data_wait_s == sorted(row[0] for row in record.data_wait.seconds)[1]


def test_a_batch_that_does_not_fit_has_no_times():
    record = make_batch(make_rng(), 64, failure="out of memory")
    found = (record.epoch_s, record.step_s, record.samples_per_s, record.data_wait_s)
    assert found == (None,) * 4
    assert record_from_json(record_to_json(record)) == record


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"failure": "out of memory", "epoch_s": 1.0}, "either times or a failure"),
        ({}, "either times or a failure"),
        ({"epoch_s": 1.0, "num_steps": 0}, "at least 1 of each"),
    ],
)
def test_an_impossible_batch_is_refused(changes, reason):
    with pytest.raises(RecordError, match=reason):
        make_batch(make_rng(), 64, **changes)


@given(SEEDS, st.integers(2, 6), st.floats(1e-4, 1e-1), st.floats(-0.05, 2), st.floats(0.1, 3), st.integers(1, 4))
def test_compute_exposed_busy_overlap_and_bandwidth_follow_from_the_steps(rng, ranks, compute_s, cost, busy, more):
    record = make_scale(
        rng, ranks, compute_s, cost * compute_s, busy * compute_s, cell_size=32 * more, batch_size=32, accumulate=more
    )
    plain, silent, under_way = (slowest(s) for s in (record.timing, record.no_comm, record.busy))
    exposed_s = max(0.0, float(np.median(plain - silent)))
    assert record.compute_s == pytest.approx(float(np.median(silent)))
    assert record.exposed_s == pytest.approx(exposed_s)
    assert record.overhead == pytest.approx(exposed_s / (exposed_s + float(np.median(silent))))
    assert record.busy_s == pytest.approx(float(np.median(under_way)))
    assert record.overlap == pytest.approx(1 - exposed_s / float(np.median(under_way)))
    bus_bytes = 2 * (ranks - 1) / ranks * record.num_bytes
    assert record.busbw_bytes_per_s == pytest.approx(bus_bytes / float(np.median(under_way)))
    assert record.global_batch_size == 32 * more * ranks
    assert record.samples_per_s == pytest.approx(32 * more * ranks / float(np.median(plain)))
    assert record.exposed_noise_s == pytest.approx(interval(plain / silent)[1] * float(np.median(silent)))


def test_one_rank_by_itself_has_nothing_exposed_and_no_bandwidth():
    record = make_scale(make_rng(), 1, 1e-2)
    assert (record.exposed_s, record.compute_s) == (0.0, record.timing.median_s)
    assert (record.busy_s, record.overlap, record.busbw_bytes_per_s, record.exposed_noise_s) == (None,) * 4
    assert record.variant == "none"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "weak", "cell_size": 64, "batch_size": 32}, r"32 samples in a cell of 64 \(weak\)"),
        ({"mode": "strong", "cell_size": 32, "batch_size": 32}, r"64 samples in a cell of 32 \(strong\)"),
        ({"accumulate": 2}, r"64 samples in a cell of 32 \(weak\)"),
        ({"mode": "sideways"}, "unknown mode of scaling 'sideways'"),
        ({"threads": 0}, "0 threads"),
        ({"timing": Samples(seconds=((0.0, 0.0),) * 9)}, "in 0.0 s"),
        ({"no_comm": make_samples(make_rng(), 1.0, ranks=2, count=8)}, "no_comm has other repetitions"),
        ({"busy": make_samples(make_rng(), 1.0, ranks=3)}, "busy has other repetitions or ranks"),
        ({"source": "guessed"}, "unknown source"),
    ],
)
def test_steps_of_another_cell_or_shape_are_refused(changes, reason):
    with pytest.raises(RecordError, match=reason):
        make_scale(make_rng(), 2, 1e-2, **changes)


@pytest.mark.parametrize(("mode", "batch_size"), [("weak", 32), ("strong", 16)])
def test_a_cell_counts_samples_per_rank_or_over_all(mode, batch_size):
    record = make_scale(make_rng(), 2, 1e-2, mode=mode, cell_size=32)
    assert (record.cell, record.batch_size) == ((mode, 32), batch_size)
    assert record_from_json(record_to_json(record)) == record


@pytest.mark.parametrize(
    ("wrapper", "name"), [("paceline", "paceline on gloo"), ("torch", "torch on gloo"), ("dp", "dp"), ("none", "none")]
)
def test_a_variant_is_a_wrapper_on_a_backend(wrapper, name):
    assert make_scale(make_rng(), 2, 1e-2, wrapper=wrapper).variant == name


def test_a_run_is_judged_by_its_last_evaluation():
    run = make_run(accuracy=0.8)
    last = run.curve[-1]
    assert (run.test_accuracy, run.test_loss, run.train_loss) == (0.8, last.test_loss, last.train_loss)
    failed = replace(run, failure="loss is nan")
    assert (failed.test_accuracy, failed.test_loss, failed.train_loss) == (None,) * 3
    for each in (run, failed, replace(failed, curve=())):
        assert record_from_json(record_to_json(each)) == each


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"budget": "hours"}, "unknown budget 'hours'"),
        ({"curve": ()}, "nothing was evaluated"),
        ({"curve": (CurvePoint(1, 1, 1.0, math.nan, 0.5),)}, "no number"),
        ({"curve": (CurvePoint(1, 1, math.inf, 1.0, 0.5),)}, "no number"),
    ],
)
def test_an_impossible_run_is_refused(changes, reason):
    with pytest.raises(RecordError, match=reason):
        make_run(**changes)
