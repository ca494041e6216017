"""Requests that `bench wrappers` rejects before any rank starts, the order of its rounds, and how torch's wrapper is
tuned."""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from paceline import machine
from paceline.errors import ConfigError
from paceline.measure.bench_settings import DEFAULT_MODELS, MAX_CANDIDATES, WRAPPERS, WrapperSettings
from paceline.measure.step_bench import draw_turns, order_turns
from paceline.measure.wrappers import build_candidates
from paceline.plan import Gradient
from paceline.units import MIB
from paceline.workloads.registry import WORKLOADS
from tests.unit.made_plans import plan_by_cap, plan_in_pieces


def test_the_default_runs_every_wrapper_but_our_tuned_one_on_the_models_of_a_small_machine():
    settings = WrapperSettings()
    settings.check()
    assert {*WRAPPERS} - {*settings.wrappers} == {"paceline-tuned"} and settings.models == DEFAULT_MODELS
    assert "gpt2-large" not in settings.models and settings.ranks == (2,)
    assert settings.batch_of("cnn") == WORKLOADS["cnn"].batch_size
    assert WrapperSettings(batch_size=3).batch_of("cnn") == 3


BATCH_BYTES = 4 * 2048 * WORKLOADS["mlp"].batch_size


def test_a_model_too_large_for_the_memory_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 20 * 2**30)
    WrapperSettings().check_host(2)
    with pytest.raises(ConfigError, match="--model"):
        WrapperSettings(models=("cnn", "gpt2-large")).check_host(2)
    small = WrapperSettings(models=("gpt2-large",), wrappers=("bare", "torch"))
    batch_bytes = 4 * 1024 * small.batch_of("gpt2-large")
    assert small.bytes_per_rank == 6 * 4 * 774_030_080 + batch_bytes  # two with buffers, and one with gradients
    tuned = WrapperSettings(models=("mlp",), wrappers=("torch-tuned",))
    assert tuned.bytes_per_rank == (2 * MAX_CANDIDATES + 2) * 4 * WORKLOADS["mlp"].num_elements + BATCH_BYTES


@pytest.mark.parametrize(("wrappers", "replicas"), [(("torch", "paceline"), 4), (("torch-tuned",), MAX_CANDIDATES)])
def test_backends_hold_replicas_together_and_candidates_one_at_a_time(wrappers, replicas):
    settings = WrapperSettings(models=("mlp",), wrappers=wrappers, backends=("gloo", "paceline"))
    assert settings.bytes_per_rank == (2 * replicas + 2) * 4 * WORKLOADS["mlp"].num_elements + BATCH_BYTES


@pytest.mark.parametrize("count", range(1, 9))
def test_each_variant_follows_every_other_equally_often(count):
    orders = [order_turns(count, repetition) for repetition in range(2 * count)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    followers = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(followers) == set(itertools.permutations(range(count), 2))
    assert len(set(followers.values())) <= 1
    assert {order[0] for order in orders} == set(range(count))


def test_random_orders_are_independent_between_rounds():
    """Comparing equal plans must be a fair coin flip: runs of equal signs must be as long as those of a coin."""
    first = [draw_turns(2, repetition, seed=3)[0] for repetition in range(4000)]
    assert abs(sum(first) / 4000 - 0.5) < 0.03
    for apart in (1, 2, 3, 4):
        equal = sum(a == b for a, b in zip(first, first[apart:], strict=False))
        assert abs(equal / (4000 - apart) - 0.5) < 0.03, apart
    assert sorted(draw_turns(6, 7, 3)) == list(range(6)) and draw_turns(6, 7, 3) == draw_turns(6, 7, 3)
    other = [draw_turns(2, repetition, seed=4)[0] for repetition in range(4000)]  # a different comparison
    assert abs(sum(a == b for a, b in zip(first, other, strict=True)) / 4000 - 0.5) < 0.03


def _names(module, plan=None):
    return [c.configuration.rpartition(", ")[2] for c in build_candidates(module, plan)]


def _meta(model):
    with torch.device("meta"):
        return WORKLOADS[model].build()


def test_caps_with_the_same_partition_are_tried_once():
    assert _names(_meta("tiny")) == ["torch's own caps"]
    # Four layers of slightly more than 16 MiB: 1, 5 and 10 MiB give the same cuts; a 50 MiB bucket closes only with the
    # last.
    assert _names(_meta("mlp")) == ["torch's own caps", "cap 1 MiB", "cap 25 MiB", "cap 50 MiB"]
    assert _names(_meta("resnet18"))[-2:] == ["cap 25 MiB", "cap 50 MiB"]


def test_our_plan_is_tried_if_torch_can_express_it_and_does_not_already_use_it():
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))  # 1 MiB each
    gradients = [Gradient(name, p.numel() * 4) for name, p in module.named_parameters()]
    order = list(reversed(range(8)))
    assert _names(module, plan_by_cap(gradients, order, 3 * MIB))[-1] == "Paceline's plan"
    assert "Paceline's plan" not in _names(module, plan_by_cap(gradients, order, MIB))
    split = plan_in_pieces(gradients, order, cap_bytes=MIB // 2)
    assert split.is_split and "Paceline's plan" not in _names(module, split)
    assert len(build_candidates(module, plan_by_cap(gradients, order, 3 * MIB))) <= MAX_CANDIDATES
