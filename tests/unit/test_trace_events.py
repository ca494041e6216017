"""Traces as torch writes them: what is read, and what a name tells."""

import pytest

from paceline.errors import RecordError
from paceline.predict.traces import find_messages, find_steps, is_collective, is_matmul, read_chrome
from paceline.predict.traces import uses_tensor_cores as on_tensor_cores
from tests.unit.made_traces import NCCL, MadeTrace

BASE = 1_790_857_026_000_000_000


def chrome(*events, **fields):
    return {"traceEvents": list(events), "baseTimeNanoseconds": BASE, **fields}


def event(name="aten::mm", ts=3_883_694_637_495.382, **fields):
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": 2.0, **fields}


def test_times_become_small_and_the_origin_is_of_the_unix_clock():
    trace = read_chrome(
        chrome(event(), event(ts=3_883_694_637_496.382), distributedInfo={"rank": 3, "world_size": 4}, host_name="box")
    )
    assert [e["ts"] for e in trace.events] == [0.0, 1.0]
    assert trace.origin_ns == pytest.approx(BASE + 3_883_694_637_495_382, abs=1000)
    assert (trace.rank, trace.world_size, trace.host, trace.device) == (3, 4, "box", "cpu")


def test_without_a_base_times_are_of_the_unix_clock():
    trace = read_chrome({"traceEvents": [event(ts=1.7e15)]}, rank=1)
    assert (trace.origin_ns, trace.rank) == (round(1.7e18), 1)


def test_what_is_about_the_profiler_and_arguments_that_nobody_needs_are_left_out():
    kernel = {**event("k"), "cat": "kernel", "pid": 0, "args": {"stream": 7, "blocks per SM": 0.5, "Ev Idx": 12}}
    metadata = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}}
    spans = [{**event(), "pid": "Spans"}, {**event(), "cat": "Trace"}, {"ph": "i", "name": "end", "pid": "", "ts": 1}]
    trace = read_chrome(chrome(kernel, metadata, *spans, deviceProperties=[{"name": "H200", "numSms": 132}]))
    assert [e["name"] for e in trace.events] == ["k", "thread_name"]
    assert trace.events[0]["args"] == {"stream": 7, "blocks per SM": 0.5}
    assert trace.events[1]["args"] == {"name": "stream 7"}
    assert (trace.device, trace.properties[0]["numSms"]) == ("cuda", 132)


@pytest.mark.parametrize("document", [{}, {"traceEvents": {}}, chrome()])
def test_what_is_no_trace_is_refused(document):
    with pytest.raises(RecordError, match="trace"):
        read_chrome(document)


def test_our_steps_come_before_the_profilers():
    made = MadeTrace().phase("ProfilerStep#5", 0, 4).phase("forward", 0, 1).phase("ProfilerStep#6", 4, 8)
    assert [e["name"] for e in find_steps(made.build().events)] == ["ProfilerStep#5", "ProfilerStep#6"]
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
        ("user_annotation", "nccl:all_reduce", False),  # its launch: the kernel is the message
        ("gpu_user_annotation", "nccl:all_reduce", False),
        ("user_annotation", "forward", False),
        ("bucket", "bucket 0, 1 MiB", True),
        ("bucket_wait", "bucket 0, 1 MiB", False),
        ("cpu_op", "c10d::allreduce_", False),
    ],
)
def test_messages_are_told_by_kind_and_name(kind, name, is_message):
    assert is_collective({"cat": kind, "name": name}) is is_message


def test_a_bucket_does_not_count_beside_the_kernel_that_carries_it():
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
def test_names_of_kernels_tell_tensor_cores(name, matmul, tensor_cores):
    assert (is_matmul(name), on_tensor_cores(name)) == (matmul, tensor_cores)


@pytest.mark.parametrize(
    "name", ["fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "fmha_cutlassB_f16_aligned_64x64_k64_sm80"]
)
def test_attention_with_a_mask_in_half_precision_is_on_tensor_cores(name):
    assert is_matmul(name) and on_tensor_cores(name)
    assert not on_tensor_cores("fmha_cutlassF_f32_aligned_64x64_rf_sm80")
