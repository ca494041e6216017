"""What the runs of a large-batch study say together: mean and spread over seeds, and the distance to the baseline.

Nothing here trains or prints.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import RecordError
from paceline.records.scaling import LargeBatchRecord

__all__ = ["RecipeSummary", "Spread", "summarize_recipes"]


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (of a sample) over seeds; None for the deviation of one seed."""

    mean: float
    deviation: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class RecipeSummary:
    """All seeds of one recipe at one global batch size. `baseline` is the summary that it is held against."""

    runs: tuple[LargeBatchRecord, ...]
    baseline: RecipeSummary | None = None

    def __post_init__(self) -> None:
        if len({run.cell for run in self.runs}) != 1:
            raise RecordError("runs of several cells in one summary")
        if len({run.seed for run in self.runs}) != len(self.runs):
            raise RecordError(f"{self.first.recipe} at {self.first.global_batch_size}: a seed is there twice")

    @property
    def first(self) -> LargeBatchRecord:
        return self.runs[0]

    @property
    def finished(self) -> list[LargeBatchRecord]:
        return [run for run in self.runs if not run.failure]

    @property
    def num_failed(self) -> int:
        return len(self.runs) - len(self.finished)

    @property
    def accuracy(self) -> Spread | None:
        return self._spread("test_accuracy")

    @property
    def test_loss(self) -> Spread | None:
        return self._spread("test_loss")

    @property
    def train_loss(self) -> Spread | None:
        return self._spread("train_loss")

    def _spread(self, name: str) -> Spread | None:
        values = [getattr(run, name) for run in self.finished]
        return Spread.of(values) if values else None

    @property
    def gap(self) -> float | None:
        """The baseline's mean test accuracy minus this one's: what the batch size costs, in shares of 1."""
        if self.baseline is None or self.baseline.accuracy is None or self.accuracy is None:
            return None
        return self.baseline.accuracy.mean - self.accuracy.mean


def summarize_recipes(records: Sequence[LargeBatchRecord]) -> list[RecipeSummary]:
    """A summary for each cell, in the order of first appearance; the baseline of a budget is its smallest batch without
    a recipe."""
    cells: dict[tuple[str, int, str], list[LargeBatchRecord]] = {}
    for record in records:
        cells.setdefault(record.cell, []).append(record)
    found = {cell: RecipeSummary(tuple(runs)) for cell, runs in cells.items()}
    summaries = []
    for (budget, size, recipe), summary in found.items():
        plain = [key for key in found if key[0] == budget and key[2] == "none"]
        base = min(plain, key=lambda key: key[1], default=None)
        is_base = base is None or base == (budget, size, recipe)
        summaries.append(summary if is_base else RecipeSummary(summary.runs, found[base]))  # type: ignore[index]
    return summaries
