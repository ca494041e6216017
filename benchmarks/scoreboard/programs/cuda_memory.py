"""Runs close to the memory limit, where the allocator frees and requests memory in every step."""

import torch
from loop import Program, main


class CudaMemory(Program):
    title = "memory near the limit"
    causes = ("memory",)
    needs_cuda = True

    def find_loss(self, model, inputs, targets):
        if not self.cured:
            torch.cuda.empty_cache()
        return super().find_loss(model, inputs, targets)


if __name__ == "__main__":
    main(CudaMemory)
