"""Rank 1 gets twice as many samples as rank 0."""

from loop import Program, main


class UnevenBatches(Program):
    title = "uneven batches"
    causes = ("uneven batches", "late rank")
    culprit = 1

    def configure(self):
        self.batch = 768 if self.cured else 512 * (1 + self.rank)

    @property
    def samples(self):
        return 768


if __name__ == "__main__":
    main(UnevenBatches)
