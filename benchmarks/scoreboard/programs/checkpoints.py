"""Rank 0 saves 50 MB after every fifth step, and the other rank waits."""

import os
import tempfile

import torch
from loop import Program, main


class Checkpoints(Program):
    title = "checkpoint every 5 steps"
    causes = ("checkpoint",)
    culprit = 0

    def configure(self):
        self.state = torch.zeros(12_500_000)

    def after_step(self, number, model):
        if number % 5 == 4 and self.is_ailing_here:
            with tempfile.NamedTemporaryFile() as file:
                torch.save({"model": model.state_dict(), "state": self.state}, file)
                os.fsync(file.fileno())


if __name__ == "__main__":
    main(Checkpoints)
