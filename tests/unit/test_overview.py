"""Trace overviews: fractions of a step, phases, and lanes of the figure."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from paceline.errors import RecordError
from paceline.measure.recorder import build_bucket_events
from paceline.parallel.timeline import BucketTimes, StepTimes
from paceline.predict.simulate import BucketSpan
from paceline.predict.traces import (
    CATEGORIES,
    StepLane,
    attribute_time,
    build_lanes,
    build_overview,
    find_lanes,
    overview_from_json,
    overview_to_json,
    sum_clipped,
    union_time,
)
from paceline.report.profiles import OPERATORS, OVERVIEWS, build_kernel_columns, plot_timeline
from paceline.report.table import Table
from tests.unit.made_runs import list_texts
from tests.unit.made_traces import NCCL, SGEMM, TENSOR_GEMM, MadeTrace


def shares_ms(overview):
    return {name: round(overview.seconds(name) * 1e3, 6) for name in CATEGORIES if overview.seconds(name)}


@pytest.fixture
def on_gpu():
    """10 ms: kernels 0-4, a message 3-6, a copy 5-7, a loader 7-8, an operator 0-9, and nothing from 9 on."""
    made = MadeTrace(properties={"name": "NVIDIA H200", "numSms": 100}).step()
    made.kernel(SGEMM, 0, 2, **{"blocks per SM": 0.5, "est. achieved occupancy %": 20})
    made.kernel(TENSOR_GEMM, 2, 3, grid=[10, 5, 4], **{"est. achieved occupancy %": 80})
    made.kernel("elementwise_kernel", 3, 4)
    made.kernel(NCCL, 3, 6, tid=20).add("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 5, 7)
    made.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 7, 8)
    made.op("aten::mm", 0, 9).add("cuda_runtime", "cudaLaunchKernel", 1, 1.01)
    return made.add("cuda_runtime", "cudaDeviceSynchronize", 9, 10)


def test_each_instant_of_a_step_counts_once(on_gpu):
    overview = build_overview(on_gpu.build())
    assert shares_ms(overview) == {"kernel": 4, "communication": 2, "copy": 1, "data": 1, "cpu": 1, "other": 1}
    assert sum(overview.share(name) for name in CATEGORIES) == pytest.approx(1)
    assert (overview.message_s, overview.host_s) == (pytest.approx(3e-3), pytest.approx(9e-3))


def test_how_a_gpu_is_used(on_gpu):
    gpu = build_overview(on_gpu.build()).gpu
    assert gpu.busy == pytest.approx(0.6)
    # Half of the SMs for 2 ms, then 200 blocks on 100 SMs for 1 ms; the other kernels carry no occupancy.
    assert gpu.sm_efficiency == pytest.approx((0.5 * 2 + 1) / 10)
    assert gpu.occupancy == pytest.approx((0.2 * 2 + 0.8 * 1) / 3)
    assert (gpu.kernel_s, gpu.num_kernels) == (pytest.approx(7e-3), 4)
    assert (gpu.tensor_core_share, gpu.matmul_share) == (pytest.approx(1 / 7), pytest.approx(3 / 7))
    assert (gpu.communication_share, gpu.missed_s) == (pytest.approx(3 / 7), pytest.approx(2e-3))
    assert (gpu.name, gpu.launch_s) == ("NVIDIA H200", pytest.approx(1e-5))


def test_a_host_that_waits_for_a_number_does_not_work():
    made = MadeTrace().step().kernel("k", 0, 8).op("aten::mm", 0, 1).op("aten::item", 1, 8)
    overview = build_overview(made.add("cuda_runtime", "cudaStreamSynchronize", 2, 8).build())
    assert overview.host_s == pytest.approx(2e-3)


def test_kernels_without_arguments_are_enough():
    gpu = build_overview(MadeTrace().step().kernel("k", 0, 5).build()).gpu
    assert (gpu.busy, gpu.sm_efficiency, gpu.occupancy) == (pytest.approx(0.5), None, None)


def test_kernels_have_a_row_for_each_name(on_gpu):
    rows = build_overview(on_gpu.kernel(SGEMM, 8, 9).build()).kernels
    assert [(row.name, row.kind, row.calls, row.uses_tensor_cores) for row in rows] == [
        (SGEMM, "matmul", 2, False), (NCCL, "communication", 1, False), (TENSOR_GEMM, "matmul", 1, True),
        ("elementwise_kernel", "other", 1, False),
    ]  # fmt: skip
    assert (rows[0].time_s, rows[0].mean_s) == (pytest.approx(3e-3), pytest.approx(1.5e-3))


@pytest.mark.parametrize("kind", ["bucket", "user_annotation"])
def test_on_a_cpu_messages_behind_operators_are_free(kind):
    made = MadeTrace().step().op("aten::mm", 0, 4)
    # An autograd frame that only waits does not hide a message, nor does the operator that starts one.
    made.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 4, 7).op("c10d::allreduce_", 4, 5)
    made.add(kind, "gloo:all_reduce", 2, 6, tid=2)
    overview = build_overview(made.build())
    assert shares_ms(overview) == {"cpu": 5, "communication": 2, "other": 3}
    assert (overview.message_s, overview.gpu) == (pytest.approx(4e-3), None)


def test_several_steps_are_means_and_what_is_between_them_does_not_count():
    made = MadeTrace().step(0, 10, 0).step(20, 40, 1)
    made.op("aten::mm", 0, 5).op("aten::mm", 12, 18).op("aten::mm", 25, 30)
    overview = build_overview(made.build())
    assert [(step.name, round(step.wall_s, 9)) for step in overview.steps] == [("step 0", 0.01), ("step 1", 0.02)]
    assert (overview.step_s, overview.seconds("cpu")) == (pytest.approx(15e-3), pytest.approx(5e-3))
    (row,) = overview.operators
    assert (row.calls, row.self_s) == (1, pytest.approx(5e-3))


def test_an_event_that_crosses_the_end_of_a_step_counts_until_there():
    overview = build_overview(MadeTrace().step(2, 10).op("aten::mm", 0, 4).op("aten::mm", 9, 14).build())
    assert shares_ms(overview) == {"cpu": 3, "other": 5}


def test_self_time_is_without_the_operators_inside():
    made = MadeTrace().step().op("aten::linear", 0, 6).op("aten::addmm", 1, 5).op("aten::copy_", 2, 3)
    made.op("aten::linear", 6, 7).op("aten::addmm", 6, 7, tid=2)
    made.op("first", 8, 8.5).op("outer", 8, 9.5)  # a child that starts together with its parent is inside it
    rows = {r.name: (r.calls, round(r.self_s, 9), round(r.total_s, 9)) for r in build_overview(made.build()).operators}
    assert rows == {
        "aten::addmm": (2, 4e-3, 5e-3), "aten::linear": (2, 3e-3, 7e-3), "aten::copy_": (1, 1e-3, 1e-3),
        "outer": (1, 1e-3, 1.5e-3), "first": (1, 0.5e-3, 0.5e-3),
    }  # fmt: skip


def test_phases_are_those_annotated():
    made = MadeTrace().step().phase("forward", 0, 1).phase("backward", 1, 3).phase("forward", 3, 5)
    made.phase("backward", 5, 7).phase("optimizer", 7, 8).op("autograd::engine::evaluate_function: A", 1, 7)
    phases = build_overview(made.build()).phases_s
    assert {name: round(s * 1e3, 6) for name, s in phases.items()} == {"forward": 3, "backward": 4, "optimizer": 1}


def test_phases_are_the_gpus_where_it_was_timed():
    made = MadeTrace().step().phase("forward", 0, 1).phase("backward", 1, 2).phase("optimizer", 2, 3)
    made.add("gpu_user_annotation", "forward", 1, 4).add("gpu_user_annotation", "backward", 4, 9)
    phases = build_overview(made.kernel(SGEMM, 1, 9).build()).phases_s
    assert {name: round(s * 1e3, 6) for name, s in phases.items()} == {"forward": 3, "backward": 5, "optimizer": 1}


@pytest.mark.parametrize(("backend", "exposed_ms"), [("nccl", 0), ("gloo", 3)])
def test_buckets_are_not_messages_if_nccl_sent_nothing(backend, exposed_ms):
    made = MadeTrace().step().kernel(SGEMM, 0, 5).bucket(3, 8)
    made.add("user_annotation", f"{backend}:allreduce_coalesced", 3, 3.1)
    assert build_overview(made.build()).seconds("communication") == pytest.approx(exposed_ms / 1e3)


def test_a_trace_without_steps_is_refused():
    with pytest.raises(RecordError, match="rank 0"):
        build_overview(MadeTrace().op("aten::mm", 0, 1).build())


def test_an_overview_survives_json(on_gpu):
    overview = build_overview(on_gpu.phase("optimizer", 8, 9).build())
    assert overview_from_json(json.loads(json.dumps(overview_to_json(overview)))) == overview
    alone = build_overview(MadeTrace().step().build())
    assert overview_from_json(json.loads(json.dumps(overview_to_json(alone)))) == alone


@pytest.mark.parametrize("change", [{"version": 2}, {"format": "x"}, {"steps": [{"name": "a"}]}, {"more": 1}])
def test_another_document_is_not_an_overview(on_gpu, change):
    document = {**overview_to_json(build_overview(on_gpu.build())), **change}
    with pytest.raises(RecordError):
        overview_from_json(document)


@pytest.mark.parametrize("seed", range(3))
def test_attribution_agrees_with_a_count_of_instants(seed):
    """Compared with whole milliseconds counted one by one; the columns of a row always sum to the window."""
    draw = random.Random(seed)
    windows = [(5, 30), (30, 42), (50, 70)]
    classes = [[(a, a + draw.randint(0, 9)) for a in draw.choices(range(75), k=12)] for _ in range(4)]
    arrays = [tuple(np.array(edge, dtype=float) for edge in zip(*c, strict=True)) for c in classes]
    found = attribute_time(arrays, np.array(windows, dtype=float))
    for row, (begin, end) in zip(found, windows, strict=True):
        wanted = [0] * 5
        for moment in range(begin, end):
            owners = [k for k, c in enumerate(classes) if any(a <= moment < b for a, b in c)]
            wanted[min(owners, default=4)] += 1
        assert row.tolist() == wanted
    assert union_time(*arrays[0], np.array(windows, dtype=float)) == found[:, 0].sum()


def test_without_intervals_all_time_is_unattributed():
    none = (np.empty(0), np.empty(0))
    assert attribute_time([none, none], np.array([[0.0, 3.0]])).tolist() == [[0, 0, 3]]


def test_concurrent_weights_are_capped_at_1():
    starts, ends, weights = np.array([0.0, 1.0, 5.0]), np.array([2.0, 4.0, 9.0]), np.array([0.75, 0.5, 0.25])
    assert sum_clipped(starts, ends, weights, np.array([[0.0, 8.0]])) == pytest.approx(0.75 + 1 + 1 + 0.75)


def test_intervals_in_a_lane_do_not_overlap():
    assert find_lanes([(0, 3), (1, 2), (2, 4), (3, 5)]) == [0, 1, 1, 0]


def test_on_a_cpu_operators_that_fetch_data_count_as_waiting():
    made = MadeTrace().step().phase("data", 0, 4).op("aten::index_select", 0.1, 3.9).op("aten::mm", 4, 9)
    assert shares_ms(build_overview(made.build())) == {"data": 4, "cpu": 5, "other": 1}


MS = 1e-3


@pytest.fixture
def backward():
    """Two messages at a time; the first queued for 1 ms. Backward started at 100.003 s and took 6 ms."""
    buckets = [
        BucketTimes(2**20, ready_s=1 * MS, launch_s=2 * MS, done_s=5 * MS),
        BucketTimes(2**21, ready_s=4 * MS, launch_s=4 * MS, done_s=8 * MS),
    ]
    return StepTimes(buckets, backward_s=6 * MS, over_s=8 * MS, begin_s=100.003)


def test_buckets_become_events_on_tracks_of_their_own(backward):
    events = build_bucket_events(3, backward, origin_s=100.0)
    spans = [(e["cat"], e["tid"], e["ts"], e["dur"], e["args"]["bytes"]) for e in events if e["ph"] == "X"]
    assert spans == [
        ("bucket", "buckets 0", pytest.approx(5000), pytest.approx(3000), 2**20),
        ("bucket_wait", "buckets ready 0", pytest.approx(4000), pytest.approx(1000), 2**20),
        ("bucket", "buckets 1", pytest.approx(7000), pytest.approx(4000), 2**21),
    ]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names["buckets 1"] == "rank 3: buckets 1"
    (over,) = [e for e in events if e["ph"] == "i"]
    assert over["ts"] == pytest.approx(9000)


def made_rank(rank, backward, origin_ms=0.0):
    made = MadeTrace(rank, origin_ms).step(0, 20).phase("forward", 0, 3).phase("backward", 3, 12)
    made.phase("optimizer", 12, 15)
    made.events += build_bucket_events(rank, backward, origin_s=100.0)
    return made.build()


def test_lanes_are_on_the_clock_of_the_first_rank(backward):
    lanes = build_lanes([made_rank(1, backward, origin_ms=2), made_rank(0, backward)])
    assert [lane.rank for lane in lanes] == [0, 1]
    first, second = lanes
    # Time that backward() spends waiting for messages after its own work is not a phase.
    assert [(name, round(start_s / MS, 6), round(end_s / MS, 6)) for name, start_s, end_s in first.phases] == [
        ("forward", 0, 3), ("backward", 3, 9), ("optimizer", 12, 15),
    ]  # fmt: skip
    assert (first.backward_end_s, first.end_s) == pytest.approx((9 * MS, 20 * MS))
    bucket = first.buckets[0]
    assert (bucket.num_bytes, bucket.ready_s, bucket.launch_s, bucket.done_s) == (
        2**20, pytest.approx(4 * MS), pytest.approx(5 * MS), pytest.approx(8 * MS),
    )  # fmt: skip
    assert first.exposed_s == pytest.approx(2 * MS)
    assert second.buckets[0].ready_s == pytest.approx(6 * MS)


def lane(rank, **changes):
    fields = {
        "phases": (("forward", 0, 3 * MS), ("backward", 3 * MS, 9 * MS)),
        "buckets": (
            BucketSpan(2**20, 4 * MS, 5 * MS, 5 * MS, 8 * MS), BucketSpan(2**21, 7 * MS, 8 * MS, 8 * MS, 12 * MS),
            BucketSpan(2**22, 9 * MS, 9 * MS, 9 * MS, 12 * MS),
        ),
        "backward_end_s": 9 * MS, "end_s": 14 * MS,
    }  # fmt: skip
    return StepLane(rank, **{**fields, **changes})


def test_a_picture_tells_ranks_phases_sizes_and_source():
    figure = plot_timeline([lane(0), lane(1)], "one step of cnn", "box, 2 cores")
    wanted = {"rank 0", "rank 1", "one step of cnn", "measured. box, 2 cores", "1 MiB", "4 MiB"}
    assert wanted | {"message after it, or waiting (3 ms)"} <= list_texts(figure)


def _hatched_ms(figure):
    found = []
    for collection in figure.axes[0].collections:
        if collection.get_hatch():
            corners = [path.vertices for path in collection.get_paths()]
            found += [(round(float(c[:, 0].min()), 6), round(float(c[:, 0].max()), 6)) for c in corners]
    return found


def test_communication_after_backward_is_hatched():
    assert _hatched_ms(plot_timeline([lane(0)], "t", "s")) == [(9, 12), (9, 12)]
    assert _hatched_ms(plot_timeline([lane(0, backward_end_s=12 * MS)], "t", "s")) == []
    assert _hatched_ms(plot_timeline([lane(0, backward_end_s=None)], "t", "s")) == []


def test_eight_ranks_need_more_height():
    eight = plot_timeline([lane(rank) for rank in range(8)], "t", "s")
    assert eight.get_size_inches()[1] > plot_timeline([lane(0)], "t", "s").get_size_inches()[1]


def test_a_rank_without_buckets_can_be_drawn():
    texts = list_texts(plot_timeline([lane(0, buckets=(), backward_end_s=None)], "t", "s"))
    assert "rank 0" in texts and not any("bucket" in text for text in texts)


def test_tables_say_what_the_overview_says():
    on_gpu = build_overview(MadeTrace().step().kernel(SGEMM, 0, 4).kernel(NCCL, 3, 5).op("aten::mm", 0, 6).build())
    on_cpu = build_overview(MadeTrace(rank=1).step().op("aten::mm", 0, 6).build())
    both = Table("overview", "", OVERVIEWS, [on_gpu, on_cpu])
    table = both.markdown().splitlines()
    header = [cell.strip() for cell in table[0].split("|")]
    first = dict(zip(header, (cell.strip() for cell in table[2].split("|")), strict=True))
    assert (first["kernels"], first["communication"], first["CPU"], first["other"]) == (
        "40.0%",
        "10.0%",
        "10.0%",
        "40.0%",
    )
    assert (first["GPU busy"], first["tensor cores"], first["source"]) == ("50.0%", "0.0%", "measured")
    assert "copies" not in header and "occupancy (est.)" not in header
    assert "GPU busy" not in Table("", "", OVERVIEWS, [on_cpu]).markdown()
    kernels = Table("", "", build_kernel_columns(on_gpu.kernels), on_gpu.kernels).markdown()
    assert f"| {SGEMM} | matmul | 1 | 4.00 | 4000.0 | no |" in kernels
    assert "| aten::mm | 1 | 6.00 | 6.00 |" in Table("", "", OPERATORS, on_cpu.operators).markdown()
    row, other = both.rows_json()
    assert (row["kernel_share"], row["gpu_busy"], row["copy_share"]) == pytest.approx((0.4, 0.5, 0.0))
    assert other.keys() == row.keys()
