"""The control words: decoding the sum over ranks must return what every rank wrote, in every dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel.control import SLOT_WORDS, ControlWords, RankReport, Status

REPORTS = st.builds(
    RankReport,
    st.integers(0, 63).map(Status),
    st.integers(0, 256**5 - 1),
    st.integers(0, 256**6 - 1),
)


@given(st.lists(REPORTS, min_size=1, max_size=5), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_the_sum_of_all_slots_has_every_ranks_report(reports, dtype):
    all_words = []
    for rank, report in enumerate(reports):
        control = ControlWords(rank, len(reports))
        words = torch.full((control.num_words,), 7.0, dtype=dtype)
        control.write_report(words, report)
        all_words.append(words)
    summed = torch.stack(all_words).sum(0)
    assert ControlWords(0, len(reports)).read_reports(summed.tolist()) == reports


def test_a_cached_slot_is_not_changed_by_the_sum():
    control, words = ControlWords(0, 1), torch.zeros(SLOT_WORDS)
    control.write_report(words, RankReport(samples=5))
    words += 1
    control.write_report(words, RankReport(samples=5))
    assert control.read_reports(words.tolist()) == [RankReport(samples=5)]


def test_use_counts_and_statistics_have_separate_words():
    control = ControlWords(1, 2, num_used=3, num_statistics=4)
    words = torch.zeros(control.num_words)
    control.write_used(words, [1])
    control.statistics(words).fill_(9)
    assert control.used(words).tolist() == [1, 0, 1] and control.num_words == 2 * SLOT_WORDS + 7
    assert words[: control.num_slot_words].count_nonzero() == 0 and words[-4:].tolist() == [9] * 4


@pytest.mark.parametrize("samples", [-1, 256**5])
def test_samples_that_do_not_fit_are_refused(samples):
    with pytest.raises(ValueError, match=f"{samples} samples"):
        RankReport(samples=samples).encode()
