"""Number and order of warm-ups and repetitions, without garbage collection in between."""

import gc

import pytest

from paceline.measure import engine
from paceline.measure.engine import Pace, run_rounds
from paceline.records.store import pause_collection

PACE = Pace(budget_s=2.0, min_iters=5, max_iters=100, warmup=3, warmup_s=2.0)


@pytest.fixture
def count(monkeypatch):
    """`count(seconds, ...)`: the warm-ups and repetitions of rounds with these durations, the last one repeated."""
    monkeypatch.setattr(engine, "agree_on_max", lambda value, control: value)

    def count(*seconds, pace=PACE, iters=None, warmup=None, report=None):
        seen, warm = [], []

        def run_round(number):
            assert not gc.isenabled()
            seen.append(number)
            return seconds[min(number, len(seconds) - 1)]

        def end_warmup(num_warmup):
            assert num_warmup == len(seen)
            warm.append(num_warmup)

        run_rounds(run_round, None, pace, iters, warmup, report, end_warmup)
        assert seen == list(range(len(seen))) and len(warm) == 1
        return warm[0], len(seen) - warm[0]

    return count


@pytest.mark.parametrize(
    ("seconds", "asked", "expected"),
    [
        ((0.1,), {}, (3, 20)),
        ((0.001,), {}, (3, 100)),
        ((0.9,), {}, (3, 5)),
        ((5.0,), {}, (1, 5)),  # one slow warm-up is enough
        ((1.5, 0.1), {}, (3, 20)),  # uses the fastest: a slow start must not reduce the repetitions
        ((5.0,), {"warmup": 4}, (4, 5)),
        ((0.1,), {"warmup": 0}, (0, 5)),
        ((0.1,), {"iters": 7}, (3, 7)),
        ((0.1,), {"iters": 1, "warmup": 0}, (0, 1)),
    ],
)
def test_rounds_fit_the_time_unless_specified(count, seconds, asked, expected):
    assert count(*seconds, **asked) == expected


def test_without_a_time_limit_all_warm_ups_are_run(count):
    assert count(9.0, pace=Pace(budget_s=2.0, min_iters=5, max_iters=15, warmup=2)) == (2, 5)


def test_progress_is_reported_as_a_share_that_ends_at_1(count):
    received = []
    count(0.1, iters=4, report=received.append)
    assert received == [0.25, 0.5, 0.75, 1.0]


def test_garbage_collection_is_on_again_afterwards_if_it_was():
    with pytest.raises(KeyError), pause_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with pause_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
