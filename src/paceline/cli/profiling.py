"""What the verbs of `profile` share: the run's folder, its ranks, progress, tables and the closing lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.markup
import rich.progress

from paceline.cli import session
from paceline.records.environment import Environment, capture_environment
from paceline.records.kinds import Record
from paceline.records.store import Run, RunFolder
from paceline.runtime.environment import is_launched, read_place
from paceline.runtime.launch import RankPool, check_rank_count, defer_signals
from paceline.runtime.session import Progress
from paceline.runtime.worker import listen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paceline.report.tables import Column
    from paceline.training.settings import TrainSettings

__all__ = ["ProfileRun", "open_run", "run_on_ranks", "show_cells", "show_share"]


@dataclass
class ProfileRun:
    """One run of a profile on the rank that speaks."""

    verb: str
    settings: TrainSettings
    folder: RunFolder
    environment: Environment
    warnings: list[str] = field(default_factory=list)

    @property
    def machine(self) -> str:
        return session.describe_machine()

    def save(self, records: Sequence[Record], notes: Sequence[str], more: dict[str, Any]) -> None:
        config = self.settings.to_json() | more
        self.folder.save(Run(self.verb, config, self.environment, tuple(records), tuple(notes)))

    def write_table(
        self, name: str, columns: Sequence[Column], records: Sequence[Any], rows: Sequence[dict[str, Any]]
    ) -> None:
        from paceline.report import tables

        self.folder.write(f"{name}.md", tables.render_markdown(columns, records))
        self.folder.write(f"{name}.csv", tables.render_csv(rows))

    def write_figure(self, name: str, figure: Figure) -> Path:
        from paceline.report import plots

        self.folder.write(f"{name}.svg", plots.render_svg(figure))
        return self.folder.write(f"{name}.png", plots.render_png(figure))

    def print_table(self, columns: Sequence[Column], records: Sequence[Any], title: str) -> None:
        from paceline.report import tables

        console = session.stdout()
        filled = [column for column in columns if any(column.cell(record) for record in records)]
        console.print(tables.render_terminal(filled, records, title, console.width))

    def print_json(self, document: dict[str, Any]) -> None:
        session.print_json({"run": str(self.folder.path)} | document)

    def close(self, notes: Sequence[str]) -> None:
        console = session.stdout()
        for note in notes:
            console.print(rich.markup.escape(note))
        console.print(f"run: {self.folder.path}")


@contextlib.contextmanager
def open_run(verb: str, settings: TrainSettings, out: Path) -> Iterator[ProfileRun | None]:
    """The run's folder, made before any work; None on the ranks of a launched world that do not speak."""
    if is_launched() and read_place().rank > 0:
        RunFolder.check(out)
        yield None
        return
    with RunFolder.create(out, verb) as folder:
        yield ProfileRun(verb, settings, folder, capture_environment())


def run_on_ranks(
    settings: TrainSettings,
    load: Callable[[], Callable[..., Any]],
    arguments: tuple[Any, ...],
    hear: Callable[[Any], None] | None = None,
) -> Any:
    """Call the loaded function on ranks of our own and return rank 0's value; or here, as one of the launched ranks."""
    hear = hear or (lambda message: None)
    if is_launched() and read_place().world_size >= settings.ranks:
        with listen(hear):
            return load()(*arguments)
    check_rank_count(settings.ranks)
    with RankPool(settings.ranks) as pool:
        pool.start()
        with defer_signals():
            function = load()
        return pool.run(function, arguments, on_message=lambda rank, message: hear(message))[0]


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[float, float, str], None]]:
    """A bar on the terminal of the rank that speaks, silence elsewhere; told how much of what is done.

    Close it before printing: while it is drawn, rich sends what goes to stdout to stderr.
    """
    console = session.stderr()
    if not console.is_terminal or (is_launched() and read_place().rank > 0):
        yield lambda done, total, label: None
        return
    with rich.progress.Progress(console=console, transient=True) as bar:
        task = bar.add_task("starting ranks", total=None)
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=label)


@contextlib.contextmanager
def show_cells(verb: str, num_worlds: int) -> Iterator[Callable[[int, Progress], None]]:
    """Progress over several worlds, each of which posts its own; where there is no bar, a line for each record."""
    console = session.stderr()
    with _bar() as update:

        def hear(world: int, message: Progress) -> None:
            update(world + message.done / message.total, num_worlds, message.label)
            if message.records and not console.is_terminal:
                console.print(f"paceline: {verb}: {message.label}: done")

        yield hear


@contextlib.contextmanager
def show_share(verb: str) -> Iterator[Callable[[float], None]]:
    """Progress of something that posts the share that is done."""
    with _bar() as update:
        yield lambda share: update(share, 1.0, verb)
