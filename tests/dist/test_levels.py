"""Two levels on four ranks of two simulated hosts: equal to one level where required, and without losses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline import machine
from paceline.parallel import DDP
from paceline.runtime.ranks.place import read_place
from paceline.strategy import Strategy
from paceline.training.train_settings import TrainSettings
from tests.dist.test_strategies import LOSSY, Mixed, average_alone, loss, train
from tests.dist.test_training_resume import SMALL, assert_same_run, copy_until, pass_by, train_watched
from tests.dist.wrapped import check_equal, error_of

CODECS = ("bf16", "int8", "topk:0.1,dgc", "powersgd:2")


@contextlib.contextmanager
def on_hosts(num_ranks: int) -> Iterator[None]:
    """Pretend that this many consecutive ranks are on one host."""
    name_host, host = machine.name_host, read_place().rank // num_ranks
    machine.name_host = lambda: f"host {host}"
    try:
        yield
    finally:
        machine.name_host = name_host


@contextlib.contextmanager
def hosts_of(num_ranks: int, backend: str = "auto") -> Iterator[Any]:
    with on_hosts(num_ranks), paceline.init(backend=backend, announce=None) as world:
        yield world


def join_errors(world: Any, model: DDP) -> dict[str, torch.Tensor]:
    """The mean residuals over the hosts, assembled into whole parameters."""
    state = model._strategy
    return state.levels.join(world.share(model.strategy_state()["rank"]), state._shapes)


def run_steps(backend: str) -> None:
    with hosts_of(2, backend) as world:
        codecs = ("dense", "int8") if backend == "gloo" else (*CODECS, "dense", "topk:1", "powersgd:31")
        for text in (f"{codec}+hosts" for codec in codecs):
            strategy = Strategy.parse(text)
            # With check_replicas_every=1, a difference between replicas is an error in the next step.
            model = DDP(Mixed(), strategy=text, bucket_cap_mb=0.001, check_replicas_every=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            given: dict[str, Any] = {}
            applied: dict[str, Any] = {}
            for step in range(4):
                optimizer.zero_grad()
                wanted = average_alone(model.module, 4, step)
                before = model.count_sent(), model._strategy.exchanges.sent_bytes
                loss(model, world.rank, step).backward()
                for name, param in model.module.named_parameters():
                    given[name] = given.get(name, 0) + wanted[name]
                    applied[name] = applied.get(name, 0) + param.grad.double()
                    if text in ("dense+hosts", "topk:1+hosts", "powersgd:31+hosts"):
                        torch.testing.assert_close(param.grad.double(), wanted[name], rtol=1e-5, atol=1e-5)
                check_equal(world, [param.grad for param in model.parameters()], (text, step))
                optimizer.step()
            assert len(model.plan.buckets) > 2
            parts = [[model.plan.gradients[i] for i in bucket] for bucket in model.plan.partition]
            found = [m for part in parts if any(g.num_bytes for g in part) for m in strategy.traffic(part, 4, 2)]
            sent = model.count_sent()
            assert sent.num_messages - before[0].num_messages == len(found), text
            assert sent.num_bytes - before[0].num_bytes == sum(message.num_bytes for message in found), text
            all_bytes = sum(message.sent_bytes(4) for message in found)
            assert model._strategy.exchanges.sent_bytes - before[1] == all_bytes, text
            if strategy.codec not in ("dense", "bf16") and not strategy.dgc:
                left = join_errors(world, model)
                for name, want in given.items():
                    have, strides = applied[name], model.module.get_parameter(name).stride()
                    if name in left:  # in the parameter's memory order
                        have = have + left[name].reshape(-1).as_strided(want.size(), strides)
                    torch.testing.assert_close(have, want, rtol=0, atol=1e-5, msg=f"{text}: {name}")
            model.stop()


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_replicas_stay_equal_and_no_gradient_is_lost(job, backend):
    job(4, run_steps, backend)


def compare(num_ranks: int) -> None:
    with hosts_of(num_ranks, "shm") as world:
        is_one = num_ranks == world.world_size
        for text in CODECS:
            if is_one and "dgc" in text:  # momentum would have no effect
                kind, message = error_of(lambda: DDP(Mixed(), strategy=f"{text}+hosts"))  # noqa: B023
                assert kind == "ConfigError strategy" and "leave out dgc" in message
                continue
            one, two = DDP(Mixed(), strategy=text), DDP(Mixed(), strategy=f"{text}+hosts")
            if is_one:
                one = DDP(Mixed())
            for model in (one, two):
                train(model, world, range(3))
            pairs = zip(one.module.named_parameters(), two.module.parameters(), strict=True)
            assert not [name for (name, mine), other in pairs if not torch.equal(mine, other)], text
            for model in (one, two):
                model.stop()


@pytest.mark.slow
def test_with_one_rank_per_host_it_equals_the_plain_strategy(job):
    job(3, compare, 1)


def test_on_one_host_the_strategy_is_the_all_reduce(job):
    job(4, compare, 4)


def resume() -> dict[str, Any]:
    """Resume bit-identically on the same hosts. Returns the states."""
    found = {}
    with hosts_of(2) as world:
        for text in (f"{codec}+hosts" for codec in CODECS):
            options = {"strategy": text, "bucket_cap_mb": 0.001}
            model = DDP(Mixed(), **options)
            train(model, world, range(3))
            values, states = copy.deepcopy(model.module.state_dict()), world.share(model.strategy_state())
            whole = {} if text.startswith("bf16") else join_errors(world, model)
            train(model, world, range(3, 5))
            twin = DDP(Mixed(), **options)
            twin.module.load_state_dict(values)
            twin.load_strategy_state(states)
            train(twin, world, range(3, 5))
            pairs = zip(model.module.state_dict().items(), twin.module.state_dict().values(), strict=True)
            assert not [name for (name, mine), other in pairs if not torch.equal(mine, other)], text
            kept = twin.strategy_state()
            twin.rebuild()
            after = twin.strategy_state()
            assert all(torch.equal(after["rank"][name], error) for name, error in kept["rank"].items()), text
            assert after["rank"].keys() == kept["rank"].keys() and after["place"] == divmod(world.rank, 2)
            found[text] = states, whole
            for each in (model, twin):
                each.stop()
    return found


def load_elsewhere(num_ranks: int, saved: dict[str, Any]) -> None:
    """Resume with a different number of ranks per host."""
    with hosts_of(num_ranks) as world:
        is_one = num_ranks == world.world_size
        for text, (states, whole) in saved.items():
            if is_one and "dgc" in text:
                continue
            model = DDP(Mixed(), strategy=text)
            if is_one and whole:
                kind, message = error_of(lambda: model.load_strategy_state(states))  # noqa: B023
                assert kind == "ConfigError strategy" and "2 hosts" in message and repr(text) in message
                continue
            model.load_strategy_state(states)
            assert model.strategy_state()["step"] == 3
            found = join_errors(world, model)
            assert found.keys() == whole.keys()
            for name, error in whole.items():
                torch.testing.assert_close(found[name], error, msg=f"{text}: {name}")
            train(model, world, range(3, 5))
            check_equal(world, model.parameters(), text)
            model.stop()
        other = {**states[0], "strategy": "int8"}
        kind, message = error_of(lambda: DDP(Mixed(), strategy="int8+hosts").load_strategy_state([other] * 4))
        assert kind == "ConfigError strategy" and "'int8'" in message


@pytest.mark.slow
def test_resuming_is_exact_and_on_other_hosts_the_mean_is_split_again(job):
    first, *_ = job(4, resume)
    job(4, load_elsewhere, 1, first)
    job(2, load_elsewhere, 1, first)
    job(2, load_elsewhere, 2, first)


def train_on_two(settings: TrainSettings, folder: Path, resume: bool) -> Any:
    with on_hosts(2):
        return train_watched(settings, folder, resume, pass_by).error


@pytest.mark.slow
def test_a_killed_run_resumes_bit_identically(job, tmp_path):
    settings = TrainSettings(**SMALL | {"ranks": 4, "strategy": "powersgd:2+hosts"})
    (tmp_path / "whole").mkdir()
    assert job(4, train_on_two, settings, tmp_path / "whole", False) == [None] * 4
    folder = copy_until(6, tmp_path / "whole", tmp_path / "broken")
    assert job(4, train_on_two, settings, folder, True) == [None] * 4
    assert_same_run(tmp_path / "whole", folder)


def meet_trouble() -> list[Any]:
    with hosts_of(2) as world:
        # One rank has a non-finite number: it reaches all ranks, and no residual changes, not even those of other
        # parts.
        for text in (f"{codec}+hosts" for codec in LOSSY):
            model = DDP(Mixed(), strategy=text, bucket_cap_mb=0.001)
            train(model, world, range(3))
            kept = model.strategy_state()
            model.zero_grad()
            loss(model, world.rank, 3).backward()
            model.load_strategy_state(world.share(kept))
            hook = model.module.wide.bias.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.inf))
            if world.rank:
                hook.remove()
            model.zero_grad()
            loss(model, world.rank, 3).backward()
            found = model.strategy_state()
            assert not torch.isfinite(model.module.wide.bias.grad).all(), text
            assert all(torch.equal(found["rank"][name], error) for name, error in kept["rank"].items()), text
            assert all(torch.equal(found["common"][name], value) for name, value in kept["common"].items()), text
            model.stop()
        theirs = DistributedDataParallel(Mixed(), bucket_cap_mb=100)
        theirs.register_comm_hook(*paceline.comm_hook("topk:0.1+hosts", theirs))
        ours = DDP(Mixed(), strategy="topk:0.1+hosts", bucket_cap_mb=100)
        for model in (theirs, ours):
            train(model, world, range(4))
        for one, other in zip(theirs.module.parameters(), ours.module.parameters(), strict=True):
            torch.testing.assert_close(one, other)
        model = DDP(Mixed(), strategy="int8+hosts", bucket_cap_mb=0.001)
        train(model, world, range(2))
        if world.rank == 1:
            model._strategy.codec._average = lambda *_: iter([{}["no more room"]])
        found = error_of(lambda: loss(model, world.rank, 2).backward())
        assert error_of(lambda: loss(model, world.rank, 3).backward())[0] == "CollectiveError unusable"
    return found


@pytest.mark.slow
def test_a_failure_on_one_rank_is_raised_on_all_and_torchs_wrapper_accepts_the_hook(job):
    first, *others = job(4, meet_trouble)
    assert first[0] == "CollectiveError hook-failed" and "rank 1" in first[1] and "no more room" in first[1]
    assert all(other == first for other in others)


def wrap_unevenly() -> Any:
    with hosts_of(2):
        return error_of(lambda: DDP(Mixed(), strategy="int8+hosts"))


def test_hosts_with_different_numbers_of_ranks_are_refused_on_all_ranks(job):
    found = set(job(3, wrap_unevenly))
    ((kind, message),) = found
    assert kind == "ConfigError strategy" and "2 and 1 ranks" in message
