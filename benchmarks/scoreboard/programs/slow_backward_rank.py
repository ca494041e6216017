"""Slows down an operator's backward on rank 1."""

import torch
from loop import Program, main, spin


class SlowBackwardRank(Program):
    title = "slow backward of an operator on one rank"
    causes = ("late rank",)
    culprit = 1

    def find_loss(self, model, inputs, targets):
        loss = super().find_loss(model, inputs, targets)
        return Slow.apply(loss) if self.is_ailing_here else loss


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        spin(12e-3)
        return gradient


if __name__ == "__main__":
    main(SlowBackwardRank)
