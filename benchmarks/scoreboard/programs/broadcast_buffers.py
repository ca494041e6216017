"""Rank 0 sends 8 MiB of constant buffers before every forward pass."""

import torch
from loop import Program, main


class BroadcastBuffers(Program):
    title = "constant buffers broadcast in every step"
    causes = ("buffers",)
    batch = 256

    def configure(self):
        self.wrapper_options = {"broadcast_buffers": not self.cured}

    def build_model(self):
        net = super().build_model()
        net.register_buffer("table", torch.ones(2 * 1024, 1024))
        return net


if __name__ == "__main__":
    main(BroadcastBuffers)
