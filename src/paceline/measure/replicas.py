"""One replica of a model in a data-parallel wrapper, and its timed step. Who takes turns with whom is in `wrappers`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.measure.engine import Group, Timing, synchronize
from paceline.parallel import DataParallel
from paceline.training.step import PhaseClock
from paceline.workloads.data import Batch
from paceline.workloads.registry import WORKLOADS, Workload

__all__ = [
    "LEARNING_RATE",
    "PHASES",
    "Replica",
    "Wrapping",
    "build_module",
    "build_replica",
    "find_wrapping",
    "wrap_by_paceline",
    "wrap_by_torch",
]

PHASES = ("forward", "backward", "optimizer")
LEARNING_RATE = 1e-3
# In the first steps of a replica its memory is counted; NCCL's watchdog looks every tenth of a second.
_SETTLING_STEPS, _WATCHDOG_S = 3, 0.25


@dataclass(frozen=True)
class Wrapping:
    """How a wrapper is put around a module, its configuration in words, and how that was chosen."""

    configuration: str
    wrap: Callable[[nn.Module, dist.ProcessGroup], nn.Module]
    note: str = ""


def wrap_by_torch(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> nn.Module:
    return DistributedDataParallel(module, process_group=group, **options)


def wrap_by_paceline(module: nn.Module, group: dist.ProcessGroup, **options: Any) -> nn.Module:
    return DataParallel(module, process_group=group, **options)


def find_wrapping(wrapper: str) -> Wrapping:
    """How to wrap by this name. `torch-tuned` is not here: what it is gets measured (`torch_tuning`)."""
    if wrapper == "bare":
        return Wrapping("no communication", lambda module, group: module)
    if wrapper == "torch":
        return Wrapping("defaults", wrap_by_torch)
    if wrapper == "paceline":
        return Wrapping("defaults", wrap_by_paceline)
    reducer = wrapper.removeprefix("paceline-")
    return Wrapping(f"reducer {reducer}", lambda module, group: wrap_by_paceline(module, group, reducer=reducer))


@dataclass
class Replica:
    """A wrapped module with its own optimizer and batch, and the raw times of its steps on this rank."""

    wrapping: Wrapping
    workload: Workload
    model: nn.Module
    batch: Batch
    optimizer: torch.optim.Optimizer
    device: torch.device
    dtype: torch.dtype
    held_bytes: int
    peak_step_bytes: int = 0
    timing: Timing = field(default_factory=lambda: Timing([], [], 0))
    phases_s: list[tuple[float, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._phases = PhaseClock(self.device)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def take_step(self, control: dist.ProcessGroup) -> float:
        """One timed step, begun by all ranks together. Collective: every rank of `control` must call this."""
        phases = self._phases
        # A wrapper may make its buffers in its first steps; only this replica works between two barriers.
        is_settling = len(self.timing.seconds) < _SETTLING_STEPS
        before = _count_allocated(self.device, is_settling)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        synchronize(self.device)
        dist.barrier(group=control)
        start_s = time.perf_counter()
        phases.enter("forward")
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            loss = self.workload.compute_loss(self.model, self.batch)
        phases.enter("backward")
        loss.backward()
        phases.enter("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        marked = phases.end()
        synchronize(self.device)
        seconds = time.perf_counter() - start_s
        self.timing.starts_s.append(start_s)
        self.timing.seconds.append(seconds)
        self.phases_s.append(tuple(marked.read()[phase] for phase in PHASES))
        del loss
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) - before
            self.peak_step_bytes = max(self.peak_step_bytes, peak)
            if is_settling:
                self.held_bytes += _count_allocated(self.device, is_settling) - before
        return seconds

    def close(self) -> None:
        """Let go of the wrapper's hooks; Paceline's own are removed by name, torch's go with the module."""
        stop = getattr(self.model, "stop", None)
        if callable(stop):
            stop()


def _count_allocated(device: torch.device, settle: bool) -> int:
    """What tensors take on a GPU, once NCCL's watchdog has had the time to let go of messages that are over."""
    if device.type != "cuda":
        return 0
    if settle:
        gc.collect()  # a wrapper that was tried before may hold its tensors in a cycle
        torch.cuda.synchronize(device)
        time.sleep(_WATCHDOG_S)
    return torch.cuda.memory_allocated(device)


def build_module(model: str, seed: int, device: torch.device) -> nn.Module:
    """The model with parameters that follow from the seed, made on the device: a large one takes long elsewhere."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        with torch.device(device):
            return WORKLOADS[model].build()


def build_replica(
    model: str, wrapping: Wrapping, group: Group, rank: int, seed: int, batch_size: int, dtype: torch.dtype
) -> Replica:
    """A fresh replica in its wrapper. Ranks begin with different parameters: a wrapper that does not broadcast rank 0's
    is found out. Collective: every rank of the group must call this."""
    workload, device = WORKLOADS[model], group.device
    if device.type == "cuda":
        # NCCL lets go of the memory of its last message when another one is over: a former replica's, perhaps.
        dist.all_reduce(torch.zeros(1, device=device), group=group.data)
    before = _count_allocated(device, True)
    module = wrapping.wrap(build_module(model, seed + rank, device), group.data)
    held = _count_allocated(device, True) - before
    return Replica(
        wrapping=wrapping,
        workload=workload,
        model=module,
        batch=workload.make_batch(batch_size, seed, rank, device),
        optimizer=torch.optim.SGD(module.parameters(), lr=LEARNING_RATE),
        device=device,
        dtype=dtype,
        held_bytes=held,
    )


def read_buckets(model: nn.Module) -> tuple[int, ...]:
    """The bytes of each bucket as the wrapper itself tells them, in the order in which they leave; none if bare."""
    if isinstance(model, DataParallel):
        return model.plan.bucket_bytes if model.plan is not None else ()
    if isinstance(model, DistributedDataParallel):
        told = model._get_ddp_logging_data()
        # Where a parameter may be unused, torch never cuts them anew.
        listed = str(told.get("rebuilt_bucket_sizes") or told.get("bucket_sizes") or "")
        return tuple(int(size) for size in listed.split(",") if size.strip())
    return ()
