"""A compiled model: torchrun --nproc-per-node 2 compiled.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--compiler", default="inductor")
parser.add_argument("--double", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
dtype = torch.float64 if args.double else torch.float32
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16)).to(dtype)
model = torch.compile(DistributedDataParallel(net), backend=args.compiler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(rank)
for number in range(args.steps):
    inputs = torch.randn(32, 128, generator=generator, dtype=dtype)
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and number % 20 == 0:
        print(f"step {number} loss {loss.item():.10f}", flush=True)
if rank == 0 and args.save:
    torch.save(net.state_dict(), args.save)
dist.destroy_process_group()
