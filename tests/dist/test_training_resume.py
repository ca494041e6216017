"""A run that is stopped and goes on is the run that was never stopped: same losses, same weights, same samples.

What the command says and how it ends is tested in `tests/cli/test_train_stops.py`.
"""

from __future__ import annotations

import collections
import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import ConfigError, PacelineError, RecordError, TrainingError
from paceline.training.checkpoints import verify_checkpoint
from paceline.training.metrics import load_metrics
from paceline.training.settings import TrainSettings
from paceline.training.tensorfiles import load_tensors

SMALL: dict[str, Any] = {
    "model": "cnn", "channels": (2, 4), "hidden": 8, "samples": 100, "batch_size": 6, "epochs": 2, "dropout": 0.2,
    "save_every": "3steps", "keep": 20,
}  # fmt: skip
STEPS = 18  # two epochs of nine: eight of 12 samples and one of four
# Of the undisturbed run, all that does not tell the time.
NOTED = ("step", "epoch", "loss", "accuracy", "samples", "lr", "test_loss", "test_accuracy", "test_samples")

NORMED = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(256, 10)
    )
"""


@dataclass(frozen=True)
class Seen:
    """What one rank did: how training ended there, and the samples that it learnt from, in order, as (epoch, index)."""

    step: int
    signal: int
    samples: tuple[tuple[int, int], ...]
    error: PacelineError | None = None


def train_watched(
    settings: TrainSettings, folder: str, resume: bool, stop_after: int | None, spoil: Callable[[int], None] | None
) -> Seen:
    """Train in a rank. After so many steps rank 1, or the only one, gets SIGTERM; `spoil` is called at each step."""
    from paceline.training import loader, trainer

    samples: list[tuple[int, int]] = []
    steps = [0]
    split, take = loader.split_window, trainer.take_step
    epochs: list[int] = []

    def watch_order(order: Any) -> Any:
        epochs.append(order.epoch)
        return order

    def spy(*args: Any) -> Any:
        parts = split(*args)
        samples.extend((epochs[-1], int(index)) for part in parts for index in part.indices[: part.num_counted])
        return parts

    def take_step(*args: Any) -> Any:
        steps[0] += 1
        if spoil is not None:
            spoil(steps[0])
        if steps[0] == stop_after and int(os.environ["RANK"]) == min(1, int(os.environ["WORLD_SIZE"]) - 1):
            os.kill(os.getpid(), signal.SIGTERM)
        return take(*args)

    load = trainer.load_windows
    trainer.load_windows = lambda data, order, *rest: load(data, watch_order(order), *rest)
    loader.split_window, trainer.take_step = spy, take_step
    try:
        result = trainer.train(settings, Path(folder), resume)
    except PacelineError as error:  # returned, so that the rank stays warm: all ranks must come here
        return Seen(0, 0, tuple(samples), error)
    finally:
        trainer.load_windows, loader.split_window, trainer.take_step = load, split, take
    return Seen(result.step, result.signal, tuple(samples))


@pytest.fixture
def trained(on_ranks, tmp_path):
    """`trained(name, ranks, ...)`: train in a folder of tmp_path; what each rank saw."""

    def run(
        name: str,
        ranks: int = 2,
        resume: bool = False,
        stop_after: int | None = None,
        spoil: Callable[[int], None] | None = None,
        **changes: Any,
    ) -> list[Seen]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        settings = TrainSettings(**(SMALL | {"ranks": ranks} | changes))
        return on_ranks(ranks, train_watched, settings, str(folder), resume, stop_after, spoil)

    return run


def assert_same_run(one: Path, other: Path) -> None:
    """Rows and weights to the bit; and optimizer, scaler and the random numbers of all ranks in the last checkpoint."""
    rows, others = ([{key: row.get(key) for key in NOTED} for row in load_metrics(f / "metrics.jsonl")] for f in (one, other))
    assert rows == others
    assert (one / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()
    last = f"checkpoints/{max(path.name for path in (one / 'checkpoints').iterdir())}"
    for file in ("model.safetensors", "state.safetensors", "state.json"):
        assert (one / last / file).read_bytes() == (other / last / file).read_bytes(), file


CASES = {
    "sgd": {},
    "adamw": {"optimizer": "adamw", "lr": 0.003, "schedule": "cosine", "lr_warmup": 4, "weight_decay": 0.1, "clip": 1.0},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16", "optimizer": "adamw", "lr": 0.003},
    "accumulate": {"batch_size": 2, "accumulate": 3, "schedule": "linear", "tail": "pad"},
    "torch": {"wrapper": "torch"},
    "gloo": {"backend": "gloo", "tail": "drop"},
    "normed": {"model": "normed"},
    "normed-torch": {"model": "normed", "wrapper": "torch"},
    "synced": {"model": "normed", "sync_batchnorm": True},
}


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_goes_on_to_the_bit(trained, tmp_path, case):
    changes = dict(CASES[case])
    if changes.get("model") == "normed":
        (tmp_path / "own.py").write_text(NORMED)
        changes |= {"model": f"{tmp_path / 'own.py'}:build", "data": "synthetic:images"}
        changes |= {"channels": None, "hidden": None, "dropout": None}
    whole = trained("whole", **changes)
    first = trained("broken", stop_after=4, **changes)
    assert {seen.signal for seen in first} == {signal.SIGTERM} and 4 <= first[0].step < whole[0].step
    assert not (tmp_path / "broken" / "weights.safetensors").exists()
    again = trained("broken", resume=True, **changes)
    assert [a.samples + b.samples for a, b in zip(first, again, strict=True)] == [seen.samples for seen in whole]
    assert_same_run(tmp_path / "whole", tmp_path / "broken")


def loss_rows(folder: Path) -> list[float]:
    return [row["loss"] for row in load_metrics(folder / "metrics.jsonl")]


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_see_every_sample_once(trained, tmp_path, ranks):
    whole = {"dropout": None, "optimizer": "sgd", "lr": 0.02}
    trained("whole", **whole)
    first = trained("broken", stop_after=4, **whole)
    shared = {"global_batch_size": 12, "batch_size": None}
    middle = trained("broken", ranks=ranks, resume=True, stop_after=9, **whole, **shared)
    assert {seen.signal for seen in middle} == {signal.SIGTERM}
    last = trained("broken", resume=True, **whole)
    counted = collections.Counter(sample for part in (first, middle, last) for seen in part for sample in seen.samples)
    assert counted == {(epoch, index): 1 for epoch in range(2) for index in range(100)}
    assert [row["step"] for row in load_metrics(tmp_path / "broken" / "metrics.jsonl")] == list(range(1, STEPS + 1))
    # Sums in another order, so close and no more.
    assert loss_rows(tmp_path / "broken") == pytest.approx(loss_rows(tmp_path / "whole"), rel=1e-3)
    weights, others = (load_tensors(tmp_path / name / "weights.safetensors") for name in ("whole", "broken"))
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-2, atol=1e-4)


def newest(folder: Path, count: int = 1) -> list[Path]:
    return sorted((folder / "checkpoints").iterdir(), reverse=True)[:count]


def flip_a_bit(checkpoint: Path, name: str) -> None:
    content = bytearray((checkpoint / name).read_bytes())
    content[len(content) // 2] ^= 4
    (checkpoint / name).write_bytes(content)


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over(trained, tmp_path, name, reference):
    trained("broken", stop_after=8)
    damaged, before = newest(tmp_path / "broken", 2)
    flip_a_bit(damaged, name)
    (seen, _) = trained("broken", resume=True)
    assert len(seen.samples) > 0
    assert_same_run(reference, tmp_path / "broken")
    # What was damaged is there again, whole.
    for path in (tmp_path / "broken" / "checkpoints").iterdir():
        verify_checkpoint(path)


@pytest.fixture(scope="module")
def reference(warm_pool, tmp_path_factory):
    """The folder of the undisturbed run of SMALL on two ranks."""
    folder = tmp_path_factory.mktemp("reference")
    warm_pool.run(train_watched, (TrainSettings(**SMALL, ranks=2), str(folder), False, None, None), num_ranks=2)
    return folder


@pytest.fixture
def copied(reference, tmp_path):
    """A copy of the undisturbed run, to go on with: `copied(step)` has only its checkpoints up to that step."""

    def copy(step: int) -> Path:
        folder = tmp_path / "copied"
        shutil.copytree(reference, folder)
        for path in newest(folder, 100):
            if int(path.name.removeprefix("step-")) > step:
                shutil.rmtree(path)
        if step < STEPS:
            (folder / "weights.safetensors").unlink()
        return folder

    return copy
