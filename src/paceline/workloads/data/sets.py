"""A data set in memory: rows by index, and what is done to a batch on its device. Reading files is in `load`."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from paceline.workloads.data.seeds import derive_seed
from paceline.workloads.forms import Batch, DataForm

__all__ = ["Augmentation", "DataSet", "ImageData", "PairData", "TokenData"]

# The fields that have a row for each sample.
_ROWS = ("inputs", "targets", "lengths")


@dataclass(frozen=True, eq=False, kw_only=True)
class DataSet:
    """Samples in memory. `source` says in words where they are from."""

    name: str
    form: DataForm
    split: str
    source: str
    inputs: torch.Tensor
    targets: torch.Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: torch.Tensor) -> Batch:
        """The samples of these indices, where the set is: on the host, or on the device for a synthetic one."""
        return Batch(_select(self.inputs, indices), _select(self.targets, indices))

    @functools.cached_property
    def checksum(self) -> int:
        """Of all samples: another set, or an edited one, has another."""
        found = 0
        for name, value in sorted(vars(self).items()):
            if name in _ROWS:
                found = zlib.crc32(value.cpu().contiguous().numpy(), found)
        return found

    def first(self, num_samples: int) -> Self:
        """The first so many samples, or all where there are fewer."""
        rows: dict[str, Any] = {name: value[:num_samples] for name, value in vars(self).items() if name in _ROWS}
        return dataclasses.replace(self, **rows)

    def prepare(self, batch: Batch, indices: torch.Tensor, epoch: int) -> Batch:
        """What a model takes, made on the batch's device from what `take(indices)` gave."""
        return batch

    def describe(self) -> str:
        """One line for people."""
        size = " x ".join(map(str, self.form.shape))
        what = {
            "images": f"images of {size} in {self.form.num_classes} classes",
            "numbers": f"rows of {size} numbers, one to be predicted",
            "pairs": f"pairs of up to {size} tokens in {self.form.num_classes} classes",
            "tokens": f"blocks of {size} tokens, of {self.form.vocabulary:,}",
        }[self.form.kind]
        return f"{self.name}, {self.split}: {len(self):,} {what}, {self.source}"


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenData(DataSet):
    """Blocks of context + 1 ids in a row; each id is the target of the one before. `targets` is not used."""

    def take(self, indices: torch.Tensor) -> Batch:
        blocks = _select(self.inputs, indices)
        return Batch(blocks[:, :-1], blocks[:, 1:])

    def prepare(self, batch: Batch, indices: torch.Tensor, epoch: int) -> Batch:
        # Ids are short in memory and on the way to the device.
        return Batch(batch.inputs.long(), batch.targets.long())


@dataclass(frozen=True, eq=False, kw_only=True)
class PairData(DataSet):
    """Sequences padded behind, of which `lengths`, on the host, says how many ids count."""

    lengths: torch.Tensor

    def take(self, indices: torch.Tensor) -> Batch:
        # The padding is cut here, where the lengths are known without asking a device.
        lengths = _select(self.lengths, indices)
        longest = int(lengths.max())
        batch = super().take(indices)
        mask = torch.arange(longest) < lengths[:, None]
        return Batch(batch.inputs[:, :longest], batch.targets, _send(mask.long(), batch.inputs.device))


# The middle of a cutout is drawn in these parts of an image, whose size is not known then.
_PARTS = 1 << 14


@dataclass(frozen=True)
class Augmentation:
    """A random crop of the image padded by `pad` pixels that mirror its edge, a horizontal flip where it may, and a
    square of `cutout` pixels a side, anywhere and partly outside perhaps, in which nothing is seen.

    What a sample gets follows from seed, epoch and its index alone: it is the same on any rank, for any number of
    ranks, and after a resume.
    """

    pad: int
    flip: bool
    seed: int
    cutout: int = 0
    _tables: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def draw(self, num_samples: int, epoch: int) -> torch.Tensor:
        """Of every sample of an epoch: the shift down, the shift right, the flip, and with a cutout the row and the
        column of its middle, in parts of `_PARTS` of the image. On the host."""
        # A thread that fetches ahead may be in the next epoch already: the table is handed on, not looked up again.
        table = self._tables.get((num_samples, epoch))
        if table is None:
            generator = torch.Generator().manual_seed(derive_seed("augment", self.seed, epoch))
            shifts = torch.randint(-self.pad, self.pad + 1, (num_samples, 2), generator=generator, dtype=torch.int16)
            flips = torch.randint(2, (num_samples, 1), generator=generator, dtype=torch.int16)
            table = torch.cat([shifts, flips * self.flip], dim=1)
            if self.cutout:
                middles = torch.randint(_PARTS, (num_samples, 2), generator=generator, dtype=torch.int16)
                table = torch.cat([table, middles], dim=1)
            self._tables.clear()
            self._tables[num_samples, epoch] = table
        return table

    def apply(self, images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """The images, each moved by its row of `draws`."""
        count, channels, height, width = images.shape
        down, right, flips = _send(draws[:, :3].long(), images.device)[:, :, None].unbind(dim=1)
        rows = _mirror(torch.arange(height, device=images.device) + down, height)
        columns = torch.arange(width, device=images.device)
        columns = _mirror(torch.where(flips > 0, width - 1 - columns, columns) + right, width)
        places = (rows[:, :, None] * width + columns[:, None, :]).reshape(count, 1, -1).expand(-1, channels, -1)
        return images.reshape(count, channels, -1).gather(2, places).reshape(images.shape)

    def hide(self, images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """The normalised images with the mean, 0, in the square of each one's row of `draws`."""
        middles = _send(draws[:, 3:].long(), images.device)
        inside = []
        for axis, size in enumerate(images.shape[2:]):
            first = (middles[:, axis] * size).div(_PARTS, rounding_mode="floor") - self.cutout // 2
            places = torch.arange(size, device=images.device) - first[:, None]
            inside.append((places >= 0) & (places < self.cutout))
        return images.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageData(DataSet):
    """Images as bytes; `mean` and `std` of each channel, on a scale from 0 to 1, are what `prepare` normalises by."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation | None = None
    _scales: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    def prepare(self, batch: Batch, indices: torch.Tensor, epoch: int) -> Batch:
        images, draws = batch.inputs, None
        if self.augmentation is not None:
            draws = _select(self.augmentation.draw(len(self), epoch), indices)
            images = self.augmentation.apply(images, draws)
        if images.device not in self._scales:
            mean, std = torch.tensor([self.mean, self.std])[:, :, None, None]
            self._scales[images.device] = torch.stack([1 / (255 * std), -mean / std]).to(images.device)
        scale, shift = self._scales[images.device]
        images = images.to(torch.float32).mul_(scale).add_(shift)
        if draws is not None and self.augmentation is not None and self.augmentation.cutout:
            images = self.augmentation.hide(images, draws)
        return Batch(images, batch.targets)


def _select(rows: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return rows.index_select(0, _send(indices, rows.device))


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor of the host on the device, without waiting for it: from pageable memory `to` would make the host
    wait until the GPU is done with all that was asked of it before, a whole step, which would look like data."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _mirror(places: torch.Tensor, size: int) -> torch.Tensor:
    """Places beyond an edge, mirrored at it."""
    places = places.abs()
    return torch.where(places < size, places, 2 * (size - 1) - places)
