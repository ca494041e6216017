"""Figures of scaling studies: the records' numbers and a source in every legend."""

from dataclasses import replace

import numpy as np
import pytest

from paceline.records.environment import capture_environment
from paceline.records.steps import list_points
from paceline.records.store import Run
from paceline.report.plots import render_svg
from paceline.report.result import build_result
from paceline.studies import batch_sizes, rank_scaling
from paceline.studies.rank_scaling import match_predictions

from .made_scaling import (
    interval,
    make_batch,
    make_batches,
    make_predictions,
    make_rng,
    make_run,
    make_runs,
    make_scales,
    slowest,
)

SCALES = make_scales(make_rng())
POINTS = list_points(SCALES)
RUNS = make_runs(make_rng())


def draw_large(name, runs):
    environment = replace(capture_environment(), cpu="box")
    return build_result(Run("scale large-batch", {}, environment, tuple(runs))).figure(name)


def plot_predicted(mode, predicted):
    return rank_scaling.plot_ranks(mode, POINTS, "box", match_predictions(predicted, POINTS))


DRAWN = {
    "batches": lambda: batch_sizes.plot_batches(make_batches(make_rng()), "box"),
    "weak": lambda: plot_predicted("weak", make_predictions()),
    "strong": lambda: plot_predicted("strong", make_predictions(mode="strong", cell_size=256)),
    "communication": lambda: rank_scaling.plot_communication(POINTS, "box"),
    "accuracy": lambda: draw_large("accuracy", RUNS),
    "curves": lambda: draw_large("curves", [r for r in RUNS if r.global_batch_size == 1024]),
}


@pytest.fixture(scope="module")
def svgs():
    return {name: render_svg(draw()).decode() for name, draw in DRAWN.items()}


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("batches", ["samples/s (measured)", "peak memory (measured)", "knee: 512", "does not fit", ">4,096<"]),
        ("weak", ["paceline on gloo (measured)", "paceline on gloo, this host (simulated)", ">1,024<", ">ideal<",
                  "32 samples per rank", "128 samples per rank"]),
        ("strong", ["torch on gloo (measured)", "this host (simulated)", ">ideal<", "256 samples over all ranks"]),
        ("communication", ["compute (measured)", "exposed communication (measured)", "torch on gloo, weak (measured)"]),
        ("accuracy", ["no recipe (measured)", "recipe lars (measured)", ">1,024<", "the same epochs"]),
        ("curves", ["no recipe at 1,024, same epochs (measured, 3 seeds)", ">epochs<", ">updates<"]),
    ],
)  # fmt: skip
def test_a_picture_names_its_machine_its_lines_and_their_source(svgs, name, texts):
    assert [text for text in [*texts, "box"] if text not in svgs[name]] == []


def test_equal_records_give_equal_files(svgs):
    for name in ("batches", "curves"):
        assert render_svg(DRAWN[name]()).decode() == svgs[name]


def _lines(axes):
    """label -> (xs, ys) of plain lines and of lines with error bars."""
    found = {}
    for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
        line = handle if hasattr(handle, "get_xdata") else handle[0]
        if hasattr(line, "get_xdata"):
            found[label] = (list(line.get_xdata()), list(line.get_ydata()))
    return found


def test_the_sweep_is_drawn_in_samples_per_s_and_mib():
    records = make_batches(make_rng())
    left, right = batch_sizes.plot_batches(records, "box").axes
    rates = [4096 / float(np.median(slowest(r.timing))) for r in records if r.timing]
    assert _lines(left)["samples/s (measured)"][1] == pytest.approx(rates)
    assert _lines(left)["does not fit"] == ([4096], [0])
    assert _lines(right)["peak memory (measured)"][1] == pytest.approx(
        [128 + r.batch_size for r in records if r.timing]
    )


def test_uncounted_memory_is_not_drawn():
    records = [make_batch(make_rng(), size, 1.0, peak_bytes=0) for size in (32, 64)]
    assert len(batch_sizes.plot_batches(records, "box").axes) == 1


@pytest.mark.parametrize(("mode", "size", "number"), [("weak", 32, 0), ("weak", 128, 1), ("strong", 256, 0)])
def test_lines_of_ranks_start_at_one_rank_and_follow_the_seconds(mode, size, number):
    panel = rank_scaling.plot_ranks(mode, POINTS, "box").axes[number]
    records = {r.world_size: r for r in SCALES if r.cell == (mode, size) and r.variant in ("none", "torch on gloo")}
    ratios = [interval(slowest(records[1].timing) / slowest(records[n].timing))[0] for n in (2, 4)]
    assert _lines(panel)["torch on gloo (measured)"] == ([1, 2, 4], pytest.approx([1.0, *ratios]))
    assert _lines(panel)["ideal"] == ([1, 2, 4], [1, 1, 1] if mode == "weak" else [1, 2, 4])


def test_predictions_continue_the_measured_line_of_the_best_variant():
    best = make_predictions(counts=(4, 64, 1024))
    slow = [replace(p, label="torch on gloo", step_s=2 * p.step_s) for p in best]
    panel = plot_predicted("weak", [*best, *slow]).axes[0]
    handles = dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True))
    [name] = [label for label in handles if "simulated" in label and "half" not in label]
    assert name == f"paceline on gloo, {best[0].network} (simulated)"
    line = handles[name]
    assert line.get_linestyle() == "--" and list(line.get_xdata())[1:] == [64, 1024]
    assert list(line.get_ydata())[1:] == pytest.approx([p.local_s / p.step_s for p in best[1:]])
    mine = [p for p in POINTS if (p.record.variant, p.record.cell) == ("paceline on gloo", ("weak", best[0].cell_size))]
    last = max(mine, key=lambda point: point.record.world_size)
    assert (line.get_xdata()[0], line.get_ydata()[0]) == (last.record.world_size, pytest.approx(last.efficiency))
    bands = [c.get_paths()[0].vertices for c in panel.collections if "Fill" in type(c).__name__]
    (band,) = (vertices for vertices in bands if vertices[:, 0].max() == 1024)
    assert band[:, 1].min() == pytest.approx(best[-1].local_s / best[-1].high_s)
    crosses = [line for line in panel.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert sorted(float(line.get_ydata()[0]) for line in crosses) == pytest.approx(
        sorted(p.local_s / p.step_s for p in (best[0], slow[0]))
    )


def test_bars_of_a_step_are_compute_and_exposed_on_top():
    panel = rank_scaling.plot_communication(POINTS, "box").axes[0]
    compute, exposed = (list(bars) for bars in panel.containers if hasattr(bars, "patches"))
    records = [r for r in SCALES if r.variant == "torch on gloo" and r.mode == "weak"]
    assert len(compute) == len(exposed) == len(records) == 4
    for low, high, record in zip(compute, exposed, records, strict=True):
        plain, silent = slowest(record.timing), slowest(record.no_comm)
        assert low.get_height() == pytest.approx(1e3 * float(np.median(silent)))
        assert high.get_height() == pytest.approx(max(0.0, 1e3 * float(np.median(plain - silent))))
        assert high.get_y() == pytest.approx(low.get_height())


@pytest.mark.parametrize("last", [2, 4])
def test_the_predicted_curve_starts_at_the_last_ranks_that_were_not_disturbed(last):
    points = [replace(p, is_disturbed=p.record.world_size > last) for p in POINTS]
    predicted = match_predictions(make_predictions(counts=(8, 64)), points)
    lines = {line.get_label(): line for line in rank_scaling.plot_ranks("weak", points, "box", predicted).axes[0].lines}
    assert list(lines["paceline on gloo, this host (simulated)"].get_xdata()) == [last, 8, 64]


def test_a_disturbed_point_is_hollow_and_its_bar_is_hatched():
    places = [("torch on gloo", ("weak", 32), 4), ("paceline on gloo", ("weak", 32), 4)]
    points = [replace(p, is_disturbed=(p.record.variant, p.record.cell, p.record.world_size) in places) for p in POINTS]
    first, second = rank_scaling.plot_ranks("weak", points, "box").axes
    hollow = [line for line in first.lines if line.get_markerfacecolor() == "white" and len(line.get_xdata())]
    marked = [p for p in points if p.is_disturbed]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in hollow] == [(4, p.efficiency) for p in marked]
    own = {line.get_label(): line for line in first.lines}
    for line, (name, *_) in zip(hollow, places, strict=True):
        whole = own[f"{name} (measured)"]
        assert (line.get_color(), line.get_marker()) == (whole.get_color(), whole.get_marker())
    assert "disturbed" in first.get_legend_handles_labels()[1]
    assert "disturbed" not in second.get_legend_handles_labels()[1]
    figure = rank_scaling.plot_communication(points, "box")
    hatched = [[bar for bar in axes.patches if bar.get_hatch()] for axes in figure.axes]
    assert [len(bars) for bars in hatched] == [1, 1, 0, 0, 0, 0]
    record = marked[0].record
    assert hatched[0][0].get_height() == pytest.approx(1e3 * (record.compute_s + record.exposed_s))
    assert "disturbed" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_accuracy_is_in_percent_with_a_panel_for_each_budget():
    runs = [*RUNS, make_run(128, budget="updates"), make_run(512, budget="updates", accuracy=0.8)]
    first, second = draw_large("accuracy", runs).axes
    assert _lines(second)["no recipe (measured)"] == ([128, 512], pytest.approx([90.0, 80.0]))
    plain = [
        100 * np.mean([r.curve[-1].test_accuracy for r in RUNS if (r.global_batch_size, r.recipe) == (size, "none")])
        for size in (128, 512, 1024)
    ]
    assert _lines(first)["no recipe (measured)"] == ([128, 512, 1024], pytest.approx(plain))


def test_curves_are_means_over_seeds_against_epochs_and_updates():
    runs = [make_run(512, "lars", seed, accuracy) for seed, accuracy in enumerate((0.6, 0.8))]
    failed = make_run(512, "lars", 2, failure="nan", curve=())
    by_epochs, by_updates = draw_large("curves", [*runs, failed]).axes
    means = [100 * (a.test_accuracy + b.test_accuracy) / 2 for a, b in zip(*(r.curve for r in runs), strict=True)]
    label = "recipe lars at 512, same epochs (measured, 2 seeds)"
    assert _lines(by_epochs)[label] == (pytest.approx([1, 2, 3, 4]), pytest.approx(means))
    assert _lines(by_updates)[label] == (pytest.approx([2, 4, 6, 8]), pytest.approx(means))


def test_a_recipe_at_one_batch_size_has_a_bar_of_its_deviation():
    runs = [make_run(), *(make_run(512, "lars", seed, accuracy) for seed, accuracy in enumerate((0.6, 0.8)))]
    (panel,) = draw_large("accuracy", runs).axes
    bar = next(line for line in panel.lines if line.get_marker() == "_" and line.get_xdata()[0] == 512)
    assert list(bar.get_ydata()) == pytest.approx([70 - 100 * 0.02**0.5, 70 + 100 * 0.02**0.5])


@pytest.mark.parametrize(("sizes", "scale"), [((128, 256), "linear"), ((16, 256), "log")])
def test_updates_are_on_a_log_axis_only_where_they_differ_much(sizes, scale):
    _, panel = draw_large("curves", [make_run(size) for size in sizes]).axes
    assert panel.get_xscale() == scale


def test_no_marker_of_a_single_batch_size_is_cut():
    samples, memory = batch_sizes.plot_batches(make_batches(make_rng())[:1], "box").axes
    for axes in (samples, memory):
        assert axes.get_ylim()[1] > 1.05 * max(line.get_ydata()[0] for line in axes.lines if line.get_marker() in "o^")


def test_an_emulated_network_has_a_line_of_its_own():
    records = [replace(r, source="emulated") if r.world_size == 4 else r for r in SCALES if r.mode == "weak"]
    lines = {
        line.get_label(): line for line in rank_scaling.plot_ranks("weak", list_points(records), "box").axes[0].lines
    }
    found = {name: lines[f"paceline on gloo ({name})"].get_linestyle() for name in ("measured", "emulated")}
    assert found == {"measured": "-", "emulated": "-."}


def test_the_legend_hides_no_line():
    figure = plot_predicted("weak", make_predictions())
    figure.draw_without_rendering()
    (legend,) = figure.legends
    left = legend.get_window_extent().x0
    assert all(axes.get_window_extent().x1 <= left for axes in figure.axes if axes.get_visible())
