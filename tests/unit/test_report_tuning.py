"""A tuning in words, as JSON and as a picture, from records of a made-up job."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from paceline.measure.tune_settings import TuneSettings
from paceline.report.tables import render_markdown
from paceline.tune import find_plan, judge_tuning

from paceline.predict.networks import find_network
from paceline.predict.search import enumerate_caps
from paceline.predict.simulate import simulate
from paceline.report.plots import render_png, render_svg
from paceline.report.tuning import (
    bucket_table,
    describe_errors,
    grid_row,
    grid_table,
    plot_tuning,
    say_verdict,
    tuning_row,
)
from paceline.training.settings import TrainSettings
from paceline.units import MIB
from tests.unit.made_plans import plan_by_cap
from tests.unit.made_tuning import MadeJob

SETTINGS = TuneSettings(TrainSettings(ranks=2))
ORDER = range(7, -1, -1)
CAPS = (MIB, 4 * MIB, 8 * MIB)
# Latency makes a bucket for each gradient slow; messages that cost nothing make all plans equal.
SLOW = MadeJob(alpha_s=0.010, backend="paceline", disturbed=((2**20, 1.0, 1.0),))
FREE = MadeJob(alpha_s=1e-6, bytes_per_s=1e12, launch_s=0.0, gather_s=0.0, disturbed=((2**20, 1.0, 1.0),))
NOISY, CALM = (0.97, 1.0, 1.03, 0.98, 1.02), (0.999, 1.0, 1.001, 1.0, 1.0)
JSON_KEYS = {
    "model", "wrapper", "backend", "world_size", "grid", "mape", "max_error", "exposed_error", "kendall_tau", "flat",
    "noise", "best_predicted_cap_bytes", "best_measured_cap_bytes", "regret", "plan", "plan_measured_s",
    "default_measured_s", "verdict",
}  # fmt: skip
GRID_KEYS = {"cap_bytes", "num_buckets", "predicted_s", "low_s", "high_s", "measured_s"}


def tune(job, grid_s=(), confirmed_s=None, spread=CALM, settings=SETTINGS):
    """The tuning of a job whose default is a bucket for each gradient; grid and confirmation took these times."""
    records = job.build_calibration()
    for cap, seconds in zip(CAPS, grid_s, strict=False):
        sizes = tuple(plan_by_cap(job.gradients, ORDER, cap).bucket_bytes)
        times_s = [seconds * share for share in spread]
        records.append(job.build_plan_step(f"cap {cap}", times_s, cap_bytes=cap, bucket_bytes=sizes))
    for number, (label, seconds) in enumerate((confirmed_s or {}).items()):
        times_s = [seconds * share for share in spread[number:] + spread[:number]]
        records.append(job.build_plan_step(label, times_s, note="confirmed"))
    return judge_tuning(settings, records, job.gradients, plan_by_cap(job.gradients, ORDER, MIB))


def test_flat():
    tuning = tune(FREE, (0.070, 0.071, 0.070), {"default": 0.070, "cap 1": 0.070}, NOISY)
    verdict = say_verdict(tuning, "made on 2 ranks")
    assert verdict.startswith("made on 2 ranks: flat: keep the default, 8 buckets: ")
    assert "all bucket sizes lie within 1.4%, the noise being 2.8%" in verdict
    assert tuning.plan is tuning.default_plan


def test_the_default_is_kept_though_sizes_differ():
    tuning = tune(FREE, (0.070, 0.080, 0.091), {"default": 0.070, "cap 1": 0.056})
    verdict = say_verdict(tuning, "made")
    assert verdict.startswith("made: keep the default, 8 buckets: ") and "flat" not in verdict
    assert "all bucket sizes lie within 30.0% (regret 25.0%)" in verdict


@pytest.mark.parametrize(
    ("recommended_s", "spread", "words"),
    [
        (0.120, CALM, ("it takes 20.0% ± 0.1% less than the default, measured in turns; predicted", "regret 20.0%")),
        (0.149, NOISY, ("keep the default: ", "was predicted to take", "within the noise")),
        (0.165, CALM, ("keep the default: ", "more: a wrong prediction", "and takes 10.0% ± 0.1% more")),
    ],
    ids=["a clear gain", "within the noise", "a wrong prediction"],
)
def test_a_recommended_plan_beside_the_default(recommended_s, spread, words):
    confirmed = {"default": 0.150, "recommended": recommended_s, "cap 1": 0.100}
    tuning = tune(SLOW, (0.150, 0.110, 0.100), confirmed, spread)
    assert not tuning.choice.is_default and tuning.judgement.recommended == "recommended"
    verdict = say_verdict(tuning, "made")
    for part in words:
        assert part in verdict
    assert ("made: use " in verdict) == (recommended_s == 0.120)
    assert f"{tuning.choice.gain:.1%}" in verdict and "\n" not in verdict


@pytest.mark.parametrize("takes_lists", [True, False])
def test_a_prediction_that_nobody_confirmed(takes_lists):
    tuning = tune(SLOW, settings=replace(SETTINGS, takes_lists=takes_lists))
    verdict = say_verdict(tuning, "made")
    assert verdict.endswith(f"predicted {tuning.choice.gain:.1%} less than the default")
    assert ("made: use bucket size " in verdict) == (tuning.choice.cap_bytes > 0)
    assert takes_lists or tuning.choice.cap_bytes > 0
    assert describe_errors(tuning.judgement) == []
    assert len(tuning.judgement.points) >= 4 and tuning.judgement.measured == []
    row = tuning_row(tuning, "plan.json", verdict)
    missing = ("mape", "max_error", "regret", "best_measured_cap_bytes", "plan_measured_s", "default_measured_s")
    assert set(row) >= JSON_KEYS and all(row[key] is None for key in missing)
    assert {point["source"] for point in row["grid"]} == {"simulated"}


def test_a_row_has_what_is_promised_and_the_numbers_of_the_judgement():
    confirmed = {"default": 0.150, "recommended": 0.120, "cap 1": 0.100}
    tuning = tune(SLOW, (0.150, 0.110, 0.100), confirmed)
    row = json.loads(json.dumps(tuning_row(tuning, "a/plan.json", "so it is")))
    assert set(row) >= JSON_KEYS
    assert (row["model"], row["wrapper"], row["backend"], row["world_size"]) == ("made", "paceline", "paceline", 2)
    assert [point["cap_bytes"] for point in row["grid"]] == list(CAPS)
    assert [point["num_buckets"] for point in row["grid"]] == [8, 2, 1]
    assert [point["measured_s"] for point in row["grid"]] == pytest.approx([0.150, 0.110, 0.100])
    for point in row["grid"]:
        assert set(point) >= GRID_KEYS and point["same_layout"] is True and point["source"] == "measured"
        assert point["low_s"] < point["predicted_s"] < point["high_s"]
    errors = [point["predicted_s"] / point["measured_s"] - 1 for point in row["grid"]]
    assert row["mape"] == pytest.approx(sum(map(abs, errors)) / 3)
    assert row["max_error"] == pytest.approx(max(map(abs, errors)))
    assert (row["plan"], row["verdict"], row["best_measured_cap_bytes"]) == ("a/plan.json", "so it is", 8 * MIB)
    assert (row["plan_measured_s"], row["default_measured_s"]) == pytest.approx((0.120, 0.150))
    assert row["regret"] == pytest.approx(0.2) and row["flat"] is False and row["keeps_default"] is False


def test_errors_in_words_name_a_layout_that_is_not_the_simulated_one():
    tuning = tune(SLOW, (0.150, 0.110, 0.100))
    (line,) = describe_errors(tuning.judgement)
    assert f"{tuning.judgement.mape:.1%} off on average" in line and "rank correlation 0.33" in line
    points = list(tuning.judgement.points)
    points[1] = replace(points[1], measured=replace(points[1].measured, bucket_bytes=(8 * MIB,)))
    lines = describe_errors(replace(tuning.judgement, points=tuple(points)))
    assert lines[1:] == ["the wrapper's buckets are not the simulated ones at 4 MiB"]


def test_tables_show_every_point_and_every_bucket():
    tuning = tune(SLOW, (0.150, 0.110))
    text = render_markdown(grid_table, tuning.judgement.points)
    assert "| 1 MiB" in text and "| 4 MiB" in text and text.count("measured |") == 2
    step = tuning.choice.estimate.step
    rows = [(number, bucket, step.backward_s) for number, bucket in enumerate(step.buckets)]
    assert render_markdown(bucket_table, rows).count("simulated") == len(step.buckets)
    assert grid_row(tuning.judgement.points[0])["measured_s"] == pytest.approx(0.150)


@pytest.mark.parametrize("grid_s", [(), (0.150, 0.110, 0.100)])
def test_the_picture_has_predicted_and_measured(grid_s):
    tuning = tune(SLOW, grid_s)
    intervals = enumerate_caps(tuning.model.job.sizes)
    caps = [
        (i.low_bytes, i.high_bytes, simulate(tuning.model.job, i.cuts, tuning.model.costs).step_s) for i in intervals
    ]
    figure = plot_tuning(tuning, "Step time against bucket size", "a box", caps)
    labels = set(figure.axes[0].get_legend_handles_labels()[1])
    drawn = {"predicted, every bucket size", "90 % interval", "best predicted", "without communication"}
    seen = {"measured: median, p10 to p90", "best measured"}
    assert drawn <= labels and (seen <= labels) == bool(grid_s)
    assert render_png(figure).startswith(b"\x89PNG")
    assert ("points are measured" if grid_s else "points are simulated") in render_svg(figure).decode()


def test_what_is_confirmed_does_not_change_the_plan():
    job = SLOW
    default = plan_by_cap(job.gradients, ORDER, MIB)
    records = job.build_calibration()
    later = [*records, job.build_plan_step("cap", (9.0,) * 5, cap_bytes=MIB)]
    (_, choice, plan), (_, again, same) = (find_plan(SETTINGS, r, job.gradients, default) for r in (records, later))
    assert (choice, plan) == (again, same)
    assert plan.rule.startswith("tuned: ") and plan.gradients == job.gradients


def test_the_emulated_network_is_what_messages_cost():
    settings = replace(SETTINGS, job=TrainSettings(ranks=1), network=find_network("1gbe"), network_ranks=4)
    settings.check()
    tuning = tune(SLOW, settings=settings)
    one = tuning.model.estimate_cap(8 * MIB)
    # A ring of four at 1 Gb/s: each byte goes 1.5 times over the wire.
    assert one.exposed_s > 1.5 * 8 * MIB / 125e6
