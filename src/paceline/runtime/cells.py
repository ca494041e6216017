"""A rank that runs cells: source that a person types, in one namespace, its output sent as it comes."""

from __future__ import annotations
import __future__

import ast
import asyncio
import base64
import contextlib
import ctypes
import fcntl
import inspect
import io
import linecache
import os
import queue
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
import traceback
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.runtime import worker
from paceline.runtime.pulse import slow
from paceline.runtime.worker import Failure, describe_failure, find_function, listen

_GATHER_S = 0.03  # text that is written within this time travels in one message
_MAX_PENDING = 2**20  # characters that wait to be sent before the cell that writes them has to wait
_DRAIN_S = 1.0
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_BACKEND = "module://paceline.runtime.cell_figures"
# In the order in which a notebook prefers them; the method of an object, and what its value is.
_MIMES = (
    ("text/html", "_repr_html_"), ("text/markdown", "_repr_markdown_"), ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"), ("image/jpeg", "_repr_jpeg_"), ("text/latex", "_repr_latex_"),
    ("application/json", "_repr_json_"), ("application/javascript", "_repr_javascript_"),
)  # fmt: skip


@dataclass(frozen=True)
class CellSettings:
    """What `%dist_init` asks for. `hook` is a function, "package.module:name", that a rank calls before a cell that
    names IPython: it lets IPython's own `display` reach the notebook."""

    num_ranks: int
    backend: str = "auto"
    device: str = "auto"
    gpu_ids: tuple[int, ...] = ()
    threads: int | None = None
    timeout_s: float = 86_400.0  # a person watches, and can interrupt
    hook: str = ""


# -- what the launcher sends, and what a rank sends back ---------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    number: int
    name: str
    source: str


@dataclass(frozen=True)
class Interrupt:
    """Raise KeyboardInterrupt in the cell of this number, if it still runs."""

    number: int


@dataclass(frozen=True)
class Abort:
    """End what the cell of this number waits for in a collective; `pids` are all ranks."""

    number: int
    pids: tuple[int, ...]


@dataclass(frozen=True)
class Reopen:
    """Close all process groups and join a new world."""


@dataclass(frozen=True)
class Ask:
    """Say where you are."""

    token: int


@dataclass(frozen=True)
class Opened:
    """The world is open; rank 0 describes it."""

    text: str
    device: str
    backend: str


@dataclass(frozen=True)
class Refused:
    """It could not be opened."""

    failure: Failure


@dataclass(frozen=True)
class Output:
    stream: str
    text: str


@dataclass(frozen=True)
class Shown:
    """A rich result: mime types and their data, as Jupyter's `display_data` has them."""

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    display_id: str = ""
    is_update: bool = False


@dataclass(frozen=True)
class Cleared:
    wait: bool


@dataclass(frozen=True)
class Ended:
    """A cell is over. `place` is the line of a cell where it failed; `counts` are the collectives of each group."""

    number: int
    failure: Failure | None = None
    place: str = ""
    is_interrupted: bool = False
    was_aborted: bool = False
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Where:
    """What a rank does: the cell that it runs (0: none), its line, and the position of its main thread.

    `waits` says that the innermost function is one of torch's or ours, in which a rank may wait for others.
    """

    token: int
    number: int
    place: str
    position: tuple[tuple[int, int], ...]
    waits: bool
    memory_bytes: int
    gpu_memory_bytes: int
    since_s: float


# -- the rank ---------------------------------------------------------------------------------------------------------


class _Outbox:
    """Messages on their way to the launcher. A thread sends them, so that an interrupt cannot cut one in two."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pending = 0  # characters
        self._lock = threading.RLock()  # a signal handler may print while its thread holds it
        self._thread = threading.Thread(target=self._run, name="paceline-outbox", daemon=True)
        self._thread.start()

    def put(self, message: Any) -> None:
        if isinstance(message, Output):
            self._count(len(message.text))
        self._queue.put(message)
        while self._pending > _MAX_PENDING and threading.current_thread() is not self._thread:
            time.sleep(0.005)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _count(self, num_characters: int) -> None:
        with self._lock:
            self._pending += num_characters

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            batch, deadline = [message], time.monotonic() + _GATHER_S
            while isinstance(batch[-1], Output) and (left_s := deadline - time.monotonic()) > 0:
                with contextlib.suppress(queue.Empty):
                    batch.append(self._queue.get(timeout=left_s))
            for one in _merge(batch):
                if one is not None:
                    with contextlib.suppress(OSError):  # the launcher is gone, and this process will follow
                        worker.send_to_launcher(one)
            self._count(-sum(len(one.text) for one in batch if isinstance(one, Output)))
            if batch[-1] is None:
                return


def _merge(batch: list[Any]) -> list[Any]:
    """Neighbouring pieces of text as one."""
    merged: list[Any] = []
    for one in batch:
        last = merged[-1] if merged else None
        if isinstance(one, Output) and isinstance(last, Output) and last.stream == one.stream:
            merged[-1] = Output(one.stream, last.text + one.text)
        else:
            merged.append(one)
    return merged


class _Stream(io.TextIOBase):
    """`sys.stdout` or `sys.stderr` of a cell."""

    def __init__(self, name: str, number: int, outbox: _Outbox) -> None:
        self._name, self._number, self._outbox = name, number, outbox
        self.buffer = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115  what is written here is captured

    @property
    def name(self) -> str:
        return f"<{self._name}>"

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._outbox.put(Output(self._name, text))
        return len(text)


class _Descriptors:
    """What C++ code and child processes write to descriptors 1 and 2, as text of stdout."""

    def __init__(self, outbox: _Outbox) -> None:
        self._outbox, self._lock = outbox, threading.Lock()
        self._saved = [os.dup(number) for number in (1, 2)]
        self._read, write = os.pipe()
        for number in (1, 2):
            os.dup2(write, number)
        os.close(write)
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="paceline-descriptors", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        while self._is_open:
            poller.poll()
            with self._lock:
                if self._is_open:
                    self._take()

    def _take(self) -> None:
        if count := self._count():
            self._outbox.put(Output("stdout", os.read(self._read, count).decode(errors="replace")))

    def _count(self) -> int:
        return int(struct.unpack("i", fcntl.ioctl(self._read, termios.FIONREAD, b"\0" * 4))[0])

    def drain(self) -> None:
        """Pass on what was written until now."""
        ctypes.CDLL(None).fflush(None)
        with self._lock:
            self._take()

    def close(self) -> None:
        self.drain()
        with self._lock:
            self._is_open = False
        os.write(1, b"\n")  # wakes the thread
        self._thread.join(_DRAIN_S)
        for number, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, number)
            os.close(saved)
        os.close(self._read)


class CellRank:
    """One rank: it opens the world, runs cells one after another, and answers questions while one runs."""

    def __init__(self, settings: CellSettings) -> None:
        self._settings = settings
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._running, self._since_s = 0, time.monotonic()
        self._can_interrupt = False
        self._aborted = 0  # the cell whose collectives were ended
        self._flags = 0
        self._names: set[str] = set()
        self._loop: asyncio.Runner | None = None
        self._world: Any = None
        self.outbox = _Outbox()
        self._descriptors: _Descriptors | None = None
        self.module = types.ModuleType("__main__")
        self.namespace = self.module.__dict__

    def serve(self) -> None:
        """Run cells until the launcher closes this."""
        mains = {name: sys.modules.get(name) for name in ("__main__", "__mp_main__")}
        # A class that a cell defines is found where its instances say that it is.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = self.module
        before = signal.signal(signal.SIGINT, self._on_sigint)
        outputs = sys.stdout, sys.stderr
        descriptors = self._descriptors = _Descriptors(self.outbox)
        sys.stdout, sys.stderr = _Stream("stdout", 1, self.outbox), _Stream("stderr", 2, self.outbox)
        threading.Thread(target=self._listen, name="paceline-listener", daemon=True).start()
        try:
            with listen(self.outbox.put):
                self._join()
                while (request := self._await_request()) is not None:
                    if isinstance(request, Reopen):
                        self._join()
                        continue
                    ended = self._run(request)
                    descriptors.drain()
                    self.outbox.put(ended)
        finally:
            sys.stdout, sys.stderr = outputs
            descriptors.close()
            signal.signal(signal.SIGINT, before)
            sys.modules.update({name: module for name, module in mains.items() if module is not None})
            self.outbox.close()

    def _await_request(self) -> Any:
        with slow("waiting for a cell"):  # as long as a person takes
            return self._requests.get()

    # -- the world

    def _join(self) -> None:
        """Open the world, or another one in its place, and provide its names."""
        rank = int(os.environ["RANK"])
        try:
            opened = self._open_world()
        except Exception as error:
            self.outbox.put(Refused(describe_failure(rank, error)))
        else:
            self.outbox.put(opened)

    def _open_world(self) -> Opened:
        from paceline.runtime import world

        settings = self._settings
        is_first = self._world is None
        if settings.gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.gpu_ids))
        if not is_first:
            world.abandon()
        said: list[str] = []
        self._world = here = world.init(
            settings.backend, settings.device, threads=settings.threads, timeout_s=settings.timeout_s,
            announce=said.append,
        )  # fmt: skip
        if is_first:
            self._provide(here)
        self.namespace["world"] = here
        return Opened(" ".join(said), str(here.device), here.backend)

    def _provide(self, here: Any) -> None:
        """The names that every cell finds."""
        import torch
        import torch.distributed as dist

        from paceline.runtime.world import get, set_seed

        is_gpu = here.device.type == "cuda"
        ids = self._settings.gpu_ids
        gpu_id = (ids[here.local_rank % len(ids)] if ids else here.device.index) if is_gpu else None
        self.namespace.update(
            torch=torch, dist=dist, rank=here.rank, world_size=here.world_size, local_rank=here.local_rank,
            device=here.device, gpu_id=gpu_id, get=get, set_seed=set_seed, display=self.display,
            __builtins__=__builtins__,
        )  # fmt: skip
        os.environ["MPLBACKEND"] = _BACKEND
        if "matplotlib" in sys.modules:
            sys.modules["matplotlib"].use(_BACKEND)  # type: ignore[attr-defined]

    def _count_collectives(self) -> dict[str, int]:
        """How many collectives this rank has started in each group."""
        import torch.distributed as dist

        from paceline.torch_internals import list_groups

        if not dist.is_initialized():
            return {}
        counts = dict[str, int]()
        for group, name in list_groups().items():
            with contextlib.suppress(Exception):  # a group that cannot tell
                counts[name] = int(group._get_sequence_number_for_group())
        return counts

    # -- cells

    def _run(self, cell: Cell) -> Ended:
        error: BaseException | None = None
        self._running, self._since_s = cell.number, time.monotonic()
        try:
            self._can_interrupt = True
            try:
                self._execute(cell)
                self.show_figures()
            finally:
                self._can_interrupt = False
        except BaseException as caught:  # also SystemExit: `exit()` in a cell ends the cell, not the rank
            error = caught
        self._running, self._since_s = 0, time.monotonic()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        was_aborted, counts = self._aborted == cell.number, self._count_collectives()
        if error is None:
            return Ended(cell.number, was_aborted=was_aborted, counts=counts)
        place = self._strip(error, cell.name)
        failure = describe_failure(int(os.environ["RANK"]), error)
        is_interrupted = isinstance(error, KeyboardInterrupt)
        error.__traceback__ = None  # its frames would hold the tensors of the cell
        return Ended(cell.number, failure, place, is_interrupted, was_aborted, counts)

    def _execute(self, cell: Cell) -> None:
        source, name = cell.source, cell.name
        self._names.add(name)
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        if self._settings.hook and "IPython" in source:
            find_function(self._settings.hook)()
        flags = self._flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree = compile(source, name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        body, last = tree.body, None
        if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";"):
            body, last = body[:-1], ast.Expression(body[-1].value)
        value = None
        for part, mode in ((ast.Module(body, tree.type_ignores), "exec"), (last, "eval")):
            if part is not None:
                code = compile(part, name, mode, flags, dont_inherit=True)
                self._flags |= code.co_flags & _FUTURE  # as in a notebook, for the cells that follow
                value = eval(code, self.namespace)
                if code.co_flags & inspect.CO_COROUTINE:
                    self._loop = self._loop or asyncio.Runner()
                    value = self._loop.run(value)
        if value is not None and last is not None:
            self.namespace["_"] = value
            self.display(value)

    def _strip(self, error: BaseException, name: str) -> str:
        """Remove our own frames from a traceback, and find the last line of a cell in it."""
        trace, place = error.__traceback__, ""
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        error.__traceback__ = trace
        for frame, line in traceback.walk_tb(trace):
            if (file := frame.f_code.co_filename) in self._names:
                place = _describe_line(file, line)
        return place

    # -- what a cell shows

    def display(self, *objects: Any, display_id: str | bool = "", update: bool = False, **_: Any) -> None:
        """Show objects in the notebook, as a cell's last line is shown."""
        if self._descriptors is not None:
            self._descriptors.drain()  # what was written before is shown before
        name = f"paceline-{time.monotonic_ns()}" if display_id is True else display_id or ""
        for one in objects:
            self.outbox.put(Shown(*describe(one), name, update))

    def show_figures(self) -> None:
        """Show the open figures of pyplot, and close them."""
        if (pyplot := sys.modules.get("matplotlib.pyplot")) is None:
            return
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            self.display(figure)
            pyplot.close(figure)

    # -- what the launcher asks meanwhile

    def _on_sigint(self, *_: Any) -> None:
        if self._can_interrupt:
            raise KeyboardInterrupt

    def _listen(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while True:
            try:
                request = worker.receive()
            except (EOFError, OSError):
                os._exit(1)  # the launcher has closed the link or is gone
            if request is None or isinstance(request, Cell | Reopen):
                self._requests.put(request)
                if request is None:
                    return
            elif isinstance(request, Ask):
                self.outbox.put(self._locate(request.token, main))
            elif request.number == self._running:
                if isinstance(request, Interrupt):
                    signal.pthread_kill(main, signal.SIGINT)
                elif isinstance(request, Abort):
                    self._aborted = request.number
                    # A thread of its own: closing may wait for what it ends, and questions must be answered.
                    threading.Thread(target=end_collectives, args=(request.pids,), daemon=True).start()

    def _locate(self, token: int, main: int) -> Where:
        frame, place, position = sys._current_frames().get(main), "", []
        waits = frame is not None and _is_library(frame.f_code.co_filename)
        while frame is not None:
            position.append((id(frame.f_code), frame.f_lasti))
            if not place and (file := frame.f_code.co_filename) in self._names:
                place = _describe_line(file, frame.f_lineno)
            frame = frame.f_back
        import psutil
        import torch

        gpu = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        memory = psutil.Process().memory_info().rss
        running_s = time.monotonic() - self._since_s
        return Where(token, self._running, place, tuple(position), waits, memory, gpu, running_s)


def _is_library(file: str) -> bool:
    """Whether a rank may wait for others in this file: torch's or ours."""
    import torch

    ours, theirs = os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__)
    return file.startswith((ours + os.sep, theirs + os.sep))


def _describe_line(file: str, line: int | None) -> str:
    return f"{file}, line {line}: {linecache.getline(file, line or 0).strip()}"


def end_collectives(pids: tuple[int, ...]) -> None:
    """Make every collective that this process waits for fail. Its groups are of no use afterwards.

    Ours and NCCL have a call for it. gloo has none: a connection that is shut down is what it notices.
    """
    from paceline.torch_internals import list_groups

    for group in list_groups():
        with contextlib.suppress(Exception):
            group.abort()
    import psutil

    def list_connections(pid: int) -> list[Any]:
        process = psutil.Process(pid)
        list_them = getattr(process, "net_connections", None) or process.connections
        return [one for one in list_them("tcp") if one.raddr]

    ends = set()
    for pid in set(pids) - {os.getpid()}:
        with contextlib.suppress(psutil.Error):
            ends |= {(one.raddr, one.laddr) for one in list_connections(pid)}
    for one in list_connections(os.getpid()):
        if (one.laddr, one.raddr) in ends and one.fd >= 0:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as copy:
                copy.shutdown(socket.SHUT_RDWR)


def describe(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a notebook can show of an object, by mime types, and the metadata of these."""
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    if not isinstance(value, type):
        if callable(bundle := getattr(value, "_repr_mimebundle_", None)):
            with contextlib.suppress(Exception):
                made = bundle()
                data, metadata = (dict(made[0]), dict(made[1])) if isinstance(made, tuple) else (dict(made or {}), {})
        for mime, method in _MIMES:
            if mime not in data and callable(make := getattr(value, method, None)):
                with contextlib.suppress(Exception):  # as in a notebook, the next representation is shown
                    made = make()
                    made, more = made if isinstance(made, tuple) else (made, None)
                    if made is not None:
                        data[mime] = made
                    if more:
                        metadata[mime] = more
        if not data and hasattr(value, "savefig") and type(value).__module__.startswith("matplotlib"):
            picture = io.BytesIO()
            value.savefig(picture, format="png", bbox_inches="tight")
            data["image/png"] = picture.getvalue()
    for mime, content in data.items():
        if isinstance(content, bytes):
            data[mime] = base64.b64encode(content).decode()
    data.setdefault("text/plain", _represent(value))
    return data, metadata


def _represent(value: Any) -> str:
    if isinstance(value, dict | list | tuple | set):
        import pprint

        return pprint.pformat(value, sort_dicts=False)
    return repr(value)


_current: CellRank | None = None


def current() -> CellRank | None:
    """The rank of this process, while it serves cells."""
    return _current


@contextlib.contextmanager
def _as_current(rank: CellRank) -> Iterator[None]:
    global _current
    _current = rank
    try:
        yield
    finally:
        _current = None


def serve_cells(settings: CellSettings) -> None:
    """The job of a rank that runs cells."""
    rank = CellRank(settings)
    with _as_current(rank):
        rank.serve()
