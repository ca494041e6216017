"""Advice on synthetic traces: each rule applies exactly when it should, with the right number."""

import pytest

from paceline.errors import RecordError
from paceline.predict.advice import MessageShare, StepFacts, advise, find_message_share
from paceline.predict.traces import Lateness, build_overview
from tests.unit.made_traces import NCCL, SGEMM, TENSOR_GEMM, MadeTrace

FACTS = StepFacts(batch_size=32, world_size=2)


def given(made, kind, facts=FACTS, lateness=None):
    """The advice of this kind, or None."""
    found = advise([build_overview(made.build())], facts, lateness)
    assert [a.gain_s for a in found] == sorted((a.gain_s for a in found), reverse=True)
    return next((advice for advice in found if advice.kind == kind), None)


def full_gpu(**arguments):
    """A GPU that keeps its tensor cores busy all the time."""
    return MadeTrace(properties={"name": "NVIDIA H200"}).step().kernel(TENSOR_GEMM, 0, 10, **arguments)


def with_messages(exposed, hidden=0.0):
    """10 ms with one message hidden behind kernels and one exposed message at the end."""
    made = MadeTrace().step().kernel(TENSOR_GEMM, 0, 10 - exposed).phase("backward", 4, 10 - exposed)
    return made.kernel(NCCL, 10 - exposed - hidden, 10, tid=20)


@pytest.mark.parametrize(("accumulate", "more", "per_micro_batch"), [(1, 2, "2.1 ms"), (4, 8, "525 µs")])
def test_accumulating_halves_exposed_messages(accumulate, more, per_micro_batch):
    advice = given(with_messages(4.2), "accumulate", StepFacts(32, accumulate=accumulate, world_size=2))
    assert (advice.gain_s, advice.certainty) == (pytest.approx(2.1e-3), "computed")
    # 0.42 / (0.42 + 2 * 0.58)
    for words in ("42% of kernel time", "4.2 ms per step is exposed", f"over {more} micro-batches", "about 27%"):
        assert words in advice.text
    assert advice.text.endswith(f"save {per_micro_batch} per micro-batch")
    assert advice.factor == pytest.approx(10 / 7.9)


def test_messages_that_are_hidden_or_few_give_no_advice():
    assert given(with_messages(0.0, hidden=5.0), "accumulate") is None
    assert given(with_messages(0.4), "accumulate") is None
    assert given(with_messages(4.2), "accumulate", StepFacts(32, world_size=1)) is None


def test_on_a_cpu_the_share_is_of_the_step():
    made = MadeTrace().step().op("aten::mm", 0, 6).bucket(5, 10)
    advice = given(made, "accumulate")
    assert (advice.gain_s, "40% of the step" in advice.text) == (pytest.approx(2e-3), True)
    # The message takes 5 ms, 4 of them exposed; at half the bytes it takes 2.5 ms less.
    assert given(made, "compress").gain_s == pytest.approx(2.5e-3)


def test_the_optimizer_is_not_repeated_with_the_micro_batches():
    made = MadeTrace().step().op("aten::mm", 0, 5).bucket(5, 8).phase("optimizer", 8, 10)
    found = find_message_share([build_overview(made.build())])
    assert (found.share, found.of, found.optimizer) == (pytest.approx(0.3), "the step", pytest.approx(0.2))
    assert found.estimate(2) == pytest.approx(3 / (3 + 2 + 2 * 5))
    assert "about 20%" in given(made, "accumulate").text
    assert MessageShare(0.422, "kernel time", 0.0, 0).estimate(2) == pytest.approx(0.267, abs=5e-4)


def test_on_a_gpu_messages_of_the_host_are_a_share_of_the_step():
    made = MadeTrace(rank=1).step().kernel(TENSOR_GEMM, 0, 5).bucket(4, 8).phase("optimizer", 8, 10)
    found = find_message_share([build_overview(made.build())])
    assert found == (pytest.approx(0.3), "the step", pytest.approx(0.2), 1)
    assert "30% of the step" in given(made, "accumulate").text


def test_another_plan_can_hide_what_fits_behind_backward():
    advice = given(with_messages(2, hidden=1), "buckets")
    assert (advice.gain_s, advice.certainty) == (pytest.approx(2e-3), "at most")
    assert "communication takes 3 ms and backward 4 ms" in advice.text
    assert given(with_messages(4), "buckets") is None


def test_a_late_rank_is_named_and_costs_no_more_than_is_exposed():
    advice = given(with_messages(2), "late rank", lateness=Lateness(rank=3, share=1.0, mean_s=1.5e-3))
    assert (advice.gain_s, "wait 1.5 ms per step for rank 3" in advice.text) == (pytest.approx(1.5e-3), True)
    advice = given(with_messages(2), "late rank", lateness=Lateness(rank=3, share=0.5, mean_s=5e-3))
    assert (advice.gain_s, "the last rank changes" in advice.text) == (pytest.approx(2e-3), True)
    assert given(with_messages(2), "late rank", lateness=Lateness(3, 1.0, 1e-4)) is None
    assert given(full_gpu(), "late rank", lateness=Lateness(3, 1.0, 5e-3)) is None


def test_messages_are_judged_by_the_rank_that_waits_least():
    overviews = [build_overview(with_messages(exposed).build()) for exposed in (6, 1)]
    assert next(a for a in advise(overviews, FACTS) if a.kind == "accumulate").gain_s == pytest.approx(0.5e-3)


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("data", ("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")),
        ("data", ("user_annotation", "data")),
        ("copies", ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)")),
    ],
)
def test_waiting_for_data_or_copies_counts_from_5_percent(kind, event):
    made = MadeTrace().step().kernel(TENSOR_GEMM, 2, 10).add(*event, 0, 2)
    advice = given(made, kind)
    assert (advice.gain_s, advice.certainty, "20%" in advice.text) == (pytest.approx(2e-3), "at most", True)
    assert given(MadeTrace().step().kernel(TENSOR_GEMM, 0.4, 10).add(*event, 0, 0.4), kind) is None


def optimizer(*operators, last=10):
    made = MadeTrace().step().op("aten::mm", 0, 6).phase("optimizer", 6, last)
    for number, name in enumerate(operators):
        made.op(name, 6 + number, 7 + number)
    return made


def test_an_optimizer_of_many_operators_could_be_one_pass():
    advice = given(optimizer("aten::lerp_", "aten::addcmul_", "aten::sqrt", "aten::addcdiv_"), "optimizer")
    assert advice.gain_s == pytest.approx(4e-3 * 3 / 4)
    assert "takes 4 ms (40% of the step) and makes 4 passes over the parameters" in advice.text
    assert given(optimizer("aten::_fused_adamw_"), "optimizer") is None
    assert given(optimizer("aten::lerp_", "aten::sqrt", last=6.5), "optimizer") is None


def test_a_gpu_that_waits_for_the_host():
    made = MadeTrace().step().kernel(TENSOR_GEMM, 0, 1.5).op("aten::mm", 0, 9)
    advice = given(made, "host")
    assert (advice.gain_s, advice.certainty) == (pytest.approx(8.5e-3), "at most")
    assert "15% busy" in advice.text and "a batch of 256 instead of 32" in advice.text
    assert advice.factor == pytest.approx(10 / 1.5)
    assert given(full_gpu(), "host") is None
    assert given(MadeTrace().step().op("aten::mm", 0, 9), "host") is None


def launches(mean_us, count=100):
    made = MadeTrace().step().op("aten::mul", 0, 9)
    for number in range(count):
        begin = number * 0.05
        made.kernel("elementwise", begin, begin + mean_us / 1e3)
        made.add("cuda_runtime", "cudaLaunchKernel", begin, begin + 0.02)
    return made


def test_many_small_kernels_are_bound_by_their_launches():
    advice = given(launches(4), "launches")
    assert advice.gain_s == pytest.approx(100 * 20e-6)
    assert "launching 100 kernels per step, 4 µs each, takes 2 ms" in advice.text
    assert given(launches(40), "launches") is None
    assert given(launches(4, count=10), "launches") is None


def fp32(gpu="NVIDIA H200", host=1.0):
    return MadeTrace(properties={"name": gpu}).step().kernel(SGEMM, 0, 8).kernel("relu", 8, 10).op("a", 0, host)


def test_matrix_kernels_without_tensor_cores_give_an_estimate_that_states_its_assumption():
    advice = given(fp32(), "tensor cores")
    assert advice.gain_s == pytest.approx(8e-3 * (1 - 2 * 67 / 989))
    assert advice.certainty == "estimated"
    for words in ("8 ms of matrix kernels", "--precision bf16", "7.4 times as fast", "NVIDIA H200"):
        assert words in advice.text
    assert given(fp32("Some GPU"), "tensor cores").gain_s == pytest.approx(8e-3 * 3 / 4)
    # No step is shorter than the host's own work.
    assert given(fp32(host=8), "tensor cores").gain_s == pytest.approx(2e-3)
    assert "multiples of 8" in given(fp32(), "tensor cores", StepFacts(32, precision="bf16")).text
    assert given(full_gpu(), "tensor cores") is None


def test_kernels_that_fill_few_sms_want_a_larger_batch():
    advice = given(full_gpu(**{"blocks per SM": 0.3}), "batch")
    assert (advice.gain_s, "30% of the SMs" in advice.text) == (pytest.approx(7e-3), True)
    assert given(full_gpu(**{"blocks per SM": 0.9}), "batch") is None


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (full_gpu(**{"blocks per SM": 4}), f"step is kernels, 100% of 10 ms, with 10 ms in {TENSOR_GEMM}"),
        (MadeTrace().step().op("aten::mm", 0, 9), "step is operators, 90% of 10 ms, with 9 ms in aten::mm"),
    ],
)
def test_without_a_problem_the_bound_is_named(made, words):
    (advice,) = advise([build_overview(made.build())], FACTS)
    assert (advice.kind, advice.gain_s, advice.factor) == ("bound", 0.0, 1.0)
    assert words in advice.text


def test_all_advice_has_a_number():
    made = fp32().kernel(NCCL, 8, 10, tid=9)
    assert all(
        any(letter.isdigit() for letter in advice.text) for advice in advise([build_overview(made.build())], FACTS)
    )
    with pytest.raises(RecordError, match="no rank was recorded"):
        advise([], FACTS)


def test_a_gpu_without_bf16_gets_fp16_advice():
    made = MadeTrace(properties={"name": "Tesla V100-SXM2-16GB"}).step().kernel("volta_sgemm_128x64_nn", 0, 9)
    (advice,) = advise([build_overview(made.build())], StepFacts(32))
    assert "--precision fp16" in advice.text
