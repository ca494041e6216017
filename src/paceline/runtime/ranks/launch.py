"""Starts, monitors and terminates local ranks, without leaving orphans.

Ranks get torchrun's environment variables, and are forked by a server that has imported torch, or spawned if forking is
not possible.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import pickle
import secrets
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from paceline import machine
from paceline.errors import ConfigError
from paceline.runtime.faults.monitor import Monitor, find_hang_timeout, is_wanted
from paceline.runtime.faults.monitor import why_not as why_no_monitor
from paceline.runtime.faults.processes import Handle
from paceline.runtime.faults.recovery import (
    LISTEN_S,
    LocalJob,
    LocalWorld,
    RankProcess,
    Recovery,
    Spares,
    end_processes,
)
from paceline.runtime.ranks import by_value, store_server
from paceline.runtime.ranks.place import is_launched, read_place
from paceline.runtime.ranks.worker import SPARE, listen, serve_jobs_spawned
from paceline.units import format_memory

# Memory of one more rank before it allocates anything, with some margin: the interpreter and torch have 145 MiB of
# private memory and share the rest of the 226 MiB resident (torch 2.13 on CPU, aarch64).
RANK_BYTES = 200 * 2**20
_LEAVE_S = 1.0  # how long an idle rank may take to exit after its link is closed, before SIGTERM
_GRACE_S = 3.0  # how long a rank may take to obey SIGTERM before SIGKILL
_LONG_S = 1e6  # no limit, for calls that do not accept infinity
# A signal this soon after the first is the same request: `timeout` and service managers signal the whole process group,
# and the launcher, perhaps delayed on a busy machine, forwards the signal to ranks that already received it.
SAME_REQUEST_S = 1.0
# Variables that no library reads on import, so changing them does not make the server's imports stale.
_HARMLESS = {"PYTEST_CURRENT_TEST", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TERM", "PWD", "OLDPWD", "_"}
_Hear = Callable[[int, Any], None] | None


def check_rank_count(num_ranks: int, bytes_per_rank: int = 0) -> None:
    """Raise ConfigError if this host's memory cannot hold this many local ranks."""
    if num_ranks < 1:
        raise ConfigError(f"{num_ranks} ranks: use at least 1")
    each, have = RANK_BYTES + bytes_per_rank, machine.available_memory_bytes()
    if num_ranks * each > have:
        text = f"{num_ranks} ranks need about {format_memory(num_ranks * each)} but {format_memory(have)} are free"
        raise ConfigError(f"{text}: use fewer ranks or smaller sizes (at most {have // each} ranks of this size)")


class _Server:
    """A process that has imported torch and `modules`, and forks ranks on request (`worker.serve_forks`).

    It ends with this process, or with its last rank once another server has replaced it.
    """

    def __init__(self, modules: frozenset[str]) -> None:
        self.owner = os.getpid()
        self.imports = _describe_imports()
        self.modules = modules
        self._lock = threading.Lock()
        self._state = b""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = f"import sys; sys.path[:] = {sys.path!r}; from paceline.runtime.ranks import worker; "
        source += f"worker.serve_forks({theirs.fileno()}, {os.getpid()}, {sorted(modules)})"
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [multiprocessing.spawn.get_executable(), *flags, "-c", source]
        with theirs, _sigint_blocked():
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.close = weakref.finalize(self, _end_server, os.getpid(), self.process, self._control)

    def is_usable(self, modules: Sequence[str]) -> bool:
        """Whether a rank forked by this server would behave like one that starts and imports these modules now."""
        is_fresh = (self.owner, self.imports) == (os.getpid(), _describe_imports())
        return is_fresh and self.process.poll() is None and self.modules >= set(modules)

    def fork(self, link: int, descriptors: Sequence[int]) -> _Forked:
        """Request a rank; returns immediately, even while the server is still importing torch."""
        status, far_status = multiprocessing.Pipe(duplex=False)
        with far_status, self._lock, contextlib.suppress(OSError):  # `is_ready` detects a dead server
            socket.send_fds(self._control, [b"rank"], [link, far_status.fileno(), *descriptors])
        return _Forked(self, status)

    def is_ready(self, timeout_s: float) -> bool:
        """Wait until the server can fork; False if it cannot, True if that is not known in time."""
        with self._lock:
            if not self._state:
                if not multiprocessing.connection.wait([self._control], min(timeout_s, _LONG_S)):
                    return True
                with contextlib.suppress(OSError):
                    self._state = self._control.recv(16)
                self._state = self._state or b"gone"
            return self._state == b"ready"


def _end_server(owner: int, process: subprocess.Popen[bytes], control: socket.socket) -> None:
    if os.getpid() == owner:
        process.kill()  # the server may be importing torch; ranks that it forked end with it
        process.wait()
    control.close()  # closed last, because a live server reports the closed link


class _Forked:
    """A process forked by the server, with the methods of `multiprocessing.Process` that a pool uses."""

    def __init__(self, server: _Server, status: Connection) -> None:
        self._server, self._status = server, status  # keep the server alive as long as the process
        self._code: int | None = None
        self._handle: Handle | None = None

    def _read(self) -> None:
        """Read the server's next report: the process id, then the exit code, sent before the id can be reused."""
        try:
            number = int(self._status.recv())
        except (EOFError, OSError):
            self._code = -signal.SIGKILL  # the server is gone, and so are all processes that it forked
            return
        if self._handle is None:
            self._handle = Handle(number)
        else:
            self._code = number

    @property
    def pid(self) -> int | None:
        """The process id. Waits until the server has forked the process."""
        if self._handle is None and self._code is None:
            self._read()
        return None if self._handle is None else self._handle.pid

    @property
    def exitcode(self) -> int | None:
        while self._code is None and self._status.poll():
            self._read()
        return self._code

    def terminate(self) -> None:
        self.kill(signal.SIGTERM)

    def kill(self, number: int = signal.SIGKILL) -> None:
        # Without an exit code, the id was still in use when the handle was opened, so the handle is for this process.
        if self.exitcode is None and self._handle is not None:
            self._handle.signal(number)

    def join(self, timeout_s: float = math.inf) -> None:
        """Wait until the process ends. Does not wait for a process that has not been forked yet: without its link, it
        ends immediately."""
        deadline = time.monotonic() + timeout_s
        while self.exitcode is None and self._handle is not None and (left_s := deadline - time.monotonic()) > 0:
            self._status.poll(min(left_s, _LONG_S))
        if self._code is not None:  # the server closes its end once the zombie is reaped
            self._status.poll(max(0.0, min(deadline - time.monotonic(), _LONG_S)))

    def close(self) -> None:
        self._status.close()
        if self._handle is not None:
            self._handle.close()


def _describe_imports() -> tuple[object, ...]:
    """The state that a library may read on import: if it changes, the server's imports are stale."""
    variables = frozenset((name, value) for name, value in os.environ.items() if name not in _HARMLESS)
    return variables, frozenset(os.sched_getaffinity(0)), multiprocessing.spawn.get_executable()


_server: _Server | None = None
_server_lock = threading.Lock()
_can_fork = sys.platform == "linux" and hasattr(os, "pidfd_open")


def _find_server(modules: Sequence[str] = ()) -> _Server | None:
    """This process's server with these modules imported, started if necessary; None if ranks must be spawned."""
    global _server
    if not _can_fork:
        return None
    with _server_lock:
        if _server is None or not _server.is_usable(modules):
            _server = _Server(frozenset(modules))
        return _server


def _join(ranks: Sequence[RankProcess], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """Warm local ranks that run one job after another and are replaced after failures. `modules` are imported once."""

    def __init__(self, num_ranks: int, modules: Sequence[str] = ()) -> None:
        check_rank_count(num_ranks)
        self.num_ranks = num_ranks
        self._modules = modules
        self._ranks: list[RankProcess] = []
        self._spares: list[RankProcess] = []  # used only during a run with recovery
        self._size = 0  # size of the current or last world; further ranks are idle
        self._server: _Server | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, fn: Callable[..., Any] | str, args: Sequence[Any] = (), *, num_ranks: int | None = None,
        timeout_s: float | None = None, on_message: _Hear = None,
        hang_timeout_s: float | None = None, recovery: Recovery | None = None,
    ) -> list[Any]:  # fmt: skip
        """Call `fn(*args)` on the first `num_ranks` ranks and return their values in rank order.

        `fn` may be a name, "package.module:name", which only the ranks import, so the launcher does not need torch. The
        function opens its own world (`paceline.init()`). `on_message(rank, message)` receives messages that ranks
        `post`. Raises LaunchError with the rank that failed first and its traceback; a PacelineError raised by a rank
        is raised here unchanged. With `hang_timeout_s` or PACELINE_MONITOR, the ranks are monitored
        (`faults/monitor.py`): a rank that is suspended, or hangs for that long, counts as failed. With `recovery`,
        ranks may continue or restart after a fault (`runtime/faults/recovery.py`), and the values are those of the last
        world.
        """
        num_ranks = self.num_ranks if num_ranks is None else num_ranks
        if not 1 <= num_ranks <= self.num_ranks:
            raise ConfigError(f"{num_ranks} ranks requested from a pool of {self.num_ranks}")
        if hang_timeout_s is None and num_ranks > 1 and is_wanted():
            # Monitor here rather than in the ranks: the process that terminates a rank must also report it.
            hang_timeout_s = find_hang_timeout()
        recovery = recovery or Recovery("stop", num_ranks)
        job = LocalJob(_pickle_job(fn, args), timeout_s, on_message, hang_timeout_s, recovery)
        with unwind_on_signals():
            try:
                if recovery.policy != "stop":
                    end_processes(self._ranks[num_ranks:])
                    del self._ranks[num_ranks:]
                self.start(num_ranks)
                self._await_ranks(num_ranks, job.deadline)
                self._size = num_ranks
                while (values := self._run_world(job)) is None:
                    if self._ranks[0].step is None:  # new processes
                        job.content = _pickle_job(fn, recovery.arguments)
                        self._await_ranks(recovery.num_ranks, job.deadline)
                        recovery.check_over()
                end_processes(self._spares)
                self._spares.clear()
                return [values[rank] for rank in range(self._size)]
            except BaseException:
                self.close(at_once=True)
                raise

    def _run_world(self, job: LocalJob) -> dict[int, Any] | None:
        """Run one world and return its values, or None once the ranks of the next world are in place."""
        spares = Spares(self._spares, job.recovery, lambda: self._start_spare(job))
        monitor = None
        if job.hang_timeout_s is not None and not why_no_monitor():
            monitor = Monitor(range(self._size), self._size, job.hang_timeout_s)
        world = LocalWorld(self._ranks[: self._size], job, monitor, spares)
        with monitor or contextlib.nullcontext():
            with _serve_store() as store:
                policy = world.run(_job_variables(self._size, store))
                if policy == "restart" or (policy == "stop" and world.is_certain):
                    for rank in [*self._ranks, *self._spares]:
                        rank.process.kill()  # while the store is open, because otherwise ranks print their own errors
                    _join(self._ranks, _GRACE_S)
            if policy == "stop":
                if world.error is not None:
                    raise world.error
                return world.values
            ranks = world.regroup() if policy != "restart" else []
            if ranks:
                self._ranks = ranks
            else:
                self.close(at_once=True)
                job.recovery.check_over()
                self.start(job.recovery.num_ranks)
            self._size = len(self._ranks)
        return None

    def _start_spare(self, job: LocalJob) -> None:
        self._start_process(self._spares, len(self._ranks) + len(self._spares))
        alone = {"RANK": "0", "LOCAL_RANK": "0", SPARE: "1"}
        self._spares[-1].place(_job_variables(1, "") | alone, job.content)

    def send(self, rank: int, message: Any) -> None:
        """Send a message to the job on this rank (`worker.receive`); ignored if the rank is gone."""
        with defer_signals():  # a partial message could not be decoded
            self._ranks[rank].send(message)

    @property
    def _active(self) -> list[RankProcess]:
        return self._ranks[: self._size or len(self._ranks)]

    def pids(self) -> list[int]:
        """The process ids in rank order; waits for ranks that are starting. To send signals, use `signal`."""
        return [rank.process.pid for rank in self._active if rank.process.pid is not None]

    def signal(self, number: int) -> None:
        """Send a signal to every rank that has not ended; waits for those that are still starting."""
        for rank in self._active:
            if rank.process.pid is not None:
                rank.signal(number)

    def close(self, at_once: bool = False) -> None:
        """Terminate the ranks and wait until they are gone; idempotent.

        Unless `at_once`, idle ranks may exit by themselves: killed ranks leave locks behind, such as tqdm's.
        """
        ranks = [*self._ranks, *self._spares]
        self._ranks = []
        self._spares.clear()
        self._size = 0
        for rank in ranks:
            rank.hang_up()
        if not at_once:
            _join(ranks, _LEAVE_S)
        for rank in ranks:
            rank.process.terminate()
        _join(ranks, _GRACE_S)
        end_processes(ranks)

    def start(self, num_ranks: int | None = None) -> None:
        """Start ranks now rather than in `run`, so that they import torch while the caller does other work."""
        for rank in range(len(self._ranks), num_ranks or self.num_ranks):
            self._start_process(self._ranks, rank)

    def _start_process(self, ranks: list[RankProcess], number: int) -> None:
        """Add a process to these ranks."""
        # This comes first, because it raises in a script without a main guard, before any server is started.
        preparation = multiprocessing.spawn.get_preparation_data(f"paceline-rank-{number}")
        preparation["authkey"] = bytes(preparation["authkey"])
        if not self._ranks:
            self._server = _find_server(self._modules)
        link, far_link = multiprocessing.Pipe()
        stacks, far_stacks = multiprocessing.Pipe(duplex=False)
        # Defer signals: a partly started rank would be neither joined nor killed.
        with far_link, far_stacks, defer_signals():
            if self._server is None:
                is_main = threading.current_thread() is threading.main_thread()
                process: Any = multiprocessing.get_context("spawn").Process(
                    target=serve_jobs_spawned, args=(number, far_link, far_stacks, is_main), name=preparation["name"]
                )
                multiprocessing.resource_tracker.ensure_running()  # a later start would undo the signal mask below
                with _sigint_blocked():
                    process.start()
            else:
                with open(os.devnull, "wb") as nothing:
                    outputs = [fd if os.path.lexists(f"/proc/self/fd/{fd}") else nothing.fileno() for fd in (1, 2)]
                    process = self._server.fork(far_link.fileno(), [far_stacks.fileno(), *outputs])
                mask = os.umask(0)
                os.umask(mask)
                with contextlib.suppress(OSError):
                    link.send_bytes(pickle.dumps((number, dict(os.environ), mask, preparation)))
            ranks.append(RankProcess(process, link, stacks))

    def _await_ranks(self, num_ranks: int, deadline: float) -> None:
        """Wait until every rank is ready, so that they start together, or has died, or the deadline passes."""
        global _can_fork
        if self._server is not None and not self._server.is_ready(max(0.0, deadline - time.monotonic())):
            self.close()
            _can_fork = False
            self.start(num_ranks)
        for rank in self._ranks[:num_ranks]:
            while not rank.was_heard and rank.is_alive and time.monotonic() < deadline:
                if rank.link.poll(max(0.0, min(LISTEN_S, deadline - time.monotonic()))):
                    with contextlib.suppress(EOFError, OSError):
                        rank.was_heard = bool(rank.link.recv_bytes())  # "ready"
                    break


def run_ranks(
    fn: Callable[..., Any], num_ranks: int, args: Sequence[Any] = (), *, timeout_s: float | None = None,
    on_message: _Hear = None,
) -> list[Any]:  # fmt: skip
    """Call `fn(*args)` on local ranks and return their values in rank order.

    In a plain program this starts local ranks and always terminates them before it returns (see `RankPool.run`).
    Use a pool to run several jobs on the same ranks. In a process that a launcher (torchrun, Slurm, mpirun, or
    Paceline itself) started as one rank, no rank is started: `fn` runs here, as this rank of that world, and every rank
    gets the list of all values. In that case it is collective: every rank must call this.

    Args:
        fn: A function that can be pickled, or one defined in a notebook or at a prompt.
        num_ranks: Number of ranks; a launched world must have the same number.
        args: Its arguments, the same on every rank.
        timeout_s: Time limit, after which ranks are terminated. In a launched world it limits the wait for the other
            ranks after `fn` has returned here.
        on_message: `on_message(rank, message)` is called with every message that ranks `post`.
    """
    if not is_launched():
        with RankPool(num_ranks) as pool:
            return pool.run(fn, args, timeout_s=timeout_s, on_message=on_message)
    place = read_place()
    if place.world_size != num_ranks:
        found = f"{num_ranks} ranks requested in a world of {place.world_size} that {place.launcher} launched"
        hint = f"request {place.world_size}, launch {num_ranks}, or start local ranks with RankPool"
        raise ConfigError(f"{found}: {hint}", code="world-size")
    listening = listen(lambda message: on_message(place.rank, message)) if on_message else contextlib.nullcontext()

    def call() -> Any:
        with listening:
            return fn(*args)

    if place.world_size == 1:
        return [call()]
    from paceline.runtime.ranks.rendezvous import gather

    return gather(place, call, timeout_s)


def _pickle_job(fn: Callable[..., Any] | str, args: Sequence[Any]) -> bytes:
    name = getattr(fn, "__qualname__", repr(fn))
    try:
        if by_value.is_interactive():
            return by_value.dumps((fn, tuple(args)))
        return pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        text = f"{name} and its arguments cannot be pickled for another process ({error})"
        raise ConfigError(f"{text}: use a module-level function and plain values") from None


def _job_variables(num_ranks: int, store: str) -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]  # for programs that need one; our ranks rendezvous through the store
    variables = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PACELINE_STORE": store}
    variables |= {"PACELINE_LAUNCHER": "paceline", "PACELINE_JOB": secrets.token_hex(8)}
    if (loopback := machine.loopback_interface()) and "GLOO_SOCKET_IFNAME" not in os.environ:
        # By default gloo resolves the host name, which on a laptop may be unreachable or unknown.
        variables["GLOO_SOCKET_IFNAME"] = loopback
    return variables


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], Any], *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals with a function inside the block; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def handle_requests(
    first: Callable[[int], Any], again: Callable[[int], Any], *numbers: signal.Signals
) -> Iterator[None]:
    """Call `first` for the first of these signals inside the block, and `again` for each later request."""
    came_s: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if not came_s:
            came_s.append(time.monotonic())
            first(number)
        elif time.monotonic() - came_s[0] > SAME_REQUEST_S:
            again(number)

    with handle_signals(handle, *numbers):
        yield


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block, for example because importing torch must not be interrupted."""
    came: list[tuple[int, FrameType | None]] = []
    with handle_signals(lambda *signal_and_frame: came.append(signal_and_frame), signal.SIGINT, signal.SIGTERM):
        yield
    for number, frame in came[:1]:
        then = signal.getsignal(number)
        if callable(then):
            then(number, frame)
        elif then == signal.SIG_DFL:
            raise SystemExit(128 + number)


@contextlib.contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind this process, as Ctrl-C does, instead of terminating it immediately."""

    def unwind(number: int, frame: FrameType | None) -> None:
        forget_terminal(number)
        raise SystemExit(128 + number)

    numbers = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) is signal.SIG_DFL]
    with handle_signals(unwind, *numbers):
        yield


def forget_terminal(number: int) -> None:
    """Redirect output after SIGHUP: the terminal is gone, and later writes must not fail."""
    for descriptor in (1, 2) if number == signal.SIGHUP else ():
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT while a process starts and inherits the mask: Ctrl-C must not kill it before it ignores SIGINT."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _serve_store() -> Iterator[str]:
    """The name of a store for one job, which serves only processes of this user."""
    with contextlib.ExitStack() as stack:
        name = f"@paceline-{secrets.token_hex(16)}"
        if sys.platform != "linux":  # no abstract sockets and no peer credentials: use a private folder
            name = os.path.join(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-")), "store")
        stack.callback(store_server.Server(store_server.bind(name)).stop)
        yield name
