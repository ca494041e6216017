"""The gradient noise scale: squared norms of small and big batches' gradients, and the batch size that they suggest.

Nothing here takes a gradient or prints. Formulas: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from paceline.errors import RecordError
from paceline.records.kinds import KINDS, Record

__all__ = ["NoiseEstimate", "NoiseProbe", "NoiseRecord", "estimate_noise_scale"]

# A mean is never longer than its parts, but for rounding.
_ROUNDING = 1e-3
# Fewer probes than this say nothing of how much they scatter.
_MIN_PROBES = 3


@dataclass(frozen=True)
class NoiseProbe:
    """Squared norms of the gradients of small batches, all of one size and of all ranks, and of their mean.

    The mean is the gradient of the big batch that the small ones make together.
    """

    small_squares: tuple[float, ...]
    big_square: float

    def __post_init__(self) -> None:
        if not isinstance(self.small_squares, list | tuple) or len(self.small_squares) < 2:
            raise RecordError(f"a probe has the small gradients {self.small_squares!r:.60}: at least 2 are needed")
        object.__setattr__(self, "small_squares", tuple(self.small_squares))  # JSON has lists
        for value in (*self.small_squares, self.big_square):
            if type(value) not in (float, int) or not 0 <= value < math.inf:
                raise RecordError(f"a probe has the squared norm {value!r}: a finite number from 0 is needed")
        if self.big_square > self.mean_small_square * (1 + _ROUNDING):
            raise RecordError(
                f"a probe's mean gradient has the squared norm {self.big_square:g} and its parts have "
                f"{self.mean_small_square:g} on average: a mean cannot be longer, so one of them is wrong"
            )

    @property
    def num_small(self) -> int:
        return len(self.small_squares)

    @property
    def mean_small_square(self) -> float:
        return statistics.fmean(self.small_squares)


@dataclass(frozen=True)
class NoiseEstimate:
    """What probes say: the squared norm of the true gradient, and the trace of the covariance of one sample's gradient.

    Both are unbiased, so the first can come out below 0 where noise drowns it. `interval` holds the noise scale with a
    confidence of 90 %; its upper end is infinite where the probes give a lower bound alone, and it is None where there
    are too few of them to tell.
    """

    gradient_square: float
    noise_trace: float
    interval: tuple[float, float] | None

    @property
    def noise_scale(self) -> float | None:
        """In samples. None where the estimate of the gradient is not positive: the noise scale is then only bounded
        from below."""
        return self.noise_trace / self.gradient_square if self.gradient_square > 0 else None


def estimate_noise_scale(probes: Sequence[NoiseProbe], small_batch_size: int) -> NoiseEstimate:
    """The noise scale from probes whose small batches have this many samples.

    With |g_n|^2 = |G|^2 + tr(Sigma) / n on average, two batch sizes tell both. They are averaged over probes before
    their ratio is taken, since the ratio of one probe is far off and biased.
    """
    if not probes or small_batch_size < 1:
        raise RecordError(f"{len(probes)} probes of batches of {small_batch_size}: at least 1 of each is needed")
    signals, noises = [], []
    for probe in probes:
        b, big = small_batch_size, small_batch_size * probe.num_small
        signals.append((big * probe.big_square - b * probe.mean_small_square) / (big - b))
        noises.append((probe.mean_small_square - probe.big_square) / (1 / b - 1 / big))
    signal, noise = statistics.fmean(signals), max(0.0, statistics.fmean(noises))
    return NoiseEstimate(signal, noise, _enclose_ratio(noises, signals))


def _enclose_ratio(noises: Sequence[float], signals: Sequence[float]) -> tuple[float, float] | None:
    """Fieller's 90 % interval of mean(noises) / mean(signals): all r for which mean(noises - r * signals) may be 0.

    Unlike quantiles of resampled ratios it stays right for few probes, and where the mean of the signals may be 0 it
    has no upper end. The true mean of the signals is a square: an estimate below 0 counts as 0.
    """
    count = len(signals)
    if count < _MIN_PROBES:
        return None
    noise, signal, t = statistics.fmean(noises), max(0.0, statistics.fmean(signals)), _student_t95(count - 1)
    scale = t * t / count
    var_noise, var_signal = statistics.variance(noises), statistics.variance(signals)
    # The r between, or beyond, the roots of a*r^2 - 2*h*r + c.
    a = signal**2 - scale * var_signal
    h = noise * signal - scale * statistics.covariance(noises, signals)
    c = noise**2 - scale * var_noise
    root = math.sqrt(max(0.0, h * h - a * c))
    if a > 0:
        return max(0.0, (h - root) / a), max(0.0, (h + root) / a)
    if c <= 0:
        return 0.0, math.inf
    # a <= 0 < c: one root on either side of 0. Written so that it holds at a = 0, too.
    return (c / (h + root) if h + root > 0 else math.inf), math.inf


def _student_t95(freedom: int) -> float:
    """The 95 % quantile of Student's t, by the expansion about the normal one; within 1.3 % from 2 degrees on."""
    z = statistics.NormalDist().inv_cdf(0.95)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


@dataclass(frozen=True, kw_only=True)
class NoiseRecord(Record):
    """Probes of one training job after `step` steps; nothing was learnt from them.

    `epoch` counts those that were trained, in parts too. `seed` is the job's, from which the samples of the probes
    follow. `small_batch_size` counts samples (for tokens: blocks), and so do the noise scale and all batch sizes here.
    """

    kind: ClassVar[str] = "noise_scale"
    parts: ClassVar[dict[str, type]] = {"probes": NoiseProbe}
    model: str
    data: str
    device: str
    world_size: int
    precision: str
    step: int
    epoch: float
    seed: int
    small_batch_size: int
    probes: tuple[NoiseProbe, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.world_size, self.small_batch_size) < 1 or self.step < 0:
            raise RecordError(
                f"{self.model}: probes of batches of {self.small_batch_size} on {self.world_size} ranks after "
                f"{self.step} steps cannot be"
            )
        if type(self.epoch) not in (float, int) or not 0 <= self.epoch < math.inf:
            raise RecordError(f"{self.model}: the epoch is {self.epoch!r}, and must be a finite number from 0")
        if len({probe.num_small for probe in self.probes}) != 1:
            raise RecordError(
                f"{self.model}: {len(self.probes)} probes of {sorted({p.num_small for p in self.probes})} small "
                "gradients: at least one probe is needed, and as many gradients in each"
            )

    @property
    def big_batch_size(self) -> int:
        return self.small_batch_size * self.probes[0].num_small

    @cached_property
    def estimate(self) -> NoiseEstimate:
        return estimate_noise_scale(self.probes, self.small_batch_size)

    @property
    def noise_scale(self) -> float | None:
        """tr(Sigma) / |G|^2, in samples; None where it is only bounded from below (`estimate.interval`)."""
        return self.estimate.noise_scale

    @property
    def critical_batch_size(self) -> float | None:
        """The global batch at which a target costs twice the fewest steps and twice the fewest samples."""
        return self.noise_scale

    def steps_factor(self, batch_size: float) -> float | None:
        """Predicted steps to a target at this global batch, as a multiple of the fewest, which a huge batch needs."""
        scale = self.noise_scale
        return None if scale is None else 1 + scale / batch_size

    def samples_factor(self, batch_size: float) -> float | None:
        """Predicted samples to a target at this global batch, as a multiple of the fewest, which a tiny batch needs."""
        scale = self.noise_scale
        if scale is None:
            return None
        return 1 + batch_size / scale if scale > 0 else math.inf


KINDS[NoiseRecord.kind] = NoiseRecord
