"""The life of a launched rank: take a job, answer, wait for the next; and `post`, its word to the launcher.

What starts, watches and ends ranks is in `launch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from paceline.errors import PacelineError

# What a rank says when its peer has failed: never the cause.
_SECONDARY = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Application timeout caused pair closure",
    "Socket closed",
    "Timed out waiting",
    "has died",
    "is stopped",
    "has closed its group",
    "did not come within the time limit",
)


@dataclass(frozen=True)
class Failure:
    """Why a rank did not answer with a value, told in a way that survives the rank."""

    rank: int
    when_s: float
    summary: str
    trace: str = ""
    error: PacelineError | None = None
    is_secondary: bool = False  # it only says that a peer failed


_link: Connection | None = None
_link_lock = threading.Lock()
_listener: Callable[[Any], None] | None = None


def post(message: Any) -> None:
    """Send a message to whoever launched this rank; without a launcher of ours, to this process's listener."""
    if _link is not None:
        _answer("message", message)
    elif _listener is not None:
        _listener(message)


@contextlib.contextmanager
def listen(listener: Callable[[Any], None]) -> Iterator[None]:
    """Receive what this process posts: for a rank that torchrun started and that nobody else listens to."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def _answer(kind: str, content: Any) -> None:
    assert _link is not None
    data = pickle.dumps((kind, content))  # plain pickle: tensors go by value, and outlive the rank
    with _link_lock:
        _link.send_bytes(data)


def serve_jobs(rank: int, link: Connection, stacks: Connection, by_main_thread: bool) -> None:
    """The life of a rank: take a job, answer with a value or a failure, wait for the next."""
    global _link
    _die_with_parent(by_main_thread)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it was blocked while this process started
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    _link = link
    import torch.distributed  # noqa: F401  what makes a rank warm

    with contextlib.suppress(OSError):  # a parent that gave up meanwhile is noticed below
        _answer("ready", None)
    while True:
        try:
            path, variables, job = pickle.loads(link.recv_bytes())
        except (EOFError, OSError):
            return
        sys.path.extend(entry for entry in path if entry not in sys.path)
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            fn, args = pickle.loads(job)
            value = fn(*args)
            _close_groups()
            _answer("value", value)
        except BaseException as error:
            # First the answer, then the groups: closing them is what makes the peers fail, and later.
            _answer("failure", describe_failure(rank, error))
            with contextlib.suppress(Exception):
                _close_groups()
        finally:
            os.environ.clear()
            os.environ.update(before)


def _close_groups() -> None:
    import torch.distributed as dist

    from paceline.runtime.rendezvous import leave_all
    from paceline.runtime.world import shutdown

    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    leave_all()


def describe_failure(rank: int, error: BaseException) -> Failure:
    trace = "".join(traceback.format_exception(error))
    text = str(error).splitlines()[0] if str(error) else ""
    summary = f"failed: {type(error).__name__}: {text}".rstrip(": ")
    ours = error if isinstance(error, PacelineError) else None
    try:
        pickle.loads(pickle.dumps(ours))
    except Exception:  # an error that cannot travel is told by its traceback alone
        ours = None
    # The user's own words may sound alike; what a backend says of a lost peer names its source.
    from_backend = isinstance(error, RuntimeError) and any(
        word in str(error) for word in ("gloo", "c10d", "NCCL", "Store", "in shared memory")
    )
    secondary = from_backend and any(word in str(error) for word in _SECONDARY)
    return Failure(rank, time.monotonic(), summary, trace, ours, secondary)


def _die_with_parent(by_main_thread: bool) -> None:
    """End this process when its parent ends, however it ends (SIGKILL too).

    The kernel's death signal follows the *thread* that started this process: it serves only if that was the main one.
    """
    parent = multiprocessing.parent_process()
    try:
        set_death_signal = 1  # PR_SET_PDEATHSIG
        if by_main_thread and ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0) == 0:
            if parent is not None and not parent.is_alive():  # it died before the kernel was told
                os._exit(1)
            return
    except (OSError, AttributeError):
        pass

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True, name="paceline-parent-watch").start()
