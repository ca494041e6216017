"""What data can be asked for, as people write it, and what is refused before torch is imported.

Reading files does not belong here; where a set's files may lie is in `files`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import ConfigError
from paceline.workloads.data.files import SPLITS, find_files
from paceline.workloads.data.hub import explain_source
from paceline.workloads.forms import KINDS

__all__ = ["DATA_NAMES", "DataRequest", "check_request", "parse_data"]

_IMAGES = ("mnist", "fashion-mnist", "cifar10")
_SEQUENCES = ("mrpc", "text", "synthetic", "synthetic:pairs", "synthetic:tokens")
DATA_NAMES = (*_IMAGES, "mrpc", "text", "synthetic", *(f"synthetic:{kind}" for kind in KINDS))


@dataclass(frozen=True, kw_only=True)
class DataRequest:
    """Which data set, from where, and in what shape.

    `path` of None means the hub's copy. `context` is tokens per sequence, None: what fits. `tokenizer` is `auto` (the
    model's own, else bytes), `bytes`, or a folder. `samples` takes the first so many of the training split, or says how
    many to make. `augment` of None means: as is usual for the set; `cutout` is the side of the
    square that augmentation hides, in pixels.
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
    """Refuse what cannot be: contradictions, and files that are not there."""
    name = request.name
    if parse_data(name) != (name, None):
        raise ConfigError(f"data {name!r} is no name: give the path apart from it")
    for what, value in (("context", request.context), ("samples", request.samples)):
        if value is not None and value < 1:
            raise ConfigError(f"{what} is {value}: needed is at least 1")
    if name not in _SEQUENCES and (request.context is not None or request.tokenizer != "auto"):
        raise ConfigError(f"{name} is no text: leave out context and tokenizer")
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
            raise ConfigError(f"{name} is made, not read: leave out path and tokenizer")
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
        raise ConfigError(f"tokenizer {tokenizer!r} is no folder: needed is auto, bytes, or a tokenizer's folder")
    if find_spec("transformers") is None:
        raise ConfigError(f"tokenizer {tokenizer!r} needs transformers, which is not installed: install paceline[hf]")
