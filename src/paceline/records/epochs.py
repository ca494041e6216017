"""Epochs of a training run, summed up from its rows of metrics: every number here is derived, none is stored.

How rows come about is in `training.journal`; how a table looks is in `report`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["EpochSummary", "summarize_epochs"]


@dataclass(frozen=True)
class EpochSummary:
    """One epoch of training. Averages weigh every sample alike; `None` is what was not measured."""

    epoch: int
    num_steps: int
    num_samples: int
    loss: float
    accuracy: float | None
    test_loss: float | None
    test_accuracy: float | None
    seconds: float
    exposed_comm_s: float | None
    data_wait_s: float

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.seconds if self.seconds else 0.0

    @property
    def exposed_share(self) -> float | None:
        """Exposed communication as a share of the epoch's steps."""
        return None if self.exposed_comm_s is None or not self.seconds else self.exposed_comm_s / self.seconds

    @property
    def data_wait_share(self) -> float:
        return self.data_wait_s / self.seconds if self.seconds else 0.0


def summarize_epochs(rows: Iterable[dict[str, Any]]) -> list[EpochSummary]:
    """The epochs that the rows belong to, in order; `loss` is the average of the steps, weighted by samples."""
    by_epoch: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_epoch.setdefault(row["epoch"], []).append(row)
    return [_summarize(epoch, found) for epoch, found in sorted(by_epoch.items())]


def _summarize(epoch: int, rows: Sequence[dict[str, Any]]) -> EpochSummary:
    samples = sum(row["samples"] for row in rows)
    # A wrapper does not know it of its first step, in which it makes its plan.
    exposed = [row["exposed_comm_s"] for row in rows if row["exposed_comm_s"] is not None]
    last = rows[-1]
    return EpochSummary(
        epoch=epoch,
        num_steps=len(rows),
        num_samples=samples,
        loss=sum((float("nan") if row["loss"] is None else row["loss"]) * row["samples"] for row in rows) / samples,
        accuracy=None
        if any(row.get("accuracy") is None for row in rows)
        else sum(row["accuracy"] * row["samples"] for row in rows) / samples,
        test_loss=last.get("test_loss"),
        test_accuracy=last.get("test_accuracy"),
        seconds=sum(row["step_s"] for row in rows),
        exposed_comm_s=sum(exposed) / len(exposed) * len(rows) if exposed else None,
        data_wait_s=sum(row["data_wait_s"] for row in rows),
    )
