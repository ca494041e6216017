"""Run your own training loop on several ranks: wrap the model, and backward averages the gradients.

python examples/train_by_hand.py            # starts two ranks
torchrun --nproc-per-node 2 examples/train_by_hand.py
"""

import torch
from torch import nn

import paceline


def main() -> float:
    with paceline.init() as world:
        paceline.set_seed(1, per_rank=True)  # draws different data on each rank; the wrapper synchronizes the models
        net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1)).to(world.device)
        model = paceline.DDP(net, average="samples")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        rule = torch.arange(10.0, device=world.device) / 10
        # Rank 0 has one more batch than the others, and the last batch on every rank is smaller.
        with model.join():
            for size in [32] * (50 + (world.rank == 0)) + [7]:
                inputs = torch.randn(size, 10, device=world.device)
                loss = nn.functional.mse_loss(model(inputs).squeeze(1), inputs @ rule)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if world.rank == 0:
            print(f"loss {loss.item():.4f} after training on {world.world_size} ranks")
            print(model.report())
        return loss.item()


if __name__ == "__main__":
    paceline.run_ranks(main, 2)  # under torchrun, this runs in the launched world
