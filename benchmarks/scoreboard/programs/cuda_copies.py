"""Copies batches from pageable memory, without overlap."""

from loop import Program, main


class CudaCopies(Program):
    title = "copies from pageable memory"
    causes = ("copies",)
    needs_cuda = True

    def configure(self):
        self.loader_options = {"pin_memory": self.cured}

    def build_batch(self, generator):
        inputs, targets = super().build_batch(generator)
        return inputs.repeat(1, 4), targets

    def find_loss(self, model, inputs, targets):
        return super().find_loss(model, inputs[:, : self.width], targets)


if __name__ == "__main__":
    main(CudaCopies)
