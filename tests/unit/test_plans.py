"""The plan that a calibrated job gets: better where something is to be gained, the default where it is not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan import Gradient, Plan, plan_by_cap, plan_shaped
from paceline.predict.calibrate import Evidence
from paceline.predict.plans import PlanModel
from paceline.units import MIB
from tests.unit.made_tuning import KIB, MadeJob

# One message at a time, at a latency that makes eight buckets far too many.
SLOW = MadeJob(alpha_s=0.010, backend="paceline", disturbed=())
# Messages that cost next to nothing.
FAST = MadeJob(alpha_s=1e-6, bytes_per_s=1e12, launch_s=0.0, gather_s=0.0, disturbed=())
# So slow a wire that messages should leave at once in the beginning, and grow while they queue: no cap does that.
NARROW = replace(SLOW, alpha_s=0.002, bytes_per_s=1e8)
UNEVEN = replace(SLOW, sizes=(16 * MIB, MIB, MIB, 8 * MIB, MIB, MIB, 4 * MIB, 64 * KIB), alpha_s=0.002)
EACH = tuple(range(1, 9))


def build(job: MadeJob) -> PlanModel:
    return PlanModel(Evidence.sort(job.build_calibration()))


def every_cut(count):
    inner = range(1, count)
    return [(*cut, count) for length in range(count) for cut in itertools.combinations(inner, length)]


@pytest.mark.parametrize("cap_bytes", [1, 2 * MIB, 8 * MIB])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_an_interval_is_around_its_estimate(cap_bytes, noise):
    model = build(replace(SLOW, noise=noise))
    estimate = model.estimate_cap(cap_bytes)
    assert 0 < estimate.low_s < estimate.step_s < estimate.high_s
    assert estimate.step_s == model.job.simulate(estimate.cuts).step_s == estimate.step.step_s
    assert estimate.exposed_s == pytest.approx(estimate.step_s - model.plain_s)
    assert estimate.num_buckets == len(model.job.cut(cap_bytes))
    assert estimate == model.estimate(estimate.cuts)


def test_no_step_takes_less_than_no_time():
    assert build(replace(SLOW, noise=0.5, count=5)).estimate((8,)).low_s >= 0


@pytest.mark.parametrize("of", ["noise", "message_noise"])
def test_an_interval_grows_with_the_noise(of):
    widths = []
    for noise in (0.0, 0.1, 0.4):
        estimate = build(replace(SLOW, **{of: noise})).estimate(EACH)
        widths.append((estimate.high_s - estimate.low_s) / estimate.step_s)
    assert widths[0] * 1.05 < widths[1] < widths[2] / 1.05


def test_without_noise_the_interval_is_what_the_model_leaves_out_of_communication():
    calm = build(SLOW)
    assert calm.noise == 0.0
    estimate = calm.estimate(EACH)
    assert estimate.high_s - estimate.step_s == pytest.approx(1.645 * 0.10 * estimate.exposed_s)


def test_a_better_plan_is_found_where_latency_makes_the_default_slow():
    model = build(SLOW)
    choice = model.choose(EACH)
    times_s = {cuts: model.job.simulate(cuts).step_s for cuts in every_cut(8)}
    assert not choice.is_default and choice.estimate.num_buckets < 8
    assert choice.estimate.step_s <= min(times_s.values()) * 1.005
    assert choice.gain == pytest.approx(1 - choice.estimate.step_s / times_s[EACH])
    assert choice.gain > 0.2


@pytest.mark.parametrize("default", [(8,), EACH, (2, 8)])
def test_the_default_stays_where_nothing_is_to_be_gained(default):
    choice = build(FAST).choose(default)
    assert choice.is_default and choice.cap_bytes == 0
    assert choice.estimate.cuts == default and choice.gain < 0.002


def test_the_best_plan_stays_where_it_is_the_default():
    model = build(SLOW)
    best = model.choose(EACH).estimate
    choice = model.choose(best.cuts)
    assert choice.is_default and choice.estimate == best


@pytest.mark.parametrize("noise", [{"noise": 0.5}, {"message_noise": 0.5}], ids=["steps", "messages"])
def test_the_default_stays_where_one_cannot_be_sure(noise):
    # The middle plan is a little slower than the best, and the machine was measured far worse than that.
    default = (1, 4, 8)
    calm, noisy = (build(replace(SLOW, alpha_s=0.002, count=5, **more)) for more in ({}, noise))
    assert not calm.choose(default).is_default
    choice = noisy.choose(default)
    assert choice.gain > 0.01, "there is something that looks like a gain"
    assert choice.is_default and choice.estimate.cuts == default


def test_a_free_plan_may_be_better_than_any_cap():
    model = build(NARROW)
    free, capped = model.choose(EACH), model.choose(EACH, only_caps=True)
    assert free.cap_bytes == 0 and capped.cap_bytes > 0
    assert free.estimate.step_s < capped.estimate.step_s * 0.998
    assert all(model.job.cut(cap) != free.estimate.cuts for cap in range(1, NARROW.num_bytes + 1, 4 * KIB))


@pytest.mark.parametrize("job", [SLOW, NARROW, UNEVEN])
def test_one_cap_makes_the_plan_where_only_caps_can_be_given(job):
    model = build(job)
    choice = model.choose(EACH, only_caps=True)
    assert not choice.is_default
    assert model.job.cut(choice.cap_bytes) == choice.estimate.cuts
    plan = model.build_plan(job.gradients, choice.estimate.cuts, "one cap")
    assert set(plan.as_torch_kwargs()) == {"bucket_cap_mb"}


@pytest.mark.parametrize("cuts", [(8,), (3, 8), EACH])
@pytest.mark.parametrize("spare", [None, Gradient("spare", 12), Gradient("spare", 12, 2, "float16")])
def test_a_plan_names_gradients_as_the_model_defines_them(cuts, spare):
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
def test_cuts_are_the_nearest_where_a_wrapper_splits_gradients_or_knows_more_of_them(cap_bytes):
    order = range(7, -1, -1)
    whole = plan_by_cap(UNEVEN.gradients, order, cap_bytes)
    assert len(MODEL.cut_like(whole.bucket_bytes)) == len(whole.buckets)
    for plan in (whole, plan_shaped(UNEVEN.gradients, order, cap_bytes)):
        cuts = MODEL.cut_like((*plan.bucket_bytes, 400))
        assert list(cuts) == sorted(set(cuts)) and cuts[-1] == 8 and cuts[0] >= 1
    assert MODEL.cut_like((17 * MIB + 4, 15 * MIB)) == (3, 8)


@pytest.mark.parametrize(("of", "first"), [("message_noise", "all-reduce"), ("noise", "the model's own step")])
def test_the_input_that_is_known_worst_is_named_first(of, first):
    doubts = build(replace(SLOW, **{of: 0.2})).estimate_doubts(EACH)
    assert next(iter(doubts)) == first and doubts[first] > 0
    assert list(doubts.values()) == sorted(doubts.values(), reverse=True)
