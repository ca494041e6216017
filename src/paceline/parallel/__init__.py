"""The data-parallel wrapper. Start with `backward`, which contains one backward pass from beginning to end."""

from paceline.parallel.batchnorm import GhostBatchNorm, SyncBatchNorm
from paceline.parallel.ddp import DDP, DataParallel, is_torchs, swap_wrapper
from paceline.parallel.strategies import comm_hook

__all__ = ["DDP", "DataParallel", "GhostBatchNorm", "SyncBatchNorm", "comm_hook", "is_torchs", "swap_wrapper"]
