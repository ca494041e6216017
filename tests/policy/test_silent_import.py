"""`import paceline` is silent and light, all public names exist, and help needs no torch."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline

from .reading import expect_none, run_python, run_without_torch, write_package

HEAVY = ("torch", "numpy", "rich", "typer", "matplotlib")

# Each argument is a command line.
_RUN_MAIN = """
import contextlib
from paceline.cli.main import main
for words in sys.argv[1:]:
    sys.argv = ["paceline", *words.split()]
    with contextlib.suppress(SystemExit):
        main()
"""

_COMPARE_TORCHS_CLASS = """
from torch.nn.parallel import DistributedDataParallel
before = dict(vars(DistributedDataParallel))
import paceline.parallel
from paceline.transport import register
register()
assert dict(vars(DistributedDataParallel)) == before, "import"
paceline.swap_wrapper(False)
assert dict(vars(DistributedDataParallel)) == before, "swap_wrapper(False)"
paceline.swap_wrapper()
print(*vars(DistributedDataParallel).keys() - before.keys())
"""


def find_import_noise(path: Path | None = None) -> list[str]:
    """Output, warnings and heavy imports of `import paceline`."""
    listing = f"import paceline, sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    done = run_python("-W", "error", "-c", "import paceline", path=path)
    found = [f"stdout: {line}" for line in done.stdout.splitlines()]
    found += [f"stderr: {line}" for line in done.stderr.splitlines()]
    if done.returncode:
        return [*found, f"exit code {done.returncode}"]
    loaded = run_python("-c", listing, path=path).stdout.splitlines()[-1]
    return found + [f"loaded: {name}" for name in loaded.split()]


def find_name_mismatches(homes: dict[str, tuple[str, ...]], public: list[str]) -> list[str]:
    """Names that are defined but not public, public but not defined, or listed twice."""
    housed = [name for names in homes.values() for name in names]
    announced = [name for name in public if name != "__version__"]
    found = [f"{name}: in _HOMES but not in __all__" for name in housed if name not in announced]
    found += [f"{name}: in __all__ but not in _HOMES" for name in announced if name not in housed]
    found += [f"{name}: twice in _HOMES" for name in sorted(set(housed)) if housed.count(name) > 1]
    return found + [f"{name}: twice in __all__" for name in sorted(set(public)) if public.count(name) > 1]


def test_import_is_silent_and_light() -> None:
    expect_none(find_import_noise())


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("print('hello')", "stdout: hello"),
        ("import sys; print('hello', file=sys.stderr)", "stderr: hello"),
        ("import warnings; warnings.warn('old', DeprecationWarning)", "exit code 1"),
        ("import rich", "loaded: rich"),
    ],
)
def test_a_noisy_import_is_found(tmp_path: Path, source: str, complaint: str) -> None:
    write_package(tmp_path, {"__init__.py": source})
    assert complaint in find_import_noise(tmp_path)


def test_every_public_name_has_one_home() -> None:
    assert "__version__" in paceline.__all__
    expect_none(find_name_mismatches(paceline._HOMES, paceline.__all__))


def test_a_name_without_a_home_is_found() -> None:
    homes = {"a": ("one", "two"), "b": ("one",)}
    assert find_name_mismatches(homes, ["__version__", "one", "three", "three"]) == [
        "two: in _HOMES but not in __all__",
        "three: in __all__ but not in _HOMES",
        "three: in __all__ but not in _HOMES",
        "one: twice in _HOMES",
        "three: twice in __all__",
    ]


def test_every_public_name_resolves() -> None:
    assert [name for name in paceline.__all__ if getattr(paceline, name, None) is None] == []
    assert set(paceline.__all__) <= set(dir(paceline))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        paceline.nonsense  # noqa: B018


def test_torchs_wrapper_is_unchanged_until_ours_is_used() -> None:
    done = run_python("-c", _COMPARE_TORCHS_CLASS)
    assert (done.stdout.split(), done.returncode) == (["__new__"], 0), done.stderr


def test_help_needs_no_torch() -> None:
    verbs = ["", "bench", "bench allreduce", "bench wrappers", "doctor"]
    done = run_without_torch(_RUN_MAIN, *(f"{words} --help" for words in verbs))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("Usage:") == len(verbs)
    for words in verbs:
        assert f"paceline {words}".rstrip() in done.stdout


def test_help_that_needs_torch_is_found(tmp_path: Path) -> None:
    write_package(tmp_path, {"cli/main.py": "def main():\n    import torch\n    print('Usage: paceline')"})
    done = run_without_torch(_RUN_MAIN, "--help", path=tmp_path)
    assert done.returncode == 1 and "torch was imported" in done.stderr
