"""The exchange between ranks after steps and the metrics files."""

import builtins
import importlib.util
import json
import math
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from paceline.errors import ConfigError, RecordError
from paceline.records.training import MetricsLog, load_metrics
from paceline.runtime.ranks import launch
from paceline.training.checkpoints import EventsLog
from paceline.training.journal import Journal, Position, StopRequest, TakenStep, catch_stop
from paceline.training.step import PhaseTimes, StepOutcome


class Table:
    """A world of threads: each contributes a value and gets all of them."""

    def __init__(self, size):
        self.values = [None] * size
        self.barrier = Barrier(size, timeout=100)

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
    """A step with this duration."""
    return PhaseTimes([("step", 0.0), ("end", seconds)])


def build_entry(step=1, loss_sum=2.0, correct=1.0, bad_parameter="", **changes):
    """The arguments of `Journal.add`."""
    correct = None if correct is None else torch.tensor(correct)
    taken = TakenStep(
        position=Position(0, step, step), epoch=0, num_samples=8, num_targets=8, rate=0.1,
        data_wait_s=changes.pop("data_wait_s", 0.001), outcome=StepOutcome(torch.tensor(loss_sum), correct,
        bad_parameter), is_epoch_end=False, is_last=False,
    )  # fmt: skip
    return {"taken": taken, "lap": took(0.01), "exposed_s": None, "phases": PhaseTimes(), **changes}


def exchange(*entries_by_rank, signals=None, saves=None, journals=None):
    """What each rank knows after exchanging these entries."""
    size = len(entries_by_rank)
    table = Table(size)
    journals = journals or [Journal(None, StopRequest()) for _ in range(size)]
    for rank, (journal, entries) in enumerate(zip(journals, entries_by_rank, strict=True)):
        journal.world = table.seat(rank)
        journal.request = StopRequest((signals or [0] * size)[rank])
        for entry in entries:
            journal.add(**entry)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: journals[rank].exchange((saves or [False] * size)[rank]), range(size)))


def test_the_loss_of_a_row_is_the_mean_over_the_targets_of_all_ranks():
    """Ranks with 3, 3 and 2 samples: a mean of means would give the last one too much weight."""
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


def test_unknown_values_are_none():
    (row,) = exchange([build_entry(correct=None)], [build_entry(correct=None)])[0].rows
    assert (row["accuracy"], row["exposed_comm_s"]) == (None, None)


def test_rows_are_in_the_order_of_steps_and_reported_once():
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


def test_the_first_of_two_bad_ranks_in_a_step_is_named():
    both = [build_entry(2, math.nan, bad_parameter="weight")]
    assert [found.bad for found in exchange([build_entry(2)], both, both)] == [(2, 1, "weight")] * 3


def test_without_a_bad_loss_there_is_none():
    assert [found.bad for found in exchange([build_entry()], [build_entry()])] == [None, None]


@pytest.mark.parametrize(("signals", "wanted"), [([0, 0], 0), ([0, 15], 15), ([2, 15], 2)])
def test_a_signal_to_one_rank_is_known_to_all(signals, wanted):
    assert [found.signal for found in exchange([build_entry()], [build_entry()], signals=signals)] == [wanted] * 2


@pytest.mark.parametrize(("saves", "wanted"), [([True, False], True), ([False, True], False)])
def test_only_rank_0_decides_when_to_save(saves, wanted):
    assert [found.is_save_due for found in exchange([build_entry()], [build_entry()], saves=saves)] == [wanted] * 2


@pytest.mark.parametrize(("step_s", "every"), [(10.0, 1), (0.1, 2), (0.01, 25), (1e-5, 100), (0.0, 100)])
def test_ranks_exchange_about_four_times_a_second_at_an_agreed_step(step_s, every):
    """The slowest rank sets the interval, and all ranks agree on it."""
    journals = [Journal(None, StopRequest()) for _ in range(2)]
    assert [journal.is_due for journal in journals] == [False, False]
    exchange([build_entry(lap=took(step_s))], [build_entry(lap=took(step_s / 7))], journals=journals)
    assert [journal.every for journal in journals] == [every] * 2
    for journal in journals:
        for step in range(every):
            assert not journal.is_due
            journal.add(**build_entry(step))
        assert journal.is_due


def write(path, *steps):
    with closing(MetricsLog(path)) as log:
        log.append(*({"step": step, "loss": 1 / (step + 1)} for step in steps))


def steps(path):
    return [row["step"] for row in load_metrics(path)]


def test_rows_are_written_immediately_and_can_be_read(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    rows = [{"step": 1, "epoch": 0, "loss": 0.1, "note": "ß", "accuracy": None}, {"step": 2, "loss": -math.inf}]
    with closing(MetricsLog(path)) as log:
        log.append(*rows)
        assert load_metrics(path) == rows
        log.append({"step": 3, "loss": math.nan})
        assert math.isnan(load_metrics(path)[2]["loss"])


def test_every_line_is_valid_json_even_with_non_finite_values(tmp_path):
    with closing(MetricsLog(tmp_path / "m")) as log:
        log.append({"step": 1, "loss": math.nan, "norm": math.inf, "rate": 0.1})

    def refuse(word):
        raise AssertionError(word)

    assert json.loads((tmp_path / "m").read_text(), parse_constant=refuse) == {
        "step": 1, "loss": None, "norm": None, "rate": 0.1, "not_finite": {"loss": "nan", "norm": "inf"},
    }  # fmt: skip


@pytest.mark.parametrize("cut_bytes", [1, 2, 10, 20])
def test_an_incomplete_last_line_is_skipped_and_truncated(tmp_path, cut_bytes):
    write(tmp_path / "m", 0, 1, 2)
    (tmp_path / "m").write_bytes((tmp_path / "m").read_bytes()[:-cut_bytes])
    assert steps(tmp_path / "m") == [0, 1]
    write(tmp_path / "m", 7)
    assert steps(tmp_path / "m") == [0, 1, 7]


@pytest.mark.parametrize(("step", "kept"), [(-1, []), (2, [0, 1, 2]), (9, [0, 1, 2, 3])])
def test_resume_drops_what_comes_after_the_step(tmp_path, step, kept):
    write(tmp_path / "m", 0, 1, 2, 3)
    with closing(MetricsLog(tmp_path / "m", step)) as log:
        log.append({"step": 10})
    assert steps(tmp_path / "m") == [*kept, 10]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_resume_begins_a_file_where_there_is_none(tmp_path):
    MetricsLog(tmp_path / "m", 5).close()
    assert load_metrics(tmp_path / "m") == []


def test_a_resume_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    write(tmp_path / "m", 0, 1, 2)

    def fail(path, size):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.truncate", fail)
    with pytest.raises(RecordError, match="Input/output error"):
        MetricsLog(tmp_path / "m", 0)
    assert steps(tmp_path / "m") == [0, 1, 2] and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(("after", "last"), [(9, 3), (2, 2), (-1, 0)])
def test_a_log_knows_the_step_of_its_last_row(tmp_path, after, last):
    write(tmp_path / "m", 1, 2, 3)
    with closing(MetricsLog(tmp_path / "m", after)) as log:
        assert log.last_step == last


def test_only_the_end_of_a_long_file_is_read(tmp_path):
    (tmp_path / "m").write_text('damaged\n{"step": 6}\n{"step": 7}\n')
    with closing(MetricsLog(tmp_path / "m", 6)) as log:
        assert log.last_step == 6
    assert (tmp_path / "m").read_text() == 'damaged\n{"step": 6}\n'


def test_a_log_does_not_continue_after_a_damaged_row(tmp_path):
    (tmp_path / "m").write_text('{"step": 6}\ndamaged\n')
    with pytest.raises(RecordError, match="m, byte 12"):
        MetricsLog(tmp_path / "m", 6)
    assert (tmp_path / "m").read_text() == '{"step": 6}\ndamaged\n'


@pytest.mark.parametrize("line", ["{", "[]", '{"loss": 1}', '{"step": "1"}', '{"step": 1, "not_finite": 3}', "\0\0"])
def test_a_damaged_line_is_named_by_its_number(tmp_path, line):
    (tmp_path / "m").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(RecordError, match="m, line 2"):
        load_metrics(tmp_path / "m")


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    original = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"install paceline\[tensorboard\]"):
        EventsLog(tmp_path, 0)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard")
def test_events_are_read_by_tensorboard_as_one_history(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(EventsLog(tmp_path, -1)) as log:
        log.append(*({"step": step, "loss": float(step), "note": "x", "gone": None, "on": True} for step in range(4)))
    with closing(EventsLog(tmp_path, after_step=1)) as log:
        log.append({"step": 2, "loss": 20.0})
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Tags()["scalars"] == ["loss"]
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(0, 0.0), (1, 1.0), (2, 20.0)]


def test_a_signal_soon_after_the_first_is_the_same_request(monkeypatch):
    clock, came = [100.0], []
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with catch_stop() as request:
            for clock[0] in (100.0, 100.0 + launch.SAME_REQUEST_S):
                signal.raise_signal(signal.SIGTERM)
            assert (request.number, came) == (signal.SIGTERM, [])
            clock[0] += 0.1
            signal.raise_signal(signal.SIGTERM)
            assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_rows_of_the_world_before_are_kept_until_others_were_exchanged():
    """A second fault may occur during the evaluation, before the rows are written."""
    journal = Journal(SimpleNamespace(rank=0, world_size=1, share=lambda value: [value]), StopRequest())
    row = {"step": 9, "step_s": 0.1}
    journal.carried = [row]
    assert journal.exchange(False).rows == (row,) and journal.list_unwritten()[0] == [row]
    journal.add(**build_entry(10))
    assert [found["step"] for found in journal.exchange(False).rows] == [10]
    assert [found["step"] for found in journal.list_unwritten()[0]] == [10]
