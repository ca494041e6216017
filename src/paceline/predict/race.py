"""The race: which of a few plans is fastest, decided from steps that were taken in turns. Pure.

A round has one turn of every plan. Two plans are compared by the ratios of their times in the same round. The interval
of the median ratio is by order statistics, whatever the distribution. It is wider where the ratios of nearby rounds are
alike: noise of one replica that lasts. The race is looked at after 16, 32, 64, ... rounds; each look spends a part of
the 5 %, so that all claims against the default hold together in 95 % of races, however often it is looked at, and what
was shown once stands. Claims between other plans have 5 % of their own. What makes one replica slower than another for
the whole race, such as where its memory lies, counts as a difference of their plans.
"""

import itertools
import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.predict.search import PLATEAU

_ALPHA, _FIRST_LOOK = 0.05, 16
_EXACT = 1000  # rounds up to which the binomial distribution is summed; then it is normal
VERDICTS = ("use", "default", "flat", "undecided")


@dataclass(frozen=True)
class Limit:
    """What no plan can exceed, as shares of the default's step by the upper ends of 90 % intervals: `share` is what one
    can save at most, and `adds` what communication adds, all of which none can save."""

    share: float = math.inf
    adds: float = math.inf

    @property
    def is_nothing(self) -> bool:
        return self.share <= PLATEAU

    def __str__(self) -> str:
        return f"no buckets can save more than {self.share:.1%}: communication adds at most {self.adds:.1%} to the step"


@dataclass(frozen=True)
class Interval:
    """The median ratio of two times, and from where to where it may be."""

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether there were enough rounds for an interval."""
        return math.isfinite(self.high)

    @property
    def is_flat(self) -> bool:
        """Whether it is shown to be within 1 % of 1."""
        return self.low >= 1 - PLATEAU and self.high <= 1 + PLATEAU

    @property
    def is_clear(self) -> bool:
        """Whether it is shown to differ from 1."""
        return self.high < 1 or self.low > 1


def list_looks(num_rounds: int) -> list[int]:
    """After how many rounds a race of this length is looked at; the end of it is the last."""
    looks = itertools.takewhile(lambda n: n < num_rounds, (_FIRST_LOOK << k for k in itertools.count()))
    return [*looks, num_rounds] if num_rounds else []


def is_look(num_rounds: int) -> bool:
    """Whether a race that may go on is looked at after this many rounds."""
    return num_rounds in list_looks(num_rounds + 1)[:-1]


def spend(look: int, num_pairs: int) -> float:
    """The chance of an error on one side of one interval at the look of this number, from 1: over all looks, both sides
    and this many pairs, 5 %."""
    return _ALPHA / (2 * max(1, num_pairs) * look * (look + 1))


def estimate_ratio(mine: Sequence[float], theirs: Sequence[float], error: float) -> Interval:
    """My times over theirs in the same rounds, with the chance of an error on each side; as many rounds as both have.

    The number of ratios below the true median is binomial(n, 1/2).
    """
    in_order = [math.log(here / there) for here, there in zip(mine, theirs, strict=False)]
    ratios = sorted(in_order)
    n, place = len(ratios), 0  # how many of them lie below the interval
    if n > _EXACT:
        place = math.floor(n / 2 + statistics.NormalDist().inv_cdf(error) * math.sqrt(n) / 2)
    else:
        below = itertools.accumulate(math.comb(n, k) for k in range(n + 1))
        place = sum(1 for _ in itertools.takewhile(lambda count: count <= error * 2**n, below))
    place = math.floor(n / 2 - (n / 2 - place) * math.sqrt(_estimate_inflation(in_order)))
    value = math.exp(statistics.median(ratios))
    if place < 1:  # too few for any interval
        return Interval(value, 0.0, math.inf)
    return Interval(value, math.exp(ratios[place - 1]), math.exp(ratios[n - place]))


def _estimate_inflation(values: Sequence[float]) -> float:
    """How many times the variance of independent values that of the count below the median is, by how often nearby ones
    are on one side of it; 1 where they are independent, or too few to tell."""
    n, median = len(values), statistics.median(values)
    sides = [(value > median) - (value < median) for value in values]
    reach = min(n - 1, math.ceil(2 * n ** (1 / 3)))
    weights = [1 - lag / (reach + 1) for lag in range(1, reach + 1)]
    alike = sum(w * sum(map(operator.mul, sides, sides[lag:])) for lag, w in enumerate(weights, 1))
    # The median is theirs, which makes them look less alike than they are: by one in n, at each distance.
    found = (1 + 2 * alike / sum(map(abs, sides))) / max(0.5, 1 - 2 * sum(weights) / n) if any(sides) else 1.0
    return max(1.0, found) if n >= _FIRST_LOOK else 1.0


def judge(ratios: Iterable[Interval], is_faster: bool, limit: Limit, left: Iterable[Interval] | None = None) -> str:
    """The verdict on plans by their times over the default's: `use` one that is faster; the `default` is best; all are
    `flat`, within 1 % of it, or none can save that, none seems to, and none is shown to lose it; or `undecided`.
    `left`: those that may still be the best."""
    found = list(ratios)
    if all(interval.is_flat for interval in found):
        return "flat"
    if is_faster:
        return "use"
    if limit.is_nothing and all(interval.value >= 1 - PLATEAU for interval in found):
        return "default" if any(interval.low > 1 + PLATEAU for interval in found) else "flat"
    rest = found if left is None else list(left)
    return "default" if rest and all(interval.low >= 1 - PLATEAU for interval in rest) else "undecided"


@dataclass(frozen=True)
class Race:
    """Where a race stands after its last look. `left` are the plans that were not shown to be slower than another one;
    the default runs on as the reference when it is. The leader is the fastest, by the median, of those that are shown
    to be faster than the default, or else of those that are left. `ratios` has the time of a plan over that of
    another, for each pair. `limit` is what is known besides of any plan."""

    default: str
    leader: str
    left: tuple[str, ...]
    ratios: Mapping[tuple[str, str], Interval]
    num_rounds: int
    limit: Limit = Limit()

    @property
    def to_default(self) -> dict[str, Interval]:
        """By plan, its time over the default's."""
        return {mine: interval for (mine, theirs), interval in self.ratios.items() if theirs == self.default}

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`; `use` the leader."""
        to_default = self.to_default
        left = [to_default[label] for label in self.left] if self.default in self.left else []
        return judge(to_default.values(), to_default[self.leader].high < 1, self.limit, left)

    @property
    def is_level(self) -> bool:
        """Whether all plans are shown to be within 1 % of the default."""
        return all(interval.is_flat for interval in self.to_default.values())

    @property
    def is_decided(self) -> bool:
        """Whether more rounds would change nothing: one plan is left, or those that are differ by less than 1 %."""
        rest = (self.ratios[label, self.winner] for label in self.left)
        return self.verdict != "undecided" and all(interval.is_flat for interval in rest)

    @property
    def winner(self) -> str:
        """What to use: the leader where it won, else the default."""
        return self.leader if self.verdict == "use" else self.default

    @property
    def gain(self) -> Interval:
        """The winner's time over the default's."""
        return self.ratios[self.winner, self.default]

    @property
    def regret(self) -> tuple[float, float, float]:
        """How much longer than the best plan the winner takes, at least and at most."""
        found = [self.ratios[self.winner, label] for label in {*self.left, self.winner}]
        value, low, high = (max(getattr(one, name) for one in found) - 1 for name in ("value", "low", "high"))
        return max(0.0, value), max(0.0, low), max(0.0, high)

    @property
    def rounds_to_decide(self) -> int:
        """About how many more rounds would decide: widths shrink with the square root of the rounds."""
        most = 0.0
        for interval in (self.ratios[label, self.leader] for label in {*self.left, self.default} - {self.leader}):
            middle = abs(math.log(interval.value))
            half = math.log(interval.high / interval.low) / 2 if interval.is_known else math.inf
            wanted = max(middle, math.log(1 + PLATEAU) - middle)
            most = max(most, (half / wanted) ** 2)
        return max(_FIRST_LOOK, math.ceil(self.num_rounds * (most - 1))) if math.isfinite(most) else _FIRST_LOOK


def judge_race(times: Mapping[str, Sequence[float]], default: str, limit: Limit = Limit()) -> Race:
    """The race of these plans: for each the time of its turn in every round until it was dropped. What is shown at a
    look stands at all later ones; a plan that is shown to be slower than another one leaves the race."""
    num_rounds, left = len(times[default]), list(times)
    # Claims against the default, and those between the other plans, have an error of 5 % each.
    with_default = len(times) - 1
    without = with_default * (with_default - 1) // 2
    ratios = {(mine, theirs): Interval(1.0, 0.0, math.inf) for mine in times for theirs in times}
    for look, rounds in enumerate(list_looks(num_rounds), 1):
        running = [label for label in times if label in left or label == default]
        for mine, theirs in itertools.product(running, repeat=2):
            error = spend(look, with_default if default in (mine, theirs) else without)
            now = estimate_ratio(times[mine][:rounds], times[theirs][:rounds], error)
            ratios[mine, theirs] = _narrow(ratios[mine, theirs], now)
        slower = {mine for mine, theirs in itertools.permutations(left, 2) if ratios[mine, theirs].low > 1}
        left = [label for label in left if label not in slower] or left
    leader = min(left, key=lambda label: (ratios[label, default].high >= 1, ratios[label, default].value))
    return Race(default, leader, tuple(left), ratios, num_rounds, limit)


def _narrow(before: Interval, now: Interval) -> Interval:
    """What both say: each holds by its own share of the error. Where they exclude each other, the later."""
    low, high = max(before.low, now.low), min(before.high, now.high)
    return Interval(min(high, max(low, now.value)), low, high) if low <= high else now
