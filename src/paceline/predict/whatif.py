"""The cost of a step on networks and rank counts that were not measured. Everything here is simulated."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from paceline.errors import ConfigError
from paceline.plan import plan_like_torch
from paceline.predict.curves import DRAWS, Resample, draw
from paceline.predict.job import Job, build_job_from_profile, draw_jobs
from paceline.predict.networks import (
    AssumedFabric,
    Fabric,
    MeasuredFabric,
    Network,
    describe_uncertainty,
    list_networks,
)
from paceline.predict.predictor import Draw, Evidence, Prediction, Predictor, RankCosts, describe_rank, fit_rank
from paceline.predict.scaling import estimate_slowdown, estimate_wait
from paceline.predict.search import estimate_caps
from paceline.predict.sending import Sending
from paceline.predict.simulate import MODEL_ERROR, Contention, MachineCosts, Schedule, SimulatedStep, simulate
from paceline.records import LayerProfileRecord
from paceline.records.samples import group_by
from paceline.strategy import DENSE
from paceline.units import format_bytes

# How ranks send, as a function of their number, their compute time relative to one rank alone, and a resample of the
# measurements.
Send = Callable[[int, float, Resample], Schedule | None]
# Differences between plans, and waits, are negligible below this fraction of a time.
_NOTHING = 1e-3


def _fill_contention(job: Job, fabric: Fabric, rank: RankCosts, source: random.Random | None = None) -> RankCosts:
    """The costs with assumed contention if it was not measured; with a random source, a draw of the assumption."""
    assumed = Contention.assume(job.device, _is_on_host(fabric), source=source)
    return replace(rank, contention=rank.contention or assumed)


def _is_on_host(fabric: Fabric) -> bool:
    """Whether the fabric connects the ranks of one host, as does a sweep unless it is known to span several nodes."""
    return isinstance(fabric, MeasuredFabric) and not 0 < fabric.ranks_per_node < max(fabric.ranks)


def count_per_host(fabric: Fabric, world_size: int) -> int:
    """The number of ranks that share a host: all of them, unless a sweep is known to span several hosts."""
    given = fabric.ranks_per_node or world_size
    return min(world_size, given if isinstance(fabric, MeasuredFabric) else max(given, fabric.network.ranks_per_node))


def is_shared(fabric: Fabric) -> bool:
    """Whether ranks reduce in shared memory."""
    return isinstance(fabric, MeasuredFabric) and fabric.fits[0].algorithm == "shared"


def _build_costs(
    job: Job, fabric: Fabric, world_size: int, rank: RankCosts, sending: Schedule | None = None
) -> MachineCosts:
    inside, contention = None, rank.contention or Contention()
    if sending is not None and sending.has_levels:
        inside, curve = fabric.build_levels(world_size)
    else:
        curve = fabric.build_curve(world_size)
    if job.device != "cpu" or not _is_on_host(fabric):  # on a CPU host, the cores themselves move the messages
        contention = contention.spread_over(curve)
    own = (0.0, 0.0) if world_size == 1 else (rank.launch_s, rank.gather_s_per_byte)
    # Concurrent messages share the link: together they are no faster than one.
    return MachineCosts(curve, fabric.servers, *own, contention, 1 / fabric.servers, sending=sending, inside=inside)


def _stretch(job: Job, fabric: Fabric, world_size: int, rank: RankCosts, shift: float = 0.0) -> Job:
    """The job slowed down by the other ranks of its CPU host."""
    per_host = fabric.ranks_per_node
    if isinstance(fabric, MeasuredFabric):  # cores move messages on gloo and in shared memory
        is_of_cores = fabric.fits[0].algorithm in ("gloo", "shared")
        per_host = per_host or max(fabric.ranks) if is_of_cores else 1
    here = min(world_size, per_host)
    if job.device != "cpu" or here <= rank.neighbors[0][0]:
        return job
    return job.stretch(estimate_slowdown(rank.neighbors, here, shift))


def simulate_what_if(
    job: Job, draws: Sequence[Job], fabric: Fabric, ranks: Sequence[int], accumulate: int = 1, spread: float = 0.0,
    slow: float = 0.0, evidence: Evidence | None = None, known: RankCosts | None = None, send: Send = lambda *_: None,
    most_caps: int = 0,
) -> list[Prediction]:  # fmt: skip
    """One row per number of ranks, with the best bucket size. `draws` are draws of the measured job. A step has
    `accumulate` micro-batches, and the compute times of ranks have a relative standard deviation of `spread`; one rank,
    if there are several, is always slower by the fraction `slow`. `evidence` has the profile's measurements of copies,
    contention and neighbors; without it, these costs are `known` or assumed. At most `most_caps` bucket sizes are tried
    (0 means all). Calls that differ only in `send` use the same draws."""
    jobs = enumerate([job, *draws])

    def build(resample: Resample) -> Callable[[int], Draw]:
        """One draw of the job, the fabric and a rank's costs, as a function of the number of ranks."""
        number, alone = next(jobs)
        alone = alone.accumulate(accumulate)
        there = fabric if resample.source is None else fabric.draw(resample.source, resample.shift)
        rank = (known or RankCosts()) if evidence is None else fit_rank(evidence, resample)
        rank = _fill_contention(alone, there, rank, resample.source)

        def build_on(world_size: int) -> Draw:
            mine = _stretch(alone, there, world_size, rank, resample.slowdown)
            codecs = Resample(random.Random(number) if number else None)
            wait_s, slow_s = estimate_wait(spread, world_size, slow) * mine.computing_s, 0.0
            if slow and world_size > 1:  # the others wait for its messages, so their steps take equally long
                slow_s, mine = slow * mine.local_s, mine.stretch(1 + slow)
            sending = send(world_size, mine.backward_s / alone.backward_s, codecs)
            # Paceline's wrapper sends embedding lookups as rows if that pays off; on a GPU only on request.
            is_ours = rank.wrapper == "paceline" and mine.device != "cuda"
            if is_ours and not is_shared(there) and (sending is None or sending.is_plain):
                mine = mine.split(world_size)
            costs = _build_costs(mine, there, world_size, rank, sending)
            return Draw(mine, costs, MODEL_ERROR * resample.error, 0.0, wait_s, slow_s, alone.local_s)

        return build_on

    best, drawn = draw(build, len(draws))
    alone = job.accumulate(accumulate)
    rows = []
    for world_size in ranks:
        model = Predictor(best(world_size), [one(world_size) for one in drawn])
        rows.append(_choose_caps(model, fabric, world_size, alone, most_caps))
    return rows


def _choose_caps(model: Predictor, fabric: Fabric, world_size: int, alone: Job, most_caps: int) -> Prediction:
    job, costs, sending = model.job, model.costs, model.costs.sending
    caps = estimate_caps(job, costs, most_caps)
    # Launches are never free, even if modeled as free: among equally fast plans, take the one with the fewest buckets.
    same = [point for point in caps.points if point.backward_s <= caps.best.backward_s * (1 + _NOTHING)]
    best = min(same, key=lambda point: len(point.cuts))
    default = simulate(job, plan_like_torch(job.gradients, range(len(job.gradients))), costs)
    row = model.predict(best.cuts)
    moved = sorted(row.bucket_bytes, reverse=True)
    names = dict.fromkeys(costs.curve.explain(size)[0] for size in moved)
    neighbours_s = job.local_s - alone.local_s - model.best.slow_s
    return replace(
        row,
        network=fabric.name,
        world_size=world_size,
        algorithm="none" if world_size == 1 else " + ".join(names),
        exposed_s=max(0.0, best.step.exposed_s),
        cap_bytes=best.high_bytes,
        plateau=next(sizes for sizes in caps.plateaus if sizes[0] <= best.high_bytes <= sizes[1]),
        default_step_s=default.step_s + model.best.wait_s,
        bound=_find_bound(best.step, row.straggler_s, neighbours_s),
        doubt="" if world_size == 1 else costs.curve.explain(moved[0])[1],
        neighbours_s=neighbours_s,
        strategy=sending.strategy if isinstance(sending, Sending) else DENSE,
        message_s=costs.curve.estimate_s(alone.num_bytes),
        sent_bytes=(sending or Sending(DENSE, world_size)).count_sent(job, best.cuts),
    )


def _find_bound(step: SimulatedStep, straggler_s: float, neighbours_s: float = 0.0) -> str:
    """The bottleneck of the step. Starting from the last message, go back as long as each message had to wait for the
    previous one."""
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
    job: Job, fabrics: Sequence[Fabric], accumulate: int = 1, spread: float = 0.0, slow: float = 0.0,
    evidence: Evidence | None = None, known: RankCosts | None = None,
) -> list[str]:  # fmt: skip
    rank = (known or RankCosts()) if evidence is None else fit_rank(evidence)
    bases = group_by(fabrics, lambda fabric: (_fill_contention(job, fabric, rank).contention or Contention()).basis)
    queue = "on gloo two at a time, which share the link" if any(f.servers > 1 for f in fabrics) else "one at a time"
    errors = describe_uncertainty(list_networks(fabrics))
    varies = f"compute times vary by {spread:.1%} (lognormal, independent), and a step waits for the slowest rank"
    return [
        *(f"contention on {', '.join(fabric.name for fabric in same)}: {basis}" for basis, same in bases.items()),
        *(describe_rank(rank, job.num_bytes) or ["copies and launches are free"] * (known is None)),
        *(["ranks of one CPU host do not slow each other down"] * (job.device == "cpu" and len(rank.neighbors) == 1)),
        f"messages are sent in bucket order, {queue}",
        *([varies] if spread else []),
        *([f"one rank is always {slow:.1%} slower than the others, which wait for it"] if slow else []),
        *(["all ranks are equally fast"] if not spread and not slow else []),
        *([f"{accumulate} micro-batches per step; gradients are sent during the last backward"] * (accumulate > 1)),
        f"interval: 90 % of {DRAWS} draws from the repetitions of the inputs and from the assumptions; standard "
        f"deviations: the model's own error {MODEL_ERROR:.0%} of exposed communication; messages {errors}",
    ]


class CommRow(NamedTuple):
    """A profile and its predictions on one network and number of ranks."""

    profile: LayerProfileRecord
    job: Job
    step: Prediction
    assumption: str


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
        found = simulate_what_if(job, draws, fabric, known, evidence=evidence)
        rows += [CommRow(profile, job, row, "; ".join(fabric.assumptions)) for row in found]
    return rows
