"""Networks by name, all-reduces on them, and the table of communication against computation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.predict.comm_table import CommRow, ModelStep, build_comm_table, build_model_step
from paceline.predict.networks import (
    NETWORKS,
    MeasuredNetwork,
    Network,
    build_measured_networks,
    estimate_allreduce,
    find_network,
)
from paceline.report.comm_tables import comm_row, comm_table, describe_assumptions
from paceline.report.tables import render_markdown

from .test_layer_profile import build as build_profile

TEN = Network("ten", 1e-3, 1e9, "a round one")


@pytest.mark.parametrize(
    ("num_bytes", "ranks", "seconds"),
    [
        (10**9, 1, 0.0),
        (0, 8, 0.0),
        (10**9, 2, 2e-3 + 1.0),
        (10**9, 4, 6e-3 + 1.5),
        (4 * 10**6, 8, 14e-3 + 7e-3),
    ],
)
def test_a_ring_takes_its_latencies_and_its_bytes(num_bytes, ranks, seconds):
    assert estimate_allreduce(num_bytes, ranks, TEN) == pytest.approx(seconds)


def test_gpt2_on_ten_gigabit():
    # 4 MB on 8 ranks at 1.25 GB/s: 7/4 of 3.2 ms, and 14 latencies of 30 µs.
    assert estimate_allreduce(4 * 10**6, 8, find_network("10gbe")) == pytest.approx(5.6e-3 + 0.42e-3)


@pytest.mark.parametrize(("num_bytes", "ranks"), [(-1, 2), (4, 0)])
def test_an_impossible_allreduce_is_refused(num_bytes, ranks):
    with pytest.raises(ConfigError, match=f"{num_bytes} bytes on {ranks} ranks"):
        estimate_allreduce(num_bytes, ranks, TEN)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_every_network_is_found_by_its_name_and_says_what_it_assumes(network):
    assert find_network(f" {network.name.upper()}") is network
    assert network.note in network.assumption
    assert network.assumption.startswith("ring")


def test_infiniband_is_in_bits():
    assert find_network("hdr").bandwidth_bytes_per_s == 200e9 / 8


@pytest.mark.parametrize(
    ("text", "rate", "latency_s"),
    [
        ("10Gb/s,50us", 1.25e9, 50e-6),
        ("10 Gbit/s, 50 µs", 1.25e9, 50e-6),
        ("1.25GB/s,50us", 1.25e9, 50e-6),
        ("800Mb/s,0.5ms", 1e8, 0.5e-3),
        ("1TB/s,0s", 1e12, 0.0),
    ],
)
def test_a_network_can_be_written(text, rate, latency_s):
    network = find_network(text)
    assert network.bandwidth_bytes_per_s == pytest.approx(rate)
    assert network.latency_s == pytest.approx(latency_s)
    assert network.name == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10gb", "did you mean 10gbe"),
        ("nvlnk", "did you mean nvlink"),
        ("carrier pigeon", "known are nvlink, pcie4, hdr, 100gbe, 10gbe, 1gbe, or write"),
        ("10Gb/s", "rate and latency as 10Gb/s,50us"),
        ("0Gb/s,50us", "bandwidth above 0"),
    ],
)
def test_an_unknown_network_is_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        find_network(text)


@pytest.fixture
def measured(build_collective, build_samples):
    records = [
        build_collective(world_size=4, num_bytes=size, timing=build_samples(1e-3 + size / 1e9, ranks=4))
        for size in (10**6, 10**7, 10**8)
    ]
    (network,) = build_measured_networks([*records, build_collective(collective="broadcast")])
    return network


def test_measured_allreduces_are_a_network_for_their_ranks(measured):
    assert isinstance(measured, MeasuredNetwork)
    assert (measured.name, measured.world_size) == ("gloo cpu", 4)
    assert estimate_allreduce(5 * 10**7, 4, measured) == pytest.approx(0.051)
    assert "3 measured all-reduces on 4 ranks" in measured.assumption
    with pytest.raises(ConfigError, match="measured on 4 ranks and is asked for 8"):
        estimate_allreduce(5 * 10**7, 8, measured)


STEP = ModelStep("toy", 10**9, 3.0, 1.0)


def test_the_table_has_a_row_for_each_model_network_and_number_of_ranks(measured):
    rows = build_comm_table([STEP, STEP], [TEN, measured], [2, 4])
    assert [(row.network, row.world_size) for row in rows] == [("ten", 2), ("ten", 4), ("gloo cpu", 4)] * 2
    with pytest.raises(ConfigError, match="measured on 4 ranks, not on 2, 8"):
        build_comm_table([STEP], [measured], [2, 8])


@pytest.mark.parametrize(
    ("comm_s", "backward_s", "overhead", "exposed_s", "exposed"),
    [
        (1.0, 1.0, 0.25, 0.0, 0.0),
        (3.0, 1.0, 0.5, 2.0, 0.4),
        (3.0, 0.0, 0.5, 3.0, 0.5),
        (0.0, 1.0, 0.0, 0.0, 0.0),
        (1.0, None, 0.25, None, None),
    ],
)
def test_overhead_is_a_share_of_the_step_with_and_without_overlap(comm_s, backward_s, overhead, exposed_s, exposed):
    row = CommRow(ModelStep("toy", 4, 3.0, backward_s), "ten", 2, comm_s, "")
    assert row.overhead == pytest.approx(overhead)
    assert row.exposed_s == exposed_s
    assert row.exposed_overhead == (None if exposed is None else pytest.approx(exposed))
    assert row.source == "simulated"


@given(
    st.integers(1, 2**40), st.integers(0, 2**40), st.integers(1, 500), st.integers(0, 500),
    st.sampled_from(NETWORKS), st.floats(1e-6, 1e3), st.floats(0, 1),
)  # fmt: skip
def test_more_bytes_and_more_ranks_never_cost_less(num_bytes, more, ranks, others, network, compute_s, share):
    steps = [ModelStep("toy", size, compute_s, share * compute_s) for size in (num_bytes, num_bytes + more)]
    counts = (ranks, ranks + others)
    small, wide, large, both = build_comm_table(steps, [network], counts)
    for less, row in ((small, wide), (small, large), (wide, both), (large, both)):
        assert less.comm_s <= row.comm_s * (1 + 1e-12)
        assert less.overhead <= row.overhead + 1e-12
        assert less.exposed_overhead <= row.exposed_overhead + 1e-12
        assert 0 <= row.exposed_overhead <= row.overhead + 1e-12 < 1 + 1e-9


def test_a_profile_gives_the_step_of_its_model():
    step = build_model_step(build_profile())
    assert step == ModelStep("toy", 68, 1.5, 0.75, "measured")


@pytest.mark.parametrize("values", [(0, 1.0, 0.5), (4, 0.0, 0.0), (4, 1.0, 2.0), (4, 1.0, -1.0)])
def test_an_impossible_step_is_refused(values):
    with pytest.raises(ConfigError, match="toy with"):
        ModelStep("toy", *values)


def test_the_table_prints_what_is_simulated_and_from_what():
    rows = build_comm_table([STEP, ModelStep("bare", 2**20, 1.0)], [TEN], [2])
    text = render_markdown(comm_table, rows)
    assert "| toy | 953.67 MiB | ten | 2 | 3000 | 1002 | 25.0% | 0.1% | compute given, comm simulated |" in text
    assert "| bare | 1 MiB | ten | 2 | 1000 | 3.0486 | 0.3% |  |" in text
    assert comm_row(rows[0])["assumption"] == TEN.assumption
    lines = describe_assumptions(rows)
    assert lines[0] == "ten: ring, 1.00 GB/s and 1 ms between neighbours (a round one)"
    assert len(lines) == 2
