"""Where the time of a training step goes: its phases, and its communication by three kinds of steps taken in turns.

Nothing here measures or prints.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import RecordError
from paceline.records.exposure import Exposure
from paceline.records.kinds import KINDS, Record
from paceline.records.pairs import Ratio, compare_times
from paceline.records.samples import Samples

__all__ = ["PHASES", "PhaseRecord"]

PHASES = ("data_wait", "forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class PhaseRecord(Exposure, Record):
    """Training steps of one job. `timing` are steps with their phases marked, `plain` without, `silent` with
    communication off; equal numbers of repetitions are neighbours in time.

    `data_wait`, `forward`, `backward` and `optimizer` belong to `timing`; backward holds what it waits for.
    `silent_backward` is that of the silent steps. `busy` is how long at least one message was under way in a step;
    None where the wrapper cannot say. `num_bytes` is what one rank hands to all-reduce in a step, in `num_messages`.
    """

    kind: ClassVar[str] = "phases"
    model: str
    data: str
    wrapper: str
    backend: str
    device: str
    world_size: int
    precision: str
    batch_size: int
    accumulate: int
    num_parameters: int
    num_bytes: int
    num_messages: int
    timing: Samples
    plain: Samples
    silent: Samples
    silent_backward: Samples
    data_wait: Samples
    forward: Samples
    backward: Samples
    optimizer: Samples
    busy: Samples | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("timing", "plain", "silent", "silent_backward", *PHASES, "busy"):
            samples: Samples | None = getattr(self, name)
            if samples and (samples.count, samples.num_ranks) != (self.timing.count, self.world_size):
                raise RecordError(f"{self.model}: {name} has other repetitions or ranks than the steps")

    @property
    def plain_steps(self) -> Samples:
        return self.plain

    @property
    def gap_s(self) -> float:
        """What is left of a step beside its phases: the host's own doings between them."""
        parts: Sequence[Samples] = [getattr(self, name) for name in PHASES]
        rows = zip(self.timing.seconds, *(part.seconds for part in parts), strict=True)
        gaps = [max(0.0, max(step) - max(sum(rank) for rank in zip(*rest, strict=True))) for step, *rest in rows]
        return float(statistics.median(gaps))

    @property
    def cost(self) -> Ratio:
        """What marking the phases does to a step: marked over plain, in the same repetition."""
        return compare_times(self.timing.reduced_s, self.plain.reduced_s)


KINDS[PhaseRecord.kind] = PhaseRecord
