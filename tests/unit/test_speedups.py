"""Speed-up, efficiency, the knee and the peak, recomputed from raw seconds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import MeasurementError, RecordError
from paceline.records import Samples, Summary
from paceline.records.steps import ScalePoint, compare_points, find_peak, find_use, list_points
from paceline.records.training import find_knee

from .made_scaling import (
    COUNT,
    make_batch,
    make_batches,
    make_cell,
    make_collectives,
    make_rng,
    make_samples,
    make_scale,
)
from .test_scaling_records import SEEDS, interval, slowest

MODES = st.sampled_from(["weak", "strong"])


@given(SEEDS, MODES, st.sampled_from([2, 4, 8]), st.floats(0.1, 3), st.floats(0, 2))
def test_speedup_efficiency_and_noise_follow_from_the_seconds(rng, mode, ranks, relative, cost):
    alone = make_scale(rng, 1, 1e-2, mode=mode, cell_size=64)
    record = make_scale(rng, ranks, relative * 1e-2, cost * 1e-2, mode=mode, cell_size=64)
    point = ScalePoint(record, alone)
    ratio, noise = interval(slowest(alone.timing) / slowest(record.timing))
    speedup = ratio * ranks if mode == "weak" else ratio
    assert point.speedup == pytest.approx(speedup)
    assert point.efficiency == pytest.approx(speedup / ranks)
    assert point.efficiency_noise == pytest.approx(noise if mode == "weak" else noise / ranks)
    share_s = np.median(slowest(alone.timing)) / (1 if mode == "weak" else ranks)
    assert point.slowdown == pytest.approx(np.median(slowest(record.no_comm)) / share_s)


def test_a_rank_beside_itself_is_1_without_noise():
    (point,) = list_points([make_scale(make_rng(), 1, 1e-2)])
    assert (point.speedup, point.efficiency, point.efficiency_noise) == (1.0, 1.0, 0.0)


def test_one_repetition_has_no_noise():
    rng = make_rng()
    alone, record = (
        replace(make_scale(rng, n, 1e-2), timing=make_samples(rng, 1e-2, n, count=1), no_comm=None) for n in (1, 2)
    )
    assert ScalePoint(record, alone).efficiency_noise is None


@pytest.mark.parametrize(
    ("changes", "alone_changes", "reason"),
    [
        ({"cell_size": 64}, {}, "not timed in turns"),
        ({"mode": "strong", "cell_size": 32}, {}, "not timed in turns"),
        ({"model": "resnet18"}, {}, "not timed in turns"),
        ({}, {"timing": make_samples(make_rng(), 1.0, count=COUNT - 1)}, "not timed in turns"),
    ],
)
def test_points_of_another_cell_or_job_are_refused(changes, alone_changes, reason):
    record, alone = make_scale(make_rng(), 2, 1e-2, **changes), make_scale(make_rng(), 1, 1e-2, **alone_changes)
    with pytest.raises(RecordError, match=reason):
        ScalePoint(record, alone)


def test_two_ranks_are_not_one_to_compare_with():
    record = make_scale(make_rng(), 2, 1e-2)
    with pytest.raises(RecordError, match="2 ranks"):
        ScalePoint(record, record)


def test_one_rank_by_itself_is_told_from_a_wrapper_on_one_rank():
    rng = make_rng()
    bare, record = make_scale(rng, 1, 1e-2), make_scale(rng, 2, 1e-2)
    wrapped = make_scale(rng, 1, 5e-2, wrapper="paceline", backend="gloo")
    assert [point.alone for point in list_points([bare, record, wrapped])] == [bare] * 3


def test_cells_and_jobs_find_their_own_rank_and_those_without_one_are_left_out():
    rng = make_rng()
    records = [*make_cell(rng, "weak", 32), *make_cell(rng, "strong", 32), make_scale(rng, 2, 1.0, cell_size=64)]
    records += [replace(record, model="resnet18") for record in make_cell(rng, "weak", 32)]
    points = list_points(records)
    assert [point.record for point in points] == [r for r in records if r.cell_size == 32]
    assert all((p.alone.cell, p.alone.job) == (p.record.cell, p.record.job) for p in points)


@given(SEEDS, MODES)
def test_my_efficiency_over_theirs_is_their_step_over_mine(rng, mode):
    points = list_points(make_cell(rng, mode, 64))
    mine, theirs = points[3], points[1]
    found = compare_points(mine, theirs)
    value, noise = interval(slowest(theirs.record.timing) / slowest(mine.record.timing))
    assert (found.value, found.noise) == (pytest.approx(value), pytest.approx(noise))
    assert found.is_clear == (abs(value - 1) > noise)


def test_points_of_other_ranks_cells_or_jobs_are_not_compared():
    rng = make_rng()
    points = list_points([*make_cell(rng, "weak", 32), *make_cell(rng, "weak", 64)])
    other = list_points([replace(record, precision="bf16") for record in make_cell(rng, "weak", 32)])
    for theirs in (points[4], points[8], other[1]):
        with pytest.raises(RecordError):
            compare_points(points[1], theirs)


@given(SEEDS, st.lists(st.floats(0.01, 100), min_size=1, max_size=8))
def test_the_knee_is_the_smallest_batch_with_nine_tenths_of_the_best_rate(rng, epochs):
    records = [make_batch(rng, 2**i, epoch_s) for i, epoch_s in enumerate(epochs)]
    rates = {r.batch_size: r.num_samples / float(np.median(slowest(r.timing))) for r in records}
    expected = min(size for size, rate in rates.items() if rate >= 0.9 * max(rates.values()))
    rng.shuffle(records)
    assert find_knee(records).batch_size == expected


def test_a_sweep_in_which_nothing_fits_has_no_knee():
    assert find_knee([make_batch(make_rng(), 64, failure="out of memory")]) is None
    assert find_knee(make_batches(make_rng())).batch_size == 512


def _step(busy_s, ranks=2, **changes):
    busy = Samples(seconds=((busy_s,) * ranks,) * COUNT)
    return make_scale(make_rng(), ranks, 1e-2, busy=busy, **{"num_bytes": 2**24, **changes})


@given(SEEDS, st.sampled_from([2, 4]))
def test_the_peak_is_of_the_quickest_repetition(rng, ranks):
    collectives = make_collectives(rng)
    quickest_s = min(
        float(slowest(c.timing).min()) for c in collectives if (c.backend, c.world_size) == ("gloo", ranks)
    )
    peak = 2 * (ranks - 1) / ranks * 2**24 / quickest_s
    assert find_peak(collectives, "gloo", ranks) == pytest.approx(peak)
    assert find_peak(collectives, "gloo", 16) is None
    assert find_peak([replace(c, collective="broadcast") for c in collectives], "gloo", ranks) is None


def test_a_peak_from_an_imported_mean_is_that_mean_and_a_time_of_0_is_none():
    (mean,) = make_collectives(make_rng(), backends=["gloo"], counts=[2])
    assert find_peak([replace(mean, timing=Summary(mean_s=2.0))], "gloo", 2) == pytest.approx(2**24 / 2.0)
    some = replace(mean, timing=Samples(seconds=((0.0, 0.0), (2.0, 2.0), (4.0, 4.0))))
    assert find_peak([some], "gloo", 2) == pytest.approx(2**24 / 2.0)


@given(SEEDS, st.sampled_from([2, 4]))
def test_a_bandwidth_at_the_peak_passes_and_one_above_it_fails(rng, ranks):
    collectives = make_collectives(rng)
    peak_s = min(float(slowest(c.timing).min()) for c in collectives if (c.backend, c.world_size) == ("gloo", ranks))
    use = find_use(_step(peak_s, ranks), collectives)
    assert use.share == pytest.approx(1.0)
    assert find_use(_step(4 * peak_s, ranks), collectives).share == pytest.approx(0.25)
    with pytest.raises(MeasurementError, match=r"above the peak of .* the bookkeeping is wrong"):
        find_use(_step(0.999 * peak_s, ranks), collectives)


@pytest.mark.parametrize("changes", [{"device": "cuda"}, {"source": "emulated"}, {"backend": "mpi"}, {"world_size": 3}])
def test_a_peak_of_another_device_source_backend_or_ranks_does_not_count(changes):
    collectives = make_collectives(make_rng(), backends=["gloo"], counts=[2])
    assert find_use(_step(1.0), collectives) is not None
    changed = [
        replace(c, **{**changes, "timing": make_samples(make_rng(), 1.0, changes.get("world_size", 2))})
        for c in collectives
    ]
    assert find_use(_step(1e-9), changed) is None


def test_what_was_not_timed_has_no_use():
    assert find_use(make_scale(make_rng(), 2, 1e-2), make_collectives(make_rng())) is None
