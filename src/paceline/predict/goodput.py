"""Goodput: the productive fraction of a job's time, given random faults and the cost of checkpoints and recovery.

Faults occur at a constant rate, one per `mtbf_s` seconds on average, also while the job recovers. A period consists of
`interval_s` seconds of steps and the stall of a save. The checkpoint is written in the background and counts once it is
on disk. After a fault the job returns to the newest checkpoint (`restart`), or continues from a living replica and
repeats the interrupted step (`spare`, `shrink`), unless the fault left no replica.

The mean times are exact for such faults. The derivation, in words, with r = 1 / mtbf_s:

- A stretch of x seconds has no fault with probability e^-rx. The mean time until its end or its first fault is
  (1 - e^-rx) / r. If it starts again after each fault and a recovery of mean time F, its mean time E is
  (1 - e^-rx) / r + (1 - e^-rx) (F + E), so E = (e^rx - 1) (1 / r + F).
- A restart of R seconds is such a stretch. After each fault, it begins once the fault is detected, D seconds later:
  F = e^rR D + (e^rR - 1) / r.
- So a period takes e^rR (e^r(interval + save) - 1) (1 / r + D). This is Daly's formula (2006), extended by D. For rare
  faults, its optimum is Young's interval, sqrt(2 save mtbf).
- With a write of B seconds, consider the moments at which a checkpoint reaches the disk. Without a fault, the next one
  is a period away; after a fault it is B seconds further away, since the job returns to the step at which the
  checkpoint was taken. The sum of both cases gives a factor of e^rB.
- If replicas survive, only the interrupted step starts again, and a fault that leaves no replica ends the period. Each
  step has a probability of finishing without such a fault, and the same sums are taken over steps.

`simulate_faults` draws the same process, to find the spread over a limited time and to check the sums.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.errors import refuse
from paceline.predict.curves import find_interval
from paceline.records.kinds import CostRecord

ALL_LOST = 0.05
_DRAWS, _SEED = 100, 1
_MOST_FAULTS = 100  # maximum number of faults simulated in one draw
_ONCE = 0.2  # relative standard deviation assumed for a single measurement
_FOUND = 0.99  # fraction of faults that find a ready spare
_FAST = 0.001  # an interval counts as optimal if it loses at most this fraction of the time
_MOST_EXPONENT = 600.0  # beyond this, no period ever finishes


@dataclass(frozen=True)
class Policy:
    """Costs of saves and faults, in seconds. A fraction `lost` of faults leaves no replica. Such a fault is detected
    after `detect_s`; the lost rank can be started after `wait_s`, which takes `restart_s`. After any other fault, the
    living ranks need `takeover_s`, which begins again if another fault occurs, and lose `slower_s` in total while a
    rank is missing. `num_idle` ranks are spares."""

    name: str
    mtbf_s: float
    save_s: float
    write_s: float = 0.0
    step_s: float = 1e-3
    detect_s: float = 0.0
    restart_s: float = 0.0
    wait_s: float = 0.0
    lost: float = 1.0
    takeover_s: float = 0.0
    slower_s: float = 0.0
    num_idle: int = 0

    def stall_s(self, interval_s: float) -> float:
        """A save waits until the previous one is on disk; the first one after a restart does not wait."""
        return self.save_s + max(0.0, self.write_s - interval_s)

    def cross(self, length_s: float) -> tuple[float, float]:
        """The mean seconds of a stretch that starts again after each fault, until it is done or no replica is left, and
        the logarithm of the probability that it finishes."""
        hit, again = -math.expm1(-length_s / self.mtbf_s), -math.expm1(-self.takeover_s / self.mtbf_s)
        lives = 1.0 - self.lost
        over = 1.0 - lives * again
        takeover_s, fails = (self.detect_s + self.slower_s + self.mtbf_s * again) / over, self.lost * again / over
        repeated = lives * hit * (1.0 - fails)
        seconds = (self.mtbf_s * hit + lives * hit * takeover_s) / (1.0 - repeated)
        return seconds, min(0.0, -length_s / self.mtbf_s - math.log1p(-repeated))

    @cached_property
    def recovery_s(self) -> float:
        """The mean time from a fault that leaves no replica until training continues."""
        growth = self.restart_s / self.mtbf_s
        return math.exp(growth) * (self.detect_s + self.wait_s) + self.mtbf_s * math.expm1(growth)

    @cached_property
    def _step(self) -> tuple[float, float]:
        return self.cross(self.step_s)

    def _cross_steps(self, work_s: float) -> tuple[float, float]:
        """The mean seconds and log probability for steps that take `work_s` in total."""
        (seconds, chance), count = self._step, work_s / self.step_s
        ends = -math.expm1(chance)
        return seconds * (-math.expm1(count * chance) / ends if ends > 1e-15 else count), count * chance

    def estimate_share(self, interval_s: float) -> float:
        """The goodput, with a save after every `interval_s` seconds of steps."""
        if max(self.restart_s, self.takeover_s, self.step_s) > _MOST_EXPONENT * self.mtbf_s:
            return 0.0
        behind_s = min(self.write_s, interval_s)
        work, rest, behind = map(self._cross_steps, (interval_s, interval_s - behind_s, behind_s))
        save, wait = self.cross(self.save_s), self.cross(self.stall_s(interval_s) - self.save_s)
        # From one durable checkpoint to the next, first without a fault and then after returning to the first.
        period_s, done = _chain(rest, save, behind, wait)
        again_s, again = _chain(work, save, behind, wait)
        if -again > _MOST_EXPONENT:
            return 0.0
        again_s = (again_s - math.expm1(again) * self.recovery_s) / math.exp(again)
        return interval_s / (period_s - math.expm1(done) * (self.recovery_s + again_s))

    def find_best_interval(self) -> float:
        """The best interval, by ternary search on a log axis, where the goodput has a single maximum. The result is at
        least the time to write a checkpoint and at least one step."""
        low = math.log(max(self.write_s, self.step_s))
        high = max(low + 0.1, math.log(max(self.mtbf_s, self.step_s) / self.lost))
        while high - low > 1e-4:
            third = (high - low) / 3
            left, right = (self.estimate_share(math.exp(x)) for x in (low + third, high - third))
            if left >= right:  # if neither interval makes progress, prefer the shorter one
                high -= third
            else:
                low += third
        return math.exp((low + high) / 2)

    def find_good_intervals(self, best_s: float) -> tuple[float, float]:
        """The range of intervals that are nearly as good as the best one."""
        least, ends = self.estimate_share(best_s) - _FAST, []
        for factor in (1 / 1.05, 1.05):
            end_s = best_s
            while self.step_s <= end_s * factor <= 1e3 * best_s and self.estimate_share(end_s * factor) >= least:
                end_s *= factor
            ends.append(end_s)
        return ends[0], ends[1]

    def estimate_lost_s(self, interval_s: float) -> float:
        """The mean work lost per fault: since the newest durable checkpoint, or half a step if a replica is left."""
        rate = -self._step[1] / self.step_s  # rate of faults that leave no replica
        first_s, period_s = interval_s + self.save_s, interval_s + self.stall_s(interval_s)

        def collect(until_s: float) -> float:
            """The integral, up to `until_s`, of the work done before a fault times the fault's density."""
            total = _integrate(rate, min(until_s, interval_s))
            return total + interval_s * max(0.0, math.exp(-rate * interval_s) - math.exp(-rate * until_s))

        # First the time until the first checkpoint is durable, then the time from each durable checkpoint to the next.
        first = collect(first_s + self.write_s) + math.exp(-rate * first_s) * collect(self.write_s)
        later = collect(period_s + self.write_s) - collect(self.write_s)
        later += math.exp(-rate * period_s) * collect(self.write_s)
        between = math.exp(-rate * first_s) * later / max(-math.expm1(-rate * period_s), 1e-300)
        return self.lost * (first + between) + (1.0 - self.lost) * self.step_s / 2


def _chain(*stretches: tuple[float, float]) -> tuple[float, float]:
    """The mean seconds and the log probability of finishing consecutive stretches."""
    seconds = chance = 0.0
    for more_s, done in stretches:
        seconds, chance = seconds + math.exp(chance) * more_s, chance + done
    return seconds, chance


def _integrate(rate: float, until_s: float) -> float:
    """The integral of x rate e^(-rate x) from 0 to `until_s`."""
    z = rate * until_s
    near = z * z * (0.5 - z / 3 + z * z / 8)  # series for small z, where the closed form loses precision
    return (near if z < 1e-4 else 1.0 - math.exp(-z) * (1.0 + z)) / rate if rate else 0.0


@dataclass(frozen=True)
class SimulatedRun:
    """`useful_s` is the time of steps that count; `lost_s` that of steps discarded when a checkpoint was loaded."""

    seconds: float
    useful_s: float
    lost_s: float
    num_faults: int

    @property
    def share(self) -> float:
        return self.useful_s / self.seconds


def simulate_faults(policy: Policy, interval_s: float, seconds: float, source: random.Random) -> SimulatedRun:
    rate, period_s = 1 / policy.mtbf_s, interval_s + policy.stall_s(interval_s)
    waits_s = period_s - interval_s - policy.save_s
    clock_s = kept_s = lost_s = running_s = 0.0  # running_s: uninterrupted time since the loaded checkpoint
    num_faults = 0

    def is_over() -> bool:
        return clock_s >= seconds

    def place() -> float:
        """The position in a run whose first save waits like the others."""
        return running_s + (waits_s if running_s > interval_s else 0.0)

    def count_work() -> float:
        periods, rest_s = divmod(place(), period_s)
        return periods * interval_s + min(rest_s, interval_s)

    while not is_over():
        until_s = source.expovariate(rate)
        if clock_s + until_s >= seconds:
            running_s += seconds - clock_s
            clock_s = seconds
            break
        clock_s, running_s, num_faults = clock_s + until_s, running_s + until_s, num_faults + 1
        has_replica = source.random() >= policy.lost
        if has_replica:
            periods, rest_s = divmod(place(), period_s)  # the interrupted step or save is repeated
            rest_s = rest_s // policy.step_s * policy.step_s if rest_s < interval_s else interval_s
            running_s = periods * period_s + rest_s - (waits_s if periods else 0.0)
        while has_replica and not is_over():
            clock_s += policy.detect_s + policy.slower_s
            until_s = source.expovariate(rate)
            if until_s >= policy.takeover_s:
                clock_s += policy.takeover_s
                break
            clock_s, num_faults, has_replica = clock_s + until_s, num_faults + 1, source.random() >= policy.lost
        if has_replica:
            continue
        counted_s = max(0.0, (place() - policy.write_s) // period_s) * interval_s
        kept_s, lost_s, running_s = kept_s + counted_s, lost_s + count_work() - counted_s, 0.0
        while not is_over():
            clock_s += policy.detect_s + policy.wait_s
            until_s = source.expovariate(rate)
            if until_s >= policy.restart_s:
                clock_s += policy.restart_s
                break
            clock_s, num_faults = clock_s + until_s, num_faults + 1
    return SimulatedRun(max(clock_s, seconds), kept_s + count_work(), lost_s, num_faults)


@dataclass(frozen=True)
class Faults:
    """Faults of a job of `ranks`. A fraction `all_lost` leaves no replica. `repair_s` is the time until a lost rank's
    place can be used again. `usable` ranks can share the global batch equally while one is missing; None means all
    others."""

    mtbf_s: float
    ranks: int
    all_lost: float = ALL_LOST
    repair_s: float = 0.0
    usable: int | None = None

    @property
    def ranks_after(self) -> int:
        return self.ranks - 1 if self.usable is None else self.usable

    def __post_init__(self) -> None:
        refuse(
            (not 0 < self.mtbf_s < math.inf, f"the mean time between faults must be above 0, not {self.mtbf_s:g} s"),
            (not 0 < self.all_lost <= 1, f"--all-lost {self.all_lost:.3%}: must be above 0 % and at most 100 %"),
        )


def count_spares(faults: Faults, restart_s: float) -> int:
    """How many spares it takes for 99 % of faults to find one. A spare in use is missing until repaired and started."""
    mean = (faults.repair_s + restart_s) / faults.mtbf_s
    if mean > 500:
        return math.ceil(mean + statistics.NormalDist().inv_cdf(_FOUND) * math.sqrt(mean))
    count, chance = 1, math.exp(-mean)
    total = chance
    while total < _FOUND:
        chance *= mean / count
        total, count = total + chance, count + 1
    return count


def build_policies(costs: Mapping[str, float], faults: Faults) -> list[Policy]:
    """The policies with known costs (`records.kinds.COSTS`). A single rank has no replica to continue from."""
    restart = Policy(
        "restart", faults.mtbf_s, costs["save"], costs.get("write", 0.0), costs["step"], costs.get("detect", 0.0),
        costs["restart"], wait_s=faults.repair_s,
    )  # fmt: skip
    found, missing_s = [restart], faults.repair_s + costs["restart"]
    if "spare" in costs and faults.ranks > 1:
        spares = count_spares(faults, costs["restart"])
        found.append(replace(restart, name="spare", lost=faults.all_lost, takeover_s=costs["spare"], num_idle=spares))
    if "shrink" in costs and faults.ranks > 1:
        # Fewer ranks share each batch until the lost rank returns. Its return causes a second pause.
        slower_s = missing_s * (1 - faults.ranks_after / faults.ranks) + costs["shrink"]
        found.append(
            replace(restart, name="shrink", lost=faults.all_lost, takeover_s=costs["shrink"], slower_s=slower_s)
        )
    return found


@dataclass(frozen=True)
class Goodput:
    """The prediction for one policy at its best interval or the requested one. `low` and `high` bound 90 % of runs of
    the requested length, including the uncertainty of the costs. `of_ranks` is the useful fraction of all ranks' time,
    including idle ranks, and `draws` are draws of `of_ranks`."""

    policy: Policy
    interval_s: float
    best_interval_s: float
    share: float
    low: float
    high: float
    of_ranks: float
    draws: tuple[float, ...]

    @property
    def good_intervals_s(self) -> tuple[float, float]:
        return self.policy.find_good_intervals(self.best_interval_s)

    @property
    def saving(self) -> float:
        return self.share * self.policy.stall_s(self.interval_s) / self.interval_s

    @property
    def failing(self) -> float:
        """The fraction of time lost to faults: detection, recovery and repeated work."""
        return max(0.0, 1.0 - self.share - self.saving)

    @property
    def fault_s(self) -> float:
        return self.failing * self.policy.mtbf_s

    @property
    def steps_lost(self) -> float:
        return self.policy.estimate_lost_s(self.interval_s) / self.policy.step_s


def average_costs(records: Sequence[CostRecord], source: random.Random | None = None) -> dict[str, float]:
    """The mean of each cost (of steps, the median); a random `source` resamples the measured ones."""
    found = {}
    for record in records:
        seconds: Sequence[float] = record.seconds
        if source is not None and record.source == "measured":
            if len(seconds) == 1:
                seconds = [seconds[0] * math.exp(source.gauss(0.0, _ONCE))]
            elif record.name != "step":  # with many steps, the median is precise
                seconds = source.choices(seconds, k=len(seconds))
        found[record.name] = statistics.median(seconds) if record.name == "step" else statistics.fmean(seconds)
    return found


def estimate_goodput(
    records: Sequence[CostRecord], faults: Faults, horizon_s: float, interval_s: float | None = None
) -> list[Goodput]:
    """Each policy at its best interval or at `interval_s`, best first by the useful fraction of all ranks' time."""
    centers = build_policies(average_costs(records), faults)
    intervals = [interval_s or policy.find_best_interval() for policy in centers]
    shares, runs = ([list[float]() for _ in centers] for _ in range(2))
    drawn_s = min(horizon_s, _MOST_FAULTS * faults.mtbf_s)
    for number in range(_DRAWS):
        costs = average_costs(records, random.Random(f"costs {_SEED} {number}"))
        for policy, every_s, means, seen in zip(build_policies(costs, faults), intervals, shares, runs, strict=True):
            share = policy.estimate_share(every_s)
            run = simulate_faults(policy, every_s, drawn_s, random.Random(f"faults {_SEED} {number}"))
            means.append(share)
            seen.append(min(1.0, max(0.0, share + (run.share - share) * math.sqrt(drawn_s / horizon_s))))
    found = []
    for policy, every_s, means, seen in zip(centers, intervals, shares, runs, strict=True):
        share, paid = policy.estimate_share(every_s), faults.ranks / (faults.ranks + policy.num_idle)
        low, high = find_interval(share, seen)
        draws, best_s = tuple(one * paid for one in means), policy.find_best_interval()
        found.append(Goodput(policy, every_s, best_s, share, low, high, share * paid, draws))
    return sorted(found, key=lambda one: one.of_ranks, reverse=True)


def is_ahead(first: Goodput, second: Goodput) -> bool:
    """Whether `first` has the higher goodput in at least 95 % of the draws."""
    better = sum(a > b for a, b in zip(first.draws, second.draws, strict=True))
    return better >= 0.95 * len(first.draws)


def estimate_save_interval(stalls_s: Sequence[float], write_s: float, mtbf_s: float, lost: float = 1.0) -> float:
    """Estimate the best time in seconds between the end of a save and the next save, from the stalls of the last saves.
    A fraction `lost` of the faults needs a checkpoint. The recovery time hardly matters."""
    return Policy("", mtbf_s, statistics.fmean(stalls_s), write_s, lost=lost).find_best_interval()
