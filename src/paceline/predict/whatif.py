"""The cost of a step on networks and rank counts that were not measured. Everything here is simulated."""

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.plan import plan_like_torch
from paceline.predict.curves import Resample, hold_draws
from paceline.predict.job import Job, build_job_from_profile, draw_jobs
from paceline.predict.networks import (
    AssumedFabric,
    Fabric,
    MeasuredFabric,
    Network,
    describe_uncertainty,
    list_networks,
)
from paceline.predict.predictor import Evidence, RankCosts, describe_rank, fit_rank
from paceline.predict.scaling import estimate_slowdown, estimate_wait
from paceline.predict.search import PLATEAU, estimate_caps
from paceline.predict.simulate import MODEL_ERROR, Contention, MachineCosts, Sending, SimulatedStep, simulate
from paceline.records import LayerProfileRecord
from paceline.records.samples import group_by
from paceline.strategy import DENSE
from paceline.units import format_bytes

DRAWS = 50
# How ranks send: a function of their number, their compute time relative to one rank alone, and a resample of the
# measurements.
Send = Callable[[int, float, Resample], Sending | None]
# Below this share of a time, differences between plans and waits are negligible.
_NOTHING = 1e-3


@dataclass(frozen=True)
class WhatIfRow:
    """One fabric and number of ranks with the best bucket size; the step is between `low_s` and `high_s` in 90 % of
    draws, and its efficiency, relative to the local step of the same draw, between `efficiency_low` and
    `efficiency_high`. `exposed_s` is exposed communication, `straggler_s` the wait for the slowest rank, and
    `neighbours_s` the slowdown by other ranks on a CPU host. `default_step_s` is the step with torch's default buckets.
    `bound` names the bottleneck, `doubt` a reason not to trust the row. `sent_bytes` is what a rank sends per step, and
    `drawn_s` the step in each draw."""

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
    neighbours_s: float = 0.0
    source: str = "simulated"
    sent_bytes: float = 0.0
    drawn_s: tuple[float, ...] = ()

    @property
    def efficiency(self) -> float:
        """Weak-scaling efficiency, T(1) / T(P)."""
        return self.local_s / self.step_s

    @property
    def exposed_share(self) -> float:
        return self.exposed_s / self.step_s

    @property
    def gain(self) -> float:
        """The share of the step with default buckets that the best size saves."""
        return 1 - self.step_s / self.default_step_s

    @property
    def keeps_default(self) -> bool:
        """Whether torch's default is on the plateau, so there is nothing to change."""
        return self.gain <= PLATEAU


def _fill_contention(job: Job, fabric: Fabric, rank: RankCosts, source: random.Random | None = None) -> RankCosts:
    """The costs with assumed contention if it was not measured; with a random source, a draw of the assumption."""
    assumed = Contention.assume(job.device, _is_on_host(fabric), source=source)
    return replace(rank, contention=rank.contention or assumed)


def _is_on_host(fabric: Fabric) -> bool:
    """Whether the fabric connects the ranks of one host: a sweep does unless it is known to span several nodes, a named
    network does not."""
    return isinstance(fabric, MeasuredFabric) and not 0 < fabric.ranks_per_node < max(fabric.ranks)


def count_per_host(fabric: Fabric, world_size: int) -> int:
    """How many ranks share a host: all of them, unless a sweep is known to span several."""
    given = fabric.ranks_per_node or world_size
    return min(world_size, given if isinstance(fabric, MeasuredFabric) else max(given, fabric.network.ranks_per_node))


def is_shared(fabric: Fabric) -> bool:
    """Whether ranks reduce in shared memory."""
    return isinstance(fabric, MeasuredFabric) and fabric.fits[0].algorithm == "shared"


def _build_costs(
    job: Job, fabric: Fabric, world_size: int, rank: RankCosts, sending: Sending | None = None
) -> MachineCosts:
    inside, contention = None, rank.contention or Contention()
    if sending is not None and sending.has_levels:
        inside, curve = fabric.build_levels(world_size)
    else:
        curve = fabric.build_curve(world_size)
    if job.device != "cpu" or not _is_on_host(fabric):  # on a CPU host, cores move the messages all the time
        contention = contention.spread_over(curve)
    own = (0.0, 0.0) if world_size == 1 else (rank.launch_s, rank.gather_s_per_byte)
    # Concurrent messages share the link: together they are not faster than one.
    return MachineCosts(curve, fabric.servers, *own, contention, 1 / fabric.servers, sending=sending, inside=inside)


def _stretch(job: Job, fabric: Fabric, world_size: int, rank: RankCosts, shift: float = 0.0) -> Job:
    """The job as a rank computes it next to the other ranks of its CPU host."""
    per_host = fabric.ranks_per_node
    if isinstance(fabric, MeasuredFabric):  # cores move the messages of gloo and of shared memory
        is_of_cores = fabric.fits[0].algorithm in ("gloo", "shared")
        per_host = per_host or max(fabric.ranks) if is_of_cores else 1
    here = min(world_size, per_host)
    if job.device != "cpu" or here <= rank.neighbours[0][0]:
        return job
    return job.stretch(estimate_slowdown(rank.neighbours, here, shift))


class _Draw(NamedTuple):
    """One draw of all inputs: `shift` is the error of the slowdown next to other ranks and `error` the model's own
    error, both in standard deviations."""

    job: Job
    fabric: Fabric
    rank: RankCosts
    shift: float
    error: float
    resample: Resample


def simulate_what_if(
    job: Job, draws: Sequence[Job], fabric: Fabric, ranks: Sequence[int], accumulate: int = 1, spread: float = 0.0,
    evidence: Evidence | None = None, known: RankCosts | None = None, send: Send = lambda *_: None, most_caps: int = 0,
) -> list[WhatIfRow]:  # fmt: skip
    """One row per number of ranks. `draws` are the job as it might have been measured. A step has `accumulate`
    micro-batches, and the compute times of ranks have a relative standard deviation of `spread`. `evidence` is what the
    profile shows about copies, contention and neighbours; without it they are `known`, or assumed. At most `most_caps`
    bucket sizes are tried (0 means all). Calls that differ only in `send` use the same draws."""
    job, source = job.accumulate(accumulate), random.Random(2024)
    # The network error dominates an interval: use its quantiles in random order, since few draws would reach the tails.
    shifts = [statistics.NormalDist().inv_cdf((place + 0.5) / len(draws)) for place in range(len(draws))]
    source.shuffle(shifts)
    varied: list[_Draw] = []
    for draw, shift in zip(draws, shifts, strict=True):
        rank = (known or RankCosts()) if evidence is None else fit_rank(evidence, Resample(source))
        found = fabric.draw(source, shift)
        rank = _fill_contention(job, found, rank, source)
        shifted = source.gauss(0, 1), source.gauss(0, 1)
        varied.append(_Draw(draw.accumulate(accumulate), found, rank, *shifted, Resample(random.Random(len(varied)))))
    rank = _fill_contention(job, fabric, (known or RankCosts()) if evidence is None else fit_rank(evidence))
    return [_build_row(job, fabric, rank, varied, world_size, spread, send, most_caps) for world_size in ranks]


def _build_row(
    alone: Job, fabric: Fabric, rank: RankCosts, draws: Sequence[_Draw], world_size: int, spread: float, send: Send,
    most_caps: int,
) -> WhatIfRow:  # fmt: skip
    wait, job = estimate_wait(spread, world_size), _stretch(alone, fabric, world_size, rank)
    sending = send(world_size, job.backward_s / alone.backward_s, Resample())
    costs = _build_costs(alone, fabric, world_size, rank, sending)
    # Paceline's wrapper sends embedding lookups as rows if that pays off; on a GPU only on request.
    is_ours = rank.wrapper == "paceline" and alone.device != "cuda"
    splits = is_ours and not is_shared(fabric) and (sending is None or sending.is_plain)
    job = job.split(world_size) if splits else job
    caps = estimate_caps(job, costs, most_caps)
    # Even if launches are modelled as free, they are not: among plans with the same time, take the fewest buckets.
    same = [point for point in caps.points if point.backward_s <= caps.best.backward_s * (1 + _NOTHING)]
    best = min(same, key=lambda point: len(point.cuts))
    low, high = next(sizes for sizes in caps.plateaus if sizes[0] <= best.high_bytes <= sizes[1])
    default = simulate(job, plan_like_torch(job.gradients, range(len(job.gradients))), costs)
    times, efficiencies = [], []
    for draw in draws:
        drawn = _stretch(draw.job, draw.fabric, world_size, draw.rank, draw.shift)
        sends = send(world_size, drawn.backward_s / draw.job.backward_s, draw.resample)
        drawn = drawn.split(world_size) if splits else drawn
        step = simulate(drawn, best.cuts, _build_costs(drawn, draw.fabric, world_size, draw.rank, sends))
        left_out_s = MODEL_ERROR * draw.error * max(0.0, step.exposed_s)
        times.append(step.step_s + left_out_s + wait * drawn.computing_s)
        efficiencies.append(draw.job.local_s / times[-1])
    straggler_s = wait * job.computing_s
    step_s = best.step.step_s + straggler_s
    low_s, high_s = hold_draws(step_s, times)
    efficiency_low, efficiency_high = hold_draws(alone.local_s / step_s, efficiencies)
    moved = sorted((bucket.num_bytes for bucket in best.step.buckets), reverse=True)
    names = dict.fromkeys(costs.curve.explain(size)[0] for size in moved)
    neighbours_s = job.local_s - alone.local_s
    return WhatIfRow(
        network=fabric.name, world_size=world_size, algorithm="none" if world_size == 1 else " + ".join(names),
        step_s=step_s, low_s=low_s, high_s=high_s, efficiency_low=efficiency_low, efficiency_high=efficiency_high,
        local_s=alone.local_s, exposed_s=max(0.0, best.step.exposed_s), straggler_s=straggler_s,
        best_cap_bytes=best.high_bytes, plateau_low_bytes=low, plateau_high_bytes=high, num_buckets=len(best.cuts),
        default_step_s=default.step_s + straggler_s, bound=_find_bound(best.step, straggler_s, neighbours_s),
        doubt="" if world_size == 1 else costs.curve.explain(moved[0])[1], neighbours_s=neighbours_s,
        sent_bytes=(sending or Sending(DENSE, world_size)).count_sent(job, best.cuts), drawn_s=tuple(times),
    )  # fmt: skip


def _find_bound(step: SimulatedStep, straggler_s: float, neighbours_s: float = 0.0) -> str:
    """The bottleneck of the step: follows the last message back while each message waited for the previous one."""
    if max(step.exposed_s, straggler_s, neighbours_s) < _NOTHING * step.step_s:
        return "compute"
    if max(straggler_s, neighbours_s) > step.exposed_s:
        return "the slowest rank" if straggler_s > neighbours_s else "contention between ranks of a host"
    last = first = max(range(len(step.buckets)), key=lambda number: step.buckets[number].done_s)
    while first > 0 and step.buckets[first].queue_s > _NOTHING * step.step_s:
        first -= 1
    where = f"bucket {first + 1} of {len(step.buckets)}"
    return f"{where} ({format_bytes(step.buckets[first].num_bytes)})" if first == last else f"network, from {where}"


def describe_scenario(
    job: Job, fabrics: Sequence[Fabric], accumulate: int = 1, spread: float = 0.0, evidence: Evidence | None = None,
    known: RankCosts | None = None,
) -> list[str]:  # fmt: skip
    """The assumptions behind every row, one per line."""
    rank = (known or RankCosts()) if evidence is None else fit_rank(evidence)
    bases = group_by(fabrics, lambda fabric: (_fill_contention(job, fabric, rank).contention or Contention()).basis)
    queue = "on gloo two at a time, which share the link" if any(f.servers > 1 for f in fabrics) else "one at a time"
    errors = describe_uncertainty(list_networks(fabrics))
    varies = f"compute times vary by {spread:.1%} (lognormal, independent), and a step waits for the slowest rank"
    return [
        *(f"contention on {', '.join(fabric.name for fabric in same)}: {basis}" for basis, same in bases.items()),
        *(describe_rank(rank, job.num_bytes) or ["copies and launches are free"] * (known is None)),
        *(["ranks of one CPU host do not slow each other down"] * (job.device == "cpu" and len(rank.neighbours) == 1)),
        f"messages are sent in bucket order, {queue}",
        varies if spread else "all ranks are equally fast",
        *([f"{accumulate} micro-batches per step; gradients are sent during the last backward"] * (accumulate > 1)),
        f"interval: 90 % of {DRAWS} draws from the repetitions of the inputs and from the assumptions; standard "
        f"deviations of {MODEL_ERROR:.0%} of exposed communication for the model's own error, and {errors}",
    ]


@dataclass(frozen=True)
class CommRow:
    """One model, network and number of ranks: the prediction, and the all-reduce of all gradients at once. `message_s`
    is that single message after backward, with nothing to hide it; `step` is the step with the best bucket size."""

    model: str
    batch_size: int
    num_bytes: int
    backward_s: float
    compute_source: str
    message_s: float
    step: WhatIfRow
    assumption: str

    @property
    def overhead(self) -> float:
        """Communication as a share of the step without any overlap."""
        return self.message_s / (self.message_s + self.step.local_s)


def build_comm_table(
    profile: LayerProfileRecord, networks: Sequence[Network], sweeps: Sequence[MeasuredFabric], ranks: Sequence[int],
    evidence: Evidence | None = None,
) -> list[CommRow]:  # fmt: skip
    """One row per network and number of ranks; a measured sweep has rows only for its own rank counts."""
    job = build_job_from_profile(profile)
    draws = draw_jobs(profile, job, DRAWS)
    fabrics: list[Fabric] = [*(AssumedFabric(network, network) for network in networks), *sweeps]
    rows = []
    for fabric in fabrics:
        known = [n for n in ranks if not isinstance(fabric, MeasuredFabric) or n in fabric.ranks]
        if not known:
            counts = ", ".join(map(str, ranks))
            raise ConfigError(f"{fabric.name} was not measured on {counts} ranks: run `bench allreduce` there")
        assumption = "; ".join(fabric.assumptions)
        for row in simulate_what_if(job, draws, fabric, known, evidence=evidence):
            message_s = fabric.build_curve(row.world_size).estimate_s(job.num_bytes)
            what = (profile.model, profile.batch_size, job.num_bytes, job.backward_s, profile.source)
            rows.append(CommRow(*what, message_s, row, assumption))
    return rows
