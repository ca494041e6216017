"""A study on disk while it is made: what was asked, and a file for each finished cell, so that it can go on.

Which cells a study has belongs to whoever makes it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, RecordError
from paceline.records.kinds import Record, record_from_json, record_to_json
from paceline.records.store import write_new

__all__ = ["STUDY_FILE", "Study"]

STUDY_FILE, _CELLS = "study.json", "cells"
_FORMAT, _VERSION = "paceline-study", 1


@dataclass(frozen=True)
class Study:
    """The folder of a study; `config` is what was asked, resolved.

    `command_line` is the one that began it; it is empty for a study of a Paceline that did not keep it.
    """

    path: Path
    verb: str
    config: dict[str, Any]
    command_line: str = ""

    @classmethod
    def begin(cls, path: Path, verb: str, config: dict[str, Any], command_line: str = "") -> Study:
        document = {
            "format": _FORMAT, "version": _VERSION, "verb": verb, "command_line": command_line, "config": config,
        }  # fmt: skip
        write_new(path / STUDY_FILE, json.dumps(document, indent=1, allow_nan=False) + "\n")
        (path / _CELLS).mkdir(exist_ok=True)
        return cls(path, verb, config, command_line)

    @classmethod
    def load(cls, path: Path, verb: str) -> Study:
        """The study in a folder, to go on with it; ConfigError where there is none of this verb."""
        file = path / STUDY_FILE
        try:
            document = json.loads(file.read_text())
            found, config = document["verb"], document["config"]
            if (document["format"], document["version"]) != (_FORMAT, _VERSION):
                raise KeyError("format")
        except OSError as error:
            raise ConfigError(f"--resume {path}: {STUDY_FILE}: {error.strerror}; give the folder of a study") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"--resume {path}: {STUDY_FILE} is not one of this Paceline") from None
        if found != verb:
            raise ConfigError(f"--resume {path}: it is a study of `{found}`, and this is `{verb}`")
        (path / _CELLS).mkdir(exist_ok=True)
        return cls(path, verb, config, document.get("command_line", ""))

    def _file(self, cell: str) -> Path:
        """Its name with what a file system takes; where that says less than the name, a sum of the name tells it."""
        plain, slug = cell.replace(" ", "-"), re.sub(r"[^A-Za-z0-9.-]+", "-", cell)
        return self.path / _CELLS / f"{slug if slug == plain else f'{slug}-{zlib.crc32(cell.encode()):08x}'}.json"

    def find(self, cell: str) -> list[Record] | None:
        """The records of a finished cell; None where it is still to be made."""
        file = self._file(cell)
        if not file.exists():
            return None
        try:
            document = json.loads(file.read_text())
            if document["cell"] != cell:
                raise RecordError(f"it holds {document['cell']!r}")
            return [record_from_json(record) for record in document["records"]]
        except (OSError, ValueError, KeyError, TypeError, RecordError) as error:
            raise RecordError(f"{file} is not the cell {cell!r}: {error}; delete it to measure that anew") from None

    def find_machine(self, cell: str) -> str | None:
        """The machine that made a finished cell; None where its file does not name one."""
        found: str | None = json.loads(self._file(cell).read_text()).get("machine")
        return found

    def keep(self, cell: str, records: Sequence[Record], machine: str | None = None) -> None:
        """Keep a finished cell, with the name of the machine that made it; from now on it is never made again."""
        document = {"cell": cell, "machine": machine, "records": [record_to_json(record) for record in records]}
        write_new(self._file(cell), json.dumps(document, allow_nan=False) + "\n")

    def count(self) -> int:
        """How many cells are finished."""
        return len(list((self.path / _CELLS).glob("*.json")))

    def forget(self) -> None:
        """Take away what a study without a finished cell left behind; its folder is then as if it had never begun."""
        for file in (self.path / _CELLS).glob(".*"):
            file.unlink()
        (self.path / _CELLS).rmdir()
        (self.path / STUDY_FILE).unlink()
