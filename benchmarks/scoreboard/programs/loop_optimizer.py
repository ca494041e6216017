"""Adam updates 160 tensors one by one in a Python loop."""

import torch
from loop import Program, main


class LoopOptimizer(Program):
    title = "optimizer loops over its tensors"
    causes = ("optimizer",)
    width, depth, batch = 64, 80, 512

    def build_optimizer(self, net):
        options = {"fused": True} if self.cured else {"foreach": False, "amsgrad": False}
        return torch.optim.Adam(net.parameters(), **options)


if __name__ == "__main__":
    main(LoopOptimizer)
