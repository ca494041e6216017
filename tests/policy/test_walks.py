"""The functions that a walk through the code names exist where it says."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(set(re.findall(r"`([a-z]+(?:\.[A-Za-z_]+)+)`", (ROOT / "docs" / "ddp.md").read_text())))
MODULES = ("backward", "control", "ddp", "reducers", "replicas")
WALK = [name for name in NAMES if name.split(".")[0] in MODULES and not name.endswith(".py")]


def test_the_walk_names_the_step_logic_and_the_reducer():
    assert {name.split(".")[1] for name in WALK} >= {"GradientSync", "BucketedReducer"}


@pytest.mark.parametrize("name", WALK)
def test_every_function_of_the_walk_exists(name):
    module, *path = name.split(".")
    found = importlib.import_module(f"paceline.parallel.{module}")
    for part in path:
        found = getattr(found, part)


def find_fields_of_others(source: str) -> list[str]:
    """Every assignment to a field of a field, such as `self.reducer.failure = ...`."""
    targets = [
        target
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for each in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in (each.elts if isinstance(each, ast.Tuple) else [each])
    ]
    return [
        ast.unparse(target)
        for target in targets
        if isinstance(target, ast.Attribute) and re.match(r"self\.\w+\.", ast.unparse(target))
    ]


def test_the_step_logic_changes_no_field_of_the_reducer_and_the_reducers_do_not_know_it():
    parallel = ROOT / "src" / "paceline" / "parallel"
    changed = find_fields_of_others((parallel / "backward.py").read_text())
    assert [name for name in changed if "reducer" in name] == []
    reducer = inspect.getsource(importlib.import_module("paceline.parallel.backward").BucketedReducer)
    assert "GradientSync" not in reducer + (parallel / "reducers.py").read_text()


def test_a_changed_field_is_found():
    source = "self.reducer.failure = None\nself.a, self.reducer.failed_in = 1, 'x'\nself.reducer = 3\nx = self.a.b"
    assert find_fields_of_others(source) == ["self.reducer.failure", "self.reducer.failed_in"]
