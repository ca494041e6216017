"""The answer of a study of strategies: which ones match bf16 and which runs are inconclusive."""

from dataclasses import replace

import pytest

from paceline.records.store import Run
from paceline.report.result import build_result

from .made_scaling import make_run


def answer(build_environment, *groups, **changes):
    """A study of strategies with these accuracies, one per seed."""
    runs = [
        make_run(recipe=text, seed=seed, accuracy=accuracy, num_classes=10, sent_bytes=size, **changes)
        for text, size, accuracies in groups
        for seed, accuracy in enumerate(accuracies)
    ]
    return build_result(Run("scale strategies", {}, build_environment(), tuple(runs))).answer


def test_the_answer_is_the_strategy_that_sends_least_within_the_spread(build_environment):
    said = answer(
        build_environment, ("dense", 400, (0.85, 0.86)), ("bf16", 200, (0.84, 0.86)), ("int8", 100, (0.845, 0.85)),
        ("topk:0.01", 10, (0.7, 0.72)),
    )  # fmt: skip
    assert said.startswith("int8 is as good as bf16 with 4 times fewer bytes")


@pytest.mark.parametrize(
    ("bf16", "int8", "wanted"),
    [
        ((0.85,), (0.85,), "One seed is not enough"),
        ((0.85, 0.86), (0.85,), "One seed is not enough"),
        ((0.1, 0.85), (0.85, 0.86), "The comparison is invalid: bf16 itself did not learn (1 of 2 seeds"),
        ((0.12, 0.11), (0.12, 0.11), "The comparison is invalid: bf16 itself did not learn (2 of 2 seeds"),
        ((0.997, 0.999), (0.996, 1.0), "The job is too easy"),
        ((0.997, 0.999), (0.996, 0.99), "No strategy is as good as bf16"),
    ],
)
def test_inconclusive_runs_are_reported(build_environment, bf16, int8, wanted):
    said = answer(build_environment, ("dense", 400, bf16), ("bf16", 200, bf16), ("int8", 100, int8))
    assert said.startswith(wanted)


def test_a_loss_far_worse_than_guessing_is_not_a_baseline(build_environment):
    groups = ("dense", 400, (0.3, 0.3)), ("bf16", 200, (0.3, 0.31)), ("int8", 100, (0.3, 0.31))
    assert "as good as" in answer(build_environment, *groups)
    curve = tuple(replace(point, test_loss=5.0) for point in make_run(accuracy=0.3).curve)
    assert "did not learn" in answer(build_environment, *groups, curve=curve)
