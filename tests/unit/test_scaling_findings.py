"""Sentences of scaling studies: they hold the records' numbers, name the larger cause and admit the noise."""

import re
from dataclasses import replace

import numpy as np
import pytest

from paceline.errors import MeasurementError
from paceline.records import Samples
from paceline.records.steps import list_points
from paceline.records.training import summarize_recipes
from paceline.report import scaling_findings as findings
from paceline.report import scaling_report
from paceline.report.predicted_tables import match_predictions
from paceline.report.scaling_tables import compare_with_torch, list_bandwidths

from .made_scaling import (
    COUNT,
    make_batch,
    make_batches,
    make_collectives,
    make_predictions,
    make_rng,
    make_run,
    make_runs,
    make_scale,
    make_scales,
    slowest,
)


def steady(seconds, ranks=1):
    return Samples(seconds=((seconds,) * ranks,) * COUNT)


def make_steady(ranks, compute_s, exposed_s=0.0, **changes):
    """A step without any noise."""
    record = make_scale(make_rng(), ranks, compute_s, exposed_s, **changes)
    silent = steady(compute_s, ranks) if record.no_comm else None
    return replace(record, timing=steady(compute_s + exposed_s, ranks), no_comm=silent)


def test_a_sweep_tells_its_knee_and_what_does_not_fit():
    records = make_batches(make_rng())
    rates = {r.batch_size: 4096 / np.median(slowest(r.timing)) for r in records if r.timing}
    assert findings.describe_batches(records) == [
        f"samples/s grow up to batch size 512 (the knee), where {rates[512] / rates[1024]:.0%} of the best "
        f"{rates[1024]:,.0f} (at 1024) are reached",
        "batch size 4096 does not fit: out of memory",
    ]


@pytest.mark.parametrize(
    ("epochs", "text"),
    [
        ({32: 1.0, 64: 1.01}, "hardly depend on the batch size"),
        ({32: 4.0, 64: 2.0}, "up to batch size 64, the largest that was measured"),
        ({32: 4.0}, "batch size 32, the only one that was measured"),
    ],
)
def test_a_sweep_without_a_knee_inside_says_so(epochs, text):
    (line,) = findings.describe_batches([make_batch(make_rng(), size, s) for size, s in epochs.items()])
    assert text in line


def test_a_sweep_in_which_nothing_fits_has_only_that_to_say():
    record = make_batch(make_rng(), 64, failure="out of memory")
    assert findings.describe_batches([record]) == ["batch size 64 does not fit: out of memory"]


@pytest.mark.parametrize(
    ("mode", "compute_s", "exposed_s", "text"),
    [
        ("weak", 0.010, 0.006, "efficiency 0.62 ± 0.00, because exposed communication is 38% of the step"),
        ("weak", 0.016, 0.004, "efficiency 0.50 ± 0.00, because ranks slow each other's computing: it takes 1.60 times "
         "that of one rank by itself (exposed communication is 20% of the step)"),
        ("weak", 0.010, 0.0, "efficiency 1.00 ± 0.00, no loss beyond the noise"),
        ("strong", 0.005, 0.003, "speed-up 1.25 of 2, efficiency 0.62 ± 0.00, because exposed communication is 37% of "
         "the step"),
        ("strong", 0.009, 0.001, "speed-up 1.00 of 2, efficiency 0.50 ± 0.00, because computing a rank's share of the "
         "batch takes 1.80 times its share of one rank's time (exposed communication is 10% of the step)"),
    ],
)  # fmt: skip
def test_a_point_names_the_larger_cause(mode, compute_s, exposed_s, text):
    records = [make_steady(n, *times, mode=mode) for n, times in ((1, (0.010,)), (2, (compute_s, exposed_s)))]
    (line,) = findings.describe_points(list_points(records))
    where = "per rank" if mode == "weak" else "over all ranks"
    # 0.625 and 0.375 lie on the edge of two roundings.
    expected = {
        f"2 ranks at batch size 32 {where} in paceline on gloo: {t}" for t in (text, text.replace("37%", "38%"))
    }
    assert line in expected


def test_without_steps_without_communication_no_cause_is_named():
    records = [make_steady(1, 0.01), make_steady(2, 0.02, wrapper="dp", no_comm=None, num_bytes=0)]
    (line,) = findings.describe_points(list_points(records))
    assert line == "2 ranks at batch size 32 per rank in dp: efficiency 0.50 ± 0.00"


def test_another_source_than_measured_is_told():
    records = [make_steady(n, 0.01, source="emulated") for n in (1, 2)]
    assert "(emulated)" in findings.describe_points(list_points(records))[0]


def test_the_leaders_are_the_best_of_each_cell_on_the_most_ranks_and_the_worst_of_all():
    points = list_points(make_scales(make_rng()))
    several = [p for p in points if p.record.world_size > 1]
    most = max(p.record.world_size for p in points)
    *best, worst = findings.pick_leaders(points)
    assert [p.record.cell for p in best] == list(dict.fromkeys(p.record.cell for p in several))
    for leader in best:
        rivals = [p for p in several if p.record.cell == leader.record.cell and p.record.world_size == most]
        assert leader.efficiency == max(p.efficiency for p in rivals)
    assert worst.efficiency == min(p.efficiency for p in several)
    assert findings.pick_leaders([]) == []


def _disturb(record, rank, factor):
    rows = tuple(tuple(v * (factor if r == rank else 1) for r, v in enumerate(row)) for row in record.no_comm.seconds)
    return replace(record, no_comm=replace(record.no_comm, seconds=rows))


def test_a_rank_that_something_else_held_up_is_named():
    record = make_scale(make_rng(), 4, 0.01)
    assert findings.describe_stragglers([record]) == []
    assert findings.describe_stragglers([_disturb(record, 2, 1.02)]) == []  # near the others
    (line,) = findings.describe_stragglers([_disturb(record, 2, 1.5), _disturb(record, 2, 1.5)])
    assert line.startswith(
        "4 ranks at batch size 32 per rank: not to be believed, for rank 2 was the slowest in 100% of"
    )
    often = [_disturb(record, number % 4, 3.0).no_comm.seconds[number] for number in range(record.timing.count)]
    changing = replace(record, no_comm=replace(record.no_comm, seconds=tuple(often)))
    assert findings.describe_stragglers([changing]) == []  # ranks take turns at it


def test_contests_count_cells_that_are_better_worse_or_neither():
    records = []
    for size, mine_s in ((32, 0.008), (64, 0.020), (128, 0.010)):
        records += [
            make_steady(1, 0.01, cell_size=size), make_steady(2, 0.010, wrapper="torch", cell_size=size),
            make_steady(2, mine_s, cell_size=size), make_steady(2, 0.005, backend="paceline", cell_size=size),
        ]  # fmt: skip
    assert findings.describe_contests(compare_with_torch(list_points(records))) == [
        "paceline on gloo beside torch on gloo, by efficiency: better in 1 of 3 cells, worse in 1, inside the noise in "
        "1; ratios from 0.50 to 1.25",
        "paceline on paceline beside torch on gloo, by efficiency: better in 3 of 3 cells, worse in 0, inside the "
        "noise in 0; ratios from 2.00 to 2.00",
    ]


def test_contests_leave_out_cells_that_a_rank_spoilt():
    records = []
    for size, factor in ((32, 1.0), (64, 1.5)):
        mine, theirs = (make_scale(make_rng(), 4, 0.01, wrapper=w, cell_size=size) for w in ("paceline", "torch"))
        records += [make_scale(make_rng(), 1, 0.01, cell_size=size), mine, _disturb(theirs, 2, factor)]
    for line in findings.describe_contests(compare_with_torch(list_points(records))):
        assert " of 1 cell, " in line and line.endswith("(1 not to be believed left out)")
    assert findings.describe_contests(compare_with_torch(list_points(records[3:]))) == []


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ({2: 0.030, 4: 0.020}, "the speed-up grows up to 4 ranks, the most measured: 2.00"),
        ({2: 0.025, 4: 0.032}, "the speed-up ends at 1.60 on 2 ranks; 4 ranks reach 1.25"),
        ({2: 0.080, 4: 0.050}, "no number of ranks is faster than one; best 0.80 on 4"),
    ],
)
def test_the_limit_of_strong_scaling(steps, text):
    records = [make_steady(1, 0.040, mode="strong")]
    for n, step_s in steps.items():
        record = make_steady(n, step_s, mode="strong")
        records.append(replace(record, busy=steady(0.010, n)))
    (line,) = findings.describe_limits(list_points(records))
    assert text in line
    assert line.endswith("while messages take 10.00 ms of a step, it stays below about 4.0")


def test_weak_scaling_has_no_such_limit():
    assert findings.describe_limits(list_points([make_steady(n, 0.01) for n in (1, 2)])) == []


def test_the_bandwidth_closest_to_the_peak_is_told():
    records = [
        replace(make_steady(2, 0.01, cell_size=size), busy=steady(s, 2)) for size, s in ((32, 0.004), (64, 0.002))
    ]
    peak = replace(make_collectives(make_rng(), backends=["gloo"], counts=[2])[0], timing=steady(2**24 / 8e9, 2))
    (line,) = findings.describe_bandwidths(list_bandwidths(records, [peak]))
    assert line == (
        "paceline on gloo: messages come closest to their peak with 2.00 GB/s, 25% of the measured 8.00 GB/s "
        "(2 ranks at batch size 64 per rank)"
    )


def _runs(cells, **changes):
    return [
        make_run(size, recipe, seed, accuracy + 0.001 * (seed - 1), epochs=40, **changes)
        for (size, recipe), accuracy in cells.items()
        for seed in range(3)
    ]


def test_large_batches_tell_the_gap_the_updates_and_what_repairs_it():
    cells = {(128, "none"): 0.904, (1024, "none"): 0.713, (1024, "linear"): 0.85, (1024, "lars"): 0.896}
    assert findings.describe_recipes(summarize_recipes(_runs(cells))) == [
        "baseline (the same epochs): 128 without a recipe: 90.4 % (± 0.1, 3 seeds) after 40 epochs, 320 updates",
        "1024 without a recipe: 71.3 % (± 0.1, 3 seeds), 19.1 points below the baseline at 128 in the same 40 epochs, "
        "with 40 updates instead of 320; lars repairs it to within 0.8 points",
    ]


def test_a_recipe_with_updates_of_its_own_tells_them():
    cells = {(128, "none"): 0.904, (1024, "none"): 0.713}
    grown = _runs({(1024, "grow"): 0.9}, num_updates=1234)
    line = findings.describe_recipes(summarize_recipes([*_runs(cells), *grown]))[1]
    assert line.endswith("with 40 updates instead of 320; grow, with 1,234 updates, repairs it to within 0.4 points")


@pytest.mark.parametrize(
    ("accuracy", "text"),
    [
        (0.60, "; no recipe repairs it, the best is lars: 30.4 points below the baseline"),
        (0.75, "; lars helps a little, to 15.4 points below the baseline"),
        (0.9035, "; lars repairs it to within 0.0 points, less than the spread over seeds"),
        (0.92, "; lars repairs it (1.6 points above the baseline)"),
    ],
)
def test_a_repair_is_called_what_it_is(accuracy, text):
    cells = {(128, "none"): 0.904, (1024, "none"): 0.713, (1024, "lars"): accuracy}
    line = findings.describe_recipes(summarize_recipes(_runs(cells)))[1]
    assert re.sub(r"within 0\.[01]", "within 0.0", line).endswith(text)


def test_a_batch_that_loses_nothing_needs_no_repair():
    cells = {(128, "none"): 0.904, (1024, "none"): 0.9042, (1024, "lars"): 0.91}
    line = findings.describe_recipes(summarize_recipes(_runs(cells)))[1]
    assert "points above the baseline at 128 (less than the spread over seeds)" in line and "lars" not in line


def test_the_same_updates_differ_in_epochs():
    runs = [make_run(128, budget="updates", epochs=4), make_run(1024, budget="updates", epochs=32, accuracy=0.8)]
    assert findings.describe_recipes(summarize_recipes(runs))[1] == (
        "1024 without a recipe: 80.0 % (one seed), 10.0 points below the baseline at 128 in the same 32 updates, "
        "with 32 epochs instead of 4"
    )


def test_failures_are_told():
    runs = [make_run(128), make_run(128, seed=1, failure="nan"), make_run(1024, failure="loss is nan", curve=())]
    lines = findings.describe_recipes(summarize_recipes(runs))
    assert "(one seed, 1 of 2 seeds failed)" in lines[0]
    assert lines[1] == "1024 without a recipe: no seed finished (loss is nan)"


def test_recipes_without_a_baseline_stand_alone():
    assert findings.describe_recipes(summarize_recipes([make_run(512, "lars")])) == ["512 with lars: 90.0 % (one seed)"]


def test_predictions_tell_their_error_and_what_lies_beyond():
    records = [make_steady(1, 0.010), make_steady(2, 0.010), make_steady(4, 0.0125)]
    predicted = [
        replace(p, step_s=s, low_s=s / 2, high_s=2 * s, alone_s=0.01, network="10 Gb/s")
        for p, s in zip(make_predictions(counts=(2, 4, 8, 1024)), (0.011, 0.012, 0.02, 0.1), strict=True)
    ]
    lines = match_predictions(predicted, list_points(records))
    assert findings.describe_errors(lines) == [
        "predicted from half as many ranks, 2 steps on 2, 4 ranks are off by 7.0% on average and by 10.0% at most "
        "(paceline on gloo at batch size 32 per rank); 2 by at most 10%, and 2 lie in the 90 % of their predictions"
    ]
    assert findings.describe_errors(lines[2:]) == []
    assert findings.describe_predictions(lines) == [
        "beyond the ranks at hand (simulated), paceline on gloo at batch size 32 per rank (10 Gb/s): efficiency 0.50 "
        "(0.25 to 1.00) on 8 ranks, efficiency 0.10 (0.05 to 0.20) on 1,024 ranks; doubtful: far",
    ]


def test_strong_predictions_tell_speedups_and_a_long_curve_is_thinned():
    counts = tuple(2**i for i in range(1, 11))
    lines = match_predictions(make_predictions(mode="strong", cell_size=1024, counts=counts), [])
    (text,) = findings.describe_predictions(lines)
    assert text.count("speed-up") == 4 and " on 2 ranks" in text and " on 1,024 ranks" in text


def _sections():
    rng = make_rng()
    scales = make_scales(rng)
    return [
        scaling_report.batch_section(make_batches(rng), [("samples/s", "batch.png")]),
        scaling_report.scaling_section(scales, make_collectives(rng), [("efficiency", "weak.png")]),
        scaling_report.recipe_section(make_runs(rng)),
        scaling_report.predicted_section(make_predictions(), list_points(scales)),
    ]


def test_the_page_has_findings_first_then_tables_pictures_machine_and_definitions(build_environment):
    machine = scaling_report.describe_machine(build_environment())
    page = scaling_report.render_report(_sections(), "My study", [machine, machine])
    headings = re.findall(r"^#+ .*", page, re.MULTILINE)
    assert headings[:2] == ["# My study", "## Findings"]
    assert headings[-2:] == ["## Machine", "## Definitions"]
    assert page.index("(the knee)") < page.index("### Epochs by batch size") < page.index("## Machine")
    assert "![samples/s](batch.png)" in page and "![efficiency](weak.png)" in page
    assert page.count("Some CPU, 8 cores, 16.0 GiB") == 1 and "torch 2.13.0" in page
    assert "busbw = 2(n-1)/n * bytes / t" in page
    for section in _sections():
        assert all(f"- {line}.\n" in page for line in section.findings)
        assert all(table.strip() in page for _, table in section.tables)


@pytest.mark.parametrize("number", range(4))
def test_a_page_with_one_section_works(number):
    section = _sections()[number]
    page = scaling_report.render_report([section])
    assert section.title in page and "## Machine" not in page
    assert f"Source: {', '.join(section.sources)}." in page


def test_sources_are_told_apart():
    sections = _sections()
    assert [list(section.sources) for section in sections] == [["measured"]] * 3 + [["simulated", "measured"]]


def test_one_rank_alone_makes_a_section():
    section = scaling_report.scaling_section([make_scale(make_rng(), 1, 0.01)])
    assert section.findings == [] and [caption for caption, _ in section.tables] == [
        "Every number of ranks and wrapper"
    ]
    assert "nothing that these records tell" in scaling_report.render_report([section])


def test_a_bandwidth_above_the_peak_stops_the_page():
    records = [make_scale(make_rng(), 1, 1e-2), make_scale(make_rng(), 2, 1e-2, busy_s=1e-6)]
    with pytest.raises(MeasurementError, match="above the peak"):
        scaling_report.scaling_section(records, make_collectives(make_rng()))
