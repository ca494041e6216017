"""The simulator: one backward pass of a data-parallel step, by its events, for one plan of buckets.

Follows the wrapper's order of things, not a formula: gradients become ready while the rank computes, buckets leave in
order, messages queue for the servers of the backend, and both sides slow each other down. What plan is best is in
`search`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.errors import ConfigError
from paceline.plan import Plan
from paceline.predict.curves import Curve

__all__ = ["Backward", "Contention", "MachineCosts", "SimulatedBucket", "SimulatedStep", "simulate_backward"]

_EPSILON = 1e-12


@dataclass(frozen=True)
class Backward:
    """A rank's own backward, without communication: when each gradient of the plan is ready, and when all is over.

    `ready_s[i]` belongs to gradient i of the plan. `before_s` and `after_s` are the rest of the step: data and forward,
    optimizer.
    """

    ready_s: tuple[float, ...]
    total_s: float
    before_s: float = 0.0
    after_s: float = 0.0

    def __post_init__(self) -> None:
        if any(not 0 <= ready <= self.total_s + 1e-9 for ready in self.ready_s):
            raise ConfigError(f"a gradient is ready outside backward, which takes {self.total_s} s")


@dataclass(frozen=True)
class Contention:
    """How a message and arithmetic slow each other down, by the size of the message: 1 is undisturbed.

    Small messages are slowed most: they wait for a core that computes. Between the sizes the rates are straight lines
    on a log axis, beyond them constant.
    """

    sizes: tuple[int, ...] = (1,)
    compute_rates: tuple[float, ...] = (1.0,)
    message_rates: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        rates = (*self.compute_rates, *self.message_rates)
        if not len(self.sizes) == len(self.compute_rates) == len(self.message_rates) or not self.sizes:
            raise ConfigError("contention needs a rate of each sort for every size")
        if list(self.sizes) != sorted(set(self.sizes)) or not all(0 < rate <= 1 for rate in rates):
            raise ConfigError(f"contention at {self.sizes} with rates {rates}: sizes in order, rates above 0, up to 1")

    @classmethod
    def uniform(cls, compute_rate: float, message_rate: float) -> Contention:
        """The same for messages of every size."""
        return cls((1,), (compute_rate,), (message_rate,))

    def rates(self, num_bytes: int) -> tuple[float, float]:
        """How fast a rank computes while such a message is under way, and how fast the message moves meanwhile."""
        right = bisect.bisect_right(self.sizes, num_bytes)
        if right in (0, len(self.sizes)):
            place = min(right, len(self.sizes) - 1)
            return self.compute_rates[place], self.message_rates[place]
        low, high = self.sizes[right - 1], self.sizes[right]
        share = math.log(num_bytes / low) / math.log(high / low)
        compute, message = (
            rates[right - 1] + share * (rates[right] - rates[right - 1])
            for rates in (self.compute_rates, self.message_rates)
        )
        return compute, message


@dataclass(frozen=True)
class MachineCosts:
    """What messages cost here. All times are of a rank that is otherwise alone, unless they say so.

    `servers`: messages that are under way at once (1 on NCCL and paceline, 2 on gloo). `launch_s`: the host's time per
    bucket. `gather_s_per_byte` and `scatter_s_per_byte`: the copies into and out of a bucket. `contention`: how
    messages and arithmetic slow each other. `pair_rate`: how fast each of two messages moves. `late_s`: by how much the
    last rank comes after this one. `finish_s`: what follows the last message.
    """

    curve: Curve
    servers: int = 1
    launch_s: float = 0.0
    gather_s_per_byte: float = 0.0
    scatter_s_per_byte: float = 0.0
    contention: Contention = Contention()
    pair_rate: float = 1.0
    late_s: float = 0.0
    finish_s: float = 0.0

    def __post_init__(self) -> None:
        if self.servers < 1 or not 0 < self.pair_rate <= 1:
            raise ConfigError(
                f"{self.servers} servers, a pair at the rate {self.pair_rate}: at least 1, and a rate above 0, up to 1"
            )


@dataclass
class SimulatedBucket:
    """One bucket, in seconds since backward began: ready, handed over, moving, done."""

    num_bytes: int
    ready_s: float = 0.0
    launch_s: float = 0.0
    start_s: float = 0.0
    done_s: float = 0.0
    work_s: float = field(default=0.0, repr=False)  # what is left of its transfer, undisturbed
    rates: tuple[float, float] = field(default=(1.0, 1.0), repr=False)  # see `Contention.rates`

    @property
    def queue_s(self) -> float:
        return self.start_s - self.launch_s

    @property
    def transfer_s(self) -> float:
        return self.done_s - self.start_s


@dataclass(frozen=True)
class SimulatedStep:
    """A step under a plan. `backward_s` is when this rank's backward ended, `over_s` when all gradients were there."""

    buckets: tuple[SimulatedBucket, ...]
    backward_s: float
    over_s: float
    before_s: float
    after_s: float
    local_s: float

    @property
    def step_s(self) -> float:
        return self.before_s + self.over_s + self.after_s

    @property
    def exposed_s(self) -> float:
        """What communication adds to the step."""
        return self.over_s - self.local_s


def simulate_backward(plan: Plan, backward: Backward, costs: MachineCosts) -> SimulatedStep:
    """Run the events of one backward pass. Pure."""
    if len(backward.ready_s) != len(plan.gradients):
        raise ConfigError(f"{len(backward.ready_s)} ready times for {len(plan.gradients)} gradients")
    ready = [max(backward.ready_s[piece.gradient] for piece in bucket.pieces) for bucket in plan.buckets]
    return simulate_buckets(plan.bucket_bytes, ready, backward, costs)


def simulate_buckets(
    sizes: Sequence[int], ready_s: Sequence[float], backward: Backward, costs: MachineCosts
) -> SimulatedStep:
    """The same from the sizes of the buckets and the moments of the local backward at which each is complete."""
    run = _Run(sizes, ready_s, backward, costs)
    run.compute()
    return run.finish()


class _Run:
    """The state of the simulation between two events.

    Progress of computing is counted in seconds of the undisturbed backward; it is slower while messages are under way.
    Handing a bucket over is computing, too.
    """

    def __init__(self, sizes: Sequence[int], ready_s: Sequence[float], backward: Backward, costs: MachineCosts) -> None:
        self.costs, self.backward = costs, backward
        self.buckets = [SimulatedBucket(size) for size in sizes]
        # In-order launch: a bucket leaves not before the ones in front of it.
        self.milestones: list[float] = []
        latest = 0.0
        for moment in ready_s:
            latest = max(latest, moment)
            self.milestones.append(latest)
        self.now_s = 0.0
        self.progress_s = 0.0
        self.waiting: list[SimulatedBucket] = []
        self.moving: list[SimulatedBucket] = []

    def compute(self) -> None:
        """This rank's backward, with buckets handed over as they are complete."""
        costs = self.costs
        for bucket, milestone in zip(self.buckets, self.milestones, strict=True):
            self._advance_compute(milestone - self.progress_s)
            self.progress_s = milestone
            bucket.ready_s = self.now_s
            self._advance_compute(costs.launch_s + costs.gather_s_per_byte * bucket.num_bytes)
            bucket.launch_s = self.now_s
            self.waiting.append(bucket)
            self._admit()
        self._advance_compute(self.backward.total_s - self.progress_s)

    def finish(self) -> SimulatedStep:
        """Wait for the buckets in order and take their sums out."""
        end_s, costs = self.now_s, self.costs
        self._drain()
        over_s = end_s
        for bucket in self.buckets:
            over_s = max(over_s, bucket.done_s) + costs.scatter_s_per_byte * bucket.num_bytes
        over_s += costs.finish_s
        return SimulatedStep(
            tuple(self.buckets), end_s, over_s, self.backward.before_s, self.backward.after_s, self.backward.total_s
        )

    def _admit(self) -> None:
        while self.waiting and len(self.moving) < self.costs.servers:
            bucket = self.waiting.pop(0)
            bucket.start_s = self.now_s
            # The last rank arrives a little later: nothing moves before, but the server is taken.
            bucket.work_s = self.costs.curve.estimate_s(bucket.num_bytes) + self.costs.late_s
            bucket.rates = self.costs.contention.rates(bucket.num_bytes)
            self.moving.append(bucket)

    def _speeds(self, is_computing: bool) -> list[float]:
        """How fast each message under way moves now."""
        together = self.costs.pair_rate if len(self.moving) > 1 else 1.0
        return [together * (bucket.rates[1] if is_computing else 1.0) for bucket in self.moving]

    def _advance_compute(self, work_s: float) -> None:
        """Compute so much undisturbed work; messages move meanwhile, and each slows the other."""
        while work_s > _EPSILON:
            # Two messages take no more of a core than the one that takes more: they share it.
            rate = min((bucket.rates[0] for bucket in self.moving), default=1.0)
            until_s = work_s / rate
            speeds = self._speeds(is_computing=True)
            elapsed_s = min(until_s, self._next_end_s(speeds))
            work_s -= elapsed_s * rate
            self._move(elapsed_s, speeds)

    def _drain(self) -> None:
        """Only messages are left."""
        while self.moving:
            speeds = self._speeds(is_computing=False)
            self._move(self._next_end_s(speeds), speeds)

    def _next_end_s(self, speeds: Sequence[float]) -> float:
        left = (bucket.work_s / speed for bucket, speed in zip(self.moving, speeds, strict=True))
        return min(left, default=math.inf)

    def _move(self, elapsed_s: float, speeds: Sequence[float]) -> None:
        self.now_s += elapsed_s
        for bucket, speed in zip(self.moving, speeds, strict=True):
            bucket.work_s -= elapsed_s * speed
        done = [bucket for bucket in self.moving if bucket.work_s <= _EPSILON]
        for bucket in done:
            bucket.done_s = self.now_s
            self.moving.remove(bucket)
        if done:
            self._admit()
