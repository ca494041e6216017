"""What a predicted scaling curve may learn from: steps of a few ranks, profiles of one, sweeps of all-reduce.

What follows from it is in `scaling`; nothing here simulates.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from paceline.errors import ConfigError, RecordError
from paceline.plan import plan_like_torch
from paceline.predict.fabrics import MeasuredFabric, build_measured_fabric
from paceline.predict.profiled import build_backward
from paceline.predict.stragglers import estimate_spread, estimate_wait
from paceline.records import CollectiveRecord, LayerProfileRecord, Record, StepRecord

__all__ = ["ScalingEvidence"]

_MOST_SPREAD = 0.5


@dataclass(frozen=True)
class ScalingEvidence:
    """What is known of one wrapper on one backend in one cell: `records` has one rank by itself, and any more ranks.

    `profiles` are of the job on one rank, at one or more batch sizes; `collectives` the sweeps of all-reduce.
    `ranks_at_hand` is how many ranks this host has cores (or devices) for. `one_rank_s` has the seconds of a step on
    one rank by its samples, for strong scaling. `layouts` has the wrapper's buckets by ranks, which follow from its
    planner and not from times; `bucket_bytes` is used where nothing tells them, and `wrapper_s`, what the wrapper costs
    on one rank, where no steps on several ranks do.
    """

    wrapper: str
    backend: str
    records: tuple[StepRecord, ...]
    profiles: tuple[LayerProfileRecord, ...]
    collectives: tuple[CollectiveRecord, ...] = ()
    ranks_at_hand: int = 1
    one_rank_s: Mapping[int, float] = field(default_factory=dict)
    bucket_bytes: tuple[int, ...] = ()
    wrapper_s: float = 0.0
    layouts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = [record.world_size for record in self.records]
        if len({record.cell for record in self.records}) != 1 or len(set(counts)) < len(counts) or 1 not in counts:
            cells = sorted((*record.cell, record.world_size) for record in self.records)
            raise RecordError(f"a scaling curve needs one cell with each number of ranks once, and one rank: {cells}")
        for record in self.shared:
            if (record.wrapper, record.backend) != (self.wrapper, self.backend) or record.no_comm is None:
                raise RecordError(
                    f"{record.variant} on {record.world_size} ranks cannot calibrate {self.wrapper} on "
                    f"{self.backend}: its own steps, and those with communication off, are needed"
                )
        if not self.profiles or self.ranks_at_hand < 1:
            raise RecordError(
                f"{len(self.profiles)} layer profiles and {self.ranks_at_hand} ranks on this host: at least 1 of each"
            )

    @classmethod
    def sort(
        cls,
        records: Sequence[Record],
        wrapper: str,
        backend: str,
        cell: tuple[str, int],
        ranks_at_hand: int,
        bucket_bytes: Sequence[int] = (),
    ) -> ScalingEvidence:
        """Take what bears on one contestant and one cell (mode, size) out of the records of a study.

        Steps with communication off are the same in every wrapper, so those of all contestants count.
        """
        steps = [record for record in records if isinstance(record, StepRecord) and record.mode]
        alone = [record for record in steps if record.world_size == 1]
        own = [r for r in steps if r.world_size > 1 and (r.wrapper, r.backend) == (wrapper, backend)]
        own = [_join_silent(record, steps) for record in own]
        return cls(
            wrapper=wrapper,
            backend=backend,
            records=tuple(record for record in (*alone, *own) if record.cell == cell),
            profiles=tuple(record for record in records if isinstance(record, LayerProfileRecord)),
            collectives=tuple(record for record in records if isinstance(record, CollectiveRecord)),
            ranks_at_hand=ranks_at_hand,
            one_rank_s={record.global_batch_size: record.timing.median_s for record in alone},
            bucket_bytes=tuple(bucket_bytes),
            layouts={r.world_size: r.bucket_bytes for r in own if r.cell == cell and r.bucket_bytes},
        )

    def calibrated_up_to(self, world_size: int) -> ScalingEvidence:
        """What so many ranks tell, and nothing of more. One rank sends nothing: with it goes the smallest sweep."""
        least = min((r.world_size for r in self.collectives), default=0)
        return replace(
            self,
            records=tuple(r for r in self.records if r.world_size <= world_size),
            collectives=tuple(r for r in self.collectives if r.world_size <= max(least, world_size)),
        )

    @property
    def alone(self) -> StepRecord:
        return next(record for record in self.records if record.world_size == 1)

    @property
    def shared(self) -> list[StepRecord]:
        """The steps on several ranks, fewest first."""
        return sorted((r for r in self.records if r.world_size > 1), key=lambda record: record.world_size)

    @cached_property
    def spread(self) -> float:
        """How far the steps of ranks lie apart without communication, as a standard deviation over their median."""
        if not self.shared or self.shared[-1].no_comm is None:
            return 0.0
        rows = self.shared[-1].no_comm.seconds
        return min(_MOST_SPREAD, estimate_spread([time_s / statistics.median(row) for row in rows for time_s in row]))

    def estimate_wait(self, world_size: int) -> float:
        """How many times as long the slowest of so many ranks computes as the slowest of this host."""
        if world_size <= self.most_on_host or not self.spread:
            return 1.0
        here, there = (1 + estimate_wait(self.spread, count) for count in (self.most_on_host, world_size))
        return there / here

    @property
    def contestant(self) -> str:
        return replace(self.alone, wrapper=self.wrapper, backend=self.backend).variant

    @property
    def accumulate(self) -> int:
        return [self.alone, *self.shared][-1].accumulate

    @property
    def most_on_host(self) -> int:
        return max([self.ranks_at_hand, *(record.world_size for record in self.records)])

    def count_samples(self, world_size: int) -> float:
        """Of one rank, in a step."""
        mode, size = self.alone.mode, self.alone.cell_size
        if mode == "strong" and world_size > size:
            raise ConfigError(f"{size} samples over {world_size} ranks: at least one for each is needed")
        return size if mode == "weak" else size / world_size

    def build_fabric(self) -> MeasuredFabric | None:
        """The sweeps where this wrapper's messages lie; None where there are none."""
        found = [r for r in self.collectives if r.backend == self.backend and r.collective == "all_reduce"]
        memory = "shared" if self.wrapper == "paceline" else "ordinary"
        found = [record for record in found if record.memory == memory] or found
        return build_measured_fabric(found, self.backend) if found else None

    def list_buckets(self, world_size: int) -> tuple[int, ...]:
        """The wrapper's buckets on so many ranks, or on the nearest number that is told; then those that were given,
        then torch's default."""
        told = {r.world_size: r.bucket_bytes for r in self.shared if r.bucket_bytes} | dict(self.layouts)
        if told:
            return told[min(told, key=lambda count: (abs(math.log(count / world_size)), -count))]
        if self.bucket_bytes:
            return self.bucket_bytes
        gradients = build_backward(self.profiles[0]).gradients
        return plan_like_torch(gradients, range(len(gradients))).bucket_bytes


def _join_silent(record: StepRecord, steps: Sequence[StepRecord]) -> StepRecord:
    """The record with the silent steps of all contestants of its cell and ranks: of each repetition the median of the
    slowest ranks, and the others as far behind it as in the median."""
    alike = [r for r in steps if (r.job, r.cell, r.world_size) == (record.job, record.cell, record.world_size)]
    told = [r.no_comm for r in alike if r.no_comm is not None and r.no_comm.count == record.timing.count]
    if record.no_comm is None or len(told) < 2:
        return record
    joined = []
    for number in range(record.timing.count):
        slowest_s = statistics.median(silent.reduced_s[number] for silent in told)
        row = [statistics.median(times) for times in zip(*(silent.seconds[number] for silent in told), strict=True)]
        joined.append(tuple(time_s / max(row) * slowest_s for time_s in row))
    return replace(record, no_comm=replace(record.no_comm, seconds=tuple(joined)))
