"""The control words: a sum over ranks must give back what every rank wrote, in every dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel.words import SLOT_WORDS, Notice, Status, Tail

NOTICES = st.builds(
    Notice,
    st.integers(0, 63).map(Status),
    st.integers(0, 256**5 - 1),
    st.integers(0, 256**6 - 1),
)


@given(st.lists(NOTICES, min_size=1, max_size=5), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_the_sum_of_all_slots_is_every_ranks_notice(notices, dtype):
    regions = []
    for rank, notice in enumerate(notices):
        tail = Tail(rank, len(notices))
        region = torch.full((tail.num_words,), 7.0, dtype=dtype)
        tail.write_slots(region, notice)
        regions.append(region)
    summed = torch.stack(regions).sum(0)
    assert Tail(0, len(notices)).read_slots(summed.tolist()) == notices


def test_a_kept_slot_is_not_changed_by_what_is_summed_into_it():
    tail, region = Tail(0, 1), torch.zeros(SLOT_WORDS)
    tail.write_slots(region, Notice(samples=5))
    region += 1
    tail.write_slots(region, Notice(samples=5))
    assert tail.read_slots(region.tolist()) == [Notice(samples=5)]


def test_use_counts_and_statistics_have_their_places():
    tail = Tail(1, 2, num_used=3, num_statistics=4)
    region = torch.zeros(tail.num_words)
    tail.write_used(region, [1])
    tail.statistics(region).fill_(9)
    assert tail.used(region).tolist() == [1, 0, 1] and tail.num_words == 2 * SLOT_WORDS + 7
    assert region[: tail.num_slots].count_nonzero() == 0 and region[-4:].tolist() == [9] * 4


@pytest.mark.parametrize("samples", [-1, 256**5])
def test_samples_that_do_not_fit_are_refused(samples):
    with pytest.raises(ValueError, match="do not fit"):
        Notice(samples=samples).encode()
