"""Evaluates 10 batches after every fifth step."""

import torch
from loop import Program, main


class Evaluation(Program):
    title = "evaluation every 5 steps"
    causes = ("evaluation",)

    def after_step(self, number, model):
        if number % 5 == 4 and not self.cured:
            model.eval()
            with torch.no_grad():
                for _ in range(10):
                    model.module(torch.randn(self.batch, self.width))
            model.train()


if __name__ == "__main__":
    main(Evaluation)
