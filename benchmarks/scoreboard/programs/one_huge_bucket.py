"""Sends all gradients in one bucket, after the last one is ready. An emulated accelerator leaves the core free."""

import time

import torch
from loop import Program, main
from torch import nn


class OneHugeBucket(Program):
    title = "one huge bucket"
    causes = ("buckets",)
    backend = "shm"  # on gloo, another transport within the host would gain as much
    width, depth, batch = 1024, 12, 32

    def configure(self):
        self.wrapper_options = {"bucket_cap_mb": 5 if self.cured else 1000}

    def build_model(self):
        layers = [layer for _ in range(self.depth) for layer in (nn.Linear(self.width, self.width), Emulated())]
        return nn.Sequential(*layers, nn.Linear(self.width, 10))


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        time.sleep(1e-3)
        return inputs.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(2e-3)
        return gradient


class Emulated(nn.Module):
    def forward(self, inputs):
        return Wait.apply(inputs)


if __name__ == "__main__":
    main(OneHugeBucket)
