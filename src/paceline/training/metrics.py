"""What a run writes of itself while it trains: rows of numbers in a file of JSON lines, and TensorBoard's events.

What the numbers are and when they are taken does not belong here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, RecordError

__all__ = ["EventsLog", "MetricsLog", "load_metrics"]

_NOT_FINITE = "not_finite"


class MetricsLog:
    """A file of rows, one JSON object per line: `step`, a whole number, and anything that JSON can write.

    JSON has no word for nan and inf. Such a value is written as null, and its name goes into `not_finite`:
    `{"step": 7, "loss": null, "not_finite": {"loss": "nan"}}`. `load_metrics` puts it back.
    """

    def __init__(self, path: str | Path) -> None:
        """Go on with a file, or begin one. What a killed run left of a last line is cut off."""
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: the rows of one `append` reach the system in one write, and a kill loses none before it.
            self._file = self.path.open("ab", buffering=0)
            self._file.truncate(_whole_bytes(self.path.read_bytes()))
        except OSError as error:
            raise RecordError(f"cannot write {path}: {error.strerror}") from None

    @classmethod
    def resume(cls, path: str | Path, step: int) -> MetricsLog:
        """Go on after this step: rows of later steps, which the run is about to make again, are dropped."""
        path = Path(path)
        if path.exists():
            rows = load_metrics(path)
            kept = [row for row in rows if row["step"] <= step]
            if len(kept) < len(rows):
                _replace(path, _render(kept))
        return cls(path)

    def append(self, *rows: Mapping[str, Any]) -> None:
        """Write rows; they are there when this returns, even if the process is killed after it."""
        data = memoryview(_render(rows))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise RecordError(f"cannot write {self.path}: {error.strerror}") from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file in order. A last line without its end is what a killed run left, and is passed over."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error.strerror}") from None
    rows = []
    for number, line in enumerate(content[: _whole_bytes(content)].splitlines(), 1):
        try:
            row = json.loads(line)
            row |= {name: float(value) for name, value in row.pop(_NOT_FINITE, {}).items()}
            if type(row["step"]) is not int:
                raise TypeError(f"step {row['step']!r}")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise RecordError(f"{path}, line {number} is no row with a step: {type(error).__name__} {error}") from None
        rows.append(row)
    return rows


def _whole_bytes(content: bytes) -> int:
    """How many bytes the whole lines have."""
    return content.rfind(b"\n") + 1


def _render(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(_render_row(row) for row in rows)


def _render_row(row: Mapping[str, Any]) -> bytes:
    if type(row.get("step")) is not int or _NOT_FINITE in row:
        raise ConfigError(
            f"a row of metrics has the keys {list(row)}: it needs a whole number `step`, and no `not_finite`"
        )
    lost = {name: str(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    plain = {**row, **dict.fromkeys(lost), **({_NOT_FINITE: lost} if lost else {})}
    try:
        return json.dumps(plain, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the row of metrics of step {row['step']} cannot be written as JSON: {error}") from None


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RecordError(f"cannot write {path}: {error.strerror}") from None


class EventsLog:
    """The numbers of rows as scalars in TensorBoard's own files; words and empty values are left out."""

    def __init__(self, folder: str | Path) -> None:
        self._writer = _build_writer(folder, None)

    @classmethod
    def resume(cls, folder: str | Path, step: int) -> EventsLog:
        """Go on after this step: TensorBoard passes over what earlier files have of later steps."""
        log = cls.__new__(cls)
        log._writer = _build_writer(folder, step + 1)
        return log

    def append(self, *rows: Mapping[str, Any]) -> None:
        for row in rows:
            for name, value in row.items():
                if name != "step" and type(value) in (int, float):
                    self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def __enter__(self) -> EventsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _build_writer(folder: str | Path, purge_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError(
            "TensorBoard's files need the package tensorboard, which is not installed: "
            "install paceline[tensorboard], or train without them"
        ) from None
    return SummaryWriter(str(folder), purge_step=purge_step)
