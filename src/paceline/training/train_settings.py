"""Settings of a training run, checked before any rank starts. Does not import torch.

This module also derives values from the settings: batches, save interval, data request.
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
from paceline.training import schedules
from paceline.training.schedules import GROWS, SCHEDULES, BatchSchedule, Growths, Schedule
from paceline.units import format_memory, format_number_of, parse_duration, shorten
from paceline.workloads.data import TAILS, DataForm, DataRequest, check_request, is_own, is_own_data, parse_data
from paceline.workloads.external import check_own
from paceline.workloads.registry import MODELS, ModelOptions, check_model, default_form

WRAPPERS = ("paceline", "torch", "none", "dp")
PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adamw", "lars", "lamb")
# Recovery policies. With the last two, the surviving ranks keep running with their state in memory.
POLICIES = ("stop", "restart", "spare", "shrink")
DEFAULT_BATCH_SIZE = 32
_LARGEST_GPU_BYTES = 512 << 30
AUTO = "auto"
FIRST_SAVE_S = 5.0  # first save interval with "auto", until the cost of a save has been measured
HOST_MTBF_S = 86400.0  # assumed mean time between faults per host

STEP_S = 1e-5  # lower bound on step time


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
    """Parse the save interval to (seconds, None), (None, steps), or (None, None) for once per epoch.

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
    refuse((not every, f"--save-every {text[:40]!r} cannot be parsed: use epoch, 10s, 5min, 3h, 100steps or auto"))
    return (None, int(every)) if steps is not None else (every, None)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a training run. `batches` fills in batch sizes that are None. `batch_growth` is a list of pairs: a
    fraction of the run, and a multiple of the initial global batch."""

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
    plan: str | None = option(None, "Bucket plan file, written by `tune`.")
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
    tail: str = option("keep", "How to treat a smaller last batch: keep, drop or pad.", DATA, choices=TAILS)
    augment: bool | None = option(None, "Crop and flip images. Default: CIFAR-10 only.", DATA)
    cutout: int = option(0, "Side length in pixels of the square masked in augmented images.", DATA, least=0)
    test_samples: int | None = option(None, "Evaluate on the first N samples. Default: all.", DATA, least=1)
    channels: tuple[int, ...] | None = option(None, "Channels of the cnn's convolutions: 32 64 128", MODEL, least=1)
    hidden: int | None = option(None, "Width of the hidden layer.", MODEL, least=1)
    dropout: float | None = option(None, "Dropout rate, for models that have dropout.", MODEL, least=0, below=1)
    ghost_batchnorm: int | None = option(None, "Compute BatchNorm statistics over N samples at a time.", MODEL, least=2)
    optimizer: str = option("sgd", "sgd, adamw, lars or lamb", LEARNING, choices=OPTIMIZERS)
    epochs: int = option(1, "Number of passes over the data.", LEARNING, least=1, each_s=STEP_S)
    steps: int | None = option(None, "Optimizer steps, instead of --epochs.", LEARNING, least=1, each_s=STEP_S)
    batch_growth: Growths = option(
        (), "SHARE:FACTOR,...: multiply the batch by FACTOR from this fraction of the run onward.", LEARNING
    )
    grow: str = option("accumulate", "How each rank's batch grows: accumulate or batch-size.", LEARNING, choices=GROWS)
    clip: float | None = option(None, "Clip gradients to this norm.", LEARNING, above=0)
    lr: float = option(0.05, "Peak learning rate.", LEARNING, least=0)
    momentum: float = option(
        0.9, "Momentum of sgd (Nesterov) or lars.", LEARNING, least=0, below=1, advice=", or updates grow without bound"
    )
    trust_coefficient: float | None = option(None, "lars: step size relative to a layer's weights.", LEARNING, above=0)
    weight_decay: float = option(0.0, "Weight decay; biases and norms are exempt.", LEARNING, least=0)
    schedule: str = option("constant", "constant, cosine or linear (to 0), piecewise", LEARNING, choices=SCHEDULES)
    lr_warmup: int = option(0, "Number of steps to warm up the learning rate.", LEARNING, least=0)
    lr_drops: tuple[float, ...] = option(
        (), "Fractions of the run at which piecewise divides the rate by 10: 0.5,0.75", LEARNING
    )
    label_smoothing: float = option(
        0.0,
        "Fraction of each target spread over all classes.",
        LEARNING,
        least=0,
        below=1,
        advice=", or labels carry no information",
    )
    profile: bool = option(False, "Time the forward, backward and optimizer of each step.", MEASUREMENT)
    save_every: str = option(
        "60s", "When to save a checkpoint: epoch, 10s, 5min, 2h, 100steps or auto (see --mtbf)", OUTPUT
    )
    mtbf: str | None = option(
        None, "With --save-every auto: mean time between faults of the job: 3h, 2d. Default: 1d for each host.", OUTPUT
    )
    keep: int = option(3, "Number of checkpoints to keep.", OUTPUT, least=1)
    tensorboard: bool = option(False, "Also write event files for TensorBoard.", OUTPUT)

    def __post_init__(self) -> None:
        if isinstance(self.backend, str):
            object.__setattr__(self, "backend", machine.canonical_backend(self.backend))
        if self.device is not None:  # also accept a torch.device
            object.__setattr__(self, "device", str(self.device))

    @property
    def batches(self) -> Batches:
        """Fill in sizes that are None; rejects inconsistent sizes."""
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
        if size % parts:
            raise ConfigError(f"{asked} is not a multiple of {parts} ({words}): use one, or leave out --batch-size")
        if accumulate not in (None, needed):
            found = f"{asked} needs --accumulate {needed} with {words}, not {accumulate}"
            raise ConfigError(f"{found}: leave out one of them")
        return Batches(ranks, batch_size, needed)

    def on_ranks(self, count: int) -> TrainSettings:
        """The settings of the same run on another number of ranks, which divides the same global batch differently."""
        size, same = self.batches.global_batch_size, self.batches.batch_size
        if count == self.ranks:
            return self
        if size % count:
            fits = ", ".join(str(ranks) for ranks in range(1, size + 1) if size % ranks == 0)
            found = f"{count} ranks cannot divide the run's global batch of {size} samples evenly"
            raise ConfigError(f"{found}: use {fits} ranks, or start a new run", code="other-run")
        # Keep the micro-batch if possible: it fits in memory, and BatchNorm statistics depend on its size.
        batch_size = same if size % (count * same) == 0 else None
        return dataclasses.replace(self, ranks=count, global_batch_size=size, batch_size=batch_size, accumulate=None)

    def usable_ranks(self, most: int) -> int:
        """The largest number of ranks, up to `most`, that divides the global batch evenly."""
        return count_usable_ranks(self.batches.global_batch_size, most)

    def build_schedules(self, num_samples: int) -> tuple[Schedule, BatchSchedule]:
        """Build the schedules of learning rates and batches for this number of training samples."""
        size = self.batches.global_batch_size
        batches = BatchSchedule(
            global_batch_size=size,
            num_samples=num_samples,
            epochs=self.epochs,
            growths=self.batch_growth,
            tail=self.tail,
        )
        per_epoch = batches.count_steps(0)
        few = f"{num_samples} samples do not fill one global batch of {size}: use a smaller batch or --tail keep"
        refuse((per_epoch == 0, few))
        if self.steps is not None:
            batches = dataclasses.replace(batches, epochs=-(-self.steps // per_epoch))
        batches.check()
        steps = self.steps or batches.num_steps
        few = f"--lr-warmup {self.lr_warmup} covers all {steps} steps: train longer, or use a shorter warm-up"
        refuse((self.lr_warmup >= steps, few))
        schedule = Schedule(
            shape=self.schedule, peak=self.lr, num_steps=steps, warmup_steps=self.lr_warmup, drops=self.lr_drops
        )
        return schedule, batches

    @property
    def stays_in_memory(self) -> bool:
        """Whether surviving ranks keep running after a fault."""
        return self.on_fault in ("spare", "shrink")

    @property
    def data_request(self) -> DataRequest:
        name, path = parse_data(self.data)
        shared = ("context", "tokenizer", "samples", "seed", "augment", "cutout")
        return DataRequest(name=name, path=path, **{field: getattr(self, field) for field in shared})

    @property
    def is_whole(self) -> bool:
        """Whether the model is a user's function that must also return its data, because no data was chosen."""
        return is_own(self.model) and self.data == "synthetic"

    @property
    def model_options(self) -> ModelOptions:
        return ModelOptions(channels=self.channels, hidden=self.hidden, dropout=self.dropout)

    @property
    def parsed_strategy(self) -> Strategy:
        return Strategy.parse(self.strategy)

    @property
    def predicts_numbers(self) -> bool:
        """Whether this is a regression job, without accuracy or label smoothing."""
        name, _ = parse_data(self.data)
        is_default = name == "synthetic" and self.model in MODELS
        return name == "synthetic:numbers" or (is_default and MODELS[self.model].form.kind == "numbers")

    def check(self) -> None:
        """Reject invalid settings. Ranks later check settings against the data and the model."""
        check_options(self)
        parse_save_every(self.save_every)
        find_hang_timeout(self.hang_timeout)
        schedules.check_growths(self.batch_growth)
        schedules.check_drops(self.lr_drops, self.schedule)
        self._check_batches()
        self._check_ranks()
        # An option for another optimizer, norm or policy would otherwise silently have no effect.
        if self.mtbf is not None and parse_duration(self.mtbf, "--mtbf") == 0:
            raise ConfigError(f"--mtbf {self.mtbf}: must be above 0")
        if self.mtbf is not None and self.save_every != AUTO:
            found = f"--mtbf {self.mtbf} with --save-every {self.save_every}"
            raise ConfigError(f"{found}: it applies only to auto; leave it out, or use auto")
        if self.trust_coefficient is not None and self.optimizer != "lars":
            found = f"--trust-coefficient {self.trust_coefficient} with --optimizer {self.optimizer}"
            raise ConfigError(f"{found}: leave it out, or use lars")
        if self.ghost_batchnorm is not None and self.sync_batchnorm:
            why = "one shrinks the batch that BatchNorm sees, the other enlarges it"
            raise ConfigError(f"--ghost-batchnorm {self.ghost_batchnorm} with --sync-batchnorm: {why}; leave one out")
        if self.spares > 1 and self.on_fault != "spare":
            found = f"--spares {self.spares} with --on-fault {self.on_fault}"
            raise ConfigError(f"{found}: leave it out, or use --on-fault spare")
        if self.max_faults != TrainSettings.max_faults and self.on_fault == "stop":
            found = f"--max-faults {self.max_faults} with --on-fault stop, which ends the run at the first fault"
            raise ConfigError(f"{found}: leave it out, or use --on-fault restart")

    def _check_batches(self) -> None:
        """Reject inconsistent batch sizes and run lengths."""
        _ = self.batches
        if self.steps is not None and self.epochs != 1:
            found = f"--steps {self.steps} with --epochs {self.epochs}"
            raise ConfigError(f"{found}: a run has only one length; leave one out")
        if self.steps is not None and self.batch_growth:
            found = f"--batch-growth {schedules.format_growths(self.batch_growth)} with --steps {self.steps}"
            raise ConfigError(f"{found}: growth points are fractions of the run's samples; use --epochs")
        if self.grow != GROWS[0] and not self.batch_growth:
            raise ConfigError(f"--grow {self.grow} has no effect without --batch-growth: leave it out, or pass both")

    def _check_ranks(self) -> None:
        """Reject invalid combinations of ranks or workers, wrapper and strategy."""
        wrapper = f"--wrapper {self.wrapper}"
        workers = f"--workers {self.workers}"
        strategy = self.parsed_strategy
        sends = f"--strategy {self.strategy}"
        has_buckets = self.wrapper in ("paceline", "torch")
        if not has_buckets and self.ranks > 1:
            what = "trains in one process" if self.wrapper == "none" else "uses the GPUs of one process"
            raise ConfigError(f"{wrapper} {what}, but --ranks is {self.ranks}: use --ranks 1")
        if self.plan is not None and not has_buckets:
            raise ConfigError(f"--plan needs --wrapper paceline or torch, not {self.wrapper}")
        if self.sync_batchnorm and self.wrapper == "dp":
            raise ConfigError("--sync-batchnorm does not work with --wrapper dp: use paceline or torch")
        if self.workers > 1 and self.ranks > 1:
            raise ConfigError(f"{workers} share one process, but --ranks is {self.ranks}: use one or the other")
        if self.workers > 1 and (strategy.is_sharded or strategy.between_hosts):
            raise ConfigError(f"{sends} with {workers}: use --ranks {self.workers}")
        if self.workers > 1 and self.precision == "fp16":
            raise ConfigError(f"--precision fp16 with {workers}: each would need its own loss scale; use bf16")
        if not strategy.is_dense and not has_buckets:
            raise ConfigError(f"{sends} needs --wrapper paceline, not {self.wrapper}")
        if not strategy.is_hook and self.wrapper == "torch":
            raise ConfigError(f"{sends} cannot be a communication hook of torch's wrapper: use --wrapper paceline")
        if strategy.dgc and self.optimizer != "sgd":
            raise ConfigError(f"{sends} includes SGD momentum: leave out dgc, or use --optimizer sgd")
        if strategy.dgc and self.momentum not in (TrainSettings.momentum, strategy.dgc):
            found = f"--momentum {self.momentum} with {sends}, whose momentum is {strategy.dgc:g}"
            raise ConfigError(f"{found}: write dgc={self.momentum}")

    def check_policy(self) -> None:
        """Reject recovery from other ranks' memory if no other rank has a copy of the lost state."""
        if not self.stays_in_memory:
            return
        asked = f"--on-fault {self.on_fault}"
        instead = "use --on-fault restart"
        if self.ranks == 1:
            what = f"{asked} with --ranks 1: no other rank has a copy of the state; {instead}"
            raise ConfigError(what, code="on-fault")
        if self.wrapper != "paceline":
            raise ConfigError(f"{asked} needs --wrapper paceline, not {self.wrapper}; or {instead}", code="on-fault")
        strategy = self.parsed_strategy
        lost = ""
        if strategy.is_sharded:
            lost = "shard of the optimizer state"
        elif strategy.outer:
            lost = "updates since the last sync"
        elif strategy.codec not in ("dense", "bf16") or strategy.between_hosts:
            lost = "residuals"
        if lost:
            what = f"{asked} with --strategy {self.strategy}: no other rank has a lost rank's {lost}; {instead}"
            raise ConfigError(what, code="on-fault")
        has_own_size = self.batch_size is None and self.global_batch_size is None
        if self.on_fault == "shrink" and has_own_size and (self.is_whole or is_own_data(self.data)):
            what = f"{asked} with your own data: pass --global-batch-size, which the remaining ranks then share"
            raise ConfigError(what, code="on-fault")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainSettings:
        """Read the output of `to_json`; rejects unknown keys and values of the wrong type."""
        where = "the run's configuration"
        if not isinstance(values, dict):
            raise ConfigError(f"{where} is not a JSON object: pass the folder of a Paceline run")
        marks = values.get("batch_growth", ())
        try:
            found: TrainSettings = decode(cls, values | {"batch_growth": ()})
            growths = tuple((decode(float, a, "batch_growth"), decode(int, b, "batch_growth")) for a, b in marks)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            text = f"batch_growth {marks!r:.40} is not a list of pairs"
            text = str(error) if isinstance(error, RecordError) else text
            raise ConfigError(f"{where} is damaged: {text[:200]}", code="damaged") from None
        return dataclasses.replace(found, batch_growth=growths)


NAMES = tuple(field.name for field in dataclasses.fields(TrainSettings))


def count_least_bytes(settings: TrainSettings) -> dict[str, int]:
    """A lower bound on each option's memory on one rank, in addition to the model's."""
    is_synthetic = settings.data.startswith("synthetic")
    has_form = settings.data == "synthetic" and settings.model in MODELS
    form = MODELS[settings.model].form if has_form else DataForm("numbers", (1,))
    is_text = form.kind in ("tokens", "pairs")
    context = settings.context or 0
    size = context or form.shape[0] if is_text else math.prod(form.shape)
    batch = settings.batches.batch_size
    channels = settings.channels or (64,)
    return {
        "batch_size": batch * size * 4,
        "context": 4 * context * max(batch * max(1, form.vocabulary), 2000 * is_synthetic),
        "workers": settings.workers * 10_000,
        "samples": is_synthetic * (settings.samples or 0) * size * (1 if form.kind == "images" else 4),
        # Weights and gradients. The last convolution leaves at least one pixel per channel for the hidden layer.
        "channels": 2 * 4 * 9 * sum(a * b for a, b in itertools.pairwise((1, *channels))),
        "hidden": 2 * 4 * (settings.hidden or 0) * (size if settings.model == "mlp" else channels[-1]),
    }


def check_size(settings: TrainSettings) -> None:
    """Reject jobs that cannot fit in memory or would never end, before allocating anything.

    Only torch can query GPU memory, so this assumes the largest existing GPU.
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
            raise ConfigError(f"{text}, but only {format_memory(have)} is free: reduce it", code="memory")
    if (settings.threads or 0) > most:
        raise ConfigError(f"--threads {shorten(settings.threads or 0)}: too many for this host; use at most {most}")


def check_job(settings: TrainSettings) -> None:
    """Raise all errors that can be detected before a rank starts: bad settings, unknown models or data, missing
    files."""
    settings.check()
    settings.check_policy()
    if settings.wrapper == "dp" and (settings.device == "cpu" or not machine.count_gpus()):
        found = "--wrapper dp is nn.DataParallel, which needs GPUs and does nothing on a CPU"
        instead = "use paceline or torch with several --ranks, or none"
        raise ConfigError(f"{found}: {instead}; a dp run can only be resumed on GPUs, so start a new run here")
    check_model(settings.model, settings.model_options)
    check_size(settings)
    check_request(settings.data_request)
    if is_own_data(settings.data):
        check_own(settings.data, "data")
    smoothing = f"--label-smoothing {settings.label_smoothing}"
    refuse((settings.label_smoothing and settings.predicts_numbers, f"{smoothing}: this is a regression; leave it out"))
    if settings.plan is not None:
        load_plan(Path(settings.plan))
    if settings.context is not None and settings.data == "synthetic":
        kind = default_form(settings.model).kind
        if kind not in ("pairs", "tokens"):
            raise ConfigError(f"--context {settings.context}: {settings.model} is trained on {kind} here; leave it out")


def list_job_warnings(settings: TrainSettings) -> list[str]:
    """Warnings about valid settings that have little effect."""
    if settings.wrapper != "dp" or machine.count_gpus() > 1:
        return []
    return ["--wrapper dp on one GPU: nn.DataParallel has nothing to distribute and behaves like --wrapper none"]


def takes_cap_lists() -> bool:
    """Whether the installed torch's DDP accepts a cap per bucket. Does not import torch."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


def load_plan(path: Path) -> Plan:
    """Load a plan from a file; raises a ConfigError if it is invalid."""
    try:
        return Plan.from_json(path.read_text())
    except OSError as error:
        raise ConfigError(f"--plan {path}: {error.strerror}; pass a plan file") from None
    except (PacelineError, UnicodeDecodeError) as error:
        raise ConfigError(f"--plan {path}: {error}") from None
