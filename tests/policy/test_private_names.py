"""Private torch names are used only in `torch_internals.py`, or listed there."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from paceline.torch_internals import MEMBERS, OPTIONAL

from .reading import PACKAGE, expect_none, imports, modules, nodes, parse, where, write_package

HOME = "torch_internals"
LISTED = {path.rpartition(".")[2] for path in MEMBERS} | set(OPTIONAL)
# Operators on lists of tensors, which torch's optimizers use; they are as stable as public ones.
OPERATORS = "_foreach_"
# Private names of the standard library and of IPython.
OTHERS = {
    "_args_from_interpreter_flags", "_asdict", "_at_fork_reinit", "_bootstrap", "_current_frames", "_DummyThread",
    "_exit", "_exit_function", "_fields", "_getframe", "_inheriting", "_parent_pid", "_replace", "_repr_mimebundle_",
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.startswith(OPERATORS)


@functools.cache
def find_own_names(tree: ast.Module) -> set[str]:
    """The names that a module defines: functions, classes, variables, and attributes of its own objects."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def find_torch_names(tree: ast.Module) -> set[str]:
    """The names in a module that refer to modules or objects of torch."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            for alias in node.names:
                path = f"{module}.{alias.name}" if module else alias.name
                if path.split(".")[0] == "torch" or HOME in path.split(".")[:-1]:
                    found.add(alias.asname or alias.name.split(".")[0])
    return found


@functools.cache
def find_uses(tree: ast.Module) -> list[tuple[int, str, bool]]:
    """Line and name of every private attribute (`a._b` or `getattr(a, "_b")`), and whether it belongs to torch."""
    torchs, found = find_torch_names(tree), []
    for node in nodes(tree):
        if isinstance(node, ast.Attribute):
            name, value = node.attr, node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            if len(node.args) < 2 or not isinstance(node.args[1], ast.Constant):
                continue
            name, value = str(node.args[1].value), node.args[0]
        else:
            continue
        while isinstance(value, ast.Attribute):
            value = value.value
        if is_private(name):
            found.append((node.lineno, name, isinstance(value, ast.Name) and value.id in torchs))
    return found


def find_private_names(root: Path) -> list[str]:
    """Every private name of torch outside `torch_internals.py`: a name that none of our modules defines."""
    trees = {name: (path, parse(path)) for name, path in modules(root).items()}
    own = {name for _, tree in trees.values() for name in find_own_names(tree)}
    found = []
    for module, (path, tree) in trees.items():
        if module == f"{root.name}.{HOME}":
            continue
        for line, target in imports(module, path):
            parts = target.split(".")
            if parts[0] == "torch" and any(map(is_private, parts)):
                found.append(f"{where(root, path, line)}: imports {target}: look it up in {HOME}.py")
        for line, name, is_torchs in find_uses(tree):
            if name not in LISTED and (is_torchs or name not in own | OTHERS):
                found.append(f"{where(root, path, line)}: {name}: look it up in {HOME}.py, or list it there")
    return found


def test_private_names_of_torch_are_in_one_file() -> None:
    expect_none(find_private_names(PACKAGE))


def test_every_listed_name_is_used() -> None:
    trees = [(name, parse(path)) for name, path in modules(PACKAGE).items()]
    texts = {node.value for _, tree in trees for node in nodes(tree) if isinstance(node, ast.Constant)}
    used = {name for module, tree in trees if not module.endswith(HOME) for _, name, _ in find_uses(tree)}
    own = {name for module, tree in trees if not module.endswith(HOME) for name in find_own_names(tree)}
    expect_none(sorted(LISTED - used - own - texts))


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C import _distributed_c10d as c10d",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch\ntorch._C._x()",
        "import torch\ntorch.cuda._sleep(1)",
        "import torch.distributed as dist\ndist._broadcast_coalesced()",
        "from torch.distributed import distributed_c10d\ndistributed_c10d._world",
        "from torch import distributed\ngetattr(distributed.distributed_c10d, '_abort')",
        "def f(group):\n    group._get_world()",
        "def f(group):\n    return getattr(group, '_get_world', None)",
        "import torch\nclass A:\n    def _mine(self): ...\ntorch.nn._mine()",
        "from paceline.torch_internals import c10d\nc10d._x",
    ],
)
def test_a_private_name_is_found(tmp_path: Path, source: str) -> None:
    root = write_package(tmp_path, {"runtime/a.py": source, "torch_internals.py": ""})
    found = find_private_names(root)
    assert found and all(line.startswith("paceline/runtime/a.py:") and HOME in line for line in found)


def test_our_own_listed_and_operator_names_pass(tmp_path: Path) -> None:
    files = {
        "torch_internals.py": "import torch\nsleep = torch.cuda._sleep",
        "runtime/a.py": "import torch\ntorch._foreach_add_([], 1)\ntorch.ones(1)._version\ntorch.__version__",
        "runtime/b.py": "import os\nclass A:\n    def _mine(self): ...\nA()._mine()\nos._exit(0)",
    }
    assert find_private_names(write_package(tmp_path, files)) == []
