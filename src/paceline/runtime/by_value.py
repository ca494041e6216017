"""What a person typed into a session, on its way to ranks: functions by their code, classes by their source.

Pickle sends a function as a name to import. Nothing can be imported from a notebook or a prompt, so these are sent
whole, with the globals that they use.
"""

from __future__ import annotations

import ast
import dis
import importlib
import io
import linecache
import marshal
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any

from paceline.errors import ConfigError

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}


def is_interactive() -> bool:
    """Whether this process's program is typed, so that another process cannot import it."""
    return not hasattr(sys.modules["__main__"], "__file__")


def dumps(value: Any) -> bytes:
    """Pickle a value; functions and classes of the session in it by value. `pickle.loads` reads it in a rank."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return pickle.dumps(_Sent(file.getvalue(), pickler.sources))


class _Sent:
    def __init__(self, data: bytes, sources: dict[str, str]) -> None:
        self._content = data, sources

    def __reduce__(self) -> Any:
        return _load, self._content


def _load(data: bytes, sources: dict[str, str]) -> Any:
    """In a rank: a `__main__` of its own for each job, so that what it defines is where it says that it is."""
    sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")
    for file, source in sources.items():
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._main = sys.modules["__main__"].__dict__
        self.sources: dict[str, str] = {}  # of the cells that are needed, for tracebacks

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return NotImplemented if _can_be_imported(value) else self._reduce_function(value)
        if isinstance(value, type):
            return self._reduce_class(value) if value.__module__ == "__main__" else NotImplemented
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        if isinstance(value, types.CellType):
            try:
                return _make_cell, (), (value.cell_contents,), None, None, _fill_cell
            except ValueError:
                return _make_cell, ()
        return NotImplemented

    def _reduce_function(self, function: Any) -> Any:
        code, home = function.__code__, function.__globals__
        self._keep_source(code.co_filename)
        is_ours = home is self._main
        state = {
            "attributes": {
                name: getattr(function, name)
                for name in (
                    "__defaults__",
                    "__kwdefaults__",
                    "__annotations__",
                    "__doc__",
                    "__module__",
                    "__qualname__",
                )
            },
            "dict": function.__dict__,
            "globals": self._find_globals(find_names(code)) if is_ours else {},
            "modules": self._find_modules(code) if is_ours else [],
        }
        where = "__main__" if is_ours else home["__name__"]
        made = marshal.dumps(code), function.__name__, where, function.__closure__
        return _make_function, made, state, None, None, _fill_function

    def _reduce_class(self, kind: type) -> Any:
        outer, _, name = kind.__qualname__.rpartition(".")
        if outer and "<locals>" not in outer:
            parent: Any = types.SimpleNamespace(**self._main)
            for part in outer.split("."):
                parent = getattr(parent, part)
            return getattr, (parent, name)
        file, node = _find_statement(kind)
        self._keep_source(file)
        code = compile(ast.Module([node], []), file, "exec", dont_inherit=True)
        at_once, later = set[str](), set[str]()  # what the statement itself uses, and what its methods do
        for inner, depth in _walk_code(code):
            (at_once if depth < 2 else later).update(_names_in(inner))
        at_once -= {name}
        patches = {
            key: value for key, value in vars(kind).items()
            if isinstance(value, types.FunctionType) and not _is_inside(value.__code__, file, node)
        }  # fmt: skip
        state = {"globals": self._find_globals(later - at_once - {name}), "patches": patches}
        made = name, file, self.sources[file], self._find_globals(at_once)
        return _make_class, made, state, None, None, _fill_class

    def _find_globals(self, names: set[str]) -> dict[str, Any]:
        return {name: self._main[name] for name in sorted(names) if name in self._main}

    def _find_modules(self, code: types.CodeType) -> list[str]:
        """Submodules that are used as attributes of a module, and that importing that module may not import."""
        used = {name for part, _ in _walk_code(code) for name in part.co_names}
        modules = [value.__name__ for value in self._find_globals(used).values() if isinstance(value, types.ModuleType)]
        return sorted(f"{module}.{name}" for module in modules for name in used if f"{module}.{name}" in sys.modules)

    def _keep_source(self, file: str) -> None:
        if (entry := linecache.cache.get(file)) is not None and len(entry) > 2 and entry[1] is None:
            self.sources[file] = "".join(entry[2])


def find_names(code: types.CodeType) -> set[str]:
    """The globals that a code uses, also in functions and classes inside of it."""
    return {name for part, _ in _walk_code(code) for name in _names_in(part)}


def _names_in(code: types.CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname in _GLOBAL}


def _walk_code(code: types.CodeType, depth: int = 0) -> Iterator[tuple[types.CodeType, int]]:
    yield code, depth
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _walk_code(constant, depth + 1)


def _can_be_imported(function: Any) -> bool:
    """Whether pickle's own way, by name, finds this function in another process."""
    if function.__module__ == "__main__":
        return False
    found: Any = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _find_statement(kind: type) -> tuple[str, ast.ClassDef]:
    """The cell that defines a class, and the statement in it."""
    name = kind.__qualname__
    if "<locals>" in name:
        raise ConfigError(f"class {name} is defined inside of a function: define it at the top level of a cell")
    methods = [value for value in vars(kind).values() if isinstance(value, types.FunctionType)]
    homes = {method.__code__.co_filename for method in methods if method.__code__.co_qualname.startswith(f"{name}.")}
    typed = [file for file, entry in linecache.cache.items() if len(entry) > 2 and entry[1] is None]
    for file in sorted(reversed(typed), key=lambda file: file not in homes):
        source = "".join(linecache.cache[file][2])  # type: ignore[misc]
        if f"class {name}" not in source:
            continue
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a file that is not a cell
            continue
        found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        if found:
            return file, found[-1]
    raise ConfigError(f"the source of class {name} is not known here: put it into a file that ranks can import")


def _is_inside(code: types.CodeType, file: str, node: ast.ClassDef) -> bool:
    """Whether a method is part of the statement, or was made by a decorator of it."""
    if code.co_filename != file:
        return code.co_filename.startswith("<")
    return node.lineno <= code.co_firstlineno <= (node.end_lineno or node.lineno)


# -- in the rank ------------------------------------------------------------------------------------------------------


def _make_function(code: bytes, name: str, module: str, closure: Any) -> Any:
    home = sys.modules["__main__"] if module == "__main__" else importlib.import_module(module)
    function = types.FunctionType(marshal.loads(code), home.__dict__, name, None, closure)
    if module == "__main__" and closure is None and name.isidentifier():
        home.__dict__.setdefault(name, function)
    return function


def _fill_function(function: Any, state: dict[str, Any]) -> None:
    for name, value in state["attributes"].items():
        setattr(function, name, value)
    function.__dict__.update(state["dict"])
    for module in state["modules"]:
        importlib.import_module(module)
    function.__globals__.update(state["globals"])


def _make_cell() -> Any:
    return types.CellType()


def _fill_cell(cell: Any, content: tuple[Any]) -> None:
    (cell.cell_contents,) = content


def _make_class(name: str, file: str, source: str, names: dict[str, Any]) -> Any:
    namespace = sys.modules["__main__"].__dict__
    namespace.update(names)
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    exec(compile(ast.Module([nodes[-1]], []), file, "exec", dont_inherit=True), namespace)
    return namespace[name]


def _fill_class(kind: Any, state: dict[str, Any]) -> None:
    sys.modules["__main__"].__dict__.update(state["globals"])
    for name, value in state["patches"].items():
        setattr(kind, name, value)
