"""Epochs from rows of metrics: averages that weigh every sample alike, and the table, the rows and the picture."""

import json
import math

import pytest

from paceline.records.training import summarize_epochs
from paceline.report.tables import render_csv, render_markdown
from paceline.report.training import epoch_row, epoch_table, plot_training


def build_row(step, epoch=0, **changes):
    fields = {
        "step": step, "epoch": epoch, "loss": 2.0, "accuracy": 0.5, "samples": 12, "lr": 0.1, "step_s": 0.5,
        "exposed_comm_s": 0.1, "data_wait_s": 0.05,
    }  # fmt: skip
    return {**fields, **changes}


ROWS = [
    build_row(1, loss=3.0, accuracy=0.25, exposed_comm_s=None),
    build_row(2, loss=1.0, accuracy=0.5),
    build_row(3, loss=13.0, accuracy=1.0, samples=1, test_loss=1.5, test_accuracy=0.4, test_samples=40),
    build_row(4, 1, loss=0.5, test_loss=1.25, test_accuracy=0.6, test_samples=40),
]


def test_averages_weigh_every_sample_alike():
    """The tail of one sample with its large loss counts as one, not as a third."""
    first, second = summarize_epochs(ROWS)
    assert (first.epoch, first.num_steps, first.num_samples) == (0, 3, 25)
    assert first.loss == pytest.approx((12 * 3 + 12 * 1 + 13) / 25)
    assert first.accuracy == pytest.approx((12 * 0.25 + 12 * 0.5 + 1) / 25)
    assert (first.test_loss, first.test_accuracy) == (1.5, 0.4)
    assert (second.epoch, second.num_steps, second.loss) == (1, 1, 0.5)


def test_times_add_up_and_steps_that_were_not_timed_are_taken_as_the_others():
    first, _ = summarize_epochs(ROWS)
    assert first.seconds == pytest.approx(1.5)
    assert first.samples_per_s == pytest.approx(25 / 1.5)
    assert first.exposed_comm_s == pytest.approx(0.3)
    assert first.exposed_share == pytest.approx(0.2)
    assert first.data_wait_share == pytest.approx(0.1)


def test_what_was_not_measured_is_none():
    (epoch,) = summarize_epochs([build_row(1, accuracy=None, exposed_comm_s=None)])
    assert (epoch.accuracy, epoch.exposed_comm_s, epoch.exposed_share) == (None, None, None)
    assert (epoch.test_loss, epoch.test_accuracy) == (None, None)


def test_rows_in_any_order_of_epochs_and_none_at_all():
    assert [epoch.epoch for epoch in summarize_epochs([build_row(4, 1), build_row(1, 0)])] == [0, 1]
    assert summarize_epochs([]) == []


def test_no_time_is_no_rate():
    (epoch,) = summarize_epochs([build_row(1, step_s=0.0)])
    assert (epoch.samples_per_s, epoch.exposed_share, epoch.data_wait_share) == (0.0, None, 0.0)


@pytest.mark.parametrize("loss", [None, math.nan])
def test_a_loss_that_is_no_number_is_valid_json(loss):
    (epoch,) = summarize_epochs([build_row(1, loss=loss), build_row(2)])
    assert math.isnan(epoch.loss)
    assert json.loads(json.dumps(epoch_row(epoch), allow_nan=False))["loss"] is None


def test_the_table_and_the_rows_count_epochs_from_1():
    epochs = summarize_epochs(ROWS)
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
        (ROWS, ["training loss", "test loss", "test accuracy"]),
        (ROWS[:2], ["training loss"]),
        ([ROWS[0], {**ROWS[2], "test_accuracy": None}], ["training loss", "test loss"]),
        ([{**ROWS[0], "loss": math.nan}, ROWS[2]], ["training loss", "test loss", "test accuracy"]),
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
