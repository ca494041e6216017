"""What steps with and without communication say together: exposed, busy, overlap, bandwidth.

Which steps those are belongs to the kinds of records; nothing here measures or prints.
"""

from __future__ import annotations

import statistics

from paceline.records.kinds import bus_factor
from paceline.records.pairs import compare_times
from paceline.records.samples import Samples

__all__ = ["Exposure"]


class Exposure:
    """Steps as they are (`plain`) and the same with communication off (`silent`), neighbours in time repetition by
    repetition; `busy` is how long at least one message was under way in a step. None where there are no such steps."""

    world_size: int
    batch_size: int
    accumulate: int
    num_bytes: int
    silent: Samples | None
    busy: Samples | None

    @property
    def plain_steps(self) -> Samples:
        raise NotImplementedError

    @property
    def global_batch_size(self) -> int:
        return self.world_size * self.batch_size * self.accumulate

    @property
    def samples_per_s(self) -> float:
        """Over all ranks, in plain steps."""
        return self.global_batch_size / self.plain_steps.median_s

    @property
    def exposed_s(self) -> float:
        """Step time minus the time of the same step with communication off; what noise makes less than 0 is 0."""
        if self.world_size == 1 or self.silent is None:
            return 0.0
        pairs = zip(self.plain_steps.reduced_s, self.silent.reduced_s, strict=True)
        return max(0.0, statistics.median(here - there for here, there in pairs))

    @property
    def compute_s(self) -> float:
        """The step with communication off."""
        if self.world_size == 1 or self.silent is None:
            return self.plain_steps.median_s
        return self.silent.median_s

    @property
    def overhead(self) -> float:
        """Exposed communication as a share of the step: the "communication overhead" of a training run."""
        return self.exposed_s / (self.exposed_s + self.compute_s)

    @property
    def exposed_noise_s(self) -> float | None:
        """Half the 95 % interval of the exposed seconds, where there are ranks and repetitions enough to tell."""
        if self.world_size == 1 or self.silent is None:
            return None
        ratio = compare_times(self.plain_steps.reduced_s, self.silent.reduced_s)
        return None if ratio.noise is None else ratio.noise * self.silent.median_s

    @property
    def busy_s(self) -> float | None:
        return None if self.busy is None else self.busy.median_s

    @property
    def overlap(self) -> float | None:
        """1 - exposed / busy: the share of communication that backward hid."""
        busy_s = self.busy_s
        return None if not busy_s else 1 - self.exposed_s / busy_s

    @property
    def busbw_bytes_per_s(self) -> float | None:
        """The bus bandwidth while messages were under way, from the bytes really sent."""
        if not self.busy_s or self.world_size == 1:
            return None
        return self.num_bytes / self.busy_s * bus_factor("all_reduce", self.world_size)
