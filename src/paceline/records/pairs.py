"""Wrappers beside each other: the ratio of steps that were timed in turns, and how uncertain it is.

Nothing here prints; what one record says by itself belongs to `kinds`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import RecordError
from paceline.records.kinds import WrapperRecord

__all__ = ["Ratio", "Standing", "compare_steps", "compare_times", "compare_wrappers"]


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, and the half-width of its 95 % interval; None where one repetition tells nothing."""

    value: float
    noise: float | None

    @property
    def is_clear(self) -> bool:
        """Whether the ratio differs from 1 by more than the noise."""
        return self.noise is not None and abs(self.value - 1) > self.noise


def _median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median by order statistics, which asks nothing of the distribution.

    The number of values below the true median is binomial(n, 1/2), within n/2 +- 0.98 sqrt(n) in 95 % of cases. With
    fewer than 6 values that is all of them, and the coverage is less.
    """
    ordered, n = sorted(values), len(values)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return ordered[low], ordered[n - 1 - low]


def compare_times(mine: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """The ratio of two things that were timed in turns, repetition by repetition."""
    ratios = [here / there for here, there in zip(mine, theirs, strict=True) if there > 0]
    if not ratios:
        raise RecordError("what is compared with takes no time: nothing to compare")
    value = statistics.median(ratios)
    if len(ratios) < 2:
        return Ratio(value, None)
    low, high = _median_interval(ratios)
    return Ratio(value, max(high - value, value - low))


def compare_steps(record: WrapperRecord, reference: WrapperRecord) -> Ratio:
    """Step time over the reference's in the same repetition: neighbours in time, so a slow spell hits both."""
    mine, theirs = record.timing.reduced_s, reference.timing.reduced_s
    if record.job != reference.job or len(mine) != len(theirs):
        raise RecordError(
            f"{record.wrapper} ({record.job}) and {reference.wrapper} ({reference.job}) were not timed in turns"
        )
    return Ratio(1.0, 0.0) if record is reference else compare_times(mine, theirs)


@dataclass(frozen=True)
class Standing:
    """A wrapper beside torch's, torch's tuned and the bare module on its own backend, and beside torch's on gloo,
    which is what one has without us; each None where that one did not run."""

    record: WrapperRecord
    torch: WrapperRecord | None
    tuned: WrapperRecord | None
    bare: WrapperRecord | None
    torch_on_gloo: WrapperRecord | None = None

    @property
    def to_torch(self) -> Ratio | None:
        return compare_steps(self.record, self.torch) if self.torch else None

    @property
    def to_tuned(self) -> Ratio | None:
        return compare_steps(self.record, self.tuned) if self.tuned else None

    @property
    def to_bare(self) -> Ratio | None:
        return compare_steps(self.record, self.bare) if self.bare else None

    @property
    def to_torch_on_gloo(self) -> Ratio | None:
        return compare_steps(self.record, self.torch_on_gloo) if self.torch_on_gloo else None

    @property
    def added_s(self) -> float | None:
        """The median of what the wrapper adds to the bare module's step of the same repetition."""
        if self.bare is None:
            return None
        pairs = zip(self.record.timing.reduced_s, self.bare.timing.reduced_s, strict=True)
        return statistics.median(here - there for here, there in pairs)

    @property
    def host_s_per_parameter(self) -> float | None:
        """The host's time that the wrapper adds per parameter, where it can be told: beyond the noise, and on one rank
        on CPU, where nothing is sent and nothing is hidden behind a device."""
        alone = self.record.world_size == 1 and self.record.device == "cpu"
        if not alone or self.added_s is None or self.to_bare is None or not self.to_bare.is_clear:
            return None
        return self.added_s / self.record.num_parameters

    @property
    def added_bytes(self) -> int | None:
        """What the wrapper adds to the bare module's memory at the peak of a step; None where nobody counted."""
        if self.bare is None or not self.record.held_bytes:
            return None
        here, there = self.record, self.bare
        return here.held_bytes + here.peak_step_bytes - there.held_bytes - there.peak_step_bytes


def compare_wrappers(records: Sequence[WrapperRecord]) -> list[Standing]:
    """Each record of a run, in the given order, with those that it is compared with."""
    known = {(record.wrapper, record.backend, record.job): record for record in records}

    def beside(record: WrapperRecord, wrapper: str, backend: str | None = None) -> WrapperRecord | None:
        return known.get((wrapper, backend or record.backend, record.job))

    return [
        Standing(r, beside(r, "torch"), beside(r, "torch-tuned"), beside(r, "bare"), beside(r, "torch", "gloo"))
        for r in records
    ]
