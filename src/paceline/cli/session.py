"""How commands print that do not yet return a result: consoles, JSON, and the machine in a few words."""

from __future__ import annotations

import json
import sys
from typing import Any

import rich.console

from paceline import machine
from paceline.units import format_memory

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
