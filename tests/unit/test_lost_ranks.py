"""Ranks with collectives that never fail, as with NCCL, must learn that another rank is lost or out of sync."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from paceline import machine
from paceline.errors import CollectiveError, ConfigError
from paceline.parallel.channel import Channel, naming_lost_peers
from paceline.runtime.faults import monitored, pulse
from paceline.runtime.faults.monitor import HangDetector, Monitor, RankSnapshot, Suspicion, why_not
from paceline.runtime.faults.processes import find_code
from paceline.runtime.faults.pulse import BETWEEN, WAIT
from paceline.runtime.faults.recovery import RECOVERS, Recovery
from paceline.runtime.ranks import world
from paceline.torch_internals import find_counter
from paceline.training.regroup import MoreRanksError, check_policy, may_stay
from tests.conftest import wait_until

has_monitor = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@pytest.fixture
def lost() -> Any:
    world._lost.set()
    yield
    world._lost.clear()


def look_for(seconds: float, *ranks: RankSnapshot) -> Suspicion | None:
    """A hang detector's finding after polling ranks in a constant state for `seconds`."""
    detector = HangDetector()
    for look in range(round(seconds / 0.1)):
        snapshots = {rank: one._replace(beat_ns=look, cpu_s=0.1 * look) for rank, one in enumerate(ranks)}
        if (found := detector.look(0.1 * look, snapshots)) is not None:
            return found
    return None


def make_snapshot(phase: int = WAIT, num_started: int = 0, **changes: Any) -> RankSnapshot:
    return RankSnapshot("R", 0.0, phase=phase, num_steps=100, p99_s=0.05, num_started=num_started, **changes)


def test_a_rank_that_spins_in_its_own_collective_is_asked_for_its_stack():
    assert look_for(10.0, make_snapshot(), make_snapshot(BETWEEN)) is None  # the rank is computing
    found = look_for(10.0, make_snapshot(num_started=70), make_snapshot(BETWEEN))
    assert found is not None and (found.kind, found.rank, found.is_certain) == ("collective", 1, False)


@pytest.mark.parametrize(
    ("counts", "rank"), [((70, 71), 1), ((71, 70), 0), ((70, 70, 69, 70), 2), ((70, 71, 70, 70), 1)]
)
def test_the_rank_with_a_different_number_of_collectives_is_named(counts, rank):
    found = look_for(5.0, *(make_snapshot(num_started=count) for count in counts))
    assert found is not None and (found.kind, found.rank, found.is_certain) == ("desynchronized", rank, True)
    assert found.ends and found.end_s is None  # the fault is certain, so nothing waits for the hang timeout


@pytest.mark.parametrize("counts", [(70, 70), (0, 70)])
def test_ranks_with_equal_or_unknown_numbers_wait_for_each_other(counts):
    ranks = [make_snapshot(num_started=count) for count in counts]
    assert look_for(5.0, *ranks) is None
    found = look_for(10.0, *ranks)
    assert found is not None and (found.kind, found.rank) == ("all-wait", None)


def test_an_unfinished_kernel_comes_before_the_number_of_collectives():
    found = look_for(5.0, make_snapshot(num_started=70), make_snapshot(num_started=71, is_busy=True))
    assert found is not None and (found.kind, found.rank) == ("kernel", 1)


@has_monitor
def test_the_page_notifies_a_rank_until_it_has_left(monkeypatch):
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    calls: list[str] = []

    def leave() -> bool:
        calls.append(threading.current_thread().name)
        return len(calls) == 2  # the first time, there is no group yet

    monkeypatch.setattr(pulse, "_on_lost", None)
    with Monitor([0], 1) as monitor:
        pulse.open_page(*monitor.find_pages(0))
        try:
            pulse.watch_lost(leave)
            pulse.watch_device(lambda: True, lambda: 7)
            monkeypatch.setattr(pulse, "_WAITED_NS", 0)
            pulse.enter(WAIT)
            wait_until(lambda: monitor._processes[0].look().num_started == 7)
            assert not calls
            monitor.tell_lost()
            wait_until(lambda: len(calls) == 2)
            pulse.enter(BETWEEN)
            wait_until(lambda: monitor._processes[0].look().num_started == 0)
            time.sleep(0.05)
            assert calls == ["paceline-beat"] * 2
        finally:
            pulse.close_page()
        assert pulse._count_started is None  # a group that is still referenced does not disappear with its world


class Group:
    """A group with collectives that only end when aborted."""

    def __init__(self, together: threading.Barrier, error: bool = False) -> None:
        self.aborted, self._together, self._error = threading.Event(), together, error

    def abort(self) -> None:
        self._together.wait(100)  # groups end only if they are aborted together
        self.aborted.set()
        if self._error:
            raise RuntimeError("it is being destroyed")


def test_all_groups_that_cannot_detect_it_are_aborted_together(monkeypatch):
    together = threading.Barrier(2)
    groups = [Group(together), Group(together, error=True), Group(together), Group(together)]
    names = ["cuda:nccl", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo", "cpu:shm"]
    monkeypatch.setattr(dist, "get_backend_config", lambda group: names[groups.index(group)])
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_names=dict.fromkeys(groups[2:], "")))
    assert not world.abort_collectives() and not world.has_lost_rank()
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_names=dict.fromkeys(groups, "")))
    try:
        assert world.abort_collectives() and world.has_lost_rank()
        wait_until(lambda: all(group.aborted.is_set() for group in groups[:2]))
        assert not any(group.aborted.is_set() for group in groups[2:])
    finally:
        world._lost.clear()


def call(error: Exception | None) -> None:
    with naming_lost_peers("bucket 0"):
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [None, RuntimeError("NCCL error"), ValueError("half written")])
def test_errors_after_an_abort_name_a_lost_peer(lost, error):
    with pytest.raises(CollectiveError) as caught:
        call(error)
    assert caught.value.code == "peer-lost" and caught.value.__cause__ is error


def test_without_an_abort_errors_are_unchanged():
    call(None)
    with pytest.raises(ValueError, match="half"):
        call(ValueError("half"))
    with pytest.raises(CollectiveError) as caught:
        call(RuntimeError("gloo: Connection closed by peer"))
    assert caught.value.code == "peer-lost"


@pytest.mark.parametrize("error", [ValueError("garbage"), CollectiveError("drift", code="drift")])
def test_a_rank_with_aborted_messages_may_continue(lost, error):
    assert may_stay(error) and not may_stay(KeyboardInterrupt())


def test_a_rank_with_its_own_error_may_not_continue():
    assert not may_stay(ValueError("a bad sample")) and may_stay(MoreRanksError("one more"))
    text = "[1]: NCCL communicator was aborted on rank 1."
    assert find_code(RuntimeError(text)) == "peer-lost" and may_stay(RuntimeError(text))


def test_a_step_is_checked_for_aborts_before_it_counts(lost):
    channel = Channel.__new__(Channel)
    channel.waits_for_gpu = False
    with pytest.raises(CollectiveError) as caught:
        channel.settle()
    assert caught.value.code == "peer-lost"


def test_only_ranks_that_continue_disable_torchs_watchdog():
    kept = Recovery("shrink", 2, (), lambda *_: None).variables
    assert kept[RECOVERS] == "1" and kept["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert Recovery("restart", 2, (), lambda *_: None).variables == {}


def test_nccl_needs_a_monitor_to_detect_lost_ranks(monkeypatch):
    learner = SimpleNamespace(own_step=None, name="cnn")
    data = SimpleNamespace(describe=lambda: "synthetic")
    where = SimpleNamespace(backend="nccl")
    job: Any = SimpleNamespace(settings=SimpleNamespace(on_fault="spare"), train=data, learner=learner, world=where)
    with pytest.raises(ConfigError) as caught:
        check_policy(job)
    assert caught.value.code == "on-fault"
    monkeypatch.setattr(pulse, "is_open", lambda: True)
    check_policy(job)


@pytest.mark.parametrize(
    ("gpus", "ranks", "asked", "expected"),
    [(2, 2, "1", False), (1, 2, "1", True), (1, 1, "1", True), (1, 1, "", False), (2, 1, "1", False)],
)
def test_a_process_on_the_only_gpu_may_share_it_in_a_later_world(monkeypatch, gpus, ranks, asked, expected):
    monkeypatch.setenv(machine.SHARE_GPUS, asked)
    assert machine.must_share_gpus(gpus, ranks) == expected


def test_torch_counts_the_collectives_of_a_group():
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert find_counter(group) is not None and find_counter(object()) is None


def test_an_error_that_ends_a_script_closes_its_world_as_failed(monkeypatch):
    """The world closes after the traceback. After Ctrl-C, the launcher decides instead."""
    done: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: done.append(kind))
    monkeypatch.setattr(world, "current_world", lambda: SimpleNamespace(__exit__=lambda *args: done.append(args)))
    monitored._note_errors(1)
    error = ValueError("a bad sample")
    sys.excepthook(ValueError, error, None)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert done == [ValueError, (ValueError, error, None), KeyboardInterrupt]


@has_monitor
def test_a_script_that_closes_its_world_after_an_error_has_not_handled_it(monkeypatch):
    """Closing may take seconds on NCCL. The monitor must still be running to report the error or a hanging exit."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr("paceline.runtime.faults.monitor._HANDLED_S", 0.0)
    left = []

    def close(*_):
        pulse.close_page()
        monitor.look()
        left.append(monitor.have_all_left())  # counted from now
        time.sleep(0.01)
        left.append(monitor.have_all_left())

    monkeypatch.setattr(world, "current_world", lambda: SimpleNamespace(__exit__=close))
    with Monitor([0], 1) as monitor:
        pulse.open_page(*monitor.find_pages(0))
        monitored._note_errors(0)
        sys.excepthook(ValueError, ValueError("a bad sample"), None)
    assert left == [False, False]
