"""A small convolutional network with BatchNorm."""

import torch
from loop import Program, main
from torch import nn


class HealthyConvolutions(Program):
    title = "healthy: convolutions"
    batch = 32

    def build_model(self):
        first, second = (nn.Conv2d(channels, 32, 3, padding=1) for channels in (3, 32))
        pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
        return nn.Sequential(first, nn.BatchNorm2d(32), nn.ReLU(), second, nn.ReLU(), *pooled)

    def build_batch(self, generator):
        inputs = torch.randn(self.batch, 3, 32, 32, generator=generator)
        return inputs, torch.randint(0, 10, (self.batch,), generator=generator)


if __name__ == "__main__":
    main(HealthyConvolutions)
