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
from paceline.options import DATA, LEARNING, MEASUREMENT, MODEL, OUTPUT, Option, check_options, option
from paceline.plan import Plan
from paceline.records.checked import decode
from paceline.records.training import count_usable_ranks
from paceline.runtime.faults.monitor import find_hang_timeout
from paceline.strategy import Strategy
from paceline.training.schedules import GROWS, SCHEDULES, Growths, check_drops, check_growths, format_growths
from paceline.units import format_memory, format_number_of, parse_duration, shorten
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

STEP_S = 1e-5  # lower bound on the time of a step


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
    """Settings of a training run. `batches` fills in batch sizes that are None. `batch_growth` has pairs: a fraction of
    the run, and a factor of the initial global batch."""

    model: str = option("cnn", "mlp, cnn, resnet18, gpt2-tiny, ..., hf:NAME, or FILE.py:FUNCTION")
    data: str = option("synthetic", "synthetic, mnist, mrpc, text, ..., with an optional :PATH, or FILE.py:FUNCTION")
    ranks: int = option(1, "Number of ranks. Default: the launched world's, else 2.", least=1)
    batch_size: int | None = option(None, "Samples per rank in a micro-batch. Default: 32.", least=1)
    global_batch_size: int | None = option(None, "Samples per step over all ranks.", least=1)
    accumulate: int | None = option(
        None, "Micro-batches per step; gradients are sent with the last.", least=1, each_s=STEP_S
    )
    precision: str = option("fp32", "fp32, bf16 or fp16 (autocast)", choices=PRECISIONS)
    wrapper: str = option("paceline", "paceline, torch, none or dp", choices=WRAPPERS)
    backend: str = option("auto", "auto, gloo, shm (shared memory) or nccl", pattern=r"[A-Za-z0-9_.:, -]{1,100}")
    device: str = option("auto", "auto, cpu, cuda or cuda:INDEX", pattern=r"auto|cpu|cuda(:\d{1,9})?")
    threads: int | None = option(None, "CPU threads per rank for torch.", least=1)
    compile: bool = option(False, "Compile the model, block by block.")
    sync_batchnorm: bool = option(False, "Compute BatchNorm statistics over the whole global batch.")
    plan: str | None = option(None, "Bucket plan, a file that `tune` writes.")
    strategy: str = option("dense", "bf16, int8, int4, topk:0.01, powersgd:4, diloco:100+int8, zero1, ...")
    workers: int = option(1, "Replicas in one process that exchange data as ranks would, to study accuracy.", least=1)
    on_fault: str = option(
        "stop", "When a rank fails: stop, restart, spare (a warm spare replaces it) or shrink.", choices=POLICIES
    )
    max_faults: int = option(10, "Maximum number of faults to recover from.", least=1)
    spares: int = option(1, "Number of warm spare processes, with --on-fault spare.", least=1)
    hang_timeout: str | None = option(
        None,
        "How long a rank may hang in a step before it is killed; hangs are reported within seconds. Default: 10min.",
    )
    seed: int = option(1, "Seed for the model, data order and dropout.", least=0)
    samples: int | None = option(None, "Use the first N samples; for synthetic data, generate N.", DATA, least=1)
    context: int | None = option(None, "Tokens per sequence.", DATA, least=2)
    tokenizer: str = option("auto", "auto (the model's own, or bytes), bytes, or a folder", DATA)
    tail: str = option("keep", "A smaller last batch of an epoch: keep, drop, or pad it.", DATA, choices=TAILS)
    augment: bool | None = option(None, "Crop and flip images. Default: CIFAR-10 only.", DATA)
    cutout: int = option(0, "Side length in pixels of the square hidden in augmented images.", DATA, least=0)
    test_samples: int | None = option(None, "Evaluate on the first N samples. Default: all.", DATA, least=1)
    channels: tuple[int, ...] | None = option(None, "Channels of the cnn's convolutions: 32 64 128", MODEL, least=1)
    hidden: int | None = option(None, "Width of the hidden layer.", MODEL, least=1)
    dropout: float | None = option(None, "Dropout rate, for models that have dropout.", MODEL, least=0, below=1)
    ghost_batchnorm: int | None = option(None, "Compute BatchNorm statistics over N samples at a time.", MODEL, least=2)
    optimizer: str = option("sgd", "sgd, adamw, lars or lamb", LEARNING, choices=OPTIMIZERS)
    epochs: int = option(1, "Number of passes over the data.", LEARNING, least=1, each_s=STEP_S)
    steps: int | None = option(None, "Optimizer steps, instead of --epochs.", LEARNING, least=1, each_s=STEP_S)
    batch_growth: Growths = option(
        (), "SHARE:FACTOR,...: multiply the batch by FACTOR from this fraction of the run on.", LEARNING
    )
    grow: str = option("accumulate", "What grows on a rank: accumulate or batch-size.", LEARNING, choices=GROWS)
    clip: float | None = option(None, "Clip gradients to this norm.", LEARNING, above=0)
    lr: float = option(0.05, "Peak learning rate.", LEARNING, least=0)
    momentum: float = option(
        0.9,
        "Momentum of sgd (Nesterov) or lars.",
        LEARNING,
        least=0,
        below=1,
        advice=", or updates grow without bound",
    )
    trust_coefficient: float | None = option(None, "lars: a layer's step relative to its weights.", LEARNING, above=0)
    weight_decay: float = option(0.0, "Weight decay, except of biases and norms.", LEARNING, least=0)
    schedule: str = option("constant", "constant, cosine or linear (to 0), piecewise", LEARNING, choices=SCHEDULES)
    lr_warmup: int = option(0, "Number of steps to warm up the learning rate.", LEARNING, least=0)
    lr_drops: tuple[float, ...] = option((), "Where piecewise divides by 10: 0.5,0.75 of the run", LEARNING)
    label_smoothing: float = option(
        0.0,
        "Fraction of a target spread over all classes.",
        LEARNING,
        least=0,
        below=1,
        advice=", or labels carry no information",
    )
    profile: bool = option(False, "Time the forward, backward and optimizer of each step.", MEASUREMENT)
    save_every: str = option(
        "60s", "When a checkpoint is due: epoch, 10s, 5min, 2h, 100steps or auto (see --mtbf)", OUTPUT
    )
    mtbf: str | None = option(
        None, "With --save-every auto: mean time between faults of the job: 3h, 2d. Default: 1d for each host.", OUTPUT
    )
    keep: int = option(3, "Number of checkpoints to keep.", OUTPUT, least=1)
    tensorboard: bool = option(False, "Also write event files for TensorBoard.", OUTPUT)

    def __post_init__(self) -> None:
        if isinstance(self.backend, str):
            object.__setattr__(self, "backend", machine.canonical_backend(self.backend))
        if self.device is not None:  # a torch.device is as good as its name
            object.__setattr__(self, "device", str(self.device))

    @property
    def batches(self) -> Batches:
        """Fill in the sizes that are None; refuse sizes that contradict each other."""
        ranks, batch_size, size, accumulate = self.ranks, self.batch_size, self.global_batch_size, self.accumulate
        check_options(self, ("batch_size", "global_batch_size", "accumulate"))
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
        check_options(self)
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
        trust = f"--trust-coefficient {self.trust_coefficient}"
        refuse(
            (faults_s == 0, f"--mtbf {self.mtbf}: above 0 is needed"),
            (faults_s is not None and self.save_every != AUTO,
             f"--mtbf {self.mtbf} with --save-every {self.save_every}: it is for auto only; leave it out, or use that"),
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
    Option(each_s=STEP_S).check("accumulate", settings.batches.accumulate)
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
