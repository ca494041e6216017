"""Scores of predictions: errors, coverage with its width, differences, and goals, on synthetic runs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.predict.predictor import Prediction
from paceline.predict.tuning import TuneSettings, derive_tuning, score_predictions
from paceline.records import StepRecord
from paceline.records.environment import capture_environment
from paceline.records.store import Run
from paceline.report.predictions import TuneResult
from paceline.units import MIB
from tests.unit.made_plans import plan_by_cap
from tests.unit.made_tuning import MadeJob

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "validate_tuning.py"
JOB = MadeJob(alpha_s=0.010, disturbed=((MIB, 1.0, 1.0),))
CALM = tuple(1 + 0.001 * turn for turn in range(-4, 5))


def judged(predicted_s, measured_s, half_s=0.1, shares=CALM):
    measured = JOB.build_plan_step("judged", [measured_s * share for share in shares])
    return Prediction(step_s=predicted_s, low_s=predicted_s - half_s, high_s=predicted_s + half_s, measured=measured)


def test_errors_and_coverage_with_the_width_of_the_intervals():
    points = [judged(1.1, 1.0), judged(2.0, 2.5, half_s=0.4), judged(4.0, 4.0, half_s=2.0)]
    scores = score_predictions(points)
    assert scores == pytest.approx({"mape": 0.1, "max_error": 0.2, "coverage": 2 / 3, "width": 0.2})


def test_r2_is_of_the_differences_within_a_case_and_not_of_the_case(script):
    score_differences = script.score_differences
    # Predict twice the mean but the right differences, then half of the differences: 1 - (0.25 + 0.25) / (1 + 1).
    assert score_differences([[judged(21, 11), judged(19, 9)]]).r2 == pytest.approx(1.0)
    assert score_differences([[judged(10.5, 11), judged(9.5, 9)]]).r2 == pytest.approx(0.75)
    # One number for all plans explains nothing.
    assert score_differences([[judged(10, 11), judged(10, 9)]]).r2 == pytest.approx(0.0)
    # Across two cases, each counts relative to its own mean, so steps of 10 and 100 times the length weigh the same.
    long = [judged(1050, 1100), judged(950, 900)]
    assert score_differences([[judged(11, 11), judged(9, 9)], long]).r2 == pytest.approx(1 - 0.5 / 4)
    assert score_differences([]).r2 is None and score_differences([[judged(1, 2), judged(3, 2)]]).r2 is None


def test_pairs_that_differ_clearly_are_ordered_right_or_not(script):
    score_differences = script.score_differences
    points = [judged(1.0, 1.0), judged(1.2, 1.1), judged(1.1, 1.3)]
    found = score_differences([points])
    assert (found.num_pairs, found.num_right) == (3, 2)
    # Steps within each other's noise do not define an order; neither do too few turns.
    noisy = tuple(1 + 0.3 * (-1) ** turn for turn in range(9))
    assert score_differences([[judged(1.0, 1.1, shares=noisy), judged(1.1, 1.0)]]).num_pairs == 0
    assert score_differences([[judged(1.0, 1.0, shares=(1,) * 7), judged(1.2, 1.1, shares=(1,) * 7)]]).num_pairs == 0


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("validate_tuning", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


ORDER = range(7, -1, -1)


def make_run(script, place, kind="real", slower=1.0, at_s=0.0):
    """A tuning with steps that took `slower` times the prediction."""
    records, default = JOB.build_calibration(), plan_by_cap(JOB.gradients, ORDER, MIB)
    calibrated = derive_tuning(TuneSettings(caps_bytes=(MIB, 4 * MIB, 8 * MIB)), records, JOB.gradients, default)

    def take(estimate):
        return [slower * estimate.step_s * share for share in CALM]

    for point in calibrated.points:
        sizes = tuple(plan_by_cap(JOB.gradients, ORDER, point.cap_bytes).bucket_bytes)
        more = {"cap_bytes": point.cap_bytes, "bucket_bytes": sizes}
        records.append(JOB.build_plan_step(f"cap {point.cap_bytes}", take(point), **more))
    for candidate in calibrated.candidates:
        more = {"note": "confirmed", "cap_bytes": candidate.cap_bytes, "bucket_bytes": candidate.plan.bucket_bytes}
        records.append(JOB.build_plan_step(candidate.label, take(candidate), **more))
    config = calibrated.settings.to_json(JOB.gradients, default, calibrated.predictions)
    result = TuneResult(Run("tune", config, capture_environment(), tuple(records)))
    return script.Measured(script.Case(kind, "made", ""), place, result, at_s)


def read_bars(table):
    return {(row[0].split(": ")[-1], row[1]): (row[3], row[4]) for row in table.rows}


def test_goals_are_scored_on_the_steps_of_the_other_pass(script):
    runs = [make_run(script, "pass-1"), make_run(script, "pass-2", slower=1.04, at_s=660)]
    assert all(run.spread > 0.05 and run.is_wide for run in runs)
    first, second = ([replace(run, case=replace(run.case, kind="gpu"))] for run in runs)
    bars = read_bars(script.build_bars(runs, first))
    later = "another process, 11 minutes apart or more"
    # Half of the points are too short by 1 - 1/1.04; those of pass 1 are scored with the calibration of pass 2.
    found, met = bars["MAPE of a step", later]
    assert (found, met) == ("1.9%", "met")
    assert bars["R2 of differences", "other bucket sizes"][1] == "met"
    assert bars["pairs in order", "and a process, later"] == ("100.0% of 6", "met")
    assert bars["MAPE", "8 bucket sizes"] == ("0.0% over 3", "missed")  # too few sizes
    assert read_bars(script.build_bars([runs[0]], second)).keys().isdisjoint({("MAPE of a step", later)})


def test_a_run_is_scored_on_every_plan_in_both_runs(script):
    one, other = make_run(script, "pass-1"), make_run(script, "loaded", slower=2.0)
    sweep, race = script.judge(one.result, other.result)
    assert [point.error for point in (*sweep, *race)] == pytest.approx([-0.5] * (len(sweep) + len(race)))
    kept = [r for r in other.result.records if not (isinstance(r, StepRecord) and r.label == "recommended")]
    fewer = TuneResult(Run("tune", other.result.config, capture_environment(), tuple(kept)))
    assert [len(part) for part in script.judge(one.result, fewer)] == [3, len(race) - 1]


def test_every_coverage_has_its_width_and_emulated_runs_stand_apart(script):
    runs = [make_run(script, place) for place in ("pass-1", "pass-2", "loaded")]
    tables = {table.name: table for table in script.build_tables([*runs, make_run(script, "emulated", "emulated")])}
    assert tables.keys() == {"cases", "differences", "held-out", "ablation", "loaded", "emulated", "bars"}
    assert [row[0] for row in tables["cases"].rows] == ["pass-1/made", "pass-2/made"]
    assert [row[2:] for row in tables["differences"].rows] == [["1.00", "3 of 3"] * 2] * 2 + [["1.00", "6 of 6"] * 2]
    assert [row[0] for row in tables["emulated"].rows] == ["emulated/made"] and "simulator" in tables["emulated"].title
    for table in tables.values():
        head = [column.name for column in table.columns]
        assert ("in the 90 %" in head) == ("half-width" in head)
        assert table.markdown().startswith("| ")


def test_without_runs_the_tables_are_empty(script):
    assert [table.rows for table in script.build_tables([])] == [[]]
