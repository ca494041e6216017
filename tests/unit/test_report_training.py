"""Tables, rows and figures of training epochs."""

import json
import math
import re
from dataclasses import replace

import pytest

from paceline.errors import ConfigError, RecordError
from paceline.records.environment import capture_environment
from paceline.records.store import Run
from paceline.report.compared import TrainComparisonResult, list_differences
from paceline.report.result import Result, load_result
from paceline.report.training_result import TrainRunResult, plot_training
from paceline.training.train_settings import TrainSettings

from .made_training import EPOCH_ROWS, build_epoch_row


def build_run(rows, load=0.0, **config):
    environment = replace(capture_environment(), load_average=load, cores=2)
    settings = TrainSettings(ranks=2, epochs=2).to_json()
    return TrainRunResult(Run("train", settings | config, environment, ()), rows=rows)


def test_the_table_and_the_rows_count_epochs_from_1():
    result = build_run(EPOCH_ROWS)
    rows = result.to_json()["epochs"]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[0]["exposed_share"] == pytest.approx(0.2)
    text = result.table().markdown()
    assert "40.0%" in text and "60.0%" in text and "20.0%" in text and "2.4400" in text
    head, *lines = result.table().csv().splitlines()
    assert head.split(",")[:3] == ["epoch", "steps", "samples"]
    assert [line.split(",")[2] for line in lines] == ["25", "12"]
    assert len(max(result.text(80).splitlines(), key=len)) <= 80


def test_the_answer_is_of_the_whole_run():
    answer = build_run(EPOCH_ROWS, outcome={"steps": 4, "world_size": 2}).answer
    assert "loss 0.5, test accuracy 60.0% after 2 epochs on 2 ranks" in answer and "not finished" not in answer
    assert "exposed communication" in answer and "data wait" in answer
    assert "not finished" in build_run(EPOCH_ROWS).answer
    assert build_run([]).answer == "No steps were taken."


def test_the_times_of_a_busy_machine_are_doubted_also_from_disk(tmp_path):
    result = build_run(EPOCH_ROWS, load=16.0)
    (warning,) = result.warnings
    assert warning.startswith("the machine was busy before the run (load 16.0 on 2 cores)") and warning in result.text(
        None
    )
    assert result.to_json()["warnings"] == [warning] and not build_run(EPOCH_ROWS).warnings
    assert load_result(result.save(tmp_path / "run")).warnings == (warning,)


def test_faults_are_named_except_one_that_ended_the_run():
    ones = [("restart", n, 10 * n) for n in range(1, 6)] + [("restart", None, None), ("stop", 1, 60)]
    faults = [
        {"policy": policy, "rank": rank, "step": step, "recovered_s": None if rank == 2 else 0.25, "steps_lost": rank}
        for policy, rank, step in ones
    ]
    (line,) = build_run(EPOCH_ROWS, faults=faults)._describe_faults()
    listed = "rank 1 in step 10 (restart), rank 2 in step 20 (restart), rank 3 in step 30 (restart) and 3 more"
    assert line == f"Recovered from 6 faults in 1.2 s and repeated 15 steps: {listed}."
    assert not build_run(EPOCH_ROWS, faults=faults[-1:])._describe_faults()
    (line,) = build_run(EPOCH_ROWS, faults=faults[-2:])._describe_faults()
    assert line.endswith("steps: all ranks before the first step (restart).")


def test_a_run_that_wrote_nothing_can_be_saved_and_loaded(tmp_path):
    faults = [{"rank": 1, "step": 3, "policy": "spare", "recovered_s": 0.5}]
    result = build_run(EPOCH_ROWS, outcome={"steps": 4, "world_size": 2, "backend": "gloo"}, faults=faults)
    result.save(tmp_path / "run")
    again = load_result(tmp_path / "run")
    assert again.to_json()["faults"] == faults
    line = "Recovered from 1 fault in 0.5 s and repeated 0 steps: rank 1 in step 3 (spare)."
    assert line in again.findings and line in " ".join(again.text(80, details=True).split())
    assert isinstance(again, TrainRunResult) and list(again.rows) == list(EPOCH_ROWS) and again.finished
    assert again.answer == result.answer and again.to_json() == result.to_json()
    assert {"table.md", "table.csv", "training.png"} <= {path.name for path in (tmp_path / "run").iterdir()}
    with pytest.raises(RecordError) as caught:
        build_run(EPOCH_ROWS).save(tmp_path / "run")
    assert caught.value.code == "exists"


@pytest.mark.parametrize(
    ("rows", "labels"),
    [
        (EPOCH_ROWS, ["training loss", "test loss", "test accuracy"]),
        (EPOCH_ROWS[:2], ["training loss"]),
        ([EPOCH_ROWS[0], {**EPOCH_ROWS[2], "test_accuracy": None}], ["training loss", "test loss"]),
        ([{**EPOCH_ROWS[0], "loss": math.nan}, EPOCH_ROWS[2]], ["training loss", "test loss", "test accuracy"]),
    ],
    ids=["all", "untested", "numbers", "nan"],
)
def test_the_picture_shows_the_available_data(rows, labels):
    figure = plot_training(rows, "a run", "a machine")
    main, *right = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
    line = main.get_lines()[0]
    assert list(line.get_xdata()) == [row["step"] for row in rows]
    assert list(line.get_ydata()) == pytest.approx([row["loss"] for row in rows], nan_ok=True)
    if right:
        tested = [row for row in rows if "test_accuracy" in row]
        assert list(right[0].get_lines()[0].get_ydata()) == [100 * row["test_accuracy"] for row in tested]


@pytest.mark.parametrize("loss", [None, math.nan])
def test_a_nan_loss_is_valid_json(loss):
    result = build_run([build_epoch_row(1, loss=loss), build_epoch_row(2)])
    assert math.isnan(result.epochs[0].loss)
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["epochs"][0]["loss"] is None


def test_the_findings_have_the_time_of_all_steps_and_of_each_rank():
    rows = [row | {"step_s": 0.5, "ranks": {"step_s": [0.5, 0.25]}} for row in EPOCH_ROWS]
    (line,) = build_run(rows).findings
    assert re.findall(r"[\d.]+ s\b", line) == [f"{0.5 * len(rows):.2f} s", "0.5000 s", "0.2500 s"]


def build_curve(ranks, step_s, change=0.0, **last):
    """A finished run of four steps; the losses of the last two differ by the fraction `change`."""
    rows = [
        build_epoch_row(step, loss=2.0 * (1 + (change if step > 2 else 0.0)), step_s=step_s) for step in (1, 2, 3, 4)
    ]
    rows[-1] |= {"test_loss": 1.5, "test_accuracy": 0.7, "test_samples": 40} | last
    return build_run(rows, ranks=ranks, outcome={"steps": 4, "world_size": ranks})


def compare(*runs):
    return TrainComparisonResult.of(runs, capture_environment())


def test_runs_are_compared_with_the_first():
    result = compare(build_curve(1, 0.6, test_f1=0.8), build_curve(2, 0.4, 0.005, test_f1=0.81), build_curve(4, 0.3))
    document = result.to_json()
    rows = document["runs"]
    names = ("1 rank", 1), ("2 ranks", 2), ("4 ranks", 4)
    assert [(row["run"], row["ranks"], row["steps"]) for row in rows] == [(*name, 4) for name in names]
    assert [row["speed_up"] for row in rows] == pytest.approx([1.0, 1.5, 2.0])
    assert [row["largest_difference"] for row in rows] == pytest.approx([0.0, 0.005, 0.0])
    assert [row["test_f1"] for row in rows] == [0.8, 0.81, None]
    assert (rows[0]["seconds"], rows[0]["samples_per_s"]) == pytest.approx((2.4, 20.0))
    assert document["learned_the_same"] and document["settings_that_differ"] == {}
    assert result.answer.startswith("The losses of 1 rank, 2 ranks and 4 ranks agree in every step, within ")
    assert "2 ranks 1.50, 4 ranks 2.00 times that of 1 rank" in result.answer
    assert "F1" not in result.answer  # not available for every run
    assert len(max(result.text(80).splitlines(), key=len)) <= 80


def test_a_superlinear_speed_up_is_doubted():
    assert compare(build_curve(1, 0.6), build_curve(2, 0.3)).warnings == ()
    (warning,) = compare(build_curve(1, 0.6), build_curve(2, 0.2)).warnings
    assert warning.startswith("2 ranks: 3.00 times as fast")
    # then the number of ranks makes the difference
    assert compare(build_curve(2, 0.6), build_curve(1, 0.2)).warnings == ()


def test_runs_that_diverge_report_where_they_diverge():
    result = compare(build_curve(1, 0.5), build_curve(2, 0.5, 0.02))
    text = "The losses of 1 rank and 2 ranks agree for 2 of 4 steps; after that, "
    text += "the loss of a step differs by up to 2.0%."
    assert not result.learned_the_same and result.answer.startswith(text)
    assert not compare(build_curve(1, 0.5), build_curve(2, 0.5, math.nan)).learned_the_same
    other = build_curve(2, 0.5)
    doubled = [row | {"loss": 2 * row["loss"]} for row in other.rows]
    result = compare(build_curve(1, 0.5), TrainRunResult(other.run, rows=doubled))
    assert "differ from the first step onward; the loss of a step differs by up to 100.0%" in result.answer


def test_a_comparison_names_what_differs_and_what_is_unfinished():
    one, other = build_curve(2, 0.5), build_curve(2, 0.5)
    other.config.update(wrapper="torch", channels=[4], outcome=None)
    one.config.update(channels=(4,))  # the same, as JSON stores it
    again = TrainRunResult(other.run, rows=other.rows)
    result = compare(one, again)
    assert result.differences == {"wrapper": ["paceline", "torch"]}
    assert [row.name for row in result.rows] == ["run 1", "run 2"]
    assert result.warnings == ("run 2: the run is not finished",)


@pytest.mark.parametrize(
    ("first", "second", "differs"),
    [
        ({"augment": None}, {"augment": False}, True),  # None means on for some datasets
        ({"cutout": 0}, {"cutout": 0}, False),
        ({"cutout": 0}, {"cutout": 8}, True),
        ({"channels": [4]}, {"channels": (4,)}, False),  # the same in JSON
    ],
)
def test_settings_differ_where_their_json_does(first, second, differs):
    assert bool(list_differences([first, second], but=())) == differs


def test_the_number_of_ranks_explains_nothing_where_it_is_the_same_or_more_differs():
    for ranks, lr, is_explained in ((2, 0.05, True), (1, 0.05, False), (2, 0.5, False)):
        other = build_curve(ranks, 0.5, 0.2)
        other.config.update(lr=lr)
        assert ("rounding" in " ".join(compare(build_curve(1, 0.5), other).findings)) == is_explained


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_runs_without_a_loss_are_compared_by_their_other_steps(loss):
    one, other = build_curve(1, 0.5), build_curve(2, 0.5)
    gone = TrainRunResult(other.run, rows=[*other.rows[:3], other.rows[3] | {"loss": loss}])
    for result in (compare(one, gone), compare(gone, one)):
        assert "agree for 3 of 4 steps; after that, one of the runs has a loss that is not finite" in result.answer
        assert "inf" not in result.text(80) and "nan" not in result.text(80)
        json.dumps(result.to_json(), allow_nan=False)


def test_a_comparison_saves_its_runs_and_can_be_moved(tmp_path):
    result = compare(build_curve(1, 0.5), build_curve(2, 0.25))
    result.save(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    again = load_result(tmp_path / "there")
    assert isinstance(again, TrainComparisonResult) and again.answer == result.answer
    assert again.to_json()["runs"] == result.to_json()["runs"]
    names = {path.name for path in (tmp_path / "there").iterdir()}
    assert names == {"run.json", "comparison.md", "comparison.csv", "losses.png", "losses.svg", "run-1", "run-2",
                     "numbers.md", "numbers.csv"}  # fmt: skip


def test_the_losses_of_all_runs_are_on_one_axis():
    figure = compare(build_curve(1, 0.5), build_curve(2, 0.5, 0.1)).figure()
    (axes,) = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "1 rank: training loss", "1 rank: test loss", "2 ranks: training loss", "2 ranks: test loss",
    ]  # fmt: skip
    assert list(axes.get_lines()[2].get_ydata()) == pytest.approx([2.0, 2.0, 2.2, 2.2])


@pytest.mark.parametrize("other", [build_run([]), Result(Run("bench allreduce", {}, capture_environment(), ()))])
def test_runs_without_steps_are_not_compared(other):
    with pytest.raises(ConfigError) as caught:
        compare(build_curve(1, 0.5), other)
    assert caught.value.code == "mismatch"
