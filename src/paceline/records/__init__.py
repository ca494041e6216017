"""What a measurement is: samples, kinds of records, the environment, and their files. Nothing here measures."""

from paceline.records.environment import Environment, capture_environment
from paceline.records.kinds import (
    ChunksRecord,
    CollectiveRecord,
    LayerSizeRecord,
    LayerTimeRecord,
    MemoryRecord,
    Record,
    bus_factor,
)
from paceline.records.layers import BlockTimes, LayerProfileRecord, ParameterTimes
from paceline.records.samples import Samples, Summary
from paceline.records.steps import StepRecord
from paceline.records.store import Run, RunFolder, load_run, save_run
from paceline.records.training import (
    BatchRecord,
    CurvePoint,
    LargeBatchRecord,
    NoiseEstimate,
    NoiseProbe,
    NoiseRecord,
    estimate_noise_scale,
)

__all__ = [
    "BatchRecord", "BlockTimes", "ChunksRecord", "CollectiveRecord", "CurvePoint", "Environment", "LargeBatchRecord",
    "LayerProfileRecord", "LayerSizeRecord", "LayerTimeRecord", "MemoryRecord", "NoiseEstimate", "NoiseProbe",
    "NoiseRecord", "ParameterTimes", "Record", "Run", "RunFolder", "Samples", "StepRecord", "Summary", "bus_factor",
    "capture_environment", "estimate_noise_scale", "load_run", "save_run",
]  # fmt: skip
