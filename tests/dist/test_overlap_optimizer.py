"""An optimizer that steps each bucket once it is averaged: equal to one that steps after backward, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
}


def build(name: str) -> tuple[paceline.DDP, torch.optim.Optimizer, nn.Module]:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(20, 20) for _ in range(4)))
    head = nn.Linear(20, 1)  # outside the wrapper: the optimizer's own step handles it
    model = paceline.DDP(net, bucket_cap_mb=0.001)
    first, *rest = net
    groups = [
        {"params": first.parameters(), "lr": 0.05}, {"params": nn.ModuleList(rest).parameters()},
        {"params": head.parameters()},
    ]  # fmt: skip
    return model, OPTIMIZERS[name](groups), head


def compare(name: str) -> None:
    with paceline.init("gloo", "cpu", threads=1, announce=None) as world:
        (plain, plain_optimizer, plain_head), (model, optimizer, head) = build(name), build(name)
        model.overlap_optimizer(optimizer)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (plain_optimizer, optimizer)]
        for number in range(6):
            for wrapper, last, chosen in ((plain, plain_head, plain_optimizer), (model, head, optimizer)):
                for micro in range(2):
                    torch.manual_seed(10 * number + 2 * micro + world.rank)
                    with contextlib.nullcontext() if micro else wrapper.no_sync():
                        last(wrapper(torch.randn(3, 20))).square().sum().backward()
                chosen.step()
                if wrapper is model:
                    assert all(param.grad is not None for param in model.parameters())
                chosen.zero_grad(set_to_none=number % 2 == 0)
            for schedule in schedules:
                schedule.step()
            if number == 2:  # replaces the state and the groups
                optimizer.load_state_dict(optimizer.state_dict())
        assert model.plan is not None and len(model.plan.buckets) > 1
        pairs = zip(
            [*plain.parameters(), *plain_head.parameters()], [*model.parameters(), *head.parameters()], strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)
        kept = [[v for state in each.state.values() for v in state.values()] for each in (plain_optimizer, optimizer)]
        assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True) if a is not None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_equal_to_the_bit(on_ranks, name):
    on_ranks(2, compare, name)


def misuse() -> None:
    def backward(model: Any, head: nn.Module) -> None:
        head(model(torch.ones(2, 20))).sum().backward()

    def expect(text: str) -> Any:
        return pytest.raises(paceline.PacelineError, match=text)

    with paceline.init("gloo", "cpu", threads=1, announce=None):
        model, optimizer, head = build("sgd")
        model.overlap_optimizer(optimizer)
        backward(model, head)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with expect("gradients changed"):
            optimizer.step()
        backward(model, head)
        optimizer.param_groups[1]["lr"] = 3.0
        with expect("optimizer options changed"):
            optimizer.step()
        backward(model, head)
        with expect("second synchronised backward"):
            backward(model, head)
        with expect("join"), model.join():
            pass
        with expect("hook"):
            model.register_comm_hook(None, lambda state, bucket: bucket.buffer())
        model.overlap_optimizer(None)
        model, optimizer, head = build("sgd")
        with expect("LBFGS"):
            model.overlap_optimizer(torch.optim.LBFGS(model.parameters()))
        with expect("samples"):
            paceline.DDP(nn.Linear(2, 2), average="samples").overlap_optimizer(optimizer)
        with expect("bf16"):
            paceline.DDP(nn.Linear(2, 2), strategy="bf16").overlap_optimizer(optimizer)
        model.overlap_optimizer(optimizer)
        with expect("closure"):
            optimizer.step(lambda: 0.0)


def test_what_is_not_exact_is_refused(on_ranks):
    on_ranks(2, misuse)
