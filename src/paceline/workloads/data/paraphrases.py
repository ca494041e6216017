"""The Microsoft paraphrase corpus (GLUE's MRPC) in its tab-separated files. Ids of tokens are in `tokenizers`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from paceline.errors import ConfigError
from paceline.workloads.data.checks import Labels, check_labels, told_of_trouble

__all__ = ["load_paraphrases"]

_HEADER = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
_QUOTED = re.compile(r'"((?:[^"]|"")*)"|([^"\t]*)')
_QUOTED_LINE = re.compile(rf"(?:{_QUOTED.pattern})(?:\t(?:{_QUOTED.pattern}))*")


def load_paraphrases(path: Path) -> tuple[list[str], list[str], Labels]:
    """First sentences, second sentences and labels; 1 is a paraphrase.

    In the files as given out a quote is a quote. Copies go around that a spreadsheet has rewritten: there a field with
    quotes is in quotes itself and its own are doubled. A copy is known by its lines, of which all obey that rule.
    """
    with told_of_trouble(path, "text", UnicodeDecodeError):
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    if not lines or tuple(lines[0].split("\t")) != _HEADER:
        found = lines[0][:80] if lines else ""
        raise ConfigError(f"{path}: the first line is {found!r}: needed are the tab-separated names {_HEADER}")
    marked = [line for line in lines if '"' in line]
    quoted = any('""' in line for line in marked) and all(_QUOTED_LINE.fullmatch(line) for line in marked)
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        fields = _unquote(line) if quoted and '"' in line else line.split("\t")
        if len(fields) != len(_HEADER):
            raise ConfigError(f"{path}, line {number}: {len(fields)} fields: needed are {len(_HEADER)}")
        if not re.fullmatch(r"-?\d+", fields[0]):
            raise ConfigError(f"{path}, line {number}: the label is {fields[0]!r}: needed is 0 or 1")
        rows.append(fields)
    if not rows:
        raise ConfigError(f"{path}: no lines below the header")
    labels = np.array([int(row[0]) for row in rows], np.int64)
    check_labels(path, labels, 2, len(rows))
    return [row[3] for row in rows], [row[4] for row in rows], labels


def _unquote(line: str) -> list[str]:
    fields, at = [], 0
    while at <= len(line):
        match = _QUOTED.match(line, at)
        assert match is not None
        inside, plain = match.groups()
        # A tab cannot be in a field of this corpus: one in quotes is a comma that was taken for a separator.
        fields.append(plain if inside is None else inside.replace('""', '"').replace("\t", ","))
        at = match.end() + 1
    return fields
