"""Reads every layer's mean activation on the host in every step."""

from loop import Program, main


class CudaItem(Program):
    title = ".item() after every layer"
    causes = ("synchronization", "host")
    needs_cuda = True

    def configure(self):
        self.depth, self.width, self.batch = 40, 256, 8192

    def build_model(self):
        net = super().build_model()
        if not self.cured:
            for layer in net:
                layer.register_forward_hook(self.watch)
        return net

    def watch(self, module, inputs, output):
        self.activation = float(output.mean())


if __name__ == "__main__":
    main(CudaItem)
