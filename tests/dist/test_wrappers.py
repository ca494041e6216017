"""Wrappers on real ranks: which parameters count as wrong, and the results of one measurement."""

from __future__ import annotations

import statistics

import pytest
import torch
import torch.distributed as dist

import paceline
from paceline.measure.bench_settings import WrapperSettings
from paceline.measure.wrappers import count_wrong_parameters, measure_wrappers
from paceline.records import StepRecord
from paceline.records.steps import compare_wrappers

SHAPES = ((4, 3), (5,), ())
STEPS = 10


CHANGES = {
    # Number of wrong parameters per rank, compared only with rank 0, and also with torch's wrapper.
    "nothing": ([0, 0], [0, 0]),
    "rounded otherwise": ([0, 0], [0, 0]),
    "one rank diverges by one bit": ([0, 1], [0, 1]),
    "one rank has a NaN": ([0, 1], [0, 1]),
    "all have a NaN": ([1, 1], [1, 1]),
    # Equal on both ranks, and nearly correct: only the direction of the change reveals the error.
    "the sum was not divided": ([0, 0], [1, 1]),
    "one never moved": ([0, 0], [1, 1]),
}


def count_after_changes() -> dict[str, tuple[int, int]]:
    """Three parameters that moved by 1e-4 from a start near 1. One of them is modified on one or both ranks."""
    counts = {}
    with paceline.init("gloo", announce=None) as world:
        torch.manual_seed(0)
        start = [1 + torch.rand(shape) for shape in SHAPES]
        ways = [1e-4 * torch.randn(shape) for shape in SHAPES]
        reference = [origin + way for origin, way in zip(start, ways, strict=True)]
        group = dist.group.WORLD
        assert group is not None
        for change in CHANGES:
            mine = [parameter.clone() for parameter in reference]
            if change == "one rank diverges by one bit" and world.rank == 1:
                mine[1][2] = torch.nextafter(mine[1][2], torch.tensor(2.0))
            elif (change == "one rank has a NaN" and world.rank == 1) or change == "all have a NaN":
                mine[0][0, 0] = float("nan")
            elif change == "the sum was not divided":
                mine[0] = start[0] + 2 * ways[0]
            elif change == "one never moved":
                mine[2] = start[2].clone()
            elif change == "rounded otherwise":
                mine = [parameter * (1 + 1e-7) for parameter in mine]
            alone, with_torch = (count_wrong_parameters(mine, start, r, group, STEPS, 0.05) for r in (None, reference))
            counts[change] = alone, with_torch
    return counts


def test_a_diverged_replica_is_counted(on_ranks):
    by_rank = on_ranks(2, count_after_changes)
    for change, (alone, with_torch) in CHANGES.items():
        assert [tuple(counts[change]) for counts in by_rank] == list(zip(alone, with_torch, strict=True)), change


@pytest.mark.slow
def test_bfloat16_runs_under_autocast_and_is_checked(on_ranks):
    wanted = WrapperSettings(
        models=("cnn",), wrappers=("bare", "torch", "paceline"), dtype="bfloat16", batch_size=2, iters=1, warmup=1
    )
    _, torch_record, ours = on_ranks(2, measure_wrappers, wanted)[0].records
    for record in (torch_record, ours):
        assert (record.precision, record.num_wrong, record.num_checked) == ("bf16", 0, 16)


def test_a_measurement_is_equal_on_every_rank_and_has_every_phase(on_ranks):
    wanted = WrapperSettings(
        models=("cnn",), wrappers=("paceline", "bare", "torch"), ranks=(1, 2), batch_size=2, iters=3, warmup=1
    )
    first, second = on_ranks(2, measure_wrappers, wanted)
    assert first.records == second.records
    records = first.records
    assert [(r.world_size, r.wrapper) for r in records] == [
        (n, wrapper) for n in (1, 2) for wrapper in ("paceline", "bare", "torch")
    ]
    for record in records:
        assert isinstance(record, StepRecord)
        assert (record.timing.count, record.timing.num_ranks) == (3, record.world_size)
        assert len(record.timing.warmup_seconds) == 1
        rows = zip(
            record.timing.seconds, record.forward.seconds, record.backward.seconds, record.optimizer.seconds,
            strict=True,
        )  # fmt: skip
        # On a CPU the phases add up to the step. On a busy machine a rank may lose its core between two marks, so
        # phases never take more than the step, and nearly all of it in the best repetition.
        shares = [sum(phase[0] for phase in phases) / step[0] for step, *phases in rows]
        assert max(shares) <= 1 + 1e-6 and max(shares) >= 0.97
        if record.wrapper == "bare":
            assert (record.num_wrong, record.num_checked) == (None, None)
        else:
            assert (record.num_wrong, record.num_checked) == (0, 8 * record.world_size)


@pytest.mark.slow
def test_backends_step_in_turns_and_each_is_tuned_for_itself(on_ranks):
    wrappers = ("torch", "torch-tuned", "paceline")
    wanted = WrapperSettings(
        backends=("gloo", "paceline"), models=("cnn",), wrappers=wrappers, batch_size=2, iters=3, warmup=1
    )
    first, second = on_ranks(2, measure_wrappers, wanted)
    assert first.records == second.records
    assert [(r.backend, r.wrapper) for r in first.records] == [(b, w) for b in ("gloo", "shm") for w in wrappers]
    assert [(r.num_wrong, r.num_checked, r.timing.count) for r in first.records] == [(0, 16, 3)] * 6
    standings = compare_wrappers(first.records)
    for standing in standings:
        ratio = standing.to_torch_on_gloo
        pairs = zip(standing.record.timing.reduced_s, first.records[0].timing.reduced_s, strict=True)
        assert ratio is not None and ratio.value == statistics.median(here / there for here, there in pairs)
    tuned = [r for r in first.records if r.wrapper == "torch-tuned"]
    assert len({r.note for r in tuned}) == 2 and all("fastest of" in r.note for r in tuned)
    assert all(r.configuration.startswith("bucket view, static graph") for r in tuned)


def build_on_two_ranks(wrappers: tuple[str, ...]) -> list[list[float]]:
    from paceline.measure.engine import Group
    from paceline.measure.wrappers import _Cell, find_wrapping
    from paceline.training.step import NoPhases

    sums = []
    with paceline.init("gloo", announce=None) as world:
        group = Group("gloo", torch.device("cpu"), 2, dist.group.WORLD, world.control)
        cell = _Cell(WrapperSettings(models=("cnn",), batch_size=2), world, [group], "cnn")
        for wrapper in wrappers:
            replica, _ = cell._build_replica(group, find_wrapping(wrapper))
            replica.run(None, NoPhases())
            sums.append([float(parameter.detach().sum()) for parameter in replica.parameters])
            assert replica.parameters[0].grad is None  # zero_grad is part of the step
            replica.close()
    return sums


def test_ranks_start_with_different_parameters_and_every_wrapper_synchronizes_them(on_ranks):
    wrappers = ("bare", "torch", "paceline", "paceline-simple")
    here, there = on_ranks(2, build_on_two_ranks, wrappers)
    assert here[1:] == there[1:] and here[0] != there[0]
