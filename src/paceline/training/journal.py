"""What a run records while it trains: the steps of all ranks as rows of metrics, and the stop signal.

Ranks exchange what they recorded about four times a second, not in every step, so that short steps do not pay for it.
The file of the rows is in `records.training`.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from paceline.runtime.world import World
    from paceline.training.step import PhaseTimes

# Signals within this time of the first one count as the same request: `timeout` and service managers signal a whole
# process group, and the launcher, which may be slow on a busy machine, passes it on to ranks that already have it.
SAME_SIGNAL_S = 1.0
_EXCHANGE_EVERY_S, _MAX_STEPS = 0.25, 100


@dataclass
class StopRequest:
    """The number of the first signal that arrived; 0 before any."""

    number: int = 0


@contextlib.contextmanager
def catch_stop() -> Iterator[StopRequest]:
    """Record SIGTERM and SIGINT instead of ending the process. A second one acts as it would without this.

    A rank of our own launcher ignores SIGINT, and keeps ignoring it: its parent passes the request on as SIGTERM.
    """
    request, arrived_s = StopRequest(), 0.0
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.getsignal(number) for number in numbers}

    def record(number: int, frame: FrameType | None) -> None:
        nonlocal arrived_s
        if not request.number:
            request.number, arrived_s = number, time.monotonic()
        elif time.monotonic() - arrived_s > SAME_SIGNAL_S:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

    for number in numbers:
        signal.signal(number, record)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class StepEntry:
    """One step as this rank saw it. `values` is (loss sum, number of correct targets), on the device at first."""

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
class _StepValues:
    """What a rank sends of one step."""

    loss_sum: float
    num_correct: float
    step_s: float
    data_wait_s: float
    exposed_s: float | None
    phases: dict[str, float]


@dataclass(frozen=True)
class _RankReport:
    """What one rank sends to the others."""

    steps: tuple[_StepValues, ...]
    bad: tuple[int, str] | None
    signal: int
    is_save_due: bool


@dataclass(frozen=True)
class Exchange:
    """What all ranks know after an exchange. `bad` is (step, rank, parameter) of the first loss that is not finite."""

    rows: tuple[dict[str, Any], ...] = ()
    bad: tuple[int, int, str] | None = None
    signal: int = 0
    is_save_due: bool = False


@dataclass
class Journal:
    """Collects the steps of this rank until the next exchange. `every` (steps) is the same on all ranks."""

    world: World
    request: StopRequest
    every: int = 1
    _entries: list[StepEntry] = field(default_factory=list)

    def add(self, entry: StepEntry) -> None:
        import torch

        if entry.values.device.type == "cuda":
            host = torch.empty_like(entry.values, device="cpu", pin_memory=True)
            entry.values = host.copy_(entry.values, non_blocking=True)
        self._entries.append(entry)

    @property
    def is_due(self) -> bool:
        """Whether an exchange is due; the same on all ranks."""
        return len(self._entries) >= self.every

    def exchange(self, is_save_due: bool) -> Exchange:
        """Combine the steps of all ranks. For `is_save_due` rank 0 decides. Collective: call on every rank."""
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the copies to pinned memory are on it
        entries, self._entries = self._entries, []
        reports: list[_RankReport] = self.world.share(self._build_report(entries, is_save_due))
        rows = tuple(
            _build_row(entry, [report.steps[index] for report in reports]) for index, entry in enumerate(entries)
        )
        if rows:
            slowest_s = sum(row["step_s"] for row in rows) / len(rows)
            self.every = max(1, min(_MAX_STEPS, int(_EXCHANGE_EVERY_S / max(slowest_s, 1e-6))))
        bad = [(report.bad[0], rank, report.bad[1]) for rank, report in enumerate(reports) if report.bad is not None]
        return Exchange(
            rows=rows,
            bad=min(bad) if bad else None,
            signal=next((report.signal for report in reports if report.signal), 0),
            is_save_due=reports[0].is_save_due,
        )

    def _build_report(self, entries: Sequence[StepEntry], is_save_due: bool) -> _RankReport:
        steps, bad = [], None
        for entry in entries:
            loss_sum, num_correct = entry.values.tolist()
            if not math.isfinite(loss_sum) and bad is None:
                bad = entry.step, entry.bad_parameter
            step_s = entry.lap.read()["step"]
            steps.append(
                _StepValues(loss_sum, num_correct, step_s, entry.data_wait_s, entry.exposed_s, entry.phases.read())
            )
        return _RankReport(tuple(steps), bad, self.request.number, is_save_due)


def _build_row(entry: StepEntry, ranks: Sequence[_StepValues]) -> dict[str, Any]:
    """One row of metrics: losses summed over ranks; times of the slowest rank; exposed communication on average."""
    exposed = [rank.exposed_s for rank in ranks if rank.exposed_s is not None]
    row: dict[str, Any] = {
        "step": entry.step,
        "epoch": entry.epoch,
        "loss": sum(rank.loss_sum for rank in ranks) / entry.num_targets,
        "accuracy": sum(rank.num_correct for rank in ranks) / entry.num_targets if entry.has_accuracy else None,
        "samples": entry.num_samples,
        "lr": entry.rate,
        "step_s": max(rank.step_s for rank in ranks),
        "exposed_comm_s": sum(exposed) / len(exposed) if exposed else None,
        "data_wait_s": max(rank.data_wait_s for rank in ranks),
    }
    for phase in ranks[0].phases:
        row[f"{phase}_s"] = max(rank.phases[phase] for rank in ranks)
    return row


class EventsLog:
    """The numbers of rows as scalars in TensorBoard's files; strings and empty values are left out."""

    def __init__(self, folder: str | Path, after_step: int | None = None) -> None:
        """With `after_step`, TensorBoard ignores what earlier files have of later steps."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "TensorBoard's files need the package tensorboard, which is not installed: "
                "install paceline[tensorboard], or train without them"
            ) from None
        self._writer: Any = SummaryWriter(  # type: ignore[no-untyped-call]
            str(folder), purge_step=None if after_step is None else after_step + 1
        )

    def append(self, *rows: Mapping[str, Any]) -> None:
        for row in rows:
            for name, value in row.items():
                if name != "step" and type(value) in (int, float):
                    self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> EventsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
