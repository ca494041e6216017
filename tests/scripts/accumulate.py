"""Gradients of several micro-batches in one step, with no_sync: torchrun --nproc-per-node 2 accumulate.py"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--micro-batches", type=int, default=3)
parser.add_argument("--double", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
dtype = torch.float64 if args.double else torch.float32
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(128, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 8)).to(dtype)
model = DistributedDataParallel(net, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(rank)
for number in range(args.steps):
    total = 0.0
    for part in range(args.micro_batches):
        inputs = torch.randn(16, 128, generator=generator, dtype=dtype)
        is_last = part == args.micro_batches - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = model(inputs).square().mean() / args.micro_batches
            loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and number % 20 == 0:
        print(f"step {number} loss {total:.10f}", flush=True)
if rank == 0 and args.save:
    torch.save(net.state_dict(), args.save)
dist.destroy_process_group()
