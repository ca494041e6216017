"""Data sets in memory, loaded from files or synthetic, with the preparation of their batches on the device."""

import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from paceline.errors import refuse
from paceline.workloads.data import Batch, DataForm, DataRequest, check_request, find_files, formats, load_from_hub
from paceline.workloads.data.sharding import cut_range, derive_seed


@dataclass(frozen=True, eq=False, kw_only=True)
class DataSet:
    """Samples in memory. `source` describes their origin for the user."""

    is_stream: ClassVar[bool] = False
    shuffles: ClassVar[bool] = True

    name: str
    form: DataForm
    split: str
    source: str
    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: torch.Tensor) -> Batch:
        """The samples at these indices, on the set's device: the host, unless it is synthetic."""
        return Batch(_select(self.inputs, indices), _select(self.targets, indices))

    @functools.cached_property
    def checksum(self) -> int:
        """A CRC of all samples, to detect a different or edited data set."""
        parts = (value.cpu().contiguous().numpy().data for value in self._rows.values())
        return functools.reduce(lambda found, part: zlib.crc32(part, found), parts, 0)

    @property
    def _rows(self) -> dict[str, Any]:
        """The fields with one row per sample, sorted by name."""
        return {name: vars(self)[name] for name in ("inputs", "lengths", "targets") if name in vars(self)}

    def first(self, num_samples: int) -> Self:
        """The first `num_samples` samples, or all if there are fewer."""
        return replace(self, **{name: value[:num_samples] for name, value in self._rows.items()})

    def prepare(self, batch: Batch, indices: torch.Tensor, epoch: int) -> Batch:
        """Convert the result of `take(indices)` to model inputs, on the batch's device."""
        return batch

    def at(self, batch_size: int) -> Self:
        """The same data with batches of this size."""
        return self

    def cut(self, size: int, rank: int, world_size: int, device: torch.device) -> Iterator[Batch]:
        """Yield this rank's share of all samples, on `device`, in batches of `size`."""
        for start in cut_range(range(0, len(self), size), rank, world_size):
            indices = torch.arange(start, min(start + size, len(self)))
            yield self.prepare(self.take(indices).to(device), indices, 0)

    def describe(self) -> str:
        """A one-line description for the user."""
        size = " x ".join(map(str, self.form.shape))
        what = {
            "images": f"images of {size} in {self.form.num_classes} classes",
            "numbers": f"rows of {size} numbers, one target each",
            "pairs": f"pairs of up to {size} tokens in {self.form.num_classes} classes",
            "tokens": f"blocks of {size} tokens, vocabulary {self.form.vocabulary:,}",
        }[self.form.kind]
        return f"{self.name}, {self.split}: {len(self):,} {what}, {self.source}"


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenData(DataSet):
    """Blocks of context + 1 consecutive ids; each id is the target of the previous one. `targets` is unused."""

    def take(self, indices: torch.Tensor) -> Batch:
        blocks = _select(self.inputs, indices)
        return Batch(blocks[:, :-1], blocks[:, 1:])

    def prepare(self, batch: Batch, indices: torch.Tensor, epoch: int) -> Batch:
        # Ids are int32 in memory and during the copy to the device.
        return Batch(batch.inputs.long(), batch.targets.long())


@dataclass(frozen=True, eq=False, kw_only=True)
class PairData(DataSet):
    """Sequences padded at the end; `lengths` are the unpadded lengths, on the host."""

    lengths: torch.Tensor

    def take(self, indices: torch.Tensor) -> Batch:
        # Trim padding here: the lengths are on the host, which avoids a device synchronization.
        lengths = _select(self.lengths, indices)
        longest = int(lengths.max())
        batch = super().take(indices)
        mask = torch.arange(longest) < lengths[:, None]
        return Batch(batch.inputs[:, :longest], batch.targets, _send(mask.long(), batch.inputs.device))


# Cutout centers are drawn in units of 1 / _PARTS of the image, before its size is known.
_PARTS = 1 << 14


@dataclass(frozen=True)
class Augmentation:
    """A random crop after reflection padding by `pad` pixels, a random horizontal flip if `flip`, and a masked square
    with sides of `cutout` pixels, possibly partly outside. Depends only on the seed, the epoch and the sample's
    index."""

    pad: int
    flip: bool
    seed: int
    cutout: int = 0

    @functools.lru_cache(maxsize=4)  # noqa: B019 - the instances it keeps alive are small
    def draw(self, num_samples: int, epoch: int) -> torch.Tensor:
        """Draw one row per sample, on the host: shift down, shift right, flip and, with a cutout, the row and column of
        its center in units of 1 / `_PARTS`."""
        generator = torch.Generator().manual_seed(derive_seed("augment", self.seed, epoch))
        shifts = torch.randint(-self.pad, self.pad + 1, (num_samples, 2), generator=generator, dtype=torch.int16)
        flips = torch.randint(2, (num_samples, 1), generator=generator, dtype=torch.int16)
        columns = [shifts, flips * self.flip]
        if self.cutout:
            columns.append(torch.randint(_PARTS, (num_samples, 2), generator=generator, dtype=torch.int16))
        return torch.cat(columns, dim=1)

    def apply(self, images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Crop and flip each image by its row of `draws`."""
        count, channels, height, width = images.shape
        down, right, flips = _send(draws[:, :3].long(), images.device)[:, :, None].unbind(dim=1)
        rows = _mirror(torch.arange(height, device=images.device) + down, height)
        columns = torch.arange(width, device=images.device)
        columns = _mirror(torch.where(flips > 0, width - 1 - columns, columns) + right, width)
        places = (rows[:, :, None] * width + columns[:, None, :]).reshape(count, 1, -1).expand(-1, channels, -1)
        return images.reshape(count, channels, -1).gather(2, places).reshape(images.shape)

    def hide(self, images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """Set the square in each normalized image to 0, the mean."""
        centres = _send(draws[:, 3:].long(), images.device)
        inside = []
        for axis, size in enumerate(images.shape[2:]):
            first = (centres[:, axis] * size).div(_PARTS, rounding_mode="floor") - self.cutout // 2
            places = torch.arange(size, device=images.device) - first[:, None]
            inside.append((places >= 0) & (places < self.cutout))
        return images.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageData(DataSet):
    """Images as bytes. `prepare` normalizes them by each channel's `mean` and `std` (pixels from 0 to 1)."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation | None = None

    def prepare(self, batch: Batch, indices: torch.Tensor, epoch: int) -> Batch:
        images, change = batch.inputs, self.augmentation
        if change is not None:
            draws = _select(change.draw(len(self), epoch), indices)
            images = change.apply(images, draws)
        scale, shift = _scales(self.mean, self.std, images.device)
        images = images.to(torch.float32).mul_(scale).add_(shift)
        if change is not None and change.cutout:
            images = change.hide(images, draws)
        return Batch(images, batch.targets)


@functools.lru_cache
def _scales(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Each channel's scale and shift."""
    means, stds = torch.tensor([mean, std])[:, :, None, None]
    return torch.stack([1 / (255 * stds), -means / stds]).to(device)


def _select(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return rows.index_select(0, _send(indices, rows.device))


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a small host tensor through pinned memory: otherwise `to` would wait for all work queued on the GPU."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _mirror(places: torch.Tensor, size: int) -> torch.Tensor:
    """Reflect positions beyond an edge."""
    places = places.abs()
    return torch.where(places < size, places, 2 * (size - 1) - places)


_Labels = dict[str, Any]  # name, split, source and other fields of a data set
_SIZES = {"train": 2048, "test": 512}
_FORMS = {
    "images": DataForm("images", (3, 32, 32), 10),
    "numbers": DataForm("numbers", (16,)),
    "pairs": DataForm("pairs", (32,), 2, vocabulary=64),
    "tokens": DataForm("tokens", (64,), 64, vocabulary=64),
}
# Number of ids in use, regardless of the vocabulary: more would take too long to learn.
_USED_IDS = 64
_SLAB = 256
# Contrast of noisy images: low enough to keep a small CNN below perfect accuracy.
_WEAK = 0.2


def build_synthetic(
    request: DataRequest, split: str, form: DataForm | None = None, device: torch.device | str = "cpu"
) -> DataSet:
    """Generate `synthetic:KIND`, or for plain `synthetic` the kind of `form`, which also sets shape, classes and
    vocabulary. `synthetic:noisy` generates low-contrast images. `request.samples` is the size of the training split;
    the test split has a fixed size."""
    kind = request.name.partition(":")[2] or (form.kind if form else "")
    strength = _WEAK if kind == "noisy" else 1.0
    kind = "images" if kind == "noisy" else kind
    refuse((not kind, f"--data synthetic needs a kind: use synthetic:KIND, one of {', '.join(_FORMS)}"), code="kind")
    if form is None or form.kind != kind:
        form = _FORMS[kind]
    if request.context and kind in ("pairs", "tokens"):
        form = replace(form, shape=(request.context,))
    count = request.samples if request.samples and split == "train" else _SIZES[split]
    builders: dict[str, Callable[..., DataSet]] = {"numbers": _numbers, "pairs": _pairs, "tokens": _tokens}
    build = builders.get(kind, functools.partial(_images, strength))
    labels: _Labels = {"name": request.name, "split": split, "source": "generated"}
    purposes = ("rule", f"samples of {split}")
    rule, draw = (torch.Generator(device).manual_seed(derive_seed(purpose, request.seed)) for purpose in purposes)
    if kind == "pairs":
        context = form.shape[0]
        what = f"synthetic pairs of {context} tokens with a vocabulary of {form.vocabulary}"
        refuse((form.vocabulary < 4 or context < 3, f"{what}: needs at least 3 tokens and a vocabulary of at least 4"))
        # Draw lengths on the host, where `take` reads them.
        host = torch.Generator().manual_seed(derive_seed(f"lengths of {split}", request.seed))
        labels["lengths"] = torch.randint(max(3, context // 2), context + 1, (count,), generator=host)
    return build(form, count, rule, draw, labels)


def _images(
    strength: float, form: DataForm, count: int, rule: torch.Generator, draw: torch.Generator, labels: _Labels
) -> DataSet:
    """Generate a smooth pattern per class, plus noise."""
    device, channels = rule.device, form.shape[0]
    patterns = torch.randn((form.num_classes, channels, 4, 4), generator=rule, device=device) * strength
    targets = torch.randint(form.num_classes, (count,), generator=draw, device=device)
    images = torch.empty((count, *form.shape), dtype=torch.uint8, device=device)
    # Generate in slabs: the whole set as floats would take four times its memory.
    for start in range(0, count, _SLAB):
        part = F.interpolate(patterns[targets[start : start + _SLAB]], size=form.shape[1:], mode="bilinear")
        part += torch.randn(part.shape, generator=draw, device=device)
        images[start : start + _SLAB] = (128 + 32 * part).round_().clamp_(0, 255).to(torch.uint8)
    labels |= {"mean": (0.5,) * channels, "std": (0.17,) * channels}
    return ImageData(form=form, inputs=images, targets=targets, **labels)


def _numbers(form: DataForm, count: int, rule: torch.Generator, draw: torch.Generator, labels: _Labels) -> DataSet:
    """Generate a linear function plus 10 % noise."""
    weights = torch.randn((form.shape[0], 1), generator=rule, device=rule.device) / form.shape[0] ** 0.5
    inputs = torch.randn((count, *form.shape), generator=draw, device=rule.device)
    noise = torch.randn((count, 1), generator=draw, device=rule.device)
    # Use double precision, because the user's flags may allow TF32 products.
    targets = (inputs.double() @ weights.double()).to(inputs.dtype) + 0.1 * noise
    return DataSet(form=form, inputs=inputs, targets=targets, **labels)


def _tokens(form: DataForm, count: int, rule: torch.Generator, draw: torch.Generator, labels: _Labels) -> DataSet:
    """Generate walks on a ring of ids: with probability 0.9 the next id follows, else a random one."""
    device, size = rule.device, (count, form.shape[0] + 1)
    ring = torch.randperm(form.vocabulary, generator=rule, device=device)[:_USED_IDS]
    leaps = torch.randint(len(ring), size, generator=draw, device=device)
    leaps[torch.rand(size, generator=draw, device=device) < 0.9] = 0
    starts = torch.randint(len(ring), (count, 1), generator=draw, device=device)
    # A running sum yields the positions on the ring without a loop over the context.
    blocks = ring[(starts + (leaps + 1).cumsum(1)) % len(ring)].to(torch.int32)
    return TokenData(form=replace(form, num_classes=form.vocabulary), inputs=blocks, targets=blocks, **labels)


def _pairs(form: DataForm, count: int, rule: torch.Generator, draw: torch.Generator, labels: _Labels) -> DataSet:
    """Generate pairs of halves, each with ids from one of two topics: class 1 if the topics match, else class 0."""
    device, context = rule.device, form.shape[0]
    ids = torch.randperm(form.vocabulary, generator=rule, device=device)
    ids = ids[ids != form.pad]
    separator, topics = ids[0], ids[1 : 2 * ((min(len(ids), _USED_IDS + 1) - 1) // 2) + 1].reshape(2, -1)
    places, ends = torch.arange(context, device=device), labels["lengths"].to(device)[:, None]
    first = torch.randint(2, (count, 1), generator=draw, device=device)
    targets = torch.randint(2, (count,), generator=draw, device=device)
    topic = torch.where(places < ends // 2, first, (first + targets[:, None] + 1) % 2)
    words = torch.randint(topics.shape[1], (count, context), generator=draw, device=device)
    inputs = topics[topic, words].masked_fill(places >= ends, form.pad)
    inputs = torch.where(places == ends // 2, separator, inputs)
    return PairData(form=replace(form, num_classes=2), inputs=inputs, targets=targets, **labels)


# Mean and standard deviation per channel, crop padding, and whether a flip keeps the class (not for digits).
_LOOKS = {
    "mnist": ((0.1307,), (0.3081,), 2, False),
    "fashion-mnist": ((0.2860,), (0.3530,), 2, True),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), 4, True),
}


def load_data(
    request: DataRequest,
    split: str,
    form: DataForm | None = None,
    device: torch.device | str = "cpu",
    model_folder: str | None = None,
) -> DataSet:
    """Load the split `train` or `test`. `form` is the model's default: the kind and shape of a synthetic set, which is
    generated on `device`, or the context of text. `model_folder` may contain the model's own tokenizer."""
    check_request(request)
    if request.name.startswith("synthetic"):
        return build_synthetic(request, split, form, device)
    limit = request.samples if split == "train" else None  # the test split is never truncated
    path = load_from_hub(request.name) if request.path is None else Path(request.path)
    layout, files = find_files(request.name, path, split)
    labels: _Labels = {"name": request.name, "split": split, "source": f"from {layout} files in {path}"}
    data: DataSet
    if request.name in _LOOKS:
        mean, std, pad, flip = _LOOKS[request.name]
        images, classes = formats.load_images(layout, files, split, len(mean), limit)
        inputs, targets = (torch.from_numpy(values[:limit].copy()) for values in (images, classes))
        if split == "train" and request.is_augmented:
            labels["augmentation"] = Augmentation(pad, flip, request.seed, request.cutout)
        form = DataForm("images", images.shape[1:], formats.NUM_CLASSES)
        data = ImageData(form=form, inputs=inputs, targets=targets, mean=mean, std=std, **labels)
    else:
        tokenizer = formats.load_tokenizer(request.tokenizer, model_folder)
        count, pad = tokenizer.vocabulary, tokenizer.pad
        labels["source"] += f", tokenized by {tokenizer.name}"
        if request.name == "mrpc":
            context = request.context or tokenizer.pair_context
            first, second, classes = formats.load_pairs(layout, files, limit)
            rows = [torch.tensor(row, dtype=torch.int64) for row in tokenizer.encode_pairs(first, second, context)]
            inputs, labels["lengths"] = pad_sequence(rows, True, pad), torch.tensor([len(row) for row in rows])
            form = DataForm("pairs", (context,), 2, count, pad)
            data = PairData(form=form, inputs=inputs, targets=torch.from_numpy(classes), **labels)
        else:
            context = request.context or (form.shape[0] if form and form.kind in ("pairs", "tokens") else 256)
            stream = torch.from_numpy(formats.load_text(files, split, tokenizer, context))
            # A view: the last id of a block (only a target) is also the first id of the next (an input).
            blocks = stream.unfold(0, context + 1, context)
            form = DataForm("tokens", (context,), count, count, pad)
            data = TokenData(form=form, inputs=blocks, targets=blocks, **labels)
    refuse((limit and limit > len(data), f"--samples {limit}: {request.name} has only {len(data)}"), code="samples")
    return data if limit is None else data.first(limit)
