"""Pads sequences of up to 32 tokens to 128."""

import torch
from loop import Program, main
from torch import nn


class Padding(Program):
    title = "padding"
    causes = ("padding",)
    batch, depth = 32, 4

    def build_model(self):
        return nn.Sequential(nn.Embedding(1000, self.width, padding_idx=0), super().build_model())

    def build_batch(self, generator):
        inputs = torch.zeros(self.batch, 32 if self.cured else 128, dtype=torch.long)
        for row, length in zip(inputs, torch.randint(16, 33, (self.batch,), generator=generator), strict=True):
            row[:length] = torch.randint(1, 1000, (int(length),), generator=generator)
        return inputs, torch.randint(0, 10, (self.batch,), generator=generator)

    def find_loss(self, model, inputs, targets):
        return nn.functional.cross_entropy(model(inputs).mean(1), targets)


if __name__ == "__main__":
    main(Padding)
