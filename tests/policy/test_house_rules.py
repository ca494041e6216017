"""House rules: docstrings, names, lengths, unfinished lines, paths, prints and ports."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from .reading import PACKAGE, REPOSITORY, STARRED, expect_none, modules, nodes, package_of, parse, where, write_package

MAX_LINES = 1000
NAMELESS = {"utils", "util", "common", "helpers", "misc"}
PURE = ("plan_", "fit_", "simulate_", "estimate_")

# Assembled from pieces: otherwise this file would break its own rules.
UNFINISHED = re.compile(
    r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK", "MEA" + "SURE", "T" + "BD")) + r")\b"
)
MACHINE_PATHS = tuple(f"/{name}/" for name in ("work", "root", "home"))
FIXED_PORT = re.compile(r"(?<!\d)29_?500(?!\d)")


def read_text(path: Path) -> str | None:
    """The text of a file, or None for a binary file."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def text_files(*places: Path) -> list[Path]:
    """The files at or below these places, without files that tools generate."""
    made = re.compile(r"__pycache__|\..*|.*\.egg-info")
    found = []
    for place in places:
        files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        found += [path for path in files if not any(map(made.fullmatch, path.relative_to(place).parts))]
    return found


def find_lines(root: Path, files: Iterable[Path], pattern: re.Pattern[str]) -> list[str]:
    """Every line of these text files that contains the pattern."""
    found = []
    for path in files:
        for number, line in enumerate((read_text(path) or "").splitlines(), 1):
            if match := pattern.search(line):
                found.append(f"{path.relative_to(root)}:{number}: {match.group()}")
    return found


def parsed(root: Path) -> Iterator[tuple[str, Path, ast.Module]]:
    for name, path in modules(root).items():
        yield name, path, parse(path)


def find_undescribed_modules(root: Path) -> list[str]:
    return [f"{where(root, path, 1)}: no docstring" for _, path, tree in parsed(root) if not ast.get_docstring(tree)]


def find_nameless_files(root: Path) -> list[str]:
    return [
        f"{path.relative_to(root.parent)}: name it after its contents"
        for path in sorted(root.rglob("*"))
        if path.stem.strip("_").lower() in NAMELESS
    ]


def find_nameless_classes(root: Path) -> list[str]:
    return [
        f"{where(root, path, node.lineno)}: class {node.name}: name it with a noun of the domain"
        for _, path, tree in parsed(root)
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Manager", "Handler"))
    ]


def find_long_modules(root: Path) -> list[str]:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules(root).values()}
    return [
        f"{where(root, path, length)}: {length} lines, at most {MAX_LINES} are allowed: split it"
        for path, length in lengths.items()
        if length > MAX_LINES
    ]


def is_stdout(node: ast.AST | None) -> bool:
    return node is not None and ast.unparse(node) in ("sys.stdout", "stdout", "sys.__stdout__")


def find_prints(root: Path) -> list[str]:
    """Every print to stdout outside `cli`; a print needs a `file=` that is not stdout."""
    found = []
    for name, path, tree in parsed(root):
        if package_of(name) == "cli":
            continue
        for node in nodes(tree):
            if not isinstance(node, ast.Call):
                continue
            called = node.func
            if isinstance(called, ast.Name) and called.id == "print":
                files = [keyword.value for keyword in node.keywords if keyword.arg == "file"]
                bad = not files or is_stdout(files[0])
            else:
                bad = isinstance(called, ast.Attribute) and called.attr.startswith("write") and is_stdout(called.value)
            if bad:
                found.append(f"{where(root, path, node.lineno)}: prints to stdout, which only cli may do")
    return found


def find_misplaced_verbs(root: Path) -> list[str]:
    """Every function outside the torch-free half with the name of a pure function."""
    return [
        f"{where(root, path, node.lineno)}: {node.name}: a pure verb outside {', '.join(STARRED)}"
        for name, path, tree in parsed(root)
        if package_of(name) not in STARRED
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(PURE)
    ]


def find_fixed_ports(root: Path) -> list[str]:
    return find_lines(root.parent, text_files(root), FIXED_PORT)


def find_machine_paths(root: Path, files: Iterable[Path]) -> list[str]:
    """Every line of these files with a machine-specific absolute path."""
    return find_lines(root, files, re.compile("|".join(map(re.escape, MACHINE_PATHS))))


def tracked_files(root: Path) -> list[Path]:
    """The existing files that git tracks; skips the test without git or its repository."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"not a git repository: {done.stderr.strip()}")
    return [path for name in done.stdout.split("\0") if name and (path := root / name).is_file()]


RULES = (
    find_undescribed_modules, find_nameless_files, find_nameless_classes, find_long_modules, find_prints,
    find_misplaced_verbs, find_fixed_ports,
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_the_package_follows_the_rule(rule: Callable[[Path], list[str]]) -> None:
    expect_none(rule(PACKAGE))


@pytest.mark.parametrize(
    ("rule", "files", "places"),
    [
        (find_undescribed_modules, {"__init__.py": '"""All."""', "a.py": '"""It."""', "b.py": "x = 1"}, ["b.py:1"]),
        (find_nameless_files, {"cli/_helpers.py": "", "utilities.py": "", "commons.py": ""}, ["cli/_helpers.py"]),
        (
            find_nameless_classes,
            {"a.py": "class Bucket: ...\nclass BucketManager: ...\ndef f():\n    class _EventHandler: ..."},
            ["a.py:2", "a.py:4"],
        ),
        (find_long_modules, {"a.py": "x = 1\n" * MAX_LINES, "b.py": "x = 1\n" * (MAX_LINES + 1)}, ["b.py:1001"]),
        (
            find_prints,
            {
                "cli/main.py": "print('fine')",
                "__main__.py": "print('fine')",
                "measure/a.py": "import sys\nprint('a', file=sys.stderr)\nprint('b')\nprint('c', file=sys.stdout)",
                "units.py": "import sys\ndef f(console):\n    sys.stdout.write('d')\n    console.print('fine')",
            },
            ["measure/a.py:3", "measure/a.py:4", "units.py:3"],
        ),
        (
            find_misplaced_verbs,
            {"plan.py": "def fit_it(): ...", "measure/a.py": "def refit(): ...\nclass A:\n    def plan_s(self): ..."},
            ["measure/a.py:3"],
        ),
        (
            find_fixed_ports,
            {"a.py": "port = 29500\n", "b.py": "url = 'tcp://127.0.0.1:29500'\n", "c.py": "port = 129500 + 2950\n"},
            ["a.py:1", "b.py:1"],
        ),
    ],
)  # fmt: skip
def test_a_violation_is_found(
    tmp_path: Path, rule: Callable[[Path], list[str]], files: dict[str, str], places: list[str]
) -> None:
    found = rule(write_package(tmp_path, files))
    assert [line.split(": ")[0] for line in found] == [f"paceline/{place}" for place in places]


def test_nothing_is_left_unfinished() -> None:
    places = [REPOSITORY / name for name in ("src", "tests", "docs", "README.md")]
    files = text_files(*(place for place in places if place.exists()))
    assert PACKAGE / "cli" / "main.py" in files and Path(__file__).resolve() in files
    expect_none(find_lines(REPOSITORY, files, UNFINISHED))


def test_an_unfinished_line_is_found(tmp_path: Path) -> None:
    word = "TO" + "DO"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(f"fine\n<!-- {word}: more -->\n{word}S {word.lower()} tmp{word}\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe" + word.encode())
    assert find_lines(tmp_path, text_files(tmp_path), UNFINISHED) == [f"docs/a.md:2: {word}"]


def test_no_path_of_a_machine_in_tracked_files() -> None:
    expect_none(find_machine_paths(REPOSITORY, tracked_files(REPOSITORY)))


def test_a_path_of_a_machine_is_found(tmp_path: Path) -> None:
    folder = MACHINE_PATHS[0]
    (tmp_path / "a.md").write_text(f"fine\nsee {folder}x\n")
    (tmp_path / "b.py").write_text(f"flag = '-I{folder}include'\n")
    (tmp_path / "c.py").write_text("a = '/tmp/x'\n")
    assert find_machine_paths(tmp_path, text_files(tmp_path)) == [f"a.md:2: {folder}", f"b.py:1: {folder}"]
