"""Searches 200 layers for unused parameters in every step, although all are used."""

from loop import Program, main


class UnusedParameters(Program):
    title = "find_unused_parameters for nothing"
    causes = ("unused parameters",)
    width, depth, batch = 16, 200, 64

    def configure(self):
        self.wrapper_options = {"find_unused_parameters": not self.cured}


if __name__ == "__main__":
    main(UnusedParameters)
