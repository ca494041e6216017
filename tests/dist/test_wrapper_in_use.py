"""Pitfalls around a wrapper: what users do to gradients, parameters and modules between and after steps."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch._dynamo  # the dispatch mode below imports it, which sets an environment variable
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import paceline
from paceline.parallel import DDP
from paceline.parallel.channel import Channel, open_group
from tests.dist.wrapped import (
    REDUCERS,
    STEPS,
    Net,
    average_alone,
    check,
    check_close,
    check_equal,
    draw,
    error_of,
    gradients,
    here,
    loss,
)

# -- gradients and parameters that users replace ----------------------------------------------------------------------


def replace_gradients() -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), **reducer)
            for step in range(3 * STEPS):
                kind = step % 3
                model.zero_grad(set_to_none=kind == 0)
                wanted = average_alone(model.module, functools.partial(loss, step=step), 2)
                if kind == 2:  # gradients accumulate into existing ones
                    for name, param in model.module.left.named_parameters():
                        param.grad = torch.full_like(param, 1.0 + world.rank)
                        wanted[f"left.{name}"] = wanted[f"left.{name}"] + 1.5
                    model.module.last.bias.grad = None
                loss(model, world.rank, step).backward()
                check(world, model, wanted, (reducer, step))


def test_gradients_may_be_zeroed_dropped_and_replaced(job):
    job(2, replace_gradients)


def keep_a_gradient() -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), **reducer)
            wanted = average_alone(model.module, loss, 2)
            for step in range(STEPS):  # without zero_grad: the old average plus a new gradient, averaged again
                loss(model, world.rank).backward()
                total = {name: (step + 1) * grad for name, grad in wanted.items()}
                check(world, model, total, (reducer, step))


def test_without_zero_grad_averages_add_up(job):
    job(2, keep_a_gradient)


def replace_values() -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), check_replicas_every=1, **reducer)
            for step in range(2 * STEPS):
                model.zero_grad(set_to_none=step % 2 == 0)
                for number, param in enumerate(model.parameters()):
                    param.data = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + number))
                wanted = average_alone(model.module, functools.partial(loss, step=step), 2)
                loss(model, world.rank, step).backward()
                check(world, model, wanted, (reducer, step))


def test_values_may_be_replaced(job):
    job(2, replace_values)


def convert(only_rank_1: bool) -> list[tuple[str, str]]:
    def loss_of(model: Any, rank: int) -> torch.Tensor:
        dtype = next(model.parameters()).dtype
        return model(draw(rank).to(dtype)).square().mean()

    errors = []
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            for whole in (True, False):
                model = DDP(Net(), **reducer)
                for step in range(2):
                    loss(model, world.rank, step).backward()
                model.zero_grad()
                if not only_rank_1 or world.rank == 1:
                    (model if whole else model.module).to(torch.float64)
                found = error_of(lambda model=model: loss_of(model, world.rank).backward())
                errors.append(found)
                if not found[0]:
                    check(world, model, average_alone(model.module, loss_of, 2), reducer)
                # The remedy in each case:
                model.to(torch.float64)
                model.zero_grad()
                model.rebuild()
                loss_of(model, world.rank).backward()
                check(world, model, average_alone(model.module, loss_of, 2), reducer)
    return errors


@pytest.mark.parametrize("only_rank_1", [False, True])
def test_another_dtype_after_wrapping_works_or_is_a_clear_error_on_all_ranks(job, only_rank_1):
    """The gradient is never silently wrong."""
    first, second = job(2, convert, only_rank_1)
    assert first == second
    assert all(kind for kind, _ in first) or not only_rank_1
    for kind, text in first:
        if kind:
            assert kind == ("CollectiveError rank-failed" if only_rank_1 else "ConfigError model-changed")
            assert "float64" in text and "rebuild()" in text
            assert not only_rank_1 or "rank 1" in text


# -- which backwards are synchronized ---------------------------------------------------------------------------------


def leave_no_sync_in_every_way() -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), **reducer)
            for step in range(STEPS):
                model.zero_grad()
                parts = [loss(model, world.rank, 10 * step + part) for part in range(4)]
                # Only around the backward; nested; and left by an exception.
                with model.no_sync():
                    parts[0].backward()
                    with model.no_sync():
                        parts[1].backward()
                    parts[2].backward()
                alone = {name: grad.clone() for name, grad in gradients(model).items()}
                everyone = world.share({name: grad.numpy() for name, grad in alone.items()})
                assert (everyone[0]["left.weight"] != everyone[1]["left.weight"]).any(), (reducer, step)
                with contextlib.suppress(KeyError), model.no_sync():
                    raise KeyError("left by an exception")
                assert model.do_sync and model.require_backward_grad_sync
                parts[3].backward()

                def all_parts(module: nn.Module, rank: int, step: int = step) -> torch.Tensor:
                    return sum(loss(module, rank, 10 * step + part) for part in range(4))

                check(world, model, average_alone(model.module, all_parts, 2), (reducer, step))
        # Forward inside, backward outside: the backward is synchronized.
        model.zero_grad()
        with model.no_sync():
            inside = loss(model, world.rank)
        inside.backward()
        check(world, model, average_alone(model.module, loss, 2))


def test_no_sync_counts_when_backward_begins(job):
    job(2, leave_no_sync_in_every_way)


# -- scaling and weights ----------------------------------------------------------------------------------------------


def overflow_on_one_rank() -> list[tuple[float, list[float]]]:
    found = []
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), **reducer)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            scaler = torch.amp.GradScaler(here().type, init_scale=1024.0, growth_interval=100)
            scales = []
            for step in range(STEPS):
                before = [param.detach().clone() for param in model.parameters()]
                optimizer.zero_grad()
                value = loss(model, world.rank, step)
                overflows = step in (1, 3)
                if overflows and world.rank == 1:
                    value = value * torch.tensor(float("inf"))
                scaler.scale(value).backward()
                scaler.unscale_(optimizer)
                if not overflows:
                    wanted = average_alone(model.module, functools.partial(loss, step=step), world.world_size)
                    check_close(model, wanted, (reducer, step))
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                pairs = zip(before, model.parameters(), strict=True)
                assert all(torch.equal(old, new) for old, new in pairs) == overflows, (reducer, step)
                check_equal(world, list(model.parameters()), (reducer, step))
            found.append(scales)
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_all(job):
    first, second = job(2, overflow_on_one_rank)
    assert first == second == [[1024.0, 512.0, 512.0, 256.0]] * len(REDUCERS)


def weigh_by_samples() -> None:
    sizes = [(1, 3), (5, 2), (4, 4), (0, 3), (2, 0), (7, 1)]

    def loss_of(model: Any, rank: int, step: int, part: int = 0) -> torch.Tensor:
        return model(draw(rank, 10 * step + part, sizes[step][rank])).square().sum() / max(1, 4 * sizes[step][rank])

    def double(model: Any, rank: int, step: int) -> torch.Tensor:
        return loss_of(model, rank, step) / 2 + loss_of(model, rank, step, 1) / 2

    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            for average in ("samples", "ranks"):
                model = DDP(Net(), average=average, **reducer)
                for step, counts in enumerate(sizes):
                    weights = counts if average == "samples" else None
                    model.zero_grad()
                    wanted = average_alone(model.module, functools.partial(loss_of, step=step), 2, weights)
                    loss_of(model, world.rank, step).backward()
                    check(world, model, wanted, (reducer, average, step))
                    model.zero_grad()
                    wanted = average_alone(model.module, functools.partial(double, step=step), 2, weights)
                    with model.no_sync():
                        (loss_of(model, world.rank, step) / 2).backward()
                    with torch.no_grad():  # an evaluation in between has no effect
                        model(draw(0, size=50))
                    (loss_of(model, world.rank, step, 1) / 2).backward()
                    check(world, model, wanted, (reducer, average, step))
        tokens = DDP(Net(), average="samples", samples_of=lambda x: 1 + 8 * x.size(0) % 7)
        loss_of(tokens, world.rank, 1).backward()
        wanted = average_alone(tokens.module, functools.partial(loss_of, step=1), 2, (1 + 40 % 7, 1 + 16 % 7))
        check(world, tokens, wanted)


def test_uneven_batches_are_weighted_by_their_samples(job):
    job(2, weigh_by_samples)


# -- modules that change ----------------------------------------------------------------------------------------------


def change_the_model(change: str) -> list[tuple[str, str]]:
    errors = []
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            net = Net()
            net.right.requires_grad_(change != "unfreeze")
            model = DDP(net, **reducer)
            for step in range(2):
                model.zero_grad()
                loss(model, world.rank, step).backward()

            def apply(net: Net = net) -> None:
                if change == "add":
                    net.last = nn.Sequential(net.last, nn.Linear(4, 4))
                else:
                    net.right.requires_grad_(change == "unfreeze")

            model.zero_grad()
            if world.rank == 1:
                apply()
            errors.append(error_of(lambda model=model: loss(model, world.rank).backward()))
            if world.rank == 0:
                apply()
            model.rebuild()
            for step in range(2):
                model.zero_grad()
                wanted = average_alone(model.module, functools.partial(loss, step=step), 2)
                loss(model, world.rank, step).backward()
                check(world, model, wanted, (reducer, step))
    return errors


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ("freeze", "CollectiveError missing-gradient", ["right.weight on rank 1", "frozen", "rebuild()"]),
        ("unfreeze", "ConfigError model-changed", ["right.weight was frozen", "rank 1", "rebuild()"]),
        ("add", "ConfigError model-changed", ["last.1.weight is new", "rank 1", "rebuild()"]),
    ],
)
def test_a_change_after_wrapping_is_detected_on_all_ranks_and_fixed_by_rebuild(job, change, kind, words):
    first, second = job(2, change_the_model, change)
    assert first == second
    for found, text in first:
        assert found == kind
        assert all(word in text for word in words), text


def wrap_again() -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            net = Net()
            for round_ in range(2):
                model = DDP(net, **reducer)
                for step in range(3):
                    model.zero_grad()
                    wanted = average_alone(net, functools.partial(loss, step=step), 2)
                    loss(model, world.rank, step).backward()
                    check(world, model, wanted, (reducer, round_, step))
                if round_ == 0:
                    model.stop()
                    model.stop()
                    if world.rank == 0:  # a synchronized backward would wait for rank 1
                        loss(net, 0).backward()
                    model.stop()
                del model
                gc.collect()
            if world.rank == 0:
                loss(net, 0).backward()
    paceline.shutdown()


def test_stopping_twice_and_wrapping_again_after_a_wrapper_is_gone(job):
    job(2, wrap_again)


# -- buffers ----------------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.scale


def share_buffers() -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Buffered(), **reducer)
            net = model.module
            for step in range(STEPS):
                model.zero_grad()
                before = {name: value.clone() for name, value in net.named_buffers()}
                if step in (1, 2):  # on one rank only, then on the other: rank 0's buffers count
                    (net.scale if world.rank == step - 1 else net.count).add_(step)
                value = loss(model, world.rank, step)
                mine = {name: value.clone() for name, value in net.named_buffers()}
                assert not torch.equal(mine["norm.running_mean"], before["norm.running_mean"])
                world.barrier()
                after = dict(net.named_buffers())
                assert all(torch.equal(after[name], mine[name]) for name in mine), (
                    "changed between forward and backward"
                )
                everyone = world.share({name: value.double().numpy() for name, value in mine.items()})
                value.backward()
                for name in ("norm.running_mean", "norm.running_var"):
                    mean = torch.from_numpy(sum(other[name] for other in everyone) / 2)
                    torch.testing.assert_close(net.get_buffer(name).double(), mean, msg=f"{reducer} {step} {name}")
                for name in ("scale", "count", "norm.num_batches_tracked"):
                    assert torch.equal(net.get_buffer(name).double(), torch.from_numpy(everyone[0][name])), (
                        reducer,
                        name,
                    )
                check_equal(world, net.buffers(), (reducer, step))


def test_running_statistics_are_averaged_and_other_buffers_follow_rank_0(job):
    job(2, share_buffers)


def keep_buffers_for_a_second_backward() -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Buffered(), **reducer)
            for step in range(STEPS):
                model.zero_grad()
                model.module.scale.add_(world.rank)
                one, two = loss(model, world.rank, 2 * step), loss(model, world.rank, 2 * step + 1)
                one.backward()
                two.backward()  # this backward needs the buffers as its forward saw them
                check_equal(world, gradients(model).values(), (reducer, step))


def test_buffers_do_not_change_while_a_backward_needs_them(job):
    job(2, keep_buffers_for_a_second_backward)


class Copies(TorchDispatchMode):
    """Counts copies of tensors into existing memory and into new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.into: list[int] = []
        self.new: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, out = func.overloadpacket.__name__, (kwargs or {}).get("out")
        if name == "_foreach_copy_":
            self.into += [to.nbytes for to, given in zip(args[0], args[1], strict=True) if to is not given]
        elif name == "copy_" or (name == "mul" and out is not None):
            self.into.append((args[0] if out is None else out).nbytes)
        elif name in ("clone", "_to_copy", "contiguous"):
            self.new.append(f"{name} of {tuple(args[0].shape)}")
        return func(*args, **(kwargs or {}))


def count_copies(dtype: torch.dtype) -> None:
    with paceline.init(announce=None) as world:
        torch.manual_seed(0)
        # Small gradients, which are copied together, and large ones of 256 KiB and more.
        layers = nn.Conv2d(3, 16, 3, bias=False), nn.Conv2d(16, 256, 3, bias=False), nn.Conv2d(256, 64, 3, bias=False)
        net = nn.Sequential(*layers).to(dtype).to(memory_format=torch.channels_last)
        model = DDP(net, bucket_cap_mb=0.1)
        sizes = sorted(param.nbytes for param in net.parameters())
        for step in range(4):
            model.zero_grad()
            x = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(10 * step + world.rank)).to(dtype)
            total = model(x.to(memory_format=torch.channels_last)).square().mean()
            with Copies() as copies:
                total.backward()
            for param in net.parameters():
                assert param.grad.stride() == param.stride() != param.contiguous().stride()
            if step:  # with a plan, each gradient is copied once, from autograd's memory to the message buffer
                assert sorted(size for size in copies.into if size >= sizes[0]) == sizes, (step, copies.into)
                assert not [text for text in copies.new if ", 3, 3)" in text], copies.new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_copied_once_in_the_strides_of_its_parameter(job, dtype):
    job(2, count_copies, dtype)


class Owner:
    """A model whose group is destroyed with it."""


def outlive_a_group() -> bool:
    with paceline.init("gloo", "cpu", announce=None) as world:
        owners = [Owner()]
        group = open_group(Channel(dist.group.WORLD, world.device), owners[0])
        is_there, may_end = threading.Event(), threading.Event()

        def hold(done, group=group):
            is_there.set()
            may_end.wait(100)
            return done.value()

        if world.rank == 1:
            world.barrier()  # if the all-reduce were complete, rank 0's callback would run in its own thread
        work = group.allreduce([torch.ones(4)])
        if world.rank == 0:
            future = work.get_future().then(hold)
            world.barrier()
            assert is_there.wait(100)
            del work
        else:
            future = work.get_future()
            del work
        del group, hold
        owners.clear()
        gc.collect()
        may_end.set()
        future.wait()
        del future
        time.sleep(0.5)
        world.barrier()
        return True


def test_a_group_may_be_freed_before_a_callback_that_holds_it(on_ranks):
    assert on_ranks(2, outlive_a_group) == [True, True]
