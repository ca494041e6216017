"""Runs on disk: one folder per run, with one versioned JSON file of its records, and a file per finished cell.

Files of records appear whole or not at all and are never overwritten. What is drawn from a run belongs to `report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
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

from paceline.errors import ConfigError, RecordError
from paceline.records.environment import Environment
from paceline.records.kinds import Record, record_from_json, record_to_json

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
    created: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))


# -- versions ----------------------------------------------------------------------------------------------------------


def upgrade(document: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a run of any readable version as that of this version.

    Version 1 lacks what version 2 added, and all of that has a default. Before version 3 the backend `shm` was called
    `paceline`.
    """
    version = document.get("version")
    if isinstance(version, int) and version < VERSION and isinstance(document.get("records"), list):
        records = [upgrade_record(record, version) for record in document["records"]]
        document = document | {"records": records, "version": VERSION}
    return document


def upgrade_record(record: Any, version: int) -> Any:
    """The JSON of one record of an older version as that of this version; also for the cells of an unfinished run."""
    if version < 3 and isinstance(record, dict) and record.get("backend") == "paceline":
        record = record | {"backend": "shm"}
    return record


# -- runs --------------------------------------------------------------------------------------------------------------


def write_new(path: Path, content: str | bytes, replace: bool = False) -> None:
    """Write a file that appears whole or not at all; refuse an existing one, unless it is to be replaced."""
    data = content.encode() if isinstance(content, str) else content
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        (os.replace if replace else _move_new)(temporary, path)
    except FileExistsError:
        raise RecordError(f"{path} exists and is never overwritten: choose another name", code="exists") from None
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _move_new(temporary: str, path: Path) -> None:
    try:
        os.link(temporary, path)  # unlike rename, link refuses an existing target
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # A file system without hard links: take the name first, then put the content there in one move.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        os.replace(temporary, path)


def save_run(run: Run, path: Path) -> None:
    """Write the run as versioned JSON to a new file."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        **{f.name: getattr(run, f.name) for f in dataclasses.fields(run)},
        "environment": dataclasses.asdict(run.environment),
        "records": [record_to_json(record) for record in run.records],
    }
    # One record per line: a person can still diff and grep the file.
    records = ",\n  ".join(json.dumps(r, allow_nan=False) for r in document.pop("records"))
    head = json.dumps(document, indent=1, allow_nan=False)
    write_new(path, head[:-2] + f',\n "records": [\n  {records}\n ]\n}}\n')


def load_run(path: str | Path) -> Run:
    """Read a run from its file or its folder; RecordError says what is wrong with it and where."""
    path = Path(path)
    file = path / RUN_FILE if path.is_dir() else path
    try:
        document = json.loads(file.read_text())
    except FileNotFoundError:
        raise RecordError(f"{file} does not exist: give a run folder or its {RUN_FILE}", code="missing") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RecordError(f'{file} is not a run of Paceline: it lacks "format": "{FORMAT}"')
    if document.get("version") not in _READABLE:
        raise RecordError(
            f"{file} has version {document.get('version')!r} and this Paceline reads versions "
            f"{', '.join(map(str, _READABLE))}: read it with the Paceline that wrote it",
            code="version",
        )
    document = upgrade(document)
    try:
        records = tuple(record_from_json(record) for record in document["records"])
        environment = Environment(**document["environment"])
        rest = {f.name: document[f.name] for f in dataclasses.fields(Run) if f.name not in ("records", "environment")}
        rest["warnings"] = tuple(rest["warnings"])
        return Run(records=records, environment=environment, **rest)
    except KeyError as error:
        raise RecordError(f"{file} lacks the key {error}") from None
    except (TypeError, RecordError) as error:
        raise RecordError(f"{file}: {error}") from None


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, made when the run starts, so that a bad place is reported before the work."""

    path: Path

    @classmethod
    @contextlib.contextmanager
    def create(cls, out: str | Path, verb: str) -> Iterator[RunFolder]:
        """A new folder `out/TIME-verb`; it is removed again if nothing was put into it."""
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        path = _make_new_folder(Path(out), f"{stamp}-{verb.replace(' ', '-')}")
        try:
            yield cls(path)
        finally:
            if not any(path.iterdir()):
                shutil.rmtree(path)

    @staticmethod
    def check(out: str | Path) -> None:
        """Refuse a place where `create` could not make a folder; makes nothing."""
        place = Path(out).absolute()
        while not place.exists() and place != place.parent:
            place = place.parent
        if not place.is_dir():
            raise _cannot_write(out, os.strerror(errno.ENOTDIR))
        if not os.access(place, os.W_OK | os.X_OK):
            raise _cannot_write(out, os.strerror(errno.EACCES))

    def save(self, run: Run) -> Path:
        save_run(run, self.path / RUN_FILE)
        return self.path / RUN_FILE

    def write(self, name: str, content: str | bytes) -> Path:
        write_new(self.path / name, content)
        return self.path / name


def _cannot_write(out: str | Path, reason: str) -> ConfigError:
    return ConfigError(f"cannot write results to {out}: {reason}; choose another folder with --out")


def _make_new_folder(out: Path, name: str) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, 1000):
            path = out / (name if attempt == 1 else f"{name}-{attempt}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise _cannot_write(out, str(error.strerror)) from None
    raise ConfigError(f"{out} already has 999 runs named {name}: choose another folder with --out")


# -- cells of an unfinished run ----------------------------------------------------------------------------------------


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
        document = {
            "format": _STUDY_FORMAT, "version": _STUDY_VERSION, "verb": verb, "command_line": command_line,
            "config": config,
        }  # fmt: skip
        write_new(path / STUDY_FILE, json.dumps(document, indent=1, allow_nan=False) + "\n")
        (path / _CELLS).mkdir(exist_ok=True)
        return cls(path, verb, config, command_line)

    @classmethod
    def load(cls, path: Path, verb: str) -> Study:
        """The study in a folder, to resume it; ConfigError where there is none of this verb."""
        file = path / STUDY_FILE
        try:
            document = json.loads(file.read_text())
            found, config = document["verb"], document["config"]
            if (document["format"], document["version"]) != (_STUDY_FORMAT, _STUDY_VERSION):
                raise KeyError("format")
        except OSError as error:
            raise ConfigError(
                f"--resume {path}: {STUDY_FILE}: {error.strerror}; give the folder of an interrupted `{verb}`",
                code="missing",
            ) from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"--resume {path}: {STUDY_FILE} is not one of this Paceline", code="damaged") from None
        if found != verb:
            raise ConfigError(f"--resume {path}: it is a run of `{found}`, and this is `{verb}`", code="other-verb")
        (path / _CELLS).mkdir(exist_ok=True)
        return cls(path, verb, config, document.get("command_line", ""))

    def _file(self, cell: str) -> Path:
        """A file name for the cell; where it cannot hold every character of the name, a checksum makes it unique."""
        plain, slug = cell.replace(" ", "-"), re.sub(r"[^A-Za-z0-9.-]+", "-", cell)
        return self.path / _CELLS / f"{slug if slug == plain else f'{slug}-{zlib.crc32(cell.encode()):08x}'}.json"

    def find(self, cell: str) -> list[Record] | None:
        """The records of a finished cell; None where it is not finished."""
        file = self._file(cell)
        if not file.exists():
            return None
        try:
            document = json.loads(file.read_text())
            if document["cell"] != cell:
                raise RecordError(f"it holds {document['cell']!r}")
            version = document.get("version", 2)
            return [record_from_json(upgrade_record(record, version)) for record in document["records"]]
        except (OSError, ValueError, KeyError, TypeError, RecordError) as error:
            raise RecordError(
                f"{file} is not the cell {cell!r}: {error}; delete it to measure that cell again", code="damaged"
            ) from None

    def find_machine(self, cell: str) -> str | None:
        """The machine on which a finished cell was measured; None where its file does not name one."""
        found: str | None = json.loads(self._file(cell).read_text()).get("machine")
        return found

    def keep(self, cell: str, records: Sequence[Record], machine: str | None = None) -> None:
        """Save a finished cell, with the name of its machine; from now on it is never measured again."""
        document = {
            "cell": cell, "version": VERSION, "machine": machine,
            "records": [record_to_json(record) for record in records],
        }  # fmt: skip
        write_new(self._file(cell), json.dumps(document, allow_nan=False) + "\n")

    def count(self) -> int:
        """How many cells are finished."""
        return len(list((self.path / _CELLS).glob("*.json")))

    def discard(self) -> None:
        """Remove what a study without a finished cell left in its folder."""
        for file in (self.path / _CELLS).glob(".*"):
            file.unlink()
        (self.path / _CELLS).rmdir()
        (self.path / STUDY_FILE).unlink()
