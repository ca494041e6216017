"""Local SGD, SlowMo and DiLoCo for replicas in one process, with the code that also runs between ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline.errors import ConfigError
from paceline.parallel.codecs import build_codec, run_together
from paceline.parallel.outer import Outer
from paceline.strategy import Strategy
from tests.unit.made_outer import Replicas

N = 3


def train_with_mean_gradients(steps: int, **options) -> torch.Tensor:
    """Train with an all-reduce: every replica applies the mean gradient in every step."""
    replicas = Replicas("localsgd:1000000", **options)
    for _ in range(steps):
        replicas.compute_gradients()
        for params in zip(*(model.parameters() for model in replicas.models), strict=True):
            mean = torch.stack([param.grad for param in params]).mean(0)
            for param in params:
                param.grad = mean.clone()
        for optimizer in replicas.optimizers:
            optimizer.step()
        replicas.step += 1
    return replicas.vector()


def test_every_step_with_sgd_is_all_reduce_and_with_adam_it_is_not():
    close = {"rtol": 0, "atol": 1e-14}
    torch.testing.assert_close(Replicas("localsgd:1").train(7).vector(), train_with_mean_gradients(7), **close)
    by_adam = Replicas("localsgd:1", torch.optim.Adam).train(7).vector()
    assert (by_adam - train_with_mean_gradients(7, optimizer=torch.optim.Adam)).abs().max() > 1e-4


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_without_outer_momentum_all_three_are_the_same(optimizer):
    local = Replicas("localsgd:3", optimizer).train(9)
    assert local.are_equal
    for text in (
        "slowmo:3,lr=1,momentum=0",
        "diloco:3,lr=1,momentum=0",
        "diloco:3,lr=1,momentum=0,fragments=1,delay=0",
    ):
        assert torch.equal(Replicas(text, optimizer).train(9).vector(), local.vector()), text


def test_a_round_of_local_sgd_is_the_mean_of_separately_trained_replicas():
    alone = Replicas("localsgd:1000").train(4)
    assert not alone.are_equal
    mean = torch.stack([alone.vector(rank) for rank in range(N)]).mean(0)
    torch.testing.assert_close(Replicas("localsgd:4").train(4).vector(), mean, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "text", ["localsgd:3", "slowmo:3", "diloco:3", "diloco:3+int8", "localsgd:3+int4", "diloco:3+bf16"]
)
def test_replicas_are_equal_after_every_sync_and_only_then(text):
    replicas = Replicas(text, torch.optim.AdamW, dtype=torch.float32)
    for step in range(1, 10):
        assert replicas.train(1).are_equal == (step % 3 == 0), step
        assert replicas.outers[0].has_drifted == (step % 3 != 0)


def test_slowmo_follows_its_formula_when_the_learning_rate_changes():
    replicas, b, a = Replicas("slowmo:2,lr=0.8,momentum=0.6"), 0.6, 0.8
    x, u = replicas.vector().clone(), torch.zeros(1, dtype=torch.float64)
    for lr in (0.05, 0.05, 0.005):
        alone = copy.deepcopy(replicas)
        for r in (alone, replicas):
            r.lr = lr
            for optimizer in r.optimizers:
                optimizer.param_groups[0]["lr"] = lr
        alone.train(1)
        before = [alone.vector(rank).clone() for rank in range(N)]
        assert len({tuple(v.tolist()) for v in before}) == N
        alone.outers = [Replicas("localsgd:1000")._make_outer(0) for _ in range(N)]
        alone.train(1)
        mean = torch.stack([alone.vector(rank) for rank in range(N)]).mean(0)
        u = b * u + (x - mean) / lr
        x = x - a * lr * u
        replicas.train(2)
        torch.testing.assert_close(replicas.vector(), x, rtol=0, atol=1e-13)


def test_diloco_is_torchs_nesterov_on_the_mean_difference():
    replicas = Replicas("diloco:3,lr=0.7,momentum=0.9", torch.optim.AdamW)
    outer = nn.Parameter(replicas.vector().clone())
    nesterov = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        alone = copy.deepcopy(replicas)
        alone.outers = [Replicas("localsgd:1000")._make_outer(0) for _ in range(N)]
        alone.train(3)
        mean = torch.stack([alone.vector(rank) for rank in range(N)]).mean(0)
        outer.grad = outer.detach() - mean
        nesterov.step()
        replicas.train(3)
        torch.testing.assert_close(replicas.vector(), outer.detach(), rtol=0, atol=1e-13)


def test_the_outer_step_moves_in_the_replicas_direction():
    """Lookahead with half a step ends halfway between the start and the end of the round."""
    start = Replicas("localsgd:4").vector().clone()
    full, half = Replicas("localsgd:4").train(4).vector(), Replicas("diloco:4,lr=0.5,momentum=0").train(4).vector()
    torch.testing.assert_close(half, (start + full) / 2, rtol=0, atol=1e-15)


def test_each_fragment_is_sent_once_per_period_in_order():
    replicas = Replicas("diloco:4,fragments=2,lr=1,momentum=0")
    params = [list(model.parameters()) for model in replicas.models]
    for step in range(1, 13):
        replicas.train(1)
        equal = [all(torch.equal(params[0][i], params[r][i]) for r in range(N)) for i in range(4)]
        assert equal == [step % 4 == 0, step % 4 == 2] * 2, step
    assert not replicas.are_equal and replicas.train(1).complete().are_equal


def test_a_delayed_fragment_is_mixed_into_the_replicas_current_parameters():
    delay, mixing = 2, 0.25
    streaming = Replicas(f"diloco:4,delay={delay},mixing={mixing},lr=0.7,momentum=0.9")
    plain = Replicas("diloco:4,lr=0.7,momentum=0.9").train(4)
    streaming.train(4)
    assert not streaming.are_equal  # nothing is applied yet
    alone = copy.deepcopy(streaming)
    alone.outers = [Replicas("localsgd:1000")._make_outer(0) for _ in range(N)]
    alone.train(delay)
    streaming.train(delay)
    for rank in range(N):
        wanted = mixing * alone.vector(rank) + (1 - mixing) * plain.vector()
        torch.testing.assert_close(streaming.vector(rank), wanted, rtol=0, atol=1e-15)
    # The next difference is relative to the new outer parameters, not to the mixture.
    torch.testing.assert_close(torch.cat([s.reshape(-1) for s in streaming.outers[0].start]), plain.vector())


@pytest.mark.parametrize("text", ["localsgd:4", "slowmo:4", "diloco:4", "diloco:4,fragments=3,delay=3+int8"])
def test_the_last_round_may_be_shorter(text):
    replicas = Replicas(text, dtype=torch.float32).train(6)
    assert not replicas.are_equal and replicas.complete().are_equal
    before = replicas.vector().clone()
    assert torch.equal(replicas.complete().vector(), before)  # nothing is left to do
    for step in range(1, 5):  # a new round starts here
        assert replicas.train(1).are_equal == (step == 4 and replicas.strategy.fragments == 1)


def test_the_last_round_applies_averages_in_flight():
    replicas = Replicas("diloco:4,lr=1,momentum=0,delay=2,mixing=0").train(5).complete()
    torch.testing.assert_close(replicas.vector(), Replicas("localsgd:4").train(4).vector(), rtol=0, atol=1e-15)


def test_post_local_counts_rounds_from_the_switch():
    replicas = Replicas("diloco:4,after=3")
    for step in range(1, 12):
        was_local = replicas.outers[0].is_local
        assert replicas.train(1).are_equal == (step <= 3 or step in (7, 11))
        assert was_local == (step > 3) and bool(replicas.outers[0].momentum) == (step >= 7)
        assert replicas.outers[0].has_drifted == (step > 3 and step not in (7, 11)), step


@pytest.mark.parametrize("text", ["localsgd:2", "diloco:2,lr=1,momentum=0+int8"])
def test_sixteen_bit_parameters_have_a_float32_start(text):
    """Steps that bfloat16 cannot represent accumulate in the starting point."""
    weights = [nn.Parameter(torch.full((8,), 256.0, dtype=torch.bfloat16)) for _ in range(2)]
    strategy = Strategy.parse(text)
    outers = [Outer(strategy, ["w"], [weight], build_codec(strategy, rank, 2)) for rank, weight in enumerate(weights)]
    for _ in range(4):
        for outer in outers:
            outer.begin_round()
        with torch.no_grad():
            weights[0].sub_(1.0)  # bfloat16 has a spacing of 1 below 256: rank 0 takes a step of 1, rank 1 none
        for outer in outers:
            outer.count(), outer.count()
        run_together([outer.advance() for outer in outers])
        assert torch.equal(*weights)
    assert outers[0].start[0].dtype == torch.float32
    torch.testing.assert_close(outers[0].start[0], torch.full((8,), 254.0))


def test_the_next_round_begins_from_values_loaded_in_between():
    replicas = Replicas("diloco:2").train(2)
    for model in replicas.models:
        for param in model.parameters():
            param.data = torch.ones_like(param)  # no version counter reveals this write
    replicas.train(1)
    assert all(torch.equal(start, torch.ones_like(start)) for start in replicas.outers[0].start)


def test_a_non_finite_replica_does_not_change_the_others():
    replicas = Replicas("diloco:2+int8", dtype=torch.float32).train(3)
    outer = replicas.outers[0]
    kept = copy.deepcopy((outer.start, outer.momentum, outer.errors))
    with torch.no_grad():
        next(replicas.models[1].parameters())[0, 0] = torch.nan
    with pytest.raises(Exception) as error:
        replicas.train(1)
    assert error.value.code == "not-finite"
    for mine, before in zip((outer.start, outer.momentum, outer.errors), kept, strict=True):
        torch.testing.assert_close(mine, before, rtol=0, atol=0)


def test_all_kinds_of_parameters_are_averaged():
    """Parameters may be complex, empty, of several dtypes, channels_last, or without a gradient."""
    values = [
        torch.randn(3, dtype=torch.complex64), torch.empty(0), torch.randn(2, 2, dtype=torch.float64),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), torch.randn(5).bfloat16(),
    ]  # fmt: skip
    replicas = [[nn.Parameter(value.clone()) for value in values] for _ in range(2)]
    for text in ("localsgd:1", "localsgd:1+int8"):
        strategy = Strategy.parse(text)
        outers = [Outer(strategy, "abcde", params, build_codec(strategy, r, 2)) for r, params in enumerate(replicas)]
        for outer in outers:
            outer.begin_round()
        with torch.no_grad():
            for param in replicas[1]:
                param += 0.5 + 0.25j if param.is_complex() else 0.5
        wanted = [(a.detach() + b.detach()) / 2 for a, b in zip(*replicas, strict=True)]
        for outer in outers:
            outer.count()
        run_together([outer.advance() for outer in outers])
        for a, b, want in zip(*replicas, wanted, strict=True):
            assert torch.equal(a, b)
            tolerance = 1e-2 if a.dtype == torch.bfloat16 else 1e-6 if strategy.codec == "dense" else 1e-3
            torch.testing.assert_close(a.detach(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "text", ["diloco:1,delay=1", "diloco:4,delay=4", "diloco:4,mixing=0.5", "diloco:2,fragments=3"]
)
def test_undefined_combinations_are_refused(text):
    with pytest.raises(ConfigError) as error:
        Strategy.parse(text)
    assert error.value.code == "strategy"
