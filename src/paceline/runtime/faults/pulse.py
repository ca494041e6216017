"""A rank's status on a shared page: its step, phase, bucket and heartbeat, for the monitor.

An update takes a few memory writes, without a lock, message or system call. Without a monitor it does nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from paceline.errors import ConfigError

PAGE_BYTES = 4096
# Phase numbers. BETWEEN is unmarked time: loading, logging, any work between two steps.
START, BETWEEN, FORWARD, BACKWARD, WAIT, OPTIMIZER, SLOW, LEFT = range(8)
NAMES = ("start", "between two steps", "forward", "backward", "wait", "optimizer", "slow", "end")
# Indices of words (int64) on the page.
PID, SERIAL, STEP, PHASE, BUCKET, SINCE_NS, BEAT_NS, NUM_STEPS, IN_STEP_NS, IS_SECONDARY, NUM_BUCKETS = range(11)
LONGEST_NS = 16  # for each phase
COUNTED, BEGUN, COMPLETE = 11, 1, 2  # index of a word, and its values if steps are marked (0: they are not)
IS_BUSY = 12  # whether the GPU has unfinished work of this rank while it waits for other ranks
IS_COMPILING = 13  # in any phase
IS_ENDING = 14  # the interpreter is exiting, which may take seconds
MOST_NS = 15  # limit of a marked pause without progress; 0 means none
IS_LOST = 25  # set by the launcher: another rank of this world is lost, and ranks that wait for it must leave
NUM_STARTED = 26  # collectives started by this rank while it waits for others; 0 if not counted
RECENT_NS, NUM_RECENT = 32, 128  # durations of the last steps, without the time between them
NUM_NOTICES = 24  # number of notices that the monitor has written
# Texts: their offset and size in bytes. A notice is a line for this rank to print.
LABEL, ERROR, NOTICE = (2048, 128), (2176, 1024), (3200, 896)
# Dumps the stacks of all threads without the GIL. Programs and job managers use SIGUSR1 and SIGUSR2.
STACKS_SIGNAL = signal.SIGRTMAX - 3
BEAT_S = 0.2
_WAITED_NS = 300_000_000
_MOST_S = 1e9  # largest value of a word
# Environment variable with the paths of a rank's page and stacks file, if the launcher is its monitor.
VARIABLE = "PACELINE_PULSE"

_IN_STEP = frozenset((FORWARD, BACKWARD, WAIT, OPTIMIZER))
_Function = TypeVar("_Function", bound=Callable[..., Any])
_words: Any = None  # the page as int64, while a monitor reads it
_rank: _Rank | None = None
_before: mmap.mmap | None = None  # page of the previous world
_is_done: Callable[[], bool] | None = None  # returns whether the GPU is idle; None without a GPU
_count_started: Callable[[], int] | None = None
_on_lost: Callable[[], bool] | None = None


def map_page(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, PAGE_BYTES)


def enter(phase: int, bucket: int = -1) -> None:
    """Enter this phase. `bucket` is the bucket that the rank waits for, if any."""
    words = _words
    if words is None:
        return
    now_ns, before = time.monotonic_ns(), words[PHASE]
    took_ns = now_ns - words[SINCE_NS]
    if took_ns > words[LONGEST_NS + before]:
        words[LONGEST_NS + before] = took_ns
    if before in _IN_STEP:
        words[IN_STEP_NS] += took_ns
    words[PHASE], words[BUCKET], words[SINCE_NS] = phase, bucket, now_ns
    words[SERIAL] += 1


def watch_device(is_done: Callable[[], bool], count_started: Callable[[], int] | None = None) -> None:
    """Watch the GPU work that does not depend on other ranks; `is_done` returns whether it has finished.
    `count_started` returns the number of collectives that this rank has started. Both are called from another thread,
    and only while this rank waits for others, when no CUDA graph is being captured."""
    global _is_done, _count_started
    _is_done, _count_started = is_done, count_started


def watch_lost(leave: Callable[[], bool]) -> None:
    """Call `leave` from another thread once the launcher reports a lost rank in this world, until it returns True."""
    global _on_lost
    _on_lost = leave


def begin_step(number: int) -> None:
    """Mark the start of a step, counted from 1. Without this call, optimizer steps are counted."""
    if _words is not None and _rank is not None:
        _rank.counts_itself = True
        _end_step(number)
        _words[COUNTED] = BEGUN


def complete_step() -> None:
    """Mark the current step as complete. The time that follows does not belong to it."""
    if _words is not None:
        _words[COUNTED] = COMPLETE


def _end_step(number: int) -> None:
    words = _words
    if words[IN_STEP_NS]:
        words[RECENT_NS + words[NUM_STEPS] % NUM_RECENT] = words[IN_STEP_NS]
        words[NUM_STEPS] += 1
    words[IN_STEP_NS], words[STEP] = 0, number


@contextlib.contextmanager
def within(phase: int, label: str = "") -> Iterator[None]:
    """Enter a phase for the duration of the block, then return to the previous one."""
    if _words is None:
        yield
        return
    before, bucket = _words[PHASE], _words[BUCKET]
    if label and _rank is not None:
        write_text(_rank.page, LABEL, label)
    enter(phase)
    try:
        yield
    finally:
        enter(before, bucket)


@contextlib.contextmanager
def slow(label: str, at_most: float | None = None) -> Iterator[None]:
    """Mark a pause of any length (an evaluation, a download, a save), so that neither the monitor nor the ranks that
    wait for this one mistake it for a hang. `at_most` is its limit in seconds. Has no other effect, and works without a
    monitor."""
    if at_most is not None and not at_most > 0:
        raise ConfigError(f"at_most must be a number of seconds above 0, not {at_most!r}", code="at_most")
    with within(SLOW, label):
        words, before = _words, 0
        if words is not None:
            before, words[MOST_NS] = words[MOST_NS], 0 if at_most is None else int(min(at_most, _MOST_S) * 1e9)
        try:
            yield
        finally:
            if words is not None and words is _words:
                words[MOST_NS] = before


def progress() -> None:
    """Mark progress within a pause, which restarts its time limit."""
    if _words is not None and _words[PHASE] == SLOW:
        enter(SLOW)


def waits(function: _Function) -> _Function:
    """Decorator for functions that wait for other ranks."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _words is None or _words[PHASE] == SLOW:
            return function(*args, **kwargs)
        with within(WAIT):
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def write_text(page: mmap.mmap, place: tuple[int, int], text: str) -> None:
    begin, size = place
    page[begin : begin + size] = text.encode(errors="replace")[: size - 1].ljust(size, b"\0")


def read_text(page: mmap.mmap, place: tuple[int, int]) -> str:
    begin, size = place
    return page[begin : begin + size].partition(b"\0")[0].decode(errors="replace")


def fail(summary: str, is_secondary: bool) -> None:
    """Record the error that ends this rank. A secondary error only reports that another rank is lost."""
    if _words is not None and _rank is not None and not read_text(_rank.page, ERROR):
        _words[IS_SECONDARY] = int(is_secondary)
        write_text(_rank.page, ERROR, summary)


class _Rank:
    """The page and the hooks of this process."""

    def __init__(self, page: str, stacks: str) -> None:
        descriptor = os.open(page, os.O_RDWR | os.O_CLOEXEC)
        self.page = map_page(descriptor)
        os.close(descriptor)
        self.stacks = os.open(stacks, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self.counts_itself = False
        self._stop, self._undo = threading.Event(), contextlib.ExitStack()

    def start(self) -> None:
        global _words
        _words = memoryview(self.page).cast("q")
        _words[PID], _words[STEP] = os.getpid(), 1
        _words[SINCE_NS] = _words[BEAT_NS] = time.monotonic_ns()
        if threading.current_thread() is threading.main_thread():
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # the signal must not kill a process that has left
        faulthandler.register(STACKS_SIGNAL, file=self.stacks, all_threads=True)
        if not faulthandler.is_enabled():  # send crash stacks to the monitor, unless faulthandler is already in use
            faulthandler.enable(self.stacks)
            self._undo.callback(faulthandler.disable)
        if "torch" in sys.modules:
            self._hook_optimizers()
        threading.Thread(target=self._beat, daemon=True, name="paceline-beat").start()

    def stop(self) -> None:
        global _words
        self._stop.set()
        self._undo.close()
        faulthandler.unregister(STACKS_SIGNAL)
        os.close(self.stacks)
        _words = None

    def _hook_optimizers(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        def after(*_: Any) -> None:
            if _words is not None:
                enter(BETWEEN)
                if not self.counts_itself:
                    _end_step(_words[STEP] + 1)

        before = register_optimizer_step_pre_hook(lambda *_: enter(OPTIMIZER))
        self._undo.callback(before.remove)
        self._undo.callback(register_optimizer_step_post_hook(after).remove)

    def _beat(self) -> None:
        """Heartbeat thread. It needs the GIL, so it stops if no Python code can run."""
        words, num_notices, has_left = _words, 0, False
        while not self._stop.wait(BEAT_S):
            if words[NUM_NOTICES] != num_notices:
                num_notices = words[NUM_NOTICES]
                with contextlib.suppress(OSError):  # stderr is closed
                    os.write(2, f"paceline: {read_text(self.page, NOTICE)}\n".encode())
            now_ns = words[BEAT_NS] = time.monotonic_ns()
            if words[IS_LOST] and not has_left and _on_lost is not None:
                has_left = _on_lost()
            if _is_done is not None:
                is_waiting = words[PHASE] == WAIT and now_ns - words[SINCE_NS] > _WAITED_NS
                with contextlib.suppress(RuntimeError):  # a GPU error, which the main thread reports
                    words[IS_BUSY] = int(is_waiting and not _is_done())
                    words[NUM_STARTED] = _count_started() if is_waiting and _count_started is not None else 0
            self._see_compiler(words, now_ns)

    def _see_compiler(self, words: Any, now_ns: int) -> None:
        """Poll for compilations, since a program may remove torch's callbacks at any time, as `torch._dynamo.reset`
        does."""
        # this thread must not import anything
        look = getattr(sys.modules.get("paceline.torch_internals"), "is_compiling", None)
        is_compiling = look is not None and look()
        if is_compiling != bool(words[IS_COMPILING]):
            # restart the clock, so that compile time does not count
            words[IS_COMPILING], words[SINCE_NS] = int(is_compiling), now_ns
            words[SERIAL] += 1


def is_open() -> bool:
    """Whether a monitor reads this rank's page."""
    return _rank is not None


def open_page(page: str, stacks: str) -> None:
    """Write to this page from now on; does nothing if one is open."""
    global _rank
    if _rank is None:
        if _before is not None:  # a world has failed, and this process continues in another one
            _before[ERROR[0] : sum(ERROR)] = bytes(ERROR[1])
        _rank = _Rank(page, stacks)
        _rank.start()
        atexit.unregister(note_exit)
        atexit.register(note_exit)


def close_page() -> None:
    """Leave the world: from now on, no rank may wait for this one."""
    global _rank, _before, _is_done, _count_started
    if _rank is not None:
        enter(LEFT)
        _rank.stop()
        _before, _rank = _rank.page, None
        _is_done = _count_started = None  # these functions refer to a group, which must end with its world


def note_exit() -> None:
    """Record that this process is exiting, which may take seconds."""
    if (page := _rank.page if _rank is not None else _before) is not None:
        memoryview(page).cast("q")[IS_ENDING] = 1


def _forget() -> None:
    global _rank, _words, _is_done, _count_started, _on_lost, _before
    _rank = _words = _is_done = _count_started = _on_lost = _before = None


os.register_at_fork(after_in_child=_forget)  # DataLoader workers are not ranks
