"""Names that programs written for torch's DistributedDataParallel use besides its documented ones, and its `Join`."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join

import paceline
from paceline.parallel import DDP
from tests.dist.wrapped import STEPS, Net, average_alone, check, check_equal, error_of, loss

TORCHS_OWN = nn.parallel.DistributedDataParallel


@pytest.fixture
def job(on_ranks):
    return functools.partial(on_ranks, timeout_s=30)


ATTRIBUTES = (
    "device", "device_ids", "device_type", "dim", "output_device", "bucket_bytes_cap", "require_forward_param_sync",
    "require_backward_grad_sync", "is_multi_device_module", "mixed_precision", "parameters_to_ignore", "process_group",
)  # fmt: skip


def compare_names() -> None:
    with paceline.init(announce=None) as world:
        torch.manual_seed(0)
        theirs, ours = (kind(Net(), bucket_cap_mb=1e-4) for kind in (TORCHS_OWN, DDP))
        for name in ATTRIBUTES:
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.logger is None
        for number in range(2):
            theirs_say, we_say = theirs._get_ddp_logging_data(), ours._get_ddp_logging_data()
            different = {name: (value, theirs_say[name]) for name, value in we_say.items() if theirs_say[name] != value}
            # torch counts an iteration when its forward begins.
            different.pop("iteration", None)
            assert not different, number
            assert ("rebuilt_bucket_sizes" in we_say) == bool(number)
            for step in range(3):
                for model in (theirs, ours):
                    loss(model, world.rank, step).backward()
        assert we_say["iteration"] == 3


def test_attributes_and_logging_data_are_those_of_torchs_wrapper(job):
    job(2, compare_names)


def ignore_by_name() -> None:
    with paceline.init(announce=None) as world:
        net = Net()
        DDP._set_params_and_buffers_to_ignore_for_model(net, ["left.weight", "left.bias", "no.such"])
        model = DDP(net)
        assert model.parameters_to_ignore == {"left.weight", "left.bias"}
        loss(model, world.rank).backward()
        everyone = world.share([param.grad.tolist() for param in (net.left.weight, net.right.weight)])
        assert everyone[0][0] != everyone[1][0] and everyone[0][1] == everyone[1][1]


def test_parameters_to_ignore_are_set_by_torchs_name(job):
    job(2, ignore_by_name)


def set_static() -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Net())
        model._set_static_graph()
        assert model.static_graph
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model._set_static_graph()
        assert len(caught) == 1
        use_left = functools.partial(loss, use="left")
        for _ in range(STEPS):
            model.zero_grad()
            wanted = average_alone(model.module, use_left, 2)
            use_left(model, world.rank).backward()
            check(world, model, wanted)
        late = DDP(Net())
        loss(late, world.rank).backward()
        assert error_of(late._set_static_graph)[0] == "ConfigError"


def test_a_static_graph_can_be_set_after_wrapping(job):
    job(2, set_static)


def use_built_in(name: str) -> None:
    with paceline.init(announce=None) as world:
        pair = dist.new_group([0, 1])
        other = dist.new_group([2])
        model = DDP(Net(), process_group=pair if world.rank < 2 else other)
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
        for step in range(STEPS):
            model.zero_grad()
            ranks = (0, 1) if world.rank < 2 else (2,)

            def of_group(m: Any, rank: int, step: int = step, ranks: tuple[int, ...] = ranks) -> torch.Tensor:
                return loss(m, ranks[rank], step)

            wanted = average_alone(model.module, of_group, len(ranks))
            loss(model, world.rank, step).backward()
            for key, param in model.module.named_parameters():
                torch.testing.assert_close(param.grad, wanted[key], atol=1e-3, rtol=1e-2)
        assert error_of(lambda: DDP(Net())._register_builtin_comm_hook("NO_SUCH"))[0] == "ConfigError"


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_built_in_hooks_reduce_in_the_wrappers_group(job, name):
    job(3, use_built_in, name)


# -- what is not there ------------------------------------------------------------------------------------------------


class Guarded(Net):
    def __init__(self) -> None:
        super().__init__()
        self._secret = 3

    @property
    def broken(self) -> int:
        return self.not_made_yet


def ask_for_names() -> None:
    with paceline.init(announce=None):
        model = DDP(Guarded())
        assert model.first is model.module.first
        for name, words in (
            ("wrong", "no attribute 'wrong', nor has its module (Guarded)"),
            ("broken", "no attribute 'broken', nor has its module (Guarded)"),
            ("_wrong", "no attribute '_wrong', nor has its module (Guarded)"),
            ("_secret", "but its module has: write .module._secret"),
        ):
            assert not hasattr(model, name)
            assert getattr(model, name, 7) == 7
            kind, text = error_of(lambda name=name, model=model: getattr(model, name))
            assert kind == "AttributeError"
            assert text.startswith("'DDP' object has no attribute") and text.endswith(words), text
        with pytest.raises(AttributeError) as caught:
            _ = model.broken
        assert caught.value.name == "broken" and "'Guarded' object" in str(caught.value.__cause__)
        bare = DDP.__new__(DDP)  # as copying and unpickling begin
        for name in ("module", "wrong", "_options", "__deepcopy_me__"):
            assert error_of(lambda name=name: getattr(bare, name))[0] == "AttributeError"
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
            assert twin.module._secret == 3 and not hasattr(twin, "wrong")
        del twin, caught
        gone = weakref.ref(model)
        gc.disable()
        del model
        gc.enable()
        assert gone() is None  # nor did any question leave a cycle, which would keep the group open


def test_a_missing_attribute_is_blamed_on_the_right_class(job):
    job(1, ask_for_names)


# -- torch's Join -----------------------------------------------------------------------------------------------------


def join_as_torch_does(batches: tuple[int, ...], shards: bool, divide_by_all: bool, options: dict[str, Any]) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns

    with paceline.init(announce=None) as world:
        model, alone = DDP(Net(), check_replicas_every=1, **options), Net()
        alone.load_state_dict(model.module.state_dict())
        sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9 if shards else 0.0)
        use = {"use": "left"} if "find_unused_parameters" in options else {}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), sgd) if shards else sgd(model.parameters())
        reference = sgd(alone.parameters())
        for _ in range(2):
            with Join([model, optimizer] if shards else [model], divide_by_initial_world_size=divide_by_all):
                for step in range(batches[world.rank]):
                    optimizer.zero_grad()
                    with model.no_sync():
                        (loss(model, world.rank, step + 50, **use) / 2).backward()
                    (loss(model, world.rank, step, **use) / 2).backward()
                    optimizer.step()
            for step in range(max(batches)):
                active = [rank for rank, count in enumerate(batches) if step < count]
                alone.zero_grad()
                total = sum(loss(alone, rank, s, **use) / 2 for rank in active for s in (step, step + 50))
                (total / (len(batches) if divide_by_all else len(active))).backward()
                reference.step()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs)
            check_equal(world, model.parameters())
        model.zero_grad()
        wanted = average_alone(model.module, functools.partial(loss, **use), len(batches))
        loss(model, world.rank, **use).backward()
        check(world, model, wanted)
        model.rebuild()


@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 1e-5, "find_unused_parameters": True}, {"reducer": "flat"}], ids=str
)
@pytest.mark.parametrize("shards", [False, True], ids=["alone", "with ZeRO"])
def test_torchs_join(job, shards, options):
    job(3, join_as_torch_does, (1, 4, 2), shards, True, options)


def test_torchs_join_can_divide_by_those_that_have_data(job):
    job(2, join_as_torch_does, (3, 1), False, False, {})


def leave_join_early(fails: bool) -> tuple[str, str]:
    with paceline.init(announce=None) as world:
        model = DDP(Fragile())

        def train() -> None:
            with Join([model], throw_on_early_termination=not fails):
                for step in range(3 - world.rank):
                    loss(model, world.rank, step, fails=fails and step == 2).backward()

        return error_of(train)


class Fragile(Net):
    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        if fails:
            raise KeyError("no such word")
        return super().forward(x)


def test_torchs_join_ends_early_on_request_or_where_a_rank_fails(job):
    first, second = job(2, leave_join_early, False)
    assert first[0] == second[0] == "RuntimeError"
    assert "exhausted" in first[1] and "exhausted" in second[1]
    first, second = job(2, leave_join_early, True)
    assert first == second and first[0] == "CollectiveError rank-failed"
    assert all(word in first[1] for word in ("step 3", "rank 0", "forward", "KeyError: 'no such word'"))
