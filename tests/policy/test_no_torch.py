"""The torch-free half never imports torch, directly or through another module."""

from __future__ import annotations

from pathlib import Path

import pytest

from .reading import (
    PACKAGE,
    STARRED,
    expect_none,
    imports,
    modules,
    package_of,
    run_without_torch,
    where,
    write_package,
)

# Modules outside the torch-free half that a command loads before it knows that it needs torch.
LATE = (
    "paceline.cli.main",
    "paceline.measure.bench_settings",
    "paceline.runtime.ranks.place",
    "paceline.runtime.ranks.launch",
    "paceline.runtime.ranks.worker",
    "paceline.studies.fault_trials",
    "paceline.studies.scale",
    "paceline.training.train_settings",
    "paceline.workloads.registry",
    "paceline.workloads.data",
)

_IMPORT_ALL = """
import importlib
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
"""


def starred_modules(root: Path) -> list[str]:
    return [name for name in modules(root) if package_of(name) in STARRED]


def find_torch_imports(root: Path) -> list[str]:
    """Every import of torch in a module that the torch-free half reaches, including imports for types."""
    known = modules(root)
    reached_from = dict.fromkeys(starred_modules(root), "")
    waiting = list(reached_from)
    found = []
    while waiting:
        name = waiting.pop(0)
        for line, target in imports(name, known[name]):
            parts = target.split(".")
            if parts[0] == "torch":
                via = f", reached from {reached_from[name]}" if reached_from[name] else ""
                found.append(f"{where(root, known[name], line)}: imports {target}{via}")
            # Importing a module runs the packages above it; `paceline` itself is lazy (test_silent_import.py).
            for length in range(2, len(parts) + 1):
                module = ".".join(parts[:length])
                if module in known and module not in reached_from:
                    reached_from[module] = reached_from[name] or name
                    waiting.append(module)
    return found


def find_failed_imports(names: list[str], path: Path | None = None) -> list[str]:
    """The modules that cannot be imported if importing torch raises."""
    done = run_without_torch(_IMPORT_ALL, *names, path=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_starred_half_never_mentions_torch() -> None:
    assert {package_of(name) for name in starred_modules(PACKAGE)} >= {
        "records",
        "predict",
        "report",
        "units",
        "errors",
    }
    expect_none(find_torch_imports(PACKAGE))


def test_starred_half_and_the_way_to_the_verbs_load_without_torch() -> None:
    expect_none(find_failed_imports([*starred_modules(PACKAGE), *LATE]))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("records/store.py", "import torch"),
        ("plan.py", "from torch.distributed import all_reduce"),
        ("predict/costs.py", "def f():\n    import torch.nn as nn"),
        ("report/__init__.py", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("units.py", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
        ("machine.py", "import importlib\ntorch = importlib.import_module('torch')"),
    ],
)
def test_torch_in_the_starred_half_is_found(tmp_path: Path, file: str, source: str) -> None:
    root = write_package(tmp_path, {file: source})
    (found,) = find_torch_imports(root)
    assert found.startswith(f"paceline/{file}:") and "imports torch" in found


def test_torch_behind_another_package_is_found(tmp_path: Path) -> None:
    files = {
        "predict/costs.py": "def f():\n    from paceline.runtime.ranks.place import Place",
        "runtime/__init__.py": "from paceline.runtime.ranks import world",
        "runtime/ranks/place.py": "",
        "runtime/ranks/world.py": "\nimport torch",
        "measure/engine.py": "import torch",
    }
    assert find_torch_imports(write_package(tmp_path, files)) == [
        "paceline/runtime/ranks/world.py:2: imports torch, reached from paceline.predict.costs"
    ]


def test_a_module_that_loads_torch_is_found(tmp_path: Path) -> None:
    files = {
        "units.py": "",
        "errors.py": "try:\n    import torch\nexcept ImportError:\n    pass",
        "records/store.py": "from paceline.runtime.ranks import world",
        "runtime/ranks/world.py": "name = 'torch.distributed'\nimport importlib\nimportlib.import_module(name)",
        "plan.py": "def f():\n    import torch",
        "machine.py": "import importlib.util\nassert importlib.util.find_spec('torch')",
    }
    root = write_package(tmp_path, files)
    failed = find_failed_imports(starred_modules(root), path=tmp_path)
    assert [line.split(":")[0] for line in failed] == ["paceline.errors", "paceline.records.store"]
    assert all("torch was imported" in line for line in failed)
