"""Clips gradients by the norm of each parameter, read on the host."""

from loop import Program, main
from torch import nn


class CudaClipping(Program):
    title = "clipping with .item() per parameter"
    causes = ("synchronization", "host")
    needs_cuda = True

    def configure(self):
        self.depth, self.width, self.batch = 60, 256, 8192

    def after_backward(self, model, loss):
        if self.cured:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            return
        norm = sum(parameter.grad.norm().item() ** 2 for parameter in model.parameters()) ** 0.5
        for parameter in model.parameters():
            parameter.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))


if __name__ == "__main__":
    main(CudaClipping)
