"""Launches 120 small layers separately."""

import torch
from loop import Program, main


class CudaLaunches(Program):
    title = "host-bound launches"
    causes = ("host", "launches")
    needs_cuda = True

    def configure(self):
        self.depth, self.width, self.batch = 120, 128, 512

    def build_model(self):
        net = super().build_model().to(self.device)
        return torch.compile(net, mode="reduce-overhead") if self.cured else net


if __name__ == "__main__":
    main(CudaLaunches)
