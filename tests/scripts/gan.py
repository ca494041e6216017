"""A GAN: two models, two optimizers, each stepped once: torchrun --nproc-per-node 2 gan.py"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--double", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
dtype = torch.float64 if args.double else torch.float32
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)).to(dtype)
critic = nn.Sequential(nn.Linear(64, 192), nn.LeakyReLU(0.2), nn.Linear(192, 1)).to(dtype)
wrapped_generator, wrapped_critic = DDP(generator), DDP(critic)
of_generator = torch.optim.Adam(wrapped_generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_critic = torch.optim.Adam(wrapped_critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.functional.binary_cross_entropy_with_logits
noise = torch.Generator().manual_seed(10 + rank)
ones, zeros = torch.ones(32, 1, dtype=dtype), torch.zeros(32, 1, dtype=dtype)
for number in range(args.steps):
    real = torch.randn(32, 64, generator=noise, dtype=dtype)
    fake = wrapped_generator(torch.randn(32, 32, generator=noise, dtype=dtype))
    # Run the critic on both at once, in one forward of the wrapper.
    of_critic.zero_grad()
    loss_critic = bce(wrapped_critic(torch.cat([real, fake.detach()])), torch.cat([ones, zeros]))
    loss_critic.backward()
    of_critic.step()
    of_generator.zero_grad()
    for parameter in critic.parameters():
        parameter.requires_grad_(False)
    loss_generator = bce(critic(fake), ones)
    loss_generator.backward()
    for parameter in critic.parameters():
        parameter.requires_grad_(True)
    of_generator.step()
    if rank == 0 and number % 20 == 0:
        print(f"step {number} loss {loss_critic.item():.10f} {loss_generator.item():.10f}", flush=True)
if rank == 0 and args.save:
    torch.save({"generator": generator.state_dict(), "critic": critic.state_dict()}, args.save)
dist.destroy_process_group()
