"""The house rules that a program can check: docstrings, names, lengths, stray words, paths, prints and ports."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from .reading import PACKAGE, REPOSITORY, STARRED, expect_none, modules, nodes, parse, room, where, write_package

MAX_LINES = 1000
NAMELESS = {"utils", "util", "common", "helpers", "misc"}
PURE = ("plan_", "fit_", "simulate_", "estimate_")

# Built from pieces, so that this file does not break its own rules.
UNFINISHED = re.compile(
    r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK", "MEA" + "SURE", "T" + "BD")) + r")\b"
)
MACHINE_PATHS = tuple(f"/{name}/" for name in ("work", "root", "home"))
FIXED_PORT = re.compile(r"(?<!\d)29_?500(?!\d)")


def read_text(path: Path) -> str | None:
    """The text of a file, or None where it is not text."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def text_files(*places: Path) -> list[Path]:
    """The files at or below these places, without what tools make there."""
    made = re.compile(r"__pycache__|\..*|.*\.egg-info")
    found = []
    for place in places:
        files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        found += [path for path in files if not any(map(made.fullmatch, path.relative_to(place).parts))]
    return found


def find_lines(root: Path, files: Iterable[Path], pattern: re.Pattern[str]) -> list[str]:
    """Every line of these files in which the pattern occurs, binary files left out."""
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
    """Every module or folder that is named for nothing in particular."""
    return [
        f"{path.relative_to(root.parent)}: name it for what is in it"
        for path in sorted(root.rglob("*"))
        if path.stem.strip("_").lower() in NAMELESS
    ]


def find_nameless_classes(root: Path) -> list[str]:
    return [
        f"{where(root, path, node.lineno)}: class {node.name}: a class is a noun of the domain"
        for _, path, tree in parsed(root)
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Manager", "Handler"))
    ]


def find_long_modules(root: Path) -> list[str]:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules(root).values()}
    return [
        f"{where(root, path, length)}: {length} lines, {MAX_LINES} are allowed: split it"
        for path, length in lengths.items()
        if length > MAX_LINES
    ]


def is_stdout(node: ast.AST | None) -> bool:
    return node is not None and ast.unparse(node) in ("sys.stdout", "stdout", "sys.__stdout__")


def find_prints(root: Path) -> list[str]:
    """Every print to stdout outside `cli`; a print needs a `file=` that is not stdout."""
    found = []
    for name, path, tree in parsed(root):
        if room(name) == "cli":
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
                found.append(f"{where(root, path, node.lineno)}: prints to stdout, which belongs to cli")
    return found


def find_misplaced_verbs(root: Path) -> list[str]:
    """Every function whose name says that it is pure and that does not live in the starred half."""
    return [
        f"{where(root, path, node.lineno)}: {node.name}: a pure verb outside {', '.join(STARRED)}"
        for name, path, tree in parsed(root)
        if room(name) not in STARRED
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith(PURE)
    ]


def find_machine_paths(root: Path, files: Iterable[Path]) -> list[str]:
    """Every line of these files that holds an absolute path of some machine."""
    return find_lines(root, files, re.compile("|".join(map(re.escape, MACHINE_PATHS))))


def tracked_files(root: Path) -> list[Path]:
    """The files that git tracks and that are there; skips the test without git or its repository."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"not a git repository: {done.stderr.strip()}")
    return [path for name in done.stdout.split("\0") if name and (path := root / name).is_file()]


def test_every_module_says_what_it_is() -> None:
    expect_none(find_undescribed_modules(PACKAGE))


def test_a_module_without_a_docstring_is_found(tmp_path: Path) -> None:
    files = {"__init__.py": '"""All of it."""', "a.py": '"""What it is."""', "b.py": "x = 1", "c.py": '"""   """'}
    found = find_undescribed_modules(write_package(tmp_path, files))
    assert [line.split(":")[0] for line in found] == ["paceline/b.py", "paceline/c.py"]


def test_no_nameless_files() -> None:
    expect_none(find_nameless_files(PACKAGE))


@pytest.mark.parametrize("file", ["utils.py", "records/util.py", "cli/_helpers.py", "common/a.py", "misc.py"])
def test_a_nameless_file_is_found(tmp_path: Path, file: str) -> None:
    root = write_package(tmp_path, {file: "", "utilities_of_loss.py": "", "commons.py": ""})
    assert len(find_nameless_files(root)) == 1


def test_no_nameless_classes() -> None:
    expect_none(find_nameless_classes(PACKAGE))


def test_a_nameless_class_is_found(tmp_path: Path) -> None:
    source = "class Bucket: ...\nclass BucketManager: ...\ndef f():\n    class _EventHandler: ..."
    found = find_nameless_classes(write_package(tmp_path, {"a.py": source}))
    assert [line.split(": ")[0] for line in found] == ["paceline/a.py:2", "paceline/a.py:4"]


def test_no_module_is_too_long() -> None:
    expect_none(find_long_modules(PACKAGE))


def test_a_long_module_is_found(tmp_path: Path) -> None:
    files = {"a.py": "x = 1\n" * MAX_LINES, "b.py": "x = 1\n" * (MAX_LINES + 1)}
    (found,) = find_long_modules(write_package(tmp_path, files))
    assert found.startswith("paceline/b.py:1001: 1001 lines")


def test_nothing_is_left_unfinished() -> None:
    places = [REPOSITORY / name for name in ("src", "tests", "docs", "README.md")]
    files = text_files(*(place for place in places if place.exists()))
    assert PACKAGE / "cli" / "main.py" in files and Path(__file__).resolve() in files
    expect_none(find_lines(REPOSITORY, files, UNFINISHED))


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK", "MEA" + "SURE", "T" + "BD"])
def test_an_unfinished_line_is_found(tmp_path: Path, word: str) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text(f"fine\n<!-- {word}: more -->\n{word}S {word.lower()} tmp{word}\n")
    (tmp_path / "b.bin").write_bytes(b"\xff\xfe" + word.encode())
    assert find_lines(tmp_path, text_files(tmp_path), UNFINISHED) == [f"docs/a.md:2: {word}"]


def test_no_path_of_a_machine_in_tracked_files() -> None:
    expect_none(find_machine_paths(REPOSITORY, tracked_files(REPOSITORY)))


@pytest.mark.parametrize("folder", MACHINE_PATHS)
def test_a_path_of_a_machine_is_found(tmp_path: Path, folder: str) -> None:
    (tmp_path / "a.md").write_text(f"fine\nsee {folder}x\n")
    (tmp_path / "b.py").write_text(f"flag = '-I{folder}include'\n")
    (tmp_path / "c.py").write_text("a = '/tmp/x'\n")
    assert find_machine_paths(tmp_path, text_files(tmp_path)) == [f"a.md:2: {folder}", f"b.py:1: {folder}"]


def test_only_cli_prints_to_stdout() -> None:
    expect_none(find_prints(PACKAGE))


def test_a_print_outside_cli_is_found(tmp_path: Path) -> None:
    files = {
        "cli/main.py": "print('fine')",
        "__main__.py": "print('fine')",
        "measure/a.py": "import sys\nprint('a', file=sys.stderr)\nprint('b')\nprint('c', file=sys.stdout)",
        "units.py": "import sys\ndef f(console):\n    sys.stdout.write('d')\n    console.print('fine')",
    }
    found = find_prints(write_package(tmp_path, files))
    assert [line.split(": ")[0] for line in found] == [
        "paceline/measure/a.py:3", "paceline/measure/a.py:4", "paceline/units.py:3",
    ]  # fmt: skip


def test_pure_verbs_live_in_the_starred_half() -> None:
    expect_none(find_misplaced_verbs(PACKAGE))


@pytest.mark.parametrize("verb", PURE)
def test_a_misplaced_pure_verb_is_found(tmp_path: Path, verb: str) -> None:
    source = f"def {verb}it(): ...\ndef re{verb}it(): ...\nclass A:\n    def {verb}s(self): ..."
    root = write_package(tmp_path, {"predict/a.py": source, "plan.py": source, "measure/a.py": source})
    found = find_misplaced_verbs(root)
    assert [line.split(": ")[0] for line in found] == ["paceline/measure/a.py:1", "paceline/measure/a.py:4"]


def test_no_fixed_port() -> None:
    expect_none(find_lines(PACKAGE, text_files(PACKAGE), FIXED_PORT))


def test_a_fixed_port_is_found(tmp_path: Path) -> None:
    files = {"a.py": "port = 29500\n", "b.py": "url = 'tcp://127.0.0.1:29500'\n", "c.py": "port = 129500 + 2950\n"}
    root = write_package(tmp_path, files)
    assert find_lines(root, text_files(root), FIXED_PORT) == ["a.py:1: 29500", "b.py:1: 29500"]
