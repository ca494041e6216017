"""Settings of a training run, checked before any rank starts. Does not import torch.

Values derived from settings (batches, save interval, data request) are computed here, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline import machine
from paceline.errors import ConfigError, PacelineError, RecordError, refuse
from paceline.plan import Plan
from paceline.records.kinds import decode
from paceline.records.training import count_usable_ranks
from paceline.runtime.monitor import find_hang_timeout
from paceline.strategy import Strategy
from paceline.training.schedules import GROWS, SCHEDULES, Growths, check_drops, check_growths, format_growths
from paceline.units import format_memory, format_number_of, parse_duration, refuse_endless, shorten
from paceline.workloads.data import TAILS, DataRequest, check_request, is_own, is_own_data, parse_data
from paceline.workloads.external import check_own
from paceline.workloads.registry import MODELS, ModelOptions, check_model, default_form

WRAPPERS = ("paceline", "torch", "none", "dp")
PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adamw", "lars", "lamb")
# What to do when a rank fails. With the last two, the surviving ranks keep running with their state in memory.
POLICIES = ("stop", "restart", "spare", "shrink")
DEFAULT_BATCH_SIZE = 32
_LARGEST_GPU_BYTES = 512 << 30
AUTO = "auto"
FIRST_SAVE_S = 5.0  # first save interval with "auto", until the cost of a save has been measured
HOST_MTBF_S = 86400.0  # assumed mean time between faults of one host

# Range checks: settings that take one of several names, integers with a minimum, and finite numbers from or above 0.
_KNOWN = {
    "wrapper": WRAPPERS, "precision": PRECISIONS, "optimizer": OPTIMIZERS, "schedule": SCHEDULES, "tail": TAILS,
    "grow": GROWS, "on_fault": POLICIES,
}  # fmt: skip
_LEAST = {
    "ranks": 1, "epochs": 1, "steps": 1, "keep": 1, "lr_warmup": 0, "samples": 1, "test_samples": 1, "context": 2,
    "threads": 1, "seed": 0, "cutout": 0, "ghost_batchnorm": 2, "workers": 1,
    "max_faults": 1, "spares": 1,
}  # fmt: skip
_REALS = dict.fromkeys(("lr", "momentum", "weight_decay", "label_smoothing"), "from")
_REALS |= dict.fromkeys(("clip", "trust_coefficient"), "above")


@dataclass(frozen=True)
class Batches:
    """How a global batch is divided: `world_size` ranks x `accumulate` micro-batches x `batch_size` samples."""

    world_size: int
    batch_size: int
    accumulate: int

    @property
    def global_batch_size(self) -> int:
        return self.world_size * self.batch_size * self.accumulate


def parse_save_every(text: str) -> tuple[float | None, int | None]:
    """The save interval as (seconds, steps), of which at most one is set; (None, None) means once per epoch.

    With `AUTO` this is only the first interval.
    """
    if text == "epoch":
        return None, None
    if text == AUTO:
        return FIRST_SAVE_S, None
    steps = re.fullmatch(r"\s*(\d{1,15})\s*steps?\s*", text)
    every = 0.0
    with contextlib.suppress(ConfigError):
        every = int(steps[1]) if steps is not None else parse_duration(text, "--save-every")
    refuse((not every, f"--save-every {text[:40]!r} is not understood: use epoch, 10s, 5min, 3h, 100steps or auto"))
    return (None, int(every)) if steps is not None else (every, None)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a training run. `data` is `NAME` or `NAME:PATH`; `batches` fills in batch sizes that are None.

    `steps` ends a run after this number of optimizer steps instead of after `epochs`. `batch_growth` lists pairs of a
    fraction of the run and the factor that multiplies the initial global batch from there on. `on_fault`, one of
    `POLICIES`, says what happens when a rank fails. A hung rank is killed after `hang_timeout` ("10min"); None means
    the environment variable, or the default.
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
    strategy: str = "dense"
    workers: int = 1
    profile: bool = False
    save_every: str = "60s"
    mtbf: str | None = None
    keep: int = 3
    on_fault: str = "stop"
    max_faults: int = 10
    spares: int = 1
    hang_timeout: str | None = None
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", machine.canonical_backend(self.backend))

    @property
    def batches(self) -> Batches:
        """Fill in the sizes that are None; refuse sizes that contradict each other."""
        ranks, batch_size, size, accumulate = self.ranks, self.batch_size, self.global_batch_size, self.accumulate
        named = (("--batch-size", batch_size), ("--global-batch-size", size), ("--accumulate", accumulate))
        refuse(*((n is not None and n < 1, f"{flag} {n}: at least 1 is needed") for flag, n in named))
        if size is None:
            return Batches(ranks, batch_size or DEFAULT_BATCH_SIZE, accumulate or 1)
        asked = f"--global-batch-size {size}"
        words = format_number_of(ranks, "rank")
        if batch_size is None:
            parts = ranks * (accumulate or 1)
            words += f" x {accumulate} micro-batches" if (accumulate or 1) > 1 else ""
            refuse((size % parts, f"{asked} cannot be divided evenly among {words}: use a multiple of {parts}"))
            return Batches(ranks, size // parts, accumulate or 1)
        parts = ranks * batch_size
        words = f"{words} x --batch-size {batch_size}"
        needed = size // parts
        refuse(
            (size % parts, f"{asked} is not a multiple of {parts} ({words}): use one, or leave out --batch-size"),
            (accumulate not in (None, needed),
             f"{asked} needs --accumulate {needed} with {words}, not {accumulate}: leave one of them out"),
        )  # fmt: skip
        return Batches(ranks, batch_size, needed)

    def on_ranks(self, count: int) -> TrainSettings:
        """The same run on another number of ranks: the global batch stays the same and is divided differently."""
        size, same = self.batches.global_batch_size, self.batches.batch_size
        if count == self.ranks:
            return self
        if size % count:
            fits = ", ".join(str(ranks) for ranks in range(1, size + 1) if size % ranks == 0)
            found = f"{count} ranks cannot divide the run's global batch of {size} samples evenly"
            raise ConfigError(f"{found}: use {fits} ranks, or start a new run", code="other-run")
        # Keep the batch size if possible: it fits into memory, and BatchNorm's statistics depend on it.
        batch_size = same if size % (count * same) == 0 else None
        return dataclasses.replace(self, ranks=count, global_batch_size=size, batch_size=batch_size, accumulate=None)

    def usable_ranks(self, most: int) -> int:
        """The largest number of ranks, up to `most`, that divides the global batch equally."""
        return count_usable_ranks(self.batches.global_batch_size, most)

    @property
    def stays_in_memory(self) -> bool:
        """Whether the surviving ranks keep running after a fault."""
        return self.on_fault in ("spare", "shrink")

    @property
    def data_request(self) -> DataRequest:
        name, path = parse_data(self.data)
        shared = ("context", "tokenizer", "samples", "seed", "augment", "cutout")
        return DataRequest(name=name, path=path, **{field: getattr(self, field) for field in shared})

    @property
    def is_whole(self) -> bool:
        """Whether the model is a user's function that must also return its data, because no data is named."""
        return is_own(self.model) and self.data == "synthetic"

    @property
    def model_options(self) -> ModelOptions:
        return ModelOptions(channels=self.channels, hidden=self.hidden, dropout=self.dropout)

    @property
    def parsed_strategy(self) -> Strategy:
        return Strategy.parse(self.strategy)

    @property
    def predicts_numbers(self) -> bool:
        """Whether this is a regression job: targets are numbers, so there is no accuracy and no label smoothing."""
        name, _ = parse_data(self.data)
        is_default = name == "synthetic" and self.model in MODELS
        return name == "synthetic:numbers" or (is_default and MODELS[self.model].form.kind == "numbers")

    def check(self) -> None:
        """Refuse invalid settings. Ranks check what depends on the data or the model."""
        for name, value in self.to_json().items():
            option, least, start = f"--{name.replace('_', '-')}", _LEAST.get(name, 0), _REALS.get(name)
            flag = f"{option} {value}"
            if name in _KNOWN and value not in _KNOWN[name]:
                raise ConfigError(f"{option} {value!r} is unknown: use one of {', '.join(_KNOWN[name])}")
            if name in _LEAST and value is not None and value < least:
                raise ConfigError(f"{flag}: at least {least} is needed")
            if start and value is not None and (not 0 <= value < math.inf or (start == "above" and value == 0)):
                raise ConfigError(f"{flag}: a finite number {start} 0 is needed")
        parse_save_every(self.save_every)
        find_hang_timeout(self.hang_timeout)
        faults_s = None if self.mtbf is None else parse_duration(self.mtbf, "--mtbf")
        _ = self.batches
        check_growths(self.batch_growth)
        strategy = self.parsed_strategy
        sends = f"--strategy {self.strategy}"
        what = "trains in one process" if self.wrapper == "none" else "uses the GPUs of one process"
        steps = f"--steps {self.steps}"
        growth = format_growths(self.batch_growth)
        smoothing = self.label_smoothing
        trust = f"--trust-coefficient {self.trust_coefficient}"
        refuse(
            (faults_s == 0, f"--mtbf {self.mtbf}: above 0 is needed"),
            (faults_s is not None and self.save_every != AUTO,
             f"--mtbf {self.mtbf} with --save-every {self.save_every}: it is for auto only; leave it out, or use that"),
            (self.momentum >= 1, f"--momentum {self.momentum}: below 1 is needed, or updates grow without bound"),
            (smoothing >= 1, f"--label-smoothing {smoothing}: below 1 is needed, or labels carry no information"),
            (self.steps is not None and self.epochs != 1,
             f"{steps} with --epochs {self.epochs}: a run has only one length; leave one out"),
            (self.steps is not None and self.batch_growth,
             f"--batch-growth {growth} with {steps}: it counts in fractions of all samples of the run; use --epochs"),
            (self.grow != GROWS[0] and not self.batch_growth,
             f"--grow {self.grow} has no effect without --batch-growth: leave it out, or give both"),
            (self.wrapper in ("none", "dp") and self.ranks > 1,
             f"--wrapper {self.wrapper} {what}, but --ranks is {self.ranks}: use --ranks 1"),
            (self.plan is not None and self.wrapper not in ("paceline", "torch"),
             f"--plan needs --wrapper paceline or torch, not {self.wrapper}"),
            (self.workers > 1 and self.ranks > 1,
             f"--workers {self.workers} share one process, but --ranks is {self.ranks}: use one or the other"),
            (self.workers > 1 and (strategy.is_sharded or strategy.between_hosts),
             f"{sends} with --workers {self.workers}: use --ranks {self.workers}"),
            (self.workers > 1 and self.precision == "fp16",
             f"--precision fp16 with --workers {self.workers}: each would need its own loss scale; use bf16"),
            (not strategy.is_dense and self.wrapper not in ("paceline", "torch"),
             f"{sends} needs --wrapper paceline, not {self.wrapper}"),
            (not strategy.is_hook and self.wrapper == "torch",
             f"{sends} cannot be a communication hook of torch's wrapper: use --wrapper paceline"),
            (strategy.dgc and self.optimizer != "sgd",
             f"{sends} includes SGD momentum: leave out dgc, or use --optimizer sgd"),
            (strategy.dgc and self.momentum not in (TrainSettings.momentum, strategy.dgc),
             f"--momentum {self.momentum} with {sends}, whose momentum is {strategy.dgc:g}: write dgc={self.momentum}"),
            (self.sync_batchnorm and self.wrapper == "dp",
             "--sync-batchnorm does not work with --wrapper dp: use paceline or torch"),
            # Options for another optimizer, schedule or norm would silently do nothing.
            (self.trust_coefficient is not None and self.optimizer != "lars",
             f"{trust} with --optimizer {self.optimizer}: leave it out, or use lars"),
            (self.ghost_batchnorm is not None and self.sync_batchnorm,
             f"--ghost-batchnorm {self.ghost_batchnorm} with --sync-batchnorm: one shrinks the batch that BatchNorm "
             "sees, the other enlarges it; leave one out"),
            (self.spares > 1 and self.on_fault != "spare",
             f"--spares {self.spares} with --on-fault {self.on_fault}: leave it out, or use --on-fault spare"),
            (self.max_faults != TrainSettings.max_faults and self.on_fault == "stop",
             f"--max-faults {self.max_faults} with --on-fault stop, which ends the run at the first fault: leave it "
             "out, or use --on-fault restart"),
        )  # fmt: skip
        check_drops(self.lr_drops, self.schedule)

    def check_policy(self) -> None:
        """Refuse recovery from the memory of another rank if no other rank holds the lost state."""
        if not self.stays_in_memory:
            return
        strategy = self.parsed_strategy
        asked = f"--on-fault {self.on_fault}"
        has_own_size = self.batch_size is None and self.global_batch_size is None
        sends = f"{asked} with --strategy {self.strategy}"
        instead = "use --on-fault restart"
        refuse(
            (self.ranks == 1, f"{asked} with --ranks 1: no other rank has a copy of the state; {instead}"),
            (self.wrapper != "paceline", f"{asked} needs --wrapper paceline, not {self.wrapper}; or {instead}"),
            (strategy.is_sharded,
             f"{sends}: a lost rank takes its shard of the optimizer state with it; {instead}"),
            (strategy.outer,
             f"{sends}: a lost rank takes its updates since the last sync with it; {instead}"),
            (strategy.codec not in ("dense", "bf16") or strategy.between_hosts,
             f"{sends}: a lost rank takes its residuals with it; {instead}"),
            (self.on_fault == "shrink" and has_own_size and (self.is_whole or is_own_data(self.data)),
             f"{asked} with your own data: give --global-batch-size, so that fewer ranks can divide it"),
            code="on-fault",
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainSettings:
        """The settings that `to_json` wrote; refuses unknown keys and values of the wrong type."""
        where = "the run's configuration"
        if not isinstance(values, dict):
            raise ConfigError(f"{where} is not a JSON object: give the folder of a run of this Paceline")
        if unknown := sorted(set(values) - set(NAMES)):
            raise ConfigError(f"{where} has unknown settings: {', '.join(unknown)[:200]}")
        grown = values.get("batch_growth", ())
        pairs = isinstance(grown, list | tuple) and all(
            isinstance(mark, list | tuple) and len(mark) == 2 for mark in grown
        )
        if not pairs or not all(type(number) in (int, float) for mark in grown for number in mark):
            raise ConfigError(f"{where} has batch_growth {str(grown)[:40]!r}: must be pairs of a fraction and a factor")
        try:
            found: TrainSettings = decode(
                cls, {name: value for name, value in values.items() if name != "batch_growth"}
            )
        except (RecordError, RecursionError, OverflowError) as error:
            raise ConfigError(f"{where} is damaged: {str(error)[:200]}", code="damaged") from None
        return dataclasses.replace(found, batch_growth=tuple(map(tuple, grown)))


NAMES = tuple(field.name for field in dataclasses.fields(TrainSettings))


def count_least_bytes(settings: TrainSettings) -> dict[str, int]:
    """A lower bound for the memory that each option needs on one rank; the model's own needs are not included."""
    form = default_form(settings.model) if settings.data == "synthetic" and settings.model in MODELS else None
    shape, is_text = (form.shape, form.kind in ("tokens", "pairs")) if form is not None else ((1,), False)
    shape = (settings.context or shape[0],) if is_text else shape
    size = math.prod(shape)
    item = 1 if form is not None and form.kind == "images" else 8 if is_text else 4
    batch = settings.batches.batch_size
    found = {
        "batch_size": batch * size * 4,
        "context": batch * (settings.context or 0) * max(1, form.vocabulary if form is not None else 1) * 4,
        "workers": settings.workers * 10_000,
    }
    if settings.data.startswith("synthetic"):
        found["samples"] = (settings.samples or 0) * size * item
        found["context"] = max(found["context"], (settings.context or 0) * 1000 * 8)
    # Weights and gradients. The last convolution leaves at least one pixel per channel for the hidden layer.
    channels = settings.channels or ()
    hidden = settings.hidden or 0
    found["channels"] = 2 * 4 * 9 * sum(a * b for a, b in itertools.pairwise((1, *channels)))
    found["hidden"] = 2 * 4 * hidden * (size if settings.model == "mlp" else (channels or (64,))[-1])
    return found


def check_size(settings: TrainSettings) -> None:
    """Refuse jobs that cannot fit into memory or would never end, before anything is allocated.

    Only torch knows the memory of the GPUs, so this assumes the largest GPU that exists.
    """
    refuse_endless(1e-5, epochs=settings.epochs, steps=settings.steps, accumulate=settings.batches.accumulate)
    gpus = 0 if settings.device == "cpu" else machine.count_gpus()
    have = max(machine.available_memory_bytes(), gpus * _LARGEST_GPU_BYTES)
    most = max(1024, 16 * machine.count_cores())
    for name, need in count_least_bytes(settings).items():
        value = settings.batches.batch_size if name == "batch_size" else getattr(settings, name)
        if need > have:
            shown = " ".join(map(shorten, value)) if isinstance(value, tuple) else shorten(value or 0)
            flag = f"--{name.replace('_', '-')} {shown}"
            text = f"{flag} needs at least {format_memory(min(need, 10**30))} on each rank"
            raise ConfigError(f"{text}, but only {format_memory(have)} is free: use less", code="memory")
    if (settings.threads or 0) > most:
        raise ConfigError(f"--threads {shorten(settings.threads or 0)}: this host has few cores; use at most {most}")


def check_job(settings: TrainSettings) -> None:
    """Refuse what can be refused before a rank starts: bad settings, unknown models or data, missing files."""
    settings.check()
    settings.check_policy()
    if settings.wrapper == "dp" and (settings.device == "cpu" or not machine.count_gpus()):
        found = "--wrapper dp is nn.DataParallel, which needs GPUs and does nothing on a CPU"
        instead = "use paceline or torch with several --ranks, or none"
        raise ConfigError(f"{found}: {instead}; a run with dp can only be resumed on GPUs, so start a new one here")
    check_model(settings.model, settings.model_options)
    check_size(settings)
    check_request(settings.data_request)
    if is_own_data(settings.data):
        check_own(settings.data, "data")
    smoothing = f"--label-smoothing {settings.label_smoothing}"
    refuse((settings.label_smoothing and settings.predicts_numbers, f"{smoothing}: targets are numbers; leave it out"))
    if settings.plan is not None:
        load_plan(Path(settings.plan))
    if settings.context is not None and settings.data == "synthetic":
        kind = default_form(settings.model).kind
        if kind not in ("pairs", "tokens"):
            raise ConfigError(f"--context {settings.context}: {settings.model} is trained on {kind} here; leave it out")


def list_job_warnings(settings: TrainSettings) -> list[str]:
    """Warnings about settings that work but measure little."""
    text = "--wrapper dp on one GPU: nn.DataParallel has nothing to distribute and acts as if there were no wrapper"
    return [text] if settings.wrapper == "dp" and machine.count_gpus() < 2 else []


def takes_cap_lists() -> bool:
    """Whether the installed torch's DDP accepts a cap for each bucket. Does not import torch."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def load_plan(path: Path) -> Plan:
    """Load a plan from a file; a ConfigError says what is wrong with it."""
    try:
        return Plan.from_json(path.read_text())
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}; give a plan file") from None
    except (PacelineError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan {path}: {error}") from None
