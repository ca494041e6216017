"""Rank 0 computes a statistic in every forward pass."""

import torch
from loop import Program, main, spin


class SlowForwardRank(Program):
    title = "slow forward on one rank"
    causes = ("late rank",)
    culprit = 0

    def find_loss(self, model, inputs, targets):
        if self.is_ailing_here:
            torch.linalg.svdvals(inputs[:160, :])
            spin(6e-3)
        return super().find_loss(model, inputs, targets)


if __name__ == "__main__":
    main(SlowForwardRank)
