"""LARS and LAMB compared with their papers, and their common behavior."""

import copy
import math

import numpy as np
import pytest
import torch
import torch._dynamo  # optimizers import it, and importing it sets an environment variable; do that before any test
from torch import nn

from paceline import LAMB, LARS, ConfigError
from paceline.training.build import _build_optimizer
from paceline.training.optimizers import match_strides, split_parameters
from paceline.training.schedules import Schedule
from paceline.training.train_settings import TrainSettings

SHAPES = ((4, 3), (2, 3, 2), (5,))


def make(seed: int = 0, shapes=SHAPES, dtype=torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


def give_gradients(params, step: int, scale: float = 1.0) -> list[np.ndarray]:
    """Gradients that depend only on the step, so that two optimizers get the same ones."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = (scale * torch.randn(param.shape, generator=generator, dtype=torch.float64)).to(param.dtype)
    return [param.grad.double().numpy().copy() for param in params]


def step_as_in_the_paper(weight, velocity, grad, rate, momentum, decay, trust, eps):
    """v = m * v + rate * ratio * (g + decay * w); w = w - v: the velocity includes the learning rate."""
    size, slope = math.sqrt((weight**2).sum()), math.sqrt((grad**2).sum())
    ratio = trust * size / (slope + decay * size + eps) if size > 0 and slope > 0 else 1.0
    velocity = momentum * velocity + rate * ratio * (grad + decay * weight)
    return weight - velocity, velocity


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_at_a_constant_rate_it_is_the_papers(momentum, decay):
    params = make()
    optimizer = LARS(params, lr=3.0, momentum=momentum, weight_decay=decay, trust_coefficient=0.02, eps=1e-3)
    weights = [param.detach().numpy().copy() for param in params]
    velocities = [np.zeros_like(weight) for weight in weights]
    for step in range(6):
        grads = give_gradients(params, step)
        optimizer.step()
        for i, grad in enumerate(grads):
            weights[i], velocities[i] = step_as_in_the_paper(
                weights[i], velocities[i], grad, 3.0, momentum, decay, 0.02, 1e-3
            )
            np.testing.assert_allclose(params[i].detach().numpy(), weights[i], rtol=1e-12, atol=1e-14)


def follow_changing_rates(*, corrects: bool) -> tuple[list[nn.Parameter], list[np.ndarray]]:
    """Weights after our steps and after the paper's; `corrects` rescales the paper's velocity when the rate changes."""
    params = make()
    optimizer = LARS(params, lr=0.0, weight_decay=0.01, trust_coefficient=0.02)
    schedule = Schedule(shape="piecewise", peak=4.0, num_steps=8, warmup_steps=3, drops=(0.625,))
    weights = [param.detach().numpy().copy() for param in params]
    velocities = [np.zeros_like(weight) for weight in weights]
    last = None
    for step in range(8):
        grads = give_gradients(params, step)
        optimizer.param_groups[0]["lr"] = rate = schedule.rate(step)
        optimizer.step()
        if corrects and last is not None:
            velocities = [velocity * (rate / last) for velocity in velocities]
        last = rate
        for i, grad in enumerate(grads):
            weights[i], velocities[i] = step_as_in_the_paper(
                weights[i], velocities[i], grad, rate, 0.9, 0.01, 0.02, 1e-8
            )
    return params, weights


def test_at_changing_rates_it_is_the_papers_with_momentum_correction():
    for param, weight in zip(*follow_changing_rates(corrects=True), strict=True):
        np.testing.assert_allclose(param.detach().numpy(), weight, rtol=1e-12, atol=1e-14)
    for param, weight in zip(*follow_changing_rates(corrects=False), strict=True):
        assert np.abs(param.detach().numpy() - weight).max() > 1e-3


def test_one_step_by_hand():
    """|w| = 5, |g| = 10, decay 0.2: ratio 0.1 * 5 / (10 + 1) = 1/22, and w moves by 2/22 of (6, 8) + 0.2 * (3, 4)."""
    param = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    param.grad = torch.tensor([[6.0, 8.0]], dtype=torch.float64)
    LARS([param], lr=2.0, weight_decay=0.2, trust_coefficient=0.1, eps=0.0).step()
    assert param.tolist()[0] == pytest.approx([3 - 6.6 / 11, 4 - 8.8 / 11], rel=1e-14)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("weights", "grads"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_where_a_norm_is_zero_it_is_sgd(weights, grads, nesterov):
    one, two = (make(shapes=((3, 2),)) for _ in range(2))
    ours = LARS(one, lr=0.5, weight_decay=0.1, nesterov=nesterov)
    plain = torch.optim.SGD(two, lr=0.5, momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    for param in (*one, *two):
        param.data.mul_(weights)
        param.grad = torch.full_like(param, 0.3 * grads)
    ours.step()
    plain.step()
    torch.testing.assert_close(one[0], two[0], rtol=1e-14, atol=1e-16)
    assert bool(torch.isfinite(one[0]).all())


def test_nesterov_looks_ahead():
    param = nn.Parameter(torch.tensor([[2.0]], dtype=torch.float64))
    optimizer = LARS([param], lr=1.0, momentum=0.5, trust_coefficient=0.1, nesterov=True, eps=0.0)
    weight, velocity = 2.0, 0.0
    for grad in (1.0, -4.0, 0.5):
        param.grad = torch.full_like(param, grad)
        optimizer.step()
        move = 0.1 * abs(weight) * math.copysign(1, grad)  # the trust ratio cancels the gradient's magnitude
        velocity = 0.5 * velocity + move
        weight -= move + 0.5 * velocity
        assert param.item() == pytest.approx(weight, rel=1e-13)


def test_the_state_of_torchs_sgd_is_taken_over():
    params = make()
    plain = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    give_gradients(params, 0)
    plain.step()
    optimizer = LARS(params, lr=0.5, trust_coefficient=0.01)
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["trust_coefficient"] == 0.01 and optimizer.param_groups[0]["adapt"] is True
    give_gradients(params, 1)
    before = [param.detach().clone() for param in params]
    velocity = optimizer.state[params[0]]["momentum_buffer"].clone()
    optimizer.step()
    ratio = 0.01 * before[0].norm() / (params[0].grad.norm() + 1e-8)
    torch.testing.assert_close(params[0].detach(), before[0] - 0.1 * (0.9 * velocity + ratio * params[0].grad))


def test_groups_may_be_added_and_are_checked():
    first, second = make(shapes=((3, 2), (4,)))
    optimizer = LARS([first], lr=0.1)
    optimizer.add_param_group({"params": [second], "adapt": False, "lr": 0.2})
    give_gradients([first, second], 0)
    before, grad = second.detach().clone(), second.grad.clone()
    optimizer.step()
    torch.testing.assert_close(second.detach(), before - 0.2 * grad)
    with pytest.raises(ConfigError, match="lr -1"):
        optimizer.add_param_group({"params": make(shapes=((2,),)), "lr": -1})
    with pytest.raises(ConfigError, match="adapt 'no'"):
        optimizer.add_param_group({"params": make(shapes=((2,),)), "adapt": "no"})
    assert len(optimizer.param_groups) == 2


def test_sparse_gradients_are_refused_by_shape():
    table = nn.Embedding(7, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match=r"LARS: .*\(7, 3\).*sparse"):
        LARS(table.parameters(), lr=0.1).step()


def test_precisions_may_be_mixed_in_one_group():
    """Norms of 2**17 and 2**16, which exceed float16 but not float32."""
    large = nn.Parameter(torch.full((64, 64), 2048.0, dtype=torch.float16))
    exact = make(shapes=((3, 2),))[0]
    optimizer = LARS([large, exact], lr=1.0, momentum=0.0, trust_coefficient=0.25)
    large.grad, exact.grad = torch.full_like(large, 1024.0), torch.ones_like(exact)
    wanted = exact.detach() - 0.25 * exact.detach().norm() / math.sqrt(6)
    optimizer.step()
    assert large.dtype == torch.float16
    assert large.unique().tolist() == [2048 - 0.25 * 2 * 1024]
    torch.testing.assert_close(exact.detach(), wanted, rtol=1e-8, atol=0)


def test_torchs_schedulers_work():
    params = make()
    optimizer = LARS([*split_parameters(nn.Linear(3, 2), 0.1), {"params": params}], lr=0.4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    found = []
    for step in range(3):
        found.append([group["lr"] for group in optimizer.param_groups])
        give_gradients(params, step)
        optimizer.step()
        scheduler.step()
    assert found == [[0.4] * 3, [0.2] * 3, [0.1] * 3]


def test_parameters_are_split_by_kind():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    module[2].bias.requires_grad_(False)
    matrices, others = split_parameters(module, 0.3)
    assert [tuple(param.shape) for param in matrices["params"]] == [(4, 3, 3, 3), (2, 4)]
    assert [tuple(param.shape) for param in others["params"]] == [(4,), (4,), (4,)]
    assert (matrices["weight_decay"], matrices["adapt"]) == (0.3, True)
    assert (others["weight_decay"], others["adapt"]) == (0.0, False)
    assert len(split_parameters(nn.Linear(3, 2, bias=False), 0.1)) == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True])
def test_torchs_optimizers_take_the_groups(kind, fused):
    module = nn.Linear(3, 2)
    module(torch.ones(4, 3)).sum().backward()
    optimizer = kind(split_parameters(module, 0.1), lr=0.1, fused=fused)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["adapt"] for group in optimizer.param_groups] == [True, False]


BETAS = (0.8, 0.95)


def move(weight, grads, rate, decay, eps):
    """One step from all gradients so far: the moments are weighted averages, which need no correction."""
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
        optimizer.param_groups[0]["lr"] = rate = schedule.rate(step)
        optimizer.step()
        for i, grad in enumerate(grads):
            seen[i].append(grad)
            weights[i] = move(weights[i], seen[i], rate, decay, 1e-3)
            np.testing.assert_allclose(params[i].detach().numpy(), weights[i], rtol=1e-12, atol=1e-14)


def test_first_step_by_hand():
    """The first m / sqrt(v) is the sign, with norm sqrt(2); |w| = 5, so each weight moves by 0.1 * 5 / sqrt(2)."""
    param = nn.Parameter(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    param.grad = torch.tensor([[0.001, -7.0]], dtype=torch.float64)
    LAMB([param], lr=0.1, eps=0.0).step()
    assert param.tolist()[0] == pytest.approx([3 - 0.5 / math.sqrt(2), 4 + 0.5 / math.sqrt(2)], rel=1e-12)


@pytest.mark.parametrize(("weights", "grads", "wanted"), [(0.0, 2.0, -0.5), (3.0, 0.0, 3.0), (0.0, 0.0, 0.0)])
def test_where_a_norm_is_zero_the_ratio_is_one(weights, grads, wanted):
    param = nn.Parameter(torch.full((3, 2), weights, dtype=torch.float64))
    param.grad = torch.full_like(param, grads)
    LAMB([param], lr=0.5).step()
    assert param.flatten().tolist() == pytest.approx([wanted] * 6, abs=1e-6)


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


def test_precisions_may_be_mixed_in_one_group_by_lamb():
    low, exact = make(shapes=((8, 4),), dtype=torch.bfloat16)[0], make(shapes=((8, 4),))[0]
    optimizer = LAMB([low, exact], lr=0.05)
    give_gradients([low], 0)
    exact.grad = low.grad.double()
    optimizer.step()
    assert low.dtype == optimizer.state[low]["exp_avg"].dtype == torch.bfloat16
    torch.testing.assert_close(low.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (LARS, {"lr": -0.1}, "lr -0.1: must be finite, at least 0"),
        (LARS, {"lr": math.nan}, "lr nan"),
        (LARS, {"lr": math.inf}, "lr inf"),
        (LARS, {"lr": torch.tensor(0.1)}, r"lr tensor\(0.1"),
        (LARS, {"lr": "fast"}, "lr 'fast'"),
        (LARS, {"momentum": 1.0}, "momentum 1.0: must be finite, at least 0, below 1"),
        (LARS, {"weight_decay": -1.0}, "weight_decay -1.0"),
        (LARS, {"trust_coefficient": 0.0}, "trust_coefficient 0.0: must be finite, above 0"),
        (LARS, {"eps": -1e-9}, "eps -1e-09"),
        (LARS, {"nesterov": True, "momentum": 0.0}, "nesterov with momentum 0"),
        (LAMB, {"lr": -0.1}, "lr -0.1"),
        (LAMB, {"betas": (0.9, 1.0)}, "a beta of 1.0: must be finite, at least 0, below 1"),
        (LAMB, {"betas": (-0.1, 0.9)}, "a beta of -0.1"),
        (LAMB, {"betas": 0.9}, "betas 0.9: must be two numbers"),
        (LAMB, {"eps": math.nan}, "eps nan"),
        (LAMB, {"weight_decay": -1}, "weight_decay -1"),
    ],
)
def test_invalid_options_are_refused(kind, options, words):
    with pytest.raises(ConfigError, match=f"{kind.__name__}: {words}"):
        kind(make(), **({"lr": 0.1} | options))


@pytest.mark.parametrize(
    ("ours", "plain", "options"),
    [
        (LARS, torch.optim.SGD, {"momentum": 0.9}),
        (LARS, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (LAMB, torch.optim.AdamW, {"betas": BETAS, "eps": 1e-4}),
    ],
)
def test_a_group_that_does_not_adapt_is_torchs_optimizer(ours, plain, options):
    one, two = make(), make()
    optimizers = ours([{"params": one, "adapt": False}], lr=0.1, weight_decay=0.05, **options)
    others = plain(two, lr=0.1, weight_decay=0.05, **options)
    for step in range(5):
        give_gradients(one, step)
        give_gradients(two, step)
        optimizers.step()
        others.step()
    for param, wanted in zip(one, two, strict=True):
        torch.testing.assert_close(param, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("kind", "lr"), [(LARS, 1.0), (LAMB, 0.1)])
def test_a_resumed_run_is_bit_identical(kind, lr):
    whole, half = make(dtype=torch.float32), make(dtype=torch.float32)
    first, second = (kind(params, lr=lr, weight_decay=0.01) for params in (whole, half))
    for step in range(6):
        give_gradients(whole, step)
        first.step()
    for step in range(3):
        give_gradients(half, step)
        second.step()
    other = [nn.Parameter(param.detach().clone()) for param in half]
    third = kind(other, lr=123.0)
    third.load_state_dict(copy.deepcopy(second.state_dict()))
    assert third.state_dict()["param_groups"] == second.state_dict()["param_groups"]
    assert third.param_groups[0]["lr"] == lr
    for step in range(3, 6):
        give_gradients(other, step)
        third.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, other, strict=True))
    if kind is LAMB:  # the counters are copies
        assert second.state[half[0]]["step"] == 3 and third.state[other[0]]["step"] == 6


@pytest.mark.parametrize(("kind", "lr"), [(LARS, 10.0), (LAMB, 0.1)])
def test_closures_schedulers_of_torch_and_parameters_without_a_gradient(kind, lr):
    used, unused = make(shapes=((3, 2), (3, 2)))
    before = unused.detach().clone()
    optimizer = kind([used, unused], lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def closure():
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(4):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(lr / 5)
    assert torch.equal(unused, before) and unused not in optimizer.state


@pytest.mark.parametrize(("strategy", "momentum", "weight_decay"), [("bf16", 0.9, 0.001), ("topk:0.1,dgc", 0.0, 0.01)])
def test_weight_decay_is_scaled_if_the_strategy_has_the_momentum(strategy, momentum, weight_decay):
    settings = TrainSettings(strategy=strategy, weight_decay=0.001, optimizer="sgd")
    matrices, others = _build_optimizer(nn.Linear(3, 2), settings, torch.device("cpu")).param_groups
    assert matrices["momentum"] == others["momentum"] == momentum
    assert matrices["weight_decay"] == pytest.approx(weight_decay) and others["weight_decay"] == 0


def test_a_loaded_state_has_the_order_in_memory_of_its_parameter():
    params = [nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.Adam(params)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    saved = optimizer.state_dict()
    loose = {
        place: {name: value.contiguous() for name, value in state.items()} for place, state in saved["state"].items()
    }
    other = torch.optim.Adam(params)
    other.load_state_dict(saved | {"state": loose})
    assert other.state[params[0]]["exp_avg"].stride() != params[0].stride()
    match_strides(other)
    for param in params:
        for name, value in optimizer.state[param].items():
            assert other.state[param][name].stride() == value.stride(), name
            assert torch.equal(other.state[param][name], value), name
