"""Strategies between ranks: equal averages, the predicted bytes, surviving residuals, and clean failures."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

import paceline
from paceline.parallel import DDP, codecs
from paceline.parallel.channel import PairExchange
from paceline.parallel.replicas import read_replica
from paceline.parallel.strategies import start_message
from paceline.strategy import Strategy, as_matrix
from paceline.transport import why_not
from tests.dist.wrapped import check_equal, error_of, here
from tests.unit.made_plans import plan_in_pieces

LOSSY = ("int8", "int4", "topk:0.1", "powersgd:2")
ALL = ("bf16", *LOSSY, "topk:0.1,dgc,warmup=4")


class Mixed(nn.Module):
    """Matrices, a channels_last convolution, tied weights, a scalar, an empty parameter, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.conv = nn.Conv2d(3, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide, self.deep, self.tied = nn.Linear(54, 31), nn.Linear(31, 31), nn.Linear(31, 31, bias=False)
        self.tied.weight = self.deep.weight
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.wide(self.conv(x).flatten(1)))
        return self.tied(torch.tanh(self.deep(hidden))) * self.scale + self.empty.sum()


def loss(model: Any, rank: int, step: int, size: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return model(torch.randn(size, 3, 3, 3, generator=generator).to(here())).square().mean()


def average_alone(module: nn.Module, num_ranks: int, step: int) -> dict[str, torch.Tensor]:
    """The mean gradient over all ranks, in float64."""
    alone = copy.deepcopy(module)
    total: dict[str, torch.Tensor] = {}
    for rank in range(num_ranks):
        alone.zero_grad()
        loss(alone, rank, step).backward()
        for name, param in alone.named_parameters():
            total[name] = total.get(name, 0) + param.grad.double() / num_ranks
    return total


def make_optimizer(model: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def train(model: Any, world: Any, steps: range, optimizer: Any = None) -> None:
    optimizer = optimizer or make_optimizer(model)
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.05 * 0.9**step
        optimizer.zero_grad()
        loss(model, world.rank, step).backward()
        optimizer.step()


def sum_errors(world: Any, model: DDP) -> dict[str, torch.Tensor]:
    everyone = world.share(model.strategy_state()["rank"])
    total = {name: sum(errors[name].double() for errors in everyone) for name in everyone[0]}
    return {name: error.to(here()) / len(everyone) for name, error in total.items()}


def run_steps() -> None:
    """Every codec: replicas stay equal, nothing is lost, and the bytes match the strategy."""
    with paceline.init(announce=None) as world:
        n = world.world_size
        for text in ALL:
            # With check_replicas_every=1 a difference between replicas is an error in the next step.
            model = DDP(Mixed(), strategy=text, bucket_cap_mb=0.001, check_replicas_every=1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            given: dict[str, Any] = {}
            applied: dict[str, Any] = {}
            for step in range(6):
                optimizer.zero_grad()
                wanted = average_alone(model.module, n, step)
                before = model.report().strategy, model.count_sent()
                loss(model, world.rank, step).backward()
                grads = dict(model.module.named_parameters())
                check_equal(world, [param.grad for param in grads.values()], (text, step))
                for name, param in grads.items():
                    given[name] = given.get(name, 0) + wanted[name]
                    applied[name] = applied.get(name, 0) + param.grad.double()
                optimizer.step()
                if step == 3:
                    assert len(model.plan.buckets) > 2
            strategy, sent = Strategy.parse(text), model.count_sent()
            assert before[0].text == text
            if "warmup" not in text and text != "bf16":  # all buckets of the last step
                parts = [[model.plan.gradients[i] for i in bucket] for bucket in model.plan.partition]
                messages = [m for part in parts if any(g.num_bytes for g in part) for m in strategy.traffic(part, n)]
                assert sent.num_messages - before[1].num_messages == len(messages)
                assert sent.num_bytes - before[1].num_bytes == sum(message.num_bytes for message in messages)
                exchanges = model._strategy.exchanges
                assert model.report().strategy.sent_bytes == exchanges.sent_bytes // 6 > 0
            assert f"strategy {text}" in str(model.report())
            if text in LOSSY:
                assert model.report().strategy.memory_bytes > 0
                left = sum_errors(world, model)
                for name, want in given.items():
                    error = left[name].view(want.size()) if name in left else 0
                    have = applied[name] + error
                    torch.testing.assert_close(have, want, rtol=0, atol=1e-5, msg=f"{text}: {name}")
            model.stop()


def test_every_codec_keeps_replicas_equal_and_loses_nothing(job):
    job(2, run_steps)


class Noted:
    """A group that records calls."""

    def __init__(self, group: Any) -> None:
        self._group, self.calls = group, []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._group, name)


def run_crossings() -> None:
    """Two gloo ranks post receives before they send, with several messages in flight, in a group that the program also
    uses. Small messages use gloo's own collectives."""
    with paceline.init("gloo", announce=None) as world:
        me, peer, group = world.rank, 1 - world.rank, Noted(dist.group.WORLD)
        for elements, is_crossing in ((16, False), (1 << 18, True)):
            own = torch.full((elements,), float(me))
            theirs = torch.empty_like(own)
            received, sent = dist.irecv(theirs, peer), dist.isend(own + 10, peer)
            group.calls.clear()
            swapped = [start_message(codecs.SWAP, torch.stack([own + k, own + k + 0.5]), group, 2) for k in range(3)]
            if is_crossing:
                assert group.calls.index("recv") < group.calls.index("send")
            work, gathered = start_message(codecs.GATHER, own + 7, group, 2)
            assert isinstance(work, PairExchange) == isinstance(swapped[0][0], PairExchange) == is_crossing
            work.wait()
            assert torch.equal(gathered, torch.tensor([[7.0], [8.0]]).expand(2, elements))
            for k, (work, rows) in enumerate(swapped):
                work.get_future().wait()
                assert torch.equal(rows, torch.tensor([[k + me / 2], [k + 1 + me / 2]]).expand(2, elements))
            received.wait()
            sent.wait()
            assert torch.equal(theirs, own * 0 + peer + 10)


def test_two_gloo_ranks_send_to_each_other_simultaneously(job):
    job(2, run_crossings)


@pytest.mark.slow
def test_every_codec_keeps_replicas_equal_and_loses_nothing_on_three_ranks(job):
    job(3, run_steps)


def average_in_bf16(backend: str) -> tuple[list[Any], list[Any]]:
    """Gradients and statistics of a few steps, with the sum in shared memory and with a codec."""
    found, statistics = list[Any](), list[Any]()
    with paceline.init(backend, announce=None) as world:
        for average in ("ranks", "samples"):
            torch.manual_seed(3)
            module = nn.Sequential(nn.Linear(27, 40), nn.BatchNorm1d(40), nn.Linear(40, 7))
            model = DDP(module, strategy="bf16", bucket_cap_mb=0.001, average=average, check_replicas_every=1)
            for step in range(4):
                model.zero_grad()
                loss(lambda x, model=model: model(x.flatten(1)), world.rank, step, size=2 + 3 * world.rank).backward()
                found += [param.grad.clone() for param in model.parameters()]
            statistics += [buffer.clone() for buffer in model.buffers()]
            assert model.count_sent().num_bytes and model.report().strategy.sent_bytes
            # In shared memory no codec runs, and no state is kept.
            assert (model.report().strategy.memory_bytes == 0) == (backend == "shm")
            model.stop()
    return found, statistics


def test_bf16_in_shared_memory_equals_bf16_messages(on_ranks):
    if why_not():
        pytest.skip(f"NOT TESTED: {why_not()}")
    sent, shared = (on_ranks(3, average_in_bf16, backend) for backend in ("gloo", "shm"))
    for (one, means), (other, others) in zip(sent, shared, strict=True):
        assert all(map(torch.equal, one, other))
        # With average="samples", the first step is divided by the true total after the sum.
        by_ranks = one[: len(one) // 2]
        assert all(torch.equal(grad, grad.bfloat16().float()) for grad in by_ranks)
        # Statistics travel with the control words, which are not rounded.
        for mean, its in zip(means, others, strict=True):
            torch.testing.assert_close(mean, its, rtol=1e-5, atol=1e-6)


def compare_exact() -> None:
    with paceline.init(announce=None) as world:
        # With one sample on each rank, matrix gradients have rank 6 at most, and a tied matrix is used twice.
        models = [DDP(Mixed(), strategy=text, bucket_cap_mb=0.001) for text in (None, "topk:1", "powersgd:7")]
        assert all(as_matrix(shape, 7) for shape in ((31, 54), (31, 31)))  # these matrices are compressed
        for step in range(4):
            for model in models:
                model.zero_grad()
                loss(model, world.rank, step, size=1).backward()
            plain, most, ranked = ([p.grad for p in model.parameters()] for model in models)
            if world.backend == "shm":
                assert all(map(torch.equal, plain, most))
            for one, other in zip(plain, ranked, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_lossless_codecs_equal_the_all_reduce(job, num_ranks):
    job(num_ranks, compare_exact)


def keep_errors() -> None:
    with paceline.init(announce=None) as world:
        for text in LOSSY:
            model = DDP(Mixed(), strategy=text)
            train(model, world, range(3))
            before = model.strategy_state()
            assert any(error.any() for error in before["rank"].values())
            model.rebuild()
            after = model.strategy_state()
            assert after["step"] == 3 and after["rank"].keys() == before["rank"].keys()
            assert all(torch.equal(after["rank"][name], error) for name, error in before["rank"].items())
            assert all(torch.equal(after["common"][name], value) for name, value in before["common"].items())
            # A later step does not change a returned state.
            kept = copy.deepcopy(before)
            train(model, world, range(3, 5))
            assert all(torch.equal(kept["rank"][name], error) for name, error in before["rank"].items())
            # Frozen or replaced parameters lose their residuals; all others keep theirs.
            before = model.strategy_state()["rank"]
            model.module.wide.requires_grad_(False)
            model.module.conv = nn.Conv2d(3, 6, 1)
            model.rebuild()
            after = model.strategy_state()["rank"]
            gone = {"wide.weight", "wide.bias", "conv.weight"}
            assert after.keys() == before.keys() - gone and "deep.weight" in after
            assert all(torch.equal(error, before[name]) for name, error in after.items())
            train(model, world, range(5, 7))
            check_equal(world, model.parameters(), text)
            model.stop()
        # After a failed rebuild, a wrapper does not average, and does not claim to.
        model.module.deep.weight = model.module.tied.weight = nn.Parameter(torch.zeros(31, 31, dtype=torch.complex64))
        for call in (model.rebuild, lambda: loss(model, world.rank, 0)):
            assert error_of(call)[0] == "ConfigError strategy"


def test_residuals_survive_a_rebuild(job):
    job(2, keep_errors)


def reorder_errors() -> None:
    """Move a state from a channels_last model to a contiguous one, and back."""
    with paceline.init(announce=None) as world:
        model, plain = (DDP(Mixed(), strategy="int8") for _ in range(2))
        plain.module.conv.to(memory_format=torch.contiguous_format)
        plain.rebuild()
        train(model, world, range(3))
        state = model.strategy_state()
        plain.load_strategy_state(world.share(state))
        there, here = plain.strategy_state()["rank"]["conv.weight"], state["rank"]["conv.weight"]
        assert here.any() and torch.equal(there, here)
        conv = model.module.conv.weight
        inside, outside = (wrapped._strategy.codec.errors["conv.weight"] for wrapped in (model, plain))
        assert torch.equal(outside.view(conv.shape), inside.as_strided(conv.shape, conv.stride()))
        before = {name: error.clone() for name, error in model._strategy.codec.errors.items()}
        model.load_strategy_state(world.share(plain.strategy_state()))
        assert all(torch.equal(before[name], error) for name, error in model._strategy.codec.errors.items())


def test_residuals_follow_the_memory_layout(job):
    job(2, reorder_errors)


def scale_losses() -> None:
    """Residuals stay in units of applied gradients when the loss scale falls after an overflow, and when it grows."""
    with paceline.init(announce=None) as world:
        for text in LOSSY:
            model = DDP(Mixed(), strategy=text, bucket_cap_mb=0.001)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            scaler = torch.amp.GradScaler(here().type, init_scale=64.0, growth_interval=2)
            given: dict[str, Any] = {}
            applied: dict[str, Any] = {}
            scales = []
            for step in range(8):
                optimizer.zero_grad()
                wanted = average_alone(model.module, world.world_size, step)
                scales.append(scaler.get_scale())
                bad = torch.inf if step == 3 and world.rank == 1 else 1.0
                scaler.scale(loss(model, world.rank, step) * bad).backward()
                scaler.unscale_(optimizer)
                for name, param in model.module.named_parameters() if step != 3 else ():
                    given[name] = given.get(name, 0) + wanted[name]
                    applied[name] = applied.get(name, 0) + param.grad.double()
                scaler.step(optimizer)
                scaler.update()
                if step == 5:  # after saving and loading, training continues, even with a new loss scale
                    states = world.share(model.strategy_state())
                    assert states[0]["scale"] == scales[-1] != scaler.get_scale()
                    model._strategy._scaler = lambda: None
                    model.load_strategy_state(states)
            assert scales == [64.0, 64.0, 128.0, 128.0, 64.0, 64.0, 128.0, 128.0], scales
            assert model.strategy_state()["scale"] == scales[-1]
            left = sum_errors(world, model)
            for name, want in given.items():
                error = left[name].view(want.size()) / scales[-1] if name in left else 0
                torch.testing.assert_close(applied[name] + error, want, rtol=0, atol=1e-5, msg=f"{text}: {name}")
            model.stop()


def test_residuals_follow_the_loss_scale(job):
    job(2, scale_losses)


def resume() -> None:
    """A resume is bit-identical on the same ranks; on other ranks, every rank gets the mean residual."""
    with paceline.init(announce=None) as world:
        for text in ALL:
            options = {"strategy": text, "bucket_cap_mb": 0.001}
            model = DDP(Mixed(), **options)
            optimizer = make_optimizer(model)
            train(model, world, range(3), optimizer)
            values, states = copy.deepcopy(model.module.state_dict()), world.share(model.strategy_state())
            train(model, world, range(3, 6), optimizer)
            wanted = model.module.state_dict()
            model.stop()
            twin = DDP(Mixed(), **options)
            twin.module.load_state_dict(values)
            optimizer = make_optimizer(twin)
            twin.load_strategy_state(states, optimizer)
            train(twin, world, range(3, 6), optimizer)
            assert all(torch.equal(wanted[name], value) for name, value in twin.module.state_dict().items()), text
            many = [*states, copy.deepcopy(states[0])]
            twin.load_strategy_state(many)
            found = twin.strategy_state()["rank"]
            for name, error in found.items():
                mean = sum(state["rank"][name].double() for state in many) / len(many)
                torch.testing.assert_close(error.double().cpu(), mean)
            assert found.keys() == states[0]["rank"].keys()
            twin.stop()
        dense = DDP(Mixed())
        assert error_of(lambda: dense.load_strategy_state(states))[0] == "ConfigError strategy"
        dense.load_strategy_state([dense.strategy_state()] * world.world_size)
        other = DDP(Mixed(), strategy="int4")
        empty = [dense.strategy_state()] * world.world_size
        assert error_of(lambda: other.load_strategy_state(empty))[0] == "ConfigError strategy"
        state = {**other.strategy_state(), "strategy": "int8"}
        kind, message = error_of(lambda: other.load_strategy_state([state] * world.world_size))
        assert kind == "ConfigError strategy" and "'int8'" in message and "'int4'" in message
        state = {**other.strategy_state(), "rank": {"gone": torch.zeros(3)}}
        kind, message = error_of(lambda: other.load_strategy_state([state] * world.world_size))
        assert kind == "ConfigError strategy" and "gone" in message


def test_resuming_is_exact_or_refused_by_name(job):
    job(2, resume)


def do_special_steps() -> None:
    with paceline.init(announce=None) as world:
        # Accumulation: one exchange, after the last micro-batch.
        model = DDP(Mixed(), strategy="int8")
        train(model, world, range(2))
        before = model.count_sent().num_messages
        model.zero_grad()
        with model.no_sync():
            for step in range(3):
                loss(model, world.rank, step).backward()
        assert model.count_sent().num_messages == before
        loss(model, world.rank, 3).backward()
        assert model.count_sent().num_messages - before == 2 * len(model.plan.buckets)
        # One rank has a non-finite number: it reaches all ranks, and no residual changes.
        for text in ("bf16", *LOSSY):
            model = DDP(Mixed(), strategy=text, bucket_cap_mb=0.001)
            train(model, world, range(3))
            kept = model.strategy_state()
            loss(model, world.rank, 3).mul(torch.inf if world.rank else 1).backward()
            assert not all(torch.isfinite(param.grad).all() for param in model.parameters()), text
            check_equal(world, [torch.isfinite(param.grad).all() for param in model.parameters()])
            found = model.strategy_state()
            assert all(torch.equal(found["rank"][name], error) for name, error in kept["rank"].items()), text
            assert all(torch.equal(found["common"][name], value) for name, value in kept["common"].items()), text
            model.stop()
        # Weights by samples, and ranks without data.
        model = DDP(Mixed(), strategy="bf16", average="samples")
        exact, by_ranks = DDP(Mixed(), average="samples"), DDP(Mixed())
        grads = []
        for each in (model, exact, by_ranks):
            for step in range(3):
                each.zero_grad()
                loss(each, world.rank, step, size=2 + 3 * world.rank).backward()
            grads.append(torch.cat([param.grad.reshape(-1) for param in each.parameters()]))
        gaps = [float((found - grads[1]).norm() / grads[1].norm()) for found in grads]
        assert gaps[0] < 0.01 < gaps[2], gaps
        for text in LOSSY:
            model = DDP(Mixed(), strategy=text)
            with model.join():
                train(model, world, range(2 + 2 * world.rank))
            check_equal(world, model.parameters(), text)
            model.stop()


def test_accumulation_overflow_weights_and_uneven_data(job):
    job(2, do_special_steps)


def weigh_by_samples() -> None:
    """The first step does not know the total number of samples. Its residuals are in the unit of the next step, even
    after a rebuild, and in a model that continues from the state."""
    with paceline.init(announce=None) as world:
        sizes = [2, 5]
        for text in LOSSY:
            models = [DDP(Mixed(), strategy=text, average="samples") for _ in range(2)]
            model, given, applied = models[0], {}, {}
            for step in range(6):
                alone = copy.deepcopy(model.module)
                for rank, size in enumerate(sizes):
                    alone.zero_grad()
                    loss(alone, rank, step, size).backward()
                    for name, param in alone.named_parameters():
                        given[name] = given.get(name, 0) + param.grad.double() * size / sum(sizes)
                model.zero_grad()
                loss(model, world.rank, step, sizes[world.rank]).backward()
                for name, param in model.module.named_parameters():
                    applied[name] = applied.get(name, 0) + param.grad.double()
                if step == 1:
                    model.rebuild()
                if step == 3:
                    states, model = world.share(model.strategy_state()), models[1]
                    model.load_strategy_state(states)
            left = sum_errors(world, model)
            for name, want in given.items():
                error = left[name].view(want.size()) if name in left else 0
                torch.testing.assert_close(applied[name] + error, want, rtol=0, atol=1e-5, msg=f"{text}: {name}")
            for each in models:
                each.stop()


def test_weighting_by_samples_loses_nothing(job):
    job(2, weigh_by_samples)


def follow_rates() -> None:
    with paceline.init(announce=None) as world:
        num_hooks = len(_global_optimizer_pre_hooks)
        model = DDP(Mixed(), strategy="topk:0.1")
        groups = [{"params": [model.module.deep.weight]}, {"params": [model.module.wide.weight], "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)

        def step_with(rates: tuple[float, float]) -> dict[str, torch.Tensor]:
            """The residuals at the start of the step."""
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            found: dict[str, torch.Tensor] = {}
            average = codecs.Codec.average

            def watch(self: Any, *args: Any) -> Any:
                found.update({name: error.clone() for name, error in self.errors.items()})
                return average(self, *args)

            codecs.Codec.average = watch  # type: ignore[method-assign]
            model.zero_grad()
            loss(model, world.rank, 0).backward()
            codecs.Codec.average = average  # type: ignore[method-assign]
            optimizer.step()
            return found

        def errors() -> dict[str, torch.Tensor]:
            return {name: error.clone() for name, error in model._strategy.codec.errors.items()}

        step_with((0.1, 0.2))
        for rates, factors in (((0.1, 0.05), (1, 4)), ((0.0, 0.05), (1, 1)), ((0.2, 0.05), (0.5, 1))):
            before = errors()
            found = step_with(rates)
            for name, factor in zip(("deep.weight", "wide.weight"), factors, strict=True):
                assert torch.equal(found[name], before[name] * factor) and found[name].any()
            others = found.keys() - {"deep.weight", "wide.weight"}
            assert others and all(torch.equal(found[name], before[name]) for name in others)
        # Optimizers that stepped earlier and still exist no longer matter.
        idle = []
        for rate in (0.3, 0.4, 0.5, 0.01):
            idle.append(optimizer)
            optimizer = torch.optim.SGD([{"params": group["params"]} for group in optimizer.param_groups], lr=rate)
            step_with((rate, rate))
        assert [each.param_groups[0]["lr"] for each in idle] == [0.2, 0.3, 0.4, 0.5]
        for _ in range(3):
            before = errors()
            found = step_with((0.01, 0.01))
            assert all(torch.equal(found[name], error) for name, error in before.items())
        model.stop()
        assert len(_global_optimizer_pre_hooks) == num_hooks
        # Another optimizer's parameters do not belong to us.
        dgc = DDP(Mixed(), strategy="topk:0.1,dgc")
        other = nn.Linear(2, 2)
        other(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9).step()
        loss(dgc, world.rank, 0).backward()
        for optimizer in (torch.optim.SGD(dgc.parameters(), lr=0.1, momentum=0.9), torch.optim.Adam(dgc.parameters())):
            kind, message = error_of(optimizer.step)
            assert kind == "ConfigError strategy" and "0.9" in message and "momentum" in message
        torch.optim.SGD(dgc.parameters(), lr=0.1).step()
        complex_one = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
        assert error_of(lambda: DDP(complex_one, strategy="int8"))[0] == "ConfigError strategy"


def test_residuals_follow_the_learning_rate_and_momentum_counts_once(job):
    job(2, follow_rates)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(20, 20), nn.Linear(20, 20)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        if not x.isfinite().all():
            raise OSError("no such sample")
        return self.a(x) + (self.b(x) if both else 0)


def apply_or_keep() -> None:
    """Gradients that no rank used, and a failed step: neither was applied, so both remain to be sent."""
    with paceline.init(announce=None) as world:
        for text in LOSSY:
            model = DDP(Halves(), strategy=text, find_unused_parameters=True)
            alone = copy.deepcopy(model.module)
            given, applied = torch.zeros(20, 20), torch.zeros(20, 20)
            for step, both in enumerate((True, True, False, False, True)):
                inputs = [torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
                for x in inputs if both else ():
                    alone.zero_grad()
                    alone(x, both).square().mean().backward()
                    given += alone.b.weight.grad / 2
                model.zero_grad()
                model(inputs[world.rank], both).square().mean().backward()
                assert (model.module.b.weight.grad is not None) == both
                applied += model.module.b.weight.grad if both else 0
            left = sum_errors(world, model)["b.weight"].view(20, 20)
            torch.testing.assert_close(applied + left.float(), given, rtol=0, atol=1e-5)
            before = model.strategy_state()
            bad = inputs[0] * (torch.nan if world.rank else 1)
            kind, _ = error_of(lambda model=model, bad=bad: model(bad, True).square().mean().backward())
            assert kind == "CollectiveError rank-failed", kind
            after = model.strategy_state()
            for part in ("rank", "common"):
                assert all(torch.equal(after[part][name], value) for name, value in before[part].items()), text
            model.stop()


def test_averages_that_were_not_applied_remain_to_be_sent(job):
    job(2, apply_or_keep)


def refuse_pieces() -> None:
    with paceline.init(announce=None) as world:
        gradients = read_replica(Mixed()).gradients
        plan = plan_in_pieces(gradients, range(len(gradients)), cap_bytes=700, tail_bytes=20)
        assert plan.is_split
        for text in LOSSY:
            assert error_of(lambda text=text: DDP(Mixed(), plan=plan, strategy=text))[0] == "ConfigError plan"
        model = DDP(Mixed(), strategy="int8")
        state = {**model.strategy_state(), "plan": plan.to_json()}
        assert error_of(lambda: model.load_strategy_state([state] * world.world_size))[0] == "ConfigError plan"
        dense = DDP(Mixed(), plan=plan)
        kind, _ = error_of(lambda: dense.register_comm_hook(None, default_hooks.fp16_compress_hook))
        assert kind == "ConfigError plan"
        loss(dense, world.rank, 0).backward()  # the rejected hook is not registered
        check_equal(world, [param.grad for param in dense.module.parameters()])


def test_a_plan_that_splits_gradients_is_refused(job):
    job(2, refuse_pieces)


def fail_inside(text: str, stage: int) -> tuple[str, str]:
    with paceline.init(announce=None) as world:
        model = DDP(Mixed(), strategy=text, bucket_cap_mb=0.001)
        train(model, world, range(2))
        codec = model._strategy.codec
        average = codec._average

        def broken(names: Any, vectors: Any, shapes: Any) -> Any:
            exchange, value = average(names, vectors, shapes), None
            for number in range(9):
                if number == stage and "wide.weight" in names:
                    raise OSError("no more room")
                try:
                    value = yield exchange.send(value)
                except StopIteration:
                    return

        if world.rank == 1:
            codec._average = broken
        found = error_of(lambda: loss(model, world.rank, 2).backward())
        assert error_of(lambda: loss(model, world.rank, 3).backward())[0] == "CollectiveError unusable"
        return found


@pytest.mark.parametrize(("text", "stage"), [("int8", 0), ("int8", 1), ("powersgd:2", 2)])
def test_a_codec_that_fails_on_one_rank_is_one_error_everywhere(job, text, stage):
    first, *others = job(3, fail_inside, text, stage)
    assert first[0] == "CollectiveError hook-failed"
    assert "rank 1" in first[1] and "no more room" in first[1]
    assert all(other == first for other in others)


def use_torchs_wrapper() -> None:
    """`comm_hook` in torch's DDP trains like our wrapper; torch's hooks work in ours."""
    with paceline.init(announce=None) as world:
        for text in ALL:
            theirs = DistributedDataParallel(Mixed(), bucket_cap_mb=100)
            theirs.register_comm_hook(*paceline.comm_hook(text, theirs))
            ours = DDP(Mixed(), strategy=text, bucket_cap_mb=100)
            for model in (theirs, ours):
                train(model, world, range(4))
            check_equal(world, theirs.module.parameters(), text)
            if text not in ("int8", "int4"):  # torch orders buckets differently, so the blocks differ, too
                for one, other in zip(theirs.module.parameters(), ours.module.parameters(), strict=True):
                    torch.testing.assert_close(one, other, msg=f"{text}: {one.shape}")
            ours.stop()
        kind, message = error_of(lambda: paceline.comm_hook("diloco:10", theirs))
        assert kind == "ConfigError strategy" and "diloco" in message
        theirs = DistributedDataParallel(Mixed())
        theirs.register_comm_hook(*paceline.comm_hook("int8", Mixed()))
        kind, message = error_of(lambda: loss(theirs, world.rank, 0).backward())
        assert kind == "ConfigError strategy" and "a different model" in message
        kind, message = error_of(lambda: DDP(Mixed(), strategy="int8" if world.rank else "int4"))
        assert kind == "ConfigError mismatch" and "'int4' on rank 0 and 'int8' on rank 1" in message
        state = powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, min_compression_rate=1)
        for hook in (
            (state, powerSGD_hook.powerSGD_hook),
            (None, default_hooks.fp16_compress_hook),
            (None, default_hooks.bf16_compress_hook),
        ):
            module = Mixed()  # with a channels_last convolution
            # torch's PowerSGD does not support scalars or empty parameters.
            module.scale, module.empty = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(2, 4))
            model = DDP(module)
            model.register_comm_hook(*hook)
            for step in range(4):
                model.zero_grad()
                wanted = average_alone(model.module, world.world_size, step)
                loss(model, world.rank, step).backward()
                found = dict(model.module.named_parameters())
                if hook[0] is None or step < 2:
                    for name, want in wanted.items():
                        torch.testing.assert_close(found[name].grad.double(), want, rtol=0.02, atol=1e-3, msg=name)
            check_equal(world, [param.grad for param in model.module.parameters()])
        assert error_of(lambda: DDP(Mixed(), strategy="int8").register_comm_hook(*hook))[0] == "ConfigError"
        dist.barrier()


def test_torchs_wrapper_accepts_our_hook_and_ours_accepts_torchs(job):
    job(2, use_torchs_wrapper)
