"""The session of one run of a verb: starts ranks or joins the launched world, shows progress, saves, and handles
interrupts."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, LaunchError
from paceline.machine import StolenTime
from paceline.records.environment import Environment, capture_environment
from paceline.records.findings import find_doubts
from paceline.records.kinds import Record
from paceline.records.store import (
    RUN_FILE,
    STUDY_FILE,
    Run,
    Study,
    check_folder,
    create_folder,
    find_file,
    load_run,
    save_run,
    write_new,
)
from paceline.runtime.faults.recovery import Recovery
from paceline.runtime.ranks.launch import (
    RankPool,
    check_rank_count,
    forget_terminal,
    handle_requests,
    unwind_on_signals,
)
from paceline.runtime.ranks.place import Place, is_launched, read_place
from paceline.runtime.ranks.worker import find_function, listen
from paceline.units import format_duration, format_number_of

if TYPE_CHECKING:
    import rich.progress

    from paceline.report.result import Result

# Seconds between progress lines if stderr is not a terminal.
_LINE_S = 10.0
_LONG_S = 60.0  # longer measurements are announced

# The function that ranks call, or "package.module:name", which only the ranks import.
Function = str | Callable[..., Any]
Describe = Callable[[Sequence[Record]], str]


@dataclass(frozen=True)
class Progress:
    """Progress posted by a rank: `done` of `total` cells or steps, where one in progress counts as a fraction.

    `records` belong to a cell that has just finished; an interrupted run saves them, and adds `config` to its
    configuration. `line` is printed on its own line, with or without a bar. `files` are written to the run's folder
    immediately.
    """

    done: float
    total: float
    label: str = ""
    records: tuple[Record, ...] = ()
    line: str = ""
    files: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """One cell of a run: a function that ranks call and that returns records; `weight` is its share of the work, and
    `expected_s` its approximate duration, None if unknown in advance.

    `follow` builds its arguments from the records of earlier tasks. `on_death` returns the task's records if its ranks
    were killed; if it is None or returns None, the error ends the run. A function that `saves` receives the first
    Ctrl-C, SIGTERM or SIGUSR1 as SIGTERM and returns (recorded in `Session.signal`); a second signal ends the ranks
    immediately. With `hang_timeout_s`, they also stop if one of them is suspended or hangs for that long, unless
    `recovery` continues the run.
    """

    name: str
    function: Function
    arguments: tuple[Any, ...] = ()
    ranks: int = 1
    weight: float = 1.0
    expected_s: float | None = None
    follow: Callable[[Sequence[Record]], tuple[Any, ...]] | None = None
    on_death: Callable[[LaunchError], list[Record] | None] | None = None
    saves: bool = False
    hang_timeout_s: float | None = None
    recovery: Recovery | None = None


@dataclass
class Session:
    """A run in progress. In a launched world every rank has one, and only rank 0 (`is_leader`) writes and prints.

    `place` is None if ranks are started here, or if only this process is measured (`here`). `folder` is None if nothing
    is written; ranks other than 0 have one only to read from, when a run is resumed. `is_finished` means that a resumed
    run has all of its records. The verb adds `warnings`. `is_timed` is False if no result is a time, so that the
    machine's load does not matter. A verb that saves on its own sets `saved`, which describes what is on disk ("step
    40") for the message on an interrupt.
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
    is_timed: bool = True
    saved: Callable[[], str] | None = None
    signal: int = 0  # signal on which ranks were asked to save and stop
    _posted: list[tuple[Record, ...]] = field(default_factory=list)  # per cell
    _cells: tuple[str, ...] = ()
    _num_cells: float = 0
    _parts: list[Session] = field(default_factory=list)
    _pools: dict[int, RankPool] = field(default_factory=dict)  # by the thread that uses them
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False
    _stolen: StolenTime = field(default_factory=StolenTime)

    @property
    def is_leader(self) -> bool:
        return self.place is None or self.place.rank == 0

    def say_long(self, limit_s: float, advice: str = "--quick takes less") -> None:
        """Announce a measurement that may take more than a minute, before it starts."""
        if self.progress and limit_s > _LONG_S:
            self._say(f"{self.verb}: this may take {format_duration(limit_s)}; Ctrl-C saves what is finished; {advice}")

    def ask(self, function: Function, args: tuple[Any, ...] = (), ranks: int | None = None, **options: Any) -> Any:
        """Call the function on the ranks and return the value of rank 0 (in a launched world, of this rank).

        Records that it posts are saved if the run is interrupted. `options` are further fields of `Task`.
        """
        with ProgressDisplay(self.verb, self.progress) as display:
            return self._call(Task("", function, args, ranks or self.ranks, **options), display)

    def run(self, tasks: Sequence[Task], describe: Describe | None = None, at_once: int = 1) -> list[Record]:
        """The records of all tasks, in order: loaded if they were saved before, otherwise run and saved now.

        `at_once` tasks run concurrently, each on its own ranks. `describe` summarizes a finished task in a few words.
        """
        if self.place is not None and at_once > 1:
            text = f"--at-once {at_once} in a launched world: its ranks run one task after another; omit the option"
            raise ConfigError(text, code="launched")
        self._cells, self._num_cells = tuple(task.name for task in tasks), len(tasks)
        found = {} if self.study is None else {name: self.study.find(name) for name in self._cells}
        kept = {name: records for name, records in found.items() if records is not None}
        missing = [task for task in tasks if task.name not in kept]
        if missing:
            if self.place is None and not self.here:
                check_rank_count(max(task.ranks for task in missing) * at_once)
            self._say_cells_ahead(missing, at_once)
            with ProgressDisplay(self.verb, self.progress, tasks, tuple(kept), describe) as display:
                self._run_missing(missing, kept, min(at_once, len(missing)), display)
        return [record for task in tasks for record in kept[task.name]]

    def _say_cells_ahead(self, tasks: Sequence[Task], at_once: int) -> None:
        many = format_number_of(len(tasks), "cell")
        times_s = [task.expected_s for task in tasks if task.expected_s is not None]
        if len(times_s) == len(tasks):
            self.say_long(sum(times_s) / at_once, many)
        elif self.progress and len(tasks) > 1:
            text = f"{many}, which may take minutes; the first will show the time left; Ctrl-C saves what is finished"
            self._say(f"{self.verb}: {text}")

    def _run_missing(
        self, tasks: Sequence[Task], kept: dict[str, list[Record]], at_once: int, display: ProgressDisplay
    ) -> None:
        def finish(task: Task, records: list[Record]) -> None:
            kept[task.name] = records
            if self.study is not None and self.is_leader:
                self.study.keep(task.name, records, self.environment.machine_and_torch)
            display.finish(task.name, records)

        def resolve(task: Task) -> Task:
            if task.follow is None:
                return task
            before = self._cells[: self._cells.index(task.name)]
            return dataclasses.replace(task, arguments=task.follow([one for name in before for one in kept[name]]))

        if at_once == 1:
            for task in tasks:
                finish(task, self._call(resolve(task), display))
            return
        with concurrent.futures.ThreadPoolExecutor(at_once) as workers:
            started = dict[concurrent.futures.Future[list[Record]], Task]()

            def finish_started() -> None:
                for future in concurrent.futures.as_completed(started):
                    finish(started[future], future.result())
                started.clear()

            try:
                for task in tasks:
                    if task.follow is not None:
                        finish_started()
                    started[workers.submit(self._call, resolve(task), display)] = task
                finish_started()
            except BaseException:
                workers.shutdown(wait=False, cancel_futures=True)
                self.close(at_once=True)
                raise

    def _call(self, task: Task, display: ProgressDisplay) -> Any:
        """The value of the task's function: called here, or on rank 0 of this thread's warm ranks."""

        def hear(rank: int, message: Progress) -> None:
            if not task.name:  # without tasks, the cells are those that ranks post
                self._posted += [message.records] if message.records else []
                self._num_cells = message.total
            self.config |= message.config
            if self.folder is not None and self.is_leader:
                for name, text in message.files.items():
                    write_new(self.folder / name, text)
            display.hear(task.name, message)

        if self.place is not None or self.here:
            with listen(lambda message: hear(0, message)):
                return find_function(task.function)(*task.arguments)
        pool = self._get_pool(task.ranks, () if task.recovery is None else task.recovery.modules)
        with self._forward_signals(pool) if task.saves else contextlib.nullcontext():
            try:
                options: dict[str, Any] = {"hang_timeout_s": task.hang_timeout_s, "recovery": task.recovery}
                return pool.run(task.function, task.arguments, num_ranks=task.ranks, on_message=hear, **options)[0]
            except LaunchError as error:
                if self.signal:  # the signal arrived before the ranks listened for it
                    raise SystemExit(128 + self.signal) from None
                records = task.on_death(error) if task.on_death is not None else None
                if records is None:
                    raise
                return records
            finally:
                if self._is_closed:  # by another thread, just before ranks were started here
                    pool.close()

    def _get_pool(self, ranks: int, modules: Sequence[str] = ()) -> RankPool:
        with self._lock:
            if self._is_closed:
                raise LaunchError("the run is being closed", code="interrupted")
            pool = self._pools.get(threading.get_ident())
            if pool is None or pool.num_ranks < ranks:
                if pool is not None:
                    pool.close()
                pool = self._pools[threading.get_ident()] = RankPool(ranks, modules)
                pool.start()
            return pool

    @contextlib.contextmanager
    def _forward_signals(self, pool: RankPool) -> Iterator[None]:
        """The first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 asks the ranks to save and stop; the second terminates them."""

        def forward(number: int) -> None:
            self.signal = number
            forget_terminal(number)
            self._say("stopping after this step with a checkpoint; interrupt again after a second to stop immediately")
            pool.signal(signal.SIGTERM)  # our own ranks ignore SIGINT

        def end(number: int) -> None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            numbers.append(signal.SIGHUP)
        with handle_requests(forward, end, *numbers):
            yield

    def share_load(self, whole: Session) -> None:
        """Use the load measured before the whole run, since a later measurement includes the load of earlier parts."""
        self.environment = dataclasses.replace(self.environment, load_average=whole.environment.load_average)

    def close(self, at_once: bool = False) -> None:
        """End all ranks, including busy ones if `at_once`; threads can no longer start new ones."""
        with self._lock:
            self._is_closed = True
            for pool in self._pools.values():
                pool.close(at_once)
            self._pools.clear()

    def observe(self) -> Environment:
        """The environment, with the fraction of CPU time that other virtual machines have stolen so far."""
        if not self.is_timed:
            return dataclasses.replace(self.environment, load_average=None)
        if self.place is not None:  # the ranks would measure different fractions
            return self.environment
        stolen = max(self.environment.stolen or 0.0, self._stolen.read_share())
        return dataclasses.replace(self.environment, stolen=stolen)

    def save(self, records: Sequence[Record], details: dict[str, Any] | None = None, complete: bool = True) -> Run:
        """Return the finished run with warnings about its results. If there is a folder, rank 0 saves the run as
        `run.json`.

        `details` are facts about the environment that only a rank can query. If a resumed run was already finished,
        returns the saved one.
        """
        if self.is_finished and self.folder is not None:
            return load_run(self.folder)
        environment = self.observe()
        if details is not None:
            environment = dataclasses.replace(environment, details=details)
        doubts = [doubt.text for doubt in find_doubts(records, environment)] if self.is_timed else []
        found = (*self.warnings, *self._find_machine_warnings(), *doubts)
        run = Run(self.verb, self.config, environment, tuple(records), found, complete)
        if self.folder is not None and self.is_leader:
            save_run(run, self.folder / RUN_FILE)
            self.is_finished = complete
        return run

    def write(self, result: Result) -> None:
        """Write the saved run's tables and figures into its folder, if this session writes."""
        if self.folder is not None and self.is_leader:
            result.save(self.folder)

    def _find_machine_warnings(self) -> list[str]:
        """Warn about other machines on which parts of the run were measured, since its environment describes only the
        last one."""
        if self.study is None:
            return []
        here = self.environment.machine_and_torch
        counts = Counter(self.study.find_machine(cell) for cell in self._cells)
        if counts.keys() <= {here}:
            return []
        if len(counts) == 1:
            (name,) = counts
            return [f"measured on {name}, but the environment saved with this run is {here}"]
        made = "; ".join(f"{format_number_of(count, 'cell')} on {name}" for name, count in counts.items())
        return [f"measured on more than one machine: {made}; means may mix them, and the run describes only the last"]

    @contextlib.contextmanager
    def open_part(self, name: str, verb: str, config: dict[str, Any], same_machine: bool = False) -> Iterator[Session]:
        """A run that is part of this one, in the subfolder `name`; resumed if it was already started."""
        assert self.folder is not None
        place, environment = self.folder / name, self.environment
        place.mkdir(exist_ok=True)
        if not (place / STUDY_FILE).exists():
            Study.begin(place, verb, config | {"machine": environment.machine_and_torch}, environment.command_line)
        try:
            options: dict[str, Any] = {"ranks": self.ranks, "progress": self.progress, "same_machine": same_machine}
            with open_session(verb, config, resume=place, cells=True, is_part=True, **options) as part:
                self._parts.append(part)
                # A resumed run's parts belong to the command that started it.
                self.environment = dataclasses.replace(environment, command_line=part.environment.command_line)
                yield part
        finally:
            with contextlib.suppress(OSError):  # removed only if empty
                place.rmdir()

    def _say_cells(self) -> str:
        count = len(self._posted) if self.study is None else self.study.count()
        total = f" of {self._num_cells:.0f}" if self._num_cells else ""  # unknown early in a resumed run
        return f"{count}{total} cells" if count else ""

    def _save_unfinished(self) -> str:
        """Save the posted records of an unfinished run, or discard an empty study; returns what is saved."""
        if self.folder is None or not self.is_leader:
            return ""
        if self.is_finished:
            return f"all records saved in {self.folder}"
        kept = self._say_cells()
        if self.saved is not None:
            kept = self.saved()
        elif self._parts:
            about = [(part, "finished" if part.is_finished else part._say_cells()) for part in self._parts]
            kept = ", ".join(f"{part.folder.name} ({cells})" for part, cells in about if part.folder and cells)
        elif self.study is None and kept:
            self.save([record for records in self._posted for record in records], complete=False)
        elif self.study is not None and not kept:
            self.study.discard()
        where = f"; resume with: paceline {self.verb} --resume {self.folder}" if self.can_resume else ""
        return f"{kept} saved{where or f' in {self.folder}'}" if kept else ""

    def _say(self, text: str) -> None:
        if self.is_leader:
            print(f"paceline: {text}", file=sys.stderr, flush=True)


def joins_world(ranks: int) -> bool:
    """Whether a session of this many ranks runs in the launched world rather than on ranks that it starts."""
    return is_launched() and not (read_place().world_size == 1 and ranks > 1)


def find_place() -> Place | None:
    """This process's place in its open process group, else in the launched world; None if there is neither."""
    distributed = sys.modules.get("torch.distributed")  # not imported here: a process with a group has imported it
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Place(distributed.get_rank(), distributed.get_world_size(), None, None, "torch.distributed")
    return read_place() if is_launched() else None


@contextlib.contextmanager
def open_session(
    verb: str, config: dict[str, Any], *, ranks: int = 1, out: str | Path | None = None, name: str = "",
    resume: str | Path | None = None, progress: bool | None = None, cells: bool = False, can_resume: bool = False,
    same_machine: bool = False, here: bool = False, is_part: bool = False,
) -> Iterator[Session]:  # fmt: skip
    """Open the session in which a verb runs: ranks, the run's folder, progress on stderr, and a message on interrupt.

    Without `out` nothing is written. With it, the run gets a folder `out/TIME-verb` or `out/name`, created before the
    work and removed if it stays empty; `resume` is the folder of an interrupted run instead. With `cells`, every
    finished task is saved and the run can be resumed, by default on any machine; `can_resume` means that the verb
    itself can resume it. `progress` True shows a bar on a terminal and lines elsewhere, None only a bar, False nothing.
    `here` starts no ranks, for objects that cannot be sent to them (a user's own model): this process runs the tasks,
    as a rank of its open process group, of the launched world, or alone. A part of another run (`Session.open_part`)
    prints no message itself; that run does.

    Inside a launched world this is collective: every rank opens the session.
    """
    place = find_place() if here else read_place() if joins_world(ranks) else None
    if place is not None and place.world_size < ranks:
        text = f"{ranks} ranks in a launched world of {place.world_size}: start more ranks, or use fewer"
        raise ConfigError(text, code="launched")
    environment = capture_environment()  # now, because our own ranks will raise the load
    if place is not None and place.world_size > 1:  # every rank returns the same result, including its warnings
        from paceline.runtime.ranks.world import share_first

        environment = share_first(place, environment)
    is_leader = place is None or place.rank == 0
    folder, study = None if resume is None else Path(resume), None
    with contextlib.ExitStack() as stack:
        if folder is None and out is not None:
            if is_leader:
                folder = stack.enter_context(create_folder(out, verb, name))
            else:
                check_folder(out)  # if rank 0 cannot write, the other ranks must also fail instead of waiting for it
        if folder is not None and cells:
            machine = environment.machine_and_torch
            if resume is not None:
                study = Study.load(folder, verb)
                begun = study.config["machine"]
                if same_machine and begun != machine and find_file(folder / RUN_FILE) is None:
                    text = f"it was started on {begun}, but this is {machine}: times cannot be mixed"
                    raise ConfigError(f"--resume {folder}: {text}", code="other-machine")
            else:
                study = Study.begin(folder, verb, config | {"machine": machine}, environment.command_line)
            config = study.config
            environment = dataclasses.replace(environment, command_line=study.command_line)
        if folder is not None and is_leader:
            stack.callback(os.close, lock_folder(folder))
        session = Session(verb, config, ranks, environment, place, folder, study, here=here)
        session.progress = progress if is_leader else False
        session.is_finished = folder is not None and find_file(folder / RUN_FILE) is not None
        session.can_resume = cells or can_resume
        stack.callback(session.close)
        stack.enter_context(unwind_on_signals())
        try:
            yield session
        except BaseException as error:
            what = session._save_unfinished()
            if not is_part:
                if isinstance(error, KeyboardInterrupt) or getattr(error, "code", None) in (0, 129, 130, 138, 143):
                    if what or not getattr(error, "was_reported", False):  # a nested run may have reported it
                        session._say(f"interrupted: {what or 'nothing was saved'}")
                    error.was_reported = True  # type: ignore[attr-defined]
                elif what and not isinstance(error, SystemExit):
                    session._say(f"stopped by an error: {what}")
            raise


def lock_folder(folder: Path, timeout_s: float = 0.1) -> int:
    """Lock a folder until the returned handle is closed; ConfigError if another process uses it."""
    handle, until_s = os.open(folder, os.O_RDONLY), time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() >= until_s:
                os.close(handle)
                text = f"{folder} is used by another process: wait for it to end, or stop it"
                raise ConfigError(text, code="locked") from None
            time.sleep(0.05)
        except OSError:  # the file system does not support locks
            return handle


class ProgressDisplay:
    """Progress of a run on stderr: a bar with the remaining time on a terminal, lines elsewhere; see `open_session`.

    Without tasks, the number of cells comes from the ranks' messages.
    """

    def __init__(
        self, verb: str, progress: bool | None, tasks: Sequence[Task] = (), finished: Sequence[str] = (),
        describe: Describe | None = None,
    ) -> None:  # fmt: skip
        self._verb = verb
        self._describe = describe
        self._lock = threading.Lock()
        self._has_bar = progress is not False and sys.stderr.isatty()
        self._has_lines = bool(progress) and not self._has_bar
        self._weights = {task.name: task.weight for task in tasks}
        self._parts = {name: self._weights[name] for name in finished}  # completed weight of each task
        self._count, self._done_before = len(finished), sum(self._parts.values())
        self._begin_s = self._line_s = time.monotonic()
        self._bar: rich.progress.Progress | None = None

    def __enter__(self) -> ProgressDisplay:
        if self._has_bar:
            import rich.console
            from rich import progress

            columns = [progress.TextColumn("{task.description}", markup=False), progress.BarColumn(bar_width=20)]
            columns += [progress.TaskProgressColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()]
            columns.append(progress.TextColumn("left"))
            # stdout is only for the result.
            options: dict[str, Any] = {"transient": True, "redirect_stdout": False, "speed_estimate_period": 3600.0}
            console = rich.console.Console(stderr=True, highlight=False)
            self._bar = progress.Progress(*columns, console=console, **options)
            self._bar.start()
            self._bar.add_task("", total=None)
            self._update("starting ranks")
        elif self._count:
            self._print(f"{self._count} of {len(self._weights)} cells already saved")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def hear(self, name: str, message: Progress) -> None:
        """Handle a rank's message from the task of this name; "" is a run without tasks."""
        with self._lock:
            weight = self._weights.setdefault(name, message.total)
            self._parts[name] = min(1.0, message.done / (message.total or 1)) * weight
            label = message.label if name in message.label else f"{name} {message.label}".strip()
            share = self._update(label)
            if message.line:
                self._print(message.line)
            elif self._bar is None and not name and message.records:
                self._print(f"{message.done:.0f} of {message.total:.0f} cells ({message.label}){self._say_left()}")
            elif self._bar is None and time.monotonic() - self._line_s > _LINE_S:
                self._print(f"{share:.0%} ({label}){self._say_left()}")

    def finish(self, name: str, records: Sequence[Record]) -> None:
        """Record that the task of this name is finished and, if possible, saved."""
        with self._lock:
            self._parts[name] = self._weights[name]
            self._count += 1
            self._update(name)
            words = f"{name}: {self._describe(records)}" if self._describe is not None else name
            if self._bar is None:
                self._print(f"{self._count} of {len(self._weights)} cells ({words}){self._say_left()}")

    def _say_left(self) -> str:
        done, total = sum(self._parts.values()), sum(self._weights.values())
        fresh, elapsed_s = done - self._done_before, time.monotonic() - self._begin_s
        if fresh <= 0 or done >= total or elapsed_s < 2.0:
            return ""
        left_s = elapsed_s * (total - done) / fresh
        if left_s < 1:
            return ""
        return f", about {format_duration(left_s) if left_s < 60 else f'{left_s / 60:.0f} min'} left"

    def _update(self, label: str) -> float:
        """Redraw the bar; returns the completed fraction."""
        done, total = sum(self._parts.values()), sum(self._weights.values())
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total or None, description=label)
        return done / total if total else 0.0

    def _print(self, text: str) -> None:
        self._line_s = time.monotonic()
        text = f"paceline: {self._verb}: {text}"
        if self._bar is not None:
            self._bar.console.print(text, markup=False, soft_wrap=True)
        elif self._has_lines:
            print(text, file=sys.stderr, flush=True)
