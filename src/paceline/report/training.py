"""The table and the picture of a training run, from its rows of metrics. What a row is, is in `training.journal`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.records.training import EpochSummary
from paceline.report.plots import COLORS, new_figure
from paceline.report.tables import Column
from paceline.units import format_speed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["epoch_row", "epoch_table", "plot_training"]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


epoch_table: Sequence[Column] = (
    Column("epoch", lambda e: str(e.epoch + 1)),
    Column("steps", lambda e: str(e.num_steps), is_optional=True),
    Column("loss", lambda e: _loss(e.loss)),
    Column("accuracy", lambda e: _percent(e.accuracy)),
    Column("test loss", lambda e: _loss(e.test_loss)),
    Column("test accuracy", lambda e: _percent(e.test_accuracy)),
    Column("time (s)", lambda e: f"{e.seconds:.2f}"),
    Column("samples/s", lambda e: format_speed(e.samples_per_s)),
    Column("exposed comm", lambda e: _percent(e.exposed_share)),
    Column("data wait", lambda e: _percent(e.data_wait_share), is_optional=True),
)


def epoch_row(epoch: EpochSummary) -> dict[str, Any]:
    """One epoch for JSON and CSV; epochs count from 1, as in the table."""
    return {
        "epoch": epoch.epoch + 1,
        "steps": epoch.num_steps,
        "samples": epoch.num_samples,
        "loss": epoch.loss if epoch.loss == epoch.loss else None,
        "accuracy": epoch.accuracy,
        "test_loss": epoch.test_loss,
        "test_accuracy": epoch.test_accuracy,
        "seconds": epoch.seconds,
        "samples_per_s": epoch.samples_per_s,
        "exposed_comm_s": epoch.exposed_comm_s,
        "exposed_share": epoch.exposed_share,
        "data_wait_s": epoch.data_wait_s,
    }


def plot_training(rows: Sequence[dict[str, Any]], title: str, subtitle: str) -> Figure:
    """The loss of every step, and the test loss and accuracy where they were taken."""
    figure, axes = new_figure(title, f"{subtitle}; measured")
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["loss"] for row in rows], color=COLORS[0], linewidth=0.9, alpha=0.8, label="training loss")
    tested = [row for row in rows if row.get("test_loss") is not None]
    if tested:
        at = [row["step"] for row in tested]
        axes.plot(at, [row["test_loss"] for row in tested], color=COLORS[1], marker="o", label="test loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    if tested and all(row.get("test_accuracy") is not None for row in tested):
        beside = axes.twinx()
        beside.plot(
            [row["step"] for row in tested],
            [100 * row["test_accuracy"] for row in tested],
            color=COLORS[2],
            marker="s",
            linestyle="--",
            label="test accuracy",
        )
        beside.set_ylabel("test accuracy (%)")
        beside.set_ylim(0, 100)
        beside.spines[["top"]].set_visible(False)
        more = beside.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    axes.legend(handles, labels, fontsize=8.5, frameon=False, loc="best")
    return figure
