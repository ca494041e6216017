"""zero1 on ranks: parameters equal those of the unsharded optimizer for any plan, on every rank."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import ConfigError
from paceline.parallel import zero
from paceline.parallel.replicas import read_replica
from paceline.training.optimizers import LAMB, LARS, split_parameters
from paceline.transport import why_not
from tests.dist.wrapped import error_of, here
from tests.unit.made_plans import plan_in_pieces

needs_shm = pytest.mark.skipif(bool(why_not()), reason=f"no shared memory between ranks: {why_not()}")
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "lars": (LARS, {"lr": 1.0}),
    "lamb": (LAMB, {"lr": 0.01}),
}


class Odd(nn.Module):
    """Tied, frozen, scalar, empty and channels_last parameters, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37, 13)
        self.blocks = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.filters = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.wide, self.head = nn.Linear(13, 501), nn.Linear(13, 37, bias=False)
        self.head.weight = self.words.weight
        self.scale, self.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.words(x)
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        seen = self.filters(hidden[:, None, :9].unflatten(2, (3, 3)).repeat(1, 2, 1, 1)).mean()
        total = (self.head(hidden) * self.scale).square().mean() + self.wide(hidden).square().mean() * self.frozen[0]
        return total + seen + self.none.sum()


def build(kind: str, strategy: str | None, overlap: bool = False, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(3)
    net = Odd()
    if "pieces" in options:
        gradients = read_replica(net).gradients
        order = range(len(gradients) - 1, -1, -1)
        options = {"plan": plan_in_pieces(gradients, order, cap_bytes=options["pieces"], tail_bytes=20)}
    model = paceline.DDP(net, strategy=strategy, **options)
    make, settings = KINDS[kind]
    optimizer = make(split_parameters(net, weight_decay=0.1), **settings)
    if strategy is not None and "zero1" in strategy:
        optimizer = model.shard_optimizer(optimizer, overlap=overlap)
    return model, optimizer


def train(model: Any, optimizer: Any, rank: int, steps: range, update: Any = None) -> list[torch.Tensor]:
    """The parameters after each step, according to `state_dict`."""
    found = []
    for step in steps:
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randint(0, 37, (4,)).to(here()))
        if update is None:
            loss.backward()
            optimizer.step()
        else:
            update(model, optimizer, loss, step)
        optimizer.zero_grad()
        found.append(torch.cat([value.detach().reshape(-1) for value in model.state_dict().values()]))
    return found


def follow(rank: int, kind: str, strategy: str | None, update: Any = None, **options: Any) -> tuple[Any, Any]:
    model, optimizer = build(kind, strategy, **options)
    found = train(model, optimizer, rank, range(4), update), optimizer.state_dict()
    model.stop()
    return found


def is_same(one: tuple[Any, Any], other: tuple[Any, Any], **close: float) -> bool:
    """Compare parameters after each step, and all states: bit-identical, or within this tolerance."""
    pairs = list(zip(one[0], other[0], strict=True))
    states = one[1]["state"], other[1]["state"]
    if states[0].keys() != states[1].keys() or one[1]["param_groups"] != other[1]["param_groups"]:
        return False
    for place, values in states[0].items():
        if values.keys() != states[1][place].keys():
            return False
        pairs += [
            (torch.as_tensor(value), torch.as_tensor(states[1][place][key]))
            for key, value in values.items() if value is not None
        ]  # fmt: skip
    pairs = [(a.cpu(), b.cpu()) for a, b in pairs]
    return all((torch.allclose(a, b, **close) if close else torch.equal(a, b)) and a.shape == b.shape for a, b in pairs)


def clip_ours(model: Any, optimizer: Any, loss: torch.Tensor, step: int) -> None:
    loss.backward()
    model.clip_grad_norm_(0.1)
    optimizer.step()


def clip_torch(model: Any, optimizer: Any, loss: torch.Tensor, step: int) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def list_warnings(rank: int, update: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        follow(rank, "sgd", "zero1", update, **options)
    return [str(warning.message) for warning in found if "zero1" in str(warning.message)]


def compare_on_shm() -> dict[str, bool]:
    found = {}
    with paceline.init("shm", "cpu", announce=None, threads=1, timeout_s=60) as world:
        rank = world.rank
        for kind in ("sgd", "adamw"):
            plain = follow(rank, kind, None)
            plans: tuple[dict[str, Any], ...] = (
                {}, {"bucket_cap_mb": 1e-4}, {"bucket_cap_mb": 4e-3}, {"pieces": 700},
            )  # fmt: skip
            for options in plans:
                found[f"{kind} {options}"] = is_same(plain, follow(rank, kind, "zero1", **options))
            found[f"{kind} overlap"] = is_same(plain, follow(rank, kind, "zero1", bucket_cap_mb=1e-4, overlap=True))
            bf16 = follow(rank, kind, "bf16")
            found[f"{kind} bf16"] = is_same(bf16, follow(rank, kind, "zero1+bf16")) and not is_same(bf16, plain)
        for kind in ("lars", "lamb"):
            plain, sharded = follow(rank, kind, None), follow(rank, kind, "zero1", bucket_cap_mb=4e-3)
            found[kind] = is_same(plain, sharded, rtol=1e-5, atol=1e-6)
        plain, sharded = (follow(rank, "sgd", strategy, clip_ours) for strategy in (None, "zero1"))
        found["clip"] = is_same(plain, sharded, rtol=1e-5, atol=1e-7)
        found["torch's clip"] = list_warnings(rank, clip_torch) == []  # every rank has all averages here
        found["clip does something"] = not torch.equal(plain[0][-1], follow(rank, "sgd", None)[0][-1])
    return found


@needs_shm
@pytest.mark.parametrize("num_ranks", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_parameters_are_those_of_the_unsharded_optimizer_in_shared_memory(on_ranks, num_ranks):
    for found in on_ranks(num_ranks, compare_on_shm, timeout_s=120):
        assert [name for name, same in found.items() if not same] == []


def compare_on_gloo() -> tuple[dict[str, bool], Any]:
    found = {}
    with paceline.init("gloo", "cpu", announce=None, threads=1, timeout_s=60) as world:
        rank, n = world.rank, world.world_size
        # With more than two ranks, a ring does not sum in rank order.
        close: dict[str, float] = {} if n == 2 else {"rtol": 1e-5, "atol": 1e-6}
        for kind in ("sgd", "adamw"):
            plain = follow(rank, kind, None)
            for options in ({}, {"bucket_cap_mb": 1e-4, "overlap": True}, {"bucket_cap_mb": 4e-3}):
                sharded = follow(rank, kind, "zero1", **options)
                found[f"{kind} {options}"] = is_same(plain, sharded, **close)
            found[f"{kind} bf16"] = is_same(follow(rank, kind, "bf16"), follow(rank, kind, "zero1+bf16"))
        found["lamb"] = is_same(follow(rank, "lamb", None), follow(rank, "lamb", "zero1"), rtol=1e-5, atol=1e-6)
        plain = follow(rank, "sgd", None, clip_ours)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            clipped = follow(rank, "sgd", "zero1", clip_ours)
        found["clip"] = is_same(plain, clipped, rtol=1e-5, atol=1e-6)
        warned = list_warnings(rank, clip_torch, bucket_cap_mb=4e-3)  # once, not in every step
        found["torch's clip"] = [f"rank {rank}" in text and "model.clip_grad_norm_()" in text for text in warned] == [
            True
        ]
        found |= look_after_a_step(rank)
        return found, sharded[0][-1]


def copy_all(named: Any) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value.detach().clone() for name, value in named}


def run_all(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        model.eval()(x)
    return {name: param.data.clone() for name, param in model.module.named_parameters()}


def average_moving(model: Any) -> dict[str, torch.Tensor]:
    averaged = torch.optim.swa_utils.AveragedModel(model.module)
    averaged.update_parameters(model.module)
    return copy_all(averaged.module.named_parameters())


# With `overlap=True`, these may see old values.
BARE_LOOKS: dict[str, Any] = {
    "parameters of the module": lambda model: copy_all(model.module.named_parameters()),
    "moving average": average_moving,
}
LOOKS: dict[str, Any] = {
    "state_dict": lambda model: copy_all(model.state_dict().items()),
    "state_dict of the module": lambda model: copy_all(model.module.state_dict().items()),
    "named_parameters": lambda model: copy_all(model.named_parameters()),
    "deepcopy": lambda model: copy_all(copy.deepcopy(model).module.named_parameters()),
    "evaluation": lambda model: run_all(model, torch.arange(4, device=here())),
}


def look_after_a_step(rank: int) -> dict[str, bool]:
    """Reading parameters right after a step returns the new values, even while other ranks are still sending."""
    found = {}
    x = torch.arange(4, device=here())
    for way in (*BARE_LOOKS, *LOOKS, "blocks in another order"):
        overlaps = way not in BARE_LOOKS
        model, optimizer = build("sgd", "zero1", bucket_cap_mb=1e-4, overlap=overlaps)
        train(model, optimizer, rank, range(2))
        model(torch.randint(0, 37, (4,)).to(here())).backward()
        optimizer.step()
        found[f"{way}: pending"] = (len(model._sharding._gathers) > 1) == overlaps
        if way != "blocks in another order":
            seen = (BARE_LOOKS | LOOKS)[way](model)
            optimizer.wait()
            want = dict(model.module.named_parameters())
            found[way] = all(torch.equal(seen[name], param) for name, param in want.items())
        else:
            model.module.blocks = nn.ModuleList(reversed(model.module.blocks))
            with torch.no_grad():
                value = model.module(x)
                optimizer.wait()
                found[way] = torch.equal(model.module(x), value)
        model.stop()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_gathered_parameters_are_those_of_the_unsharded_optimizer(on_ranks, num_ranks):
    results = on_ranks(num_ranks, compare_on_gloo)
    for found, last in results:
        assert [name for name, same in found.items() if not same] == []
        assert torch.equal(last, results[0][1])


def save_and_use() -> Any:
    """A full state from another number of ranks; overflow on one rank; refusals; independent copies."""
    facts: dict[str, Any] = {}
    with paceline.init("gloo", "cpu", announce=None, threads=1, timeout_s=60) as world:
        rank = world.rank
        model, optimizer = build("sgd", "zero1")
        scaler = torch.amp.GradScaler(here().type, init_scale=4.0)

        def update(model: Any, optimizer: Any, loss: torch.Tensor, step: int) -> None:
            # A single element, visible only to its owner.
            bad = model.module.scale.register_hook(lambda grad: grad * (torch.inf if step == 1 and rank == 1 else 1.0))
            scaler.scale(loss).backward()
            bad.remove()
            scaler.step(optimizer)
            scaler.update()

        found = train(model, optimizer, rank, range(3), update)
        facts["skipped"] = [torch.equal(*pair) for pair in itertools.pairwise(found)], scaler.get_scale()
        facts["finite"] = bool(torch.isfinite(found[-1]).all())
        # Two synchronized backward passes cannot be accumulated here.
        model(torch.arange(4, device=here())).backward()
        facts["twice"] = error_of(lambda: model(torch.arange(4, device=here())).backward())
        # Zeros are allowed: many loops keep their gradient tensors.
        for zero in (model.zero_grad, optimizer.zero_grad):
            zero(set_to_none=False)
            assert model.module.scale.grad is not None
            model(torch.arange(4, device=here())).backward()
            optimizer.step()
        optimizer.zero_grad()
        with model.no_sync():
            model(torch.arange(4, device=here())).backward()
        facts["unsynchronized"] = error_of(optimizer.step)
        facts["group"] = error_of(lambda: optimizer.add_param_group({"params": []}))
        with pytest.raises(ConfigError) as caught, model.join():
            pass
        assert caught.value.code == "strategy"
        model.stop()
    return facts


def test_overflow_and_refusals(on_ranks):
    first, second = on_ranks(2, save_and_use)
    assert first == second
    assert first["skipped"] == ([True, False], 2.0)
    assert first["finite"]
    for name in ("unsynchronized", "group"):
        assert first[name][0] == "ConfigError strategy", name
    assert "no_sync()" in first["twice"][1]


def ask_alone(backend: str) -> dict[str, Any]:
    """One rank requests the state while the others continue training: it gets an error, and nothing is lost."""
    found: dict[str, Any] = {}
    zero._STATE_TIMEOUT_S, before = 0.3, zero._STATE_TIMEOUT_S
    try:
        with paceline.init(backend, "cpu", announce=None, threads=1, timeout_s=60) as world:
            model, optimizer = build("adamw", "zero1")
            train(model, optimizer, world.rank, range(2))
            if world.rank == 0:
                found["alone"] = error_of(optimizer.state_dict)
            world.barrier()
            found["late"] = error_of(optimizer.state_dict)  # a second attempt in the same step fails, too
            train(model, optimizer, world.rank, range(2, 3))
            whole = optimizer.state_dict()
            optimizer.consolidate_state_dict()
            optimizer.param_groups[0]["lr"] = 0.5
            if world.rank == 0:
                once = optimizer.state_dict()
                found["same"] = is_same(([], {**once, "param_groups": whole["param_groups"]}), ([], whole))
                found["rate"] = once["param_groups"][0]["lr"]
            world.barrier()
            found["states"] = world.share(len(optimizer.state_dict()["state"])), len(whole["state"])
            train(model, optimizer, world.rank, range(3, 4))
            found["after"] = len(optimizer.state_dict()["state"])
            costs = model.report().strategy
            found["costs"] = (
                costs.sent_bytes,
                costs.memory_bytes,
                sum(value.nbytes for state in optimizer.state.values() for value in state.values()),
            )
            model.stop()
    finally:
        zero._STATE_TIMEOUT_S = before
    return found


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=needs_shm)])
def test_requesting_the_state_on_one_rank_is_an_error_unless_consolidated(on_ranks, backend):
    first, second = on_ranks(2, ask_alone, backend)
    kind, text = first["alone"]
    assert kind == "ConfigError strategy" and "rank 1 did not call it in 0.3 s" in text
    assert "consolidate_state_dict()" in text and first["late"] == second["late"] == first["alone"]
    assert first["same"] and first["rate"] == 0.5
    by_rank, count = first["states"]
    assert by_rank == [count, 0] and first["after"] == second["after"] == count
    for sent, memory, held in (first["costs"], second["costs"]):
        assert sent > 0 and memory == held > 0


def train_from(saved: Any, kind: str, strategy: str | None, steps: range) -> Any:
    """Four samples per step, divided among the ranks, from a saved model and state."""
    with paceline.init("gloo", "cpu", announce=None, threads=1, timeout_s=60) as world:
        model, optimizer = build(kind, strategy)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for step in steps:
            torch.manual_seed(step)
            batch = torch.randint(0, 37, (4,)).chunk(world.world_size)[world.rank].to(here())
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        values = {name: value.clone() for name, value in model.state_dict().items()}
        held = sum(v.numel() for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v))
        found = values, optimizer.state_dict(), held
        model.stop()
        return found


def test_a_state_of_two_ranks_loads_on_four_and_on_one(on_ranks):
    saved, want = None, None
    for num_ranks, steps in ((2, range(2)), (4, range(2, 4)), (1, range(4, 6))):
        loaded = saved
        results = on_ranks(num_ranks, train_from, loaded, "adamw", "zero1", steps)
        saved = results[0]
        for other in results[1:]:
            assert all(torch.equal(other[0][name], value) for name, value in saved[0].items())
        # The state is torch's: an unsharded optimizer continues from it, and the totals match.
        (want,) = on_ranks(1, train_from, loaded, "adamw", None, steps)
        assert sum(result[2] for result in results) >= want[2] - 13
        for name, value in want[0].items():
            torch.testing.assert_close(saved[0][name], value, rtol=1e-5, atol=1e-6)
        if num_ranks == 1:
            assert all(torch.equal(saved[0][name], value) for name, value in want[0].items())
            for place, state in want[1]["state"].items():
                assert all(torch.equal(saved[1]["state"][place][key], value) for key, value in state.items())
