"""Reads each batch in a worker, where its 8 ms are hidden behind computation."""

import time
from typing import ClassVar

from loop import Program, main


class HealthyPrefetching(Program):
    title = "healthy: prefetching loader"
    loader_options: ClassVar = {"num_workers": 1, "persistent_workers": True}

    def load(self, number):
        time.sleep(8e-3)


if __name__ == "__main__":
    main(HealthyPrefetching)
