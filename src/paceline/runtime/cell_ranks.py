"""Ranks that run the cells of a notebook, seen from the notebook: start, run, interrupt, recover, end."""

from __future__ import annotations

import ast
import atexit
import contextlib
import itertools
import math
import queue
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import CollectiveError, ConfigError, LaunchError, PacelineError
from paceline.runtime.cells import (
    Abort,
    Ask,
    Cell,
    CellSettings,
    Cleared,
    Ended,
    Interrupt,
    Opened,
    Output,
    Refused,
    Reopen,
    Shown,
    Where,
)
from paceline.runtime.launch import SAME_REQUEST_S, RankPool, handle_signals
from paceline.units import format_number_of

Show = Callable[[int, Any], None]  # a rank, and an Output, a Shown or a Cleared of it

_OPEN_S = 180.0  # how long ranks may take to start and meet
_ANSWER_S = 2.0  # how long a rank may take to say where it is
_ABORT_S = 0.6  # how long an interrupted rank may take before its collectives are ended
_DEAF_S = 4.0  # and before it is reported that it does not react
_STUCK_S = 2.0  # a rank that stays at one place for so long after another has failed waits for that one
_LOOK_S = 0.5
_NOTICE_S = 10.0  # when nothing has moved for this long, it is reported where every rank is


class CellError(LaunchError):
    """A cell failed on `rank`, with the traceback `rank_traceback`; `others` are one line for each other rank."""

    who: str = ""
    others: tuple[str, ...] = ()

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows instead of the frames of this process, which the person did not write."""
        return [*self.rank_traceback.rstrip().splitlines(), f"(on {self.who})", *self.others]


class CellInterrupted(KeyboardInterrupt):
    """A cell was interrupted; the text says where every rank was."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@dataclass(frozen=True)
class RankStatus:
    """One rank of a notebook. `state` is what it does, in words."""

    rank: int
    pid: int
    device: str
    state: str
    memory_bytes: int | None = None
    gpu_memory_bytes: int | None = None


@dataclass
class _Lost:
    """The ranks ended: the error of the one that failed, or None where they were closed."""

    error: BaseException | None


class _Interrupted:
    """Ctrl-C, as a message among the others: an exception could come between receiving one and acting on it."""


class CellRanks(contextlib.AbstractContextManager["CellRanks"]):
    """Ranks of a pool that all run one job: serving cells. A thread listens to them; `run` acts on what they say.

    `notice` gets what is said about the ranks, a line each. What a rank writes while no cell runs goes to `show`, too,
    from that thread.
    """

    def __init__(self, settings: CellSettings, show: Show, notice: Callable[[str], None]) -> None:
        if settings.gpu_ids and len(settings.gpu_ids) < settings.num_ranks:
            text = f"{settings.num_ranks} ranks on {format_number_of(len(settings.gpu_ids), 'GPU')}"
            raise ConfigError(f"{text}: name one for each rank")
        self.settings = settings
        self._show, self._notice = show, notice
        self._pool = RankPool(settings.num_ranks)
        self._inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._is_busy = False
        self._numbers, self._tokens = itertools.count(1), itertools.count(1)
        self._lost: _Lost | None = None
        self._devices = [""] * settings.num_ranks
        self._counts: list[dict[str, int]] = [{} for _ in range(settings.num_ranks)]
        self._pids: tuple[int, ...] = ()
        self._thread = threading.Thread(target=self._serve, name="paceline-cells", daemon=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        return self._lost is None and self._thread.is_alive()

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
        """End the ranks; does nothing the second time."""
        atexit.unregister(self.close)
        if self._thread.ident is not None and self._lost is None:
            for rank in range(self.settings.num_ranks):
                with contextlib.suppress(IndexError):  # the pool has ended them
                    self._pool.send(rank, None)
            self._thread.join(1.0)
        self._pool.close(at_once=self._thread.is_alive())
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def run(self, source: str, ranks: Sequence[int] | None = None, name: str = "") -> None:
        """Run source on these ranks, by default on all, and return when it has ended on all of them.

        Raises CellError if it fails on one, once whatever waits for that one has ended too, and CellInterrupted after
        Ctrl-C. The ranks can be used afterwards: where collectives were left half done, a new world is opened.
        """
        chosen = tuple(range(self.settings.num_ranks)) if ranks is None else tuple(dict.fromkeys(ranks))
        self.check_ranks(chosen)
        self._check_alive()
        number = next(self._numbers)
        cell = Cell(number, name or f"In[{number}]", source)
        with self._receiving(), handle_signals(lambda *_: self._inbox.put((-1, _Interrupted())), signal.SIGINT):
            for rank in chosen:
                self._pool.send(rank, cell)
            watch = _Watch(self, number, chosen)
            ended = watch.follow()
            failures = {rank: end for rank, end in ended.items() if end.failure is not None}
            is_broken = self._find_broken(ended)
            if is_broken:
                self._reopen()
        error = describe_end(failures, self.settings.num_ranks, watch.is_interrupted)
        if is_broken:
            words = "A new process group was opened. Make wrappers, meshes and groups that used the old one again."
            self._notice(f"collectives were left half done: {words[0].lower()}{words[1:]}")
        if error is not None:
            raise error

    def status(self) -> list[RankStatus]:
        """What every rank does now; one that does not answer within seconds is reported as such."""
        if not self.is_alive:
            state = "ended" if self._lost is None or self._lost.error is None else _first_line(self._lost.error)
            return [RankStatus(rank, pid, self._devices[rank], state) for rank, pid in enumerate(self._pids)]
        with self._receiving():
            answers = self._ask(range(self.settings.num_ranks))
        found = []
        for rank, pid in enumerate(self._pids):
            where = answers.get(rank)
            if where is None:
                found.append(RankStatus(rank, pid, self._devices[rank], f"no answer within {_ANSWER_S:g} s"))
                continue
            state = f"at {where.place}" if where.number else "idle"
            gpu = where.gpu_memory_bytes if "cuda" in self._devices[rank] else None
            found.append(RankStatus(rank, pid, self._devices[rank], state, where.memory_bytes, gpu))
        return found

    def check_ranks(self, ranks: Sequence[int]) -> None:
        wrong = [rank for rank in ranks if not 0 <= rank < self.settings.num_ranks]
        if wrong or not ranks:
            text = f"rank {wrong[0]} does not exist" if wrong else "no rank is named"
            raise ConfigError(f"{text}: use 0 to {self.settings.num_ranks - 1}")

    # -- the thread

    def _serve(self) -> None:
        error: BaseException | None = None
        try:
            self._pool.run("paceline.runtime.cells:serve_cells", (self.settings,), on_message=self._hear)
        except BaseException as caught:
            error = caught
        self._lost = _Lost(error)
        self._inbox.put((-1, self._lost))

    def _hear(self, rank: int, message: Any) -> None:
        if self._is_busy or not isinstance(message, Output | Shown):
            self._inbox.put((rank, message))
        else:
            self._show(rank, message)

    @contextlib.contextmanager
    def _receiving(self) -> Any:
        if self._is_busy:
            raise ConfigError("the ranks run a cell: wait until it ends, or interrupt it", code="busy")
        with contextlib.suppress(queue.Empty):
            while True:  # what was said after the last cell
                rank, message = self._inbox.get_nowait()
                if isinstance(message, Output | Shown):
                    self._show(rank, message)
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    # -- talking

    def _check_alive(self) -> None:
        if self.is_alive:
            return
        reason = "they were ended" if self._lost is None or self._lost.error is None else str(self._lost.error)
        raise LaunchError(f"the ranks are gone: {reason}\n%dist_reset starts new ones, with an empty namespace")

    def _next(self, timeout_s: float) -> tuple[int, Any] | None:
        """The next message that is not to be shown; None when there was none in time. Raises when the ranks end."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                rank, message = self._inbox.get(timeout=max(0.0, min(deadline - time.monotonic(), 1e6)))
            except queue.Empty:
                return None
            if isinstance(message, Output | Shown | Cleared):
                self._show(rank, message)
            elif isinstance(message, _Lost):
                self._check_alive()
            else:
                return rank, message

    def _ask(self, ranks: Sequence[int]) -> dict[int, Where]:
        """Where these ranks are, of those that answer in time."""
        token, answers = next(self._tokens), dict[int, Where]()
        for rank in ranks:
            self._pool.send(rank, Ask(token))
        deadline = time.monotonic() + _ANSWER_S
        while len(answers) < len(ranks) and (found := self._next(deadline - time.monotonic())) is not None:
            rank, message = found
            if isinstance(message, Where) and message.token == token:
                answers[rank] = message
        return answers

    def _await_world(self) -> str:
        """Wait until every rank has joined the world; raises what one of them met."""
        deadline, texts = time.monotonic() + _OPEN_S, dict[int, str]()
        while len(texts) < self.settings.num_ranks:
            found = self._next(deadline - time.monotonic())
            if found is None:
                raise LaunchError(f"the ranks did not open their world within {_OPEN_S:g} s", code="timeout")
            rank, message = found
            if isinstance(message, Refused):
                failure = message.failure
                raise failure.error or LaunchError(f"rank {rank} {failure.summary}", rank, failure.trace, failure.code)
            if isinstance(message, Opened):
                texts[rank] = message.text
                self._devices[rank] = f"{message.device}, {message.backend}"
        self._counts = [{} for _ in self._counts]
        return texts[0]

    def _reopen(self) -> None:
        for rank in range(self.settings.num_ranks):
            self._pool.send(rank, Reopen())
        try:
            self._await_world()
        except PacelineError as error:
            self._notice(f"the process group could not be opened again: {_first_line(error)}")
            self.close()

    def _find_broken(self, ended: dict[int, Ended]) -> bool:
        """Whether a cell that failed left collectives half done: some rank has started more of them than others.

        Counts are compared with those before the cell: messages between two ranks are no business of a third.
        """
        before = self._counts
        after = [ended[rank].counts if rank in ended else before[rank] for rank in range(len(before))]
        self._counts = after
        if self.settings.num_ranks == 1 or all(end.failure is None for end in ended.values()):
            return False
        failures = [end.failure for end in ended.values() if end.failure is not None]
        if any(one.is_secondary or isinstance(one.error, CollectiveError) for one in failures):
            return True  # a group that has timed out or lost a rank is of no use
        if any(end.was_aborted for end in ended.values()):
            return True
        for group in set().union(*after):
            started = {now[group] - then.get(group, 0) for then, now in zip(before, after, strict=True) if group in now}
            if len(started) > 1:
                return True
        return False


class _Watch:
    """One cell under way: what its ranks say until it has ended on all of them."""

    def __init__(self, ranks: CellRanks, number: int, chosen: Sequence[int]) -> None:
        self._ranks, self._number = ranks, number
        self._pending, self._ended = set(chosen), dict[int, Ended]()
        self._token, self._look_s = 0, math.inf
        self._seen: dict[int, tuple[tuple[tuple[int, int], ...], float]] = {}  # where each rank is, and since when
        self._asked: dict[int, Where] = {}
        self._was_aborted, self._was_noticed, self._was_deaf = False, False, False
        self._interrupt_s = math.inf
        self._begin_s = time.monotonic()

    @property
    def is_interrupted(self) -> bool:
        return self._interrupt_s < math.inf

    def follow(self) -> dict[int, Ended]:
        while self._pending:
            found = self._ranks._next(self._plan_look())
            now_s = time.monotonic()
            if found is not None:
                self._hear(*found, now_s)
            self._look(now_s)
        return self._ended

    def _plan_look(self) -> float:
        """How long to wait for a message: shorter where something is to be done in time."""
        if self.is_interrupted or self._has_failed():
            return 0.1
        return _LOOK_S

    def _has_failed(self) -> bool:
        return any(end.failure is not None for end in self._ended.values())

    def _hear(self, rank: int, message: Any, now_s: float) -> None:
        if isinstance(message, Ended) and message.number == self._number:
            self._pending.discard(rank)
            self._ended[rank] = message
        elif isinstance(message, Where) and message.token == self._token:
            self._asked[rank] = message
            if rank not in self._seen or self._seen[rank][0] != message.position:
                self._seen[rank] = message.position, now_s
        elif isinstance(message, _Interrupted):
            self._interrupt(now_s)

    def _interrupt(self, now_s: float) -> None:
        if not self.is_interrupted:
            self._interrupt_s = now_s
            self._send(Interrupt(self._number))
        elif now_s - self._interrupt_s > SAME_REQUEST_S:
            self._ranks._lost = _Lost(None)
            self._ranks.close()
            raise CellInterrupted("interrupted twice: the ranks were ended; %dist_reset starts new ones")

    def _send(self, message: Any) -> None:
        for rank in sorted(self._pending):
            self._ranks._pool.send(rank, message)

    def _abort(self) -> None:
        if not self._was_aborted:
            self._was_aborted = True
            self._send(Abort(self._number, self._ranks._pids))

    def _look(self, now_s: float) -> None:
        """Ask ranks where they are, now and then, and act where they wait for something that will not come."""
        if not self._pending:
            return
        interrupted_s = now_s - self._interrupt_s
        if interrupted_s > _ABORT_S:
            self._abort()
        if interrupted_s > _DEAF_S and not self._was_deaf:
            self._was_deaf = True
            names = ", ".join(map(str, sorted(self._pending)))
            self._ranks._notice(f"rank {names} does not react to the interrupt: interrupt again to end all ranks")
        if not self._has_failed() and now_s - self._begin_s < _NOTICE_S / 2:
            return
        if now_s >= self._look_s or self._look_s == math.inf:
            self._look_s = now_s + _LOOK_S
            self._token = next(self._ranks._tokens)
            self._send(Ask(self._token))
        waiting_s = {rank: self._find_waiting(rank, now_s) for rank in self._pending}
        if self._has_failed() and any(since_s > _STUCK_S for since_s in waiting_s.values()):
            self._abort()
        if min(waiting_s.values()) > _NOTICE_S and not self._was_noticed and not self.is_interrupted:
            self._was_noticed = True
            self._tell()

    def _find_waiting(self, rank: int, now_s: float) -> float:
        """For how long a rank has been at one place in a library."""
        where = self._asked.get(rank)
        return now_s - self._seen[rank][1] if where is not None and where.waits else 0.0

    def _tell(self) -> None:
        """Name what may be a deadlock."""
        lines = [f"nothing has moved for {_NOTICE_S:g} s; interrupt the kernel if this is a deadlock"]
        for rank in range(self._ranks.settings.num_ranks):
            if rank in self._pending:
                lines.append(f"  rank {rank} waits at {self._asked[rank].place}")
            elif rank in self._ended:
                lines.append(f"  rank {rank} has finished the cell")
            else:
                lines.append(f"  rank {rank} does not run this cell")
        self._ranks._notice("\n".join(lines))


def describe_end(failures: dict[int, Ended], num_ranks: int, is_interrupted: bool) -> BaseException | None:
    """The one error of a cell. Equal failures are one; those that only lost a peer are named after the others."""
    if is_interrupted:
        lines = [f"rank {rank} was at {end.place or 'no line of a cell'}" for rank, end in sorted(failures.items())]
        return CellInterrupted("\n".join(["interrupted", *lines]))
    if not failures:
        return None

    def sort_key(rank: int) -> tuple[bool, float]:
        failure = failures[rank].failure
        assert failure is not None
        return failures[rank].was_aborted or failure.is_secondary, failure.when_s

    first = min(failures, key=sort_key)
    cause = failures[first].failure
    assert cause is not None
    same = [rank for rank, end in sorted(failures.items()) if end.failure and end.failure.trace == cause.trace]
    others = []
    for rank, end in sorted(failures.items()):
        assert end.failure is not None
        if rank not in same:
            what = end.failure.summary.removeprefix("failed: ")
            what = f"waited for rank {first}" if sort_key(rank)[0] and not sort_key(first)[0] else what
            others.append(f"rank {rank}: {what}" + (f" ({end.place})" if end.place else ""))
    names = ", ".join(map(str, same))
    who = f"rank{'s' if len(same) > 1 else ''} {names} of {num_ranks}"
    error = CellError(f"{who} {cause.summary}", first, cause.trace, cause.code)
    error.who, error.others = who, tuple(others)
    return error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class RankLines:
    """Text of several ranks as lines that name theirs: `[1] text`.

    A line that a rank has not finished stays open for it; another rank's text begins a new one. Of a progress bar,
    which overwrites its line, other ranks' states wait until they end.
    """

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write
        self._open: tuple[int, str] | None = None  # whose line is unfinished
        self._held: dict[tuple[int, str], str] = {}

    def add(self, rank: int, stream: str, text: str) -> None:
        source = rank, stream
        text = text.replace("\r\n", "\n")
        if source in self._held:
            text = self._held.pop(source) + text
        if self._open is not None and self._open != source and "\r" in text and "\n" not in text:
            self._held[source] = "\r" + text.rpartition("\r")[2]
            return
        made = ""
        if self._open not in (None, source):
            self._write(self._open[1], "\n")  # type: ignore[index]
            self._open = None
        if at_start := self._open is None:
            text = text.lstrip("\r")
        for piece in _split_lines(text):
            if at_start and piece not in ("\n", "\r"):
                made += f"[{rank}] "
            elif at_start and piece == "\n":
                made += f"[{rank}]"
            made += piece
            at_start = piece.endswith(("\n", "\r"))
        if made:
            self._write(stream, made)
        self._open = None if made.endswith("\n") else source

    def close(self) -> None:
        """Finish every line."""
        for (rank, stream), text in list(self._held.items()):
            del self._held[rank, stream]
            self.add(rank, stream, text.strip("\r") + "\n")
        if self._open is not None:
            self._write(self._open[1], "\n")
            self._open = None


def _split_lines(text: str) -> list[str]:
    """Lines with what ends them, a newline or a carriage return."""
    pieces, line = [], ""
    for mark in text:
        line += mark
        if mark in "\n\r":
            pieces.append(line)
            line = ""
    return [*pieces, line] if line else pieces


def parse_ranks(text: str) -> list[int]:
    """`0`, `1,2`, `[1, 2]` and `0-3` as numbers of ranks."""
    found: list[int] = []
    for part in text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split():
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not match:
            raise ConfigError(f"%%rank {text.strip()}: {part!r} is no rank; write %%rank 0, %%rank [1,2] or %%rank 0-3")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def runs_on_ranks(source: str) -> bool:
    """Whether a cell without a magic is Python that ranks can run: no magic, no shell command, no question."""
    if not source.strip() or source.lstrip().startswith(("%", "!", "?")):
        return False
    try:
        tree = compile(source, "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        return bool(tree.body)
    except (SyntaxError, ValueError):
        special = r"^\s*[%!?]|=\s*[%!]\s*\w|\?\s*$"
        return not re.search(special, source, re.MULTILINE)  # a mistake is reported by the ranks
