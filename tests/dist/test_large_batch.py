"""A run of a large-batch study on real ranks: data, updates, evaluations, and a diverging loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.studies.large_batches import LargeBatchSettings
from paceline.training.train_settings import TrainSettings

STUDY = LargeBatchSettings(
    job=TrainSettings(
        channels=(2, 4), hidden=8, samples=40, test_samples=16, epochs=2, ranks=2, device="cpu", threads=1
    ),
    base_batch_size=4, global_batch_sizes=(16,), recipes=("none", "grow"), seeds=(3, 4), updates=5, most_at_once=4,
    evaluations=3,
)  # fmt: skip
CELLS = {cell.name: cell for cell in STUDY.list_cells(40)}


def train_all(names: list[str], lr: float | None) -> list[Any]:
    """For each cell: (records, bytes of its data, bytes of its initial weights, samples of each micro-batch)."""
    from paceline.studies import training_runs as measuring
    from paceline.training import loop

    build, take, found = measuring.build_job, loop.take_step, []
    seen: dict[str, Any] = {}

    def build_job(*args: Any, **options: Any) -> Any:
        job = build(*args, **options)
        inputs = [data.inputs.numpy().tobytes() for data in (job.train, job.test)]
        seen.update(data=inputs, weights=next(job.learner.module.parameters()).detach().numpy().tobytes(), micro=[])
        return job

    def take_step(learner: Any, window: Any, *rest: Any) -> Any:
        seen["micro"].append([len(loaded.batch) for loaded in window])
        return take(learner, window, *rest)

    measuring.build_job, loop.take_step = build_job, take_step
    try:
        for name in names:
            cell = CELLS[name]
            if lr is not None:
                cell = replace(cell, settings=replace(cell.settings, lr=lr))
            records = measuring.measure_training(cell, STUDY.evaluations, STUDY.seeds[0])
            found.append((records, seen["data"], seen["weights"], seen["micro"]))
    finally:
        measuring.build_job, loop.take_step = build, take
    return found


@pytest.fixture(scope="module")
def trained(warm_pool) -> dict[str, Any]:
    """Each cell as seen by two ranks."""
    ranks = warm_pool.run(train_all, (list(CELLS), None), num_ranks=2, timeout_s=90)
    return dict(zip(CELLS, zip(*ranks, strict=True), strict=True))


@pytest.mark.slow
def test_seeds_are_runs_of_one_task(trained):
    """Synthetic data does not depend on the seed; initial weights do, and so does training."""
    data = [rank[1] for of_cell in trained.values() for rank in of_cell]
    assert all(found == data[0] for found in data)
    weights = {(CELLS[name].settings.seed, rank[2]) for name, of_cell in trained.items() for rank in of_cell}
    assert len(weights) == 2
    losses = [of_cell[0][0][0].curve[-1].test_loss for of_cell in trained.values()]
    assert len(set(losses)) == len(losses)


def without_times(record):
    return replace(record, seconds=1.0, curve=tuple(replace(point, seconds=1.0) for point in record.curve))


def test_both_ranks_report_the_same_except_for_times(trained):
    for one, other in trained.values():
        assert without_times(one[0][0]) == without_times(other[0][0])
        assert one[0][1:] == other[0][1:]


@pytest.mark.parametrize(
    ("name", "updates", "epochs", "evaluated", "micro"),
    [
        ("epochs 4 none seed 3", 20, 2, [7, 14, 20], [2]),
        ("epochs 16 none seed 3", 6, 2, [2, 4, 6], [4, 4]),
        ("updates 16 none seed 3", 5, 1.8, [2, 4, 5], [4, 4]),
        ("updates 4 none seed 3", 5, 0.5, [2, 4, 5], [2]),
    ],
)
def test_updates_and_evaluations_are_as_requested(trained, name, updates, epochs, evaluated, micro):
    (record, *_), _, _, steps = trained[name][0]
    assert record.epochs == pytest.approx(epochs)
    assert (record.num_updates, len(steps), record.failure) == (updates, updates, "")
    assert [point.update for point in record.curve] == evaluated
    assert steps[0] == micro and record.batch_size == micro[0]
    done = sum(map(sum, steps)) + sum(map(sum, trained[name][1][3]))
    assert (record.num_samples, record.curve[-1].num_samples) == (done, done)
    assert (record.recipe, record.global_batch_size, record.largest_batch_size) == ("none", *[sum(micro) * 2] * 2)


def test_a_growing_batch_ends_at_the_requested_size(trained):
    (record, *_), _, _, steps = trained["epochs 16 grow seed 3"][0]
    assert (record.global_batch_size, record.largest_batch_size, record.batch_size) == (16, 16, 2)
    assert [sum(step) for step in steps][:8] == [2] * 8 and max(map(sum, steps)) == 8
    # The micro-batch of a rank grew as long as it fit, and no further.
    assert max(map(max, steps)) <= STUDY.most_at_once and record.num_samples == 80


def test_noise_is_probed_in_one_run_at_four_times(trained):
    found = {name: of_cell[0][0][1:] for name, of_cell in trained.items() if len(of_cell[0][0]) > 1}
    assert list(found) == ["epochs 4 none seed 3"]
    assert [(record.step, record.epoch) for record in found["epochs 4 none seed 3"]] == [
        (2, 0.2), (6, 0.6), (12, 1.2), (20, 2.0)
    ]  # fmt: skip


def test_a_nan_loss_ends_the_run_on_all_ranks(on_ranks):
    name = "epochs 16 none seed 3"
    for (((record,), _, _, steps),) in on_ranks(2, train_all, [name], 1e30):
        assert record.failure == "the loss was not finite after 2 updates"
        assert (record.num_updates, len(steps), record.curve) == (2, 2, ())
