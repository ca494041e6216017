"""Growing batches on real ranks: the samples, losses and steps of one process, also after a resume."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.records.training import load_metrics
from paceline.training.train_settings import TrainSettings
from paceline.workloads.data.sharding import EpochOrder
from tests.dist.test_training_parity import CNN, assert_parity, train_and_look
from tests.dist.test_training_resume import (
    SMALL,
    Seen,
    assert_same_run,
    checkpoints,
    copy_until,
    pass_by,
    stop_the_last_rank,
    train_watched,
)

# 200 samples in batches of 12, of 24 from sample 80, and of 48 from sample 120: both inside an epoch.
GROWN = SMALL | {"batch_growth": ((0.4, 2), (0.6, 4)), "save_every": "1steps"}
SIZES = [12] * 7 + [16, 24, 48, 28]
STEPS = len(SIZES)


@pytest.fixture
def train(on_ranks):
    """`train(folder, ...)`: train GROWN with changes; returns each rank's records."""

    def run(folder: Path, resume: bool = False, before_step: Any = pass_by, **changes: Any) -> list[Seen]:
        folder.mkdir(exist_ok=True)
        settings = TrainSettings(**(GROWN | changes))
        return on_ranks(settings.ranks, train_watched, settings, folder, resume, before_step)

    return run


def find_windows(seen: list[Seen], sizes: list[int]) -> list[list[tuple[int, int]]]:
    """The samples of each global batch in rank order; each of two ranks takes half of a batch."""
    rests = [list(item.samples) for item in seen]
    return [
        [sample for rank, rest in enumerate(rests) for sample in take(rest, size, rank, len(rests))] for size in sizes
    ]


def take(rest: list[tuple[int, int]], size: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    count = (rank + 1) * size // world_size - rank * size // world_size
    taken, rest[:] = rest[:count], rest[count:]
    return taken


@pytest.mark.parametrize(
    ("ranks", "grow"),
    [(2, "accumulate"), *(pytest.param(n, "batch-size", marks=[pytest.mark.slow] * (n < 3)) for n in (1, 2, 3))],
)
def test_the_sample_order_is_that_of_a_constant_batch(train, tmp_path, ranks, grow):
    shared = {"ranks": ranks, "batch_size": None, "global_batch_size": 12, "grow": grow}
    seen = train(tmp_path / "run", **shared)
    assert [item.step for item in seen] == [STEPS] * ranks
    assert [row["samples"] for row in load_metrics(tmp_path / "run" / "metrics.jsonl")] == SIZES
    found = [sample for window in find_windows(seen, SIZES) for sample in window]
    order = [EpochOrder(100, 100, 1, epoch).window(0).tolist() for epoch in range(2)]
    assert found == [(epoch, index) for epoch, indices in enumerate(order) for index in indices]


@pytest.mark.parametrize(
    ("wrapper", "accumulate", "tail", "grow"),
    [
        pytest.param("paceline", 1, "keep", "accumulate", marks=pytest.mark.slow),
        ("paceline", 2, "pad", "batch-size"),
        ("torch", 2, "drop", "accumulate"),
        pytest.param("torch", 1, "keep", "batch-size", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_like_one_process_on_whole_batches(on_ranks, tmp_path, wrapper, accumulate, tail, grow):
    """Two epochs of 50 samples in batches of 4, of 8 from sample 30 on, and of 24 from sample 70 on.

    The single process takes each batch at once, so growth in micro-batches is compared with growth of the batch itself.
    """
    settings = replace(CNN, samples=50, global_batch_size=4, batch_growth=((0.3, 2), (0.7, 6)), tail=tail)
    look = functools.partial(train_and_look, num_test=1)
    (alone,) = on_ranks(1, look, replace(settings, wrapper="none", grow="batch-size"), tmp_path / "alone")
    tails = {"keep": ([2], [2]), "drop": ([], []), "pad": ([8], [24])}[tail]
    assert [row["samples"] for row in alone.rows] == [4] * 8 + [8, 8, *tails[0]] + [8] * 3 + [24, *tails[1]]
    on_two = replace(settings, wrapper=wrapper, accumulate=accumulate, grow=grow)
    assert_parity(on_ranks(2, look, on_two, tmp_path / "two"), alone)


def count_micro_batches(settings: TrainSettings, folder: Path) -> list[list[int]]:
    """The samples of each micro-batch on this rank, step by step."""
    from paceline.training import loop

    steps: list[list[int]] = []
    real = loop.take_step

    def take_step(learner: Any, window: Any, *rest: Any) -> Any:
        steps.append([len(loaded.batch) for loaded in window])
        return real(learner, window, *rest)

    loop.take_step = take_step
    try:
        loop.train(settings, folder, False)
    finally:
        loop.take_step = real
    return steps


@pytest.mark.parametrize(
    ("grow", "wanted"),
    [
        ("accumulate", [[3, 3]] * 7 + [[2, 3, 3], [3] * 4, [3] * 8, [2, 3, 3, 3, 3]]),
        ("batch-size", [[3, 3]] * 7 + [[4, 4], [6, 6], [12, 12], [7, 7]]),
    ],
)
def test_micro_batches_become_more_or_larger(on_ranks, tmp_path, grow, wanted):
    settings = TrainSettings(**(GROWN | {"batch_size": 3, "accumulate": 2, "grow": grow, "save_every": "epoch"}))
    assert on_ranks(2, count_micro_batches, settings, tmp_path) == [wanted, wanted]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grow", "schedule"), [pytest.param("accumulate", "constant", marks=pytest.mark.slow), ("batch-size", "cosine")]
)
def test_a_resume_before_and_after_growths_is_bit_identical(train, tmp_path, grow, schedule):
    """Steps 9 and 10 are in the second epoch, after the first and second growth; step 6 is before both."""
    changes = {"grow": grow, "schedule": schedule}
    train(tmp_path / "whole", **changes)
    for step in (6, 9, 10):
        folder = copy_until(step, tmp_path / "whole", tmp_path / f"from-{step}")
        assert [seen.step for seen in train(folder, resume=True, **changes)] == [STEPS] * 2
        assert_same_run(tmp_path / "whole", folder)


def test_a_stopped_run_continues_on_other_ranks_through_a_growth(train, tmp_path):
    plain = {"dropout": None, "lr": 0.02, "ranks": 3, "batch_size": None, "global_batch_size": 12}
    first = train(tmp_path / "run", before_step=stop_the_last_rank, **plain)
    (last,) = train(tmp_path / "run", resume=True, **(plain | {"ranks": 1}))
    done = first[0].step
    assert 4 <= done < STEPS and last.step == STEPS
    order = [EpochOrder(100, 100, 1, epoch).window(0).tolist() for epoch in range(2)]
    wanted = [(epoch, index) for epoch, indices in enumerate(order) for index in indices]
    assert [s for window in find_windows(first, SIZES[:done]) for s in window] == wanted[: sum(SIZES[:done])]
    assert list(last.samples) == wanted[sum(SIZES[:done]) :]
    train(tmp_path / "whole", **plain)
    rows, whole = (load_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], rel=1e-3)


def test_a_different_growth_is_refused_and_changes_nothing(train, tmp_path):
    train(tmp_path / "run", ranks=1, batch_size=12)
    folder = copy_until(9, tmp_path / "run", tmp_path / "again")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for changes, words in (
        ({"batch_growth": ()}, "24 from sample 80 on, to 48 from sample 120 on"),
        ({"batch_growth": ((0.4, 3), (0.6, 4))}, "36 from sample 80 on"),
        ({"epochs": 3}, "24 from sample 120 on"),
    ):
        (seen,) = train(folder, resume=True, **({"ranks": 1, "batch_size": 12} | changes))
        assert isinstance(seen.error, ConfigError) and seen.error.code == "mismatch" and words in str(seen.error)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("steps", [5, 22])
def test_a_short_run_equals_the_beginning_of_a_longer_one(train, tmp_path, steps):
    """Epochs have nine steps, so the short run ends inside the first or the third."""
    constant = {"batch_growth": (), "epochs": 1}
    seen = train(tmp_path / "run", steps=steps, **constant)
    assert [item.step for item in seen] == [steps] * 2
    train(tmp_path / "longer", **(constant | {"epochs": 3}))
    rows, longer = (load_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "longer"))
    assert [row["loss"] for row in rows] == [row["loss"] for row in longer[:steps]]
    assert [row["step"] for row in rows if "test_loss" in row] == [*range(9, steps, 9), steps]
    assert checkpoints(tmp_path / "run")[0].name == f"step-{steps:08}"
    folder = copy_until(4, tmp_path / "run", tmp_path / "again")
    train(folder, resume=True, steps=steps, **constant)
    assert_same_run(tmp_path / "run", folder)
    train(folder, resume=True, steps=27, **constant)
    assert (folder / "weights.safetensors").read_bytes() == (tmp_path / "longer" / "weights.safetensors").read_bytes()


def test_the_learning_rate_decays_over_the_requested_steps(train, tmp_path):
    train(tmp_path / "run", ranks=1, batch_size=12, steps=12, schedule="linear", lr=0.12, batch_growth=(), epochs=1)
    rates = [row["lr"] for row in load_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rates == pytest.approx([0.12 - 0.01 * step for step in range(12)])
