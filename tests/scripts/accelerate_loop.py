"""A loop with Accelerate, two ranks on a CPU: accelerate launch --multi_gpu --num_processes 2 accelerate_loop.py"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--double", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()

torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.accumulate)
dtype = torch.float64 if args.double else torch.float32
generator = torch.Generator().manual_seed(3)
count = args.steps * args.accumulate * 16 * accelerator.num_processes
inputs = torch.randn(count, 64, generator=generator, dtype=dtype)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to(dtype)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for number, (batch, targets) in enumerate(loader):
    with accelerator.accumulate(model):
        loss = nn.functional.mse_loss(model(batch), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if number % 40 == 0:
        accelerator.print(f"batch {number} loss {loss.item():.10f}", flush=True)
accelerator.wait_for_everyone()
if args.save:
    accelerator.save(accelerator.unwrap_model(model).state_dict(), args.save)
accelerator.end_training()
