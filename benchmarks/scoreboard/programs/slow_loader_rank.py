"""Rank 1 reads its batches from a slow disk."""

import time

from loop import Program, main


class SlowLoaderRank(Program):
    title = "slow loader on one rank"
    causes = ("data",)
    culprit = 1

    def load(self, number):
        if self.is_ailing_here:
            time.sleep(15e-3)


if __name__ == "__main__":
    main(SlowLoaderRank)
