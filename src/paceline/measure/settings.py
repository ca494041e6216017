"""What benchmarks and scaling studies measure, checked before any rank starts, without torch: refused at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

from paceline import machine
from paceline.errors import ConfigError, refuse, suggest
from paceline.records.kinds import COLLECTIVES, ITEM_BYTES, MEMORIES, Record
from paceline.runtime.launch import RANK_BYTES, check_rank_count
from paceline.training.recipes import NO_RECIPE, Recipe, share_batch
from paceline.training.schedules import BatchSchedule
from paceline.training.settings import TrainSettings, check_size
from paceline.units import MIB, format_bytes, refuse_endless
from paceline.workloads.registry import WORKLOADS

BACKENDS = ("gloo", "nccl", "shm")
OPS = ("sum", "avg", "min", "max", "prod")
REDUCING = ("all_reduce", "reduce_scatter")
# What the backend shm reduces in shared memory; the rest goes to gloo under it.
SHARED_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
SHARED_OPS = ("sum", "avg", "min", "max")
DEFAULT_WRAPPERS = (
    "bare", "torch", "torch-tuned", "paceline", "paceline-per_parameter", "paceline-flat", "paceline-overlap",
)  # fmt: skip
WRAPPERS = (*DEFAULT_WRAPPERS, "paceline-tuned")
# What two cores step through in minutes; the others are for GPUs and must be named.
DEFAULT_MODELS = ("mlp", "cnn", "resnet18", "gpt2-mini", "tiny")
# Ways to set the buckets of a wrapper that a tuned one chooses from: its own caps, five others, one bucket, and for
# torch's wrapper our plan.
MAX_CANDIDATES = 8


@dataclass(frozen=True)
class Measured:
    """What a measurement returns, equal on every rank: records, and what only a rank knows of its environment."""

    records: tuple[Record, ...]
    details: dict[str, Any]


def check_names(what: str, values: Sequence[str], known: Iterable[str]) -> None:
    """Refuse no name at all, and an unknown one with the known one that is nearest to it."""
    known = list(known)
    if not values:
        raise ConfigError(f"no {what} given: known are {', '.join(known)}")
    for value in values:
        if value not in known:
            raise ConfigError(f"{what} {value!r} is unknown: {suggest(value, known)}known are {', '.join(known)}")


# What one of these takes at least; anything else is counted in microseconds.
_LEAST_S = {"seeds": 10.0, "evaluations": 0.01, "threads": 1e4, "steps": 1e-5, "at_once": 1e4, "workers": 1.0}


def check_counts(advice: str = "", /, **counts: int | None) -> None:
    """Refuse impossible numbers of repetitions, by the names of their flags; None was not given."""
    for name, count in counts.items():
        least = 0 if name in ("warmup", "updates") else 1
        if count is not None and count < least:
            raise ConfigError(f"--{name.replace('_', '-')} {count}: at least {least} is needed{advice}")
        refuse_endless(_LEAST_S.get(name, 1e-6), **{name: count})


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """What every benchmark of a process group shares. `iters` and `warmup` of None mean: as the time allows."""

    # How a refusal for memory begins and ends.
    memory_words: ClassVar[tuple[str, str]] = ("a message takes", "use smaller sizes")

    backends: tuple[str, ...] = ("gloo",)
    ranks: tuple[int, ...] = (2,)
    dtype: str = "float32"
    device: str = "auto"
    threads: int = 1
    iters: int | None = None
    warmup: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", tuple(map(machine.canonical_backend, self.backends)))

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def is_whole(self, num_bytes: int) -> bool:
        """Whether this number of bytes is a whole number of elements, and at least one."""
        return num_bytes >= self.item_bytes and num_bytes % self.item_bytes == 0

    def device_of(self, backend: str) -> str:
        """`cpu` or `cuda`: where this backend's messages live."""
        return self.device if self.device != "auto" else "cuda" if backend == "nccl" else "cpu"

    def check(self) -> None:
        """Refuse what cannot be measured on any machine; `check_host` looks at this one."""
        check_names("backend", self.backends, BACKENDS)
        check_names("dtype", (self.dtype,), ITEM_BYTES)
        check_names("device", (self.device,), ("auto", "cpu", "cuda"))
        check_counts(threads=self.threads)
        check_counts(", or leave it out to fit the time", iters=self.iters, warmup=self.warmup)
        if "nccl" in self.backends and self.device == "cpu":
            raise ConfigError("backend nccl works on GPUs only: leave out --device cpu, or use the backend gloo")

    @property
    def bytes_per_rank(self) -> int:
        """The most memory that one rank holds for its messages."""
        raise NotImplementedError

    def check_host(self, local_ranks: int) -> None:
        """Refuse what this host's GPUs or memory cannot hold for this number of ranks, before anything is started."""
        on_gpu = {backend for backend in self.backends if self.device_of(backend) == "cuda"}
        gpus, who = machine.count_gpus() if on_gpu else 0, " and ".join(sorted(on_gpu))
        # The GPU's memory is checked where torch can ask it.
        need = 0 if on_gpu == set(self.backends) else self.bytes_per_rank
        have, (takes, advice) = machine.available_memory_bytes(), self.memory_words
        refuse(
            (on_gpu and not gpus, f"{who} on CUDA needs a GPU and none is visible here: use gloo and --device cpu"),
            ("nccl" in on_gpu and not machine.can_serve_nccl(gpus, local_ranks),
             f"backend nccl needs one GPU per rank: {local_ranks} ranks on this host, {gpus} GPU here; "
             f"use --ranks {gpus}, --backend gloo --device cuda, or {machine.SHARE_GPUS}=1 to share GPUs"),
            (need + RANK_BYTES > have,
             f"{takes} {format_bytes(need)} on each rank and {format_bytes(have)} are free: {advice}"),
        )  # fmt: skip
        check_rank_count(local_ranks, need)


@dataclass(frozen=True, kw_only=True)
class CollectiveSettings(GroupSettings):
    """`bench allreduce`: backends x ranks x sizes of one collective. Sizes are nccl-tests' sizes, in bytes.

    `memories` says where the vectors lie; only the backend shm has `shared`. With `limit`, what memory could do is
    measured too.
    """

    sizes: tuple[int, ...]
    collective: str = "all_reduce"
    op: str = "sum"
    memories: tuple[str, ...] = ("ordinary",)
    limit: bool = False

    def check(self) -> None:
        check_names("collective", (self.collective,), COLLECTIVES)
        super().check()
        check_names("op", (self.op,), OPS)
        check_names("memory", self.memories, MEMORIES)
        what, item, most = self.collective, self.item_bytes, max(self.ranks)
        if "shared" in self.memories:
            self._check_shared()
        sizes = [(size, f"size {format_bytes(size)} ({size} bytes) is") for size in self.sizes]
        refuse(
            (what not in REDUCING and self.op != "sum",
             f"--op {self.op} contradicts --collective {what}, which reduces nothing"),
            (self.op == "avg" and "int" in self.dtype, f"--op avg of {self.dtype} is not defined: use floating point"),
            (self.limit and what != "all_reduce",
             f"--limit is the bound of an all_reduce: leave it out for --collective {what}"),
            *((not self.is_whole(size), f"{found} not a whole number of {self.dtype} elements of {item} bytes")
              for size, found in sizes),
            *((self.has_shares and size < most * item,
               f"{found} less than one element for each of {most} ranks, which {what} needs")
              for size, found in sizes),
        )  # fmt: skip

    def _check_shared(self) -> None:
        """Refuse what the backend shm does not reduce in shared memory."""
        what, backends = self.collective, " and ".join(self.backends)
        others = " and ".join(backend for backend in self.backends if backend != "shm")
        limits = (("dtype", self.dtype, SHARED_DTYPES), ("op", self.op, SHARED_OPS))
        refuse(
            ("shm" not in self.backends,
             f"--memory shared: backend {backends} has none, only shm does: leave it out, or add shm to --backend"),
            (self.memories == ("shared",) and others,
             f"--memory shared leaves nothing to measure on {others}: use --memory ordinary,shared"),
            (what != "all_reduce",
             f"--memory shared is for all_reduce: {what} copies its parts whatever their memory; leave it out"),
            (self.device == "cuda", "--memory shared is memory of the host: leave out --device cuda"),
            *((value not in known, f"--{name} {value} is not reduced in shared memory: known are {', '.join(known)}")
              for name, value, known in limits),
        )  # fmt: skip

    @property
    def has_shares(self) -> bool:
        """Whether every rank has its own share of the vector."""
        return self.collective in ("all_gather", "reduce_scatter")

    def memories_of(self, backend: str) -> tuple[str, ...]:
        """The memories that are measured on this backend."""
        return self.memories if backend == "shm" else ("ordinary",)

    def num_elements(self, num_bytes: int, world_size: int) -> int:
        """Elements of the full vector; for all_gather and reduce_scatter cut to a multiple of the ranks."""
        elements = num_bytes // self.item_bytes
        return elements - elements % world_size if self.has_shares else elements

    @property
    def bytes_per_rank(self) -> int:
        """A vector for each memory, and one to copy to for the limit; or a vector, a share, and gloo's copy of both."""
        if self.has_shares:
            return 2 * max(self.sizes) + max(self.sizes) // min(self.ranks)
        return len({*self.memories, "ordinary", "target"} if self.limit else self.memories) * max(self.sizes)


@dataclass(frozen=True, kw_only=True)
class ChunkSettings(GroupSettings):
    """`bench chunks`: a fixed total, all-reduced in chunks of many sizes, in bytes."""

    total_bytes: int
    chunks: tuple[int, ...]

    def check(self) -> None:
        super().check()
        largest, total = max(self.chunks), self.total_bytes
        sizes, what = [("total", total), *(("chunk", size) for size in self.chunks)], f"{self.dtype} elements"
        refuse(
            *((not self.is_whole(n), f"{name} of {n} bytes is not a whole number of {what}") for name, n in sizes),
            (largest > total, f"a chunk of {format_bytes(largest)} is larger than the total of {format_bytes(total)}"),
        )

    @property
    def bytes_per_rank(self) -> int:
        return self.total_bytes


@dataclass(frozen=True, kw_only=True)
class WrapperSettings(GroupSettings):
    """`bench wrappers`: each model on each number of ranks, all wrappers in turns. `batch_size` None: the model's."""

    memory_words: ClassVar[tuple[str, str]] = (
        "the replicas of one model take", "leave out a large --model or some of --wrapper",
    )  # fmt: skip

    models: tuple[str, ...] = DEFAULT_MODELS
    wrappers: tuple[str, ...] = DEFAULT_WRAPPERS
    batch_size: int | None = None

    def check(self) -> None:
        check_names("model", self.models, WORKLOADS)
        check_names("wrapper", self.wrappers, WRAPPERS)
        super().check()
        check_counts(", or leave it out for the model's own", batch_size=self.batch_size)
        is_odd = self.dtype not in ("float32", "bfloat16")
        refuse((is_odd, f"--dtype {self.dtype}: wrappers are timed in float32 or bfloat16 (autocast)"))

    def batch_of(self, model: str) -> int:
        """Samples per rank in one step of this model."""
        return WORKLOADS[model].batch_size if self.batch_size is None else self.batch_size

    def replica_bytes(self, model: str, num_backends: int) -> int:
        """Parameters and buffers of all replicas, gradients and a copy of one that steps. Activations come on top."""
        replicas = num_backends * len(self.wrappers)
        if {"torch-tuned", "paceline-tuned"} & {*self.wrappers}:  # their candidates are tried before, one after another
            replicas = max(replicas, MAX_CANDIDATES)
        batch_bytes = 4 * self.batch_of(model) * math.prod(WORKLOADS[model].data_form.shape)
        return (2 * replicas + 2) * 4 * WORKLOADS[model].num_elements + batch_bytes

    @property
    def bytes_per_rank(self) -> int:
        return max(self.replica_bytes(model, len(self.backends)) for model in self.models)


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

    def check_size(self) -> None:
        """Refuse cells that no memory here can hold, or that would not end."""
        given = asdict(self)
        check_counts(**{name: given.get(name) for name in ("iters", "epochs", "updates", "evaluations")})
        sizes = (*given.get("batch_sizes", ()), given.get("most_at_once", 1))
        check_size(replace(self.job, batch_size=max(sizes), global_batch_size=None, accumulate=None))
        refuse_endless(1e-6, global_batch_size=max(given.get("global_batch_sizes", ()), default=None))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        known = {field.name for field in fields(cls)}
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
        check_names("wrapper", [setup.wrapper for setup in self.setups], ("paceline", "torch", "dp"))
        check_names("backend", [setup.backend for setup in self.setups], BACKENDS)
        ranks, most, parts, gpus = self.ranks, max(self.ranks), self.job.accumulate or 1, machine.count_gpus()
        how, shares = f" in {parts} micro-batches" if parts > 1 else "", ", ".join(str(n * parts) for n in ranks)
        with_dp = any(setup.wrapper == "dp" for setup in self.setups)
        refuse(
            (most < 2, f"--ranks {','.join(map(str, ranks))}: scaling compares one rank with two or more"),
            *((size % (n * parts),
               f"--global-batch-size {size} cannot be shared equally by {n} ranks{how}: use a multiple of {shares}")
              for size in self.global_batch_sizes for n in ranks),
            (self.iters is not None and self.iters < 2,
             f"--iters {self.iters}: at least 2 are needed to know the noise"),
            (with_dp and (gpus < most or self.job.device == "cpu"),
             f"--wrapper dp puts {most} GPUs into one process, and {gpus} can be used here: leave it out"),
        )  # fmt: skip

    def sweep(self, num_bytes: int, on_one_host: bool = True) -> CollectiveSettings:
        """All-reduces alone, up to the size of all gradients: the peak bandwidth, and the base of a prediction."""
        sizes = [1 << 14]
        while sizes[-1] < num_bytes:
            sizes.append(4 * sizes[-1])
        sizes[-1] = max(sizes[-1], MIB)
        return CollectiveSettings(
            backends=self.backends, ranks=tuple(n for n in self.ranks if n > 1), sizes=tuple(sizes),
            device="auto" if "nccl" in self.backends else self.job.device, threads=self.job.threads or 1,
            memories=("ordinary", "shared") if on_one_host and "shm" in self.backends else ("ordinary",),
        )  # fmt: skip

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return super().from_json(values | {"setups": [Setup(**value) for value in values["setups"]]})


@dataclass(frozen=True, kw_only=True)
class BatchSettings(StudySettings):
    """`scale batch`: whole epochs of the job on one rank at each batch size, the first of them a warm-up."""

    batch_sizes: tuple[int, ...]
    epochs: int = 2

    def check(self) -> None:
        most, samples = max(self.batch_sizes), self.job.samples
        few = f"--batch-size {most} of --samples {samples}: leave it out, or give more"
        refuse(
            (self.epochs < 2, f"--epochs {self.epochs}: the first is a warm-up, so at least 2 are needed"),
            (samples is not None and samples < most, few),
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
        base, sizes, shown = self.base_batch_size, self.global_batch_sizes, ",".join(map(str, self.global_batch_sizes))
        check_counts(evaluations=self.evaluations, batch_size=self.most_at_once, updates=self.updates)
        refuse((min(sizes) <= base, f"--global-batch-size {shown}: batches above the base of {base} are needed"))
        odd = next((size for size in sizes if size % base), 0)
        for text in self.recipes:
            recipe, alone = Recipe.parse(text), "sync needs several ranks, and there is one; use ghost, or --ranks"
            without = "smoothing needs classes, and here numbers are predicted; leave it out"
            refuse(
                ("sync" in recipe.names and self.job.ranks == 1, f"recipe {text!r}: {alone}"),
                ("grow" in recipe.names and odd, f"recipe {text!r}: {odd} is not a multiple of the base {base}"),
                (recipe.is_for_classes and self.job.predicts_numbers, f"recipe {text!r}: {without}"),
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


@dataclass(frozen=True, kw_only=True)
class StrategiesSettings(StudySettings):
    """`scale strategies`: the job with every strategy and every seed. `target` is a test accuracy, or a test loss where
    numbers are predicted: how long does each take to reach it?"""

    is_timed: ClassVar[bool] = False

    strategies: tuple[str, ...]
    seeds: tuple[int, ...] = (1, 2, 3)
    evaluations: int = 10
    target: float | None = None

    def check(self) -> None:
        check_counts(evaluations=self.evaluations)
        several = max(self.job.ranks, self.job.workers) > 1
        refuse((not several, "one rank and one worker: nothing is sent; use --workers 4, or --ranks"))
        for text in self.strategies:
            replace(self.job, strategy=text).check()

    def list_cells(self) -> list[TrainingCell]:
        """All runs of the study, seed by seed: what an interrupted one has can be compared."""
        job, size = self.job, self.job.batches.global_batch_size
        runs = [replace(job, strategy=text, seed=seed) for seed in self.seeds for text in self.strategies]
        return [TrainingCell(run, "epochs" if run.steps is None else "updates", run.strategy, size) for run in runs]
