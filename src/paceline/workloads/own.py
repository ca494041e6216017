"""A user's own model, named as FILE.py:FUNCTION. Other models are in `registry`.

Checking reads the file and runs nothing of it; building imports it, as Python would a script in its folder.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import symtable
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError, suggest
from paceline.workloads.data import DataForm

if TYPE_CHECKING:
    from torch import nn

_GIVE = "give the name of a function in it that returns the module"


def is_own(name: str) -> bool:
    """Whether the name of a model is that of a user's file, with or without a function in it."""
    return name.rpartition(":")[0].endswith(".py") or name.endswith(".py")


def check_own(name: str) -> None:
    """Refuse a file that is not there or not Python, and a name that it does not define."""
    path, function = _split(name)
    try:
        text = path.read_text(encoding="utf-8")
        symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    except OSError as error:
        raise ConfigError(f"model file {path} cannot be read: {error.strerror or error}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"model file {path} is not Python: {error}") from error
    names = [symbol.get_name() for symbol in symbols if symbol.is_assigned()]
    # What a star brings, only running would show.
    if function not in names and not re.search(r"import\s*\*", text):
        raise ConfigError(f"model file {path} defines no {function}: {suggest(function, names)}{_GIVE}")


def _split(name: str) -> tuple[Path, str]:
    file, _, function = name.rpartition(":")
    if not file or not function:
        raise ConfigError(f"model {name!r} names no function: write FILE.py:FUNCTION, such as {name.rstrip(':')}:build")
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"model file {path} does not exist: give the path of a Python file, from {Path.cwd()}")
    return path, function


def build_own(name: str, form: DataForm) -> nn.Module:
    """Call the user's function, with the form of the data if it takes one argument."""
    from torch import nn

    path, function = _split(name)
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # the file may import its neighbours, also from inside the function
    try:
        module = _call(name, _load_function(path, function), form)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model {name} raised {type(error).__name__}: {error}") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model {name} returned a {type(module).__name__}: it must return a torch.nn.Module")
    return module


def _load_function(path: Path, function: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location(f"paceline_own_{path.stem}", path.resolve())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles look for their module there.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"model file {path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        what = f"{function} of type {type(found).__name__}" if hasattr(module, function) else f"no {function}"
        raise ConfigError(f"model file {path} defines {what}: {suggest(function, vars(module))}{_GIVE}")
    return found  # type: ignore[no-any-return]


def _call(name: str, function: Callable[..., Any], form: DataForm) -> Any:
    """Hand over the form as the one argument that must be given, or as the one called `form`."""
    found = inspect.signature(function).parameters.values()
    needed = [p for p in found if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1:
        what = f"needs {', '.join(parameter.name for parameter in needed)}"
        raise ConfigError(f"model {name} {what}: it is called with the form of the data, or with nothing")
    for parameter in needed or (p for p in found if p.name == "form"):
        return function(form) if parameter.kind is parameter.POSITIONAL_ONLY else function(**{parameter.name: form})
    return function()
