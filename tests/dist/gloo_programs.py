"""Programs written for gloo. They do not know their backend; each returns its results.

`test_transport_torch` runs each on gloo and on paceline, and compares.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

_ERRORS = (ValueError, TypeError, RuntimeError)


def numbers(size: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ between ranks and are exact in every type: summation order does not matter."""
    return (torch.arange(size) % 5 + dist.get_rank() + 1).to(dtype)


def outcome(call: Callable[[], Any]) -> Any:
    """The result of a call, or the type of the error it raises."""
    try:
        return call()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"raised {next(kind.__name__ for kind in _ERRORS if isinstance(error, kind))}"


def build_model() -> nn.Module:
    torch.manual_seed(dist.get_rank())  # differs on every rank, to detect a missing broadcast
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[torch.Tensor]:
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
    return [value.detach().clone() for value in model.state_dict().values()]


# -- training ----------------------------------------------------------------------------------------------------------


def ddp() -> Any:
    found = []
    for options in ({}, {"bucket_cap_mb": 1e-4}, {"gradient_as_bucket_view": True}, {"static_graph": True},
                    {"find_unused_parameters": True}):  # fmt: skip
        model = DistributedDataParallel(build_model(), **options)
        found += train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return found


def ddp_with_hooks() -> Any:
    # Without PowerSGD: its callbacks hold the group, and gloo aborts if its own thread is the last to release it.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    found = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        model = DistributedDataParallel(build_model())
        model.register_comm_hook(None, hook)
        found += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return found


def ddp_with_built_in_hooks() -> Any:
    found = []
    for name in ("ALLREDUCE", "FP16_COMPRESS"):
        model = DistributedDataParallel(build_model())
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
        found += train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return found


def compiled_ddp() -> Any:
    torch._dynamo.reset()
    model = DistributedDataParallel(build_model())
    compiled = torch.compile(model, backend="aot_eager")
    return train(compiled, torch.optim.SGD(model.parameters(), lr=0.1))


def compiled_step() -> Any:
    """A compiled step with its own reduction: forward, backward, all-reduce, update."""
    torch._dynamo.reset()
    torch.manual_seed(4)
    model, size = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DistributedDataParallel(nn.Linear(8, 4))

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            param.grad.div_(size)
        optimizer.step()
        optimizer.zero_grad()
        wrapped(batch).sum().backward()  # torch's C++ code calls the group
        mean = loss.detach().clone()
        dist.broadcast(mean, 0)
        return mean

    compiled = torch.compile(step, backend="aot_eager")
    found = []
    for number in range(3):
        torch.manual_seed(100 * number + dist.get_rank())
        found.append(compiled(torch.randn(6, 8)))
    return [*found, *(param.detach().clone() for param in model.parameters()), wrapped.module.weight.grad]


def ddp_with_uneven_inputs() -> Any:
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + 2 * dist.get_rank()):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(step))).sum().backward()
            optimizer.step()
    return list(model.state_dict().values())


def zero_redundancy() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(build_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    found = train(model, optimizer)
    optimizer.consolidate_state_dict(0)
    return found


def fully_shard() -> Any:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    dist_mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=dist_mesh)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return [param.full_tensor() for param in model.parameters()]


def checkpoint() -> Any:
    import torch.distributed.checkpoint as dcp

    model = build_model()
    with tempfile.TemporaryDirectory() as mine:
        place = [mine]
        dist.broadcast_object_list(place)
        dcp.save(copy.deepcopy(model.state_dict()), checkpoint_id=place[0])
        state = model.state_dict()
        dcp.load(state, checkpoint_id=place[0])
        dist.barrier()
    return list(state.values())


# -- collectives -------------------------------------------------------------------------------------------------------


def objects() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (10 ** (rank + 2))})
    received: list[Any] = ["from the last", {1, 2}, None] if rank == size - 1 else [None] * 3
    dist.broadcast_object_list(received, src=size - 1)
    collected: Any = [None] * size if rank == 0 else None
    dist.gather_object(("mine", rank), collected, dst=0)
    given: list[Any] = [None]
    dist.scatter_object_list(given, [f"to {r}" for r in range(size)] if rank == 1 else None, src=1)
    return everyone, received, collected, given


def reductions() -> Any:
    """The dtypes that can be reduced, which may differ between backends."""
    found = {}
    for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.int8,
                      torch.uint8):  # fmt: skip
            value = numbers(5, dtype)
            if outcome(lambda value=value, op=op: dist.all_reduce(value, getattr(dist.ReduceOp, op))) is None:
                found[op, dtype] = value
    return found


def rooted() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    value = numbers()
    dist.reduce(value, dst=1)
    parts = [torch.zeros(6) for _ in range(size)] if rank == 0 else None
    dist.gather(numbers(), parts, dst=0)
    mine = torch.zeros(6)
    dist.scatter(mine, [torch.full((6,), float(r)) for r in range(size)] if rank == 1 else None, src=1)
    return value if rank == 1 else None, parts, mine


def all_to_all() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    outputs = [torch.zeros(3) for _ in range(size)]
    listed = outcome(lambda: dist.all_to_all(outputs, [torch.full((3,), 10.0 * rank + r) for r in range(size)]))
    single, into = numbers(2 * size), torch.zeros(2 * size)
    dist.all_to_all_single(into, single)
    return listed, outputs, into


def point_to_point() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    got, batched, anyone = torch.zeros(6), torch.zeros(6), torch.zeros(2)
    sending = dist.isend(numbers(), after)
    dist.irecv(got, before).wait()
    sending.wait()
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, numbers(), before), dist.P2POp(dist.irecv, batched, after)]
    ):
        work.wait()
    senders = {dist.recv(anyone) for _ in range(size - 1)} if rank == 0 else {dist.send(torch.ones(2), 0)}
    return got, batched, anyone, senders


def gathering() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    listed = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(listed, numbers().view(2, 3))
    flat, shard, scattered = torch.zeros(6 * size), torch.zeros(3), torch.zeros(2)
    dist.all_gather_into_tensor(flat, numbers())
    dist.reduce_scatter_tensor(shard, numbers(3 * size))
    dist.reduce_scatter(scattered, [torch.full((2,), float(r + rank)) for r in range(size)])
    newer = []
    for name in ("all_gather_single", "reduce_scatter_single"):
        if hasattr(dist, name):
            into = torch.zeros(6 * size) if "gather" in name else torch.zeros(3)
            getattr(dist, name)(into, numbers() if "gather" in name else numbers(3 * size))
            newer.append(into)
    return listed, flat, shard, scattered, newer


def asynchronous() -> Any:
    values = [numbers(size) for size in (1, 1000, 100_000) for _ in range(5)]
    works = [dist.all_reduce(value, async_op=True) for value in values]
    doubled = dist.all_reduce(numbers(), async_op=True).get_future().then(lambda future: future.value()[0] * 2)
    received = numbers()
    telling = dist.broadcast(received, 1, async_op=True)
    parts = [torch.zeros(6) for _ in range(dist.get_world_size())]
    gathering = dist.all_gather(parts, numbers(), async_op=True)
    into = torch.zeros(6 * dist.get_world_size())
    waits = [work.wait() for work in (*works, telling, gathering, dist.barrier(async_op=True))]
    dist.all_gather_into_tensor(into, numbers(), async_op=True).get_future().wait()
    done = all(work.is_completed() for work in works)
    return [value.sum() for value in values], doubled.wait(), received, parts, into, all(waits), done


def coalesced() -> Any:
    size = dist.get_world_size()
    values = [numbers(4), numbers(7), numbers(300)]

    def reduce_together() -> None:
        with dist._coalescing_manager():
            for value in values:
                dist.all_reduce(value)

    parts = [torch.zeros(size * 4), torch.zeros(size * 7)]

    def gather_together() -> None:
        with dist._coalescing_manager(async_ops=True) as together:
            for part, count in zip(parts, (4, 7), strict=True):
                dist.all_gather_into_tensor(part, numbers(count))
        together.wait()

    shards = [torch.zeros(4), torch.zeros(7)]

    def scatter_together() -> None:
        with dist._coalescing_manager():
            for shard, count in zip(shards, (4, 7), strict=True):
                dist.reduce_scatter_tensor(shard, numbers(size * count))

    return [outcome(call) for call in (reduce_together, gather_together, scatter_together)], values, parts, shards


def functional() -> Any:
    import torch.distributed._functional_collectives as fc

    everyone, size = list(range(dist.get_world_size())), dist.get_world_size()
    return [
        part + 0
        for part in (
            fc.all_reduce(numbers(), "sum", everyone),
            fc.all_reduce(numbers(), "avg", everyone),
            fc.all_gather_tensor(numbers(), 0, everyone),
            fc.reduce_scatter_tensor(numbers(size * 4), "sum", 0, everyone),
            fc.broadcast(numbers(), 1, everyone),
            *fc.all_reduce_coalesced([numbers(3), numbers(4)], "sum", everyone),
            *fc.all_gather_into_tensor_coalesced([numbers(3), numbers(4)], everyone),
            fc.all_to_all_single(numbers(size * 2), None, None, everyone),
        )
    ]


# -- tensors of every kind ---------------------------------------------------------------------------------------------


def kinds() -> Any:
    found = []
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.complex64, torch.complex128, torch.float16,
                  torch.bfloat16, torch.float64):  # fmt: skip
        value, parts = numbers(5, dtype), [torch.zeros(5, dtype=dtype) for _ in range(dist.get_world_size())]
        into = torch.zeros(5 * dist.get_world_size(), dtype=dtype)
        calls = {
            "broadcast": lambda value=value: dist.broadcast(value, 1),
            "gather": lambda parts=parts, dtype=dtype: dist.all_gather(parts, numbers(5, dtype)),
            "into": lambda into=into, dtype=dtype: dist.all_gather_into_tensor(into, numbers(5, dtype)),
        }
        found.append((dtype, {name: outcome(call) for name, call in calls.items()}, value, parts, into))
    complex_sum = numbers(4, torch.complex64)
    return found, outcome(lambda: dist.all_reduce(complex_sum)), complex_sum


def empty() -> Any:
    size = dist.get_world_size()
    nothing, shaped, none = torch.zeros(0), torch.zeros(2, 0, 3), torch.zeros(0)
    parts = [torch.zeros(0) for _ in range(size)]
    return [
        outcome(call)
        for call in (
            lambda: dist.all_reduce(nothing),
            lambda: dist.all_reduce(shaped),
            lambda: dist.broadcast(nothing, 1),
            lambda: dist.all_gather(parts, nothing),
            lambda: dist.all_gather_into_tensor(none, nothing),
            lambda: dist.reduce_scatter_tensor(none, nothing),
        )
    ], dist.all_reduce(torch.ones(1))


def scattered_in_memory() -> Any:
    """Non-contiguous tensors."""
    size = dist.get_world_size()

    def turned(rows: int = 3) -> torch.Tensor:
        return numbers(4 * rows).view(4, rows).t()

    reduced, received = turned(), turned()
    parts = [torch.zeros(4, 3).t() for _ in range(size)]
    plain_parts = [torch.zeros(3, 4) for _ in range(size)]
    found = {
        "reduce": outcome(lambda: dist.all_reduce(reduced)),
        "broadcast": outcome(lambda: dist.broadcast(received, 1)),
        "gather": outcome(lambda: dist.all_gather(plain_parts, turned())),
        "into": outcome(lambda: dist.all_gather(parts, turned().contiguous())),
        "flat": outcome(lambda: dist.all_gather_into_tensor(torch.zeros(3 * size, 4), turned())),
        "scatter": outcome(lambda: dist.reduce_scatter_tensor(torch.zeros(3, 4), turned(3 * size))),
    }
    return found, reduced, received, parts, plain_parts


# -- groups ------------------------------------------------------------------------------------------------------------


def groups() -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([first, first + 1]) for first in range(0, size - 1, 2)]
    backwards, alone = dist.new_group(list(reversed(range(size)))), dist.new_group([0])
    value, other, single = numbers(), numbers(), numbers()
    mine = next((pair for pair in pairs if dist.get_rank(pair) >= 0), None)
    if mine is not None:
        dist.all_reduce(value, group=mine)
        dist.broadcast(other, dist.get_global_rank(mine, 1), group=mine)
        everyone: list[Any] = [None] * dist.get_world_size(mine)
        dist.all_gather_object(everyone, rank, group=mine)
        dist.destroy_process_group(mine)
    if rank == 0:
        dist.all_reduce(single, group=alone)
    across = [torch.zeros(6) for _ in range(size)]
    dist.all_gather(across, numbers(), group=backwards)
    dist.barrier(group=backwards)
    dist.monitored_barrier(group=backwards, timeout=timedelta(seconds=30), wait_all_ranks=True)
    total = numbers()
    dist.all_reduce(total)
    return value, other, everyone if mine is not None else None, single, across, total


def meshes() -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("row", "column"))
    value = numbers()
    dist.all_reduce(value, group=mesh.get_group("column"))
    table = torch.arange(float(size * 6)).view(size * 2, 3)
    sharded = distribute_tensor(table, mesh["column"], [Shard(0)])
    product = (sharded * 2).redistribute(placements=[Replicate()]).to_local()
    return value, sharded.to_local(), product, (sharded.sum() + 0).full_tensor()


def reopened() -> Any:
    """Close and reopen the world, each time at a new rendezvous."""
    backend, rank, size = dist.get_backend(), dist.get_rank(), dist.get_world_size()
    with tempfile.TemporaryDirectory() as mine:
        place, found = [mine], []
        dist.broadcast_object_list(place)
        for number in range(2):
            dist.destroy_process_group()
            dist.init_process_group(backend, f"file://{place[0]}/{number}", rank=rank, world_size=size)
            found.append(dist.all_reduce(total := numbers()) or total)
            dist.barrier()
    return found
