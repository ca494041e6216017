"""Tables, rows and pictures of the epochs of training."""

import json
import math

import pytest

from paceline.records.training import summarize_epochs
from paceline.report.tables import render_csv, render_markdown
from paceline.report.training import epoch_row, epoch_table, plot_training

from .made_training import EPOCH_ROWS, build_epoch_row


def test_the_table_and_the_rows_count_epochs_from_1():
    epochs = summarize_epochs(EPOCH_ROWS)
    rows = [epoch_row(epoch) for epoch in epochs]
    assert [row["epoch"] for row in rows] == [1, 2]
    assert rows[0]["exposed_share"] == pytest.approx(0.2)
    text = render_markdown(epoch_table, epochs)
    assert "40.0%" in text and "60.0%" in text and "20.0%" in text and "2.4400" in text
    head, *lines = render_csv(rows).splitlines()
    assert head.split(",")[:3] == ["epoch", "steps", "samples"]
    assert [line.split(",")[2] for line in lines] == ["25", "12"]


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
    assert [text.get_text() for text in main.get_legend().get_texts()] == labels
    line = main.get_lines()[0]
    assert list(line.get_xdata()) == [row["step"] for row in rows]
    assert list(line.get_ydata()) == pytest.approx([row["loss"] for row in rows], nan_ok=True)
    if beside:
        tested = [row for row in rows if "test_accuracy" in row]
        assert list(beside[0].get_lines()[0].get_ydata()) == [100 * row["test_accuracy"] for row in tested]


@pytest.mark.parametrize("loss", [None, math.nan])
def test_a_loss_that_is_no_number_is_valid_json(loss):
    (epoch,) = summarize_epochs([build_epoch_row(1, loss=loss), build_epoch_row(2)])
    assert math.isnan(epoch.loss)
    assert json.loads(json.dumps(epoch_row(epoch), allow_nan=False))["loss"] is None
