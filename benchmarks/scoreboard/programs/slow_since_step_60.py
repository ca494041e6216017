"""Rank 1 becomes slow after 60 steps, as if its clock were throttled."""

from loop import Program, main, spin


class SlowSinceStep60(Program):
    title = "slow rank since step 60"
    causes = ("late rank",)
    culprit = 1
    num_steps = 0

    def find_loss(self, model, inputs, targets):
        self.num_steps += 1
        if self.num_steps > 60 and self.is_ailing_here:
            spin(15e-3)
        return super().find_loss(model, inputs, targets)


if __name__ == "__main__":
    main(SlowSinceStep60)
