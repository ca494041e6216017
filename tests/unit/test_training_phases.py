"""The phases of a step on a clock that the test sets."""

import time

import pytest
import torch
import torch._dynamo  # torch's optimizers import it, and its first import sets an environment variable
from torch import nn

from paceline.training import step
from paceline.training.step import NoPhases, OwnStep, PhaseClock, PhaseTimes


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


class Phases:
    """Writes down what a step enters."""

    def __init__(self):
        self.entered = []

    def enter(self, phase):
        self.entered.append(phase)

    def end(self):
        return PhaseTimes()


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x, *, y):
        return {"sum": self.left(x) + self.right(y)}


def build_own(num_micro_batches=1, num_optimizers=1):
    """A user's module of two inputs, with a loss and an update of their own, as a step."""
    torch.manual_seed(0)
    module = TwoInputs()
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for _ in range(num_optimizers)]

    def step(model):
        for _ in range(num_micro_batches):
            output = model(torch.ones(5, 3), y=torch.ones(5, 4))
            loss = output["sum"].square().mean()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return OwnStep(module, step)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_step_of_the_users_own_enters_the_phases_of_ours(num_micro_batches):
    step, phases = build_own(num_micro_batches, num_optimizers=2), Phases()
    step(phases)
    assert phases.entered == ["forward", "backward", "optimizer"] * num_micro_batches


def test_a_step_of_the_users_own_learns_and_leaves_nothing_behind():
    own, backward = build_own(), torch.autograd.backward
    losses = [own(NoPhases()) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert torch.autograd.backward is backward and not own.model._forward_pre_hooks

    def fail(model):
        model(torch.ones(5, 3), y=torch.ones(5, 4))["sum"].sum().backward()
        raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        OwnStep(own.model, fail)(NoPhases())
    assert torch.autograd.backward is backward and not own.model._forward_pre_hooks


def test_the_time_of_a_users_backward_is_in_its_phase():
    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(0.05)
            return grad

    module = nn.Linear(2, 2)
    clock = PhaseClock(torch.device("cpu"))
    OwnStep(module, lambda model: Slow.apply(model(torch.ones(1, 2))).sum().backward())(clock)
    seconds = clock.end().read()
    assert seconds["backward"] > 0.05 > seconds["forward"]
