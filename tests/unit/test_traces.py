"""Events of traces and the traces of all ranks in one document."""

from __future__ import annotations

import copy
import gzip
import json

import pytest

from paceline.predict.traces import (
    find_lateness,
    find_messages,
    find_steps,
    is_collective,
    is_matmul,
    merge_traces,
    read_chrome,
    render_trace,
)
from paceline.predict.traces import uses_tensor_cores as on_tensor_cores
from tests.unit.made_traces import NCCL, MadeTrace, check_trace

BASE = 1_790_857_026_000_000_000


def chrome(*events, **fields):
    return {"traceEvents": list(events), "baseTimeNanoseconds": BASE, **fields}


def event(name="aten::mm", ts=3_883_694_637_495.382, **fields):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": 2.0, **fields}


def test_times_become_small_and_the_origin_is_of_the_unix_clock():
    trace = read_chrome(chrome(event(), event(ts=3_883_694_637_496.382), host_name="box"), 3, 4)
    assert [e["ts"] for e in trace.events] == [0.0, 1.0]
    assert trace.origin_ns == pytest.approx(BASE + 3_883_694_637_495_382, abs=1000)
    assert (trace.rank, trace.world_size, trace.host, trace.device) == (3, 4, "box", "cpu")


def test_without_a_base_times_are_of_the_unix_clock():
    trace = read_chrome({"traceEvents": [event(ts=1.7e15)]}, rank=1)
    assert (trace.origin_ns, trace.rank) == (round(1.7e18), 1)


def test_profiler_tracks_and_unused_arguments_are_dropped():
    kernel = {**event("k"), "cat": "kernel", "pid": 0, "args": {"stream": 7, "blocks per SM": 0.5, "Ev Idx": 12}}
    metadata = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}}
    spans = [{**event(), "pid": "Spans"}, {**event(), "cat": "Trace"}, {"ph": "i", "name": "end", "pid": "", "ts": 1}]
    trace = read_chrome(chrome(kernel, metadata, *spans, deviceProperties=[{"name": "H200", "numSms": 132}]))
    assert [e["name"] for e in trace.events] == ["k", "thread_name"]
    assert trace.events[0]["args"] == {"stream": 7, "blocks per SM": 0.5}
    assert trace.events[1]["args"] == {"name": "stream 7"}
    assert (trace.device, trace.properties[0]["numSms"]) == ("cuda", 132)


def test_steps_are_ours_and_not_the_profilers():
    made = MadeTrace().phase("ProfilerStep#5", 0, 4).phase("forward", 0, 1).phase("ProfilerStep#6", 4, 8)
    made.step(5, 7, number=1).step(1, 3, number=0)
    assert [e["name"] for e in find_steps(made.build().events)] == ["step 0", "step 1"]


@pytest.mark.parametrize(
    ("kind", "name", "is_message"),
    [
        ("kernel", NCCL, True),
        ("kernel", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", True),
        ("kernel", "void at::native::reduce_kernel<512, 1>", False),
        ("user_annotation", "gloo:all_reduce", True),
        ("user_annotation", "gloo:broadcast", True),
        ("user_annotation", "nccl:all_reduce", False),  # a launch, not the message itself, which is the kernel
        ("gpu_user_annotation", "nccl:all_reduce", False),
        ("user_annotation", "forward", False),
        ("bucket", "bucket 0, 1 MiB", True),
        ("bucket_wait", "bucket 0, 1 MiB", False),
        ("cpu_op", "c10d::allreduce_", False),
    ],
)
def test_messages_are_recognized_by_kind_and_name(kind, name, is_message):
    assert is_collective(kind, name) is is_message


def test_a_bucket_does_not_count_with_the_kernel_that_carries_it():
    made = MadeTrace().bucket(0, 5)
    assert len(find_messages(made.build().events)) == 1
    assert [e["cat"] for e in find_messages(made.kernel(NCCL, 3, 5).build().events)] == ["kernel"]


@pytest.mark.parametrize(
    ("name", "matmul", "tensor_cores"),
    [
        ("ampere_sgemm_128x64_nn", True, False),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_tn_align1>(Params)", True, False),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4", True, False),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x5_nn_align4", True, True),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize64x64x64_stage3_tensor16x8x8", True, True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1", True, True),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn", True, True),
        ("volta_h884gemm_64x64_ldg8_nn", True, True),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", True, True),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", True, True),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80", True, False),
        ("void cudnn::cnn::implicit_convolve_sgemm<float, float, 128>", True, False),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>", False, False),
        ("void cudnn::ops::nchwToNhwcKernel<float>", False, False),
        (NCCL, False, False),
    ],
)
def test_kernel_names_show_tensor_cores(name, matmul, tensor_cores):
    assert (is_matmul(name), on_tensor_cores(name)) == (matmul, tensor_cores)


@pytest.mark.parametrize(
    "name", ["fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "fmha_cutlassB_f16_aligned_64x64_k64_sm80"]
)
def test_attention_with_a_mask_in_half_precision_is_on_tensor_cores(name):
    assert is_matmul(name) and on_tensor_cores(name)
    assert not on_tensor_cores("fmha_cutlassF_f32_aligned_64x64_rf_sm80")


def two_ranks():
    """Rank 1's clock started 2 ms after rank 0's. Both ranks have a flow with the same id, process and thread."""
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


def test_flows_of_two_ranks_stay_apart():
    flows = [(e["pid"], e["ph"], e["id"]) for e in merge_traces(two_ranks())["traceEvents"] if e["ph"] in "sf"]
    assert len(flows) == 4
    ids = {pid: {flow for p, _, flow in flows if p == pid} for pid in (1, 2)}
    assert all(len(found) == 1 for found in ids.values()) and ids[1] != ids[2]


def test_a_trace_is_rendered_compressed():
    document = merge_traces(two_ranks())
    assert json.loads(gzip.decompress(render_trace(document))) == document


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
def test_events_that_viewers_reject_are_found(events, found):
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
    # The clock of rank 1 started 1 ms later; by its own clock, the rank is not late.
    others = [late(rank, messages=(2, 5, 12, 15), kind=kind) for rank in (0, 2)]
    lateness = find_lateness([*others, late(1, messages=(4, 5, 12, 15), origin_ms=1, kind=kind)])
    assert (lateness.rank, lateness.share) == (1, 1.0)
    assert lateness.mean_s == pytest.approx((3e-3 + 1e-3) / 2)


def test_ranks_that_take_turns_share_the_lateness():
    lateness = find_lateness([late(0, messages=(4, 12)), late(1, messages=(2, 13))])
    assert (lateness.share, lateness.mean_s) == (0.5, pytest.approx(1.5e-3))


@pytest.mark.parametrize("traces", [[late(0, messages=(1,))], [late(0, messages=()), late(1, messages=())],
                                    [late(0, messages=(1, 2)), late(1, messages=(1,))]])  # fmt: skip
def test_no_rank_is_late_without_common_messages(traces):
    assert find_lateness(traces) is None
