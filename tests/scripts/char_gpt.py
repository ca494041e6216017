"""A small GPT on characters, with its own batches and schedule: torchrun --nproc-per-node 2 char_gpt.py"""

import argparse
import math
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--double", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()
batch_size, block_size, num_embd, num_head, num_layer = 8, 32, 64, 4, 2
accumulation, learning_rate, warmup = 2, 1e-3, 10
text = "data-parallel training averages the gradients of all ranks before each step. " * 60
characters = sorted(set(text))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(num_embd), nn.LayerNorm(num_embd)
        self.c_attn = nn.Linear(num_embd, 3 * num_embd)
        self.c_proj = nn.Linear(num_embd, num_embd)
        self.mlp = nn.Sequential(nn.Linear(num_embd, 4 * num_embd), nn.GELU(), nn.Linear(4 * num_embd, num_embd))

    def forward(self, x):
        size = x.shape
        q, k, v = (
            part.view(size[0], size[1], num_head, -1).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(num_embd, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(size))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(characters), num_embd), nn.Embedding(block_size, num_embd)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layer))
        self.ln_f = nn.LayerNorm(num_embd)
        self.lm_head = nn.Linear(num_embd, len(characters), bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


torch.set_num_threads(1)
init_process_group(backend="gloo")
rank = int(os.environ["RANK"])
encoded = torch.tensor([characters.index(c) for c in text])
torch.manual_seed(1337)
net = GPT().to(torch.float64 if args.double else torch.float32)
model = DDP(net)
decayed = [p for p in net.parameters() if p.dim() >= 2]
others = [p for p in net.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
places = torch.Generator().manual_seed(1337 + rank)


def get_batch():
    starts = torch.randint(len(encoded) - block_size, (batch_size,), generator=places)
    x = torch.stack([encoded[i : i + block_size] for i in starts])
    y = torch.stack([encoded[i + 1 : i + 1 + block_size] for i in starts])
    return x, y


x, y = get_batch()
for number in range(args.steps):
    share = min(1.0, (number + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * number / args.steps))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * share
    for part in range(accumulation):
        model.require_backward_grad_sync = part == accumulation - 1
        logits, loss = model(x, y)
        x, y = get_batch()
        (loss / accumulation).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if rank == 0 and number % 20 == 0:
        print(f"iter {number}: loss {loss.item():.10f}", flush=True)
if rank == 0 and args.save:
    torch.save(net.state_dict(), args.save)
destroy_process_group()
