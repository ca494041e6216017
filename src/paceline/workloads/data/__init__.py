"""Data as a model sees it: the form of a data set, and one batch of it.

Loads without torch. `sources` finds files, `formats` reads them, `sets` holds the samples, `sharding` shares them out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KINDS = ("images", "numbers", "pairs", "tokens")
# A target of this value counts neither in the loss nor in the accuracy, as in torch's cross-entropy.
IGNORED = -100
# What becomes of the last global batch of an epoch when it is not full.
TAILS = ("keep", "drop", "pad")


def shorten_error(error: Exception) -> str:
    """The text of another library's error on one line of limited length."""
    return " ".join(str(error).split())[:160] or type(error).__name__


@dataclass(frozen=True)
class DataForm:
    """What a model must take and give. `images`: inputs (batch, channels, height, width), a class each. `numbers`:
    inputs (batch, features), a number each, 0 classes. `tokens`: inputs (batch, context) of ids, the next id for each.
    `pairs`: the same inputs with a mask, padded at the end to the longest of the batch, and a class for each pair."""

    kind: str
    shape: tuple[int, ...]
    num_classes: int = 0
    vocabulary: int = 0
    pad: int = 0

    @property
    def targets_per_sample(self) -> int:
        """How many targets one sample has: what a loss is averaged over."""
        return self.shape[0] if self.kind == "tokens" else 1


@dataclass(frozen=True)
class Batch:
    """Samples of one rank: inputs, targets and, where sequences are padded, a mask that is 1 on tokens."""

    inputs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with each of its tensors changed."""
        return Batch(change(self.inputs), change(self.targets), None if self.mask is None else change(self.mask))

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on a device."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
