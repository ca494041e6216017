"""Run a program with a bottleneck planted from outside: planted.py KIND PROGRAM ARGUMENTS..."""

import os
import runpy
import sys
import time

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data._utils.fetch import _MapDatasetFetcher


def plant_data() -> None:
    """Every batch takes 60 ms longer to load, in any process."""
    original = _MapDatasetFetcher.fetch

    def fetch(self, index):
        time.sleep(0.06)
        return original(self, index)

    _MapDatasetFetcher.fetch = fetch


def plant_late_rank() -> None:
    original = DistributedDataParallel.forward

    def forward(self, *args, **kwargs):
        time.sleep(0.06 if os.environ["RANK"] == "1" else 0.0)
        return original(self, *args, **kwargs)

    DistributedDataParallel.forward = forward


def plant_buckets() -> None:
    """One bucket per gradient."""
    original = DistributedDataParallel.__init__

    def initialize(self, *args, **kwargs):
        original(self, *args, **kwargs | {"bucket_cap_mb": 0.001})

    DistributedDataParallel.__init__ = initialize


if __name__ == "__main__":
    kind, *sys.argv = sys.argv[1:]
    if kind != "nothing":
        {"data": plant_data, "late rank": plant_late_rank, "buckets": plant_buckets}[kind]()
    runpy.run_path(sys.argv[0], run_name="__main__")
