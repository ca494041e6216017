"""Runs on disk: one folder per run, with one versioned JSON file of its records, and a file per finished cell.

Files of records appear whole or not at all and are never overwritten. What is drawn from a run belongs to `report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import gc
import itertools
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, PacelineError, RecordError
from paceline.records.environment import Environment
from paceline.records.kinds import Record, decode, record_from_json, record_to_json

FORMAT, VERSION = "paceline-run", 3
_READABLE = (1, 2, 3)
RUN_FILE = "run.json"
STUDY_FILE, _CELLS = "study.json", "cells"
_STUDY_FORMAT, _STUDY_VERSION = "paceline-study", 1


@dataclass(frozen=True)
class Run:
    """One run of a command: what was asked (`config`, resolved), where (`environment`), and what was measured.

    `warnings` are reasons to doubt the result, and nothing else.
    """

    verb: str
    config: dict[str, Any]
    environment: Environment
    records: tuple[Record, ...]
    warnings: tuple[str, ...] = ()
    complete: bool = True
    version: int = field(default=VERSION, compare=False)  # of the file that it was read from
    created: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))


def write_new(path: Path, content: str | bytes, replace: bool = False) -> None:
    """Write a file that appears whole or not at all; refuse an existing one, unless it is to be replaced."""
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
                os.link(temporary, path)  # unlike rename, it refuses an existing target
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
                    raise
                # A file system without hard links: take the name first, then put the content there in one move.
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
    """Write the run as versioned JSON to a new file."""
    head = {"format": FORMAT} | dataclasses.asdict(dataclasses.replace(run, records=(), version=VERSION))
    del head["records"]
    # One record per line: a person can still diff and grep the file.
    records = ",\n  ".join(json.dumps(record_to_json(record), allow_nan=False) for record in run.records)
    write_new(path, json.dumps(head, indent=1, allow_nan=False)[:-2] + f',\n "records": [\n  {records}\n ]\n}}\n')


@contextlib.contextmanager
def pause_collection() -> Iterator[None]:
    """No garbage collection while a large document is read: it looks at all of it, over and over. For a trace of many
    events, which has nothing to collect, that takes several times as long as reading."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def naming_damage() -> Iterator[None]:
    """For a verb that reads what it was given and starts nothing: where a file holds values of another kind than any
    run has, the failure to read them is one of the file."""
    try:
        yield
    except PacelineError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, RecursionError) as error:
        text = f"a file that was given holds a value that no run has: {type(error).__name__}: {_first_line(error)}"
        raise RecordError(f"{text}; write it again with the command that made it", code="damaged") from error


def load_json(file: Path, needed: str) -> Any:
    """The document of a file. RecordError "missing", with what is needed, or "damaged"."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise RecordError(f"{file} does not exist: {needed}", code="missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{file} cannot be read as JSON: {_first_line(error)}", code="damaged") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200] or type(error).__name__


def load_run(path: str | Path) -> Run:
    """Read a run from its file or its folder; RecordError says what is wrong with it and where."""
    path = Path(path)
    file = path / RUN_FILE if path.is_dir() else path
    document = load_json(file, f"give a run folder or its {RUN_FILE}")
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RecordError(f'{file} is not a run of Paceline: it lacks "format": "{FORMAT}"')
    version = document.get("version")
    if version not in _READABLE:
        known = ", ".join(map(str, _READABLE))
        text = f"{file} has version {version!r} and this Paceline reads versions {known}: use the one that wrote it"
        raise RecordError(text, code="version")
    try:
        values = {f.name: document[f.name] for f in dataclasses.fields(Run)}
        values["records"] = load_records(values["records"], version)
        run: Run = decode(Run, values)
        return run
    except KeyError as error:
        raise RecordError(f"{file} lacks the key {error}") from None
    except (TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:  # ours is a ValueError
        raise RecordError(f"{file}: {_first_line(error)}") from None


def load_records(documents: Sequence[Any], version: int) -> tuple[Record, ...]:
    """The records of a run or a cell of this version. Before version 3 the backend `shm` was called `paceline`; what
    version 2 added has defaults."""

    def load(document: Any) -> Record:
        is_renamed = version < 3 and isinstance(document, dict) and document.get("backend") == "paceline"
        return record_from_json(document | {"backend": "shm"} if is_renamed else document)

    return tuple(map(load, documents))


@contextlib.contextmanager
def create_folder(out: str | Path, verb: str, name: str = "") -> Iterator[Path]:
    """A new folder `out/TIME-verb`, or of this name, made first so that a bad place is reported at once; removed if it
    stays empty."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    name = name or f"{stamp}-{verb.replace(' --', '-').replace(' ', '-')}"
    try:
        Path(out).mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = Path(out) / (name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(0o700)  # results and checkpoints are for this user, until they are given away
                break
    except OSError as error:
        raise _cannot_write(out, str(error.strerror)) from None
    try:
        yield path
    finally:
        if not any(path.iterdir()):
            shutil.rmtree(path)


def check_folder(out: str | Path) -> None:
    """Refuse a place where `create_folder` could not make one; makes nothing."""
    place = Path(out).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise _cannot_write(out, os.strerror(errno.EACCES if place.is_dir() else errno.ENOTDIR))


def _cannot_write(out: str | Path, reason: str) -> ConfigError:
    return ConfigError(f"cannot write results to {out}: {reason}; choose another folder with --out")


@dataclass(frozen=True)
class Study:
    """A run that is made cell by cell: what was asked (`config`, resolved), and a file for each finished cell.

    `command_line` is the one that started it; empty for a study of a Paceline that did not save it.
    """

    path: Path
    verb: str
    config: dict[str, Any]
    command_line: str = ""

    @classmethod
    def begin(cls, path: Path, verb: str, config: dict[str, Any], command_line: str = "") -> Study:
        said = {"verb": verb, "command_line": command_line, "config": config}
        document = {"format": _STUDY_FORMAT, "version": _STUDY_VERSION, **said}
        write_new(path / STUDY_FILE, json.dumps(document, indent=1, allow_nan=False) + "\n")
        return cls(path, verb, config, command_line)

    @classmethod
    def load(cls, path: Path, verb: str) -> Study:
        """The study in a folder, to resume it; ConfigError where there is none of this verb."""
        try:
            document = json.loads((path / STUDY_FILE).read_text())
            found, config = document["verb"], document["config"]
            if (document["format"], document["version"]) != (_STUDY_FORMAT, _STUDY_VERSION):
                raise KeyError("format")
        except OSError as error:
            reason = f"{STUDY_FILE}: {error.strerror}; give the folder of an interrupted `{verb}`"
            raise ConfigError(f"--resume {path}: {reason}", code="missing") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"--resume {path}: {STUDY_FILE} is not one of this Paceline", code="damaged") from None
        if found != verb:
            raise ConfigError(f"--resume {path}: it is a run of `{found}`, and this is `{verb}`", code="other-verb")
        return cls(path, verb, config, document.get("command_line", ""))

    def _file(self, cell: str) -> Path:
        """A file name for the cell; where it cannot hold every character of the name, a checksum makes it unique."""
        plain, slug = cell.replace(" ", "-"), re.sub(r"[^A-Za-z0-9.-]+", "-", cell)
        folder = self.path / _CELLS
        folder.mkdir(exist_ok=True)
        return folder / f"{slug if slug == plain else f'{slug}-{zlib.crc32(cell.encode()):08x}'}.json"

    def find(self, cell: str) -> list[Record] | None:
        """The records of a finished cell; None where it is not finished."""
        file = self._file(cell)
        if not file.exists():
            return None
        try:
            document = json.loads(file.read_text())
            if document["cell"] != cell:
                raise RecordError(f"it holds {document['cell']!r}")
            return list(load_records(document["records"], document.get("version", 2)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{file} is not the cell {cell!r}: {error}; delete it to measure that cell again"
            raise RecordError(reason, code="damaged") from None

    def find_machine(self, cell: str) -> str | None:
        """The machine on which a finished cell was measured; None where its file does not name one."""
        found: str | None = json.loads(self._file(cell).read_text()).get("machine")
        return found

    def keep(self, cell: str, records: Sequence[Record], machine: str | None = None) -> None:
        """Save a finished cell, with the name of its machine; from now on it is never measured again."""
        document = {"cell": cell, "version": VERSION, "machine": machine, "records": [*map(record_to_json, records)]}
        write_new(self._file(cell), json.dumps(document, allow_nan=False) + "\n")

    def count(self) -> int:
        """How many cells are finished."""
        return len(list((self.path / _CELLS).glob("*.json")))  # none where the study was discarded

    def discard(self) -> None:
        """Remove what a study left in its folder, unless a cell is finished."""
        if not self.count():
            shutil.rmtree(self.path / _CELLS, ignore_errors=True)
            (self.path / STUDY_FILE).unlink()
