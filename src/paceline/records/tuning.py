"""Steps of one training job under plans of buckets, and what calibrates their prediction: all taken in turns.

What is concluded from them is in `predict`; nothing here measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import RecordError
from paceline.records.kinds import KINDS, Record
from paceline.records.samples import Samples

__all__ = ["CALIBRATING", "ROLES", "TuneStepRecord"]

# Roles that a prediction may learn from: steps that send nothing, and steps whose messages are not the job's own.
CALIBRATING = ("plain", "local", "disturbed")
ROLES = (*CALIBRATING, "plan")


@dataclass(frozen=True, kw_only=True)
class TuneStepRecord(Record):
    """Steps of one sort. `plain`: the bare model. `local`: in the wrapper, in a world of one rank. `disturbed`: the
    bare model while `num_messages` messages of `message_bytes` are sent beside its backward. `plan`: the job itself.

    `bucket_bytes` are the wrapper's buckets, as it tells them; `cap_bytes` what they were made by, 0 where that is no
    cap. Of `disturbed` steps alone: `under_way` is the mean time of a step's messages from their start to their end,
    and `overlapped` the part of it before the end of backward.
    """

    kind: ClassVar[str] = "tune_step"
    model: str
    wrapper: str
    backend: str
    device: str
    world_size: int
    batch_size: int
    role: str
    label: str
    timing: Samples
    forward: Samples
    backward: Samples
    optimizer: Samples
    cap_bytes: int = 0
    bucket_bytes: tuple[int, ...] = ()
    message_bytes: int = 0
    num_messages: int = 0
    under_way: Samples | None = None
    overlapped: Samples | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bucket_bytes", tuple(self.bucket_bytes))  # JSON has lists
        if self.role not in ROLES:
            raise RecordError(f"unknown role {self.role!r} of a step: known are {', '.join(ROLES)}")
        for phase in ("forward", "backward", "optimizer", "under_way", "overlapped"):
            samples: Samples | None = getattr(self, phase)
            if samples and (samples.count, samples.num_ranks) != (self.timing.count, self.timing.num_ranks):
                raise RecordError(f"{self.model}, {self.label}: {phase} has other repetitions or ranks than the step")
        counted = (
            self.num_messages > 0,
            self.message_bytes > 0,
            self.under_way is not None,
            self.overlapped is not None,
        )
        if set(counted) != {self.role == "disturbed"}:
            raise RecordError(f"{self.model}, {self.label}: messages are counted in disturbed steps, and only there")
        if self.cap_bytes < 0 or self.world_size < 1 or any(size < 0 for size in self.bucket_bytes):
            raise RecordError(
                f"{self.model}, {self.label}: {self.world_size} ranks, buckets of {self.bucket_bytes} by a cap of "
                f"{self.cap_bytes} bytes cannot be"
            )

    @property
    def num_buckets(self) -> int:
        return len(self.bucket_bytes)


KINDS[TuneStepRecord.kind] = TuneStepRecord
