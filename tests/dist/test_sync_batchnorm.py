"""SyncBatchNorm on real ranks equals torch's BatchNorm on the whole batch."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import ConfigError
from paceline.parallel.batchnorm import SyncBatchNorm

CHANNELS = 3
STEPS = 2  # the second step updates running statistics that are no longer initial


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values with a different mean and spread in every channel and sample: parts then differ from the whole."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sample = torch.arange(shape[0], dtype=torch.float64).view(-1, 1, *[1] * (len(shape) - 2))
    channel = torch.arange(1, CHANNELS + 1, dtype=torch.float64).view(1, -1, *[1] * (len(shape) - 2))
    return values * channel + sample - channel


def train(layer: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> dict[str, Any]:
    """Some steps of the loss (output * upstream).sum(), and all results of the last step, as float64 arrays."""
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(0.5, 1.5, CHANNELS))
            if layer.bias is not None:
                layer.bias.copy_(torch.linspace(-1, 1, CHANNELS))
    for step in range(STEPS):
        layer.zero_grad()
        leaf = (x * (step + 1)).requires_grad_()
        out = layer(leaf)
        (out * upstream).sum().backward()
    found = {"out": out, "grad_x": leaf.grad} | {f"grad_{k}": p.grad for k, p in layer.named_parameters()}
    found |= dict(layer.named_buffers())
    return {name: tensor.detach().double().cpu().numpy() for name, tensor in found.items()} | {"dtype": out.dtype}


def train_part(parts: list[tuple[np.ndarray, np.ndarray]], dtype: torch.dtype, options: dict) -> dict[str, Any]:
    return train_parts([(parts, dtype, options)])[0]


def train_parts(jobs: list[tuple[list[tuple[np.ndarray, np.ndarray]], torch.dtype, dict]]) -> list[dict[str, Any]]:
    """Train several layers one after another in one world."""
    found = []
    with paceline.init(device="cpu", announce=None) as world:
        for parts, dtype, options in jobs:
            x, upstream = (torch.from_numpy(array).to(world.device, dtype) for array in parts[world.rank])
            layer = SyncBatchNorm(CHANNELS, **options).to(world.device)
            found.append(train(layer.double() if dtype == torch.float64 else layer, x, upstream))
    return found


def cut(x: torch.Tensor, upstream: torch.Tensor, sizes: tuple[int, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(a.numpy(), b.numpy()) for a, b in zip(x.split(sizes), upstream.split(sizes), strict=True)]


def check_parity(on_ranks, sizes, image, dtype=torch.float64, *, offset=0.0, rtol=1e-9, atol=1e-9, **options) -> None:
    """Train on the parts and on the whole, the latter in float64 from the same numbers."""
    check_together(on_ranks, [(sizes, image, options)], dtype, offset=offset, rtol=rtol, atol=atol)


def check_together(on_ranks, cases, dtype=torch.float64, *, offset=0.0, rtol=1e-9, atol=1e-9) -> None:
    """The same for several cases (sizes of the parts, shape of a sample, options) on the same number of ranks, in one
    job."""
    wanted, jobs = [], []
    for sizes, image, options in cases:
        x, upstream = (draw(sum(sizes), CHANNELS, *image, seed=seed).to(dtype).double() for seed in (0, 1))
        x = (x + offset).to(dtype).double()
        kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[x.dim()]
        wanted.append(train(kind(CHANNELS, **options).double(), x, upstream))
        jobs.append((cut(x, upstream, sizes), dtype, options))
    found = on_ranks(len(cases[0][0]), train_parts, jobs)
    for case, want, *parts in zip(cases, wanted, *found, strict=True):
        for name, value in want.items():
            if name in ("out", "grad_x"):
                got = np.concatenate([part[name] for part in parts])
            elif name.startswith("grad"):
                got = sum(part[name] for part in parts)
            elif name == "dtype":
                assert [part[name] for part in parts] == [dtype] * len(parts)
                continue
            else:
                got = parts[0][name]
                assert all(np.array_equal(part[name], got) for part in parts), f"{name} differs between the ranks"
            np.testing.assert_allclose(got, value, rtol, atol, err_msg=f"{name} of {case}")


SIZES = [(4, 4), (5, 1), (0, 4), (1, 1), (3, 1, 2), (2, 0, 3), (0, 2, 0)]
IMAGES = [(), (4,), (3, 2), (2, 3, 2)]
OPTIONS = [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.5, "momentum": 0.7}]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_even_uneven_and_empty_batches_equal_the_whole_batch(on_ranks, num_ranks):
    sizes = [size for size in SIZES if len(size) == num_ranks]
    check_together(on_ranks, [(size, image, {}) for size in sizes for image in ((), (3, 2))])


def test_every_option_and_number_of_dimensions(on_ranks):
    check_together(on_ranks, [((2, 3), image, options) for image in IMAGES for options in OPTIONS])


@pytest.mark.skipif("bias" not in inspect.signature(nn.BatchNorm2d).parameters, reason="this torch always has a bias")
def test_a_weight_without_a_bias(on_ranks):
    check_parity(on_ranks, (2, 3), (2,), bias=False)


def test_float32_statistics_have_float32_accuracy(on_ranks):
    check_parity(on_ranks, (3, 1, 2), (4, 4), torch.float32, rtol=1e-5, atol=1e-5)


def test_a_large_mean_does_not_cancel_the_variance(on_ranks):
    """At 1e4, float32 has a spacing of 1e-3, an acceptable error; a mean of squares would have a spacing of 8."""
    check_parity(on_ranks, (4, 2, 6), (8, 8), torch.float32, offset=1e4, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_have_float32_statistics(on_ranks, dtype):
    half = torch.finfo(dtype).eps
    check_parity(on_ranks, (3, 1, 2), (4, 4), dtype, rtol=4 * half, atol=4 * half)
    x = draw(6, CHANNELS, 4, 4).to(dtype).double()
    found = on_ranks(2, train_part, cut(x, x, (4, 2)), dtype, {"momentum": 1.0})[0]
    last = (x * STEPS).transpose(0, 1).flatten(1)
    np.testing.assert_allclose(found["running_mean"], last.mean(1).numpy(), 1e-5)
    np.testing.assert_allclose(found["running_var"], last.var(1).numpy(), 1e-5)


def train_in_half(parts: list, autocast: bool) -> tuple:
    with paceline.init(device="cpu", announce=None) as world:
        x = torch.from_numpy(parts[world.rank][0]).float()
        layers = nn.Sequential(nn.Linear(CHANNELS, CHANNELS, bias=False), SyncBatchNorm(CHANNELS))
        nn.init.eye_(layers[0].weight)
        if not autocast:
            x, layers = x.bfloat16(), layers.bfloat16()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = layers(x)
        out.float().pow(3).sum().backward()
        grads = [p.grad for p in layers.parameters()]
        return out.dtype, [g.dtype for g in grads], out.float().detach().numpy(), layers[1].running_var.double().numpy()


@pytest.mark.parametrize("autocast", [True, False])
def test_autocast_and_low_precision_parameters(on_ranks, autocast):
    x = draw(6, CHANNELS)
    found = on_ranks(2, train_in_half, cut(x, x, (5, 1)), autocast)
    assert {f[0] for f in found} == {torch.bfloat16}
    assert {d for f in found for d in f[1]} == {torch.float32 if autocast else torch.bfloat16}
    whole = nn.BatchNorm1d(CHANNELS).double()
    wanted = whole(x).detach().numpy()
    np.testing.assert_allclose(np.concatenate([f[2] for f in found]), wanted, atol=0.03)
    np.testing.assert_allclose(found[0][3], whole.running_var.numpy(), rtol=0.01)


def follow_layout(parts: list, layout: torch.memory_format) -> tuple[bool, bool]:
    with paceline.init(device="cpu", announce=None) as world:
        x = torch.from_numpy(parts[world.rank][0]).to(memory_format=layout).requires_grad_()
        out = SyncBatchNorm(CHANNELS).double()(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        return out.is_contiguous(memory_format=layout), grad.is_contiguous(memory_format=layout)


@pytest.mark.parametrize(
    ("image", "layout"),
    [((4, 2), torch.contiguous_format), ((4, 2), torch.channels_last), ((4, 2, 3), torch.channels_last_3d)],
)
def test_the_memory_format_is_preserved(on_ranks, image, layout):
    x = draw(5, CHANNELS, *image)
    assert on_ranks(2, follow_layout, cut(x, x, (2, 3)), layout) == [(True, True)] * 2


def evaluate_alone() -> tuple:
    with paceline.init(device="cpu", announce=None) as world:
        torch.manual_seed(world.rank)
        x = torch.randn(4, CHANNELS)
        tracking, free = SyncBatchNorm(CHANNELS).eval(), SyncBatchNorm(CHANNELS, track_running_stats=False).eval()
        tracking.running_mean.fill_(2.0)
        if world.rank == 1:  # rank 0 does not call the layer
            torch.testing.assert_close(tracking(x), (x - 2) / (1 + 1e-5) ** 0.5)
            torch.testing.assert_close(free(x), nn.BatchNorm1d(CHANNELS)(x))
        return tracking.num_batches_tracked.item(), tracking.running_mean.tolist()


def test_evaluation_needs_no_other_rank(on_ranks):
    assert on_ranks(2, evaluate_alone) == [(0, [2.0] * CHANNELS)] * 2


def count_messages() -> list[int]:
    with paceline.init(device="cpu", announce=None):
        sent = dist.group.WORLD._get_sequence_number_for_group
        layer, counts = SyncBatchNorm(CHANNELS), []
        for x in (torch.randn(4, CHANNELS, requires_grad=True), torch.randn(4, CHANNELS)):
            before = sent()
            out = layer(x)
            between = sent()
            out.square().sum().backward()
            counts += [between - before, sent() - between]
        return counts


def test_one_message_in_forward_and_one_in_backward_if_the_input_needs_a_gradient(on_ranks):
    assert on_ranks(2, count_messages) == [[1, 1, 1, 0]] * 2


def test_a_world_of_one_uses_torchs_layer_and_sends_nothing():
    x, upstream = draw(4, CHANNELS, 2).float(), draw(4, CHANNELS, 2, seed=1).float()
    with paceline.init(device="cpu", announce=None):
        before = dist.group.WORLD._get_sequence_number_for_group()
        found = train(SyncBatchNorm(CHANNELS), x, upstream)
        assert dist.group.WORLD._get_sequence_number_for_group() == before
    for name, value in train(nn.BatchNorm1d(CHANNELS), x, upstream).items():
        assert np.array_equal(found[name], value), name


def train_on(sizes: tuple[int, ...]) -> tuple[str, list, int]:
    with paceline.init(device="cpu", announce=None) as world:
        layer = SyncBatchNorm(CHANNELS)
        text = ""
        try:
            layer(torch.ones(sizes[world.rank], CHANNELS, requires_grad=True)).sum().backward()
        except ValueError as error:
            text = str(error)
        grads = [p.grad.tolist() if p.grad is not None else None for p in layer.parameters()]
        state = [layer.running_mean.tolist(), layer.running_var.tolist()]
        return text, grads + state, layer.num_batches_tracked.item()


@pytest.mark.parametrize("sizes", [(1, 0), (0, 0, 1)])
def test_a_single_value_is_refused_on_all_ranks_alike(on_ranks, sizes):
    found = on_ranks(len(sizes), train_on, sizes)
    assert len(set(map(str, found))) == 1
    text, state, batches = found[0]
    assert text.startswith("Expected more than 1 value per channel when training, got 1 on ")
    assert (state[2:], batches) == ([[0.0] * CHANNELS, [1.0] * CHANNELS], 0)


def test_empty_batches_on_all_ranks_do_not_change_statistics(on_ranks):
    zeros, ones = [0.0] * CHANNELS, [1.0] * CHANNELS
    assert on_ranks(2, train_on, (0, 0)) == [("", [zeros, zeros, zeros, ones], 1)] * 2  # as torch does


def stop_tracking() -> tuple[list, int]:
    with paceline.init(device="cpu", announce=None):
        layer = SyncBatchNorm(CHANNELS)
        layer.track_running_stats = False
        layer(torch.randn(4, CHANNELS))
        return layer.running_mean.tolist(), layer.num_batches_tracked.item()


def test_tracking_can_be_switched_off_later(on_ranks):
    assert on_ranks(2, stop_tracking) == [([0.0] * CHANNELS, 0)] * 2


def train_in_pairs(parts: list) -> Any:
    with paceline.init(device="cpu", announce=None) as world:
        groups = [dist.new_group([0, 2]), dist.new_group([1])]
        layer = SyncBatchNorm(CHANNELS, process_group=groups[0]).double()
        x, upstream = (torch.from_numpy(array) for array in parts[world.rank])
        if world.rank != 1:
            return train(layer, x, upstream)
        with pytest.raises(ConfigError, match="rank 1") as caught:
            layer(x)
        assert caught.value.code == "not-in-group"
        return train(SyncBatchNorm(CHANNELS, process_group=groups[1]).double(), x, upstream)


def test_a_group_of_some_ranks(on_ranks):
    x, upstream = draw(9, CHANNELS, 2), draw(9, CHANNELS, 2, seed=1)
    found = on_ranks(3, train_in_pairs, cut(x, upstream, (2, 3, 4)))
    for members in ((0, 2), (1,)):
        own = [torch.cat([t.split((2, 3, 4))[m] for m in members]) for t in (x, upstream)]
        wanted = train(nn.BatchNorm1d(CHANNELS).double(), *own)
        for name in ("out", "grad_x"):
            np.testing.assert_allclose(np.concatenate([found[m][name] for m in members]), wanted[name], 1e-9, 1e-9)


def differentiate_twice() -> None:
    with paceline.init(device="cpu", announce=None):
        x = torch.randn(4, CHANNELS, requires_grad=True)
        (grad,) = torch.autograd.grad(SyncBatchNorm(CHANNELS)(x).pow(3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_a_second_derivative_is_refused(on_ranks):
    on_ranks(2, differentiate_twice)


def build_network() -> nn.Module:
    torch.manual_seed(7)
    shared = nn.BatchNorm2d(4)
    blocks = [nn.Conv2d(CHANNELS, 4, 3, bias=False), shared, nn.ReLU(), nn.Conv2d(4, 4, 1), shared, nn.Flatten()]
    return nn.Sequential(*blocks, nn.Linear(16, 5), nn.BatchNorm1d(5)).double()


def train_network(network: nn.Module, x: torch.Tensor) -> list[np.ndarray]:
    network(x).pow(3).sum().backward()
    return [p.grad.numpy() for p in network.parameters()] + [b.double().numpy() for b in network.buffers()]


def train_converted(parts: list) -> list[np.ndarray]:
    with paceline.init(device="cpu", announce=None) as world:
        return train_network(SyncBatchNorm.convert(build_network()), torch.from_numpy(parts[world.rank][0]))


@pytest.mark.parametrize("sizes", [(3, 3), (4, 0, 2)])
def test_a_converted_network_has_the_gradients_of_the_whole_batch(on_ranks, sizes):
    x = draw(6, CHANNELS, 4, 4)
    network = build_network()
    wanted = train_network(network, x)
    found = on_ranks(len(sizes), train_converted, cut(x, x, sizes))
    for index, value in enumerate(wanted):
        is_gradient = index < len(list(network.parameters()))
        got = sum(part[index] for part in found) if is_gradient else found[0][index]
        np.testing.assert_allclose(got, value, 1e-9, 1e-9)
