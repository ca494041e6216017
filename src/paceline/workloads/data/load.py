"""From a request to a data set in memory: finds the files, reads them and wraps the arrays. Formats are elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.errors import ConfigError
from paceline.workloads.data.checks import Bytes, Labels
from paceline.workloads.data.cifar import load_batches, load_tar
from paceline.workloads.data.files import SPLITS, Found, find_files
from paceline.workloads.data.hub import load_from_hub
from paceline.workloads.data.idx import load_idx
from paceline.workloads.data.paraphrases import load_paraphrases
from paceline.workloads.data.parquet import load_parquet_images, load_parquet_pairs
from paceline.workloads.data.requests import DataRequest, check_request
from paceline.workloads.data.sets import Augmentation, DataSet, ImageData, PairData, TokenData
from paceline.workloads.data.synthetic import build_synthetic
from paceline.workloads.data.text import load_text
from paceline.workloads.data.tokenizers import Tokenizer, load_tokenizer
from paceline.workloads.forms import DataForm

__all__ = ["load_data"]

_TEXT_CONTEXT = 256
_NUM_CLASSES = 10


@dataclass(frozen=True)
class _Pictures:
    """How images of a set are shown to a model. Digits are not flipped: a mirrored one is another sign."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int
    flip: bool
    augment: bool


_PICTURES = {
    "mnist": _Pictures((0.1307,), (0.3081,), pad=2, flip=False, augment=False),
    "fashion-mnist": _Pictures((0.2860,), (0.3530,), pad=2, flip=True, augment=False),
    "cifar10": _Pictures((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), pad=4, flip=True, augment=True),
}


def load_data(
    request: DataRequest,
    split: str,
    form: DataForm | None = None,
    device: torch.device | str = "cpu",
    model_folder: str | None = None,
) -> DataSet:
    """A split of a data set, `train` or `test`.

    `form` is what the model would like: the kind and shape of a synthetic set, the context of text. `device` is where a
    synthetic set is made; others stay on the host. `model_folder` may hold the model's own tokenizer.
    """
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} is unknown: known are {', '.join(SPLITS)}")
    check_request(request)
    if request.name.startswith("synthetic"):
        return build_synthetic(request.name, split, form, request.context, request.samples, request.seed, device)
    path = load_from_hub(request.name) if request.path is None else Path(request.path)
    found = find_files(request.name, path, split)
    labelled: dict[str, Any] = {"name": request.name, "split": split, "source": f"from {found.layout} in {path}"}
    if request.name in _PICTURES:
        return _load_pictures(request, split, found, labelled)
    tokenizer = load_tokenizer(request.tokenizer, model_folder)
    wished = form.shape[0] if form and form.kind in ("pairs", "tokens") else None
    labelled["source"] += f", tokens by {tokenizer.name}"
    if request.name == "text":
        return _load_blocks(request, split, found, labelled, tokenizer, request.context or wished or _TEXT_CONTEXT)
    context = request.context or tokenizer.pair_context
    return _load_pairs(request, split, found, labelled, tokenizer, context)


def _limit(request: DataRequest, split: str, available: int) -> int:
    """How many samples of a split are used: the first so many of training, all of the test."""
    if split != "train" or request.samples is None:
        return available
    if request.samples > available:
        raise ConfigError(f"{request.samples} samples of {request.name}: it has {available}")
    return request.samples


def _load_pictures(request: DataRequest, split: str, found: Found, labelled: dict[str, Any]) -> DataSet:
    look = _PICTURES[request.name]
    images: Bytes
    labels: Labels
    if found.layout == "idx":
        images, labels = load_idx(found.files[0], found.files[1], _NUM_CLASSES)
    elif found.layout == "batches":
        images, labels = load_batches(found.files)
    elif found.layout == "tar":
        images, labels = load_tar(found.files[0], split)
    else:
        limit = request.samples if split == "train" else None
        images, labels = load_parquet_images(found.files, len(look.mean), _NUM_CLASSES, limit)
    count = _limit(request, split, len(images))
    augment = split == "train" and (look.augment if request.augment is None else request.augment)
    return ImageData(
        form=DataForm(kind="images", shape=images.shape[1:], num_classes=_NUM_CLASSES),
        inputs=torch.from_numpy(images[:count].copy()), targets=torch.from_numpy(labels[:count].copy()),
        mean=look.mean, std=look.std,
        augmentation=Augmentation(look.pad, look.flip, request.seed, request.cutout) if augment else None,
        **labelled,
    )  # fmt: skip


def _load_pairs(
    request: DataRequest, split: str, found: Found, labelled: dict[str, Any], tokenizer: Tokenizer, context: int
) -> DataSet:
    if found.layout == "tsv":
        first, second, labels = load_paraphrases(found.files[0])
    else:
        first, second, labels = load_parquet_pairs(found.files, request.samples if split == "train" else None)
    count = _limit(request, split, len(labels))
    rows = tokenizer.encode_pairs(first[:count], second[:count], context)
    ids = np.full((count, max(map(len, rows))), tokenizer.pad, np.int64)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    vocabulary, pad = tokenizer.vocabulary, tokenizer.pad
    return PairData(
        form=DataForm(kind="pairs", shape=(context,), num_classes=2, vocabulary=vocabulary, pad=pad),
        inputs=torch.from_numpy(ids), targets=torch.from_numpy(labels[:count].copy()),
        lengths=torch.tensor([len(row) for row in rows]),
        **labelled,
    )  # fmt: skip


def _load_blocks(
    request: DataRequest, split: str, found: Found, labelled: dict[str, Any], tokenizer: Tokenizer, context: int
) -> DataSet:
    stream = torch.from_numpy(load_text(found.files, split, tokenizer, context))
    # A view: the last id of a block, a target there, is the first of the next, an input.
    blocks = stream.unfold(0, context + 1, context)
    blocks = blocks[: _limit(request, split, len(blocks))]
    count = tokenizer.vocabulary
    form = DataForm(kind="tokens", shape=(context,), num_classes=count, vocabulary=count, pad=tokenizer.pad)
    return TokenData(form=form, inputs=blocks, targets=blocks, **labelled)
