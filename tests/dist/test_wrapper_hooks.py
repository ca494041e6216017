"""Communication hooks that fail on some rank: one error on all ranks, and no aborted process."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import paceline
from paceline.parallel import DDP
from tests.dist.wrapped import STEPS, Net, average_alone, check, error_of, loss

SOON_S = 60  # the timeouts of a collective and of the job are longer


def break_hook(how: str, ranks: tuple[int, ...], at_step: int) -> list[tuple[str, str, float]]:
    with paceline.init(announce=None) as world:
        model = DDP(Net(), bucket_cap_mb=1e-5)
        step, found = 0, []

        def hook(state: object, bucket: Any) -> Any:
            mine = bucket.buffer().div_(world.world_size)
            fails = step == at_step and world.rank in ranks
            if fails and ((how == "last call" and bucket.is_last()) or how == "first call"):
                raise OSError("no more room")
            if fails and how == "no future":
                return mine
            future = dist.all_reduce(mine, async_op=True).get_future()
            if fails and how == "set":
                broken: torch.futures.Future[torch.Tensor] = torch.futures.Future()
                broken.set_exception(OSError("no more room"))
                return broken
            if fails and how == "then":
                return future.then(lambda _: {}["no more room"])
            if fails and how == "shape":
                return future.then(lambda done: done.value()[0][:1].repeat(999))
            return future.then(lambda done: done.value()[0])

        model.register_comm_hook(None, hook)
        for step in range(at_step + 1):
            model.zero_grad()
            wanted = average_alone(model.module, functools.partial(loss, step=step), world.world_size)
            began = time.monotonic()
            kind, text = error_of(lambda step=step: loss(model, world.rank, step).backward())
            found.append((kind, text, time.monotonic() - began))
            if step < at_step:
                check(world, model, wanted, step)
        # If the hook failed on all ranks, all can continue; otherwise the ranks are out of sync.
        step = at_step + 1
        found.append((*error_of(lambda: loss(model, world.rank, step).backward()), 0.0))
        return found


FAILURES = {
    "first call": "OSError: no more room",
    "last call": "OSError: no more room",
    "no future": "ConfigError",
    "set": "OSError: no more room",
    "then": "KeyError: 'no more room'",
    "shape": "999",
}
STARTS = [(how, step) for how, step in zip(FAILURES, (0, 2) * 3, strict=True)]
OTHERS = [pytest.param(how, 2 - step, marks=pytest.mark.slow) for how, step in STARTS]


@pytest.mark.parametrize(("how", "at_step"), STARTS + OTHERS)
def test_a_hook_that_fails_on_one_rank_is_one_error_everywhere(job, how, at_step):
    results = job(3, break_hook, how, (1,), at_step)
    texts = [[(kind, text) for kind, text, _ in result] for result in results]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][:at_step] == [("", "")] * at_step
    (kind, text), (later, refusal) = texts[0][at_step:]
    assert (kind, later) == ("CollectiveError hook-failed", "CollectiveError unusable")
    assert f"step {at_step + 1}" in text and "rank 1" in text and "rank 0" not in text
    assert FAILURES[how] in text and "\n" not in text
    assert text in refusal
    assert all(seconds < SOON_S for result in results for *_, seconds in result)


def test_if_the_hook_fails_on_all_ranks_each_raises_its_own_error_and_can_continue(job):
    for result in job(2, break_hook, "first call", (0, 1), 1):
        assert [(kind, text) for kind, text, _ in result] == [("", ""), ("OSError", "no more room"), ("", "")]


def register_somewhere(ranks: tuple[int, ...], at_step: int) -> list[tuple[str, str]]:
    with paceline.init(announce=None) as world:
        model = DDP(Net(), bucket_cap_mb=1e-5)
        for step in range(at_step):
            loss(model, world.rank, step).backward()
        if at_step:
            assert error_of(lambda: model.register_comm_hook(None, allreduce_hook))[0] == "ConfigError"
            model.rebuild()
        if world.rank in ranks:
            model.register_comm_hook(None, allreduce_hook)
        errors = [error_of(lambda: loss(model, world.rank).backward()) for _ in range(2)]
        if world.rank not in ranks:
            model.register_comm_hook(None, allreduce_hook)
        for step in range(STEPS):
            model.zero_grad()
            wanted = average_alone(model.module, functools.partial(loss, step=step), world.world_size)
            loss(model, world.rank, step).backward()
            check(world, model, wanted, step)
        return errors


@pytest.mark.parametrize("at_step", [0, 2])
def test_a_hook_on_only_some_ranks_is_detected_before_it_sends(job, at_step):
    results = job(3, register_somewhere, (0, 2), at_step)
    assert results[0] == results[1] == results[2]
    for kind, text in results[0]:
        assert kind == "ConfigError mismatch"
        assert "ranks 0, 2" in text and "rank 1" in text


def count_messages(with_hook: bool) -> list[int]:
    """The all-reduces of each step, separating those of a hook. On gloo, because the profiler can record it."""
    with paceline.init(backend="gloo", announce=None) as world:
        model = DDP(Net(), bucket_cap_mb=1e-5)
        if with_hook:
            model.register_comm_hook(None, lambda state, bucket: done_with(bucket.buffer()))
        counts = []
        for step in range(STEPS):
            with torch.profiler.profile() as profile:
                loss(model, world.rank, step).backward()
            counts.append(sum("gloo:" in event.name for event in profile.events()))
        return counts


def done_with(tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(tensor)
    return future


def test_the_check_for_hooks_sends_nothing_after_the_first_step(job):
    num_buckets = 8
    assert {tuple(counts[1:]) for counts in job(2, count_messages, False)} == {(num_buckets,) * (STEPS - 1)}
    assert {tuple(counts[1:]) for counts in job(2, count_messages, True)} == {(1,) * (STEPS - 1)}
