"""Waits for the other rank after each phase of a step."""

import torch.distributed as dist
from loop import Program, main


class Barriers(Program):
    title = "barriers in every step"
    causes = ("collectives",)
    batch = 256

    def find_loss(self, model, inputs, targets):
        loss = super().find_loss(model, inputs, targets)
        self.wait()
        return loss

    def after_backward(self, model, loss):
        self.wait()

    def after_step(self, number, model):
        self.wait()

    def wait(self):
        if not self.cured:
            dist.barrier()


if __name__ == "__main__":
    main(Barriers)
