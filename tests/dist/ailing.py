"""A program with the ailment that its first argument names: torchrun --nproc-per-node 2 ailing.py AILMENT"""

import gc
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(ailment: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept = [[n] for n in range(2_000_000 if ailment == "garbage collection" else 0)]
    for number in range(60):
        optimizer.zero_grad()
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        if number % 4 == 3:
            if ailment == "garbage collection":
                gc.collect()
            elif ailment == "evaluation":
                model.eval()
                time.sleep(0.1)
                model.train()
            elif ailment == "checkpoint" and dist.get_rank() == 0:
                torch.save([torch.zeros(1 << 24)], "/dev/null")
    del kept
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
