"""Learning rates and global batches as pure functions of the step: nothing to save, so a resumed run cannot differ."""

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
    """Refuse drops that are not increasing shares of a run, or of another schedule than piecewise."""
    found, rises = f"{name} {','.join(map(str, drops)) or 'none'}", itertools.pairwise((0.0, *drops, 1.0))
    refuse(
        (bool(drops) != (shape == "piecewise"),
         f"{found} with schedule {shape}: drops belong to piecewise, which needs them, as 0.5,0.75"),
        (not all(a < b for a, b in rises), f"{found}: increasing shares of the run between 0 and 1 are needed"),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate that climbs linearly to `peak` over `warmup_steps`, and then has a shape.

    It stays (constant), falls to 0 at `num_steps` (cosine, linear), or is divided by 10 at each of `drops`, which are
    shares of all `num_steps`, those of the warm-up included (piecewise).
    """

    shape: str
    peak: float
    num_steps: int
    warmup_steps: int = 0
    drops: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        steps, warmup, first = self.num_steps, self.warmup_steps, (*self.drops, math.inf)[0]
        refuse(
            (self.shape not in SCHEDULES, f"unknown schedule {self.shape!r}: known are {', '.join(SCHEDULES)}"),
            (not 0 <= self.peak < math.inf, f"peak {self.peak}: a finite number from 0 is needed"),
            (steps < 1 or warmup < 0, f"{steps} steps, {warmup} of warm-up: at least 1 and 0 are needed"),
        )
        check_drops(self.drops, self.shape, "drops")
        refuse((first * steps < warmup, f"a drop at {first} of {steps} steps, inside the warm-up of {warmup}: move it"))

    def rate(self, step: int) -> float:
        """The learning rate of a step; steps count from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        if self.shape == "piecewise":
            # The quotient is rounded once, as a share that was typed is: 0.55 of 100 steps is step 55, not 56.
            return self.peak * 0.1 ** sum(step / self.num_steps >= drop for drop in self.drops)
        length = max(1, self.num_steps - self.warmup_steps)
        share = min(1.0, (step - self.warmup_steps) / length)
        if self.shape == "linear":
            return self.peak * (1 - share)
        return self.peak * 0.5 * (1 + math.cos(math.pi * share))

    def apply(self, optimizer: Optimizer, step: int) -> float:
        """Give all groups of an optimizer the learning rate of a step, and return it."""
        rate = self.rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate


# How a rank takes its share of a grown batch: in more micro-batches, or in larger ones.
GROWS = ("accumulate", "batch-size")

Growths = tuple[tuple[float, int], ...]


def parse_growths(text: str) -> Growths:
    """Parse `0.5:4,0.75:16`: from each share of the run on, the first batch times the factor."""
    growths = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d*\.?\d+)\s*:\s*(\d+)\s*", part, re.ASCII)
        if match is None:
            use = "use SHARE:FACTOR, as in 0.5:4,0.75:16"
            raise ConfigError(f"--batch-growth {text!r} is not understood at {part!r}: {use}")
        growths.append((float(match[1]), int(match[2])))
    check_growths(tuple(growths))
    return tuple(growths)


def format_growths(growths: Growths) -> str:
    """As it is typed; `none` where the batch does not grow."""
    return ",".join(f"{share}:{factor}" for share, factor in growths) or "none"


def check_growths(growths: Growths) -> None:
    """Refuse invalid growths: shares of the run must increase, and so must factors, from 2."""
    flag = f"--batch-growth {format_growths(growths)}:"
    for (before, least), (share, factor) in itertools.pairwise(((0.0, 1), *growths)):
        is_factor = type(factor) is int
        refuse(
            (not 0 < share < 1, f"{flag} {share} is not a share of the run; above 0 and below 1 is needed"),
            (not is_factor, f"{flag} {factor!r} is not a factor; an integer is needed, so that ranks can share"),
            (share <= before, f"{flag} {share} comes after {before}; each share has to be larger than the last"),
            (is_factor and factor <= least, f"{flag} {factor} times comes after {least} times; each has to be larger"),
        )


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """The global batches of a run of `epochs` over `num_samples` each.

    The batch grows at the first step that begins at or after a share of all samples of all epochs, also within an
    epoch.
    """

    global_batch_size: int
    num_samples: int
    epochs: int
    growths: Growths = ()
    tail: str = "keep"

    def __post_init__(self) -> None:
        numbers = (self.global_batch_size, self.num_samples, self.epochs)
        if min(numbers) < 1:
            raise ConfigError("batches of {} of {} samples, {} epochs: at least 1 of each is needed".format(*numbers))
        check_growths(self.growths)

    @cached_property
    def marks(self) -> tuple[tuple[int, int], ...]:
        """Each growth as (the sample of the run from which on a step has it, its global batch)."""
        total = self.epochs * self.num_samples
        # As it was typed: 0.1 of 30 samples is 3, and the float product is a little more.
        return tuple(
            (math.ceil(Fraction(repr(float(share))) * total), factor * self.global_batch_size)
            for share, factor in self.growths
        )

    def window_sizes(self, epoch: int) -> tuple[int, ...]:
        """The size of every window that begins in the epoch; the last is its nominal size, even if it is short."""
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
        """Of the whole run."""
        steps = self.epochs * self.count_steps(0)
        return steps if not self.growths else sum(self.count_steps(epoch) for epoch in range(self.epochs))

    @cached_property
    def growth_steps(self) -> tuple[int | None, ...]:
        """The first step of each growth, counted from 0; None for one that no step reaches."""
        first, step = dict[int, int](), 0
        for epoch in range(self.epochs if self.growths else 0):
            sizes = self.window_sizes(epoch)[: self.count_steps(epoch)]
            first = {size: step + sizes.index(size) for size in set(sizes)} | first
            step += len(sizes)
        return tuple(first.get(size) for _, size in self.marks)

    def check(self) -> None:
        """Refuse growths that do not fit this data, rather than train without them."""
        for (share, factor), (_, size), step in zip(self.growths, self.marks, self.growth_steps, strict=True):
            flag, grown = f"--batch-growth {format_growths(self.growths)}:", f"{factor} times {self.global_batch_size}"
            refuse(
                (size > self.num_samples,
                 f"{flag} {grown} is more than the {self.num_samples} samples of an epoch; use a smaller factor"),
                (step is None,
                 f"{flag} no step has the growth at {share}: it is too late, or the next replaces it; "
                 "move it, or leave it out"),
            )  # fmt: skip
