"""Steps on other networks and numbers of ranks: invariants for any network and manual sums."""

from __future__ import annotations

import csv
import io
import itertools
import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan import Gradient
from paceline.predict.curves import DRAWS as NUM_DRAWS
from paceline.predict.curves import Resample
from paceline.predict.job import Job, build_job_from_profile, draw_jobs
from paceline.predict.networks import AssumedFabric, Network, build_measured_fabric, build_sweeps, find_network
from paceline.predict.predictor import RankCosts, find_evidence, fit_rank
from paceline.predict.scaling import estimate_wait
from paceline.predict.whatif import build_comm_table, describe_scenario, simulate_what_if
from paceline.report.plots import render_png
from paceline.report.prediction_rows import WHAT_IF
from paceline.report.predictions import plot_efficiency
from paceline.report.table import Table

from .made_tuning import MadeJob
from .test_records_layers import build_profile

MIB = 2**20
READY = (0.2, 0.4, 0.6, 0.8)
JOB = Job(tuple(Gradient(f"layer {number}", 40 * MIB) for number in range(4)), READY, 0.8, 0.3, 0.1)
DRAWS = [replace(JOB, before_s=before_s) for before_s in (0.29, 0.3, 0.31)]


def join(latency_s: float = 0.0, rate: float = 1e30, **options) -> AssumedFabric:
    network = Network("net", latency_s, rate, "made up")
    return AssumedFabric(network, network, **options)


def simulate(fabric, ranks, job=JOB, **scenario):
    draws = [replace(draw, gradients=job.gradients) for draw in DRAWS]
    return simulate_what_if(job, draws, fabric, ranks, **scenario)


@given(st.sampled_from([1, 2, 64, 16384]), st.integers(1, 4))
def test_a_free_network_gives_the_local_step(world_size, count):
    (row,) = simulate(join(), [world_size], accumulate=count)
    assert row.step_s == pytest.approx(1.2 + (count - 1) * 1.1) and row.efficiency == pytest.approx(1.0)
    assert row.exposed_s == pytest.approx(0, abs=1e-9) and row.bound == "compute" and row.keeps_default


def test_accumulation_adds_local_passes_and_nothing_else():
    fabric = join(1e-4, 1e9)
    for count in (2, 5):
        (once,), (several,) = simulate(fabric, [8]), simulate(fabric, [8], accumulate=count)
        assert several.step_s - once.step_s == pytest.approx((count - 1) * (0.3 + 0.8))
        assert several.exposed_s == pytest.approx(once.exposed_s)
        assert several.efficiency > once.efficiency
    assert JOB.accumulate(1) == JOB


@given(st.floats(0, 1e-3), st.floats(1e7, 1e12), st.lists(st.integers(1, 20_000), min_size=2, max_size=4))
def test_efficiency_never_grows_with_ranks(latency_s, rate, ranks):
    for algorithm in ("auto", "ring", "tree"):
        rows = simulate(join(latency_s, rate, algorithm=algorithm), sorted(ranks))
        for fewer, more in itertools.pairwise(rows):
            # Among plans within 0.1 %, the one with the fewest buckets is chosen.
            assert more.efficiency <= fewer.efficiency * (1 + 2e-3)
        for row in rows:
            assert 0 < row.efficiency <= 1 + 1e-9 and row.low_s <= row.step_s <= row.high_s
            assert row.efficiency_bounds[0] <= row.efficiency <= row.efficiency_bounds[1] <= 1 + 1e-9
            assert row.plateau[0] <= row.cap_bytes <= row.plateau[1]
            assert row.step_s == pytest.approx(row.local_s + row.exposed_s + row.straggler_s)


def test_a_row_by_hand():
    """Each gradient takes 0.1 s on 2 ranks, and one becomes ready every 0.2 s: only the last one is exposed."""
    (row,) = simulate(join(rate=400 * MIB), [2])
    assert (row.exposed_s, row.num_buckets) == (pytest.approx(0.1), 4)
    assert (row.bound, row.algorithm, row.gain) == ("bucket 4 of 4 (40 MiB)", "ring", pytest.approx(0))
    assert row.keeps_default and row.doubt == "" and row.source == "simulated"
    # Messages of 0.4 s queue: after the first, one is always waiting.
    (row,) = simulate(join(rate=100 * MIB), [2])
    assert row.exposed_s == pytest.approx(0.2 + 4 * 0.4 - 0.8) and row.bound == "network, from bucket 1 of 4"


def test_high_latency_needs_larger_buckets_than_the_default():
    (row,) = simulate(join(latency_s=0.05, rate=1e12, algorithm="ring"), [8])
    assert row.plateau[0] > 40 * MIB and row.gain > 0.1 and not row.keeps_default


def test_half_the_bytes_take_half_the_time():
    half = replace(JOB, gradients=tuple(Gradient(g.name, g.num_bytes // 2, 2) for g in JOB.gradients))
    (whole,), (less,) = simulate(join(rate=1e8), [8]), simulate(join(rate=1e8), [8], job=half)
    assert less.exposed_s + 0.6 == pytest.approx((whole.exposed_s + 0.6) / 2)


def test_a_step_waits_for_the_slowest_rank():
    rows = simulate(join(), [1, 8, 16384], accumulate=2, spread=0.03)
    computing_s = 2 * (0.3 + 0.8)
    for row in rows:
        assert row.straggler_s == pytest.approx(computing_s * estimate_wait(0.03, row.world_size))
        assert row.step_s == pytest.approx(row.local_s + row.straggler_s)
    assert rows[0].straggler_s == 0 < rows[1].straggler_s < rows[2].straggler_s
    assert rows[2].bound == "the slowest rank"


def test_all_ranks_take_the_steps_of_a_rank_that_is_always_slower():
    alone, several = simulate(join(), [1, 8], slow=0.2)
    assert (alone.step_s, alone.straggler_s) == (pytest.approx(1.2), 0.0)
    assert several.step_s == pytest.approx(1.2 * 1.2) and several.efficiency == pytest.approx(1 / 1.2)
    assert several.straggler_s == pytest.approx(0.2 * 1.2) and several.bound == "the slowest rank"
    # The slow rank's longer backward hides more messages: the step grows by less than 20 %.
    plain, slow = (simulate(join(rate=400 * MIB), [8], slow=share)[0] for share in (0.0, 0.2))
    assert slow.exposed_s <= plain.exposed_s + 1e-9 and slow.neighbours_s == pytest.approx(0, abs=1e-9)
    assert slow.step_s == pytest.approx(slow.local_s + slow.exposed_s + slow.straggler_s)
    # Random delays add less to this step than with equal ranks, because any of those may be the slowest.
    (varied,) = simulate(join(), [8], slow=0.2, spread=0.03)
    assert 0 < varied.step_s - several.step_s < simulate(join(), [8], spread=0.03)[0].straggler_s


def test_the_wait_for_a_slow_rank_among_random_delays_agrees_with_sampling():
    sigma, source = 0.05, random.Random(1)
    spread = math.sqrt((math.exp(sigma**2) - 1) * math.exp(sigma**2))
    for slow in (0.001, 0.05, 0.5):
        drawn = [max(source.lognormvariate(0, sigma) * (1 + slow * (n == 0)) for n in range(8)) for _ in range(8000)]
        wanted = statistics.fmean(drawn) - (1 + slow) * math.exp(sigma**2 / 2)
        assert estimate_wait(spread, 8, slow) == pytest.approx(wanted, abs=2e-3)
    assert estimate_wait(spread, 8, 1e-9) == pytest.approx(estimate_wait(spread, 8), abs=1e-4)


def test_the_interval_is_of_the_profile_and_of_the_network():
    (quick, slow) = (simulate(join(rate=rate), [8])[0] for rate in (1e30, 1e8))
    assert (quick.low_s, quick.high_s) == (pytest.approx(1.19, abs=2e-3), pytest.approx(1.21, abs=2e-3))
    assert (slow.high_s - slow.low_s) / slow.step_s > 0.1


@pytest.mark.parametrize("options", [{"accumulate": 0}, {"spread": 1.5}, {"slow": -0.1}])
def test_impossible_values_are_refused(options):
    with pytest.raises(ConfigError):
        simulate(join(), [8], **options)


def test_the_table_marks_simulated_rows_and_their_warnings():
    rows = simulate(join(1e-4, 1e9), [2, 8])
    rows[1] = replace(rows[1], doubt="nobody knows")
    table = Table("table", "steps", WHAT_IF, rows)
    text = table.markdown()
    assert "| net | 2 | ring |" in text and "simulated |" in text and "simulated, doubtful |" in text
    (first, second) = csv.DictReader(io.StringIO(table.csv()))
    assert (first["doubt"], second["doubt"]) == ("", "nobody knows")
    assert float(first["step_s"]) == rows[0].step_s and first["source"] == "simulated"
    assert render_png(plot_efficiency(rows, "title", "subtitle")).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("scenario", "options", "words"),
    [
        ({}, {}, "all ranks are equally fast"),
        ({"spread": 0.03}, {}, "vary by 3.0%"),
        ({"accumulate": 4}, {}, "4 micro-batches"),
        ({}, {"algorithm": "gloo"}, "two at a time"),
    ],
)
def test_assumptions_are_listed(scenario, options, words):
    assert words in "\n".join(describe_scenario(JOB, [join(**options)], **scenario))


# -- the table of communication against computation --------------------------------------------------------------------


TEN = Network("ten", 1e-3, 1e3, "a round one")


@pytest.fixture
def sweep(build_collective, build_samples):
    records = [
        build_collective(world_size=4, num_bytes=size, timing=build_samples(1e-3 + size / 1e9, ranks=4))
        for size in (10**6, 10**7, 10**8)
    ]
    alone = build_collective(backend="nccl", world_size=4, num_bytes=4)  # a single size does not define a curve
    (found,) = build_sweeps([*records, alone, build_collective(collective="broadcast")])
    return found


def test_the_comm_table_has_a_row_for_each_network_and_number_of_ranks(sweep):
    rows = build_comm_table(build_profile(), [TEN], [sweep], [2, 4])
    assert [(row.step.network, row.step.world_size) for row in rows] == [("ten", 2), ("ten", 4), ("gloo", 4)]
    with pytest.raises(ConfigError, match=r"gloo .*2, 8 ranks"):
        build_comm_table(build_profile(), [], [sweep], [2, 8])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("world_size", [1, 2, 4, 64])
def test_the_comm_table_agrees_with_predict(device, world_size, build_collective, build_samples):
    """The same profile, network and ranks yield the same step, exposed time and interval."""
    profile = build_profile(device=device)
    sweep = (
        build_measured_fabric(
            [
                build_collective(
                    world_size=world_size, num_bytes=size, timing=build_samples(0.01 * size, ranks=world_size)
                )
                for size in (10, 40, 80)
            ],
            None,
        )
        if world_size > 1
        else None
    )
    rows = build_comm_table(profile, [TEN, find_network("1gbe")], [sweep] if sweep else [], [world_size])
    job = build_job_from_profile(profile)
    fabrics = [*(AssumedFabric(network, find_network("nvlink")) for network in (TEN, find_network("1gbe")))]
    fabrics += [sweep] if sweep else []
    draws = draw_jobs(profile, job, NUM_DRAWS)
    assert [[row.step] for row in rows] == [simulate_what_if(job, draws, fabric, [world_size]) for fabric in fabrics]
    if world_size > 1:
        assert all(row.step.exposed_s > 0 for row in rows)
    for row, fabric in zip(rows, fabrics, strict=True):
        assert row.step.message_s == fabric.build_curve(world_size).estimate_s(68)
        assert row.step.overhead == pytest.approx(row.step.message_s / (row.step.message_s + job.local_s))


def test_messages_use_a_core_on_a_host_and_none_on_a_link(sweep):
    job = replace(JOB, device="cpu")
    lines = "\n".join(describe_scenario(job, [join(), sweep]))
    assert "contention on net: assumed: messages over a link use no CPU core" in lines
    assert "contention on gloo: assumed: a message between ranks of a full CPU host uses half" in lines
    (here,), (free,) = (simulate_what_if(one, [], sweep, [4]) for one in (job, replace(JOB, device="")))
    assert here.step_s > free.step_s * 1.02 and here.local_s == free.local_s


def test_a_sweep_over_several_nodes_is_a_link(sweep):
    job = replace(JOB, device="cpu")
    for per_node, is_link in ((0, False), (1, True), (2, True), (4, False)):
        lines = "\n".join(describe_scenario(job, [replace(sweep, ranks_per_node=per_node)]))
        assert ("messages over a link use no CPU core" in lines) == is_link
    (here,), (apart,) = (simulate_what_if(job, [], replace(sweep, ranks_per_node=n), [4]) for n in (4, 1))
    assert apart.step_s < here.step_s


# -- the contents of a profile ----------------------------------------------------------------------------------------


MADE = MadeJob(disturbed=((MIB, 0.8, 0.9),))


def predict_made(fabric, ranks, made=MADE, **options):
    records = made.build_carried(**options)
    job = build_job_from_profile(records[-1] if not options else next(r for r in records if r.kind == "layer_profile"))
    return simulate_what_if(job, [job] * 3, fabric, ranks, evidence=find_evidence(records))


def test_a_profile_measures_costs_that_hold_on_any_network():
    rank = fit_rank(find_evidence(MADE.build_carried(slowed=1.3)))
    assert rank.launch_s == pytest.approx(MADE.launch_s) and rank.gather_s_per_byte * MADE.num_bytes == pytest.approx(
        0.002
    )
    assert rank.contention.rates(MIB) == pytest.approx((0.8, 0.9)) and rank.wrapper == "paceline"
    assert rank.contention.alone_s == pytest.approx((MADE.message_s(MIB),))
    assert rank.neighbors == ((2, 1.0), (4, pytest.approx(1.3)))
    layers = [record for record in MADE.build_carried() if record.kind == "layer_profile"]
    assert find_evidence(layers) is None


def test_messages_that_delay_more_than_they_overlap_do_not_measure_contention():
    made = replace(MADE, disturbed=((64 * 1024, -0.3, 0.9), (MIB, 0.8, 0.9)), noise=0.05)
    for resample in (None, *(Resample(random.Random(seed)) for seed in range(5))):
        rank = fit_rank(find_evidence(made.build_carried()), resample)
        assert (rank.contention.sizes, rank.too_short) == ((MIB,), (64 * 1024,))
    only = find_evidence(replace(made, disturbed=made.disturbed[:1]).build_carried())
    assert all(fit_rank(only, Resample(random.Random(seed))).contention is None for seed in range(5))
    lines = describe_scenario(replace(JOB, device="cpu"), [join()], evidence=only)
    assert any("could not be measured with messages of 64 KiB" in line for line in lines)
    assert any(line.startswith("contention on net: assumed") for line in lines)
    assert not any("of its normal speed" in line for line in lines)


def test_a_number_of_ranks_that_was_measured_twice_is_one_neighbor():
    records = MADE.build_carried(slowed=1.3)
    rank = fit_rank(find_evidence([*records, records[-1]]))
    assert rank.neighbors == ((2, 1.0), (4, pytest.approx(1.3)))
    (row,) = predict_made(join(ranks_per_node=8), [8], slowed=1.3)
    job = build_job_from_profile(next(r for r in records if r.kind == "layer_profile"))
    evidence = find_evidence([*records, records[-1]])
    assert simulate_what_if(job, [job] * 3, join(ranks_per_node=8), [8], evidence=evidence) == [row]


def test_copies_and_launches_are_part_of_a_predicted_step():
    free = replace(MADE, gather_s=0.0, launch_s=0.0, disturbed=())
    (here,), (there,) = (predict_made(join(), [8], made) for made in (replace(MADE, disturbed=()), free))
    # With free messages, one bucket is best: one launch, and all the copies.
    assert here.step_s - there.step_s == pytest.approx(MADE.gather_s + MADE.launch_s)
    assert there.step_s == pytest.approx(MADE.plain_s) and here.num_buckets == 1
    (alone,) = predict_made(join(), [1])
    assert alone.step_s == pytest.approx(MADE.plain_s) and alone.exposed_s == pytest.approx(0, abs=1e-12)


def test_the_measured_slowdown_of_ranks_on_a_host_is_used():
    one, four, eight = predict_made(join(ranks_per_node=8), [2, 4, 8], slowed=1.3)
    assert (one.neighbours_s, four.neighbours_s) == (0.0, pytest.approx(0.3 * MADE.plain_s))
    assert eight.neighbours_s == pytest.approx(0.9 * MADE.plain_s)  # on the fitted line: 1, 1.3, 1.9
    assert four.bound == "contention between ranks of a host" and four.efficiency < 1 / 1.3
    (apart,) = predict_made(join(), [8], slowed=1.3)  # one rank per node
    assert apart.neighbours_s == 0


def test_an_unmeasured_slowdown_only_widens_the_interval():
    (here,), (there,) = (predict_made(join(ranks_per_node=count), [8]) for count in (8, 1))
    assert here.step_s == there.step_s and here.high_s > there.high_s * 1.02


def test_the_interval_includes_the_models_own_error():
    """One standard deviation is 10 % of the cost of communication; on an exact network nothing else varies."""

    class Certain(AssumedFabric):
        def draw(self, source, shift=None):
            return self

    network = Network("net", 0.0, 1e8, "made up")
    (row,) = simulate_what_if(JOB, [JOB] * 400, Certain(network, network), [8])
    width = (row.high_s - row.low_s) / 2
    assert row.exposed_s > 1 and width == pytest.approx(1.645 * 0.10 * row.exposed_s, rel=0.15)
    (hidden,) = simulate_what_if(JOB, [JOB] * 40, Certain(replace(network, bandwidth_bytes_per_s=1e30), network), [8])
    assert hidden.high_s - hidden.low_s < 1e-9


def test_a_gpu_profile_without_contention_uses_published_numbers():
    gpu = replace(JOB, device="cuda")
    lines = describe_scenario(gpu, [join()])
    assert any(line.startswith("contention on net: assumed: a GPU computes 18.9% longer") for line in lines)
    (here,), (there,) = (simulate_what_if(job, [job] * 50, join(rate=400 * MIB), [2]) for job in (gpu, JOB))
    # Three of four 0.1 s messages are hidden, which slows 0.3 s of compute; each message also takes longer meanwhile.
    slowed_s = 0.3 * 0.189 / 1.189
    assert slowed_s < here.exposed_s - there.exposed_s < slowed_s + 0.1 * (1 / 0.6 - 1)
    assert here.high_s - here.low_s > there.high_s - there.low_s
    assert "copies and launches are free" in lines and RankCosts().wrapper == ""


def test_a_sweep_on_one_host_has_neighboring_ranks(sweep):
    assert sweep.ranks == (4,)
    (four,) = predict_made(sweep, [4], slowed=1.3)
    assert four.neighbours_s == pytest.approx(0.3 * MADE.plain_s)
    nccl = replace(sweep, fits=tuple(replace(fit, algorithm="ring") for fit in sweep.fits))
    assert predict_made(nccl, [4], slowed=1.3)[0].neighbours_s == 0


def test_the_interval_of_a_network_has_its_quantiles_even_with_few_draws():
    fabric = join(0.0, 1e6)  # 160 MiB take far longer than the step
    (row,) = simulate_what_if(JOB, [JOB] * 50, fabric, [2])
    # The log of a large message's time has a standard deviation of 0.45; p5 and p95 are 1.645 of these away.
    sent_s = row.step_s - JOB.local_s
    assert (row.high_s - JOB.local_s) / sent_s == pytest.approx(math.exp(1.645 * 0.45), rel=0.25)
    assert (row.low_s - JOB.local_s) / sent_s == pytest.approx(math.exp(-1.645 * 0.45), rel=0.25)
