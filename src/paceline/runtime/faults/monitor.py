"""The monitor of one host determines which rank is dead, suspended or hung, and where, since when and why.

`Monitor` takes snapshots of the ranks of one host, from their status pages (`pulse`) and their processes in /proc, and
`HangDetector` decides from the snapshots so far. The launcher monitors its own ranks; under other launchers, a separate
process does (`monitored`), which outlives every rank. Does not import torch.

A proven fault ends the job at once: a rank is dead or suspended, or all ranks wait for different collectives. Any other
suspicious rank may be healthy but slow, so it is reported in a warning within seconds, and terminated only after the
hang timeout.
"""

from __future__ import annotations

import collections
import contextlib
import math
import multiprocessing.connection
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.runtime.faults import pulse
from paceline.runtime.faults.processes import (
    Handle,
    count_oom_kills,
    describe_end,
    describe_frames,
    find_frames,
    is_importing,
    is_in_collective,
)
from paceline.runtime.faults.pulse import BETWEEN, LEFT, SLOW, START, WAIT
from paceline.units import name_ranks, parse_duration

# Environment variables: whether to monitor a program that does not request it itself, and its hang timeout.
VARIABLE, TIMEOUT_VARIABLE = "PACELINE_MONITOR", "PACELINE_HANG_TIMEOUT"
# How long a rank may stay in one phase of a step before it is terminated. Equal to the default timeout of a
# collective (`init`), which would then fail on the other ranks anyway.
HANG_S = 600.0
LOOK_S = 0.1
# Intervals between snapshots count as at most this long, so that ranks get more time on an overloaded machine.
_MOST_S = 2.5 * LOOK_S
_STOPPED_S = 1.5  # shorter suspensions are harmless
_OOM_S = 1.0  # attribute a rank's end to an OOM kill within the last one or two of these periods
# A process that keeps running for this long after its world failed has handled the error.
_HANDLED_S = 1.0
_EXIT_S = 30.0  # the exit of a process with an error may take this long, or the hang timeout if that is longer
# A rank is reported once a phase of a step takes this many times as long as a slow step (p99), and at least this long.
_TIMES, _AT_LEAST_S = 4.0, 3.0
# The same limits before the first step, and during the first few steps, which are too few to learn from.
_FIRST_S, _EARLY_S, _NUM_EARLY = 1800.0, 30.0, 8
_NUM_FIRST = 3
# Between steps a program loads, evaluates or saves, possibly on one rank only. The limit is this long, or several times
# the longest such pause so far. The shorter limit is for holding the GIL, for example to pickle a large state.
_BETWEEN_S, _HELD_BETWEEN_S = 1800.0, 600.0
_PATIENCE = 5.0  # factor on the limits if no other rank waits for this one
_CPU_S = 1.5  # minimum CPU time of a rank that is reported as computing
# A blocked process sleeps for at least this fraction of the time. A process that waits for a core is runnable, not
# hung.
_BLOCKED = 0.8
_MOST_FRAMES = 20  # maximum number of printed frames
_MARK = "mark long-running work with paceline.slow()"
# The symptom of each kind of fault and the advice.
_FOUND = {
    "stopped": "has been stopped (SIGSTOP)",
    "gil": "has held Python's lock (the GIL)",
    "loop": "has been computing",
    "blocked": "has been blocked",
    "disk": "has been waiting for a disk or a driver (state D)",
    "kernel": "has been waiting for its GPU",
    "collective": "has been waiting in a collective that the others have not joined",
    "desynchronized": "has started a different number of collectives than the others",
    "left": "has left, and others have been waiting",
    "all-wait": "all ranks have been waiting for each other",
}
_ADVICE = {
    "ended": "see its own output, or the kernel's log (dmesg)",
    "stopped": "it was suspended and never resumed, by a person, a debugger or a job manager",
    "gil": f"a call in this stack does not release the GIL: make it release the GIL, or return sooner; {_MARK}",
    "loop": f"it is slow in this stack, or stuck in a loop; {_MARK}",
    "blocked": f"it waits for something other than a rank: a lock, a file, a child process; {_MARK}",
    "disk": "a disk, a network file system or a driver does not answer (dmesg; /proc/PID/stack shows where)",
    "kernel": "a kernel that it launched never finishes, or the GPU has failed (dmesg, nvidia-smi)",
    "collective": "the other ranks are not in this collective: all ranks must make the same calls in the same order",
    "desynchronized": "all ranks must call the same collectives in the same order",
    "left": "give every rank the same number of batches, or train inside `with model.join():`",
    "all-wait": "no rank is missing: they called different collectives, or the network between them is cut",
}


def why_not() -> str:
    """Why this host cannot run a monitor; empty if it can."""
    has_all = sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")
    return "" if has_all else "the monitor needs Linux 5.3 or later"


def is_wanted() -> bool:
    """Whether the environment requests a monitor."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def find_hang_timeout(given: str | None = None) -> float:
    """Seconds after which a hung rank is terminated: from the option, the environment, or the default."""
    text, name = given or os.environ.get(TIMEOUT_VARIABLE, ""), "--hang-timeout" if given else TIMEOUT_VARIABLE
    limit_s = parse_duration(text, name) if text else HANG_S
    if not limit_s > 0:
        raise ConfigError(f"{name} {text}: must be above 0; to monitor without ending ranks, use a long one like 30d")
    return limit_s


class Suspicion(NamedTuple):
    """A suspected fault of a rank (None: all ranks), found from snapshots only. The job must end after `end_s`, with a
    warning before that; None means that the fault is proven. If `is_certain` is False, the rank's stack must also be
    inside a collective."""

    kind: str
    rank: int | None
    since_s: float
    end_s: float | None = None
    is_certain: bool = True

    @property
    def ends(self) -> bool:
        return self.end_s is None or self.since_s > self.end_s


@dataclass(frozen=True)
class Verdict:
    """The fault of one rank: what happened, where, for how long, who waits for it, and its position in the code.

    `kind` is a key of `_ADVICE`; "all-wait" blames no rank. `ends` means that the job must end: because the fault
    is proven, or because it lasted longer than `limit`. Otherwise this is a warning.
    """

    kind: str
    rank: int | None
    what: str
    where: str
    since_s: float = 0.0
    waiting: str = ""
    place: str = ""
    stack: str = ""
    ends: bool = True
    limit: str = ""

    @property
    def summary(self) -> str:
        """The predicate of a sentence about the rank."""
        since = f" for {self.since_s:.1f} s" if self.since_s else ""
        at = f"it is at {self.place}" if self.place else ""
        text = "; ".join(filter(None, (f"{self.what}{since} {self.where}".strip(), self.waiting, at)))
        return f"{text}: {_ADVICE[self.kind]}{self._describe_end()}"

    def _describe_end(self) -> str:
        """Describe Paceline's reaction; empty for a rank that ended by itself."""
        who = {"ended": "", "left": "the ranks that wait", "all-wait": "all ranks"}.get(self.kind, "it")
        if not self.ends:
            return f"; Paceline ends {who} only if this lasts longer than {self.limit}" if self.limit else ""
        why = f" because this lasted longer than {self.limit}" if self.limit else ""
        return f"; Paceline ended {who}{why}" if who else ""


class RankSnapshot(NamedTuple):
    """A snapshot of one rank: its process state (R, S, D, T; "" if it is gone) and its status page."""

    state: str
    cpu_s: float
    serial: int = 0
    step: int = 0
    phase: int = START
    bucket: int = -1
    beat_ns: int = 0
    num_steps: int = 0
    p99_s: float = 0.0  # of recent steps, excluding the time between them
    longest_s: float = 0.0  # longest time between two steps so far
    is_busy: bool = False  # whether the GPU of a waiting rank is busy
    most_s: float = math.inf  # limit of a marked pause
    num_started: int = 0  # collectives started by a waiting rank; 0 if not counted


class _Span:
    """A period without change: its duration, and the seconds spent asleep and waiting for a disk. `cpu_s` is the CPU
    time at its start."""

    def __init__(self, cpu_s: float) -> None:
        self.cpu_s = cpu_s
        self.lasted_s = self.asleep_s = self.disk_s = 0.0

    def add(self, state: str, took_s: float) -> None:
        self.lasted_s += took_s
        self.asleep_s += took_s if state == "S" else 0.0
        self.disk_s += took_s if state == "D" else 0.0

    @property
    def is_asleep(self) -> bool:
        return self.asleep_s >= _BLOCKED * self.lasted_s


class _History:
    """The snapshots of one rank: how long it has been in its current phase, and how long it has sent no heartbeat."""

    def __init__(self, snapshot: RankSnapshot) -> None:
        self.snapshot = snapshot
        self.stopped_s = 0.0
        self.phase, self.silence = _Span(snapshot.cpu_s), _Span(snapshot.cpu_s)
        self.is_in_collective = False  # the stack shows that the rank waits for other ranks in this phase
        self._step_cpu_s = collections.deque[float](maxlen=31)  # per step, averaged over each second
        # seconds observed, and the number of steps and the CPU time at the start of the window
        self._window = 0.0, 0, 0.0

    def add(self, snapshot: RankSnapshot, took_s: float) -> None:
        before, self.snapshot = self.snapshot, snapshot
        self.stopped_s = self.stopped_s + took_s if snapshot.state == "T" else 0.0
        if snapshot.serial != before.serial:
            self.phase = _Span(snapshot.cpu_s)
            self.is_in_collective = False
        if snapshot.beat_ns != before.beat_ns:
            self.silence = _Span(snapshot.cpu_s)
        self.phase.add(snapshot.state, took_s)
        self.silence.add(snapshot.state, took_s)
        window_s, num_steps, cpu_s = self._window
        self._window = window_s + took_s, num_steps, cpu_s
        if window_s > 1.0 and snapshot.num_steps > num_steps:
            if num_steps:  # excludes the time before the first step
                self._step_cpu_s.append((snapshot.cpu_s - cpu_s) / (snapshot.num_steps - num_steps))
            self._window = 0.0, snapshot.num_steps, snapshot.cpu_s

    @property
    def step_cpu_s(self) -> float:
        """CPU time per step: the median, because some windows may contain an evaluation."""
        return statistics.median(self._step_cpu_s) if self._step_cpu_s else 0.0

    @property
    def is_there(self) -> bool:
        return bool(self.snapshot.state) and self.snapshot.phase != LEFT

    @property
    def waits(self) -> bool:
        return self.snapshot.phase == WAIT or self.is_in_collective

    @property
    def may_wait(self) -> bool:
        """Whether the rank is, or may be, waiting for other ranks: a program's own collectives are not marked."""
        return self.phase.lasted_s > 1.0 and (self.waits or self.phase.is_asleep)


class HangDetector:
    """Decides from snapshots of all ranks of a host whether one of them is suspended, slow or hung. `has_others` means
    that ranks on other hosts may wait for the ranks here, and vice versa. Reports nothing twice while a rank stays in
    one phase (`note_named`), unless the rank must now be terminated."""

    def __init__(self, has_others: bool = False, hang_timeout_s: float = HANG_S) -> None:
        self.has_others, self.hang_timeout_s = has_others, hang_timeout_s
        self.seen: dict[int, _History] = {}
        self._looked_s = math.inf
        self._named: dict[int | None, list[int]] = {}  # the phase in which each rank was reported

    def look(self, now_s: float, snapshots: Mapping[int, RankSnapshot]) -> Suspicion | None:
        took_s, self._looked_s = min(max(0.0, now_s - self._looked_s), _MOST_S), now_s
        for rank, snapshot in snapshots.items():
            if rank in self.seen:
                self.seen[rank].add(snapshot, took_s)
            else:
                self.seen[rank] = _History(snapshot)
        return self.find()

    def find(self) -> Suspicion | None:
        return self._find_stopped() or self._find_hung() or self._find_unmatched()

    def note_named(self, rank: int | None) -> None:
        """Record that this rank was reported; None if the report was that all ranks wait."""
        self._named[rank] = self._list_serials(rank)

    def _list_serials(self, rank: int | None) -> list[int]:
        return [one.snapshot.serial for number, one in self.seen.items() if rank in (None, number)]

    def _suspect(self, kind: str, rank: int | None, since_s: float, end_s: float | None) -> Suspicion | None:
        found = Suspicion(kind, rank, since_s, end_s)
        return found if found.ends or self._named.get(rank) != self._list_serials(rank) else None

    @property
    def limit_s(self) -> float:
        """Time that a phase of a step may take before its rank is reported."""
        steps = [(one.snapshot.num_steps, one.snapshot.p99_s) for one in self.seen.values()]
        num_steps, p99_s = min((n for n, _ in steps), default=0), max((p for _, p in steps), default=0.0)
        at_least_s = _FIRST_S if num_steps == 0 else _EARLY_S if num_steps < _NUM_EARLY else _AT_LEAST_S
        return max(at_least_s, _TIMES * p99_s)

    def _there(self) -> dict[int, _History]:
        return {rank: one for rank, one in self.seen.items() if one.is_there}

    def _find_stopped(self) -> Suspicion | None:
        there = self._there()
        stopped = {rank: one.stopped_s for rank, one in there.items() if one.stopped_s > _STOPPED_S}
        # If all ranks are stopped, including those that left, the job is suspended: by Ctrl-Z or by a job manager.
        is_suspended = all(one.stopped_s > _STOPPED_S for one in self.seen.values() if one.snapshot.state)
        if not stopped or (is_suspended and not (self.has_others and len(there) == 1)):
            return None
        rank = max(stopped, key=lambda rank: stopped[rank])
        return Suspicion("stopped", rank, stopped[rank])

    def _find_hung(self) -> Suspicion | None:
        there, found = self._there(), list[Suspicion]()
        for rank, one in there.items():
            waits = self.has_others or any(other.may_wait for number, other in there.items() if number != rank)
            if (suspicion := self._find_slow(rank, one, 1.0 if waits else _PATIENCE)) is not None:
                found.append(suspicion)
        order = ("gil", "loop", "blocked", "disk")
        return min(found, key=lambda one: (order.index(one.kind), -one.since_s), default=None)

    def _find_slow(self, rank: int, one: _History, patience: float) -> Suspicion | None:
        snapshot, step_s = one.snapshot, self.limit_s
        between_s = max(step_s, _TIMES * snapshot.longest_s)
        limits = {SLOW: (snapshot.most_s, snapshot.most_s), START: (_FIRST_S, _FIRST_S)}
        limits[BETWEEN] = max(_HELD_BETWEEN_S, between_s), max(_BETWEEN_S, between_s)
        held_s, limit_s = (patience * each for each in limits.get(snapshot.phase, (step_s, step_s)))
        # A program that never takes a step, such as inference, may run normally for hours.
        end_s = {SLOW: limit_s, START: math.inf}.get(snapshot.phase, max(limit_s, self.hang_timeout_s))
        cpu_s = max(_CPU_S, 2 * _TIMES * one.step_cpu_s) * patience
        phase, silence = one.phase, one.silence
        if silence.lasted_s > held_s and (silence.is_asleep or snapshot.cpu_s - silence.cpu_s >= cpu_s):
            return self._suspect("gil", rank, silence.lasted_s, end_s)
        if one.waits or phase.lasted_s <= limit_s:
            return None
        if phase.disk_s >= _BLOCKED * phase.lasted_s:
            return self._suspect("disk", rank, phase.lasted_s, end_s)
        if phase.is_asleep:
            return self._suspect("blocked", rank, phase.lasted_s, end_s)
        if snapshot.cpu_s - phase.cpu_s < cpu_s or snapshot.phase == START:
            return None
        # Between steps, an infinite loop looks like an evaluation, and ranks that wait for it have their own timeouts.
        return self._suspect("loop", rank, phase.lasted_s, math.inf if snapshot.phase == BETWEEN else end_s)

    def _find_unmatched(self) -> Suspicion | None:
        """Find ranks that wait for a rank whose GPU is stuck, for a rank that left, for a rank in a different
        collective, or for each other."""
        there, limit_s = self._there(), self.limit_s
        waiting = {rank: one for rank, one in there.items() if one.waits and one.phase.lasted_s > limit_s}
        for rank, one in waiting.items():
            if one.snapshot.is_busy:
                return self._suspect("kernel", rank, one.phase.lasted_s, self.hang_timeout_s)
        if not waiting or self.has_others:
            return None
        spins = any(one.snapshot.num_started for one in waiting.values())  # a rank that waits for NCCL does not sleep
        for rank, one in there.items():
            is_outside = one.snapshot.phase in (BETWEEN, START) and not one.waits
            if is_outside and one.phase.lasted_s > limit_s and (spins or one.phase.is_asleep):
                return Suspicion("collective", rank, one.phase.lasted_s, is_certain=False)
        if len(waiting) < len(there):  # the others may be waiting for a rank that is only slow
            return None
        since_s = max(one.phase.lasted_s for one in waiting.values())
        if left := [rank for rank, one in self.seen.items() if not one.is_there]:
            return Suspicion("left", left[0], since_s)
        own = [rank for rank, one in waiting.items() if one.snapshot.phase != WAIT]
        if len(own) == 1 < len(there):  # one rank waits outside the wrapper, and all others wait inside it
            return Suspicion("collective", own[0], waiting[own[0]].phase.lasted_s)
        if (odd := self._find_odd(waiting)) is not None:
            return Suspicion("desynchronized", odd, waiting[odd].phase.lasted_s)
        if len(there) > 1 and min(one.phase.lasted_s for one in waiting.values()) > 2 * limit_s:
            # If all ranks wait for the same message, it may just be large.
            awaited = {-2 if rank in own else one.snapshot.bucket for rank, one in waiting.items()}
            return self._suspect("all-wait", None, since_s, None if len(awaited) > 1 else self.hang_timeout_s)
        return None

    @staticmethod
    def _find_odd(waiting: Mapping[int, _History]) -> int | None:
        """The rank that has started a different number of collectives than most ranks; of two ranks, the one with more.
        NCCL matches calls only by their order: after one extra call, all ranks wait for different collectives."""
        counts = {rank: one.snapshot.num_started for rank, one in waiting.items()}
        if not all(counts.values()):
            return None
        seen = collections.Counter(counts.values())
        usual = min(seen, key=lambda count: (-seen[count], count))
        return next((rank for rank, count in counts.items() if count != usual), None)


class _Process:
    """One rank: its status page, its stacks, its process."""

    def __init__(self) -> None:
        self.page_fd, self.stacks_fd = (os.memfd_create(f"paceline-{name}") for name in ("page", "stacks"))
        os.ftruncate(self.page_fd, pulse.PAGE_BYTES)
        self.page = pulse.map_page(self.page_fd)
        self.words = memoryview(self.page).cast("q")
        self.handle: Handle | None = None  # once the rank has opened its page

    def close(self) -> None:
        self.words.release()
        self.page.close()
        os.close(self.page_fd)
        os.close(self.stacks_fd)
        if self.handle is not None:
            self.handle.close()

    def look(self) -> RankSnapshot | None:
        """A snapshot; None before the rank has opened its page."""
        words = self.words
        if self.handle is None:
            if not words[pulse.PID]:
                return None
            self.handle = Handle(words[pulse.PID])
        state, cpu_s = self.handle.read_state()
        serial, step, _, bucket, _, beat_ns, num_steps = words[pulse.SERIAL : pulse.NUM_STEPS + 1]
        phase, longest_s = self.find_phase()[0], words[pulse.LONGEST_NS + BETWEEN] / 1e9
        p99_s, is_busy, num_started = self._find_p99(), bool(words[pulse.IS_BUSY]), words[pulse.NUM_STARTED]
        times = p99_s, longest_s, is_busy, self.find_most_s(), num_started
        return RankSnapshot(state, cpu_s, serial, step, phase, bucket, beat_ns, num_steps, *times)

    def find_phase(self) -> tuple[int, str]:
        """The phase and the label of a marked pause."""
        phase = self.words[pulse.PHASE]
        if self.words[pulse.IS_COMPILING] and phase != LEFT:
            return SLOW, "torch.compile"
        return phase, pulse.read_text(self.page, pulse.LABEL)

    @property
    def since_s(self) -> float:
        """How long the rank has been in its phase."""
        return float(time.monotonic_ns() - self.words[pulse.SINCE_NS]) / 1e9

    def find_most_s(self) -> float:
        """The time limit of a marked pause; infinite for a compilation."""
        most_ns = self.words[pulse.MOST_NS]
        return math.inf if self.words[pulse.IS_COMPILING] or not most_ns else most_ns / 1e9

    def _find_p99(self) -> float:
        """The p99 of recent steps."""
        num_steps = self.words[pulse.NUM_STEPS]
        recent = list(self.words[pulse.RECENT_NS : pulse.RECENT_NS + min(num_steps, pulse.NUM_RECENT)])
        if num_steps <= pulse.NUM_RECENT:
            recent = recent[_NUM_FIRST:]  # in the first steps, ranks wait until all have started
        recent.sort()
        return recent[math.ceil(0.99 * len(recent)) - 1] / 1e9 if recent else 0.0

    @property
    def error(self) -> str:
        """The error with which the rank is ending or has left its world."""
        return pulse.read_text(self.page, pulse.ERROR)

    @property
    def is_gone(self) -> bool:
        return self.handle is not None and self.handle.is_gone

    def describe(self) -> str:
        """The current or last step and phase; empty if unknown."""
        words, (phase, label) = self.words, self.find_phase()
        step, bucket = words[pulse.STEP], words[pulse.BUCKET]
        if phase == START:
            return "before the first step" if words[pulse.PID] else ""
        if phase == LEFT:  # after an error or at its end
            is_begun = words[pulse.COUNTED] or words[pulse.NUM_STEPS]
            return f"in step {step}" if self.error and is_begun else f"after {step - 1} steps"
        if phase == WAIT:
            return f"in step {step}, while it waited for {'the other ranks' if bucket < 0 else f'bucket {bucket}'}"
        if phase == SLOW:
            return f"in step {step}, in {label!r}"
        where = "outside of forward, backward and optimizer" if phase == BETWEEN else f"in {pulse.NAMES[phase]}"
        return f"in step {step}, {where}"

    def tell(self, text: str) -> None:
        """Have the rank print this text, on a dedicated thread (`pulse`)."""
        pulse.write_text(self.page, pulse.NOTICE, text)
        self.words[pulse.NUM_NOTICES] += 1

    def read_stack(self, limit_s: float = 1.0) -> str:
        """The stacks of all the rank's threads; empty if the rank is stopped or gone."""
        if self.handle is None or self.words[pulse.PHASE] == LEFT:
            return ""
        if self.handle.read_state()[0] in ("T", "t", "Z", ""):
            return ""
        os.ftruncate(self.stacks_fd, 0)
        self.handle.signal(pulse.STACKS_SIGNAL)
        until_s, size = time.monotonic() + limit_s, 0
        while time.monotonic() < until_s:
            time.sleep(0.03)
            before, size = size, os.fstat(self.stacks_fd).st_size
            if size and size == before:
                break
        return self._read_stacks()

    def _read_stacks(self) -> str:
        return os.pread(self.stacks_fd, 1 << 16, 0).decode(errors="replace").strip()

    def read_fatal(self) -> str:
        """The stacks written by a crash."""
        _, found, stack = self._read_stacks().rpartition("Fatal Python error: ")
        return stack if found else ""


class Monitor(contextlib.AbstractContextManager["Monitor"]):
    """Monitors the ranks of one host. Pass each rank its pages (`find_pages`) and call `look` ten times a second."""

    def __init__(self, ranks: Sequence[int], world_size: int, hang_timeout_s: float = HANG_S) -> None:
        self.world_size = world_size
        self._processes = {rank: _Process() for rank in ranks}
        self._detector = HangDetector(len(ranks) < world_size, hang_timeout_s)
        self._asked_s, self._left_s = 0.0, math.inf
        self._oom_kills = collections.deque([(time.monotonic(), count_oom_kills())] * 2, maxlen=2)
        self._imports = False  # the last suspected rank was importing a module

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.close()
        self._processes = {}

    def find_pages(self, rank: int) -> tuple[str, str]:
        """The paths of a rank's page and of the file for its stacks, valid for processes of this user on this host."""
        process, here = self._processes[rank], f"/proc/{os.getpid()}/fd"
        return f"{here}/{process.page_fd}", f"{here}/{process.stacks_fd}"

    def look(self) -> Verdict | None:
        """A fault that must end the job, or a warning, which is returned once (`Verdict.ends`)."""
        snapshots = {rank: one.look() for rank, one in self._processes.items()}
        there = {rank: snapshot for rank, snapshot in snapshots.items() if snapshot is not None}
        now_s = time.monotonic()
        if now_s - self._oom_kills[-1][0] > _OOM_S:
            self._oom_kills.append((now_s, count_oom_kills()))
        found = self._detector.look(now_s, there)
        return None if found is None else self._make_verdict(found)

    def announce(self, text: str, rank: int | None = None, stack: str = "") -> None:
        """Print `text` on stderr with the main thread's stack, and have ranks with a different stderr print it, so that
        it appears in every rank's log. The process `rank` may be unable to print, so it comes last."""
        frames = "".join(f"\n  {name} ({file}:{line})" for file, line, name in find_frames(stack)[:_MOST_FRAMES])
        print(f"paceline: {text}{frames}", file=sys.stderr, flush=True)
        outputs = {None, _find_output("self")}
        for number in sorted(self._processes, key=lambda number: number == rank):
            process = self._processes[number]
            if process.handle is None or process.is_gone:
                continue
            if (output := _find_output(process.handle.pid)) not in outputs:
                outputs.add(output)
                process.tell(text)

    def pids(self) -> dict[int, int]:
        """The process ids of the ranks that have opened their pages."""
        return {rank: one.handle.pid for rank, one in self._processes.items() if one.handle is not None}

    def wait(self, limit_s: float) -> None:
        """Wait until a rank ends, for at most `limit_s`."""
        handles = [one.handle.fd for one in self._processes.values() if one.handle is not None and not one.is_gone]
        multiprocessing.connection.wait(handles, limit_s)

    def signal(self, ranks: Sequence[int] | None, number: int) -> None:
        """Send a signal to these ranks, or to all."""
        for rank in self._processes if ranks is None else ranks:
            if (handle := self._processes[rank].handle) is not None:
                handle.signal(number)

    def tell_lost(self) -> None:
        """Tell the ranks that one of them is lost, since some collectives would wait for it forever."""
        for one in self._processes.values():
            one.words[pulse.IS_LOST] = 1

    def are_all_gone(self) -> bool:
        return all(one.is_gone or one.handle is None for one in self._processes.values())

    def have_all_left(self) -> bool:
        """Whether every rank of this host has finished properly."""
        there = self._detector.seen
        if len(there) < len(self._processes) or any(one.is_there for one in there.values()):
            self._left_s = math.inf
            return False
        self._left_s = min(self._left_s, time.monotonic())
        # A rank with an error may be about to exit because of it; one that keeps running has handled it.
        failed = [one for one in self._processes.values() if one.error and not one.is_gone]
        if any(one.words[pulse.IS_ENDING] for one in failed):  # until the rank exits or `find_ended` gives up
            return False
        return not failed or time.monotonic() - self._left_s > _HANDLED_S

    def find_ended(self) -> dict[int, tuple[str, bool]]:
        """The ranks that a signal or an error has ended, how they ended, and whether the error only reports a lost
        rank. Includes ranks that hang at exit after an error: closing an NCCL group may wait for a collective that
        never ends."""
        found = {}
        for rank, one in self._processes.items():
            if one.handle is None or not (one.is_gone or self._hangs_at_exit(rank)):
                continue
            status, error = one.handle.find_status(), one.error
            has_left = one.words[pulse.PHASE] == LEFT
            if status == 0 or (status is None and not error and has_left):  # the rank handled an error in its world
                continue
            where = self.describe(rank)
            if error:
                how = f"{error} {where}" + ("" if one.is_gone else ", and does not exit; Paceline ended it")
            elif status is None:  # the parent has reaped the process (before Linux 6.15)
                how = f"ended {where} with an unknown exit code"
            else:
                how = self.describe_end(rank, os.waitstatus_to_exitcode(status))
            text = "; ".join(filter(None, (how, self.describe_waiting(rank))))
            found[rank] = text, bool(one.words[pulse.IS_SECONDARY])
        return found

    def _hangs_at_exit(self, rank: int) -> bool:
        """Whether a rank with an error has left its world, and has been exiting for too long."""
        one, history = self._processes[rank], self._detector.seen.get(rank)
        if history is None or not one.words[pulse.IS_ENDING] or one.words[pulse.PHASE] != LEFT or not one.error:
            return False
        return history.phase.lasted_s > max(_EXIT_S, self._detector.hang_timeout_s)

    def find_step(self, rank: int | None = None) -> tuple[int, int] | None:
        """The current or last step of a rank, and how many steps the leading rank has completed; None before the first
        step of this world. Without a rank, or before its first step, the step of the leading rank."""
        pages = {number: one.words for number, one in self._processes.items() if one.words[pulse.COUNTED]}
        if not pages:
            return None
        last = max(pages.values(), key=lambda words: (words[pulse.STEP], words[pulse.COUNTED]))
        done = last[pulse.STEP] - (last[pulse.COUNTED] < pulse.COMPLETE)
        return pages.get(-1 if rank is None else rank, last)[pulse.STEP], done

    def is_busy(self, rank: int) -> bool:
        """Whether a rank that does not wait for others may need more time: it has marked a pause, or is within the
        learned limit."""
        one = self._processes[rank]
        phase, _ = one.find_phase()
        limit_s = one.find_most_s() if phase == SLOW else self._detector.limit_s
        return phase != WAIT and one.since_s <= limit_s

    def describe(self, rank: int) -> str:
        """The current or last step and phase of a rank; empty if unknown."""
        return self._processes[rank].describe()

    def describe_end(self, rank: int, code: int) -> str:
        """Describe how a rank ended, from its exit code, and where it was."""
        is_oom = count_oom_kills() > self._oom_kills[0][1]
        return describe_end(code, self.describe(rank), is_oom, self._processes[rank].read_fatal())

    def describe_waiting(self, rank: int | None) -> str:
        """Describe which ranks wait and for what."""
        waiting: dict[str, list[int]] = {}
        for other, one in self._detector.seen.items():
            if other != rank and one.is_there and one.snapshot.phase == WAIT:
                what = f"bucket {one.snapshot.bucket}" if one.snapshot.bucket >= 0 else "the other ranks"
                waiting.setdefault(f"for {what} in step {one.snapshot.step}", []).append(other)
        parts = [f"{name_ranks(ranks)} wait{'s' * (len(ranks) == 1)} {what}" for what, ranks in waiting.items()]
        return ", ".join(parts)

    def _make_verdict(self, found: Suspicion) -> Verdict | None:
        """The verdict on a suspected rank; None if its stack or its later progress shows that it is healthy."""
        kind, rank, since_s, end_s, is_certain = found
        if rank is None:
            places = {other: describe_frames(one.read_stack(), 2) for other, one in self._processes.items()}
            text = "; ".join(f"rank {other} is at {place}" for other, place in places.items() if place)
            waiting, limit = self.describe_waiting(None), _describe_limit(end_s)
            self._detector.note_named(None)
            return Verdict(kind, None, _FOUND[kind], waiting, since_s, text, ends=found.ends, limit=limit)
        process, history = self._processes[rank], self._detector.seen[rank]
        where, waiting = process.describe(), self.describe_waiting(rank)  # read now: the signal below may wake the rank
        if kind == "left" and process.error:
            return Verdict("ended", rank, process.error, where, waiting=waiting)
        if (not is_certain or self._imports) and time.monotonic() - self._asked_s < 2.0:
            return None
        self._asked_s = time.monotonic()
        stack = process.read_stack()
        is_inside = is_in_collective(stack)
        if not is_certain or (kind == "blocked" and is_inside):  # torch's wrapper synchronizes buffers in forward
            history.is_in_collective = is_inside
            again = self._detector.find() if is_inside and not is_certain else None
            return self._make_verdict(again) if again is not None and again.is_certain else None
        if kind == "collective" and not is_inside:  # the rank has since left the collective
            history.is_in_collective = False
            return None
        self._imports = kind in ("blocked", "loop", "disk") and since_s < _FIRST_S and is_importing(stack)
        if self._imports:
            return None
        self._detector.note_named(rank)
        limit = _describe_limit(end_s, history.snapshot.phase == SLOW)
        return Verdict(
            kind, rank, _FOUND[kind], where, since_s, waiting, describe_frames(stack), stack, found.ends, limit
        )


def _describe_limit(end_s: float | None, is_marked: bool = False) -> str:
    return "" if end_s in (None, math.inf) else f"{end_s:g} s ({'its at_most' if is_marked else 'the hang timeout'})"


def _find_output(process: int | str) -> tuple[int, int] | None:
    """The file behind a process's stderr."""
    with contextlib.suppress(OSError):
        found = os.stat(f"/proc/{process}/fd/2")
        return found.st_dev, found.st_ino
    return None
