"""Data-parallel training for PyTorch that measures itself, predicts itself and tunes itself.

The public names. They load on first use: importing Paceline is silent, quick and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.errors import (
        CollectiveError,
        ConfigError,
        LaunchError,
        MeasurementError,
        PacelineError,
        RecordError,
    )
    from paceline.parallel import DDP, DataParallel, GhostBatchNorm, SyncBatchNorm
    from paceline.plan import Plan
    from paceline.records.store import Run, load_run
    from paceline.report.result import Result, load_result
    from paceline.runtime.environment import is_launched
    from paceline.runtime.launch import RankPool, run_ranks
    from paceline.runtime.ranks import Ranks, get, ranks, set_seed
    from paceline.runtime.world import World, init, shutdown
    from paceline.training.optimizers import LAMB, LARS
    from paceline.verbs import bench, scale
    from paceline.verbs.doctor import doctor
    from paceline.verbs.profile import comm_table, compare, profile, trace

__version__ = "0.1.0"

_HOMES = {
    "paceline.errors": (
        "CollectiveError", "ConfigError", "LaunchError", "MeasurementError", "PacelineError", "RecordError",
    ),
    "paceline.parallel": ("DDP", "DataParallel", "GhostBatchNorm", "SyncBatchNorm"),
    "paceline.plan": ("Plan",),
    "paceline.records.store": ("Run", "load_run"),
    "paceline.runtime.environment": ("is_launched",),
    "paceline.report.result": ("Result", "load_result"),
    "paceline.runtime.launch": ("RankPool", "run_ranks"),
    "paceline.runtime.ranks": ("Ranks", "get", "ranks", "set_seed"),
    "paceline.runtime.world": ("World", "init", "shutdown"),
    "paceline.training.optimizers": ("LAMB", "LARS"),
    "paceline.verbs": ("bench", "scale"),
    "paceline.verbs.doctor": ("doctor",),
    "paceline.verbs.profile": ("comm_table", "compare", "profile", "trace"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DDP",
    "LAMB",
    "LARS",
    "CollectiveError",
    "ConfigError",
    "DataParallel",
    "GhostBatchNorm",
    "LaunchError",
    "MeasurementError",
    "PacelineError",
    "Plan",
    "RankPool",
    "Ranks",
    "RecordError",
    "Result",
    "Run",
    "SyncBatchNorm",
    "World",
    "__version__",
    "bench",
    "comm_table",
    "compare",
    "doctor",
    "get",
    "init",
    "is_launched",
    "load_result",
    "load_run",
    "profile",
    "ranks",
    "run_ranks",
    "scale",
    "set_seed",
    "shutdown",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
