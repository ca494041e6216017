"""The settings of scaling studies and the cells that follow from them, checked before any rank starts. No torch.

Measuring the cells is in `scaling`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline import machine
from paceline.errors import ConfigError
from paceline.measure.settings import BACKENDS, CollectiveSettings, check_name
from paceline.runtime.environment import is_launched, read_place
from paceline.training.recipes import NO_RECIPE, Recipe, share_batch
from paceline.training.schedules import BatchSchedule
from paceline.training.settings import TrainSettings, check_job
from paceline.units import MIB

SCALED_WRAPPERS = ("paceline", "torch", "dp")
_RECIPES = ("none", "sqrt", "linear", "linear+warmup", "linear+warmup+smoothing", "lars+warmup", "lamb+warmup", "grow")

Counts = int | Sequence[int]
Names = str | Sequence[str]


@dataclass(frozen=True)
class Setup:
    """A wrapper and the backend of its messages."""

    wrapper: str
    backend: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", machine.canonical_backend(self.backend))


@dataclass(frozen=True)
class Cell:
    """What takes turns: one mode at one number of samples, of a rank's micro-batch (weak) or over all ranks and
    micro-batches (strong)."""

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
class ScaleSettings:
    """`scale ranks`: the job on each number of ranks, weak (`batch_sizes` per rank) and strong (`global_batch_sizes`),
    all wrappers on all backends in turns, and one rank alone."""

    job: TrainSettings
    ranks: tuple[int, ...]
    setups: tuple[Setup, ...]
    batch_sizes: tuple[int, ...]
    global_batch_sizes: tuple[int, ...] = ()
    iters: int | None = None

    @property
    def cells(self) -> tuple[Cell, ...]:
        weak = (Cell("weak", size) for size in self.batch_sizes)
        return (*weak, *(Cell("strong", size) for size in self.global_batch_sizes))

    @property
    def backends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.backend for c in self.setups if c.wrapper != "dp"))

    def check(self) -> None:
        """Refuse what cannot be measured; the job itself is checked apart."""
        if not self.setups:
            raise ConfigError(f"no wrapper given: known are {', '.join(SCALED_WRAPPERS)}")
        for setup in self.setups:
            check_name("wrapper", setup.wrapper, SCALED_WRAPPERS)
            check_name("backend", setup.backend, BACKENDS)
        if min(self.ranks) < 1 or max(self.ranks) < 2:
            raise ConfigError(f"--ranks {','.join(map(str, self.ranks))}: scaling compares one rank with two or more")
        for size in self.global_batch_sizes:
            parts = self.job.accumulate or 1
            odd = [n for n in self.ranks if size % (n * parts)]
            if odd:
                how = f" in {parts} micro-batches" if parts > 1 else ""
                raise ConfigError(
                    f"--global-batch-size {size} cannot be shared equally by {odd[0]} ranks{how}: use a multiple of "
                    f"{', '.join(str(n * parts) for n in self.ranks)}"
                )
        if not self.cells:
            raise ConfigError("nothing to measure: give --batch-size (weak scaling) or --global-batch-size (strong)")
        if self.iters is not None and self.iters < 2:
            raise ConfigError(f"--iters {self.iters}: at least 2 are needed to know the noise")
        gpus = machine.count_gpus()
        if any(c.wrapper == "dp" for c in self.setups) and (gpus < max(self.ranks) or self.job.device == "cpu"):
            raise ConfigError(
                f"--wrapper dp puts {max(self.ranks)} GPUs into one process, and {gpus} can be used here: leave it out"
            )

    def sweep(self, num_bytes: int) -> CollectiveSettings:
        """All-reduces alone on these ranks and backends, up to the size of all gradients: the peak bandwidth, and what
        a prediction is based on."""
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
        if "contestants" in values:  # the name of the key in older studies
            values = values | {"setups": values["contestants"]}
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
        values["job"] = TrainSettings.from_json(values["job"])
        values["setups"] = tuple(Setup(**value) for value in values["setups"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
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
    def from_json(cls, values: dict[str, Any]) -> BatchSettings:
        return cls(
            job=TrainSettings.from_json(values["job"]),
            batch_sizes=tuple(values["batch_sizes"]),
            epochs=values["epochs"],
        )


# -- large batches -----------------------------------------------------------------------------------------------------


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


# -- settings from what was requested ----------------------------------------------------------------------------------


def build_batch(
    *, batch_size: Counts = (32, 128, 512, 2048), epochs: int = 3, device: str = "auto", **job: Any
) -> BatchSettings:
    _refuse(job, ("ranks", "wrapper", "backend", "plan", "sync_batchnorm", "accumulate"), "one rank computes alone")
    sizes = list_counts(batch_size)
    train = TrainSettings(ranks=1, batch_size=sizes[0], wrapper="none", device=_choose_device(device), **job)
    settings = BatchSettings(job=train, batch_sizes=sizes, epochs=epochs)
    settings.check()
    for size in sizes:
        check_job(dataclasses.replace(train, batch_size=size))
    return settings


def build_ranks(
    *,
    ranks: Counts | None = None,
    batch_size: Counts = (8, 32),
    global_batch_size: Counts | None = None,
    wrapper: Names = ("paceline", "torch"),
    backend: Names = "auto",
    iters: int | None = None,
    device: str = "auto",
    **job: Any,
) -> ScaleSettings:
    _refuse(job, ("plan",), "wrappers are compared with their default buckets")
    _refuse(job, ("sync_batchnorm",), "it would wait for ranks that do not take part in a turn")
    counts, sizes, device = _choose_counts(ranks), list_counts(batch_size), _choose_device(device)
    wrappers, backends = _split(wrapper), _split(backend)
    if backends == ("auto",):
        backends = _choose_backends(device, max(counts))
    setups = [Setup(w, b) for b in backends for w in wrappers if w != "dp"]
    setups += [Setup("dp", backends[0])] if "dp" in wrappers else []
    accumulate = job.get("accumulate") or 1
    if global_batch_size is not None:
        strong = list_counts(global_batch_size)
    else:  # the least from twice the largest batch on that all of them can share
        shares = math.lcm(*counts) * accumulate
        strong = (shares * -(-2 * max(sizes) // shares),)
    # A rank has the same number of threads alone as among others: the study compares ranks, not machines.
    threads = job.pop("threads", None) or max(1, machine.count_cores() // max(counts))
    samples = job.pop("samples", None)
    if samples is None and job.get("data", "synthetic").startswith("synthetic"):
        samples = max(2048, max(max(sizes) * max(counts), *strong, 0) * accumulate)
    train = TrainSettings(
        ranks=1, batch_size=sizes[0], wrapper="none", backend="gloo", device=device, threads=threads, samples=samples,
        **job,
    )  # fmt: skip
    settings = ScaleSettings(
        job=train, ranks=counts, setups=tuple(setups), batch_sizes=sizes, global_batch_sizes=strong, iters=iters
    )
    settings.check()
    check_job(train)
    return settings


def build_large_batch(
    *,
    model: str | None = None,
    base_batch_size: int = 16,
    global_batch_size: Counts | None = None,
    recipes: Names | None = None,
    seeds: int = 3,
    epochs: int = 6,
    updates: int | None = None,
    batch_size: int = 512,
    evaluations: int = 6,
    ranks: int | None = None,
    **job: Any,
) -> LargeBatchSettings:
    _refuse(job, ("accumulate",), "it follows from the batches; batch_size is what a rank computes at once")
    if model is None and not {"channels", "hidden"} & set(job):
        job |= {"channels": (8, 16), "hidden": 64}
    if job.get("data", "synthetic") == "synthetic":
        job.setdefault("samples", 1024)
    if "backend" in job:
        job["backend"] = machine.canonical_backend(job["backend"])
    launched = read_place().world_size if is_launched() else 1
    if ranks is not None and launched > 1 and ranks != launched:
        raise ConfigError(f"{ranks} ranks in a launched world of {launched}: leave out --ranks", code="launched")
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds}: at least 1 is needed")
    values: dict[str, Any] = {"lr": 0.005, "schedule": "cosine"} | job
    train = TrainSettings(
        model=model or "cnn", ranks=ranks or launched, global_batch_size=base_batch_size, epochs=epochs, **values
    )
    texts = _split(recipes) if recipes is not None else _choose_recipes(train)
    names = tuple(dict.fromkeys(Recipe.parse(text).text for text in texts))
    settings = LargeBatchSettings(
        job=train, base_batch_size=base_batch_size,
        global_batch_sizes=(16 * base_batch_size,) if global_batch_size is None else list_counts(global_batch_size),
        recipes=names if NO_RECIPE in names else (NO_RECIPE, *names),  # to compare the others with
        seeds=tuple(train.seed + number for number in range(seeds)),
        updates=updates, most_at_once=batch_size, evaluations=evaluations,
    )  # fmt: skip
    settings.check()
    check_job(train)
    return settings


def _choose_counts(ranks: Counts | None) -> tuple[int, ...]:
    """1, 2, 4, ... up to the cores (or GPUs), or to the launched world; one rank is always there to compare with."""
    launched = read_place().world_size if is_launched() else 1
    most = launched if launched > 1 else max(2, machine.count_gpus() or machine.count_cores())
    counts = list_counts(ranks) if ranks is not None else tuple(2**k for k in range(most.bit_length()))
    if launched > 1 and max(counts) > launched:
        raise ConfigError(
            f"{max(counts)} ranks in a launched world of {launched}: use at most that many", code="launched"
        )
    return tuple(sorted({1, *counts}))


def _choose_device(device: str) -> str:
    return device if device != "auto" else "cuda" if machine.count_gpus() else "cpu"


def _choose_backends(device: str, most: int) -> tuple[str, ...]:
    if device == "cuda":
        return ("nccl",) if machine.count_gpus() >= most else ("gloo",)
    return ("gloo", "shm")


def _choose_recipes(train: TrainSettings) -> tuple[str, ...]:
    """All that this job can have: what changes BatchNorm only where there is one, as far as is known here."""
    if not train.model.startswith("resnet"):
        return _RECIPES
    return (*_RECIPES, "linear+warmup+ghost", *(["linear+warmup+sync"] if train.ranks > 1 else []))


def _refuse(job: dict[str, Any], names: Sequence[str], why: str) -> None:
    """An option that would change nothing is refused, not ignored."""
    given = next((name for name in names if name in job), None)
    if given is not None:
        raise ConfigError(f"--{given.replace('_', '-')}: {why}; leave it out", code="unused")


def list_counts(counts: Counts) -> tuple[int, ...]:
    """One number or several, without repeats."""
    found = (counts,) if isinstance(counts, int) else tuple(dict.fromkeys(counts))
    if not found or min(found) < 1:
        raise ConfigError(f"{counts}: at least one number of at least 1 is needed")
    return found


def _split(names: Names) -> tuple[str, ...]:
    found = names.split(",") if isinstance(names, str) else names
    return tuple(dict.fromkeys(name.strip() for name in found if name.strip()))
