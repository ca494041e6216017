"""Train your own model on several ranks and see the cost of communication."""

import torch
from torch import nn

import paceline


def train():
    with paceline.init() as world:  # joins torchrun, Slurm or mpirun; otherwise one rank
        net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(world.device)
        model = paceline.DDP(net)  # replaces DistributedDataParallel
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            x = torch.randn(32, 10, device=world.device)
            model(x).square().mean().backward()  # averages gradients over all ranks
            optimizer.step()
            optimizer.zero_grad()
        if world.rank == 0:
            print(model.report())  # shows where step time goes


if __name__ == "__main__":
    paceline.run_ranks(train, 2)  # starts 2 local ranks, or uses those of torchrun
