"""The predicted scaling curve: its bounds, recovery of a synthetic machine, and records that it must never use."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError, RecordError
from paceline.predict import curves, scaling
from paceline.predict.curves import FamilyCurve
from paceline.predict.job import Job
from paceline.predict.networks import find_network
from paceline.predict.scaling import (
    ScalingEvidence,
    describe_assumptions,
    estimate_slowdown,
    estimate_spread,
    estimate_wait,
    interpolate_logs,
    simulate_scaling,
)
from paceline.predict.simulate import Contention, Layout, MachineCosts, simulate
from paceline.records import CollectiveRecord, LayerProfileRecord, ParameterTimes, Samples, StepRecord
from paceline.records.kinds import record_from_json, record_to_json
from paceline.units import MIB
from tests.unit.made_jobs import make_job

SWEPT = [4096 << power for power in range(15)]  # 4 KiB to 64 MiB


def spread(seconds, ranks, noise=0.0, count=9, seed=0):
    draw = random.Random(f"{seed} {seconds} {ranks}")
    return Samples(seconds=tuple((seconds * (1 + noise * draw.uniform(-1, 1)),) * ranks for _ in range(count)))


@dataclass(frozen=True)
class MadeWorld:
    """A job and a host with known costs. `slowdown(n)` applies to compute, `factor` to messages during compute. A
    step on b samples takes `fixed_s + b * sample_s`, and the wrapper adds `copies_s`, slowed by the square of
    `slowdown(n)`."""

    sizes: tuple[int, ...] = (2 * MIB,) * 12
    fixed_s: float = 0.010
    sample_s: float = 0.015
    alpha_s: float = 5e-5
    bytes_per_s: float = 4e9
    backend: str = "gloo"
    factor: float = 1.0
    slowdown: Callable[[int], float] = lambda ranks: 1.0
    cores: int = 64
    mode: str = "weak"
    cell_size: int = 8
    buckets: tuple[int, ...] = (2 * MIB, 11 * MIB, 11 * MIB)
    noise: float = 0.0
    copies_s: float = 0.0

    @property
    def wrapper(self) -> str:
        return "paceline" if self.backend == "paceline" else "torch"

    def one_rank_s(self, samples: float) -> float:
        return self.fixed_s + samples * self.sample_s

    def samples(self, ranks: int) -> int:
        return self.cell_size if self.mode == "weak" else self.cell_size // ranks

    def job(self, step_s: float, after_s: float) -> Job:
        rest_s = step_s - after_s
        ready = tuple(rest_s * 0.6 * (place + 1) / len(self.sizes) for place in range(len(self.sizes)))
        return make_job(self.sizes, ready, rest_s * 0.6, rest_s * 0.4, after_s)

    def message(self, ranks: int) -> FamilyCurve:
        algorithm = "shared" if self.backend == "paceline" else "gloo"
        return FamilyCurve(algorithm, ranks, self.alpha_s, self.bytes_per_s)

    def step_s(self, ranks: int) -> tuple[float, float]:
        """(step time, step time without communication)"""
        slowed = self.slowdown(ranks)
        compute_s = self.one_rank_s(self.samples(ranks)) * slowed
        if ranks == 1:
            return compute_s, compute_s
        job = self.job(compute_s, self.fixed_s * slowed)
        curve = FamilyCurve(
            self.message(ranks).algorithm, ranks, self.alpha_s * self.factor, self.bytes_per_s / self.factor
        )
        servers = 1 if self.backend == "paceline" else 2
        rate = (1 + min(1.0, max(0.0, self.cores / ranks - 1))) / 2
        costs = MachineCosts(curve, servers, pair_rate=1 / servers, contention=Contention((1,), (rate,), (rate,)))
        ends = [sum(self.buckets[: place + 1]) for place in range(len(self.buckets))]
        ready = tuple(job.ready_s[-(-end // self.sizes[0]) - 1] for end in ends)
        return simulate(job, Layout(self.buckets, ready), costs).step_s + self.copies_s * slowed**2, compute_s

    def record(self, ranks: int) -> StepRecord:
        step_s, silent_s = self.step_s(ranks)
        return StepRecord(
            mode=self.mode, cell_size=self.cell_size, model="made", data="synthetic",
            wrapper=self.wrapper if ranks > 1 else "none", backend=self.backend, device="cpu", world_size=ranks,
            threads=1, precision="fp32", batch_size=self.samples(ranks), accumulate=1,
            timing=spread(step_s, ranks, self.noise), num_bytes=sum(self.sizes), num_messages=len(self.buckets),
            bucket_bytes=self.buckets if ranks > 1 else (),
            no_comm=spread(silent_s, ranks, self.noise) if ranks > 1 else None,
        )  # fmt: skip

    def silent(self, ranks: int) -> StepRecord:
        """Steps of this many ranks without messages; for one rank, inside the wrapper."""
        silent_s = self.step_s(ranks)[1] + (self.copies_s if ranks == 1 else 0.0)
        own = {"role": "local", "wrapper": self.wrapper} if ranks == 1 else {"role": "together", "wrapper": "none"}
        nothing = {"bucket_bytes": (), "no_comm": None, "timing": spread(silent_s, ranks, self.noise)}
        return replace(self.record(ranks), **own, **nothing)

    def profile(self, batch_size: int) -> LayerProfileRecord:
        step_s = self.one_rank_s(batch_size)
        job = self.job(step_s, self.fixed_s)
        parameters = tuple(
            ParameterTimes(f"layer{place}", size, size // 4, "float32", "", (job.ready_s[place],) * 9)
            for place, size in enumerate(self.sizes)
        )
        step, forward, back, after = (
            spread(seconds, 1) for seconds in (step_s, job.before_s, job.backward_s, self.fixed_s)
        )
        return LayerProfileRecord(
            model="made", device="cpu", dtype="fp32", batch_size=batch_size, parameters=parameters, blocks=(),
            timing=step, forward=forward, backward=back, optimizer=after, profiled_step=step, profiled_forward=forward,
            profiled_backward=back,
        )  # fmt: skip

    def sweep(self, ranks: int) -> list[CollectiveRecord]:
        curve = self.message(ranks)
        memory = "shared" if self.backend == "paceline" else "ordinary"
        return [
            CollectiveRecord(
                collective="all_reduce", backend=self.backend, device="cpu", world_size=ranks, num_bytes=size,
                dtype="float32", op="sum", memory=memory, timing=spread(curve.estimate_s(size), ranks, self.noise),
            )
            for size in SWEPT
        ]  # fmt: skip

    def evidence(self, *ranks: int, sweeps=(), records=None, collectives=None, wrapper="", up_to=0) -> ScalingEvidence:
        """`records` and `collectives` replace the world's own."""
        swept = sweeps or tuple(count for count in ranks if count > 1) or (2,)
        others = {self.samples(count) for count in (2, 4, 8, 16)} - {self.cell_size}
        study = list(records or map(self.record, ranks))
        study += [replace(self, cell_size=samples).record(1) for samples in sorted(others)]
        study += [record for count in swept for record in self.sweep(count)] if collectives is None else collectives
        where = wrapper or self.wrapper, self.backend, (self.mode, self.cell_size), self.cores
        evidence = ScalingEvidence([*study, self.profile(self.cell_size)], *where, up_to)
        evidence.layouts = {2: self.buckets}
        return evidence


# The cost of messages relative to those of a sweep, by number of ranks.
FACTORS = {1: 1.0, 2: 0.8, 4: 2.0}


def rise(share):
    return lambda ranks: 1 + share * (ranks - 1)


def power(exponent):
    return lambda ranks: float(ranks) ** exponent


WORLDS = st.builds(
    MadeWorld,
    sample_s=st.floats(1e-4, 0.03),
    alpha_s=st.floats(1e-6, 1e-3),
    bytes_per_s=st.floats(1e8, 1e11),
    backend=st.sampled_from(["gloo", "paceline"]),
    factor=st.floats(0.5, 2.5),
    slowdown=st.floats(0, 0.05).map(rise),
    cores=st.sampled_from([4, 8, 64]),
)


@given(world=WORLDS, known=st.sampled_from([(1,), (1, 2), (1, 2, 4)]))
@settings(max_examples=6)
def test_weak_scaling_stays_within_its_bounds(world, known):
    """A step is never faster than on one rank, nor than on half as many ranks, and is within its interval."""
    points = simulate_scaling(world.evidence(*known), (1, 2, 4, 8, 16, 32, 64), (find_network("10gbe"),))
    steps = [point.step_s for point in points]
    assert steps[0] == pytest.approx(world.one_rank_s(8))
    assert all(later >= sooner * (1 - 1e-3) for sooner, later in itertools.pairwise(steps))
    for point in points:
        assert point.low_s <= point.step_s <= point.high_s
        assert 0 < point.efficiency <= 1 + 1e-9
        assert point.speedup == pytest.approx(point.efficiency * point.world_size)


@given(world=WORLDS, more=st.floats(1, 4))
@settings(max_examples=6)
def test_slower_messages_never_shorten_a_step(world, more):
    dearer = replace(world, alpha_s=world.alpha_s * more, bytes_per_s=world.bytes_per_s / more)
    here, there = (simulate_scaling(each.evidence(1, sweeps=(2,)), (2, 4)) for each in (world, dearer))
    assert all(b.step_s >= a.step_s * (1 - 1e-9) for a, b in zip(here, there, strict=True))


def test_free_messages_and_equal_ranks_scale_perfectly():
    world = MadeWorld(alpha_s=1e-12, bytes_per_s=1e18)
    for point in simulate_scaling(world.evidence(1, 2, 4), (2, 8, 64)):
        assert point.efficiency == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("factor", "copies_s"), [(0.6, 0.0), (1.0, 0.02)])
@pytest.mark.parametrize("slowdown", [rise(0), pytest.param(rise(0.02), marks=pytest.mark.slow), rise(0.06)])
@pytest.mark.parametrize("bytes_per_s", [1e10, pytest.param(1e11, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mode", "cell_size"), [("weak", 8), ("strong", 64)])
def test_twice_the_measured_ranks_are_extrapolated(factor, copies_s, slowdown, bytes_per_s, mode, cell_size):
    world = MadeWorld(
        backend="paceline",
        factor=factor,
        copies_s=copies_s,
        slowdown=slowdown,
        bytes_per_s=bytes_per_s,
        mode=mode,
        cell_size=cell_size,
    )
    [point] = simulate_scaling(world.evidence(1, 2, 4), (8,))
    assert point.step_s == pytest.approx(world.step_s(8)[0], rel=0.03)


@pytest.mark.parametrize("factor", [0.6, 1.0, 2.0])
def test_ranks_with_their_own_links_are_extrapolated(factor):
    world = MadeWorld(factor=factor, slowdown=rise(0.02), bytes_per_s=1e9)
    [point] = simulate_scaling(world.evidence(1, 2, 4), (8,))
    assert point.step_s == pytest.approx(world.step_s(8)[0], rel=0.02)


def test_messages_of_ranks_that_outnumber_the_cores_slow():
    crowded, roomy = (MadeWorld(cores=cores).evidence(1, 2, 4).fabric for cores in (8, 64))
    size = 8 * MIB
    assert crowded.build_curve(4).estimate_s(size) == roomy.build_curve(4).estimate_s(size)
    # Each of 8 ranks on 8 cores runs two gloo threads.
    ratio = crowded.build_curve(8).estimate_s(size) / roomy.build_curve(8).estimate_s(size)
    assert ratio == pytest.approx(2**0.8)


def test_calibrated_ranks_are_reproduced_and_the_nearest_corrects_the_others():
    worlds = {count: MadeWorld(factor=factor, slowdown=rise(0.03), noise=0.02) for count, factor in FACTORS.items()}
    records = tuple(world.record(count) for count, world in worlds.items())
    evidence = worlds[4].evidence(1, 2, 4, records=records)
    *known, beyond = simulate_scaling(evidence, (1, 2, 4, 8))
    for point, record in zip(known, records, strict=True):
        assert point.step_s == pytest.approx(record.timing.median_s, rel=1e-3)
    assert beyond.step_s == pytest.approx(simulate_scaling(worlds[4].evidence(1, 2, 4), (8,))[0].step_s, rel=1e-3)


def test_a_slowdown_below_one_counts_as_noise():
    world = MadeWorld()
    alone_s = world.one_rank_s(8)
    quick = replace(world.record(4), no_comm=spread(alone_s * 0.9, 4), timing=spread(alone_s * 0.92, 4))
    evidence = world.evidence(1, 2, 4, records=(world.record(1), world.record(2), quick))
    assert all(point.step_s >= alone_s for point in simulate_scaling(evidence, (2, 4, 8)))


@pytest.mark.parametrize(("up_to", "ranks"), [(4, 8), (2, 4), (1, 2)])
def test_held_out_records_do_not_change_the_prediction(up_to, ranks):
    world = MadeWorld(noise=0.02, slowdown=rise(0.02))
    known = (1, 2, 4, 8)
    wild = MadeWorld(alpha_s=0.1, bytes_per_s=1e6, sample_s=3.0, buckets=(MIB,) * 24)
    other = {
        "records": [(world if count <= up_to else wild).record(count) for count in known],
        "collectives": [
            r if count <= max(2, up_to) else replace(r, timing=spread(7.0, count))
            for count in known[1:]
            for r in world.sweep(count)
        ],
    }
    asked = (2, 4, 8)
    held_out = world.evidence(*known, up_to=up_to)
    points = simulate_scaling(held_out, asked)
    assert points == simulate_scaling(world.evidence(*known, **other, up_to=up_to), asked)
    assert simulate_scaling(world.evidence(*known), asked) != simulate_scaling(world.evidence(*known, **other), asked)
    measured = {count: world.record(count).timing.median_s for count in known}
    assert {p.world_size: p.step_s for p in points}[ranks] == pytest.approx(measured[ranks], rel=0.05)
    assert held_out.ranks == tuple(count for count in known if count <= up_to)


def test_the_interval_widens_with_every_doubling():
    world = MadeWorld(noise=0.01, slowdown=rise(0.01), bytes_per_s=1e9, cores=256)
    points = simulate_scaling(world.evidence(1, 2, 4), (4, 8, 16, 32, 64))
    widths = [(point.high_s - point.low_s) / point.step_s for point in points]
    assert widths == sorted(widths) and widths[0] > 0


def test_the_interval_has_the_noise_of_what_it_is_compared_with():
    world = MadeWorld(bytes_per_s=1e9)
    noisy = replace(world.record(1), timing=spread(world.one_rank_s(8), 1, noise=0.2))
    evidence = world.evidence(1, 2, records=(noisy, world.record(2)))
    [point] = simulate_scaling(evidence, (2,))  # unaffected by draws: its own steps calibrate it
    assert point.low_s < 0.98 * point.step_s and point.high_s > 1.02 * point.step_s


def test_the_interval_is_wider_far_from_steps_than_far_from_sweeps():
    world = MadeWorld(noise=0.01, bytes_per_s=1e9)
    near, far = world.evidence(1, 2, 4, 8), world.evidence(1, 2, sweeps=(2, 4, 8))
    (here,), (there,) = simulate_scaling(near, (8,)), simulate_scaling(far, (8,))
    assert there.high_s - there.low_s > 2 * (here.high_s - here.low_s)
    # With no compute, the step takes exactly as long as its messages.
    idle = replace(world, sample_s=1e-6, fixed_s=1e-5)
    [point] = simulate_scaling(idle.evidence(1, 2, sweeps=(2, 4, 8)), (8,))
    assert point.high_s / point.step_s > 1.4


@pytest.mark.parametrize(("known", "is_wider"), [((1,), True), ((1, 2), False)])
def test_the_models_own_error_counts_until_steps_with_messages_correct_it(monkeypatch, known, is_wider):
    world = MadeWorld(noise=0.01, bytes_per_s=1e9)
    evidence = world.evidence(*known, sweeps=(2, 4))
    [point] = simulate_scaling(evidence, (4,))
    monkeypatch.setattr(scaling, "MODEL_ERROR", 0.5)
    [wider] = simulate_scaling(evidence, (4,))
    assert wider.step_s == point.step_s
    assert (wider.high_s > point.high_s) is is_wider


def test_the_optimizer_does_not_shrink_with_the_batch():
    world = MadeWorld(mode="strong", cell_size=64, fixed_s=0.03, sample_s=0.004, bytes_per_s=1e9)
    [point] = simulate_scaling(world.evidence(1, sweeps=(2, 4, 8)), (8,))
    assert point.step_s == pytest.approx(world.step_s(8)[0], rel=1e-3)


def test_strong_scaling_takes_each_share_from_one_rank():
    world = MadeWorld(mode="strong", cell_size=64, alpha_s=1e-12, bytes_per_s=1e18)
    points = simulate_scaling(world.evidence(1), (1, 2, 4, 8))
    for point in points:
        assert point.step_s == pytest.approx(world.one_rank_s(64 // point.world_size))
        assert point.speedup == pytest.approx(world.one_rank_s(64) / world.one_rank_s(64 // point.world_size))
        assert point.efficiency == pytest.approx(point.speedup / point.world_size)
    with pytest.raises(ConfigError, match=r"64 samples.*128 ranks"):
        simulate_scaling(replace(world, cores=256).evidence(1), (128,))


def test_batch_sizes_are_interpolated_on_log_axes():
    points = [(2.0, 1.0), (8.0, 2.0), (32.0, 8.0)]
    assert [interpolate_logs(points, place) for place in (2, 4, 8, 16, 32, 64)] == pytest.approx(
        [1, 2**0.5, 2, 4, 8, 16]
    )
    assert interpolate_logs(points, 0.5) == pytest.approx(0.5)
    assert interpolate_logs([(8.0, 2.0)], 2) == pytest.approx(0.5)
    # A quantity that falls while samples grow is noise: it is not extrapolated.
    assert interpolate_logs([(2.0, 1.1), (4.0, 1.0)], 1) == 1.1


def test_beyond_the_host_a_network_joins_hosts_and_a_slower_one_is_never_better():
    world = MadeWorld(cores=4, slowdown=rise(0.05))
    networks = [find_network(name) for name in ("hdr", "10gbe", "1gbe")]
    points = simulate_scaling(world.evidence(1, 2, 4), (2, 4, 8, 64), networks)
    assert [(p.world_size, p.network) for p in points[:2]] == [(2, ""), (4, "")]
    for count in (8, 64):
        row = [point for point in points if point.world_size == count]
        assert [point.network for point in row] == ["hdr", "10gbe", "1gbe"]
        assert points[1].step_s <= row[0].step_s <= row[1].step_s <= row[2].step_s
        assert row[1].step_s < row[2].step_s
    # Hosts do not slow each other down: on a free network, 64 ranks are as fast as one full host.
    [free] = simulate_scaling(
        world.evidence(1, 2, 4), (64,), [find_network("1e9GB/s,0ns".replace("1e9", "1000000000"))]
    )
    assert free.step_s == pytest.approx(points[1].step_s, rel=1e-3)
    with pytest.raises(ConfigError, match="8 ranks"):
        simulate_scaling(world.evidence(1, 2), (8,))


def test_ranks_on_several_hosts_wait_for_the_slowest():
    world, free = MadeWorld(cores=4), [find_network("1000000000GB/s,0ns")]
    even = world.evidence(1, 2, 4)
    rows = tuple((0.9, 0.95, 1.0, 1.05) if n % 2 else (1.05, 0.9, 1.0, 0.95) for n in range(9))
    last = even.shared[-1]
    step_s = last.no_comm.median_s
    apart = replace(last.no_comm, seconds=tuple(tuple(step_s / 1.05 * share for share in row) for row in rows))
    uneven = world.evidence(1, 2, 4, records=(even.alone, even.shared[0], replace(last, no_comm=apart)))
    assert even.spread == 0 and 0.03 < uneven.spread < 0.08
    times = {
        count: [simulate_scaling(known, (count,), free)[0].step_s for known in (even, uneven)]
        for count in (4, 64, 1024)
    }
    assert times[4][0] == pytest.approx(times[4][1])
    assert times[64][0] == pytest.approx(times[4][0], rel=1e-3)
    assert times[4][1] < times[64][1] < times[1024][1]
    wait = (1 + estimate_wait(uneven.spread, 64)) / (1 + estimate_wait(uneven.spread, 4))
    assert times[64][1] - times[4][1] == pytest.approx(step_s * (wait - 1), rel=0.1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_disturbed_steps_are_excluded_from_calibration(ranks):
    world = MadeWorld(cores=4)
    known = world.evidence(1, 2, 4)
    rest, (last,) = ([r for r in known.shared if (r.world_size == ranks) is side] for side in (False, True))
    rows = tuple(tuple(s * (1.4 if rank == 1 else 1.0) for rank, s in enumerate(row)) for row in last.no_comm.seconds)
    disturbed = replace(last, no_comm=replace(last.no_comm, seconds=rows))
    # Steps interleaved with the disturbed ones are not used either.
    for late in ((disturbed,), (last, replace(disturbed, wrapper="other"))):
        changed = world.evidence(1, sweeps=(2, 4), records=(known.alone, *rest, *late))
        without = world.evidence(1, sweeps=(2, 4), records=(known.alone, *rest))
        assert simulate_scaling(changed, (2, 4)) == simulate_scaling(without, (2, 4))
        text = f"disturbed steps on {ranks} ranks are excluded"
        assert text in describe_assumptions(changed)[0] and text not in describe_assumptions(without)[0]
    assert changed.layouts == known.layouts


def test_a_host_of_one_device_needs_no_sweep():
    world = MadeWorld(cores=1)
    points = simulate_scaling(world.evidence(1, collectives=()), (1, 2, 64), [find_network("10gbe")])
    assert [point.network for point in points] == ["", "10gbe", "10gbe"]
    assert points[0].step_s < points[1].step_s < points[2].step_s
    assert "no step with communication was measured for calibration: ranks are assumed not to slow" in points[1].doubt
    with pytest.raises(RecordError, match="gloo"):
        simulate_scaling(replace(world, cores=2).evidence(1, collectives=()), (2,))


def test_a_full_host_hides_less():
    hidden = {}
    for cores in (2, 3, 4):
        world = MadeWorld(cores=cores, buckets=(12 * MIB, 12 * MIB), bytes_per_s=1e9)
        hidden[cores] = simulate_scaling(world.evidence(1), (2,))[0].step_s
    assert hidden[2] > hidden[3] > hidden[4]


def test_unexplained_time_is_added():
    """Fully hidden messages, and a wait that is not caused by them."""
    world = MadeWorld(bytes_per_s=1e13, alpha_s=1e-9)
    shared = (world.record(count) for count in (2, 4))
    waits = [replace(r, timing=spread(r.timing.median_s + 0.02, r.world_size)) for r in shared]
    evidence = world.evidence(1, 2, 4, records=(world.record(1), *waits))
    assert simulate_scaling(evidence, (8,))[0].step_s == pytest.approx(world.step_s(8)[0] + 0.02, rel=0.01)


def test_the_slowdown_is_extrapolated_linearly():
    line = ((1, 1.0), (2, 1.1), (4, 1.3))
    assert estimate_slowdown(line, 8) == pytest.approx(1.7)
    assert estimate_slowdown(line[:2], 4) == pytest.approx(1.3)
    assert [estimate_slowdown(line, count) for count in (1, 2)] == pytest.approx([1, 1.1])
    # One rank carries no information about its neighbors, which never make it faster.
    assert estimate_slowdown(line[:1], 16) == 1
    assert estimate_slowdown(line[:1], 2, -2.0) == estimate_slowdown(line[:1], 2, 2.0) > 1.15
    # The slowdown never grows faster than the number of ranks, and never decreases.
    assert estimate_slowdown(((1, 1.0), (2, 1.0), (4, 4.0)), 8) <= 8
    assert estimate_slowdown(((1, 1.0), (2, 1.2), (4, 1.1)), 8) == pytest.approx(1.1)


def test_warnings_and_assumptions_are_listed():
    world = MadeWorld(cores=4)
    networks = [find_network("10gbe")]
    near, far = simulate_scaling(world.evidence(1, 2), (4, 16), networks)
    assert near.doubt == "" and "over twice the largest number used for calibration, 2" in far.doubt
    lines = " | ".join(describe_assumptions(world.evidence(1, 2), networks))
    for words in (
        "calibrated on steps of 1, 2 ranks",
        "10gbe: 1.25 GB/s",
        "4 ranks fit this host",
        "27% per doubling",
    ):
        assert words in lines
    assert "no steps on several ranks" in " | ".join(describe_assumptions(world.evidence(1)))


def test_evidence_is_selected_from_a_study():
    world, other = MadeWorld(), MadeWorld(backend="paceline")
    records = [
        world.record(1),
        *map(world.record, (2, 4)),
        other.record(2),
        world.profile(8),
        *world.sweep(2),
        *other.sweep(2),
    ]
    strong = MadeWorld(mode="strong", cell_size=64).record(1)
    found = ScalingEvidence([*records, strong], "torch", "gloo", ("weak", 8), 64)
    assert found.ranks == (1, 2, 4) and found.alone == world.record(1)
    assert set(found.one_rank_s) == {8, 64}
    assert found.variant == "torch on gloo"
    assert {record.backend for record in found.shared} == {"gloo"}
    with pytest.raises(RecordError, match="one rank"):
        ScalingEvidence(records, "torch", "gloo", ("weak", 16), 64)
    with pytest.raises(RecordError, match="once"):
        ScalingEvidence([*records, world.record(2)], "torch", "gloo", ("weak", 8), 64)
    with pytest.raises(RecordError, match="communication off"):
        world.evidence(1, 2, records=(world.record(1), replace(world.record(2), no_comm=None)))


@pytest.mark.parametrize(("wrapper", "memory"), [("paceline", "shared"), ("torch", "ordinary")])
def test_sweeps_are_those_of_the_wrappers_kind_of_memory(wrapper, memory):
    world = MadeWorld(backend="paceline")
    copied = [replace(record, memory="ordinary") for record in world.sweep(2)]
    evidence = world.evidence(1, wrapper=wrapper, collectives=(*world.sweep(2), *copied))
    fabric = evidence.fabric
    assert ("(shared)" in fabric.name) == (memory == "shared")


def test_the_buckets_are_those_of_the_nearest_ranks():
    world = MadeWorld()
    evidence = world.evidence(1, 2)
    evidence.layouts = {2: (3 * MIB,), 4: (MIB, MIB)}
    assert [evidence.list_buckets(count) for count in (2, 4, 8)] == [(3 * MIB,), (MIB, MIB), (MIB, MIB)]
    study = [world.record(1), world.record(2), world.profile(8)]
    held_out = ScalingEvidence(study, world.wrapper, world.backend, ("weak", 8), 64, up_to=1)
    assert held_out.ranks == (1,) and held_out.list_buckets(2) == world.buckets
    evidence.layouts = {}
    assert sum(evidence.list_buckets(2)) == sum(world.sizes)


def test_steps_without_communication_count_for_all_wrappers():
    world = MadeWorld()
    mine = world.record(2)
    theirs = replace(mine, wrapper="paceline", no_comm=replace(mine.no_comm, seconds=tuple(
        tuple(3 * value for value in row) for row in mine.no_comm.seconds
    )))  # fmt: skip
    records = [world.record(1), mine, theirs, world.profile(32), *world.sweep(2)]
    [shared] = ScalingEvidence(records, mine.wrapper, mine.backend, mine.cell, 64).shared
    assert shared.no_comm.reduced_s == pytest.approx([2 * value for value in mine.no_comm.reduced_s])
    assert shared.timing == mine.timing


def test_buckets_survive_json():
    record = MadeWorld().record(2)
    assert record_from_json(record_to_json(record)) == record


def test_ranks_with_a_gap_are_predicted_from_the_smallest_sweep():
    [point] = simulate_scaling(MadeWorld().evidence(1, 3, sweeps=(3,), up_to=1), [3])
    assert point.step_s > 0


def test_the_lognormal_wait_agrees_with_sampling():
    sigma = 0.05
    spread = math.sqrt((math.exp(sigma**2) - 1) * math.exp(sigma**2))
    source = random.Random(1)
    drawn = [max(source.lognormvariate(0, sigma) for _ in range(32)) for _ in range(4000)]
    expected = statistics.fmean(drawn) - math.exp(sigma**2 / 2)
    assert estimate_wait(spread, 32) == pytest.approx(expected, rel=0.02)


@given(st.floats(0, 0.5), st.floats(0, 0.4), st.integers(1, 5000), st.integers(0, 5000))
def test_a_wait_grows_with_the_spread_and_with_the_ranks(spread, more, count, others):
    wait = estimate_wait(spread, count)
    assert wait >= 0 and estimate_wait(spread, 1) == 0 == estimate_wait(0.0, count)
    assert wait <= estimate_wait(spread, count + others) + 1e-12
    assert wait <= estimate_wait(spread + more, count) + 1e-12


@pytest.mark.parametrize(("call", "words"), [((0.1, 0), "10% on 0"), ((-0.1, 2), "-10%"), ((1.0, 2), "100%")])
def test_an_impossible_spread_is_refused(call, words):
    with pytest.raises(ConfigError, match=words):
        estimate_wait(*call)


def test_a_spread_comes_from_repetitions_and_not_from_one_outlier():
    source = random.Random(2)
    times = [source.gauss(1.0, 0.02) for _ in range(4000)]
    assert estimate_spread(times) == pytest.approx(0.02, rel=0.1)
    assert estimate_spread([*times, 100.0]) == pytest.approx(0.02, rel=0.1)


# -- steps without messages on twice the ranks -------------------------------------------------------------------------


@pytest.mark.parametrize("slowdown", [pytest.param(rise(0.02), marks=pytest.mark.slow), power(0.5)])
@pytest.mark.parametrize(
    ("known", "ranks"), [((1,), 2), ((1, 2), 4), pytest.param((1, 2, 4), 8, marks=pytest.mark.slow)]
)
def test_steps_without_messages_show_the_slowdown_of_more_ranks(monkeypatch, slowdown, known, ranks):
    """Steps of half of the ranks, and of all ranks without messages, reveal any slowdown law."""
    monkeypatch.setattr(curves, "draw", partial(curves.draw, count=400))  # for a precise comparison of widths
    world = MadeWorld(slowdown=slowdown, copies_s=0.02, cores=64)
    silent = [world.silent(count) for count in (1, 2, 4, 8)]
    evidence = world.evidence(records=[*map(world.record, known), *silent], sweeps=(2, 4, 8), up_to=known[-1])
    assert evidence.ranks == known
    [point] = simulate_scaling(evidence, (ranks,))
    true_s = world.step_s(ranks)[0]
    assert point.step_s == pytest.approx(true_s, rel=0.02)
    without = world.evidence(*known, sweeps=(2, 4, 8), up_to=known[-1])
    [guess] = simulate_scaling(without, (ranks,))
    assert abs(guess.step_s - true_s) >= abs(point.step_s - true_s)
    assert guess.high_s - guess.low_s > point.high_s - point.low_s
    assert known != (1,) or ("not to slow each other" in guess.doubt and "not to slow" not in point.doubt)


def test_the_wrappers_overhead_on_one_rank_holds_on_two():
    world = MadeWorld(copies_s=0.03)
    plain = world.evidence(1, sweeps=(2,))
    local = world.evidence(records=[world.record(1), world.silent(1)], sweeps=(2,))
    (here,), (there,) = simulate_scaling(plain, (2,)), simulate_scaling(local, (2,))
    assert there.step_s - here.step_s == pytest.approx(0.03) and there.step_s == pytest.approx(
        world.step_s(2)[0], rel=1e-3
    )
    # They carry no information about another wrapper.
    other = replace(world.silent(1), wrapper="another")
    assert simulate_scaling(world.evidence(records=[world.record(1), other], sweeps=(2,)), (2,)) == [here]


@pytest.mark.parametrize(("backend", "is_slowed"), [("nccl", True), ("gloo", False)])
def test_only_nccl_messages_are_slowed_by_a_gpu(backend, is_slowed):
    alone = SimpleNamespace(device="cuda")
    evidence = SimpleNamespace(alone=alone, backend=backend, most_on_host=4, ranks_at_hand=4)
    found = scaling._ScalingCurve.find_contention(SimpleNamespace(evidence=evidence), 2)
    assert found.compute_rates[0] < 1
    assert (found.message_rates[0] < 1) == is_slowed
