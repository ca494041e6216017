"""Who takes which sample: the order of an epoch, its global batches, and the share of each rank.

Everything follows from its arguments alone, so ranks agree without communication. Samples are in `sets`.
"""

import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from paceline.errors import ConfigError
from paceline.workloads.data import TAILS


@dataclass(frozen=True)
class EpochOrder:
    """The samples of one epoch in the order of training, cut into windows: one window is one global batch. `tail` says
    what becomes of a last window that is not full: it is kept short, dropped, or filled with the first samples of the
    same order. `global_batch_size` is that of all windows, or a tuple of that of each. Unless it
    `shuffles`, samples stay in the order of the data."""

    num_samples: int
    global_batch_size: int | tuple[int, ...]
    seed: int
    epoch: int
    tail: str = "keep"
    shuffles: bool = True

    def __post_init__(self) -> None:
        size = self.global_batch_size
        if self.tail not in TAILS:
            raise ConfigError(f"tail {self.tail!r} is unknown: known are {', '.join(TAILS)}")
        if self.num_samples < 1 or min(size if isinstance(size, tuple) else (size,), default=0) < 1 or self.epoch < 0:
            what = f"{self.num_samples} samples in global batches of {size}, epoch {self.epoch}"
            raise ConfigError(f"{what}: needed are at least 1, 1 and 0")
        if isinstance(size, tuple) and not sum(size[:-1]) < self.num_samples <= sum(size):
            what = f"{len(size)} global batches of {sum(size)} samples in all, the last of {size[-1]}"
            raise ConfigError(f"{what}, do not cut {self.num_samples}: the last has to take what the others leave")
        if self.num_windows == 0:
            what = f"{self.num_samples} samples make no whole global batch of {self._ends[1]}"
            raise ConfigError(f"{what}: use a smaller batch, or --tail keep")

    @cached_property
    def _ends(self) -> list[int]:
        """Where each window ends if there are as many samples; before them, where the first begins."""
        size = self.global_batch_size
        sizes = size if isinstance(size, tuple) else [size] * -(-self.num_samples // size)
        return list(itertools.accumulate(sizes, initial=0))

    @property
    def num_windows(self) -> int:
        """How many global batches, and so optimizer steps, the epoch has."""
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
            raise IndexError(f"global batch {number} of an epoch that has {self.num_windows}")
        start, end = self._ends[number : number + 2]
        found = self._order[start:end]
        missing = end - start - len(found)
        if self.tail != "pad" or missing == 0:
            return found
        # An epoch shorter than the batch is repeated more than once.
        return torch.cat([found, self._order[torch.arange(missing) % self.num_samples]])


class MicroBatch(NamedTuple):
    """What one rank computes at once. Its samples count in the loss, or `num_counted` is 0: then one sample is there
    only so that forward and backward match those of other ranks."""

    indices: torch.Tensor
    num_counted: int


def split_window(indices: torch.Tensor, rank: int, world_size: int, micro_batch_size: int) -> list[MicroBatch]:
    """A rank's share of a global batch as micro-batches, of which every rank has equally many. Shares are contiguous
    and differ by one sample at most, and so do the micro-batches of a rank."""
    largest = -(-len(indices) // world_size)
    count = -(-largest // micro_batch_size)
    share = cut_range(range(len(indices)), rank, world_size)
    parts = [cut_range(share, number, count) for number in range(count)]
    return [MicroBatch(indices[part.start : part.stop] if part else indices[:1], len(part)) for part in parts]


def cut_range(whole: range, number: int, count: int) -> range:
    """Part `number` of `count` contiguous parts, which differ by one at most, so a part may be empty."""
    return whole[number * len(whole) // count : (number + 1) * len(whole) // count]


def derive_seed(purpose: str, *numbers: int) -> int:
    """A seed for one purpose, unrelated to that of neighbouring numbers: torch's generator on the CPU uses the low 32
    bits only, so sums such as seed + epoch would collide."""
    text = ":".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
