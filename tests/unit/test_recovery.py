"""The launcher's decisions after a fault."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import CollectiveError, LaunchError, PacelineError, RecordError, TrainingError
from paceline.runtime.faults.processes import Failure, find_code, make_error
from paceline.runtime.faults.recovery import Recovery
from paceline.training.regroup import BufferGuard
from paceline.training.train_settings import TrainSettings


def decide(
    recovery: Recovery, step: int | None = 5, has_values: bool = False, done: int | None = None, **changes: Any
) -> str:
    failure = Failure(**{"rank": 1, "when_s": 0.0, "summary": "was killed", "code": "killed"} | changes)
    error, at = make_error(failure, 2), None if step is None else (step, step - 1 if done is None else done)
    policy = recovery.decide(failure, error, 2, has_values, at)
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
def test_all_ranks_restart_if_none_can_be_replaced(changes):
    assert decide(make("shrink"), **changes) == "restart"


@pytest.mark.parametrize("error", [TrainingError("nan", code="not-finite"), RecordError("full", code="disk")])
def test_errors_that_users_must_fix_end_the_run(error: PacelineError):
    recovery = make()
    assert decide(recovery, error=error) == "stop" and recovery.faults == []


def test_a_run_that_was_asked_to_stop_does_not_recover():
    assert decide(make(is_over=lambda: 15)) == "stop"
    with pytest.raises(LaunchError) as caught:
        make(is_over=lambda: 15).check_over()
    assert caught.value.code == "interrupted"
    make().check_over()


def test_faults_are_bounded_and_a_step_is_not_retried_forever():
    recovery = make(max_faults=3)
    assert [decide(recovery, step) for step in (5, 6)] == ["spare", "spare"]
    assert decide(recovery, 6) == "stop: the previous fault was also in step 6: the run keeps failing there"
    assert decide(recovery, 7) == "stop: this is fault 4, but --max-faults is 3"


def test_faults_before_the_first_step_of_a_world_are_in_no_step():
    recovery = make()
    assert [decide(recovery, step) for step in (None, None, 5, None)] == ["spare"] * 4
    assert decide(recovery, 5).startswith("stop: ")


def test_a_run_that_keeps_failing_before_its_first_step_is_not_retried_forever():
    heard: list[str] = []
    recovery = Recovery("restart", 2, (), lambda faults, line: heard.append(line))
    assert [decide(recovery, None) for _ in range(2)] == ["restart", "restart"]
    assert decide(recovery, None).startswith("stop: the previous 2 faults were also before the first step")
    assert heard[0].endswith("all ranks start again")  # there is no checkpoint
    # Once a step has completed, any number of faults may follow.
    recovery = Recovery("restart", 2, (), lambda faults, line: heard.append(line))
    assert decide(recovery, None) == "restart"
    recovery.note_step(0, time.monotonic(), 2)
    assert [decide(recovery, None) for _ in range(5)] == ["restart"] * 5
    assert heard[-1].endswith("all ranks start again from the last checkpoint")


def test_the_last_of_several_faults_before_a_step_has_the_time_until_it():
    heard: list[str] = []
    recovery = Recovery("shrink", 4, (), lambda faults, line: heard.append(line))
    decide(recovery, 9)
    decide(recovery, None)
    recovery.note_step(6, 1e9, 2)
    recovery.note_step(8, 2e9, 2)
    assert [(fault.steps_lost, fault.ranks_after) for fault in recovery.faults] == [(2, 2), (None, 2)]
    assert [fault.recovered_s is None for fault in recovery.faults] == [True, False]
    assert len(heard) == 3 and heard[-1].endswith("2 ranks continue after step 6; 2 steps lost")


def test_a_step_is_lost_where_the_fault_hit_in_what_follows_it():
    recovery = make("restart")
    decide(recovery, 12, done=12)
    recovery.note_step(8, 0.0, 2)
    assert recovery.faults[0].steps_lost == 4


def test_a_fault_that_leaves_no_rank_counts_as_a_restart():
    recovery = make("shrink")
    decide(recovery, 3)
    recovery.note_step(3, 0.0, 2)
    decide(recovery, 8)
    recovery.restart_instead()
    assert [fault.policy for fault in recovery.faults] == ["shrink", "restart"]


def test_after_three_that_fail_no_more_spares_are_started_until_a_world_has_taken_a_step():
    heard: list[str] = []
    recovery = Recovery("spare", 2, (), lambda faults, line: heard.append(line))
    for _ in range(3):
        assert recovery.num_wanted == 3
        recovery.note_spare_failed(None)
    assert recovery.num_wanted == 0 and [line.endswith("no more are started") for line in heard] == [False, False, True]
    recovery.note_step(1, 0.0, 2)
    assert recovery.num_wanted == 3


def test_a_rank_that_cannot_be_reached_is_lost():
    assert find_code(RuntimeError("gloo/transport/tcp/pair.cc:1: connect: Connection refused")) == "peer-lost"


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_a_step_that_failed_leaves_no_statistics(norm):
    model = norm(3, affine=True, track_running_stats=True)
    guard = BufferGuard(model)
    for _ in range(2):
        with guard():
            model(torch.randn(2, 3, 4, 4))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with pytest.raises(RuntimeError, match="lost"), guard():
        model(torch.randn(2, 3, 4, 4))
        raise RuntimeError("lost")
    assert before and all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_fewer_ranks_share_the_same_global_batch():
    settings = TrainSettings(ranks=4, global_batch_size=32, batch_size=4)
    assert [settings.usable_ranks(count) for count in (4, 3, 2, 1)] == [4, 2, 2, 1]
    moved = settings.on_ranks(2).batches
    assert (moved.world_size, moved.batch_size, moved.accumulate) == (2, 4, 4)
    assert settings.on_ranks(4) is settings
