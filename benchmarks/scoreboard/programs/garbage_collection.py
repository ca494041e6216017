"""Calls the garbage collector in every fourth step, with 400,000 objects alive."""

import gc

from loop import Program, main


class GarbageCollection(Program):
    title = "garbage collection pauses"
    causes = ("garbage collection",)

    def configure(self):
        self.alive = [[number] for number in range(400_000)]

    def after_step(self, number, model):
        if number % 4 == 3 and not self.cured:
            gc.collect()


if __name__ == "__main__":
    main(GarbageCollection)
