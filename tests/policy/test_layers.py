"""Imports point down, siblings do not import each other, and every module belongs to a known package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .reading import PACKAGE, expect_none, imports, modules, package_of, where, write_package

# From top to bottom; packages of one level are siblings. docs/architecture.md shows the same order.
LEVELS = (
    ("cli", "autoload"),  # `cli` includes `__main__`; torch calls `autoload`
    ("integrations",),
    ("studies",),
    ("verbs",),
    ("measure",),
    ("training",),
    ("parallel", "workloads"),
    ("runtime",),
    ("transport", "report"),
    ("predict", "torch_internals"),
    ("strategy",),
    ("records", "plan"),
    ("machine",),
    ("options",),
    ("units",),
    ("errors",),
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}


def find_layer_violations(root: Path) -> list[str]:
    """Every import that points up or sideways, and every module outside the known packages.

    Imports in functions and under TYPE_CHECKING count as well. `paceline/__init__.py` is exempt, because its lazy
    names reach everything, and so is `predict`, which is also a verb. In return, only `cli` may import names from
    `paceline` itself; the others may import only `__version__`, which is a literal.
    """
    found = []
    for name, path in modules(root).items():
        here = package_of(name)
        if name in (root.name, f"{root.name}.predict"):
            continue
        if here not in LEVEL_OF:
            found.append(
                f"{where(root, path, 1)}: '{here}' is not a known package: move the module into one, or add a line "
                "to docs/architecture.md and to LEVELS in tests/policy/test_layers.py"
            )
            continue
        for line, target in imports(name, path):
            if target.split(".")[0] != root.name:
                continue
            there = package_of(target)
            place = f"{where(root, path, line)}: {here} imports {target}"
            if there not in LEVEL_OF:
                if here != "cli" and target != f"{root.name}.__version__":
                    found.append(f"{place}: only cli may import paceline's public names")
            elif here != there and LEVEL_OF[there] <= LEVEL_OF[here]:
                way = "sideways" if LEVEL_OF[there] == LEVEL_OF[here] else "up"
                found.append(f"{place}: that points {way}")
    return found


def test_imports_point_down() -> None:
    expect_none(find_layer_violations(PACKAGE))


def test_the_rule_reads_the_whole_package() -> None:
    names = modules(PACKAGE)
    assert {"paceline", "paceline.__main__", "paceline.errors", "paceline.cli.main", "paceline.records"} <= set(names)
    targets = [target for name, path in names.items() for _, target in imports(name, path)]
    assert sum(target.startswith("paceline.") for target in targets) > 20


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("runtime/a.py", "from paceline.measure.engine import Cell", "paceline/runtime/a.py:1: .* points up"),
        ("runtime/a.py", "import paceline.cli.main as m", "points up"),
        ("runtime/a.py", "from paceline import verbs", "points up"),
        ("verbs/a.py", "from paceline.studies import scale", "points up"),
        ("transport/a.py", "from paceline.report import tables", "points sideways"),
        ("workloads/a.py", "import paceline.parallel", "points sideways"),
        ("predict/a.py", "from ..report import tables", "points up"),
        ("records/__init__.py", "from ..plan import Plan", "points sideways"),
        ("records/__init__.py", "from .. import plan", "points sideways"),
        ("plan.py", "from .records import Run", "points sideways"),
        ("units.py", "from paceline import machine", "points up"),
        ("errors.py", "def f():\n    from paceline.units import GB", "paceline/errors.py:2: .* points up"),
        ("errors.py", "if TYPE_CHECKING:\n    from paceline.units import GB", "points up"),
        ("errors.py", "import importlib\nimportlib.import_module('paceline.units')", "points up"),
        ("runtime/a.py", "from paceline import init", "public names"),
        ("runtime/a.py", "import paceline", "public names"),
        ("runtime/a.py", "from paceline import *", "public names"),
        ("cellar/a.py", "", "'cellar' is not a known package.*docs/architecture.md"),
        ("attic.py", "", "'attic' is not a known package.*docs/architecture.md"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, source: str, complaint: str) -> None:
    root = write_package(tmp_path, {file: source})
    found = find_layer_violations(root)
    assert found and all(re.search(complaint, line) for line in found), found


def test_right_imports_pass(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from paceline.cli.main import main",
        "__main__.py": "from paceline.cli.main import main",
        "cli/main.py": "import paceline\nfrom paceline import verbs, __version__\nfrom . import bench",
        "cli/bench.py": "from paceline.measure.engine import Cell",
        "measure/engine.py": "import os.path, torch\nfrom .settings import S\nfrom ..runtime import world",
        "studies/scale.py": "from paceline.verbs import jobs\nfrom .study import run",
        "measure/bench_settings.py": "from paceline import machine\nfrom paceline.records import Run",
        "units.py": "import pacelines\nfrom paceline.errors import ConfigError",
    }
    assert find_layer_violations(write_package(tmp_path, files)) == []
