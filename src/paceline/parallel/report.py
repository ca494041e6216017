"""What a wrapper knows of its own last step, for a person to read. Measuring does not belong here (`timeline`)."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.parallel.timeline import StepTimes
from paceline.plan import Plan
from paceline.units import format_bytes, format_ms

__all__ = ["Report", "build_report"]


@dataclass(frozen=True)
class Report:
    """The plan, the times of one synchronised step on this rank, and what would make it faster."""

    rank: int
    world_size: int
    backend: str
    num_steps: int
    plan: Plan
    times: StepTimes | None
    advice: str

    @property
    def exposed_s(self) -> float | None:
        """Communication after the end of this rank's backward."""
        return None if self.times is None else self.times.exposed_s

    def __str__(self) -> str:
        head = (
            f"rank {self.rank} of {self.world_size} on {self.backend}, {self.num_steps} synchronised steps; "
            f"{len(self.plan.buckets)} {'buckets' if len(self.plan.buckets) > 1 else 'bucket'}, "
            f"{format_bytes(self.plan.num_bytes)} ({self.plan.rule})"
        )
        if self.times is None:
            return f"{head}\nno step has been timed yet"
        rows: list[tuple[str, ...]] = [("bucket", "bytes", "ready ms", "launch ms", "done ms", "waited ms")]
        for number, times in enumerate(self.times.buckets):
            moments = (times.ready_s, times.launch_s, times.done_s, times.waited_s)
            rows.append((str(number), format_bytes(times.num_bytes), *(format_ms(moment) for moment in moments)))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        ends = (
            f"backward over at {format_ms(self.times.backward_s)} ms, all gradients there at "
            f"{format_ms(self.times.over_s)} ms: {format_ms(self.times.exposed_s)} ms of communication exposed"
        )
        return "\n".join([head, *table, ends, self.advice])


def build_report(
    rank: int, world_size: int, backend: str, num_steps: int, plan: Plan, times: StepTimes | None
) -> Report:
    advice = "" if times is None else _advise(times, world_size)
    return Report(rank, world_size, backend, num_steps, plan, times, advice)


def _advise(times: StepTimes, world_size: int) -> str:
    """One sentence on what holds this step back, from its times alone."""
    if world_size == 1:
        return "one rank: there is nothing to wait for"
    if times.exposed_s < 0.02 * times.backward_s:
        return "communication is hidden behind backward: only less work per step could make it faster"
    busy_s = sum(max(0.0, bucket.done_s - bucket.launch_s) for bucket in times.buckets)
    last = times.buckets[-1]
    tail_s = max(0.0, last.done_s - max(last.launch_s, times.backward_s))
    if tail_s > 0.7 * times.exposed_s and len(times.buckets) > 1:
        return (
            f"the last bucket ({format_bytes(last.num_bytes)}) is exposed for {format_ms(tail_s)} ms: a smaller tail, "
            "or a bucket before it that leaves earlier, would shorten the step"
        )
    if times.buckets[0].ready_s > 0.5 * times.backward_s and len(times.buckets) > 1:
        return "the first bucket is ready only in the second half of backward: smaller early buckets would start sooner"
    if busy_s > times.backward_s:
        return (
            f"communication takes {format_ms(busy_s)} ms and backward {format_ms(times.backward_s)} ms: no plan can "
            "hide it all; accumulate over more micro-batches, send fewer bytes (a bf16 hook), or use a faster transport"
        )
    return "communication starts too late to be hidden: more, smaller buckets would start sooner"
