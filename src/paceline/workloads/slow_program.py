"""The slow program for `paceline demo`: plain torch on two ranks, with an expensive mistake in one line."""

import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(32)), nn.Linear(64, 10))
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)  # the mistake: one message per layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(400):
        inputs = torch.randn(64, 64)
        labels = torch.randint(10, (64,))
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        # Forking avoids importing torch again in each rank.
        multiprocessing.start_processes(train, (f"file://{folder}/store",), nprocs=2, start_method="fork")
