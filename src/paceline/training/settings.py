"""What a training run does: its settings, checked before any rank starts. Imports no torch.

What follows from a setting (batches, cadence of saves, the request for data) is computed here, once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, PacelineError
from paceline.plan import Plan
from paceline.training.schedules import GROWS, SCHEDULES, Growths, check_drops, check_growths, format_growths
from paceline.units import format_number_of
from paceline.workloads.data import TAILS
from paceline.workloads.data.sources import DataRequest, check_request, parse_data
from paceline.workloads.registry import ModelOptions, check_model, default_form

WRAPPERS = ("paceline", "torch", "none", "dp")
PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adamw", "lars", "lamb")
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class Batches:
    """How one global batch is made up: `world_size` ranks x `accumulate` micro-batches x `batch_size` samples."""

    world_size: int
    batch_size: int
    accumulate: int

    @property
    def global_batch_size(self) -> int:
        return self.world_size * self.batch_size * self.accumulate


def settle_batches(
    world_size: int, batch_size: int | None, global_batch_size: int | None, accumulate: int | None
) -> Batches:
    """Fill in what is None; refuse what does not add up."""
    named = (("--batch-size", batch_size), ("--global-batch-size", global_batch_size), ("--accumulate", accumulate))
    for name, value in named:
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value}: at least 1 is needed")
    if global_batch_size is None:
        return Batches(world_size, batch_size or DEFAULT_BATCH_SIZE, accumulate or 1)
    if batch_size is None:
        parts = world_size * (accumulate or 1)
        words = f"{format_number_of(world_size, 'rank')}" + (
            f" x {accumulate} micro-batches" if (accumulate or 1) > 1 else ""
        )
        if global_batch_size % parts:
            raise ConfigError(
                f"--global-batch-size {global_batch_size} cannot be shared by {words}: use a multiple of {parts}"
            )
        return Batches(world_size, global_batch_size // parts, accumulate or 1)
    parts = world_size * batch_size
    if global_batch_size % parts:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} is not a multiple of {parts} "
            f"({format_number_of(world_size, 'rank')} x --batch-size {batch_size}): use one, or leave out --batch-size"
        )
    needed = global_batch_size // parts
    if accumulate is not None and accumulate != needed:
        raise ConfigError(
            f"--global-batch-size {global_batch_size} needs --accumulate {needed} with "
            f"{format_number_of(world_size, 'rank')} x --batch-size {batch_size}, and --accumulate {accumulate} "
            "was given: leave one of them out"
        )
    return Batches(world_size, batch_size, needed)


@dataclass(frozen=True)
class SaveEvery:
    """When a checkpoint is due: after a number of seconds, of steps, or at the end of each epoch (neither)."""

    seconds: float | None = None
    steps: int | None = None

    @classmethod
    def parse(cls, text: str) -> SaveEvery:
        if text == "epoch":
            return cls()
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|steps?)", text.replace(" ", ""))
        if match is None or float(match[1]) == 0 or (match[2].startswith("step") and "." in match[1]):
            raise ConfigError(f"--save-every {text!r} is not understood: use epoch, 10s, 5min or 100steps")
        if match[2].startswith("step"):
            return cls(steps=int(match[1]))
        return cls(seconds=float(match[1]) * (60 if match[2] == "min" else 1))


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """A training run. `data` is `NAME` or `NAME:PATH`; batches of None are settled by `batches`.

    `steps` ends a run after this number of optimizer steps instead of after `epochs`. `batch_growth` has pairs of a
    share of the run and the factor by which the first global batch is multiplied from there on.
    """

    model: str = "cnn"
    data: str = "synthetic"
    ranks: int = 1
    backend: str = "auto"
    device: str = "auto"
    threads: int | None = None
    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = None
    global_batch_size: int | None = None
    accumulate: int | None = None
    batch_growth: Growths = ()
    grow: str = "accumulate"
    tail: str = "keep"
    precision: str = "fp32"
    compile: bool = False
    clip: float | None = None
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    trust_coefficient: float | None = None
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    schedule: str = "constant"
    lr_warmup: int = 0
    lr_drops: tuple[float, ...] = ()
    wrapper: str = "paceline"
    sync_batchnorm: bool = False
    ghost_batchnorm: int | None = None
    plan: str | None = None
    profile: bool = False
    save_every: str = "60s"
    keep: int = 3
    seed: int = 1
    samples: int | None = None
    test_samples: int | None = None
    context: int | None = None
    tokenizer: str = "auto"
    augment: bool | None = None
    cutout: int = 0
    channels: tuple[int, ...] | None = None
    hidden: int | None = None
    dropout: float | None = None
    tensorboard: bool = False

    @property
    def batches(self) -> Batches:
        return settle_batches(self.ranks, self.batch_size, self.global_batch_size, self.accumulate)

    def check(self) -> None:
        """Refuse invalid settings. What depends on the data or the model is checked by the ranks."""
        for name, value, known in (
            ("--wrapper", self.wrapper, WRAPPERS),
            ("--precision", self.precision, PRECISIONS),
            ("--optimizer", self.optimizer, OPTIMIZERS),
            ("--schedule", self.schedule, SCHEDULES),
            ("--tail", self.tail, TAILS),
            ("--grow", self.grow, GROWS),
        ):
            if value not in known:
                raise ConfigError(f"{name} {value!r} is unknown: known are {', '.join(known)}")
        for flag, number, least in (
            ("--ranks", self.ranks, 1),
            ("--epochs", self.epochs, 1),
            ("--steps", self.steps, 1),
            ("--keep", self.keep, 1),
            ("--lr-warmup", self.lr_warmup, 0),
            ("--samples", self.samples, 1),
            ("--test-samples", self.test_samples, 1),
            ("--context", self.context, 2),
            ("--threads", self.threads, 1),
            ("--seed", self.seed, 0),
            ("--cutout", self.cutout, 0),
            ("--ghost-batchnorm", self.ghost_batchnorm, 2),
        ):
            if number is not None and number < least:
                raise ConfigError(f"{flag} {number}: at least {least} is needed")
        for flag, real, is_open in (
            ("--lr", self.lr, False),
            ("--clip", self.clip, True),
            ("--momentum", self.momentum, False),
            ("--trust-coefficient", self.trust_coefficient, True),
            ("--weight-decay", self.weight_decay, False),
            ("--label-smoothing", self.label_smoothing, False),
        ):
            if real is not None and (not math.isfinite(real) or real < 0 or (is_open and real == 0)):
                raise ConfigError(f"{flag} {real}: a finite number {'above' if is_open else 'from'} 0 is needed")
        if self.momentum >= 1:
            raise ConfigError(f"--momentum {self.momentum}: below 1 is needed, or steps grow without end")
        if self.label_smoothing >= 1:
            raise ConfigError(
                f"--label-smoothing {self.label_smoothing}: below 1 is needed, or nothing is left to learn"
            )
        SaveEvery.parse(self.save_every)
        _ = self.batches
        self._check_length()
        if self.wrapper in ("none", "dp") and self.ranks > 1:
            what = "trains one process" if self.wrapper == "none" else "serves the GPUs of one process"
            raise ConfigError(f"--wrapper {self.wrapper} {what}, and --ranks is {self.ranks}: use --ranks 1")
        if self.plan is not None and self.wrapper not in ("paceline", "torch"):
            raise ConfigError(f"--plan needs --wrapper paceline or torch, not {self.wrapper}")
        if self.sync_batchnorm and self.wrapper == "dp":
            raise ConfigError("--sync-batchnorm does not work with --wrapper dp: use paceline or torch")
        self._check_large_batch()

    def _check_large_batch(self) -> None:
        """Refuse options of another optimizer, schedule or norm, which would change nothing."""
        if self.trust_coefficient is not None and self.optimizer != "lars":
            found = f"--trust-coefficient {self.trust_coefficient} with --optimizer {self.optimizer}"
            raise ConfigError(f"{found}: leave it out, or use lars")
        check_drops(self.lr_drops, self.schedule)
        if self.ghost_batchnorm is not None and self.sync_batchnorm:
            raise ConfigError(
                f"--ghost-batchnorm {self.ghost_batchnorm} with --sync-batchnorm: one makes the batch of a norm "
                "smaller, the other larger; leave one out"
            )

    def _check_length(self) -> None:
        check_growths(self.batch_growth)
        if self.steps is not None and self.epochs != 1:
            raise ConfigError(f"--steps {self.steps} with --epochs {self.epochs}: a run has one length; leave one out")
        if self.steps is not None and self.batch_growth:
            raise ConfigError(
                f"--batch-growth {format_growths(self.batch_growth)} with --steps {self.steps}: its shares are of "
                "all samples of the run, which --epochs fixes and --steps does not; use --epochs"
            )
        if self.grow != GROWS[0] and not self.batch_growth:
            raise ConfigError(f"--grow {self.grow} without --batch-growth: nothing grows; leave it out, or give both")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainSettings:
        """The settings that `to_json` wrote; refuses unknown keys."""
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ConfigError(f"the run's configuration has unknown settings: {', '.join(unknown)}")
        values = dict(values)
        for name in ("channels", "lr_drops"):
            if values.get(name) is not None:
                values[name] = tuple(values[name])
        values["batch_growth"] = tuple((share, factor) for share, factor in values.get("batch_growth", ()))
        return cls(**values)


def build_data_request(settings: TrainSettings) -> DataRequest:
    name, path = parse_data(settings.data)
    return DataRequest(
        name=name,
        path=path,
        context=settings.context,
        tokenizer=settings.tokenizer,
        samples=settings.samples,
        seed=settings.seed,
        augment=settings.augment,
        cutout=settings.cutout,
    )


def build_model_options(settings: TrainSettings) -> ModelOptions:
    return ModelOptions(channels=settings.channels, hidden=settings.hidden, dropout=settings.dropout)


def check_job(settings: TrainSettings) -> None:
    """Everything that can be refused before a rank starts: settings, an unknown model, data, or missing files."""
    options = build_model_options(settings)
    settings.check()
    check_model(settings.model, options)
    check_request(build_data_request(settings))
    if settings.plan is not None:
        load_plan(Path(settings.plan))
    if settings.context is not None and settings.data == "synthetic":
        kind = default_form(settings.model, options).kind
        if kind not in ("pairs", "tokens"):
            raise ConfigError(f"--context {settings.context}: {settings.model} is trained on {kind} here; leave it out")


def takes_cap_lists() -> bool:
    """Whether the DDP of the installed torch accepts a cap for each bucket. Imports no torch."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def load_plan(path: Path) -> Plan:
    """The plan in a file; ConfigError says what is wrong with it."""
    try:
        return Plan.from_json(path.read_text())
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}; give the file of a plan") from None
    except (PacelineError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan {path}: {error}") from None
