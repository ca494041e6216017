"""Trains with 16 samples per step, where messages take longer than computation."""

from loop import Program, main


class SmallBatch(Program):
    title = "small batch"
    causes = ("batch", "accumulate")
    backend = "shm"
    width, depth = 192, 16

    def configure(self):
        self.batch = 64 if self.cured else 16


if __name__ == "__main__":
    main(SmallBatch)
