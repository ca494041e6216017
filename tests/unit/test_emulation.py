"""An emulated network: first in, first out, never faster than its model, with unchanged values."""

from __future__ import annotations

import copy
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.measure.plan_bench import EmulatedNetwork
from paceline.parallel import DataParallel
from paceline.predict.curves import FamilyCurve

CURVE = FamilyCurve("line", 2, 0.004, 1e6)


@pytest.fixture
def build_network():
    networks = []

    def build(curve):
        networks.append(EmulatedNetwork(curve))
        return networks[-1]

    yield build
    for network in networks:
        network.close()


@pytest.fixture
def alone():
    """A world of one process, this one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Wrapped(DataParallel):
    """A stand-in for a wrapper that keeps its hook."""

    def __init__(self):
        nn.Module.__init__(self)

    def register_comm_hook(self, state, hook):
        object.__setattr__(self, "send", lambda tensor: hook(state, Bucket(tensor)))


class Bucket:
    def __init__(self, tensor):
        self._tensor = tensor

    def buffer(self):
        return self._tensor


def count_threads():
    return sum(thread.name.startswith("paceline-emulated-network") for thread in threading.enumerate())


def test_buckets_end_in_order_and_not_before_their_time(build_network):
    network, wrapped = build_network(CURVE), Wrapped()
    network.attach(wrapped)
    tensors = [torch.full((count,), float(count)) for count in (2000, 1, 500)]
    ended = []
    begin_s = time.perf_counter()
    futures = [wrapped.send(tensor) for tensor in tensors]
    for number, future in enumerate(futures):
        future.add_done_callback(lambda _, number=number: ended.append((number, time.perf_counter())))
    results = [future.wait() for future in futures]
    network.close()
    assert [number for number, _ in ended] == [0, 1, 2]
    due_s = 0.0
    for tensor, (_, end_s) in zip(tensors, ended, strict=True):
        due_s += 0.004 + tensor.nbytes / 1e6  # one at a time: each waits for its predecessors
        assert end_s - begin_s >= due_s
    assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
    assert [float(tensor[0]) for tensor in tensors] == [2000, 1, 500]


def test_an_idle_network_starts_at_once_and_not_in_the_past(build_network):
    network, wrapped = build_network(CURVE), Wrapped()
    network.attach(wrapped)
    wrapped.send(torch.ones(1)).wait()
    time.sleep(0.02)
    begin_s = time.perf_counter()
    wrapped.send(torch.ones(1000)).wait()
    assert time.perf_counter() - begin_s >= 0.004 + 4000 / 1e6


def test_models_share_one_network(build_network):
    network, first, second = build_network(CURVE), Wrapped(), Wrapped()
    network.attach(first)
    network.attach(second)
    begin_s = time.perf_counter()
    futures = [wrapped.send(torch.ones(2000)) for wrapped in (first, second)]
    torch.futures.wait_all(futures)
    assert count_threads() == 1
    assert time.perf_counter() - begin_s >= 2 * (0.004 + 8000 / 1e6)


def test_without_a_curve_a_bucket_is_done_when_it_is_sent(build_network):
    network, wrapped, tensor = build_network(None), Wrapped(), torch.arange(5.0)
    before_s = sys.getswitchinterval()
    network.attach(wrapped)
    future = wrapped.send(tensor)
    assert future.done() and future.value() is tensor
    assert count_threads() == 0 and sys.getswitchinterval() == before_s


def test_closing_leaves_no_thread_and_the_interpreter_as_it_was():
    before_s = sys.getswitchinterval()
    network, wrapped = EmulatedNetwork(CURVE), Wrapped()
    network.attach(wrapped)
    assert sys.getswitchinterval() < before_s
    wrapped.send(torch.ones(3)).wait()
    assert count_threads() == 1
    network.close()
    assert count_threads() == 0 and sys.getswitchinterval() == before_s
    network.close()  # closing twice is harmless
    assert sys.getswitchinterval() == before_s


@pytest.mark.parametrize("curve", [None, CURVE], ids=["no time", "some time"])
@pytest.mark.parametrize("wrapper", [DataParallel, DistributedDataParallel])
def test_gradients_are_those_of_the_bare_model(alone, build_network, wrapper, curve):
    torch.manual_seed(3)
    bare = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    wrapped = wrapper(copy.deepcopy(bare), bucket_cap_mb=1e-4)
    network = build_network(curve)
    sent = []
    send = network._send
    network._send = lambda buffer: sent.append(buffer.nbytes) or send(buffer)
    network.attach(wrapped)
    for step in range(3):
        sent.clear()
        batch = torch.randn(4, 6) + step
        for model in (bare, wrapped):
            model.zero_grad()
            model(batch).pow(2).sum().backward()
        for mine, theirs in zip(wrapped.module.parameters(), bare.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)
        assert sum(sent) == sum(param.nbytes for param in bare.parameters())
    assert len(sent) > 1
    if isinstance(wrapped, DataParallel):
        wrapped.stop()
