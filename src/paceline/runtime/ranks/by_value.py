"""Pickles functions and classes defined in a notebook or at a prompt by value, with cloudpickle.

Plain pickle sends a function as a name to import, but another process cannot import an interactive session.
"""

from __future__ import annotations

import importlib.util
import io
import linecache
import pickle
import sys
import types
from typing import Any

from paceline.errors import ConfigError


def is_interactive() -> bool:
    """Whether this is an interactive session, whose code other processes cannot import."""
    return not hasattr(sys.modules["__main__"], "__file__")


def dumps(value: Any) -> bytes:
    """Pickle a value with the session's functions and classes in it, for `pickle.loads` in a rank."""
    if importlib.util.find_spec("cloudpickle") is not None:
        return _dump_session(value)
    try:
        data = pickle.dumps(value)
    except (pickle.PicklingError, AttributeError):  # a lambda or a nested function
        data = b"__main__"
    if b"__main__" in data:
        found = "functions and classes of a notebook or prompt are sent to ranks by cloudpickle, which is not installed"
        raise ConfigError(f"{found}: pip install 'paceline[notebook]'", code="missing-extra")
    return data


def _dump_session(value: Any) -> bytes:
    import cloudpickle

    names: dict[str, Any] = {}
    sources: dict[str, list[str]] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, one: Any) -> Any:
            if isinstance(one, types.FunctionType):
                entry = linecache.cache.get(one.__code__.co_filename)
                if entry is not None and len(entry) == 4 and entry[1] is None:  # a cell, not a file
                    sources[one.__code__.co_filename] = entry[2]
            is_ours = isinstance(one, type | types.FunctionType) and one.__module__ == "__main__"
            if is_ours and one.__qualname__.isidentifier():
                names[one.__qualname__] = one
            return super().reducer_override(one)

    file = io.BytesIO()
    Pickler(file).dump((value, names, sources))  # in this order, because pickling the value fills the other two
    return pickle.dumps(_Session(file.getvalue()))


class _Session:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> Any:
        return _load_session, (self._data,)


def _load_session(data: bytes) -> Any:
    """In a rank: create a `__main__` with the session's names, so that pickle finds them, and register cells' lines."""
    main = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    value, names, sources = pickle.loads(data)
    vars(main).update(names)
    for file, lines in sources.items():
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)
    return value
