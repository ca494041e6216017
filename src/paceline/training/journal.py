"""The journal of a training run: the steps of all ranks as rows of metrics, and the stop signal.

Ranks exchange their records about four times a second rather than in every step, which keeps short steps cheap.
"""

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.runtime.faults import pulse
from paceline.runtime.ranks.launch import handle_requests
from paceline.runtime.ranks.world import World
from paceline.training.step import PhaseTimes, StepOutcome

_EXCHANGE_EVERY_S = 0.25
_MAX_STEPS = 100  # maximum number of steps between exchanges
_MOST_RECORDED = 16  # maximum number of rows with message times
_DIGITS = 6  # times per rank are rounded to microseconds


@dataclass
class StopRequest:
    number: int = 0  # the signal that requested a stop, or 0


@contextlib.contextmanager
def catch_stop() -> Iterator[StopRequest]:
    """Record SIGTERM, SIGUSR1 and SIGINT instead of exiting. A second signal has its usual effect.

    Ranks of our own launcher ignore SIGINT: their parent forwards it as SIGTERM. SIGUSR1 prints their stack, while
    under Slurm it requests a save before the time limit.
    """
    request = StopRequest()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if os.environ.get("PACELINE_LAUNCHER") != "paceline":
        numbers.append(signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}

    def record(number: int) -> None:
        request.number = number

    def end(number: int) -> None:
        signal.signal(number, before[signal.Signals(number)])
        signal.raise_signal(number)

    with handle_requests(record, end, *(number for number in before if before[number] is not signal.SIG_IGN)):
        yield request


@dataclass(frozen=True)
class Position:
    """A position in a run: the next window of an epoch and the number of steps taken."""

    epoch: int
    window: int
    step: int


@dataclass(frozen=True)
class TakenStep:
    """One step of the loop on this rank; `position` is the position in the run after the step."""

    position: Position
    epoch: int
    rate: float
    num_samples: int
    num_targets: int
    data_wait_s: float
    outcome: StepOutcome
    is_epoch_end: bool
    is_last: bool


# Unwritten records of a world that ended early; see `Journal.list_unwritten`.
Unwritten = tuple[list[dict[str, Any]], list[dict[str, Any]], int]
# A step that was not yet exchanged, (loss sum, number of correct targets) on the host, lap, phases and exposed_s.
_Entry = tuple[TakenStep, torch.Tensor, PhaseTimes, PhaseTimes, float | None]


@dataclass(frozen=True)
class Exchange:
    """The result of an exchange, equal on all ranks. `bad` is (step, rank, parameter) of the first non-finite loss.
    `is_left` tells all ranks to leave this world for a larger one once the step is finished.

    The same class carries one rank's message; `rows` then contains its own sums and times.
    """

    rows: tuple[dict[str, Any], ...]
    bad: tuple[int, int, str] | None
    signal: int
    is_save_due: bool
    is_left: bool = False


@dataclass
class Journal:
    """Collects this rank's steps until the next exchange, after `every` steps (the same on all ranks)."""

    world: World
    request: StopRequest
    every: int = 1
    asked: tuple[int, ...] = ()  # ranks that received a stop signal
    # Returns a recent step's age in steps and its message times; see `loop.read_messages`.
    read_messages: Callable[[], tuple[int, dict[str, Any]] | None] = lambda: None
    carried: list[dict[str, Any]] = field(default_factory=list)  # the previous world's unwritten rows
    _last: list[dict[str, Any]] = field(default_factory=list)  # rows from the last exchange, possibly unwritten
    _num_recorded: int = 0
    _entries: list[_Entry] = field(default_factory=list)

    def add(self, taken: TakenStep, lap: PhaseTimes, phases: PhaseTimes, exposed_s: float | None) -> None:
        """Add a step. `lap` times the whole step, as `step`. Does not wait for the GPU or another rank."""
        loss_sum, correct = taken.outcome.loss_sum, taken.outcome.num_correct
        values = torch.stack([loss_sum.double(), (loss_sum if correct is None else correct).double()])
        if values.is_cuda:
            host = torch.empty_like(values, device="cpu", pin_memory=True)
            values = host.copy_(values, non_blocking=True)
        self._entries.append((taken, values, lap, phases, exposed_s))

    @property
    def is_due(self) -> bool:
        """Whether an exchange is due; the same on all ranks."""
        return len(self._entries) >= self.every

    def exchange(self, is_save_due: bool, is_left: bool = False) -> Exchange:
        """Combine all ranks' steps; rank 0 decides `is_save_due` and `is_left`. Collective: call on every rank."""
        entries = self._entries
        sent, bad = self._read_entries()
        self._entries = []
        found = self.read_messages() if self._num_recorded < _MOST_RECORDED else None
        if found is not None and found[0] < len(sent):  # the same on all ranks
            self._num_recorded += 1
            row, moments, times = sent[-1 - found[0]], entries[-1 - found[0]][2].moments, found[1]
            before_s, begin_s = max(0.0, row["times"]["step_s"] - times["over_s"]), times.pop("begin_s")
            if moments and isinstance(moments[0][1], float):  # CUDA events are not on the host's clock
                before_s = begin_s - moments[0][1]
            row["messages"] = {"before_s": before_s, **times}
        report = Exchange(tuple(sent), bad, self.request.number, is_save_due, is_left)
        try:
            reports: list[Exchange] = self.world.share(report)
        except BaseException:
            self._entries = entries  # kept for the next world
            raise
        by_step = zip(*(report.rows for report in reports), strict=True)
        self._last, self.carried = [*self.carried, *(_build_row(ranks) for ranks in by_step)], []
        rows = tuple(self._last)
        if rows:
            slowest_s = sum(row["step_s"] for row in rows) / len(rows)
            self.every = max(1, min(_MAX_STEPS, int(_EXCHANGE_EVERY_S / max(slowest_s, 1e-6))))
        bad = min((report.bad for report in reports if report.bad is not None), default=None)
        number = next((report.signal for report in reports if report.signal), 0)
        self.asked = tuple(rank for rank, report in enumerate(reports) if report.signal)
        return Exchange(rows, bad, number, reports[0].is_save_due, reports[0].is_left)

    def _read_entries(self) -> tuple[list[dict[str, Any]], tuple[int, int, str] | None]:
        """The records of this rank's steps and its first non-finite loss."""
        if torch.cuda.is_initialized():
            with pulse.within(pulse.WAIT):
                torch.cuda.current_stream().synchronize()  # wait for the copies to pinned memory
        sent = []
        bad = None
        for taken, values, lap, phases, exposed_s in self._entries:
            loss_sum, num_correct = values.tolist()
            if not math.isfinite(loss_sum) and bad is None:
                bad = taken.position.step, self.world.rank, taken.outcome.bad_parameter
            parts_s = phases.read()  # a user's step may include data loading
            waited_s = taken.data_wait_s + parts_s.pop("data_wait", 0.0)
            times = {"step_s": lap.read()["step"], "data_wait_s": waited_s}
            times |= {f"{phase}_s": seconds for phase, seconds in parts_s.items()}
            about = {"step": taken.position.step, "epoch": taken.epoch, "samples": taken.num_samples, "lr": taken.rate}
            correct = None if taken.outcome.num_correct is None else num_correct
            own = {"loss": loss_sum, "correct": correct, "exposed_s": exposed_s, "times": times}
            sent.append({"about": about, "targets": taken.num_targets, **own})
        return sent, bad

    def list_unwritten(self) -> Unwritten:
        """Rows that may not be written yet, this rank's unexchanged steps, and the number of ranks."""
        return [*self.carried, *self._last], self._read_entries()[0], self.world.world_size

    def carry(self, mine: Unwritten | None, step: int) -> None:
        """Take over the unwritten rows of the previous world, up to `step`. Collective: call on every rank.

        Estimates a lost rank's part of unexchanged steps from the other ranks.
        """
        rows: dict[int, dict[str, Any]] = {}
        sent: dict[int, list[dict[str, Any]]] = {}
        size = 1
        for known, entries, num_ranks in self.world.share(mine or ([], [], 0)):
            rows |= {row["step"]: row for row in known}
            size = max(size, num_ranks)
            for entry in entries:
                sent.setdefault(entry["about"]["step"], []).append(entry)
        rows = {number: _build_row(entries, size) for number, entries in sent.items()} | rows
        self.carried = [rows[number] for number in sorted(rows) if number <= step]


def _build_row(ranks: Sequence[Mapping[str, Any]], num_ranks: int = 0) -> dict[str, Any]:
    """Build one row of metrics: losses summed over ranks, times of the slowest rank, mean exposed communication.

    The row's `ranks` are the times of each rank; `messages`, in a few rows, are bucket times. If only some of
    `num_ranks` ranks are known, sums are scaled up to all of them.
    """
    each = {name: [round(rank["times"][name], _DIGITS) for rank in ranks] for name in ranks[0]["times"]}
    each["exposed_comm_s"] = [None if (s := rank["exposed_s"]) is None else round(s, _DIGITS) for rank in ranks]
    recorded = [rank["messages"] for rank in ranks if "messages" in rank]
    exposed = [rank["exposed_s"] for rank in ranks if rank["exposed_s"] is not None]
    about = ranks[0]["about"]
    targets = ranks[0]["targets"]
    more = max(1.0, num_ranks / len(ranks))
    known = [rank["correct"] for rank in ranks if rank["correct"] is not None]
    return {
        "step": about["step"],
        "epoch": about["epoch"],
        "loss": sum(rank["loss"] for rank in ranks) * more / targets,
        "accuracy": sum(known) * more / targets if len(known) == len(ranks) else None,
        "samples": about["samples"],
        "lr": about["lr"],
        "exposed_comm_s": sum(exposed) / len(exposed) if exposed else None,
        **{name: max(rank["times"][name] for rank in ranks) for name in ranks[0]["times"]},
        "ranks": each,
        **({"messages": recorded} if len(recorded) == len(ranks) else {}),
    }
