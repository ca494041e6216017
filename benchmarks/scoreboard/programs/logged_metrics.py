"""Averages ten metrics over the ranks, one by one, and prints them in every step."""

import os
import sys

import torch.distributed as dist
from loop import Program, main


class LoggedMetrics(Program):
    title = "metrics reduced and printed in every step"
    causes = ("collectives",)
    batch = 256

    def after_backward(self, model, loss):
        if not self.cured:
            for number in range(10):
                metric = loss.detach() * number
                dist.all_reduce(metric)
                print(f"metric {number}: {metric.item():.4f}", file=sys.stderr if metric.isnan() else LOG)


LOG = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process


if __name__ == "__main__":
    main(LoggedMetrics)
