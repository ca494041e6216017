"""One run of a command: it starts ranks or joins the launched world, shows progress, saves, and survives interrupts.

Every verb runs in a session, from the command line and from Python. What is measured belongs to `measure`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, LaunchError
from paceline.records.environment import Environment, capture_environment, find_doubts
from paceline.records.kinds import Record
from paceline.records.store import RUN_FILE, STUDY_FILE, Run, RunFolder, Study, load_run
from paceline.runtime.environment import Place, is_launched, read_place
from paceline.runtime.launch import RankPool, check_rank_count, defer_signals
from paceline.runtime.worker import listen
from paceline.units import format_duration, format_number_of

if TYPE_CHECKING:
    import rich.progress

    from paceline.report.result import Result

# Where there is no terminal to draw on, how often a log gets a line.
_LINE_S = 10.0
# A signal so soon after the first is the same request: `timeout` and service managers signal a whole process group, and
# a launcher that got a signal passes it on to ranks that already have it.
_ECHO_S = 0.3

# A function of the ranks: "package.module:name", which only the ranks import, or a call that imports it here.
Load = str | Callable[[], Callable[..., Any]]


@dataclass(frozen=True)
class Progress:
    """What a rank posts on its way: `done` of `total` cells or steps (one in progress counts in part).

    `label` says what is being done. `records` are those of a cell that is now finished; an interrupted run saves them.
    `line` is a line that must be shown, wherever the output goes.
    """

    done: float
    total: float
    label: str = ""
    records: tuple[Record, ...] = ()
    line: str = ""


@dataclass(frozen=True)
class Task:
    """One cell of a run: a function that ranks call and that returns records.

    `load` names the function ("package.module:name"), so that this process needs not import torch, or imports it; the
    ranks already start while it does. `weight` is its work compared with other tasks.
    `follow` makes its arguments from the records of the tasks before it. `on_death` makes its records where its ranks
    were killed; where that is None, or returns None, the error ends the run.
    """

    name: str
    load: Load
    arguments: tuple[Any, ...] = ()
    ranks: int = 1
    weight: float = 1.0
    follow: Callable[[Sequence[Record]], tuple[Any, ...]] | None = None
    on_death: Callable[[LaunchError], list[Record] | None] | None = None


@dataclass
class Session:
    """One run under way. In a launched world every rank has one, and only rank 0 (`is_leader`) writes and shows.

    `place` is None where the ranks are started here, or where this process alone is measured (`here`).
    `folder` is the run's folder, None where nothing is to be written;
    in a launched world the others than rank 0 have one only to read from, when a run is resumed.
    `config` is the resolved request. `is_finished` says that a resumed run has all of its records already.
    `warnings` are reasons to doubt that the verb adds. `saved` may be set by a verb that saves in its own way: it
    describes what is on disk, for the message of an interrupt ("step 40"); empty where there is nothing.
    """

    verb: str
    config: dict[str, Any]
    ranks: int
    environment: Environment
    place: Place | None = None
    folder: Path | None = None
    study: Study | None = None
    progress: bool | None = None
    here: bool = False
    is_finished: bool = False
    can_resume: bool = False
    warnings: list[str] = field(default_factory=list)
    saved: Callable[[], str] | None = None
    signal: int = 0  # the one for which ranks were asked to save and stop
    _posted: list[Record] = field(default_factory=list)
    _num_posted: int = 0  # cells
    _cells: tuple[str, ...] = ()
    _num_cells: float = 0
    _parts: list[Session] = field(default_factory=list)
    _pools: dict[int, RankPool] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    @property
    def is_leader(self) -> bool:
        return self.place is None or self.place.rank == 0

    # -- running -------------------------------------------------------------------------------------------------------

    def ask(
        self,
        load: Load,
        arguments: tuple[Any, ...] = (),
        ranks: int | None = None,
        on_interrupt: str = "stop",
    ) -> Any:
        """Call the loaded function on the ranks and return the value of rank 0 (in a launched world: of this rank).

        Records that it posts are saved if the run is interrupted. `on_interrupt` "stop" ends the ranks; "save" passes
        the first Ctrl-C or SIGTERM to them, so that they save and return, and notes it in `signal`; a second one ends
        them at once.
        """
        task = Task("", load, arguments, ranks or self.ranks)
        with self._show() as display:
            if self.place is not None or self.here:
                return self._call_here(task, display)
            check_rank_count(task.ranks)
            return self._call_on_pool(0, task, display, saves=on_interrupt == "save")

    def run(
        self,
        tasks: Sequence[Task],
        describe: Callable[[Sequence[Record]], str] | None = None,
        at_once: int = 1,
    ) -> list[Record]:
        """The records of all tasks, in order: of those that are saved already, and of the others, run and saved now.

        `at_once` tasks run at a time, each on ranks of its own. `describe` says a few words about a finished task.
        """
        if self.place is not None and at_once > 1:
            raise ConfigError(
                f"--at-once {at_once} in a launched world of {self.place.world_size}: its ranks run one task after the "
                "other; leave it out, or start without the launcher",
                code="launched",
            )
        self._cells, self._num_cells = tuple(task.name for task in tasks), len(tasks)
        kept = {task.name: found for task in tasks if (found := self._find(task)) is not None}
        missing = [task for task in tasks if task.name not in kept]
        if missing:
            with self._show(tasks, tuple(kept), describe) as display:
                if self.place is not None or self.here:
                    self._run_in_turn(missing, kept, lambda task: self._call_here(task, display), display)
                else:
                    check_rank_count(max(task.ranks for task in missing) * at_once)
                    if at_once == 1 or len(missing) == 1:
                        self._run_in_turn(missing, kept, lambda task: self._run_on_pool(0, task, display), display)
                    else:
                        self._run_at_once(missing, kept, at_once, display)
        return [record for task in tasks for record in kept[task.name]]

    def _show(
        self,
        tasks: Sequence[Task] = (),
        finished: Sequence[str] = (),
        describe: Callable[[Sequence[Record]], str] | None = None,
    ) -> ProgressDisplay:
        return ProgressDisplay(self.verb, self.progress if self.is_leader else False, tasks, finished, describe)

    def _find(self, task: Task) -> list[Record] | None:
        return None if self.study is None else self.study.find(task.name)

    def _finish(self, task: Task, records: list[Record], display: ProgressDisplay) -> list[Record]:
        if self.study is not None and self.is_leader:
            self.study.keep(task.name, records, self.environment.machine_and_torch)
        display.finish(task.name, records)
        return records

    def _run_in_turn(
        self,
        tasks: Sequence[Task],
        kept: dict[str, list[Record]],
        call: Callable[[Task], list[Record]],
        display: ProgressDisplay,
    ) -> None:
        for task in tasks:
            if task.follow is not None:
                before = [record for records in kept.values() for record in records]
                task = dataclasses.replace(task, arguments=task.follow(before))
            kept[task.name] = self._finish(task, call(task), display)

    def _run_at_once(
        self, tasks: Sequence[Task], kept: dict[str, list[Record]], at_once: int, display: ProgressDisplay
    ) -> None:
        waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        done: queue.SimpleQueue[tuple[Task, list[Record] | BaseException] | None] = queue.SimpleQueue()
        is_over = threading.Event()

        def work(number: int) -> None:
            while not is_over.is_set():
                try:
                    task = waiting.get_nowait()
                except queue.Empty:
                    break
                try:
                    done.put((task, self._run_on_pool(number, task, display)))
                except BaseException as error:
                    done.put((task, error))
                    break
            done.put(None)

        _load(tasks[0].load)  # once, here: threads that import torch at the same time would wait for each other
        workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(at_once)]
        try:
            for worker in workers:
                worker.start()
            left = len(workers)
            while left:
                item = _wait_for(done)
                if item is None:
                    left -= 1
                    continue
                task, outcome = item
                if isinstance(outcome, BaseException):
                    raise outcome
                kept[task.name] = self._finish(task, outcome, display)
        except BaseException:
            is_over.set()
            self.close()
            raise
        finally:
            for worker in workers:
                worker.join()

    def _call_here(self, task: Task, display: ProgressDisplay) -> Any:
        def hear(message: Any) -> None:
            self._hear(task, message, display)

        with listen(hear):
            return find_function(task.load)(*task.arguments)

    def _run_on_pool(self, number: int, task: Task, display: ProgressDisplay) -> list[Record]:
        try:
            records: list[Record] = self._call_on_pool(number, task, display)
        except LaunchError as error:
            replaced = task.on_death(error) if task.on_death is not None else None
            if replaced is None:
                raise
            return replaced
        return records

    def _call_on_pool(self, number: int, task: Task, display: ProgressDisplay, saves: bool = False) -> Any:
        """The value of rank 0 of the task's function, on warm ranks that belong to this worker."""
        with contextlib.ExitStack() as stack:
            pool = self._get_pool(number, task.ranks)
            if saves:
                stack.enter_context(self._forward_signals(pool))
            function = _load(task.load)
            if self.signal:  # before there was a rank that could save anything
                raise SystemExit(128 + self.signal)

            def hear(rank: int, message: Any) -> None:
                self._hear(task, message, display)

            try:
                return pool.run(function, task.arguments, num_ranks=task.ranks, on_message=hear)[0]
            except LaunchError:
                if self.signal:  # it came before the ranks had begun to listen for it
                    raise SystemExit(128 + self.signal) from None
                raise

    def _hear(self, task: Task, message: Progress, display: ProgressDisplay) -> None:
        if not task.name:  # of a run without tasks, the cells are those that the ranks post
            self._posted.extend(message.records)
            self._num_posted += bool(message.records)
            self._num_cells = message.total
        display.hear(task.name, message)

    def _get_pool(self, number: int, ranks: int) -> RankPool:
        with self._lock:
            if self._is_closed:
                raise LaunchError("the run is being closed", code="interrupted")
            pool = self._pools.get(number)
            if pool is None or pool.num_ranks < ranks:
                if pool is not None:
                    pool.close()
                pool = self._pools[number] = RankPool(ranks)
                pool.start()
            return pool

    @contextlib.contextmanager
    def _forward_signals(self, pool: RankPool) -> Iterator[None]:
        """The first Ctrl-C or SIGTERM asks the ranks to save and stop; the second ends them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        came_s = 0.0

        def forward(number: int, frame: FrameType | None) -> None:
            nonlocal came_s
            if self.signal:
                if time.monotonic() - came_s <= _ECHO_S:
                    return
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            self.signal, came_s = number, time.monotonic()
            self._say("stopping after this step, with a checkpoint; interrupt once more to stop at once")
            for pid in pool.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)  # ranks of our own ignore SIGINT

        with _handle(forward, signal.SIGINT, signal.SIGTERM):
            yield

    def close(self) -> None:
        """End all ranks; a worker that is about to start some is refused."""
        with self._lock:
            self._is_closed = True
            for pool in self._pools.values():
                pool.close()
            self._pools.clear()

    # -- saving --------------------------------------------------------------------------------------------------------

    def save(
        self,
        records: Sequence[Record],
        details: dict[str, Any] | None = None,
        doubts: Sequence[str] | None = None,
        complete: bool = True,
    ) -> Run:
        """The finished run, saved as `run.json` where this session writes. Its warnings are the reasons to doubt it.

        `details` is what only a rank knows of the environment. `doubts` are those that follow from the records: by
        default those that `find_doubts` finds. A resumed run that was finished is the saved one.
        """
        if self.is_finished and self.folder is not None:
            return load_run(self.folder)
        environment = self.environment if details is None else dataclasses.replace(self.environment, details=details)
        if doubts is None:
            doubts = [doubt.text for doubt in find_doubts(records, environment)]
        found = (*self.warnings, *self._find_machine_warnings(), *doubts)
        run = Run(self.verb, self.config, environment, tuple(records), found, complete)
        if self.folder is not None and self.is_leader:
            RunFolder(self.folder).save(run)
            self.is_finished = complete
        return run

    def write(self, result: Result) -> None:
        """Write the tables and figures of the saved run into its folder, where this session writes."""
        if self.folder is not None and self.is_leader:
            result.save(self.folder)

    def _find_machine_warnings(self) -> list[str]:
        """The environment of a run is that of its last machine; this names the others."""
        if self.study is None:
            return []
        begun, here = self.study.config.get("machine", "unknown"), self.environment.machine_and_torch
        counts = Counter(self.study.find_machine(cell) or begun for cell in self._cells)
        if set(counts) <= {here}:
            return []
        counts[here] += 0
        made = "; ".join(f"{format_number_of(count, 'cell')} on {name}" for name, count in counts.items())
        return [f"measured on more than one machine: {made}. A mean may mix them; the run names the last."]

    @contextlib.contextmanager
    def open_part(self, name: str, verb: str, config: dict[str, Any], same_machine: bool = False) -> Iterator[Session]:
        """A run that is part of this one, in the folder `name` inside of its folder: resumed where it was started.

        Its cells are kept there, and it is this session that says what is saved when it is interrupted.
        """
        assert self.folder is not None
        place = self.folder / name
        is_begun = (place / STUDY_FILE).exists()
        place.mkdir(exist_ok=True)
        with _open(
            verb,
            config,
            ranks=self.ranks,
            resume=place if is_begun else None,
            folder=place,
            progress=self.progress,
            cells=True,
            same_machine=same_machine,
            command_line=self.environment.command_line,
        ) as part:
            self._parts.append(part)
            try:
                yield part
            except BaseException:
                if part.study is not None and not part.is_finished and not part.study.count():
                    part.study.discard()
                    with contextlib.suppress(OSError):
                        place.rmdir()
                raise

    # -- what an interrupt says ----------------------------------------------------------------------------------------

    def _describe_saved(self) -> str:
        """What is on disk of an unfinished run, with its verb ("3 of 8 cells are"); empty where nothing is."""
        if self.saved is not None:
            what = self.saved()
            return f"{what} is" if what else ""
        if self._parts:
            kept = []
            for part in self._parts:
                count = part.study.count() if part.study is not None else 0
                name = part.folder.name if part.folder is not None else part.verb
                if part.is_finished:
                    kept.append(f"{name} (finished)")
                elif count:
                    kept.append(f"{name} ({count} of {part._num_cells:.0f} cells)")
            return f"{', '.join(kept)} {'are' if len(kept) > 1 else 'is'}" if kept else ""
        if self.study is not None:
            count = self.study.count()
            total = f" of {self._num_cells:.0f}" if self._num_cells else ""
            return f"{count}{total} cells {'are' if count != 1 else 'is'}" if count else ""
        return ""

    def _save_unfinished(self) -> str:
        """Save what was posted by an unfinished run, or discard an empty study; say what there is."""
        if self.folder is None or not self.is_leader:
            return ""
        if self.is_finished:
            return f"all records are saved in {self.folder}"
        if self.study is None and self._posted and not (self.folder / RUN_FILE).exists():
            self.save(self._posted, complete=False)
            count = self._num_posted
            return f"{count} of {self._num_cells:.0f} cells {'are' if count != 1 else 'is'} saved in {self.folder}"
        what = self._describe_saved()
        if what and self.can_resume:
            return f"{what} saved; resume with: paceline {self.verb} --resume {self.folder}"
        if what:
            return f"{what} saved in {self.folder}"
        if self.study is not None:
            self.study.discard()
        return ""

    def _say(self, text: str) -> None:
        if self.is_leader:
            print(f"paceline: {text}", file=sys.stderr, flush=True)


# -- opening -----------------------------------------------------------------------------------------------------------


def choose_ranks(requested: Sequence[int] | None, default: Sequence[int] = (2,)) -> tuple[tuple[int, ...], list[str]]:
    """The numbers of ranks to measure, and a warning about those that the launched world cannot hold.

    Without a request: all of the launched world or, in a plain process, the default. A launched world of one rank, such
    as a shell of a batch job, does not limit a request: local ranks are started for it.
    """
    place = read_place() if is_launched() else None
    if requested is None:
        return (tuple(default) if place is None else (place.world_size,)), []
    if place is None or place.world_size == 1:
        return tuple(requested), []
    fitting = tuple(n for n in requested if n <= place.world_size)
    if not fitting:
        raise ConfigError(
            f"--ranks {','.join(map(str, requested))} in a launched world of {place.world_size}: "
            "start more ranks, or leave out --ranks",
            code="launched",
        )
    left_out = ", ".join(str(n) for n in requested if n > place.world_size)
    return fitting, (
        [f"not measured: {left_out} ranks, because the launched world has {place.world_size}"] if left_out else []
    )


def joins_world(ranks: int) -> bool:
    """Whether a session of this many ranks runs in the launched world, rather than on ranks that it starts."""
    return is_launched() and not (read_place().world_size == 1 and ranks > 1)


def find_place() -> Place | None:
    """This process's place in the process group that it has opened, else in the launched world; None in neither."""
    distributed = sys.modules.get("torch.distributed")  # not imported: who has a group has imported it
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        return Place(rank, world_size, None, None, "torch.distributed", None, None)
    return read_place() if is_launched() else None


@contextlib.contextmanager
def open_session(
    verb: str,
    config: dict[str, Any],
    *,
    ranks: int = 1,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    progress: bool | None = None,
    cells: bool = False,
    can_resume: bool | None = None,
    same_machine: bool = False,
    here: bool = False,
) -> Iterator[Session]:
    """The one way to run a verb: ranks, the run's folder, progress on stderr, and a word on what an interrupt left.

    Without `out` nothing is written. With it, the run gets a folder `out/TIME-verb`, made before the work and removed
    again if it stays empty; `resume` is the folder of an interrupted run instead. With `cells`, every finished task is
    saved, and the run can be resumed; `same_machine` refuses to resume it on another machine. `can_resume` says that
    the verb has its own way to do so (training).
    `progress` True shows a bar on a terminal and lines elsewhere, None a bar alone, False nothing.
    `here` starts no ranks, for what cannot be sent to them (a user's own model): this process runs the tasks, as a rank
    of its process group if it has opened one, of the launched world if there is one, and else alone.
    Inside a launched world this is collective: every rank opens the session.
    """
    if can_resume is None:
        can_resume = cells
    with (
        _open(
            verb, config, ranks, out, resume, None, progress, cells, same_machine, can_resume=can_resume, here=here
        ) as session,
        _raise_on_sigterm(),
    ):
        try:
            yield session
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt) or (
                isinstance(error, SystemExit) and error.code in (130, 143)
            )
            what = session._save_unfinished()
            if is_interrupt:
                session._say(f"interrupted: {what or 'nothing was saved'}")
                error.was_reported = True  # type: ignore[attr-defined]
            elif what and not isinstance(error, SystemExit):
                session._say(f"stopped by an error: {what}")
            raise


@contextlib.contextmanager
def _open(
    verb: str,
    config: dict[str, Any],
    ranks: int,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    folder: Path | None = None,
    progress: bool | None = None,
    cells: bool = False,
    same_machine: bool = False,
    command_line: str = "",
    can_resume: bool = False,
    here: bool = False,
) -> Iterator[Session]:
    place = find_place() if here else read_place() if joins_world(ranks) else None
    if place is not None and place.world_size < ranks:
        raise ConfigError(
            f"{ranks} ranks in a launched world of {place.world_size}: start more ranks, or use fewer", code="launched"
        )
    environment = capture_environment()  # now, because our own ranks will raise the load
    is_leader = place is None or place.rank == 0
    with contextlib.ExitStack() as stack:
        study = None
        if resume is not None:
            folder = Path(resume)
        elif out is not None and not is_leader:
            RunFolder.check(out)  # here too: if rank 0 cannot write, the others must not wait for it
        elif out is not None:
            folder = stack.enter_context(RunFolder.create(out, verb)).path
        if resume is not None and cells:
            study = Study.load(Path(resume), verb)
            if same_machine and not (study.path / RUN_FILE).exists():
                _check_same_machine(study, environment)
            config = study.config
        elif cells and folder is not None:
            config = config | {"machine": environment.machine_and_torch}
            study = Study.begin(folder, verb, config, command_line or environment.command_line)
        if study is not None and study.command_line:
            environment = dataclasses.replace(environment, command_line=study.command_line)
        if folder is not None and is_leader:
            stack.callback(os.close, lock_folder(folder))
        session = Session(
            verb, config, ranks, environment, place, folder, study, progress,
            here=here, is_finished=folder is not None and (folder / RUN_FILE).exists(), can_resume=can_resume,
        )  # fmt: skip
        stack.callback(session.close)
        yield session


def _check_same_machine(study: Study, environment: Environment) -> None:
    begun, here = study.config.get("machine"), environment.machine_and_torch
    if begun != here:
        raise ConfigError(
            f"--resume {study.path}: it was started on {begun}, and this is {here}: times cannot be mixed",
            code="other-machine",
        )


def lock_folder(folder: Path, timeout_s: float = 0.0) -> int:
    """Refuse a folder in which another process runs; the lock lasts until the handle is closed or this process ends."""
    handle, until_s = os.open(folder, os.O_RDONLY), time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until_s:
                time.sleep(0.05)
                continue
            os.close(handle)
            text = f"{folder} is used by another process: wait until it ends, or stop it"
            raise ConfigError(text, code="locked") from None
        except OSError:  # a file system without locks
            pass
        return handle


def find_function(load: Load) -> Callable[..., Any]:
    """The function of the ranks itself, imported into this process."""
    if not isinstance(load, str):
        return load()
    module, _, name = load.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _load(load: Load) -> str | Callable[..., Any]:
    """What a pool is given: a name as it is, and else the function, imported where no signal can interrupt that."""
    if isinstance(load, str):
        return load
    with defer_signals():
        return load()


def _wait_for(done: queue.SimpleQueue[Any]) -> Any:
    """Wait so that Ctrl-C is noticed: a wait without a limit cannot be interrupted on every platform."""
    while True:
        with contextlib.suppress(queue.Empty):
            return done.get(timeout=1.0)


@contextlib.contextmanager
def _handle(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in numbers}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind this process as Ctrl-C does, instead of ending it on the spot."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with _handle(unwind, signal.SIGTERM):
            yield
    else:
        yield


# -- progress ----------------------------------------------------------------------------------------------------------


class ProgressDisplay:
    """How far a run is, on stderr: a bar with the time left on a terminal, lines elsewhere.

    Without tasks, the cells are those that the messages of the ranks count. `progress` as for `open_session`.
    """

    def __init__(
        self,
        verb: str,
        progress: bool | None,
        tasks: Sequence[Task] = (),
        finished: Sequence[str] = (),
        describe: Callable[[Sequence[Record]], str] | None = None,
    ) -> None:
        self._verb, self._describe, self._lock = verb, describe, threading.Lock()
        self._has_bar = progress is not False and sys.stderr.isatty()
        self._has_lines = bool(progress) and not self._has_bar
        self._weights = {task.name: task.weight for task in tasks}
        self._total = sum(self._weights.values())
        self._before = self._done = sum(self._weights[name] for name in finished)
        self._count, self._num_tasks = len(finished), len(tasks)
        self._parts: dict[str, float] = {}  # of the tasks that are running
        self._begin_s = self._line_s = time.monotonic()
        self._bar: rich.progress.Progress | None = None
        self._bar_task: Any = None

    def __enter__(self) -> ProgressDisplay:
        if self._has_bar:
            import rich.console
            import rich.progress

            console = rich.console.Console(stderr=True, highlight=False)
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}", markup=False),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TaskProgressColumn(),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TextColumn("{task.fields[left]}"),
                console=console,
                transient=True,
                redirect_stdout=False,  # stdout is for the result alone
            )
            self._bar.start()
            self._bar_task = self._bar.add_task("starting ranks", total=self._total or None, left="")
        elif self._has_lines and self._count:
            self._print(f"saved already: {self._count} of {self._num_tasks} cells")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def hear(self, name: str, message: Progress) -> None:
        """What a rank posted in the task of this name."""
        with self._lock:
            if name in self._weights:
                self._parts[name] = min(1.0, message.done / message.total) * self._weights[name]
            else:
                self._total, self._done = message.total, message.done
            label = " ".join(part for part in (name, message.label) if part)
            self._update(label)
            if message.line:
                self._print(message.line)
            elif self._has_lines and not name and message.records:
                self._print(f"{message.done:.0f} of {message.total:.0f} cells ({message.label}){self._say_left()}")
            elif self._has_lines and time.monotonic() - self._line_s > _LINE_S:
                self._print(f"{self._find_share():.0%} ({label}){self._say_left()}")

    def finish(self, name: str, records: Sequence[Record]) -> None:
        """The task of this name is finished, and saved where it can be."""
        with self._lock:
            self._parts.pop(name, None)
            self._done += self._weights[name]
            self._count += 1
            self._update(name)
            if self._has_lines:
                words = self._describe(records) if self._describe is not None else ""
                what = f"{name}: {words}" if words else name
                self._print(f"{self._count} of {self._num_tasks} cells ({what}){self._say_left()}")

    def _find_share(self) -> float:
        return (self._done + sum(self._parts.values())) / self._total if self._total else 0.0

    def _say_left(self) -> str:
        done = self._done + sum(self._parts.values())
        fresh, elapsed_s = done - self._before, time.monotonic() - self._begin_s
        if fresh <= 0 or done >= self._total or elapsed_s < 2.0:
            return ""
        left_s = elapsed_s * (self._total - done) / fresh
        return f", about {format_duration(left_s) if left_s < 60 else f'{left_s / 60:.0f} min'} left"

    def _update(self, label: str) -> None:
        if self._bar is not None:
            done = self._done + sum(self._parts.values())
            left = self._say_left().removeprefix(", ")
            self._bar.update(self._bar_task, completed=done, total=self._total, description=label, left=left)

    def _print(self, text: str) -> None:
        self._line_s = time.monotonic()
        text = f"paceline: {self._verb}: {text}"
        if self._bar is not None:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        elif self._has_lines:
            print(text, file=sys.stderr, flush=True)
