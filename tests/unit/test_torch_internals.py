"""Each private torch name that Paceline uses behaves as expected on the installed version."""

from __future__ import annotations

import sys
import time
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from paceline import torch_internals as internals
from paceline.errors import ConfigError


@pytest.fixture
def world():
    """A world of a single process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_installed_torch_has_all_members():
    assert internals.find_missing() == {}


def test_a_missing_member_is_found_with_what_fails(monkeypatch):
    lacking = {"torch.Tensor._no_such_name": "a", "torch.NoSuchClass._x": "b", "torch.nn.Module._no_such_name": "c"}
    monkeypatch.setattr(internals, "MEMBERS", internals.MEMBERS | lacking)
    assert internals.find_missing() == lacking


@pytest.mark.parametrize("path", ["torch._C._no_such_name", "torch._no_such.name", "torch.nn.NoSuch._x"])
def test_a_missing_name_is_a_one_line_error(path):
    with pytest.raises(ConfigError) as caught:
        internals._need(path)
    text = str(caught.value)
    assert caught.value.code == "torch-version" and "\n" not in text
    assert torch.__version__ in text and path in text and "pip install" in text


class Held(Dataset):
    """A data set whose items block until `go` is set."""

    def __init__(self):
        self.go = torch.multiprocessing.get_context("fork").Event()

    def __len__(self):
        return 4

    def __getitem__(self, number):
        self.go.wait()
        return number


@pytest.mark.parametrize("workers", [1, 2])
def test_a_loader_says_whether_its_workers_have_delivered_the_next_batch(workers):
    data = Held()
    batches = iter(DataLoader(data, num_workers=workers, multiprocessing_context="fork", timeout=60))
    assert not internals.is_delivered(batches)
    data.go.set()
    next(batches)
    while not internals.is_delivered(batches):
        time.sleep(0.01)
    assert len(list(batches)) == 3 and not internals.is_delivered(batches)
    assert not internals.is_delivered(iter(DataLoader([1])))


def test_classes():
    names = "ProcessGroup ProcessGroupGloo Work AllreduceOptions AllreduceCoalescedOptions BroadcastOptions"
    names += " AllgatherOptions ReduceScatterOptions BarrierOptions"
    assert all(isinstance(getattr(internals.c10d, name), type) for name in names.split())
    assert issubclass(torch.futures.Future, internals.Future)
    assert issubclass(nn.BatchNorm2d, internals.BatchNorm) and issubclass(nn.SyncBatchNorm, internals.BatchNorm)
    assert isinstance(iter(DataLoader([1])), internals.DataLoaderIterator)
    assert issubclass(internals.StopRecomputation, Exception)
    assert internals.BufferHookLocation.PRE_FORWARD != internals.BufferHookLocation.POST_FORWARD
    assert internals.JoinConfig.construct_disabled_join_config().enable is False


def test_backward():
    seen = {}

    def look(_: torch.Tensor) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code is not internals.run_backward.__code__:
            frame = frame.f_back
        seen["is on the stack"] = frame is not None
        seen["task"] = internals.current_graph_task()
        seen["reaches"] = [internals.will_execute(get_gradient_edge(one).node) for one in (used, unused)]
        internals.engine.queue_callback(lambda: seen.update(end=used.grad is not None))

    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    product = used * 2
    product.register_hook(look)
    (product + unused.detach()).sum().backward()
    assert internals.current_graph_task() == -1
    assert seen.pop("task") >= 0
    assert seen == {"is on the stack": True, "reaches": [True, False], "end": True}


def test_memory():
    tensor = torch.ones(4)
    alone = internals.count_storage_uses(tensor.untyped_storage()._cdata)
    view = tensor[:2]
    assert internals.count_storage_uses(tensor.untyped_storage()._cdata) == alone + 1 and view.numel() == 2
    assert internals.has_internal_overlap(torch.ones(1).expand(3)) == 1
    assert internals.has_internal_overlap(torch.ones(3)) == 0
    assert internals.tree_map_only(int, lambda value: -value, {"a": [1, "b"]}) == {"a": [-1, "b"]}
    buffer = torch.zeros(2)
    with internals.keep_versions((buffer,)):
        buffer += 1
    assert buffer._version == 0


def test_the_profiler():
    assert not internals.is_profiling() and not internals.is_recording()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert internals.is_profiling() and internals.is_recording()


def test_a_range_ends_with_a_future():
    future = torch.futures.Future()
    with torch.profiler.profile() as profiler:
        with torch.profiler.record_function("long") as span:
            internals.extend_range(span, future)
        with torch.profiler.record_function("inner"):
            pass
        future.set_result(None)
    times = {event.name: event.time_range for event in profiler.events()}
    assert times["long"].start < times["inner"].start and times["inner"].end < times["long"].end


def test_groups(world):
    assert list(internals.list_groups()) == [world]
    store = internals.get_default_store()
    store.set("key", "value")
    first, second = (internals.new_local_group([0], "gloo") for _ in range(2))
    names = internals.list_groups()
    assert len(names) == 3 and first.group_name != second.group_name
    assert all(names[group] == group.group_name for group in (first, second))
    other = dist.new_group([0])  # named by torch again
    assert not other.group_name.startswith("paceline")
    values = [torch.ones(2), torch.ones(3)]
    internals.broadcast_coalesced(world, values, 1 << 20, 0)
    assert store.get("key") == b"value" and "env" in internals.rendezvous_handlers
    backend = world._get_backend(torch.device("cpu"))
    assert isinstance(backend, internals.c10d.ProcessGroupGloo) and torch.device("cpu") in world._device_types
    assert world._get_sequence_number_for_group() >= 0


def test_torch_names_a_group_if_the_name_cannot_be_set(world, monkeypatch):
    name_group = dist.distributed_c10d._process_group_name
    monkeypatch.delattr(dist.distributed_c10d, "_process_group_name")
    with internals._naming("ours"):
        assert not hasattr(dist.distributed_c10d, "_process_group_name")
    monkeypatch.setattr(dist.distributed_c10d, "_process_group_name", name_group, raising=False)
    with internals._naming("ours"):
        assert dist.distributed_c10d._process_group_name([0], True) == "ours"
    assert dist.distributed_c10d._process_group_name is name_group


def test_a_wrappers_hook_can_be_registered_again(world):
    calls = []

    def hook(state, bucket):
        calls.append(state)
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(nn.Linear(2, 2))
    model.register_comm_hook("first", hook)
    assert model._comm_hooks == [(hook, "first")]
    other = DistributedDataParallel(nn.Linear(2, 2))
    internals.register_comm_hook(other.reducer, "second", hook)
    other(torch.ones(1, 2)).sum().backward()
    assert calls == ["second"]


def test_torch_compile():
    seen = []

    def backend(graph, inputs):
        seen.append(internals.is_compiling())
        return graph.forward

    def leave(x):
        return x + 1

    try:
        assert torch.compile(lambda x: x * 2, backend=backend)(torch.ones(1)) == 2
        assert seen == [True] and not internals.is_compiling()
        internals.skip_frames(leave.__code__, with_calls=True)
        assert torch.compile(leave, backend=backend)(torch.ones(1)) == 2
        assert seen == [True]
        before = torch._dynamo.config.recompile_limit
        internals.raise_recompile_limit(before - 1)
        assert torch._dynamo.config.recompile_limit == before
        internals.raise_recompile_limit(before + 3)
        assert torch._dynamo.config.recompile_limit == before + 3
        torch._dynamo.config.recompile_limit = before
        assert torch.compile(nn.Linear(1, 1), backend=backend)._orig_mod is not None
    finally:
        torch.compiler.reset()


def test_optional_attributes_are_those_that_torch_sets(world):
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["bias"])
    assert model._ddp_params_and_buffers_to_ignore == ["bias"]
    _apply_optimizer_in_backward(torch.optim.SGD, [model.weight], {"lr": 0.1})
    assert hasattr(model.weight, "_in_backward_optimizers")
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert hasattr(DistributedDataParallel(nn.Linear(2, 2)), "_bucket_config")
    loader = DataLoader([1])
    assert loader._iterator is None
    assert hasattr(torch.utils.data.dataloader._MultiProcessingDataLoaderIter, "_shutdown_workers")
    assert torch.compiler.disable(lambda: None)._torchdynamo_disable is True
