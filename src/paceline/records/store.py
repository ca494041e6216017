"""Runs on disk: one folder per run, with its records in one versioned JSON file, and one file per finished cell.

A file of records is written atomically and never overwritten. Every file can also be read compressed: if
`run.json` is missing, `run.json.gz` is read. Tables and figures are written by `report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import difflib
import errno
import functools
import gc
import gzip
import inspect
import itertools
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, ParamSpec, TypeVar, cast

from paceline.errors import ConfigError, PacelineError, RecordError
from paceline.records.checked import decode
from paceline.records.environment import Environment
from paceline.records.kinds import Record, record_from_json, record_to_json

P = ParamSpec("P")
T = TypeVar("T")

RUN_FORMAT = ("paceline-run", 3)
RUN_FILE = "run.json"
STUDY_FILE, _CELLS = "study.json", "cells"
_STUDY_FORMAT, _CELL_FORMAT = ("paceline-study", 1), ("paceline-cell", 3)


@dataclass(frozen=True)
class Run:
    """One run of a command: its resolved settings (`config`), the `environment`, and the `records`. `warnings` contains
    only reasons not to trust the result."""

    verb: str
    config: dict[str, Any]
    environment: Environment
    records: tuple[Record, ...]
    warnings: tuple[str, ...] = ()
    complete: bool = True
    created: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))


def write_new(path: Path, content: str | bytes, replace: bool = False) -> None:
    """Write a file atomically; refuse to overwrite an existing one unless `replace` is set."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        if replace:
            os.replace(temporary, path)
        else:
            try:
                os.link(temporary, path)  # unlike rename, this fails if the target exists
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                # The file system has no hard links: reserve the name, then move the content there in one step.
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
                os.replace(temporary, path)
    except FileExistsError:
        raise RecordError(f"{path} exists and is never overwritten: choose another name", code="exists") from None
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def save_run(run: Run, path: Path) -> None:
    head = name_format(RUN_FORMAT) | dataclasses.asdict(dataclasses.replace(run, records=()))
    del head["records"]
    # One record per line keeps the file easy to diff and grep.
    records = ",\n  ".join(json.dumps(record_to_json(record), allow_nan=False) for record in run.records)
    write_new(path, json.dumps(head, indent=1, allow_nan=False)[:-2] + f',\n "records": [\n  {records}\n ]\n}}\n')


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """Turn garbage collection off while something is timed or a large document is read. While reading, each collection
    scans everything read so far and frees nothing, which takes several times as long as parsing a trace."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def naming_damage() -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator for verbs that only read files: report a value of an unexpected type as damage to a file, not as a bug.
    Arguments that the verb does not take are still a TypeError."""

    def decorate(verb: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(verb)

        @functools.wraps(verb)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = next((name for name in kwargs if name not in signature.parameters), "")
                close = difflib.get_close_matches(unknown, signature.parameters, 1)
                advice = f"; did you mean {close[0]}?" if close else ""
                raise TypeError(f"{verb.__name__}() {error}{advice}") from None
            try:
                return verb(*args, **kwargs)
            except PacelineError:
                raise
            except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RecursionError) as error:
                text = f"an input file contains an invalid value: {type(error).__name__}: {_first_line(error)}"
                advice = "write the file again with the command that made it"
                raise RecordError(f"{text}; {advice}", code="damaged") from error

        return call

    return decorate


def find_file(path: Path) -> Path | None:
    """The file, or its compressed copy (`.gz`) if only that exists; None if neither exists."""
    packed = path.with_name(f"{path.name}.gz")
    return path if path.exists() else packed if packed.exists() else None


def open_file(path: Path) -> BinaryIO:
    file = find_file(path) or path
    return cast(BinaryIO, gzip.open(file)) if file.suffix == ".gz" else file.open("rb")


def read_file(path: Path) -> bytes:
    """The content of a file or of its compressed copy; OSError if it cannot be read."""
    try:
        with open_file(path) as file:
            return file.read()
    except (EOFError, zlib.error) as error:
        raise OSError(errno.EIO, f"damaged gzip file: {error}") from None


def is_run_path(path: str | Path) -> bool:
    """Whether this is a run rather than a table: a folder, or a file with the name of one in a run's folder."""
    return Path(path).is_dir() or Path(path).name in (RUN_FILE, f"{RUN_FILE}.gz")


def load_json(file: Path, needed: str) -> Any:
    """The document of a file, compressed or not; RecordError "missing", which says what is `needed`, or "damaged"."""
    try:
        return json.loads(read_file(file))
    except FileNotFoundError:
        raise RecordError(f"{file} does not exist: {needed}", code="missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{file} cannot be read as JSON: {_first_line(error)}", code="damaged") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def name_format(known: tuple[str, int]) -> dict[str, Any]:
    """The first two keys of every file that Paceline writes."""
    return dict(zip(("format", "version"), known, strict=True))


def check_format(document: Any, known: tuple[str, int], where: str | Path) -> dict[str, Any]:
    """Return the document if it has this format and version; otherwise raise RecordError "damaged" or "version"."""
    name, version = known
    if not isinstance(document, dict) or document.get("format") != name:
        raise RecordError(f'{where} is not a file of this kind: it lacks "format": "{name}"', code="damaged")
    if document.get("version") != version:
        found = f"{where} has version {document.get('version')!r} of {name}, but this Paceline reads version {version}"
        raise RecordError(f"{found}: use the Paceline that wrote it, or write it again", code="version")
    return document


def load_run(path: str | Path) -> Run:
    """Read a run from its file or its folder. RecordError names the file and the problem."""
    path = Path(path)
    file = path / RUN_FILE if path.is_dir() else path
    document = check_format(load_json(file, f"pass a run folder or its {RUN_FILE}"), RUN_FORMAT, file)
    try:
        values = {f.name: document[f.name] for f in dataclasses.fields(Run)}
        values["records"] = tuple(map(record_from_json, values["records"]))
        run: Run = decode(Run, values)
        return run
    except KeyError as error:
        raise RecordError(f"{file} lacks the key {error}") from None
    except (TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:  # our own is a ValueError
        raise RecordError(f"{file}: {_first_line(error)}") from None


@contextlib.contextmanager
def create_folder(out: str | Path, verb: str, name: str = "") -> Iterator[Path]:
    """Make a new folder `out/TIME-verb`, or `out/name`, before the work begins, so that a bad path fails immediately.
    Removes the folder again if it stays empty."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    name = name or f"{stamp}-{verb.replace(' --', '-').replace(' ', '-')}"
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = Path(out) / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)  # private until the user shares it
                break
    except OSError as error:
        raise _cannot_write(out, str(error.strerror)) from None
    try:
        yield path
    finally:
        if not any(path.iterdir()):
            shutil.rmtree(path)


def check_folder(out: str | Path) -> None:
    """Refuse a path where `create_folder` would fail, without creating anything."""
    place = Path(out).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise _cannot_write(out, os.strerror(errno.EACCES if place.is_dir() else errno.ENOTDIR))


def _cannot_write(out: str | Path, reason: str) -> ConfigError:
    return ConfigError(f"cannot write results to {out}: {reason}; choose another folder with --out")


@dataclass(frozen=True)
class Study:
    """A run that is measured cell by cell: its resolved settings (`config`), and one file per finished cell."""

    path: Path
    verb: str
    config: dict[str, Any]
    command_line: str = ""

    @classmethod
    def begin(cls, path: Path, verb: str, config: dict[str, Any], command_line: str = "") -> Study:
        settings = {"verb": verb, "command_line": command_line, "config": config}
        text = json.dumps(name_format(_STUDY_FORMAT) | settings, indent=1, allow_nan=False)
        write_new(path / STUDY_FILE, text + "\n")
        return cls(path, verb, config, command_line)

    @classmethod
    def load(cls, path: Path, verb: str) -> Study:
        """The study in a folder, for resuming. ConfigError if there is no study, or if it belongs to another verb."""
        try:
            document = load_json(path / STUDY_FILE, f"pass the folder of an interrupted `{verb}`")
            check_format(document, _STUDY_FORMAT, STUDY_FILE)
            found, config, command_line = (document[name] for name in ("verb", "config", "command_line"))
        except RecordError as error:
            raise ConfigError(f"--resume {path}: {error}", code=error.code) from None
        except KeyError as error:
            raise ConfigError(f"--resume {path}: {STUDY_FILE} lacks the key {error}", code="damaged") from None
        if found != verb:
            raise ConfigError(f"--resume {path}: it is a run of `{found}`, but this is `{verb}`", code="other-verb")
        return cls(path, verb, config, command_line)

    def _file(self, cell: str) -> Path:
        """The file of a cell. A checksum makes it unique if the name has characters that a file name cannot have."""
        plain, slug = cell.replace(" ", "-"), re.sub(r"[^A-Za-z0-9.-]+", "-", cell)
        folder = self.path / _CELLS
        folder.mkdir(exist_ok=True)
        return folder / f"{slug if slug == plain else f'{slug}-{zlib.crc32(cell.encode()):08x}'}.json"

    def find(self, cell: str) -> list[Record] | None:
        """The records of a finished cell; None if it is not finished."""
        file = self._file(cell)
        if not file.exists():
            return None
        try:
            document = check_format(load_json(file, ""), _CELL_FORMAT, file)
            if document["cell"] != cell:
                raise RecordError(f"it contains {document['cell']!r}")
            return [record_from_json(record) for record in document["records"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            code = "version" if getattr(error, "code", "") == "version" else "damaged"
            text = f"{file} is not the cell {cell!r}: {error}; delete it to measure that cell again"
            raise RecordError(text, code=code) from None

    def find_machine(self, cell: str) -> str:
        found: str = json.loads(self._file(cell).read_text())["machine"]
        return found

    def keep(self, cell: str, records: Sequence[Record], machine: str = "unknown") -> None:
        """Save a finished cell and the name of its machine. A saved cell is never measured again."""
        document = name_format(_CELL_FORMAT) | {"cell": cell, "machine": machine}
        document["records"] = [record_to_json(record) for record in records]
        write_new(self._file(cell), json.dumps(document, allow_nan=False) + "\n")

    def count(self) -> int:
        return len(list((self.path / _CELLS).glob("*.json")))  # 0 if the study was discarded

    def discard(self) -> None:
        """Remove the study's files, unless a cell is finished."""
        if not self.count():
            shutil.rmtree(self.path / _CELLS, ignore_errors=True)
            (self.path / STUDY_FILE).unlink()
