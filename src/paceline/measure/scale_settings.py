"""What scaling studies are asked to do, checked before any rank starts. Imports no torch; measuring is in `scaling`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from paceline import machine
from paceline.errors import ConfigError
from paceline.measure.settings import BACKENDS, CollectiveSettings, check_name
from paceline.training.settings import TrainSettings
from paceline.units import MIB

__all__ = ["SCALED_WRAPPERS", "BatchSweepSettings", "Cell", "Contestant", "ScaleSettings"]

SCALED_WRAPPERS = ("paceline", "torch", "dp")


@dataclass(frozen=True)
class Contestant:
    """A wrapper and what its messages go over."""

    wrapper: str
    backend: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", machine.canonical_backend(self.backend))


@dataclass(frozen=True)
class Cell:
    """What takes turns: one mode at one number of samples: of a rank's micro-batch (weak), or over all ranks and
    micro-batches (strong)."""

    mode: str
    samples: int

    @property
    def name(self) -> str:
        return f"{self.mode} {self.samples}"

    def batch_size(self, world_size: int, accumulate: int = 1) -> int:
        """What one rank of so many computes at once."""
        return self.samples if self.mode == "weak" else self.samples // (world_size * accumulate)

    def count_samples(self, accumulate: int) -> int:
        """Of a step: one rank's (weak), or those of all (strong)."""
        return self.samples * accumulate if self.mode == "weak" else self.samples


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """`scale ranks`: the job on each number of ranks, weak (`batch_sizes` per rank) and strong (`global_batch_sizes`),
    all wrappers on all backends in turns, and one rank by itself."""

    job: TrainSettings
    ranks: tuple[int, ...]
    contestants: tuple[Contestant, ...]
    batch_sizes: tuple[int, ...]
    global_batch_sizes: tuple[int, ...] = ()
    iters: int | None = None

    @property
    def cells(self) -> tuple[Cell, ...]:
        weak = (Cell("weak", size) for size in self.batch_sizes)
        return (*weak, *(Cell("strong", size) for size in self.global_batch_sizes))

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.backend for c in self.contestants if c.wrapper != "dp"))

    def check(self) -> None:
        """Refuse what cannot be; what the job itself asks for is checked with the job."""
        if not self.contestants:
            raise ConfigError(f"no wrapper given: known are {', '.join(SCALED_WRAPPERS)}")
        for contestant in self.contestants:
            check_name("wrapper", contestant.wrapper, SCALED_WRAPPERS)
            check_name("backend", contestant.backend, BACKENDS)
        if min(self.ranks) < 1 or max(self.ranks) < 2:
            raise ConfigError(f"--ranks {','.join(map(str, self.ranks))}: scaling needs two or more ranks beside one")
        for size in self.global_batch_sizes:
            parts = self.job.accumulate or 1
            odd = [n for n in self.ranks if size % (n * parts)]
            if odd:
                beside = f" in {parts} micro-batches" if parts > 1 else ""
                raise ConfigError(
                    f"--global-batch-size {size} cannot be shared equally by {odd[0]} ranks{beside}: use a multiple of "
                    f"{', '.join(str(n * parts) for n in self.ranks)}"
                )
        if not self.cells:
            raise ConfigError("nothing to measure: give --batch-size (weak scaling) or --global-batch-size (strong)")
        if self.iters is not None and self.iters < 2:
            raise ConfigError(f"--iters {self.iters}: at least 2 are needed to know the noise")
        gpus = machine.count_gpus()
        if any(c.wrapper == "dp" for c in self.contestants) and (gpus < max(self.ranks) or self.job.device == "cpu"):
            raise ConfigError(
                f"--wrapper dp puts {max(self.ranks)} GPUs into one process, and {gpus} can be used here: leave it out"
            )

    def sweep(self, num_bytes: int) -> CollectiveSettings:
        """The all-reduces of these ranks and backends alone, up to all gradients at once: their peak, and what a
        prediction stands on."""
        sizes, size = [], 1 << 14
        while size < num_bytes:
            sizes.append(size)
            size *= 4
        sizes.append(max(size, MIB))
        return CollectiveSettings(
            backends=self.backends,
            ranks=tuple(n for n in self.ranks if n > 1),
            sizes=tuple(sizes),
            device="auto" if "nccl" in self.backends else self.job.device,
            memories=("ordinary", "shared") if "shm" in self.backends else ("ordinary",),
            threads=self.job.threads or 1,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ScaleSettings:
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
        values["job"] = TrainSettings.from_json(values["job"])
        values["contestants"] = tuple(Contestant(**value) for value in values["contestants"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class BatchSweepSettings:
    """`scale batch`: whole epochs of the job on one rank at each batch size, the first of them a warm-up."""

    job: TrainSettings
    batch_sizes: tuple[int, ...]
    epochs: int = 2

    def check(self) -> None:
        if self.epochs < 2:
            raise ConfigError(f"--epochs {self.epochs}: the first is a warm-up, so at least 2 are needed")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError("--batch-size: at least one size of at least 1 is needed")
        if self.job.samples is not None and self.job.samples < max(self.batch_sizes):
            raise ConfigError(
                f"--batch-size {max(self.batch_sizes)} of --samples {self.job.samples}: leave it out, or give more"
            )
        if self.job.ranks != 1:
            raise ConfigError(f"--ranks {self.job.ranks}: batch sizes are compared on one rank; see `scale ranks`")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> BatchSweepSettings:
        return cls(
            job=TrainSettings.from_json(values["job"]),
            batch_sizes=tuple(values["batch_sizes"]),
            epochs=values["epochs"],
        )
