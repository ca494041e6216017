"""Trains a large embedding with dense gradients and little compute, on the fastest transport within a host.

The fix is a batch four times larger: on this transport, bf16 costs more than it saves.
"""

import torch
from loop import Program, main
from torch import nn


class NetworkBound(Program):
    title = "network-bound: large gradients, little compute"
    causes = ("network", "batch", "accumulate", "compress")
    backend = "shm"

    def configure(self):
        self.batch = 256 if self.cured else 64

    def build_model(self):
        return nn.Sequential(nn.EmbeddingBag(60_000, 64), nn.Linear(64, 10))

    def build_batch(self, generator):
        inputs = torch.randint(0, 60_000, (self.batch, 16), generator=generator)
        return inputs, torch.randint(0, 10, (self.batch,), generator=generator)


if __name__ == "__main__":
    main(NetworkBound)
