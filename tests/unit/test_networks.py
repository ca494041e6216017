"""Named networks and measured sweeps, for any number of ranks."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from paceline.errors import ConfigError, RecordError
from paceline.predict.curves import FamilyCurve, join_levels
from paceline.predict.networks import (
    FIRST_NODE,
    NETWORKS,
    SITE_FACTOR,
    AssumedFabric,
    Correction,
    Network,
    build_measured_fabric,
    build_public_fabric,
    describe_uncertainty,
    find_links,
    find_network,
    find_networks,
    list_networks,
)
from paceline.records import Summary


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
        ("carrier pigeon", "use one of nvlink, .*10gbe, 1gbe, a100-nvlink, .*, or a rate"),
        ("10Gb/s", "rate and latency such as 10Gb/s,50us"),
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
    with pytest.raises(ConfigError, match="is empty"):
        find_networks(" , ")


def test_one_rank_per_node_ignores_the_inside():
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
        ((8, "shared"), "shared memory is not a network"),
        ((1, "two-level"), "one level"),
        ((0, "auto"), "--ranks-per-node 0"),
    ],
)
def test_contradictions_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        AssumedFabric(OUT, IN, *arguments)


@pytest.fixture
def sweep(build_collective, build_samples):
    """All-reduces that take exactly the time of gloo's family, with a spread of 1 % over the repetitions."""

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
    assert fabric.build_curve(1024).explain(10**6)[0] == "scaled from 4 ranks as gloo"
    assert fabric.build_curve(4).explain(10**6)[1] == "" != fabric.build_curve(1024).explain(10**6)[1]
    assert fabric.build_curve(1).estimate_s(10**6) == 0


def test_a_warning_about_a_size_depends_on_the_sweep_of_those_ranks(sweep):
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


def test_uncertainty_grows_with_the_distance(sweep):
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
    assert fabric.build_curve(4).estimate_s(10**6) == pytest.approx(6e-4 + 7e-3)


@pytest.mark.parametrize(
    ("make", "backend", "algorithm", "error", "words"),
    [
        (lambda s: [*s(), *s(backend="nccl")], None, "auto", ConfigError, "nccl on cpu in float32.*--backend"),
        (lambda s: [*s(), *s(dtype="bfloat16")], "gloo", "auto", ConfigError, "keep the rows of one dtype"),
        (lambda s: s(), "nccl", "auto", ConfigError, "only on gloo"),
        (lambda s: s(), None, "two-level", ConfigError, "cannot be fitted to one sweep"),
        (lambda s: s(collective="broadcast"), None, "auto", RecordError, "no all-reduce"),
        (lambda s: [], None, "auto", RecordError, "no all-reduce"),
        (lambda s: s()[:1], None, "auto", RecordError, "two or more sizes"),
        (lambda s: [s()[0], s()[4]], None, "auto", RecordError, "one size per rank count"),
        (lambda s: s(), None, "rnig", ConfigError, "did you mean ring"),
    ],
)  # fmt: skip
def test_an_unusable_sweep_is_refused(sweep, make, backend, algorithm, error, words):
    with pytest.raises(error, match=words):
        build_measured_fabric(make(sweep), backend, algorithm)


PUBLIC = [network for network in NETWORKS if network.sweeps]


@pytest.mark.parametrize("network", PUBLIC, ids=lambda network: network.name)
def test_a_published_network_gives_its_own_figures_and_cites_them(network):
    fabric, (line,) = AssumedFabric(network, network), AssumedFabric(network, network).assumptions
    for sweep in network.sweeps:
        assert sweep.source in line and sweep.nodes == math.ceil(sweep.ranks / network.ranks_per_node)
        others = [s for s in network.sweeps if s.ranks == sweep.ranks]
        low, high = sweep.points[0], sweep.points[-1]
        for size, seconds in (low, high):
            times = [dict(s.points)[size] for s in others if size in dict(s.points)]
            found = fabric.build_curve(sweep.ranks).estimate_s(size)
            assert found == pytest.approx(SITE_FACTOR * statistics.median(times)) and seconds in times
    assert build_public_fabric(network).build_curve(network.sweeps[0].ranks).explain(10**6)[0] == "measured"


def test_a_published_network_is_less_certain_on_other_ranks_and_small_messages():
    hdr = find_network("a100-hdr")

    def width(ranks: int, size: int) -> float:
        plain, moved = (AssumedFabric(hdr, hdr, shift=shift).build_curve(ranks).estimate_s(size) for shift in (0, 1))
        return math.log(moved / plain)

    assert width(16, 2**27) < width(16, 2**20) < width(256, 2**20) < width(4096, 2**20)
    assert width(8, 2**20) == pytest.approx(width(16, 2**20))


def test_a_published_network_has_nodes_of_its_own():
    hdr, nvlink = find_network("a100-hdr"), find_network("nvlink")
    given, own = (AssumedFabric(hdr, nvlink, per_node).build_curve(64).estimate_s(10**6) for per_node in (8, 1))
    assert given == own
    with pytest.raises(ConfigError, match=r"a100-hdr .*8"):
        AssumedFabric(hdr, nvlink, 4)
    with pytest.raises(ConfigError, match=r"a100-hdr .*8 ranks per node"):
        find_links("hdr,a100-hdr")
    assert [network.name for network in find_links("hdr,h200-roce")] == ["hdr", "h200-roce"]


def test_a_data_sheet_is_corrected_and_available_as_written():
    for name in ("hdr", "10gbe", "10Gb/s,50us", "200Gb/s,2us"):
        network = find_network(name)
        exact, corrected = (AssumedFabric(n, n).build_curve(8) for n in (network.as_written, network))
        assert network.as_written.correction == Correction()
        for size in SIZES:
            assert corrected.estimate_s(size) > exact.estimate_s(size)
        assert corrected.estimate_s(1000) > 1.5 * exact.estimate_s(1000)
    slow, fast = find_network("1gbe"), find_network("hdr")
    assert slow.correction.efficiency > fast.correction.efficiency and slow.correction.overhead_s > 1e-4


def test_the_interval_of_a_data_sheet_is_wider_for_small_messages():
    hdr, source = find_network("hdr"), random.Random(5)
    draws = [AssumedFabric(hdr, hdr).draw(source).build_curve(8) for _ in range(400)]

    def spread(size: int) -> float:
        return statistics.stdev(math.log(draw.estimate_s(size)) for draw in draws)

    assert spread(2**30) == pytest.approx(0.45, abs=0.06) and spread(2**10) == pytest.approx(0.65, abs=0.08)


def on_nodes(records, nodes):
    return [replace(record, nodes=nodes(record.world_size)) for record in records]


def test_measurements_on_one_node_say_little_about_several(sweep):
    records = sweep((2, 4), algorithm="ring", backend="nccl", device="cuda")
    node = build_measured_fabric(on_nodes(records, lambda n: 1), None)
    unknown = build_measured_fabric(records, None)
    assert (node.ranks_per_node, unknown.ranks_per_node) == (4, 0)
    inside = replace(unknown, ranks_per_node=8)
    here, there = (fabric.build_curve(8) for fabric in (inside, node))
    assert "8 ranks are on several nodes, but all measurements are from one" in there.explain(10**6)[1]
    assert here.explain(10**6)[1] == ""
    (_, small), (_, large) = FIRST_NODE
    assert there.estimate_s(1000) == pytest.approx(small * here.estimate_s(1000))
    assert there.estimate_s(10**8) == pytest.approx(large * here.estimate_s(10**8))

    def width(fabric, ranks: int) -> float:
        return math.log(replace(fabric, shift=1.0).build_curve(ranks).estimate_s(10**6))

    wide, narrow = (width(f, 8) - math.log(f.build_curve(8).estimate_s(10**6)) for f in (node, inside))
    assert wide > 0.5 > narrow > 0.2
    # The ranks per node are unknown: assume the same width, with a warning. Up to 8 GPUs probably share one; more do
    # not.
    many, of_one = (fabric.build_curve(16) for fabric in (unknown, replace(inside, ranks_per_node=16)))
    assert many.estimate_s(10**8) == pytest.approx(large * of_one.estimate_s(10**8))
    asked = unknown.build_curve(8)
    assert "ranks share a node: set --ranks-per-node" in asked.explain(10**6)[1]
    assert asked.estimate_s(10**6) == pytest.approx(here.estimate_s(10**6))
    assert width(unknown, 8) - math.log(asked.estimate_s(10**6)) == pytest.approx(wide)
    assert not unknown.build_curve(4).explain(10**6)[1] and not unknown.build_curve(3).explain(10**6)[1]
    one = build_measured_fabric(records, None, ranks_per_node=1)
    assert one.ranks_per_node == 1 and not one.build_curve(8).explain(10**6)[1]


def test_an_imported_gloo_table_shares_its_host_in_part(sweep):
    """The host's cores are unknown, so times lie half way between links of their own and one shared link."""
    records = on_nodes(sweep((2,)), lambda n: 1)
    own = build_measured_fabric(records, None, ranks_per_node=8)
    table = build_measured_fabric([replace(r, source="imported") for r in records], None, ranks_per_node=8)
    for ranks, slower in ((2, 1), (8, 2)):
        here, there = (fabric.build_curve(ranks).estimate_s(10**7) for fabric in (own, table))
        assert there == pytest.approx(slower * here)


def test_from_two_nccl_ranks_times_grow_less_than_the_family(sweep):
    records = on_nodes(sweep((2, 4), algorithm="ring", backend="nccl", device="cuda"), lambda n: 1)
    two = build_measured_fabric(records[: len(SIZES)], None, ranks_per_node=16)
    four = build_measured_fabric(records[len(SIZES) :], None, ranks_per_node=16)

    def grow(fabric, ranks: int, known: int) -> float:
        return fabric.build_curve(ranks).estimate_s(10**9) / fabric.build_curve(known).estimate_s(10**9)

    assert grow(two, 4, 2) == pytest.approx(1.5**0.6, rel=0.01)
    assert grow(four, 8, 4) == pytest.approx(1, rel=0.01)  # a tree sends as many bytes on any number of ranks
    assert grow(two, 16, 2) == pytest.approx(2 * 15 / 16, rel=0.01)  # more ranks than a node has GPUs


def test_shared_memory_never_leaves_its_host(sweep):
    shared = build_measured_fabric(sweep(backend="shm", algorithm="shared"), None)
    assert shared.ranks_per_node == 0 and not shared.build_curve(8).explain(10**6)[1]


def test_only_uncertainties_in_use_are_described(sweep):
    measured, sheet, public = build_measured_fabric(sweep(), None), find_network("hdr"), find_network("a100-hdr")
    kinds = ([measured], [measured, AssumedFabric(sheet, OUT)], [measured, AssumedFabric(public, OUT)])
    texts = [describe_uncertainty(list_networks(fabrics)) for fabrics in kinds]
    assert [("data-sheet" in text, "published" in text) for text in texts] == [
        (False, False), (True, False), (False, True),
    ]  # fmt: skip
    assert all("from one node to several" in text for text in texts)


def test_the_first_node_boundary_counts_once(sweep):
    records = on_nodes(sweep((4, 8, 16), algorithm="tree", backend="nccl"), lambda n: math.ceil(n / 8))
    fabric = build_measured_fabric(records, None)
    assert fabric.ranks_per_node == 8
    # By ratio, 12 is closer to 16 than to 8, though not by difference; 32 needs no warning, as 16 already span two
    # nodes.
    assert "from 16 ranks" in fabric.build_curve(12).explain(10**6)[0]
    assert "from 8 ranks" in fabric.build_curve(7).explain(10**6)[0]
    assert not fabric.build_curve(32).explain(10**6)[1]
    beyond = build_measured_fabric([record for record in records if record.world_size == 16], None)
    assert "8 ranks are on one node, but all measurements are from several" in beyond.build_curve(8).explain(10**6)[1]


@pytest.mark.parametrize(
    ("nodes", "given", "found"),
    [
        (lambda n: 0, 0, 0), (lambda n: 0, 2, 2), (lambda n: 1, 0, 4), (lambda n: 1, 16, 16),
        (lambda n: n // 2, 0, 2), (lambda n: n // 2, 2, 2),
    ],
)  # fmt: skip
def test_ranks_per_node_are_those_of_the_records_or_those_that_are_given(sweep, nodes, given, found):
    assert build_measured_fabric(on_nodes(sweep(), nodes), None, ranks_per_node=given).ranks_per_node == found


@pytest.mark.parametrize(
    ("nodes", "given", "error", "words"),
    [
        (lambda n: 1, 2, ConfigError, "--ranks-per-node 2: the sweep was measured with 4 per node"),
        (lambda n: n // 2, 4, ConfigError, "--ranks-per-node 4: the sweep was measured with 2 per node"),
        (lambda n: 2, 0, RecordError, "2 ranks on 2 nodes and others with 2 per node"),
    ],
)
def test_ranks_per_node_that_contradict_each_other_are_refused(sweep, nodes, given, error, words):
    with pytest.raises(error, match=words):
        build_measured_fabric(on_nodes(sweep(), nodes), None, ranks_per_node=given)


def test_a_table_of_several_sources_is_refused(sweep):
    made = [replace(r, source="imported", timing=Summary(mean_s=r.time_s)) for r in sweep()]
    one, other = ([replace(record, note=name) for record in made] for name in ("one", "other"))
    with pytest.raises(ConfigError, match=r"\(one; other\)"):
        build_measured_fabric([*one, *other], None)
    assert build_measured_fabric(one, None).ranks == (2, 4)


def test_a_sweep_inside_nodes_joins_a_network_between_them(sweep):
    inside = build_measured_fabric(on_nodes(sweep(), lambda n: 1), None)
    fabric = AssumedFabric(OUT, inside, 4)
    for size in SIZES:
        assert fabric.build_curve(4).estimate_s(size) == inside.build_curve(4).estimate_s(size)
        between = AssumedFabric(OUT, OUT).build_curve(4)
        joined = join_levels(inside.build_curve(4), between).estimate_s(size)
        assert fabric.build_curve(16).estimate_s(size) == pytest.approx(joined)
        assert between.estimate_s(size) < joined < between.estimate_s(size) + inside.build_curve(4).estimate_s(size)
    assert any("all-reduce measured on 2, 4 ranks" in line for line in fabric.assumptions)
    drawn = fabric.draw(random.Random(1))
    assert drawn.build_curve(16).estimate_s(10**6) != fabric.build_curve(16).estimate_s(10**6)
    with pytest.raises(ConfigError, match="nodes"):
        AssumedFabric(find_network("v100-edr"), inside, 4)
