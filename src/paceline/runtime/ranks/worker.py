"""The process of a launched rank: the server that forks it, the loop that runs its jobs, and `post` for messages."""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import os
import pickle
import pkgutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from paceline.errors import LaunchError
from paceline.runtime.faults import pulse
from paceline.runtime.faults.processes import describe_failure

_JOB_SIGNALS = {signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

_link: Connection | None = None
_link_lock = threading.Lock()
_listener: Callable[[Any], None] | None = None


def post(message: Any) -> None:
    """Send a message to this process's listener, if a session runs here, otherwise to this rank's launcher."""
    if _listener is not None:
        _listener(message)
    elif _link is not None:
        send_to_launcher(message)


def send_to_launcher(message: Any) -> None:
    """Send a message to the launcher, even if this process has a listener."""
    _answer("message", message)


def receive() -> Any:
    """Wait for a message from the launcher to this rank's job (`RankPool.send`); EOFError if the launcher is gone."""
    assert _link is not None
    return pickle.loads(_link.recv_bytes())


# Set in a process that is preparing to replace a rank.
SPARE = "PACELINE_SPARE"


def stand_by(step: int, is_lost: bool = False) -> None:
    """Wait for a place in a new world, and take it, after this rank has left the previous one. `step` is the last
    completed step, -1 if the rank has no state. `is_lost` means that the rank left because it lost another rank, and
    not on request."""
    import torch.distributed as dist

    from paceline.runtime.ranks import rendezvous

    if dist.is_initialized():
        raise LaunchError("this rank could not leave its world after another rank was lost")
    rendezvous.close_stores()
    _answer("standby", (step, is_lost))
    while not isinstance(variables := receive(), dict):
        pass  # a request that the previous world did not read
    os.environ.update(variables)
    _open_page(variables)


def is_wanted() -> bool:
    """Whether the launcher has asked this rank to leave its world for a larger one."""
    return _link is not None and _link.poll() and receive() is not None


def report_step(first: int) -> None:
    """Report that the world has taken its first step, after step `first`."""
    if _link is not None:
        _answer("stepped", (first, time.monotonic()))


def _open_page(variables: dict[str, str]) -> None:
    if pulse.VARIABLE in variables:
        pulse.open_page(*variables[pulse.VARIABLE].split(":"))


@contextlib.contextmanager
def listen(listener: Callable[[Any], None]) -> Iterator[None]:
    """Receive the messages that this process posts."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def _answer(kind: str, content: Any) -> None:
    assert _link is not None
    data = pickle.dumps((kind, content))  # plain pickle: tensors are sent by value and outlive the rank
    with _link_lock:
        _link.send_bytes(data)


def serve_jobs(rank: int, link: Connection, stacks: Connection) -> None:
    """Take a job, answer with a value or a failure, and wait for the next, until the launcher closes the link."""
    global _link
    for number in (signal.SIGINT, signal.SIGHUP):  # sent to all processes of a terminal; the launcher decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked while this process started
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    _link = link
    from paceline.runtime.ranks.rendezvous import serve_env_for_torch  # imports torch in advance

    serve_env_for_torch()

    with contextlib.suppress(OSError):  # a launcher that has given up is detected below
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
            _open_page(variables)
            fn, args = pickle.loads(job)
            value = find_function(fn)(*args)
            _close_groups()
            _answer("value", value)
        except BaseException as error:
            # Answer before closing the groups, which makes the peers fail as well.
            with contextlib.suppress(OSError):  # the launcher has given up
                _answer("failure", describe_failure(int(os.environ.get("RANK", rank)), error))
            with contextlib.suppress(Exception):
                _close_groups()
        finally:
            pulse.close_page()
            os.environ.clear()
            os.environ.update(before)


def serve_jobs_spawned(rank: int, link: Connection, stacks: Connection, by_main_thread: bool) -> None:
    """`serve_jobs` in a spawned process, if ranks cannot be forked; it ends with its parent."""
    parent: Any = multiprocessing.parent_process()

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="paceline-parent-watch").start()
    if by_main_thread and sys.platform == "linux":  # the kernel ties the signal to the thread that started this process
        _die_with_parent(parent.pid)
    serve_jobs(rank, link, stacks)


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has already died
        os._exit(1)


def find_function(fn: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return the function, imported if `fn` is a name such as "package.module:name"."""
    found: Callable[..., Any] = pkgutil.resolve_name(fn) if isinstance(fn, str) else fn
    return found


def _close_groups() -> None:
    import torch.distributed as dist

    from paceline.runtime.ranks import rendezvous, world

    world.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    rendezvous.close_stores()


# -- the fork server --------------------------------------------------------------------------------------------------
#
# One process imports torch and forks every rank, so that a rank costs milliseconds instead of an import. Forking is
# safe because the server has one thread, has not initialized CUDA, and has run no OpenMP region. It ends with the
# launcher, which it watches through a pidfd, and ranks end with it. The link to a rank carries the same data that
# `multiprocessing` would send to a spawned process.


def serve_forks(control_fd: int, launcher_pid: int, modules: Sequence[str] = ()) -> None:
    """Fork a process for each request of the launcher, and report each exit code, until the launcher ends."""
    # Signals to all processes of a job are meant for the launcher and the ranks, and the ranks would die with this
    # process.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_JOB_SIGNALS})
    control = socket.socket(fileno=control_fd)
    try:
        launcher_fd = os.pidfd_open(launcher_pid)
        import paceline.runtime.ranks.world  # noqa: F401  and with it torch

        for name in modules:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # garbage collection in ranks then writes to fewer shared pages
        # Python warns about other threads, but numpy's BLAS stops its own before a fork, so fork once, then count.
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        if not (pid := os.fork()):
            os._exit(0)
        os.waitpid(pid, 0)
        control.send(b"ready" if len(os.listdir("/proc/self/task")) == 1 else b"threads")
    except OSError:  # the launcher is gone, or the kernel lacks the call and the launcher will spawn ranks instead
        os._exit(1)
    children: dict[int, tuple[int, Connection]] = {}
    while True:
        for fd in multiprocessing.connection.wait([launcher_fd, control_fd, *children]):
            if fd in children:
                pid, status = children.pop(fd)
                ended: Any = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                with status:
                    with contextlib.suppress(OSError):  # the launcher may have closed its end
                        status.send(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
                    # last, because afterward the id may be reused and signals could reach another process
                    os.waitpid(pid, 0)
                os.close(fd)
                continue
            kind = b""
            if fd == control_fd:
                with contextlib.suppress(OSError):  # the launcher was interrupted before it read everything
                    kind, descriptors, _, _ = socket.recv_fds(control, 16, 8)
            if not kind:  # the launcher is gone, and the ranks end with this process
                os._exit(0)
            link, status = Connection(descriptors[0]), Connection(descriptors[1], readable=False)
            if not (pid := os.fork()):
                control.close()
                status.close()
                for other, (_, other_status) in children.items():
                    os.close(other)
                    other_status.close()
                _run_child(link, descriptors[2:], launcher_fd, launcher_pid)
            with contextlib.suppress(OSError):
                status.send(pid)
            link.close()
            for descriptor in descriptors[2:]:
                os.close(descriptor)
            children[os.pidfd_open(pid)] = pid, status


def _run_child(link: Connection, descriptors: list[int], launcher_fd: int, launcher_pid: int) -> None:
    """Run a forked process; does not return."""
    code = 1
    try:
        _die_with_parent(os.getppid())
        if not multiprocessing.connection.wait([launcher_fd], 0):
            code = _run_rank(link, descriptors, launcher_fd, launcher_pid)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_rank(link: Connection, descriptors: list[int], launcher_fd: int, launcher_pid: int) -> int:
    stacks = Connection(descriptors[0], readable=False)
    for standard, descriptor in zip((1, 2), descriptors[1:], strict=True):  # the launcher's current descriptors
        os.dup2(descriptor, standard)
        os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _JOB_SIGNALS)
    try:
        rank, variables, mask, preparation = pickle.loads(link.recv_bytes())
    except (EOFError, OSError):  # the launcher has given up
        return 0
    os.environ.clear()
    os.environ.update(variables)
    os.umask(mask)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # Python reseeds its own generator after a fork, and torch's has a fixed seed
    current: Any = multiprocessing.current_process()
    current._inheriting = True  # makes a script without a main guard fail with multiprocessing's own message
    multiprocessing.spawn.prepare(preparation)
    del current._inheriting
    name = preparation["name"]
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])  # for `ps` and `top`
    process: Any = multiprocessing.get_context("spawn").Process(target=serve_jobs, args=(rank, link, stacks), name=name)
    process._parent_pid = launcher_pid
    try:
        return int(process._bootstrap(parent_sentinel=launcher_fd))
    finally:
        # Since Python 3.13 the caller must run the exit functions. Older versions have already run them, so this is a
        # no-op.
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
