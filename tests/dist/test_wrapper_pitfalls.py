"""The pitfalls of a wrapper that hooks into autograd; each test fails if the wrapper falls into one."""

from __future__ import annotations

import functools
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.parallel import DDP
from tests.dist.wrapped import (
    REDUCERS,
    STEPS,
    Net,
    average_alone,
    check,
    check_equal,
    describe,
    draw,
    error_of,
    loss,
)

# -- the arguments of a hook, and what it may modify ------------------------------------------------------------------


def keep_own_parameters() -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), init="none", check_replicas_every=0, **reducer)
            before = [param.detach().clone() for param in model.parameters()]
            for step in range(STEPS):
                model.zero_grad()
                loss(model, world.rank, step).backward()
            for param, value in zip(model.parameters(), before, strict=True):
                assert torch.equal(param, value), f"{reducer}: synchronizing gradients changed a parameter"
            check_equal(world, [param.grad for param in model.parameters()], reducer)


def test_gradients_are_averaged_and_parameters_unchanged(job):
    job(2, keep_own_parameters)


class Handover(torch.autograd.Function):
    """A model with gradients that share memory with each other and with a tensor referenced elsewhere."""

    held: list[torch.Tensor]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x + a + b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        Handover.held = [grad, grad.clone()]
        return grad.view_as(grad), grad.view_as(grad), grad.view_as(grad)


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = (nn.Parameter(torch.randn(3, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Handover.apply(x * self.first, self.a, self.b))


def share_memory() -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Aliased(), **reducer)
            for step in range(STEPS):
                model.zero_grad()
                wanted = average_alone(model.module, functools.partial(loss, step=step), 2)
                loss(model, world.rank, step).backward()
                held, value = Handover.held
                assert torch.equal(held, value), f"{reducer}: a tensor that autograd lent was written to"
                check(world, model, wanted, (reducer, step))


def test_a_gradient_that_shares_memory_is_copied_before_it_is_changed(job):
    job(2, share_memory)


def keep_strides() -> None:
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2)).to(memory_format=torch.channels_last)
            model = DDP(net, **reducer)

            def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
                images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
                # On rank 1 only: autograd's gradients need not have the same strides on all ranks.
                images = images.to(memory_format=torch.channels_last) if rank else images
                return module(images).square().mean()

            for step in range(STEPS):
                model.zero_grad(set_to_none=step % 2 == 0)
                wanted = average_alone(model.module, functools.partial(loss_of, step=step), 2)
                loss_of(model, world.rank, step).backward()
                check(world, model, wanted, (reducer, step))
                for param in model.parameters():
                    assert param.grad is not None and param.grad.stride() == param.stride(), (reducer, step)


def test_channels_last_gradients_have_their_parameters_strides(job):
    job(2, keep_strides)


# -- several uses, several backwards ----------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.out = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.out.weight = self.table.weight

    def forward(self, x: torch.Tensor, use: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.middle(self.table(x) if use else x))
        return self.out(hidden) if use else hidden


def tie() -> list[tuple[str, str]]:
    errors = []
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Tied(), **reducer)
            for step in range(STEPS):
                model.zero_grad()
                wanted = average_alone(model.module, functools.partial(loss, step=step), 2)
                loss(model, world.rank, step).backward()
                check(world, model, wanted, (reducer, step))
            assert [gradient.name for gradient in model.plan.gradients] == ["table.weight", "middle.weight"]
            model.zero_grad()
            errors.append(error_of(lambda model=model: loss(model, world.rank, use=world.rank == 0).backward()))
    return errors


def test_a_tied_parameter_is_one_entry_with_both_names(job):
    texts = job(2, tie)
    assert texts[0] == texts[1]
    for kind, text in texts[0]:
        assert kind == "CollectiveError missing-gradient"
        assert "table.weight = out.weight on rank 1" in text


class Checkpointed(nn.Module):
    """One layer is used in two checkpointed segments. The output can be hidden from searches for tensors."""

    def __init__(self, reentrant: bool | None, hidden: bool = False) -> None:
        super().__init__()
        self.first, self.shared, self.other, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.reentrant, self.hidden = reentrant, hidden

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.other(torch.tanh(self.shared(x))))

    def again(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(torch.tanh(self.shared(x))))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for part in (self.segment, self.again):
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return (lambda: x) if self.hidden else x


def recompute(reentrant: bool, hidden: bool) -> None:
    def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
        out = model(draw(rank, step))
        return (out() if callable(out) else out).square().mean()

    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model, plain = DDP(Checkpointed(reentrant, hidden), **reducer), Checkpointed(None)
            plain.load_state_dict(model.module.state_dict())
            for step in range(STEPS):
                model.zero_grad()
                wanted = average_alone(plain, functools.partial(loss_of, step=step), 2)
                loss_of(model, world.rank, step).backward()
                check(world, model, wanted, (reducer, step))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_with_a_layer_in_two_segments(job, reentrant):
    job(2, recompute, reentrant, False)


class Repeated(nn.Module):
    """One layer is used in several segments of re-entrant checkpointing, so its gradient arrives in several parts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: torch.Tensor, uses: int) -> torch.Tensor:
        x = self.first(x)
        for _ in range(uses):
            x = checkpoint(lambda value: torch.tanh(self.shared(value)), x, use_reentrant=True)
        return self.last(x)


def arrive_in_parts(width: int, uses: dict[int, tuple[int, int]]) -> None:
    """`uses`: the number of uses on each rank in these steps, if not two."""

    def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(10 * step + rank))
        return model(x, uses.get(step, (2, 2))[rank]).square().mean()

    with paceline.init(announce=None) as world:
        for keeps in (False, True):  # gradients that autograd accumulates in place
            model = DDP(Repeated(width), bucket_cap_mb=1e-6)
            for step in range(8):
                model.zero_grad(set_to_none=not keeps)
                wanted = average_alone(model.module, functools.partial(loss_of, step=step), 2)
                loss_of(model, world.rank, step).backward()
                check(world, model, wanted, (keeps, step))


@pytest.mark.parametrize(
    ("width", "uses"),
    [
        (4, {3: (1, 1), 4: (1, 1), 6: (3, 2)}),
        (256, {0: (1, 2), 5: (3, 3)}),  # large gradients; rank 0 first learns from rank 1 that there are parts
    ],
)
def test_a_gradient_may_arrive_in_any_number_of_parts(job, width, uses):
    job(2, arrive_in_parts, width, uses)


def hide_the_output() -> tuple[str, str]:
    with paceline.init(announce=None) as world:
        model = DDP(Checkpointed(True, True))
        return error_of(lambda: model(draw(world.rank))().square().mean().backward())


def test_an_output_that_hides_its_tensors_is_refused_with_reentrant_checkpointing(job):
    """The backward is first detected inside a nested one, which ends too early."""
    (kind, text), other = job(2, hide_the_output)
    assert (kind, text) == other
    assert kind == "ConfigError reentrant-checkpoint" and "use_reentrant=False" in text
    job(2, recompute, False, True)


def differentiate_twice() -> int:
    def penalty(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = draw(rank, step).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum() + model(x).square().mean()

    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), **reducer)
            for step in range(STEPS):
                model.zero_grad()
                if world.rank == 0:  # if these were synchronized, rank 0 would wait for rank 1
                    torch.autograd.grad(loss(model, 0), list(model.parameters()))
                    torch.autograd.grad(loss(model, 0), model.module.first.weight)
                assert all(param.grad is None for param in model.parameters())
                wanted = average_alone(model.module, functools.partial(penalty, step=step), 2)
                penalty(model, world.rank, step).backward()
                check(world, model, wanted, (reducer, step))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = DDP(Net())
            for step in range(STEPS):
                model.zero_grad(set_to_none=step % 2 == 0)
                wanted = average_alone(model.module, functools.partial(loss, step=step), 2)
                loss(model, world.rank, step).backward(create_graph=True)
                check(world, model, wanted, step)
                for param in model.parameters():
                    param.grad = param.grad.detach()  # break the cycle, as torch's warning recommends
        return sum("backward(create_graph=True)" in str(warning.message) for warning in caught)


def test_create_graph_is_averaged_with_one_warning_and_autograd_grad_sends_nothing(job):
    assert job(2, differentiate_twice) == [1, 1]


# -- parameters without a gradient ------------------------------------------------------------------------------------

USES = {0: "left right", 1: "left right", 2: "left"}


def leave_out(step_of_it: int) -> list[tuple[str, str]]:
    errors = []
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), **reducer)
            for step in range(step_of_it):
                model.zero_grad()
                loss(model, world.rank, step).backward()
            model.zero_grad()
            missing_on_two = loss(model, world.rank, use=USES[world.rank])
            errors.append(error_of(missing_on_two.backward))
            # The error is handled: the next step is normal.
            model.zero_grad()
            wanted = average_alone(model.module, loss, 3)
            loss(model, world.rank).backward()
            check(world, model, wanted, reducer)
    return errors


@pytest.mark.parametrize("step_of_it", [0, 3])
def test_an_unused_parameter_is_named_on_all_ranks_in_the_same_backward(job, step_of_it):
    texts = job(3, leave_out, step_of_it)
    assert texts[0] == texts[1] == texts[2]
    for kind, text in texts[0]:
        assert kind == "CollectiveError missing-gradient"
        assert f"step {step_of_it + 1}: " in text
        assert "right.weight on rank 2; right.bias on rank 2" in text
        assert "left" not in text
        assert "find_unused_parameters=True" in text


def count_as_zeros() -> None:
    # Used on one rank, on the other, on both, and on neither; no rank uses `right` in step 3.
    uses = [("left right", "left"), ("right", "left right"), ("right", "left"), ("left", "left"), ("left right",) * 2]
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), find_unused_parameters=True, **reducer)
            for step, use in enumerate(uses * 2):
                model.zero_grad(set_to_none=True)

                def loss_of(module: nn.Module, rank: int, step: int = step, use: tuple = use) -> torch.Tensor:
                    return loss(module, rank, step, use=use[rank])

                wanted = average_alone(model.module, loss_of, 2)
                assert (wanted["right.weight"] is None) == (use == ("left", "left"))
                loss_of(model, world.rank).backward()
                check(world, model, wanted, (reducer, step))


def test_unused_parameters_count_as_zeros_on_request_and_have_no_gradient_if_unused_everywhere(job):
    job(2, count_as_zeros)


def accumulate_by_turns() -> None:
    def both(module: nn.Module, rank: int, step: int) -> torch.Tensor:
        halves = ("left", "right") if rank == step % 2 else ("right", "left")
        return sum(loss(module, rank, 10 * step + part, use=use) for part, use in enumerate(halves))

    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), **reducer)
            for step in range(STEPS):
                model.zero_grad(set_to_none=step < 2)
                wanted = average_alone(model.module, functools.partial(both, step=step), 2)
                halves = ("left", "right") if world.rank == step % 2 else ("right", "left")
                with model.no_sync():
                    loss(model, world.rank, 10 * step, use=halves[0]).backward()
                loss(model, world.rank, 10 * step + 1, use=halves[1]).backward()
                check(world, model, wanted, (reducer, step))


def test_accumulation_keeps_gradients_of_earlier_micro_batches(job):
    job(2, accumulate_by_turns)


# -- errors in the middle of a backward -------------------------------------------------------------------------------


def fail_in_backward(goes_on: bool) -> tuple[list[tuple[str, str]], float]:
    def refuse(_: torch.Tensor) -> None:
        raise OSError("the disk of this rank is full")

    errors: list[tuple[str, str]] = []
    began = time.monotonic()
    for reducer in REDUCERS if goes_on else REDUCERS[2:]:
        try:
            with paceline.init(announce=None) as world:
                model = DDP(Net(), **reducer)
                for step in range(STEPS):
                    model.zero_grad()
                    handle = None
                    if step == STEPS - 1 and world.rank == 1:
                        handle = model.module.left.weight.register_hook(refuse)
                    try:
                        loss(model, world.rank, step).backward()
                    except OSError:
                        if not goes_on:
                            raise
                        handle.remove()
                        loss(model, world.rank, step)
        except Exception as error:
            errors.append(describe(error))
    return errors, time.monotonic() - began


def test_a_rank_that_fails_in_backward_and_exits_is_named_by_the_others(job):
    (first, first_s), (second, _) = job(2, fail_in_backward, False)
    assert second == [("OSError", "the disk of this rank is full")]
    assert [kind for kind, _ in first] == ["CollectiveError peer-lost"]
    assert "rank 1" in first[0][1] and "OSError: the disk of this rank is full" in first[0][1]
    assert first_s < 60  # the timeouts of a collective and of the job are longer


def test_a_rank_that_fails_in_backward_and_continues_raises_the_same_error_as_the_others(job):
    (first, _), (second, _) = job(2, fail_in_backward, True)
    assert first == second
    assert len(first) == len(REDUCERS)
    for kind, text in first:
        assert kind == "CollectiveError rank-failed"
        assert f"step {STEPS}: rank 1 failed" in text


def clip() -> list[float]:
    norms = []
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), **reducer)
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0).add_(0.5)
            loss(model, world.rank).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            check_equal(world, [param.grad for param in model.parameters()], reducer)
    return norms


def test_the_norm_of_clipped_gradients_is_equal_on_all_ranks(job):
    norms = job(3, clip)
    assert norms[0] == norms[1] == norms[2]
    assert norms[0][0] > 0.01
    assert norms[0] == pytest.approx([norms[0][0]] * len(norms[0]), rel=1e-5)
