"""What scaling records say together: efficiency, speed-up, bandwidth beside its peak, the knee of a batch sweep.

Definitions: weak-scaling efficiency is T(1)/T(n) at equal samples per rank; strong-scaling speed-up is T(1)/T(n) at
equal samples over all ranks, and its efficiency is that divided by n. T(1) is one rank by itself, without a wrapper.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import MeasurementError, RecordError
from paceline.records.kinds import CollectiveRecord
from paceline.records.pairs import Ratio, compare_times
from paceline.records.scaling import BatchRecord, ScaleRecord
from paceline.units import format_rate

__all__ = [
    "KNEE",
    "ScalePoint",
    "Straggler",
    "Utilisation",
    "compare_points",
    "find_knee",
    "find_peak",
    "find_straggler",
    "list_points",
    "find_use",
]

# The knee: the smallest batch size with this share of the best throughput.
KNEE = 0.9
# Disturbed is a rank that is the slowest in more than this share of steps, by more than this share of others' time.
_MOST_STEPS, _FAR_BEHIND = 2 / 3, 0.1
# Bytes over seconds, computed in two ways, differ by so much at most.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ScalePoint:
    """One number of ranks beside one rank by itself, in the same cell."""

    record: ScaleRecord
    alone: ScaleRecord

    def __post_init__(self) -> None:
        here, alone = self.record, self.alone
        if (here.cell, here.job, here.timing.count) != (alone.cell, alone.job, alone.timing.count):
            raise RecordError(f"{here.cell} of {here.job} and {alone.cell} of {alone.job} were not timed in turns")
        if alone.world_size != 1:
            raise RecordError(f"{here.cell}: {alone.world_size} ranks are not one rank to compare with")

    @property
    def ratio(self) -> Ratio:
        """T(1)/T(n), repetition by repetition."""
        if self.record is self.alone:
            return Ratio(1.0, 0.0)
        return compare_times(self.alone.timing.reduced_s, self.record.timing.reduced_s)

    @property
    def speedup(self) -> float:
        """How many times the samples per second of one rank."""
        return self.ratio.value * (self.record.world_size if self.record.mode == "weak" else 1)

    @property
    def efficiency(self) -> float:
        """The speed-up as a share of the ideal one."""
        return self.speedup / self.record.world_size

    @property
    def efficiency_noise(self) -> float | None:
        """Half the 95 % interval of the efficiency."""
        if self.ratio.noise is None:
            return None
        return self.ratio.noise / (1 if self.record.mode == "weak" else self.record.world_size)

    @property
    def slowdown(self) -> float:
        """How much longer a rank computes when the others compute too: T without communication over T(1), or over the
        share of T(1) that is one rank's in strong scaling."""
        share = 1 if self.record.mode == "weak" else self.record.world_size
        return self.record.compute_s / (self.alone.timing.median_s / share)


def list_points(records: Sequence[ScaleRecord]) -> list[ScalePoint]:
    """Each record with one rank of its cell, in the given order; cells without one rank cannot be judged."""
    alone = {(r.cell, r.job): r for r in records if r.world_size == 1 and r.wrapper == "none"}
    return [ScalePoint(r, alone[r.cell, r.job]) for r in records if (r.cell, r.job) in alone]


def compare_points(mine: ScalePoint, theirs: ScalePoint) -> Ratio:
    """My efficiency over theirs, which is their step over mine, repetition by repetition."""
    here, there = mine.record, theirs.record
    mine_is, theirs_is = ((r.cell, r.job, r.world_size, r.timing.count) for r in (here, there))
    if mine_is != theirs_is:
        raise RecordError(f"{here.contestant} and {there.contestant} were not timed in turns")
    return compare_times(there.timing.reduced_s, here.timing.reduced_s)


@dataclass(frozen=True)
class Utilisation:
    """The bandwidth of a step's messages beside the best that an all-reduce alone reached on the same ranks."""

    busbw_bytes_per_s: float
    peak_bytes_per_s: float

    @property
    def share(self) -> float:
        return self.busbw_bytes_per_s / self.peak_bytes_per_s


def find_peak(collectives: Sequence[CollectiveRecord], backend: str, world_size: int) -> float | None:
    """The largest bus bandwidth of an all-reduce on this backend and so many ranks; None where nobody measured it.

    By the quickest repetition of each size: the peak is what the machine can do, not what it does on average.
    """
    rates = []
    for record in collectives:
        if (record.collective, record.backend, record.world_size) == ("all_reduce", backend, world_size):
            times_s = [time_s for time_s in getattr(record.timing, "reduced_s", ()) if time_s > 0]
            rates.append(record.busbw_bytes_per_s * record.time_s / min(times_s, default=record.time_s))
    return max(rates, default=None)


def find_use(record: ScaleRecord, collectives: Sequence[CollectiveRecord]) -> Utilisation | None:
    """The bandwidth that a step used; None where it was not measured, or its peak was not, on the same sort of device
    and from the same source.

    MeasurementError where it is above the peak: bytes or seconds were then not counted as they were.
    """
    alike = [c for c in collectives if (c.device, c.source) == (record.device, record.source)]
    rate, peak = record.busbw_bytes_per_s, find_peak(alike, record.backend, record.world_size)
    if rate is None or peak is None:
        return None
    if rate > peak * (1 + _ROUNDING):
        raise MeasurementError(
            f"{record.contestant}, {record.world_size} ranks, batch size {record.batch_size}: {format_rate(rate)} GB/s "
            f"in {record.num_messages} messages of together {record.num_bytes} bytes is above the peak of "
            f"{format_rate(peak)} GB/s that an all-reduce alone reached here: the bookkeeping is wrong"
        )
    return Utilisation(rate, peak)


@dataclass(frozen=True)
class Straggler:
    """A rank that was the slowest again and again, far behind the others: something else had its core."""

    record: ScaleRecord
    rank: int
    share: float
    excess: float


def find_straggler(record: ScaleRecord) -> Straggler | None:
    """The rank that spoils a record, by its steps without communication; None where the slowest changes, or is near.

    Ranks that compute alike take turns at being the slowest. One that is it in most steps, and well behind the
    others, makes every time of the record its own.
    """
    if record.silent is None or record.world_size < 2 or record.silent.num_ranks < 2:
        return None
    rows = record.silent.seconds
    slowest = [max(range(len(row)), key=row.__getitem__) for row in rows]
    rank = statistics.mode(slowest)
    share = slowest.count(rank) / len(rows)
    middles = [statistics.median(row[number] for row in rows) for number in range(len(rows[0]))]
    others = statistics.median(middle for number, middle in enumerate(middles) if number != rank)
    excess = middles[rank] / others - 1
    return Straggler(record, rank, share, excess) if share > _MOST_STEPS and excess > _FAR_BEHIND else None


def find_knee(records: Sequence[BatchRecord]) -> BatchRecord | None:
    """The smallest batch size that reaches nine tenths of the best throughput; None where none was measured."""
    found = [(record.samples_per_s, record) for record in records if record.samples_per_s is not None]
    if not found:
        return None
    best = max(rate for rate, _ in found)
    return min((record for rate, record in found if rate >= KNEE * best), key=lambda record: record.batch_size)
