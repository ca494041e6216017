"""A rank that runs cells in IPython's shell and streams their output to the notebook."""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import io
import linecache
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from IPython.core.compilerop import CachingCompiler
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.pylabtools import print_figure
from IPython.display import display
from traitlets import Type
from traitlets.config import Config

from paceline.runtime.faults.processes import Failure, describe_failure
from paceline.runtime.faults.pulse import slow
from paceline.runtime.ranks import worker
from paceline.runtime.ranks.launch import defer_signals
from paceline.runtime.ranks.worker import listen

_GATHER_S = 0.01  # text written within this time forms one message
_FIGURES = "module://matplotlib_inline.backend_inline"


@dataclass(frozen=True)
class CellSettings:
    """The options of `%dist_init`."""

    num_ranks: int
    backend: str = "auto"
    device: str = "auto"
    gpu_ids: tuple[int, ...] = ()
    threads: int | None = None
    timeout_s: float = 86_400.0  # the user is watching, and can interrupt


# -- messages from the notebook to a rank, and back --------------------------------------------------------------------


class Cell(NamedTuple):
    """`name` is its file name in tracebacks, which begins with `In[`."""

    number: int
    name: str
    source: str


class Interrupt(NamedTuple):
    """Raise KeyboardInterrupt in the cell with this number, if it is still running. If `pids` (those of all ranks) is
    set, abort the collectives in which the cell waits instead."""

    number: int
    pids: tuple[int, ...] = ()


class Reopen(NamedTuple):
    """Close all process groups and join a new world."""


class Opened(NamedTuple):
    """The world is open, or could not be opened. On rank 0 `text` describes it."""

    text: str = ""
    device: str = ""
    failure: Failure | None = None


class Output(NamedTuple):
    stream: str
    text: str


@dataclass(frozen=True)
class Shown:
    """A rich result: the arguments of IPython's `DisplayPublisher.publish`."""

    data: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    transient: dict[str, Any] = field(default_factory=dict)
    update: bool = False


class Cleared(NamedTuple):
    wait: bool


class Locate(NamedTuple):
    """Asks for the position of the main thread in this cell. Every rank answers."""

    number: int


class Located(NamedTuple):
    """`position` is None unless the main thread is inside torch or Paceline, where it may wait for other ranks. An
    unchanged position means that the thread has made no progress. `place` is its line in a cell."""

    number: int
    place: str = ""
    position: int | None = None


@dataclass(frozen=True)
class Ended:
    """A cell has ended. `place` is the line of a cell where it failed; `counts` are the collectives of each group."""

    number: int
    failure: Failure | None = None
    place: str = ""
    was_aborted: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    gpu_memory_bytes: int | None = None


# -- output ------------------------------------------------------------------------------------------------------------


class _Stream(io.TextIOWrapper):
    """`sys.stdout` or `sys.stderr`, flushed after every write."""

    def write(self, text: str) -> int:
        count = super().write(text)
        self.flush()
        return count


class _Capture:
    """Sends the output that Python, C++ code and child processes write to descriptors 1 and 2."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._pipes: dict[int, tuple[str, codecs.IncrementalDecoder]] = {}
        for number, name in ((1, "stdout"), (2, "stderr")):
            read, write = os.pipe()
            os.set_blocking(read, False)
            os.dup2(write, number)
            os.close(write)
            self._pipes[read] = name, codecs.getincrementaldecoder("utf-8")("replace")
            binary = open(number, "wb", closefd=False)  # noqa: SIM115
            setattr(sys, name, _Stream(binary, "utf-8", "backslashreplace"))
        threading.Thread(target=self._run, name="paceline-output", daemon=True).start()

    def _run(self) -> None:
        poller = select.poll()
        for read in self._pipes:
            poller.register(read, select.POLLIN)
        while True:
            poller.poll()
            time.sleep(_GATHER_S)
            self._take()

    def _take(self) -> None:
        with self._lock:
            for read, (name, decoder) in self._pipes.items():
                with contextlib.suppress(BlockingIOError):  # the pipe is empty
                    if text := decoder.decode(os.read(read, 2**20)):
                        self._send(Output(name, text))

    def drain(self) -> None:
        """Send everything that has been written so far."""
        ctypes.CDLL(None).fflush(None)
        with defer_signals():  # an interrupt between reading and sending would lose text
            self._take()


class _Compiler(CachingCompiler):
    """Names code objects after the notebook's cell numbers."""

    name = ""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return self.name


class _DisplayHook(DisplayHook):
    """Shows the last expression of a cell. It keeps `_` but no history of outputs, which would keep tensors alive."""

    def __call__(self, result: Any = None) -> None:
        shell: Any = self.shell
        source = "".join(linecache.getlines(shell.compile.name))
        if result is not None and not self.semicolon_at_end_of_expression(source):
            shell.user_ns["_"] = result
            display(result)


class _DisplayPublisher(DisplayPublisher):
    def publish(
        self, data: Any, metadata: Any = None, *_: Any, transient: Any = None, update: bool = False, **__: Any
    ) -> None:
        self.shell.show(Shown(data, metadata or {}, transient or {}, update))

    def clear_output(self, wait: bool = False) -> None:
        self.shell.show(Cleared(wait))


class RankShell(InteractiveShell):
    """IPython's shell in a rank. It shows no errors: the notebook does, once for all ranks."""

    compiler_class = Type(_Compiler)
    displayhook_class = Type(_DisplayHook)
    display_pub_class = Type(_DisplayPublisher)
    show: Callable[[Any], None]

    def init_virtualenv(self) -> None:
        """Do nothing: IPython's version would repeat the notebook's warning about a wrong virtual environment."""

    def init_display_formatter(self) -> None:
        """Show figures even if pyplot, which would register this, is not imported."""
        super().init_display_formatter()
        pictures: Any = self.display_formatter.formatters["image/png"]  # type: ignore[union-attr]
        pictures.for_type_by_name("matplotlib.figure", "Figure", lambda figure: print_figure(figure, base64=True))

    def showtraceback(self, *_: Any, **__: Any) -> None: ...

    def showsyntaxerror(self, *_: Any, **__: Any) -> None: ...


# -- the rank ----------------------------------------------------------------------------------------------------------


class CellRank:
    """One rank: it opens the world, runs one cell after another, and listens to the notebook in the meantime."""

    def __init__(self, settings: CellSettings) -> None:
        self._settings = settings
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._running = 0
        self._can_interrupt = False
        self._aborted = 0  # the cell whose collectives were aborted
        self._world: Any = None
        self._main = threading.get_ident()
        self._capture = _Capture(self._send)
        # As `__main__`, so that pickle finds the functions and classes of cells.
        module = sys.modules["__mp_main__"] = types.ModuleType("__main__")
        config = Config()
        config.HistoryManager.enabled = False
        self._shell: Any = RankShell.instance(config=config, user_module=module)
        self._shell.show = self._show
        self._shell.user_ns["exit"] = self._shell.user_ns["quit"] = sys.exit  # IPython's would prompt on a terminal
        warnings.filterwarnings("ignore", "To exit: use 'exit'")

    def serve(self) -> None:
        """Run cells until the launcher ends this job."""
        signal.signal(signal.SIGINT, self._on_sigint)
        threading.Thread(target=self._listen, daemon=True).start()
        with listen(self._send):
            self._join()
            while (request := self._await_request()) is not None:
                if isinstance(request, Reopen):
                    self._join()
                else:
                    ended = self._run(request)
                    self._capture.drain()
                    self._send(ended)

    def _await_request(self) -> Any:
        with slow("waiting for a cell"):  # the user may take any amount of time
            return self._requests.get()

    def _send(self, message: Any) -> None:
        with defer_signals():  # a partial message could not be decoded
            worker.send_to_launcher(message)

    def _show(self, message: Any) -> None:
        self._capture.drain()  # keep the order of output and results
        self._send(message)

    # -- the world

    def _join(self) -> None:
        """Open the first world, or one that replaces it, and report that to the notebook."""
        try:
            opened = self._open_world()
        except Exception as error:
            opened = Opened(failure=describe_failure(int(os.environ["RANK"]), error))
        self._send(opened)

    def _open_world(self) -> Opened:
        from paceline.runtime.ranks import world

        settings = self._settings
        is_first = self._world is None
        if settings.gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.gpu_ids))
        if not is_first:
            world.abandon()
        said: list[str] = []
        self._world = here = world.init(
            settings.backend,
            settings.device,
            threads=settings.threads,
            timeout_s=settings.timeout_s,
            announce=said.append,
        )
        if is_first:
            self._provide(here)
        self._shell.user_ns["world"] = here
        return Opened(" ".join(said), f"{here.device}, {here.backend}")

    def _provide(self, here: Any) -> None:
        """Define the names available in every cell."""
        import torch
        import torch.distributed as dist

        from paceline.runtime.ranks.world import get, set_seed

        gpu_id = here.device.index if here.device.type == "cuda" else None
        if gpu_id is not None and self._settings.gpu_ids:
            gpu_id = self._settings.gpu_ids[here.local_rank % len(self._settings.gpu_ids)]
        self._shell.user_ns.update(
            torch=torch,
            dist=dist,
            rank=here.rank,
            world_size=here.world_size,
            local_rank=here.local_rank,
            device=here.device,
            gpu_id=gpu_id,
            get=get,
            set_seed=set_seed,
        )
        os.environ["MPLBACKEND"] = _FIGURES
        if "matplotlib" in sys.modules:
            sys.modules["matplotlib"].use(_FIGURES)  # type: ignore[attr-defined]

    def _count_collectives(self) -> dict[str, int]:
        """The number of collectives that this rank has started in each group."""
        import torch.distributed as dist

        from paceline.torch_internals import list_groups

        if not dist.is_initialized():
            return {}
        counts = dict[str, int]()
        for group, name in list_groups().items():
            with contextlib.suppress(Exception):  # a group without a counter
                counts[name] = int(group._get_sequence_number_for_group())
        return counts

    # -- cells

    def _run(self, cell: Cell) -> Ended:
        import torch

        self._shell.compile.name = cell.name
        self._running = cell.number
        try:
            self._can_interrupt = True
            try:
                result = self._shell.run_cell(cell.source)
                error = result.error_before_exec or result.error_in_exec
            finally:
                self._can_interrupt = False
        except BaseException as caught:  # an interrupt in the shell's code, after the cell has ended
            error = caught
        self._running = 0
        failure, place = None, ""
        if error is not None:
            place = _strip(error, cell.name)
            failure = describe_failure(int(os.environ["RANK"]), error)
            error.__traceback__ = None  # its frames would keep the tensors of the cell alive
        gpu_memory = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else None
        was_aborted = self._aborted == cell.number
        return Ended(cell.number, failure, place, was_aborted, self._count_collectives(), gpu_memory)

    def _on_sigint(self, *_: Any) -> None:
        if self._can_interrupt:
            raise KeyboardInterrupt

    # -- while a cell runs

    def _listen(self) -> None:
        while True:
            try:
                request = worker.receive()
            except (EOFError, OSError):
                os._exit(1)  # the launcher has closed the link or is gone
            if isinstance(request, Locate):
                self._send(self._locate(request.number))
            elif not isinstance(request, Interrupt):
                self._requests.put(request)
                if request is None:
                    return
            elif request.number == self._running and request.pids:
                self._aborted = request.number
                # On a separate thread, because closing may block, and further requests must be read.
                threading.Thread(target=abort_collectives, args=(request.pids,), daemon=True).start()
            elif request.number == self._running:
                signal.pthread_kill(self._main, signal.SIGINT)

    def _locate(self, number: int) -> Located:
        frame = sys._current_frames().get(self._main)
        if number != self._running or frame is None or not _is_library(frame.f_code.co_filename):
            return Located(number)
        frames = list(traceback.walk_stack(frame))
        lines = [_describe_line(one.f_code.co_filename, line) for one, line in frames if _is_cell(one)]
        position = hash(tuple((id(one.f_code), one.f_lasti) for one, _ in frames))
        return Located(number, lines[0] if lines else "", position)


def _is_cell(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith("In[")


def _is_library(file: str) -> bool:
    """Whether this file belongs to torch or Paceline, where a rank may wait for others."""
    import torch

    ours, theirs = str(Path(__file__).parents[2]), os.path.dirname(torch.__file__)
    return file.startswith((ours + os.sep, theirs + os.sep))


def _describe_line(file: str, line: int) -> str:
    return f"{file}, line {line}: {linecache.getline(file, line).strip()}"


def _strip(error: BaseException, name: str) -> str:
    """Remove the frames above the cell from a traceback and return the last line of a cell in it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != name:
        trace = trace.tb_next
    error.__traceback__ = trace
    lines = [_describe_line(one.f_code.co_filename, line) for one, line in traceback.walk_tb(trace) if _is_cell(one)]
    return lines[-1] if lines else ""


def abort_collectives(pids: tuple[int, ...]) -> None:
    """Abort every collective that this process is waiting in. Its groups cannot be used afterward.

    Our backend and NCCL have a call for it. gloo does not, but it fails when a connection is shut down.
    """
    from paceline.runtime.ranks.world import abort_groups
    from paceline.torch_internals import list_groups

    abort_groups(list_groups())

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


def serve_cells(settings: CellSettings) -> None:
    """The job of a rank that runs cells."""
    CellRank(settings).serve()
