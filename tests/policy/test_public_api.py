"""The public names: documented one by one, all that examples use, and the README's program is one that runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).parents[2]
API = (ROOT / "docs" / "api.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def find_used(source: str) -> set[str]:
    """The names that a program takes from the package: `paceline.NAME`, and imports of it."""
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
    assert example.endswith(blocks[0]) and blocks[0].startswith("import torch")


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) < 100
