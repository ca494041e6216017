"""Programs written for torch's DistributedDataParallel give the same results with our wrapper."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

import paceline
from paceline.parallel import DDP
from paceline.parallel.graph import move_tensors
from tests.dist.wrapped import STEPS, Net, average_alone, check, check_equal, draw, error_of, loss


@contextlib.contextmanager
def swapped(is_ours: bool = True) -> Iterator[None]:
    """Swap the wrapper in this context, and restore it, because warm ranks are reused."""
    paceline.swap_wrapper(is_ours)
    try:
        yield
    finally:
        paceline.swap_wrapper(False)


def parameters_after(program: Any, *args: Any) -> list[list[torch.Tensor]]:
    """The final parameters of a program, with torch's wrapper and with ours."""
    ends = []
    for is_ours in (False, True):
        torch.manual_seed(3)
        with swapped(is_ours):
            models = program(*args)
        assert all(isinstance(model, DDP) is is_ours for model in models)
        ends.append([param.detach().clone() for model in models for param in model.parameters()])
    return ends


def compare(program: Any, *args: Any, atol: float = 1e-6) -> None:
    with paceline.init(announce=None) as world:
        torchs, ours = parameters_after(program, world.rank, *args)
        for a, b in zip(torchs, ours, strict=True):
            torch.testing.assert_close(b, a, atol=atol, rtol=1e-4)
        check_equal(world, ours, program.__name__)


# -- whole programs ---------------------------------------------------------------------------------------------------


def gan(rank: int, freezes: bool) -> list[nn.Module]:
    """The loop of torch's DCGAN example: two losses for D, then one through D for G. Some programs freeze D
    during the latter."""
    ddp = nn.parallel.DistributedDataParallel
    generator = ddp(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)))
    critic = ddp(nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1)))
    for_g, for_d = (torch.optim.SGD(model.parameters(), 0.1) for model in (generator, critic))
    for step in range(5):
        if freezes:
            critic.requires_grad_(True)
        critic.zero_grad()
        real = critic(draw(rank, step))
        F.binary_cross_entropy_with_logits(real, torch.ones_like(real)).backward()
        fake = generator(draw(rank, step + 50)[:, :2])
        answer = critic(fake.detach())
        F.binary_cross_entropy_with_logits(answer, torch.zeros_like(answer)).backward()
        for_d.step()
        if freezes:
            critic.requires_grad_(False)
        generator.zero_grad()
        answer = critic(fake)
        F.binary_cross_entropy_with_logits(answer, torch.ones_like(answer)).backward()
        for_g.step()
    return [generator, critic]


@pytest.mark.parametrize("freezes", [False, True])
def test_a_gan_with_two_wrapped_networks(job, freezes):
    job(2, compare, gan, freezes)


def accumulate(rank: int) -> list[nn.Module]:
    model = nn.parallel.DistributedDataParallel(Net(), None, None, 0, True, True, None, 0.001)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(STEPS):
        for part in range(3):
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                (loss(model, rank, 10 * step + part) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    # Accelerate and Lightning call the wrapper like this.
    model.require_backward_grad_sync = False
    loss(model, rank, 100).backward()
    model.require_backward_grad_sync = True
    loss(model, rank, 101).backward()
    optimizer.step()
    return [model]


def test_accumulation_with_no_sync_and_positional_arguments(job):
    job(2, compare, accumulate)


def several(rank: int) -> list[nn.Module]:
    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss(model, rank, 2 * step) + loss(model, rank, 2 * step + 1)).backward()  # two forwards, one backward
        optimizer.step()
    return [model]


def test_two_forwards_before_a_backward(job):
    job(2, compare, several)


def retain_synchronized() -> None:
    def together(model: Any, rank: int) -> torch.Tensor:
        out = model(draw(rank))
        return out.square().mean() + out.abs().mean()

    with paceline.init(announce=None) as world:
        for options in ({}, {"bucket_cap_mb": 1e-5}, {"reducer": "simple"}):
            model = DDP(Net(), **options)
            for _ in range(STEPS):
                model.zero_grad()
                wanted = average_alone(model.module, together, 2)
                out = model(draw(world.rank))
                out.square().mean().backward(retain_graph=True)
                out.abs().mean().backward()
                check(world, model, wanted, options)


def test_several_synchronized_losses_of_one_forward(job):
    """torch allows one synchronized backward per forward; here every one is synchronized."""
    job(2, retain_synchronized)


def hooked(rank: int, name: str) -> list[nn.Module]:
    # With several buckets, torch's PowerSGD can hang on gloo even with torch's wrapper: it waits in callbacks.
    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=1 if name == "power" else 0.0002)
    state: Any = None
    hook = {
        "allreduce": default_hooks.allreduce_hook,
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "fp16 of allreduce": default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        "power": powerSGD_hook.powerSGD_hook,
        "local": post_localSGD_hook.post_localSGD_hook,
    }[name]
    if name == "power":
        # With the same buckets and seeds, and without per-bucket state, both compute the same result.
        state = powerSGD_hook.PowerSGDState(None, 4, 2, 1, use_error_feedback=False, warm_start=False)
    if name == "local":
        alone, _ = dist.new_subgroups(1)
        state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=100)
    if name != "bf16" or isinstance(model, DDP):  # torch rejects this hook on CPU, so its wrapper gets none
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(5):
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    return [model]


@pytest.mark.parametrize(
    ("name", "atol"),
    [
        ("allreduce", 1e-6),
        ("fp16", 1e-4),
        ("bf16", 3e-3),
        ("fp16 of allreduce", 1e-4),
        ("power", 1e-4),
        ("local", 1e-6),
    ],
)
def test_torchs_communication_hooks(job, name, atol):
    job(2, functools.partial(compare, atol=atol), hooked, name)


def look_into_buckets() -> None:
    """Every gradient, including large ones, is in one bucket, which is passed to the hook."""
    with paceline.init(announce=None) as world:
        wide = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 4))
        model = DDP(wide, bucket_cap_mb=0.001)
        seen: list[tuple[int, bool, list[tuple[int, ...]]]] = []

        def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
            params, grads = bucket.parameters(), bucket.gradients()
            assert [grad.shape for grad in grads] == [param.shape for param in params]
            assert sum(grad.numel() for grad in grads) <= bucket.buffer().numel()
            seen.append((bucket.index(), bucket.is_last(), [tuple(param.shape) for param in params]))
            for grad in grads:  # write through the gradients instead of the buffer
                dist.all_reduce(grad)
                grad.div_(world.world_size)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        model.register_comm_hook(None, hook)
        for step in range(3):
            seen.clear()
            inputs = torch.randn(2, 300, generator=torch.Generator().manual_seed(10 * step + world.rank))
            model.zero_grad()
            model(inputs).square().mean().backward()
            shapes = sorted(shape for _, _, shapes in seen for shape in shapes)
            assert shapes == sorted(tuple(param.shape) for param in wide.parameters())
            assert [is_last for _, is_last, _ in seen] == [False] * (len(seen) - 1) + [True]
            plain = copy.deepcopy(wide)
            plain.zero_grad()
            for rank in range(2):
                other = torch.randn(2, 300, generator=torch.Generator().manual_seed(10 * step + rank))
                (plain(other).square().mean() / 2).backward()
            for ours, theirs in zip(wide.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad)
        assert len(seen) > 1


def test_a_hook_gets_every_gradient(job):
    job(2, look_into_buckets)


def go_local() -> None:
    with paceline.init(announce=None) as world:
        torch.manual_seed(0)
        alone, _ = dist.new_subgroups(1)
        model = DDP(Net())
        state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        for step in range(STEPS):
            model.zero_grad()
            loss(model, world.rank, step).backward()
        mine = average_alone(model.module, lambda net, _: loss(net, world.rank, STEPS - 1), 1)
        for name, param in model.module.named_parameters():
            torch.testing.assert_close(param.grad, mine[name])
        assert error_of(lambda: model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook))[0]
        assert error_of(lambda: DDP(Net()).register_comm_hook(None, "no function"))[0] == "TypeError"


def test_post_local_sgd_keeps_gradients_apart_after_its_start(job):
    job(2, go_local)


def accelerate_program() -> None:
    from accelerate import Accelerator

    with paceline.init(announce=None) as world, swapped():
        torch.manual_seed(world.rank)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = Net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        assert isinstance(model, DDP)
        for step in range(2 * STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, world.rank, step))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        check_equal(world, model.parameters())
        unwrapped = accelerator.unwrap_model(model)
        assert unwrapped is net


def test_accelerate_prepares_ours(job):
    pytest.importorskip("accelerate")
    job(2, accelerate_program)


# -- outputs, attributes, saving --------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "loss rest")


@dataclass
class Result:
    loss: torch.Tensor
    note: str = "a dataclass"


class ModelOutput(OrderedDict):
    """Like Hugging Face's outputs: an ordered dict with its entries as attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def update(self, *args: Any, **values: Any) -> None:
        raise TypeError("items are set one by one")


def test_inputs_in_a_dict_that_forbids_update_are_moved():
    moved = move_tensors(ModelOutput(x=torch.ones(2)), torch.device("meta"))
    assert type(moved) is ModelOutput and moved.x.is_meta


class Talkative(Net):
    def forward(self, x: torch.Tensor, kind: str) -> Any:
        value = super().forward(x).square().mean()
        return {
            "dict": lambda: {"deep": [{"loss": value}]},
            "tuple": lambda: (None, (value, 3)),
            "namedtuple": lambda: Pair(value, "rest"),
            "dataclass": lambda: Result(value),
            "model output": lambda: ModelOutput(loss=value),
            "closure": lambda: lambda: value,
        }[kind]()

    def describe(self) -> str:
        return f"{len(list(self.parameters()))} parameters"


PICK = {
    "dict": lambda out: out["deep"][0]["loss"],
    "tuple": lambda out: out[1][0],
    "namedtuple": lambda out: out.loss,
    "dataclass": lambda out: out.loss,
    "model output": lambda out: out.loss,
    "closure": lambda out: out(),
}


def nest_outputs() -> None:
    with paceline.init(announce=None) as world:
        for options in ({}, {"bucket_cap_mb": 1e-5}, {"find_unused_parameters": True}):
            model = DDP(Talkative(), **options)
            for kind, pick in PICK.items():
                for step in range(2):
                    model.zero_grad()

                    def loss_of(m: Any, rank: int, kind: str = kind, pick: Any = pick, step: int = step) -> Any:
                        return pick(m(draw(rank, step), kind=kind))

                    wanted = average_alone(model.module, loss_of, 2)
                    loss_of(model, world.rank).backward()
                    check(world, model, wanted, (kind, options))


def test_any_nested_output(job):
    job(2, nest_outputs)


def be_a_module() -> None:
    with paceline.init(announce=None) as world:
        net = Talkative()
        model = DDP(net)
        assert model.module is net
        assert model.describe() == "8 parameters"
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = model.no_such_thing
        assert list(map(id, model.parameters())) == list(map(id, net.parameters()))
        assert not model.eval().training and not net.training
        assert model.train().training and net.training
        assert {key.removeprefix("module.") for key in model.state_dict()} == set(net.state_dict())
        assert all(key.startswith("module.") for key in model.state_dict())
        with torch.no_grad():
            only_here = model(draw(world.rank), "dict") if world.rank == 0 else None
        assert world.rank or only_here is not None

        def works(twin: DDP) -> None:
            def loss_of(m: Any, rank: int) -> torch.Tensor:
                return m(draw(rank), kind="tuple")[1][0]

            for _ in range(3):
                twin.zero_grad()
                wanted = average_alone(twin.module, loss_of, 2)
                loss_of(twin, world.rank).backward()
                check(world, twin, wanted)

        for prefix in ("module.", ""):  # with both kinds of keys, into another wrapper
            other = DDP(Talkative())
            other.load_state_dict({prefix + key: value + 1 for key, value in net.state_dict().items()})
            for a, b in zip(other.parameters(), net.parameters(), strict=True):
                assert torch.equal(a, b + 1)
            with pytest.raises(RuntimeError, match="Missing key"):
                other.load_state_dict({prefix + "first.weight": net.first.weight})
        works(model)
        works(copy.deepcopy(model))
        works(pickle.loads(pickle.dumps(model)))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        works(torch.load(file, weights_only=False))
        works(model)


def test_the_wrapper_can_be_saved_and_copied(job):
    job(2, be_a_module)
