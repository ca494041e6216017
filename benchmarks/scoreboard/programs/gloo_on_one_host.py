"""Sends 8 MiB of gradients with gloo, through sockets, between processes on the same host."""

from loop import Program, main


class GlooOnOneHost(Program):
    title = "gloo on one host"
    causes = ("backend",)
    width, batch = 512, 128

    def configure(self):
        self.backend = "shm" if self.cured else "gloo"


if __name__ == "__main__":
    main(GlooOnOneHost)
