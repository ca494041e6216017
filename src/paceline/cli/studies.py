"""How a long study is run: cell by cell, each kept when it is done, with the time left on the screen, and resumable.

Which cells a study has, and what is made of them, is in the verbs of `scale`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import machine
from paceline.cli import session
from paceline.cli.study_screen import Screen
from paceline.errors import ConfigError, LaunchError
from paceline.records.environment import Environment, capture_environment
from paceline.records.kinds import Record
from paceline.records.store import RUN_FILE, STUDY_FILE, Run, RunFolder, Study, load_run
from paceline.runtime.environment import is_launched, read_place
from paceline.runtime.launch import RankPool, check_rank_count, defer_signals
from paceline.runtime.worker import listen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paceline.report.tables import Column

__all__ = ["StudyRun", "Task", "check_same_machine", "hold", "open_study", "tell_how_to_go_on"]


@dataclass(frozen=True)
class Task:
    """One cell: a function of the ranks that returns records, loaded late, and how much work it is beside others.

    `follow` makes its arguments from the records of the cells before it, where cells are made one after the other.
    `on_death` makes records where the ranks were killed; None lets that end the study.
    """

    name: str
    load: Callable[[], Callable[..., list[Record]]]
    arguments: tuple[Any, ...] = ()
    ranks: int = 1
    weight: float = 1.0
    follow: Callable[[Sequence[Record]], tuple[Any, ...]] | None = None
    on_death: Callable[[LaunchError], list[Record] | None] | None = None


@dataclass
class StudyRun:
    """A study under way. `study` is None on the ranks of a launched world that do not write; a quiet one leaves stdout
    to JSON."""

    verb: str
    study: Study | None
    environment: Environment
    is_quiet: bool
    was_over: bool = False
    at_once: int = 1
    _pools: dict[int, RankPool] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False
    _cells: tuple[str, ...] = ()

    # -- cells --------------------------------------------------------------------------------------------------------

    def make(self, tasks: Sequence[Task], describe: Callable[[Sequence[Record]], str] | None = None) -> list[Record]:
        """The records of all tasks in their order: those that are kept already, and the others made and kept now."""
        if is_launched() and self.at_once > 1:
            raise ConfigError(
                f"--at-once {self.at_once} in a launched world of {read_place().world_size}: its ranks make one run "
                "after the other; leave it out, or start it without torchrun"
            )
        self._cells = tuple(task.name for task in tasks)
        kept = {task.name: found for task in tasks if (found := self._find(task)) is not None}
        missing = [task for task in tasks if task.name not in kept]
        if missing:
            with Screen(self.verb, tasks, kept, self._speaks) as screen:
                screen.describe = describe
                if is_launched():
                    self._run_in_turn(missing, kept, lambda task: self._run_here(task, screen), screen)
                else:
                    self._run_all(missing, kept, screen)
        return [record for task in tasks for record in kept[task.name]]

    def _run_in_turn(
        self,
        tasks: Sequence[Task],
        kept: dict[str, list[Record]],
        run: Callable[[Task], list[Record]],
        screen: Screen,
    ) -> None:
        for task in tasks:
            if task.follow is not None:
                before = [record for records in kept.values() for record in records]
                task = dataclasses.replace(task, arguments=task.follow(before))
            kept[task.name] = self._finish(task, run(task), screen)

    def ask(self, load: Callable[[], Callable[..., Any]], arguments: tuple[Any, ...], ranks: int) -> Any:
        """Something that ranks must be asked before the cells are known; nothing is kept."""
        if is_launched():
            return load()(*arguments)
        pool = self._get_pool(0, ranks)
        with defer_signals():
            function = load()
        return pool.run(function, arguments, num_ranks=ranks)[0]

    @property
    def writes(self) -> bool:
        """Whether this rank closes the study; in a launched world rank 0 alone does."""
        return self.study is not None and not isinstance(self.study, _Reader)

    @property
    def _speaks(self) -> bool:
        return not is_launched() or read_place().rank == 0

    def _find(self, task: Task) -> list[Record] | None:
        return None if self.study is None else self.study.find(task.name)

    def _finish(self, task: Task, records: list[Record], screen: Screen) -> list[Record]:
        if self.study is not None:
            self.study.keep(task.name, records, _name_machine(self.environment))
        screen.finish(task, records)
        return records

    def _run_here(self, task: Task, screen: Screen) -> list[Record]:
        with listen(lambda message: screen.hear(task, message)):
            return task.load()(*task.arguments)

    def _run_all(self, tasks: Sequence[Task], kept: dict[str, list[Record]], screen: Screen) -> None:
        """On ranks of our own, `at_once` tasks at a time, each in warm ranks of its own."""
        check_rank_count(max(task.ranks for task in tasks) * self.at_once)
        if self.at_once == 1 or len(tasks) == 1:
            self._run_in_turn(tasks, kept, lambda task: self._run_on(0, task, screen), screen)
            return
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
                    done.put((task, self._run_on(number, task, screen)))
                except BaseException as error:
                    done.put((task, error))
                    break
            done.put(None)

        tasks[0].load()  # once, here: threads that import torch at a time would wait for each other
        workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(self.at_once)]
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
                kept[task.name] = self._finish(task, outcome, screen)
        except BaseException:
            is_over.set()
            self.close()
            raise
        finally:
            for worker in workers:
                worker.join()

    def _get_pool(self, number: int, ranks: int) -> RankPool:
        """Warm ranks of a worker's own; none any more once the study is being closed."""
        with self._lock:
            if self._is_closed:
                raise LaunchError("the study is being closed")
            pool = self._pools.get(number)
            if pool is None or pool.num_ranks < ranks:
                if pool is not None:
                    pool.close()
                pool = self._pools[number] = RankPool(ranks)
                pool.start()
            return pool

    def _run_on(self, number: int, task: Task, screen: Screen) -> list[Record]:
        pool = self._get_pool(number, task.ranks)
        with defer_signals():
            function = task.load()
        try:
            answers = pool.run(
                function, task.arguments, num_ranks=task.ranks, on_message=lambda rank, told: screen.hear(task, told)
            )
        except LaunchError as error:
            records = task.on_death(error) if task.on_death is not None else None
            if records is None:
                raise
            return records
        found: list[Record] = answers[0]
        return found

    def close(self) -> None:
        """End all ranks; a worker that is about to start some finds out that it may not."""
        with self._lock:
            self._is_closed = True
            for pool in self._pools.values():
                pool.close()
            self._pools.clear()

    # -- what is left behind ------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        assert self.study is not None
        return self.study.path

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    def save(self, records: Sequence[Record]) -> Run:
        """Close the study: all records in one run, which is what is shown from then on."""
        assert self.study is not None
        if self.was_over:
            return load_run(self.path)
        run = Run(self.verb, self.study.config, self.environment, tuple(records), self._find_warnings(self.study))
        self.folder.save(run)
        return run

    def _find_warnings(self, study: Study) -> tuple[str, ...]:
        """What the run's environment, which is that of the last machine, does not tell of the others."""
        begun, here = study.config.get("machine", "unknown"), _name_machine(self.environment)
        counts = Counter(study.find_machine(cell) or begun for cell in self._cells)
        if set(counts) <= {here}:
            return ()
        counts[here] += 0
        made = "; ".join(f"{count} cell{'s' if count != 1 else ''} on {name}" for name, count in counts.items())
        return (f"made on more than one machine: {made}. A mean may hold runs of several; the run names the last.",)

    def write(self, name: str, content: str | bytes) -> Path:
        """A file that is drawn from the records; one of a study that was shown before is drawn anew."""
        for old in (self.path / name, *self.path.glob(f".{name}.*")):
            old.unlink(missing_ok=True)
        return self.folder.write(name, content)

    def write_table(self, name: str, columns: Sequence[Column], items: Sequence[Any], rows: Sequence[Any]) -> None:
        from paceline.report import tables

        self.write(f"{name}.md", tables.render_markdown(columns, items))
        self.write(f"{name}.csv", tables.render_csv(rows))

    def write_figure(self, name: str, figure: Figure) -> Path:
        from paceline.report import plots

        self.write(f"{name}.svg", plots.render_svg(figure))
        return self.write(f"{name}.png", plots.render_png(figure))

    def print_table(self, columns: Sequence[Column], items: Sequence[Any], title: str) -> None:
        from paceline.report import tables

        if self.is_quiet or not items:
            return
        console = session.stdout()
        filled = [column for column in columns if any(column.cell(item) for item in items)]
        console.print(tables.render_terminal(filled, items, title, console.width))

    def print_lines(self, lines: Sequence[str]) -> None:
        if not self.is_quiet:
            for line in lines:
                session.stdout().print(line, markup=False)


def _wait_for(done: queue.SimpleQueue[Any]) -> Any:
    """Wait so that Ctrl-C is heard: a wait without end is deaf to it where the lock cannot be interrupted."""
    while True:
        with contextlib.suppress(queue.Empty):
            return done.get(timeout=1.0)


@contextlib.contextmanager
def open_study(
    verb: str,
    config: dict[str, Any],
    out: Path,
    resume: Path | None,
    quiet: bool,
    at: Path | None = None,
    command_line: str = "",
) -> Iterator[StudyRun]:
    """A new study, or one that goes on; says how to go on where it is broken off with finished cells.

    `at` is a folder of its own for a study that is part of another one: begun or gone on with, as it is found, and it
    is the other one that says how to go on. `command_line` is what began that one; empty: this process's.
    """
    environment, is_part = _capture(), at is not None
    if is_launched() and read_place().rank > 0:
        if resume is None:
            RunFolder.check(out)
        reader = None if resume is None else _Reader.load(resume, verb)
        was_over = reader is not None and (reader.path / RUN_FILE).exists()
        yield StudyRun(verb, reader, environment, True, was_over)
        return
    with contextlib.ExitStack() as stack:
        if at is not None and (at / STUDY_FILE).exists():
            resume = at
        if resume is not None:
            study = Study.load(resume, verb)
        else:
            if at is None:
                at = stack.enter_context(RunFolder.create(out, verb)).path
            at.mkdir(exist_ok=True)
            asked = config | {"machine": _name_machine(environment)}
            study = Study.begin(at, verb, asked, command_line or environment.command_line)
        if study.command_line:
            environment = dataclasses.replace(environment, command_line=study.command_line)
        run = StudyRun(verb, study, environment, quiet, was_over=(study.path / RUN_FILE).exists())
        stack.enter_context(hold(study.path))
        try:
            yield run
        except BaseException:
            if not run.was_over and not study.count():
                study.discard()
            elif not run.was_over and not is_part:
                cells = f"{study.count()} finished cell{'s are' if study.count() != 1 else ' is'}"
                tell_how_to_go_on(cells, verb, study.path)
            raise
        finally:
            run.close()


def tell_how_to_go_on(kept: str, verb: str, path: Path) -> None:
    """The line of something that is broken off; `kept` is what is there of it, with its verb."""
    text = f"paceline: broken off; {kept} kept: go on with paceline {verb} --resume {path}"
    session.stderr().print(text, soft_wrap=True, markup=False)


@contextlib.contextmanager
def hold(path: Path) -> Iterator[None]:
    """Refuse a folder in which another process makes the same study: both would make the same cells."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(f"{path} is being made by another process: wait for its end, or stop it") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(handle)


def _capture() -> Environment:
    gpu = machine.gpu_name()
    return dataclasses.replace(capture_environment(), details={"gpu": gpu} if gpu else {})


def _name_machine(environment: Environment) -> str:
    """What must stay the same for times to stand in one table."""
    gpu = f", {environment.details['gpu']}" if environment.details else ""
    return f"{session.describe_machine()}{gpu}, torch {environment.versions.get('torch', 'unknown')}"


class _Reader(Study):
    """A study that others write."""

    def keep(self, cell: str, records: Sequence[Record], machine: str | None = None) -> None:
        pass


def check_same_machine(study_config: dict[str, Any], resume: Path) -> None:
    """Refuse to go on elsewhere: times of two machines do not stand in one table."""
    begun, here = study_config.get("machine"), _name_machine(_capture())
    if begun != here:
        raise ConfigError(f"--resume {resume}: it was begun on {begun}, and this is {here}: times cannot be mixed")
