"""The notebook's side of the ranks that run its cells: starts, runs, interrupts, recovers and ends them."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
from IPython.core.inputtransformer2 import TransformerManager

from paceline.errors import CollectiveError, ConfigError, LaunchError, PacelineError
from paceline.runtime.faults.processes import read_state
from paceline.runtime.notebooks.cells import (
    Cell,
    CellSettings,
    Cleared,
    Ended,
    Interrupt,
    Locate,
    Located,
    Opened,
    Output,
    Reopen,
    Shown,
)
from paceline.runtime.ranks.launch import SAME_REQUEST_S, RankPool, handle_signals
from paceline.units import format_number_of

Show = Callable[[int, Any], None]  # a rank, and an Output, a Shown or a Cleared from it

_OPEN_S = 180.0  # how long ranks may take to start and open their world
_ABORT_S = 0.6  # how long an interrupted rank may take before its collectives are aborted
_UNRESPONSIVE_S = 4.0  # how long an interrupted rank may take before it is reported as unresponsive
_STUCK_S = 2.0  # after a rank has failed, one that has been blocked for this long counts as waiting for it
_NOTICE_S = 10.0  # report a possible deadlock once every rank has been blocked for this long
_TICK_S = 0.1  # how often to check these limits
_LOCATE_S = 0.2  # how often to ask ranks for their position
# Messages from this process to itself: the ranks were closed, or one of them died; and Ctrl-C, which is a message
# because an exception could be raised between receiving a message and handling it.
_RANKS_ENDED, _INTERRUPTED = object(), object()


class CellError(LaunchError):
    """A cell failed on `rank`, with the traceback `rank_traceback`; `others` has a line for each other failed rank."""

    who: str = ""
    others: tuple[str, ...] = ()

    def _render_traceback_(self) -> list[str]:
        """The traceback shown in the notebook. It replaces this process's frames, which are not the user's code."""
        return [*self.rank_traceback.rstrip().splitlines(), f"(on {self.who})", *self.others]


class CellInterrupted(KeyboardInterrupt):
    """A cell was interrupted; the text describes where each rank was."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@dataclass(frozen=True)
class RankStatus:
    """One rank of a notebook; `state` is text."""

    rank: int
    pid: int
    device: str
    state: str
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None


class CellRanks(contextlib.AbstractContextManager["CellRanks"]):
    """Ranks of a pool whose only job is to run cells. A thread receives their messages, and `run` handles them.

    `notice` receives messages for the user about the ranks. While no cell is running, that thread passes the ranks'
    output to `show`.
    """

    def __init__(self, settings: CellSettings, show: Show, notice: Callable[[str], None]) -> None:
        if settings.gpu_ids and len(settings.gpu_ids) < settings.num_ranks:
            text = f"{settings.num_ranks} ranks on {format_number_of(len(settings.gpu_ids), 'GPU')}"
            raise ConfigError(f"{text}: list one for each rank", code="gpu-ids")
        self.settings = settings
        self._show = show
        self._notice = notice
        self._pool = RankPool(settings.num_ranks, ["paceline.runtime.notebooks.cells"])
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._is_busy = False
        self._has_ended = False
        self._error: BaseException | None = None  # the error of the rank whose failure terminated all ranks
        self._numbers = itertools.count(1)
        self._devices = [""] * settings.num_ranks
        self._gpu_memory: list[int | None] = [None] * settings.num_ranks  # after the last cell
        self._counts: list[dict[str, int]] = [{} for _ in range(settings.num_ranks)]
        self._pids: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._serve, name="paceline-cells", daemon=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        return not self._has_ended and self._thread.is_alive()

    def start(self) -> str:
        """Start the ranks, wait until their world is open, and return a description of it."""
        try:
            with self._receiving():
                self._pool.start()
                self._thread.start()
                atexit.register(self.close)
                text = self._await_world()
            self._pids = tuple(self._pool.pids())
            return text
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks; idempotent."""
        atexit.unregister(self.close)
        if self.is_alive:
            with contextlib.suppress(IndexError):  # the pool has already terminated the ranks
                self._send(range(self.settings.num_ranks), None)
            self._thread.join(1.0)
        self._pool.close(at_once=self._thread.is_alive())
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def run(self, source: str, ranks: Sequence[int] | None = None, name: str = "") -> None:
        """Run source on these ranks, by default on all, and return when it has finished on all of them.

        Raises CellError if it fails on a rank, once the ranks that waited for it have also ended the cell, and
        CellInterrupted after Ctrl-C. Afterward the ranks can be used again: if collectives were left incomplete, the
        ranks have opened a new world.
        """
        chosen = tuple(range(self.settings.num_ranks)) if ranks is None else tuple(dict.fromkeys(ranks))
        self.check_ranks(chosen)
        self._check_alive()
        number = next(self._numbers)
        with self._receiving(), handle_signals(lambda *_: self._inbox.put((-1, _INTERRUPTED)), signal.SIGINT):
            self._send(chosen, Cell(number, name or f"In[{number}]", source))
            run = _CellRun(self, number, chosen)
            ended = run.follow()
            for rank, end in ended.items():
                self._gpu_memory[rank] = end.gpu_memory_bytes
            if is_broken := self._find_broken(ended):
                self._reopen()
        if is_broken:
            advice = "recreate all wrappers, meshes and groups that used the old one"
            self._notice(f"collectives were left incomplete, so a new process group was opened: {advice}")
        failures = {rank: end for rank, end in ended.items() if end.failure is not None}
        error = describe_end(failures, self.settings.num_ranks, run.is_interrupted)
        if error is not None:
            raise error

    def status(self) -> list[RankStatus]:
        """The state and memory of every rank."""
        found = []
        for rank, pid in enumerate(self._pids):
            state = "ended" if self._error is None else _first_line(self._error)
            memory = None
            with contextlib.suppress(psutil.NoSuchProcess):
                if self.is_alive:
                    memory = psutil.Process(pid).memory_info().rss
                    is_suspended = read_state(pid)[0] == "T"
                    state = "suspended" if is_suspended else "running a cell" if self._is_busy else "idle"
            found.append(RankStatus(rank, pid, self._devices[rank], state, memory, self._gpu_memory[rank]))
        return found

    def check_ranks(self, ranks: Sequence[int]) -> None:
        wrong = [rank for rank in ranks if not 0 <= rank < self.settings.num_ranks]
        if wrong or not ranks:
            text = f"rank {wrong[0]} does not exist" if wrong else "no rank was passed"
            raise ConfigError(f"{text}: use 0 to {self.settings.num_ranks - 1}", code="rank")

    # -- messages

    def _serve(self) -> None:
        try:
            self._pool.run("paceline.runtime.notebooks.cells:serve_cells", (self.settings,), on_message=self._hear)
        except BaseException as error:
            self._error = error
        self._has_ended = True
        self._inbox.put((-1, _RANKS_ENDED))

    def _hear(self, rank: int, message: Any) -> None:
        if self._is_busy or not isinstance(message, Output | Shown):
            self._inbox.put((rank, message))
        else:
            self._show(rank, message)

    def _send(self, ranks: Sequence[int], message: Any) -> None:
        for rank in ranks:
            self._pool.send(rank, message)

    @contextlib.contextmanager
    def _receiving(self) -> Iterator[None]:
        if self._is_busy:
            raise ConfigError("the ranks are running a cell: wait until it ends, or interrupt it", code="busy")
        with contextlib.suppress(queue.Empty):
            while True:  # messages that arrived after the last cell
                rank, message = self._inbox.get_nowait()
                if isinstance(message, Output | Shown):
                    self._show(rank, message)
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _check_alive(self) -> None:
        if not self.is_alive:
            reason = "they were ended" if self._error is None else str(self._error)
            text = f"the ranks are gone: {reason}\n%dist_reset starts new ones, with an empty namespace"
            raise LaunchError(text, getattr(self._error, "rank", None), code="ranks-gone")

    def _next(self, timeout_s: float) -> tuple[int, Any]:
        """Show output until a message of another kind arrives, and return its rank and the message, or None after the
        timeout. Raises if the ranks have ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                rank, message = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return -1, None
            if isinstance(message, Output | Shown | Cleared):
                self._show(rank, message)
            elif message is _RANKS_ENDED:
                self._check_alive()
            else:
                return rank, message

    def _await_world(self) -> str:
        """Wait until every rank has joined the world; raises the first error of any rank."""
        deadline = time.monotonic() + _OPEN_S
        texts: dict[int, str] = {}
        while len(texts) < self.settings.num_ranks:
            rank, message = self._next(deadline - time.monotonic())
            if message is None:
                raise LaunchError(f"the ranks did not open their world within {_OPEN_S:g} s", code="timeout")
            if isinstance(message, Opened):
                if failure := message.failure:
                    text = f"rank {rank} {failure.summary}"
                    raise failure.error or LaunchError(text, rank, failure.trace, failure.code)
                texts[rank] = message.text
                self._devices[rank] = message.device
        self._counts = [{} for _ in self._counts]
        return texts[0]

    def _reopen(self) -> None:
        self._send(range(self.settings.num_ranks), Reopen())
        try:
            self._await_world()
        except PacelineError as error:
            self._notice(f"the process group could not be opened again: {_first_line(error)}")
            self.close()

    def _find_broken(self, ended: dict[int, Ended]) -> bool:
        """Whether a failed cell left collectives incomplete: some rank has started more collectives than others.

        Compares counts with those before the cell, because messages between two ranks are not counted on a third.
        """
        before = self._counts
        after = [ended[rank].counts if rank in ended else before[rank] for rank in range(len(before))]
        self._counts = after
        failures = [end.failure for end in ended.values() if end.failure is not None]
        if self.settings.num_ranks == 1 or not failures:
            return False
        if any(one.is_secondary or isinstance(one.error, CollectiveError) for one in failures):
            return True  # a group that has timed out or lost a rank cannot be used again
        if any(end.was_aborted for end in ended.values()):
            return True
        for group in set().union(*after):
            started = {now[group] - then.get(group, 0) for then, now in zip(before, after, strict=True) if group in now}
            if len(started) > 1:
                return True
        return False


class _CellRun:
    """One running cell: handles the messages of its ranks until it has ended on all of them."""

    def __init__(self, ranks: CellRanks, number: int, chosen: Sequence[int]) -> None:
        self._ranks = ranks
        self._number = number
        self._pending = set(chosen)
        self._ended: dict[int, Ended] = {}
        self._asked: set[int] = set()  # ranks that have not yet reported their position
        self._asked_s = -math.inf
        self._places: dict[int, tuple[Located, float]] = {}  # where a rank waits and since when
        self._interrupt_s = math.inf
        self._was_aborted = False
        self._was_noticed = False  # whether a possible deadlock was reported
        self._was_reported = False  # whether an unresponsive rank was reported

    @property
    def is_interrupted(self) -> bool:
        return self._interrupt_s < math.inf

    def follow(self) -> dict[int, Ended]:
        while self._pending:
            rank, message = self._ranks._next(_TICK_S)
            if message is _INTERRUPTED:
                self._interrupt()
            elif getattr(message, "number", None) == self._number:
                if isinstance(message, Ended):
                    self._pending.discard(rank)
                    self._ended[rank] = message
                elif isinstance(message, Located):
                    self._note_place(rank, message)
            if self._pending:
                self._locate()
                self._check_limits(time.monotonic())
        return self._ended

    def _locate(self) -> None:
        """Ask ranks for their position, but at most once until they answer: a rank that holds the GIL does not read
        messages."""
        if time.monotonic() - self._asked_s > _LOCATE_S:
            self._asked_s = time.monotonic()
            self._ranks._send(sorted(self._pending - self._asked), Locate(self._number))
            self._asked |= self._pending

    def _note_place(self, rank: int, found: Located) -> None:
        self._asked.discard(rank)
        if found.position is None:
            self._places.pop(rank, None)
        elif rank not in self._places or self._places[rank][0].position != found.position:
            self._places[rank] = found, time.monotonic()

    def _interrupt(self) -> None:
        now_s = time.monotonic()
        if not self.is_interrupted:
            self._interrupt_s = now_s
            self._ranks._send(sorted(self._pending), Interrupt(self._number))
        elif now_s - self._interrupt_s > SAME_REQUEST_S:
            self._ranks._has_ended = True
            self._ranks.close()
            raise CellInterrupted("interrupted twice: the ranks were ended; %dist_reset starts new ones")

    def _check_limits(self, now_s: float) -> None:
        """Abort the collectives of ranks that wait for a rank that will never arrive, and report hangs that only the
        user can end."""
        blocked_s = [now_s - self._places[rank][1] if rank in self._places else 0.0 for rank in self._pending]
        interrupted_s = now_s - self._interrupt_s
        has_failed = any(end.failure is not None for end in self._ended.values())
        if (interrupted_s > _ABORT_S or (has_failed and max(blocked_s) > _STUCK_S)) and not self._was_aborted:
            self._was_aborted = True
            self._ranks._send(sorted(self._pending), Interrupt(self._number, self._ranks._pids))
        if interrupted_s > _UNRESPONSIVE_S and not self._was_reported:
            self._was_reported = True
            names = ", ".join(map(str, sorted(self._pending)))
            self._ranks._notice(f"rank {names} does not respond to the interrupt: interrupt again to end all ranks")
        if min(blocked_s) > _NOTICE_S and not self.is_interrupted and not self._was_noticed:
            self._was_noticed = True
            self._ranks._notice(self._describe_deadlock())

    def _describe_deadlock(self) -> str:
        lines = [f"no rank has made progress for {_NOTICE_S:g} s; interrupt the kernel if this is a deadlock"]
        for rank in range(self._ranks.settings.num_ranks):
            if rank in self._pending:
                lines.append(f"  rank {rank} waits at {self._places[rank][0].place}")
            elif rank in self._ended:
                lines.append(f"  rank {rank} has finished the cell")
            else:
                lines.append(f"  rank {rank} does not run this cell")
        return "\n".join(lines)


def describe_end(failures: dict[int, Ended], num_ranks: int, is_interrupted: bool) -> BaseException | None:
    """The error of a cell: the error of the rank that failed first. It lists the ranks with the same traceback, then
    all other failed ranks."""
    if is_interrupted:
        places = {rank: f"at {end.place}" if end.place else "not in a cell" for rank, end in sorted(failures.items())}
        lines = [f"rank {rank} was {place}" for rank, place in places.items()]
        return CellInterrupted("\n".join(["interrupted", *lines]))
    found = {rank: end.failure for rank, end in sorted(failures.items()) if end.failure is not None}
    if not found:
        return None
    waited = {rank for rank, failure in found.items() if failures[rank].was_aborted or failure.is_secondary}
    first = min(found, key=lambda rank: (rank in waited, found[rank].when_s))
    cause = found[first]
    same = [rank for rank, failure in found.items() if failure.trace == cause.trace]
    others = []
    for rank, failure in found.items():
        if rank not in same:
            what = failure.summary.removeprefix("failed: ")
            if rank in waited and first not in waited:
                what = f"waited for rank {first}"
            place = failures[rank].place
            others.append(f"rank {rank}: {what}" + (f" ({place})" if place else ""))
    who = f"rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))} of {num_ranks}"
    error = CellError(f"{who} {cause.summary}", first, cause.trace, cause.code)
    error.who = who
    error.others = tuple(others)
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class RankLines:
    """Prefixes each line of text with its rank: `[1] text`.

    An unfinished line stays open for its rank; text of another rank starts a new line. Only one progress bar, which
    overwrites its line, is shown at a time: those of other ranks are held back until their line ends.
    """

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write
        self._open: tuple[int, str] | None = None  # the rank with an unfinished line and the line
        self._held: dict[tuple[int, str], str] = {}

    def add(self, rank: int, stream: str, text: str) -> None:
        source = rank, stream
        text = self._held.pop(source, "") + text.replace("\r\n", "\n")
        if self._open is not None and self._open != source:
            if "\r" in text and "\n" not in text:
                self._held[source] = "\r" + text.rpartition("\r")[2]
                return
            self._write(self._open[1], "\n")
            self._open = None
        at_start = self._open is None
        if at_start:
            text = text.lstrip("\r")
        made = ""
        for piece in re.findall(r"[^\n\r]*[\n\r]|[^\n\r]+", text):
            if at_start:
                made += {"\n": f"[{rank}]", "\r": ""}.get(piece, f"[{rank}] ")
            made += piece
            at_start = piece.endswith(("\n", "\r"))
        if made:
            self._write(stream, made)
        self._open = None if made.endswith("\n") else source

    def close(self) -> None:
        """Terminate all unfinished lines."""
        for (rank, stream), text in list(self._held.items()):
            del self._held[rank, stream]
            self.add(rank, stream, text.strip("\r") + "\n")
        if self._open is not None:
            self._write(self._open[1], "\n")
            self._open = None


def parse_ranks(text: str) -> list[int]:
    """Parse `0`, `1,2`, `[1, 2]` and `0-3`."""
    found: list[int] = []
    for part in text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split():
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            advice = "write %%rank 0, %%rank [1,2] or %%rank 0-3"
            raise ConfigError(f"%%rank {text.strip()}: {part!r} is not a rank; {advice}", code="rank")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def runs_on_ranks(source: str) -> bool:
    """Whether a cell is plain Python: no magic, no shell command, no `name?`. Ranks report its syntax errors, as
    IPython would."""
    if all(line.lstrip().startswith("#") or not line.strip() for line in source.splitlines()):
        return False
    try:
        python = TransformerManager().transform_cell(source)
    except SyntaxError:
        return True
    return python.count("get_ipython()") == source.count("get_ipython()")
