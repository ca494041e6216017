"""What every rank saw in its steps, brought together now and then: rows of metrics, a loss that is no number, a wish.

Ranks meet about four times a second, not in every step, so that small steps do not pay for it. What follows from what
is heard is in `trainer`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.runtime.world import World
from paceline.training.phases import PhaseTimes
from paceline.training.stopping import StopWish

__all__ = ["Heard", "Journal", "StepNote"]

_MEET_EVERY_S, _MOST_STEPS = 0.25, 100


@dataclass
class StepNote:
    """One rank's view of one step. `values` is (loss sum, number of correct targets), on the device at first."""

    step: int
    epoch: int
    num_samples: int
    num_targets: int
    rate: float
    lap: PhaseTimes
    data_wait_s: float
    exposed_s: float | None
    phases: PhaseTimes
    values: torch.Tensor
    has_accuracy: bool
    bad_parameter: str = ""


@dataclass(frozen=True)
class _Told:
    """What one rank tells the others when they meet."""

    rows: tuple[tuple[float, ...], ...]
    exposed: tuple[float | None, ...]
    phases: tuple[dict[str, float], ...]
    bad: tuple[int, str] | None
    signal: int
    wants_save: bool


@dataclass(frozen=True)
class Heard:
    """What all ranks know after a meeting. `bad` is (step, rank, parameter) of the first loss that is no number."""

    rows: tuple[dict[str, Any], ...] = ()
    bad: tuple[int, int, str] | None = None
    signal: int = 0
    wants_save: bool = False


@dataclass
class Journal:
    """Keeps this rank's notes until the ranks meet. `every` is agreed on: it follows from what all have heard."""

    world: World
    wish: StopWish
    every: int = 1
    _notes: list[StepNote] = field(default_factory=list)

    def note(self, note: StepNote) -> None:
        if note.values.device.type == "cuda":
            host = torch.empty_like(note.values, device="cpu", pin_memory=True)
            note.values = host.copy_(note.values, non_blocking=True)
        self._notes.append(note)

    @property
    def is_due(self) -> bool:
        """Whether the ranks meet now; the same on all of them."""
        return len(self._notes) >= self.every

    def meet(self, wants_save: bool) -> Heard:
        """Tell and hear. Rank 0's wish to save counts. Collective: every rank must call this."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the copies to pinned memory are on it
        notes, self._notes = self._notes, []
        mine = self._tell(notes, wants_save)
        told: list[_Told] = self.world.share(mine)
        rows = tuple(_build_row(note, index, told) for index, note in enumerate(notes))
        if rows:
            slowest_s = sum(row["step_s"] for row in rows) / len(rows)
            self.every = max(1, min(_MOST_STEPS, int(_MEET_EVERY_S / max(slowest_s, 1e-6))))
        bad = [(item.bad[0], rank, item.bad[1]) for rank, item in enumerate(told) if item.bad is not None]
        return Heard(
            rows=rows,
            bad=min(bad) if bad else None,
            signal=next((item.signal for item in told if item.signal), 0),
            wants_save=told[0].wants_save,
        )

    def _tell(self, notes: Sequence[StepNote], wants_save: bool) -> _Told:
        rows, bad = [], None
        for note in notes:
            loss_sum, num_correct = note.values.tolist()
            if not math.isfinite(loss_sum) and bad is None:
                bad = note.step, note.bad_parameter
            rows.append((loss_sum, num_correct, note.lap.read()["step"], note.data_wait_s))
        return _Told(
            tuple(rows),
            tuple(note.exposed_s for note in notes),
            tuple(note.phases.read() for note in notes),
            bad,
            self.wish.number,
            wants_save,
        )


def _build_row(note: StepNote, index: int, told: Sequence[_Told]) -> dict[str, Any]:
    """One line of metrics: losses summed over ranks; times of the rank that took longest; exposed on average."""
    rows = [item.rows[index] for item in told]
    exposed = [item.exposed[index] for item in told]
    known = [value for value in exposed if value is not None]
    row: dict[str, Any] = {
        "step": note.step,
        "epoch": note.epoch,
        "loss": sum(row[0] for row in rows) / note.num_targets,
        "accuracy": sum(row[1] for row in rows) / note.num_targets if note.has_accuracy else None,
        "samples": note.num_samples,
        "lr": note.rate,
        "step_s": max(row[2] for row in rows),
        "exposed_comm_s": sum(known) / len(known) if known else None,
        "data_wait_s": max(row[3] for row in rows),
    }
    for phase in told[0].phases[index]:
        row[f"{phase}_s"] = max(item.phases[index][phase] for item in told)
    return row
