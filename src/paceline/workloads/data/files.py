"""Where the files of a data set lie, in the layouts that they are distributed in. Nothing here opens a file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import ConfigError

__all__ = ["SPLITS", "Found", "find_files"]

SPLITS = ("train", "test")


@dataclass(frozen=True)
class Found:
    """The files of one split, and the `layout` that says which reader takes them."""

    layout: str
    files: tuple[Path, ...]


# For each set and split, layouts in the order of preference. A layout is a list of parts that must all be there; a
# part is a list of patterns of which the first that matches serves.
_Layouts = tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]


def _idx(prefix: str) -> _Layouts:
    parts = tuple(
        (f"{prefix}-{what}[-.]{form}-ubyte", f"{prefix}-{what}[-.]{form}-ubyte.gz")
        for what, form in (("images", "idx3"), ("labels", "idx1"))
    )
    return (("idx", parts),)


def _parquet(*names: str) -> _Layouts:
    return tuple(("parquet", ((f"{name}.parquet", f"{name}-*-of-*.parquet"),)) for name in names)


_TAR: _Layouts = (("tar", (("cifar-10-python.tar.gz", "cifar-10-python.tar"),)),)
_MNIST = {"train": _idx("train") + _parquet("train"), "test": _idx("t10k") + _parquet("test")}
_LAYOUTS: dict[str, dict[str, _Layouts]] = {
    "mnist": _MNIST,
    "fashion-mnist": _MNIST,
    "cifar10": {
        "train": (("batches", tuple((f"data_batch_{n}",) for n in range(1, 6))), *_TAR, *_parquet("train")),
        "test": (("batches", (("test_batch",),)), *_TAR, *_parquet("test")),
    },
    "mrpc": {
        "train": (("tsv", (("msr_paraphrase_train.txt", "train.tsv"),)), *_parquet("train")),
        # GLUE's own test.tsv has no labels; its dev.tsv has.
        "test": (("tsv", (("msr_paraphrase_test.txt", "dev.tsv"),)), *_parquet("test", "validation")),
    },
}
# Folders inside the given one, as archives, hubs and other libraries leave them.
_INSIDE = {
    "mnist": ("mnist", "MNIST/raw"),
    "fashion-mnist": ("fashion_mnist", "FashionMNIST/raw"),
    "cifar10": ("cifar-10-batches-py", "plain_text"),
    "mrpc": ("mrpc", "MRPC"),
}


def find_files(name: str, path: Path, split: str) -> Found:
    """The files of a split in a folder, or in the file that is the whole set (`text`, an archive of CIFAR-10)."""
    if not path.exists():
        raise ConfigError(f"{name}: {path} does not exist: give the folder with {_wanted(name, split)}")
    if name == "text":
        return Found("text", _find_texts(path))
    if name == "cifar10" and path.is_file() and path.name.endswith((".tar", ".tar.gz", ".tgz")):
        return Found("tar", (path,))
    if not path.is_dir():
        raise ConfigError(f"{name}: {path} is a file: give the folder with {_wanted(name, split)}")
    lacking = ""
    for folder in (path, *(path / inside for inside in _INSIDE[name])):
        for layout, parts in _LAYOUTS[name][split]:
            matches = [_match(folder, patterns) for patterns in parts]
            if all(matches):
                if layout == "parquet" and find_spec("pyarrow") is None:
                    raise ConfigError(f"{matches[0][0]} needs pyarrow, which is not installed: install paceline[hf]")
                return Found(layout, tuple(file for match in matches for file in match))
            if any(matches):
                lacking = next(patterns[0] for patterns, match in zip(parts, matches, strict=True) if not match)
                lacking = f"{folder} lacks {lacking}: "
    seen = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
    raise ConfigError(
        f"{name}: {lacking}no {split} split in {path}, which holds {seen}: needed is {_wanted(name, split)}"
    )


def _match(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    for pattern in patterns:
        if found := sorted(file for file in folder.glob(pattern) if file.is_file()):
            # A set may come in several numbered parquet files; of anything else there is one.
            return found if "-of-" in pattern else found[:1]
    return []


def _find_texts(path: Path) -> tuple[Path, ...]:
    files = tuple(sorted(path.rglob("*.txt"))) if path.is_dir() else (path,)
    if not files:
        raise ConfigError(f"text: no .txt file in {path}: give a file, or a folder of .txt files")
    return files


def _wanted(name: str, split: str) -> str:
    """The files of a split in words, one example for each layout."""
    if name == "text":
        return "the .txt files, or one file of text"
    return ", or ".join(" and ".join(patterns[0] for patterns in parts) for _, parts in _LAYOUTS[name][split])
