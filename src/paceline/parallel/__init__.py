"""The data-parallel wrapper. One backward pass can be followed in `backward`."""

from paceline.parallel.batchnorm import GhostBatchNorm, SyncBatchNorm
from paceline.parallel.ddp import DDP, DataParallel, is_torchs, swap_wrapper

__all__ = ["DDP", "DataParallel", "GhostBatchNorm", "SyncBatchNorm", "is_torchs", "swap_wrapper"]
