"""Numbers derived from a layer profile, and the profiles that are refused."""

from dataclasses import replace

import pytest

from paceline.errors import RecordError
from paceline.records import BlockTimes, LayerProfileRecord, ParameterTimes, Samples
from paceline.records.kinds import record_from_json, record_to_json


def build_times(*times_s):
    return Samples(seconds=tuple((time_s,) for time_s in times_s))


def build_profile(**changes):
    """Two repetitions: a head whose gradient is ready early, a tied embedding that is ready last, and a block without
    gradients."""
    fields = {
        "model": "toy", "device": "cpu", "dtype": "float32", "batch_size": 2,
        "parameters": (
            ParameterTimes("head.bias", 8, 2, "float32", "head", (0.1, 0.3)),
            ParameterTimes("scale", 4, 1, "float32", "", (0.2, 0.4)),
            ParameterTimes("embed.weight", 40, 10, "float32", "embed", (0.9, 0.9), ("head.weight",)),
            ParameterTimes("spare", 16, 4, "float32", "embed", (None, None)),
        ),
        "blocks": (BlockTimes("embed", (0.1, 0.1), (0.5, 0.7)), BlockTimes("head", (0.2, 0.2), (0.2, 0.1))),
        "timing": build_times(1.0, 2.0), "forward": build_times(0.3, 0.3), "backward": build_times(0.5, 1.0),
        "optimizer": build_times(0.1, 0.3), "profiled_step": build_times(1.1, 2.6),
        "profiled_forward": build_times(0.5, 0.5), "profiled_backward": build_times(1.0, 1.0),
    }  # fmt: skip
    return LayerProfileRecord(**{**fields, **changes})


def test_bytes_and_ready_times_of_blocks_follow_from_their_parameters():
    record = build_profile()
    assert record.num_bytes == 68
    assert [p.name for p in record.unused] == ["spare"]
    assert record.ready_of("embed") == 0.9
    assert record.ready_of("outside") == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("ready_s", "is_stable"), [((0.2, 0.4), True), ((0.3, 0.2), False), ((0.3, None), False), ((0.1, 0.3), True)]
)
def test_an_order_is_stable_if_every_repetition_has_it(ready_s, is_stable):
    record = build_profile()
    moved = replace(record.parameters[1], ready_s=ready_s)
    assert build_profile(parameters=(record.parameters[0], moved, *record.parameters[2:])).is_order_stable == is_stable


def test_time_outside_blocks_is_the_rest():
    outside = build_profile().outside
    assert outside.forward_s == pytest.approx((0.2, 0.2))
    assert outside.backward_s == pytest.approx((0.3, 0.2))


def test_the_cost_of_profiling_is_reported_with_its_noise():
    record = build_profile()
    cost = record.step_cost
    assert (cost.value, cost.noise, cost.is_clear) == (pytest.approx(1.2), pytest.approx(0.1), True)
    assert record.backward_cost.value == pytest.approx(1.5)
    assert not build_profile(profiled_step=build_times(0.9, 2.2)).step_cost.is_clear


def test_sizes_and_times_for_the_files_of_others():
    record = build_profile()
    assert [(r.layer, r.num_params) for r in record.layer_sizes] == [("embed", 14), ("head", 2), ("outside", 1)]
    times = {r.layer: r.timing.reduced_s for r in record.layer_times}
    assert list(times) == ["backward", "embed grad", "head grad", "forward", "step"]
    assert times["embed grad"] == pytest.approx((0.5 / 1.5, 0.7 / 1.5))  # the profiler's overhead is subtracted
    assert times["backward"] == pytest.approx((0.3 / 1.5, 0.2 / 1.5))
    assert times["step"] == (0.1, 0.3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parameters": ()}, "toy: no trained parameters"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"blocks": (BlockTimes("a", (0.1,) * 2, (0.1,) * 2),) * 2}, "a, a"),
        ({"blocks": (BlockTimes("outside", (0.1,) * 2, (0.1,) * 2),)}, "outside"),
        ({"blocks": ()}, "in the block 'head'"),
        ({"profiled_backward": build_times(1.0, 0.85)}, "embed.weight takes 0.9 s of a phase of 0.85 s"),
        ({"profiled_forward": build_times(0.5, 0.2)}, "sum of all blocks' forward"),
        ({"optimizer": build_times(0.1)}, "optimizer differs from the steps in repetitions"),
        ({"forward": Samples(seconds=((0.1, 0.1),) * 2)}, "forward differs .* ranks"),
        ({"blocks": (BlockTimes("a", (0.1,), (0.1, 0.1)),)}, "a block differs from the steps in repetitions"),
        (
            {"parameters": (ParameterTimes("a", 4, 1, "float32", "", (0.1,)),)},
            "a differs from the steps in repetitions",
        ),
        ({"parameters": build_profile().parameters[::-1]}, "ready order"),
    ],
)
def test_an_impossible_profile_is_refused(changes, reason):
    with pytest.raises(RecordError, match=reason):
        build_profile(**changes)


FIRST = record_to_json(build_profile())["parameters"][0]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("blocks", 3, "blocks .* not int"),
        ("blocks", [["a"]], "blocks .* not"),
        ("blocks", [{"name": "a"}], "forward_s"),
        ("parameters", [{"name": "a", "colour": "red"}], "ParameterTimes has no field colour"),
        ("parameters", [{**FIRST, "num_bytes": "8"}], "must be int"),
        (
            "parameters",
            [{**FIRST, "ready_s": ["soon", 1]}],
            "parameters.ready_s.*'soon'",
        ),
        ("parameters", [{**FIRST, "ready_s": [-1.0, 1]}], "head.bias: ready_s is -1.0"),
        ("parameters", [{**FIRST, "ready_s": 1.0}], "ready_s must be a list"),
    ],
)
def test_a_broken_profile_is_refused(field, value, reason):
    with pytest.raises(RecordError, match=reason):
        record_from_json({**record_to_json(build_profile()), field: value})


def test_derived_numbers_are_not_stored():
    document = record_to_json(build_profile())
    assert document["parameters"][2]["ready_s"] == (0.9, 0.9)
    assert not {"num_bytes", "step_cost", "outside", "index", "parts"} & set(document)
