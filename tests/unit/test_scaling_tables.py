"""Tables of scaling studies: every derived number of every CSV row, recomputed from raw seconds."""

import csv
import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from paceline.errors import MeasurementError
from paceline.records.samples import Ratio
from paceline.records.steps import list_points
from paceline.records.training import summarize_recipes
from paceline.report import predicted_tables, scaling_matrices, scaling_tables
from paceline.report.tables import render_csv, render_markdown

from .made_scaling import (
    SEEDS,
    PredictedPoint,
    interval,
    make_batches,
    make_cell,
    make_collectives,
    make_predictions,
    make_rng,
    make_runs,
    make_samples,
    make_scale,
    make_scales,
    slowest,
)


def parse(rows):
    """The rows as a reader of the CSV sees them; JSON must take them, too."""
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    return list(csv.DictReader(io.StringIO(render_csv(rows))))


def number(text):
    return float(text) if text else None


def cells(columns, items):
    """The printed table, as a dictionary for each line."""
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")] for line in render_markdown(columns, items).splitlines()
    ]
    return [dict(zip(header, row, strict=True)) for row in rows]


def median(samples):
    return float(np.median(slowest(samples)))


@settings(max_examples=20)
@given(SEEDS)
def test_rows_of_a_batch_sweep_follow_from_its_epochs(rng):
    records = make_batches(rng)
    rows = parse([scaling_tables.batch_row(line) for line in scaling_tables.mark_knee(records)])
    best = max(r.num_samples / median(r.timing) for r in records if r.timing)
    knees = []
    for record, row in zip(records, rows, strict=True):
        assert (int(row["batch_size"]), int(row["num_steps"])) == (record.batch_size, record.num_steps)
        assert row["failure"] == record.failure and row["source"] == "measured"
        if record.timing is None:
            assert not any(row[name] for name in ("epoch_s", "step_s", "samples_per_s", "noise", "peak_bytes"))
            continue
        epoch_s, seconds = median(record.timing), slowest(record.timing)
        low, high = np.quantile(seconds, [0.1, 0.9])
        rate = record.num_samples / epoch_s
        expected = {
            "epoch_s": epoch_s, "step_s": epoch_s / math.ceil(4096 / record.batch_size), "samples_per_s": rate,
            "epoch_p10_s": low, "epoch_p90_s": high, "noise": (high - low) / 2 / epoch_s,
            "data_wait_s": median(record.data_wait), "peak_bytes": 2**27 + record.batch_size * 2**20,
        }  # fmt: skip
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected)
        knees += [record.batch_size] if rate >= 0.9 * best else []
    assert [int(row["batch_size"]) for row in rows if row["is_knee"] == "True"] == [min(knees)]


def test_the_printed_sweep_marks_the_knee_and_tells_what_does_not_fit():
    records = make_batches(make_rng())
    rows = cells(scaling_tables.batch_table, scaling_tables.mark_knee(records))
    assert [row["mark"] for row in rows] == ["", "", "knee", "", "", "out of memory"]
    assert rows[-1]["epoch (s)"] == rows[-1]["samples/s"] == rows[-1]["peak memory (MiB)"] == ""
    assert rows[0]["peak memory (MiB)"] == "160" and rows[0]["steps per epoch"] == "128"
    assert rows[0]["epoch (s)"] == f"{median(records[0].timing):.3f}"


def test_one_epoch_has_no_noise():
    record = replace(make_batches(make_rng())[0], timing=make_samples(make_rng(), 1.0, count=1))
    (line,) = scaling_tables.mark_knee([record])
    assert scaling_tables.batch_row(line)["noise"] is None


@settings(max_examples=20)
@given(SEEDS)
def test_rows_of_ranks_follow_from_the_steps(rng):
    records = make_scales(rng)
    rows = parse([scaling_tables.scale_row(line) for line in scaling_tables.compare_with_torch(list_points(records))])
    alone = {r.cell: r for r in records if r.world_size == 1}
    torch = {(r.cell, r.world_size, r.backend): r for r in records if r.wrapper == "torch"}
    for record, row in zip(records, rows, strict=True):
        n, seconds = record.world_size, slowest(record.timing)
        ratio, noise = interval(slowest(alone[record.cell].timing) / seconds)
        low, high = np.quantile(seconds, [0.1, 0.9])
        samples = record.cell_size * (n if record.mode == "weak" else 1)
        efficiency = ratio if record.mode == "weak" else ratio / n
        expected = {
            "step_s": float(np.median(seconds)), "step_p10_s": low, "step_p90_s": high,
            "alone_s": median(alone[record.cell].timing), "global_batch_size": samples,
            "samples_per_s": samples / float(np.median(seconds)), "speedup": efficiency * n, "ideal_speedup": n,
            "efficiency": efficiency, "efficiency_noise": noise if record.mode == "weak" else noise / n,
        }  # fmt: skip
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected)
        for name, backend in (("torch", record.backend), ("torch_on_gloo", "gloo")):
            theirs = torch.get((record.cell, n, backend))
            found = [number(row[f"efficiency_over_{name}{end}"]) for end in ("", "_noise")]
            known = [None, None] if theirs is None else interval(slowest(theirs.timing) / seconds)
            assert found == pytest.approx(list(known))
        if n == 1:
            assert row["compute_slowdown"] == ""
        else:
            ideal_s = median(alone[record.cell].timing) / (1 if record.mode == "weak" else n)
            assert float(row["compute_slowdown"]) == pytest.approx(median(record.no_comm) / ideal_s)


def test_the_printed_ranks_say_when_torch_is_inside_the_noise():
    assert scaling_tables.say_ratio(Ratio(1.01, 0.02)) == "1.010 ± 0.020 (inside the noise)"
    assert scaling_tables.say_ratio(Ratio(1.21, 0.02)) == "1.210 ± 0.020"
    assert scaling_tables.say_ratio(Ratio(1.21, None)) == "1.210 (one repetition)"
    rng = make_rng()
    noisy = make_samples(rng, 1.2e-2, 2, spread=0.5)
    records = [
        make_scale(rng, 1, 1e-2), make_scale(rng, 2, 1.2e-2, wrapper="torch"), make_scale(rng, 2, 1.2e-2, timing=noisy),
        make_scale(rng, 2, 6e-3, backend="paceline"),
    ]  # fmt: skip
    rows = cells(scaling_tables.scale_table, scaling_tables.compare_with_torch(list_points(records)))
    assert [row["/ torch"][-18:] for row in rows] == ["", "1", "(inside the noise)", ""]
    assert rows[3]["/ torch on gloo"].startswith(("1.9", "2.0"))
    assert [row["wrapper"] for row in rows] == ["none", "torch on gloo", "paceline on gloo", "paceline on paceline"]
    assert rows[1]["global batch"] == "64" and rows[0]["efficiency"] == "1.000"


@settings(max_examples=20)
@given(SEEDS)
def test_rows_of_communication_and_bandwidth_follow_from_the_steps(rng):
    records = [r for r in make_scales(rng) if r.world_size > 1]
    collectives = make_collectives(rng)
    lines = scaling_tables.list_bandwidths(records, collectives)
    for record, row, rate in zip(
        records,
        parse([scaling_tables.communication_row(record) for record in records]),
        parse([scaling_tables.bandwidth_row(line) for line in lines]),
        strict=True,
    ):
        plain, silent, busy_s = slowest(record.timing), slowest(record.no_comm), median(record.busy)
        exposed_s, compute_s = max(0.0, float(np.median(plain - silent))), float(np.median(silent))
        expected = {
            "step_s": float(np.median(plain)), "compute_s": compute_s, "exposed_s": exposed_s,
            "exposed_noise_s": interval(plain / silent)[1] * compute_s, "busy_s": busy_s,
            "exposed_share": exposed_s / (exposed_s + compute_s), "overlap": 1 - exposed_s / busy_s,
        }  # fmt: skip
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected)
        n = record.world_size
        quickest_s = min(
            float(slowest(c.timing).min()) for c in collectives if (c.backend, c.world_size) == (record.backend, n)
        )
        bus = 2 * (n - 1) / n
        expected = {
            "busbw_bytes_per_s": bus * 4_000_000 / busy_s, "peak_bytes_per_s": bus * 2**24 / quickest_s,
            "peak_share": 4_000_000 / busy_s / (2**24 / quickest_s), "num_bytes": 4_000_000, "num_messages": 3,
        }  # fmt: skip
        assert {name: float(rate[name]) for name in expected} == pytest.approx(expected)


def test_a_bandwidth_above_the_peak_gets_no_table():
    records = [make_scale(make_rng(), 2, 1e-2, busy_s=1e-3)]
    assert scaling_tables.list_bandwidths(records, make_collectives(make_rng(), 1e-3))
    with pytest.raises(MeasurementError, match="above the peak"):
        scaling_tables.list_bandwidths(records, make_collectives(make_rng(), 1e-2))


def test_a_bandwidth_without_a_peak_is_shown_alone():
    (line,) = scaling_tables.list_bandwidths([make_scale(make_rng(), 2, 1e-2, busy_s=1e-3)], [])
    row = scaling_tables.bandwidth_row(line)
    assert (row["peak_bytes_per_s"], row["peak_share"]) == (None, None)
    (shown,) = cells(scaling_tables.bandwidth_table, [line])
    assert shown["peak (GB/s)"] == shown["of peak"] == "" and shown["busbw (GB/s)"]
    assert scaling_tables.list_bandwidths([make_scale(make_rng(), 2, 1e-2)], []) == []


def test_what_was_not_timed_without_communication_is_not_called_0():
    record = make_scale(make_rng(), 2, 1e-2, wrapper="dp", no_comm=None, num_bytes=0, num_messages=0)
    row = scaling_tables.communication_row(record)
    assert (row["compute_s"], row["exposed_s"], row["exposed_share"], row["overlap"]) == (None,) * 4
    (shown,) = cells(scaling_tables.communication_table, [record])
    assert (shown["compute (ms)"], shown["exposed (ms)"], shown["of step"]) == ("", "", "")


@settings(max_examples=20)
@given(SEEDS)
def test_rows_of_recipes_follow_from_the_last_evaluations(rng):
    runs = make_runs(rng)
    rows = parse([scaling_tables.recipe_row(summary) for summary in summarize_recipes(runs)])
    base = np.mean([r.curve[-1].test_accuracy for r in runs if (r.global_batch_size, r.recipe) == (128, "none")])
    for row in rows:
        own = [r for r in runs if (str(r.global_batch_size), r.recipe) == (row["global_batch_size"], row["recipe"])]
        done = [r for r in own if not r.failure]
        for name in ("test_accuracy", "test_loss", "train_loss"):
            values = [getattr(r.curve[-1], name) for r in done]
            assert float(row[name]) == pytest.approx(np.mean(values))
            assert float(row[f"{name}_deviation"]) == pytest.approx(np.std(values, ddof=1), abs=1e-12)
        is_base = (row["global_batch_size"], row["recipe"]) == ("128", "none")
        gap = None if is_base else base - np.mean([r.curve[-1].test_accuracy for r in done])
        assert number(row["gap"]) == (None if gap is None else pytest.approx(gap))
        assert (int(row["num_seeds"]), int(row["num_failed"])) == (len(own), len(own) - len(done))
        assert float(row["run_s"]) == pytest.approx(np.mean([r.seconds for r in done]))
        assert int(row["num_updates"]) == 10 * (1024 // int(row["global_batch_size"]))


def test_the_printed_recipes_are_in_percent_and_points():
    summaries = summarize_recipes(make_runs(make_rng()))
    rows = {(row["global batch"], row["recipe"]): row for row in cells(scaling_tables.recipe_table, summaries)}
    first, lars = summaries[0], summaries[-1]
    assert rows["128", "none"]["test accuracy (%)"] == (
        f"{100 * first.accuracy.mean:.2f} ± {100 * first.accuracy.deviation:.2f}"
    )
    assert rows["1024", "lars"]["gap (points)"] == f"{100 * (first.accuracy.mean - lars.accuracy.mean):.2f}"
    assert (rows["1024", "linear"]["failed"], rows["1024", "linear"]["seeds"]) == ("1", "4")


def test_a_recipe_of_which_no_seed_finished_has_a_row():
    runs = [replace(run, failure="nan", curve=()) for run in make_runs(make_rng())[:3]]
    (summary,) = summarize_recipes(runs)
    row = scaling_tables.recipe_row(summary)
    assert (row["test_accuracy"], row["test_accuracy_deviation"], row["run_s"], row["num_failed"]) == (None,) * 3 + (3,)
    assert cells(scaling_tables.recipe_table, [summary])[0]["test accuracy (%)"] == ""


@settings(max_examples=20)
@given(SEEDS)
def test_rows_of_predictions_follow_from_predicted_and_measured_steps(rng):
    records = make_scales(rng)
    predicted = [
        *make_predictions(cell_size=32), *make_predictions(mode="strong", cell_size=256),
        *make_predictions("torch on gloo", cell_size=999),
    ]  # fmt: skip
    lines = predicted_tables.match_predictions(predicted, list_points(records))
    rows = parse([predicted_tables.predicted_row(line) for line in lines])
    alone = {r.cell: r for r in records if r.world_size == 1}
    known = {(r.variant, r.cell, r.world_size): r for r in records}
    num_matched = 0
    for p, row in zip(predicted, rows, strict=True):
        ideal_s = p.alone_s if p.mode == "weak" else p.alone_s / p.world_size
        expected = {
            "efficiency": ideal_s / p.step_s, "efficiency_low": ideal_s / p.high_s,
            "efficiency_high": ideal_s / p.low_s, "speedup": p.world_size * ideal_s / p.step_s,
        }  # fmt: skip
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected)
        record = known.get((p.variant, (p.mode, p.cell_size), p.world_size))
        if record is None:
            assert not any(row[name] for name in ("measured_step_s", "measured_efficiency", "error", "is_covered"))
            continue
        num_matched += 1
        step_s, share = median(record.timing), 1 if p.mode == "weak" else p.world_size
        ratio, _ = interval(slowest(alone[record.cell].timing) / slowest(record.timing))
        assert float(row["measured_step_s"]) == pytest.approx(step_s)
        assert float(row["measured_efficiency"]) == pytest.approx(ratio / share)
        assert float(row["error"]) == pytest.approx((p.step_s - step_s) / step_s)
        assert row["is_covered"] == str(p.low_s <= step_s <= p.high_s)
        assert (row["source"], row["measured_source"]) == ("simulated", "measured")
    assert num_matched == 4


def test_the_printed_predictions_say_what_is_simulated_and_doubtful():
    points = list_points(make_cell(make_rng(), "weak", 32))
    lines = predicted_tables.match_predictions(make_predictions(), points)
    rows = cells(predicted_tables.predicted_table, lines)
    assert [row["source"] for row in rows] == [
        "simulated", "simulated and measured", "simulated and measured", "simulated", "simulated",
        "simulated, doubtful",
    ]  # fmt: skip
    step_s = next(p.record.timing.median_s for p in points if p.record.variant == "paceline on gloo")
    assert rows[1]["error"] == f"{lines[1].predicted.step_s / step_s - 1:+.1%}"
    assert [row["error"] for row in rows[3:]] == ["", "", ""]


def test_the_bands_of_a_prediction_hold_its_value():
    line = predicted_tables.PredictedLine(PredictedPoint("x", "strong", 64, 4, 2.0, 1.0, 4.0, 4.0), None)
    assert (line.speedup_band, line.efficiency_band) == ((1.0, 4.0), (0.25, 1.0))


def _matrices(text):
    """heading -> lines of cells."""
    found, heading = {}, ""
    for line in text.splitlines():
        if line.endswith(":"):
            heading = line[:-1]
        elif line:
            found.setdefault(heading, []).append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def test_matrices_have_ranks_against_batch_sizes():
    records = [*make_scales(make_rng(), strong=()), make_scale(make_rng(), 8, 1e-2, 1e-3, 2e-3)]
    found = _matrices(scaling_matrices.render_communication(records))
    assert list(found) == [f"{name}, weak scaling (measured)" for name in (
        "torch on gloo", "paceline on gloo", "paceline on paceline"
    )]  # fmt: skip
    header, _, *rows = found["paceline on gloo, weak scaling (measured)"]
    assert header == [
        "ranks",
        *(f"{size} per rank: {name} (ms)" for size in (32, 128) for name in ("compute", "exposed")),
    ]
    assert [row[0] for row in rows] == ["2", "4", "8"]
    two = next(r for r in records if (r.variant, r.world_size, r.cell_size) == ("paceline on gloo", 2, 32))
    exposed_ms = 1e3 * float(np.median(slowest(two.timing) - slowest(two.no_comm)))
    assert float(rows[0][1]) == pytest.approx(1e3 * median(two.no_comm), abs=5e-3)
    assert float(rows[0][2]) == pytest.approx(exposed_ms, abs=5e-3)
    assert rows[2][3:] == ["", ""]


def test_matrices_of_speedups_and_bandwidths_show_the_rows_numbers():
    records = make_scales(make_rng())
    points = list_points(records)
    header, _, row = _matrices(scaling_matrices.render_speedups(points))["torch on gloo, strong scaling (measured)"]
    assert header == ["samples", "1 rank (ms)", "2 ranks: speed-up", "2 ranks: efficiency", "4 ranks: speed-up",
                      "4 ranks: efficiency"]  # fmt: skip
    alone = next(r for r in records if (r.mode, r.world_size) == ("strong", 1))
    for place, n in ((2, 2), (4, 4)):
        record = next(r for r in records if (r.mode, r.world_size, r.wrapper) == ("strong", n, "torch"))
        ratio, _ = interval(slowest(alone.timing) / slowest(record.timing))
        assert row[place : place + 2] == [f"{ratio:.2f}", f"{ratio / n:.2f}"]
    assert float(row[1]) == pytest.approx(1e3 * median(alone.timing), abs=5e-3)
    lines = scaling_tables.list_bandwidths(records, make_collectives(make_rng(), 1e-3))
    found = _matrices(scaling_matrices.render_bandwidths(lines))["torch on gloo, strong scaling (measured)"]
    two = next(r for r in records if (r.mode, r.world_size, r.wrapper) == ("strong", 2, "torch"))
    assert float(found[2][1]) == pytest.approx(4e6 / median(two.busy) / 1e9, abs=1e-4)
    assert found[2][2].endswith("%")
