"""What a measurement is: samples, kinds of records, the environment, and their files. Nothing here measures."""

from paceline.records.environment import Environment, capture_environment
from paceline.records.kinds import (
    ChunksRecord,
    CollectiveRecord,
    LayerSizeRecord,
    LayerTimeRecord,
    MemoryRecord,
    Record,
    WrapperRecord,
    bus_factor,
)
from paceline.records.layer_profile import BlockTimes, LayerProfileRecord, ParameterTimes
from paceline.records.noise_scale import NoiseEstimate, NoiseProbe, NoiseRecord, estimate_noise_scale
from paceline.records.phase_profile import PhaseRecord
from paceline.records.samples import Samples, Summary
from paceline.records.scaling import BatchRecord, CurvePoint, LargeBatchRecord, ScaleRecord
from paceline.records.store import Run, RunFolder, load_run, save_run
from paceline.records.tuning import TuneStepRecord

__all__ = [
    "BatchRecord",
    "BlockTimes",
    "ChunksRecord",
    "CollectiveRecord",
    "CurvePoint",
    "Environment",
    "LargeBatchRecord",
    "LayerProfileRecord",
    "LayerSizeRecord",
    "LayerTimeRecord",
    "MemoryRecord",
    "NoiseEstimate",
    "NoiseProbe",
    "NoiseRecord",
    "ParameterTimes",
    "PhaseRecord",
    "Record",
    "Run",
    "RunFolder",
    "Samples",
    "ScaleRecord",
    "Summary",
    "TuneStepRecord",
    "WrapperRecord",
    "bus_factor",
    "capture_environment",
    "estimate_noise_scale",
    "load_run",
    "save_run",
]
