"""The search for the best plan: every partition that a cap can make, and free plans by dynamic programming.

What a plan costs is the simulator's business; measuring does not belong here.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.plan import Bucket, Gradient, Piece, Plan
from paceline.predict.curves import Curve
from paceline.predict.simulate import Backward, MachineCosts, SimulatedStep, simulate_buckets

__all__ = [
    "CapInterval",
    "choose_caps",
    "cut_by_cap",
    "enumerate_caps",
    "find_best_cuts",
    "find_cuts",
    "plan_by_cuts",
    "simulate_cuts",
]

_MAX_ROUNDS = 200
_SMALLEST_SHARE = 0.01


@dataclass(frozen=True)
class CapInterval:
    """All caps from `low_bytes` to `high_bytes` cut the ready order at the same places, after so many gradients."""

    low_bytes: int
    high_bytes: int
    cuts: tuple[int, ...]


def cut_by_cap(totals: Sequence[int], cap_bytes: int) -> tuple[int, ...]:
    """Where torch's rule cuts: a bucket closes with the gradient at which its size reaches the cap.

    `totals[k]` are the bytes of the first k gradients in ready order.
    """
    cuts, place, count = [], 0, len(totals) - 1
    while place < count:
        place = min(count, bisect.bisect_left(totals, totals[place] + cap_bytes, lo=place + 1))
        cuts.append(place)
    return tuple(cuts)


def enumerate_caps(sizes: Sequence[int]) -> list[CapInterval]:
    """Every distinct way in which one cap can cut gradients of these sizes, in ready order and of one dtype.

    The cuts stay the same up to the smallest bucket that has closed: only a cap above that size can change them. So
    the next cap to try is one byte more, and none is missed.
    """
    totals = [0, *itertools.accumulate(sizes)]
    found: list[CapInterval] = []
    low = 1
    while True:
        cuts = cut_by_cap(totals, low)
        closed = [end - start for start, end in itertools.pairwise([0, *(totals[cut] for cut in cuts)])]
        # The last bucket may be one that never reached the cap.
        high = min((size for size in closed if size >= low), default=low)
        if found and found[-1].cuts == cuts:
            found[-1] = CapInterval(found[-1].low_bytes, high, cuts)
        else:
            found.append(CapInterval(low, high, cuts))
        if len(cuts) == 1:
            return found
        low = high + 1


def choose_caps(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """Caps to try on the job itself: about as many, evenly spread on a log axis, no two with the same buckets.

    The largest makes one bucket; the smallest is a hundredth of it.
    """
    total = sum(sizes)
    intervals = enumerate_caps(sizes)
    found: dict[tuple[int, ...], int] = {}
    for number in range(count):
        cap = max(1, round(total * _SMALLEST_SHARE ** (1 - number / max(1, count - 1))))
        interval = next((i for i in intervals if cap <= i.high_bytes), intervals[-1])
        found.setdefault(interval.cuts, min(cap, total))
    return tuple(found.values())


def simulate_cuts(
    sizes: Sequence[int], ready_s: Sequence[float], cuts: Sequence[int], backward: Backward, costs: MachineCosts
) -> SimulatedStep:
    """The step whose buckets end at these places of the ready order; the fast way for many plans."""
    edges = [0, *cuts]
    spans = list(itertools.pairwise(edges))
    buckets = [sum(sizes[start:end]) for start, end in spans]
    ready = [max(ready_s[start:end]) for start, end in spans]
    return simulate_buckets(buckets, ready, backward, costs)


def plan_by_cuts(gradients: Sequence[Gradient], ready_order: Sequence[int], cuts: Sequence[int], rule: str) -> Plan:
    """The plan whose buckets end after the gradients at these places of the ready order (the last one included)."""
    pieces = [Piece(index, 0, gradients[index].num_bytes) for index in ready_order]
    edges = [0, *sorted(set(cuts) | {len(pieces)})]
    buckets: list[Bucket] = []
    for start, end in itertools.pairwise(edges):
        # Gradients of several dtypes cannot share a bucket: a cut makes one bucket for each.
        families = dict.fromkeys(gradients[piece.gradient].family for piece in pieces[start:end])
        buckets += [
            Bucket(tuple(piece for piece in pieces[start:end] if gradients[piece.gradient].family == family))
            for family in families
        ]
    return Plan(tuple(gradients), tuple(buckets), rule)


def find_cuts(sizes: Sequence[int], ready_s: Sequence[float], curve: Curve, overhead_s: float) -> list[int]:
    """Where to cut the ready order so that the last message ends soonest: exact for one server and no contention.

    `C[j] = min over i < j of max(C[i], ready_j) + overhead + a(bytes of i+1..j)`, the end of a last bucket that ends
    with gradient j.
    """
    count = len(sizes)
    totals = [0, *itertools.accumulate(sizes)]
    latest = list(itertools.accumulate(ready_s, max))
    ends = [0.0] * (count + 1)
    previous = [0] * (count + 1)
    for j in range(1, count + 1):
        best_s = float("inf")
        for i in range(j):
            start_s = max(ends[i], latest[j - 1])
            end_s = start_s + overhead_s + curve.estimate_s(totals[j] - totals[i])
            # Of two that end at the same moment, the one with fewer buckets: their overheads are real.
            if end_s < best_s - 1e-15:
                best_s, previous[j] = end_s, i
        ends[j] = best_s
    cuts, place = [], count
    while place:
        cuts.append(place)
        place = previous[place]
    return sorted(cuts)


def find_best_cuts(
    sizes: Sequence[int],
    ready_s: Sequence[float],
    backward: Backward,
    costs: MachineCosts,
    seeds: Sequence[tuple[int, ...]] = (),
) -> tuple[tuple[int, ...], SimulatedStep]:
    """The best free cuts: the exact ones of the simple model, and the given seeds, moved one by one in the full one.

    `sizes` and `ready_s` are in ready order.
    """

    def evaluate(cuts: tuple[int, ...]) -> SimulatedStep:
        return simulate_cuts(sizes, ready_s, cuts, backward, costs)

    starts = dict.fromkeys([tuple(find_cuts(sizes, ready_s, costs.curve, costs.launch_s)), *seeds])
    found = [_improve(cuts, len(sizes), evaluate) for cuts in starts]
    return min(found, key=lambda pair: pair[1].step_s)


def _improve(
    cuts: tuple[int, ...], count: int, evaluate: Callable[[tuple[int, ...]], SimulatedStep]
) -> tuple[tuple[int, ...], SimulatedStep]:
    """Move, drop and add one cut at a time while that helps."""
    best = evaluate(cuts)
    tried = {cuts}
    for _ in range(_MAX_ROUNDS):
        for neighbour in _neighbours(cuts, count):
            if neighbour in tried:
                continue
            tried.add(neighbour)
            step = evaluate(neighbour)
            if step.step_s < best.step_s * (1 - 1e-9):
                best, cuts = step, neighbour
                break
        else:
            break
    return cuts, best


def _neighbours(cuts: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
    inner = [cut for cut in cuts if cut < count]
    for index, cut in enumerate(inner):
        rest = inner[:index] + inner[index + 1 :]
        yield (*rest, count)
        for shift in (-8, -4, -2, -1, 1, 2, 4, 8):
            moved = cut + shift
            if 0 < moved < count and moved not in rest:
                yield (*sorted([*rest, moved]), count)
    edges = [0, *inner, count]
    for start, end in itertools.pairwise(edges):
        middle = (start + end) // 2
        if start < middle < end:
            yield (*sorted([*inner, middle]), count)
