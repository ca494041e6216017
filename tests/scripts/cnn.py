"""A CNN with BatchNorm, workers that load data, and epochs: torchrun --nproc-per-node 2 cnn.py"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60, help="over three epochs")
parser.add_argument("--workers", type=int, default=1)
parser.add_argument("--double", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()


def conv(channels_in, channels_out):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False), nn.BatchNorm2d(channels_out), nn.ReLU()
    )


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dtype = torch.float64 if args.double else torch.float32
    generator = torch.Generator().manual_seed(2)
    per_epoch = -(-args.steps // 3)
    images = torch.randn(per_epoch * 8 * world_size, 3, 16, 16, generator=generator, dtype=dtype)
    labels = torch.randint(0, 10, (len(images),), generator=generator)
    data = TensorDataset(images, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=args.workers)
    torch.manual_seed(0)
    parts = [conv(3, 16), conv(16, 32), nn.MaxPool2d(2), conv(32, 64), nn.AdaptiveAvgPool2d(1)]
    net = nn.Sequential(*parts, nn.Flatten(), nn.Linear(64, 10)).to(dtype)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            optimizer.step()
        schedule.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.10f}", flush=True)
    if rank == 0 and args.save:
        torch.save(net.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
