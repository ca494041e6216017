"""A profile of layers becomes a backward pass, without what profiling cost."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError, RecordError
from paceline.predict.profiled import build_backward, draw_backwards

from .test_layer_profile import build as build_profile
from .test_layer_profile import samples


def test_ready_times_lose_the_cost_of_profiling():
    model = build_backward(build_profile())  # profiled backward over plain: 2 and 1, so 1.5
    assert [gradient.name for gradient in model.gradients] == ["head.bias", "scale", "embed.weight", "spare"]
    assert model.ready_s == pytest.approx((0.2 / 1.5, 0.3 / 1.5, 0.9 / 1.5, 0.75))
    assert model.backward.total_s == 0.75
    assert model.num_bytes == 68
    assert any("1 parameters never had a gradient" in note for note in model.notes)


def test_the_step_around_is_the_plain_one():
    backward = build_backward(build_profile()).backward
    assert backward.after_s == pytest.approx(0.2)
    assert backward.before_s + backward.total_s + backward.after_s == pytest.approx(1.5)


def test_no_gradient_is_ready_after_the_end():
    model = build_backward(build_profile(backward=samples(0.5, 0.5), profiled_backward=samples(0.95, 0.95)))
    assert max(model.ready_s) == model.backward.total_s


@pytest.mark.parametrize(("gradients", "num_bytes", "dtype"), [("bf16", 34, "bfloat16"), ("fp32", 68, "float32")])
def test_gradients_can_travel_in_another_type(gradients, num_bytes, dtype):
    model = build_backward(build_profile(), gradients)
    assert model.num_bytes == num_bytes and {gradient.dtype for gradient in model.gradients} == {dtype}
    assert any("conversion" in note for note in model.notes) == (gradients == "bf16")


def test_unknown_types_and_empty_backwards_are_refused():
    with pytest.raises(ConfigError, match="'fp8': known are fp32, bf16"):
        build_backward(build_profile(), "fp8")
    with pytest.raises(RecordError, match=r"backward of 0\.0 s"):
        build_backward(build_profile(backward=samples(0.0, 0.0)))


def test_draws_vary_with_the_repetitions_and_are_the_same_every_time():
    record = build_profile()
    model = build_backward(record)
    draws = draw_backwards(record, model, 20)
    assert draws == draw_backwards(record, model, 20)
    assert {draw.total_s for draw in draws} == {0.5, 0.75, 1.0}
    for draw in draws:
        assert draw.ready_s[0] / draw.total_s == pytest.approx(model.ready_s[0] / model.backward.total_s)
