"""Accumulates four micro-batches per step, and sends gradients only with the last one."""

import contextlib

from loop import Program, main


class HealthyAccumulation(Program):
    title = "healthy: gradient accumulation"

    def train_step(self, model, optimizer, inputs, targets):
        optimizer.zero_grad()
        for number, (some, their) in enumerate(zip(inputs.chunk(4), targets.chunk(4), strict=True)):
            with model.no_sync() if number < 3 else contextlib.nullcontext():
                self.find_loss(model, some, their).backward()
        optimizer.step()


if __name__ == "__main__":
    main(HealthyAccumulation)
