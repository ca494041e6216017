"""Restarts the loader's workers in every epoch of 15 steps."""

import itertools

from loop import Batches, Program, main
from torch.utils.data import DataLoader


class RestartedWorkers(Program):
    title = "loader workers restarted each epoch"
    causes = ("data",)

    def build_loader(self, steps):
        options = {"num_workers": 1, "persistent_workers": self.cured}
        loader = DataLoader(Batches(self, 15), batch_size=None, **options)
        return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), steps)


if __name__ == "__main__":
    main(RestartedWorkers)
