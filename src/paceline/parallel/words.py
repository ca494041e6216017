"""The control words: what every rank tells the others in the same message that carries the last gradients.

A sum is a gather where each rank writes only its own slot and leaves the others at zero. All words are whole numbers
below 256, which every floating-point dtype down to bfloat16 carries exactly. What the words lead to is in `steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import torch

__all__ = ["SLOT_WORDS", "Notice", "Status", "Tail"]

_SAMPLE_WORDS, _DIGEST_WORDS = 5, 6
SLOT_WORDS = 1 + _SAMPLE_WORDS + _DIGEST_WORDS


class Status(IntFlag):
    """What may be up with a rank in this step. All but `STATISTICS`, `BUFFERS` and `HOLD` are out of the ordinary."""

    FINE = 0
    MISSING = 1  # a parameter has no gradient here, and that was not asked to be handled
    FAILED = 2  # this rank raised an error and takes part only so that nobody waits for it
    CHANGED = 4  # parameters were added, or set to be trained, after wrapping
    FINISHED = 8  # this rank has no more data and waits in `join`
    STATISTICS = 16  # running statistics have changed and travel in this message
    BUFFERS = 32  # other buffers have changed
    HOLD = 64  # another backward still needs buffers as they are: leave them for this step


@dataclass(frozen=True)
class Notice:
    """One rank's slot: its status, the samples behind its gradients, and a digest of its parameters (0: not taken)."""

    status: Status = Status.FINE
    samples: int = 1
    digest: int = 0

    def encode(self) -> list[float]:
        if not 0 <= self.samples < 256**_SAMPLE_WORDS:
            raise ValueError(f"{self.samples} samples do not fit their words")
        digits = [int(self.status)]
        for value, words in ((self.samples, _SAMPLE_WORDS), (self.digest, _DIGEST_WORDS)):
            digits += [(value >> (8 * word)) & 255 for word in range(words)]
        return [float(digit) for digit in digits]

    @classmethod
    def decode(cls, words: Sequence[float]) -> Notice:
        digits = [int(word) for word in words]
        samples = sum(digit << (8 * place) for place, digit in enumerate(digits[1 : 1 + _SAMPLE_WORDS]))
        digest = sum(digit << (8 * place) for place, digit in enumerate(digits[1 + _SAMPLE_WORDS :]))
        return cls(Status(digits[0]), samples, digest)


class Tail:
    """What rides behind the last gradients: a slot for each rank, use counts of parameters, running statistics.

    The use counts are there only where missing gradients are handled; `num_statistics` words are for the statistics.
    """

    def __init__(self, rank: int, world_size: int, num_used: int = 0, num_statistics: int = 0) -> None:
        self.rank, self.world_size = rank, world_size
        self.num_slots = world_size * SLOT_WORDS
        self.num_used, self.num_statistics = num_used, num_statistics
        self._kept: dict[tuple[Notice, torch.device, torch.dtype], torch.Tensor] = {}

    @property
    def num_words(self) -> int:
        return self.num_slots + self.num_used + self.num_statistics

    def write_slots(self, region: torch.Tensor, notice: Notice) -> None:
        """Fill the slots of all ranks: this rank's notice, and zeros for the others' to be added to."""
        region[: self.num_slots].copy_(self._slots(notice, region.device, region.dtype))

    def _slots(self, notice: Notice, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        # Steps are mostly alike: a kept tensor saves building it, and on a GPU the copy from the host.
        key = (notice, device, dtype)
        if key not in self._kept:
            slots = [0.0] * self.num_slots
            slots[self.rank * SLOT_WORDS : (self.rank + 1) * SLOT_WORDS] = notice.encode()
            if len(self._kept) > 16:
                self._kept.clear()
            self._kept[key] = torch.tensor(slots, dtype=dtype, device=device)
        return self._kept[key]

    def write_used(self, region: torch.Tensor, missing: Sequence[int]) -> None:
        """Count one for every parameter that has a gradient here."""
        used = self.used(region)
        used.fill_(1.0)
        if missing:
            used[torch.tensor(missing, device=region.device)] = 0.0

    def used(self, region: torch.Tensor) -> torch.Tensor:
        return region[self.num_slots : self.num_slots + self.num_used]

    def statistics(self, region: torch.Tensor) -> torch.Tensor:
        return region[self.num_slots + self.num_used : self.num_words]

    def read_slots(self, words: Sequence[float]) -> list[Notice]:
        """Every rank's notice, in rank order, from the summed slots."""
        edges = range(0, self.num_slots, SLOT_WORDS)
        return [Notice.decode(words[start : start + SLOT_WORDS]) for start in edges]
