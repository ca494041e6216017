"""A typical program for gloo under torchrun, without Paceline: `program_for_gloo.py BACKEND`."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(model: nn.Module, ranks: range) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        batches = [torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
        model(torch.cat(batches)).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 5))


dist.init_process_group(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
found = train(DistributedDataParallel(build(rank)), range(rank, rank + 1))
for one, other in zip(found, train(build(0), range(size)), strict=True):
    torch.testing.assert_close(one, other)

everyone = [None] * size
dist.all_gather_object(everyone, f"rank {rank}")
assert everyone == [f"rank {r}" for r in range(size)]
received = [dist.get_backend(), size] if rank == 0 else [None, None]
dist.broadcast_object_list(received, src=0)
assert received == [sys.argv[1].split(":")[-1], size]
pair = dist.new_group([0, 1])
total = torch.ones(3)
dist.all_reduce(total, group=pair)
assert total.tolist() == [2.0] * 3
dist.destroy_process_group(pair)
dist.monitored_barrier()
dist.barrier()
dist.destroy_process_group()
print("all is well" if "paceline.transport.group" in sys.modules else "Paceline was not used", flush=True)
