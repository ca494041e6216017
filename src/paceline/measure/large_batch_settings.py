"""The settings of a large-batch study, and the runs that follow from them. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import ConfigError
from paceline.training.recipes import NO_RECIPE, Recipe, share_batch
from paceline.training.schedules import BatchSchedule
from paceline.training.settings import TrainSettings


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
        """What the recipe set, in words for a table."""
        s = self.settings
        parts = [s.optimizer, f"lr {s.lr:.4g}", s.schedule]
        parts += [f"warm-up {s.lr_warmup}"] if s.lr_warmup else []
        if s.batch_growth:
            grown = ", ".join(f"x{factor} at {share:g}" for share, factor in s.batch_growth)
            parts.append(f"from {s.global_batch_size}: {grown}")
        parts += [f"ghosts of {s.ghost_batchnorm}"] if s.ghost_batchnorm else []
        parts += ["sync BatchNorm"] if s.sync_batchnorm else []
        parts += [f"smoothing {s.label_smoothing:g}"] if s.label_smoothing else []
        return ", ".join(parts)


def _check_length(cell: TrainingCell, num_samples: int) -> None:
    """Refuse warm-ups and growths for which a run is too short before anything is trained."""
    s, size = cell.settings, cell.settings.batches.global_batch_size
    steps = BatchSchedule(
        global_batch_size=size, num_samples=num_samples, epochs=s.epochs, growths=s.batch_growth, tail=s.tail
    )
    try:
        steps.check()
    except ConfigError as error:
        raise ConfigError(f"recipe {cell.recipe!r} at {cell.global_batch_size}: {error}") from None
    if s.lr_warmup >= steps.num_steps:
        raise ConfigError(
            f"recipe {cell.recipe!r} at {cell.global_batch_size}: a warm-up of {s.lr_warmup} updates in a run of "
            f"{steps.num_steps}; use more --epochs, or a smaller share"
        )


@dataclass(frozen=True, kw_only=True)
class LargeBatchSettings:
    """`scale large-batch`: the job at its base batch, and at larger ones by each recipe, with every seed.

    `job` has the settings that were found for `base_batch_size`. `updates` is how many the runs at a fixed number of
    them have: None is twice those of the largest batch, 0 leaves such runs out. `most_at_once` bounds what a rank
    computes at once; larger batches accumulate.
    """

    job: TrainSettings
    base_batch_size: int
    global_batch_sizes: tuple[int, ...]
    recipes: tuple[str, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    updates: int | None = None
    most_at_once: int = 512
    evaluations: int = 10

    def check(self) -> None:
        """Refuse invalid settings, before anything is trained."""
        if not self.global_batch_sizes or min(self.global_batch_sizes) <= self.base_batch_size:
            sizes = ",".join(map(str, self.global_batch_sizes)) or "nothing"
            raise ConfigError(
                f"--global-batch-size {sizes}: batches above the base of {self.base_batch_size} are needed"
            )
        if not self.recipes:
            raise ConfigError("--recipes: at least one, such as none")
        for flag, value, least in (
            ("--base-batch-size", self.base_batch_size, 1), ("--evaluations", self.evaluations, 1),
            ("--batch-size", self.most_at_once, 1), ("--updates", self.updates or 0, 0),
            ("--seeds", len(self.seeds), 1),
        ):  # fmt: skip
            if value < least:
                raise ConfigError(f"{flag} {value}: at least {least} is needed")
        for text in self.recipes:
            recipe = Recipe.parse(text)
            if "sync" in recipe.names and self.job.ranks == 1:
                raise ConfigError(f"recipe {text!r}: sync needs several ranks, and there is one; use ghost, or --ranks")
            if "grow" in recipe.names:
                odd = [size for size in self.global_batch_sizes if size % self.base_batch_size]
                if odd:
                    raise ConfigError(f"recipe {text!r}: {odd[0]} is not a multiple of the base {self.base_batch_size}")

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
        cells = list(self._list_epochs(num_samples))
        updates = self.updates
        if updates is None:
            updates = 2 * self.count_updates(max(self.global_batch_sizes), num_samples)
        if updates:
            sizes = (self.base_batch_size, *self.global_batch_sizes)
            settings = [self._share(replace(self.job, global_batch_size=size)) for size in sizes]
            for size, of_size in zip(sizes, settings, strict=True):
                limited = replace(of_size, epochs=1, steps=updates)
                cells += [TrainingCell(replace(limited, seed=seed), "updates", NO_RECIPE, size) for seed in self.seeds]
        for cell in cells:
            cell.settings.check()
            _check_length(cell, num_samples)
        return cells

    def _list_epochs(self, num_samples: int) -> Iterator[TrainingCell]:
        base = self.base_batch_size
        plan = [(base, NO_RECIPE), *((size, recipe) for size in self.global_batch_sizes for recipe in self.recipes)]
        for size, text in plan:
            if size > num_samples:
                # A shorter batch would be recorded as this one.
                raise ConfigError(f"{num_samples} samples are fewer than a batch of {size}: leave it out")
            updates = self.count_updates(size, num_samples)
            settings = self._share(Recipe.parse(text).apply(self.job, size, base, updates))
            for seed in self.seeds:
                probes = size == base and seed == self.seeds[0]
                yield TrainingCell(replace(settings, seed=seed), "epochs", text, size, probes)

    def _share(self, settings: TrainSettings) -> TrainSettings:
        return share_batch(settings, self.most_at_once)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> LargeBatchSettings:
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
        return cls(**(values | {"job": TrainSettings.from_json(values["job"])}))
