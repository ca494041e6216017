"""Every command as a function of the library that returns a result."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """The modules of verbs that have several functions, such as `paceline.bench`, loaded on first use."""
    if name in ("bench", "scale"):
        return importlib.import_module(f"paceline.verbs.{name}")
    raise AttributeError(f"module 'paceline.verbs' has no attribute {name!r}")
