"""GhostBatchNorm compared with a loop over sub-batches: forward, backward, running statistics, and `convert`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline import ConfigError, GhostBatchNorm, SyncBatchNorm

CHANNELS = 3


def make(ghost_size: int, **options) -> GhostBatchNorm:
    torch.manual_seed(1)
    layer = GhostBatchNorm(CHANNELS, ghost_size, dtype=torch.float64, **options)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def train(layer, x: torch.Tensor, forward) -> list[torch.Tensor]:
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = forward(leaf)
    (out**3).sum().backward()
    return [out.detach(), leaf.grad, *(param.grad for param in layer.parameters())]


def expect(layer: GhostBatchNorm, x: torch.Tensor, sizes: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A loop over sub-batches of these sizes; their means and unbiased variances are averaged, weighted by samples."""

    def forward(leaf):
        return torch.cat([F.batch_norm(part, None, None, layer.weight, layer.bias, True) for part in leaf.split(sizes)])

    rows = []
    for part in x.split(sizes):
        flat = part.movedim(1, -1).reshape(-1, CHANNELS)
        rows.append(len(part) / len(x) * torch.stack([flat.mean(0), flat.var(0, correction=1)]))
    return train(layer, x, forward), sum(rows)


@pytest.mark.parametrize("space", [(), (5,), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize(
    ("samples", "ghost_size", "sizes"),
    [
        (8, 4, [4, 4]),
        (12, 4, [4, 4, 4]),
        (11, 4, [4, 4, 3]),
        (6, 4, [4, 2]),
        (4, 4, [4]),
        (3, 4, [3]),
    ],
)
def test_ghost_batchnorm_equals_a_loop_over_sub_batches(samples, ghost_size, sizes, space):
    x = torch.randn(samples, CHANNELS, *space, dtype=torch.float64) * 2 + 5
    layer = make(ghost_size)
    reference = copy.deepcopy(layer)
    wanted, averages = expect(reference, x, sizes)
    for a, b in zip(train(layer, x, layer), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.running_mean, 0.1 * averages[0], rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * averages[1], rtol=1e-12, atol=1e-14)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize(("space", "sizes"), [((), [4, 5]), ((1, 1), [4, 5]), ((1, 2), [4, 4, 1])])
def test_a_last_sample_with_one_value_joins_the_previous_sub_batch(space, sizes):
    x = torch.randn(9, CHANNELS, *space, dtype=torch.float64)
    layer = make(4)
    wanted, averages = expect(copy.deepcopy(layer), x, sizes)
    for a, b in zip(train(layer, x, layer), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.running_var, 0.9 + 0.1 * averages[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("samples", [8, 7])
@pytest.mark.parametrize(("space", "layout"), [((4, 5), torch.channels_last), ((2, 4, 5), torch.channels_last_3d)])
def test_the_memory_format_is_preserved(samples, space, layout):
    x = torch.randn(samples, CHANNELS, *space, dtype=torch.float64)
    layer, other = make(4), make(4)
    ours = train(layer, x.contiguous(memory_format=layout), layer)
    assert ours[0].is_contiguous(memory_format=layout) and not ours[0].is_contiguous()
    plain = train(other, x, other)
    assert plain[0].is_contiguous()
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.running_var, other.running_var, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"momentum": 0.3, "eps": 0.1}]
)
def test_options_work_as_in_torch(options):
    """With two equal halves, torch's BatchNorm on one half matches GhostBatchNorm on both."""
    half = torch.randn(4, CHANNELS, 2, dtype=torch.float64)
    layer = make(4, **options)
    plain = nn.BatchNorm1d(CHANNELS, dtype=torch.float64, **options)
    plain.load_state_dict(layer.state_dict())
    for _ in range(3):
        torch.testing.assert_close(layer(torch.cat([half, half]))[:4], plain(half))
    for (name, found), wanted in zip(layer.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted, msg=name)
    plain.load_state_dict(layer.state_dict())  # equal up to rounding
    layer.eval(), plain.eval()
    x = torch.randn(9, CHANNELS, 2, dtype=torch.float64)
    assert torch.equal(layer(x), plain(x))


@pytest.mark.parametrize("samples", [8, 7, 3])
def test_bfloat16_under_autocast_is_normalized(samples):
    layer = GhostBatchNorm(CHANNELS, 4)
    x = torch.randn(samples, CHANNELS, 6, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x.bfloat16())
    assert out.dtype == torch.bfloat16 and layer.running_mean.dtype == torch.float32
    torch.testing.assert_close(out.float(), GhostBatchNorm(CHANNELS, 4)(x), rtol=0.05, atol=0.05)


def test_invalid_inputs_and_sizes_are_refused():
    for size in (1, 0, -3):
        with pytest.raises(ConfigError, match=f"ghost_size={size}"):
            GhostBatchNorm(CHANNELS, size)
        with pytest.raises(ConfigError, match=f"ghost_size={size}"):
            GhostBatchNorm.convert(nn.Linear(3, 3), size)  # even though there is nothing to replace
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        GhostBatchNorm(CHANNELS, 2)(torch.randn(1, CHANNELS))
    for shape in ((3,), (4, 2)):
        with pytest.raises(ValueError, match=r"expected an input \(N, 3, ...\)"):
            GhostBatchNorm(CHANNELS, 2)(torch.randn(*shape))


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


def test_convert_keeps_everything_else():
    norm, calls = nn.BatchNorm2d(3, eps=0.1).eval(), []
    handle = norm.register_forward_hook(lambda module, args, out: calls.append(type(module)))
    model = nn.ModuleDict({"a": norm, "b": nn.Sequential(norm, nn.InstanceNorm2d(3)), "c": nn.Conv2d(3, 3, 1)})
    plain, parameters = copy.deepcopy(model), list(model.parameters())
    assert GhostBatchNorm.convert(model, 4) is model
    assert model["a"] is model["b"][0] and type(model["a"]) is GhostBatchNorm
    assert (model["a"].ghost_size, model["a"].eps, model["a"].training) == (4, 0.1, False)
    assert "ghost_size=4" in repr(model)
    assert [id(param) for param in model.parameters()] == [id(param) for param in parameters]
    # Checkpoints can be exchanged in both directions.
    assert list(model.state_dict()) == list(plain.state_dict())
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model["a"](torch.randn(2, 3, 1, 1))
    handle.remove()
    model["a"](torch.randn(2, 3, 1, 1))
    assert calls == [GhostBatchNorm]
    layer = model["a"]
    GhostBatchNorm.convert(model, 8)
    assert model["a"] is layer and layer.ghost_size == 8


@pytest.mark.parametrize(
    ("layer", "code"),
    [
        (nn.LazyBatchNorm2d(), "lazy-layer"),
        (Activated(3), "custom-forward"),
        (SyncBatchNorm(3), "custom-forward"),
    ],
)
def test_layers_that_would_lose_something_are_refused_and_nothing_changes(layer, code):
    model = nn.Sequential(nn.BatchNorm2d(3), layer)
    with pytest.raises(ConfigError, match=rf"1 \({type(layer).__name__}\)") as caught:
        GhostBatchNorm.convert(model, 4)
    assert caught.value.code == code
    assert type(model[0]) is nn.BatchNorm2d and model[1] is layer
