"""The form of a model's data, the named data sets, and the location of their files, in a folder or on the Hugging Face
hub.

Does not import torch. `formats` reads files, `sets` holds samples in memory, `own` wraps a user's data, `sharding`
divides samples among ranks.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from paceline.errors import ConfigError, refuse, suggest
from paceline.runtime.ranks.place import read_place

if TYPE_CHECKING:
    import torch

KINDS = ("images", "numbers", "pairs", "tokens")
TAILS = ("keep", "drop", "pad")  # what to do with an incomplete last global batch


def shorten_error(error: Exception) -> str:
    """Shorten another library's error message to one line of at most 160 characters."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def import_hf(name: str) -> Any:
    """Import a Hugging Face library, with progress bars only on the first rank of a host."""
    if read_place().local_rank:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # also honored by transformers
    return importlib.import_module(name)


@dataclass(frozen=True)
class DataForm:
    """The shapes that a model must accept and produce.

    `images`: inputs (batch, channels, height, width), one class each.
    `numbers`: inputs (batch, features), one number each; 0 classes.
    `tokens`: inputs (batch, context) of ids; the target of each id is the next one.
    `pairs`: token ids with a mask, padded at the end to the longest in the batch, and one class per pair.
    `own`: a user's data; `shape` is the number of targets per sample.
    `num_classes` is -1 if unknown.
    """

    kind: str
    shape: tuple[int, ...]
    num_classes: int = 0
    vocabulary: int = 0
    pad: int = 0

    @property
    def targets_per_sample(self) -> int:
        """Number of targets averaged in one sample's loss."""
        return self.shape[0] if self.kind in ("tokens", "own") else 1


@dataclass(frozen=True)
class Batch:
    """One rank's samples: inputs, targets and, for padded sequences, a mask that is 1 on tokens."""

    inputs: Any  # a tensor; for a user's data also tensors in a dict or tuple
    targets: torch.Tensor
    mask: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def content(self) -> Any:
        """The argument of a user's step."""
        return (self.inputs, self.targets) if self.mask is None else (self.inputs, self.targets, self.mask)

    def split(self) -> tuple[Any, torch.Tensor]:
        """Split into inputs and targets for the built-in step."""
        return self.inputs, self.targets

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Apply `change` to every tensor."""
        parts = {name: map_parts(part, "is_floating_point", change) for name, part in vars(self).items()}
        return replace(self, **parts)

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class OwnBatch(Batch):
    """A batch of a user's data, with the original object in `inputs`. `count` is its number of samples, if known."""

    targets: Any = None
    count: int | None = None

    def __len__(self) -> int:
        """`count`, else the batch's own `batch_size`, else the length of its first tensor, else of its first list."""
        found: Any = getattr(self.inputs, "batch_size", None) if self.count is None else self.count
        if isinstance(found, int):
            return found
        for leaf in filter(is_tensor, list_leaves(self.inputs)):
            return len(leaf) if leaf.dim() else 1
        found = [self.inputs]
        while parts := list_parts(found[0]):
            found = parts
        return len(found)

    @property
    def content(self) -> Any:
        return self.inputs

    def split(self) -> tuple[Any, torch.Tensor]:
        found = self.inputs
        inputs = cast(Any, None)
        targets = cast(Any, None)
        if isinstance(found, Mapping):
            inputs = {name: value for name, value in found.items() if name != "labels"}
            targets = found.get("labels")
        elif isinstance(found, list | tuple) and len(found) > 1:
            *first, targets = found
            inputs = first[0] if len(first) == 1 else tuple(first)
        if not is_tensor(targets) or not any(map(is_tensor, list_leaves(inputs))):
            keys = f" with {', '.join(map(str, found))}" if isinstance(found, Mapping) else ""
            kinds = " and ".join(sorted({type(leaf).__name__ for leaf in list_leaves(found)}))
            what = f"a batch is a {type(found).__name__}{keys} of {kinds or 'nothing'}"
            needed = "return (inputs, targets) or a dict with labels, as tensors, or write your own step"
            raise ConfigError(f"{what}: {needed}", code="batch")
        return inputs, targets.float() if targets.is_floating_point() else targets.long()

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Move everything in the batch that has a `to` method."""
        return replace(self, inputs=map_parts(self.inputs, "to", lambda part: part.to(device)))


def is_tensor(value: Any) -> bool:
    return hasattr(type(value), "is_floating_point")


def map_parts(value: Any, method: str, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to every object with this method in nested dicts, lists, tuples and dataclasses. Containers keep
    their class."""
    if hasattr(type(value), method):
        return change(value)
    if isinstance(value, Mapping):
        items: Any = {key: map_parts(item, method, change) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return type(value)(items)  # type: ignore[call-arg]
        changed: Any = copy.copy(value)
        changed.update(items)
        return changed
    if isinstance(value, list | tuple):
        items = [map_parts(item, method, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(type(value)):
        changed = copy.copy(value)
        for each in fields(value):
            object.__setattr__(changed, each.name, map_parts(getattr(value, each.name), method, change))
        return changed
    return value


def list_parts(value: Any) -> list[Any]:
    """The members of a dict, list, tuple, dataclass, or object with a `to` method."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(type(value)):
        return [getattr(value, each.name) for each in fields(value)]
    return list(vars(value).values()) if hasattr(type(value), "to") and hasattr(value, "__dict__") else []


def list_leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors and other values in nested containers, in order; an empty container is a leaf."""
    parts = [] if is_tensor(value) else list_parts(value)
    for part in parts:
        yield from list_leaves(part)
    if not parts:
        yield value


SPLITS = ("train", "test")
BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
# A reader, and a glob pattern for each of its files. A single pattern may match several files, which are all read.
_Layout = tuple[str, tuple[str, ...]]


class _Source(NamedTuple):
    """The origin of a data set, and the layouts of its splits in order of preference. `folders` are the subfolders
    created by archives, the hub and torchvision."""

    files: str
    folders: tuple[str, ...]
    layouts: Mapping[str, tuple[_Layout, ...]]
    repo: str = ""  # a repository on the hub, with parquet files in the first of `folders`


def _idx(split: str, prefix: str) -> tuple[_Layout, ...]:
    names = (f"{prefix}-images[-.]idx3-ubyte*", f"{prefix}-labels[-.]idx1-ubyte*")
    return ("idx", names), ("parquet", (f"{split}*.parquet",))


_IDX = {"train": _idx("train", "train"), "test": _idx("test", "t10k")}
_IDX_FILES = "train-images-idx3-ubyte.gz and its three companions"
_TAR = "cifar-10-python.tar.gz"
_CIFAR = {
    split: (("batches", BATCHES[split]), ("tar", (_TAR,)), ("parquet", (f"{split}*.parquet",))) for split in SPLITS
}
_MRPC: dict[str, tuple[_Layout, ...]] = {
    "train": (("tsv", ("msr_paraphrase_train.txt",)), ("tsv", ("train.tsv",)), ("parquet", ("train*.parquet",))),
    # GLUE's test.tsv has no labels, but its dev.tsv does.
    "test": (
        ("tsv", ("msr_paraphrase_test.txt",)),
        ("tsv", ("dev.tsv",)),
        ("parquet", ("test*.parquet",)),
        ("parquet", ("validation*.parquet",)),
    ),
}
_SOURCES = {
    "mnist": _Source(_IDX_FILES, ("mnist", "MNIST/raw"), _IDX, "ylecun/mnist"),
    "fashion-mnist": _Source(_IDX_FILES, ("fashion_mnist", "FashionMNIST/raw"), _IDX, "zalando-datasets/fashion_mnist"),
    "cifar10": _Source(_TAR, ("plain_text", "cifar-10-batches-py"), _CIFAR, "uoft-cs/cifar10"),
    "mrpc": _Source("msr_paraphrase_train.txt and msr_paraphrase_test.txt", ("mrpc", "MRPC"), _MRPC, "nyu-mll/glue"),
    "text": _Source("a text file or a folder of .txt files", (), dict.fromkeys(SPLITS, (("text", ("**/*.txt",)),))),
}


def _advise(name: str) -> str:
    source = _SOURCES[name]
    files = source.files
    if source.repo:
        files += f", or the parquet files of {source.repo} ({source.folders[0]}) on the hub"
    return f"download {files}, and pass {name}:PATH"


def find_files(name: str, path: Path, split: str) -> tuple[str, tuple[Path, ...]]:
    """Find the reader for a split, and its files. `path` is a folder, a text file, or CIFAR-10's archive."""
    if path.is_file() and name == "text":
        return "text", (path,)
    if path.is_file() and name == "cifar10" and path.name.endswith((".tar", ".tar.gz", ".tgz")):
        return "tar", (path,)
    source = _SOURCES[name]
    missing: list[str] = []
    for folder in (path, *(path / inside for inside in source.folders)):
        for layout, patterns in source.layouts[split]:
            matches = [sorted(folder.glob(pattern)) for pattern in patterns]
            if all(matches):
                if layout == "parquet" and find_spec("pyarrow") is None:
                    raise ConfigError(f"{matches[0][0]}: pyarrow is not installed: install paceline[hf]", code="no-hf")
                return layout, tuple(matches[0] if len(patterns) == 1 else [match[0] for match in matches])
            if any(matches):
                missing = [pattern for pattern, match in zip(patterns, matches, strict=True) if not match]
    found = "is a file" if path.is_file() else "does not exist"
    if path.is_dir():
        entries = ", ".join(sorted(entry.name for entry in path.iterdir())[:6])
        found = f"has no {', '.join(missing) or f'{split} split'} (it contains {entries or 'nothing'})"
    raise ConfigError(f"{name}: {path} {found}: {_advise(name)}", code="no-files")


_TIMEOUT_S = 5.0


def fetch_from_hub(is_complete: Callable[[Path], bool], **wanted: Any) -> Path:
    """Return the folder of a hub repository: the local copy if it is complete, else a download.

    Raises errors of the hub's library, which have no common base class in all versions.
    """
    from multiprocessing.pool import ThreadPool

    snapshot_download = import_hf("huggingface_hub").snapshot_download
    with contextlib.suppress(OSError, ValueError):  # raised if there is no complete local copy
        local = Path(snapshot_download(**wanted, local_files_only=True))
        if is_complete(local):
            return local
    if not os.environ.get("HF_HUB_OFFLINE"):
        # The hub's library waits minutes for an unresponsive server, so probe it first; any response will do.
        # The probe runs in a daemon thread because a DNS lookup has no timeout.
        request = urllib.request.Request(import_hf("huggingface_hub.constants").ENDPOINT, method="HEAD")
        with contextlib.suppress(urllib.error.HTTPError), ThreadPool(1) as pool:
            pool.apply_async(urllib.request.urlopen, (request, None, _TIMEOUT_S)).get(2 * _TIMEOUT_S).close()
    return Path(snapshot_download(**wanted))


def load_from_hub(name: str) -> Path:
    """Return the folder with a data set's files."""
    source = _SOURCES[name]
    folder = source.folders[0]

    def is_complete(place: Path) -> bool:
        return all(find_files(name, place / folder, split) for split in SPLITS)  # raises an error if incomplete

    try:
        wanted = {"repo_id": source.repo, "repo_type": "dataset", "allow_patterns": f"{folder}/*.parquet"}
        return fetch_from_hub(is_complete, **wanted) / folder
    except Exception as error:
        text = f"{name} cannot be downloaded from the hub ({shorten_error(error)}): {_advise(name)}"
        raise ConfigError(text, code="hub") from error


_IMAGES = ("mnist", "fashion-mnist", "cifar10")
_SEQUENCES = ("mrpc", "text", "synthetic", "synthetic:pairs", "synthetic:tokens")
DATA_NAMES = (*_IMAGES, "mrpc", "text", "synthetic", *(f"synthetic:{kind}" for kind in KINDS), "synthetic:noisy")


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """The requested data set, its location and its shape.

    `path` None means the hub. `context` is tokens per sequence; None means automatic. `tokenizer` is `auto` (the
    model's own if it has one, else bytes), `bytes`, or a folder. `samples` limits the training split, or is the number
    of synthetic samples. `augment` None means the data set's default; `cutout` is the side, in pixels, of the masked
    square in augmented images.
    """

    name: str
    path: str | None = None
    context: int | None = None
    tokenizer: str = "auto"
    samples: int | None = None
    seed: int = 0
    augment: bool | None = None
    cutout: int = 0

    @property
    def is_augmented(self) -> bool:
        return self.name == "cifar10" if self.augment is None else self.augment


def is_own(name: str) -> bool:
    """Whether a name is `FILE.py` or `FILE.py:FUNCTION`."""
    return name.rpartition(":")[0].endswith(".py") or name.endswith(".py")


def is_own_data(text: str) -> bool:
    """Like `is_own`, for `--data`: here `text:FILE.py` is a text file."""
    return is_own(text) and text.partition(":")[0] not in DATA_NAMES


def parse_data(text: str) -> tuple[str, str | None]:
    """Split `NAME` or `NAME:PATH` into name and path; `synthetic:KIND` and `FILE.py:FUNCTION` are names as a whole."""
    if is_own_data(text):
        return text, None
    name, _, rest = text.partition(":")
    if name == "synthetic":
        name, rest = text.rstrip(":"), ""
    if name not in DATA_NAMES:
        known = f"use one of {', '.join(DATA_NAMES)}, FILE.py:FUNCTION, or NAME:PATH for files"
        raise ConfigError(f"data {name!r} is unknown: {suggest(name, DATA_NAMES)}{known}", code="unknown")
    return name, rest or None


def check_request(request: DataRequest) -> None:
    """Reject conflicting options and missing files."""
    name, tokenizer = request.name, request.tokenizer
    is_synthetic = name.startswith("synthetic")
    has_cutout = request.cutout and not (name in _IMAGES and request.is_augmented)
    has_text_options = name not in _SEQUENCES and (request.context is not None or tokenizer != "auto")
    has_files = is_synthetic and (request.path is not None or tokenizer != "auto")
    refuse(
        (has_text_options, f"{name} is not text: leave out --context and --tokenizer"),
        (request.augment and name not in _IMAGES, f"--augment: {name} cannot be augmented, only {', '.join(_IMAGES)}"),
        (has_cutout, f"--cutout {request.cutout}: {name} is not augmented: leave it out"),
        (has_files, f"{name} is generated: leave out the path and --tokenizer"),
        code="unused",
    )
    if is_synthetic or is_own_data(name):
        return
    if tokenizer not in ("auto", "bytes"):
        refuse(
            (not Path(tokenizer).is_dir(), f"--tokenizer {tokenizer} is not a folder: use auto, bytes or a folder"),
            (find_spec("transformers") is None, f"--tokenizer {tokenizer} needs transformers: install paceline[hf]"),
            code="tokenizer",
        )
    if request.path is not None:
        for split in SPLITS:
            find_files(name, Path(request.path), split)
        return
    libraries = [module for module in ("huggingface_hub", "pyarrow") if find_spec(module) is None]
    refuse(
        (name == "text", f"text needs a path: {_advise(name)}"),
        (
            libraries,
            f"{name} without a path comes from the hub, which needs {' and '.join(libraries)}: {_advise(name)}",
        ),
        code="no-files",
    )
