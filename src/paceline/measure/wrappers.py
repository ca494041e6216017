"""Compares data-parallel wrappers: replicas of one model take interleaved steps, and their parameters are checked.

`step_bench` interleaves them; `records.steps` derives numbers from the records.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import ConfigError, refuse
from paceline.measure.bench_settings import Measured, WrapperSettings
from paceline.measure.engine import Group, Pace, Report, run_cells
from paceline.measure.step_bench import Probe, Replica, StepBench, Variant, list_gradients, wrap
from paceline.plan import TORCH_CAP_BYTES, TORCH_FIRST_CAP_BYTES, Plan, plan_like_torch
from paceline.records import StepRecord
from paceline.records.kinds import PRECISIONS
from paceline.runtime.ranks.world import World
from paceline.training.step import NoPhases, Phases, PhaseTimes
from paceline.units import MIB, format_bytes, format_duration
from paceline.workloads.registry import WORKLOADS

_SEED = 1
_LEARNING_RATE = 1e-3
# The budget covers all wrappers of a cell. During the warm-ups, Paceline plans (first step) and torch rebuilds its
# buckets (second step).
_PACE = Pace(budget_s=WrapperSettings.cell_s, min_iters=10, max_iters=100, warmup=3)
_TUNING_PACE = Pace(budget_s=8.0, min_iters=5, max_iters=15, warmup=3)
# Tolerated relative difference between a parameter's change and its change under torch's wrapper. Rounding causes about
# 1e-6 on a CPU and much more with bfloat16 or TF32; a missing division or average causes about 1.
_TOLERANCE = 0.05
_COARSE_TOLERANCE = 0.5
_CAPS_MIB = (1, 5, 10, 25, 50)
_OPTIONS = set(inspect.signature(DistributedDataParallel.__init__).parameters)
# Options that a user tuning torch's wrapper would set besides buckets.
_TUNED: dict[str, Any] = {
    "gradient_as_bucket_view": True,
    "static_graph": True,
    # torch 2.13 renames the option that stops the broadcast of buffers in every forward.
    ("forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"): False,
}
_MEMORY_STEPS = 3  # number of first steps in which a replica's memory is measured exactly
_WATCHDOG_S = 0.25  # NCCL's watchdog frees finished messages every tenth of a second


@dataclass(frozen=True)
class Wrapping:
    """A wrapper configuration: the wrapping function, a description, and a note on how it was chosen."""

    configuration: str
    wrap: Callable[..., nn.Module]  # called with a module and its `group`
    note: str = ""


def find_wrapping(wrapper: str) -> Wrapping:
    """The wrapper configuration with this name. Excludes tuned wrappers, whose options come from a measurement."""
    if wrapper == "bare":
        return Wrapping("no communication", lambda module, group: module)
    name, _, reducer = wrapper.partition("-")
    options: dict[str, Any] = {"reducer": reducer} if reducer else {}
    return Wrapping(f"reducer {reducer}" if reducer else "defaults", partial(wrap, wrapper=name, **options))


def build_module(model: str, seed: int, device: torch.device) -> nn.Module:
    """Build a model from the seed, directly on the device because copying a large model is slow."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        with torch.device(device):
            return WORKLOADS[model].build()


def measure_wrappers(settings: WrapperSettings) -> Measured:
    """Time and check every cell: each number of ranks x each model. Collective: call on every rank."""

    def measure(world: World, groups: Sequence[Group], model: str, report: Report) -> list[StepRecord]:
        try:
            return _Cell(settings, world, groups, model).measure(report)
        finally:
            _free()  # the next cell must start with the same free memory

    return run_cells(settings, settings.models, str, measure)


class _ReplicaCheck(Probe):
    """Checks one replica on this rank: counts parameters that deviate from training under torch's wrapper and, on GPUs,
    measures the memory held between steps and the peak added by a step."""

    def __init__(self, replica: Replica, held_bytes: int) -> None:
        self.replica = replica
        self._device = replica.device
        self.held_bytes = held_bytes
        self._peak_bytes = 0
        self.num_wrong = 0
        self._num_steps = 0

    def begin(self, kind: str, hooks: contextlib.ExitStack) -> Phases | None:
        if self._device.type == "cuda":
            # A wrapper may allocate its buffers in its first steps. Only this replica runs between two barriers.
            self._before = _count_allocated(self._device, self._num_steps < _MEMORY_STEPS)
            torch.cuda.reset_peak_memory_stats(self._device)
        return None

    def end(self, kind: str, times: PhaseTimes) -> None:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - self._before
            # A step may free memory held between steps before its peak, so add the two per step.
            self._peak_bytes = max(self._peak_bytes, self.held_bytes + peak)
            if self._num_steps < _MEMORY_STEPS:
                self.held_bytes += _count_allocated(self._device, True) - self._before
            self._num_steps += 1

    @property
    def peak_step_bytes(self) -> int:
        return max(0, self._peak_bytes - self.held_bytes)


class _Cell:
    """One model on the first n ranks: every wrapper on every backend. Other ranks only join the barriers."""

    def __init__(self, settings: WrapperSettings, world: World, groups: Sequence[Group], model: str) -> None:
        self.settings = settings
        self.world = world
        self.groups = groups
        self.model = model
        self.workload = WORKLOADS[model]
        self.batch_size = settings.batch_of(model)
        self.is_in = world.rank < groups[0].world_size
        self.is_low = settings.dtype == "bfloat16"
        self.labels = {
            "model": model,
            "precision": PRECISIONS[settings.dtype],
            "batch_size": self.batch_size,
            "num_parameters": self.workload.num_parameters,
            "num_bytes": 4 * self.workload.num_elements,
        }
        # On GPUs Paceline's wrapper waits for the control words of its first ten steps only.
        self.warmup = 12 if groups[0].device.type == "cuda" else 3

    def measure(self, report: Report) -> list[StepRecord]:
        self._check_gpu_memory()
        with StepBench(self.world, self.labels) as bench:
            variants = [
                (group, self._add(bench, group, wrapper, wrapping))
                for group in self.groups
                for wrapper, wrapping in self._find_wrappings(group).items()
            ]
            pace, given = replace(_PACE, warmup=self.warmup), self.settings
            compare = partial(self._compare_with_torch, bench, variants)
            bench.run(pace, given.iters, given.warmup, report, end_warmup=compare)
            return [self._build_record(bench, group, variant) for group, variant in variants]

    def _add(self, bench: StepBench, group: Group, wrapper: str, wrapping: Wrapping, kind: str = "marked") -> Variant:
        labels = {"wrapper": wrapper, "backend": group.backend, "world_size": group.world_size}
        labels |= {"configuration": wrapping.configuration, "note": wrapping.note}
        variant = bench.add(Variant(labels, None, (kind,)))
        if self.is_in:
            is_measured = kind == "marked"  # tuning candidates take plain steps
            variant.replica, held_bytes = self._build_replica(group, wrapping, is_measured)
            if is_measured:
                variant.probe = _ReplicaCheck(variant.replica, held_bytes)
        return variant

    def _build_replica(self, group: Group, wrapping: Wrapping, is_exact: bool = False) -> tuple[Replica, int]:
        """Build a replica and its wrapper, and count the bytes that they allocate. The count is exact only with
        `is_exact`, which is slower.

        Ranks start with different parameters to detect a wrapper that does not broadcast those of rank 0.
        Collective: call on every rank of the group.
        """
        workload, device, rank = self.workload, group.device, self.world.rank
        if device.type == "cuda":
            # NCCL keeps the memory of its last message, perhaps a previous replica's, until another message finishes.
            dist.all_reduce(torch.zeros(1, device=device), group=group.data)
        before = _count_allocated(device, is_exact)
        module = build_module(self.model, _SEED + rank, device)
        model = wrapping.wrap(module, group=group.data)
        held_bytes = _count_allocated(device, is_exact) - before
        batch = workload.make_batch(self.batch_size, _SEED, rank, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)

        def run(_: Any, phases: Phases) -> None:
            phases.enter("forward")
            with torch.autocast(device.type, torch.bfloat16, enabled=self.is_low):
                loss = workload.compute_loss(model, batch)
            phases.enter("backward")
            loss.backward()
            phases.enter("optimizer")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return Replica(model, module, device, run), held_bytes

    def _check_gpu_memory(self) -> None:
        """Reject replicas that do not fit in the GPU memory of every rank; raises on all ranks."""
        on_gpu = [group for group in self.groups if group.device.type == "cuda"]
        for group in on_gpu:
            sharing = math.ceil(group.world_size / torch.cuda.device_count())  # an overestimate with several hosts
            need = self.settings.replica_bytes(self.model, len(on_gpu)) * sharing
            free = min(self.world.share(torch.cuda.mem_get_info(group.device)[0]))
            found = f"{format_bytes(need)}, but {format_bytes(free)} is free on the GPU"
            advice = self.settings.memory_advice
            refuse((need > free, f"the replicas of {self.model} take about {found}: {advice}"), code="memory")

    def _find_wrappings(self, group: Group) -> dict[str, Wrapping]:
        """The configuration of each wrapper for this group; measures candidates for tuned wrappers."""
        return {
            name: self._tune(group, name.removesuffix("-tuned")) if name.endswith("-tuned") else find_wrapping(name)
            for name in self.settings.wrappers
        }

    def _tune(self, group: Group, wrapper: str) -> Wrapping:
        """Find a wrapper's fastest bucket settings. The note lists every candidate's median."""
        plan = None  # one more candidate for torch: the plan of Paceline's wrapper
        if self.is_in and wrapper == "torch":
            replica, _ = self._build_replica(group, find_wrapping("paceline"))
            for _ in range(2):
                replica.run(None, NoPhases())
            plan = getattr(replica.model, "plan", None)
            replica.close()
            del replica
        plan = self.world.share(plan)[0]
        candidates = build_candidates(build_module(self.model, _SEED, group.device), plan, wrapper)
        _free()
        if len(candidates) == 1:
            return replace(candidates[0], note="the only way to set its buckets")
        with StepBench(self.world, self.labels) as bench:
            for candidate in candidates:
                self._add(bench, group, wrapper, candidate, "plain")
            bench.run(replace(_TUNING_PACE, warmup=self.warmup))
            records = [bench.build_record(variant) for variant in bench.variants]
        _free()
        medians = [record.timing.median_s for record in records]
        tried = zip((candidate.configuration.rpartition(", ")[2] for candidate in candidates), medians, strict=True)
        text = "; ".join(f"{name} {format_duration(median)}" for name, median in tried)
        note = f"fastest of {len(candidates)} in {records[0].timing.count} rounds: {text}"
        return replace(candidates[medians.index(min(medians))], note=note)

    def _compare_with_torch(self, bench: StepBench, variants: Sequence[tuple[Group, Variant]]) -> None:
        """Count each replica's parameters that deviate from training under torch's wrapper. Called after the warm-ups:
        later, rounding can make replicas diverge."""
        num_steps = bench.num_warmup
        for group in self.groups if self.is_in and num_steps else ():
            mine = {v.labels["wrapper"]: cast(_ReplicaCheck, v.probe) for owner, v in variants if owner is group}
            reference = mine.get("torch") or mine.get("torch-tuned")
            if reference is None:
                continue
            start = list(build_module(self.model, _SEED, group.device).parameters())
            tolerance = _COARSE_TOLERANCE if self.is_low or group.device.type == "cuda" else _TOLERANCE
            for wrapper, found in mine.items():
                if wrapper != "bare" and found is not reference:
                    params = found.replica.parameters, start, reference.replica.parameters
                    found.num_wrong = count_wrong_parameters(*params, group.data, num_steps, tolerance)

    def _build_record(self, bench: StepBench, group: Group, variant: Variant) -> StepRecord:
        """Build a variant's record, after checking that parameters are equal on all ranks."""
        mine = None
        wrapper = variant.labels["wrapper"]
        if self.is_in:
            found = cast(_ReplicaCheck, variant.probe)
            params = found.replica.parameters
            unequal = count_wrong_parameters(params, params, None, group.data, 0, 0.0) if wrapper != "bare" else 0
            plan = getattr(found.replica.model, "plan", None) if wrapper.startswith("paceline") else None
            buckets = f", {len(plan.buckets)} buckets: {plan.rule}" if plan is not None else ""
            counts = max(found.num_wrong, unequal), len(params), found.held_bytes, found.peak_step_bytes
            mine = *counts, variant.labels["configuration"] + buckets
        answers = [answer for answer in self.world.share(mine) if answer is not None]
        wrong, checked, held, peaks, configurations = zip(*answers, strict=True)
        more: dict[str, Any] = {"held_bytes": max(held), "peak_step_bytes": max(peaks)}
        more |= {"num_wrong": sum(wrong), "num_checked": sum(checked)} if wrapper != "bare" else {}
        return bench.build_record(variant, configuration=configurations[0], **more)


def build_candidates(module: nn.Module, ours: Plan | None, wrapper: str = "torch") -> list[Wrapping]:
    """Build the bucket settings to try for a wrapper, without duplicates; includes `ours` if torch supports it.

    To find duplicates, buckets are planned in reverse parameter order, which is close to gradient order.
    """
    gradients = list_gradients(module)
    is_torch = wrapper == "torch"
    order = list(reversed(range(len(gradients))))
    total = sum(gradient.num_bytes for gradient in gradients)
    ways: list[tuple[str, list[int], dict[str, Any]]] = [
        ("torch's own caps", [TORCH_FIRST_CAP_BYTES, TORCH_CAP_BYTES], {}) if is_torch else ("defaults", [], {}),
        *((f"cap {cap} MiB", [cap * MIB], {"bucket_cap_mb": cap}) for cap in _CAPS_MIB),
        ("one bucket", [total + 1], {"bucket_cap_mb": math.ceil(total / MIB) + 1}),
    ]
    if ours is not None:
        with contextlib.suppress(ConfigError):  # raised if torch's rule cannot produce these buckets
            options = ours.as_torch_kwargs()
            if set(options) <= _OPTIONS:
                ways.append(("Paceline's plan", [], options))
    found: dict[Any, Wrapping] = {}
    for name, caps, options in ways:
        known = plan_like_torch(gradients, order, caps) if caps or (is_torch and ours is None) else ours
        text = f"bucket view, static graph, no buffers in forward, {name}" if is_torch else name
        options = {**_TUNED, **options} if is_torch else options
        found.setdefault(known and known.partition, Wrapping(text, partial(wrap, wrapper=wrapper, **options)))
    return list(found.values())


@torch.no_grad()
def count_wrong_parameters(
    parameters: Sequence[torch.Tensor], start: Sequence[torch.Tensor], reference: Sequence[torch.Tensor] | None,
    group: dist.ProcessGroup, num_steps: int, tolerance: float,
) -> int:  # fmt: skip
    """Number of this rank's parameters that differ from rank 0's or, after these steps, are not close to the reference.

    Close means that the change since `start` (rank 0's values) is within the fraction `tolerance` of the reference's
    change. Comparing values instead of changes would not detect a wrong gradient after a few small steps.
    Collective: call on every rank of the group.
    """
    wrong = 0
    for index, (parameter, origin) in enumerate(zip(parameters, start, strict=True)):
        first = parameter.detach().clone()
        dist.broadcast(first, group=group, group_src=0)
        is_wrong = not torch.equal(first, parameter)
        if reference is not None:
            theirs = reference[index]
            # Allow for rounding: one ulp of the value per step, and gradients that are zero up to rounding.
            ulps = torch.finfo(theirs.dtype).eps * math.sqrt(num_steps) * float(theirs.norm())
            slack = ulps + 1e-6 * _LEARNING_RATE * num_steps * math.sqrt(theirs.numel())
            change = float((theirs - origin).norm())
            apart = float((parameter - theirs).norm())
            is_wrong = is_wrong or not apart <= tolerance * change + slack  # `not <=` also catches NaN
        wrong += is_wrong
    return wrong


def _count_allocated(device: torch.device, is_exact: bool) -> int:
    """Bytes of tensors on a GPU. With `is_exact`, first wait for NCCL's watchdog to free finished messages."""
    if device.type != "cuda":
        return 0
    if is_exact:
        gc.collect()  # a previous wrapper may keep its tensors alive in a reference cycle
        torch.cuda.synchronize(device)
        time.sleep(_WATCHDOG_S)
    return torch.cuda.memory_allocated(device)


def _free() -> None:
    gc.collect()  # wrapped modules contain reference cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
