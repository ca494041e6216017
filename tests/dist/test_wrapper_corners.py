"""Corner cases in which a wrapper could be silently wrong: several backwards, two wrappers, replaced parts."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import paceline
from paceline.parallel import DDP, ddp
from tests.dist.wrapped import Net, average_alone, check, check_equal, draw, error_of, gradients, loss


def weigh_two_backwards() -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Net(), average="samples")
        for step in range(3):
            model.zero_grad()
            model(draw(world.rank, 50, size=9)).sum()  # a forward without a backward: its samples do not count
            one, two = loss(model, world.rank, 2 * step), loss(model, world.rank, 2 * step + 1)
            one.backward()
            two.backward()
            wanted = average_alone(
                model.module, lambda m, rank, s=step: loss(m, rank, 2 * s) + loss(m, rank, 2 * s + 1), 2
            )
            check(world, model, wanted, step)


def test_the_samples_of_every_forward_in_a_backward_count(job):
    job(2, weigh_two_backwards)


def train_two() -> None:
    with paceline.init(announce=None) as world:
        first, second = (DDP(Net(), find_unused_parameters=True, bucket_cap_mb=1e-5) for _ in range(2))

        def loss_of(pair: nn.ModuleList, rank: int, step: int) -> torch.Tensor:
            use = "left" if rank == 1 and step > 1 else "left right"
            return pair[1](pair[0](draw(rank, step)), use=use).square().mean()

        for step in range(5):
            pair = nn.ModuleList([first, second])
            wanted = average_alone(
                nn.ModuleList([first.module, second.module]), functools.partial(loss_of, step=step), 2
            )
            pair.zero_grad()
            loss_of(pair, world.rank, step).backward()
            for index, model in enumerate((first, second)):
                prefix = f"{index}."
                check(
                    world, model, {n.removeprefix(prefix): g for n, g in wanted.items() if n.startswith(prefix)}, step
                )


def stop_one_of_two() -> None:
    with paceline.init(announce=None):
        first, second = DDP(Net()), DDP(Net())
        assert second._gradient_group is not None  # the second wrapper's messages are separate from the first's
        first.stop()
        # From now on, other wrappers can share a group with it.
        assert first not in ddp._wrappers and second in ddp._wrappers


def test_a_stopped_wrapper_does_not_cost_the_next_one_a_group(job):
    job(2, stop_one_of_two)


def test_two_wrappers_keep_their_messages_apart_if_ranks_take_different_branches(job):
    job(2, train_two)


def replace_everything() -> list[tuple[str, str]]:
    with paceline.init(announce=None) as world:
        errors = []
        for how in ("assign", "swap"):
            model = DDP(Net())
            for step in range(2):
                loss(model, world.rank, step).backward()
            if how == "assign":
                model.module.load_state_dict(copy.deepcopy(Net().state_dict()), assign=True)
            else:
                model.module = Net()
            errors.append(error_of(lambda model=model: loss(model, world.rank).backward()))
        return errors


def test_replacing_all_parameters_is_detected(job):
    first, second = job(2, replace_everything)
    assert first == second
    assert all(kind == "ConfigError model-changed" and "is new" in text for kind, text in first), first


def keep_on() -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Net())
        loss(model, world.rank).backward()
        if world.rank == 1:
            model.module.extra = nn.Parameter(torch.zeros(1))
        assert error_of(model.rebuild)[0] == "ConfigError mismatch"
        if world.rank == 1:
            del model.module.extra
        model.zero_grad()
        wanted = average_alone(model.module, loss, 2)
        loss(model, world.rank).backward()
        check(world, model, wanted)


def test_a_failed_rebuild_leaves_the_wrapper_unchanged(job):
    job(2, keep_on)


def fail_while_accumulating() -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Net())
        for step in range(2):
            loss(model, world.rank, step).backward()
        model.zero_grad()
        with model.no_sync():
            loss(model, world.rank).backward()
        before = {name: grad.clone() for name, grad in gradients(model).items() if grad is not None}
        assert error_of(lambda: model(torch.zeros(3, 5)))[0] == "RuntimeError"  # the wrong width, on every rank
        assert all(torch.equal(grad, before[name]) for name, grad in gradients(model).items())


def test_a_failed_forward_keeps_accumulated_gradients(job):
    job(2, fail_while_accumulating)


def recompute_the_wrapper() -> int:
    with paceline.init(announce=None) as world:
        model = DDP(Net())
        for step in range(3):
            model.zero_grad()
            wanted = average_alone(model.module, functools.partial(loss, step=step), 2)
            x = draw(world.rank, step).requires_grad_()
            checkpoint(model, x, use_reentrant=False).square().mean().backward()
            check(world, model, wanted, step)
        return model.report().num_steps


def test_a_checkpointed_wrapper_synchronizes_once_per_backward(job):
    assert job(2, recompute_the_wrapper) == [3, 3]


class Counting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor, use: str = "left right") -> torch.Tensor:
        self.seen = self.seen + x.detach().sum(0)
        return super().forward(x, use)


def assign_buffers() -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Counting())
        for step in range(3):
            loss(model, world.rank, step).backward()
            check_equal(world, [model.module.seen], step)


def test_a_reassigned_buffer_is_synchronized(job):
    job(2, assign_buffers)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, use: str = "left right") -> torch.Tensor:
        return self.norm(super().forward(x, use))


def keep_an_output(average: str) -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Normed(), average=average)
        size = 3 + world.rank
        model.eval()
        kept = model(draw(world.rank, size=20 * world.rank + 1))
        model.train()
        for step in range(3):
            model.zero_grad()
            weights = [3.0, 4.0] if average == "samples" else None

            def loss_of(m: nn.Module, rank: int, step: int = step) -> torch.Tensor:
                return m(draw(rank, step, 3 + rank)).square().mean()

            wanted = average_alone(model.module, loss_of, 2, weights)
            model(draw(world.rank, step, size)).square().mean().backward()
            check(world, model, wanted, step)
            check_equal(world, [model.module.norm.running_mean, model.module.norm.running_var], step)
        assert kept.requires_grad


@pytest.mark.parametrize("average", ["ranks", "samples"])
def test_keeping_an_evaluation_output_does_not_hold_buffers_back(job, average):
    job(2, keep_an_output, average)


def average_statistics(average: str) -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Normed(), average=average)
        norm = model.module.norm
        for step in range(4):  # the numbers of samples differ between ranks and steps
            output = model(draw(world.rank, step, 3 + 2 * world.rank + step))
            means = world.share(norm.running_mean.clone())
            output.square().mean().backward()
            assert torch.equal(norm.running_mean, (means[0] + means[1]) / 2), step
        for step in range(2):
            one, two = loss(model, world.rank, 2 * step), loss(model, world.rank, 2 * step + 1)
            before = [(value.clone(), value._version) for value in (norm.running_mean, norm.running_var)]
            one.backward()
            for value, (same, version) in zip((norm.running_mean, norm.running_var), before, strict=True):
                assert torch.equal(value, same) and value._version == version  # the other backward needs them
            two.backward()
            check_equal(world, [norm.running_mean, norm.running_var], step)


@pytest.mark.parametrize("average", ["ranks", "samples"])
def test_statistics_are_the_exact_mean_and_wait_for_the_last_backward(job, average):
    job(2, average_statistics, average)


def train_in_eval_mode() -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Normed(), average="samples").eval()  # as in training with frozen statistics
        for step in range(3):
            model.zero_grad()

            def loss_of(m: nn.Module, rank: int, step: int = step) -> torch.Tensor:
                return m(draw(rank, step, 3 + 2 * rank)).square().mean()

            wanted = average_alone(model.module, loss_of, 2, [3.0, 5.0])
            loss_of(model, world.rank).backward()
            check(world, model, wanted, step)


def test_samples_count_in_eval_mode(job):
    job(2, train_in_eval_mode)


class Distilled(Net):
    """A student that makes a frozen copy of part of itself when a teacher is first requested."""

    def forward(self, x: torch.Tensor, use: str = "left right", teach: str = "") -> Any:
        if teach:
            if not hasattr(self, "teacher"):
                self.teacher = copy.deepcopy(self.left).requires_grad_(False)
            answer = self.teacher(x)
            return (lambda: answer) if teach == "hidden" else answer
        return super().forward(x, use)


def distil(average: str) -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Distilled(), average=average, find_unused_parameters=True)
        for step in range(4):
            if step == 2:
                model.module.left.requires_grad_(False)
            model.zero_grad()
            if average == "samples":  # a teacher's samples do not count
                assert not model(draw(world.rank, step, 9 * world.rank + 1), teach="plain").requires_grad
            elif step > 1:
                model(draw(world.rank, step), teach="hidden")
            wanted = average_alone(model.module, functools.partial(loss, step=step), 2)
            loss(model, world.rank, step).backward()
            check(world, model, wanted, step)
        model.module.left.requires_grad_(True)
        frozen = copy.deepcopy(model).requires_grad_(False)
        for teacher in (frozen, model.requires_grad_(False)):
            assert not teacher(draw(world.rank)).requires_grad
        model.requires_grad_(True)
        model.module.teacher.requires_grad_(False)
        model.zero_grad()
        wanted = average_alone(model.module, loss, 2)
        loss(model, world.rank).backward()
        check(world, model, wanted)


@pytest.mark.parametrize("average", ["ranks", "samples"])
def test_a_frozen_teacher_inside_and_outside_the_model(job, average):
    job(2, distil, average)
