"""Evaluation on several ranks: every sample once, and the answer of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.training.loop import Evaluation
from paceline.training.settings import TrainSettings

CNN = TrainSettings(model="cnn", channels=(4, 8), hidden=16, device="cpu", threads=1, samples=8, batch_size=2)
CASES = {
    "cnn": CNN,
    "gpt2": replace(CNN, model="gpt2-tiny", channels=None, hidden=None, context=16),
    "pairs": replace(CNN, model="gpt2-tiny", channels=None, hidden=None, data="synthetic:pairs", context=16),
    "numbers": replace(CNN, model="mlp", channels=None, data="synthetic:numbers"),
    "bf16": replace(CNN, precision="bf16"),
}


def evaluate_untrained(settings: TrainSettings, num_test: int, spread: float = 0.0) -> tuple[Evaluation, bool]:
    """A fresh model on a test set of that size; `spread` gives each rank other buffers. Also whether it trains on."""
    import paceline
    from paceline.training.build import build_job
    from paceline.training.loop import evaluate
    from paceline.workloads.data import sets

    sizes = dict(sets._SIZES)
    sets._SIZES["test"] = num_test
    try:
        with paceline.init(settings.backend, settings.device, threads=settings.threads, announce=None) as world:
            job = build_job(replace(settings, ranks=world.world_size), world)
            job.learner.model.train()
            for buffer in job.learner.module.buffers():
                if buffer.is_floating_point():
                    buffer *= 1 + spread * (world.rank + 1)
            found = evaluate(job.learner, job.test, world)
            return found, job.learner.module.training
    finally:
        sets._SIZES.update(sizes)


def evaluate_alone(settings: TrainSettings, num_test: int) -> tuple[float, float | None, float | None]:
    """Loss, accuracy and F1 by plain torch, one sample after the other, in double precision."""
    import paceline
    from paceline.training.build import build_job
    from paceline.workloads.data import sets

    sizes = dict(sets._SIZES)
    sets._SIZES["test"] = num_test
    try:
        with paceline.init(settings.backend, settings.device, threads=settings.threads, announce=None) as world:
            job = build_job(settings, world)
    finally:
        sets._SIZES.update(sizes)
    model = job.learner.module.double().eval()
    losses: list[torch.Tensor] = []
    right: list[torch.Tensor] = []
    pairs: list[tuple[int, int]] = []
    for number in range(num_test):
        index = torch.tensor([number])
        batch = job.test.prepare(job.test.take(index), index, 0)
        inputs = batch.inputs.double() if batch.inputs.is_floating_point() else batch.inputs
        with torch.no_grad():
            answer: Any = model(inputs) if batch.mask is None else model(inputs, attention_mask=batch.mask)
        if job.test.form.num_classes == 0:
            losses.append((answer.reshape(-1) - batch.targets.reshape(-1)).square())
            continue
        answer, targets = answer.reshape(-1, answer.shape[-1]), batch.targets.reshape(-1)
        losses.append(-answer.log_softmax(-1)[torch.arange(len(targets)), targets])
        right.append((answer.argmax(-1) == targets).double())
        pairs += zip(answer.argmax(-1).tolist(), targets.tolist(), strict=True)
    f1 = None
    if job.test.form.num_classes == 2:
        hits = pairs.count((1, 1))
        precision, recall = hits / (hits + pairs.count((1, 0))), hits / (hits + pairs.count((0, 1)))
        f1 = 2 * precision * recall / (precision + recall)
    return torch.cat(losses).mean().item(), torch.cat(right).mean().item() if right else None, f1


@pytest.mark.parametrize("num_test", [2, 67, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_that_of_one_process(on_ranks, name, num_test):
    """On 3 ranks, 2 samples leave one without any; 67 and 200 are in batches of 64 and what is left."""
    settings = CASES[name]
    ((alone, _),) = on_ranks(1, evaluate_untrained, settings, num_test)
    for ranks in (2, 3):
        for found, is_training in on_ranks(ranks, evaluate_untrained, settings, num_test):
            assert (found.num_samples, found.accuracy, is_training) == (num_test, alone.accuracy, True)
            assert found.f1 == alone.f1
            assert found.loss == pytest.approx(alone.loss, rel=1e-9)


@pytest.mark.parametrize("name", [name for name in CASES if name != "bf16"])
def test_the_answer_is_that_of_plain_torch(on_ranks, name):
    loss, accuracy, f1 = on_ranks(1, evaluate_alone, CASES[name], 67)[0]
    found, _ = on_ranks(2, evaluate_untrained, CASES[name], 67)[0]
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.accuracy == (None if accuracy is None else pytest.approx(accuracy, abs=1e-12))
    assert (f1 is not None) == (name == "pairs")
    assert found.f1 == (None if f1 is None else pytest.approx(f1, abs=1e-12))


def test_running_statistics_are_those_of_rank_0_under_torch(on_ranks):
    """The only batch goes to rank 1, and each rank has statistics of its own; torch evens them out late."""
    settings = replace(CNN, model="resnet18", channels=None, hidden=None, wrapper="torch")
    ((alone, _),) = on_ranks(1, evaluate_untrained, settings, 4, 0.5)
    for found, _ in on_ranks(2, evaluate_untrained, settings, 4, 0.5):
        assert found.loss == pytest.approx(alone.loss, rel=1e-6)
    ((other, _),) = on_ranks(1, evaluate_untrained, settings, 4, 1.0)
    assert other.loss != pytest.approx(alone.loss, rel=1e-5), "statistics would not matter"
