"""Delays a random rank by 12 ms in every step."""

import random

from loop import Program, main, spin


class RotatingRank(Program):
    title = "slow rank that changes"
    causes = ("changing late rank", "late rank")

    def configure(self):
        self.draw = random.Random(0)  # the same on both ranks

    def find_loss(self, model, inputs, targets):
        if self.draw.randrange(2) == self.rank and not self.cured:
            spin(12e-3)
        return super().find_loss(model, inputs, targets)


if __name__ == "__main__":
    main(RotatingRank)
