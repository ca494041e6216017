"""Plan comparison: decides which of a few plans is fastest from interleaved steps. Pure.

A round has one turn of every plan. Two plans are compared by the ratios of their times in the same round. The interval
of the median ratio uses order statistics, so it holds for any distribution. It is wider if the ratios of nearby rounds
are correlated, for example by noise that lasts for several rounds. Results are tested after 16, 32, 64, ... rounds, and
a decision, once made, is final. Each test spends a part of the 5 % error, so all claims against the default hold
together in 95 % of comparisons. Claims between other plans have another 5 %. A persistent difference between replicas,
such as the location of their memory, counts as a difference between their plans.
"""

import itertools
import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.predict.search import PLATEAU

_ALPHA, _FIRST_LOOK = 0.05, 16
_EXACT = 1000  # number of rounds above which the binomial distribution is approximated by a normal one
VERDICTS = ("use", "default", "flat", "undecided")


@dataclass(frozen=True)
class Limit:
    """Upper bounds that hold for every plan, as fractions of the default's step time, at the upper ends of 90 %
    intervals. `share` is the largest possible saving. `adds` is the time that communication adds to the step, which no
    plan can remove entirely."""

    share: float = math.inf
    adds: float = math.inf

    @property
    def is_nothing(self) -> bool:
        return self.share <= PLATEAU

    def __str__(self) -> str:
        return f"no plan can save more than {self.share:.1%}: communication adds at most {self.adds:.1%} to the step"


@dataclass(frozen=True)
class Interval:
    """The median ratio of two times, with its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether there were enough rounds for an interval."""
        return math.isfinite(self.high)

    @property
    def saved(self) -> tuple[float, float, float]:
        """The fraction of the other time that is saved, with its bounds."""
        return 1 - self.value, 1 - self.high, 1 - self.low

    @property
    def is_flat(self) -> bool:
        return self.low >= 1 - PLATEAU and self.high <= 1 + PLATEAU

    @property
    def is_clear(self) -> bool:
        return self.high < 1 or self.low > 1


def list_looks(num_rounds: int) -> list[int]:
    """The rounds after which a comparison of this length is tested; the last round is always one of them."""
    looks = itertools.takewhile(lambda n: n < num_rounds, (_FIRST_LOOK << k for k in itertools.count()))
    return [*looks, num_rounds] if num_rounds else []


def is_look(num_rounds: int) -> bool:
    """Whether a comparison that can still continue is tested after this many rounds."""
    return num_rounds in list_looks(num_rounds + 1)[:-1]


def spend(look: int, num_pairs: int) -> float:
    """The error probability of one side of one interval at this test (from 1). Over everything it adds up to 5 %."""
    return _ALPHA / (2 * max(1, num_pairs) * look * (look + 1))


def estimate_ratio(mine: Sequence[float], theirs: Sequence[float], error: float) -> Interval:
    """The ratio of `mine` to `theirs` in the rounds that both have; `error` is the error probability on each side. The
    number of ratios below the true median follows a binomial(n, 1/2) distribution."""
    in_order = [math.log(here / there) for here, there in zip(mine, theirs, strict=False)]
    ratios = sorted(in_order)
    n = len(ratios)
    # `place` counts the ratios below the interval.
    if n > _EXACT:
        place = math.floor(n / 2 + statistics.NormalDist().inv_cdf(error) * math.sqrt(n) / 2)
    else:
        below = itertools.accumulate(math.comb(n, k) for k in range(n + 1))
        place = sum(1 for _ in itertools.takewhile(lambda count: count <= error * 2**n, below))
    place = math.floor(n / 2 - (n / 2 - place) * math.sqrt(_estimate_inflation(in_order)))
    value = math.exp(statistics.median(ratios))
    if place < 1:  # too few rounds for an interval
        return Interval(value, 0.0, math.inf)
    return Interval(value, math.exp(ratios[place - 1]), math.exp(ratios[n - place]))


def _estimate_inflation(values: Sequence[float]) -> float:
    """Variance inflation of the count below the median, from how often nearby values lie on the same side of it."""
    n, median = len(values), statistics.median(values)
    sides = [(value > median) - (value < median) for value in values]
    reach = min(n - 1, math.ceil(2 * n ** (1 / 3)))
    weights = [1 - lag / (reach + 1) for lag in range(1, reach + 1)]
    alike = sum(w * sum(map(operator.mul, sides, sides[lag:])) for lag, w in enumerate(weights, 1))
    # The median comes from the same values, which biases their autocorrelation by -1/n at every lag.
    found = (1 + 2 * alike / sum(map(abs, sides))) / max(0.5, 1 - 2 * sum(weights) / n) if any(sides) else 1.0
    return max(1.0, found) if n >= _FIRST_LOOK else 1.0


def judge(ratios: Iterable[Interval], is_faster: bool, limit: Limit, left: Iterable[Interval] | None = None) -> str:
    """The verdict from the ratios of the plans to the default: `use` a faster plan, keep the `default` because it is
    best, `flat`, or `undecided`. Plans are flat if all are within 1 % of the default. They are also flat if none can
    save 1 %, no median saves as much, and none is shown to be more than 1 % slower. `left` may still be the best."""
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
    """A comparison after its last test. `left` are the plans not shown to be slower than another; the default keeps
    running as the reference. The leader has the smallest median among the plans shown to be faster than the default, or
    otherwise among those left. `ratios` compare each pair of plans, and `limit` is a bound for any plan."""

    default: str
    leader: str
    left: tuple[str, ...]
    ratios: Mapping[tuple[str, str], Interval]
    num_rounds: int
    limit: Limit = Limit()

    @property
    def to_default(self) -> dict[str, Interval]:
        return {mine: interval for (mine, theirs), interval in self.ratios.items() if theirs == self.default}

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`; `use` refers to the leader."""
        to_default = self.to_default
        left = [to_default[label] for label in self.left] if self.default in self.left else []
        return judge(to_default.values(), to_default[self.leader].high < 1, self.limit, left)

    @property
    def is_level(self) -> bool:
        return all(interval.is_flat for interval in self.to_default.values())

    @property
    def is_decided(self) -> bool:
        """Whether more rounds cannot change the result: one plan is left, or those left differ by less than 1 %."""
        rest = (self.ratios[label, self.winner] for label in self.left)
        return self.verdict != "undecided" and all(interval.is_flat for interval in rest)

    @property
    def winner(self) -> str:
        """The leader if it won, otherwise the default."""
        return self.leader if self.verdict == "use" else self.default

    @property
    def gain(self) -> Interval:
        return self.ratios[self.winner, self.default]

    @property
    def regret(self) -> tuple[float, float, float]:
        """How much longer than the best plan the winner takes: the estimate and its bounds."""
        found = [self.ratios[self.winner, label] for label in {*self.left, self.winner}]
        value, low, high = (max(getattr(one, name) for one in found) - 1 for name in ("value", "low", "high"))
        return max(0.0, value), max(0.0, low), max(0.0, high)

    @property
    def rounds_to_decide(self) -> int:
        """Estimated number of further rounds until a decision: widths shrink with the square root of the rounds."""
        most = 0.0
        for interval in (self.ratios[label, self.leader] for label in {*self.left, self.default} - {self.leader}):
            middle = abs(math.log(interval.value))
            half = math.log(interval.high / interval.low) / 2 if interval.is_known else math.inf
            wanted = max(middle, math.log(1 + PLATEAU) - middle)
            most = max(most, (half / wanted) ** 2)
        return max(_FIRST_LOOK, math.ceil(self.num_rounds * (most - 1))) if math.isfinite(most) else _FIRST_LOOK


def judge_race(times: Mapping[str, Sequence[float]], default: str, limit: Limit = Limit()) -> Race:
    """Compare plans from the times of their turns; a plan has one time per round until it is dropped. A plan that is
    shown to be slower than another is dropped. A decision, once made, is not revised by later tests."""
    num_rounds, left = len(times[default]), list(times)
    # Claims against the default and claims between the other plans each have an error probability of 5 %.
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
    """The intersection of two intervals, each with its own part of the error; the later one if they are disjoint."""
    low, high = max(before.low, now.low), min(before.high, now.high)
    return Interval(min(high, max(low, now.value)), low, high) if low <= high else now
