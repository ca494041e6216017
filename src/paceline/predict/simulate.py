"""The simulator: the model of one data-parallel step with one bucket plan. Reads top to bottom.

A gradient is ready after a fixed amount of the rank's own compute, and a bucket is launched when its gradients and all
earlier buckets are complete. Copying and launching a bucket counts as compute; its message then queues for one of n
servers. While messages are in flight, compute runs at a rate c and each message at a rate m, which depend on the size
of the message; of two concurrent messages each is slowed by another factor p. At the end of backward, the rank waits
for all messages. The rest of the step (data, forward, optimizer, buffers) takes as long as measured.

`Timeline` evaluates this event by event, also with several servers and for strategies, whose buckets become several
messages with the work of a codec between them. For one message at a time, `Queue` is the closed form: faster for many
buckets and for many partitions. A strategy is a `Schedule` in another module.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.plan import Gradient, Plan, cut_like, find_late
from paceline.predict.curves import CostCurve, interpolate_sizes
from paceline.predict.job import Job

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

_EPSILON = 1e-12
# With at least this many buckets, the closed form is faster than simulating events, even for a single step.
_MANY_BUCKETS = 16
# Maximum number of buckets that are simulated at once.
_MOST_CELLS = 200_000
# Standard deviation of the model's own error, as a fraction of exposed communication. The same for all predictions.
MODEL_ERROR = 0.10
# How much longer a GPU computes while NCCL moves a message: published mean and maximum, arXiv 2507.03114.
_SLOWED_MEAN, _SLOWED_MOST = 0.189, 0.40
# The speed of an NCCL message while the GPU computes: least, most likely and most.
_MESSAGE_RATES = (0.35, 0.60, 0.85)
# Standard deviation of an assumed core fraction.
_SHARE_ERROR = 0.15
_SIZES = tuple(4096 << 2 * power for power in range(11))  # up to 4 GiB
# Codec work that follows a message shares the rank's core with backward.
_CALLBACK_RATE = 0.5


@dataclass(frozen=True)
class Contention:
    """How messages and compute slow each other down, by message size: 1 means undisturbed. Fitted to steps measured
    while messages were sent (`predictor`), otherwise assumed by `assume`; `basis` says which. Small messages are slowed
    most, because they wait for a busy core. Rates are interpolated linearly over the logarithm of the size, and are
    constant beyond the ends. `alone_s` is set if the undisturbed times of these messages, in seconds, differ from those
    of the cost curve. `is_by_bytes` means that a message slows compute while its bytes move, not while it waits: see
    `spread_over`."""

    sizes: tuple[int, ...] = (1,)
    compute_rates: tuple[float, ...] = (1.0,)
    message_rates: tuple[float, ...] = (1.0,)
    basis: str = "assumed: messages and compute do not slow each other down"
    alone_s: tuple[float, ...] = ()
    is_by_bytes: bool = False

    @classmethod
    def assume(
        cls, device: str, is_on_host: bool, spare_cores: float = 0.0, source: random.Random | None = None,
        is_alone: bool = True,
    ) -> Contention:  # fmt: skip
        """The assumption if nothing was measured; with a random source, a draw. `spare_cores` are idle cores per rank.
        `is_on_host` means that cores move the messages, between ranks of one host; those over a link are assumed to
        need none. `is_alone` means that messages were timed without compute; otherwise they are not slowed further."""
        if device == "cuda":
            mode = 3 * _SLOWED_MEAN - _SLOWED_MOST  # mode of the triangular distribution on [0, max] with this mean
            slowed = source.triangular(0.0, _SLOWED_MOST, mode) if source else _SLOWED_MEAN
            basis = f"assumed: a GPU computes {_SLOWED_MEAN:.1%} longer while NCCL moves a message, {_SLOWED_MOST:.0%} "
            basis += "at most (published, arXiv 2507.03114)"
            if not is_alone:
                return cls((1,), (1 / (1 + slowed),), (1.0,), basis, (), True)
            least, rate, most = _MESSAGE_RATES
            basis += f", and the message moves at {rate:.0%} of its normal speed ({least:.0%} to {most:.0%})"
            rate = source.triangular(least, most, rate) if source else rate
            return cls((1,), (1 / (1 + slowed),), (rate,), basis, (), True)
        share, on_host = 0.0, device == "cpu" and is_on_host
        if on_host:
            share = (1 - min(1.0, max(0.0, spare_cores))) / 2
        if source is not None and device == "cpu":
            share = min(0.9, abs(share + _SHARE_ERROR * source.gauss(0, 1)))
        if not on_host:
            return cls((1,), (1 - share,), (1.0,), "assumed: messages over a link use no CPU core")
        basis = "assumed: a message between ranks of a full CPU host uses half of a rank's core"
        return cls((1,), (1 - share,), (1 - share,), f"{basis}, or none if each rank has a spare core")

    @property
    def is_nothing(self) -> bool:
        return min(self.compute_rates) == min(self.message_rates) == 1

    def spread_over(self, curve: CostCurve) -> Contention:
        """Adapt to a link on which messages take longer. Compute and a message delay each other by as many seconds as
        measured, spread over the longer message. By bytes, the latency of a message causes no contention."""
        if self.is_by_bytes:
            wait_s = curve.estimate_s(1)
            moving = [1 - wait_s / max(wait_s, curve.estimate_s(size), 1e-12) for size in _SIZES]
            compute, message = (
                tuple(1 - (1 - rates[0]) * share for share in moving)
                for rates in (self.compute_rates, self.message_rates)
            )
            return Contention(_SIZES, compute, message, self.basis)
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
        """The speed of compute while such a message is in flight and the speed of the message at the same time."""
        if len(self.sizes) == 1:
            return self.compute_rates[0], self.message_rates[0]
        compute, message = (
            interpolate_sizes(list(zip(self.sizes, rates, strict=True)), num_bytes)
            for rates in (self.compute_rates, self.message_rates)
        )
        return compute, message


class Load(NamedTuple):
    """A message, as the size of an all-reduce with as many bytes, over all ranks or only one host's."""

    num_bytes: int
    is_inside: bool = False


class Schedule:
    """How a strategy arranges a step; the strategies are subclasses in other modules (`sending`, `fully_sharded`).
    This one sends each bucket as one all-reduce."""

    @property
    def has_buckets(self) -> bool:
        """Whether the strategy uses the buckets; otherwise it defines its own messages."""
        return True

    @property
    def is_plain(self) -> bool:
        """Whether each bucket is one plain all-reduce, with the control words in the last."""
        return False

    @property
    def has_levels(self) -> bool:
        """Whether messages inside hosts and between hosts are separate."""
        return False

    def list_messages(self, gradients: Sequence[Gradient]) -> tuple[Load, ...]:
        """The messages that a bucket is sent as, one after the other."""
        return (Load(sum(gradient.num_bytes for gradient in gradients)),)

    def list_works(self, num_bytes: int, count: int) -> list[float]:
        """Seconds of compute before the first of a bucket's `count` messages and after each message."""
        return [0.0] * (count + 1)

    def simulate(self, job: Job, buckets: Buckets, costs: MachineCosts) -> SimulatedStep:
        return simulate_buckets(job, buckets, costs)

    def count_sent(self, job: Job, cuts: Sequence[int]) -> float:
        """Mean bytes that a rank sends per step with these buckets; 0 if unknown."""
        return 0.0


@dataclass(frozen=True)
class MachineCosts:
    """Costs of messages. Times are for a rank that does nothing else, unless stated otherwise. `servers` is the number
    of concurrent messages (1 on NCCL and shm, 2 on gloo). `launch_s` is the host time per bucket. `gather_s_per_byte`
    covers the copies into and out of a bucket. `pair_rate` is the speed of each of two concurrent messages. `finish_s`
    follows the last message; if it is negative, communication ends sooner, but not before backward. Without `sending`,
    each bucket is one all-reduce. `inside` is the curve for messages inside a host if there are two levels; `curve` is
    then for messages between hosts."""

    curve: CostCurve
    servers: int = 1
    launch_s: float = 0.0
    gather_s_per_byte: float = 0.0
    contention: Contention = Contention()
    pair_rate: float = 1.0
    finish_s: float = 0.0
    sending: Schedule | None = None
    inside: CostCurve | None = None

    @classmethod
    def assume(cls, curve: CostCurve, servers: int, contention: Contention) -> MachineCosts:
        """The costs if no steps were measured: copies and launches are free, and concurrent messages share the link."""
        return cls(curve, servers, contention=contention, pair_rate=1 / servers)


class Layout(NamedTuple):
    """Buckets in launch order: their bytes, when each is complete in an undisturbed backward, and their messages if a
    bucket is not a single all-reduce. `late` names the gradients that are sent whole even if the job is split, because
    their dense part is late (`drop_late_rows`)."""

    num_bytes: tuple[int, ...]
    ready_s: tuple[float, ...]
    messages: tuple[tuple[Load, ...], ...] = ()
    late: frozenset[str] = frozenset()


@dataclass
class BucketSpan:
    """One bucket: when it was ready, launched, started and done, in seconds since backward began."""

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
    """A step under a plan. `backward_s` is the end of this rank's backward, `over_s` the time at which all gradients
    are reduced. `local_s` is the rank's own backward without communication."""

    buckets: tuple[BucketSpan, ...]
    backward_s: float
    over_s: float
    before_s: float
    after_s: float
    local_s: float
    tail: tuple[BucketSpan, ...] = ()  # rows of embeddings

    @property
    def step_s(self) -> float:
        return self.before_s + self.over_s + self.after_s

    @property
    def exposed_s(self) -> float:
        return self.over_s - self.local_s


Buckets = Plan | Layout | Sequence[int]


def simulate(job: Job, buckets: Buckets, costs: MachineCosts) -> SimulatedStep:
    """Simulate one step with these buckets: a plan (by its sizes), a layout, or end positions in the ready order. For a
    strategy with a period, it is the mean step; its buckets are fragments, in seconds since their exchange began."""
    return (costs.sending or Schedule()).simulate(job, buckets, costs)


def simulate_buckets(job: Job, buckets: Buckets, costs: MachineCosts) -> SimulatedStep:
    """The step with one queue of buckets, each sent as the messages of its strategy."""
    layout = buckets if isinstance(buckets, Layout) else _lay_out(job, buckets, costs.sending)
    run = Timeline(costs)
    if has_closed_form(costs) and len(layout.num_bytes) >= _MANY_BUCKETS:
        done, backward_s = Queue.read(job, layout, costs).list_spans()
        run.now_s = max([backward_s, *(bucket.done_s for bucket in done[-1:])])
    else:
        done = [BucketSpan(size) for size in layout.num_bytes]
        backward_s = run.compute_and_send(job, layout, done)
    # Embedding rows follow once the control words, which carry their number, have arrived.
    tail = [BucketSpan(num_bytes, backward_s) for one, num_bytes in job.tail if one.name not in layout.late]
    for rows in tail:
        run.hand_over(rows, (Load(rows.num_bytes),), 0.0)
    run.drain()
    over_s = max([backward_s, *(span.done_s for span in (*done, *tail))])
    over_s = max(job.backward_s, over_s + costs.finish_s)
    return SimulatedStep(tuple(done), backward_s, over_s, job.before_s, job.after_s, job.backward_s, tuple(tail))


def simulate_cuts(job: Job, partitions: Sequence[Sequence[int]], costs: MachineCosts) -> list[float]:
    """`simulate(job, cuts, costs).over_s` for many cuts; faster than separate calls if there is a closed form."""
    if not has_closed_form(costs):
        return [simulate(job, cuts, costs).over_s for cuts in partitions]
    found, place = list[float](), 0
    while place < len(partitions):
        # Partitions of increasing caps have fewer and fewer buckets, so the first has the most.
        chunk = partitions[place : place + max(1, _MOST_CELLS // len(partitions[place]))]
        place += len(chunk)
        ends = np.full((len(chunk), max(map(len, chunk))), len(job.sizes))
        for row, cuts in zip(ends, chunk, strict=True):
            row[: len(cuts)] = cuts
        found += _simulate_rows(job, ends, costs).tolist()
    return found


def _simulate_rows(job: Job, ends: Indices, costs: MachineCosts) -> Floats:
    """Seconds until all gradients are reduced, for each row of bucket ends; rows are padded with the last end."""
    starts, totals = np.hstack([np.zeros_like(ends[:, :1]), ends[:, :-1]]), np.array(job.totals, dtype=np.float64)
    is_bucket, ready_s = ends > starts, np.array(job.latest_s)[ends - 1]
    last_s, rows_s = find_tails(job, costs, starts[np.arange(len(ends)), is_bucket.sum(axis=1) - 1])
    ready_s[ends == len(job.latest_s)] = np.repeat(last_s, (ends == len(job.latest_s)).sum(axis=1))
    queue = Queue(costs, totals[ends] - totals[starts], ready_s, max(job.backward_s, job.latest_s[-1]), is_bucket)
    return np.maximum(queue.over_s + rows_s + costs.finish_s, job.backward_s)


def find_tails(job: Job, costs: MachineCosts, starts: Indices) -> tuple[Floats, Floats]:
    """For last buckets that start at these gradients: when they are ready, and the seconds that the rows after them
    take. A tied gradient in the last bucket is sent whole, once its lookups are also ready."""
    tied = {job.gradients[place].name: place for place in job.tied}
    ready_s, rows_s = np.full(starts.shape, job.latest_s[-1]), np.zeros(starts.shape)
    for one, num_bytes in job.tail:
        is_late = starts <= tied.get(one.name, -1)
        ready_s[is_late] = max(job.backward_s, job.latest_s[-1])
        rows_s[~is_late] += costs.curve.estimate_s(num_bytes)
    return ready_s, rows_s


def has_closed_form(costs: MachineCosts) -> bool:
    """Whether each bucket is one message, and messages are sent one at a time."""
    return costs.sending is None and costs.servers == 1


class MessageTimes(NamedTuple):
    """Times of messages of some sizes: seconds alone, the compute that hides a message, and, per second of this
    compute, by how many seconds the message advances and the compute is delayed."""

    alone_s: Floats
    hiding_s: Floats
    moved: Floats
    slowed: Floats

    @classmethod
    def estimate(cls, sizes: Floats, costs: MachineCosts) -> MessageTimes:
        known, places = np.unique(sizes, return_inverse=True)
        contention, logs = costs.contention, np.log(np.maximum(known, 1.0))
        scale = np.log(np.array(contention.sizes, dtype=np.float64))
        compute, message = (np.interp(logs, scale, r) for r in (contention.compute_rates, contention.message_rates))
        alone_s = costs.curve.estimate_all(known)
        found = alone_s, alone_s * compute / message, message / compute, 1 / compute - 1
        return cls(*(values[places.reshape(sizes.shape)] for values in found))


class Queue:
    """The model in closed form, for one message at a time; one row per step, with its buckets in launch order. The
    clock counts the compute done so far, including launches and copies. `ready_s`, when each bucket is complete,
    excludes them. Shorter rows are padded with buckets for which `is_bucket` is false."""

    def __init__(
        self, costs: MachineCosts, sizes: Floats, ready_s: Floats, backward_s: float, is_bucket: NDArray[np.bool_]
    ) -> None:
        times = MessageTimes.estimate(sizes, costs)
        alone_s, self.hiding_s = times.alone_s * is_bucket, times.hiding_s * is_bucket
        own_s = costs.launch_s * is_bucket + costs.gather_s_per_byte * sizes
        # Times on the clock: launched, in flight, and the end of backward.
        self.launched_s = ready_s + np.cumsum(own_s, axis=1)
        self.ready_s = self.launched_s - own_s
        self.end_s = backward_s + own_s.sum(axis=1)
        before_s = np.cumsum(self.hiding_s, axis=1) - self.hiding_s
        # A message starts when its bucket is launched and the messages before it have ended.
        self.starts_s = before_s + np.maximum.accumulate(self.launched_s - before_s, axis=1)
        # The part of a message that compute hides delays compute; the rest follows the end of backward.
        self.hides_s = np.clip(self.end_s[:, None] - self.starts_s, 0.0, self.hiding_s)
        self.left_s = np.where(self.hides_s < self.hiding_s, alone_s - times.moved * self.hides_s, 0.0)
        self.lost_s = times.slowed * self.hides_s
        self.sizes = sizes

    @classmethod
    def read(cls, job: Job, layout: Layout, costs: MachineCosts) -> Queue:
        """A single step."""
        sizes = np.array(layout.num_bytes, dtype=np.float64)[None, :]
        ready_s = np.maximum.accumulate(np.array(layout.ready_s, dtype=np.float64))[None, :]
        backward_s = max([job.backward_s, *ready_s[0, -1:]])
        return cls(costs, sizes, ready_s, backward_s, np.ones_like(sizes, dtype=np.bool_))

    @property
    def over_s(self) -> Floats:
        """When the last message ends, for each row."""
        found: Floats = self.end_s + (self.lost_s + self.left_s).sum(axis=1)
        return found

    def list_spans(self) -> tuple[list[BucketSpan], float]:
        """The buckets of the first row in seconds since backward began and the end of backward."""
        starts_s, lost_s, left_s, end_s = self.starts_s[0], self.lost_s[0], self.left_s[0], float(self.end_s[0])
        moments_s = np.minimum(np.stack([starts_s, starts_s + self.hides_s[0]], axis=1), end_s)
        delays_s = np.stack([np.cumsum(lost_s) - lost_s, np.cumsum(lost_s)], axis=1)

        def read_clock(clock_s: Floats) -> Floats:
            delayed_s: Floats = np.interp(clock_s, np.append(0.0, moments_s), np.append(0.0, delays_s))
            return clock_s + delayed_s

        backward_s = end_s + float(lost_s.sum())
        after_s = backward_s + np.cumsum(left_s)
        begun_s = np.where(starts_s < end_s, read_clock(starts_s), after_s - left_s)
        done_s = np.where(left_s > 0, after_s, np.maximum(begun_s, read_clock(starts_s + self.hides_s[0])))
        columns = (
            self.sizes[0].astype(int),
            read_clock(self.ready_s[0]),
            read_clock(self.launched_s[0]),
            begun_s,
            done_s,
        )
        return [BucketSpan(*row) for row in zip(*(column.tolist() for column in columns), strict=True)], backward_s


def _lay_out(job: Job, buckets: Plan | Sequence[int], sending: Schedule | None) -> Layout:
    cuts = cut_like(job.totals, buckets.bucket_bytes) if isinstance(buckets, Plan) else buckets
    spans = list(itertools.pairwise([0, *cuts]))
    places = [range(*span) for span in spans]
    sizes = tuple(job.totals[end] - job.totals[start] for start, end in spans)
    ready = tuple(job.latest_s[end - 1] for end in cuts)
    messages: tuple[tuple[Load, ...], ...] = ()
    if sending is not None:
        messages = tuple(sending.list_messages([job.gradients[place] for place in one]) for one in places)
    late = find_late(places, len(job.gradients) - 1, job.tied) if job.tied else set()
    if late:  # sent as one tensor, which is not ready before its lookups
        ready = tuple(r if late.isdisjoint(one) else job.backward_s for r, one in zip(ready, places, strict=True))
    return Layout(sizes, ready, messages, frozenset(job.gradients[place].name for place in late))


@dataclass(eq=False, slots=True)
class _Task:
    """A task in progress for a bucket: a message, or codec work after one has arrived. It has the undisturbed seconds
    left, its rates (see `Contention.rates`), and the tasks that follow it: messages, or seconds of codec work."""

    bucket: BucketSpan
    is_message: bool
    left_s: float
    compute_rate: float
    message_rate: float
    then: deque[Load | float]


@dataclass
class Timeline:
    """The simulation between two events: the clock, and the messages and codec tasks that wait or are in progress."""

    costs: MachineCosts
    now_s: float = 0.0
    waiting: tuple[deque[_Task], deque[_Task]] = field(default_factory=lambda: (deque(), deque()))
    moving: list[_Task] = field(default_factory=list)
    # State of the work in progress: the number of messages, whether a codec is computing, and the speed of all compute.
    # Two messages share a core, so together they use no more of it than the more demanding one does alone.
    num_messages: int = 0
    is_coding: bool = False
    compute_rate: float = 1.0

    def compute_and_send(self, job: Job, layout: Layout, buckets: Sequence[BucketSpan]) -> float:
        """Compute, launch buckets in order as they become complete, and wait for the messages; return the end of
        backward. Launching a bucket also counts as compute."""
        computed_s = 0.0
        messages = layout.messages or tuple((Load(size),) for size in layout.num_bytes)
        latest_s = itertools.accumulate(layout.ready_s, max)
        for bucket, loads, complete_s in zip(buckets, messages, latest_s, strict=True):
            self.compute(complete_s - computed_s)
            computed_s = complete_s
            bucket.ready_s = self.now_s
            self.hand_over(bucket, loads, self.costs.launch_s + self.costs.gather_s_per_byte * bucket.num_bytes)
        self.compute(job.backward_s - computed_s)
        backward_s = self.now_s
        self.drain()
        return backward_s

    def compute(self, work_s: float) -> None:
        """Do work that takes this many undisturbed seconds. Messages progress meanwhile; both slow each other down."""
        while work_s > _EPSILON:
            rate = self.compute_rate * (_CALLBACK_RATE if self.is_coding else 1.0)
            work_s -= self._move(work_s / rate, True) * rate

    def hand_over(self, bucket: BucketSpan, messages: Sequence[Load], own_s: float) -> None:
        """Encode a bucket, which takes `own_s` in addition to the codec, and queue its messages one after the other."""
        sending, count = self.costs.sending, len(messages)
        works = [0.0] * (count + 1) if sending is None else sending.list_works(bucket.num_bytes, count)
        self.compute(own_s + works[0])
        bucket.launch_s, bucket.start_s = self.now_s, math.inf
        pairs = zip(messages, works[1:], strict=True)
        self._follow(bucket, deque(task for pair in pairs for task in pair))
        self._admit()

    def drain(self) -> None:
        while self.moving:
            self._move(math.inf, is_computing=False)

    def wait_for(self, bucket: BucketSpan) -> None:
        while self.moving and not bucket.done_s:
            self._move(math.inf, is_computing=False)

    def _follow(self, bucket: BucketSpan, tasks: deque[Load | float]) -> None:
        """Queue the bucket's next task; if there is none, the bucket is done."""
        while tasks and tasks[0] == 0.0:
            tasks.popleft()
        if not tasks:
            bucket.done_s, bucket.start_s = self.now_s, min(bucket.start_s, self.now_s)
            return
        task, costs = tasks.popleft(), self.costs
        if isinstance(task, Load):
            curve = costs.inside if task.is_inside and costs.inside is not None else costs.curve
            left_s, rates = curve.estimate_s(task.num_bytes), costs.contention.rates(max(1, task.num_bytes))
        else:
            left_s, rates = task, (1.0, 1.0)
        is_message = isinstance(task, Load)
        self.waiting[is_message].append(_Task(bucket, is_message, left_s, *rates, tasks))

    def _admit(self) -> None:
        """Start a message as soon as a server is free; codec tasks run one at a time."""
        codecs, messages = self.waiting
        while messages and self.num_messages < self.costs.servers:
            self.num_messages += 1
            self._start(messages.popleft())
        if codecs and not self.is_coding:
            self.is_coding = True
            self._start(codecs.popleft())

    def _start(self, task: _Task) -> None:
        self.moving.append(task)
        self.compute_rate = min(self.compute_rate, task.compute_rate)
        task.bucket.start_s = min(task.bucket.start_s, self.now_s)

    def _move(self, most_s: float, is_computing: bool) -> float:
        """Advance until the first task ends, or by `most_s`; returns the elapsed seconds."""
        moving = self.moving
        if not moving:
            self.now_s += most_s
            return most_s
        together = self.costs.pair_rate if self.num_messages > 1 else 1.0
        shares_core = is_computing or self.is_coding
        own = self.compute_rate * (_CALLBACK_RATE if is_computing else 1.0)
        elapsed_s = most_s
        speeds = []
        for task in moving:
            speed = own
            if task.is_message:
                speed = together * (task.message_rate if shares_core else 1.0)
            speeds.append(speed)
            elapsed_s = min(elapsed_s, task.left_s / speed)
        self.now_s += elapsed_s
        done = []
        for task, speed in zip(moving, speeds, strict=True):
            task.left_s -= elapsed_s * speed
            if task.left_s <= _EPSILON:
                done.append(task)
        if done:
            self._end(done)
        return elapsed_s

    def _end(self, done: Sequence[_Task]) -> None:
        for task in done:
            self.moving.remove(task)
            self._follow(task.bucket, task.then)
        self.num_messages = sum([task.is_message for task in self.moving])
        self.is_coding = self.num_messages < len(self.moving)
        self.compute_rate = min([task.compute_rate for task in self.moving], default=1.0)
        self._admit()
