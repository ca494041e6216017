"""Programs that do not mention Paceline, with our wrapper instead of torch's: the same losses and checkpoints."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import itertools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.parallel import DDP, is_torchs
from paceline.transport import why_not
from tests.dist import user_programs
from tests.dist.user_programs import FRAMEWORKS, PROGRAMS, Net, draw, in_float64
from tests.dist.wrapped import error_of

TOLERANCE = 1e-6  # relative, in float64


def need(name: str) -> None:
    """Skip if a package is missing, without importing it, which would leave environment variables behind."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"not installed: {name}")


def call(program: Callable[..., tuple[list[float], str]], is_ours: bool, *args: Any, **options: Any) -> list[float]:
    """The losses of a program with our wrapper or with torch's; checks that the program really used it."""
    paceline.swap_wrapper(is_ours)
    try:
        with in_float64():
            losses, kind = program(*args, **options)
    finally:
        paceline.swap_wrapper(False)
    assert kind == ("DDP" if is_ours else "DistributedDataParallel")
    assert losses
    return losses


def compare_program(name: str, folder: Path) -> None:
    with paceline.init(announce=None):
        theirs, ours = (call(PROGRAMS[name], is_ours, folder) for is_ours in (False, True))
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "compiled")) for name in PROGRAMS]
)
def test_losses_are_those_of_torchs_wrapper(job, tmp_path, name):
    job(2, compare_program, name, tmp_path)


def compare_framework(name: str, folder: Path, options: dict[str, Any], backend: str) -> None:
    """Train and save with each wrapper, then resume from each checkpoint with each: six runs, two different results."""
    program = functools.partial(FRAMEWORKS[name], **options)
    with paceline.init(announce=None, backend=backend) as world:
        assert world.backend == ("gloo" if backend == "gloo" or why_not() else "shm")
        folders = {is_ours: folder / f"ours {is_ours}" for is_ours in (False, True)}
        if world.rank == 0:
            for each in folders.values():
                each.mkdir()
        dist.barrier()
        begun = {is_ours: call(program, is_ours, folders[is_ours], False) for is_ours in folders}
        assert begun[True] == pytest.approx(begun[False], rel=TOLERANCE, abs=0)
        resumed = [call(program, is_ours, folders[other], True) for is_ours in folders for other in folders]
        for losses in resumed[1:]:
            assert losses == pytest.approx(resumed[0], rel=TOLERANCE, abs=0)
        assert resumed[0][0] != pytest.approx(begun[False][0])  # the resumed run did not start from scratch


NEEDS = {"fabric": "lightning"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("accelerate", {}),
    ("transformers", {}),
    ("transformers", {"gradient_checkpointing": True}),
    ("transformers", {"torch_compile": True, "torch_compile_backend": "aot_eager"}),
    ("lightning", {}),
    ("lightning", {"is_manual": True, "strategy": "ddp_find_unused_parameters_true"}),
    ("fabric", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "auto"])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_losses_and_checkpoints_of_frameworks(job, tmp_path, name, options, backend):
    need(NEEDS.get(name, name))
    job(2, compare_framework, name, tmp_path, options, backend)


def run_accelerates_tests() -> None:
    from accelerate import Accelerator
    from accelerate.test_utils.scripts import test_sync

    with paceline.init(announce=None):
        paceline.swap_wrapper()
        try:
            assert type(Accelerator(cpu=True).prepare(nn.Linear(1, 1))) is DDP
            for check in (test_sync.test_distributed_sync, test_sync.test_distributed_sync_multiple_fwd):
                check(Accelerator(cpu=True))
            test_sync.test_dataloader_break()
            for choices in itertools.product((True, False), repeat=3):
                test_sync.test_gradient_accumulation(*choices)
                test_sync.test_gradient_accumulation_with_opt_and_scheduler(*choices)
        finally:
            paceline.swap_wrapper(False)


@pytest.mark.slow
def test_accelerates_own_tests_of_synchronization(job):
    need("accelerate")
    job(2, run_accelerates_tests)


# -- the swap itself ---------------------------------------------------------------------------------------------------


class Named(DistributedDataParallel):
    """A program's own subclass of torch's class, which may use anything that torch's class has."""


def swap() -> None:
    with paceline.init(announce=None):
        before = DistributedDataParallel(Net())
        paceline.swap_wrapper(check_replicas_every=3, bucket_cap_mb=2)
        try:
            for given in ((None, None, 0, True, True, None, 7), ()):
                ours = nn.parallel.DistributedDataParallel(Net(), *given, static_graph=True)
                assert ours.bucket_bytes_cap == 2 << 20 and ours.static_graph
            ours = nn.parallel.DistributedDataParallel(module=Net(), bucket_cap_mb_list=[7, 9])
            assert type(ours) is DDP and isinstance(ours, DistributedDataParallel) and not is_torchs(ours)
            assert ours._options.check_every == 3 and ours.bucket_bytes_cap == 2 << 20
            assert type(Named(Net())) is Named
            assert type(DistributedDataParallel(nn.ParameterList([nn.Parameter(torch.ones(2))]))) is not DDP
            assert is_torchs(before)
            for name in ("no_such", "self", "module"):
                kind, text = error_of(lambda name=name: paceline.swap_wrapper(**{name: 1}))
                assert kind == "ConfigError" and name in text
            assert error_of(lambda: DistributedDataParallel(None))[0] == "ConfigError"
        finally:
            paceline.swap_wrapper(False)
        assert is_torchs(DistributedDataParallel(Net()))
        names = list(inspect.signature(DistributedDataParallel).parameters)
        assert names == list(inspect.signature(DistributedDataParallel.__init__).parameters)[1:]
        assert set(names) <= set(inspect.signature(DDP).parameters)


def test_the_swap_reaches_every_name_of_the_class_and_can_be_undone(job):
    job(1, swap)


class Own(DDP):
    """A program's own subclass of ours, with its own arguments."""

    def __init__(self, width: int) -> None:
        super().__init__(Net(width))
        self.count = 0


def wrap_twice() -> None:
    with paceline.init(announce=None) as world:
        net = Net()
        model = DDP(net, bucket_cap_mb=1e-4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert DistributedDataParallel(model) is model
            assert not caught
            assert DistributedDataParallel(model, None, None, 0) is model  # only defaults
            assert not caught
            assert DistributedDataParallel(module=model, device_ids=None, find_unused_parameters=True) is model
            assert DistributedDataParallel(model, None, None, 0, True, True, None, 7, static_graph=False) is model
        ignored = [re.search(r"wrapper's (.*) is ignored", str(one.message))[1] for one in caught]
        assert ignored == ["find_unused_parameters", "bucket_cap_mb, static_graph"]
        assert type(model) is DDP and model.module is net and not model.static_graph
        assert error_of(lambda: DistributedDataParallel(model, no_such=1))[0] == "TypeError"
        own = Own(8)
        own.count = 5
        assert DistributedDataParallel(own) is own and type(own) is Own and own.count == 5
        own(draw(0, 3, 4).float()).sum().backward()
        assert world.share(own.module.head.bias.grad.tolist())[0] == own.module.head.bias.grad.tolist()
        # A framework that wraps it again treats it as the bare model.
        assert model.state_dict().keys() == net.state_dict().keys()
        values = {key: value + 1 for key, value in net.state_dict().items()}
        for prefix in ("", "module."):
            model.load_state_dict({prefix + key: value for key, value in values.items()})
        assert all(torch.equal(net.state_dict()[key], value) for key, value in values.items())
        for step in range(3):
            model.zero_grad()
            model(draw(step, 3, 4).float()).sum().backward()
        everyone = world.share([param.grad.tolist() for param in net.parameters()])
        assert everyone[0] == everyone[1]
        for wrapped in (model, DistributedDataParallel(Net())):
            kind, text = error_of(lambda wrapped=wrapped: DDP(wrapped))
            assert kind == "ConfigError" and ".module" in text
        for given in (None, Net):
            kind, text = error_of(lambda given=given: DDP(given))
            assert kind == "ConfigError" and "nn.Module" in text and "\n" not in text


def test_a_wrapped_model_is_not_wrapped_again(job):
    job(2, wrap_twice)


def prepare_what_is_wrapped(folder: Path) -> None:
    from accelerate import Accelerator
    from safetensors.torch import load_file

    with paceline.init(announce=None) as world:
        net = Net()
        model = DDP(net)
        accelerator = Accelerator(cpu=True)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(3):
            accelerator.backward(prepared(draw(step, 3, 4).float()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_state(str(folder / "state"))
        accelerator.save_model(prepared, str(folder / "model"))
        dist.barrier()
        assert accelerator.unwrap_model(prepared) is net
        for file in ("state/model.safetensors", "model/model.safetensors"):
            assert load_file(folder / file).keys() == net.state_dict().keys()
        accelerator.load_state(str(folder / "state"))
        everyone = world.share([param.tolist() for param in net.parameters()])
        assert everyone[0] == everyone[1]


def test_accelerate_saves_a_model_that_was_wrapped_by_hand_without_a_prefix(job, tmp_path):
    need("accelerate")
    job(2, prepare_what_is_wrapped, tmp_path)


def test_the_programs_do_not_name_paceline():
    source = Path(inspect.getfile(user_programs)).read_text()
    assert "paceline" not in source.split('"""', 2)[2].lower()


def read_by_torchs_own() -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    with paceline.init(announce=None):
        for wraps_again, has_parent in itertools.product((False, True), repeat=2):
            net = Net()
            model = top = DDP(net)
            if wraps_again:
                assert DistributedDataParallel(model) is model
            prefix = "part." if has_parent else ""
            if has_parent:
                top = nn.ModuleDict({"part": model})
            bare = {f"{prefix}{key}" for key in net.state_dict()}
            assert dcp.get_model_state_dict(top).keys() == bare
            assert top.state_dict().keys() == (
                bare if wraps_again else {f"{prefix}module.{key}" for key in net.state_dict()}
            )

            def load(put: Callable[[dict[str, torch.Tensor]], Any], name: str, net: Net = net) -> None:
                values = {key: value + 1 for key, value in net.state_dict().items()}
                found = put({f"{name}{key}": value for key, value in values.items()})
                assert not found.missing_keys and not found.unexpected_keys
                assert all(torch.equal(net.state_dict()[key], value) for key, value in values.items())

            load(functools.partial(dcp.set_model_state_dict, top), prefix)
            for name in ("", "module."):
                load(top.load_state_dict, prefix + name)
            optimizer = torch.optim.SGD(top.parameters(), lr=0.1, momentum=0.9)
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            states = dcp.get_state_dict(top, optimizer)
            assert states[1]["state"].keys() == bare
            dcp.set_state_dict(top, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
            kind, text = error_of(lambda top=top, prefix=prefix: top.load_state_dict({f"{prefix}other": torch.ones(1)}))
            assert kind == "RuntimeError" and "head.bias" in text


def test_torchs_checkpoints_have_no_prefix_and_both_kinds_of_keys_load(job):
    job(1, read_by_torchs_own)
