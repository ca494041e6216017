"""What a step costs on networks and numbers of ranks that nobody has at hand. Everything here is simulated.

One prediction, top to bottom: a profiled model, a fabric's curve, every bucket size, the best of them, and how sure
that is. How it prints is in `report.whatif_tables`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.plan import plan_like_torch
from paceline.predict.caps import PLATEAU, estimate_caps
from paceline.predict.fabrics import ASSUMED_ERROR, ERROR_PER_DOUBLING, Fabric
from paceline.predict.families import NamedCurve
from paceline.predict.layerwise import LayerwiseModel
from paceline.predict.search import cut_by_cap, simulate_cuts
from paceline.predict.simulate import Backward, MachineCosts, SimulatedStep, simulate_backward
from paceline.predict.stragglers import estimate_wait
from paceline.records.samples import quantile
from paceline.units import format_bytes

__all__ = ["DRAWS", "Scenario", "WhatIfRow", "accumulate", "describe_scenario", "simulate_what_if"]

DRAWS = 50
_SEED = 2024
# Less than this share of a time is nothing: not a difference between plans, and not what a step waits for.
_NOTHING = 1e-3


@dataclass(frozen=True)
class Scenario:
    """What is asked beyond the network: micro-batches in a step, and the spread between ranks (a relative sd)."""

    accumulate: int = 1
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ConfigError(f"{self.accumulate} micro-batches in a step: at least 1")
        estimate_wait(self.spread, 1)  # refuses what cannot be


@dataclass(frozen=True)
class WhatIfRow:
    """One fabric with so many ranks under its best bucket size; `low_s` to `high_s` hold the step in 90 % of draws.

    `efficiency_low` and `efficiency_high` do for the efficiency, each step against the local one of the same draw.
    `exposed_s` is what communication adds, and `straggler_s` what waiting for the slowest rank adds. `default_step_s`
    is the step with torch's default buckets. `bound` says what everything waits for, `doubt` why not to trust the row.
    """

    network: str
    world_size: int
    algorithm: str
    step_s: float
    low_s: float
    high_s: float
    efficiency_low: float
    efficiency_high: float
    local_s: float
    exposed_s: float
    straggler_s: float
    best_cap_bytes: int
    plateau_low_bytes: int
    plateau_high_bytes: int
    num_buckets: int
    default_step_s: float
    bound: str
    doubt: str = ""
    source: str = "simulated"

    @property
    def efficiency(self) -> float:
        """Weak scaling: T(1) / T(P)."""
        return self.local_s / self.step_s

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.step_s

    @property
    def gain(self) -> float:
        """The share of the step with the default buckets that the best size saves."""
        return 1 - self.step_s / self.default_step_s

    @property
    def keeps_default(self) -> bool:
        """Whether torch's default is on the plateau, so that there is nothing to change."""
        return self.gain <= PLATEAU


def accumulate(backward: Backward, count: int) -> Backward:
    """A step of several micro-batches: all but the last backward only compute."""
    return replace(backward, before_s=count * backward.before_s + (count - 1) * backward.total_s)


def _build_costs(fabric: Fabric, curve: NamedCurve) -> MachineCosts:
    # Messages that are under way at once share the link: together they are no faster than one.
    return MachineCosts(curve=curve, servers=fabric.servers, pair_rate=1 / fabric.servers)


def simulate_what_if(
    model: LayerwiseModel,
    draws: Sequence[Backward],
    fabrics: Sequence[Fabric],
    ranks: Sequence[int],
    scenario: Scenario,
) -> list[WhatIfRow]:
    """A row for each fabric and number of ranks. `draws` are the model's backward as it might have been measured."""
    if not ranks or min(ranks) < 1:
        raise ConfigError(f"numbers of ranks {list(ranks)}: one or more, of at least 1")
    passes = [accumulate(backward, scenario.accumulate) for backward in draws]
    rows = []
    for fabric in fabrics:
        source = random.Random(_SEED)
        varied = [fabric.draw(source) for _ in passes]
        rows += [_simulate_row(model, passes, fabric, varied, world_size, scenario) for world_size in ranks]
    return rows


def _simulate_row(
    model: LayerwiseModel,
    passes: Sequence[Backward],
    fabric: Fabric,
    varied: Sequence[Fabric],
    world_size: int,
    scenario: Scenario,
) -> WhatIfRow:
    backward = accumulate(model.backward, scenario.accumulate)
    curve = fabric.build_curve(world_size)
    costs = _build_costs(fabric, curve)
    sizes = model.sizes
    caps = estimate_caps(sizes, model.ready_s, backward, costs)
    low, high = caps.plateau
    # Launches cost nothing here, but do in truth: of plans that take the same time the one with the fewest buckets.
    plateau = [point for point in caps.points if low <= point.low_bytes and point.high_bytes <= high]
    same = [point for point in plateau if point.backward_s <= caps.best.backward_s * (1 + _NOTHING)]
    best = min(same, key=lambda point: point.num_buckets)
    cuts = cut_by_cap([0, *itertools.accumulate(sizes)], best.high_bytes)
    step = simulate_cuts(sizes, model.ready_s, cuts, backward, costs)
    default = simulate_backward(plan_like_torch(model.gradients, range(len(sizes))), backward, costs)
    wait = estimate_wait(scenario.spread, world_size)
    times, efficiencies = [], []
    for drawn, other in zip(passes, varied, strict=True):
        there = _build_costs(other, other.build_curve(world_size))
        simulated = simulate_cuts(sizes, drawn.ready_s, cuts, drawn, there)
        times.append(simulated.step_s + wait * _computing_s(drawn))
        efficiencies.append(_local_s(drawn) / times[-1])
    straggler_s = wait * _computing_s(backward)
    step_s, local_s = step.step_s + straggler_s, _local_s(backward)
    low_s, high_s = _hold(step_s, times)
    efficiency_low, efficiency_high = _hold(local_s / step_s, efficiencies)
    moved = [bucket.num_bytes for bucket in step.buckets]
    names = dict.fromkeys(curve.name_algorithm(size) for size in sorted(moved, reverse=True))
    return WhatIfRow(
        network=fabric.name,
        world_size=world_size,
        algorithm="none" if world_size == 1 else " + ".join(names),
        step_s=step_s,
        low_s=low_s,
        high_s=high_s,
        efficiency_low=efficiency_low,
        efficiency_high=efficiency_high,
        local_s=local_s,
        exposed_s=max(0.0, step.exposed_s),
        straggler_s=straggler_s,
        best_cap_bytes=best.high_bytes,
        plateau_low_bytes=low,
        plateau_high_bytes=high,
        num_buckets=len(cuts),
        default_step_s=default.step_s + straggler_s,
        bound=_find_bound(step, straggler_s),
        doubt="" if world_size == 1 else curve.describe_doubt(max(moved)),
    )


def _computing_s(backward: Backward) -> float:
    """What ranks do by themselves before they need each other."""
    return backward.before_s + backward.total_s


def _local_s(backward: Backward) -> float:
    return _computing_s(backward) + backward.after_s


def _hold(value: float, draws: Sequence[float]) -> tuple[float, float]:
    """From p5 to p95 of the draws, and never without the value itself."""
    return (min(value, quantile(draws, 0.05)), max(value, quantile(draws, 0.95))) if draws else (value, value)


def _find_bound(step: SimulatedStep, straggler_s: float) -> str:
    """What the end of the step waits for, followed back from the last message while each waited for the one before."""
    if max(step.exposed_s, straggler_s) < _NOTHING * step.step_s:
        return "compute"
    if straggler_s > step.exposed_s:
        return "the slowest rank"
    last = first = max(range(len(step.buckets)), key=lambda number: step.buckets[number].done_s)
    while first > 0 and step.buckets[first].queue_s > _NOTHING * step.step_s:
        first -= 1
    count = len(step.buckets)
    size = format_bytes(step.buckets[first].num_bytes)
    if first == last:
        return f"bucket {first + 1} of {count} ({size})"
    return f"network, from bucket {first + 1} of {count}"


def describe_scenario(scenario: Scenario, fabrics: Sequence[Fabric]) -> list[str]:
    """What every row takes for granted, one line each."""
    lines = [
        "communication and computing do not slow each other, and copies and launches cost nothing",
        "messages go one at a time, in the order of the buckets"
        if all(fabric.servers == 1 for fabric in fabrics)
        else "messages go in the order of the buckets; on gloo two at a time, which share the link",
        "all ranks equally fast"
        if scenario.spread == 0
        else f"a rank's computing varies by {scenario.spread:.1%} (lognormal, independent), and a step waits for the "
        "slowest",
    ]
    if scenario.accumulate > 1:
        lines.append(f"{scenario.accumulate} micro-batches in a step; gradients travel behind the last backward")
    lines.append(
        f"interval: 90 % of {DRAWS} draws from the repetitions of the inputs, with {ASSUMED_ERROR:.0%} (one sd) for a "
        f"network that is only named, and {ERROR_PER_DOUBLING:.0%} for each doubling away from measured ranks"
    )
    return lines
