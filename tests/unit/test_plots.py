"""Figures of records: real files, identical for equal records, with the source in the legend."""

import itertools
from pathlib import Path

import pytest

from paceline.records import Summary
from paceline.report import plots, sweeps
from paceline.report.plots import render_png, render_svg
from tests.unit.made_runs import list_texts


@pytest.fixture
def curve(build_collective, build_samples):
    def curve(**changes):
        samples = build_samples(1e-3, 1.1e-3, 1.2e-3, ranks=changes.get("world_size", 2))
        return [build_collective(num_bytes=n, **{"timing": samples, **changes}) for n in (2**20, 2**10, 2**15)]

    return curve


@pytest.fixture
def imported(curve):
    return curve(timing=Summary(mean_s=2e-3), source="imported", note="somebody")


def test_a_png_is_a_png(curve):
    assert render_png(sweeps.plot_time(curve(), "box")).startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("plot", [sweeps.plot_time, sweeps.plot_bandwidth])
def test_an_svg_names_machine_series_and_source(curve, imported, plot):
    svg = render_svg(plot([*curve(), *curve(world_size=4), *imported], "some box, 8 cores")).decode()
    assert svg.startswith("<?xml")
    for text in (
        "all_reduce: ", "some box, 8 cores", "gloo, 2 ranks (measured)", "gloo, 4 ranks (measured)",
        "gloo, 2 ranks (imported, mean: somebody)", ">1 KiB<", ">32 KiB<", ">1 MiB<",
    ):  # fmt: skip
        assert text in svg


def test_equal_records_give_equal_files(curve, imported):
    first, second = (render_svg(sweeps.plot_time([*curve(), *imported], "box")) for _ in range(2))
    assert first == second
    assert first != render_svg(sweeps.plot_time([*curve(), *imported], "another box"))


def _lines(figure):
    (axes,) = figure.axes
    return {line.get_label(): line for line in axes.get_lines()}


def test_time_is_drawn_in_ms_in_order_of_size_with_a_band_where_there_are_samples(curve, imported):
    figure = sweeps.plot_time([*curve(), *imported], "box")
    lines = _lines(figure)
    measured, published = lines["gloo, 2 ranks (measured)"], lines["gloo, 2 ranks (imported, mean: somebody)"]
    assert list(measured.get_xdata()) == [2**10, 2**15, 2**20]
    assert list(measured.get_ydata()) == pytest.approx([1.1] * 3)
    assert (measured.get_linestyle(), published.get_linestyle()) == ("-", "--")
    assert len(figure.axes[0].collections) == 1


def test_bandwidth_is_busbw_in_gb_per_s(curve):
    figure = sweeps.plot_bandwidth(curve(world_size=4), "box")
    (line,) = _lines(figure).values()
    assert list(line.get_ydata()) == pytest.approx([1.5 * n / 1.1e-3 / 1e9 for n in (2**10, 2**15, 2**20)])
    assert figure.axes[0].get_ylabel() == "busbw (GB/s)"


def test_one_rank_has_algbw_instead_of_a_bus(curve):
    figure = sweeps.plot_bandwidth(curve(world_size=1), "box")
    (label, line), *_ = _lines(figure).items()
    assert label == "gloo, 1 rank (measured)"
    assert list(line.get_ydata()) == pytest.approx([n / 1.1e-3 / 1e9 for n in (2**10, 2**15, 2**20)])
    texts = list_texts(figure)
    assert "algbw (GB/s)" in texts and not any("busbw" in text for text in texts)


def test_one_size_alone_can_be_drawn(curve):
    for plot in (sweeps.plot_time, sweeps.plot_bandwidth):
        plot(curve()[:1], "box").draw_without_rendering()


def test_backends_and_devices_are_told_apart(curve):
    records = [*curve(), *curve(device="cuda"), *curve(backend="nccl", device="cuda")]
    lines = _lines(sweeps.plot_time(records, "box"))
    assert set(lines) == {
        "gloo cpu, 2 ranks (measured)",
        "gloo cuda, 2 ranks (measured)",
        "nccl, 2 ranks (measured)",
    }
    assert len({line.get_color() for line in lines.values()}) == 3


def test_many_sizes_do_not_print_over_each_other(build_collective):
    axes = sweeps.plot_time([build_collective(num_bytes=2**k) for k in range(2, 30)], "box").axes[0]
    assert 5 <= len(axes.get_xticks()) <= 15


def test_chunks_are_drawn_against_elements(build_chunks, build_samples):
    records = [
        build_chunks(total_bytes=2**20, chunk_bytes=n, timing=build_samples(t))
        for n, t in ((2**20, 1e-3), (2**12, 4e-3))
    ]
    figure = sweeps.plot_chunks(records, "box")
    (label, line), *_ = _lines(figure).items()
    assert label == "gloo, 2 ranks (measured)"
    assert list(line.get_xdata()) == [2**10, 2**18]
    assert list(line.get_ydata()) == pytest.approx([4.0, 1.0])
    assert "1 MiB all-reduced in chunks" in list_texts(figure)


def test_memories_are_told_apart_and_the_bound_is_a_line_of_its_own(curve, build_pass, build_samples):
    records = [*curve(), *curve(backend="paceline"), *curve(backend="paceline", memory="shared")]
    bounds = [build_pass(num_bytes=n, time_s=t) for n, t in ((2**20, 3e-4), (2**10, 1e-6))]
    figure = sweeps.plot_time(records, "box", bounds)
    lines = _lines(figure)
    assert list(lines) == [
        "gloo, 2 ranks (measured)", "paceline, ordinary memory, 2 ranks (measured)",
        "paceline, shared memory, 2 ranks (measured)", "memory bound, 2 ranks (measured)",
    ]  # fmt: skip
    assert len({line.get_color() for line in lines.values()}) == 4
    bound = lines["memory bound, 2 ranks (measured)"]
    assert (list(bound.get_xdata()), list(bound.get_ydata())) == ([2**10, 2**20], pytest.approx([1e-3, 0.3]))
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert not any("memory bound" in text for text in list_texts(sweeps.plot_bandwidth(records, "box")))


def test_a_backend_in_ordinary_memory_alone_does_not_say_so(curve):
    assert set(_lines(sweeps.plot_time(curve(backend="paceline"), "box"))) == {"paceline, 2 ranks (measured)"}


@pytest.mark.parametrize(("least_s", "labels"), [(1e-6, {"0.001", "0.01", "1"}), (0.3e-3, {"0.5", "1"})])
def test_times_are_written_out_at_the_axis(build_collective, build_samples, least_s, labels):
    times = {2**10: least_s, 2**20: 1.1e-3}
    records = [build_collective(num_bytes=n, timing=build_samples(*(t,) * 5)) for n, t in times.items()]
    figure = sweeps.plot_time(records, "box")
    figure.draw_without_rendering()
    assert labels <= list_texts(figure)


@pytest.mark.parametrize("count", [1, 4, 5, 12])
def test_no_legend_covers_the_data(curve, count):
    records = [record for n in range(2, count + 2) for record in curve(world_size=n)]
    figure = sweeps.plot_time(records, "box")
    figure.draw_without_rendering()  # computes the layout
    (axes,), (legend,) = figure.axes, figure.legends
    assert not axes.get_legend() and len(legend.get_texts()) == count
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1


LONG = "a-model-of-a-user-whose-name-is-longer-than-any-line " * 2 + "folder/of/models/" + "very_long_name_" * 9
WIDE = "gpt2-large on 1gbe, 64 ranks, emulated, wrapper paceline, backend gloo, " * 3


@pytest.mark.parametrize(("text", "count"), [(LONG, 1), (WIDE, 4), ("W" * 200, 2)])
def test_no_text_is_cut_and_no_legend_covers_the_data_however_long_the_names_are(text, count):
    figure, panels = plots.build_panels([text] * count, text, text)
    for axes in panels:
        plots.draw_line(axes, 0, [(1, 1, None, None), (2, 2, None, None)], f"{text} (measured)")
    plots.place_legend(figure, *panels)
    figure.set_dpi(150)  # at the saved resolution: letters are whole pixels wide
    figure.draw_without_rendering()  # computes the layout
    texts = (figure._suptitle, figure._supxlabel, *(axes._left_title for axes in panels))
    for extent in (text.get_window_extent() for text in texts):
        assert figure.bbox.x0 <= extent.x0 and extent.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= extent.y0 and extent.y1 <= figure.bbox.y1
    assert "".join(figure._suptitle.get_text().split()) == "".join(text.split())
    (legend,) = figure.legends
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    for axes in panels:
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    for left, right in itertools.pairwise(panels[:3]):  # panels in one row
        assert left._left_title.get_window_extent().x1 <= right._left_title.get_window_extent().x0


def test_every_picture_is_made_where_its_texts_are_fitted():
    source = Path(plots.__file__).parents[1]
    for words in ("Figure(", ".suptitle(", ".legend("):
        assert [path.name for path in source.rglob("*.py") if words in path.read_text()] == ["plots.py"]
