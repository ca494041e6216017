"""The models: as large as the catalog says, trained in every parameter, and batches that follow from seed and rank."""

import pytest
import torch
from torch import nn

from paceline.measure.settings import DEFAULT_MODELS
from paceline.measure.wrappers import build_module
from paceline.workloads.registry import WORKLOADS

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_model_is_as_large_as_the_catalog_says(monkeypatch, name):
    monkeypatch.setattr(nn.init, "normal_", lambda tensor, **_: tensor)  # on meta it loads all of torch's compiler
    with torch.device("meta"):
        parameters = list(WORKLOADS[name].build().parameters())
    assert len(parameters) == WORKLOADS[name].num_parameters
    assert sum(parameter.numel() for parameter in parameters) == WORKLOADS[name].num_elements


def test_the_published_sizes():
    assert WORKLOADS["resnet18"].num_elements == 11_173_962
    assert WORKLOADS["resnet18-imagenet"].num_elements == 11_689_512
    assert WORKLOADS["gpt2-large"].num_elements == 774_030_080
    assert WORKLOADS["tiny"].num_parameters == 1000
    assert 4 * WORKLOADS["mlp"].num_elements > 64 * 2**20


@pytest.mark.parametrize("name", DEFAULT_MODELS)
def test_every_parameter_gets_a_gradient(name):
    workload = WORKLOADS[name]
    module = build_module(name, 0, CPU)
    loss = workload.compute_loss(module, workload.make_batch(2, 0, 0, CPU))
    loss.backward()
    assert torch.isfinite(loss)
    for path, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path
        assert parameter.grad.any(), path


def test_gpt2_looks_back_only_and_ties_its_head():
    module = build_module("gpt2-mini", 0, CPU).eval()
    ids = torch.arange(8).reshape(1, 8)
    changed = ids.clone()
    changed[0, 5] = 77
    before, after = module(ids), module(changed)
    assert torch.equal(before[0, :5], after[0, :5]) and not torch.equal(before[0, 5:], after[0, 5:])
    with torch.no_grad():
        module.tokens.weight[4000] += 1  # a token that is not in the input changes its own logit alone
    apart = (module(ids) != before).any(dim=1)[0]
    assert apart.nonzero().flatten().tolist() == [4000]


@pytest.mark.parametrize("name", ["cnn", "gpt2-mini"])
def test_batches_follow_from_seed_and_rank(name):
    def make(seed, rank):
        batch = WORKLOADS[name].make_batch(3, seed, rank, CPU)
        return batch.inputs, batch.targets

    first, again, other_rank, other_seed = make(1, 0), make(1, 0), make(1, 1), make(2, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other_rank[0]) and not torch.equal(first[0], other_seed[0])
    assert first[0].shape[0] == first[1].shape[0] == 3


def test_modules_follow_from_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (build_module("cnn", seed, CPU) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
