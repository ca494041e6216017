"""Ranks in one document: one clock, no number twice, and a checker that finds what a viewer would stumble over."""

import copy

import pytest

from paceline.errors import RecordError
from paceline.predict.overview import find_lateness
from paceline.predict.traces import check_trace, load_trace, merge_traces, save_trace
from tests.unit.made_traces import NCCL, MadeTrace


def two_ranks():
    """Rank 1's clock began 2 ms after rank 0's. Both have a flow of the same id, and the same process and thread."""
    traces = []
    for rank in (0, 1):
        made = MadeTrace(rank, origin_ms=1000 + 2 * rank).step().kernel("k", 1, 2)
        for phase, ts in (("s", 1.0), ("f", 1000.0)):
            made.events.append({"ph": phase, "id": 9, "cat": "ac2g", "name": "ac2g", "pid": 100, "tid": 1, "ts": ts})
        made.events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}})
        traces.append(made.build())
    return traces


def names_of(document, kind):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in document["traceEvents"] if e["name"] == kind}


def test_ranks_are_processes_on_one_clock():
    document = merge_traces(two_ranks()[::-1])
    assert check_trace(document) == []
    assert sorted(names_of(document, "process_name").values()) == ["rank 0 (cuda)", "rank 1 (cuda)"]
    steps = {e["pid"]: e["ts"] for e in document["traceEvents"] if e["name"] == "step 0"}
    assert steps == {1: 0.0, 2: 2000.0}
    threads = names_of(document, "thread_name")
    assert len({tid for _, tid in threads}) == len(threads) == 4
    assert sorted(threads.values()) == ["stream 7", "stream 7", "thread 1", "thread 1"]
    order = [e["args"]["sort_index"] for e in document["traceEvents"] if e["name"] == "process_sort_index"]
    assert sorted(order) == [0, 1]


def test_flows_of_two_ranks_do_not_meet():
    flows = [(e["pid"], e["ph"], e["id"]) for e in merge_traces(two_ranks())["traceEvents"] if e["ph"] in "sf"]
    assert len(flows) == 4
    ids = {pid: {flow for p, _, flow in flows if p == pid} for pid in (1, 2)}
    assert all(len(found) == 1 for found in ids.values()) and ids[1] != ids[2]


@pytest.mark.parametrize("traces", [[], [MadeTrace().step().build()] * 2])
def test_nothing_or_one_rank_twice_is_refused(traces):
    with pytest.raises(RecordError):
        merge_traces(traces)


def test_a_trace_is_written_compressed_and_read_again(tmp_path):
    document = merge_traces(two_ranks())
    path = tmp_path / "trace.json.gz"
    save_trace(document, path)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert load_trace(path) == document
    with pytest.raises(RecordError, match="never overwritten"):
        save_trace(document, path)
    with pytest.raises(RecordError, match=r"\.json\.gz"):
        save_trace(document, tmp_path / "trace.json")


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b\x08", b"[1]", b"{}"])
def test_what_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RecordError, match=r"a\.json"):
        load_trace(tmp_path / "a.json")
    with pytest.raises(RecordError, match="does not exist"):
        load_trace(tmp_path / "b.json")


BEGIN = {"ph": "B", "name": "a", "pid": 1, "tid": 1, "ts": 1.0}


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([{**BEGIN, "ph": "?"}], "unknown phase '?'"),
        ([{**BEGIN, "ph": "X"}], "dur is None in 'a'"),
        ([{**BEGIN, "ph": "X", "dur": -1}], "dur is -1 in 'a'"),
        ([{**BEGIN, "ph": "X", "dur": float("nan")}], "dur is nan in 'a'"),
        ([{**BEGIN, "ph": "i", "ts": "1"}], "ts is '1' in 'a'"),
        ([BEGIN], "'a' begins and never ends on thread 1"),
        ([{**BEGIN, "ph": "E"}], "an end without a begin on thread 1"),
        ([BEGIN, {**BEGIN, "ph": "E", "tid": 2}], "an end without a begin on thread 2"),
        ([{**BEGIN, "ph": "i", "pid": 77}], "process 77 has no name"),
        ([{"ph": "M", "name": "thread_nam", "pid": 1, "args": {}}], "unknown metadata 'thread_nam'"),
        ([{"ph": "M", "name": "thread_name", "pid": 1}], "metadata thread_name says nothing"),
        ([{**BEGIN, "ph": "s", "id": 1, "cat": "c"}] * 2, "2 flows begin with one id"),
        (["text"], "an event that is a str"),
    ],
)
def test_what_a_viewer_would_stumble_over_is_found(events, found):
    document = merge_traces(two_ranks())
    broken = copy.deepcopy(document)
    broken["traceEvents"] += events
    assert any(found in line for line in check_trace(broken))
    assert check_trace({"traceEvents": None}) == ['no list "traceEvents"']


def test_begin_and_end_on_one_thread_are_fine():
    document = merge_traces(two_ranks())
    inner = {**BEGIN, "name": "b"}
    document["traceEvents"] += [BEGIN, inner, {**inner, "ph": "E"}, {**BEGIN, "ph": "E"}]
    assert check_trace(document) == []


def late(rank, *, messages, origin_ms=0.0, kind="bucket"):
    made = MadeTrace(rank, origin_ms).step(0, 10, 0).step(10, 20, 1)
    for moment in messages:
        made.add(kind, NCCL, moment, moment + 0.5)
    return made.build()


@pytest.mark.parametrize("kind", ["bucket", "kernel"])
def test_the_rank_that_the_others_wait_for_is_named(kind):
    # The clock of rank 1 began 1 ms later: by its own clock it is not late.
    others = [late(rank, messages=(2, 5, 12, 15), kind=kind) for rank in (0, 2)]
    lateness = find_lateness([*others, late(1, messages=(4, 5, 12, 15), origin_ms=1, kind=kind)])
    assert (lateness.rank, lateness.share) == (1, 1.0)
    assert lateness.mean_s == pytest.approx((3e-3 + 1e-3) / 2)


def test_ranks_that_take_turns_share_the_lateness():
    lateness = find_lateness([late(0, messages=(4, 12)), late(1, messages=(2, 13))])
    assert (lateness.share, lateness.mean_s) == (0.5, pytest.approx(1.5e-3))


@pytest.mark.parametrize("traces", [[late(0, messages=(1,))], [late(0, messages=()), late(1, messages=())],
                                    [late(0, messages=(1, 2)), late(1, messages=(1,))]])  # fmt: skip
def test_without_common_messages_nobody_is_late(traces):
    assert find_lateness(traces) is None
