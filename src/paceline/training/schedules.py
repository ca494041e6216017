"""Learning rates and global batches as pure functions of the step: a resumed run repeats them without saved state."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.errors import ConfigError, refuse

if TYPE_CHECKING:
    from torch.optim import Optimizer

SCHEDULES = ("constant", "cosine", "linear", "piecewise")


def check_drops(drops: tuple[float, ...], shape: str, name: str = "--lr-drops") -> None:
    """Reject drops that are not increasing fractions of a run, or that come without the piecewise schedule."""
    found = f"{name} {','.join(map(str, drops)) or 'none'}"
    if bool(drops) != (shape == "piecewise"):
        raise ConfigError(f"{found} with schedule {shape}: only piecewise has drops, and requires them: 0.5,0.75")
    if not all(a < b for a, b in itertools.pairwise((0.0, *drops, 1.0))):
        raise ConfigError(f"{found}: must be increasing fractions of the run between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate that rises linearly to `peak` over `warmup_steps`, and then follows a shape.

    It stays constant, falls to 0 at `num_steps` (cosine, linear), or is divided by 10 at each of `drops` (piecewise),
    which are fractions of all `num_steps`, including the warm-up.
    """

    shape: str
    peak: float
    num_steps: int
    warmup_steps: int = 0
    drops: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        steps, warmup, first = self.num_steps, self.warmup_steps, (*self.drops, math.inf)[0]
        refuse(
            (self.shape not in SCHEDULES, f"unknown schedule {self.shape!r}: use one of {', '.join(SCHEDULES)}"),
            (not 0 <= self.peak < math.inf, f"peak {self.peak}: must be finite and at least 0"),
            (steps < 1 or warmup < 0, f"{steps} steps with {warmup} warm-up steps: must be at least 1 and at least 0"),
        )
        check_drops(self.drops, self.shape, "drops")
        refuse((first * steps < warmup, f"a drop at {first} of {steps} steps, inside the warm-up of {warmup}: move it"))

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        if self.shape == "piecewise":
            # Divide instead of multiplying: the quotient rounds exactly as the literal does, so 0.55 of 100 steps is
            # step 55 and not 56.
            return self.peak * 0.1 ** sum(step / self.num_steps >= drop for drop in self.drops)
        length = max(1, self.num_steps - self.warmup_steps)
        share = min(1.0, (step - self.warmup_steps) / length)
        if self.shape == "linear":
            return self.peak * (1 - share)
        return self.peak * 0.5 * (1 + math.cos(math.pi * share))

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Set a step's learning rate in all parameter groups, and return it."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate


# A rank computes its part of a grown batch in more or larger micro-batches.
GROWS = ("accumulate", "batch-size")

Growths = tuple[tuple[float, int], ...]


def parse_growths(text: str) -> Growths:
    """Parse `0.5:4,0.75:16`: from each fraction of the run onward, multiply the initial batch by the factor."""
    growths = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d*\.?\d+)\s*:\s*(\d+)\s*", part, re.ASCII)
        if match is None:
            use = "use SHARE:FACTOR, as in 0.5:4,0.75:16"
            raise ConfigError(f"--batch-growth {text!r} cannot be parsed at {part!r}: {use}")
        growths.append((float(match[1]), int(match[2])))
    check_growths(tuple(growths))
    return tuple(growths)


def format_growths(growths: Growths) -> str:
    """The inverse of `parse_growths`; `none` if the batch does not grow."""
    return ",".join(f"{share}:{factor}" for share, factor in growths) or "none"


def check_growths(growths: Growths) -> None:
    """Reject invalid batch growth: fractions of the run and factors must increase, and factors start at 2."""
    flag = f"--batch-growth {format_growths(growths)}:"
    for (before, least), (share, factor) in itertools.pairwise(((0.0, 1), *growths)):
        is_factor = type(factor) is int
        refuse(
            (not 0 < share < 1, f"{flag} {share} is not a fraction of the run; it must be above 0 and below 1"),
            (not is_factor, f"{flag} factor {factor!r} must be an integer, so that ranks can divide the batch"),
            (share <= before, f"{flag} {share} comes after {before}; fractions must increase"),
            (is_factor and factor <= least, f"{flag} factor {factor} comes after {least}; factors must increase"),
        )


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The global batches of a run of `epochs`, each with `num_samples`.

    The batch grows at the first step that starts at or after the specified fraction of the run's samples, even in the
    middle of an epoch.
    """

    global_batch_size: int
    num_samples: int
    epochs: int
    growths: Growths = ()
    tail: str = "keep"

    def __post_init__(self) -> None:
        numbers = (self.global_batch_size, self.num_samples, self.epochs)
        if min(numbers) < 1:
            raise ConfigError("batch size {}, {} samples, {} epochs: each must be at least 1".format(*numbers))
        check_growths(self.growths)

    @cached_property
    def marks(self) -> tuple[tuple[int, int], ...]:
        """Each growth as (the run's first sample with this batch, global batch size)."""
        total = self.epochs * self.num_samples
        # Use exact decimals: 0.1 of 30 samples is 3, but the float product is slightly more.
        return tuple(
            (math.ceil(Fraction(repr(float(share))) * total), factor * self.global_batch_size)
            for share, factor in self.growths
        )

    def window_sizes(self, epoch: int) -> tuple[int, ...]:
        """The sizes of all windows that start in the epoch; a short last window counts with its nominal size."""
        sizes: list[int] = []
        at, end = epoch * self.num_samples, (epoch + 1) * self.num_samples
        while at < end:
            size = max((size for start, size in self.marks if start <= at), default=self.global_batch_size)
            until = min((start for start, _ in self.marks if at < start < end), default=end)
            count = -(-(until - at) // size)
            sizes += [size] * count
            at += count * size
        return tuple(sizes)

    def count_steps(self, epoch: int) -> int:
        sizes = self.window_sizes(epoch)
        return len(sizes) - (sum(sizes) > self.num_samples and self.tail == "drop")

    @cached_property
    def num_steps(self) -> int:
        """Number of steps in the whole run."""
        if not self.growths:
            return self.epochs * self.count_steps(0)
        return sum(map(self.count_steps, range(self.epochs)))

    @cached_property
    def growth_steps(self) -> tuple[int | None, ...]:
        """The first step of each growth, counted from 0; None for growths that never take effect."""
        first: dict[int, int] = {}
        step = 0
        for epoch in range(self.epochs if self.growths else 0):
            sizes = self.window_sizes(epoch)[: self.count_steps(epoch)]
            first = {size: step + sizes.index(size) for size in set(sizes)} | first
            step += len(sizes)
        return tuple(first.get(size) for _, size in self.marks)

    def check(self) -> None:
        """Reject growths that do not fit this data or never take effect."""
        flag = f"--batch-growth {format_growths(self.growths)}:"
        for (share, factor), (_, size), step in zip(self.growths, self.marks, self.growth_steps, strict=True):
            if size > self.num_samples:
                found = f"{factor} x {self.global_batch_size} is more than the {self.num_samples} samples of an epoch"
                raise ConfigError(f"{flag} {found}; use a smaller factor")
            if step is None:
                why = "it comes too late, or the next one replaces it"
                raise ConfigError(f"{flag}: the growth at {share} never takes effect: {why}; move it, or leave it out")
