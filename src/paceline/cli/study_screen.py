"""What a person sees of a study while it is made: how far it is, and the time left. Running it is in `studies`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import rich.progress

from paceline.cli import session
from paceline.records.kinds import Record
from paceline.units import format_duration

__all__ = ["Screen", "ShownTask"]


class ShownTask(Protocol):
    """A cell as it is shown: its name, and how much work it is beside others."""

    @property
    def name(self) -> str: ...

    @property
    def weight(self) -> float: ...


class Screen:
    """What a person sees of a study: a bar with the time left, or a line for each finished cell."""

    def __init__(self, verb: str, tasks: Sequence[ShownTask], kept: dict[str, Any], speaks: bool) -> None:
        self._verb, self._console = verb, session.stderr()
        self._speaks, self._lock = speaks, threading.Lock()
        self._total = sum(task.weight for task in tasks)
        self._before = self._done = sum(task.weight for task in tasks if task.name in kept)
        self._count, self._num_tasks = len(kept), len(tasks)
        self._begin_s = time.monotonic()
        self._parts: dict[str, float] = {}
        self._bar: rich.progress.Progress | None = None
        self.describe: Callable[[Sequence[Record]], str] | None = None

    def __enter__(self) -> Screen:
        if self._speaks and self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("{task.description}"),
                rich.progress.BarColumn(),
                rich.progress.TaskProgressColumn(),
                rich.progress.TimeElapsedColumn(),
                rich.progress.TextColumn("{task.fields[left]}"),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting ranks", total=self._total, left="")
            self._bar.update(self._task, completed=self._done)
        elif self._speaks and self._count:
            self._console.print(f"paceline: {self._verb}: {self._count} of {self._num_tasks} cells were kept")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def hear(self, task: ShownTask, message: Any) -> None:
        """A message of a rank: how far its cell is, as `done` of `total`, or as a share."""
        share = message if isinstance(message, float) else message.done / message.total
        with self._lock:
            self._parts[task.name] = min(1.0, share) * task.weight
            self._update(task.name)

    def finish(self, task: ShownTask, records: Sequence[Record]) -> None:
        with self._lock:
            self._parts.pop(task.name, None)
            self._done += task.weight
            self._count += 1
            self._update(task.name)
            if self._speaks and self._bar is None:
                what = f": {told}" if self.describe is not None and (told := self.describe(records)) else ""
                left = self._estimate_left()
                rest = f", about {left} left" if left and self._count < self._num_tasks else ""
                self._console.print(
                    f"paceline: {self._verb}: {self._count} of {self._num_tasks} cells ({task.name}{what}){rest}",
                    markup=False,
                )

    def _estimate_left(self) -> str:
        done = self._done + sum(self._parts.values())
        fresh = done - self._before
        if fresh <= 0:
            return ""
        left_s = (time.monotonic() - self._begin_s) * (self._total - done) / fresh
        return format_duration(left_s) if left_s < 60 else f"{left_s / 60:.0f} min"

    def _update(self, label: str) -> None:
        if self._bar is not None:
            done = self._done + sum(self._parts.values())
            left = self._estimate_left()
            self._bar.update(self._task, completed=done, description=label, left=f"about {left} left" if left else "")
