"""A multilayer perceptron that mostly computes, in bf16."""

import torch
from loop import Program, main


class HealthyCuda(Program):
    title = "healthy: multilayer perceptron on a GPU"
    needs_cuda = True

    def configure(self):
        self.loader_options = {"pin_memory": True}
        self.batch = 131_072

    def find_loss(self, model, inputs, targets):
        with torch.autocast("cuda", torch.bfloat16):
            return super().find_loss(model, inputs, targets)


if __name__ == "__main__":
    main(HealthyCuda)
