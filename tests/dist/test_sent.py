"""The bytes each rank passes to all-reduce in a step, for every reducer, and in scaling studies."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from paceline.errors import MeasurementError
from paceline.studies.rank_scaling import ScaleSettings, ScalingCell, Setup
from paceline.training.train_settings import TrainSettings
from paceline.transport import why_not

JOB = TrainSettings(
    channels=(2, 4), hidden=8, dropout=0.0, samples=12, batch_size=2, wrapper="none", threads=1, device="cpu"
)
BACKENDS = ["gloo"] if why_not() else ["gloo", "paceline"]


def count_steps(backend: str, dtype_name: str) -> list[Any]:
    """For each reducer: (what was sent in each step, number of parameters, bytes of gradients, buckets of the plan).

    With half-precision gradients, BatchNorm's statistics need a separate message. One gradient is large enough for
    its own aligned space. Every second step has two micro-batches.
    """
    import torch
    from torch import nn

    import paceline
    from paceline.parallel import DDP
    from tests.dist.wrapped import REDUCERS

    received: list[Any] = []
    with paceline.init(backend=backend):
        for options in REDUCERS:
            layers = (nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 300), nn.Linear(300, 3))
            model = DDP(nn.Sequential(*layers).to(getattr(torch, dtype_name)), **options)
            params, sent = list(model.parameters()), []
            x = torch.ones(2, 4, dtype=params[0].dtype)
            for step in range(4):
                before = model.count_sent()
                if step % 2:
                    with model.no_sync():
                        model(x).sum().backward()
                model(x).sum().backward()
                after = model.count_sent()
                sent.append((after.num_messages - before.num_messages, after.num_bytes - before.num_bytes))
                model.zero_grad()
            assert model.plan is not None
            received.append(
                (options, sent, len(params), sum(param.nbytes for param in params), len(model.plan.buckets))
            )
            model.stop()
    return received


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_gradient_is_sent_once_and_nothing_else_is_counted(on_ranks, backend, dtype_name):
    received = on_ranks(2, count_steps, backend, dtype_name)
    assert received[0] == received[1]
    for options, sent, num_params, num_bytes, num_buckets in received[0]:
        is_simple = options["reducer"] == "simple"
        assert num_buckets == num_params or not is_simple
        # In the first step, the default reducer has no plan yet.
        assert sent == [(num_params if is_simple else 1, num_bytes), *[(num_buckets, num_bytes)] * 3], options


def measure_wrongly(settings: ScaleSettings, fault: str) -> tuple[str, int]:
    """The error, and the bytes of all gradients, if each message is sent twice or is not counted."""
    from paceline.measure import step_bench
    from paceline.parallel.channel import Channel
    from paceline.studies import rank_steps

    real_sum, real_send, real_run = Channel.start_sum, step_bench.TimedMessages._send, step_bench.StepBench.run
    num_bytes: list[int] = []

    def start_sum(channel: Any, tensor: Any, average: bool = False, gradient_bytes: int = 0) -> Any:
        if fault == "twice":
            real_sum(channel, tensor.clone(), average=average, gradient_bytes=gradient_bytes).wait()
            return real_sum(channel, tensor, average=average, gradient_bytes=gradient_bytes)
        return real_sum(channel, tensor, average=average)

    def send(messages: Any, bucket: Any) -> Any:
        if fault == "twice":
            real_send(messages, bucket).wait()
            return real_send(messages, bucket)
        future = real_send(messages, bucket)
        messages._buckets.pop()
        return future

    def run(bench: Any, *args: Any, **kwargs: Any) -> None:
        num_bytes.append(sum(param.nbytes for param in bench.variants[-1].replica.parameters))
        real_run(bench, *args, **kwargs)

    # type: ignore[method-assign]
    Channel.start_sum, step_bench.TimedMessages._send, step_bench.StepBench.run = start_sum, send, run
    words = "nothing"
    try:
        rank_steps.measure_scaling(settings, ScalingCell("weak", 2))
    except MeasurementError as error:
        words = str(error)
    finally:
        Channel.start_sum, step_bench.TimedMessages._send, step_bench.StepBench.run = (  # type: ignore[method-assign]
            real_sum, real_send, real_run
        )  # fmt: skip
        gc.collect()  # the study's wrappers; the next study on these ranks would find them in its group
    return words, num_bytes[0]


@pytest.mark.parametrize(("fault", "times"), [("twice", 2), pytest.param("uncounted", 0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "setup", [Setup("torch", "gloo"), *(Setup("paceline", backend) for backend in BACKENDS)], ids=str
)
def test_a_study_refuses_gradients_that_were_sent_twice_or_not_counted(on_ranks, setup, fault, times):
    settings = ScaleSettings(job=JOB, ranks=(1, 2), setups=(setup,), batch_sizes=(2,), iters=1)
    received = on_ranks(2, measure_wrongly, settings, fault)
    assert received[0] == received[1]
    words, num_bytes = received[0]
    assert f"{setup.wrapper} on {setup.backend}, 2 ranks: in step 1 rank 0 sent" in words
    assert f"{times * num_bytes} bytes of gradients in {times} messages but the plan has {num_bytes}" in words
