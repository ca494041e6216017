"""From the records of a machine and a job to the inputs of the simulator. Pure; the job's own steps are left out.

What the inputs predict is in `simulate`; which plan is best in `search`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.errors import MeasurementError
from paceline.plan import Gradient
from paceline.predict.curves import Curve, MeasuredCurve
from paceline.predict.search import cut_by_cap, simulate_cuts
from paceline.predict.simulate import Backward, Contention, MachineCosts, SimulatedStep
from paceline.records import ChunksRecord, CollectiveRecord, LayerProfileRecord, Record, StepRecord
from paceline.records.samples import Samples
from paceline.records.steps import CALIBRATING

__all__ = ["CalibratedJob", "Evidence", "SERVERS", "fit_job", "resample"]

# Messages that a backend moves at once.
SERVERS = {"gloo": 2, "shm": 1, "paceline": 1, "nccl": 1}
_SLOWEST = 0.02
# A median of repetitions: all of them, or those that a bootstrap has drawn.
Draw = Callable[[int], Sequence[int]]


@dataclass(frozen=True)
class Evidence:
    """What a prediction may learn from, sorted by what it is."""

    profile: LayerProfileRecord
    plain: StepRecord
    one_bucket: StepRecord
    bucket_each: StepRecord
    disturbed: tuple[StepRecord, ...]
    sweep: tuple[CollectiveRecord, ...]
    pairs: tuple[ChunksRecord, ...]
    extras: tuple[CollectiveRecord, ...]

    @classmethod
    def sort(cls, records: Sequence[Record]) -> Evidence:
        """Take what calibrates out of the records of a tuning run, and leave the job's own steps."""
        steps = [r for r in records if isinstance(r, StepRecord) and r.role in CALIBRATING]
        collectives = [record for record in records if isinstance(record, CollectiveRecord)]
        profiles = [record for record in records if isinstance(record, LayerProfileRecord)]
        local = sorted((r for r in steps if r.role == "local"), key=lambda record: record.num_buckets)
        plain = [record for record in steps if record.role == "plain"]
        if not profiles or not plain or not local:
            raise MeasurementError("a prediction needs a layer profile, plain steps and steps of the wrapper alone")
        return cls(
            profile=profiles[0],
            plain=plain[0],
            one_bucket=local[0],
            bucket_each=local[-1],
            disturbed=tuple(r for r in steps if r.role == "disturbed"),
            sweep=tuple(r for r in collectives if r.note != "buffers"),
            pairs=tuple(record for record in records if isinstance(record, ChunksRecord)),
            extras=tuple(r for r in collectives if r.note == "buffers"),
        )


@dataclass(frozen=True)
class CalibratedJob:
    """A job as the simulator sees it: gradients in ready order, a rank's own backward, and what messages cost."""

    gradients: tuple[Gradient, ...]
    ready_s: tuple[float, ...]
    backward: Backward
    costs: MachineCosts

    @property
    def sizes(self) -> list[int]:
        return [gradient.num_bytes for gradient in self.gradients]

    def cut(self, cap_bytes: int) -> tuple[int, ...]:
        totals = [0]
        for size in self.sizes:
            totals.append(totals[-1] + size)
        return cut_by_cap(totals, cap_bytes)

    def simulate(self, cuts: Sequence[int]) -> SimulatedStep:
        """A step whose buckets end at these places of the ready order."""
        return simulate_cuts(self.sizes, self.ready_s, cuts, self.backward, self.costs)


def fit_job(evidence: Evidence, curve: Curve | None = None, draw: Draw | None = None) -> CalibratedJob:
    """The inputs of the simulator, by medians. `curve` is used where messages are not measured but modelled.

    `draw(count)` gives the repetitions to use, of so many; all of them by default.
    """
    pick = draw or range
    kept: dict[int, Sequence[int]] = {}

    def center(samples: Samples) -> float:
        # Steps that were taken in turns are drawn together: a slow spell is in all of them.
        if samples.count not in kept:
            kept[samples.count] = pick(samples.count)
        return statistics.median(samples.reduced_s[index] for index in kept[samples.count])

    plain, one, each = evidence.plain, evidence.one_bucket, evidence.bucket_each
    num_bytes = evidence.profile.num_bytes
    backward_s = center(plain.phase("backward"))
    local_s = center(one.phase("backward"))
    more = max(0.0, center(each.timing) - center(one.timing))
    launch_s = more / max(1, each.num_buckets - one.num_buckets)
    # The copies of the wrapper, without its one launch; they can be within the noise.
    gather_s = max(0.0, local_s - backward_s - launch_s)
    step_s, after_s = center(one.timing), center(one.phase("optimizer"))
    before_s = max(0.0, step_s - backward_s - gather_s - after_s - launch_s)
    used = [parameter for parameter in evidence.profile.parameters if parameter.median_s is not None]
    profiled_s = statistics.median(evidence.profile.profiled_backward.reduced_s)
    ready_s = tuple(min(backward_s, (p.median_s or 0.0) * backward_s / profiled_s) for p in used)
    extra_s = sum(center(_samples(record)) for record in evidence.extras)
    if curve is None:
        points = sorted((record.num_bytes, center(_samples(record))) for record in evidence.sweep)
        curve = MeasuredCurve(tuple(size for size, _ in points), tuple(seconds for _, seconds in points))
    costs = MachineCosts(
        curve=curve,
        servers=SERVERS.get(plain.backend, 1) if evidence.sweep else 1,
        launch_s=launch_s,
        gather_s_per_byte=gather_s / num_bytes,
        contention=_fit_contention(evidence, curve, center, backward_s),
        pair_rate=_fit_pair_rate(evidence, curve, center),
        finish_s=extra_s if plain.wrapper == "paceline" else 0.0,
    )
    before_s += extra_s if plain.wrapper != "paceline" else 0.0
    gradients = tuple(Gradient(p.name, p.num_bytes, p.num_bytes // max(1, p.num_elements), p.dtype) for p in used)
    return CalibratedJob(gradients, ready_s, Backward(ready_s, backward_s, before_s, after_s), costs)


def _samples(record: CollectiveRecord | ChunksRecord) -> Samples:
    if not isinstance(record.timing, Samples):
        raise MeasurementError("a prediction needs raw samples, and this is a summary")
    return record.timing


def _fit_contention(
    evidence: Evidence, curve: Curve, center: Callable[[Samples], float], backward_s: float
) -> Contention:
    """From backwards beside which messages were sent: what these cost it, and how much slower they were."""
    rates: dict[int, tuple[float, float]] = {}
    for record in evidence.disturbed:
        assert record.under_way is not None and record.overlapped is not None
        # From the last rank's start on; a message that waits for a peer takes no core.
        under_way_s = center(replace(record.under_way, reducer="min"))
        overlapped_s = min(center(replace(record.overlapped, reducer="min")), under_way_s)
        delay_s = max(0.0, center(record.phase("backward")) - backward_s) / record.num_messages
        alone_s = curve.estimate_s(record.message_bytes)
        if overlapped_s <= 0:
            continue
        moved_s = max(0.0, alone_s - (under_way_s - overlapped_s))
        compute_rate = min(1.0, max(_SLOWEST, 1 - delay_s / overlapped_s))
        # What arithmetic loses moves the message: a core is never idle while both want it.
        message_rate = min(1.0, max(_SLOWEST, moved_s / overlapped_s, 1 - compute_rate))
        rates[record.message_bytes] = compute_rate, message_rate
    if not rates:
        return Contention()
    sizes = tuple(sorted(rates))
    return Contention(sizes, tuple(rates[size][0] for size in sizes), tuple(rates[size][1] for size in sizes))


def _fit_pair_rate(evidence: Evidence, curve: Curve, center: Callable[[Samples], float]) -> float:
    found = [curve.estimate_s(record.chunk_bytes) / center(_samples(record)) for record in evidence.pairs]
    return min(1.0, max(_SLOWEST, statistics.median(found))) if found else 1.0


def resample(rng: random.Random) -> Draw:
    """Repetitions drawn with replacement, for one round of a bootstrap."""
    return lambda count: [rng.randrange(count) for _ in range(count)]
