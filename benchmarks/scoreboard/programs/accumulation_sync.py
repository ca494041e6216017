"""Sends gradients after each of four micro-batches instead of once per step."""

import contextlib

from loop import Program, main


class AccumulationSync(Program):
    title = "gradient accumulation without no_sync"
    causes = ("accumulate", "batch")
    width, batch = 256, 128

    def train_step(self, model, optimizer, inputs, targets):
        optimizer.zero_grad()
        for number, (some, their) in enumerate(zip(inputs.chunk(4), targets.chunk(4), strict=True)):
            with model.no_sync() if self.cured and number < 3 else contextlib.nullcontext():
                self.find_loss(model, some, their).backward()
        optimizer.step()


if __name__ == "__main__":
    main(AccumulationSync)
