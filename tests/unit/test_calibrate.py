"""Calibrating gives back what a made-up machine costs, and learns nothing from the steps that it is judged by."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.errors import MeasurementError
from paceline.predict.calibrate import SERVERS, Evidence, fit_job, resample
from paceline.predict.costs import AlphaBeta
from paceline.predict.curves import LineCurve
from paceline.predict.simulate import Backward, Contention, MachineCosts, simulate_buckets
from paceline.records import ChunksRecord, CollectiveRecord, LayerProfileRecord, StepRecord, Summary
from paceline.units import MIB
from tests.unit.made_tuning import KIB, MadeJob

JOB = MadeJob()
LINE = LineCurve(AlphaBeta(0.5, 1e9, 1, 10**9, (0.0,)))


def fit(job, **more):
    return fit_job(Evidence.sort(job.build_calibration()), **more)


def test_what_was_put_in_comes_back():
    job = fit(JOB)
    assert job.sizes == list(JOB.sizes) and [g.name for g in job.gradients] == [f"layer{k}" for k in range(8)]
    assert all((g.item_bytes, g.dtype) == (4, "float32") for g in job.gradients)
    assert job.ready_s == pytest.approx(JOB.ready_s)
    assert job.backward.total_s == pytest.approx(0.040)
    assert (job.backward.before_s, job.backward.after_s) == pytest.approx((0.020, 0.010))
    costs = job.costs
    assert [costs.curve.estimate_s(x) for x in JOB.sweep_sizes] == pytest.approx(
        [1e-3 + x / 1e9 for x in JOB.sweep_sizes]
    )
    assert costs.gather_s_per_byte * JOB.num_bytes == pytest.approx(0.002)
    assert costs.launch_s == pytest.approx(0.0005)
    assert costs.pair_rate == pytest.approx(0.8)
    assert costs.contention.sizes == (64 * KIB, MIB)
    assert costs.contention.compute_rates == pytest.approx((0.5, 0.8))
    assert costs.contention.message_rates == pytest.approx((0.6, 0.9))
    assert (costs.servers, costs.finish_s, costs.late_s, costs.scatter_s_per_byte) == (2, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("cap_bytes", [1, 2 * MIB, 3 * MIB, 8 * MIB])
def test_a_step_is_predicted_as_the_simulator_takes_the_true_machine(cap_bytes):
    job = fit(JOB)
    cuts = job.cut(cap_bytes)
    true_costs = MachineCosts(
        LineCurve(AlphaBeta(JOB.alpha_s, JOB.bytes_per_s, 1, 10**9, (0.0,))), 2, JOB.launch_s,
        JOB.gather_s / JOB.num_bytes, 0.0, Contention((64 * KIB, MIB), (0.5, 0.8), (0.6, 0.9)), 0.8,
    )  # fmt: skip
    backward = Backward(JOB.ready_s, JOB.backward_s, JOB.forward_s, JOB.optimizer_s)
    edges = [0, *cuts]
    sizes = [sum(JOB.sizes[start:end]) for start, end in zip(edges, cuts, strict=False)]
    true = simulate_buckets(sizes, [JOB.ready_s[cut - 1] for cut in cuts], backward, true_costs)
    # Between two measured sizes the curve is not the line that it was measured on.
    assert job.simulate(cuts).step_s == pytest.approx(true.step_s, rel=5e-3)


def change_wildly(record):
    slow = replace(record.timing, seconds=tuple(tuple(100 * s for s in row) for row in record.timing.seconds))
    return replace(record, timing=slow, forward=slow, backward=slow, optimizer=slow, bucket_bytes=(1, 2, 3))


def test_the_steps_that_judge_a_prediction_change_nothing_in_it():
    calibration = JOB.build_calibration()
    plans = [JOB.build_plan_step(f"cap {cap}", (0.08,) * 9, cap_bytes=cap) for cap in (1, MIB, 8 * MIB)]
    without, seen = fit_job(Evidence.sort(calibration)), fit_job(Evidence.sort([*plans, *calibration]))
    changed = fit_job(Evidence.sort([*map(change_wildly, plans), *calibration, *map(change_wildly, plans)]))
    assert without == seen == changed
    # The test can fail: any other step does change it.
    steps = [change_wildly(r) if isinstance(r, StepRecord) and r.role == "local" else r for r in calibration]
    assert fit_job(Evidence.sort(steps)) != without


def test_a_network_that_is_modelled_takes_the_place_of_the_sweep():
    job = fit(JOB, curve=LINE)
    assert job.costs.curve is LINE
    assert job.simulate((8,)).step_s > 0.5
    alone = [r for r in JOB.build_calibration() if not isinstance(r, CollectiveRecord | ChunksRecord)]
    alone = [r for r in alone if getattr(r, "role", "") != "disturbed"]
    costs = fit_job(Evidence.sort(alone), LINE).costs
    assert (costs.servers, costs.pair_rate, costs.contention) == (1, 1.0, Contention())


@pytest.mark.parametrize("backend", [*SERVERS, "another"])
def test_a_backend_moves_as_many_messages_as_is_known_of_it(backend):
    assert fit(replace(JOB, backend=backend)).costs.servers == SERVERS.get(backend, 1)


@pytest.mark.parametrize(("wrapper", "finish_s", "before_s"), [("paceline", 0.003, 0.020), ("torch", 0.0, 0.023)])
def test_buffers_travel_at_the_end_of_our_step_and_at_the_beginning_of_torchs(wrapper, finish_s, before_s):
    job = fit(replace(JOB, wrapper=wrapper, extra_s=0.003))
    assert job.costs.finish_s == pytest.approx(finish_s)
    assert job.backward.before_s == pytest.approx(before_s)
    assert job.costs.curve == fit(JOB).costs.curve


def is_needed(kind, role=""):
    return lambda record: isinstance(record, kind) and getattr(record, "role", "") == role


@pytest.mark.parametrize(
    "is_lost", [is_needed(LayerProfileRecord), is_needed(StepRecord, "plain"), is_needed(StepRecord, "local")]
)
def test_evidence_that_is_not_there_is_missed(is_lost):
    left = [record for record in JOB.build_calibration() if not is_lost(record)]
    plans = [JOB.build_plan_step("cap", (0.08,) * 9, cap_bytes=MIB)]
    with pytest.raises(MeasurementError, match="needs a layer profile, plain steps and steps of the wrapper alone"):
        Evidence.sort([*left, *plans])


def test_without_a_sweep_or_with_a_summary_of_one_nothing_is_fitted():
    records = JOB.build_calibration()
    evidence = Evidence.sort([record for record in records if not isinstance(record, CollectiveRecord)])
    with pytest.raises(MeasurementError, match="two or more sizes"):
        fit_job(evidence)
    told = [replace(r, timing=Summary(mean_s=1.0)) if isinstance(r, CollectiveRecord) else r for r in records]
    with pytest.raises(MeasurementError, match="needs raw samples"):
        fit_job(Evidence.sort(told))


def test_a_draw_of_a_bootstrap_can_be_repeated_and_draws_what_was_taken_in_turns_together():
    noisy = replace(JOB, noise=0.2, message_noise=0.2)
    evidence = Evidence.sort(noisy.build_calibration())
    first, again, other = (fit_job(evidence, draw=resample(random.Random(seed))) for seed in (3, 3, 4))
    assert first == again != other
    asked = []

    def draw(count):
        asked.append(count)
        return [0]

    only_first = fit_job(evidence, draw=draw)
    assert asked == [9]
    assert only_first.backward.total_s == evidence.plain.backward.reduced_s[0]
    assert only_first.costs.curve.seconds[0] == evidence.sweep[0].timing.reduced_s[0]


def test_all_repetitions_are_used_where_nobody_draws():
    evidence = Evidence.sort(replace(JOB, noise=0.2, message_noise=0.2).build_calibration())
    assert fit_job(evidence) == fit_job(evidence, draw=range)
    assert resample(random.Random(0))(1) == [0] and set(resample(random.Random(0))(4)) <= set(range(4))


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2])
def test_contention_is_the_same_from_messages_that_outlast_backward(share):
    job = replace(JOB, disturbed=())
    record = job.build_disturbed(random.Random(0), MIB, 0.75, 0.5, share)
    contention = fit_job(Evidence.sort([*job.build_calibration(), record])).costs.contention
    assert contention.rates(MIB) == pytest.approx((0.75, 0.5))


@pytest.mark.parametrize("delay_s", [-0.01, 0.0, 0.001, 0.004, 0.1, 10.0])
@pytest.mark.parametrize(("under_way_s", "overlapped_s"), [(0.01, 0.01), (1e-4, 1e-4), (5.0, 5.0), (0.3, 0.002)])
def test_contention_never_leaves_its_limits(delay_s, under_way_s, overlapped_s):
    job = replace(JOB, disturbed=())
    record = job.build_disturbed(random.Random(0), MIB, 0.5, 0.5)
    times = [replace(record.timing, seconds=((s,) * 2,) * 9) for s in (under_way_s, overlapped_s)]
    backward = replace(record.backward, seconds=((job.backward_s + 3 * delay_s,) * 2,) * 9)
    record = replace(record, under_way=times[0], overlapped=times[1], backward=backward)
    compute, message = fit_job(Evidence.sort([*job.build_calibration(), record])).costs.contention.rates(MIB)
    assert 0 < compute <= 1 and 0 < message <= 1
    assert message >= 1 - compute - 1e-12


def test_messages_that_met_no_arithmetic_tell_nothing_of_contention():
    record = JOB.build_disturbed(random.Random(0), 4 * MIB, 0.5, 0.5, share=0.0)
    nothing = replace(record, overlapped=replace(record.timing, seconds=((0.0, 0.0),) * 9))
    assert fit_job(Evidence.sort([*JOB.build_calibration(), nothing])) == fit(JOB)


@pytest.mark.parametrize(("gather_s", "launch_s"), [(-0.005, 0.0005), (0.002, -0.001)])
def test_costs_within_the_noise_are_none_and_not_less(gather_s, launch_s):
    job = fit(replace(JOB, gather_s=gather_s, launch_s=launch_s))
    assert job.costs.gather_s_per_byte >= 0 and job.costs.launch_s >= 0 and job.backward.before_s >= 0
