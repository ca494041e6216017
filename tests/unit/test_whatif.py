"""Steps on other networks and numbers of ranks: what must hold whatever the network, and sums done by hand."""

from __future__ import annotations

import csv
import io
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan import Gradient
from paceline.predict.fabrics import AssumedFabric
from paceline.predict.layerwise import LayerwiseModel
from paceline.predict.networks import Network
from paceline.predict.simulate import Backward
from paceline.predict.stragglers import estimate_wait
from paceline.predict.whatif import Scenario, accumulate, describe_scenario, simulate_what_if
from paceline.report.plots import render_png
from paceline.report.tables import render_csv, render_markdown
from paceline.report.whatif_tables import describe_doubts, plot_efficiency, whatif_row, whatif_table

MIB = 2**20
READY = (0.2, 0.4, 0.6, 0.8)
MODEL = LayerwiseModel(
    tuple(Gradient(f"layer {number}", 40 * MIB) for number in range(4)), READY, Backward(READY, 0.8, 0.3, 0.1), ()
)
DRAWS = [replace(MODEL.backward, before_s=before_s) for before_s in (0.29, 0.3, 0.31)]


def join(latency_s: float = 0.0, rate: float = 1e30, **options) -> AssumedFabric:
    network = Network("net", latency_s, rate, "made up")
    return AssumedFabric(network, network, **options)


def simulate(fabric, ranks, scenario=None, model=MODEL):
    return simulate_what_if(model, DRAWS, [fabric], ranks, scenario or Scenario())


@settings(deadline=None, max_examples=30)
@given(st.sampled_from([1, 2, 64, 16384]), st.integers(1, 4))
def test_on_a_network_that_takes_no_time_a_step_is_the_local_one(world_size, count):
    (row,) = simulate(join(), [world_size], Scenario(count))
    assert row.step_s == pytest.approx(1.2 + (count - 1) * 1.1) and row.efficiency == pytest.approx(1.0)
    assert row.exposed_s == pytest.approx(0, abs=1e-9) and row.bound == "compute" and row.keeps_default


def test_accumulation_adds_local_passes_and_nothing_else():
    fabric = join(1e-4, 1e9)
    for count in (2, 5):
        (once,), (several,) = simulate(fabric, [8]), simulate(fabric, [8], Scenario(count))
        assert several.step_s - once.step_s == pytest.approx((count - 1) * (0.3 + 0.8))
        assert several.exposed_s == pytest.approx(once.exposed_s)
        assert several.efficiency > once.efficiency
    assert accumulate(MODEL.backward, 1) == MODEL.backward


@settings(deadline=None, max_examples=25)
@given(st.floats(0, 1e-3), st.floats(1e7, 1e12), st.lists(st.integers(1, 20_000), min_size=2, max_size=4))
def test_efficiency_never_grows_with_ranks(latency_s, rate, ranks):
    for algorithm in ("auto", "ring", "tree"):
        rows = simulate(join(latency_s, rate, algorithm=algorithm), sorted(ranks))
        for fewer, more in itertools.pairwise(rows):
            # Of plans within a thousandth the one with the fewest buckets is taken.
            assert more.efficiency <= fewer.efficiency * (1 + 2e-3)
        for row in rows:
            assert 0 < row.efficiency <= 1 + 1e-9 and row.low_s <= row.step_s <= row.high_s
            assert row.efficiency_low <= row.efficiency <= row.efficiency_high <= 1 + 1e-9
            assert row.plateau_low_bytes <= row.best_cap_bytes <= row.plateau_high_bytes
            assert row.step_s == pytest.approx(row.local_s + row.exposed_s + row.straggler_s)


def test_a_row_by_hand():
    """Each gradient takes 0.1 s on 2 ranks, and the next is ready after 0.2 s: only the last one is exposed."""
    (row,) = simulate(join(rate=400 * MIB), [2])
    assert (row.exposed_s, row.num_buckets) == (pytest.approx(0.1), 4)
    assert (row.bound, row.algorithm, row.gain) == ("bucket 4 of 4 (40 MiB)", "ring", pytest.approx(0))
    assert row.keeps_default and row.doubt == "" and row.source == "simulated"
    # At 0.4 s each they queue: from the first on there is always one waiting.
    (row,) = simulate(join(rate=100 * MIB), [2])
    assert row.exposed_s == pytest.approx(0.2 + 4 * 0.4 - 0.8) and row.bound == "network, from bucket 1 of 4"


def test_large_latencies_ask_for_larger_buckets_than_the_default():
    (row,) = simulate(join(latency_s=0.05, rate=1e12, algorithm="ring"), [8])
    assert row.plateau_low_bytes > 40 * MIB and row.gain > 0.1 and not row.keeps_default


def test_half_the_bytes_are_sent_in_half_the_time():
    half = replace(MODEL, gradients=tuple(Gradient(g.name, g.num_bytes // 2, 2) for g in MODEL.gradients))
    (whole,), (less,) = simulate(join(rate=1e8), [8]), simulate(join(rate=1e8), [8], model=half)
    assert less.exposed_s + 0.6 == pytest.approx((whole.exposed_s + 0.6) / 2)


def test_the_slowest_rank_is_waited_for():
    rows = simulate(join(), [1, 8, 16384], Scenario(2, 0.03))
    computing_s = 2 * (0.3 + 0.8)
    for row in rows:
        assert row.straggler_s == pytest.approx(computing_s * estimate_wait(0.03, row.world_size))
        assert row.step_s == pytest.approx(row.local_s + row.straggler_s)
    assert rows[0].straggler_s == 0 < rows[1].straggler_s < rows[2].straggler_s
    assert rows[2].bound == "the slowest rank"


def test_the_interval_is_of_the_profile_and_of_the_network():
    (quick, slow) = (simulate(join(rate=rate), [8])[0] for rate in (1e30, 1e8))
    assert (quick.low_s, quick.high_s) == (pytest.approx(1.19, abs=2e-3), pytest.approx(1.21, abs=2e-3))
    assert (slow.high_s - slow.low_s) / slow.step_s > 0.1


@pytest.mark.parametrize(
    "call", [lambda: simulate(join(), [0]), lambda: simulate(join(), []), lambda: Scenario(0), lambda: Scenario(1, 1.5)]
)
def test_what_cannot_be_is_refused(call):
    with pytest.raises(ConfigError):
        call()


def test_the_table_says_what_is_simulated_and_why_not_to_trust_it():
    rows = simulate(join(1e-4, 1e9), [2, 8])
    rows[1] = replace(rows[1], doubt="nobody knows")
    text = render_markdown(whatif_table, rows)
    assert "| net | 2 | ring |" in text and "simulated |" in text and "simulated, doubtful |" in text
    assert describe_doubts(rows) == ["doubtful: net on 8 ranks: nobody knows"]
    (first, _) = csv.DictReader(io.StringIO(render_csv([whatif_row(row) for row in rows])))
    assert float(first["step_s"]) == rows[0].step_s and first["source"] == "simulated"
    assert render_png(plot_efficiency(rows, "title", "subtitle")).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("scenario", "options", "words"),
    [
        (Scenario(), {}, "all ranks equally fast"),
        (Scenario(spread=0.03), {}, "varies by 3.0%"),
        (Scenario(accumulate=4), {}, "4 micro-batches"),
        (Scenario(), {"algorithm": "gloo"}, "two at a time"),
    ],
)
def test_what_is_assumed_is_said(scenario, options, words):
    assert words in "\n".join(describe_scenario(scenario, [join(**options)]))
