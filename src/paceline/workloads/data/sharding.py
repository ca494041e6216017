"""The assignment of samples to ranks: the order of an epoch, its global batches, and each rank's share.

All functions are deterministic, so ranks agree without communication.
"""

import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from paceline.errors import ConfigError, refuse
from paceline.workloads.data import TAILS


@dataclass(frozen=True)
class EpochOrder:
    """The samples of one epoch in training order, cut into windows of one global batch each.

    `global_batch_size` is an int, or a tuple with the size of every window. `tail` determines whether an incomplete
    last window is kept, dropped, or padded with the first samples of the same order.
    """

    num_samples: int
    global_batch_size: int | tuple[int, ...]
    seed: int
    epoch: int
    tail: str = "keep"
    shuffles: bool = True

    def __post_init__(self) -> None:
        size = self.global_batch_size
        refuse((self.tail not in TAILS, f"tail {self.tail!r} is unknown: use {', '.join(TAILS)}"))
        if self.num_samples < 1 or min(size if isinstance(size, tuple) else (size,), default=0) < 1 or self.epoch < 0:
            what = f"{self.num_samples} samples in global batches of {size}, epoch {self.epoch}"
            raise ConfigError(f"{what}: samples and batches must be at least 1, and the epoch at least 0")
        if isinstance(size, tuple) and not sum(size[:-1]) < self.num_samples <= sum(size):
            what = (
                f"global batches of {sum(size)} samples in all, the last of {size[-1]}, for {self.num_samples} samples"
            )
            raise ConfigError(f"{what}: the last batch must have exactly the remaining samples")
        what = f"{self.num_samples} samples do not fill one global batch of {self._ends[1]}"
        refuse((self.num_windows == 0, f"{what}: use a smaller batch or --tail keep"))

    @cached_property
    def _ends(self) -> list[int]:
        """The start of the first window, then the end of every window, as if the last one were complete."""
        size = self.global_batch_size
        sizes = size if isinstance(size, tuple) else [size] * -(-self.num_samples // size)
        return list(itertools.accumulate(sizes, initial=0))

    @property
    def num_windows(self) -> int:
        """Number of global batches (optimizer steps) in the epoch."""
        is_short = self._ends[-1] > self.num_samples
        return len(self._ends) - 1 - (is_short and self.tail == "drop")

    @cached_property
    def _order(self) -> torch.Tensor:
        if not self.shuffles:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(derive_seed("order", self.seed, self.epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def window(self, number: int) -> torch.Tensor:
        """The indices of global batch `number`, on the host."""
        if not 0 <= number < self.num_windows:
            raise IndexError(f"global batch {number}: the epoch has only {self.num_windows}")
        start, end = self._ends[number : number + 2]
        found = self._order[start:end]
        missing = end - start - len(found)
        if self.tail != "pad" or missing == 0:
            return found
        # An epoch shorter than the batch may repeat more than once.
        return torch.cat([found, self._order[torch.arange(missing) % self.num_samples]])


class MicroBatch(NamedTuple):
    """The samples of one forward and backward pass on one rank. `num_counted` is 0 for a filler, a sample that does not
    count in the loss: it equalizes the number of passes on all ranks."""

    indices: torch.Tensor
    num_counted: int


def split_window(indices: torch.Tensor, rank: int, world_size: int, micro_batch_size: int) -> list[MicroBatch]:
    """Split off a rank's share of a global batch, in the same number of micro-batches on every rank. Shares are
    contiguous and differ in size by at most one sample, as do a rank's micro-batches."""
    largest = -(-len(indices) // world_size)
    count = -(-largest // micro_batch_size)
    share = cut_range(range(len(indices)), rank, world_size)
    parts = [cut_range(share, number, count) for number in range(count)]
    return [MicroBatch(indices[part.start : part.stop] if part else indices[:1], len(part)) for part in parts]


def cut_range(whole: range, number: int, count: int) -> range:
    """Part `number` of `count` contiguous parts with sizes that differ by at most one; a part may be empty."""
    return whole[number * len(whole) // count : (number + 1) * len(whole) // count]


def derive_seed(purpose: str, *numbers: int) -> int:
    """Derive a seed for one purpose. Hashing avoids collisions of sums such as seed + epoch, and fills the low 32 bits,
    the only ones that torch's CPU generator uses."""
    text = ":".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
