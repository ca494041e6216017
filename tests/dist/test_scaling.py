"""The cells of scaling studies on real ranks: the ranks in a turn, their messages, and no updates.

Batch sizes on one rank are tested here, too: their epochs, and a batch that does not fit into memory.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pytest

from paceline.errors import ConfigError
from paceline.studies.rank_scaling import ScaleSettings, ScalingCell, Setup
from paceline.training.train_settings import TrainSettings
from paceline.transport import why_not

# 12 samples: two global batches of 6 in an epoch.
JOB = TrainSettings(
    channels=(2, 4), hidden=8, dropout=0.0, samples=12, batch_size=2, wrapper="none", threads=1, device="cpu"
)
SETUPS = [Setup("torch", "gloo"), Setup("paceline", "gloo")]
if not why_not():
    SETUPS.append(Setup("paceline", "shm"))
ITERS = 2
STUDY = ScaleSettings(
    job=JOB, ranks=(1, 2, 3), setups=tuple(SETUPS), batch_sizes=(2,), global_batch_sizes=(6,), iters=ITERS
)


@dataclass
class Taken:
    """A step on this rank: its turn, its number in the turn, its start and end, and the applied gradients."""

    setup: Setup
    world_size: int
    kind: str
    number: int
    samples: int
    begin_s: float
    end_s: float = 0.0
    grads: list[Any] | None = None

    @property
    def turn(self) -> tuple[Setup, int]:
        return self.setup, self.world_size


def measure_watched(settings: ScaleSettings, cell: ScalingCell) -> Any:
    """(records, number of steps on this rank, whether any parameter moved, bytes of all gradients)."""
    import torch

    from paceline.measure import step_bench as benching
    from paceline.studies import rank_steps
    from paceline.training import step as stepping

    real_take, real_run, real_step, real_update = (
        benching.StepBench._take, benching.StepBench.run, benching.take_step, stepping.Learner.update
    )  # fmt: skip
    steps: list[Taken] = []
    counts: dict[Any, int] = {}
    now: list[Any] = [None]
    moved: list[bool] = []
    num_bytes: list[int] = []

    def take(bench: Any, turn: Any, kind: str) -> None:
        now[0] = turn, kind
        real_take(bench, turn, kind)

    def take_step(learner: Any, window: Any, *rest: Any) -> Any:
        turn, kind = now[0]
        key = Setup(turn.labels["wrapper"], turn.labels["backend"]), turn.labels["world_size"]
        samples = sum(len(loaded.batch) for loaded in window)
        taken = Taken(*key, kind, counts.get(key, 0), samples, time.perf_counter())
        counts[key] = taken.number + 1
        steps.append(taken)
        outcome = real_step(learner, window, *rest)
        taken.end_s = time.perf_counter()
        return outcome

    def update(learner: Any) -> None:
        steps[-1].grads = [param.grad.clone().numpy() for param in learner.parameters]
        real_update(learner)

    def run(bench: Any, *args: Any, **kwargs: Any) -> None:
        learners = [variant.replica for variant in bench.variants if variant.replica is not None]
        before = [[param.detach().clone() for param in learner.parameters] for learner in learners]
        num_bytes.append(sum(param.nbytes for param in learners[0].parameters) if learners else 0)
        real_run(bench, *args, **kwargs)
        for learner, values in zip(learners, before, strict=True):
            moved.extend(not torch.equal(a, b) for a, b in zip(learner.parameters, values, strict=True))

    benching.StepBench._take, benching.StepBench.run = take, run  # type: ignore[method-assign]
    benching.take_step, stepping.Learner.update = take_step, update
    try:
        records = rank_steps.measure_scaling(settings, cell)
    finally:
        benching.StepBench._take, benching.StepBench.run = real_take, real_run  # type: ignore[method-assign]
        benching.take_step, stepping.Learner.update = real_step, real_update
    return records, steps, any(moved), num_bytes[0]


@pytest.fixture(scope="module", params=STUDY.cells, ids=lambda cell: cell.name)
def measured(request, warm_pool):
    """(cell, what each of three ranks observed)."""
    seen = warm_pool.run(measure_watched, (STUDY, request.param), num_ranks=3, timeout_s=90)
    return request.param, seen


def test_interleaved_variants_have_equal_repetitions(measured):
    cell, seen = measured
    records = seen[0][0]
    assert [(r.role, r.wrapper, r.backend, r.world_size) for r in records] == [
        ("job", "none", "", 1), *(("local", c.wrapper, c.backend, 1) for c in SETUPS),
        *(turn for n in (2, 3)
          for turn in (("together", "none", "", n), *(("job", c.wrapper, c.backend, n) for c in SETUPS))),
    ]  # fmt: skip
    for record in records:
        is_whole = record.role == "job" and record.world_size > 1
        received = [record.timing, record.no_comm, record.busy] if is_whole else [record.timing]
        assert all((s.count, s.num_ranks) == (ITERS, record.world_size) for s in received)
        assert len({len(s.warmup_seconds) for s in received}) == 1 and len(received[0].warmup_seconds) > 0
        assert (record.mode, record.cell_size) == (cell.mode, cell.samples)


def test_every_rank_has_the_same_records(measured):
    _, seen = measured
    assert seen[0][0] == seen[1][0] == seen[2][0]


def test_a_rank_computes_its_share(measured):
    cell, seen = measured
    wanted = {1: 2, 2: 2, 3: 2} if cell.mode == "weak" else {1: 6, 2: 3, 3: 2}
    assert {r.world_size: r.batch_size for r in seen[0][0]} == wanted
    for _, steps, _, _ in seen:
        assert all(step.samples == wanted[step.world_size] for step in steps)


def test_buckets_hold_all_gradients_and_one_rank_sends_nothing(measured):
    records, _, _, num_bytes = measured[1][0]
    assert num_bytes > 0
    for record in records:
        sent = 0 if record.wrapper == "none" else num_bytes  # or would be sent if there were another rank
        assert (record.num_bytes, sum(record.bucket_bytes)) == (sent, sent)
        assert record.num_messages == len(record.bucket_bytes)


def test_ranks_outside_a_turn_wait_without_stepping(measured):
    _, seen = measured
    rounds = ITERS + len(seen[0][0][0].timing.warmup_seconds)
    turns = [(c, n) for n in (1, 2, 3) for c in (Setup("none", ""), *SETUPS)]
    for rank, (_, steps, _, _) in enumerate(seen):
        found = {turn: sum(step.turn == turn for step in steps) for turn in turns}
        assert found == {
            turn: rounds * (1 if "none" in turn[0].wrapper or turn[1] == 1 else 3) * (rank < turn[1]) for turn in turns
        }
    # All processes on a host share a clock: steps of different turns never overlap.
    spans = sorted(
        (step.begin_s, step.end_s, (step.turn, step.number)) for _, steps, _, _ in seen for step in steps
    )  # fmt: skip
    for (_, end_s, one), (begin_s, _, other) in itertools.pairwise(spans):
        assert one == other or end_s <= begin_s


def test_parameters_do_not_change(measured):
    assert [moved for _, _, moved, _ in measured[1]] == [False] * 3


def list_steps(seen: Any, world_size: int, kinds: tuple[str, ...]) -> dict[Any, list[Taken]]:
    """The corresponding steps of all ranks."""
    found: dict[Any, list[Taken]] = {}
    for _, steps, _, _ in seen:
        for step in steps:
            if step.setup.wrapper != "none" and step.world_size == world_size and step.kind in kinds:
                found.setdefault((step.turn, step.number), []).append(step)
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_averaged_only_over_the_ranks_of_the_turn(measured, world_size):
    cell, seen = measured
    for together in list_steps(seen, world_size, ("plain", "timed")).values():
        assert len(together) == world_size
        for step in together[1:]:
            assert all((a == b).all() for a, b in zip(step.grads, together[0].grads, strict=True))
    silent = list_steps(seen, world_size, ("no_comm",)).values()
    assert all((one.grads[0] != other.grads[0]).any() for one, other, *_ in silent)
    if cell.mode == "weak":
        return
    # A single rank computed the same global batches, so no other gradients are included.
    alone = {step.number: step.grads for step in seen[0][1] if step.turn == (Setup("none", ""), 1)}
    shared = [(key[1], steps[0]) for key, steps in list_steps(seen, world_size, ("plain", "timed")).items()]
    compared = [(step.grads, alone[number]) for number, step in shared if number in alone]
    assert len(compared) >= len(SETUPS)
    for found, wanted in compared:
        for a, b in zip(found, wanted, strict=True):
            numpy.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "cell", "words"),
    [
        ({}, 2, ScalingCell("weak", 2), "3 ranks"),
        pytest.param({}, 3, ScalingCell("weak", 5), "batch of 15", marks=pytest.mark.slow),
        pytest.param({}, 3, ScalingCell("strong", 15), "batch of 15", marks=pytest.mark.slow),
        ({"job": replace(JOB, accumulate=3)}, 3, ScalingCell("weak", 2), "batch of 18"),
    ],
)
def test_impossible_ranks_or_data_are_refused_on_all_ranks(on_ranks, changes, num_ranks, cell, words):
    received = on_ranks(num_ranks, fail_to_measure, replace(STUDY, **changes), cell)
    assert len(set(received)) == 1 and words in received[0]


def fail_to_measure(settings: ScaleSettings, cell: ScalingCell) -> str:
    """Return its error, to keep the warm rank alive."""
    from paceline.studies.rank_steps import measure_scaling

    with pytest.raises(ConfigError) as caught:
        measure_scaling(settings, cell)
    return str(caught.value)


# -- one rank at one batch size ----------------------------------------------------------------------------------------


def sweep(settings: TrainSettings, epochs: int, breaks_at: int | None = None, text: str = "", kind: str = "") -> Any:
    """(the record, samples of each step); the step with this number raises an error."""
    import torch

    from paceline.studies.batch_sizes import measure_batch
    from paceline.training import loop

    kinds = {"runtime": RuntimeError, "memory": MemoryError, "gpu": torch.OutOfMemoryError}
    real, steps = loop.take_step, []

    def take_step(learner: Any, window: Any, *rest: Any) -> Any:
        steps.append(sum(len(loaded.batch) for loaded in window))
        if len(steps) - 1 == breaks_at:
            raise kinds[kind](text)
        return real(learner, window, *rest)

    loop.take_step = take_step
    try:
        (record,) = measure_batch(settings, epochs)
    finally:
        loop.take_step = real
    return record, steps


def test_batch_sizes_are_timed_over_whole_epochs_after_a_warm_up(on_ranks):
    ((record, steps),) = on_ranks(1, sweep, replace(JOB, batch_size=5), 3)
    assert steps == [5, 5, 2] * 3
    assert (record.batch_size, record.num_samples, record.num_steps, record.failure) == (5, 12, 3, "")
    for samples in (record.timing, record.data_wait):
        assert (samples.count, len(samples.warmup_seconds), samples.num_ranks) == (2, 1, 1)
    assert record.peak_bytes > 0 and record.samples_per_s == pytest.approx(12 / record.timing.median_s)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("runtime", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        ("runtime", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        ("memory", ""),
        ("gpu", "CUDA out of memory."),
    ],
)
def test_a_batch_that_does_not_fit_is_a_row(on_ranks, kind, text):
    ((record, steps),) = on_ranks(1, sweep, replace(JOB, batch_size=4), 2, 4, text, kind)
    assert len(steps) == 5  # the run ends there
    assert (record.failure, record.timing, record.data_wait) == ("out of memory in epoch 2", None, None)
    assert (record.batch_size, record.num_samples, record.num_steps) == (4, 12, 3)


def test_a_batch_above_the_data_is_a_row(on_ranks):
    ((record, steps),) = on_ranks(1, sweep, replace(JOB, batch_size=16), 2, 0, "", "runtime")
    assert (record.failure, record.timing, steps) == ("more than the 12 samples of an epoch", None, [])


def test_other_errors_do_not_become_rows(on_ranks):
    (received,) = on_ranks(1, fail_to_sweep, replace(JOB, batch_size=4), "size mismatch", RuntimeError)
    assert "size mismatch" in received


def fail_to_sweep(settings: TrainSettings, text: str, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        sweep(settings, 2, 0, text, "runtime")
    return str(caught.value)
