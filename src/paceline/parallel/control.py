"""The control words that travel with the last gradients of a step, and the errors that result from them.

Each rank writes only its own slot, so the sum acts as a gather. All words are integers below 256, which every dtype
down to bfloat16 represents exactly. After an error, the ranks share the details as `Finding` objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import IntFlag
from typing import NamedTuple

import torch

from paceline.errors import CollectiveError, ConfigError, PacelineError
from paceline.parallel.replicas import Replica, list_some
from paceline.units import name_ranks

_STATUS_WORDS, _SAMPLE_WORDS, _DIGEST_WORDS = 2, 5, 6
SLOT_WORDS = _STATUS_WORDS + _SAMPLE_WORDS + _DIGEST_WORDS
_COUNT_WORDS = 4


class Status(IntFlag):
    """The status of a rank in this step. `MISSING`, `FAILED` and `CHANGED` are errors."""

    OK = 0
    MISSING = 1  # a parameter has no gradient, and unused parameters are not allowed
    FAILED = 2  # this rank raised an error and takes part only so that no rank waits for it
    CHANGED = 4  # parameters were added or unfrozen after wrapping
    FINISHED = 8  # this rank has run out of data and waits in `join`
    STATISTICS = 16  # running statistics have changed and travel in this message
    BUFFERS = 32  # other buffers have changed
    HOLD = 64  # a pending backward needs the buffers as they are: do not change them in this step
    SKIPS = 128  # local gradients are not finite: the optimizer may skip this step


ERRORS = Status.MISSING | Status.FAILED | Status.CHANGED


class RankReport(NamedTuple):
    """One rank's slot: its status, its number of samples, and a digest of its parameters (0: not computed)."""

    status: Status = Status.OK
    samples: int = 1
    digest: int = 0

    def encode(self) -> list[float]:
        if not 0 <= self.samples < 256**_SAMPLE_WORDS:
            raise ConfigError(f"a step has {self.samples} samples: must be 0 to {256**_SAMPLE_WORDS - 1}")
        fields = (self.status, _STATUS_WORDS), (self.samples, _SAMPLE_WORDS), (self.digest, _DIGEST_WORDS)
        return [float(byte) for value, size in fields for byte in int(value).to_bytes(size, "little")]

    @classmethod
    def decode(cls, words: Sequence[float]) -> RankReport:
        numbers, ends = bytes(map(int, words)), (0, _STATUS_WORDS, _STATUS_WORDS + _SAMPLE_WORDS, SLOT_WORDS)
        status, samples, digest = (int.from_bytes(numbers[a:b], "little") for a, b in itertools.pairwise(ends))
        return cls(Status(status), samples, digest)


class ControlWords:
    """The layout: a slot per rank, row counts of embeddings, use counts (if unused parameters are allowed), running
    statistics."""

    def __init__(
        self, rank: int, world_size: int, num_used: int = 0, num_statistics: int = 0, num_tables: int = 0
    ) -> None:
        self.rank, self.num_slot_words, self.num_tables = rank, world_size * SLOT_WORDS, num_tables
        self.num_used, self.num_statistics = num_used, num_statistics
        # The host reads these words in each step.
        self.num_read_words = self.num_slot_words + world_size * num_tables * _COUNT_WORDS
        self.num_words = self.num_read_words + num_used + num_statistics
        self._encoded: dict[tuple[RankReport, torch.device, torch.dtype], torch.Tensor] = {}

    def write(self, words: torch.Tensor, report: RankReport, counts: Sequence[int], missing: Sequence[int]) -> None:
        """Write everything except the statistics."""
        self.write_report(words, report)
        if self.num_tables:
            self.write_counts(words, counts)
        if self.num_used:
            self.write_used(words, missing)

    def write_report(self, words: torch.Tensor, report: RankReport) -> None:
        """Fill the slots of all ranks: this rank's report, and zeros for the others, which the sum fills in."""
        # Most steps repeat a report. Caching the tensor avoids building it and, on a GPU, copying it from the host.
        key = (report, words.device, words.dtype)
        if key not in self._encoded:
            slots = [0.0] * self.num_slot_words
            slots[self.rank * SLOT_WORDS : (self.rank + 1) * SLOT_WORDS] = report.encode()
            if len(self._encoded) > 16:
                self._encoded.clear()
            self._encoded[key] = torch.tensor(slots, dtype=words.dtype, device=words.device)
        words[: self.num_slot_words].copy_(self._encoded[key])

    def read_reports(self, slots: Sequence[float]) -> list[RankReport]:
        """Every rank's report, in rank order, from the summed slots."""
        starts = range(0, self.num_slot_words, SLOT_WORDS)
        return [RankReport.decode(slots[start : start + SLOT_WORDS]) for start in starts]

    def write_counts(self, words: torch.Tensor, counts: Sequence[int]) -> None:
        """Write this rank's row count for each embedding, below 2 ** 32, and zeros for the other ranks."""
        mine = [float(byte) for count in counts for byte in count.to_bytes(_COUNT_WORDS, "little")]
        part = words[self.num_slot_words : self.num_read_words].zero_()
        part[self.rank * len(mine) : (self.rank + 1) * len(mine)] = torch.tensor(mine, dtype=words.dtype)

    def read_counts(self, words: Sequence[float]) -> list[list[int]]:
        """The row counts by rank and embedding."""
        starts = range(self.num_slot_words, self.num_read_words, _COUNT_WORDS)
        found = [int.from_bytes(bytes(map(int, words[start : start + _COUNT_WORDS])), "little") for start in starts]
        tables = self.num_tables
        return [found[place : place + tables] for place in range(0, len(found), tables)] if tables else []

    def write_used(self, words: torch.Tensor, missing: Sequence[int]) -> None:
        """Write 1 for every parameter with a gradient and 0 for the others."""
        used = self.used(words).fill_(1.0)
        if missing:
            used[torch.tensor(missing, device=words.device)] = 0.0

    def used(self, words: torch.Tensor) -> torch.Tensor:
        return words[self.num_read_words : self.num_read_words + self.num_used]

    def statistics(self, words: torch.Tensor) -> torch.Tensor:
        return words[self.num_read_words + self.num_used : self.num_words]


class Finding(NamedTuple):
    """One rank's report on a failed step: an error message, a change to the model, missing gradients."""

    error: str
    in_hook: bool
    change: str
    missing: tuple[int, ...]
    frozen: tuple[int, ...]


def build_step_error(findings: Sequence[Finding], step: int, replica: Replica) -> PacelineError:
    """The error for the findings of all ranks. Equal findings yield equal errors, so every rank raises the same one."""
    if failed := [f"rank {rank} failed in {finding.error}" for rank, finding in enumerate(findings) if finding.error]:
        code = "hook-failed" if any(finding.in_hook for finding in findings) else "rank-failed"
        return CollectiveError(f"step {step}: {'; '.join(failed)}", code=code)
    if changed := [f"{finding.change} (rank {rank})" for rank, finding in enumerate(findings) if finding.change]:
        text = f"the model changed after wrapping: {'; '.join(changed)}; call rebuild() on all ranks"
        return ConfigError(text, code="model-changed")
    lines = []
    for index in sorted({index for finding in findings for index in finding.missing}):
        ranks = [rank for rank, finding in enumerate(findings) if index in finding.missing]
        where = "any rank" if len(ranks) == len(findings) else name_ranks(ranks)
        is_frozen = any(index in finding.frozen for finding in findings)
        after = " (frozen after wrapping: call rebuild())" if is_frozen else ""
        lines.append(f"{replica.name(index)} on {where}{after}")
    advice = "make the loss depend on these parameters, or pass find_unused_parameters=True (they then count as zeros)"
    text = f"step {step}: no gradient for {list_some(lines, most=8)}: {advice}"
    return CollectiveError(text, code="missing-gradient")
