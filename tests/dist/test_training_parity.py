"""Training on several ranks against one process at the same global batch: one loss curve, one model, one message."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import TrainingError
from paceline.training.metrics import load_metrics
from paceline.training.settings import TrainSettings

CNN = TrainSettings(model="cnn", channels=(4, 8), hidden=16, device="cpu", threads=1, epochs=2, save_every="epoch")
GPT2 = replace(CNN, model="gpt2-tiny", channels=None, hidden=None, context=16, optimizer="adamw", lr=1e-3)
RESNET = replace(CNN, model="resnet18", channels=None, hidden=None, epochs=1, lr=0.02)


@dataclass(frozen=True)
class Seen:
    """What one rank has after training: the rows of metrics, its model, and the messages of each step."""

    rows: list[dict[str, Any]]
    weights: dict[str, torch.Tensor]
    messages: list[int]
    syncs: int | None

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    @property
    def digest(self) -> dict[str, str]:
        return {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in self.weights.items()}


def train_and_look(settings: TrainSettings, folder: Path, num_test: int = 40) -> Seen:
    """Train, with a small test set, and keep what `train` does not return."""
    import torch.distributed as dist

    from paceline.parallel import DataParallel
    from paceline.training import trainer
    from paceline.workloads.data import synthetic

    jobs: list[Any] = []
    messages: list[int] = []
    syncs: list[int] = []
    build, step, sizes = trainer.build_job, trainer.take_step, dict(synthetic._SIZES)

    def build_and_keep(*args: Any) -> Any:
        jobs.append(build(*args))
        return jobs[-1]

    def step_and_count(learner: Any, *args: Any) -> Any:
        before = dist.group.WORLD._get_sequence_number_for_group()
        outcome = step(learner, *args)
        messages.append(dist.group.WORLD._get_sequence_number_for_group() - before)
        if isinstance(learner.model, DataParallel):
            syncs[:] = [learner.model.report().num_steps]
        return outcome

    trainer.build_job, trainer.take_step = build_and_keep, step_and_count
    synthetic._SIZES["test"] = num_test
    try:
        trainer.train(settings, folder, False)
    finally:
        trainer.build_job, trainer.take_step = build, step
        synthetic._SIZES.update(sizes)
    weights = {name: tensor.clone() for name, tensor in jobs[0].learner.module.state_dict().items()}
    path = folder / "metrics.jsonl"
    return Seen(load_metrics(path) if path.exists() else [], weights, messages, syncs[0] if syncs else None)


@pytest.fixture
def train_on(on_ranks, tmp_path):
    """`train_on(ranks, settings)`: what each rank saw."""
    runs = iter(range(100))

    def run(ranks: int, settings: TrainSettings, **options: Any) -> list[Seen]:
        folder = tmp_path / str(next(runs))
        return on_ranks(ranks, functools.partial(train_and_look, **options), settings, folder)

    return run


def assert_parity(seen: list[Seen], wanted: Seen, tolerance: float, buffers_too: bool = True) -> None:
    """The curve and the model of one process within rounding, and one model on all ranks to the bit."""
    first = seen[0]
    assert first.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert [row["samples"] for row in first.rows] == [row["samples"] for row in wanted.rows]
    assert [row["accuracy"] for row in first.rows] == pytest.approx([row["accuracy"] for row in wanted.rows])
    for name, tensor in wanted.weights.items():
        if buffers_too or not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            torch.testing.assert_close(first.weights[name], tensor, rtol=tolerance, atol=tolerance, msg=name)
    for rank, other in enumerate(seen[1:], 1):
        assert other.digest == first.digest, f"rank {rank} has another model than rank 0"


@pytest.mark.parametrize("tail", ["keep", "drop", "pad"])
@pytest.mark.parametrize(
    ("ranks", "accumulate", "wrapper"),
    [(2, 1, "paceline"), (2, 3, "torch"), (3, 2, "paceline"), (3, 1, "torch")],
)
def test_a_cnn_learns_as_in_one_process(train_on, tail, ranks, accumulate, wrapper):
    """25 samples in batches of 12: the last window is one sample, less than there are ranks."""
    settings = replace(CNN, samples=25, global_batch_size=12, tail=tail)
    (alone,) = train_on(1, replace(settings, wrapper="none"))
    seen = train_on(ranks, replace(settings, wrapper=wrapper, accumulate=accumulate))
    assert len(alone.rows) == (4 if tail == "drop" else 6)
    assert alone.losses[-2] < alone.losses[0]
    assert_parity(seen, alone, 1e-5)
