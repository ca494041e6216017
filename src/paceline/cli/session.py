"""What the measuring verbs share: ranks launched or joined, progress, the run's folder, and the output.

Nothing here knows what is measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.console
import rich.progress

from paceline import machine
from paceline.errors import ConfigError
from paceline.measure.settings import GroupSettings
from paceline.records import Environment, Record, Run, RunFolder, capture_environment
from paceline.records.environment import NOISY, Doubt, find_doubts
from paceline.runtime.environment import Place, is_launched, read_place
from paceline.runtime.launch import RankPool, defer_signals
from paceline.runtime.session import Progress
from paceline.runtime.worker import listen
from paceline.units import format_memory

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paceline.measure.engine import Measured
    from paceline.report.tables import Column

__all__ = ["Session", "describe_machine", "print_json", "run_measurement", "stderr", "stdout"]

# Piped output has no width of its own; a table must then not be cut to 80 columns.
_PIPE_WIDTH = 200


def stdout() -> rich.console.Console:
    piped = not sys.stdout.isatty()
    return rich.console.Console(width=_PIPE_WIDTH if piped else None, highlight=False, soft_wrap=piped)


def stderr() -> rich.console.Console:
    return rich.console.Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def print_json(document: dict[str, Any]) -> None:
    """One JSON document, and nothing else, on stdout."""
    print(json.dumps(document, indent=1, allow_nan=False))


def describe_machine() -> str:
    """The machine in a few words, for the subtitle of a picture."""
    memory = format_memory(machine.total_memory_bytes())
    return f"{machine.cpu_name()}, {machine.count_cores()} cores, {memory}"


@dataclasses.dataclass
class Session:
    """One invocation of a measuring verb. In a launched world every rank has one, and only the leader speaks."""

    verb: str
    settings: GroupSettings
    place: Place | None
    folder: RunFolder | None
    notes: list[str]

    @property
    def is_leader(self) -> bool:
        return self.place is None or self.place.rank == 0

    def measure(self, load: Callable[[], Callable[[Any], Measured]]) -> tuple[Run, list[Doubt]]:
        """Run the measurement on its ranks and return the finished run, with what speaks against it.

        `load` imports the measuring function; the ranks already start while it does. If the measurement breaks
        off, the records that were finished are saved and the error goes on.
        """
        finished: list[Record] = []
        before = capture_environment()  # now, because our own ranks will raise the load
        with _show_progress(self.verb, self.is_leader) as show:

            def hear(message: Progress) -> None:
                finished.extend(message.records)
                show(message)

            try:
                if self.place is not None:
                    with listen(hear):
                        measured = load()(self.settings)
                else:
                    with RankPool(max(self.settings.ranks)) as pool:
                        pool.start()
                        with defer_signals():
                            function = load()
                        answers = pool.run(function, (self.settings,), on_message=lambda rank, message: hear(message))
                        measured = answers[0]
            except BaseException as error:
                if finished and self.folder is not None:
                    self.folder.save(self._build_run(finished, before, complete=False)[0])
                    stderr().print(f"paceline: broken off; {len(finished)} finished records are in {self.folder.path}")
                elif self.is_leader and isinstance(error, KeyboardInterrupt | SystemExit):
                    stderr().print("paceline: broken off before the first result")
                raise
        environment = dataclasses.replace(before, details=measured.details)
        return self._build_run(measured.records, environment, complete=True)

    def _build_run(
        self, records: Sequence[Record], environment: Environment, complete: bool
    ) -> tuple[Run, list[Doubt]]:
        doubts = find_doubts(records, environment)
        config = dataclasses.asdict(self.settings)
        warnings = (*self.notes, *(doubt.text for doubt in doubts))
        return Run(self.verb, config, environment, tuple(records), warnings, complete), doubts

    def write_tables(self, columns: Sequence[Column], records: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
        """The table for people as Markdown, and its rows as CSV, into the run's folder."""
        from paceline.report import tables

        assert self.folder is not None
        self.folder.write("table.csv", tables.render_csv(rows))
        self.folder.write("table.md", tables.render_markdown(columns, records))

    def write_figure(self, name: str, figure: Figure) -> None:
        """A picture as PNG and SVG, into the run's folder."""
        from paceline.report import plots

        assert self.folder is not None
        self.folder.write(f"{name}.png", plots.render_png(figure))
        self.folder.write(f"{name}.svg", plots.render_svg(figure))

    def print_closing(self, warnings: Sequence[str]) -> None:
        """What comes under the table for people: warnings, and where everything is."""
        console = stdout()
        for warning in warnings:
            console.print(f"[yellow]warning:[/] {rich.markup.escape(warning)}")
        if self.folder is not None:
            console.print(f"run: {self.folder.path}")


def run_measurement(
    verb: str,
    settings: Any,
    out: Path,
    strict: bool,
    load: Callable[[], Callable[[Any], Measured]],
    report: Callable[[Session, Run], None],
) -> int:
    """Measure, save, report and return the exit code: 1 for wrong data or, under `--strict`, for noisy times.

    `load` imports the measuring function, `report` writes and prints what comes of the run, on the leader alone.
    """
    with _open_session(verb, settings, out) as session:
        run, doubts = session.measure(load)
        if session.folder is not None:
            session.folder.save(run)
            report(session, run)
    kinds = {doubt.kind for doubt in doubts}
    return 1 if "wrong" in kinds or (strict and kinds & set(NOISY)) else 0


@contextlib.contextmanager
def _open_session(verb: str, settings: Any, out: Path) -> Iterator[Session]:
    """Check the settings against this host or the launched world, and make the run's folder, before any work."""
    place = read_place() if is_launched() else None
    if place is not None and place.world_size == 1 and max(settings.ranks) > 1:
        place = None  # a shell inside a batch job, say: nobody else to join, so start the ranks here
    notes: list[str] = []
    if place is not None:
        settings, notes = _narrow_to_world(settings, place)
    settings.check()
    local_ranks = max(settings.ranks) if place is None else (place.local_world_size or 1)
    settings.check_host(local_ranks)
    if place is not None and place.rank > 0:
        RunFolder.check(out)  # here too: if rank 0 cannot write, the others must not wait for it
        yield Session(verb, settings, place, None, notes)
        return
    with RunFolder.create(out, verb) as folder:
        yield Session(verb, settings, place, folder, notes)


def _narrow_to_world(settings: Any, place: Place) -> tuple[Any, list[str]]:
    """Under torchrun the world is given: measure the numbers of ranks that it can hold, and say what it cannot."""
    fitting = tuple(n for n in settings.ranks if n <= place.world_size)
    if not fitting:
        raise ConfigError(
            f"--ranks {','.join(map(str, settings.ranks))} in a launched world of {place.world_size}: "
            "start more ranks, or leave out --ranks"
        )
    if fitting == settings.ranks:
        return settings, []
    left_out = ", ".join(str(n) for n in settings.ranks if n > place.world_size)
    note = f"not measured: {left_out} ranks, because the launched world has {place.world_size}"
    return dataclasses.replace(settings, ranks=fitting), [note]


@contextlib.contextmanager
def _show_progress(verb: str, is_leader: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, a line per finished cell elsewhere, silence on the other ranks. Always on stderr."""
    console = stderr()
    if not is_leader:
        yield lambda message: None
    elif not console.is_terminal:

        def print_line(message: Progress) -> None:
            if message.records:
                console.print(f"paceline: {verb}: {message.done:.0f} of {message.total} cells")

        yield print_line
    else:
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
        )
        with rich.progress.Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting ranks", total=None)

            def update(message: Progress) -> None:
                bar.update(task, completed=message.done, total=message.total, description=message.label)

            yield update
