"""Reads batches in the training process, which takes 15 ms for each."""

import time

from loop import Program, main


class SlowLoader(Program):
    title = "slow loader on all ranks"
    causes = ("data",)

    def configure(self):
        self.loader_options = {"num_workers": 1, "persistent_workers": True} if self.cured else {}

    def load(self, number):
        time.sleep(15e-3)


if __name__ == "__main__":
    main(SlowLoader)
