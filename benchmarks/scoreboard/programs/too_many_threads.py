"""Each rank computes with eight threads on cores that the ranks share."""

from loop import Program, main


class TooManyThreads(Program):
    title = "too many threads per rank"
    causes = ("threads",)

    def configure(self):
        self.threads = 1 if self.cured else 8


if __name__ == "__main__":
    main(TooManyThreads)
