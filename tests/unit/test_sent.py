"""Message counts of ranks, compared across ranks and with the plan."""

from __future__ import annotations

import pytest

from paceline.errors import MeasurementError
from paceline.measure.step_bench import check_sent
from paceline.parallel.channel import Sent

PLANNED = Sent(2, 80)


@pytest.mark.parametrize("by_rank", [[[PLANNED] * 3] * 2, [[], []], [[]], []])
def test_planned_counts_and_missing_counts_are_accepted(by_rank):
    check_sent(by_rank, PLANNED, "torch")


@pytest.mark.parametrize(
    ("by_rank", "numbers"),
    [
        ([[PLANNED, PLANNED], [PLANNED, Sent(3, 120)]], ("step 2", "rank 1", "120", "3", "80", "2")),
        ([[Sent(2, 84)], [Sent(2, 84)]], ("step 1", "rank 0", "84", "80")),
        ([[Sent(1, 80)], [Sent(1, 80)]], ("80", "1", "2")),
        ([[Sent(0, 0)]], ("rank 0", "0")),
    ],
)
def test_counts_that_differ_are_refused_with_both_numbers(by_rank, numbers):
    with pytest.raises(MeasurementError) as caught:
        check_sent(by_rank, PLANNED, "torch on gloo, 2 ranks")
    assert caught.value.code == "mismatch"
    assert all(number in str(caught.value) for number in ("torch on gloo, 2 ranks", *numbers))
