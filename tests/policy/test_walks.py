"""The functions that a walk through the code names exist where it says."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(set(re.findall(r"`([a-z]+(?:\.[A-Za-z_]+)+)`", (ROOT / "docs" / "ddp.md").read_text())))
MODULES = ("backward", "control", "ddp", "flat", "replicas")
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


def test_the_step_logic_changes_no_field_of_the_reducer_and_the_reducer_does_not_know_it():
    parallel = ROOT / "src" / "paceline" / "parallel"
    changed = find_fields_of_others((parallel / "backward.py").read_text())
    assert [name for name in changed if "reducer" in name] == []
    reducer = inspect.getsource(importlib.import_module("paceline.parallel.backward").BucketedReducer)
    assert "GradientSync" not in reducer + (parallel / "flat.py").read_text()


def test_a_changed_field_is_found():
    source = "self.reducer.failure = None\nself.a, self.reducer.failed_in = 1, 'x'\nself.reducer = 3\nx = self.a.b"
    assert find_fields_of_others(source) == ["self.reducer.failure", "self.reducer.failed_in"]


# -- the three walks of docs/architecture.md ---------------------------------------------------------------------------

ARCHITECTURE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "src" / "paceline"
REFERENCE = re.compile(r"`([\w/]+\.py):(\d+)` `([\w.]+)`")


def find_lines(path: Path) -> dict[str, int]:
    """Where each function and class begins, by its name in the file."""
    lines: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                lines[prefix + child.name] = child.lineno
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(path.read_text()), "")
    return lines


def update_walks() -> None:
    def renew(match: re.Match[str]) -> str:
        file, _, name = match.groups()
        return f"`{file}:{find_lines(PACKAGE / file).get(name, 0)}` `{name}`"

    ARCHITECTURE.write_text(REFERENCE.sub(renew, ARCHITECTURE.read_text()))


if os.environ.get("PACELINE_UPDATE_WALKS"):
    update_walks()
REFERENCES = REFERENCE.findall(ARCHITECTURE.read_text())


def test_each_of_the_three_walks_stays_in_one_file():
    walks = ARCHITECTURE.read_text().split("## Three walks")[1].split("\n## ")[0].split("\n**")[1:]
    files = [{file for file, _, _ in REFERENCE.findall(walk)} for walk in walks]
    assert files == [{"parallel/backward.py"}, {"measure/engine.py"}, {"predict/simulate.py"}]


@pytest.mark.parametrize(("file", "line", "name"), REFERENCES)
def test_a_reference_names_the_line_of_its_function(file, line, name):
    assert find_lines(PACKAGE / file).get(name) == int(line), "run this test with PACELINE_UPDATE_WALKS=1"
