"""How right a prediction was, by steps that it has not seen: errors, order, coverage, regret. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.predict.plans import Estimate
from paceline.records.samples import Ratio, Samples, compare_times
from paceline.records.steps import StepRecord

__all__ = ["GridPoint", "Judgement", "judge", "kendall_tau"]

_Z95 = 1.96


@dataclass(frozen=True)
class GridPoint:
    """One cap: what was predicted for it and, where the job was run, what it took. `same_layout`: the wrapper's buckets
    are those that were simulated."""

    cap_bytes: int
    estimate: Estimate
    plain_s: float
    measured: StepRecord | None = None

    @property
    def measured_s(self) -> float | None:
        return None if self.measured is None else self.measured.timing.median_s

    @property
    def error(self) -> float | None:
        return None if self.measured_s is None else self.estimate.step_s / self.measured_s - 1

    @property
    def exposed_s(self) -> float | None:
        """What communication added to the step."""
        return None if self.measured_s is None else self.measured_s - self.plain_s

    @property
    def is_covered(self) -> bool | None:
        return None if self.measured_s is None else self.estimate.low_s <= self.measured_s <= self.estimate.high_s

    @property
    def same_layout(self) -> bool:
        simulated = tuple(bucket.num_bytes for bucket in self.estimate.step.buckets)
        return self.measured is None or self.measured.bucket_bytes == simulated


@dataclass(frozen=True)
class Judgement:
    """A sweep of caps and, where it was confirmed, the recommended plan beside the default. Errors are fractions.

    `noise` is the half-width of the 95 % interval of a median here. `regret` is of the recommendation.
    """

    points: tuple[GridPoint, ...]
    confirmed: dict[str, StepRecord]
    recommended: str

    @property
    def measured(self) -> list[GridPoint]:
        return [point for point in self.points if point.measured is not None]

    @property
    def errors(self) -> list[float]:
        return [point.error for point in self.points if point.error is not None]

    @property
    def mape(self) -> float | None:
        return statistics.fmean(abs(error) for error in self.errors) if self.errors else None

    @property
    def max_error(self) -> float | None:
        return max((abs(error) for error in self.errors), default=None)

    @property
    def exposed_error(self) -> float | None:
        """The mean error on what communication adds, over what it adds on average."""
        pairs = [(p.estimate.exposed_s, p.exposed_s) for p in self.points if p.exposed_s is not None]
        added_s = sum(abs(measured_s) for _, measured_s in pairs)
        return sum(abs(here - there) for here, there in pairs) / added_s if added_s else None

    @property
    def exposed_step_error(self) -> float | None:
        """The same error over the step."""
        pairs = [(p.estimate.step_s, p.measured_s) for p in self.points if p.measured_s is not None]
        total_s = sum(measured_s for _, measured_s in pairs)
        return sum(abs(here - there) for here, there in pairs) / total_s if total_s else None

    @property
    def coverage(self) -> float | None:
        covered = [point.is_covered for point in self.points if point.is_covered is not None]
        return sum(covered) / len(covered) if covered else None

    @property
    def kendall_tau(self) -> float | None:
        pairs = [(p.estimate.step_s, p.measured_s) for p in self.points if p.measured_s is not None]
        return kendall_tau(pairs)

    @property
    def noise(self) -> float:
        timings = [point.measured.timing for point in self.points if point.measured is not None]
        return statistics.median(_noise(timing) for timing in timings) if timings else 0.0

    @property
    def is_flat(self) -> bool:
        """Whether all caps cost the same within twice the noise: measured where they were, else predicted."""
        times = [p.measured_s if p.measured_s is not None else p.estimate.step_s for p in self.points]
        widths = [(p.estimate.high_s - p.estimate.low_s) / 2 / p.estimate.step_s for p in self.points]
        noise = self.noise or statistics.median(widths)
        return max(times) / min(times) - 1 < 2 * noise

    @property
    def best_predicted(self) -> GridPoint:
        return min(self.points, key=lambda point: point.estimate.step_s)

    @property
    def best_measured(self) -> GridPoint | None:
        return min(self.measured, key=lambda point: point.measured_s or math.inf, default=None)

    @property
    def regret(self) -> float | None:
        """The recommended plan's time over the best measured one's, minus 1; of those that were confirmed in turns."""
        if self.confirmed:
            times = {label: record.timing.median_s for label, record in self.confirmed.items()}
            return times[self.recommended] / min(times.values()) - 1
        best, chosen = self.best_measured, self.best_predicted
        if best is None or chosen.measured_s is None or best.measured_s is None:
            return None
        return chosen.measured_s / best.measured_s - 1

    @property
    def gain(self) -> Ratio | None:
        """The recommended plan over the default, step by step."""
        if self.recommended == "default" or "default" not in self.confirmed:
            return None
        mine, theirs = (self.confirmed[label].timing.reduced_s for label in (self.recommended, "default"))
        return compare_times(mine, theirs)


def judge(points: Sequence[GridPoint], confirmed: Sequence[StepRecord] = (), recommended: str = "default") -> Judgement:
    return Judgement(tuple(points), {record.label: record for record in confirmed}, recommended)


def _noise(timing: Samples) -> float:
    if timing.count < 2:
        return 0.0
    return _Z95 * 1.25 * timing.stdev_s / math.sqrt(timing.count) / timing.median_s


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float | None:
    """The rank correlation tau-b of two orders; None where either of them has but one value."""
    agreeing = ties_x = ties_y = total = 0
    for (x0, y0), (x1, y1) in itertools.combinations(pairs, 2):
        total += 1
        product = (x1 - x0) * (y1 - y0)
        agreeing += (product > 0) - (product < 0)
        ties_x += x0 == x1
        ties_y += y0 == y1
    scale = math.sqrt((total - ties_x) * (total - ties_y))
    return agreeing / scale if scale else None
