"""The smallest Paceline program: open a world, run one all-reduce, and close it.

python examples/allreduce_by_hand.py            # starts two ranks
torchrun --nproc-per-node 2 examples/allreduce_by_hand.py
"""

import torch
import torch.distributed as dist

import paceline


def main() -> float:
    with paceline.init() as world:
        vector = torch.full((1000,), float(world.rank + 1), device=world.device)
        dist.all_reduce(vector)
        if world.rank == 0:
            print(f"the sum over {world.world_size} ranks is {vector[0]:g}")
        return float(vector[0])


if __name__ == "__main__":
    paceline.run_ranks(main, 2)  # under torchrun, this runs in the launched world
