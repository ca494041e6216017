"""Data-parallel training for PyTorch that shows where each step's time goes, predicts how it scales, and picks buckets.

Public names load on first use: importing Paceline is silent, quick and does not import torch.
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
        TrainingError,
    )
    from paceline.parallel import DDP, DataParallel, GhostBatchNorm, SyncBatchNorm, comm_hook, swap_wrapper
    from paceline.plan import Plan
    from paceline.records.store import Run, load_run
    from paceline.report.result import Result, load_result
    from paceline.runtime.faults.monitored import monitor
    from paceline.runtime.faults.pulse import slow
    from paceline.runtime.ranks.launch import RankPool, run_ranks
    from paceline.runtime.ranks.place import is_launched
    from paceline.runtime.ranks.world import Ranks, World, get, init, ranks, set_seed, shutdown
    from paceline.strategy import Strategy
    from paceline.studies import scale
    from paceline.studies.fault_trials import faults
    from paceline.training.optimizers import LAMB, LARS, split_parameters
    from paceline.training.schedules import BatchSchedule, Schedule
    from paceline.verbs import bench
    from paceline.verbs.attach import attach
    from paceline.verbs.demo import demo
    from paceline.verbs.doctor import doctor
    from paceline.verbs.predict import predict, predict_csv, predict_goodput, predict_scale, predict_trace
    from paceline.verbs.profile import comm_table, compare, profile, trace
    from paceline.verbs.report import save_report
    from paceline.verbs.train import train
    from paceline.verbs.tune import tune
    from paceline.verbs.watch import watch
    from paceline.workloads.data.sharding import EpochOrder

__version__ = "0.1.0"

_HOMES = {
    "paceline.errors": (
        "CollectiveError", "ConfigError", "LaunchError", "MeasurementError", "PacelineError", "RecordError",
        "TrainingError",
    ),
    "paceline.parallel": ("DDP", "DataParallel", "GhostBatchNorm", "SyncBatchNorm", "comm_hook", "swap_wrapper"),
    "paceline.plan": ("Plan",), "paceline.predict": ("predict",),  # a package that can be called
    "paceline.records.store": ("Run", "load_run"), "paceline.report.result": ("Result", "load_result"),
    "paceline.runtime.ranks.place": ("is_launched",), "paceline.runtime.ranks.launch": ("RankPool", "run_ranks"),
    "paceline.runtime.faults.monitored": ("monitor",), "paceline.runtime.faults.pulse": ("slow",),
    "paceline.runtime.ranks.world": ("Ranks", "World", "get", "init", "ranks", "set_seed", "shutdown"),
    "paceline.strategy": ("Strategy",), "paceline.training.optimizers": ("LAMB", "LARS", "split_parameters"),
    "paceline.training.schedules": ("BatchSchedule", "Schedule"),
    "paceline.verbs.attach": ("attach",), "paceline.verbs.bench": ("bench",), "paceline.verbs.doctor": ("doctor",),
    "paceline.verbs.demo": ("demo",),
    "paceline.studies.fault_trials": ("faults",),
    "paceline.verbs.predict": ("predict_csv", "predict_goodput", "predict_scale", "predict_trace"),
    "paceline.verbs.profile": ("comm_table", "compare", "profile", "trace"),
    "paceline.verbs.report": ("save_report",), "paceline.verbs.watch": ("watch",),
    "paceline.studies.scale": ("scale",), "paceline.verbs.train": ("train",), "paceline.verbs.tune": ("tune",),
    "paceline.workloads.data.sharding": ("EpochOrder",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "DDP", "LAMB", "LARS", "BatchSchedule", "CollectiveError", "ConfigError", "DataParallel", "EpochOrder",
    "GhostBatchNorm", "LaunchError", "MeasurementError", "PacelineError", "Plan", "RankPool", "Ranks", "RecordError",
    "Result", "Run", "Schedule", "Strategy", "SyncBatchNorm", "TrainingError", "World", "__version__", "attach",
    "bench", "comm_hook", "comm_table", "compare", "demo", "doctor", "faults", "get", "init", "is_launched",
    "load_result", "load_run", "monitor", "predict", "predict_csv", "predict_goodput", "predict_scale", "predict_trace",
    "profile", "ranks", "run_ranks", "save_report", "scale", "set_seed", "shutdown", "slow", "split_parameters",
    "swap_wrapper", "trace", "train", "tune", "watch",
]  # fmt: skip


def load_ipython_extension(shell: Any) -> None:
    """Entry point of `%load_ext paceline`."""
    from paceline.integrations.notebook import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    from paceline.integrations.notebook import unload

    unload(shell)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        home = importlib.import_module(_HOME_OF[name])
        value = home if name in ("bench", "predict", "scale") else getattr(home, name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
