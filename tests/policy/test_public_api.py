"""Every public name is documented, examples use only public names, and the README's program is a tested example."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.report.result import _CLASSES
from paceline.training.train_settings import NAMES
from paceline.verbs import predict as verbs

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "api.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def find_used(source: str) -> set[str]:
    """The names that a program uses from the package: `paceline.NAME`, and imports."""
    used = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "paceline":
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "paceline":
            used |= {".".join([*node.module.split(".")[1:], alias.name]) for alias in node.names}
        elif isinstance(node, ast.Import):
            used |= {alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("paceline.")}
    return used


@pytest.mark.parametrize("name", sorted(set(paceline.__all__) - {"__version__"}))
def test_every_public_name_is_documented_with_an_example(name):
    assert re.search(rf"^### .*`{name}\b", API, re.MULTILINE), f"docs/api.md has no heading for {name}"
    section = re.split(rf"^### .*`{name}\b", API, maxsplit=1, flags=re.MULTILINE)[1].split("\n### ")[0]
    assert name in "".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)), f"no example of {name}"


def test_the_documented_names_exist():
    headings = re.findall(r"^### (.*)$", API, re.MULTILINE)
    names = {name.split(".")[0] for heading in headings for name in re.findall(r"`([A-Za-z_]+)", heading)}
    assert names and names <= set(paceline.__all__)


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", API, re.DOTALL))
def test_examples_of_the_api_parse_and_use_public_names(block):
    assert find_used(block) <= set(paceline.__all__)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_import_public_names_only(path):
    assert find_used(path.read_text()) <= set(paceline.__all__)


def test_a_private_name_is_found():
    assert find_used("import paceline\npaceline.runtime.launch") == {"runtime"}
    assert find_used("from paceline.plan import Plan") == {"plan.Plan"}


def test_the_program_of_the_readme_is_the_example_that_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    example = (ROOT / "examples" / "quick_start.py").read_text()
    lines = iter(line.strip() for line in example.splitlines())
    assert blocks and all(line.strip() in lines for line in blocks[0].splitlines())  # in this order


def find_public(words: str) -> Any:
    """The object with this public name, such as `bench.allreduce`."""
    found = functools.reduce(getattr, words.split("."), paceline)
    return verbs.predict if found is paceline.predict else found  # a callable package


def find_calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """The calls of functions of the package, by dotted name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and re.fullmatch(r"paceline(\.\w+)+", ast.unparse(node.func)):
            yield ast.unparse(node.func).removeprefix("paceline."), node


def check_call(words: str, call: ast.Call) -> None:
    """A TypeError if the function does not take these arguments; the rest must be options of a training job."""
    found = inspect.signature(find_public(words)).bind(*call.args, **{word.arg or "": 0 for word in call.keywords})
    more = {n for n, p in found.signature.parameters.items() if p.kind is p.VAR_KEYWORD and n in ("job", "settings")}
    unknown = {name for group in more for name in found.arguments.get(group, {})} - set(NAMES)
    if unknown:
        raise TypeError(f"{words}: {', '.join(sorted(unknown))}")


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", API, re.DOTALL))
def test_calls_in_the_api_have_arguments_that_exist(block):
    for words, call in find_calls(block):
        check_call(words, call)


def test_an_argument_that_does_not_exist_is_found():
    for source in ("paceline.bench.chunks(rank=2)", "paceline.train('cnn', ranks=2, learning=1)"):
        ((words, call),) = find_calls(source)
        with pytest.raises(TypeError, match=r"rank|learning"):
            check_call(words, call)


def find_unknown_arguments(found: Any) -> list[str]:
    """The arguments that a docstring describes but the function or class does not take."""
    described = (inspect.getdoc(found) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    return sorted(set(re.findall(r"^    (\w+):", described, re.MULTILINE)) - set(inspect.signature(found).parameters))


FUNCTIONS = [name for name in paceline.__all__ if name not in ("__version__", "bench", "scale")]
FUNCTIONS += [f"bench.{name}" for name in ("allreduce", "chunks", "wrappers")]
FUNCTIONS += [f"scale.{name}" for name in ("batch", "ranks", "large_batch", "strategies", "report")]


@pytest.mark.parametrize("words", FUNCTIONS)
def test_every_public_name_has_a_docstring_with_arguments_that_exist(words):
    found = find_public(words)
    assert inspect.getdoc(found) and find_unknown_arguments(found) == []


def test_a_described_argument_that_does_not_exist_is_found():
    def add(first: int) -> None:
        """Adds.

        Args:
            first: One.
            second: Another,
                or none.

        Returns:
            Nothing.
        """

    assert find_unknown_arguments(add) == ["second"]


@pytest.mark.parametrize("row", re.findall(r"^\| `([\w.]+)`[^|]*\| `(\w+)` \| (.*) \|$", API, re.MULTILINE))
def test_calls_return_the_documented_types(row):
    words, name, besides = row
    module = next(home for home in _CLASSES.values() if home.endswith(f".{name}")).rpartition(".")[0]
    kind = getattr(importlib.import_module(f"paceline.{module}"), name)
    said = inspect.signature(find_public(words)).return_annotation
    assert said in ("Any", name) or name in said
    source = "".join(inspect.getsource(base) for base in kind.__mro__ if base is not object)
    for attribute in re.findall(r"`([a-z_]+)`", besides):
        assert hasattr(kind, attribute) or f"self.{attribute}" in source, f"{name} has no {attribute}"


def test_every_kind_of_result_is_documented():
    documented = set(re.findall(r"^\| `[\w.]+`[^|]*\| `(\w+)` \|", API, re.MULTILINE))
    assert {home.split(".")[-1] for home in _CLASSES.values()} - documented == {"CapsResult"}
