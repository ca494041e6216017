"""The settings of scaling studies and the cells that `scaling` measures, checked before any rank starts. No torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from paceline import machine
from paceline.errors import ConfigError, refuse
from paceline.measure.settings import BACKENDS, CollectiveSettings, check_counts, check_names
from paceline.training.recipes import NO_RECIPE, Recipe, share_batch
from paceline.training.schedules import BatchSchedule
from paceline.training.settings import TrainSettings
from paceline.units import MIB

SCALED_WRAPPERS = ("paceline", "torch", "dp")


@dataclass(frozen=True)
class Setup:
    """A wrapper and the backend of its messages."""

    wrapper: str
    backend: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", machine.canonical_backend(self.backend))


@dataclass(frozen=True)
class Cell:
    """What takes turns: a mode at a number of samples: of a rank's micro-batch (weak), or over all of them (strong)."""

    mode: str
    samples: int

    @property
    def name(self) -> str:
        return f"{self.mode} {self.samples}"

    def batch_size(self, world_size: int, accumulate: int = 1) -> int:
        """What one rank of this number of ranks computes at once."""
        return self.samples if self.mode == "weak" else self.samples // (world_size * accumulate)

    def count_samples(self, accumulate: int) -> int:
        """Of a step: one rank's (weak), or those of all (strong)."""
        return self.samples * accumulate if self.mode == "weak" else self.samples


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """What every study has. `is_timed`: its cells are times, which must not be mixed with those of another machine."""

    is_timed: ClassVar[bool] = True

    job: TrainSettings

    @property
    def num_ranks(self) -> int:
        """The most ranks that are used at once."""
        return self.job.ranks

    def check(self) -> None:
        """Refuse what cannot be measured; the job itself is checked apart."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
        return cls(**values | {"job": TrainSettings.from_json(values["job"])})


@dataclass(frozen=True, kw_only=True)
class ScaleSettings(StudySettings):
    """`scale ranks`: the job on each number of ranks, weak (`batch_sizes` per rank) and strong (`global_batch_sizes`),
    all wrappers on all backends in turns, and one rank alone. The curve is predicted for `network` and `predict_ranks`.
    """

    ranks: tuple[int, ...]
    setups: tuple[Setup, ...]
    batch_sizes: tuple[int, ...]
    global_batch_sizes: tuple[int, ...] = ()
    iters: int | None = None
    network: str = "10gbe,100gbe"
    predict_ranks: str = "64,1024"

    @property
    def num_ranks(self) -> int:
        return max(self.ranks)

    @property
    def cells(self) -> tuple[Cell, ...]:
        weak = (Cell("weak", size) for size in self.batch_sizes)
        return (*weak, *(Cell("strong", size) for size in self.global_batch_sizes))

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.backend for c in self.setups if c.wrapper != "dp"))

    def check(self) -> None:
        check_names("wrapper", [setup.wrapper for setup in self.setups], SCALED_WRAPPERS)
        check_names("backend", [setup.backend for setup in self.setups], BACKENDS)
        ranks, most, parts, gpus = self.ranks, max(self.ranks), self.job.accumulate or 1, machine.count_gpus()
        how, shares = f" in {parts} micro-batches" if parts > 1 else "", ", ".join(str(n * parts) for n in ranks)
        with_dp = any(setup.wrapper == "dp" for setup in self.setups)
        if min(ranks) < 1 or most < 2:
            raise ConfigError(f"--ranks {','.join(map(str, ranks))}: scaling compares one rank with two or more")
        refuse(
            *((size % (n * parts),
               f"--global-batch-size {size} cannot be shared equally by {n} ranks{how}: use a multiple of {shares}")
              for size in self.global_batch_sizes for n in ranks),
            (not self.cells, "nothing to measure: give --batch-size (weak scaling) or --global-batch-size (strong)"),
            (self.iters is not None and self.iters < 2,
             f"--iters {self.iters}: at least 2 are needed to know the noise"),
            (with_dp and (gpus < most or self.job.device == "cpu"),
             f"--wrapper dp puts {most} GPUs into one process, and {gpus} can be used here: leave it out"),
        )  # fmt: skip

    def sweep(self, num_bytes: int) -> CollectiveSettings:
        """All-reduces alone, up to the size of all gradients: the peak bandwidth, and the base of a prediction."""
        sizes = [1 << 14]
        while sizes[-1] < num_bytes:
            sizes.append(4 * sizes[-1])
        sizes[-1] = max(sizes[-1], MIB)
        return CollectiveSettings(
            backends=self.backends, ranks=tuple(n for n in self.ranks if n > 1), sizes=tuple(sizes),
            device="auto" if "nccl" in self.backends else self.job.device, threads=self.job.threads or 1,
            memories=("ordinary", "shared") if "shm" in self.backends else ("ordinary",),
        )  # fmt: skip

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        setups = values["contestants"] if "contestants" in values else values["setups"]  # the key of older studies
        return super().from_json(values | {"setups": [Setup(**value) for value in setups]})


@dataclass(frozen=True, kw_only=True)
class BatchSettings(StudySettings):
    """`scale batch`: whole epochs of the job on one rank at each batch size, the first of them a warm-up."""

    batch_sizes: tuple[int, ...]
    epochs: int = 2

    def check(self) -> None:
        most, samples, ranks = max(self.batch_sizes, default=0), self.job.samples, self.job.ranks
        few = f"--batch-size {most} of --samples {samples}: leave it out, or give more"
        refuse(
            (self.epochs < 2, f"--epochs {self.epochs}: the first is a warm-up, so at least 2 are needed"),
            (min(self.batch_sizes, default=0) < 1, "--batch-size: at least one size of at least 1 is needed"),
            (samples is not None and samples < most, few),
            (ranks != 1, f"--ranks {ranks}: batch sizes are compared on one rank; see `scale ranks`"),
        )


@dataclass(frozen=True)
class TrainingCell:
    """One run of the study: its settings, their names, and whether the noise of gradients is probed in it."""

    settings: TrainSettings
    budget: str
    recipe: str
    global_batch_size: int
    probes: bool = False

    @property
    def name(self) -> str:
        return f"{self.budget} {self.global_batch_size} {self.recipe} seed {self.settings.seed}"

    @property
    def configuration(self) -> str:
        """What the recipe set, for a table."""
        s = self.settings
        grown = ", ".join(f"x{factor} at {share:g}" for share, factor in s.batch_growth)
        parts = [
            (True, f"{s.optimizer}, lr {s.lr:.4g}, {s.schedule}"),
            (s.lr_warmup, f"warm-up {s.lr_warmup}"),
            (s.batch_growth, f"from {s.global_batch_size}: {grown}"),
            (s.ghost_batchnorm, f"ghosts of {s.ghost_batchnorm}"),
            (s.sync_batchnorm, "sync BatchNorm"),
            (s.label_smoothing, f"smoothing {s.label_smoothing:g}"),
        ]
        return ", ".join(words for is_on, words in parts if is_on)

    def check(self, num_samples: int) -> None:
        """Refuse warm-ups and growths for which a run is too short before anything is trained."""
        s, what = self.settings, f"recipe {self.recipe!r} at {self.global_batch_size}"
        s.check()
        steps = BatchSchedule(
            global_batch_size=s.batches.global_batch_size, num_samples=num_samples, epochs=s.epochs,
            growths=s.batch_growth, tail=s.tail,
        )  # fmt: skip
        try:
            steps.check()
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from None
        if s.lr_warmup >= steps.num_steps:
            found = f"a warm-up of {s.lr_warmup} updates in a run of {steps.num_steps}"
            raise ConfigError(f"{what}: {found}; use more --epochs, or a smaller share")


@dataclass(frozen=True, kw_only=True)
class LargeBatchSettings(StudySettings):
    """`scale large-batch`: the job at its base batch, and at larger ones by each recipe, with every seed.

    `job` has the settings that were found for `base_batch_size`. `updates` is how many the runs at a fixed number of
    them have: None is twice those of the largest batch, 0 leaves such runs out. `most_at_once` bounds what a rank
    computes at once; larger batches accumulate.
    """

    is_timed: ClassVar[bool] = False

    base_batch_size: int
    global_batch_sizes: tuple[int, ...]
    recipes: tuple[str, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    updates: int | None = None
    most_at_once: int = 512
    evaluations: int = 10

    def check(self) -> None:
        base, sizes = self.base_batch_size, self.global_batch_sizes
        shown = ",".join(map(str, sizes)) or "nothing"
        check_counts(base_batch_size=base, evaluations=self.evaluations, batch_size=self.most_at_once)
        check_counts(updates=self.updates, seeds=len(self.seeds))
        is_small = min(sizes, default=0) <= base
        refuse(
            (is_small, f"--global-batch-size {shown}: batches above the base of {base} are needed"),
            (not self.recipes, "--recipes: at least one, such as none"),
        )
        odd = next((size for size in sizes if size % base), 0)
        for text in self.recipes:
            names, alone = Recipe.parse(text).names, "sync needs several ranks, and there is one; use ghost, or --ranks"
            refuse(
                ("sync" in names and self.job.ranks == 1, f"recipe {text!r}: {alone}"),
                ("grow" in names and odd, f"recipe {text!r}: {odd} is not a multiple of the base {base}"),
            )

    def check_norms(self, has_norm: bool) -> None:
        """Refuse recipes for BatchNorm where the model has none."""
        odd = [text for text in self.recipes if Recipe.parse(text).is_for_norms]
        if odd and not has_norm:
            raise ConfigError(f"recipe {odd[0]!r}: {self.job.model} has no BatchNorm to change; leave it out")

    def count_updates(self, global_batch_size: int, num_samples: int) -> int:
        """Of a run of the job's epochs at a batch that does not change."""
        per_epoch = num_samples / global_batch_size
        return self.job.epochs * (math.floor(per_epoch) if self.job.tail == "drop" else math.ceil(per_epoch))

    def list_cells(self, num_samples: int) -> list[TrainingCell]:
        """All runs of the study; the baseline first, whose first seed probes the noise of its gradients."""
        base, larger, found = self.base_batch_size, self.global_batch_sizes, []
        for size, text in [(base, NO_RECIPE), *((size, recipe) for size in larger for recipe in self.recipes)]:
            if size > num_samples:  # a shorter batch would be recorded as this one
                raise ConfigError(f"{num_samples} samples are fewer than a batch of {size}: leave it out")
            settings = Recipe.parse(text).apply(self.job, size, base, self.count_updates(size, num_samples))
            found.append((share_batch(settings, self.most_at_once), "epochs", text, size))
        updates = 2 * self.count_updates(max(larger), num_samples) if self.updates is None else self.updates
        for size in (base, *larger) if updates else ():
            settings = share_batch(replace(self.job, global_batch_size=size), self.most_at_once)
            found.append((replace(settings, epochs=1, steps=updates), "updates", NO_RECIPE, size))
        cells = []
        for settings, budget, text, size in found:
            for seed in self.seeds:
                probes = (budget, size, seed) == ("epochs", base, self.seeds[0])
                cells.append(TrainingCell(replace(settings, seed=seed), budget, text, size, probes))
        for cell in cells:
            cell.check(num_samples)
        return cells
