"""Evaluation on several ranks: every sample once, and the result of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.runtime.ranks.launch import RankPool
from paceline.training.loop import Evaluation
from paceline.training.train_settings import TrainSettings

CNN = TrainSettings(model="cnn", channels=(4, 8), hidden=16, device="cpu", threads=1, samples=8, batch_size=2)
CASES = {
    "cnn": CNN,
    "gpt2": replace(CNN, model="gpt2-tiny", channels=None, hidden=None, context=16),
    "pairs": replace(CNN, model="gpt2-tiny", channels=None, hidden=None, data="synthetic:pairs", context=16),
    "numbers": replace(CNN, model="mlp", channels=None, data="synthetic:numbers"),
    "bf16": replace(CNN, precision="bf16"),
}


# on 3 ranks, 2 samples leave one rank without any; the other sizes give batches of 64 and a remainder
SIZES = (2, 67, 200)


@contextlib.contextmanager
def limit_test_set(num_test: int) -> Iterator[None]:
    from paceline.workloads.data import sets

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sets._SIZES, "test", num_test)
        yield


def evaluate_untrained(
    settings: TrainSettings, num_test: int, world: Any, spread: float = 0.0
) -> tuple[Evaluation, bool]:
    """A fresh model on a test set of this size; `spread` gives each rank different buffers. Also whether training
    continues afterward."""
    from paceline.training.build import build_job
    from paceline.training.loop import evaluate

    with limit_test_set(num_test):
        job = build_job(replace(settings, ranks=world.world_size), world)
    job.learner.model.train()
    for buffer in job.learner.module.buffers():
        if buffer.is_floating_point():
            buffer *= 1 + spread * (world.rank + 1)
    found = evaluate(job.learner, job.test, world)
    return found, job.learner.module.training


def evaluate_plainly(settings: TrainSettings, num_test: int, world: Any) -> tuple[float, float | None, float | None]:
    """Loss, accuracy and F1 by plain torch, one sample at a time, in double precision."""
    from paceline.training.build import build_job

    with limit_test_set(num_test):
        job = build_job(settings, world)
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


def evaluate_all() -> tuple[dict[Any, tuple[Evaluation, bool]], dict[str, Any]]:
    """Every case at every size in one world; on one rank also by plain torch."""
    import paceline

    torch._C._set_mkldnn_enabled(True)  # bf16 may have turned it off; it is the last case here
    with paceline.init(CNN.backend, CNN.device, threads=CNN.threads, announce=None) as world:
        names = [name for name in CASES if name != "bf16"] if world.world_size == 1 else []
        plain = {name: evaluate_plainly(CASES[name], 67, world) for name in names}
        return {(name, n): evaluate_untrained(CASES[name], n, world) for name in CASES for n in SIZES}, plain


@pytest.fixture(scope="module")
def evaluated(warm_pool: RankPool) -> dict[int, list[Any]]:
    """The results of each rank, by the number of ranks."""
    return {ranks: warm_pool.run(evaluate_all, (), num_ranks=ranks, timeout_s=90) for ranks in (1, 2, 3)}


@pytest.mark.parametrize("num_test", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_that_of_one_process(evaluated, name, num_test):
    alone, _ = evaluated[1][0][0][name, num_test]
    for ranks in (2, 3):
        for everything, _ in evaluated[ranks]:
            found, is_training = everything[name, num_test]
            assert (found.num_samples, found.accuracy, is_training) == (num_test, alone.accuracy, True)
            assert found.f1 == alone.f1
            assert found.loss == pytest.approx(alone.loss, rel=1e-9)


@pytest.mark.parametrize("name", [name for name in CASES if name != "bf16"])
def test_the_answer_is_that_of_plain_torch(evaluated, name):
    loss, accuracy, f1 = evaluated[1][0][1][name]
    found, _ = evaluated[2][0][0][name, 67]
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.accuracy == (None if accuracy is None else pytest.approx(accuracy, abs=1e-12))
    assert (f1 is not None) == (name == "pairs")
    assert found.f1 == (None if f1 is None else pytest.approx(f1, abs=1e-12))


def evaluate_spread(settings: TrainSettings, spreads: tuple[float, ...]) -> list[float]:
    """The loss for each spread."""
    import paceline

    with paceline.init(settings.backend, settings.device, threads=settings.threads, announce=None) as world:
        return [evaluate_untrained(settings, 4, world, spread)[0].loss for spread in spreads]


def test_running_statistics_are_those_of_rank_0_under_torch(on_ranks):
    """The only batch goes to rank 1, and each rank has its own statistics, which torch synchronizes too late."""
    settings = replace(CNN, model="resnet18", channels=None, hidden=None, wrapper="torch")
    ((alone, other),) = on_ranks(1, evaluate_spread, settings, (0.5, 1.0))
    for (found,) in on_ranks(2, evaluate_spread, settings, (0.5,)):
        assert found == pytest.approx(alone, rel=1e-6)
    assert other != pytest.approx(alone, rel=1e-5), "statistics would not matter"
