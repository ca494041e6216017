"""A large embedding with dense gradients, little to compute, on the fastest transport of one host."""

import torch
from loop import Program, main
from torch import nn


class NetworkBound(Program):
    title = "network-bound: large gradients, little compute"
    causes = ("network", "compress")
    backend = "shm"
    batch = 64

    def build_model(self):
        return nn.Sequential(nn.EmbeddingBag(60_000, 64), nn.Linear(64, 10))

    def build_batch(self, generator):
        inputs = torch.randint(0, 60_000, (self.batch, 16), generator=generator)
        return inputs, torch.randint(0, 10, (self.batch,), generator=generator)

    def wrap(self, net):
        model = super().wrap(net)
        if self.cured:
            import paceline

            model.register_comm_hook(*paceline.comm_hook("bf16", net))
        return model


if __name__ == "__main__":
    main(NetworkBound)
