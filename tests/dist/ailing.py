"""A program with the problem named by its first argument: torchrun --nproc-per-node 2 ailing.py PROBLEM"""

import gc
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


def main(problem: str) -> None:
    torch.set_num_threads(4 if problem == "threads" else 1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    depth, width, size = {"optimizer": (16, 512, 4), "unused parameters": (300, 8, 8)}.get(problem, (6, 256, 64))
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    if problem == "buffers":
        net.register_buffer("table", torch.zeros(1 << 22))
    model = DistributedDataParallel(net, find_unused_parameters=problem == "unused parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=None if problem == "optimizer" else True)
    data = TensorDataset(torch.randint(1, 99, (60 * size, width)))
    if problem == "padding":
        data.tensors[0][:, width // 4 :] = 0
    if problem == "uneven batches":
        size *= 1 + 7 * dist.get_rank()
    kept = [[n] for n in range(2_000_000 if problem == "garbage collection" else 0)]
    for number, (inputs,) in enumerate(DataLoader(data, size, sampler=RandomSampler(data, True, 60 * size))):
        optimizer.zero_grad()
        model(inputs.float()).square().mean().backward()
        optimizer.step()
        if number % 4 == 3:
            if problem == "garbage collection":
                gc.collect()
            elif problem == "evaluation":
                model.eval()
                time.sleep(0.1)
                model.train()
            elif problem == "checkpoint" and dist.get_rank() == 0:
                torch.save([torch.zeros(1 << 24)], "/dev/null")
    del kept
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
