"""What follows from a layer profile, what it refuses, and how it is shown."""

from dataclasses import replace

import pytest

from paceline.errors import RecordError
from paceline.records import BlockTimes, LayerProfileRecord, ParameterTimes, Samples
from paceline.records.kinds import record_from_json, record_to_json
from paceline.report.layer_plots import plot_ready
from paceline.report.layer_tables import (
    block_lines,
    block_row,
    block_table,
    describe_profile,
    parameter_lines,
    parameter_row,
    parameter_table,
)
from paceline.report.plots import render_png
from paceline.report.tables import render_markdown


def samples(*times_s):
    return Samples(seconds=tuple((time_s,) for time_s in times_s))


def build(**changes):
    """Two repetitions: a head whose gradient is ready early, a tied embedding that is ready last, one without any."""
    fields = {
        "model": "toy", "device": "cpu", "dtype": "float32", "batch_size": 2,
        "parameters": (
            ParameterTimes("head.bias", 8, 2, "float32", "head", (0.1, 0.3)),
            ParameterTimes("scale", 4, 1, "float32", "", (0.2, 0.4)),
            ParameterTimes("embed.weight", 40, 10, "float32", "embed", (0.9, 0.9), ("head.weight",)),
            ParameterTimes("spare", 16, 4, "float32", "embed", (None, None)),
        ),
        "blocks": (BlockTimes("embed", (0.1, 0.1), (0.5, 0.7)), BlockTimes("head", (0.2, 0.2), (0.2, 0.1))),
        "timing": samples(1.0, 2.0), "forward": samples(0.3, 0.3), "backward": samples(0.5, 1.0),
        "optimizer": samples(0.1, 0.3), "profiled_step": samples(1.1, 2.6), "profiled_forward": samples(0.5, 0.5),
        "profiled_backward": samples(1.0, 1.0),
    }  # fmt: skip
    return LayerProfileRecord(**{**fields, **changes})


def test_the_timeline_adds_up_bytes_in_ready_order():
    record = build()
    assert record.timeline == ((pytest.approx(0.2), 8), (pytest.approx(0.3), 12), (0.9, 52))
    assert record.num_bytes == 68
    assert [p.name for p in record.unused] == ["spare"]
    assert record.ready_of("embed") == 0.9
    assert record.ready_of("outside") == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("ready_s", "is_stable"), [((0.2, 0.4), True), ((0.3, 0.2), False), ((0.3, None), False), ((0.1, 0.3), True)]
)
def test_an_order_is_stable_if_every_repetition_has_it(ready_s, is_stable):
    record = build()
    moved = replace(record.parameters[1], ready_s=ready_s)
    assert build(parameters=(record.parameters[0], moved, *record.parameters[2:])).is_order_stable == is_stable


def test_what_is_in_no_block_is_the_rest():
    outside = build().outside
    assert outside.forward_s == pytest.approx((0.2, 0.2))
    assert outside.backward_s == pytest.approx((0.3, 0.2))


def test_the_cost_of_profiling_is_told_with_its_spread():
    record = build()
    cost = record.step_cost
    assert (cost.value, cost.p10, cost.p90) == (pytest.approx(1.2), pytest.approx(1.12), pytest.approx(1.28))
    assert cost.is_clear
    assert record.backward_cost.value == pytest.approx(1.5)
    assert not build(profiled_step=samples(0.9, 2.2)).step_cost.is_clear


def test_sizes_and_times_for_the_files_of_others():
    record = build()
    assert [(r.layer, r.num_params) for r in record.layer_sizes] == [("embed", 14), ("head", 2), ("outside", 1)]
    times = {r.layer: r.timing.reduced_s for r in record.layer_times}
    assert list(times) == ["backward", "embed grad", "head grad", "forward", "step"]
    assert times["embed grad"] == (0.5, 0.7)
    assert times["backward"] == pytest.approx((0.3, 0.2))
    assert times["step"] == (0.1, 0.3)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parameters": ()}, "toy with 0 trained parameters"),
        ({"batch_size": 0}, "0 samples"),
        ({"blocks": (BlockTimes("a", (0.1,) * 2, (0.1,) * 2),) * 2}, "the blocks a, a need names of their own"),
        ({"blocks": (BlockTimes("outside", (0.1,) * 2, (0.1,) * 2),)}, "not 'outside'"),
        ({"blocks": ()}, "head.bias is in the block 'head', which is not there"),
        ({"optimizer": samples(0.1)}, "optimizer has other repetitions"),
        ({"forward": Samples(seconds=((0.1, 0.1),) * 2)}, "several ranks"),
        ({"profiled_backward": samples(1.0, 0.85)}, "embed.weight is at 0.9 s, after the end at 0.85 s"),
        ({"profiled_forward": samples(0.5, 0.2)}, "sum of all blocks' forward"),
        ({"parameters": build().parameters[::-1]}, "not in the order in which they become ready"),
        ({"parameters": (ParameterTimes("a", 4, 1, "float32", "", (0.1,)),)}, "a has 1 repetitions, and the step 2"),
    ],
)
def test_an_impossible_profile_is_refused(changes, reason):
    with pytest.raises(RecordError, match=reason):
        build(**changes)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("blocks", 3, "blocks is a list of JSON objects, not 3"),
        ("blocks", [["a"]], "blocks is a list of JSON objects"),
        ("blocks", [{"name": "a"}], "forward_s"),
        ("parameters", [{"name": "a", "colour": "red"}], "ParameterTimes has no field colour"),
        ("parameters", [{**record_to_json(build())["parameters"][0], "num_bytes": "8"}], "must be int"),
        ("parameters", [{**record_to_json(build())["parameters"][0], "ready_s": ["soon", 1]}], "the time 'soon'"),
        ("parameters", [{**record_to_json(build())["parameters"][0], "ready_s": [-1.0, 1]}], "the time -1.0"),
        ("parameters", [{**record_to_json(build())["parameters"][0], "ready_s": 1.0}], "ParameterTimes"),
    ],
)
def test_a_broken_profile_is_refused(field, value, reason):
    with pytest.raises(RecordError, match=reason):
        record_from_json({**record_to_json(build()), field: value})


def test_derived_numbers_are_not_stored():
    document = record_to_json(build())
    assert document["parameters"][2]["ready_s"] == (0.9, 0.9)
    assert not {"timeline", "num_bytes", "step_cost", "outside", "index", "parts"} & set(document)


def test_the_tables_show_blocks_and_parameters_in_their_orders():
    record = build()
    blocks = render_markdown(block_table, block_lines(record)).splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in blocks[2:]] == ["embed", "head", "outside"]
    assert "| 60.0% |" in blocks[2]
    parameters = render_markdown(parameter_table, parameter_lines(record))
    assert "| 2 | embed.weight = head.weight | embed | float32 | 40 B | 900.0 | 52 B |" in parameters
    assert "| 3 | spare | embed | float32 | 16 B | never | 52 B |" in parameters
    assert "| 1 | scale | outside |" in parameters
    rows = [block_row(line) for line in block_lines(record)]
    assert sum(row["num_bytes"] for row in rows) == record.num_bytes
    assert sum(row["backward_s"] for row in rows) == pytest.approx(1.0)
    assert parameter_row(parameter_lines(record)[3])["ready_s"] is None


def test_the_words_say_what_it_costs_and_what_is_odd():
    text = "\n".join(describe_profile(build(note="2 parameters are not trained")))
    assert "profiling costs +20.0% (p10 +12.0%, p90 +28.0%) of a step" in text
    assert "same order in every step" in text
    assert "embed.weight = head.weight" in text
    assert "without a gradient: spare" in text
    assert "2 parameters are not trained" in text
    assert "within the noise" in "\n".join(describe_profile(build(profiled_step=samples(0.9, 2.2))))


def test_the_plot_rises_to_the_bytes_that_become_ready():
    figure = plot_ready(build(), "box")
    (axes,) = figure.axes
    line, end, marks = axes.get_lines()
    assert list(line.get_xdata()) == pytest.approx([0, 200, 300, 900, 1000])
    assert line.get_ydata()[-1] * 2**20 == pytest.approx(52)
    assert list(end.get_xdata()) == pytest.approx([1000, 1000])
    assert list(marks.get_xdata()) == pytest.approx([200, 900])
    assert "ready (measured, median)" in [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"head", "embed"} <= {text.get_text() for text in axes.texts}
    assert render_png(figure).startswith(b"\x89PNG")


def test_labels_that_would_print_over_each_other_are_joined():
    names = ("a", "b", "c", "d")
    parameters = tuple(ParameterTimes(n, 4, 1, "float32", n, (0.5 + i / 1000,) * 2) for i, n in enumerate(names[:3]))
    parameters = (ParameterTimes("d", 400, 100, "float32", "d", (0.1,) * 2), *parameters)
    figure = plot_ready(
        build(parameters=parameters, blocks=tuple(BlockTimes(n, (0.0,) * 2, (0.0,) * 2) for n in names)), ""
    )
    assert [text.get_text() for text in figure.axes[0].texts[1:]] == ["d", "c +2"]


def test_a_profile_without_blocks_can_be_drawn():
    parameters = (ParameterTimes("a", 4, 1, "float32", "", (0.1, 0.1)),)
    assert render_png(plot_ready(build(parameters=parameters, blocks=()), ""))
