"""The simulator: one step of a data-parallel job, by its events, for one plan of buckets. Reads top to bottom.

It follows the wrapper's order of events, not a formula: gradients become ready while the rank computes, buckets leave
in order, messages queue for the servers of the backend, and computing and messages slow each other down.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.plan import Plan
from paceline.predict.curves import CostCurve
from paceline.predict.job import Job

# Messages that a backend moves at once; 1 where nothing is known.
SERVERS = {"gloo": 2}
_EPSILON = 1e-12
# What the model leaves out, as a standard deviation: a share of what communication adds. One number for all.
MODEL_ERROR = 0.10
# How much longer a GPU computes while NCCL moves a message: the published mean and maximum, arXiv 2507.03114.
_SLOWED_MEAN, _SLOWED_MOST = 0.189, 0.40
# And how far off an assumed share of a core is, one standard deviation.
_SHARE_ERROR = 0.15
_SIZES = tuple(4096 << 2 * power for power in range(11))  # to 4 GiB


@dataclass(frozen=True)
class Contention:
    """How a message and arithmetic slow each other down, by the size of the message: 1 is undisturbed. Fitted where
    steps were measured while messages were sent (`predictor`), else as `assume` says; `basis` says which. Small
    messages are slowed most: they wait for a core that computes. Between the sizes the rates are straight lines on a
    log axis, beyond them constant. `alone_s` are the seconds of these messages alone where they are not those of the
    curve, and `is_by_bytes` says that it is their bytes that slow, not their wait: see `spread_over`."""

    sizes: tuple[int, ...] = (1,)
    compute_rates: tuple[float, ...] = (1.0,)
    message_rates: tuple[float, ...] = (1.0,)
    basis: str = "assumed: messages and computing do not slow each other"
    alone_s: tuple[float, ...] = ()
    is_by_bytes: bool = False

    def __post_init__(self) -> None:
        rates, is_ordered = (*self.compute_rates, *self.message_rates), list(self.sizes) == sorted(set(self.sizes))
        has_all = 0 < len(self.sizes) == len(self.compute_rates) == len(self.message_rates)
        if not has_all or not is_ordered or not all(0 < rate <= 1 for rate in rates):
            raise ConfigError(f"contention at {self.sizes} with rates {rates}: sizes in order, rates above 0, up to 1")

    @classmethod
    def assume(
        cls, device: str, is_on_host: bool, spare_cores: float = 0.0, source: random.Random | None = None
    ) -> Contention:
        """What is taken where nothing was measured; with a source, as it might be. `spare_cores` are the idle cores for
        each rank. `is_on_host`: cores move the messages, between ranks of one host. What a link carries is taken to
        need none of a CPU host."""
        if device == "cuda":
            mode = 3 * _SLOWED_MEAN - _SLOWED_MOST  # of a triangle from 0 to the most with this mean
            slowed = source.triangular(0.0, _SLOWED_MOST, mode) if source else _SLOWED_MEAN
            basis = f"assumed: a GPU computes {_SLOWED_MEAN:.1%} longer while NCCL moves a message, {_SLOWED_MOST:.0%} "
            return cls((1,), (1 / (1 + slowed),), (1.0,), f"{basis}at most (published, arXiv 2507.03114)", (), True)
        share, on_host = 0.0, device == "cpu" and is_on_host
        if on_host:
            share = (1 - min(1.0, max(0.0, spare_cores))) / 2
        if source is not None and device == "cpu":
            share = min(0.9, abs(share + _SHARE_ERROR * source.gauss(0, 1)))
        if not on_host:
            return cls((1,), (1 - share,), (1.0,), "assumed: messages on a link take no core of a rank")
        basis = "assumed: a message between ranks of a full CPU host takes half of its rank's core"
        return cls((1,), (1 - share,), (1 - share,), f"{basis}, and nothing where each rank has a core to spare")

    def spread_over(self, curve: CostCurve) -> Contention:
        """For messages that a link makes longer than those that were measured: arithmetic loses as many seconds, and
        delays the message by as many, over a longer time. Where bytes slow, the latency of a message costs nothing."""
        if self.is_by_bytes:
            wait_s, lost = curve.estimate_s(1), 1 - self.compute_rates[0]
            rates = tuple(1 - lost * (1 - wait_s / max(wait_s, curve.estimate_s(size), 1e-12)) for size in _SIZES)
            return Contention(_SIZES, rates, (1.0,) * len(_SIZES), self.basis)
        if not self.alone_s:
            return self
        compute_rates, message_rates = [], []
        for number, (size, alone_s) in enumerate(zip(self.sizes, self.alone_s, strict=True)):
            longer_s, under_way_s = max(0.0, curve.estimate_s(size) - alone_s), alone_s / self.message_rates[number]
            lost_s = (1 - self.compute_rates[number]) * under_way_s
            compute_rates.append(1 - lost_s / (under_way_s + longer_s))
            message_rates.append((alone_s + longer_s) / (under_way_s + longer_s))
        return replace(self, compute_rates=tuple(compute_rates), message_rates=tuple(message_rates), alone_s=())

    def rates(self, num_bytes: int) -> tuple[float, float]:
        """How fast a rank computes while such a message is under way, and how fast the message moves meanwhile."""
        right = bisect.bisect_right(self.sizes, num_bytes)
        left, right = max(0, right - 1), min(right, len(self.sizes) - 1)
        if left == right:
            return self.compute_rates[left], self.message_rates[left]
        share = math.log(num_bytes / self.sizes[left]) / math.log(self.sizes[right] / self.sizes[left])
        compute, message = (
            rates[left] + share * (rates[right] - rates[left]) for rates in (self.compute_rates, self.message_rates)
        )
        return compute, message


@dataclass(frozen=True)
class MachineCosts:
    """What messages cost. All times are of a rank that is otherwise alone, unless they say so. `servers`: messages that
    are under way at once (1 on NCCL and shm, 2 on gloo). `launch_s`: the host's time per bucket. `gather_s_per_byte`:
    the copies into a bucket and out of it. `contention`: how messages and arithmetic slow each other. `pair_rate`: how
    fast each of two messages moves. `finish_s`: what follows the last message."""

    curve: CostCurve
    servers: int = 1
    launch_s: float = 0.0
    gather_s_per_byte: float = 0.0
    contention: Contention = Contention()
    pair_rate: float = 1.0
    finish_s: float = 0.0

    def __post_init__(self) -> None:
        if self.servers < 1 or not 0 < self.pair_rate <= 1:
            raise ConfigError(f"{self.servers} servers, pairs at {self.pair_rate}: at least 1, at a rate in (0, 1]")

    @classmethod
    def assume(cls, curve: CostCurve, servers: int, contention: Contention) -> MachineCosts:
        """The costs where no steps were measured: copies and launches cost nothing. Messages that are under way at once
        share the link: together they are no faster than one."""
        return cls(curve, servers, contention=contention, pair_rate=1 / servers)


class Layout(NamedTuple):
    """Buckets in the order of their launch: their bytes, and when each is complete in the undisturbed backward."""

    num_bytes: tuple[int, ...]
    ready_s: tuple[float, ...]


@dataclass
class BucketSpan:
    """One bucket: when it was ready, handed over, moving and done, in seconds since backward began."""

    num_bytes: int
    ready_s: float = 0.0
    launch_s: float = 0.0
    start_s: float = 0.0
    done_s: float = 0.0

    @property
    def queue_s(self) -> float:
        return self.start_s - self.launch_s


@dataclass(frozen=True)
class SimulatedStep:
    """A step under a plan. `backward_s` is when this rank's backward ended, `over_s` when all gradients were there.
    `local_s` is the rank's own backward, without communication."""

    buckets: tuple[BucketSpan, ...]
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


def simulate(job: Job, buckets: Plan | Layout | Sequence[int], costs: MachineCosts) -> SimulatedStep:
    """One step of the job with these buckets: a plan, a layout, or the places of the ready order at which they end."""
    layout = buckets if isinstance(buckets, Layout) else _lay_out(job, buckets)
    run = _Run(costs)
    done = [BucketSpan(size) for size in layout.num_bytes]
    # Computing, with buckets handed over as they are complete. In-order launch: a bucket does not leave before the ones
    # in front of it, so it is complete with the latest gradient so far. Handing a bucket over is computing, too.
    computed_s = 0.0
    for bucket, complete_s in zip(done, itertools.accumulate(layout.ready_s, max), strict=True):
        run.compute(complete_s - computed_s)
        computed_s = complete_s
        bucket.ready_s = run.now_s
        run.compute(costs.launch_s + costs.gather_s_per_byte * bucket.num_bytes)
        bucket.launch_s = run.now_s
        run.send(bucket)
    run.compute(job.backward_s - computed_s)
    backward_s = run.now_s
    # Only messages are left.
    run.drain()
    over_s = max([backward_s, *(bucket.done_s for bucket in done)]) + costs.finish_s
    return SimulatedStep(tuple(done), backward_s, over_s, job.before_s, job.after_s, job.backward_s)


def _lay_out(job: Job, buckets: Plan | Sequence[int]) -> Layout:
    if isinstance(buckets, Plan):
        ready_of = dict(zip((gradient.name for gradient in job.gradients), job.ready_s, strict=True))
        names = [gradient.name for gradient in buckets.gradients]
        if missing := [name for name in names if name not in ready_of]:
            raise ConfigError(f"the plan has {len(missing)} gradients that the job lacks, such as {missing[0]!r}")
        ready = (max(ready_of[names[piece.gradient]] for piece in bucket.pieces) for bucket in buckets.buckets)
        return Layout(buckets.bucket_bytes, tuple(ready))
    ends = [0, *buckets]
    sizes = tuple(job.totals[end] - job.totals[start] for start, end in itertools.pairwise(ends))
    return Layout(sizes, tuple(job.latest_s[end - 1] for end in buckets))


@dataclass
class _Message:
    """A message under way: the undisturbed seconds that are left of it, and its rates (see `Contention.rates`)."""

    bucket: BucketSpan
    left_s: float
    compute_rate: float
    message_rate: float


@dataclass
class _Run:
    """The state of the simulation between two events: the clock, messages that wait, and messages that move."""

    costs: MachineCosts
    now_s: float = 0.0
    waiting: deque[BucketSpan] = field(default_factory=deque)
    moving: list[_Message] = field(default_factory=list)

    def compute(self, work_s: float) -> None:
        """Compute this many undisturbed seconds; messages move meanwhile, and each slows the other."""
        while work_s > _EPSILON:
            # Two messages take no more of a core than the one that takes more: they share it.
            rate = min((message.compute_rate for message in self.moving), default=1.0)
            work_s -= self._move(work_s / rate, is_computing=True) * rate

    def send(self, bucket: BucketSpan) -> None:
        self.waiting.append(bucket)
        self._admit()

    def drain(self) -> None:
        while self.moving:
            self._move(math.inf, is_computing=False)

    def _admit(self) -> None:
        """A message starts as soon as a server is free."""
        while self.waiting and len(self.moving) < self.costs.servers:
            bucket = self.waiting.popleft()
            bucket.start_s = self.now_s
            left_s = self.costs.curve.estimate_s(bucket.num_bytes)
            self.moving.append(_Message(bucket, left_s, *self.costs.contention.rates(bucket.num_bytes)))

    def _move(self, most_s: float, is_computing: bool) -> float:
        """Move the messages until the first one ends, or for `most_s`; the seconds that this takes."""
        together = self.costs.pair_rate if len(self.moving) > 1 else 1.0
        speeds = [together * (message.message_rate if is_computing else 1.0) for message in self.moving]
        ends = (message.left_s / speed for message, speed in zip(self.moving, speeds, strict=True))
        elapsed_s = min(most_s, min(ends, default=math.inf))
        self.now_s += elapsed_s
        for message, speed in zip(self.moving, speeds, strict=True):
            message.left_s -= elapsed_s * speed
        done = [message for message in self.moving if message.left_s <= _EPSILON]
        for message in done:
            message.bucket.done_s = self.now_s
            self.moving.remove(message)
        if done:
            self._admit()
        return elapsed_s
