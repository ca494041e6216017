"""Functions and classes defined in a session work in another process with an empty `__main__`."""

from __future__ import annotations

import importlib.util
import linecache
import pickle
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline import ConfigError
from paceline.runtime.ranks import by_value


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """`session(source)` runs a cell in a `__main__` without a file and returns its namespace."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    cells: list[str] = []

    def enter(source: str) -> dict[str, Any]:
        cells.append(f"cell-{len(cells)}")
        linecache.cache[cells[-1]] = (len(source), None, source.splitlines(keepends=True), cells[-1])
        exec(compile(source, cells[-1], "exec", dont_inherit=True), main.__dict__)
        return main.__dict__

    yield enter
    for cell in cells:
        linecache.cache.pop(cell, None)


def travel(value: Any) -> Any:
    """The value as another process unpickles it, without access to the session."""
    data = by_value.dumps(value)
    sys.modules["__main__"] = types.ModuleType("__main__")
    linecache.cache.pop("cell-0", None)
    return pickle.loads(data)


def test_a_program_in_a_file_is_not_interactive(session):
    assert by_value.is_interactive()
    sys.modules["__main__"].__file__ = "program.py"
    assert not by_value.is_interactive()


def test_a_function_brings_only_the_globals_it_uses(session):
    names = session("import math\nk = 3\ndef g(x): return k * x\ndef f(x): return g(math.sqrt(x))")
    names["secret"] = sys.stdout  # cannot be pickled, and does not need to be
    f = travel(names["f"])
    assert f(4.0) == 6.0
    assert {"g", "k", "math"} <= set(f.__globals__) and "secret" not in f.__globals__
    assert vars(sys.modules["__main__"])["f"] is f  # so that `f` can be pickled by name there


def test_defaults_closures_recursion_and_wrappers_survive(session):
    names = session(
        "import functools\n"
        "def count_down(n, *, step=1): return [n, *count_down(n - step, step=step)] if n > 0 else []\n"
        "def make(k):\n    def inner(n): return k if n == 0 else inner(n - 1) + 1\n    return inner\n"
        "def double(f):\n    @functools.wraps(f)\n    def call(*a): return 2 * f(*a)\n    return call\n"
        "@double\ndef three(): return 3\n"
        "inner = make(10)\nsquare = lambda x: x * x\n"
    )
    count_down, inner, three, square = travel([names[n] for n in ("count_down", "inner", "three", "square")])
    assert count_down(4, step=2) == [4, 2] and inner(5) == 15 and three() == 6 and square(3) == 9
    assert three.__name__ == "three"


def test_a_function_of_a_library_that_wraps_ours_keeps_its_own_globals(session):
    names = session("import torch\n@torch.no_grad()\ndef f(x): return (x * 2).requires_grad")
    import torch

    assert travel(names["f"])(torch.ones(1, requires_grad=True)) is False


def test_classes_arrive_with_bases_methods_and_later_changes(session):
    session("import torch\nfrom dataclasses import dataclass\nscale = 2.0\n")
    session(
        "class Base(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.ones(2))\n"
        "class Model(Base):\n    class Inner: pass\n    def forward(self, x): return self.help(x) * scale\n"
    )
    names = session("def add(self, x): return x + self.w\nModel.help = add\n@dataclass\nclass Point:\n    x: int = 1\n")
    import torch

    model, point, inner = travel((names["Model"](), names["Point"](5), names["Model"].Inner))
    assert model(torch.ones(2)).tolist() == [4.0, 4.0]
    assert point.x == 5 and type(point)() == type(point)(1)
    assert inner is type(model).Inner and type(model).__module__ == "__main__"
    assert type(model) is vars(sys.modules["__main__"])["Model"]  # an instance can be sent back by name


def test_a_class_that_refers_to_itself_and_to_a_function_that_uses_it(session):
    names = session(
        "def make(): return Node(None)\n"
        "class Node:\n    def __init__(self, n): self.n = n\n    def grow(self): return Node(make())\n"
    )
    node = travel(names["Node"](1)).grow()
    assert type(node.n) is type(node)


def test_tracebacks_show_the_lines_of_cells(session):
    import traceback

    f = travel(session("def f():\n    return 1 / 0  # here\n")["f"])
    try:
        f()
    except ZeroDivisionError as error:
        assert "return 1 / 0  # here" in "".join(traceback.format_exception(error))


def test_classes_defined_inside_blocks_arrive_too(session):
    names = session(
        "def make():\n    class Local:\n        x = 1\n    return Local\n"
        "local = make()\nmade = type('Made', (), {'x': 2})\n"
    )
    assert [kind().x for kind in travel((names["local"], names["made"]))] == [1, 2]


def test_without_cloudpickle_only_importable_functions_are_sent(session, monkeypatch):
    names = session("def f(): return 1\nclass Net: pass\ndef make(): return lambda: 2\ninner = make()\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert travel((textwrap.dedent, ["plain"])) == (textwrap.dedent, ["plain"])
    sys.modules["__main__"].__dict__.update(names)
    for value in (names["f"], [names["Net"]()], names["inner"]):
        with pytest.raises(ConfigError, match=r"paceline\[notebook\]") as caught:
            by_value.dumps(value)
        assert caught.value.code == "missing-extra"
