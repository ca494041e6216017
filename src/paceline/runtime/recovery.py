"""What follows a fault of a local rank: a new world, from the state in memory of the other ranks or from the last file.

This is the launcher's part: it counts faults, and decides who is in the next world. Ranks that stay have left the world
of the lost one and wait for their new places (`worker.stand_by`); a spare waits there from its start. What ranks bring
along, and how they agree on it, is their own business. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import CollectiveError, LaunchError, PacelineError
from paceline.runtime.worker import Failure
from paceline.units import format_number_of

# How many processes that were to become ranks again may fail before no more are started.
_MOST_FAILED = 3
# How many faults there may be before the first step of a run.
_MOST_EARLY = 2
# Ranks that stay abort the communicators of NCCL themselves, when they are told. The watchdog of torch must not do it,
# nor end the process, nor hold a lock for a minute while it writes what it has recorded.
RECOVERS = "PACELINE_RECOVERS"
_VARIABLES = {
    RECOVERS: "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}  # fmt: skip


@dataclass
class Fault:
    """One fault, and what followed. `time_s` is when it was named, as `time.time`. `step` is None before the first of
    a world. `policy`: "restart", "spare" or "shrink", or "stop" where it ended the run. `recovered_s`: until the next
    step was taken by `ranks_after` ranks; None where it was not, or another fault came first. `steps_lost`: those that
    were taken again, where that is known."""

    time_s: float
    rank: int | None
    step: int | None
    cause: str
    policy: str
    ranks: int
    ranks_after: int = 0
    steps_lost: int | None = None
    recovered_s: float | None = None


@dataclass
class Recovery:
    """The policy of one run, and its faults so far. `arguments` are those of the job that resumes from the last file.
    `modules` are what the job imports. `fit(count)` is how many of these ranks can be used, and `is_over` says that the
    run was asked to stop. `report(faults, line)` is called after each fault, and again when the run has recovered."""

    policy: str
    num_ranks: int
    arguments: tuple[Any, ...]
    report: Callable[[Sequence[Fault], str], None]
    max_faults: int = 10
    spares: int = 1
    modules: tuple[str, ...] = ()
    fit: Callable[[int], int] = lambda count: count
    is_over: Callable[[], object] = lambda: False
    faults: list[Fault] = field(default_factory=list)
    num_failed: int = 0
    # Faults after which no step was taken yet, and how many were complete.
    _open: list[tuple[Fault, int | None]] = field(default_factory=list)

    @property
    def stays_in_memory(self) -> bool:
        return self.policy in ("spare", "shrink")

    @property
    def variables(self) -> dict[str, str]:
        """What ranks need in their environment before they open a world that they may leave for another one."""
        return dict(_VARIABLES) if self.stays_in_memory else {}

    @property
    def num_wanted(self) -> int:
        """How many processes there should be, those that wait for a place included."""
        if self.num_failed >= _MOST_FAILED or not self.stays_in_memory:
            return 0
        return self.num_ranks + (self.spares if self.policy == "spare" else 0)

    @property
    def _has_begun(self) -> bool:
        """Whether a step was begun, so far as is known."""
        return any(fault.step is not None or fault.recovered_s is not None for fault in self.faults)

    def check_over(self) -> None:
        """Raise where the run was asked to stop: what is started now would not know."""
        if self.is_over():
            raise LaunchError("the run was asked to stop while it recovered from a fault", code="interrupted")

    def decide(
        self, failure: Failure, error: PacelineError, size: int, has_values: bool, at: tuple[int, int] | None
    ) -> str:
        """What follows this failure in a world of `size` ranks: "stop", "restart", or the policy. `at` is the step that
        the ranks were in and how many were complete, if that is known; `has_values`: some have already returned."""
        step, done = at or (None, None)
        cause = str(error).partition("\n")[0]
        policy, why = self.policy, ""
        # What a user must fix, and what all ranks raise together: there is no rank that could be replaced.
        if self.is_over() or not isinstance(failure.error or LaunchError(""), CollectiveError | LaunchError):
            return "stop"
        if len(self.faults) >= self.max_faults:
            policy, why = "stop", f"it is fault {len(self.faults) + 1}, and --max-faults is {self.max_faults}"
        elif step is not None and step in [fault.step for fault in self.faults if fault.step is not None][-1:]:
            policy, why = "stop", f"the fault before it was in step {step}, too: the run does not get past it"
        elif step is None and not self._has_begun and len(self.faults) >= _MOST_EARLY:
            policy, why = "stop", f"so were the {_MOST_EARLY} faults before it: the run does not get past its start"
        elif failure.code not in ("killed", "died", "hung") or failure.rank is None or has_values:
            policy = "restart"
        self.faults.append(Fault(time.time(), failure.rank, step, cause, policy, size))
        self._open.append((self.faults[-1], done))
        if why:
            error.add_note(why)
        then = {
            "restart": f"all ranks start again{' from the last checkpoint' * self._has_begun}",
            "spare": "a spare takes its place", "shrink": "the others continue", "stop": why,
        }[policy]  # fmt: skip
        self.report(self.faults, f"{cause}; {then}")
        return policy

    def note_spare_failed(self, failure: Any) -> None:
        self.num_failed += 1
        why = failure.summary if isinstance(failure, Failure) else "it ended"
        then = "; no more are started" if self.num_failed >= _MOST_FAILED else ""
        self.report(self.faults, f"a process that was to become a rank is not there: {why}{then}")

    def restart_instead(self) -> None:
        """The ranks that are left cannot continue."""
        for fault, _ in self._open[-1:]:
            fault.policy = "restart"
        self.report(self.faults, "no rank is left to continue: all ranks start again from the last checkpoint")

    def note_step(self, first: int, when_s: float, size: int) -> None:
        """A world of `size` ranks has taken its first step, after step `first`."""
        open_faults, self._open, self.num_failed = self._open, [], 0
        for fault, done in open_faults:
            fault.ranks_after, fault.steps_lost = size, None if done is None else max(0, done - first)
        for fault, _ in open_faults[-1:]:
            fault.recovered_s = time.time() - (time.monotonic() - when_s) - fault.time_s
            most = max((fault.steps_lost for fault, _ in open_faults if fault.steps_lost is not None), default=None)
            lost = "" if most is None else f"; {format_number_of(most, 'step')} lost"
            took, ranks = f"recovered after {fault.recovered_s:.1f} s", format_number_of(size, "rank")
            self.report(self.faults, f"{took}: {ranks} continue after step {first}{lost}")
