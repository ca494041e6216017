"""Data: as a model sees it, which can be requested, and where its files lie: a folder, or the Hugging Face hub.

Loads without torch. `formats` reads the files, `sets` holds the samples, `sharding` shares them out.
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

from paceline.errors import ConfigError, suggest
from paceline.runtime.environment import read_place

if TYPE_CHECKING:
    import torch

KINDS = ("images", "numbers", "pairs", "tokens")
# What becomes of the last global batch of an epoch when it is not full.
TAILS = ("keep", "drop", "pad")


def shorten_error(error: Exception) -> str:
    """The text of another library's error on one line of limited length."""
    return " ".join(str(error).split())[:160] or type(error).__name__


def import_hf(name: str) -> Any:
    """A library of Hugging Face. Only the first rank of a host shows its progress bars."""
    if read_place().local_rank:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers follows it too
    return importlib.import_module(name)


@dataclass(frozen=True)
class DataForm:
    """What a model must take and give. `images`: inputs (batch, channels, height, width), a class each. `numbers`:
    inputs (batch, features), a number each, 0 classes. `tokens`: inputs (batch, context) of ids, the next id for each.
    `pairs`: the same inputs with a mask, padded at the end to the longest of the batch, and a class for each pair.
    `own`: any inputs of a user's data; its shape is the number of targets of a sample. -1 classes: their number is not
    known."""

    kind: str
    shape: tuple[int, ...]
    num_classes: int = 0
    vocabulary: int = 0
    pad: int = 0

    @property
    def targets_per_sample(self) -> int:
        """How many targets one sample has: what a loss is averaged over."""
        return self.shape[0] if self.kind in ("tokens", "own") else 1


@dataclass(frozen=True)
class Batch:
    """Samples of one rank: inputs, targets and, where sequences are padded, a mask that is 1 on tokens."""

    inputs: Any  # a tensor; of a user's data also tensors in a dict or a tuple
    targets: torch.Tensor
    mask: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def content(self) -> Any:
        """What a step of a user's own gets."""
        return (self.inputs, self.targets) if self.mask is None else (self.inputs, self.targets, self.mask)

    def split(self) -> tuple[Any, torch.Tensor]:
        """Inputs and targets, for a step of ours."""
        return self.inputs, self.targets

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The batch with each of its tensors changed."""
        return replace(self, **{name: map_tensors(part, change) for name, part in vars(self).items()})

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The same batch on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class OwnBatch(Batch):
    """A batch of a user's own data, as it is, in `inputs`. `count` is its number of samples where that is known."""

    targets: Any = None
    count: int | None = None

    def __len__(self) -> int:
        """The samples in it: what it says itself, or the length of its first tensor or, without one, first list."""
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
        found, inputs, targets = self.inputs, cast(Any, None), cast(Any, None)
        if isinstance(found, Mapping):
            inputs = {name: value for name, value in found.items() if name != "labels"}
            targets = found.get("labels")
        elif isinstance(found, list | tuple) and len(found) > 1:
            *first, targets = found
            inputs = first[0] if len(first) == 1 else tuple(first)
        if not is_tensor(targets) or not any(map(is_tensor, list_leaves(inputs))):
            keys = f" with {', '.join(map(str, found))}" if isinstance(found, Mapping) else ""
            kinds = sorted({type(leaf).__name__ for leaf in list_leaves(found)})
            needed = "(inputs, targets), or a dict with labels, of tensors is needed, or a step of your own"
            what = f"{type(found).__name__}{keys}{' of ' * bool(kinds)}{' and '.join(kinds)}"
            raise ConfigError(f"a batch is a {what}: {needed}", code="batch")
        return inputs, targets.float() if targets.is_floating_point() else targets.long()

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """The same batch on a device, with all in it that has a method `to`."""
        return replace(self, inputs=map_parts(self.inputs, "to", lambda part: part.to(device)))


def is_tensor(value: Any) -> bool:
    return hasattr(type(value), "is_floating_point")


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Nested dicts, lists, tuples and dataclasses with each tensor in them changed."""
    return map_parts(value, "is_floating_point", change)


def map_parts(value: Any, method: str, change: Callable[[Any], Any]) -> Any:
    """The same with each part changed whose class has this method. Containers keep their class."""
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
    """What a dict, a list, a tuple, a dataclass, or an object that has a method `to` holds."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if is_dataclass(type(value)):
        return [getattr(value, each.name) for each in fields(value)]
    return list(vars(value).values()) if hasattr(type(value), "to") and hasattr(value, "__dict__") else []


def list_leaves(value: Any) -> Iterator[Any]:
    """What is in the parts of a value, and in theirs, in order; or the value where it has none."""
    parts = [] if is_tensor(value) else list_parts(value)
    for part in parts:
        yield from list_leaves(part)
    if not parts:
        yield value


SPLITS = ("train", "test")
# A reader, and the parts that must all be there; a part is a list of patterns of which the first that matches serves.
_Layout = tuple[str, tuple[tuple[str, ...], ...]]


class _Source(NamedTuple):
    """A set: the hub's repository and folder, the files as their authors give them out, its layouts by split in the
    order of preference, and folders inside the given one, as archives, hubs and other libraries leave them."""

    repo: str
    folder: str
    files: str
    layouts: Mapping[str, tuple[_Layout, ...]]
    inside: tuple[str, ...]


def _parquet(name: str) -> _Layout:
    return "parquet", ((f"{name}.parquet", f"{name}-*-of-*.parquet"),)


def _idx(prefix: str) -> _Layout:
    names = (f"{prefix}-images[-.]idx3-ubyte", f"{prefix}-labels[-.]idx1-ubyte")
    return "idx", tuple((name, f"{name}.gz") for name in names)


BATCHES = {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)}
_TAR: _Layout = ("tar", (("cifar-10-python.tar.gz", "cifar-10-python.tar"),))
_IDX = {"train": (_idx("train"), _parquet("train")), "test": (_idx("t10k"), _parquet("test"))}
_IDX_FILES = "train-images-idx3-ubyte.gz and its three companions"
_FASHION = "zalando-datasets/fashion_mnist"
_CIFAR = {split: (("batches", tuple((n,) for n in names)), _TAR, _parquet(split)) for split, names in BATCHES.items()}
_MRPC = {
    "train": (("tsv", (("msr_paraphrase_train.txt", "train.tsv"),)), _parquet("train")),
    # GLUE's own test.tsv has no labels; its dev.tsv has.
    "test": (("tsv", (("msr_paraphrase_test.txt", "dev.tsv"),)), _parquet("test"), _parquet("validation")),
}
_MRPC_FILES = "msr_paraphrase_train.txt and msr_paraphrase_test.txt"
_SOURCES = {
    "mnist": _Source("ylecun/mnist", "mnist", _IDX_FILES, _IDX, ("mnist", "MNIST/raw")),
    "fashion-mnist": _Source(_FASHION, "fashion_mnist", _IDX_FILES, _IDX, ("fashion_mnist", "FashionMNIST/raw")),
    "cifar10": _Source("uoft-cs/cifar10", "plain_text", _TAR[1][0][0], _CIFAR, ("cifar-10-batches-py", "plain_text")),
    "mrpc": _Source("nyu-mll/glue", "mrpc", _MRPC_FILES, _MRPC, ("mrpc", "MRPC")),
}


def find_files(name: str, path: Path, split: str) -> tuple[str, tuple[Path, ...]]:
    """The files of a split in a folder, or the file that is the whole set (`text`, an archive of CIFAR-10), after the
    layout that says which reader takes them."""
    layouts = _SOURCES[name].layouts[split] if name != "text" else ()
    # In words, one example for each layout.
    wanted = ", or ".join(" and ".join(patterns[0] for patterns in parts) for _, parts in layouts)
    if not path.exists():
        wanted = wanted or "the .txt files, or one file of text"
        raise ConfigError(f"{name}: {path} does not exist: give the folder with {wanted}")
    if name == "text":
        files = tuple(sorted(path.rglob("*.txt"))) if path.is_dir() else (path,)
        if not files:
            raise ConfigError(f"text: no .txt file in {path}: give a file, or a folder of .txt files")
        return "text", files
    if name == "cifar10" and path.is_file() and path.name.endswith((".tar", ".tar.gz", ".tgz")):
        return "tar", (path,)
    if not path.is_dir():
        raise ConfigError(f"{name}: {path} is a file: give the folder with {wanted}")
    lacking = ""
    for folder in (path, *(path / inside for inside in _SOURCES[name].inside)):
        for layout, parts in layouts:
            matches = [_match(folder, patterns) for patterns in parts]
            if all(matches):
                if layout == "parquet" and find_spec("pyarrow") is None:
                    raise ConfigError(f"{matches[0][0]} needs pyarrow, which is not installed: install paceline[hf]")
                return layout, tuple(file for match in matches for file in match)
            if any(matches):
                missing = next(patterns[0] for patterns, match in zip(parts, matches, strict=True) if not match)
                lacking = f"{folder} lacks {missing}: "
    seen = ", ".join(sorted(entry.name for entry in path.iterdir())[:6]) or "nothing"
    raise ConfigError(f"{name}: {lacking}no {split} split in {path}, which holds {seen}: needed is {wanted}")


def _match(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    for pattern in patterns:
        if found := sorted(file for file in folder.glob(pattern) if file.is_file()):
            # A set may come in several numbered parquet files; of anything else there is one.
            return found if "-of-" in pattern else found[:1]
    return []


_TIMEOUT_S = 5.0


def _advise(name: str) -> str:
    repo, folder, files, *_ = _SOURCES[name]
    return f"get {files}, or the parquet files of {repo} ({folder}), on this machine and pass {name}:FOLDER"


def load_from_hub(name: str) -> Path:
    """The folder with a set's files: the local copy where there is one, else downloaded."""
    from multiprocessing.pool import ThreadPool

    snapshot_download = import_hf("huggingface_hub").snapshot_download
    endpoint = import_hf("huggingface_hub.constants").ENDPOINT
    repo, folder, *_ = _SOURCES[name]
    wanted = {"repo_id": repo, "repo_type": "dataset", "allow_patterns": f"{folder}/*.parquet"}
    with contextlib.suppress(OSError, ValueError):  # no copy, or an incomplete one: fetch it
        copy = Path(snapshot_download(**wanted, local_files_only=True)) / folder
        for split in SPLITS:
            find_files(name, copy, split)
        return copy
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        # The hub's library waits minutes for a server that does not answer; any answer shows that it is there. In a
        # daemon thread, because a DNS lookup has no timeout.
        with contextlib.suppress(urllib.error.HTTPError), ThreadPool(1) as pool:
            pool.apply_async(urllib.request.urlopen, (request, None, _TIMEOUT_S)).get(2 * _TIMEOUT_S).close()
        return Path(snapshot_download(**wanted)) / folder
    except Exception as error:
        raise ConfigError(f"{name} cannot be fetched from the hub ({shorten_error(error)}): {_advise(name)}") from error


_IMAGES = ("mnist", "fashion-mnist", "cifar10")
_SEQUENCES = ("mrpc", "text", "synthetic", "synthetic:pairs", "synthetic:tokens")
DATA_NAMES = (*_IMAGES, "mrpc", "text", "synthetic", *(f"synthetic:{kind}" for kind in KINDS), "synthetic:noisy")


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

    @property
    def is_augmented(self) -> bool:
        return self.name == "cifar10" if self.augment is None else self.augment


def is_own(name: str) -> bool:
    """Whether a name is that of a user's file, with or without a function in it."""
    return name.rpartition(":")[0].endswith(".py") or name.endswith(".py")


def is_own_data(text: str) -> bool:
    """The same of data, whose name may also be before the path of a file."""
    return is_own(text) and text.partition(":")[0] not in DATA_NAMES


def parse_data(text: str) -> tuple[str, str | None]:
    """The name and the path of `NAME`, `NAME:PATH` or `synthetic:KIND`; the latter is a name as a whole, and so is
    `FILE.py:FUNCTION`."""
    if is_own_data(text):
        return text, None
    name, _, rest = text.partition(":")
    if name == "synthetic":
        name, rest = text.rstrip(":"), ""
    if name not in DATA_NAMES:
        known = f"known are {', '.join(DATA_NAMES)} and FILE.py:FUNCTION; files are NAME:PATH"
        raise ConfigError(f"data {name!r} is unknown: {suggest(name, DATA_NAMES)}{known}")
    return name, rest or None


def check_request(request: DataRequest) -> None:
    """Refuse contradictions and missing files."""
    name, tokenizer = request.name, request.tokenizer
    if name not in _SEQUENCES and (request.context is not None or tokenizer != "auto"):
        raise ConfigError(f"{name} is not text: leave out context and tokenizer")
    if request.augment and name not in _IMAGES:
        raise ConfigError(f"{name} cannot be augmented: that is for {', '.join(_IMAGES)}")
    if request.cutout and not (name in _IMAGES and request.is_augmented):
        text = f"cutout {request.cutout} is a part of augmentation, and {name} is not augmented"
        raise ConfigError(f"{text}: leave it out")
    if is_own_data(name):
        return
    if name.startswith("synthetic"):
        if request.path is not None or tokenizer != "auto":
            raise ConfigError(f"{name} data is generated: leave out path and tokenizer")
        return
    if tokenizer not in ("auto", "bytes"):
        if not Path(tokenizer).is_dir():
            needed = "needed is auto, bytes, or a tokenizer's folder"
            raise ConfigError(f"tokenizer {tokenizer!r} is not a folder: {needed}")
        if find_spec("transformers") is None:
            raise ConfigError(f"tokenizer {tokenizer!r} needs transformers: install paceline[hf]")
    if request.path is not None:
        for split in SPLITS:
            find_files(name, Path(request.path), split)
    elif name == "text":
        raise ConfigError("text needs a path: give text:PATH, a file or a folder of .txt files")
    elif lacking := " and ".join(module for module in ("huggingface_hub", "pyarrow") if find_spec(module) is None):
        raise ConfigError(f"{name} without a path comes from the hub, which needs {lacking}: {_advise(name)}")
