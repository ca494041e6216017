"""What ranks exchange between steps: rows over all of them, the first bad loss, a signal, a save that is due."""

import math
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from paceline.training.journal import Journal, StepEntry, StopRequest
from paceline.training.step import PhaseTimes


class Table:
    """A world of threads: everyone puts a value down, and takes all of them."""

    def __init__(self, size):
        self.values = [None] * size
        self.barrier = Barrier(size, timeout=10)

    def seat(self, rank):
        return Seat(self, rank)


class Seat:
    def __init__(self, table, rank):
        self.table, self.rank = table, rank

    def share(self, value):
        self.table.values[self.rank] = value
        self.table.barrier.wait()
        values = list(self.table.values)
        self.table.barrier.wait()
        return values


def took(seconds: float) -> PhaseTimes:
    """A step of so long."""
    return PhaseTimes([("step", 0.0), ("end", seconds)])


def build_entry(step=1, loss_sum=2.0, correct=1.0, **changes):
    fields = {
        "step": step, "epoch": 0, "num_samples": 8, "num_targets": 8, "rate": 0.1, "lap": took(0.01),
        "data_wait_s": 0.001,
        "exposed_s": None, "phases": PhaseTimes(), "values": torch.tensor([loss_sum, correct]).double(),
        "has_accuracy": True,
    }  # fmt: skip
    return StepEntry(**{**fields, **changes})


def exchange(*entries_by_rank, signals=None, saves=None, journals=None):
    """What each rank knows after exchanging these entries."""
    size = len(entries_by_rank)
    table = Table(size)
    journals = journals or [Journal(None, StopRequest()) for _ in range(size)]
    for rank, (journal, entries) in enumerate(zip(journals, entries_by_rank, strict=True)):
        journal.world = table.seat(rank)
        journal.request = StopRequest((signals or [0] * size)[rank])
        for entry in entries:
            journal.add(entry)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: journals[rank].exchange((saves or [False] * size)[rank]), range(size)))


def test_the_loss_of_a_row_is_the_mean_over_the_targets_of_all_ranks():
    """Ranks of 3, 3 and 2 samples: a mean of means would weigh the last one's too much."""
    sums = [(3 * 1.0, 3.0), (3 * 2.0, 0.0), (2 * 5.0, 1.0)]
    found = exchange(*([build_entry(loss_sum=loss, correct=right)] for loss, right in sums))
    assert all(other.rows == found[0].rows for other in found)
    (row,) = found[0].rows
    assert row["loss"] == pytest.approx((3 + 6 + 10) / 8)
    assert row["accuracy"] == pytest.approx(4 / 8)
    assert (row["samples"], row["step"], row["epoch"], row["lr"]) == (8, 1, 0, 0.1)


def test_times_are_of_the_slowest_rank_and_exposed_is_an_average():
    entries = [
        build_entry(
            lap=took(0.1), data_wait_s=0.03, exposed_s=0.02, phases=PhaseTimes([("forward", 1.0), ("end", 1.5)])
        ),
        build_entry(
            lap=took(0.2), data_wait_s=0.01, exposed_s=0.04, phases=PhaseTimes([("forward", 7.0), ("end", 7.1)])
        ),
        build_entry(
            lap=took(0.1), data_wait_s=0.02, exposed_s=None, phases=PhaseTimes([("forward", 2.0), ("end", 2.2)])
        ),
    ]
    (row,) = exchange(*([entry] for entry in entries))[0].rows
    assert (row["step_s"], row["data_wait_s"]) == (0.2, 0.03)
    assert row["exposed_comm_s"] == pytest.approx(0.03)
    assert row["forward_s"] == pytest.approx(0.5)


def test_what_nobody_knows_is_none():
    (row,) = exchange([build_entry(has_accuracy=False)], [build_entry(has_accuracy=False)])[0].rows
    assert (row["accuracy"], row["exposed_comm_s"]) == (None, None)


def test_rows_are_in_the_order_of_steps_and_told_once():
    journals = [Journal(None, StopRequest()) for _ in range(2)]
    entries = [[build_entry(step, loss_sum=step * 8.0 / 2) for step in (1, 2, 3)] for _ in range(2)]
    found = exchange(*entries, journals=journals)
    assert [(row["step"], row["loss"]) for row in found[0].rows] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert [other.rows for other in exchange([], [], journals=journals)] == [(), ()]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_the_first_bad_loss_is_known_to_all(loss):
    first = [build_entry(1), build_entry(2), build_entry(3, loss, bad_parameter="late")]
    second = [build_entry(1), build_entry(2, loss, bad_parameter="weight"), build_entry(3, loss, bad_parameter="later")]
    assert [found.bad for found in exchange(first, second)] == [(2, 1, "weight")] * 2


def test_of_two_bad_ranks_in_one_step_the_first_is_named():
    both = [build_entry(2, math.nan, bad_parameter="weight")]
    assert [found.bad for found in exchange([build_entry(2)], both, both)] == [(2, 1, "weight")] * 3


def test_no_bad_loss_is_none():
    assert [found.bad for found in exchange([build_entry()], [build_entry()])] == [None, None]


@pytest.mark.parametrize(("signals", "wanted"), [([0, 0], 0), ([0, 15], 15), ([2, 15], 2)])
def test_a_signal_to_one_rank_is_known_to_all(signals, wanted):
    assert [found.signal for found in exchange([build_entry()], [build_entry()], signals=signals)] == [wanted] * 2


@pytest.mark.parametrize(("saves", "wanted"), [([True, False], True), ([False, True], False)])
def test_rank_0_alone_says_when_to_save(saves, wanted):
    assert [found.is_save_due for found in exchange([build_entry()], [build_entry()], saves=saves)] == [wanted] * 2


@pytest.mark.parametrize(("step_s", "every"), [(10.0, 1), (0.1, 2), (0.01, 25), (1e-5, 100), (0.0, 100)])
def test_ranks_meet_about_four_times_a_second_and_agree_on_when(step_s, every):
    """What counts is the slowest rank, which all have found of."""
    journals = [Journal(None, StopRequest()) for _ in range(2)]
    assert [journal.is_due for journal in journals] == [False, False]
    exchange([build_entry(lap=took(step_s))], [build_entry(lap=took(step_s / 7))], journals=journals)
    assert [journal.every for journal in journals] == [every] * 2
    for journal in journals:
        for step in range(every):
            assert not journal.is_due
            journal.add(build_entry(step))
        assert journal.is_due
