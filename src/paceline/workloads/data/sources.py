"""Which data can be requested, and where its files lie: a folder, or the Hugging Face hub."""

from __future__ import annotations

import difflib
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import ConfigError
from paceline.workloads.data import KINDS

SPLITS = ("train", "test")


def shorten_error(error: Exception) -> str:
    """The text of another library's error on one line of limited length."""
    return " ".join(str(error).split())[:160]


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


# The hub's data set, the folder in it, and the files as their authors give them out.
_SOURCES = {
    "mnist": ("ylecun/mnist", "mnist", "train-images-idx3-ubyte.gz and its three companions"),
    "fashion-mnist": (
        "zalando-datasets/fashion_mnist", "fashion_mnist", "train-images-idx3-ubyte.gz and its three companions",
    ),
    "cifar10": ("uoft-cs/cifar10", "plain_text", "cifar-10-python.tar.gz"),
    "mrpc": ("nyu-mll/glue", "mrpc", "msr_paraphrase_train.txt and msr_paraphrase_test.txt"),
}  # fmt: skip
_TIMEOUT_S = 5.0


def explain_source(name: str) -> str:
    """Why a set without a path cannot be fetched, and what to do instead; empty where it can be fetched."""
    if name not in _SOURCES:
        return f"{name} needs a path: give {name}:PATH, a file or a folder of .txt files"
    lacking = [module for module in ("huggingface_hub", "pyarrow") if find_spec(module) is None]
    if not lacking:
        return ""
    return f"{name} without a path comes from the hub, which needs {' and '.join(lacking)}: {_advise(name)}"


def load_from_hub(name: str) -> Path:
    """The folder with a set's files: the local copy where there is one, else downloaded."""
    if why := explain_source(name):
        raise ConfigError(why)
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import ENDPOINT

    repo, folder, _ = _SOURCES[name]
    wanted = {"repo_id": repo, "repo_type": "dataset", "allow_patterns": f"{folder}/*.parquet"}
    try:
        copy = Path(snapshot_download(**wanted, local_files_only=True)) / folder
        for split in SPLITS:
            find_files(name, copy, split)
        return copy
    except (OSError, ValueError):
        pass  # no copy, or an incomplete one: fetch it
    try:
        _check_reachable(ENDPOINT)
        return Path(snapshot_download(**wanted)) / folder
    except Exception as error:
        raise ConfigError(f"{name} cannot be fetched from the hub ({shorten_error(error)}): {_advise(name)}") from error


def _check_reachable(address: str) -> None:
    """Raise if a server does not answer soon: the hub's library waits minutes for one that does not."""
    troubles: list[Exception] = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_TIMEOUT_S).close()
        except urllib.error.HTTPError:
            pass  # any answer shows that it is there
        except Exception as error:
            troubles.append(error)

    # In a thread, because a DNS lookup has no timeout.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(2 * _TIMEOUT_S)
    if thread.is_alive() or troubles:
        raise TimeoutError(str(troubles[0]) if troubles else f"no answer from {address} in {2 * _TIMEOUT_S} s")


def _advise(name: str) -> str:
    repo, folder, files = _SOURCES[name]
    return f"get {files}, or the parquet files of {repo} ({folder}), on this machine and pass {name}:FOLDER"


_IMAGES = ("mnist", "fashion-mnist", "cifar10")
_SEQUENCES = ("mrpc", "text", "synthetic", "synthetic:pairs", "synthetic:tokens")
DATA_NAMES = (*_IMAGES, "mrpc", "text", "synthetic", *(f"synthetic:{kind}" for kind in KINDS))


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Which data set, from where, and in what shape.

    `path` of None means the hub's copy. `context` is tokens per sequence, None: what fits. `tokenizer` is `auto` (the
    model's own, else bytes), `bytes`, or a folder. `samples` takes the first ones of the training split, or is the
    number of synthetic ones. `augment` of None means the default of the set; `cutout` is the side of the square that
    augmentation hides, in pixels.
    """

    name: str
    path: str | None = None
    context: int | None = None
    tokenizer: str = "auto"
    samples: int | None = None
    seed: int = 0
    augment: bool | None = None
    cutout: int = 0


def parse_data(text: str) -> tuple[str, str | None]:
    """The name and the path of `NAME`, `NAME:PATH` or `synthetic:KIND`; the latter is a name as a whole."""
    name, _, rest = text.partition(":")
    if name == "synthetic":
        name, rest = text.rstrip(":"), ""
    if name not in DATA_NAMES:
        near = difflib.get_close_matches(name, DATA_NAMES, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"data {name!r} is unknown: {hint}known are {', '.join(DATA_NAMES)}; files are NAME:PATH")
    return name, rest or None


def check_request(request: DataRequest) -> None:
    """Refuse contradictions and missing files."""
    name = request.name
    if parse_data(name) != (name, None):
        raise ConfigError(f"data {name!r} is not a name: give the path separately")
    for what, value in (("context", request.context), ("samples", request.samples)):
        if value is not None and value < 1:
            raise ConfigError(f"{what} is {value}: needed is at least 1")
    if name not in _SEQUENCES and (request.context is not None or request.tokenizer != "auto"):
        raise ConfigError(f"{name} is not text: leave out context and tokenizer")
    if request.augment and name not in _IMAGES:
        raise ConfigError(f"{name} cannot be augmented: that is for {', '.join(_IMAGES)}")
    if request.cutout and (
        name not in _IMAGES or not (name == "cifar10" if request.augment is None else request.augment)
    ):
        raise ConfigError(
            f"cutout {request.cutout} is a part of augmentation, and {name} is not augmented: leave it out"
        )
    if name.startswith("synthetic"):
        if request.path is not None or request.tokenizer != "auto":
            raise ConfigError(f"{name} data is generated: leave out path and tokenizer")
        return
    _check_tokenizer(request.tokenizer)
    if request.path is not None:
        for split in SPLITS:
            find_files(name, Path(request.path), split)
    elif why := explain_source(name):
        raise ConfigError(why)


def _check_tokenizer(tokenizer: str) -> None:
    if tokenizer in ("auto", "bytes"):
        return
    if not Path(tokenizer).is_dir():
        raise ConfigError(f"tokenizer {tokenizer!r} is not a folder: needed is auto, bytes, or a tokenizer's folder")
    if find_spec("transformers") is None:
        raise ConfigError(f"tokenizer {tokenizer!r} needs transformers, which is not installed: install paceline[hf]")
