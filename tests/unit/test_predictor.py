"""Predictions from tuning records: the fit, the chosen plan, and the errors."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import MeasurementError
from paceline.plan import Gradient, Plan
from paceline.predict.curves import Resample
from paceline.predict.predictor import (
    Choice,
    Draw,
    Evidence,
    Prediction,
    Predictor,
    calibrate,
    fit_job,
)
from paceline.predict.simulate import BucketSpan, Contention, MachineCosts, SimulatedStep, simulate
from paceline.predict.tuning import TuneSettings, Tuning, kendall_tau
from paceline.records import ChunksRecord, CollectiveRecord, LayerProfileRecord, StepRecord, Summary
from paceline.records.steps import SERVERS
from paceline.units import MIB
from tests.unit.made_jobs import line, make_job
from tests.unit.made_plans import plan_by_cap, plan_in_pieces
from tests.unit.made_tuning import KIB, MadeJob

JOB = MadeJob()
LINE = line(0.5, 1e9)


def fit(job, **more):
    return fit_job(Evidence(job.build_calibration()), **more)


def test_the_fit_recovers_the_job_behind_the_records():
    job, costs = fit(JOB)
    assert job.sizes == JOB.sizes and [g.name for g in job.gradients] == [f"layer{k}" for k in range(8)]
    assert all((g.item_bytes, g.dtype) == (4, "float32") for g in job.gradients)
    assert job.ready_s == pytest.approx(JOB.ready_s)
    assert (job.before_s, job.backward_s, job.after_s) == pytest.approx((0.020, 0.040, 0.010))
    assert job.device == "cpu"
    assert [costs.curve.estimate_s(x) for x in JOB.sweep_sizes] == pytest.approx(
        [1e-3 + x / 1e9 for x in JOB.sweep_sizes]
    )
    assert costs.gather_s_per_byte * JOB.num_bytes == pytest.approx(0.002)
    assert costs.launch_s == pytest.approx(0.0005)
    assert costs.pair_rate == pytest.approx(0.8)
    assert costs.contention.sizes == (64 * KIB, MIB)
    assert costs.contention.compute_rates == pytest.approx((0.5, 0.8))
    assert costs.contention.message_rates == pytest.approx((0.6, 0.9))
    assert "fitted to steps" in costs.contention.basis
    assert (costs.servers, costs.finish_s) == (2, 0.0)


@pytest.mark.parametrize("cap_bytes", [1, 2 * MIB, 3 * MIB, 8 * MIB])
def test_a_predicted_step_is_that_of_the_true_machine(cap_bytes):
    job, costs = fit(JOB)
    true_costs = MachineCosts(
        line(JOB.alpha_s, JOB.bytes_per_s), 2, JOB.launch_s, JOB.gather_s / JOB.num_bytes,
        Contention((64 * KIB, MIB), (0.5, 0.8), (0.6, 0.9)), 0.8,
    )  # fmt: skip
    true_job = make_job(JOB.sizes, JOB.ready_s, JOB.backward_s, JOB.forward_s, JOB.optimizer_s)
    true = simulate(true_job, job.cut(cap_bytes), true_costs)
    # Between two measured sizes, the curve differs from the line it was sampled from.
    assert simulate(job, job.cut(cap_bytes), costs).step_s == pytest.approx(true.step_s, rel=5e-3)


def change_wildly(record):
    slow = replace(record.timing, seconds=tuple(tuple(100 * s for s in row) for row in record.timing.seconds))
    return replace(record, timing=slow, forward=slow, backward=slow, optimizer=slow, bucket_bytes=(1, 2, 3))


def test_the_steps_that_test_a_prediction_do_not_change_it():
    calibration = JOB.build_calibration()
    plans = [JOB.build_plan_step(f"cap {cap}", (0.08,) * 9, cap_bytes=cap) for cap in (1, MIB, 8 * MIB)]
    without, seen = fit_job(Evidence(calibration)), fit_job(Evidence([*plans, *calibration]))
    changed = fit_job(Evidence([*map(change_wildly, plans), *calibration, *map(change_wildly, plans)]))
    assert without == seen == changed
    # Prove that this test can fail: changing other steps does change the fit.
    steps = [change_wildly(r) if isinstance(r, StepRecord) and r.role == "local" else r for r in calibration]
    assert fit_job(Evidence(steps)) != without


def test_a_modeled_network_replaces_the_sweep():
    job, costs = fit(JOB, curve=LINE)
    assert costs.curve is LINE
    assert simulate(job, (8,), costs).step_s > 0.5
    alone = [r for r in JOB.build_calibration() if not isinstance(r, CollectiveRecord | ChunksRecord)]
    alone = [r for r in alone if getattr(r, "role", "") != "disturbed"]
    _, costs = fit_job(Evidence(alone), LINE)
    assert (costs.servers, costs.pair_rate, costs.contention.rates(MIB)) == (1, 1.0, (1.0, 1.0))
    assert "emulated" in costs.contention.basis


def test_contention_is_assumed_without_evidence():
    _, costs = fit(replace(JOB, disturbed=()))
    assert costs.contention == Contention.assume("cpu", is_on_host=True)
    _, costs = fit(replace(JOB, disturbed=((MIB, -0.3, 0.9),)))  # backward grows by more than the overlap with messages
    assert costs.contention.compute_rates == Contention.assume("cpu", is_on_host=True).compute_rates
    assert "this backward is too short" in costs.contention.basis


@pytest.mark.parametrize(
    ("idle_s", "expected_s"), [(0.0004, 0.0004), (-0.001, 0.0), (0.0015, 0.8 * JOB.message_s(4 * KIB))]
)
def test_a_queued_message_on_a_gpu_does_not_idle_like_one_alone(idle_s, expected_s):
    job = replace(JOB, backend="nccl", device="cuda", idle_s=idle_s)
    _, costs = fit(job)
    assert costs.curve.estimate_s(MIB) == pytest.approx(job.message_s(MIB) - expected_s)
    assert costs.curve.estimate_s(4 * KIB) == pytest.approx(job.message_s(4 * KIB) - expected_s)
    # In disturbed steps, messages are launched one at a time, as when measured separately.
    assert costs.contention.message_rates == pytest.approx(fit(JOB)[1].contention.message_rates)
    assert fit(replace(job, device="cpu"))[1].curve == fit(JOB)[1].curve


def test_messages_on_a_gpu_are_timed_even_if_backward_is_too_short():
    job = replace(JOB, backend="nccl", device="cuda", disturbed=((MIB, -0.3, 0.5),))
    contention = fit(job)[1].contention
    assumed = Contention.assume("cuda", is_on_host=False)
    assert "this backward is too short" in contention.basis and assumed.basis in contention.basis
    assert min(contention.message_rates) == pytest.approx(0.5, abs=0.01)
    assert min(contention.compute_rates) == pytest.approx(assumed.compute_rates[0], abs=0.01)


@pytest.mark.parametrize("backend", [*SERVERS, "shm", "nccl", "another"])
def test_each_backend_has_its_number_of_concurrent_messages(backend):
    assert fit(replace(JOB, backend=backend))[1].servers == (2 if backend == "gloo" else 1)


@pytest.mark.parametrize(("wrapper", "finish_s", "before_s"), [("paceline", 0.003, 0.020), ("torch", 0.0, 0.023)])
def test_buffers_are_sent_after_our_step_and_before_torchs(wrapper, finish_s, before_s):
    job, costs = fit(replace(JOB, wrapper=wrapper, extra_s=0.003))
    assert costs.finish_s == pytest.approx(finish_s)
    assert job.before_s == pytest.approx(before_s)
    assert costs.curve == fit(JOB)[1].curve


def is_needed(kind, role=""):
    return lambda record: isinstance(record, kind) and getattr(record, "role", "") == role


@pytest.mark.parametrize(
    "is_lost", [is_needed(LayerProfileRecord), is_needed(StepRecord, "plain"), is_needed(StepRecord, "local")]
)
def test_missing_evidence_is_an_error(is_lost):
    left = [record for record in JOB.build_calibration() if not is_lost(record)]
    plans = [JOB.build_plan_step("cap", (0.08,) * 9, cap_bytes=MIB)]
    with pytest.raises(MeasurementError, match="layer profile"):
        Evidence([*left, *plans])


def test_a_fit_needs_a_sweep_with_raw_samples():
    records = JOB.build_calibration()
    evidence = Evidence([record for record in records if not isinstance(record, CollectiveRecord)])
    with pytest.raises(MeasurementError, match="sizes"):
        fit_job(evidence)
    received = [replace(r, timing=Summary(mean_s=1.0)) if isinstance(r, CollectiveRecord) else r for r in records]
    with pytest.raises(MeasurementError, match="samples"):
        fit_job(Evidence(received))


def test_a_bootstrap_is_reproducible_and_draws_interleaved_series_together():
    noisy = replace(JOB, noise=0.2, message_noise=0.2)
    evidence = Evidence(noisy.build_calibration())
    first, again, other = (fit_job(evidence, resample=Resample(random.Random(seed))) for seed in (3, 3, 4))
    assert first == again != other

    class First(random.Random):
        def choices(self, numbers, *, k):
            asked.append(k)
            return [0]

    asked = []
    job, costs = fit_job(evidence, resample=Resample(First()))
    assert asked == [9]
    assert job.backward_s == evidence.plain.backward.reduced_s[0]
    assert costs.curve.seconds[0] == evidence.sweep[0].timing.reduced_s[0]


@pytest.mark.parametrize("share", [1.0, 0.6, 0.2])
def test_messages_that_outlast_backward_give_the_same_contention(share):
    job = replace(JOB, disturbed=())
    record = job.build_disturbed(random.Random(0), MIB, 0.75, 0.5, share)
    contention = fit_job(Evidence([*job.build_calibration(), record]))[1].contention
    assert contention.rates(MIB) == pytest.approx((0.75, 0.5))


@pytest.mark.parametrize("delay_s", [-0.01, 0.0, 0.001, 0.004, 0.1, 10.0])
@pytest.mark.parametrize(("under_way_s", "overlapped_s"), [(0.01, 0.01), (1e-4, 1e-4), (5.0, 5.0), (0.3, 0.002)])
def test_contention_never_leaves_its_limits(delay_s, under_way_s, overlapped_s):
    job = replace(JOB, disturbed=())
    record = job.build_disturbed(random.Random(0), MIB, 0.5, 0.5)
    times = [replace(record.timing, seconds=((s,) * 2,) * 9) for s in (under_way_s, overlapped_s)]
    backward = replace(record.backward, seconds=((job.backward_s + 3 * delay_s,) * 2,) * 9)
    record = replace(record, under_way=times[0], overlapped=times[1], backward=backward)
    compute, message = fit_job(Evidence([*job.build_calibration(), record]))[1].contention.rates(MIB)
    assert 0 < compute <= 1 and 0 < message <= 1
    assert message >= 1 - compute - 1e-12


def test_messages_without_overlap_do_not_measure_contention():
    record = JOB.build_disturbed(random.Random(0), 4 * MIB, 0.5, 0.5, share=0.0)
    nothing = replace(record, overlapped=replace(record.timing, seconds=((0.0, 0.0),) * 9))
    assert fit_job(Evidence([*JOB.build_calibration(), nothing])) == fit(JOB)


@pytest.mark.parametrize(("gather_s", "launch_s"), [(-0.005, 0.0005), (0.002, -0.001)])
def test_costs_within_the_noise_are_zero(gather_s, launch_s):
    job, costs = fit(replace(JOB, gather_s=gather_s, launch_s=launch_s))
    assert costs.gather_s_per_byte >= 0 and costs.launch_s >= 0 and job.before_s >= 0


# Messages and arithmetic do not slow each other down.
ALONE = ((MIB, 1.0, 1.0),)
# Messages run one at a time, with a latency that makes eight buckets far too many.
SLOW = MadeJob(alpha_s=0.010, backend="paceline", disturbed=ALONE)
# Messages cost almost nothing.
FAST = MadeJob(alpha_s=1e-6, bytes_per_s=1e12, launch_s=0.0, gather_s=0.0, disturbed=ALONE)
# On such a slow link, messages should start at once and grow while they queue; no cap achieves that.
NARROW = replace(SLOW, alpha_s=0.002, bytes_per_s=1e8)
UNEVEN = replace(SLOW, sizes=(16 * MIB, MIB, MIB, 8 * MIB, MIB, MIB, 4 * MIB, 64 * KIB), alpha_s=0.002)
EACH = tuple(range(1, 9))


def build(job: MadeJob) -> Predictor:
    return Predictor.fit(Evidence(job.build_calibration()))


def every_cut(count):
    inner = range(1, count)
    return [(*cut, count) for length in range(count) for cut in itertools.combinations(inner, length)]


@pytest.mark.parametrize("cap_bytes", [1, 2 * MIB, 8 * MIB])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_an_interval_is_around_its_estimate(cap_bytes, noise):
    model = build(replace(SLOW, noise=noise))
    estimate = model.predict(model.job.cut(cap_bytes))
    assert 0 < estimate.low_s < estimate.step_s < estimate.high_s
    assert estimate.step_s == simulate(model.job, estimate.cuts, model.costs).step_s == estimate.step.step_s
    assert estimate.exposed_s == pytest.approx(estimate.step_s - model.plain_s)
    assert estimate.num_buckets == len(model.job.cut(cap_bytes))
    assert estimate == model.predict(estimate.cuts)


def test_a_calibration_reproduces_each_step_and_draws_their_mean_factor():
    job, cuts = make_job((4 * MIB,) * 4, (4, 8, 12, 16), 16), (1, 2, 3, 4)

    def scale(factor: float) -> MachineCosts:
        return MachineCosts(line(1e-3 * factor, 1e9 / factor))

    true_s = [simulate(job, cuts, scale(factor)).step_s for factor in (1.5, 2.0, 9.0)]
    near, other, beyond = (calibrate(job, scale, [(cuts, step_s)], (0.5, 4.0)) for step_s in true_s)
    assert near.factor == pytest.approx(1.5, rel=1e-5) and near.rests_s[0] == pytest.approx(0, abs=1e-6)
    assert near.draw(3.0).curve.estimate_s(MIB) == near.draw().curve.estimate_s(MIB)  # one step shows no error
    assert beyond.factor == 4.0 and beyond.rests_s[0] == pytest.approx(true_s[2] - simulate(job, cuts, scale(4)).step_s)
    both = calibrate(job, scale, [(cuts, step_s) for step_s in true_s[:2]], (0.5, 4.0))
    assert both.factors == (near.factor, other.factor) and both.factor == pytest.approx(math.sqrt(3), rel=1e-5)
    low, middle, high = (both.draw(shift).curve.estimate_s(MIB) for shift in (-1, 0, 1))
    assert low < middle < high and middle / low == pytest.approx((2 / 1.5) ** 0.5, rel=1e-5)


def test_no_prediction_is_negative():
    assert build(replace(SLOW, noise=0.5, count=5)).predict((8,)).low_s >= 0


@pytest.mark.parametrize("of", ["noise", "message_noise"])
def test_an_interval_grows_with_the_noise(of):
    widths = []
    for noise in (0.0, 0.1, 0.4):
        estimate = build(replace(SLOW, **{of: noise})).predict(EACH)
        widths.append((estimate.high_s - estimate.low_s) / estimate.step_s)
    assert widths[0] * 1.05 < widths[1] < widths[2] / 1.05


def test_without_noise_the_interval_is_the_models_own_error():
    calm = build(SLOW)
    assert calm.noise == 0.0
    estimate = calm.predict(EACH)
    assert estimate.high_s - estimate.step_s == pytest.approx(1.645 * 0.10 * estimate.exposed_s, rel=0.1)


def test_no_plan_is_said_to_save_more_than_communication_adds():
    """The cost of a bucket is uncertain: with more buckets a step may take much longer, but not much less."""
    job, costs = fit_job(Evidence(FAST.build_calibration()))
    draws = [(job, replace(costs, launch_s=launch_s)) for launch_s in (0.0, 1e-3, 5e-3)]
    model = Predictor(Draw(job, costs), [Draw(*one) for one in draws])
    gain, low, high = model.compare(model.predict(EACH), model.predict((8,))).saved
    adds = [simulate(job, (8,), each) for _, each in draws]
    assert gain <= high <= max(step.exposed_s / step.step_s for step in adds) < 0.1 < gain - low


def test_a_better_plan_is_found_where_latency_makes_the_default_slow():
    model = build(SLOW)
    choice = model.choose(EACH)
    times_s = {cuts: simulate(model.job, cuts, model.costs).step_s for cuts in every_cut(8)}
    assert choice.is_clear and choice.best.num_buckets < 8
    assert choice.best.step_s <= min(times_s.values()) * 1.005
    assert choice.gain == pytest.approx(1 - choice.best.step_s / times_s[EACH])
    assert choice.gain > 0.2


@pytest.mark.parametrize("default", [(8,), EACH, (2, 8)])
def test_the_default_is_kept_without_a_gain(default):
    choice = build(FAST).choose(default)
    assert not choice.is_clear and choice.default.cuts == default and choice.gain < 0.002


def test_a_default_that_is_best_is_kept():
    model = build(SLOW)
    best = model.choose(EACH).best
    choice = model.choose(best.cuts)
    assert not choice.is_clear and choice.default.cuts == best.cuts and choice.gain == 0


@pytest.mark.parametrize("noise", [{"noise": 0.5}, {"message_noise": 0.5}], ids=["steps", "messages"])
def test_the_default_is_kept_if_the_gain_is_uncertain(noise):
    # The middle plan is slightly slower than the best, and the uncertainty of the machine is far larger than that.
    default = (1, 4, 8)
    calm, noisy = (build(replace(SLOW, alpha_s=0.002, count=5, **more)) for more in ({}, noise))
    assert calm.choose(default).is_clear
    choice = noisy.choose(default)
    assert choice.gain > 0.01, "there is something that looks like a gain"
    assert not choice.is_clear and choice.default.cuts == default


def test_a_free_plan_may_be_better_than_any_cap():
    model = build(NARROW)
    free, capped = model.choose(EACH), model.choose(EACH, only_caps=True)
    assert free.best.cap_bytes == 0 and capped.best.cap_bytes > 0
    assert free.best.step_s < capped.best.step_s * 0.998
    assert all(model.job.cut(cap) != free.best.cuts for cap in range(1, NARROW.num_bytes + 1, 4 * KIB))


@pytest.mark.parametrize("job", [SLOW, NARROW, UNEVEN])
def test_one_cap_makes_the_plan_where_only_caps_can_be_given(job):
    model = build(job)
    choice = model.choose(EACH, only_caps=True)
    assert choice.is_clear
    assert model.job.cut(choice.best.cap_bytes) == choice.best.cuts
    plan = model.build_plan(job.gradients, choice.best.cuts, "one cap")
    assert set(plan.as_torch_kwargs()) == {"bucket_cap_mb"}


@pytest.mark.parametrize("cuts", [(8,), (3, 8), EACH])
@pytest.mark.parametrize("spare", [None, Gradient("spare", 12), Gradient("spare", 12, 2, "float16")])
def test_a_plan_lists_gradients_in_model_order(cuts, spare):
    model = build(UNEVEN)
    gradients = list(UNEVEN.gradients)
    if spare is not None:
        gradients.insert(2, spare)
    plan = model.build_plan(gradients, cuts, "made")
    assert Plan.from_json(plan.to_json()) == plan and plan.rule == "made"
    names = [[plan.gradients[index].name for index in bucket] for bucket in plan.partition]
    wanted = [[f"layer{place}" for place in range(start, end)] for start, end in itertools.pairwise([0, *cuts])]
    if spare is not None and spare.dtype == "float32":
        wanted[-1].append("spare")
    elif spare is not None:
        wanted.append(["spare"])
    assert names == wanted


MODEL = build(UNEVEN)


@given(st.sets(st.integers(1, 7)))
def test_cuts_are_recovered_from_the_sizes_of_buckets(inner):
    cuts = (*sorted(inner), 8)
    plan = MODEL.build_plan(UNEVEN.gradients, cuts, "")
    assert MODEL.cut_like(plan.bucket_bytes) == cuts


@pytest.mark.parametrize("cap_bytes", [64 * KIB, 4 * MIB, 100 * MIB])
def test_cuts_are_the_nearest_if_a_wrapper_splits_gradients_or_has_more(cap_bytes):
    order = range(7, -1, -1)
    whole = plan_by_cap(UNEVEN.gradients, order, cap_bytes)
    assert len(MODEL.cut_like(whole.bucket_bytes)) == len(whole.buckets)
    for plan in (whole, plan_in_pieces(UNEVEN.gradients, order, cap_bytes)):
        cuts = MODEL.cut_like((*plan.bucket_bytes, 400))
        assert list(cuts) == sorted(set(cuts)) and cuts[-1] == 8 and cuts[0] >= 1
    assert MODEL.cut_like((17 * MIB + 4, 15 * MIB)) == (3, 8)


@pytest.mark.parametrize(("of", "first"), [("message_noise", "all-reduce"), ("noise", "the local step")])
def test_the_least_certain_input_comes_first(of, first):
    doubts = build(replace(SLOW, **{of: 0.2})).estimate_doubts(EACH)
    assert next(iter(doubts)) == first and doubts[first] > 0
    assert list(doubts.values()) == sorted(doubts.values(), reverse=True)


PLAIN_S = 0.5
# A tuning without content, because the score ignores it.
NO_TUNING = Tuning(TuneSettings(), (), None, None, (), ())
# Two ranks per row; the medians are 1, 2 and 4.
TIMES_S = {1: (0.9, 1.0, 1.1), 2: (1.9, 2.0, 2.3), 4: (4.0, 4.0, 4.0)}


def guess(step_s, low_s=None, high_s=None, sizes=(MIB,), **known):
    step = SimulatedStep(tuple(map(BucketSpan, sizes)), 0.0, step_s, 0.0, 0.0, 0.0)
    low_s, high_s = step_s * 0.95 if low_s is None else low_s, step_s * 1.05 if high_s is None else high_s
    exposed_s = step_s - PLAIN_S
    return Prediction(
        step_s=step_s, low_s=low_s, high_s=high_s, exposed_s=exposed_s, local_s=PLAIN_S, step=step, **known
    )


def measure(label, times_s, sizes=(MIB,)):
    return MadeJob().build_plan_step(label, times_s, bucket_bytes=sizes)


def judge(points):
    choice = Choice(points[0], points[0], False)
    return replace(NO_TUNING, choice=choice, points=tuple(points))


def point(cap_bytes, step_s, times_s=None, **limits):
    measured = None if times_s is None else measure(f"cap {cap_bytes}", times_s)
    return guess(step_s, cap_bytes=cap_bytes, measured=measured, **limits)


@pytest.fixture
def judged():
    return judge([point(1, 1.1, TIMES_S[1]), point(2, 1.8, TIMES_S[2]), point(4, 4.2, TIMES_S[4])])


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [
        ([(1, 1), (2, 2), (3, 3)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        ([(1, 1), (2, 3), (3, 2)], 1 / 3),
        # There are 6 pairs: those with the first agree, 1 is a tie, and 2 disagree.
        ([(1, 1), (2, 2), (3, 2), (4, 1.5)], (3 - 2) / math.sqrt(6 * 5)),
        ([(1, 5), (2, 5), (3, 5)], None),
        ([(2, 1), (2, 2), (2, 3)], None),
        ([(1, 1)], None),
        ([], None),
    ],
)
def test_rank_correlation_by_hand(pairs, tau):
    assert kendall_tau(pairs) == (None if tau is None else pytest.approx(tau))
    assert kendall_tau([(y, x) for x, y in pairs]) == kendall_tau(pairs)


def test_ties_in_both_orders_count_once_on_each_side():
    # 10 pairs: one tie in x only, one in y only, one in both; of the other 7, 5 agree.
    pairs = [(1, 1), (1, 2), (2, 3), (2, 3), (3, 2)]
    assert kendall_tau(pairs) == pytest.approx((5 - 2) / math.sqrt((10 - 2) * (10 - 2)))


def test_errors_of_steps_and_of_what_communication_adds(judged):
    assert [point.error for point in judged.points] == pytest.approx([0.1, -0.1, 0.05])
    scores = judged.scores
    assert scores["mape"] == pytest.approx(0.25 / 3)
    assert scores["max_error"] == pytest.approx(0.1)
    # Measured communication adds 0.5, 1.5 and 3.5; predicted 0.6, 1.3 and 3.7.
    assert scores["exposed_error"] == pytest.approx((0.1 + 0.2 + 0.2) / 5.5)
    assert scores["exposed_step_error"] == pytest.approx((0.1 + 0.2 + 0.2) / 7.0)
    assert scores["kendall_tau"] == pytest.approx(1.0)


def test_coverage_is_the_share_of_points_in_their_intervals():
    points = [
        point(1, 1.1, TIMES_S[1], low_s=1.0, high_s=1.2),  # on the boundary
        point(2, 1.8, TIMES_S[2], low_s=1.7, high_s=1.9),
        point(4, 4.2, TIMES_S[4], low_s=3.0, high_s=5.0),
        point(8, 9.0),
    ]
    assert judge(points).scores["coverage"] == pytest.approx(2 / 3)


def test_noise_is_the_half_width_of_a_median(judged):
    def by_hand(times_s):
        return 1.96 * 1.25 * statistics.stdev(times_s) / math.sqrt(3) / statistics.median(times_s)

    assert judged.noise == pytest.approx(sorted(map(by_hand, TIMES_S.values()))[1])
    assert judge([point(1, 1.0, (1.0,))]).noise == 0.0


def test_without_measured_steps_there_are_no_scores():
    judged = judge([point(1, 1.0), point(2, 1.1)])
    assert judged.noise == 0.0 and judged.measured == [] and judged.best_measured is None
    assert set(judged.scores.values()) == {None} and judged.race is None


def test_the_best_of_each():
    judged = judge([point(1, 1.5, (1.0,) * 3), point(2, 1.2, (1.3,) * 3), point(4, 1.9, (2.0,) * 3)])
    assert (judged.best_predicted.cap_bytes, judged.best_measured.cap_bytes) == (2, 1)


def test_a_layout_is_the_simulated_one_or_not():
    same, other = (guess(1.0, sizes=(MIB, 4), measured=measure("", (1.0,), sizes)) for sizes in ((MIB, 4), (MIB,)))
    assert same.same_layout and not other.same_layout
    assert point(1, 1.0).same_layout
    assert (point(1, 1.0).error, point(1, 1.0).measured_exposed_s, point(1, 1.0).measured_s) == (None, None, None)


def limit(sizes, ready_s, costs, cuts, backward_s=0.01, before_s=0.48):
    job = make_job(sizes, ready_s, backward_s, before_s)
    return Predictor(Draw(job, costs), [Draw(job, costs)] * 2).limit_gain(cuts)


def test_buckets_cannot_save_more_than_can_be_hidden():
    """A long wait for data, followed by 1 MiB that takes 8 ms: 1.6 % of the step."""
    costs, early, late = MachineCosts(line(1e-4, 1.25e8)), (0.0, 0.005, 0.010), (0.008, 0.009, 0.010)
    sizes = (MIB // 2, MIB // 4, MIB // 4)
    found = limit(sizes, late, costs, (3,))
    assert found.is_nothing and found.adds == pytest.approx(0.0171, abs=1e-3)  # only 2 ms of it can be hidden
    # The same exposed time, but most of it could be hidden.
    assert limit(sizes, early, costs, (3,)).share > 0.011 and not limit(sizes, early, costs, (3,)).is_nothing


def test_hidden_messages_that_slow_compute_leave_something_to_gain():
    sizes, ready_s = (4 * KIB,) * 100, tuple(0.1 * (n + 1) / 101 for n in range(100))
    costs = MachineCosts(line(1e-4, 1e9), launch_s=2e-5, contention=Contention((1,), (0.5,), (1.0,)))
    each = tuple(range(1, 101))
    step = simulate(make_job(sizes, ready_s, 0.1), each, costs)
    assert max(bucket.done_s for bucket in step.buckets) <= step.backward_s  # no message ends after backward
    assert limit(sizes, ready_s, costs, each, 0.1, 0.0).share > 0.03


def test_uncertainty_raises_the_limit():
    job, costs = make_job((MIB, MIB), (0.008, 0.010), 0.01, 0.2), MachineCosts(line(1e-4, 1e9))
    slower = replace(costs, curve=line(2e-3, 1e9), contention=Contention((1,), (0.5,), (1.0,)))
    calm, doubtful = (
        Predictor(Draw(job, costs), [Draw(job, costs), Draw(job, other)]).limit_gain((1, 2))
        for other in (costs, slower)
    )
    assert calm.share < doubtful.share <= doubtful.adds and calm.adds < doubtful.adds
