"""A stopped and resumed run equals an uninterrupted one: same losses, weights and samples.

The command's output and exit code are tested in `tests/cli/test_train_stops.py`.
"""

from __future__ import annotations

import collections
import errno
import itertools
import os
import shutil
import signal
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from paceline.errors import ConfigError, PacelineError, RecordError, TrainingError
from paceline.records.training import load_metrics
from paceline.training.checkpoint_files import load_checkpoint
from paceline.training.train_settings import TrainSettings

# Two epochs of nine steps: eight of 12 samples and one of four, or 12 with `pad`.
SMALL: dict[str, Any] = {
    "model": "cnn", "channels": (2, 4), "hidden": 8, "samples": 100, "batch_size": 6, "epochs": 2, "dropout": 0.2,
    "save_every": "3steps", "keep": 20, "ranks": 2,
}  # fmt: skip
STEPS = 18
# Every column of a row except durations.
NOTED = ("step", "epoch", "loss", "accuracy", "samples", "lr", "test_loss", "test_accuracy", "test_samples")
NORMED = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(196, 10)
    )
"""


@dataclass(frozen=True)
class Seen:
    """One rank's outcome: how training ended, and its samples in order, as (epoch, index)."""

    step: int
    signal: int
    samples: tuple[tuple[int, int], ...]
    error: PacelineError | None = None


def train_watched(settings: TrainSettings, folder: Path, resume: bool, before_step: Callable[[int], None]) -> Seen:
    """Train in a rank. `before_step` gets the number of each step of this call, from 1."""
    from paceline.training import loader, loop

    real = loader.split_window, loop.load_windows, loop.take_step
    samples: list[tuple[int, int]] = []
    epochs: list[int] = []
    steps: list[int] = []

    def split_window(*args: Any) -> Any:
        parts = real[0](*args)
        samples.extend((epochs[-1], int(index)) for part in parts for index in part.indices[: part.num_counted])
        return parts

    def load_windows(data: Any, order: Any, *rest: Any) -> Any:
        epochs.append(order.epoch)
        return real[1](data, order, *rest)

    def take_step(*args: Any) -> Any:
        steps.append(len(steps) + 1)
        before_step(steps[-1])
        return real[2](*args)

    loader.split_window, loop.load_windows, loop.take_step = split_window, load_windows, take_step
    try:
        result = loop.train(settings, folder, resume)
    except (ConfigError, TrainingError) as error:  # returned, because a failed rank would be restarted
        return Seen(0, 0, tuple(samples), error)
    finally:
        loader.split_window, loop.load_windows, loop.take_step = real
    return Seen(result.step, result.signal, tuple(samples))


def pass_by(step: int) -> None:
    """Does nothing."""


def stop_the_last_rank(step: int) -> None:
    if step == 4 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def outcomes(on_ranks):
    """`outcomes(folder, ...)`: train SMALL with changes; returns each rank's outcome, which may be an error."""

    def run(
        folder: Path, resume: bool = False, before_step: Callable[[int], None] = pass_by, **changes: Any
    ) -> list[Seen]:
        folder.mkdir(exist_ok=True)
        settings = TrainSettings(**(SMALL | changes))
        return on_ranks(settings.ranks, train_watched, settings, folder, resume, before_step)

    return run


@pytest.fixture
def train(outcomes):
    """Like `outcomes`, but expects no error."""

    def run(*args: Any, **options: Any) -> list[Seen]:
        seen = outcomes(*args, **options)
        assert [item.error for item in seen] == [None] * len(seen)
        return seen

    return run


@pytest.fixture
def refuse(outcomes):
    """Like `outcomes`, but all ranks must raise the same error, which is returned."""

    def run(*args: Any, **options: Any) -> PacelineError:
        errors = [seen.error for seen in outcomes(*args, **options)]
        assert errors[0] is not None and {str(error) for error in errors} == {str(errors[0])}
        return errors[0]

    return run


@pytest.fixture(scope="module")
def reference(warm_pool, tmp_path_factory) -> Path:
    """The folder of SMALL, run without interruption."""
    folder = tmp_path_factory.mktemp("reference")
    warm_pool.run(train_watched, (TrainSettings(**SMALL), folder, False, pass_by), num_ranks=2)
    return folder


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    return sorted((folder / "checkpoints").iterdir(), reverse=True)


def copy_until(step: int, run: Path, folder: Path) -> Path:
    """A copy of a run as if it had been killed some time after the checkpoint of this step."""
    shutil.copytree(run, folder)
    for path in checkpoints(folder):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    (folder / "weights.safetensors").unlink()
    return folder


def assert_same_run(one: Path, other: Path) -> None:
    """Compare rows and weights bit for bit, and optimizer, scaler and all ranks' random state in the last
    checkpoint."""
    rows, others = (
        [{key: row.get(key) for key in NOTED} for row in load_metrics(folder / "metrics.jsonl")]
        for folder in (one, other)
    )
    assert rows == others
    assert (one / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()
    last, other_last = checkpoints(one)[0], checkpoints(other)[0]
    for file in ("model.safetensors", "state.safetensors", "state.json"):
        assert (last / file).read_bytes() == (other_last / file).read_bytes(), file
    assert not list(other.rglob(".*")), "something temporary is left"


def test_a_stopped_run_saves_its_position_and_resumes_bit_identically(train, reference, tmp_path):
    # One rank gets the signal, and all stop after the same step.
    first = train(tmp_path / "run", before_step=stop_the_last_rank)
    assert {(seen.signal, seen.step) for seen in first} == {(signal.SIGTERM, first[0].step)}
    assert 4 <= first[0].step < STEPS and not (tmp_path / "run" / "weights.safetensors").exists()
    assert checkpoints(tmp_path / "run")[0].name == f"step-{first[0].step:08}"
    again = train(tmp_path / "run", resume=True)
    assert {seen.step for seen in again} == {STEPS}
    samples = collections.Counter(sample for seen in first + again for sample in seen.samples)
    assert samples == {(epoch, index): 1 for epoch in range(2) for index in range(100)}
    assert_same_run(reference, tmp_path / "run")


CASES = {
    "adamw": {"optimizer": "adamw", "lr": 0.003, "schedule": "cosine", "lr_warmup": 4, "weight_decay": 0.1},
    "lars": {"optimizer": "lars", "lr": 2.0, "schedule": "piecewise", "lr_drops": (0.3, 0.6), "weight_decay": 0.01},
    "lamb": {"optimizer": "lamb", "lr": 0.01, "schedule": "linear"},
    "fp16": {"precision": "fp16", "clip": 1.0},
    "bf16": {"precision": "bf16", "optimizer": "adamw", "lr": 0.003},
    "accumulate": {"batch_size": 2, "accumulate": 3, "schedule": "linear", "tail": "pad"},
    "torch": {"wrapper": "torch"},
    "gloo": {"backend": "gloo", "tail": "drop", "clip": 0.5},
    "normed": {"model": "normed"},
    "normed-torch": {"model": "normed", "wrapper": "torch"},
    "ghosts": {"model": "normed", "ghost_batchnorm": 4},
    "synced": {"model": "normed", "sync_batchnorm": True},
    "alone": {"ranks": 1, "wrapper": "none"},
    # Step 6 is in the middle of their rounds; the last round is shorter, as is one that ends at an evaluation.
    "diloco": {"strategy": "diloco:4,fragments=2,delay=3+int8", "optimizer": "adamw", "lr": 0.003},
    "localsgd": {"strategy": "localsgd:4,after=3", "model": "normed", "precision": "fp16"},
    "slowmo": {"strategy": "slowmo:4", "backend": "gloo", "schedule": "cosine"},
    "int8": {"strategy": "int8", "schedule": "cosine"},
    "dgc": {"strategy": "topk:0.05,dgc,warmup=9", "schedule": "linear"},
    "powersgd": {"strategy": "powersgd:1", "backend": "gloo", "schedule": "cosine"},
    "zero1": {"strategy": "zero1", "optimizer": "adamw", "lr": 0.003},
    "zero1-gloo": {"strategy": "zero1+bf16", "backend": "gloo", "schedule": "cosine", "clip": 0.5},
    "hooked": {"strategy": "topk:0.1,warmup=9", "wrapper": "torch", "schedule": "cosine"},
    "workers": {"strategy": "topk:0.1", "model": "normed", "ranks": 1, "workers": 2, "schedule": "cosine"},
    "workers-diloco": {"strategy": "diloco:4,fragments=2,delay=3+int8", "ranks": 1, "workers": 3, "lr": 0.003},
}


# One of each kind; the others are slow.
QUICK = ("diloco", "dgc", "zero1-gloo")


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in CASES])
def test_everything_that_a_step_depends_on_is_kept(train, tmp_path, case):
    changes = dict(CASES[case])
    if changes.get("model") == "normed":
        (tmp_path / "own.py").write_text(NORMED)
        changes |= {"model": f"{tmp_path / 'own.py'}:build", "data": "synthetic:images"}
        changes |= {"channels": None, "hidden": None, "dropout": None}
    train(tmp_path / "whole", **changes)
    # Step 6 is in the middle of an epoch, and the rows of later steps already exist.
    folder = copy_until(6, tmp_path / "whole", tmp_path / "broken")
    train(folder, resume=True, **changes)
    assert_same_run(tmp_path / "whole", folder)


@pytest.fixture(scope="module")
def plain_reference(warm_pool, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    warm_pool.run(train_watched, (TrainSettings(**SMALL | PLAIN), folder, False, pass_by), num_ranks=2)
    return folder


PLAIN = {"dropout": None, "lr": 0.02}


@pytest.mark.parametrize("ranks", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_another_number_of_ranks_takes_the_same_steps(train, plain_reference, tmp_path, ranks):
    first = train(tmp_path / "run", before_step=stop_the_last_rank, **PLAIN)
    shared = {"ranks": ranks, "batch_size": None, "global_batch_size": 12}
    middle = train(tmp_path / "run", resume=True, before_step=stop_the_last_rank, **PLAIN, **shared)
    assert {seen.signal for seen in middle} == {signal.SIGTERM}
    last = train(tmp_path / "run", resume=True, **PLAIN)
    samples = collections.Counter(sample for seen in first + middle + last for sample in seen.samples)
    assert samples == {(epoch, index): 1 for epoch in range(2) for index in range(100)}
    rows, whole = (load_metrics(folder / "metrics.jsonl") for folder in (tmp_path / "run", plain_reference))
    assert [(row["step"], row["samples"]) for row in rows] == [(row["step"], row["samples"]) for row in whole]
    # Sums in a different order: close, but not identical.
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], rel=1e-3)
    weights, others = (
        safetensors.torch.load_file(folder / "weights.safetensors") for folder in (plain_reference, tmp_path / "run")
    )
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-2, atol=1e-4)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_skipped_and_replaced(train, reference, tmp_path):
    folder = copy_until(12, reference, tmp_path / "run")
    flip_a_bit(checkpoints(folder)[0] / "model.safetensors")
    (seen, _) = train(folder, resume=True)
    assert len(seen.samples) == 50  # from step 9 on, which ended the first epoch
    assert_same_run(reference, folder)
    for path in checkpoints(folder):
        load_checkpoint(path)


def test_a_run_does_not_restart_if_every_checkpoint_is_damaged(refuse, reference, tmp_path):
    folder = copy_until(6, reference, tmp_path / "run")
    for path in checkpoints(folder):
        flip_a_bit(path / "model.safetensors")
    before = (folder / "metrics.jsonl").read_bytes()
    error = refuse(folder, resume=True)
    assert isinstance(error, ConfigError) and error.code == "damaged"
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 9}, "model"),
        pytest.param({"batch_size": 5}, "10", marks=pytest.mark.slow),
        pytest.param({"samples": 99}, "99", marks=pytest.mark.slow),
        ({"strategy": "int8"}, "'int8'"),
        pytest.param({"ranks": 1, "workers": 2, "batch_size": 12}, "worker", marks=pytest.mark.slow),
        ({"epochs": 1}, "--epochs 1"),
    ],
)
def test_settings_that_contradict_the_checkpoint_are_refused_and_nothing_changes(
    refuse, reference, tmp_path, changes, words
):
    folder = copy_until(15, reference, tmp_path / "run")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    error = refuse(folder, resume=True, **changes)
    assert isinstance(error, ConfigError) and words in str(error)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_run_that_ended_before_its_first_checkpoint_starts_over(train, reference, tmp_path):
    folder = copy_until(0, reference, tmp_path / "run")
    train(folder, resume=True)
    assert_same_run(reference, folder)


def test_a_finished_run_stays_finished(train, refuse, reference, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    (folder / "checkpoints" / ".saving-step-00000018").mkdir()
    (folder / ".weights.safetensors.abc").touch()
    assert [(seen.step, seen.samples) for seen in train(folder, resume=True)] == [(STEPS, ())] * 2
    assert_same_run(reference, folder)
    shutil.rmtree(folder / "checkpoints")
    assert refuse(folder, resume=True).code == "finished"
    assert (folder / "weights.safetensors").read_bytes() == (reference / "weights.safetensors").read_bytes()


def test_more_epochs_equal_a_longer_run(train, reference, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(reference, folder)
    train(folder, resume=True, epochs=3)
    train(tmp_path / "longer", epochs=3)
    assert_same_run(tmp_path / "longer", folder)


def spoil_the_update(step: int) -> None:
    """In step 5 the loss is still finite, but the weights after it are not."""
    from paceline.training.step import Learner

    real = Learner.update

    def update(learner: Any) -> None:
        Learner.update = real
        real(learner)
        next(learner.module.parameters()).data.fill_(float("inf"))

    if step == 5:
        Learner.update = update


@pytest.mark.parametrize(
    ("changes", "before_step", "kept"),
    [
        ({"lr": 1e20, "save_every": "epoch"}, pass_by, []),
        ({"save_every": "3steps"}, spoil_the_update, ["step-00000003"]),
        pytest.param({"save_every": "5steps"}, spoil_the_update, [], marks=pytest.mark.slow),
        pytest.param(
            {"save_every": "1steps", "keep": 2},
            spoil_the_update,
            ["step-00000004", "step-00000003"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_non_finite_values_are_never_saved(refuse, tmp_path, changes, before_step, kept):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    error = refuse(folder, before_step=before_step, **changes)
    assert isinstance(error, TrainingError) and error.code == "not-finite"
    assert [path.name for path in checkpoints(folder)] == kept
    assert not kept or f"step {int(kept[0][5:])}" in str(error)
    for path in checkpoints(folder):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in load_checkpoint(path).model.values())
    assert not (folder / "weights.safetensors").exists()


def fill_the_disk(step: int) -> None:
    """From the eighth step on, with the checkpoint of step 3 on disk, no file can be written completely."""
    from paceline.training import checkpoint_files

    real = checkpoint_files._write

    def write(path: Path, data: Any) -> str:
        real(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == 8:
        checkpoint_files._write = write


def test_a_full_disk_ends_the_run_in_one_line_and_harms_no_checkpoint(outcomes, train, reference, tmp_path):
    # Only rank 0 raises the error, so the ranks are terminated, which also discards their patched functions.
    with pytest.raises(RecordError, match="No space left on device") as caught:
        outcomes(tmp_path / "run", before_step=fill_the_disk)
    assert "\n" not in str(caught.value)
    kept = checkpoints(tmp_path / "run")
    assert [load_checkpoint(path).step for path in kept][-1] == 3 and len(kept) <= 2
    train(tmp_path / "run", resume=True)
    assert_same_run(reference, tmp_path / "run")


def train_by_ticks(settings: TrainSettings, folder: Path) -> list[int]:
    """The steps at which this rank saved. Saves are timed by a clock that ticks on rank 0 whenever it is read, and
    stands still on the others: the interval depends neither on the machine nor on its load."""
    from paceline.training import checkpoint_files, checkpoints, loop

    ticks, saved, save = itertools.count(), [], checkpoints.RunFiles.save
    speed = 1.0 if os.environ["RANK"] == "0" else 0.0
    clock = types.SimpleNamespace(monotonic=lambda: speed * next(ticks), time=time.time)

    def noted(self: Any, job: Any, position: Any) -> None:
        saved.append(position.step)
        save(self, job, position)

    with pytest.MonkeyPatch.context() as patch:
        for module in (checkpoints, checkpoint_files):
            patch.setattr(module, "time", clock)
        patch.setattr(checkpoints.RunFiles, "save", noted)
        loop.train(settings, folder)
    return saved


def test_saves_at_the_best_interval_are_those_of_rank_0_on_all_ranks(on_ranks, tmp_path):
    settings = TrainSettings(**(SMALL | {"save_every": "auto", "mtbf": "1s", "epochs": 6}))
    mine, other = on_ranks(2, train_by_ticks, settings, tmp_path)
    rows = load_metrics(tmp_path / "saves.jsonl")
    assert mine == other == [row["step"] for row in rows]
    assert len(rows) > 2 and rows[-1]["step"] == 54
    assert all(row["stall_s"] > row["wait_s"] > 0 <= row["write_s"] and row["next_s"] > 0 for row in rows)
    saved = [f"step-{row['step']:08}" for row in rows[-settings.keep :]]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == saved
