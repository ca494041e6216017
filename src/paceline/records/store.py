"""Runs on disk: one folder per invocation, one versioned JSON file of records in it.

Files appear whole or not at all and are never overwritten. What is drawn from a run belongs to `report`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, RecordError
from paceline.records.environment import Environment
from paceline.records.kinds import Record, record_from_json, record_to_json

__all__ = ["FORMAT", "RUN_FILE", "VERSION", "Run", "RunFolder", "load_run", "save_run", "write_new"]

FORMAT, VERSION = "paceline-run", 2
_READABLE = (1, 2)  # version 1 lacks what version 2 added, and all of that has a default
RUN_FILE = "run.json"


@dataclass(frozen=True)
class Run:
    """One invocation: what was asked (`config`, resolved), where (`environment`), and what came out."""

    verb: str
    config: dict[str, Any]
    environment: Environment
    records: tuple[Record, ...]
    warnings: tuple[str, ...] = ()
    complete: bool = True
    created: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))


def write_new(path: Path, content: str | bytes) -> None:
    """Write a file that appears whole or not at all; refuse to replace one that is there."""
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
        _move_new(temporary, path)
    except FileExistsError:
        raise RecordError(f"{path} exists and is never overwritten: choose another name") from None
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
        raise RecordError(f"{file} does not exist: give a run folder or its {RUN_FILE}") from None
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RecordError(f'{file} is not a run of Paceline: it lacks "format": "{FORMAT}"')
    if document.get("version") not in _READABLE:
        raise RecordError(
            f"{file} has version {document.get('version')!r} and this Paceline reads versions "
            f"{' and '.join(map(str, _READABLE))}: "
            "read it with the Paceline that wrote it"
        )
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
    """The folder of one run, made when the run starts, so that a bad place is found out before the work."""

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
