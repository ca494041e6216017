"""Multiplies matrices in fp32 without tensor cores."""

import torch
from loop import Program, main


class CudaFullPrecision(Program):
    title = "arithmetic without tensor cores"
    causes = ("tensor cores",)
    needs_cuda = True

    def find_loss(self, model, inputs, targets):
        with torch.autocast("cuda", torch.bfloat16, enabled=self.cured):
            return super().find_loss(model, inputs, targets)


if __name__ == "__main__":
    main(CudaFullPrecision)
