"""Helpers for the policy tests: the modules of a package, their imports, and Python without torch."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "src" / "paceline"

# The half of the package that never imports torch.
STARRED = ("plan", "records", "predict", "report", "units", "errors", "machine", "options")

# torch is found but cannot be loaded. Not an ImportError, which `except ImportError` would hide.
_BLOCK_TORCH = """
import importlib.machinery, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            return importlib.machinery.ModuleSpec(name, self)
        return None

    def create_module(self, spec):
        raise RuntimeError("policy: " + spec.name + " was imported")

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, NoTorch())
"""


def load_script(path: Path) -> Any:
    """A script that is not part of a package, as a module."""
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_package(folder: Path, files: dict[str, str]) -> Path:
    """Write a fake package `paceline` from {path: source}, with an `__init__` in every folder."""
    root = folder / "paceline"
    for path, source in {"__init__.py": "", **files}.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if not (file.parent / "__init__.py").exists():
            (file.parent / "__init__.py").write_text("")
        file.write_text(source)
    return root


def modules(root: Path) -> dict[str, Path]:
    """The modules of the package at `root`, by dotted name."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def package_of(module: str) -> str:
    """The second part of a module's name; `__main__` belongs to `cli`, and "" is `paceline` itself."""
    name = [*module.split("."), ""][1]
    return "cli" if name == "__main__" else name


def where(root: Path, path: Path, line: int) -> str:
    return f"{path.relative_to(root.parent)}:{line}"


@functools.cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once for all rules."""
    return _parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a tree, cached because `ast.walk` takes longer than the rules."""
    return tuple(ast.walk(tree))


def imports(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import in a module, including those in functions and under TYPE_CHECKING.

    `from a import b` gives `a.b`, since b may be a module. Imports by a literal name (`import_module("a")`) count.
    """
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in nodes(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, base if a.name == "*" else f"{base}.{a.name}") for a in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def expect_none(found: list[str]) -> None:
    """Fail with all findings, one per line."""
    assert not found, "\n".join([f"{len(found)} found:", *found])


def run_python(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in a new process, optionally with the package below `path` instead of the installed one."""
    colored = ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")  # typer prints escape sequences if these are set
    environment = {name: value for name, value in os.environ.items() if name not in colored}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=100, env=environment, check=False
    )


def run_without_torch(source: str, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the source in a Python in which `import torch` raises."""
    return run_python("-c", _BLOCK_TORCH + source, *arguments, path=path)
