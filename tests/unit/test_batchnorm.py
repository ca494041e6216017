"""SyncBatchNorm without a process group is torch's BatchNorm, and `convert` keeps a layer's state."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from paceline import ConfigError
from paceline.parallel.batchnorm import SyncBatchNorm


def train(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    out = layer(leaf)
    out.pow(3).sum().backward()
    return [out, leaf.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None, "eps": 0.1}]
)
def test_sync_batchnorm_without_a_process_group_is_torchs_batchnorm(options):
    x = torch.randn(4, 3, 5, 2)
    for got, wanted in zip(train(SyncBatchNorm(3, **options), x), train(nn.BatchNorm2d(3, **options), x), strict=True):
        assert torch.equal(got, wanted)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        SyncBatchNorm(3, **options)(torch.randn(1, 3))


def test_a_wrong_shape_is_named():
    for shape in ((3,), (4, 2), (3, 4)):
        with pytest.raises(ValueError, match=rf"expected an input \(N, 3, ...\), got \({shape[0]},"):
            SyncBatchNorm(3)(torch.randn(*shape))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_a_root_module_becomes_a_new_layer_with_the_same_state(kind):
    old = kind(3, eps=0.1, momentum=None).eval()
    old.weight.requires_grad_(False)
    new = SyncBatchNorm.convert(old)
    assert type(new) is SyncBatchNorm and new is not old and type(old) is kind
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        assert getattr(new, name) is getattr(old, name)
    assert (new.eps, new.momentum, new.training, new.process_group) == (0.1, None, False, None)
    assert set(new.state_dict()) == set(old.state_dict())


def test_convert_leaves_other_modules_unchanged():
    norm, instance = nn.BatchNorm2d(3), nn.InstanceNorm2d(3)
    inner = nn.Sequential(norm, instance, nn.BatchNorm2d(3, affine=False, track_running_stats=False))
    model = nn.ModuleDict({"a": norm, "b": inner, "again": inner, "none": nn.Sequential()})
    model["none"].register_module("missing", None)
    names = list(model.state_dict())
    parameters = list(model.parameters())
    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    assert model["a"] is model["b"][0] and type(model["a"]) is SyncBatchNorm  # one layer used in two places
    assert model["again"] is model["b"] is inner and inner[1] is instance
    assert type(inner[2]) is SyncBatchNorm and inner[2].weight is None and inner[2].running_mean is None
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    copied = copy.deepcopy(model)
    assert type(copied["a"]) is SyncBatchNorm and copied["a"].weight is not norm.weight


def test_hooks_are_kept_and_can_still_be_removed():
    old, calls = nn.BatchNorm1d(3), []
    handle = old.register_forward_hook(lambda module, args, out: calls.append(type(module)))
    new = SyncBatchNorm.convert(old)
    new(torch.randn(2, 3))
    assert calls == [SyncBatchNorm]
    handle.remove()
    new(torch.randn(2, 3))
    assert len(calls) == 1


def test_a_group_is_kept_unless_another_is_given():
    first, second = object(), object()
    model = nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3, process_group=first))
    SyncBatchNorm.convert(model)
    assert [layer.process_group for layer in model] == [None, first]
    layers = list(model)
    SyncBatchNorm.convert(model, second)
    assert [layer.process_group for layer in model] == [second, second]
    assert list(model) == layers  # a converted layer is not replaced again


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Careful(nn.BatchNorm2d):
    def __init__(self, channels):
        super().__init__(channels, eps=1e-3)


def test_layers_that_would_lose_something_are_refused_and_nothing_changes():
    for layer, code in ((nn.LazyBatchNorm2d(), "lazy-layer"), (Activated(3), "custom-forward")):
        model = nn.Sequential(nn.BatchNorm2d(3), layer)
        with pytest.raises(ConfigError, match=rf"1 \({type(layer).__name__}\)") as caught:
            SyncBatchNorm.convert(model)
        assert caught.value.code == code
        assert type(model[0]) is nn.BatchNorm2d and model[1] is layer
    assert SyncBatchNorm.convert(Careful(3)).eps == 1e-3


def test_a_lazy_layer_that_has_seen_a_batch_is_converted():
    model = nn.Sequential(nn.LazyBatchNorm2d())
    model(torch.randn(2, 3, 1, 1))
    assert SyncBatchNorm.convert(model)[0].num_features == 3
