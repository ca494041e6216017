"""What ranks counted of their messages, beside each other and beside the plan."""

from __future__ import annotations

import pytest

from paceline.errors import MeasurementError
from paceline.measure.busy import agree_on_sent
from paceline.parallel.channel import Sent

PLANNED = Sent(2, 80)


@pytest.mark.parametrize("by_rank", [[[PLANNED] * 3] * 2, [[], []], [[]], []])
def test_equal_counts_are_what_was_sent_and_none_leaves_the_plan(by_rank):
    assert agree_on_sent(by_rank, PLANNED, "torch") == PLANNED


@pytest.mark.parametrize(
    ("by_rank", "words"),
    [
        ([[PLANNED, PLANNED], [PLANNED, Sent(3, 120)]], "step 2 rank 1 sent 120 bytes of gradients in 3 messages and "
         "rank 0 sent 80 bytes of gradients in 2 messages"),
        ([[Sent(2, 84)], [Sent(2, 84)]], "step 1 rank 0 sent 84 bytes of gradients in 2 messages and the plan says 80"),
        ([[Sent(1, 80)], [Sent(1, 80)]], "in 1 messages and the plan says 80 bytes of gradients in 2 messages"),
        ([[Sent(0, 0)]], "rank 0 sent 0 bytes"),
    ],
)  # fmt: skip
def test_counts_that_differ_are_refused_with_both_numbers(by_rank, words):
    with pytest.raises(MeasurementError) as caught:
        agree_on_sent(by_rank, PLANNED, "torch on gloo, 2 ranks")
    assert str(caught.value).startswith("torch on gloo, 2 ranks: in step") and words in str(caught.value)
