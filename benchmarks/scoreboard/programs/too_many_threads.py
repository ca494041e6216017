"""Runs eight threads per rank on the cores that the ranks share."""

from loop import Program, main


class TooManyThreads(Program):
    title = "too many threads per rank"
    causes = ("threads",)

    def configure(self):
        self.threads = 1 if self.cured else 8


if __name__ == "__main__":
    main(TooManyThreads)
