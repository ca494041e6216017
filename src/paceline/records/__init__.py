"""Measurements as data: samples, records, the environment, and their files. Nothing here measures."""

from paceline.records.kinds import ChunksRecord, CollectiveRecord, MemoryRecord, Record
from paceline.records.layers import (
    BlockTimes,
    CapTimeRecord,
    CodecRecord,
    LayerProfileRecord,
    LayerSizeRecord,
    LayerTimeRecord,
    ParameterTimes,
)
from paceline.records.samples import Samples, Summary
from paceline.records.steps import RankRecord, StepRecord, TracedMessage, TracedStepRecord
from paceline.records.training import BatchRecord, CurvePoint, LargeBatchRecord, NoiseRecord

__all__ = [
    "BatchRecord", "BlockTimes", "CapTimeRecord", "ChunksRecord", "CodecRecord", "CollectiveRecord", "CurvePoint",
    "LargeBatchRecord", "LayerProfileRecord", "LayerSizeRecord", "LayerTimeRecord", "MemoryRecord", "NoiseRecord",
    "ParameterTimes", "RankRecord", "Record", "Samples", "StepRecord", "Summary", "TracedMessage", "TracedStepRecord",
]  # fmt: skip
