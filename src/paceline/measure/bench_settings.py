"""Settings of benchmarks, checked without torch before any rank starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from paceline import machine
from paceline.errors import ConfigError, refuse
from paceline.options import check_options, option
from paceline.records.kinds import COLLECTIVES, ITEM_BYTES, MEMORIES, Record
from paceline.runtime.ranks.launch import RANK_BYTES, check_rank_count
from paceline.units import format_bytes
from paceline.workloads.registry import WORKLOADS

BACKENDS = ("gloo", "nccl", "shm")
OPS = ("sum", "avg", "min", "max", "prod")
REDUCING = ("all_reduce", "reduce_scatter")
# Types that the shm backend reduces in shared memory; gloo handles all others.
SHARED_DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "int64")
SHARED_OPS = ("sum", "avg", "min", "max")
DEFAULT_WRAPPERS = ("bare", "torch", "torch-tuned", "paceline", "paceline-simple")
WRAPPERS = (*DEFAULT_WRAPPERS, "paceline-tuned")
# Small models that two cores measure within minutes; larger ones must be requested explicitly.
DEFAULT_MODELS = ("mlp", "cnn", "resnet18", "gpt2-mini", "tiny")
# Maximum number of bucket settings tried when tuning a wrapper: its default caps, five other caps, a single bucket and,
# for torch's wrapper, our plan.
MAX_CANDIDATES = 8
_TIME = ", or leave it out to fit the time"


@dataclass(frozen=True)
class Measured:
    """The result of a measurement, identical on every rank: records, and environment details that only ranks can
    query."""

    records: tuple[Record, ...]
    details: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings shared by all process-group benchmarks. If `iters` or `warmup` is None, the time budget decides."""

    memory_advice: ClassVar[str] = "use smaller sizes"
    cell_s: ClassVar[float] = 2.0  # time budget of a cell, unless `iters` is set

    backends: tuple[str, ...] = option(("gloo",), choices=BACKENDS)
    ranks: tuple[int, ...] = (2,)
    dtype: str = option("float32", choices=ITEM_BYTES)
    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    threads: int = option(1, least=1, each_s=1e4)
    iters: int | None = option(None, least=1, each_s=1e-6, advice=_TIME)
    warmup: int | None = option(None, least=0, each_s=1e-6, advice=_TIME)

    def __post_init__(self) -> None:
        object.__setattr__(self, "backends", tuple(map(machine.canonical_backend, self.backends)))

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def is_whole(self, num_bytes: int) -> bool:
        """Whether the size is a positive whole number of elements."""
        return num_bytes >= self.item_bytes and num_bytes % self.item_bytes == 0

    def device_of(self, backend: str) -> str:
        """The device of this backend's messages: `cpu` or `cuda`."""
        return self.device if self.device != "auto" else "cuda" if backend == "nccl" else "cpu"

    @property
    def num_cells(self) -> int:
        """Number of timed combinations."""
        raise NotImplementedError

    @property
    def limit_s(self) -> float | None:
        """Approximate upper bound on timing, doubled to cover warm-ups; None if the number of repetitions is fixed,
        because a repetition's duration is unknown."""
        return None if self.iters is not None else 2 * self.num_cells * self.cell_s

    def check(self) -> None:
        """Reject requests that no machine could run; `check_host` checks this machine."""
        check_options(self)
        if "nccl" in self.backends and self.device == "cpu":
            raise ConfigError("the nccl backend works on GPUs only: leave out --device cpu, or use the gloo backend")

    @property
    def bytes_per_rank(self) -> int:
        """Peak memory for one rank's messages."""
        raise NotImplementedError

    def check_host(self, local_ranks: int) -> None:
        """Reject requests that need more GPUs or memory than this host has, before any rank starts."""
        on_gpu = {backend for backend in self.backends if self.device_of(backend) == "cuda"}
        gpus, who = machine.count_gpus() if on_gpu else 0, " and ".join(sorted(on_gpu))
        # GPU memory is checked later, on the ranks, where torch can query it.
        need = 0 if on_gpu == set(self.backends) else self.bytes_per_rank
        have = machine.available_memory_bytes()
        refuse(
            (on_gpu and not gpus, f"{who} on CUDA needs a GPU and none is visible here: use gloo and --device cpu"),
            ("nccl" in on_gpu and not machine.can_serve_nccl(gpus, local_ranks),
             f"the nccl backend needs one GPU per rank: {local_ranks} ranks on this host, {gpus} GPU here; "
             f"use --ranks {gpus}, --backend gloo --device cuda, or {machine.SHARE_GPUS}=1 to share GPUs"),
            (need + RANK_BYTES > have,
             f"each rank needs {format_bytes(need)} and {format_bytes(have)} are free: {self.memory_advice}"),
        )  # fmt: skip
        check_rank_count(local_ranks, need)


@dataclass(frozen=True, kw_only=True)
class CollectiveSettings(GroupSettings):
    """`bench allreduce`: backends x ranks x sizes of one collective. Sizes are in bytes, defined as in nccl-tests.

    `memories` lists the memory kinds to use; only the shm backend supports `shared`. `limit` also measures
    memory bandwidth.
    """

    sizes: tuple[int, ...]
    collective: str = option("all_reduce", choices=COLLECTIVES)
    op: str = option("sum", choices=OPS)
    memories: tuple[str, ...] = option(("ordinary",), choices=MEMORIES)
    limit: bool = False

    def check(self) -> None:
        super().check()
        what = self.collective
        item = self.item_bytes
        most = max(self.ranks)
        if "shared" in self.memories:
            self._check_shared()
        refuse(
            (what not in REDUCING and self.op != "sum",
             f"--op {self.op} cannot be combined with --collective {what}, which reduces nothing"),
            (self.op == "avg" and "int" in self.dtype, f"--op avg of {self.dtype} is not defined: use floating point"),
            (self.limit and what != "all_reduce",
             f"--limit applies only to all_reduce: leave it out for --collective {what}"),
        )  # fmt: skip
        for size in self.sizes:
            found = f"size {format_bytes(size)} ({size} bytes) is"
            is_small = self.has_shares and size < most * item
            refuse(
                (not self.is_whole(size), f"{found} not a whole number of {self.dtype} elements of {item} bytes"),
                (is_small, f"{found} less than one element for each of {most} ranks, which {what} needs"),
            )

    def _check_shared(self) -> None:
        """Reject requests that the shm backend cannot reduce in shared memory."""
        what, backends = self.collective, " and ".join(self.backends)
        others = " and ".join(backend for backend in self.backends if backend != "shm")
        limits = (("dtype", self.dtype, SHARED_DTYPES), ("op", self.op, SHARED_OPS))
        refuse(
            ("shm" not in self.backends,
             f"--memory shared: {backends} does not support it: leave it out, or add shm to --backend"),
            (self.memories == ("shared",) and others,
             f"--memory shared leaves nothing to measure on {others}: use --memory ordinary,shared"),
            (what != "all_reduce",
             f"--memory shared is for all_reduce: {what} copies its parts in either kind of memory; leave it out"),
            (self.device == "cuda", "--memory shared is host memory: leave out --device cuda"),
            *((value not in known, f"--{name} {value} is not reduced in shared memory: use one of {', '.join(known)}")
              for name, value, known in limits),
        )  # fmt: skip

    @property
    def num_cells(self) -> int:
        variants = sum(len(self.memories_of(backend)) for backend in self.backends)
        return variants * len(self.ranks) * len(self.sizes)

    @property
    def has_shares(self) -> bool:
        """Whether the collective splits the vector into one part per rank."""
        return self.collective in ("all_gather", "reduce_scatter")

    def memories_of(self, backend: str) -> tuple[str, ...]:
        """The memory kinds to measure on this backend."""
        return self.memories if backend == "shm" else ("ordinary",)

    def num_elements(self, num_bytes: int, world_size: int) -> int:
        """Number of elements of the full vector, rounded down to a multiple of `world_size` for all_gather and
        reduce_scatter."""
        elements = num_bytes // self.item_bytes
        return elements - elements % world_size if self.has_shares else elements

    @property
    def bytes_per_rank(self) -> int:
        """Memory of one vector per memory kind plus a copy target for the limit, or of a vector, a part, and gloo's
        copies."""
        if self.has_shares:
            return 2 * max(self.sizes) + max(self.sizes) // min(self.ranks)
        return len({*self.memories, "ordinary", "target"} if self.limit else self.memories) * max(self.sizes)


@dataclass(frozen=True, kw_only=True)
class ChunkSettings(GroupSettings):
    """`bench chunks`: all-reduce a fixed total in chunks of several sizes, in bytes."""

    total_bytes: int
    chunks: tuple[int, ...]

    def check(self) -> None:
        super().check()
        largest, total = max(self.chunks), self.total_bytes
        for name, size in [("total", total), *(("chunk", size) for size in self.chunks)]:
            whole = f"a whole number of {self.dtype} elements"
            refuse((not self.is_whole(size), f"a {name} of {size} bytes is not {whole}"))
        found = f"a chunk of {format_bytes(largest)} is larger than the total of {format_bytes(total)}"
        refuse((largest > total, found))

    @property
    def num_cells(self) -> int:
        return len(self.backends) * len(self.ranks) * len(self.chunks)

    @property
    def bytes_per_rank(self) -> int:
        return self.total_bytes


@dataclass(frozen=True, kw_only=True)
class WrapperSettings(GroupSettings):
    """`bench wrappers`: each model on each number of ranks, with all wrappers interleaved. With `batch_size` None, each
    model uses its default."""

    memory_advice: ClassVar[str] = "leave out a large --model or some wrappers"
    cell_s: ClassVar[float] = 30.0

    models: tuple[str, ...] = option(DEFAULT_MODELS, choices=WORKLOADS)
    wrappers: tuple[str, ...] = option(DEFAULT_WRAPPERS, choices=WRAPPERS)
    batch_size: int | None = option(None, least=1, each_s=1e-6, advice=", or leave it out for the model's default")
    dtype: str = option("float32", choices=("float32", "bfloat16"))

    @property
    def num_cells(self) -> int:
        return len(self.models) * len(self.ranks)  # the wrappers and backends of a cell share its time budget

    def batch_of(self, model: str) -> int:
        """Samples per rank in one step of this model."""
        return WORKLOADS[model].batch_size if self.batch_size is None else self.batch_size

    def replica_bytes(self, model: str, num_backends: int) -> int:
        """Memory of all replicas' parameters and buffers, plus gradients and a copy for the active one. Excludes
        activations."""
        replicas = num_backends * len(self.wrappers)
        if {"torch-tuned", "paceline-tuned"} & {*self.wrappers}:  # candidates are tried beforehand, one at a time
            replicas = max(replicas, MAX_CANDIDATES)
        batch_bytes = 4 * self.batch_of(model) * math.prod(WORKLOADS[model].data_form.shape)
        return (2 * replicas + 2) * 4 * WORKLOADS[model].num_elements + batch_bytes

    @property
    def bytes_per_rank(self) -> int:
        return max(self.replica_bytes(model, len(self.backends)) for model in self.models)
