"""Synthetic data sets of every kind, made on the device that asks, with a rule that a model can learn.

The rule follows from the seed, the samples from seed and split: training and test data obey the same rule. No file is
read here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from paceline.errors import ConfigError
from paceline.workloads.data.seeds import derive_seed
from paceline.workloads.data.sets import DataSet, ImageData, PairData, TokenData
from paceline.workloads.forms import DataForm

__all__ = ["build_synthetic"]

_SIZES = {"train": 2048, "test": 512}
_FORMS = {
    "images": DataForm(kind="images", shape=(3, 32, 32), num_classes=10),
    "numbers": DataForm(kind="numbers", shape=(16,), num_classes=0),
    "pairs": DataForm(kind="pairs", shape=(32,), num_classes=2, vocabulary=64),
    "tokens": DataForm(kind="tokens", shape=(64,), num_classes=64, vocabulary=64),
}
# Rules over more ids than these would take long to learn, whatever the vocabulary.
_USED_IDS = 64
_SLAB = 256


def build_synthetic(
    name: str,
    split: str,
    form: DataForm | None = None,
    context: int | None = None,
    samples: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> DataSet:
    """`synthetic:KIND`, or `synthetic` for the kind of `form`, which also gives shape, classes and vocabulary.

    `samples` is the size of the training split; the test split has a fixed one.
    """
    kind = name.partition(":")[2] or (form.kind if form else "")
    if not kind:
        raise ConfigError(f"synthetic data of which kind? give synthetic:KIND, one of {', '.join(_FORMS)}")
    if form is None or form.kind != kind:
        form = _FORMS[kind]
    if context and kind in ("pairs", "tokens"):
        form = replace(form, shape=(context,))
    count = samples if samples and split == "train" else _SIZES[split]
    build = {"images": _images, "numbers": _numbers, "pairs": _pairs, "tokens": _tokens}[kind]
    return build(name, split, form, count, seed, torch.device(device))


def _generators(seed: int, split: str, device: torch.device) -> tuple[torch.Generator, torch.Generator]:
    rule = torch.Generator(device).manual_seed(derive_seed("rule", seed))
    return rule, torch.Generator(device).manual_seed(derive_seed(f"samples of {split}", seed))


def _images(name: str, split: str, form: DataForm, count: int, seed: int, device: torch.device) -> DataSet:
    """A smooth pattern for each class, under noise."""
    rule, draw = _generators(seed, split, device)
    patterns = torch.randn((form.num_classes, form.shape[0], 4, 4), generator=rule, device=device)
    targets = torch.randint(form.num_classes, (count,), generator=draw, device=device)
    images = torch.empty((count, *form.shape), dtype=torch.uint8, device=device)
    # In slabs: as floats, large images would take four times the memory of the set.
    for start in range(0, count, _SLAB):
        part = F.interpolate(patterns[targets[start : start + _SLAB]], size=form.shape[1:], mode="bilinear")
        part += torch.randn(part.shape, generator=draw, device=device)
        images[start : start + _SLAB] = (128 + 32 * part).round_().clamp_(0, 255).to(torch.uint8)
    return ImageData(
        name=name, form=form, split=split, source="made", inputs=images, targets=targets,
        mean=(0.5,) * form.shape[0], std=(0.17,) * form.shape[0],
    )  # fmt: skip


def _numbers(name: str, split: str, form: DataForm, count: int, seed: int, device: torch.device) -> DataSet:
    """A linear rule and a tenth of noise."""
    rule, draw = _generators(seed, split, device)
    weights = torch.randn((form.shape[0], 1), generator=rule, device=device) / form.shape[0] ** 0.5
    inputs = torch.randn((count, *form.shape), generator=draw, device=device)
    noise = torch.randn((count, 1), generator=draw, device=device)
    # In double precision: a float product may be rounded as the user's flags for the device say.
    targets = (inputs.double() @ weights.double()).to(inputs.dtype) + 0.1 * noise
    return DataSet(name=name, form=form, split=split, source="made", inputs=inputs, targets=targets)


def _tokens(name: str, split: str, form: DataForm, count: int, seed: int, device: torch.device) -> DataSet:
    """A ring of ids: nine times in ten the next id follows, else any."""
    rule, draw = _generators(seed, split, device)
    ring = torch.randperm(form.vocabulary, generator=rule, device=device)[:_USED_IDS]
    size = (count, form.shape[0] + 1)
    leaps = torch.randint(len(ring), size, generator=draw, device=device)
    leaps[torch.rand(size, generator=draw, device=device) < 0.9] = 0
    starts = torch.randint(len(ring), (count, 1), generator=draw, device=device)
    # Places on the ring are a running sum, so no loop over the context is needed.
    blocks = ring[(starts + (leaps + 1).cumsum(1)) % len(ring)].to(torch.int32)
    form = replace(form, num_classes=form.vocabulary)
    return TokenData(name=name, form=form, split=split, source="made", inputs=blocks, targets=blocks)


def _pairs(name: str, split: str, form: DataForm, count: int, seed: int, device: torch.device) -> DataSet:
    """Two halves, each of ids of one of two topics: class 1 if the topics match, else class 0."""
    context = form.shape[0]
    if form.vocabulary < 4 or context < 3:
        raise ConfigError(
            f"synthetic pairs of {context} tokens out of {form.vocabulary}: needed are at least 3 tokens out of 4"
        )
    rule, draw = _generators(seed, split, device)
    ids = torch.randperm(form.vocabulary, generator=rule, device=device)
    ids = ids[ids != form.pad]
    separator, topics = ids[0], ids[1 : 2 * ((min(len(ids), _USED_IDS + 1) - 1) // 2) + 1].reshape(2, -1)
    # Lengths are drawn on the host, where `take` asks for them.
    host = torch.Generator().manual_seed(derive_seed(f"lengths of {split}", seed))
    lengths = torch.randint(max(3, context // 2), context + 1, (count,), generator=host)
    places, ends = torch.arange(context, device=device), lengths.to(device)[:, None]
    first = torch.randint(2, (count, 1), generator=draw, device=device)
    targets = torch.randint(2, (count,), generator=draw, device=device)
    topic = torch.where(places < ends // 2, first, (first + targets[:, None] + 1) % 2)
    words = torch.randint(topics.shape[1], (count, context), generator=draw, device=device)
    inputs = topics[topic, words].masked_fill(places >= ends, form.pad)
    inputs = torch.where(places == ends // 2, separator, inputs)
    form = replace(form, num_classes=2)
    return PairData(name=name, form=form, split=split, source="made", inputs=inputs, targets=targets, lengths=lengths)
