"""Step records: derived numbers, comparisons of variants, scaling, and refusals."""

import dataclasses
import json
import random
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import MeasurementError, RecordError
from paceline.records import Samples, Summary
from paceline.records.kinds import record_from_json, record_to_json
from paceline.records.samples import Ratio
from paceline.records.steps import compare_steps, compare_wrappers, find_peak_of, list_points
from paceline.units import MIB

from .made_scaling import (
    COUNT,
    SEEDS,
    interval,
    make_cell,
    make_collectives,
    make_rng,
    make_samples,
    make_scale,
    slowest,
)
from .made_tuning import MadeJob

# -- computing, communication and phases -------------------------------------------------------------------------------


def test_communication_is_the_difference_to_silent_steps(build_phases):
    record = build_phases()
    assert record.exposed_s == pytest.approx(0.002)
    assert record.compute_s == pytest.approx(0.008)
    assert record.overhead == pytest.approx(0.2)
    assert record.overlap == pytest.approx(1 - 2 / 5)
    assert record.busbw_bytes_per_s == pytest.approx(4e6 / 0.005 * 2 * (2 - 1) / 2)
    assert record.samples_per_s == pytest.approx(2 * 16 * 2 / 0.010)


def test_exposed_is_the_median_of_differences_in_one_repetition(build_phases, build_samples):
    """A slow spell affects neighboring samples alike; the difference of the medians would be 9 ms here."""
    record = build_phases(
        **{name: build_samples(*(0.01,) * 3) for name in ("marked", "data_wait", "forward", "backward", "optimizer")},
        no_comm_backward=build_samples(*(0.004,) * 3),
        timing=build_samples(0.010, 0.019, 0.020),
        no_comm=build_samples(0.009, 0.018, 0.010),
        busy=None,
    )
    assert record.exposed_s == pytest.approx(0.001)


def test_exposed_is_never_negative(build_phases, build_samples):
    record = build_phases(no_comm=build_samples(*(0.011,) * 10))
    assert (record.exposed_s, record.overhead, record.overlap) == (0.0, 0.0, 1.0)


def test_the_slowest_rank_determines_the_step(build_phases):
    uneven = Samples(seconds=((0.010, 0.014),) * 10)
    assert build_phases(timing=uneven).exposed_s == pytest.approx(0.006)


def test_one_rank_has_no_communication(build_phases):
    record = build_phases(world_size=1, busy=None, num_bytes=0, num_messages=0)
    assert (record.exposed_s, record.overhead, record.exposed_noise_s) == (0.0, 0.0, None)
    assert (record.overlap, record.busy_s, record.busbw_bytes_per_s) == (None, None, None)
    assert record.compute_s == pytest.approx(0.010)


def test_time_outside_the_phases_is_host_time(build_phases):
    """10.1 ms minus 1 + 2 + 6 + 1, for each rank separately, because ranks wait for each other within a phase."""
    assert build_phases().gap_s == pytest.approx(0.0001)
    early_late = Samples(seconds=((0.0010, 0.0030),) * 10), Samples(seconds=((0.0060, 0.0040),) * 10)
    assert build_phases(data_wait=early_late[0], backward=early_late[1]).gap_s == pytest.approx(0.0001)
    assert build_phases(backward=Samples(seconds=((0.009, 0.009),) * 10)).gap_s == 0.0


def test_profiling_is_marked_over_plain(build_phases, build_samples):
    record = build_phases()
    assert record.cost.value == pytest.approx(1.01)
    assert record.cost.noise == pytest.approx(0.0)
    assert build_phases(marked=build_samples(*(0.01, 0.011) * 5)).cost.is_clear is False


def test_the_noise_of_exposed_is_in_seconds(build_phases, build_samples):
    record = build_phases(timing=build_samples(*(0.010, 0.012) * 5))
    assert record.exposed_noise_s == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize(
    "name",
    ["marked", "timing", "no_comm", "no_comm_backward", "data_wait", "forward", "backward", "optimizer", "busy"],
)
def test_parts_of_other_ranks_or_repetitions_are_refused(build_phases, build_samples, name):
    for other in (build_samples(*(0.001,) * 10, ranks=3), build_samples(0.001, 0.001)):
        with pytest.raises(
            RecordError, match=f"cnn.*{'marked' if name == 'timing' else name} differs from the steps in repetitions"
        ):
            build_phases(**{name: other})


@pytest.mark.parametrize("busy", [True, False])
def test_a_record_survives_json(build_phases, busy):
    record = build_phases() if busy else build_phases(busy=None)
    assert record_from_json(record_to_json(record)) == record


def test_a_record_cannot_be_changed(build_phases):
    with pytest.raises(dataclasses.FrozenInstanceError):
        build_phases().model = "other"


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


def test_a_single_rank_has_no_exposed_time_or_bandwidth():
    record = make_scale(make_rng(), 1, 1e-2)
    assert (record.exposed_s, record.compute_s) == (0.0, record.timing.median_s)
    assert (record.busy_s, record.overlap, record.busbw_bytes_per_s, record.exposed_noise_s) == (None,) * 4
    assert record.variant == "none"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mode": "weak", "cell_size": 64, "batch_size": 32}, r"32 samples in a cell of 64 \(weak\)"),
        ({"mode": "strong", "cell_size": 32, "batch_size": 32}, r"64 samples in a cell of 32 \(strong\)"),
        ({"threads": 0}, "0 threads"),
        ({"mode": "sideways"}, "mode is 'sideways'"),
        ({"timing": Samples(seconds=((0.0, 0.0),) * 9)}, "timing is .* positive"),
        ({"source": "guessed"}, "source is 'guessed'"),
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


# -- roles of a tuning -------------------------------------------------------------------------------------------------


JOB = MadeJob(noise=0.1)


PLAIN = JOB.build_step(random.Random(1), "plain", "plain", 0.04)


DISTURBED = JOB.build_disturbed(random.Random(1), MIB, 0.5, 0.5)


PLAN = JOB.build_plan_step(
    "cap", (1.0, 2.0), cap_bytes=MIB, bucket_bytes=(MIB, 12), source="emulated", note="confirmed"
)


SHORT = Samples(seconds=((1.0, 1.0),))


@pytest.mark.parametrize("record", [PLAIN, DISTURBED, PLAN], ids=lambda record: record.role)
def test_a_step_survives_json(record):
    read = record_from_json(json.loads(json.dumps(record_to_json(record))))
    assert read == record and type(read) is type(record)
    assert isinstance(read.bucket_bytes, tuple) and read.num_buckets == len(record.bucket_bytes)


@pytest.mark.parametrize(
    ("record", "changes", "words"),
    [
        (PLAIN, {"role": "guess"}, "guess"),
        (DISTURBED, {"overlapped": SHORT}, "overlapped differs from the steps in repetitions"),
        (DISTURBED, {"num_messages": 0}, "only there"),
        (DISTURBED, {"under_way": None}, "only there"),
        (PLAIN, {"role": "disturbed"}, "only there"),
        (PLAIN, {"message_bytes": 1}, "only there"),
        (PLAIN, {"num_messages": -1}, "num_messages is -1"),
        (PLAN, {"bucket_bytes": (MIB, -4)}, "bucket_bytes is -4"),
        (PLAN, {"cap_bytes": -1}, "cap_bytes is -1"),
        (PLAN, {"world_size": 0}, "world_size is 0"),
        (PLAN, {"source": "dreamt"}, "dreamt"),
    ],
)
def test_impossible_values_are_refused(record, changes, words):
    with pytest.raises(RecordError, match=words):
        replace(record, **changes)


# -- variants compared with each other ---------------------------------------------------------------------------------


def test_a_ratio_is_of_steps_in_the_same_repetition(build_wrapper):
    """A spell that slows both sides by a factor of ten leaves the paired ratio unchanged; a ratio of medians would be
    wrong."""
    torch = build_wrapper("torch", (1.0, 10.0, 10.0, 1.0, 1.0, 1.0))
    ours = build_wrapper("paceline", (0.9, 9.0, 9.0, 9.0, 0.9, 0.9))
    ratio = compare_steps(ours, torch)
    assert ratio.value == pytest.approx(0.9)
    assert ours.timing.median_s / torch.timing.median_s != pytest.approx(0.9)


def test_the_slowest_rank_counts(build_wrapper, build_samples):
    both = build_samples(1.0, 1.0)
    ours = build_wrapper("paceline", (1.0, 1.0), timing=type(both)(seconds=((1.0, 2.0), (2.0, 1.0))))
    assert compare_steps(ours, build_wrapper("torch", (1.0, 1.0))).value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(2, 0, 1), (5, 0, 4), (6, 0, 5), (9, 1, 7), (20, 5, 14), (100, 40, 59)]
)
def test_noise_reaches_to_the_order_statistics_of_the_median(build_wrapper, count, low, high):
    ratios = [1 + 0.01 * k**2 for k in range(count)]
    shuffled = random.Random(1).sample(ratios, count)
    ratio = compare_steps(build_wrapper("paceline", shuffled), build_wrapper("torch", (1.0,) * count))
    middle = statistics.median(ratios)
    assert ratio.noise == pytest.approx(max(ratios[high] - middle, middle - ratios[low]))


def test_the_noise_covers_the_truth_at_its_nominal_rate(build_wrapper):
    """1,000 synthetic benchmarks of two equal wrappers: a difference is claimed in about 5 % of them, not in 20 %."""
    generator = random.Random(3)
    torch, claimed = build_wrapper("torch", (1.0,) * 20), 0
    for _ in range(1000):
        times = [generator.lognormvariate(0, 0.1) for _ in range(20)]
        claimed += compare_steps(build_wrapper("paceline", times), torch).is_clear
    assert 0 < claimed < 80


@pytest.mark.parametrize(
    ("ratio", "is_clear"),
    [(Ratio(0.9, 0.05), True), (Ratio(0.9, 0.15), False), (Ratio(1.1, 0.05), True), (Ratio(2.0, None), False)],
)
def test_a_difference_is_clear_beyond_the_noise(ratio, is_clear):
    assert ratio.is_clear is is_clear


def test_one_repetition_has_no_noise_estimate(build_wrapper):
    ratio = compare_steps(build_wrapper("paceline", (1.0,)), build_wrapper("torch", (2.0,)))
    assert (ratio.value, ratio.noise, ratio.is_clear) == (0.5, None, False)


@pytest.mark.parametrize("changes", [{"model": "mlp"}, {"world_size": 3}, {"batch_size": 9}, {"times_s": (1.0,)}])
def test_records_that_were_not_interleaved_are_not_compared(build_wrapper, changes):
    with pytest.raises(RecordError, match="were not interleaved"):
        compare_steps(build_wrapper("paceline", **changes), build_wrapper("torch"))


def test_each_wrapper_is_compared_with_those_of_its_own_cell(build_wrapper):
    records = [
        build_wrapper("bare", (1.0, 1.0)), build_wrapper("torch", (2.0, 2.0)), build_wrapper("paceline", (1.5, 1.5)),
        build_wrapper("torch", (8.0, 8.0), model="mlp"), build_wrapper("torch-tuned", (4.0, 4.0), model="mlp"),
    ]  # fmt: skip
    bare, torch, ours, mlp_torch, mlp_tuned = compare_wrappers(records)
    assert [s.record for s in (bare, torch, ours, mlp_torch, mlp_tuned)] == records
    assert (ours.to_torch.value, ours.to_bare.value, ours.to_tuned) == (0.75, 1.5, None)
    assert (bare.to_torch.value, torch.to_torch) == (0.5, Ratio(1.0, 0.0))
    assert (mlp_torch.to_tuned.value, mlp_tuned.to_torch.value, mlp_torch.to_bare) == (2.0, 0.5, None)


def test_host_time_per_parameter_is_reported_only_for_one_rank_on_a_cpu(build_wrapper):
    def per_parameter(times_s=(1.1, 2.1, 3.2), **changes):
        records = [build_wrapper("bare", (1.0, 2.0, 3.0), **changes), build_wrapper("paceline", times_s, **changes)]
        return compare_wrappers(records)[1].host_us_per_parameter

    assert per_parameter(world_size=1) == pytest.approx(0.1e6 / 100)
    assert per_parameter((1.1, 1.9, 3.2), world_size=1) is None  # within the noise
    assert per_parameter(world_size=2) is None
    assert per_parameter(world_size=1, device="cuda") is None
    assert compare_wrappers([build_wrapper("paceline", world_size=1)])[0].host_us_per_parameter is None


def test_added_memory_is_the_peak_above_the_bare_modules_peak(build_wrapper):
    records = [
        build_wrapper("bare", held_bytes=1000, peak_step_bytes=1500),
        build_wrapper("torch", held_bytes=2000, peak_step_bytes=1600),
    ]
    assert [s.added_bytes for s in compare_wrappers(records)] == [0, 1100]
    assert [s.added_bytes for s in compare_wrappers([build_wrapper("bare"), build_wrapper("torch")])] == [None, None]


def test_across_backends_torch_on_gloo_is_the_baseline(build_wrapper):
    records = [
        build_wrapper("torch", (2.0, 4.0)), build_wrapper("paceline", (1.0, 2.0)),
        build_wrapper("torch", (1.0, 2.0), backend="paceline"),
        build_wrapper("paceline", (0.5, 1.0), backend="paceline"),
        build_wrapper("paceline", (8.0, 8.0), backend="paceline", model="mlp"),
    ]  # fmt: skip
    on_gloo, ours_on_gloo, there, ours, alone = compare_wrappers(records)
    assert [s.to_torch_on_gloo.value for s in (on_gloo, ours_on_gloo, there, ours)] == [1.0, 0.5, 0.5, 0.25]
    assert [s.to_torch.value for s in (on_gloo, ours_on_gloo, there, ours)] == [1.0, 0.5, 1.0, 0.5]
    assert (alone.to_torch_on_gloo, alone.to_torch) == (None, None)  # a different model


def test_across_backends_a_slow_spell_hits_both(build_wrapper):
    records = [
        build_wrapper("torch", (1.0, 10.0, 10.0, 1.0, 1.0, 1.0)),
        build_wrapper("torch", (0.5, 5.0, 5.0, 5.0, 0.5, 0.5), backend="paceline"),
    ]
    ratio = compare_wrappers(records)[1].to_torch_on_gloo
    assert ratio.value == pytest.approx(0.5)
    assert records[1].timing.median_s / records[0].timing.median_s != pytest.approx(0.5)


def test_another_device_is_another_job(build_wrapper):
    records = [build_wrapper("torch"), build_wrapper("torch", backend="nccl", device="cuda")]
    assert compare_wrappers(records)[1].to_torch_on_gloo is None
    with pytest.raises(RecordError, match="were not interleaved"):
        compare_steps(*records)


# -- scaling -----------------------------------------------------------------------------------------------------------


SCALING = st.sampled_from(["weak", "strong"])


@given(SEEDS, SCALING, st.sampled_from([2, 4, 8]), st.floats(0.1, 3), st.floats(0, 2))
def test_speedup_efficiency_and_noise_follow_from_the_seconds(rng, mode, ranks, relative, cost):
    alone = make_scale(rng, 1, 1e-2, mode=mode, cell_size=64)
    record = make_scale(rng, ranks, relative * 1e-2, cost * 1e-2, mode=mode, cell_size=64)
    _, point = list_points([alone, record])
    ratio, noise = interval(slowest(alone.timing) / slowest(record.timing))
    speedup = ratio * ranks if mode == "weak" else ratio
    assert point.speedup == pytest.approx(speedup)
    assert point.efficiency == pytest.approx(speedup / ranks)
    assert point.efficiency_noise == pytest.approx(noise if mode == "weak" else noise / ranks)
    share_s = np.median(slowest(alone.timing)) / (1 if mode == "weak" else ranks)
    assert point.slowdown == pytest.approx(np.median(slowest(record.no_comm)) / share_s)


def test_a_rank_compared_with_itself_is_1_without_noise():
    (point,) = list_points([make_scale(make_rng(), 1, 1e-2)])
    assert (point.speedup, point.efficiency, point.efficiency_noise) == (1.0, 1.0, 0.0)


def test_one_repetition_has_no_noise():
    rng = make_rng()
    alone, record = (
        replace(make_scale(rng, n, 1e-2), timing=make_samples(rng, 1e-2, n, count=1), no_comm=None) for n in (1, 2)
    )
    assert list_points([alone, record])[1].efficiency_noise is None


def test_a_point_of_other_repetitions_is_refused():
    alone = make_scale(make_rng(), 1, 1e-2, timing=make_samples(make_rng(), 1.0, count=COUNT - 1))
    with pytest.raises(RecordError, match="were not interleaved"):
        list_points([alone, make_scale(make_rng(), 2, 1e-2)])


def test_a_bare_rank_is_distinguished_from_a_wrapper_on_one_rank():
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
    assert find_peak_of(_step(1.0, ranks), collectives) == pytest.approx(peak)
    assert find_peak_of(_step(1.0, 16), collectives) is None
    assert find_peak_of(_step(1.0, ranks), [replace(c, collective="broadcast") for c in collectives]) is None


def test_a_peak_from_an_imported_mean_is_that_mean_and_a_time_of_0_is_none():
    (mean,) = make_collectives(make_rng(), backends=["gloo"], counts=[2])
    assert find_peak_of(_step(4.0), [replace(mean, timing=Summary(mean_s=2.0))]) == pytest.approx(2**24 / 2.0)
    some = replace(mean, timing=Samples(seconds=((0.0, 0.0), (2.0, 2.0), (4.0, 4.0))))
    assert find_peak_of(_step(4.0), [some]) == pytest.approx(2**24 / 2.0)


@given(SEEDS, st.sampled_from([2, 4]))
def test_a_bandwidth_at_the_peak_passes_and_one_above_it_fails(rng, ranks):
    collectives = make_collectives(rng)
    peak_s = min(float(slowest(c.timing).min()) for c in collectives if (c.backend, c.world_size) == ("gloo", ranks))
    step = _step(peak_s, ranks)
    assert step.busbw_bytes_per_s / find_peak_of(step, collectives) == pytest.approx(1.0)
    with pytest.raises(MeasurementError, match="peak"):
        find_peak_of(_step(0.999 * peak_s, ranks), collectives)


@pytest.mark.parametrize("changes", [{"device": "cuda"}, {"source": "emulated"}, {"backend": "mpi"}, {"world_size": 3}])
def test_a_peak_of_another_device_source_backend_or_ranks_does_not_count(changes):
    collectives = make_collectives(make_rng(), backends=["gloo"], counts=[2])
    assert find_peak_of(_step(1.0), collectives) is not None
    changed = [
        replace(c, **{**changes, "timing": make_samples(make_rng(), 1.0, changes.get("world_size", 2))})
        for c in collectives
    ]
    assert find_peak_of(_step(1e-9), changed) is None


def test_untimed_records_have_no_peak():
    assert find_peak_of(make_scale(make_rng(), 2, 1e-2), make_collectives(make_rng())) is None
