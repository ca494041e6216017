"""Recovery from a fault of a local rank: a new world, from memory or from the last checkpoint.

This is the launcher's part: it counts faults and decides which ranks are in the next world. Ranks that stay have left
the old world and wait for their new places (`worker.stand_by`); a spare waits there from the start. The ranks
themselves decide what state they keep, and how they agree on it. Does not import torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import CollectiveError, LaunchError, PacelineError
from paceline.runtime.processes import Failure
from paceline.units import format_number_of

# Number of replacement ranks that may fail before no more are started.
_MOST_FAILED = 3
# Number of faults allowed before the first step of a run.
_MOST_EARLY = 2
# Ranks that stay abort NCCL communicators themselves when told to. torch's watchdog must not do so, nor end the
# process, nor hold a lock for a minute while it writes its recordings.
RECOVERS = "PACELINE_RECOVERS"
_VARIABLES = {
    RECOVERS: "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}  # fmt: skip


@dataclass
class Fault:
    """One fault and its outcome. `time_s` is when it was reported, as `time.time`. `step` is None before the first step
    of a world. `policy` is "restart", "spare" or "shrink", or "stop" if it ended the run. `recovered_s` is the time
    until `ranks_after` ranks took the next step; None if they did not, or if another fault came first. `steps_lost` is
    the number of repeated steps, if known."""

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
    """The policy of one run, and its faults so far. `arguments` are for a job that resumes from the last checkpoint,
    and `modules` are what it imports. `fit(count)` is how many of these ranks can be used, and `is_over` whether the
    run was asked to stop. `report(faults, line)` is called after each fault, and again after recovery."""

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
    # Faults without a subsequent step, and the number of complete steps at each.
    _open: list[tuple[Fault, int | None]] = field(default_factory=list)

    @property
    def stays_in_memory(self) -> bool:
        return self.policy in ("spare", "shrink")

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that ranks need before they open a world that they may leave for another one."""
        return dict(_VARIABLES) if self.stays_in_memory else {}

    @property
    def num_wanted(self) -> int:
        """The desired number of processes, including those that wait for a place."""
        if self.num_failed >= _MOST_FAILED or not self.stays_in_memory:
            return 0
        return self.num_ranks + (self.spares if self.policy == "spare" else 0)

    @property
    def _has_begun(self) -> bool:
        """Whether a step is known to have begun."""
        return any(fault.step is not None or fault.recovered_s is not None for fault in self.faults)

    def check_over(self) -> None:
        """Raise LaunchError if the run was asked to stop, since ranks started now would not know."""
        if self.is_over():
            raise LaunchError("the run was asked to stop while it recovered from a fault", code="interrupted")

    def decide(
        self, failure: Failure, error: PacelineError, size: int, has_values: bool, at: tuple[int, int] | None
    ) -> str:
        """What to do after this failure in a world of `size` ranks: "stop", "restart", or the policy. `at` is the
        ranks' step and the number of complete steps, if known; `has_values` means that some ranks have already
        returned."""
        step, done = at or (None, None)
        cause = str(error).partition("\n")[0]
        policy, why = self.policy, ""
        # Errors that the user must fix, and errors that all ranks raise together: no rank could be replaced.
        if self.is_over() or not isinstance(failure.error or LaunchError(""), CollectiveError | LaunchError):
            return "stop"
        if len(self.faults) >= self.max_faults:
            policy, why = "stop", f"this is fault {len(self.faults) + 1}, but --max-faults is {self.max_faults}"
        elif step is not None and step in [fault.step for fault in self.faults if fault.step is not None][-1:]:
            policy, why = "stop", f"the previous fault was also in step {step}: the run keeps failing there"
        elif step is None and not self._has_begun and len(self.faults) >= _MOST_EARLY:
            policy, why = (
                "stop",
                f"like the {_MOST_EARLY} faults before: the run keeps failing before its first step",
            )
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
        self.report(self.faults, f"a replacement rank failed: {why}{then}")

    def restart_instead(self) -> None:
        """The remaining ranks cannot continue, so restart all."""
        for fault, _ in self._open[-1:]:
            fault.policy = "restart"
        self.report(self.faults, "no rank is left to continue: all ranks start again from the last checkpoint")

    def note_step(self, first: int, when_s: float, size: int) -> None:
        """Record that a world of `size` ranks has taken its first step, after step `first`."""
        open_faults, self._open, self.num_failed = self._open, [], 0
        for fault, done in open_faults:
            fault.ranks_after, fault.steps_lost = size, None if done is None else max(0, done - first)
        for fault, _ in open_faults[-1:]:
            fault.recovered_s = time.time() - (time.monotonic() - when_s) - fault.time_s
            most = max((fault.steps_lost for fault, _ in open_faults if fault.steps_lost is not None), default=None)
            lost = "" if most is None else f"; {format_number_of(most, 'step')} lost"
            took, ranks = f"recovered after {fault.recovered_s:.1f} s", format_number_of(size, "rank")
            self.report(self.faults, f"{took}: {ranks} continue after step {first}{lost}")
