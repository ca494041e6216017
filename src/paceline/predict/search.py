"""The search for the best plan: all partitions that a cap can produce, the plateau around the best, and free plans."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from paceline.plan import cut_by_cap
from paceline.predict.curves import CostCurve, MeasuredCurve, fit_line
from paceline.predict.job import Job
from paceline.predict.simulate import MachineCosts, SimulatedStep, simulate

# Sizes within this share of the best form one plateau: measurements cannot tell them apart.
PLATEAU = 0.01
_MOST_SWEEPS = 30
# Number of partitions used to show how the best bucket size moves.
_MOST_CHANGED = 160


@functools.lru_cache(8)  # many predictions share one job
def enumerate_caps(sizes: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, int]]:
    """Every distinct partition that one cap produces from gradients of these sizes (in ready order, of one dtype), with
    the smallest and the largest cap that produces it. The cuts stay the same up to the size of the smallest closed
    bucket, so the next cap to try is one byte larger and no partition is missed."""
    totals = [0, *itertools.accumulate(sizes)]
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    low, cuts = 1, tuple[int, ...]()
    while len(cuts) != 1:
        cuts = cut_by_cap(totals, low)
        closed = [end - start for start, end in itertools.pairwise([0, *(totals[cut] for cut in cuts)])]
        # The last bucket may never have reached the cap.
        high = min((size for size in closed if size >= low), default=low)
        found[cuts] = found.get(cuts, (low, low))[0], high
        low = high + 1
    return found


def choose_caps(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Caps to run the job with: about `count`, evenly spaced on a log axis, each with different buckets. The largest
    makes one bucket; the smallest is a hundredth of it."""
    totals = [0, *itertools.accumulate(sizes)]
    found: dict[tuple[int, ...], int] = {}
    for number in range(count):
        cap = max(1, round(totals[-1] * 0.01 ** (1 - number / max(1, count - 1))))
        found.setdefault(cut_by_cap(totals, cap), min(cap, totals[-1]))
    return tuple(found.values())


@dataclass(frozen=True)
class CapPoint:
    """The step with the buckets that every cap from `low_bytes` to `high_bytes` produces; `cuts` are their ends."""

    low_bytes: int
    high_bytes: int
    cuts: tuple[int, ...]
    step: SimulatedStep

    @property
    def backward_s(self) -> float:
        return self.step.over_s


@dataclass(frozen=True)
class CapCurve:
    """Every distinct partition in order of its caps; if `what` is set, that input is multiplied by `factor`.
    `most_bytes` is the largest message with a known time."""

    points: tuple[CapPoint, ...]
    what: str = ""
    factor: float = 1.0
    most_bytes: float = math.inf

    @cached_property
    def best(self) -> CapPoint:
        return min(self.points, key=lambda point: point.backward_s)

    def is_fast(self, point: CapPoint) -> bool:
        return point.backward_s <= self.best.backward_s * (1 + PLATEAU)

    @property
    def is_beyond(self) -> bool:
        """Whether the chosen plan has a bucket larger than any message with a known time."""
        return max(bucket.num_bytes for bucket in self.chosen.step.buckets) > self.most_bytes

    @cached_property
    def plateaus(self) -> list[tuple[int, int]]:
        """All ranges of caps whose times are within 1 % of the best, in order."""
        return self.list_ranges(self.is_fast)

    def list_ranges(self, is_in: Callable[[CapPoint], bool]) -> list[tuple[int, int]]:
        """All ranges of caps for which `is_in` holds."""
        runs = [list(run) for is_true, run in itertools.groupby(self.points, is_in) if is_true]
        return [(run[0].low_bytes, run[-1].high_bytes) for run in runs]

    @property
    def plateau(self) -> tuple[int, int]:
        """The widest plateau on a log axis. It answers "which bucket size" better than the exact minimum, which may be
        a spike."""
        return max(self.plateaus, key=lambda sizes: sizes[1] / sizes[0])

    @property
    def chosen(self) -> CapPoint:
        """The best point in the widest plateau."""
        low, high = self.plateau
        inside = (point for point in self.points if low <= point.high_bytes <= high)
        return min(inside, key=lambda point: point.backward_s)


def estimate_caps(job: Job, costs: MachineCosts, most: int = 0) -> CapCurve:
    """Simulate every partition that one cap can produce. If there are more than `most` (0 means no limit), simulate
    that many, evenly spaced. Caps below the smallest gradient produce the same partition as that gradient's size."""
    caps, least = list(enumerate_caps(job.sizes).items()), min(job.sizes)
    if costs.sending is not None and costs.sending.strategy.outer:
        caps = caps[-1:]  # outer strategies have no buckets
    if 1 < most < len(caps):
        caps = [caps[round(place * (len(caps) - 1) / (most - 1))] for place in range(most)]
    points = (CapPoint(max(least, low), high, cuts, simulate(job, cuts, costs)) for cuts, (low, high) in caps)
    return CapCurve(tuple(points))


def scale_curve(curve: MeasuredCurve, alpha: float = 1.0, beta: float = 1.0) -> MeasuredCurve:
    """The curve with latency and bandwidth scaled. They are split by the line fitted to the curve; its residuals
    stay."""
    points = list(zip(curve.sizes, curve.seconds, strict=True))
    line, seconds = fit_line(points), []
    for size, measured_s in points:
        share = line.alpha_s / line.estimate_s(size)
        seconds.append(measured_s * share * alpha + measured_s * (1 - share) / beta)
    return MeasuredCurve(curve.sizes, tuple(seconds))


def estimate_sensitivity(job: Job, costs: MachineCosts, curve: MeasuredCurve) -> list[CapCurve]:
    """How the best bucket size changes with the model's bytes (`B`), the latency (`alpha`) and the bandwidth (`beta`),
    one at a time. The last two are those of the line fitted to the measured curve; its residuals stay."""
    changes = []
    for what, factor in [("", 1.0), *itertools.product(("B", "alpha", "beta"), (0.1, 0.5, 2.0, 10.0))]:
        other_job, other_costs = job, costs
        if what == "B":
            found = (replace(g, num_bytes=max(1, round(g.num_bytes * factor))) for g in job.gradients)
            other_job = replace(job, gradients=tuple(found))
        else:
            alpha, beta = (factor, 1.0) if what == "alpha" else (1.0, factor)
            other_costs = replace(costs, curve=scale_curve(curve, alpha, beta))
        caps = estimate_caps(other_job, other_costs, _MOST_CHANGED if what else 0)
        changes.append(replace(caps, what=what, factor=factor, most_bytes=curve.sizes[-1]))
    return changes


def estimate_least_s(job: Job, costs: MachineCosts) -> float:
    """A lower bound on the step time for any buckets. It includes all of the rank's own work and one launch; at least
    one message follows the last gradient; and all bytes must be sent after the first gradient, at the best rate."""
    own_s, curve = costs.launch_s + costs.gather_s_per_byte * job.num_bytes, costs.curve
    last_s = min(curve.estimate_s(job.num_bytes - total) for total in job.totals[:-1])
    # The best rate may lie at any point of the curve; between points it is monotonic.
    least, most = min(size for size in job.sizes if size), job.num_bytes
    known = curve.sizes if isinstance(curve, MeasuredCurve) else (least << n for n in range(1, 64))
    sizes = (least, most, *(size for size in known if least < size < most))
    moved_s = most * min(curve.estimate_s(size) / size for size in sizes) / max(1.0, costs.servers * costs.pair_rate)
    ends = job.backward_s + own_s, job.latest_s[-1] + own_s + last_s, job.latest_s[0] + costs.launch_s + moved_s
    return job.before_s + max(ends) + costs.finish_s + job.after_s


def estimate_closed_form(job: Job, alpha_s: float) -> float:
    """The best bucket size, in bytes, when communication is the bottleneck: B sqrt(alpha / T).

    Buckets of b bytes are ready every T b / B seconds, and the link is busy from the first one on, so backward ends
    after T b / B + (B / b) alpha + B / beta. This b minimizes that time. It does not apply if compute hides the
    messages.
    """
    return job.num_bytes * math.sqrt(alpha_s / job.backward_s)


def find_cuts(job: Job, curve: CostCurve, overhead_s: float) -> list[int]:
    """Where to cut the ready order so that the last message ends as early as possible; exact for one server and no
    contention."""
    # C[j] is the earliest end of the messages up to gradient j: min over i < j of max(C[i], ready_j) + overhead +
    # a(bytes of i+1..j).
    count, latest = len(job.sizes), job.latest_s
    totals = np.array(job.totals, dtype=np.float64)
    ends = np.zeros(count + 1)
    previous = [0] * (count + 1)
    for j in range(1, count + 1):
        messages_s = curve.estimate_all(totals[j] - totals[:j])
        found = np.maximum(ends[:j], latest[j - 1]) + overhead_s + messages_s
        ends[j] = found.min()
        # On a tie, prefer fewer buckets: their overhead is real.
        previous[j] = int(np.argmax(found <= ends[j] + 1e-15))
    cuts, place = [], count
    while place:
        cuts.append(place)
        place = previous[place]
    return sorted(cuts)


def find_best_cuts(
    job: Job, costs: MachineCosts, seeds: Sequence[tuple[int, ...]] = ()
) -> tuple[tuple[int, ...], SimulatedStep]:
    """The best free cuts: starts from the exact cuts of the simple model and the given seeds, and improves each in the
    full model, unless the simple model holds."""
    exact = tuple(find_cuts(job, costs.curve, costs.launch_s))
    step = simulate(job, exact, costs)
    if costs == MachineCosts(costs.curve) and len(step.tail) == len(job.tail):
        return exact, step
    starts = dict.fromkeys([exact, *seeds])
    return min((_improve(job, costs, cuts) for cuts in starts), key=lambda pair: pair[1].step_s)


def _improve(job: Job, costs: MachineCosts, cuts: tuple[int, ...]) -> tuple[tuple[int, ...], SimulatedStep]:
    """Move, drop and add one cut at a time while that helps. A sweep continues after an improvement; earlier cuts are
    tried again only in the next sweep."""
    count, best, tried = len(job.sizes), simulate(job, cuts, costs), {cuts}

    def accept(neighbour: tuple[int, ...]) -> bool:
        nonlocal best, cuts
        if neighbour in tried:
            return False
        tried.add(neighbour)
        step = simulate(job, neighbour, costs)
        if is_better := step.step_s < best.step_s * (1 - 1e-9):
            best, cuts = step, neighbour
        return is_better

    for _ in range(_MOST_SWEEPS):
        before = cuts
        for cut in before[:-1]:
            rest = [other for other in cuts if other != cut]
            if not accept(tuple(rest)):
                places = {cut + shift for shift in (-8, -4, -2, -1, 1, 2, 4, 8)} & set(range(1, count)) - set(rest)
                any(accept(tuple(sorted([*rest, place]))) for place in sorted(places))
        for start, end in itertools.pairwise([0, *cuts]):
            middle = (start + end) // 2
            if start < middle < end:
                accept(tuple(sorted([*cuts, middle])))
        if cuts == before:
            break
    return cuts, best
