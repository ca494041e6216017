"""nccl-tests output becomes records with its ranks and nodes; untrustworthy output is refused with a one-line error."""

from __future__ import annotations

import json

import pytest

from paceline.errors import RecordError
from paceline.records.exchange import load_table

NAMES = (
    "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    "     time   algbw   busbw #wrong"
)
UNITS = "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"
END = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 12.5\n#"
SIZES = (1024, 2**20, 2**25)


def list_ranks(hosts: dict[str, int], group: str = " Group  0") -> str:
    places = [(host, device) for host, count in hosts.items() for device in range(count)]
    return "\n".join(
        f"#  Rank {rank:2}{group} Pid {4000 + rank} on {host:>10} device {device:2} [0x1{device}] NVIDIA A100-SXM4-40GB"
        for rank, (host, device) in enumerate(places)
    )


def write_row(
    size: int, ranks: int, time_us: float = 0.0, factor: float | None = None, more: str = "  0", blocks: int = 2
):
    time_us = time_us or 20 + size / 1e4
    algbw = size / time_us / 1e3
    busbw = algbw * (2 * (ranks - 1) / ranks if factor is None else factor)
    block = f"{time_us:10.2f} {algbw:7.2f} {busbw:7.2f} {more}"
    return f"{size:12} {size // 4:12}     float     sum      -1{block * blocks}"


def write_run(hosts: dict[str, int], ranks: int = 0, names: str = NAMES, **row) -> str:
    ranks = ranks or sum(hosts.values())
    rows = [write_row(size, ranks, **row) for size in SIZES]
    return "\n".join(["# Using devices", list_ranks(hosts), "#", names, UNITS, *rows, END, ""])


TWO_NODES = write_run({"a01": 4, "a02": 4})


@pytest.fixture
def load(tmp_path):
    def load(text: str, name: str = "pasted.txt"):
        path = tmp_path / name
        path.write_text(text)
        return load_table(path)

    return load


def test_a_pasted_output_has_its_ranks_and_nodes(load):
    records = load("$ mpirun -np 8 all_reduce_perf -b 1K -e 32M\n" + TWO_NODES)
    assert [r.num_bytes for r in records] == list(SIZES)
    assert {(r.world_size, r.nodes, r.backend, r.device, r.dtype, r.op) for r in records} == {
        (8, 2, "nccl", "cuda", "float32", "sum")
    }
    assert records[1].timing.mean_s == pytest.approx((20 + 2**20 / 1e4) * 1e-6, abs=1e-8)
    assert {(r.source, r.num_wrong, r.collective) for r in records} == {("imported", 0, "all_reduce")}


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "[1,0]<stdout>: ", "[0] ", "0: ", "> "])
def test_prefixes_of_launchers_are_ignored(load, prefix):
    assert load("\n".join(prefix + line for line in TWO_NODES.splitlines())) == load(TWO_NODES)


def test_several_runs_in_one_file_are_one_sweep(load):
    records = load(write_run({"a01": 4}) + "some log\n" + TWO_NODES)
    assert [(r.world_size, r.nodes) for r in records] == [(4, 1)] * 3 + [(8, 2)] * 3


def test_older_and_longer_tables_are_read_by_their_names(load):
    old = NAMES.replace("    root", "").replace("#wrong", " error")
    rows = [write_row(size, 4).replace("      -1", "  ") for size in SIZES]
    found = load("\n".join([list_ranks({"a": 4}, group=""), old, *rows]))
    assert [(r.world_size, r.num_bytes) for r in found] == [(4, size) for size in SIZES]
    each = NAMES.replace("#wrong", "#wrong   i_min   i_max   i_p99   i_cv%")
    row = write_row(2**20, 4, time_us=99.0, more="0 1.0 2.0 3.0 4.0")
    found = load("\n".join([list_ranks({"a": 4}), each, row]))
    assert found[0].time_s == pytest.approx(99e-6)
    only = write_row(2**20, 4, more="N/A", blocks=1)  # no in-place result
    assert load("\n".join([list_ranks({"a": 4}), NAMES, only]))[0].num_wrong is None


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_ranks_missing_from_a_table_follow_from_its_bandwidths(load, ranks):
    rows = [write_row(size, ranks) for size in (1024, 2**20, 2**30)]
    records = load("\n".join([NAMES, *rows]))
    assert {(r.world_size, r.nodes) for r in records} == {(ranks, 0)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TWO_NODES.replace("     time   algbw", "            algbw"), "line 11: the table lacks time"),
        (TWO_NODES.replace("  busbw", "       "), "lacks busbw"),
        (TWO_NODES.replace(" time ", " cputime "), "without -C"),
        (write_run({"a": 4}, time_us=1e-9).replace("inf", "0.00"), "must be positive"),
        (write_run({"a": 8}, ranks=4), "busbw / algbw is 1.50 to 1.50, but should be 1.75 on the 8 listed ranks"),
        ("\n".join([NAMES, write_row(2**30, 4), write_row(2**29, 8)]), "different numbers of ranks"),
        ("\n".join([NAMES, write_row(1024, 4)]), "does not state its number of ranks"),
        ("\n".join([NAMES, write_row(2**30, 900)]), "keep the `# Rank` lines"),
        ("\n".join([NAMES, write_row(2**30, 8, factor=7 / 8)]), "not an all-reduce on two or more ranks"),
        (TWO_NODES.replace(" sum ", "none "), "redop none with root -1 is not an all-reduce"),
        (TWO_NODES.replace("      -1", "       0"), "root 0 is not an all-reduce"),
        ("# Collective test starting: all_gather_perf\n" + TWO_NODES, "output of all_gather_perf"),
        (list_ranks({"a": 2}) + "\n" + write_run({"b": 2}), "rank 0 is listed twice"),
        (write_run({"a": 1}, factor=0.0), "one rank alone"),
        (TWO_NODES.replace(END, "12 3 float sum\n" + END), "4 cells where the header has 9"),
        ("\n".join([write_row(1024, 4), NAMES]), "nccl-tests results without the header"),
        (write_row(1024, 4), "line 1: nccl-tests results without the header"),
        ("", "and no nccl-tests output"),
        (TWO_NODES.replace(write_row(2**20, 8), write_row(2**20, 8, more="  3")),
         "line 14: 3 wrong values at size 1 MiB (#wrong)"),
        (NAMES, "no results below"),
    ],
)  # fmt: skip
def test_untrustworthy_output_is_refused_in_one_line(load, text, words):
    with pytest.raises(RecordError) as caught:
        load(text)
    assert words in str(caught.value) and "\n" not in str(caught.value) and "pasted.txt" in str(caught.value)


def build_document(hosts: dict[str, int], gpus: int = 1, **changes) -> dict:
    """A document as `-J` writes it: `devices` has one entry per process, for its first rank."""
    places = [host for host, count in hosts.items() for _ in range(count)]
    ranks = len(places) * gpus
    results = [
        {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1",
         "out_of_place": {"time": 50.0, "alg_bw": 4.0, "bus_bw": 8.0 * (ranks - 1) / ranks, "nwrong": 0.0},
         "in_place": {"time": 49.0, "alg_bw": 4.0, "bus_bw": 4.0, "nwrong": None}}
        for size in SIZES
    ]  # fmt: skip
    devices = [{"rank": n * gpus, "group": 0, "pid": n, "hostname": host} for n, host in enumerate(places)]
    config = {"nthreads": 1, "ngpus": gpus, "devices": devices}
    return {"version": 2, "args": ["/opt/all_reduce_perf", "-J", "x"], "config": config, "results": results} | changes


@pytest.mark.parametrize(
    ("hosts", "gpus", "expected"), [({"a": 4, "b": 4}, 1, (8, 2)), ({"a": 1}, 8, (8, 1)), ({"a": 1, "b": 1}, 4, (8, 2))]
)
def test_its_json_is_read(load, hosts, gpus, expected):
    records = load(json.dumps(build_document(hosts, gpus)), "result.json")
    assert [r.num_bytes for r in records] == list(SIZES) and records[0].time_s == pytest.approx(50e-6)
    assert {(r.world_size, r.nodes) for r in records} == {expected} and records[0].num_wrong == 0
    assert load(json.dumps(build_document(hosts, gpus)), "no-suffix")[0].world_size == 8


def test_raw_times_of_its_json_count(load):
    document = build_document({"a": 4})
    document["results"][0]["out_of_place_per_iter"] = {"times_us": [50.0, 51.0], "stdev_us": 0.5}
    timing = load(json.dumps(document), "result.json")[0].timing
    assert timing.count == 2 and timing.stdev_s == pytest.approx(0.5e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"results": []}, "has no results"),
        ({"config": {}}, "is not the JSON of nccl-tests: KeyError"),
        ({"results": [{"size": 4}]}, "KeyError 'out_of_place'"),
        ({"args": ["./reduce_perf"]}, "output of reduce_perf"),
        ({"results": [{**build_document({"a": 4})["results"][0], "out_of_place": {"cpu_time": 5.0}}]}, "without -C"),
        ({"results": [{**build_document({"a": 4})["results"][0], "out_of_place": {
            "time": 0.0, "alg_bw": 4.0, "bus_bw": 6.0, "nwrong": None}}]}, "must be positive"),
    ],
)  # fmt: skip
def test_a_malformed_json_is_refused_in_one_line(load, change, words):
    with pytest.raises(RecordError, match=words):
        load(json.dumps(build_document({"a": 4}) | change), "result.json")
    with pytest.raises(RecordError, match="JSON"):
        load(json.dumps(build_document({"a": 4}))[:-9], "result.json")
