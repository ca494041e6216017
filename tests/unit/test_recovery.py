"""What the launcher decides after a fault."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import CollectiveError, PacelineError, RecordError, TrainingError
from paceline.runtime.recovery import Fault, Recovery
from paceline.runtime.worker import Failure, make_error
from paceline.training.settings import TrainSettings


def decide(recovery: Recovery, step: int = 5, has_values: bool = False, **changes: Any) -> str:
    failure = Failure(**{"rank": 1, "when_s": 0.0, "summary": "was killed", "code": "killed"} | changes)
    error = make_error(failure, 2)
    policy = recovery.decide(failure, error, 2, has_values, step)
    return f"{policy}: {error.__notes__[-1]}" if getattr(error, "__notes__", None) and not failure.error else policy


def make(policy: str = "spare", **changes: Any) -> Recovery:
    return Recovery(policy, 2, (), lambda *_: None, **changes)


@pytest.mark.parametrize("policy", ["restart", "spare", "shrink"])
@pytest.mark.parametrize("code", ["killed", "died", "hung"])
def test_a_lost_rank_is_replaced_or_left_out(policy, code):
    assert decide(make(policy), code=code) == policy


@pytest.mark.parametrize(
    "changes",
    [
        {"code": ""}, {"rank": None, "code": "hung"}, {"has_values": True},
        {"error": CollectiveError("step 3: rank 1 failed", code="rank-failed"), "code": ""},
    ],
)  # fmt: skip
def test_where_no_rank_can_be_replaced_all_start_again(changes):
    assert decide(make("shrink"), **changes) == "restart"


@pytest.mark.parametrize("error", [TrainingError("nan", code="not-finite"), RecordError("full", code="disk")])
def test_what_people_must_fix_ends_the_run(error: PacelineError):
    recovery = make()
    assert decide(recovery, error=error) == "stop" and recovery.faults == []


def test_a_run_that_was_asked_to_stop_does_not_recover():
    assert decide(make(is_over=lambda: 15)) == "stop"


def test_faults_are_bounded_and_a_step_is_not_tried_for_ever():
    recovery = make(max_faults=3)
    assert [decide(recovery, step) for step in (5, 6)] == ["spare", "spare"]
    assert decide(recovery, 6) == "stop: the fault before it was in step 6, too: the run does not get past it"
    assert decide(recovery, 7) == "stop: it is fault 4, and --max-faults is 3"


def test_every_fault_before_a_step_has_recovered_with_it():
    heard: list[str] = []
    recovery = Recovery("shrink", 4, (), lambda faults, line: heard.append(line))
    decide(recovery, 9)
    decide(recovery, 1)
    recovery.note_step(8, 1e9, 2)
    recovery.note_step(8, 2e9, 2)
    assert [(fault.steps_lost, fault.ranks_after) for fault in recovery.faults] == [(0, 2), (0, 2)]
    assert all(isinstance(fault, Fault) and fault.recovered_s is not None for fault in recovery.faults)
    assert len(heard) == 3


def test_fewer_ranks_share_the_same_global_batch():
    settings = TrainSettings(ranks=4, global_batch_size=32, batch_size=4)
    assert [settings.usable_ranks(count) for count in (4, 3, 2, 1)] == [4, 2, 2, 1]
    moved = settings.on_ranks(2).batches
    assert (moved.world_size, moved.batch_size, moved.accumulate) == (2, 4, 4)
    assert settings.on_ranks(4) is settings
