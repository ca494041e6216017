"""Predicted steps on more ranks next to the measured ones, as a table. The predictions are simulated, and marked so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.predict.scaling import PredictedPoint
from paceline.records.steps import ScalePoint
from paceline.report.tables import Column
from paceline.units import format_ms


@dataclass(frozen=True)
class PredictedLine:
    """A prediction, and the point that was measured there, where one was."""

    predicted: PredictedPoint
    point: ScalePoint | None

    @property
    def error(self) -> float | None:
        """PredictedPoint step over the measured, minus 1."""
        if self.point is None:
            return None
        return self.predicted.step_s / self.point.record.timing.median_s - 1

    @property
    def is_covered(self) -> bool | None:
        """Whether the measured step lies in the predicted interval."""
        if self.point is None:
            return None
        return self.predicted.low_s <= self.point.record.timing.median_s <= self.predicted.high_s

    @property
    def efficiency_band(self) -> tuple[float, float]:
        """The efficiency by the slowest and by the quickest step of the interval."""
        ideal_s = self.predicted.efficiency * self.predicted.step_s
        return ideal_s / self.predicted.high_s, ideal_s / self.predicted.low_s

    @property
    def speedup_band(self) -> tuple[float, float]:
        low, high = self.efficiency_band
        return low * self.predicted.world_size, high * self.predicted.world_size


def match_predictions(predicted: Sequence[PredictedPoint], points: Sequence[ScalePoint]) -> list[PredictedLine]:
    """Each prediction in the given order, with what was measured for the same variant, cell and ranks."""
    known = {(p.record.variant, p.record.cell, p.record.world_size): p for p in points}
    return [PredictedLine(p, known.get((p.variant, (p.mode, p.cell_size), p.world_size))) for p in predicted]


def _measured(line: PredictedLine) -> str:
    return "" if line.point is None else format_ms(line.point.record.timing.median_s)


def _sources(line: PredictedLine) -> str:
    measured = "" if line.point is None else f" and {line.point.record.source}"
    return f"{line.predicted.source}{measured}{', doubtful' if line.predicted.doubt else ''}"


predicted_table: Sequence[Column] = (
    Column("wrapper", lambda p: p.predicted.variant, False),
    Column("network", lambda p: p.predicted.network, False),
    Column("mode", lambda p: p.predicted.mode, False),
    Column("samples", lambda p: str(p.predicted.cell_size)),
    Column("ranks", lambda p: f"{p.predicted.world_size:,}"),
    Column("predicted step (ms)", lambda p: format_ms(p.predicted.step_s)),
    Column("interval (ms)", lambda p: f"{format_ms(p.predicted.low_s)} to {format_ms(p.predicted.high_s)}"),
    Column("measured step (ms)", _measured),
    Column("error", lambda p: "" if p.error is None else f"{p.error:+.1%}"),
    Column("predicted speed-up", lambda p: f"{p.predicted.speedup:.2f}", is_optional=True),
    Column("predicted efficiency", lambda p: f"{p.predicted.efficiency:.3f}"),
    Column("measured efficiency", lambda p: "" if p.point is None else f"{p.point.efficiency:.3f}"),
    Column("source", _sources, False),
)


def predicted_row(line: PredictedLine) -> dict[str, Any]:
    """One prediction for JSON and CSV; efficiencies and the error are fractions of 1, and what was not measured is
    null. `source` is that of the prediction."""
    predicted, point = line.predicted, line.point
    low, high = line.efficiency_band
    return {
        "contestant": predicted.variant,
        "network": predicted.network,
        "mode": predicted.mode,
        "cell_size": predicted.cell_size,
        "world_size": predicted.world_size,
        "step_s": predicted.step_s,
        "low_s": predicted.low_s,
        "high_s": predicted.high_s,
        "alone_s": predicted.alone_s,
        "speedup": predicted.speedup,
        "efficiency": predicted.efficiency,
        "efficiency_low": low,
        "efficiency_high": high,
        "measured_step_s": point and point.record.timing.median_s,
        "measured_efficiency": point and point.efficiency,
        "measured_source": point and point.record.source,
        "error": line.error,
        "is_covered": line.is_covered,
        "doubt": predicted.doubt,
        "source": predicted.source,
    }
