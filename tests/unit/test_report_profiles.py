"""Tables, rows, sentences and pictures of profiles: phases of a step, and layers."""

import pytest

from paceline.records import BlockTimes, ParameterTimes
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
from paceline.report.phase_tables import describe_phases, phase_row, phase_table
from paceline.report.plots import render_png
from paceline.report.tables import render_markdown

from .test_records_layers import build_profile, build_times


def test_the_row_and_the_table_say_the_same(build_phases):
    record = build_phases()
    row = phase_row(record)
    assert row["exposed_comm_s"] == pytest.approx(0.002) and row["comm_overhead"] == pytest.approx(0.2)
    assert row["backward_s"] == pytest.approx(0.004), "what is computed, not what is waited for"
    assert row["busbw_gbps"] == pytest.approx(0.8)
    assert row["profiling_cost"] == pytest.approx(0.01)
    assert (row["world_size"], row["batch_size"], row["accumulate"], row["source"]) == (2, 16, 2, "measured")
    head, _, line = render_markdown(phase_table, [record]).strip().splitlines()
    cells = dict(zip((c.strip() for c in head.split("|")), (c.strip() for c in line.split("|")), strict=True))
    assert float(cells["step (ms)"]) == pytest.approx(10) and float(cells["exposed (ms)"]) == pytest.approx(2)
    assert (cells["comm overhead"], cells["overlap"], cells["samples/s"]) == ("20.0%", "60.0%", "6,400")
    assert cells["source"] == "measured"


def test_what_is_unknown_is_an_empty_cell(build_phases):
    cells = {column.name: column.cell(build_phases(busy=None)) for column in phase_table}
    assert (cells["busy (ms)"], cells["overlap"], cells["busbw (GB/s)"]) == ("", "", "")


def test_in_words(build_phases, build_samples):
    sent, cost = describe_phases(build_phases())
    assert "2 ranks, batch 16: each rank sends" in sent and "in 3 messages per step" in sent and "20.0%" in sent
    assert "profiling costs +1.0%" in cost and "within the noise" not in cost
    (alone,) = describe_phases(build_phases(world_size=1, busy=None, marked=build_samples(*(0.01, 0.011) * 5, ranks=1)))
    assert alone.startswith("1 rank, batch 16: profiling costs") and alone.endswith("within the noise")


def test_the_tables_show_blocks_and_parameters_in_their_orders():
    record = build_profile()
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
    text = "\n".join(describe_profile(build_profile(note="2 parameters are not trained")))
    assert "profiling costs +20.0% (p10 +12.0%, p90 +28.0%) of a step" in text
    assert "same order in every step" in text
    assert "embed.weight = head.weight" in text
    assert "without a gradient: spare" in text
    assert "2 parameters are not trained" in text
    assert "within the noise" in "\n".join(describe_profile(build_profile(profiled_step=build_times(0.9, 2.2))))


def test_the_plot_rises_to_the_bytes_that_become_ready():
    figure = plot_ready(build_profile(), "box")
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
        build_profile(parameters=parameters, blocks=tuple(BlockTimes(n, (0.0,) * 2, (0.0,) * 2) for n in names)), ""
    )
    assert [text.get_text() for text in figure.axes[0].texts[1:]] == ["d", "c +2"]


def test_a_profile_without_blocks_can_be_drawn():
    parameters = (ParameterTimes("a", 4, 1, "float32", "", (0.1, 0.1)),)
    assert render_png(plot_ready(build_profile(parameters=parameters, blocks=()), ""))
