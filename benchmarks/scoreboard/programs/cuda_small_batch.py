"""Trains with 64 samples per step, which leave most of a GPU idle."""

from loop import Program, main


class CudaSmallBatch(Program):
    title = "small batch on a GPU"
    causes = ("batch", "host")
    needs_cuda = True

    def configure(self):
        self.batch = 4096 if self.cured else 64


if __name__ == "__main__":
    main(CudaSmallBatch)
