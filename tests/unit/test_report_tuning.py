"""A tuning as text, JSON and figure, from synthetic records; and every committed tuning."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import load_result
from paceline.errors import ConfigError
from paceline.predict.race import VERDICTS
from paceline.predict.tuning import TuneSettings, derive_tuning, render_predictions
from paceline.records import StepRecord
from paceline.records.environment import capture_environment
from paceline.records.findings import find_doubts
from paceline.records.store import Run
from paceline.report.plots import render_png, render_svg
from paceline.report.predictions import TuneResult, describe_answer, describe_errors, plot_race, plot_tuning
from paceline.units import MIB, format_ms
from tests.unit.made_plans import plan_by_cap
from tests.unit.made_tuning import MadeJob

SETTINGS = TuneSettings()
RESULTS = Path(__file__).parents[2] / "results"
ORDER = range(7, -1, -1)
CAPS = (MIB, 4 * MIB, 8 * MIB)
# Latency makes one bucket per gradient slow; with free messages, all plans are equal.
SLOW = MadeJob(alpha_s=0.010, backend="paceline", disturbed=((2**20, 1.0, 1.0),))
FREE = MadeJob(alpha_s=1e-6, bytes_per_s=1e12, launch_s=0.0, gather_s=0.0, disturbed=((2**20, 1.0, 1.0),))
NOISY, CALM = (0.97, 1.0, 1.03, 0.98, 1.02), (0.999, 1.0, 1.001, 1.0, 1.0)
JSON_KEYS = {
    "model", "wrapper", "backend", "world_size", "grid", "mape", "max_error", "exposed_error", "kendall_tau", "noise",
    "best_predicted_cap_bytes", "best_measured_cap_bytes", "regret", "regret_high", "gain", "gain_low", "gain_high",
    "plan", "plan_measured_s", "default_measured_s", "verdict",
}  # fmt: skip
GRID_KEYS = {"cap_bytes", "num_buckets", "predicted_s", "low_s", "high_s", "measured_s"}


def tune(job, grid_s=(), confirmed_s=None, spread=CALM, settings=SETTINGS):
    """The tuning of a job with one bucket per gradient by default; grid and confirmation took these times."""
    return judge(job, grid_s, tuple((confirmed_s or {}).items()), spread, settings)


@functools.cache  # several tests read the same tuning
def judge(job, grid_s, confirmed_s, spread, settings):
    records = job.build_calibration()
    for cap, seconds in zip(CAPS, grid_s, strict=False):
        sizes = tuple(plan_by_cap(job.gradients, ORDER, cap).bucket_bytes)
        times_s = [seconds * share for share in spread]
        records.append(job.build_plan_step(f"cap {cap}", times_s, cap_bytes=cap, bucket_bytes=sizes))
    sizes = {"default": (MIB,) * 8, "recommended": (4 * MIB, 4 * MIB), "cap 8 MiB": (8 * MIB,)}
    for number, (label, seconds) in enumerate(confirmed_s):
        times_s = [seconds * share for share in spread[number:] + spread[:number]] * 8
        cap = 8 * MIB if label.startswith("cap") else 0
        records.append(job.build_plan_step(label, times_s, note="confirmed", cap_bytes=cap, bucket_bytes=sizes[label]))
    return derive_tuning(settings, records, job.gradients, plan_by_cap(job.gradients, ORDER, MIB))


def make_result(tuning, **config):
    """The result of a run with the records of this tuning."""
    plan = tuning.candidates[0].plan
    config |= tuning.settings.to_json(plan.gradients, plan)
    return TuneResult(Run("tune", config, capture_environment(), tuning.records))


def test_flat():
    tuning = tune(FREE, (0.070, 0.071, 0.070), {"default": 0.070, "cap 8 MiB": 0.0701})
    answer = describe_answer(tuning)
    within = "all 2 compared plans are within ±1 % of the default (8 buckets)"
    assert answer == f"flat: {within} over 40 alternating rounds; keep it"
    result = make_result(tuning)
    assert (result.verdict, result.plan, result.gain) == ("flat", tuning.candidates[0].plan, 0.0)
    assert result.answer == f"made on 2 ranks, wrapper paceline, backend gloo: {answer}."
    assert result.regret[1] <= 0.01


def test_plans_with_the_same_buckets_are_one():
    tuning = tune(FREE, (0.070, 0.071, 0.070), {"default": 0.070})
    twin = next(r for r in tuning.records if isinstance(r, StepRecord) and r.note)
    records = [*tuning.records, replace(twin, label="recommended"), replace(twin, label="cap 1 MiB", cap_bytes=MIB)]
    again = derive_tuning(SETTINGS, records, FREE.gradients, tuning.candidates[0].plan)
    assert [candidate.label for candidate in again.candidates] == ["default"]
    assert describe_answer(again) == "flat: all plans have the same buckets as the default (8 buckets)"


@pytest.mark.parametrize(
    ("times_s", "spread", "verdict", "words"),
    [
        ((0.150, 0.120, 0.130), CALM, "use",
         ("use bucket size 4 MiB (2 buckets): 20.0% (19.", "40 alternating rounds", "no other plan is faster")),
        ((0.150, 0.120, 0.100), CALM, "use", ("use bucket size 8 MiB (1 bucket): 33.3% (",)),
        ((0.150, 0.149, 0.165), NOISY, "undecided",
         ("undecided: the default (8 buckets) is at most ", "the best of 3 plans after 40 alternating rounds; about ",
          " more rounds (", ") would decide")),
        ((0.150, 0.165, 0.180), CALM, "default",
         ("the default (8 buckets) is the best of 3 plans over 40 alternating rounds: the others are slower",)),
        ((0.150, 0.165, 0.150), CALM, "default",
         ("the default (8 buckets) is the best of 3 plans over 40", "rounds: another plan may be up to 0.")),
    ],
    ids=["a clear gain", "the best of the sweep", "within the noise", "all slower", "one as good"],
)  # fmt: skip
def test_the_comparison_decides(times_s, spread, verdict, words):
    confirmed = dict(zip(("default", "recommended", "cap 8 MiB"), times_s, strict=True))
    tuning = tune(SLOW, (0.150, 0.110, 0.100), confirmed, spread)
    answer = describe_answer(tuning)
    for part in words:
        assert part in answer
    result = make_result(tuning)
    assert result.verdict == verdict and "\n" not in answer
    place = min(range(3), key=lambda number: times_s[number]) if verdict == "use" else 0
    assert result.plan == tuning.candidates[place].plan
    assert 1 - result.gain == pytest.approx(times_s[place] / 0.150, rel=0.01)
    rows = result.table("race").rows_json()
    assert [row["plan"] for row in rows] == list(confirmed)
    assert [row["measured_s"] for row in rows] == pytest.approx(times_s, rel=0.03)
    assert [row["status"] for row in rows][place] == ("use" if place else "keep")
    assert rows[0]["status"] == ("beaten" if verdict == "use" else "keep")
    labels = set(plot_race(result, "a box").axes[0].get_legend_handles_labels()[1])
    assert {"to use" if place else "to keep", "predicted", "within 1 % of the default"} <= labels


def test_candidates_are_the_default_the_predicted_and_measured_best_and_those_that_may_be_as_good():
    tuning = tune(SLOW, (0.150, 0.110, 0.090))
    labels = [candidate.label for candidate in tuning.candidates]
    assert labels[0] == "default" and "recommended" in labels and len(labels) == len(set(labels)) <= 6
    assert len({candidate.plan.bucket_bytes for candidate in tuning.candidates}) == len(labels)
    assert any(candidate.plan.bucket_bytes == (8 * MIB,) for candidate in tuning.candidates), "the best of the sweep"
    assert [one["label"] for one in tuning.predictions] == labels
    for one, candidate in zip(tuning.predictions, tuning.candidates, strict=True):
        assert one["low_s"] < one["step_s"] < one["high_s"] and one["bucket_bytes"] == list(candidate.plan.bucket_bytes)


def test_the_compared_plan_is_the_saved_one_for_mixed_dtypes():
    """One bucket per dtype: their bytes do not reveal the cuts in the ready order."""
    dtypes = ("float32", "float64") * 4
    tuning = tune(SLOW, (0.150, 0.110, 0.100), {"default": 0.150, "recommended": 0.120})
    gradients = tuple(replace(g, dtype=dtype) for g, dtype in zip(SLOW.gradients, dtypes, strict=True))
    default = plan_by_cap(gradients, ORDER, MIB)
    raced = tuning.model.build_plan(gradients, (8,), "tuned")
    assert raced.bucket_bytes == (4 * MIB, 4 * MIB)
    said = [{"label": "default", "cuts": list(range(1, 9))}, {"label": "recommended", "cuts": [8]}]
    again = derive_tuning(SETTINGS, tuning.records, gradients, default, said)
    assert again.answer.label == "recommended" and again.answer.plan.buckets == raced.buckets
    assert derive_tuning(SETTINGS, tuning.records, gradients, default).answer.plan.buckets != raced.buckets


def test_a_plan_that_torch_cannot_make_is_not_recommended():
    tuning = tune(SLOW, settings=replace(SETTINGS, wrapper="torch"))
    assert tuning.choice.is_clear
    without = replace(tuning, candidates=tuning.candidates[:1])
    assert without.verdict == "default" and without.answer.label == "default"
    assert "no plan is clearly faster" in describe_answer(without)


def test_changed_predictions_are_detected(tmp_path):
    tuning = tune(SLOW, (0.150, 0.110, 0.100), {"default": 0.150, "recommended": 0.120})
    result = make_result(tuning)
    result.config["predictions"] = tuning.predictions
    folder = result.save(tmp_path / "run")
    (folder / "predictions.json").write_text(render_predictions(tuning.predictions))
    assert any("predictions were saved before the comparison began" in line for line in load_result(folder).findings)
    changed = [one | {"step_s": 2 * one["step_s"]} for one in tuning.predictions]
    (folder / "predictions.json").write_text(render_predictions(changed))
    assert any("one of the two was changed" in line for line in load_result(folder).findings)


@pytest.mark.parametrize("takes_lists", [True, False])
def test_an_unconfirmed_prediction(takes_lists):
    tuning = tune(SLOW, settings=replace(SETTINGS, takes_lists=takes_lists))
    answer = describe_answer(tuning)
    assert answer.endswith(f"predicted {tuning.choice.gain:.1%} faster than the default; no plan was run")
    assert answer.startswith("use bucket size ") == (tuning.choice.best.cap_bytes > 0)
    assert describe_answer(tune(FREE)).startswith("flat: keep the default (8 buckets): ")
    assert takes_lists or tuning.choice.best.cap_bytes > 0
    assert describe_errors(tuning) == []
    assert len(tuning.points) >= 4 and tuning.measured == []
    result = make_result(tuning)
    assert result.gain is None and result.candidates == tuning.points
    row = result.to_json()
    missing = ("mape", "max_error", "regret", "best_measured_cap_bytes", "plan_measured_s", "default_measured_s")
    assert set(row) >= JSON_KEYS and all(row[key] is None for key in missing)
    assert {point["source"] for point in row["grid"]} == {"simulated"}


def test_a_row_has_every_key_and_the_tunings_numbers():
    confirmed = {"default": 0.150, "recommended": 0.120, "cap 8 MiB": 0.130}
    tuning = tune(SLOW, (0.150, 0.110, 0.100), confirmed)
    result = make_result(tuning)
    result.folder = Path("a")
    row = json.loads(json.dumps(result.to_json()))
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
    assert (row["plan"], row["verdict"], row["answer"]) == ("a/plan.json", "use", result.answer)
    assert row["best_measured_cap_bytes"] == 8 * MIB
    assert (row["plan_measured_s"], row["default_measured_s"]) == pytest.approx((0.120, 0.150))
    assert (row["regret"], row["regret_high"], row["is_predicted"]) == (0.0, 0.0, False)
    assert row["gain"] == pytest.approx(0.2, abs=0.01) and row["gain_low"] < row["gain"] < row["gain_high"]


def test_errors_in_words_name_a_layout_that_is_not_the_simulated_one():
    tuning = tune(SLOW, (0.150, 0.110, 0.100))
    (line,) = describe_errors(tuning)
    assert f"off by {tuning.scores['mape']:.1%} on average" in line and "rank correlation 0.33" in line
    exact = replace(tuning)
    vars(exact)["scores"] = tuning.scores | {"coverage": 1.0}
    assert "; 100% of the measured points" in describe_errors(exact)[0]
    points = list(tuning.points)
    points[1] = replace(points[1], measured=replace(points[1].measured, bucket_bytes=(8 * MIB,)))
    lines = describe_errors(replace(tuning, points=tuple(points)))
    (line,) = describe_errors(tune(SLOW, (0.150,)))
    assert "rank correlation unknown" in line and "nan" not in line
    assert lines[1:] == ["the wrapper's buckets differ from the simulation at 4 MiB"]


def test_a_step_that_is_faster_with_communication_is_noise_not_a_gain():
    tuning = tune(SLOW, (0.060, 0.150, 0.160))  # a plain step takes 70 ms
    grid, _ = make_result(tuning).tables()
    cells = [line.split(" | ") for line in grid.markdown().splitlines()]
    place = cells[0].index("measured exposed (ms)")
    assert [row[place] for row in cells[2:]] == ["within the noise", "80.0", "90.0"]
    assert [point["measured_exposed_s"] for point in grid.rows_json()] == pytest.approx([-0.010, 0.080, 0.090])
    assert "exposed communication is off by " in describe_errors(tuning)[0]
    (line,) = describe_errors(tune(FREE, (0.070, 0.071, 0.069), spread=NOISY))
    assert "exposed communication is within the noise; " in line and "of a step" not in line


def test_a_tuning_on_a_busy_machine_says_that_nothing_can_be_concluded():
    busy = make_result(tune(SLOW, (0.150, 0.110, 0.100), spread=(0.3, 1.0, 1.9, 0.4, 1.7)))
    doubts = find_doubts(busy.records, replace(busy.run.environment, cores=2))
    assert "3 of 3 variants of the step are unstable" in doubts[0].text  # the calibration steps are steady
    assert "nothing can be concluded" in doubts[0].text and len(busy.noise) > 0


def test_the_comparison_allows_for_a_busy_machine():
    spread, times_s = (0.3, 1.0, 1.9, 0.4, 1.7), (0.150, 0.110, 0.100)
    decided = make_result(tune(SLOW, times_s, {"default": 9.0, "recommended": 0.120}, spread=spread))
    doubts = find_doubts(decided.records, replace(decided.run.environment, cores=2))
    assert "3 of 3 variants of the step are unstable" in doubts[0].text, "not the plans of the race"
    assert "plan comparisons allow for the noise" in doubts[0].text
    assert decided.verdict == "use" and decided.noise == []
    undecided = make_result(tune(SLOW, times_s, {"default": 0.121, "recommended": 0.120}, spread=spread))
    assert undecided.verdict == "undecided" and undecided.noise == [undecided.answer]


def test_tables_show_every_point_and_every_bucket():
    tuning = tune(SLOW, (0.150, 0.110))
    grid, buckets = make_result(tuning).tables()
    assert (grid.name, buckets.name) == ("grid", "buckets")
    text = grid.markdown()
    assert "| 1 MiB" in text and "| 4 MiB" in text and text.count("measured |") == 2
    count = len(tuning.answer.step.buckets)
    assert len(buckets.rows_json()) == count and buckets.markdown().count("simulated") == count
    assert set(buckets.rows_json()[0]) == {
        "bucket", "num_bytes", "ready_s", "launch_s", "start_s", "done_s", "source",
    }  # fmt: skip
    assert grid.rows_json()[0]["measured_s"] == pytest.approx(0.150)


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_cuts_no_size_and_no_number(width):
    confirmed = {"default": 0.150, "recommended": 0.120, "cap 8 MiB": 0.130}
    result = make_result(tune(SLOW, (0.150, 0.110, 0.100), confirmed))
    text = result.text(width, details=True)
    assert max(map(len, text.splitlines())) <= width and "…" not in text
    lines = [line.split() for line in result.table("grid").terminal(width).splitlines()]
    for size, predicted, measured in (("1", 0, "150"), ("4", 1, "110"), ("8", 2, "100")):
        (line,) = (cells for cells in lines if cells[:2] == [size, "MiB"])
        assert measured in line and format_ms(result.candidates[predicted].step_s) in line
    for bucket, line in zip(
        result.table("buckets").rows_json(), result.table("buckets").terminal(width).splitlines()[3:], strict=False
    ):
        assert line.split()[0] == str(bucket["bucket"]) and format_ms(bucket["done_s"]) in line


def test_the_next_command_has_the_options_of_the_job():
    tuning = tune(SLOW, (0.150, 0.110, 0.100), {"default": 0.150, "recommended": 0.120})
    assert make_result(tuning).next_steps == ("paceline.DDP(model, plan=result.plan)",)
    result = make_result(tuning, data="synthetic", hidden=2048, channels=[2, 4], backend="gloo", batch_size=4)
    result.folder = Path("a")
    job = "--model made --batch-size 4 --backend gloo --channels 2 4 --hidden 2048"
    assert result.next_steps == (f"paceline train {job} --ranks 2 --plan a/plan.json",)
    times_s = {"default": 0.150, "recommended": 0.149}
    noisy = tune(SLOW, (0.150, 0.149), times_s, NOISY, settings=replace(SETTINGS, strategies=("all",)))
    result = make_result(noisy, data="synthetic")
    result.folder = Path("a")
    assert result.verdict == "undecided" and "--ranks 2 --strategy all --budget " in result.next_steps[0]


@pytest.mark.parametrize("grid_s", [(), (0.150, 0.110, 0.100)])
def test_the_picture_has_predicted_and_measured(grid_s):
    tuning = tune(SLOW, grid_s)
    figure = plot_tuning(tuning, "Step time against bucket size", "a box")
    labels = set(figure.axes[0].get_legend_handles_labels()[1])
    drawn = {"predicted for every bucket size", "90 % interval", "best predicted", "without communication"}
    seen = {"measured: median, p10 to p90", "best measured"}
    assert drawn <= labels and (seen <= labels) == bool(grid_s)
    assert render_png(figure).startswith(b"\x89PNG")
    assert ("points are measured" if grid_s else "points are simulated") in render_svg(figure).decode()


@pytest.mark.parametrize("caps", [(25,), (1, 25), (1, 4, 8)])
def test_the_curve_reaches_the_best_size_even_beyond_the_model(caps):
    tuning = tune(SLOW)
    points = tuple(replace(point, cap_bytes=cap * MIB) for point, cap in zip(tuning.points, caps, strict=False))
    figure = plot_tuning(replace(tuning, points=points), "title", "a box")
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    curve, best = lines["predicted for every bucket size"].get_xdata(), lines["best predicted"].get_xdata()
    assert min(curve) <= caps[0] and max(curve) >= caps[-1] and best[0] in caps


def test_confirmation_does_not_change_the_plan():
    job = SLOW
    default = plan_by_cap(job.gradients, ORDER, MIB)
    records = job.build_calibration()
    later = [*records, job.build_plan_step("cap", (9.0,) * 5, cap_bytes=MIB)]
    first, again = (derive_tuning(SETTINGS, r, job.gradients, default) for r in (records, later))
    plan = first.candidates[1].plan
    assert (first.choice, plan) == (again.choice, again.candidates[1].plan)
    assert plan.rule.startswith("tuned: ") and plan.gradients == job.gradients


def test_the_predicted_gain_is_that_of_the_best_plan_whether_it_ran_or_not():
    before = tune(SLOW)
    after = tune(SLOW, (0.150, 0.110, 0.100), {"default": 0.150, "cap 8 MiB": 0.100})
    assert before.predicted_gain == before.choice.gain > after.choice.gain
    assert make_result(after).to_json()["predicted_gain"] == after.predicted_gain == before.predicted_gain


def test_the_emulated_network_determines_the_cost_of_messages():
    settings = replace(SETTINGS, network="1gbe", network_ranks=4)
    settings.check(ranks=1)
    for ranks, others in ((2, settings), (1, replace(settings, network_ranks=1)), (1, SETTINGS)):
        with pytest.raises(ConfigError) as caught:
            others.check(ranks)
        assert caught.value.code == "ranks"
    tuning = tune(SLOW, settings=settings)
    one = tuning.model.predict(tuning.model.job.cut(8 * MIB))
    # A ring of four at 1 Gb/s: each byte crosses the link 1.5 times.
    assert one.exposed_s > 1.5 * 8 * MIB / 125e6


def test_a_saved_run_gives_the_same_answer(tmp_path):
    confirmed = {"default": 0.150, "recommended": 0.120, "cap 8 MiB": 0.130}
    result = make_result(tune(SLOW, (0.150, 0.110, 0.100), confirmed))
    again = load_result(result.save(tmp_path / "run"))
    assert isinstance(again, TuneResult) and again.to_json() == result.to_json()
    assert (again.plan, again.verdict, again.gain) == (result.plan, "use", result.gain)


# One for each machine, wrapper and kind of network; the others are similar.
OFTEN = ("tune-gpt2-large-emulated", "tune-1Gb-link-torch", "cnn-gloo", "mlp-paceline", "gpt2-mini-1Gb-8-ranks-torch")
STORED = sorted(path.parent for path in RESULTS.rglob("plan.json"))


@pytest.mark.parametrize(
    "folder",
    [pytest.param(path, marks=() if path.name in OFTEN else pytest.mark.slow, id=path.name) for path in STORED],
)
def test_every_stored_tuning_still_answers(folder):
    result = load_result(folder)
    assert isinstance(result, TuneResult) and result.verdict in VERDICTS
    grid = [r for r in result.records if isinstance(r, StepRecord) and r.role == "job" and not r.note]
    assert [point.measured for point in result.candidates] == grid and len(grid) >= 2
    assert result.plan.num_bytes == result.tuning.candidates[0].plan.num_bytes


def test_rounds_that_show_nothing_are_flat_where_communication_adds_nothing():
    times_s = {"default": 0.070, "cap 8 MiB": 0.0701}
    tuning = tune(FREE, (0.070, 0.071, 0.070), times_s, NOISY)
    assert tuning.race.limit.is_nothing and tuning.verdict == "flat" and not tuning.race.is_level
    assert describe_answer(tuning).startswith(f"flat: {tuning.race.limit} (predicted, ")
    assert tune(SLOW, (0.070, 0.071, 0.070), times_s, NOISY).verdict == "undecided"
