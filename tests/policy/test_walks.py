"""The functions named in the documents' walks through the code exist there."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from paceline.parallel import backward
from paceline.predict import simulate

from .reading import PACKAGE, REPOSITORY, expect_none, parse

DDP = REPOSITORY / "docs" / "ddp.md"
ARCHITECTURE = REPOSITORY / "docs" / "architecture.md"
# The modules of `parallel` that docs/ddp.md walks through: `backward.BucketedReducer.begin`.
MODULES = ("backward", "control", "ddp", "flat", "replicas")


def find_names(path: Path) -> set[str]:
    """The qualified names of the functions and classes in a file."""
    names: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                names.add(prefix + child.name)
                inner = f"{prefix}{child.name}."
            visit(child, inner)

    visit(parse(path), "")
    return names


def find_missing(file: str, named: list[str]) -> list[str]:
    """The names that this module does not define."""
    path = PACKAGE / file
    known = find_names(path) if path.is_file() else set()
    return [f"{file}: {name}" for name in named if name not in known]


def read_walks() -> dict[str, list[str]]:
    """The walks of docs/architecture.md: each names a file and then functions in it."""
    text = ARCHITECTURE.read_text().split("## Three walks")[1].split("\n## ")[0]
    walks = {}
    for walk in text.split("\n**")[1:]:
        heading, _, steps = walk.partition("\n")
        walks[re.findall(r"`([\w/]+\.py)`", heading)[0]] = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", steps)
    return walks


def test_the_functions_of_the_three_walks_exist():
    walks = read_walks()
    assert len(walks) == 3 and all(walks.values())
    expect_none([missing for file, named in walks.items() for missing in find_missing(file, named)])


def test_the_functions_of_the_walk_through_a_backward_pass_exist():
    named = re.findall(rf"`({'|'.join(MODULES)})\.([A-Za-z_][\w.]*)`", DDP.read_text())
    named = [(module, name) for module, name in named if name != "py"]
    assert named
    expect_none([missing for module, name in named for missing in find_missing(f"parallel/{module}.py", [name])])


@pytest.mark.parametrize("name", ["GradientSync.no_such_function", "after_forward", "NoSuchClass"])
def test_a_missing_function_is_found(name):
    assert find_missing("parallel/backward.py", ["GradientSync", name]) == [f"parallel/backward.py: {name}"]


def find_fields_of_others(source: str) -> list[str]:
    """Assignments to a field of another object, such as `self.reducer.failure = ...`."""
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


def test_the_step_logic_and_the_reducer_do_not_change_each_other():
    changed = find_fields_of_others(inspect.getsource(backward))
    assert [name for name in changed if "reducer" in name] == []
    assert "GradientSync" not in inspect.getsource(backward.BucketedReducer)


def test_a_changed_field_is_found():
    source = "self.reducer.failure = None\nself.a, self.reducer.failed_in = 1, 'x'\nself.reducer = 3\nx = self.a.b"
    assert find_fields_of_others(source) == ["self.reducer.failure", "self.reducer.failed_in"]


def test_the_model_of_a_step_is_stated_in_the_same_words_in_the_document_and_in_the_simulator():
    stated = (simulate.__doc__ or "").split("\n\n")[1].split()
    document = (REPOSITORY / "docs" / "performance-model.md").read_text()
    assert len(stated) > 50 and stated in [paragraph.split() for paragraph in document.split("\n\n")]
