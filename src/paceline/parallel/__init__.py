"""The data-parallel wrapper: one backward pass can be followed in `steps` and `bucketed`."""

from paceline.parallel.batchnorm import SyncBatchNorm
from paceline.parallel.ghost import GhostBatchNorm
from paceline.parallel.wrapper import DataParallel

__all__ = ["DataParallel", "GhostBatchNorm", "SyncBatchNorm"]
