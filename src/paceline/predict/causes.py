"""Causes of slow steps besides data, late ranks and messages: a table of detectors, each with its cure.

A detector reads the evidence of a profile and returns the `Loss` that it explains, if any. `find_causes` turns losses
into findings, and `advice.rank_findings` drops those below the noise.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.predict.accounting import RankRow, estimate_mean
from paceline.records.findings import Finding
from paceline.records.samples import group_by
from paceline.records.steps import RESENT, RankRecord, TracedStepRecord
from paceline.units import format_bytes, format_duration, format_number_of

_Interval = tuple[float, float]
# Assumed fraction of an optimizer's time that remains with a fused kernel: typical, longest and shortest.
_FUSED, _FUSED_ADAM, _FUSED_ON_GPU = (0.5, 0.75, 0.3), (0.3, 0.45, 0.15), (0.6, 0.9, 0.3)
# Assumed fraction of compute that each doubling of threads beyond the cores costs: typical, least and most; and the
# fraction of the cores that ranks must use before extra threads cost anything.
_CROWDING, _LEAST_USED = (0.15, 0.03, 0.4), 0.85
_LEAST_QUEUED = 0.15  # fraction of time that a thread may wait for a core without competition from other programs
_OFTEN = 0.8  # fraction of steps in which the same rank must have the largest batch to be named
_STATIC = "DistributedDataParallel(model, find_unused_parameters=True, static_graph=True)"
_SEARCH = "search_unused_parameters"
_BROADCASTS = 2  # buffer broadcasts per forward: one per dtype


@dataclass(frozen=True)
class Evidence:
    """Measurements of a profiled program: `rows` has each rank's parts of a step, `ranks` each rank's work outside its
    steps, and `recorded` the profiler's steps. `idle_s` is the time a GPU waits for the host, and `cores` the number of
    cores of the host."""

    rows: Sequence[RankRow]
    ranks: Sequence[RankRecord]
    recorded: Sequence[TracedStepRecord] = ()
    idle_s: float = 0.0
    cores: int = 0

    @property
    def critical(self) -> RankRow:
        return find_critical(self.rows)

    @property
    def step_s(self) -> float:
        """The mean step, including the pauses between steps."""
        return self.critical.step_s + sum(map(statistics.fmean, self.list_pauses().values()))

    @property
    def compute_s(self) -> float:
        """Forward and backward, the part that grows with the batch."""
        return (self.critical.forward_s or 0.0) + (self.critical.backward_s or 0.0)

    def list_recorded(self) -> list[TracedStepRecord]:
        """The recorded steps of the rank that limits the step."""
        return [step for step in self.recorded if step.rank == self.critical.rank]

    def list_pauses(self) -> dict[str, list[float]]:
        """The pause at each timed step, by kind: the longest on any rank, because the others wait for that rank."""
        found = {}
        for name in ("collected_s", "evaluated_s", "saved_s"):
            times = zip(*(getattr(rank, name) for rank in self.ranks), strict=True)
            found[name] = [max(row) for row in times] or [0.0]
        return found


class Loss(NamedTuple):
    """Time that a step loses to a cause, with its 90 % interval. `cure` and `line` replace those of the table."""

    gain_s: float
    evidence: str
    interval_s: _Interval | None = None
    rank: int | None = None
    cure: str = ""
    line: str = ""


class Cause(NamedTuple):
    kind: str
    certainty: str
    find: Callable[[Evidence], Loss | None]
    cure: str
    line: str


def find_critical(rows: Sequence[RankRow]) -> RankRow:
    """The row of the rank that limits the step: the rank that waits least for the others."""
    return min(rows, key=lambda row: (row.waiting_s or 0.0, -row.step_s))


def find_causes(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.ranks:  # a run of an older version, or of `paceline train`
        return
    for cause in CAUSES:
        if (loss := cause.find(evidence)) is not None and loss.gain_s > 0:
            yield Finding(
                cause.kind,
                loss.evidence,
                loss.cure or cause.cure,
                loss.gain_s,
                cause.certainty,
                evidence.step_s,
                loss.rank,
                loss.interval_s,
                loss.line or cause.line,
            )


# -- pauses -----------------------------------------------------------------------------------------------------------


def _find_pauses(name: str, what: str) -> Callable[[Evidence], Loss | None]:
    def find(evidence: Evidence) -> Loss | None:
        times = evidence.list_pauses()[name]
        found = [time for time in times if time > 0]
        if not found:
            return None
        gain_s = statistics.fmean(times)
        if name == "collected_s" and evidence.ranks[0].device == "cuda":
            gain_s = min(gain_s, evidence.idle_s)  # the GPU keeps running launched kernels
        # Another run of the same length may contain one pause more or less.
        low, high = (gain_s * count / len(found) for count in (max(0.5, len(found) - 1), len(found) + 1))
        by_rank = {rank.rank: sum(getattr(rank, name)) for rank in evidence.ranks}
        most = max(by_rank, key=by_rank.__getitem__)
        is_alone = len(by_rank) > 1 and by_rank[most] > 0.9 * sum(by_rank.values())
        where = f" on rank {most} while the others wait" if is_alone else ""
        times_text = f"{format_number_of(len(found), 'time')} in {format_number_of(len(times), 'step')}"
        evidence_text = f"{what} takes {format_duration(statistics.median(found))}{where}, {times_text}"
        return Loss(gain_s, evidence_text, (low, high), most if is_alone else None)

    return find


# -- the wrapper ------------------------------------------------------------------------------------------------------


def _find_unused(evidence: Evidence) -> Loss | None:
    """The cost of searching the graph for unused parameters and of exchanging which of them any rank used."""
    recorded, first = evidence.list_recorded(), evidence.ranks[0]
    if not first.find_unused or first.is_static or not recorded:
        return None
    times = []
    for step in recorded:
        search_s = sum(one.own_s for one in step.operators if _SEARCH in one.name)
        times.append(search_s + sum(stall.blocked_s for stall in step.stalls if 0 <= stall.start_s <= step.over_s))
    gain_s = statistics.fmean(times)
    text = f"find_unused_parameters=True spends {format_duration(gain_s)} per step searching the graph"
    interval_s = estimate_mean(times, gain_s)
    if any(rank.has_unused for rank in evidence.ranks):
        cure = "if the same parameters are unused in every step, set static_graph=True to search only once"
        return Loss(gain_s, f"{text}, and finds some", interval_s, None, cure, _STATIC)
    return Loss(gain_s, f"{text}, but all parameters are used", interval_s)


def _find_buffers(evidence: Evidence) -> Loss | None:
    recorded, first = evidence.list_recorded(), evidence.ranks[0]
    if not first.buffer_bytes or not recorded:
        return None
    times = []
    for step in recorded:
        stalls = [stall for stall in step.stalls if stall.start_s < 0]
        times.append(sum(stall.blocked_s for stall in stalls[:_BROADCASTS]))
    gain_s = statistics.fmean(times)
    text = (
        f"broadcasting {format_bytes(first.buffer_bytes)} of buffers delays every forward by {format_duration(gain_s)}"
    )
    if all(rank.are_buffers_constant for rank in evidence.ranks):
        text += ", and they never change"
    return Loss(gain_s, text, estimate_mean(times, gain_s))


def _find_resent(evidence: Evidence) -> Loss | None:
    """Gradients that every micro-batch of a step sends."""
    recorded = evidence.list_recorded()
    times = [sum(stall.blocked_s for stall in step.stalls if stall.name == RESENT) for step in recorded]
    if not any(times):
        return None
    last = max(recorded, key=lambda step: len(step.stalls))
    number = 1 + round(sum(stall.name == RESENT for stall in last.stalls) / max(1, len(last.messages)))
    gain_s = statistics.fmean(times)
    text = f"all {number} micro-batches send their gradients, although only the last needs to: the others cost"
    return Loss(gain_s, f"{text} {format_duration(gain_s)} per step", estimate_mean(times, gain_s))


def _find_collectives(evidence: Evidence) -> Loss | None:
    """Collectives that neither the wrapper nor its gradients need."""
    first, times, names = evidence.ranks[0], list[float](), Counter[str]()
    for step in evidence.list_recorded():
        stalls = [stall for stall in step.stalls if stall.name != RESENT]
        if first.find_unused:
            stalls = [stall for stall in stalls if not 0 <= stall.start_s <= step.over_s]
        if first.buffer_bytes:
            forward = [stall for stall in stalls if stall.start_s < 0]
            stalls = [stall for stall in stalls if stall not in forward[:_BROADCASTS]]
        times.append(sum(stall.blocked_s for stall in stalls))
        names.update(stall.name for stall in stalls)
    if not any(times):
        return None
    gain_s = statistics.fmean(times)
    each = ", ".join(f"{count / len(times):.3g} x {name}" for name, count in names.most_common(3))
    text = f"collectives other than those of gradients ({each}) block each step for {format_duration(gain_s)}"
    return Loss(gain_s, text, estimate_mean(times, gain_s))


# -- the optimizer ----------------------------------------------------------------------------------------------------


def _find_unfused(evidence: Evidence) -> Loss | None:
    took_s, first = evidence.critical.optimizer_s or 0.0, evidence.ranks[0]
    if not first.can_fuse or first.is_fused:
        return None
    left = _FUSED_ON_GPU if first.device == "cuda" else _FUSED_ADAM if "Adam" in first.optimizer else _FUSED
    gain_s, low_s, high_s = (took_s * (1 - share) for share in left)
    text = f"{first.optimizer} takes {format_duration(took_s)} ({took_s / evidence.critical.step_s:.0%} of a step)"
    line = f"torch.optim.{first.optimizer}(..., fused=True)"
    return Loss(gain_s, f"{text} in several passes over the parameters", (low_s, high_s), line=line)


def _find_replicated(evidence: Evidence) -> Loss | None:
    """Each rank updates all parameters. A sharded optimizer would send the same number of bytes."""
    took_s, n = evidence.critical.optimizer_s or 0.0, len(evidence.rows)
    if n < 2 or (evidence.ranks[0].can_fuse and not evidence.ranks[0].is_fused):
        return None  # advise fusing first, because it takes only one argument
    gain_s = took_s * (1 - 1 / n)
    text = f"each of {n} ranks updates all parameters, which takes {format_duration(took_s)}"
    return Loss(gain_s, text, (gain_s / 2, gain_s))


# -- cores ------------------------------------------------------------------------------------------------------------


def _find_crowding(evidence: Evidence) -> Loss | None:
    """Too many threads: the host whose ranks have the most, if they outnumber its cores and the cores are busy."""
    worst = max(group_by(evidence.ranks, lambda rank: rank.host).values(), key=lambda rs: sum(r.threads for r in rs))
    threads, cores = sum(rank.threads for rank in worst), evidence.cores or max(rank.cores for rank in worst)
    used = sum(rank.cpu_share for rank in worst)
    if threads <= cores or worst[0].threads < 2 or worst[0].device == "cuda" or used < _LEAST_USED * cores:
        return None
    compute_s = evidence.compute_s + (evidence.critical.optimizer_s or 0.0)
    gain_s, low_s, high_s = (min(0.5, cost * math.log2(threads / cores)) * compute_s for cost in _CROWDING)
    each = format_number_of(worst[0].threads, "thread")
    text = f"{format_number_of(len(worst), 'rank')} of {each} each share {format_number_of(cores, 'core')}"
    return Loss(gain_s, text, (low_s, high_s), line=f"torch.set_num_threads({max(1, cores // len(worst))})")


def _find_share(name: str, least: float, what: str) -> Callable[[Evidence], Loss | None]:
    def find(evidence: Evidence) -> Loss | None:
        shares = {rank.rank: getattr(rank, name) for rank in evidence.ranks}
        rank = max(shares, key=shares.__getitem__)
        if shares[rank] <= least or (name == "queued_share" and _find_crowding(evidence) is not None):
            return None
        gain_s = min(1.0, shares[rank]) * evidence.critical.step_s
        return Loss(gain_s, f"rank {rank} {what} for {shares[rank]:.0%} of the time", rank=rank)

    return find


# -- batches ----------------------------------------------------------------------------------------------------------


def _find_uneven(evidence: Evidence) -> Loss | None:
    """Uneven batches: in each step, the other ranks wait for the rank with the largest batch."""
    steps = [row for row in zip(*(rank.elements for rank in evidence.ranks), strict=True) if min(row) > 0]
    if not steps or len(evidence.ranks) < 2:
        return None
    mean, longest = statistics.fmean(map(statistics.fmean, steps)), statistics.fmean(map(max, steps))
    # The compute in the row of the rank that limits the step is for that rank's own batches.
    place = [rank.rank for rank in evidence.ranks].index(evidence.critical.rank)
    gain_s = evidence.compute_s * (longest - mean) / statistics.fmean(row[place] for row in steps)
    counts = [sum(row[k] == max(row) > min(row) for row in steps) for k in range(len(evidence.ranks))]
    rank = evidence.ranks[counts.index(max(counts))].rank if max(counts) > _OFTEN * len(steps) else None
    where = "the largest batch of a step" if rank is None else f"the batch of rank {rank}"
    text = f"{where} is {longest / mean - 1:.0%} larger than the mean, and the other ranks wait for it"
    return Loss(gain_s, text, (gain_s / 2, gain_s), rank)


def _find_padding(evidence: Evidence) -> Loss | None:
    share = statistics.fmean(rank.padded_share for rank in evidence.ranks)
    if not share:
        return None
    gain_s = evidence.compute_s * share
    return Loss(gain_s, f"{share:.0%} of the tokens are padding", (gain_s / 2, gain_s))


# -- the table ---------------------------------------------------------------------------------------------------------

CAUSES = (
    Cause(
        "garbage collection",
        "at most",
        _find_pauses("collected_s", "a full garbage collection"),
        "exclude long-lived objects from collection, and collect at the same step on all ranks",
        "gc.collect(); gc.freeze(); gc.disable()  # before the loop; in it, gc.collect() every 1000 steps",
    ),
    Cause(
        "evaluation",
        "at most",
        _find_pauses("evaluated_s", "evaluation between steps"),
        "evaluate less often or on fewer samples, and divide them among all ranks",
        "if step % 1000 == 0: evaluate(model)",
    ),
    Cause(
        "checkpoint",
        "at most",
        _find_pauses("saved_s", "torch.save between steps"),
        "save less often (`paceline predict goodput` computes how often) or in the background",
        "torch.distributed.checkpoint.async_save(state, checkpoint_id=path)",
    ),
    Cause(
        "threads",
        "estimated",
        _find_crowding,
        "give each rank its share of the cores, assuming that twice as many threads cost 3 to 40 % of compute",
        "",
    ),
    Cause(
        "throttling",
        "at most",
        _find_share("throttled_share", 0.0, "is throttled by the CPU limit of its container"),
        "raise the CPU limit, or use no more threads and workers than it allows",
        "",
    ),
    Cause(
        "shared cores",
        "at most",
        _find_share("queued_share", _LEAST_QUEUED, "waits for a core"),
        "move other programs and surplus workers to other cores",
        "",
    ),
    Cause(
        "unused parameters",
        "computed",
        _find_unused,
        "turn the search off",
        "DistributedDataParallel(model)",
    ),
    Cause(
        "buffers",
        "computed",
        _find_buffers,
        "do not broadcast them; only evaluation needs BatchNorm statistics, so broadcast them before it",
        "DistributedDataParallel(model, broadcast_buffers=False)",
    ),
    Cause(
        "accumulate",
        "computed",
        _find_resent,
        "send gradients only after the last micro-batch of a step",
        "with model.no_sync(): loss.backward()  # in all micro-batches but the last",
    ),
    Cause(
        "collectives",
        "at most",
        _find_collectives,
        "call them less often, combine them into one, or do not wait for them (async_op=True)",
        "if step % 100 == 0: torch.distributed.all_reduce(torch.stack(metrics))",
    ),
    Cause("optimizer", "estimated", _find_unfused, "update all parameters in one kernel", ""),
    Cause(
        "replicated optimizer",
        "computed",
        _find_replicated,
        "shard the optimizer over the ranks (ZeRO-1)",
        'paceline.DDP(net, strategy="zero1")',
    ),
    Cause(
        "uneven batches",
        "estimated",
        _find_uneven,
        "give all ranks batches of the same size; with sequences, sort them into batches of similar length",
        "",
    ),
    Cause(
        "padding",
        "at most",
        _find_padding,
        "pad to the longest sequence of a batch, batch similar lengths, or pack several sequences into a row",
        "",
    ),
)
