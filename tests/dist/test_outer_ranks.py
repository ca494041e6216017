"""Outer schedules between ranks: equal to replicas in one process, resumed mid-round, and one error on all ranks."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.parallel import DDP
from paceline.parallel.codecs import Quantized
from paceline.plan import Gradient
from paceline.strategy import Strategy
from tests.dist.wrapped import check_equal, error_of, here
from tests.unit.made_outer import Replicas, build_model, draw

SOON_S = 60  # the timeouts of a collective and of the job are longer
SCHEDULES = (
    "localsgd:3", "localsgd:3,after=4", "slowmo:3+bf16", "diloco:3", "diloco:4+int8", "diloco:4,fragments=2+int4",
    "diloco:4,fragments=2,delay=3,mixing=0.25+int8", "diloco:5,delay=2",
)  # fmt: skip


class Trainee:
    """A wrapped model with its optimizer."""

    def __init__(self, rank: int, text: str, model: nn.Module | None = None, **options: Any) -> None:
        self.rank, self.done = rank, 0
        self.model = DDP(build_model() if model is None else model, strategy=text, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def train(self, steps: int = 1) -> Trainee:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(draw(self.rank, self.done).to(here())).square().mean().backward()
            self.optimizer.step()
            self.done += 1
        return self

    def vector(self) -> torch.Tensor:
        return torch.cat([param.detach().reshape(-1) for param in self.model.parameters()])


def compare_with_one_process(backend: str) -> None:
    with paceline.init(backend=backend, announce=None) as world:
        for text in SCHEDULES:
            replicas = Replicas(text, torch.optim.AdamW, dtype=torch.float32, num=world.world_size)
            trainee = Trainee(world.rank, text)
            for step in range(1, 14):
                replicas.train(1)
                trainee.train()
                assert torch.equal(trainee.vector(), replicas.vector(world.rank)), (text, step)
                assert trainee.model._strategy.outer.has_drifted == replicas.outers[0].has_drifted, (text, step)
            trainee.model.sync_parameters()
            assert torch.equal(trainee.vector(), replicas.complete().vector()), text
            check_equal(world, [trainee.vector()], text)
            trainee.model.stop()


@pytest.mark.parametrize(("num_ranks", "backend"), [(2, "gloo"), (2, "shm"), (1, "gloo")])
def test_ranks_equal_replicas_in_one_process(job, num_ranks, backend):
    job(num_ranks, compare_with_one_process, backend)


def build_normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def resume_in_mid_round() -> None:
    with paceline.init(announce=None) as world:
        for text, at in (*((text, 5) for text in SCHEDULES), ("localsgd:3,after=4", 2), ("slowmo:3+bf16", 6)):
            whole = Trainee(world.rank, text, build_normed()).train(at)
            states = world.share(whole.model.strategy_state())
            weights = world.share({name: value.clone() for name, value in whole.model.state_dict().items()})[0]
            inner, before = copy.deepcopy(whole.optimizer.state_dict()), whole.vector().clone()
            resumed = Trainee(world.rank, text, build_normed())
            resumed.model.load_state_dict(weights)  # rank 0's weights
            resumed.optimizer.load_state_dict(inner)
            resumed.model.load_strategy_state(states)
            resumed.done = at
            assert torch.equal(resumed.vector(), before), (text, at)
            for trainee in (resumed.train(9), whole.train(9)):
                trainee.model.sync_parameters()
            pairs = zip(resumed.model.state_dict().items(), whole.model.state_dict().values(), strict=True)
            assert not [name for (name, one), other in pairs if not torch.equal(one, other)], (text, at)
            check_equal(world, whole.model.state_dict().values(), (text, at))


def test_a_run_killed_mid_round_resumes_bit_identically(job):
    job(2, resume_in_mid_round)


def resume_on_one_more() -> None:
    with paceline.init(announce=None) as world:
        whole = Trainee(world.rank, "diloco:4+int8").train(6)
        state = whole.model.strategy_state()
        states, vectors = world.share(state), world.share(whole.vector())
        # Load the state as if three ranks had written it.
        more = Trainee(world.rank, "diloco:4+int8")
        more.model.load_strategy_state([*states, states[0]])
        mean = (2 * vectors[0] + vectors[1]) / 3
        torch.testing.assert_close(more.vector(), mean)
        for mine, start in zip(more.model._strategy.outer.start, whole.model._strategy.outer.start, strict=True):
            assert torch.equal(mine, start)
        kind, _ = error_of(lambda: Trainee(0, "diloco:5").model.load_strategy_state(states))
        assert kind == "ConfigError strategy"
        other = Trainee(0, "diloco:4+int8", nn.Linear(4, 2))
        assert error_of(lambda: other.model.load_strategy_state(states))[0] == "ConfigError strategy"


def test_another_number_of_ranks_starts_from_the_mean_and_another_model_is_refused(job):
    job(2, resume_on_one_more)


def fail_in_every_way() -> list[tuple[str, str]]:
    found = []
    with paceline.init(announce=None) as world:
        first = world.rank == 0

        def attempt(what: str, trainee: Trainee, call: Callable[[], object], goes_on: bool = True) -> None:
            began = time.monotonic()
            found.append(error_of(call))
            assert time.monotonic() - began < SOON_S, what
            if goes_on:  # all ranks count from here
                for _ in range(3):
                    trainee.train()
                assert not trainee.model._strategy.outer.has_drifted, what
                check_equal(world, [trainee.vector()], what)

        def raises_in_forward(trainee: Trainee) -> None:
            trainee.train(1)
            if first:
                trainee.model(torch.zeros(1, 1))
            else:
                for _ in range(50):  # far from the next sync
                    trainee.train()
                    time.sleep(0.1)

        trainee = Trainee(world.rank, "localsgd:100").train()
        attempt("forward", trainee, lambda: raises_in_forward(trainee), goes_on=False)

        trainee = Trainee(world.rank, "localsgd:3").train()

        def misses_a_gradient() -> None:
            trainee.optimizer.zero_grad()
            module = trainee.model.module
            output = trainee.model(draw(world.rank, 0).to(here()))
            (module[2].bias.sum() if first else output.sum()).backward()
            trainee.train(2)

        attempt("missing", trainee, misses_a_gradient)

        def is_uneven() -> None:
            trainee.train(1 if first else 3)
            trainee.model.sync_parameters()

        attempt("uneven", trainee, is_uneven)

        def has_nan() -> None:
            with torch.no_grad():
                if first:
                    trainee.model.module[0].bias[0] = torch.nan
            trainee.train(3)  # if an optimizer might skip the step, the sync waits for the next forward

        trainee.train(1)
        kept = [start.clone() for start in trainee.model._strategy.outer.start]
        attempt("nan", trainee, has_nan, goes_on=False)
        assert all(map(torch.equal, kept, trainee.model._strategy.outer.start))

        def drifts() -> None:
            if first:
                with torch.no_grad():
                    trainee.model._strategy.outer.start[1][0] += 1
            trainee.train(3)

        trainee = Trainee(world.rank, "localsgd:3")
        trainee.model._sync.before_forward("")
        attempt("drift", trainee, drifts, goes_on=False)

        trainee = Trainee(world.rank, "localsgd:3+int8").train()
        average = Quantized.average
        if first:
            Quantized.average = lambda *_: iter([{}["no more room"]])
        attempt("codec", trainee, lambda: trainee.train(2), goes_on=False)
        Quantized.average = average
        found.append(error_of(trainee.train))

        trainee = Trainee(world.rank, "localsgd:3").train(1)  # in the first sync, before groups are open
        if first:
            trainee.model._strategy.outer.average = lambda number: {}["no more room"]
        attempt("differences", trainee, lambda: trainee.train(2), goes_on=False)
    return found


def test_a_failure_on_one_rank_is_one_error_on_all(job):
    first, second = job(2, fail_in_every_way)
    codes = [kind for kind, _ in first]
    assert codes == [
        "CollectiveError rank-failed", "CollectiveError missing-gradient", "CollectiveError uneven-inputs",
        "CollectiveError not-finite", "CollectiveError drift", "CollectiveError hook-failed",
        "CollectiveError unusable", "CollectiveError hook-failed",
    ]  # fmt: skip
    assert first == second
    assert "on rank 0" in first[3][1] and "rank 1" not in first[3][1] and "0.bias" in first[4][1]


def use_in_many_ways() -> None:
    with paceline.init(announce=None) as world:
        first = world.rank == 0
        # One rank's optimizer skips the step of a sync, and the ranks send their own messages before the next step.
        model = DDP(build_model(), strategy="localsgd:2")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(8):
            optimizer.zero_grad()
            loss = model(draw(world.rank, step)).square().mean()
            (loss * torch.inf if first and step == 3 else loss).backward()
            if all(torch.isfinite(param.grad).all() for param in model.parameters()):
                optimizer.step()
            dist.all_reduce(loss.detach())
            assert model._strategy.is_due == (step == 3)
            if step in (1, 5, 7):
                check_equal(world, model.parameters(), step)
        # Accumulation counts once; `sync_gradients` counts gradients that no backward has synchronized.
        model = DDP(build_model(), strategy="localsgd:2")
        for step in range(1, 5):
            with model.no_sync():
                model(draw(world.rank, step)).sum().backward()
            if step % 2:
                model(draw(world.rank, step)).sum().backward()
            else:
                model.sync_gradients()
            assert model._strategy.outer.step == step
            with torch.no_grad():
                for param in model.parameters():  # without an optimizer, the sync waits for the next forward
                    param.sub_(0.01 * param.grad)
                    param.grad = None  # does not need a gradient
            assert model._strategy.is_due == (step % 2 == 0)
        model.sync_parameters()
        check_equal(world, model.parameters())
        # Several optimizers, only one of which has stepped.
        model = DDP(build_model(), strategy="localsgd:1")
        head, body = (torch.optim.SGD(model.module[i].parameters(), lr=0.1) for i in (2, 0))
        model(draw(world.rank, 0)).sum().backward()
        head.step()
        assert model._strategy.is_due
        body.step()
        assert not model._strategy.is_due
        check_equal(world, model.parameters())
        # In eval mode a forward may belong to an evaluation, so the sync waits for a backward.
        model = DDP(build_model(), strategy="localsgd:1").eval()
        for step in range(3):
            if world.rank == 0:
                model(draw(0, 0))
            model(draw(world.rank, step)).sum().backward()
            assert model._strategy.exchanges.num_messages == step
        # BatchNorm's statistics are averaged at syncs, and before an evaluation.
        norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        trainee = Trainee(world.rank, "diloco:3", norm)
        for step in range(1, 5):
            trainee.train()
            means = world.share(norm[1].running_mean.clone())
            assert torch.equal(*means) == (step == 3), step
        trainee.model.eval()
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            trainee.model(draw(0, 0))
            trainee.model(draw(0, 0))
            assert len([w for w in caught if "sync_parameters" in str(w.message)]) == 1
            trainee.model.sync_parameters()
            trainee.model(draw(0, 0))
        check_equal(world, trainee.model.state_dict().values())
        assert torch.equal(norm[1].running_mean, sum(m * 0.5 for m in means))
        # The bytes match `traffic`.
        for text, per_round in (("localsgd:2", 1), ("diloco:2+int8", 2), ("diloco:2,fragments=2+bf16", 2)):
            trainee = Trainee(world.rank, text).train(6)
            exchanges, strategy = trainee.model._strategy.exchanges, Strategy.parse(text)
            assert exchanges.num_messages == 3 * per_round
            params, num = list(trainee.model.parameters()), strategy.fragments
            parts = [params[f::num] for f in range(num)]
            messages = [
                m
                for part in parts
                for m in strategy.traffic([Gradient(str(i), p.nbytes) for i, p in enumerate(part)], 2)
            ]
            assert exchanges.sent_bytes == 3 * sum(message.sent_bytes(2) for message in messages), text
        # A model that is reloaded mid-round gets the common parameters and keeps its momentum.
        trainee = Trainee(world.rank, "diloco:3").train(4)
        held = sum(param.nbytes for param in trainee.model.parameters())
        # the parameters at the start of the round, and the momentum
        assert trainee.model.report().strategy.memory_bytes == 2 * held
        assert trainee.model.report().times is None and "no buckets to time" in str(trainee.model.report())
        before = world.share(trainee.vector())
        trainee.model.module[0].bias.requires_grad_(False)
        trainee.model.rebuild()
        check_equal(world, trainee.model.parameters())
        assert not torch.equal(*before) and trainee.model._strategy.outer.momentum.keys() == {
            "0.weight",
            "2.weight",
            "2.bias",
        }
        trainee.train(3)
        check_equal(world, trainee.model.parameters())
        for options in ({"average": "samples"}, {"manual": True}):
            kind, _ = error_of(lambda options=options: DDP(build_model(), strategy="localsgd:2", **options))
            assert kind == "ConfigError strategy"

        def join() -> None:
            with trainee.model.join():
                pass

        assert error_of(join)[0] == "ConfigError strategy"


def test_it_works_in_all_kinds_of_training_loops(job):
    job(2, use_in_many_ways)
