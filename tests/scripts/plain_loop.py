"""A plain loop with DistributedDataParallel: torchrun --nproc-per-node 2 plain_loop.py"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--depth", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--bucket-cap-mb", type=float, default=None)
parser.add_argument("--decode-ms", type=float, default=0.0, help="what decoding a sample takes")
parser.add_argument("--slow-rank-ms", type=float, default=0.0, help="what else the last rank does in a step")
parser.add_argument("--double", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()
dtype = torch.float64 if args.double else torch.float32


class Samples(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, args.width, generator=generator, dtype=dtype)
        self.targets = torch.randint(0, 10, (count,), generator=generator)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if args.decode_ms:
            time.sleep(args.decode_ms / 1e3)
        return self.inputs[index], self.targets[index]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [layer for _ in range(args.depth) for layer in (nn.Linear(args.width, args.width), nn.ReLU())]
    net = nn.Sequential(*layers, nn.Linear(args.width, 10)).to(dtype)
    options = {} if args.bucket_cap_mb is None else {"bucket_cap_mb": args.bucket_cap_mb}
    model = DDP(net, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data = Samples(args.steps * args.batch_size * world_size)
    sampler = DistributedSampler(data, shuffle=True)
    for number, (inputs, targets) in enumerate(DataLoader(data, args.batch_size, sampler=sampler)):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if rank == world_size - 1 and args.slow_rank_ms:
            time.sleep(args.slow_rank_ms / 1e3)
        loss.backward()
        optimizer.step()
        if rank == 0 and number % 20 == 0:
            print(f"step {number} loss {loss.item():.10f}", flush=True)
    if rank == 0 and args.save:
        torch.save(net.state_dict(), args.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
