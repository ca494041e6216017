"""Trains with fused AdamW and clipped gradients, and occasionally prints the loss."""

import sys

import torch
from loop import Program, main
from torch import nn


class HealthyAdam(Program):
    title = "healthy: fused AdamW with clipping"
    num_steps = 0

    def build_optimizer(self, net):
        return torch.optim.AdamW(net.parameters(), fused=True)

    def after_backward(self, model, loss):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.num_steps += 1
        if self.num_steps % 50 == 0 and self.rank == 0:
            print(f"step {self.num_steps}: loss {loss.item():.4f}", file=sys.stderr)


if __name__ == "__main__":
    main(HealthyAdam)
