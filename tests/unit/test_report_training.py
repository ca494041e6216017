"""Tables, rows and pictures of the epochs of training."""

import json
import math

import pytest

from paceline.errors import RecordError
from paceline.records.environment import capture_environment
from paceline.records.store import Run
from paceline.report.result import load_result
from paceline.report.training import TrainRunResult, plot_training
from paceline.training.settings import TrainSettings

from .made_training import EPOCH_ROWS, build_epoch_row


def build_run(rows, **config):
    environment = capture_environment()
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
    assert build_run([]).answer == "No step was taken."


def test_a_run_that_wrote_nothing_can_be_saved_and_loaded(tmp_path):
    result = build_run(EPOCH_ROWS, outcome={"steps": 4, "world_size": 2, "backend": "gloo"})
    result.save(tmp_path / "run")
    again = load_result(tmp_path / "run")
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
def test_the_picture_shows_what_there_is(rows, labels):
    figure = plot_training(rows, "a run", "a machine")
    main, *beside = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
    line = main.get_lines()[0]
    assert list(line.get_xdata()) == [row["step"] for row in rows]
    assert list(line.get_ydata()) == pytest.approx([row["loss"] for row in rows], nan_ok=True)
    if beside:
        tested = [row for row in rows if "test_accuracy" in row]
        assert list(beside[0].get_lines()[0].get_ydata()) == [100 * row["test_accuracy"] for row in tested]


@pytest.mark.parametrize("loss", [None, math.nan])
def test_a_loss_that_is_no_number_is_valid_json(loss):
    result = build_run([build_epoch_row(1, loss=loss), build_epoch_row(2)])
    assert math.isnan(result.epochs[0].loss)
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["epochs"][0]["loss"] is None
