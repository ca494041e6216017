"""A loop with Lightning Fabric, which starts the ranks itself: python fabric_loop.py"""

import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--double", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()


def main():
    torch.set_num_threads(1)
    precision = "64-true" if args.double else "32-true"
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp", precision=precision)
    fabric.launch()
    fabric.seed_everything(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    count = args.steps * args.accumulate * 16 * fabric.world_size
    inputs = torch.randn(count, 64, generator=torch.Generator().manual_seed(6))
    inputs = inputs.double() if args.double else inputs
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16))
    for number, (batch, targets) in enumerate(loader):
        is_last = (number + 1) % args.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.mse_loss(model(batch), targets)
            fabric.backward(loss / args.accumulate)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        if number % 40 == 0:
            fabric.print(f"batch {number} loss {loss.item():.10f}", flush=True)
    if args.save and fabric.global_rank == 0:
        torch.save(net.state_dict(), args.save)


if __name__ == "__main__":
    main()
