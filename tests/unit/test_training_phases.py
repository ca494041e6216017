"""The phases of a step on a clock that the test sets."""

import pytest
import torch

from paceline.training import step
from paceline.training.step import NoPhases, PhaseClock, PhaseTimes


def test_a_phase_that_comes_again_is_added_up(monkeypatch):
    moments = iter([0.0, 1.0, 3.0, 3.5, 7.5, 8.0])
    monkeypatch.setattr(step.time, "perf_counter", lambda: next(moments))
    clock = PhaseClock(torch.device("cpu"))
    for phase in ("forward", "backward", "forward", "backward", "optimizer"):
        clock.enter(phase)
    assert clock.end().read() == pytest.approx({"forward": 1.5, "backward": 6.0, "optimizer": 0.5})


def test_every_step_begins_anew(monkeypatch):
    moments = iter([0.0, 1.0, 10.0, 12.0])
    monkeypatch.setattr(step.time, "perf_counter", lambda: next(moments))
    clock = PhaseClock(torch.device("cpu"))
    clock.enter("forward")
    assert clock.end().read() == {"forward": 1.0}
    clock.enter("backward")
    assert clock.end().read() == {"backward": 2.0}


def test_moments_of_a_gpu_are_asked_in_milliseconds():
    class Event:
        def __init__(self, moment_ms):
            self.moment_ms = moment_ms

        def elapsed_time(self, end):
            return end.moment_ms - self.moment_ms

    times = PhaseTimes([("forward", Event(1.0)), ("backward", Event(4.0)), ("end", Event(4.5))])
    assert times.read() == pytest.approx({"forward": 3e-3, "backward": 5e-4})


def test_nothing_is_timed_where_nobody_asked():
    quiet = NoPhases()
    quiet.enter("forward")
    assert quiet.end().read() == {}
