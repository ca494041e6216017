"""The launcher's side of a world of local ranks. It sends the ranks their job, receives their messages, diagnoses
failures, and decides after a fault which ranks join the next world.

Surviving ranks leave the old world and wait for a place in the next one (`worker.stand_by`). A spare waits for a place
from its start. The ranks themselves decide which state they keep, and how they agree on it. Does not import torch.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing.connection
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from paceline.errors import CollectiveError, LaunchError, PacelineError
from paceline.runtime.faults import pulse
from paceline.runtime.faults.monitor import LOOK_S, Monitor, Verdict
from paceline.runtime.faults.processes import Failure, describe_end, make_error, read_state
from paceline.units import format_number_of

# Number of replacement ranks that may fail before no more are started.
_MOST_FAILED = 3
# Number of faults allowed before the first step of a run.
_MOST_EARLY = 2
# How often to check that ranks are alive while no message arrives; a monitor looks more often.
LISTEN_S = 0.5
# After the first failure, how long to listen for others, so that a secondary failure is not mistaken for the root
# cause.
_AFTERMATH_S = 1.0
# Failures that cannot be a consequence of another rank's failure, so there is no need to listen for more.
_CERTAIN = ("killed", "hung")
# After a fault, how long surviving ranks may take to leave their world, and to report the rank that they lost.
_REGROUP_S, _STANDBY_S = 30.0, 5.0
_SPARE_S = 120.0  # how long to wait for a spare if none is ready
# Surviving ranks abort NCCL communicators themselves when told to. torch's watchdog must not do so, nor end the
# process, nor hold a lock for a minute while it dumps its flight recorder.
RECOVERS = "PACELINE_RECOVERS"
_VARIABLES = {
    RECOVERS: "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
}


@dataclass
class Fault:
    """One fault and its outcome. `time_s` is when it was reported, by `time.time`. `step` is None before the first step
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
    and `modules` are those it imports. `fit(count)` returns how many of `count` ranks can be used, and `is_over()`
    whether the run was asked to stop. `report(faults, line)` is called after each fault, and again after recovery."""

    policy: str  # "stop" ends the run at the first fault, without a report
    num_ranks: int
    arguments: tuple[Any, ...] = ()
    report: Callable[[Sequence[Fault], str], None] = lambda *_: None
    max_faults: int = 10
    spares: int = 1
    modules: tuple[str, ...] = ()
    fit: Callable[[int], int] = lambda count: count
    is_over: Callable[[], object] = lambda: False
    faults: list[Fault] = field(default_factory=list)
    num_failed: int = 0
    # Faults since the last step, with the number of complete steps at each.
    _open: list[tuple[Fault, int | None]] = field(default_factory=list)

    @property
    def stays_in_memory(self) -> bool:
        return self.policy in ("spare", "shrink")

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that ranks need before they open a world that they may leave later."""
        return dict(_VARIABLES) if self.stays_in_memory else {}

    @property
    def num_wanted(self) -> int:
        """The desired number of processes, including those still waiting for a slot."""
        if self.num_failed >= _MOST_FAILED or not self.stays_in_memory:
            return 0
        return self.num_ranks + (self.spares if self.policy == "spare" else 0)

    @property
    def _has_begun(self) -> bool:
        """Whether a step is known to have begun."""
        return any(fault.step is not None or fault.recovered_s is not None for fault in self.faults)

    def check_over(self) -> None:
        """Raise LaunchError if the run was asked to stop, since new ranks would not have received the request."""
        if self.is_over():
            raise LaunchError("the run was asked to stop while it recovered from a fault", code="interrupted")

    def decide(
        self, failure: Failure, error: PacelineError, size: int, has_values: bool, at: tuple[int, int] | None
    ) -> str:
        """What to do after this failure in a world of `size` ranks: "stop", "restart", or the policy. `at` is the
        ranks' step and the number of complete steps, if known; `has_values` means that some ranks have already
        returned."""
        if self.policy == "stop":
            return "stop"
        # Errors that the user must fix, and errors that all ranks raise together: replacing a rank would not help.
        if self.is_over() or not isinstance(failure.error or LaunchError(""), CollectiveError | LaunchError):
            return "stop"
        step, done = at or (None, None)
        cause = str(error).partition("\n")[0]
        policy, then = self.policy, {"spare": "a spare takes its place", "shrink": "the others continue"}
        if why := self._find_reason_to_stop(step):
            policy, then = "stop", {"stop": why}
            error.add_note(why)
        elif failure.code not in ("killed", "died", "hung") or failure.rank is None or has_values:
            policy = "restart"
        self.faults.append(Fault(time.time(), failure.rank, step, cause, policy, size))
        self._open.append((self.faults[-1], done))
        again = f"all ranks start again{' from the last checkpoint' * self._has_begun}"
        self.report(self.faults, f"{cause}; {then.get(policy, again)}")
        return policy

    def _find_reason_to_stop(self, step: int | None) -> str:
        """Why another fault in this step ends the run; empty if the run may recover."""
        if len(self.faults) >= self.max_faults:
            return f"this is fault {len(self.faults) + 1}, but --max-faults is {self.max_faults}"
        if step is not None and step in [fault.step for fault in self.faults if fault.step is not None][-1:]:
            return f"the previous fault was also in step {step}: the run keeps failing there"
        if step is None and not self._has_begun and len(self.faults) >= _MOST_EARLY:
            return f"the previous {_MOST_EARLY} faults were also before the first step: the run keeps failing there"
        return ""

    def note_spare_failed(self, failure: Any) -> None:
        self.num_failed += 1
        why = failure.summary if isinstance(failure, Failure) else "it ended"
        then = "; no more are started" if self.num_failed >= _MOST_FAILED else ""
        self.report(self.faults, f"a replacement rank failed: {why}{then}")

    def restart_instead(self) -> None:
        """Restart all ranks, because the remaining ones cannot continue."""
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


# -- one process -------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class RankProcess:
    """The launcher's handle on one rank."""

    process: Any  # a `multiprocessing.Process`, or an object with its methods
    link: Connection
    stacks: Connection
    was_heard: bool = False
    step: int | None = None  # last completed step of a rank that waits for a new world
    is_lost: bool = False  # the rank waits because it lost another rank

    @property
    def is_alive(self) -> bool:
        return self.process.exitcode is None

    def send(self, message: Any) -> None:
        """Send a message to the job on this rank (`worker.receive`); ignored if the rank is gone."""
        with contextlib.suppress(OSError):
            self.link.send_bytes(pickle.dumps(message))

    def place(self, variables: dict[str, str], job: bytes) -> None:
        """Send the rank to a new world: a rank on standby continues its job there, and any other rank starts it."""
        message = (sys.path, variables, job) if self.step is None else variables
        self.step = None
        self.is_lost = False
        self.send(message)

    def receive(self, is_gone: bool) -> Iterator[tuple[str, Any]]:
        """The rank's messages and, if it has exited, its exit code as "ended". An answer sent before the rank died
        still counts."""
        try:
            while self.link.poll():
                answer = pickle.loads(self.link.recv_bytes())
                self.was_heard = True
                yield answer
        except (EOFError, OSError):
            is_gone = True
        if is_gone:
            self.process.join()
            yield "ended", self.process.exitcode or 0

    def describe_death(self, rank: int, code: int, summary: str = "") -> Failure:
        summary = summary or describe_end(code)
        if code >= 0 and not self.was_heard:
            summary += f" while starting: {_explain_start()}"
        return Failure(rank, time.monotonic(), summary, code="killed" if code == -signal.SIGKILL else "died")

    def signal(self, number: int) -> None:
        """Send a signal to the process; a no-op once it has ended."""
        if not isinstance(self.process, multiprocessing.process.BaseProcess):
            self.process.kill(number)
        elif self.is_alive:  # our own child: its ID stays reserved until we read its exit code
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid or 0, number)

    def read_stack(self) -> str:
        """The stacks of all the rank's threads, for an error message."""
        if self.process.pid is None or not self.was_heard:
            return "(still starting)"
        if not self.is_alive:
            return "(ended)"
        self.signal(signal.SIGUSR1)
        text = b""
        while len(text) < 2**16 and self.stacks.poll(0.3 if text else 1.0):
            if not (chunk := os.read(self.stacks.fileno(), 2**16)):
                break
            text += chunk
        silent = "(suspended)" if read_state(self.process.pid)[0] == "T" else "(no answer: stuck in the kernel)"
        return text.decode(errors="replace").strip() or silent

    def hang_up(self) -> None:
        """Close the link, which makes an idle rank exit."""
        self.link.close()
        self.stacks.close()


def _explain_start() -> str:
    """Why a new process may have failed before it became a rank: it imports the script that starts it."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if not script.is_file():
        return "ranks import the script that starts them, so it cannot come from standard input: save it in a file"
    if "__main__" in script.read_text(errors="replace"):
        return f"its error is above; ranks import {script.name}, which must work in a new process"
    return "a script must start ranks under `if __name__ == '__main__':`"


def end_processes(ranks: Sequence[RankProcess]) -> None:
    """Kill processes, even if they are suspended or busy in a signal handler, and wait until they are gone."""
    for rank in ranks:
        rank.process.kill()
        rank.hang_up()
    for rank in ranks:
        rank.process.kill()
        rank.process.join()
        rank.process.close()


def hear(ranks: Sequence[RankProcess], timeout_s: float) -> Iterator[tuple[RankProcess, str, Any]]:
    """Messages from these ranks, up to a final one: "value", "failure", or "ended" with its exit code. Waits for at
    least one message."""
    ready = multiprocessing.connection.wait([rank.link for rank in ranks], timeout_s)
    for rank in ranks:
        if rank.link.closed:  # since the last message
            continue
        # A dead rank closes its link. If a grandchild holds the link open, the exit code shows that the rank has died.
        is_gone = not rank.is_alive
        if not is_gone and rank.link not in ready:
            continue
        for kind, content in rank.receive(is_gone):
            yield rank, kind, content
            if kind in ("value", "failure", "ended"):
                break


# -- one world ---------------------------------------------------------------------------------------------------------


@dataclass
class LocalJob:
    """The pickled job of local ranks and its deadline. `recovery` decides what follows a fault."""

    content: bytes
    timeout_s: float | None
    on_message: Callable[[int, Any], None] | None
    hang_timeout_s: float | None
    recovery: Recovery

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + (math.inf if self.timeout_s is None else self.timeout_s)


class Spares:
    """Processes that wait for a place in a world. `start` adds a process to the list and lets it prepare."""

    def __init__(self, processes: list[RankProcess], recovery: Recovery, start: Callable[[], None]) -> None:
        self.processes = processes
        self._recovery = recovery
        self._start = start

    @property
    def ready(self) -> list[RankProcess]:
        return [spare for spare in self.processes if spare.step is not None and spare.is_alive]

    def refill(self, num_ranks: int) -> None:
        """Start missing spares, in addition to `num_ranks` ranks."""
        self.keep([spare for spare in self.processes if spare.is_alive])
        for _ in range(self._recovery.num_wanted - num_ranks - len(self.processes)):
            self._start()

    def keep(self, kept: Sequence[RankProcess]) -> None:
        """Terminate all spares except these."""
        others = [spare for spare in self.processes if spare not in kept]
        self.processes[:] = kept
        end_processes(others)

    def take(self, spare: RankProcess, kind: str, content: Any, num_ranks: int) -> None:
        """Handle a message from a spare: it is ready, or has failed."""
        if kind == "standby":
            spare.step = content[0]
        elif kind in ("value", "failure", "ended"):
            self._recovery.note_spare_failed(spare.describe_death(-1, content) if kind == "ended" else content)
            self.keep([other for other in self.processes if other is not spare])
            self.refill(num_ranks)

    def await_ready(self, count: int, num_ranks: int) -> None:
        """Wait until `count` spares are ready, unless too many fail."""
        deadline = time.monotonic() + _SPARE_S
        while len(self.ready) < count and self._recovery.num_wanted and time.monotonic() < deadline:
            self._recovery.check_over()
            self.refill(num_ranks)
            for spare, kind, content in hear([one for one in self.processes if one.step is None], LISTEN_S):
                self.take(spare, kind, content, num_ranks)


class LocalWorld:
    """A world of local ranks, from its start until it returns values, fails, or is replaced by a larger world."""

    def __init__(self, ranks: Sequence[RankProcess], job: LocalJob, monitor: Monitor | None, spares: Spares) -> None:
        self.ranks = ranks
        self.values: dict[int, Any] = {}
        self.failures: list[Failure] = []
        self.error: PacelineError | None = None
        self._job = job
        self._monitor = monitor
        self._spares = spares
        self._numbers = {rank: number for number, rank in enumerate(ranks)}

    def run(self, variables: dict[str, str]) -> str:
        """Run the job and decide what follows: "stop" (with `values`, or `error`), "restart", or the policy of the
        recovery. Keep the world's store open meanwhile: closing it would wake stuck ranks, whose stacks would be
        lost."""
        recovery = self._job.recovery
        for number, rank in enumerate(self.ranks):
            own = variables | recovery.variables | {"RANK": str(number), "LOCAL_RANK": str(number)}
            if self._monitor is not None:
                own[pulse.VARIABLE] = ":".join(self._monitor.find_pages(number))
            rank.place(own, self._job.content)
        self._listen()
        waiting = [rank for rank in self.ranks if rank.step is not None]
        if waiting and not self.failures and all(rank.is_lost for rank in waiting):
            self.failures.append(Failure(None, time.monotonic(), "ranks lost contact, though all are alive"))
        if self.failures:
            return self._decide()
        if waiting:  # more ranks are available
            return recovery.policy
        self._name_stuck()
        return "stop"

    def _listen(self) -> None:
        """Listen to all ranks until each has answered or is on standby, one has failed, or the deadline passes."""
        job, recovery, spares = self._job, self._job.recovery, self._spares
        pending = dict.fromkeys(self.ranks)  # in the order of ranks
        deadline = job.deadline
        is_growing = False
        while pending and (left_s := deadline - time.monotonic()) > 0:
            for rank, kind, content in hear([*pending, *spares.processes], min(left_s, self._listen_s)):
                number = self._numbers.get(rank)
                if number is None:
                    spares.take(rank, kind, content, len(self.ranks))
                elif kind == "message" and job.on_message is not None:
                    job.on_message(number, content)
                elif kind == "stepped":
                    first, when_s = content
                    recovery.note_step(first, when_s, len(self.ranks))
                    spares.refill(len(self.ranks))  # refill now, when it does not delay a recovery
                elif kind == "standby":
                    pending.pop(rank, None)
                    rank.step, rank.is_lost = content
                    deadline = min(deadline, time.monotonic() + _STANDBY_S)
                elif kind in ("value", "failure", "ended"):
                    pending.pop(rank, None)
                    self._take_last(number, kind, content)
            is_open = all(failure.is_secondary for failure in self.failures)  # the cause is still unknown
            if is_open and (verdict := self._look()) is not None:
                failure = Failure(verdict.rank, time.monotonic(), verdict.summary, verdict.stack, code="hung")
                self.failures.append(failure)
            is_named = recovery.policy != "stop" and any(not failure.is_secondary for failure in self.failures)
            if is_named or self.is_certain:
                break
            if self.failures:
                deadline = min(deadline, time.monotonic() + _AFTERMATH_S)
            if not is_growing and len(self.ranks) < recovery.num_ranks:
                num_ranks = min(len(self.ranks) + len(spares.ready), recovery.num_ranks)
                if is_growing := recovery.fit(num_ranks) > len(self.ranks):
                    self.ranks[0].send("more ranks are available")

    @property
    def _listen_s(self) -> float:
        return LISTEN_S if self._monitor is None else LOOK_S

    @property
    def is_certain(self) -> bool:
        """Whether a failure cannot be a consequence of another rank's failure."""
        return any(failure.code in _CERTAIN for failure in self.failures)

    def _take_last(self, number: int, kind: str, content: Any) -> None:
        """Store the last message of a rank: its value, its failure, or its exit code."""
        if kind == "value":
            self.values[number] = content
        elif kind == "ended":
            summary = "" if self._monitor is None else self._monitor.describe_end(number, content)
            self.failures.append(self.ranks[number].describe_death(number, content, summary))
        elif self._monitor is None:
            self.failures.append(content)
        else:
            self.failures.append(_add_place(content, self._monitor.describe(number)))

    def _look(self) -> Verdict | None:
        """A fault that must end the world. A rank that is only slow is reported on stderr."""
        verdict = None if self._monitor is None else self._monitor.look()
        if self._monitor is None or verdict is None or verdict.ends:
            return verdict
        who = "" if verdict.rank is None else f"rank {verdict.rank} of {len(self.ranks)} "
        self._monitor.announce(f"warning: {who}{verdict.summary}", verdict.rank, verdict.stack)
        return None

    def _decide(self) -> str:
        """Decide what follows the first failure that is not just the loss of a peer."""
        first = min(self.failures, key=lambda failure: (failure.is_secondary, failure.when_s))
        size = len(self.ranks)
        self.error = make_error(first, size, sorted(self.values))
        at = self._monitor.find_step(first.rank) if self._monitor is not None else None
        return self._job.recovery.decide(first, self.error, size, bool(self.values), at)

    def _name_stuck(self) -> None:
        stuck = [number for number in range(len(self.ranks)) if number not in self.values]
        if stuck:
            places = [f"\n\nRank {number} is at:\n{self.ranks[number].read_stack()}" for number in stuck]
            names = ", ".join(map(str, stuck))
            message = f"rank {names} of {len(self.ranks)} did not finish within {self._job.timeout_s:g} s"
            self.error = LaunchError("".join([message, *places]), stuck[0])

    def regroup(self) -> list[RankProcess]:
        """The ranks of the next world in their new order; the others are spares or ended. Empty if all ranks must start
        again. A surviving rank that has received a signal stops in the next world."""
        recovery, spares = self._job.recovery, self._spares
        stay = self._await_survivors()
        if recovery.policy == "spare" and stay:
            spares.await_ready(len(self.ranks) - len(stay), len(stay))
        ready = spares.ready
        ranks = []
        for rank in self.ranks:
            if rank in stay:
                ranks.append(rank)
            elif recovery.policy == "spare" and ready:  # the spare takes over the number of the lost rank
                ranks.append(ready.pop(0))
        if recovery.policy == "shrink":
            ranks += ready
        if not stay or (recovery.policy == "spare" and len(ranks) < recovery.num_ranks):
            recovery.restart_instead()
            return []
        end_processes([rank for rank in self.ranks if rank not in stay])
        size = recovery.fit(min(len(ranks), recovery.num_ranks))
        spares.processes[:] = [*ranks[size:], *(one for one in spares.processes if one not in ranks)]
        return ranks[:size]

    def _await_survivors(self) -> set[RankProcess]:
        """Wait until every rank that is not lost has left this world."""
        on_message, monitor = self._job.on_message, self._monitor
        deadline = time.monotonic() + _REGROUP_S
        late = dict.fromkeys(self.ranks)
        for number in {failure.rank for failure in self.failures if failure.rank is not None}:
            self.ranks[number].process.kill()
            late.pop(self.ranks[number])
        if self.failures and monitor is not None:  # after the rank's death, so that the others learn of it in time
            monitor.tell_lost()
        stay = {rank for rank in late if rank.step is not None}

        def is_busy(rank: RankProcess) -> bool:
            return monitor is not None and monitor.is_busy(self._numbers[rank])

        while (pending := [rank for rank in late if rank not in stay]) and (
            time.monotonic() < deadline or any(map(is_busy, pending))
        ):
            for rank, kind, content in hear(pending, self._listen_s):
                if kind == "message" and on_message is not None:
                    on_message(self._numbers[rank], content)
                elif kind == "standby":
                    rank.step = content[0]
                    stay.add(rank)
                elif kind in ("value", "failure", "ended"):
                    late.pop(rank, None)
            if (verdict := self._look()) is not None and verdict.rank is not None:
                late.pop(self.ranks[verdict.rank], None)  # this rank is also lost
        return stay


def _add_place(failure: Failure, where: str) -> Failure:
    """Add the step to a failure in a collective or in user code; other failures already name their step or have
    none."""
    found = re.match(r"in step \d+", where)
    if found is None:
        return failure
    if isinstance(failure.error, CollectiveError) and not re.search(r"\bstep \d", str(failure.error)):
        failure.error.args = (f"{found[0]}: {failure.error}",)
    elif failure.error is None and failure.trace:
        return replace(failure, summary=failure.summary.replace("failed:", f"failed {found[0]}:", 1))
    return failure
