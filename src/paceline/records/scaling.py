"""Scaling: epochs at one batch size, steps on one number of ranks, a training run at one global batch size.

What several records say together (speed-up, efficiency, spread over seeds) is in `speedups` and `recipes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import RecordError
from paceline.records.exposure import Exposure
from paceline.records.kinds import KINDS, Record
from paceline.records.samples import Samples

__all__ = ["BUDGETS", "MODES", "BatchRecord", "CurvePoint", "LargeBatchRecord", "ScaleRecord"]

MODES = ("weak", "strong")
BUDGETS = ("epochs", "updates")


@dataclass(frozen=True, kw_only=True)
class BatchRecord(Record):
    """Epochs on one rank at one batch size. `timing` has a repetition for each epoch: the seconds of its steps alone,
    warm-up epochs apart; `data_wait` what the steps waited for data beside that.

    Where the batch does not fit, `failure` says so and there are no times. `peak_bytes` is the most memory that the
    process (on CUDA: its tensors) held; 0 where nobody could tell.
    """

    kind: ClassVar[str] = "batch"
    model: str
    data: str
    device: str
    precision: str
    threads: int
    batch_size: int
    num_samples: int
    num_steps: int
    timing: Samples | None = None
    data_wait: Samples | None = None
    peak_bytes: int = 0
    failure: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.batch_size, self.num_samples, self.num_steps) < 1:
            raise RecordError(
                f"{self.num_samples} samples in {self.num_steps} steps of {self.batch_size}: at least 1 of each"
            )
        if (self.timing is None) != bool(self.failure):
            raise RecordError(f"batch size {self.batch_size}: either times or a failure is needed")

    @property
    def epoch_s(self) -> float | None:
        return None if self.timing is None else self.timing.median_s

    @property
    def step_s(self) -> float | None:
        """A full batch's share of the epoch, whose last one may be smaller."""
        return None if self.epoch_s is None else self.epoch_s * self.batch_size / self.num_samples

    @property
    def samples_per_s(self) -> float | None:
        return None if not self.epoch_s else self.num_samples / self.epoch_s

    @property
    def data_wait_s(self) -> float | None:
        return None if self.data_wait is None else self.data_wait.median_s


@dataclass(frozen=True, kw_only=True)
class ScaleRecord(Exposure, Record):
    """Steps of one job on one number of ranks, in one wrapper. `timing` are plain steps, `silent` the same with
    communication off, `busy` how long a message was under way in a third kind; all in turns, within one cell.

    A cell is one `mode` with one `cell_size`: samples per rank (weak) or over all ranks (strong). Repetitions of equal
    number in one cell are neighbours in time, whatever the ranks and wrappers: they are compared pair by pair.
    One rank by itself has the wrapper `none` and nothing to send. `num_bytes` is what a rank handed to all-reduce in a
    step, gradients alone, in `num_messages`, counted in the third kind of steps (torch's wrapper on a GPU: as planned);
    `bucket_bytes` are the wrapper's buckets in the order in which they leave, as it tells them.
    """

    kind: ClassVar[str] = "scale"
    mode: str
    cell_size: int
    model: str
    data: str
    wrapper: str
    backend: str
    device: str
    world_size: int
    threads: int
    precision: str
    batch_size: int
    accumulate: int
    timing: Samples
    num_bytes: int = 0
    num_messages: int = 0
    bucket_bytes: tuple[int, ...] = ()
    silent: Samples | None = None
    busy: Samples | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "bucket_bytes", tuple(self.bucket_bytes))  # JSON has lists
        if self.mode not in MODES:
            raise RecordError(f"unknown mode of scaling {self.mode!r}: known are {', '.join(MODES)}")
        if min(self.world_size, self.batch_size, self.accumulate, self.threads) < 1 or self.timing.median_s <= 0:
            raise RecordError(
                f"{self.world_size} ranks x {self.batch_size} x {self.accumulate} samples in {self.timing.median_s} s "
                "cannot be"
            )
        samples = self.batch_size * self.accumulate * (1 if self.mode == "weak" else self.world_size)
        if samples != self.cell_size:
            raise RecordError(f"{samples} samples in a cell of {self.cell_size} ({self.mode})")
        for name in ("silent", "busy"):
            found: Samples | None = getattr(self, name)
            if found is not None and (found.count, found.num_ranks) != (self.timing.count, self.timing.num_ranks):
                raise RecordError(f"{self.wrapper}: {name} has other repetitions or ranks than the steps")

    @property
    def plain_steps(self) -> Samples:
        return self.timing

    @property
    def cell(self) -> tuple[str, int]:
        return self.mode, self.cell_size

    @property
    def job(self) -> tuple[str, str, str, str]:
        """The work of a step: what records must share to be compared, beside their cell."""
        return self.model, self.data, self.device, self.precision

    @property
    def contestant(self) -> str:
        """The wrapper and what its messages go over."""
        return self.wrapper if self.wrapper in ("none", "dp") else f"{self.wrapper} on {self.backend}"


@dataclass(frozen=True)
class CurvePoint:
    """An evaluation on the way: after so many updates and samples. The training loss is the mean since the last."""

    update: int
    num_samples: int
    train_loss: float
    test_loss: float
    test_accuracy: float


@dataclass(frozen=True, kw_only=True)
class LargeBatchRecord(Record):
    """One training run of a large-batch study. `recipe` names what was switched on, `configuration` says it in full.

    `budget` is what runs of one study share: `epochs` (then updates follow) or `updates`, which may end within an
    epoch: `epochs` is then no whole number. `batch_size` is what one rank computes at once, `largest_batch_size` the
    global batch at the end where it grew. A run whose loss was no longer a number has a `failure`, and its curve ends
    there.
    """

    kind: ClassVar[str] = "large_batch"
    parts: ClassVar[dict[str, type]] = {"curve": CurvePoint}
    model: str
    data: str
    device: str
    precision: str
    world_size: int
    batch_size: int
    global_batch_size: int
    largest_batch_size: int
    recipe: str
    configuration: str
    budget: str
    epochs: float
    num_updates: int
    num_samples: int
    seed: int
    lr: float
    seconds: float
    curve: tuple[CurvePoint, ...]
    failure: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget not in BUDGETS:
            raise RecordError(f"unknown budget {self.budget!r}: known are {', '.join(BUDGETS)}")
        if not self.curve and not self.failure:
            raise RecordError(f"{self.recipe} at {self.global_batch_size}, seed {self.seed}: nothing was evaluated")
        for point in self.curve:
            if not all(map(math.isfinite, (point.train_loss, point.test_loss, point.test_accuracy))):
                raise RecordError(f"{self.recipe} at {self.global_batch_size}: an evaluation that is no number")

    @property
    def test_accuracy(self) -> float | None:
        """At the end of the run; None for one that failed."""
        return None if self.failure else self.curve[-1].test_accuracy

    @property
    def test_loss(self) -> float | None:
        return None if self.failure else self.curve[-1].test_loss

    @property
    def train_loss(self) -> float | None:
        return None if self.failure else self.curve[-1].train_loss

    @property
    def cell(self) -> tuple[str, int, str]:
        """What runs that differ in their seed alone share."""
        return self.budget, self.global_batch_size, self.recipe


for _kind in (BatchRecord, ScaleRecord, LargeBatchRecord):
    KINDS[_kind.kind] = _kind
