"""Two transformer layers."""

import torch
from loop import Program, main
from torch import nn


class HealthyAttention(Program):
    title = "healthy: attention"
    batch = 8

    def build_model(self):
        layer = nn.TransformerEncoderLayer(96, 4, 192, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(96 * 64, 10))

    def build_batch(self, generator):
        inputs = torch.randn(self.batch, 64, 96, generator=generator)
        return inputs, torch.randint(0, 10, (self.batch,), generator=generator)


if __name__ == "__main__":
    main(HealthyAttention)
