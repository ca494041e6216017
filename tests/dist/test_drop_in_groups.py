"""The rest of torch's interface: groups and meshes, ignored parameters, the loop of document 001, and reports."""

from __future__ import annotations

import functools
import gc
import pickle
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import paceline
from paceline import ConfigError
from paceline.parallel import DDP
from paceline.parallel.channel import Channel, open_group
from tests.conftest import BACKEND
from tests.dist.wrapped import REDUCERS, STEPS, Net, average_alone, check, check_close, draw, gradients, loss


def train_in_groups() -> None:
    with paceline.init(announce=None) as world:
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
        for kind in ("group", "mesh", "group of the world"):
            if kind == "group":
                options: dict[str, Any] = {"process_group": pairs[world.rank % 2]}
                peers = [world.rank % 2, world.rank % 2 + 2]
            elif kind == "mesh":
                options, peers = {"device_mesh": mesh["data"]}, [world.rank // 2 * 2, world.rank // 2 * 2 + 1]
            else:
                options, peers = {"process_group": dist.group.WORLD}, [0, 1, 2, 3]
            for reducer in REDUCERS[1:]:
                model = DDP(Net(), check_replicas_every=1, **options, **reducer)
                assert dist.get_world_size(model.process_group) == len(peers)
                for step in range(3):
                    model.zero_grad()

                    def loss_of(m: Any, number: int, step: int = step, peers: list[int] = peers) -> torch.Tensor:
                        return loss(m, peers[number], step)

                    # Each group has its own values, and their sums must not mix.
                    wanted = average_alone(model.module, loss_of, len(peers))
                    loss(model, world.rank, step).backward()
                    check_close(model, wanted, (kind, reducer, step))
            if kind == "group":
                with pytest.raises(ConfigError) as caught:
                    pickle.dumps(model)
                assert caught.value.code == "not-picklable"
        with pytest.raises(ConfigError, match="2 dimensions"):
            DDP(Net(), device_mesh=mesh)
        with pytest.raises(ConfigError, match="process_group and device_mesh"):
            DDP(Net(), device_mesh=mesh["data"], process_group=pairs[0])


def test_groups_and_meshes(job):
    job(4, train_in_groups)


class Owner:
    """A model whose group is destroyed with it."""


def open_groups_of_a_part() -> list[float]:
    """Several groups of the same two ranks, sequentially and concurrently; then groups of the whole world."""
    groups, sums = list[Any](), list[float]()
    with paceline.init(announce=None) as world:
        pair, owners = dist.new_group([0, 1]), [Owner(), Owner()]
        if world.rank < 2:
            groups = [open_group(Channel(pair, world.device), owner) for owner in owners]
            del groups[0], owners[0]
            owners.append(Owner())
            groups.append(open_group(Channel(pair, world.device), owners[-1]))
        for group in [*groups, dist.new_group(), dist.new_group()]:
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            sums.append(tensor.item())
    return sums


def test_groups_of_some_ranks_do_not_affect_groups_of_the_world(job):
    assert job(3, open_groups_of_a_part) == [[2.0, 2.0, 3.0, 3.0], [2.0, 2.0, 3.0, 3.0], [3.0, 3.0]]


def ignore(how: str) -> None:
    with paceline.init(announce=None) as world:
        net = Net()
        net.register_buffer("scale", torch.full((2,), float(world.rank)))
        names = ["left.weight", "left.bias", "scale"]
        before = net.left.weight.detach().clone()
        if how == "torch":
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
        model = DDP(net) if how == "torch" else DDP(net, ignore=iter(names))
        assert torch.equal(net.left.weight, before)
        for step in range(STEPS):
            model.zero_grad()
            net.scale.fill_(world.rank + step)
            alone = average_alone(net, lambda m, _, step=step: loss(m, world.rank, step), 1)
            loss(model, world.rank, step).backward()
            assert torch.equal(net.scale, torch.full((2,), float(world.rank + step)))
            for name in names[:2]:
                torch.testing.assert_close(net.get_parameter(name).grad, alone[name])
            kept = world.share({name: grad.numpy() for name, grad in gradients(model).items()})
            for name, grad in kept[0].items():
                assert (name in names) != (grad == kept[1][name]).all(), name


@pytest.mark.parametrize("how", ["torch", "ours"])
def test_ignored_parameters_and_buffers_are_unchanged(job, how):
    job(2, ignore, how)


def follow_the_seed() -> None:
    """The loop of document 001: accumulate without and with synchronization, then synchronize explicitly."""
    with paceline.init(announce=None) as world:
        for reducer in REDUCERS:
            model = DDP(Net(), manual=True, **reducer)
            assert model.do_sync
            for step in range(STEPS):
                model.zero_grad()

                def parts(m: Any, rank: int, step: int = step) -> torch.Tensor:
                    return sum(loss(m, rank, 10 * step + part) / 3 for part in range(3))

                wanted = average_alone(model.module, parts, 2)
                mine = average_alone(model.module, lambda m, _, parts=parts: parts(m, world.rank), 1)
                for part in range(3):
                    if part < 2:
                        model.disable_grad_sync()
                        assert not model.do_sync
                    else:
                        model.enable_grad_sync()
                        assert model.do_sync
                    (loss(model, world.rank, 10 * step + part) / 3).backward()
                    if part < 2 or step % 2:
                        model.sync_gradients() if part < 2 else None
                check_close(model, mine, "nothing was synchronized yet")
                with model.no_sync():
                    model.sync_gradients()
                check_close(model, mine, "no_sync")
                model.sync_gradients()
                check(world, model, wanted, (reducer, step))
                model.sync_gradients()  # there is nothing left to synchronize
                check(world, model, wanted, (reducer, step))


def test_the_loop_of_document_001(job):
    job(2, follow_the_seed)


def report() -> dict[str, Any]:
    with paceline.init(announce=None) as world:
        model = DDP(Net(), bucket_cap_mb=1e-4)
        early = model.report()
        assert model.plan is None
        assert early.times is None and early.exposed_s is None
        assert "no step has been timed yet" in str(early)
        for step in range(6):
            model.zero_grad()
            loss(model, world.rank, step).backward()
        found = model.report()
        assert model.plan == found.plan
        times = found.times
        return {
            "who": (found.rank, found.world_size, found.backend, found.num_steps),
            "bytes": [bucket.num_bytes for bucket in times.buckets],
            "planned": [found.plan.num_bytes, len(found.plan.buckets)],
            "buckets": [(b.ready_s, b.launch_s, b.done_s, b.waited_s) for b in times.buckets],
            "ends": (times.backward_s, times.over_s, found.exposed_s),
            "advice": found.advice,
            "text": str(found),
        }


def test_a_report_has_bucket_times_and_advice(job):
    for rank, found in enumerate(job(2, report)):
        assert found["who"] == (rank, 2, BACKEND, 6)
        model_bytes = sum(param.numel() * 4 for param in Net().parameters())
        assert found["planned"] == [model_bytes, len(found["bytes"])]
        assert sum(found["bytes"]) == model_bytes and len(found["bytes"]) > 1
        backward_s, over_s, exposed_s = found["ends"]
        assert 0 < backward_s <= over_s and exposed_s == over_s - backward_s
        for ready_s, launch_s, done_s, waited_s in found["buckets"]:
            assert 0 < ready_s <= launch_s <= done_s <= over_s
            assert 0 <= waited_s <= over_s
        launches = [launch_s for _, launch_s, _, _ in found["buckets"]]
        assert launches == sorted(launches)
        for word in (f"rank {rank} of 2", BACKEND, "6 synchronized steps", "ready", "exposed", found["advice"]):
            assert word in found["text"]
        assert found["advice"]


def wait_for_the_slow() -> None:
    with paceline.init(announce=None) as world:
        for options in REDUCERS:
            model = DDP(Net(), **options)
            for step in range(3):
                model.zero_grad()
                output = loss(model, world.rank, step)
                if step == 2 and world.rank == 1:
                    time.sleep(1.0)
                output.backward()
            report = model.report()
            waited_s = [bucket.waited_s for bucket in report.times.buckets]
            assert waited_s[0] > 0 or world.rank == 1, (options, waited_s)


def test_a_report_shows_the_wait_for_a_slow_rank(job):
    job(2, wait_for_the_slow)


def fail_everywhere(kind: str) -> weakref.ref[DDP]:
    model = DDP(nn.Embedding(5, 3, sparse=True), reducer="simple") if kind == "sparse" else DDP(Net())
    if kind == "hook":
        model.register_comm_hook(None, lambda state, bucket: {}["nothing"])
    with pytest.raises(KeyError if kind == "hook" else ConfigError):
        (model(torch.arange(3)) if kind == "sparse" else model(draw(0))).sum().backward()
    return weakref.ref(model)


def catch_errors() -> None:
    with paceline.init(announce=None):
        gc.disable()
        try:
            assert [kind for kind in ("sparse", "hook") if fail_everywhere(kind)() is not None] == []
        finally:
            gc.enable()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_on_every_rank_leaves_no_reference_cycle(job, ranks):
    job(ranks, catch_errors)


def alone() -> None:
    with paceline.init(announce=None):
        for reducer in REDUCERS:
            model = DDP(Net(), **reducer)
            for step in range(3):
                model.zero_grad()
                wanted = average_alone(model.module, functools.partial(loss, step=step), 1)
                loss(model, 0, step).backward()
                check_close(model, wanted, reducer)
            model.zero_grad()
            with pytest.raises(paceline.CollectiveError, match=r"right\.weight") as caught:
                model(draw(0), use="left").sum().backward()
            assert caught.value.code == "missing-gradient"
            gone = weakref.ref(model)
            gc.disable()
            del caught, model
            gc.enable()
            assert gone() is None  # the error left no reference cycle, which would keep the group open


def test_a_world_of_one_takes_the_same_path(job):
    job(1, alone)


def train_after_stop() -> bool:
    with paceline.init(announce=None) as world:
        model = DDP(Net())
        for step in range(3):
            loss(model, world.rank, step).backward()
            model.zero_grad()
        held = loss(model, world.rank, 3)
        model.stop()
        held.backward()
        loss(model, world.rank, 4).backward()
        mine = model.module.first.weight.grad.tolist()
        return world.share(mine)[0] != world.share(mine)[1]


def test_nothing_is_synchronized_after_stop(job):
    assert job(2, train_after_stop) == [True, True]
