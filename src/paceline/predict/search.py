"""The search for the best plan: all partitions that a cap can produce, the plateau around the best, and free plans."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from paceline.plan import cut_by_cap
from paceline.predict.curves import MeasuredCurve, fit_line
from paceline.predict.job import Job
from paceline.predict.simulate import (
    MachineCosts,
    MessageTimes,
    SimulatedStep,
    find_tails,
    has_closed_form,
    simulate,
    simulate_cuts,
)

# Sizes whose times are within this fraction of the best form one plateau: measurements cannot tell them apart.
PLATEAU = 0.01
_MOST_SWEEPS = 30
# Number of partitions used to show how the best bucket size changes.
_MOST_CHANGED = 160
_EPSILON = 1e-12


@functools.lru_cache(8)  # many predictions share one job
def enumerate_caps(sizes: tuple[int, ...]) -> dict[tuple[int, ...], tuple[int, int]]:
    """Every distinct partition that one cap produces from gradients of these sizes (in ready order, of one dtype), with
    the smallest and the largest cap that produces it. The cuts stay the same up to the size of the smallest closed
    bucket, so the next cap to try is one byte larger than that size and no partition is missed."""
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
    """About `count` caps to run the job with, evenly spaced on a log axis, each with different buckets. The largest
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
    backward_s: float
    job: Job = field(repr=False, compare=False)
    costs: MachineCosts = field(repr=False, compare=False)

    @cached_property
    def step(self) -> SimulatedStep:
        return simulate(self.job, self.cuts, self.costs)

    @property
    def exposed_s(self) -> float:
        return self.backward_s - self.job.backward_s

    @property
    def step_s(self) -> float:
        if self.costs.sending is not None:  # a sharded update also changes the time after backward
            return self.step.step_s
        return self.job.before_s + self.backward_s + self.job.after_s


@dataclass(frozen=True)
class CapCurve:
    """Simulated steps for every distinct partition, in order of its caps. If `what` names an input, these are the steps
    with that input multiplied by `factor`. `most_bytes` is the largest message with a known time."""

    points: tuple[CapPoint, ...]
    what: str = ""
    factor: float = 1.0
    most_bytes: float = math.inf

    @cached_property
    def best(self) -> CapPoint:
        return min(self.points, key=lambda point: round(point.backward_s, 12))

    def is_fast(self, point: CapPoint) -> bool:
        return point.backward_s <= self.best.backward_s * (1 + PLATEAU)

    @property
    def is_beyond(self) -> bool:
        """Whether a chosen bucket is larger than any message with a known time."""
        return max(bucket.num_bytes for bucket in self.chosen.step.buckets) > self.most_bytes

    @cached_property
    def plateaus(self) -> list[tuple[int, int]]:
        """All ranges of caps whose times are within 1 % of the best, in order."""
        return self.list_ranges(self.is_fast)

    def list_ranges(self, is_in: Callable[[CapPoint], bool]) -> list[tuple[int, int]]:
        runs = [list(run) for is_true, run in itertools.groupby(self.points, is_in) if is_true]
        return [(run[0].low_bytes, run[-1].high_bytes) for run in runs]

    @property
    def plateau(self) -> tuple[int, int]:
        """The widest plateau on a log axis, a better answer than the exact minimum, which may be a spike."""
        return max(self.plateaus, key=lambda sizes: sizes[1] / sizes[0])

    @property
    def chosen(self) -> CapPoint:
        low, high = self.plateau
        inside = (point for point in self.points if low <= point.high_bytes <= high)
        return min(inside, key=lambda point: round(point.backward_s, 12))


def estimate_caps(job: Job, costs: MachineCosts, most: int = 0) -> CapCurve:
    """Simulate every partition that one cap can produce. If there are more than `most` (0 means no limit), simulate
    that many, evenly spaced. Caps below the smallest gradient produce the same partition as that gradient's size."""
    caps, least = list(enumerate_caps(job.sizes).items()), min(job.sizes)
    if costs.sending is not None and not costs.sending.has_buckets:
        caps = caps[-1:]
    if 1 < most < len(caps):
        caps = [caps[round(place * (len(caps) - 1) / (most - 1))] for place in range(most)]
    times_s = simulate_cuts(job, [cuts for cuts, _ in caps], costs)
    points = zip(caps, times_s, strict=True)
    return CapCurve(tuple(CapPoint(max(least, low), high, cuts, s, job, costs) for (cuts, (low, high)), s in points))


def scale_curve(curve: MeasuredCurve, alpha: float = 1.0, beta: float = 1.0) -> MeasuredCurve:
    """The curve with latency and bandwidth scaled: a fitted line splits each time, and its residuals are kept."""
    points = list(zip(curve.sizes, curve.seconds, strict=True))
    line, seconds = fit_line(points), []
    for size, measured_s in points:
        share = line.alpha_s / line.estimate_s(size)
        seconds.append(measured_s * share * alpha + measured_s * (1 - share) / beta)
    return MeasuredCurve(curve.sizes, tuple(seconds))


def estimate_sensitivity(job: Job, costs: MachineCosts, curve: MeasuredCurve) -> list[CapCurve]:
    """How the best bucket size changes with the model's bytes (`B`), the latency (`alpha`) and the bandwidth (`beta`),
    one at a time. The last two are those of the line fitted to the measured curve; its residuals are kept."""
    changes = []
    for what, factor in itertools.product(("B", "alpha", "beta"), (0.1, 0.5, 2.0, 10.0)):
        other_job, other_costs = job, costs
        if what == "B":
            found = (replace(g, num_bytes=max(1, round(g.num_bytes * factor))) for g in job.gradients)
            other_job = replace(job, gradients=tuple(found))
        else:
            alpha, beta = (factor, 1.0) if what == "alpha" else (1.0, factor)
            other_costs = replace(costs, curve=scale_curve(curve, alpha, beta))
        caps = estimate_caps(other_job, other_costs, _MOST_CHANGED)
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
    """The best bucket size, in bytes, when communication is the bottleneck: B sqrt(alpha / T). Buckets of b bytes are
    ready every T b / B seconds, and the link is busy from the first one on, so backward ends after T b / B + (B / b)
    alpha + B / beta. This b minimizes that time. It does not apply if compute hides the messages."""
    return job.num_bytes * math.sqrt(alpha_s / job.backward_s)


def find_cuts(job: Job, costs: MachineCosts) -> tuple[int, ...]:
    """Where to cut the ready order so that the step ends as early as possible. Exact if messages are sent one at a
    time, launches are free, and a message that is sent during compute costs no more than one sent after it."""
    totals, count = np.array(job.totals, dtype=np.float64), len(job.sizes)
    compute_s = max(job.backward_s, job.latest_s[-1]) + costs.gather_s_per_byte * totals[-1]
    # A state is a place, the time on the compute clock (without launches) when messages end, the cost so far, and the
    # previous state. Each place keeps only the states that no other state beats in both time and cost; if messages and
    # compute do not slow each other down, a single state remains.
    places, ends_s, costs_s, parents = (np.zeros(1, dtype) for dtype in (np.int64, np.float64, np.float64, np.int64))
    lasts, firsts = np.tril_indices(count)
    times = MessageTimes.estimate(totals[lasts + 1] - totals[firsts], costs)
    for place in range(1, count + 1):
        starts, first = np.arange(place), place * (place - 1) // 2
        alone_s, hiding_s, moved, slowed = (values[first : first + place] for values in times)
        ready_s, rows_s = np.full(place, job.latest_s[place - 1]), np.zeros(place)
        if place == count:
            ready_s, rows_s = find_tails(job, costs, starts)
        ready_s += costs.gather_s_per_byte * totals[place]
        starts_s = np.maximum(ends_s - costs.launch_s, ready_s[places])
        hides_s = np.clip(compute_s - starts_s, 0.0, hiding_s[places])
        found_s = costs_s + costs.launch_s + (alone_s + rows_s)[places] - (moved - slowed)[places] * hides_s
        found_ends_s = starts_s + hiding_s[places]
        if place == count:
            break
        order = np.lexsort((found_s, found_ends_s))
        least_s = np.minimum.accumulate(found_s[order])
        kept = order[np.concatenate([[True], found_s[order][1:] < least_s[:-1] - _EPSILON])]
        places = np.concatenate([places, np.full(len(kept), place)])
        ends_s, costs_s = np.concatenate([ends_s, found_ends_s[kept]]), np.concatenate([costs_s, found_s[kept]])
        parents = np.concatenate([parents, kept])
    # On a tie, prefer the largest last bucket.
    state = int(np.argmax(found_s <= found_s.min() + _EPSILON))
    cuts = [count]
    while state:
        cuts.append(int(places[state]))
        state = int(parents[state])
    return tuple(cuts[::-1])


def find_best_cuts(
    job: Job, costs: MachineCosts, seeds: Sequence[tuple[int, ...]] = ()
) -> tuple[tuple[int, ...], SimulatedStep]:
    """The best free cuts: those from `find_cuts`, or one of the seeds if it is better. With several messages at a time
    or a strategy, `find_cuts` is not exact, so all candidates are improved in the full model."""
    starts = list(dict.fromkeys([find_cuts(job, costs), *seeds]))
    if has_closed_form(costs):
        times_s = simulate_cuts(job, starts, costs)
        cuts = starts[times_s.index(min(times_s))]
        return cuts, simulate(job, cuts, costs)
    return min((_improve(job, costs, cuts) for cuts in starts), key=lambda pair: pair[1].step_s)


def _improve(job: Job, costs: MachineCosts, cuts: tuple[int, ...]) -> tuple[tuple[int, ...], SimulatedStep]:
    """Move, drop and add one cut at a time while that helps; earlier cuts are tried again only in the next sweep."""
    count, best, tried = len(job.sizes), simulate(job, cuts, costs), {cuts}

    def accept(neighbor: tuple[int, ...]) -> bool:
        nonlocal best, cuts
        if neighbor in tried:
            return False
        tried.add(neighbor)
        step = simulate(job, neighbor, costs)
        if is_better := step.step_s < best.step_s * (1 - 1e-9):
            best, cuts = step, neighbor
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
