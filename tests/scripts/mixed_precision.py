"""Autocast and a GradScaler, ranks started by the script itself: python mixed_precision.py"""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--world-size", type=int, default=2)
parser.add_argument("--double", action="store_true", help="no autocast, in float64")
parser.add_argument("--save", default="")


def train(rank, port, args):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=args.world_size)
    torch.manual_seed(0)
    dtype = torch.float64 if args.double else torch.float32
    net = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)).to(dtype)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=not args.double)
    generator = torch.Generator().manual_seed(rank)
    for number in range(args.steps):
        inputs = torch.randn(32, 128, generator=generator, dtype=dtype)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not args.double):
            loss = model(inputs).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if rank == 0 and number % 20 == 0:
            print(f"step {number} loss {loss.item():.10f}", flush=True)
    if rank == 0 and args.save:
        torch.save(net.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        free = found.getsockname()[1]
    options = parser.parse_args()
    mp.spawn(train, (free, options), nprocs=options.world_size)
