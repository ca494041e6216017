"""Results of scaling studies: every number in every row recomputed from raw seconds; sentences and pages."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from paceline.errors import MeasurementError
from paceline.predict.predictor import Prediction
from paceline.records import CollectiveRecord, Samples
from paceline.records.steps import list_points
from paceline.records.store import Run, load_run
from paceline.report.result import build_result, load_result
from paceline.report.table import Table
from paceline.studies import batch_sizes, large_batches, rank_scaling, study
from paceline.studies.rank_scaling import list_lines, match_predictions
from paceline.studies.scale import ReportResult
from paceline.studies.training_grid import summarize_seeds
from paceline.units import format_ms

from .made_scaling import (
    COUNT,
    SEEDS,
    interval,
    make_batch,
    make_batches,
    make_cell,
    make_collectives,
    make_predictions,
    make_rng,
    make_run,
    make_runs,
    make_samples,
    make_scale,
    make_scales,
    slowest,
)

RESULTS = Path(__file__).parents[2] / "results"


def parse(columns, items):
    """The rows as a reader of the CSV sees them; they must also be valid JSON."""
    table = columns if isinstance(columns, Table) else Table("t", "", columns, items)
    rows = table.rows_json()
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    return list(csv.DictReader(io.StringIO(table.csv())))


def row_of(columns, item):
    return Table("t", "", columns, [item]).rows_json()[0]


def number(text):
    return float(text) if text else None


def cells(columns, items):
    """The printed table as one dictionary per line."""
    table = columns if isinstance(columns, Table) else Table("t", "", columns, items)
    shown = {column.header: column for column in reversed(table.columns) if column.name is not None}
    lines = table.markdown().splitlines()
    assert len({line.count("|") for line in lines}) == 1 and len(lines) == 2 + len(table.rows)
    return [{name: column.cell(row) for name, column in shown.items()} for row in table.rows]


def median(samples):
    return float(np.median(slowest(samples)))


@given(SEEDS)
def test_rows_of_a_batch_sweep_follow_from_its_epochs(rng):
    records = make_batches(rng)
    rows = parse(batch_sizes.build_batch_table(records), None)
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


def test_the_printed_sweep_marks_the_knee_and_the_sizes_that_do_not_fit():
    records = make_batches(make_rng())
    rows = cells(batch_sizes.build_batch_table(records), None)
    assert [row["mark"] for row in rows] == ["", "", "knee", "", "", "out of memory"]
    assert rows[-1]["epoch (s)"] == rows[-1]["samples/s"] == rows[-1]["peak memory"] == ""
    assert rows[0]["peak memory"] == "160 MiB" and rows[0]["steps per epoch"] == "128"
    assert rows[0]["epoch (s)"] == f"{median(records[0].timing):.3f}"


def test_one_epoch_has_no_noise():
    record = replace(make_batches(make_rng())[0], timing=make_samples(make_rng(), 1.0, count=1))
    (row,) = batch_sizes.build_batch_table([record]).rows_json()
    assert row["noise"] is None


@given(SEEDS)
def test_rows_of_ranks_follow_from_the_steps(rng):
    records = make_scales(rng)
    rows = parse(rank_scaling.SCALING, list_lines(list_points(records)))
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
    rng = make_rng()
    noisy = make_samples(rng, 1.2e-2, 2, spread=0.5)
    records = [
        make_scale(rng, 1, 1e-2), make_scale(rng, 2, 1.2e-2, wrapper="torch"), make_scale(rng, 2, 1.2e-2, timing=noisy),
        make_scale(rng, 2, 6e-3, backend="paceline"),
    ]  # fmt: skip
    rows = cells(rank_scaling.SCALING, list_lines(list_points(records)))
    assert [row["/ torch"][-1:] for row in rows] == ["", "1", "=", ""]
    assert rows[3]["/ torch on gloo"].startswith(("1.9", "2.0"))
    assert [row["wrapper"] for row in rows] == ["none", "torch on gloo", "paceline on gloo", "paceline on paceline"]
    assert rows[1]["global batch"] == "64" and rows[0]["efficiency"] == "1.000"


@given(SEEDS)
def test_rows_of_communication_and_bandwidth_follow_from_the_steps(rng):
    collectives = make_collectives(rng)
    lines = [line for line in list_lines(list_points(make_scales(rng)), collectives) if line.record.world_size > 1]
    records = [line.record for line in lines]
    rows = parse(rank_scaling.COMMUNICATION, lines), parse(rank_scaling.BANDWIDTH, lines)
    for record, row, rate in zip(records, *rows, strict=True):
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


def make_line(**changes):
    """A study of one and two ranks."""
    records = [make_scale(make_rng(), 1, 1e-2), make_scale(make_rng(), 2, 1e-2, **changes)]
    return lambda collectives=(): list_lines(list_points(records), collectives)[1]


def test_a_bandwidth_above_the_peak_gets_no_table():
    line = make_line(busy_s=1e-3)
    assert line(make_collectives(make_rng(), 1e-3)).peak is not None
    with pytest.raises(MeasurementError) as caught:
        line(make_collectives(make_rng(), 1e-2))
    assert caught.value.code == "above-peak"


def test_a_bandwidth_without_a_peak_is_shown_alone():
    line = make_line(busy_s=1e-3)()
    row = row_of(rank_scaling.BANDWIDTH, line)
    assert (row["peak_bytes_per_s"], row["peak_share"]) == (None, None)
    (shown,) = cells(rank_scaling.BANDWIDTH, [line])
    assert shown["peak (GB/s)"] == shown["of peak"] == "" and shown["busbw (GB/s)"]


def test_steps_not_timed_without_communication_have_no_value():
    line = make_line(wrapper="dp", no_comm=None, num_bytes=0, num_messages=0)()
    row = row_of(rank_scaling.COMMUNICATION, line)
    assert (row["compute_s"], row["exposed_s"], row["exposed_share"], row["overlap"]) == (None,) * 4
    (shown,) = cells(rank_scaling.COMMUNICATION, [line])
    assert (shown["compute (ms)"], shown["exposed (ms)"], shown["of step"]) == ("", "", "")


@given(SEEDS)
def test_rows_of_recipes_follow_from_the_last_evaluations(rng):
    runs = make_runs(rng)
    rows = parse(large_batches.RECIPES, summarize_seeds(runs))
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
    summaries = summarize_seeds(make_runs(make_rng()))
    rows = {(row["global batch"], row["recipe"]): row for row in cells(large_batches.RECIPES, summaries)}
    first, lars = summaries[0], summaries[-1]
    assert rows["128", "none"]["test accuracy (%)"] == f"{100 * first.accuracy.mean:.2f}"
    assert rows["128", "none"]["±"] == f"{100 * first.accuracy.deviation:.2f}"
    assert rows["1024", "lars"]["gap (points)"] == f"{100 * (first.accuracy.mean - lars.accuracy.mean):.2f}"
    assert (rows["1024", "linear"]["failed"], rows["1024", "linear"]["seeds"]) == ("1", "4")


def test_a_recipe_of_which_no_seed_finished_has_a_row():
    runs = [replace(run, failure="nan", curve=()) for run in make_runs(make_rng())[:3]]
    (summary,) = summarize_seeds(runs)
    row = row_of(large_batches.RECIPES, summary)
    assert (row["test_accuracy"], row["test_accuracy_deviation"], row["run_s"], row["num_failed"]) == (None,) * 3 + (3,)
    assert cells(large_batches.RECIPES, [summary])[0]["test accuracy (%)"] == ""


@given(SEEDS)
def test_rows_of_predictions_follow_from_predicted_and_measured_steps(rng):
    records = make_scales(rng)
    predicted = [
        *make_predictions(cell_size=32), *make_predictions(mode="strong", cell_size=256),
        *make_predictions("torch on gloo", cell_size=999),
    ]  # fmt: skip
    lines = match_predictions(predicted, list_points(records))
    rows = parse(rank_scaling.PREDICTED, lines)
    alone = {r.cell: r for r in records if r.world_size == 1}
    known = {(r.variant, r.cell, r.world_size): r for r in records}
    num_matched = 0
    for p, row in zip(predicted, rows, strict=True):
        ideal_s = p.local_s if p.mode == "weak" else p.local_s / p.world_size
        expected = {
            "efficiency": ideal_s / p.step_s, "efficiency_low": ideal_s / p.high_s,
            "efficiency_high": ideal_s / p.low_s, "speedup": p.world_size * ideal_s / p.step_s,
        }  # fmt: skip
        assert {name: float(row[name]) for name in expected} == pytest.approx(expected)
        record = known.get((p.label, (p.mode, p.cell_size), p.world_size))
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
    lines = match_predictions(make_predictions(), points)
    rows = cells(rank_scaling.PREDICTED, lines)
    assert [row["source"] for row in rows] == [
        "simulated", "simulated", "simulated", "simulated", "simulated", "simulated, doubtful",
    ]  # fmt: skip
    step_s = next(p.record.timing.median_s for p in points if p.record.variant == "paceline on gloo")
    assert rows[1]["error"] == f"{lines[1].step_s / step_s - 1:+.1%}"
    assert [row["error"] for row in rows[3:]] == ["", "", ""]


def test_predictions_from_steps_of_a_busy_machine_are_doubtful():
    run = load_run(RESULTS / "neoverse-n1-2-cores" / "scale-ranks")
    kept = tuple(r for r in run.records if getattr(r, "cell", ("weak", 8)) == ("weak", 8))
    steps = "measured on a busy machine: steps"
    for load in (0.0, 16.0):
        environment = replace(run.environment, load_average=load)
        config = run.config | {"predict_ranks": "4", "network": "10gbe"}
        result = build_result(replace(run, environment=environment, config=config, records=kept))
        doubts = [row["doubt"] for row in result.table("predicted").rows_json()]
        assert doubts and all(doubt.endswith(steps) is (load > 0) for doubt in doubts)
        assert (steps in str(result.findings)) is (load > 0)


def test_prediction_intervals_contain_the_value():
    point = Prediction(step_s=2.0, low_s=1.0, high_s=4.0, local_s=4.0, mode="strong", cell_size=64, world_size=4)
    assert (point.find_bounds(point.speedup), point.efficiency_bounds) == ((1.0, 4.0), (0.25, 1.0))


# -- sentences ---------------------------------------------------------------------------------------------------------


def steady(seconds, ranks=1):
    return Samples(seconds=((seconds,) * ranks,) * COUNT)


def make_steady(ranks, compute_s, exposed_s=0.0, **changes):
    """A step without any noise."""
    record = make_scale(make_rng(), ranks, compute_s, exposed_s, **changes)
    silent = steady(compute_s, ranks) if record.no_comm else None
    return replace(record, timing=steady(compute_s + exposed_s, ranks), no_comm=silent)


def describe(records):
    lines = list_lines(list_points(records))
    return rank_scaling.describe_lines([line for line in lines if line.record.world_size > 1], lines)


def test_a_sweep_reports_its_knee_and_the_sizes_that_do_not_fit():
    records = make_batches(make_rng())
    rates = {r.batch_size: 4096 / np.median(slowest(r.timing)) for r in records if r.timing}
    assert batch_sizes.describe_batches(records) == [
        f"Batch size 512 (the knee) reaches {rates[512] / rates[1024]:.0%} of the best {rates[1024]:,.0f} samples/s "
        "(at 1024).",
        f"At batch size 512 a step takes {format_ms(512 / rates[512])} ms and the process peaks at 640 MiB.",
        "Batch size 4096 does not fit: out of memory.",
    ]


@pytest.mark.parametrize(
    ("epochs", "text"),
    [
        ({32: 1.0, 64: 1.01}, "The batch size hardly matters: 32, the smallest, reaches "),
        ({8: 4.0}, "Batch size 8, the only one measured, reaches "),
    ],
)
def test_a_sweep_without_a_knee_inside_says_so(epochs, text):
    line, _ = batch_sizes.describe_batches([make_batch(make_rng(), size, s) for size, s in epochs.items()])
    assert text in line and "knee" not in line


@pytest.mark.parametrize("failure", ["", "out of memory"])
def test_throughput_that_still_grows_at_the_largest_size_has_no_knee_anywhere(build_environment, failure):
    records = [make_batch(make_rng(), size, s, 4096) for size, s in ((32, 4.0), (64, 2.0), (16, 7.0))]
    records += [make_batch(make_rng(), 128, failure=failure)] if failure else []
    result = build_result(Run("scale batch", {}, build_environment(), tuple(records)))
    more = "larger batches do not fit" if failure else "try larger batches"
    assert result.answer == f"Throughput still grows at batch size 64: {more}."
    assert result.findings[0].startswith("At batch size 64 a step takes ")
    assert not any(row["is_knee"] for row in result.table().rows_json())
    assert [row["mark"] for row in cells(result.table(), None)] == ["", "", "", *([failure] if failure else [])]
    labels = [text for axes in result.figure().axes for text in axes.get_legend_handles_labels()[1]]
    assert "samples/s (measured)" in labels and not any("knee" in label for label in labels)
    assert result.next_steps == ["paceline scale ranks --model cnn --batch-size 64"]
    assert build_result(Run("scale batch", {}, build_environment(), tuple(records[:1]))).next_steps == [
        "paceline scale ranks --model cnn --batch-size 32"
    ]


def test_a_sweep_in_which_nothing_fits_reports_only_that():
    record = make_batch(make_rng(), 64, failure="out of memory")
    assert batch_sizes.describe_batches([record]) == ["Batch size 64 does not fit: out of memory."]


@pytest.mark.parametrize(
    ("mode", "compute_s", "exposed_s", "text"),
    [
        ("weak", 0.010, 0.006, "efficiency 0.62 ± 0.00. The cause: exposed communication is 38% of the step."),
        ("weak", 0.016, 0.004, "efficiency 0.50 ± 0.00. The cause: ranks slow each other down: "
         "compute takes 1.60 times as long as on one rank (exposed communication is 20% of the step)."),
        ("weak", 0.010, 0.0, "efficiency 1.00 ± 0.00. The loss is within the noise."),
        ("strong", 0.005, 0.003, "speed-up 1.25 of 2, efficiency 0.62 ± 0.00. The cause: exposed communication is 37% "
         "of the step."),
        ("strong", 0.009, 0.001, "speed-up 1.00 of 2, efficiency 0.50 ± 0.00. The cause: a rank's share of the "
         "batch takes 1.80 times as long per sample as the whole batch on one rank "
         "(exposed communication is 10% of the step)."),
    ],
)  # fmt: skip
def test_a_point_names_the_larger_cause(mode, compute_s, exposed_s, text):
    records = [make_steady(n, *times, mode=mode) for n, times in ((1, (0.010,)), (2, (compute_s, exposed_s)))]
    (line,) = describe(records)
    where = "per rank" if mode == "weak" else "in all"
    # 0.625 and 0.375 are exactly between two roundings.
    expected = {f"2 ranks with 32 samples {where} in paceline on gloo: {t}" for t in (text, text.replace("37%", "38%"))}
    assert line in expected


def test_no_cause_is_named_without_steps_without_communication():
    records = [make_steady(1, 0.01), make_steady(2, 0.02, wrapper="dp", no_comm=None, num_bytes=0)]
    (line,) = describe(records)
    assert line == "2 ranks with 32 samples per rank in dp: efficiency 0.50 ± 0.00."


def test_a_source_other_than_measured_is_reported():
    records = [make_steady(n, 0.01, source="emulated") for n in (1, 2)]
    assert "(emulated)" in describe(records)[0]


def test_the_leaders_are_the_best_of_each_cell_on_the_most_ranks_and_the_worst_of_all():
    several = [line for line in list_lines(list_points(make_scales(make_rng()))) if line.record.world_size > 1]
    most = max(line.record.world_size for line in several)
    *best, worst = rank_scaling.choose_lines(several)
    assert [line.record.cell for line in best] == list(dict.fromkeys(line.record.cell for line in several))
    for leader in best:
        rivals = [r for r in several if r.record.cell == leader.record.cell and r.record.world_size == most]
        assert leader.efficiency == max(rival.efficiency for rival in rivals)
    assert worst.efficiency == min(line.efficiency for line in several)
    assert rank_scaling.choose_lines([]) == []


def _disturb(record, rank, factor):
    rows = tuple(tuple(v * (factor if r == rank else 1) for r, v in enumerate(row)) for row in record.no_comm.seconds)
    return replace(record, no_comm=replace(record.no_comm, seconds=rows))


def test_a_rank_delayed_by_another_process_is_named():
    record = make_scale(make_rng(), 4, 0.01)
    assert rank_scaling.describe_stragglers([record]) == []
    assert rank_scaling.describe_stragglers([_disturb(record, 2, 1.02)]) == []  # too close to the other ranks
    (line,) = rank_scaling.describe_stragglers([_disturb(record, 2, 1.5), _disturb(record, 2, 1.5)])
    assert line.startswith(
        "4 ranks with 32 samples per rank: do not use this cell. Rank 2 was the slowest in 100% of the steps"
    )
    often = [_disturb(record, number % 4, 3.0).no_comm.seconds[number] for number in range(record.timing.count)]
    changing = replace(record, no_comm=replace(record.no_comm, seconds=tuple(often)))
    assert rank_scaling.describe_stragglers([changing]) == []  # a different rank each time


def test_comparisons_count_cells_that_are_better_worse_or_neither():
    records = []
    for size, mine_s in ((32, 0.008), (64, 0.020), (128, 0.010)):
        records += [
            make_steady(1, 0.01, cell_size=size), make_steady(2, 0.010, wrapper="torch", cell_size=size),
            make_steady(2, mine_s, cell_size=size), make_steady(2, 0.005, backend="paceline", cell_size=size),
        ]  # fmt: skip
    assert rank_scaling.describe_comparisons(list_lines(list_points(records))) == [
        "paceline on gloo compared with torch on gloo, by efficiency: better in 1 of 3 undisturbed cells, worse in 1, "
        "within the noise in 1; ratios from 0.50 to 1.25.",
        "paceline on paceline compared with torch on gloo, by efficiency: better in 3 of 3 undisturbed cells, worse in "
        "0, within the noise in 0; ratios from 2.00 to 2.00.",
    ]


def test_comparisons_exclude_cells_disturbed_by_a_slow_rank():
    records = []
    for size, factor in ((32, 1.0), (64, 1.5)):
        mine, theirs = (make_scale(make_rng(), 4, 0.01, wrapper=w, cell_size=size) for w in ("paceline", "torch"))
        records += [make_scale(make_rng(), 1, 0.01, cell_size=size), mine, _disturb(theirs, 2, factor)]
    lines = list_lines(list_points(records))
    assert [line.record for line in lines if line.is_disturbed] == records[4:]  # including interleaved ones
    (text,) = rank_scaling.describe_comparisons([line for line in lines if not line.is_disturbed])
    assert " of 1 undisturbed cell, " in text


def _build_disturbed(build_environment, mode="weak", sizes=(32, 64)):
    """A study with a last batch size that was disturbed on 4 ranks, and is both the best and the worst there."""
    records = []
    for size in sizes:
        late = size == sizes[-1]
        records += [
            make_steady(1, 0.01, mode=mode, cell_size=size), make_steady(2, 0.012, 0.001, mode=mode, cell_size=size),
            *(_disturb(make_steady(4, s, 0.002, mode=mode, cell_size=size, wrapper=w), 2, 1.5 if late else 1.0)
              for w, s in (("paceline", 0.0101 if late else 0.013), ("torch", 0.030 if late else 0.014))),
        ]  # fmt: skip
    return build_result(Run("scale ranks", {}, build_environment(), tuple(records)))


def test_a_disturbed_cell_is_marked_and_its_efficiency_is_not_reported(build_environment):
    result = _build_disturbed(build_environment)
    (warning,) = [line for line in result.sentences if "do not use this cell" in line]
    assert warning.startswith("4 ranks with 64 samples per rank: ")
    others = [line for line in result.sentences if line is not warning]
    assert not any("4 ranks with 64" in line or "(paceline on gloo, 64" in line for line in others)
    assert result.answer.startswith("4 ranks reach ") and "32 samples per rank" in result.answer
    assert any(
        line.startswith("2 ranks with 64 samples per rank in paceline") for line in others
    )  # the best of the remaining ones
    for table in result.tables():
        expected = [(row["cell_size"], row["world_size"]) == (64, 4) for row in table.rows_json()]
        assert [row["is_disturbed"] for row in table.rows_json()] == expected and sum(expected) == 2
        assert [row["mark"] for row in cells(table, None)] == ["disturbed" * late for late in expected]


def test_a_study_with_only_disturbed_cells_reports_only_that(build_environment):
    one, two = make_steady(1, 0.01), _disturb(make_steady(2, 0.015), 1, 1.5)
    result = build_result(Run("scale ranks", {}, build_environment(), (one, two)))
    assert result.answer.startswith("2 ranks with 32 samples per rank: do not use this cell.") and not result.findings


@pytest.mark.parametrize("mode", ["weak", "strong"])
def test_the_speedup_of_a_disturbed_cell_is_not_the_largest(build_environment, mode):
    result = _build_disturbed(build_environment, mode, sizes=(64,))
    assert result.answer.startswith("2 ranks reach ") and "largest on 4" not in " ".join(result.sentences)


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ({2: 0.030, 4: 0.020}, ""),
        ({2: 0.025, 4: 0.032}, " The speed-up is largest on 2 ranks: 1.60."),
        ({2: 0.060, 4: 0.080}, " One rank alone is faster than any number of ranks."),
        ({2: 0.080, 4: 0.060}, " One rank alone is faster than any number of ranks."),
    ],
)
def test_the_limit_of_strong_scaling(steps, text):
    records = [make_steady(1, 0.040, mode="strong")]
    for n, step_s in steps.items():
        records.append(replace(make_steady(n, step_s, mode="strong"), busy=steady(0.010, n)))
    line = describe(records)[-1]
    assert line.endswith(f"{text} Messages take 10.0 ms on 4 ranks, which limits the speed-up to 4.0.")
    assert ("largest" in line) == ("largest" in text) and ("alone" in line) == ("alone" in text)


def _runs(cells, **changes):
    return [
        make_run(size, recipe, seed, accuracy + 0.001 * (seed - 1), epochs=40, **changes)
        for (size, recipe), accuracy in cells.items()
        for seed in range(3)
    ]


def test_large_batches_report_the_gap_the_updates_and_the_best_recipe():
    cells = {(128, "none"): 0.904, (1024, "none"): 0.713, (1024, "linear"): 0.85, (1024, "lars"): 0.896}
    assert large_batches.describe_recipes(summarize_seeds(_runs(cells))) == [
        "Baseline (the same epochs): 128 without a recipe: 90.4 % (± 0.1, 3 seeds), after 320 updates in 40 epochs.",
        "1024 without a recipe: 71.3 % (± 0.1, 3 seeds), 19.1 points below the baseline, after 40 updates in 40 epochs"
        "; the best recipe, lars: 0.8 points below the baseline.",
    ]


@pytest.mark.parametrize(
    ("accuracy", "text"),
    [
        (0.60, "; no recipe helps; the best, lars: 30.4 points below the baseline."),
        (0.9035, "lars: 0.0 points below the baseline (less than the spread over seeds)."),
        (0.92, "; the best recipe, lars: 1.6 points above the baseline."),
    ],
)
def test_the_best_recipe_is_compared_with_the_baseline(accuracy, text):
    cells = {(128, "none"): 0.904, (1024, "none"): 0.713, (1024, "lars"): accuracy}
    line = large_batches.describe_recipes(summarize_seeds(_runs(cells)))[1]
    assert re.sub(r" 0\.[01] points", " 0.0 points", line).endswith(text)


def test_a_recipe_is_reported_only_if_accuracy_was_lost_and_its_updates_only_if_they_differ():
    runs = [make_run(128), make_run(1024, accuracy=0.7), make_run(1024, "grow", accuracy=0.8, num_updates=9)]
    assert large_batches.describe_recipes(summarize_seeds(runs))[1].endswith(
        "; the best recipe, grow: 10.0 points below the baseline, after 9 updates."
    )
    runs = [make_run(128), make_run(1024, accuracy=0.95), make_run(1024, "lars", accuracy=0.97)]
    assert "lars" not in large_batches.describe_recipes(summarize_seeds(runs))[1]


def test_the_answer_is_about_the_largest_batch_in_whatever_order(build_environment):
    runs = [make_run(128), make_run(1024, accuracy=0.7), make_run(512, accuracy=0.8)]
    result = build_result(Run("scale large-batch", {}, build_environment(), tuple(runs)))
    assert result.answer.startswith("1024 without a recipe")


def test_the_answer_says_whether_more_ranks_help(results):
    result = results["scale ranks"]
    most = [point for point in result.points if point.record.world_size == 4]
    weak = max(point.efficiency for point in most if point.record.mode == "weak")
    strong = max(point.speedup for point in most if point.record.mode == "strong")
    assert result.answer.startswith(f"4 ranks reach {weak:.0%} efficiency in weak scaling (paceline on ")
    assert f" and a speed-up of {strong:.2f} in strong scaling (" in result.answer
    assert "? a single repetition" in " ".join(result.text(300, details=True).split())


def test_the_same_updates_differ_in_epochs():
    runs = [make_run(128, budget="updates", epochs=4), make_run(1024, budget="updates", epochs=32, accuracy=0.8)]
    assert large_batches.describe_recipes(summarize_seeds(runs))[1] == (
        "1024 without a recipe: 80.0 % (one seed), 10.0 points below the baseline, after 32 updates in 32 epochs."
    )


def test_failures_are_reported():
    runs = [make_run(128), make_run(128, seed=1, failure="nan"), make_run(1024, failure="loss is nan", curve=())]
    lines = large_batches.describe_recipes(summarize_seeds(runs))
    assert "(one seed, 1 of 2 seeds failed)" in lines[0]
    assert lines[1] == "1024 without a recipe: no seed finished (loss is nan)."


def test_recipes_without_a_baseline_are_not_compared():
    assert large_batches.describe_recipes(summarize_seeds([make_run(512, "lars")])) == [
        "512 with lars: 90.0 % (one seed), after 8 updates in 4 epochs."
    ]


def test_predictions_report_their_error_and_the_values_for_more_ranks():
    records = [make_steady(1, 0.010), make_steady(2, 0.010), make_steady(4, 0.0125)]
    predicted = [
        replace(p, step_s=s, low_s=s / 2, high_s=2 * s, local_s=0.01, network="10 Gb/s")
        for p, s in zip(make_predictions(counts=(2, 4, 8, 1024)), (0.011, 0.012, 0.02, 0.1), strict=True)
    ]
    lines = match_predictions(predicted, list_points(records))
    assert rank_scaling.describe_errors(lines) == [
        "Predicting 2 steps on 2, 4 ranks from half the ranks: mean error 7.0%, largest 10.0% "
        "(paceline on gloo, 32 samples per rank); 2 of 2 within the 90 % interval."
    ]
    assert rank_scaling.describe_errors(lines[2:]) == []
    lines[0] = replace(lines[0], is_disturbed=True)
    (text,) = rank_scaling.describe_errors(lines)
    assert text.startswith("Predicting 1 step on 4 ranks from half the ranks: mean error 4.0%, ")
    assert text.endswith("; 1 of 1 within the 90 % interval (1 disturbed step left out).")
    assert [row["mark"] for row in cells(rank_scaling.PREDICTED, lines)] == ["disturbed", "", "", ""]
    assert [bool(row["error"]) for row in cells(rank_scaling.PREDICTED, lines)] == [False, True, False, False]
    assert [row["is_disturbed"] for row in parse(rank_scaling.PREDICTED, lines)] == ["True", "False", "False", "False"]
    assert rank_scaling.describe_predictions(lines[2:]) == [
        "Predicted (simulated) for paceline on gloo, 32 samples per rank, 10 Gb/s: efficiency 0.50 "
        "(0.25 to 1.00) on 8 ranks, efficiency 0.10 (0.05 to 0.20) on 1,024 ranks; doubtful: far.",
    ]


def test_strong_predictions_report_the_speedups_at_both_ends_of_the_curve():
    counts = tuple(2**i for i in range(1, 11))
    lines = match_predictions(make_predictions(mode="strong", cell_size=1024, counts=counts), [])
    (text,) = rank_scaling.describe_predictions(lines)
    assert text.count("speed-up") == 2 and " on 2 ranks" in text and " on 1,024 ranks" in text


# -- results and pages -------------------------------------------------------------------------------------------------


@pytest.fixture
def results(build_environment):
    """The results of synthetic records, by verb."""
    rng = make_rng()
    config = {"network": "10gbe", "predict_ranks": "64"}
    records = {
        "scale batch": make_batches(rng),
        "scale ranks": [*make_scales(rng), *make_collectives(rng)],
        "scale large-batch": make_runs(rng),
    }
    return {verb: build_result(Run(verb, config, build_environment(), tuple(found))) for verb, found in records.items()}


def test_a_page_has_findings_first_then_tables_figures_machine_and_definitions(results, monkeypatch):
    monkeypatch.setattr(rank_scaling.RanksResult, "assumptions", ["none"])
    page = study.render_page("My study", list(results.values()), None, ["noisy"])
    headings = re.findall(r"^#+ .*", page, re.MULTILINE)
    assert headings[:2] == ["# My study", "## Findings"]
    assert headings[-4:] == ["## Machine", "## Definitions", "## Assumptions of predictions", "## Warnings"]
    assert page.index("(the knee)") < page.index("### Batch sizes on one rank") < page.index("## Machine")
    assert "](batch.png)" in page and "](weak.png)" in page and "](accuracy.png)" in page
    assert page.count("Some CPU, 8 cores, 16.0 GiB") == 1 and "torch 2.13.0" in page
    assert "busbw = 2(n-1)/n * bytes / t" in page
    for result in results.values():
        assert all(f"- {line}\n" in page for line in (result.answer, *result.findings))
        assert all(table.markdown().strip() in page for table in result.tables())


def test_the_page_of_ranks_has_matrices_of_batch_sizes_and_ranks(results):
    result = results["scale ranks"]
    matrices = [table for table in result.page_tables() if table.name not in {one.name for one in result.tables()}]
    assert [table.title for table in matrices] == [
        f"{mode} scaling: {what}"
        for mode, ratio in (("weak", "efficiency"), ("strong", "speed-up"))
        for what in (f"{ratio} by batch size and ranks", "compute and exposed", "bandwidth")
    ]
    page = result.files()["report.md"]
    assert all(f"### {table.title.capitalize()}\n\n{table.markdown()}" in page for table in matrices)
    speed, split, rate = matrices[:3]
    assert speed.markdown().splitlines()[0] == (
        "| wrapper | samples | 1 rank (ms) | 2 ranks: efficiency | 4 ranks: efficiency |"
    )
    assert split.markdown().splitlines()[0] == (
        "| wrapper | ranks | 32 per rank: compute (ms) | 32 per rank: exposed (ms) | 128 per rank: compute (ms) "
        "| 128 per rank: exposed (ms) |"
    )
    assert rate.markdown().splitlines()[0] == (
        "| wrapper | ranks | 32 per rank: busbw (GB/s) | 128 per rank: busbw (GB/s) |"
    )
    rows = [line.split(" | ")[:2] for line in speed.markdown().splitlines()[2:]]
    names = ("torch on gloo", "paceline on gloo", "paceline on paceline")
    assert rows == [[f"| {name}", f"{size} per rank"] for name in names for size in (32, 128)]
    known = {
        (line.record.variant, line.record.cell, line.record.world_size): line for line in list_lines(result.points)
    }
    line = known["paceline on gloo", ("weak", 128), 4]
    assert speed.rows_json()[3]["efficiency_4_ranks"] == line.efficiency
    assert speed.rows_json()[3]["alone_s"] == line.alone.timing.median_s
    assert split.rows_json()[3]["compute_s_128_per_rank"] == line.record.compute_s
    assert split.rows_json()[3]["exposed_s_128_per_rank"] == line.record.exposed_s
    assert rate.rows_json()[3]["busbw_bytes_per_s_128_per_rank"] == line.record.busbw_bytes_per_s


def test_a_matrix_marks_a_disturbed_cell(build_environment):
    speed, split, *_ = _build_disturbed(build_environment).page_tables()
    assert speed.markdown().splitlines()[0].endswith("4 ranks: efficiency | 4 ranks: mark |")
    assert [line.endswith("| disturbed |") for line in speed.markdown().splitlines()[2:]] == [False, True] * 2
    assert "64 per rank: mark" in split.markdown() and "32 per rank: mark" not in split.markdown()


@pytest.mark.parametrize("verb", [f"scale {name}" for name in ("batch", "ranks", "large-batch")])
def test_a_result_has_its_answer_tables_and_page_without_a_folder(results, verb):
    result = results[verb]
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert document["answer"] == result.answer and result.answer not in document["findings"]
    assert {table.name for table in result.tables()} <= set(document) and "assumptions" in document
    assert str(result).startswith(result.answer[:40]) and max(map(len, str(result).splitlines())) <= 80
    (page,) = result.files().values()
    assert result.answer in page and result.title in page


def test_a_result_is_written_with_every_table_and_figure(results, tmp_path):
    folder = results["scale batch"].save(tmp_path / "run")
    assert {path.name for path in folder.iterdir()} == {
        "run.json", "report.md", *(f"batch.{kind}" for kind in ("md", "csv", "png", "svg")),
    }  # fmt: skip


def test_several_studies_make_one_report(results, build_environment, tmp_path):
    for verb in ("scale batch", "scale large-batch"):
        results[verb].save(tmp_path / verb.split()[1])
    run = Run("scale report", {"runs": ["../batch", "../large-batch"]}, build_environment(), ())
    saved = ReportResult(run, tmp_path / "page", [results["scale batch"], results["scale large-batch"]])
    saved.save(tmp_path / "page")
    found = load_result(tmp_path / "page")
    assert isinstance(found, ReportResult) and found.answer == saved.answer
    assert found.findings == [*results["scale batch"].findings, *results["scale large-batch"].findings]
    assert "](../batch/batch.png)" in (tmp_path / "page" / "report.md").read_text()
    assert list(json.loads((tmp_path / "page" / "report.json").read_text())["tables"]) == [
        str(tmp_path / "batch"), str(tmp_path / "large-batch")
    ]  # fmt: skip


def test_a_single_rank_makes_a_page(build_environment):
    record = make_scale(make_rng(), 1, 0.01)
    result = build_result(Run("scale ranks", {}, build_environment(), (record,)))
    assert result.findings == [] and [table.name for table in result.tables()] == ["scaling"]
    assert "There is nothing to report" in result.files()["report.md"] and "not measured" in result.answer


def test_times_that_no_model_fits_are_reported_and_the_rest_is_shown():
    run = load_run(RESULTS / "neoverse-n1-2-cores" / "scale-ranks")
    records = [
        replace(r, timing=Samples(seconds=((1.0 / r.num_bytes,) * 2,) * 5))  # larger messages are faster
        if isinstance(r, CollectiveRecord)
        else r
        for r in run.records
    ]
    result = build_result(replace(run, records=tuple(records)))
    assert result.assumptions and all(line.startswith("No prediction for ") for line in result.assumptions)
    assert f"{result.assumptions[0]}." in result.findings
    assert [table.name for table in result.tables()][:2] == ["scaling", "communication"]


def test_a_bandwidth_above_the_peak_is_a_failure_and_not_in_the_table(build_environment):
    records = (make_scale(make_rng(), 1, 1e-2), make_scale(make_rng(), 2, 1e-2, busy_s=1e-6))
    result = build_result(Run("scale ranks", {}, build_environment(), (*records, *make_collectives(make_rng()))))
    assert "above the peak" in result.failure and "above the peak" not in str(result)
    assert [table.name for table in result.tables()] == ["scaling", "communication"]


@pytest.mark.parametrize(
    "name",
    [
        "neoverse-n1-2-cores/scale-ranks", "neoverse-n1-2-cores/scale-large-batch-cpu", "h200-16-cores/scale-batch",
        "h200-16-cores/scale-large-batch",
    ],
)  # fmt: skip
def test_runs_of_older_versions_are_shown(name):
    result = load_result(RESULTS / name)
    assert result.answer and result.findings and max(map(len, str(result).splitlines()[:-3])) <= 80
