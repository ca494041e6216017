"""A training job with the problem named by the environment variable PLANTED, if any.

For `paceline train --model planted_job.py:build --data planted_job.py:load`, and with torch's wrapper as a program:
`torchrun --nproc-per-node 2 planted_job.py`.
"""

import itertools
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from paceline.plan import Gradient, plan_like_torch

PLANTED = os.environ.get("PLANTED", "nothing")
BATCH_SIZE, ROWS, WIDTH = 1 if PLANTED == "batch" else 32, 40_000 if PLANTED == "network" else 1, 128
TOKENS = {"batch": 1, "buckets": 8, "data": 8, "late rank": 8}.get(PLANTED, 64)
# Layers are wide for a batch of one, and each bad bucket is one of many gradients.
WIDE, DEPTH = {"batch": (1024, 5), "buckets": (WIDTH, 48)}.get(PLANTED, (WIDTH, 8))
CAP_MB = 0.001 if PLANTED == "buckets" else 25


class Sentences(Dataset):
    def __init__(self):
        self.tokens = torch.randint(64, (512, TOKENS), generator=torch.Generator().manual_seed(0))
        self.samples = list(zip(self.tokens, self.tokens.sum(dim=1) % 8, strict=True))

    def __len__(self):
        return 1 << 16

    def __getitem__(self, index):
        if PLANTED == "data":
            time.sleep(0.002)
        return self.samples[index % 512]


class Net(nn.Module):
    """Long arithmetic on few parameters; the gradient of the offsets, the last one, has 20 MB when a problem is
    planted."""

    def __init__(self):
        super().__init__()
        self.offsets, self.table = nn.Parameter(torch.zeros(ROWS, WIDTH)), nn.Embedding(64, WIDTH)
        sizes = [WIDTH, *[WIDE] * (DEPTH - 1), WIDTH]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(sizes))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, tokens):
        if PLANTED == "late rank" and os.environ["RANK"] == "1":
            time.sleep(0.05)
        found = self.table(tokens) + self.offsets[0]
        for layer in self.layers:
            found = layer(found).relu()
        return self.head(found.mean(dim=1))


def build(form):
    return Net()


def save_plan(path):
    """One bucket per gradient."""
    found = [Gradient(name, 4 * one.numel(), shape=tuple(one.shape)) for name, one in Net().named_parameters()]
    path.write_text(plan_like_torch(found, reversed(range(len(found))), [1]).to_json())


def load():
    return DataLoader(Sentences(), BATCH_SIZE, shuffle=True)


def main():
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=CAP_MB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = Sentences()
    for tokens, targets in DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), targets).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
