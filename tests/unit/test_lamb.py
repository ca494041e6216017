"""LAMB against plain arithmetic, moments written out as sums, and against torch's AdamW where no layer adapts."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch._dynamo  # an optimizer imports it, and it sets a variable of the environment: here, before any test
from torch import nn

from paceline import LAMB, ConfigError
from paceline.training.schedules import Schedule
from tests.unit.test_lars import give_gradients, make

BETAS = (0.8, 0.95)


def move(weight, grads, rate, decay, eps):
    """A step from all gradients so far: the moments are weighted averages, which need no correction."""
    averages = []
    for beta, power in ((BETAS[0], 1), (BETAS[1], 2)):
        shares = [beta ** (len(grads) - 1 - i) for i in range(len(grads))]
        averages.append(sum(share * grad**power for share, grad in zip(shares, grads, strict=True)) / sum(shares))
    update = averages[0] / (np.sqrt(averages[1]) + eps) + decay * weight
    size, length = math.sqrt((weight**2).sum()), math.sqrt((update**2).sum())
    return weight - rate * (size / length if size > 0 and length > 0 else 1.0) * update


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_at_changing_rates(decay):
    params = make()
    optimizer = LAMB(params, lr=0.0, betas=BETAS, eps=1e-3, weight_decay=decay)
    schedule = Schedule(shape="linear", peak=0.1, num_steps=6, warmup_steps=2)
    weights, seen = [param.detach().numpy().copy() for param in params], [[] for _ in params]
    for step in range(6):
        grads = give_gradients(params, step, scale=0.1 + step)
        rate = schedule.apply(optimizer, step)
        optimizer.step()
        for i, grad in enumerate(grads):
            seen[i].append(grad)
            weights[i] = move(weights[i], seen[i], rate, decay, 1e-3)
            np.testing.assert_allclose(params[i].detach().numpy(), weights[i], rtol=1e-12, atol=1e-14)


def test_first_step_by_hand():
    """The first m / sqrt(v) is the sign, of length sqrt(2); |w| = 5, so each weight moves by 0.1 * 5 / sqrt(2)."""
    param = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    param.grad = torch.tensor([[0.001, -7.0]], dtype=torch.float64)
    LAMB([param], lr=0.1, eps=0.0).step()
    assert param.tolist()[0] == pytest.approx([3 - 0.5 / math.sqrt(2), 4 + 0.5 / math.sqrt(2)], rel=1e-12)


def test_a_group_that_does_not_adapt_is_torchs_adamw():
    one, two = make(), make()
    ours = LAMB([{"params": one, "adapt": False}], lr=0.01, betas=BETAS, eps=1e-4, weight_decay=0.1)
    plain = torch.optim.AdamW(two, lr=0.01, betas=BETAS, eps=1e-4, weight_decay=0.1)
    for step in range(5):
        give_gradients(one, step)
        give_gradients(two, step)
        ours.step()
        plain.step()
    for param, wanted in zip(one, two, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("weights", "grads", "wanted"), [(0.0, 2.0, -0.5), (3.0, 0.0, 3.0), (0.0, 0.0, 0.0)])
def test_where_a_norm_is_zero_the_ratio_is_one(weights, grads, wanted):
    param = nn.Parameter(torch.full((3, 2), weights, dtype=torch.float64))
    param.grad = torch.full_like(param, grads)
    LAMB([param], lr=0.5).step()
    assert param.flatten().tolist() == pytest.approx([wanted] * 6, abs=1e-6)


def test_a_run_that_goes_on_is_equal_to_the_last_bit_and_counts_on():
    whole, half = make(dtype=torch.float32), make(dtype=torch.float32)
    first, second = (LAMB(params, lr=0.1, weight_decay=0.01) for params in (whole, half))
    for step in range(6):
        give_gradients(whole, step)
        first.step()
    for step in range(3):
        give_gradients(half, step)
        second.step()
    other = [nn.Parameter(param.detach().clone()) for param in half]
    third = LAMB(other, lr=123.0)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    assert third.state_dict()["param_groups"] == second.state_dict()["param_groups"]
    assert [state["step"] for state in third.state.values()] == [3, 3, 3]
    for step in range(3, 6):
        give_gradients(other, step)
        third.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    assert second.state[half[0]]["step"] == 3  # its own, not shared with the one that went on


def test_a_parameter_that_pauses_keeps_its_own_count():
    steady, pausing = make(shapes=((3, 2), (3, 2)))
    alone = nn.Parameter(pausing.detach().clone())
    both, one = LAMB([steady, pausing], lr=0.1), LAMB([alone], lr=0.1)
    for step in range(4):
        give_gradients([steady, pausing], step)
        alone.grad = pausing.grad.clone()
        if step == 1:
            pausing.grad = None
        else:
            one.step()
        both.step()
    assert (both.state[steady]["step"], both.state[pausing]["step"]) == (4, 3)
    torch.testing.assert_close(pausing, alone, rtol=1e-14, atol=1e-16)


def test_closures_and_the_schedulers_of_torch():
    param = make(shapes=((3, 2),))[0]
    optimizer = LAMB([param], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(4):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 5)


def test_precisions_may_be_mixed_in_one_group():
    low, exact = make(shapes=((8, 4),), dtype=torch.bfloat16)[0], make(shapes=((8, 4),))[0]
    optimizer = LAMB([low, exact], lr=0.05)
    give_gradients([low], 0)
    exact.grad = low.grad.double()
    optimizer.step()
    assert low.dtype == optimizer.state[low]["exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -0.1}, "lr -0.1"),
        ({"betas": (0.9, 1.0)}, "a beta of 1.0: a finite number from 0 and below 1"),
        ({"betas": (-0.1, 0.9)}, "a beta of -0.1"),
        ({"betas": 0.9}, "betas 0.9: two numbers"),
        ({"eps": math.nan}, "eps nan"),
        ({"weight_decay": -1}, "weight_decay -1"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ConfigError, match=f"LAMB: {words}"):
        LAMB(make(), **({"lr": 0.1} | options))
