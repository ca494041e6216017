"""Jobs built from a layer profile and from tables of layers."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError, RecordError
from paceline.predict.curves import MeasuredCurve
from paceline.predict.job import build_job_from_profile, build_job_from_tables, draw_jobs
from paceline.predict.search import CapCurve, CapPoint, estimate_caps, estimate_sensitivity
from paceline.predict.simulate import MachineCosts
from paceline.records import LayerSizeRecord, LayerTimeRecord, Summary

from .made_jobs import make_job
from .test_records_layers import build_profile
from .test_records_layers import build_times as samples


def test_ready_times_lose_the_cost_of_profiling():
    job = build_job_from_profile(build_profile())  # profiled over plain backward: 2 and 1, so the factor is 1.5
    assert [gradient.name for gradient in job.gradients] == ["head.bias", "scale", "embed.weight", "spare"]
    assert job.ready_s == pytest.approx((0.2 / 1.5, 0.3 / 1.5, 0.9 / 1.5, 0.75))
    assert job.backward_s == 0.75
    assert job.num_bytes == 68
    assert any("1 parameters never received a gradient" in note for note in job.notes)


def test_the_step_around_is_the_plain_one():
    job = build_job_from_profile(build_profile())
    assert job.after_s == pytest.approx(0.2)
    assert job.before_s + job.backward_s + job.after_s == job.local_s == pytest.approx(1.5)
    assert job.device == "cpu"


def test_no_gradient_is_ready_after_the_end():
    job = build_job_from_profile(build_profile(backward=samples(0.5, 0.5), profiled_backward=samples(0.95, 0.95)))
    assert max(job.ready_s) == job.backward_s


@pytest.mark.parametrize(("gradients", "num_bytes", "dtype"), [("bf16", 34, "bfloat16"), ("fp32", 68, "float32")])
def test_gradients_can_be_sent_in_another_type(gradients, num_bytes, dtype):
    job = build_job_from_profile(build_profile(), gradients)
    assert job.num_bytes == num_bytes and {gradient.dtype for gradient in job.gradients} == {dtype}
    assert any("conversion" in note for note in job.notes) == (gradients == "bf16")


def test_unknown_types_and_empty_backwards_are_refused():
    with pytest.raises(ConfigError, match=r"'fp8'.*fp32, bf16"):
        build_job_from_profile(build_profile(), "fp8")
    with pytest.raises(RecordError):
        build_job_from_profile(build_profile(backward=samples(0.0, 0.0)))


def test_draws_vary_with_the_repetitions_and_are_the_same_every_time():
    record = build_profile(timing=samples(1.5, 1.6))
    job = build_job_from_profile(record)
    draws = draw_jobs(record, job, 20)
    assert draws == draw_jobs(record, job, 20)
    assert {draw.backward_s for draw in draws} == {0.5, 0.75, 1.0}
    unstable = build_profile()  # a median of draws would be less uncertain than single repetitions
    assert {draw.backward_s for draw in draw_jobs(unstable, job, 20)} == {0.5, 1.0}
    for draw in draws:
        assert draw.ready_s[0] / draw.backward_s == pytest.approx(job.ready_s[0] / job.backward_s)


WIDTH, LAYERS, VOCABULARY, CONTEXT = 1280, 36, 50257, 1024
BLOCK = 12 * WIDTH**2 + 13 * WIDTH
MS = 1e-3
# A published all-reduce of 8 GPUs on two hosts: flat up to a megabyte, then about 14 GB/s.
CURVE = MeasuredCurve(
    (4, 2**20, 26 * 10**6, 105 * 10**6, 838 * 10**6, 6700 * 10**6), (3e-3, 3e-3, 6.5e-3, 15e-3, 65e-3, 0.45)
)


def size(layer: str, num_params: int) -> LayerSizeRecord:
    return LayerSizeRecord(layer=layer, num_params=num_params, source="imported")


def time(layer: str, seconds: float) -> LayerTimeRecord:
    return LayerTimeRecord(layer=layer, timing=Summary(median_s=seconds), source="imported")


def gpt2_large(layers=LAYERS):
    """GPT-2 large as published tables list it: the tied embedding twice, and no times for the embeddings."""
    sizes = [size("Token embedding", VOCABULARY * WIDTH), size("Position embedding", CONTEXT * WIDTH)]
    sizes += [size(f"Block {number}", BLOCK) for number in range(layers)]
    sizes += [size("LayerNorm final", 2 * WIDTH), size("LM head", VOCABULARY * WIDTH)]
    times = [time("forward", 0.397), time("backward", 1.7e-6), time("step", 0.077), time("ln_f grad", 0.1 * MS)]
    times += [time("lm_head grad", 57 * MS), *(time(f"block_{number} grad", 21.45 * MS) for number in range(layers))]
    return build_job_from_tables(sizes, times)


def test_the_published_model_has_its_parameters_once():
    job = gpt2_large()
    assert job.num_bytes == 4 * 774_030_080
    assert len(job.gradients) == 36 * 10 + 3
    assert job.backward_s == pytest.approx(57.1 * MS + 36 * 21.45 * MS)
    assert (job.before_s, job.after_s) == (0.397, 0.077)
    assert any("one tied tensor" in note for note in job.notes)
    assert any("no times for Token embedding, Position embedding" in note for note in job.notes)


def test_the_tied_gradient_is_ready_last_and_the_others_in_the_order_of_backward():
    job = gpt2_large()
    assert job.gradients[-1].name == "Token embedding" and job.ready_s[-1] == job.backward_s
    assert list(job.ready_s) == sorted(job.ready_s)
    assert job.gradients[0].name == "LayerNorm final" and job.ready_s[0] == pytest.approx(57.1 * MS)
    assert job.gradients[1].name == "Block 35.mlp.c_proj.weight"


def find_point(curve, cap_bytes):
    return next((point for point in curve.points if cap_bytes <= point.high_bytes), curve.points[-1])


def test_the_curve_has_each_partition_once_and_a_floor_that_no_bucket_size_removes():
    job = gpt2_large()
    costs = MachineCosts(curve=CURVE)
    curve = estimate_caps(job, costs)
    assert [point.low_bytes for point in curve.points[1:]] == [point.high_bytes + 1 for point in curve.points[:-1]]
    mib = 2**20
    # All caps from 8 to 25 MiB give the same partition: every block weight closes a bucket, two of them together
    # with earlier gradients.
    assert find_point(curve, 8 * mib) is find_point(curve, 25 * mib) and len(find_point(curve, 8 * mib).cuts) == 109
    assert len(find_point(curve, 2**40).cuts) == 1
    # The message of the tied embedding takes this long, and cannot start before backward ends.
    floor_s = CURVE.estimate_s(4 * VOCABULARY * WIDTH)
    assert all(point.exposed_s >= floor_s - 1e-9 for point in curve.points)
    assert curve.best.exposed_s < 1.2 * floor_s
    low, high = curve.plateau
    assert low <= 25 * mib <= high
    # All sizes within the ranges are within 1 %, no other size is, and the answer is the widest range.
    fast = [point for point in curve.points if point.backward_s <= 1.01 * curve.best.backward_s]
    covered = [p for p in curve.points if any(a <= p.low_bytes and p.high_bytes <= b for a, b in curve.plateaus)]
    assert covered == fast and len(curve.plateaus) > 1
    assert (
        curve.points[0].backward_s > 1.5 * curve.best.backward_s and curve.points[-1].backward_s > curve.best.backward_s
    )


def test_the_widest_range_is_chosen():
    # (low, high, backward) of those within 1 % of the best.
    steps = [(100, 150, 1.0), (151, 200, 2.0), (201, 600, 1.005), (601, 700, 2.0), (701, 800, 1.0)]
    job, costs = make_job([100, 700], [0.5, 1.0], 1.0), MachineCosts(curve=CURVE)
    points = (CapPoint(a, b, (1, 2), s, job, costs) for a, b, s in steps)
    curve = CapCurve(tuple(points))
    assert curve.plateaus == [(100, 150), (201, 600), (701, 800)]
    assert curve.plateau == (201, 600) and curve.chosen is curve.points[2]
    narrow = CapCurve(curve.points[:2])
    assert narrow.plateau == (100, 150) and narrow.chosen is curve.points[0]


def test_a_larger_latency_needs_larger_buckets():
    job = gpt2_large(6)
    costs = MachineCosts(curve=CURVE)
    changes = estimate_sensitivity(job, costs, CURVE)
    by_name = {(change.what, change.factor): change for change in changes}
    assert by_name["alpha", 10.0].plateau[0] > by_name["alpha", 0.1].plateau[0]
    assert by_name["beta", 0.1].best.backward_s > by_name["beta", 10.0].best.backward_s
    assert by_name["B", 10.0].best.backward_s > by_name["B", 0.1].best.backward_s


def test_layers_of_any_model_are_gradients_as_they_are():
    job = build_job_from_tables([size("a", 10), size("b", 20)], [time("a grad", 1.0), time("b grad", 2.0)])
    assert [(g.name, g.num_bytes) for g in job.gradients] == [("b", 80), ("a", 40)]
    assert job.ready_s == (2.0, 3.0)


def test_the_rest_of_backward_and_layers_without_parameters_take_their_time():
    sizes, times = [size("a", 10), size("b", 20)], [time("a grad", 1.0), time("b grad", 2.0)]
    job = build_job_from_tables(sizes, [*times, time("relu grad", 0.5), time("backward", 2.5)])
    assert job.backward_s == pytest.approx(6.0) and job.ready_s == pytest.approx((4.0, 6.0))
    assert any("3000 of 6000 ms of backward; the rest is distributed in proportion" in note for note in job.notes)
    assert "no size for relu: assumed to have no parameters" in job.notes


def test_exported_tables_give_the_backward_of_their_profile():
    profile = build_profile()
    job = build_job_from_tables(profile.layer_sizes, profile.layer_times)
    # the backward of the profiled steps, without the profiler's overhead
    assert job.backward_s == pytest.approx(1.0 / 1.5, rel=0.01)
    assert job.num_bytes == build_job_from_profile(profile).num_bytes


def test_times_without_a_size_and_tables_without_layers_are_refused():
    with pytest.raises(RecordError, match=r"sizes.* c"):
        build_job_from_tables([size("a", 1)], [time("c grad", 1.0)])
    with pytest.raises(RecordError, match="empty"):
        build_job_from_tables([], [])
    with pytest.raises(RecordError, match="`NAME grad`"):
        build_job_from_tables([size("a", 1)], [time("forward", 1.0), time("backward", 1.0)])
