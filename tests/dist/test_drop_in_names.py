"""Undocumented names of torch's DistributedDataParallel that programs use, and its `Join`."""

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
from torch.nn.parallel.distributed import _BufferCommHookLocation

import paceline
from paceline.parallel import DDP
from tests.dist.wrapped import STEPS, Net, average_alone, check, check_equal, draw, error_of, loss

TORCHS_OWN = nn.parallel.DistributedDataParallel


ATTRIBUTES = (
    "device", "device_ids", "device_type", "dim", "output_device", "bucket_bytes_cap", "require_forward_param_sync",
    "require_backward_grad_sync", "is_multi_device_module", "mixed_precision", "parameters_to_ignore", "process_group",
    "static_graph", "find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers", "modules_buffers",
    "bucket_bytes_cap_default", "skip_all_reduce_unused_params", "named_module_buffers",
)  # fmt: skip
# Attributes that torch 2.13 and 2.15 added.
NEW = (
    "forward_sync_buffers", "batched_grad_copy", "bucket_bytes_cap_list", "lazy_bucket_allocation",
    "require_manual_backward_finalization", "should_finalize_after_backward",
)  # fmt: skip


def compare_names() -> None:
    with paceline.init(announce=None) as world:
        torch.manual_seed(0)
        theirs, ours = (kind(Net(), bucket_cap_mb=1e-4) for kind in (TORCHS_OWN, DDP))
        for name in ATTRIBUTES:
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in NEW:
            if hasattr(theirs, name):
                assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.logger is None
        ours.require_manual_backward_finalization = False
        assert error_of(lambda: setattr(ours, "require_manual_backward_finalization", True))[0] == "ConfigError"
        assert error_of(ours.finalize_backward)[0] == "ConfigError"
        mesh = dist.init_device_mesh("cpu", (2,))
        on_mesh = DDP(Net(), device_mesh=mesh, bucket_cap_mb_list=[1, 2])
        assert on_mesh.device_mesh is mesh and on_mesh.process_group is mesh.get_group()
        assert copy.deepcopy(on_mesh).device_mesh is mesh
        assert not hasattr(ours, "device_mesh") and not hasattr(theirs, "device_mesh")
        assert on_mesh.bucket_bytes_cap_list == [1 << 20, 2 << 20] and not on_mesh.bucket_bytes_cap_default
        assert isinstance(ours, TORCHS_OWN)
        for number in range(2):
            theirs_say, we_say = theirs._get_ddp_logging_data(), ours._get_ddp_logging_data()
            different = {name: (value, theirs_say[name]) for name, value in we_say.items() if theirs_say[name] != value}
            # torch counts an iteration at the start of its forward.
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


# -- inside a framework's own backward --------------------------------------------------------------------------------


class Stepping(nn.Module):
    """Like Lightning's manual optimization: its forward runs a backward and returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.nets, self.prepare = nn.ModuleList(Net() for _ in range(3)), None

    def forward(self, x: torch.Tensor, number: int) -> None:
        value = self.nets[number](x).square().mean()
        self.prepare()
        value.backward()


def prepare_as_frameworks_do() -> None:
    with paceline.init(announce=None) as world:
        model = DDP(Stepping(), find_unused_parameters=True)
        model.module.prepare = lambda: model.reducer.prepare_for_backward([])
        assert model.reducer._rebuild_buckets() is False
        for step in range(6):
            number = (step + 1) % 3  # first the branch with neither the first nor the last parameter
            net = model.module.nets[number]
            model.zero_grad()
            wanted = average_alone(net, functools.partial(loss, step=step), 2)
            model(draw(world.rank, step), number)
            check(world, net, wanted)
        model.reducer._delay_all_reduce()
        model._check_reducer_finalized()
        with pytest.raises(AttributeError, match="no_such"):
            model.reducer.no_such()
        model._remove_autograd_hooks()
        assert model._sync._is_stopped


def test_a_backward_inside_forward_is_synchronized_from_the_first_step_on(job):
    job(2, prepare_as_frameworks_do)


class Counting(Net):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.full((2,), float(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)


def sum_buffers(waits: bool, before: bool) -> list[list[float]]:
    found = []
    with paceline.init(announce=None) as world:
        for kind in (TORCHS_OWN, DDP):
            model = kind(Counting(world.rank))

            def add_up(state: Any, buffers: dict[str, torch.Tensor]) -> Any:
                assert state == "state" and list(buffers) == ["count"]
                work = dist.all_reduce(buffers["count"], async_op=True)
                return work.wait() and None if waits else [work.get_future()]

            place = _BufferCommHookLocation.PRE_FORWARD if before else _BufferCommHookLocation.POST_FORWARD
            model._register_buffer_comm_hook("state", add_up, place)
            for step in range(3):
                loss(model, world.rank, step).backward()
            with model.no_sync():
                for step in range(2):  # torch does not wait for the Futures here
                    loss(model, world.rank, step).backward()
            found.append(model.module.count.tolist())
    return found


@pytest.mark.parametrize(("waits", "before", "wanted"), [(True, True, 16), (True, False, 31), (False, False, 31)])
def test_a_buffer_hook_synchronizes_the_buffers(job, waits, before, wanted):
    for theirs, ours in job(2, sum_buffers, waits, before):
        assert ours == [wanted, wanted]
        assert theirs == ours or not waits


def start_with_own_buffers() -> list[tuple[float, float]]:
    found = []
    with paceline.init(announce=None) as world:
        for options in ({"broadcast_buffers": False}, {"forward_sync_buffers": False}, {}):
            for kind in (TORCHS_OWN, DDP):
                if kind is DDP or hasattr(TORCHS_OWN, "broadcast_buffers"):  # torch 2.13, with both arguments
                    model = kind(Counting(world.rank), **options)
                    first = model.module.count[0].item()
                    for step in range(2):
                        loss(model, world.rank, step).backward()
                    found.append((first, model.module.count[0].item()))
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_buffers_are_synchronized_as_in_torch(job):
    for rank, found in enumerate(job(2, start_with_own_buffers)):
        ours = found[1::2] if len(found) == 6 else found
        assert ours == [(rank, rank + 2.0), (0, 2.0), (0, 2.0)]
        assert len(found) == 3 or found[::2] == ours


def profile_forward() -> list[str]:
    with paceline.init(announce=None) as world:
        model = DDP(Net())
        with torch.profiler.profile() as seen:
            loss(model, world.rank).backward()
        return [event.key for event in seen.key_averages()]


def test_a_trace_has_the_profiler_range_of_torchs_wrapper(job):
    assert all("DistributedDataParallel.forward" in names for names in job(2, profile_forward))


def change_group() -> None:
    with paceline.init(announce=None) as world:
        pair, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in range(2)][world.rank]
        model = DDP(Net(), process_group=pair)
        loss(model, world.rank).backward()
        model._update_process_group(alone)
        for step in range(2):
            model.zero_grad()
            loss(model, world.rank, step).backward()
        mine = average_alone(model.module, lambda net, _: loss(net, world.rank, 1), 1)
        for name, param in model.module.named_parameters():
            torch.testing.assert_close(param.grad, mine[name])


def test_another_process_group_can_be_set(job):
    job(2, change_group)


# -- unsupported names ------------------------------------------------------------------------------------------------


class Guarded(Net):
    def __init__(self) -> None:
        super().__init__()
        self._secret = 3

    @property
    def broken(self) -> int:
        return self.not_made_yet


def refuse() -> list[tuple[str, str]]:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torch.distributed.tensor import Replicate, distribute_module

    with paceline.init(announce=None):
        early, spread = Net(), Net()
        _apply_optimizer_in_backward(torch.optim.SGD, early.parameters(), {"lr": 0.1})
        distribute_module(spread, dist.init_device_mesh("cpu", (1,)))
        assert isinstance(next(spread.parameters()).placements[0], Replicate)
        fused = DDP(Net())
        calls = (lambda: DDP(early), lambda: DDP(spread), lambda: fused._register_fused_optim(torch.optim.SGD, lr=0.1))
        return [error_of(call) for call in calls]


def test_unsupported_features_are_refused(job):
    (found,) = job(1, refuse)
    for (kind, text), word in zip(found, ("in backward", "DTensor", "_register_fused_optim"), strict=True):
        assert kind == "ConfigError" and word in text


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
        bare = DDP.__new__(DDP)  # as copying and unpickling do
        for name in ("module", "wrong", "_options", "__deepcopy_me__"):
            assert error_of(lambda name=name: getattr(bare, name))[0] == "AttributeError"
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
            assert twin.module._secret == 3 and not hasattr(twin, "wrong")
        del twin, caught
        gone = weakref.ref(model)
        gc.disable()
        del model
        gc.enable()
        assert gone() is None  # no lookup left a reference cycle, which would keep the group open


def test_an_error_for_a_missing_attribute_names_the_right_class(job):
    job(1, ask_for_names)


# -- torch's Join -----------------------------------------------------------------------------------------------------


def join_as_torch_does(batches: tuple[int, ...], shards: bool, divide_by_all: bool, options: dict[str, Any]) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # emits a warning

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
    "options", [{}, {"bucket_cap_mb": 1e-5, "find_unused_parameters": True}, {"reducer": "simple"}], ids=str
)
@pytest.mark.parametrize("shards", [False, True], ids=["alone", "with ZeRO"])
def test_torchs_join(job, shards, options):
    job(3, join_as_torch_does, (1, 4, 2), shards, True, options)


def test_torchs_join_can_divide_by_the_number_of_active_ranks(job):
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


def test_torchs_join_ends_early_on_request_or_if_a_rank_fails(job):
    first, second = job(2, leave_join_early, False)
    assert first[0] == second[0] == "RuntimeError"
    assert "exhausted" in first[1] and "exhausted" in second[1]
    first, second = job(2, leave_join_early, True)
    assert first == second and first[0] == "CollectiveError rank-failed"
    assert all(word in first[1] for word in ("step 3", "rank 0", "forward", "KeyError: 'no such word'"))
