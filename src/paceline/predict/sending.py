"""The strategies that send buckets, as schedules of the simulator: codecs, ZeRO-1, local SGD and DiLoCo."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.plan import Gradient
from paceline.predict.job import Job
from paceline.predict.simulate import (
    Buckets,
    BucketSpan,
    Load,
    MachineCosts,
    Schedule,
    SimulatedStep,
    Timeline,
    simulate_buckets,
)
from paceline.strategy import Strategy

# When larger blocks are freed, glibc returns them to the system.
LARGE_BYTES = 32 << 20
# If a bucket is not a single all-reduce, the wrapper's control words need a separate message.
_WORDS_BYTES = 64


@dataclass(frozen=True)
class Sending(Schedule):
    """How ranks send with a strategy. `parts` is the codec's work for a bucket: pairs of fixed seconds and seconds per
    byte of gradients, one before the first message and one after each; empty if it is free. `is_in_place` means that
    the ranks share memory. `large_factor` multiplies the codec's cost for a bucket above `LARGE_BYTES`, whose vectors
    are allocated anew in each step. `ranks_per_host` ranks share the link of their host. `round_s_per_byte` is the
    remaining work in a schedule's round or a sharded update, in seconds per byte of parameters."""

    strategy: Strategy
    world_size: int
    parts: tuple[tuple[float, float], ...] = ()
    is_in_place: bool = False
    large_factor: float = 1.0
    ranks_per_host: int = 1
    round_s_per_byte: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self.is_in_place and self.strategy.is_plain_in_memory

    @property
    def has_levels(self) -> bool:
        return self.strategy.between_hosts and 1 < self.ranks_per_host < self.world_size

    def list_messages(self, gradients: Sequence[Gradient]) -> tuple[Load, ...]:
        """The messages that a bucket is sent as. A sharded update gathers later. The bytes of an all-reduce or
        all-gather cross each link between hosts once; in an all-to-all, or in each rank's own exchange between hosts in
        a two-level scheme, all bytes cross the link."""
        found = self.strategy.traffic(gradients, self.world_size, self.ranks_per_host, self.is_in_place)
        found = found[:1] if self.strategy.is_sharded else found
        loads = []
        for message in found:
            shares = not message.is_inside and (self.has_levels or message.kind == "all-to-all")
            times = self.ranks_per_host if shares and self.ranks_per_host < self.world_size else 1
            loads.append(Load(times * message.as_all_reduce(self.world_size), message.is_inside))
        return tuple(loads)

    def list_works(self, num_bytes: int, count: int) -> list[float]:
        if self.has_levels:  # the codec runs between the messages inside a host, on a part of the bucket
            between = replace(self, ranks_per_host=1)
            return [0.0, *between.list_works(num_bytes // self.ranks_per_host, count - 2), 0.0]
        if not self.parts:
            return [0.0] * (count + 1)
        chosen = [*self.parts[:count], self.parts[-1]]
        chosen += [(0.0, 0.0)] * (count + 1 - len(chosen))
        factor = self.large_factor if num_bytes > LARGE_BYTES else 1.0
        return [factor * (fixed_s + s_per_byte * num_bytes) for fixed_s, s_per_byte in chosen]

    def scale(self, factor: float) -> Sending:
        """The same strategy with a codec that takes `factor` times as long."""
        return replace(self, parts=tuple((factor * fixed_s, factor * s_per_byte) for fixed_s, s_per_byte in self.parts))

    @property
    def has_buckets(self) -> bool:
        return not self.strategy.outer

    def simulate(self, job: Job, buckets: Buckets, costs: MachineCosts) -> SimulatedStep:
        if self.strategy.outer:
            return self._simulate_period(job, costs)
        step = simulate_buckets(job, buckets, costs)
        over_s = step.over_s + (0.0 if self.is_plain else costs.curve.estimate_s(_WORDS_BYTES))
        if not self.strategy.is_sharded:
            return replace(step, over_s=over_s)
        over_s += self._estimate_gathering(job, step.buckets, costs)
        return replace(step, over_s=over_s, after_s=step.after_s / self.world_size)

    def count_sent(self, job: Job, cuts: Sequence[int]) -> float:
        groups = [job.gradients[start:end] for start, end in itertools.pairwise([0, *cuts])]
        messages = (
            message
            for group in (self.list_fragments(job) if self.strategy.outer else groups)
            for message in self.strategy.traffic(group, self.world_size, self.ranks_per_host, self.is_in_place)
        )
        return sum(message.sent_bytes(self.world_size) for message in messages) / self.strategy.period

    def list_fragments(self, job: Job) -> list[tuple[Gradient, ...]]:
        """The gradients of each exchange in a period: every F-th parameter, for F fragments."""
        count = self.strategy.fragments
        return [group for number in range(count) if (group := job.gradients[number::count])]

    def _simulate_period(self, job: Job, costs: MachineCosts) -> SimulatedStep:
        """Local steps, and one exchange of every fragment per period. An exchange blocks unless it has a delay."""
        strategy, spans, exposed_s = self.strategy, list[BucketSpan](), 0.0
        for group in self.list_fragments(job):
            run, span = Timeline(costs), BucketSpan(sum(gradient.num_bytes for gradient in group))
            run.hand_over(span, self.list_messages(group), costs.launch_s)
            run.drain()
            spans.append(span)
            # Ranks agree through control words before an exchange begins and before its result is used.
            exposed_s += 2 * costs.curve.estimate_s(_WORDS_BYTES) + span.launch_s
            exposed_s += max(0.0, span.done_s - span.launch_s - strategy.delay * job.local_s)
            exposed_s += self.round_s_per_byte * span.num_bytes
        over_s = job.backward_s + exposed_s / strategy.period
        return SimulatedStep(tuple(spans), job.backward_s, over_s, job.before_s, job.after_s, job.backward_s)

    def _estimate_gathering(self, job: Job, buckets: Sequence[BucketSpan], costs: MachineCosts) -> float:
        """How much longer the next forward takes because it waits for updated parameters. They arrive in forward order,
        the reverse of the buckets; a bucket is needed once forward has processed the bytes before it."""
        arrived_s, passed_s = 0.0, 0.0
        sizes = [bucket.num_bytes for bucket in buckets]
        for num_bytes in reversed(sizes):
            (*_, message) = self.strategy.traffic([Gradient("", num_bytes, 1)], self.world_size)
            arrived_s += costs.curve.estimate_s(message.as_all_reduce(self.world_size))
            passed_s = max(passed_s, arrived_s) + job.before_s * num_bytes / max(1, sum(sizes))
            passed_s += self.round_s_per_byte * num_bytes
        return passed_s - job.before_s
