"""Several workers in one process: they train like one process, or according to a strategy."""

import copy

import pytest
import torch
import torch._dynamo  # optimizers import it, and importing it sets an environment variable; do that before any test
from torch import nn

from paceline.strategy import Strategy
from paceline.training.loader import LoadedBatch
from paceline.training.step import Learner, NoPhases, take_step
from paceline.training.workers import build_workers
from paceline.workloads.data import Batch, DataForm

CLASSES = DataForm(kind="images", shape=(6,), num_classes=5)
SIZE = 8


def make_learner(*layers):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), *layers, nn.ReLU(), nn.Linear(16, 5))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return Learner(module, module, optimizer, scaler, CLASSES, torch.device("cpu"), 1, "fp32", None)


def make_window(step, size=SIZE):
    source = torch.Generator().manual_seed(step)
    batch = Batch(torch.randn(size, 6, generator=source), torch.randint(5, (size,), generator=source))
    return [LoadedBatch(batch, size)]


def run(learner, steps, size=SIZE):
    return [take_step(learner, make_window(step, size), size, 0.1, NoPhases()) for step in range(steps)]


def parameters_of(learner):
    return [[param.detach().clone() for param in each.parameters] for each in learner.workers.learners]


@pytest.mark.parametrize("size", [8, 7, 2])  # equal shares, unequal shares, and fewer samples than workers
def test_workers_that_send_all_learn_as_one(size):
    alone, several = make_learner(), build_workers(make_learner(), 3, Strategy.parse("dense"))
    outcomes = run(alone, 5, size), run(several, 5, size)
    for one, all_ in zip(*outcomes, strict=True):
        torch.testing.assert_close(all_.loss_sum, one.loss_sum)
        assert all_.num_correct == one.num_correct
    for found in parameters_of(several):
        torch.testing.assert_close(found, [param.detach() for param in alone.parameters])


@pytest.mark.parametrize("text", ["bf16", "int8", "topk:0.1", "powersgd:2"])
def test_workers_hold_the_same_parameters_after_every_step(text):
    learner = build_workers(make_learner(), 2, Strategy.parse(text))
    for _ in range(3):
        run(learner, 1)
        first, second = parameters_of(learner)
        assert all(map(torch.equal, first, second))


def test_a_schedule_lets_workers_differ_until_it_is_due_or_they_are_evaluated():
    learner = build_workers(make_learner(), 2, Strategy.parse("localsgd:3"))
    seen = []
    for step in range(5):
        take_step(learner, make_window(step), SIZE, 0.1, NoPhases())
        first, second = parameters_of(learner)
        seen.append(all(map(torch.equal, first, second)))
    assert seen == [False, False, True, False, False]
    mean = [(a + b) / 2 for a, b in zip(*parameters_of(learner), strict=True)]
    learner.sync_parameters()
    for found in parameters_of(learner):
        torch.testing.assert_close(found, mean)


def test_before_a_schedule_begins_gradients_pass_no_codec():
    plain, learner = (
        build_workers(make_learner(), 2, Strategy.parse(text)) for text in ("dense", "diloco:4,after=3+int4")
    )
    for each in (plain, learner):
        run(each, 3)
    assert all(map(torch.equal, parameters_of(plain)[0], parameters_of(learner)[0]))
    assert not learner.workers._outers[0].errors


def test_running_statistics_are_averaged():
    learner = build_workers(make_learner(nn.BatchNorm1d(16)), 2, Strategy.parse("bf16"))
    parts = [copy.deepcopy(learner.module) for _ in range(2)]
    run(learner, 1)
    with torch.no_grad():
        for part, half in zip(parts, make_window(0)[0].batch.inputs.split(4), strict=True):
            part(half)
    for name in ("running_mean", "running_var"):
        mean = torch.stack([getattr(part[1], name) for part in parts]).mean(0)
        for each in learner.workers.learners:
            torch.testing.assert_close(getattr(each.module[1], name), mean)
