"""Tables of layers become a backward pass: tied tensors once and last, missing times said, blocks taken apart."""

from __future__ import annotations

import pytest

from paceline.errors import RecordError
from paceline.predict.caps import estimate_caps, estimate_sensitivity
from paceline.predict.curves import MeasuredCurve
from paceline.predict.layerwise import build_layerwise_model
from paceline.predict.simulate import MachineCosts
from paceline.records import LayerSizeRecord, LayerTimeRecord, Summary

WIDTH, LAYERS, VOCABULARY, CONTEXT = 1280, 36, 50257, 1024
BLOCK = 12 * WIDTH**2 + 13 * WIDTH
MS = 1e-3
# An all-reduce of 8 GPUs on two hosts, as a published table has it: flat up to a megabyte, then 14 GB/s or so.
CURVE = MeasuredCurve(
    (4, 2**20, 26 * 10**6, 105 * 10**6, 838 * 10**6, 6700 * 10**6), (3e-3, 3e-3, 6.5e-3, 15e-3, 65e-3, 0.45)
)


def size(layer: str, num_params: int) -> LayerSizeRecord:
    return LayerSizeRecord(layer=layer, num_params=num_params, source="imported")


def time(layer: str, seconds: float) -> LayerTimeRecord:
    return LayerTimeRecord(layer=layer, timing=Summary(median_s=seconds), source="imported")


def gpt2_large():
    """GPT-2 large as the assignment's tables list it: the tied embedding twice, and no times for the embeddings."""
    sizes = [size("Token embedding", VOCABULARY * WIDTH), size("Position embedding", CONTEXT * WIDTH)]
    sizes += [size(f"Block {number}", BLOCK) for number in range(LAYERS)]
    sizes += [size("LayerNorm final", 2 * WIDTH), size("LM head", VOCABULARY * WIDTH)]
    times = [time("forward", 0.397), time("backward", 1.7e-6), time("step", 0.077), time("ln_f grad", 0.1 * MS)]
    times += [time("lm_head grad", 57 * MS), *(time(f"block_{number} grad", 21.45 * MS) for number in range(LAYERS))]
    return build_layerwise_model(sizes, times)


def test_the_published_model_has_its_parameters_once():
    model = gpt2_large()
    assert model.num_bytes == 4 * 774_030_080
    assert len(model.gradients) == 36 * 10 + 3
    assert model.backward.total_s == pytest.approx(57.1 * MS + 36 * 21.45 * MS)
    assert (model.backward.before_s, model.backward.after_s) == (0.397, 0.077)
    assert any("one tied tensor" in note for note in model.notes)
    assert any("no times for Token embedding, Position embedding" in note for note in model.notes)


def test_the_tied_gradient_is_ready_last_and_the_others_in_the_order_of_backward():
    model = gpt2_large()
    assert model.gradients[-1].name == "Token embedding" and model.ready_s[-1] == model.backward.total_s
    assert list(model.ready_s) == sorted(model.ready_s)
    assert model.gradients[0].name == "LayerNorm final" and model.ready_s[0] == pytest.approx(57.1 * MS)
    assert model.gradients[1].name == "Block 35.mlp.c_proj.weight"


def test_the_curve_has_each_partition_once_and_a_floor_that_no_bucket_size_removes():
    model = gpt2_large()
    costs = MachineCosts(curve=CURVE)
    curve = estimate_caps(model.sizes, model.ready_s, model.backward, costs)
    assert [point.low_bytes for point in curve.points[1:]] == [point.high_bytes + 1 for point in curve.points[:-1]]
    mib = 2**20
    # One partition from 8 to 25 MiB: every weight of a block closes a bucket, two of them with what came before.
    assert curve.at(8 * mib) is curve.at(25 * mib) and curve.at(8 * mib).num_buckets == 109
    assert curve.at(2**40).num_buckets == 1
    # The tied embedding alone takes this long, and cannot start before the end of backward.
    floor_s = CURVE.estimate_s(4 * VOCABULARY * WIDTH)
    assert all(point.exposed_s >= floor_s - 1e-9 for point in curve.points)
    assert curve.best.exposed_s < 1.2 * floor_s
    low, high = curve.plateau
    assert low <= 25 * mib <= high
    assert (
        curve.points[0].backward_s > 1.5 * curve.best.backward_s and curve.points[-1].backward_s > curve.best.backward_s
    )


def test_a_larger_latency_asks_for_larger_buckets():
    model = gpt2_large()
    costs = MachineCosts(curve=CURVE)
    changes = estimate_sensitivity(model.sizes, model.ready_s, model.backward, costs, CURVE)
    by_name = {(change.what, change.factor): change.curve for change in changes}
    assert by_name["alpha", 10.0].plateau[0] > by_name["alpha", 0.1].plateau[0]
    assert by_name["beta", 0.1].best.backward_s > by_name["beta", 10.0].best.backward_s
    assert by_name["B", 10.0].best.backward_s > by_name["B", 0.1].best.backward_s


def test_layers_of_any_model_are_gradients_as_they_are():
    model = build_layerwise_model([size("a", 10), size("b", 20)], [time("a grad", 1.0), time("b grad", 2.0)])
    assert [(g.name, g.num_bytes) for g in model.gradients] == [("b", 80), ("a", 40)]
    assert model.ready_s == (2.0, 3.0)


def test_times_without_a_size_and_tables_without_layers_are_refused():
    with pytest.raises(RecordError, match="no size: c"):
        build_layerwise_model([size("a", 1)], [time("c grad", 1.0)])
    with pytest.raises(RecordError, match="empty"):
        build_layerwise_model([], [])
