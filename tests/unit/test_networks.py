"""Networks by name and sweeps that were measured, for any number of ranks."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from paceline.errors import ConfigError, RecordError
from paceline.predict.curves import FamilyCurve
from paceline.predict.networks import (
    NETWORKS,
    AssumedFabric,
    Network,
    build_measured_fabric,
    find_network,
    find_networks,
)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_every_network_is_found_by_its_name_and_says_what_it_assumes(network):
    assert find_network(f" {network.name.upper()}") is network
    assert network.note in AssumedFabric(network, network).assumptions[0]


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


OUT = Network("out", 1e-5, 1e9, "slow")
IN = Network("in", 1e-6, 1e11, "quick")
SIZES = (1000, 10**6, 10**8)


def test_networks_are_listed_by_commas_each_once():
    assert [network.name for network in find_networks("hdr, 10Gb/s,50us ,10GBE,hdr")] == ["hdr", "10Gb/s,50us", "10gbe"]
    with pytest.raises(ConfigError, match="names none"):
        find_networks(" , ")


def test_one_rank_per_node_knows_no_inside():
    curve = AssumedFabric(OUT, IN).build_curve(8)
    ring, tree = (FamilyCurve(name, 8, 1e-5, 1e9) for name in ("ring", "tree"))
    for size in SIZES:
        assert curve.estimate_s(size) == min(ring.estimate_s(size), tree.estimate_s(size))


@pytest.mark.parametrize("algorithm", ["auto", "ring", "tree", "two-level", "gloo"])
@pytest.mark.parametrize("world_size", [1, 2, 8, 9, 64, 16384])
def test_auto_is_never_slower_than_an_algorithm_that_it_may_take(algorithm, world_size):
    auto = AssumedFabric(OUT, IN, 8).build_curve(world_size)
    other = AssumedFabric(OUT, IN, 8, algorithm).build_curve(world_size)
    for size in SIZES:
        assert auto.estimate_s(size) <= other.estimate_s(size)
    assert (auto.estimate_s(10**6) == 0) == (world_size == 1)


def test_a_node_that_holds_all_ranks_uses_its_inside():
    full, beyond = (AssumedFabric(OUT, IN, 8).build_curve(count) for count in (8, 9))
    assert full.explain(10**8)[0] == "ring inside"
    assert beyond.estimate_s(10**8) > 10 * full.estimate_s(10**8)


def test_a_flat_algorithm_is_as_slow_as_the_slower_of_two_networks():
    curve = AssumedFabric(IN, OUT, 8, "ring").build_curve(64)
    assert curve.estimate_s(10**8) == FamilyCurve("ring", 64, 1e-5, 1e9).estimate_s(10**8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8, "shared"), "shared memory is no network"),
        ((1, "two-level"), "one level"),
        ((0, "auto"), "0 ranks per node"),
    ],
)
def test_contradictions_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        AssumedFabric(OUT, IN, *arguments)


@pytest.fixture
def sweep(build_collective, build_samples):
    """All-reduces that take exactly what gloo's family says, with a spread of 1 % over the repetitions."""

    def build(worlds=(2, 4), algorithm="gloo", **changes):
        records = []
        for world in worlds:
            for size in SIZES:
                seconds = FamilyCurve(algorithm, world, 1e-4, 1e9).estimate_s(size)
                timing = build_samples(*(seconds * factor for factor in (0.99, 1.0, 1.01)), ranks=world)
                records.append(build_collective(world_size=world, num_bytes=size, timing=timing, **changes))
        return records

    return build


@pytest.mark.parametrize("algorithm", ["auto", "gloo"])
def test_a_sweep_serves_its_own_ranks_and_others_by_its_family(sweep, algorithm):
    fabric = build_measured_fabric(sweep(), None, algorithm)
    assert (fabric.name, fabric.ranks, fabric.servers) == ("gloo", (2, 4), 2)
    for world in (2, 4, 16, 1024):
        for size in SIZES:
            expected = FamilyCurve("gloo", world, 1e-4, 1e9).estimate_s(size)
            assert fabric.build_curve(world).estimate_s(size) == pytest.approx(expected, rel=1e-6)
    assert fabric.build_curve(4).explain(10**6)[0] == "measured"
    assert fabric.build_curve(1024).explain(10**6)[0] == "gloo, measured on 4"
    assert fabric.build_curve(4).explain(10**6)[1] == "" != fabric.build_curve(1024).explain(10**6)[1]
    assert fabric.build_curve(1).estimate_s(10**6) == 0


def test_a_size_is_doubted_by_what_was_measured_on_those_ranks(sweep):
    curve = build_measured_fabric([*sweep((2,)), *sweep((4,))[:2]], None).build_curve(4)
    assert curve.explain(2 * 10**6)[1] == "" and "largest measured size" in curve.explain(10**7)[1]


@pytest.mark.parametrize(
    ("backend", "families"),
    [("gloo", ["gloo"]), ("paceline", ["shared"]), ("shm", ["shared"]), ("nccl", ["ring", "tree"])],
)
def test_each_backend_follows_its_own_family(sweep, backend, families):
    fabric = build_measured_fabric(sweep(backend=backend), backend)
    assert [fit.algorithm for fit in fabric.fits] == families


@pytest.mark.parametrize(("measured", "wanted"), [("shm", "paceline"), ("paceline", "shm")])
def test_the_old_name_of_the_shared_memory_backend_still_finds_it(sweep, measured, wanted):
    assert build_measured_fabric([*sweep(), *sweep(backend=measured)], wanted).name == measured


def test_the_further_away_the_less_is_known(sweep):
    fabric = build_measured_fabric(sweep(), None)
    source = random.Random(3)
    draws = [fabric.draw(source) for _ in range(100)]

    def width(world: int) -> float:
        times = sorted(math.log(draw.build_curve(world).estimate_s(10**6)) for draw in draws)
        return times[94] - times[5]

    assert 0 < width(4) < 0.05 < width(8) < width(64) < width(1024)


def test_a_draw_of_an_unstable_size_is_one_repetition(sweep, build_samples):
    calm, *others = sweep(worlds=(2,))
    wild = replace(others[0], timing=build_samples(*(others[0].time_s * factor for factor in (0.5, 1.0, 2.0)), ranks=2))
    fabric = build_measured_fabric([calm, wild, *others[1:]], None)
    source = random.Random(3)
    draws = [fabric.draw(source).sweeps[2] for _ in range(50)]
    assert {len(draw[calm.num_bytes]) for draw in draws} == {3} and {len(draw[wild.num_bytes]) for draw in draws} == {1}
    times = [draw[wild.num_bytes][0] / wild.time_s for draw in draws]
    assert sorted(set(times)) == pytest.approx([0.5, 1.0, 2.0])


def test_shared_memory_is_preferred_for_the_backend_that_has_it(sweep):
    ordinary, shared = sweep(backend="paceline"), sweep(backend="paceline", algorithm="shared", memory="shared")
    fabric = build_measured_fabric([*ordinary, *shared, *sweep()], "paceline")
    assert fabric.name == "paceline (shared)"
    assert fabric.build_curve(4).estimate_s(10**6) == pytest.approx(4e-4 + 8e-3)


@pytest.mark.parametrize(
    ("make", "backend", "algorithm", "error", "words"),
    [
        (lambda s: [*s(), *s(backend="nccl")], None, "auto", ConfigError, "gloo on cpu in float32; nccl on cpu"),
        (lambda s: [*s(), *s(dtype="bfloat16")], "gloo", "auto", ConfigError, "several curves"),
        (lambda s: s(), "nccl", "auto", ConfigError, "there is gloo"),
        (lambda s: s(), None, "two-level", ConfigError, "cannot be fitted to one sweep"),
        (lambda s: s(collective="broadcast"), None, "auto", RecordError, "no all-reduce"),
        (lambda s: [], None, "auto", RecordError, "no all-reduce"),
        (lambda s: s()[:1], None, "auto", RecordError, "two or more sizes"),
        (lambda s: [s()[0], s()[4]], None, "auto", RecordError, "one size for each number of ranks"),
        (lambda s: s(), None, "rnig", ConfigError, "did you mean ring"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_serve_is_refused(sweep, make, backend, algorithm, error, words):
    with pytest.raises(error, match=words):
        build_measured_fabric(make(sweep), backend, algorithm)
