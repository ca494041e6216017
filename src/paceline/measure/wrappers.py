"""Data-parallel wrappers compared: replicas of one model take steps in turns, and their parameters are checked.

How steps take turns is in `steps`; what is derived from the records is in `records.steps`.
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
from paceline.measure.engine import Group, Pace, Report, run_cells
from paceline.measure.settings import MAX_CANDIDATES, Measured, WrapperSettings
from paceline.measure.steps import Probe, Replica, StepBench, Variant, list_gradients, wrap
from paceline.plan import TORCH_CAP_BYTES, TORCH_FIRST_CAP_BYTES, Plan, plan_like_torch
from paceline.records import StepRecord
from paceline.records.kinds import PRECISIONS
from paceline.runtime.world import World
from paceline.training.step import NoPhases, Phases
from paceline.units import MIB, format_bytes, format_duration
from paceline.workloads.registry import WORKLOADS

_SEED = 1
_LEARNING_RATE = 1e-3
# The budget is for all wrappers of a cell. Warm-ups: torch rebuilds its buckets in its second step, and Paceline plans
# in its first.
_PACE = Pace(budget_s=30.0, min_iters=10, max_iters=100, warmup=3)
_TUNING_PACE = Pace(budget_s=8.0, min_iters=5, max_iters=15, warmup=3)
# How far a parameter's change may be from its change under torch's wrapper, as a share of that change. Rounding gives
# 1e-6 on a CPU, and much more where matrices are multiplied in bfloat16 or TF32; a missing division, or ranks that were
# not averaged, about 1.
_TOLERANCE, _COARSE_TOLERANCE = 0.05, 0.5
_CAPS_MIB = (1, 5, 10, 25, 50)
_OPTIONS = set(inspect.signature(DistributedDataParallel.__init__).parameters)
# What a user who tunes torch's wrapper would set, whatever the buckets are.
_TUNED: dict[str, Any] = {
    "gradient_as_bucket_view": True,
    "static_graph": True,
    # torch 2.13 renames the option that stops the broadcast of buffers in every forward.
    ("forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"): False,
}
# In the first steps of a replica its memory is counted; NCCL's watchdog looks every tenth of a second.
_SETTLING_STEPS, _WATCHDOG_S = 3, 0.25


@dataclass(frozen=True)
class Wrapping:
    """How a wrapper is put around a module, its configuration in words, and how that was chosen."""

    configuration: str
    wrap: Callable[..., nn.Module]  # of a module, with its `group`
    note: str = ""


def find_wrapping(wrapper: str) -> Wrapping:
    """How to wrap by this name. Tuned wrappers are not here: their options are found by measuring."""
    if wrapper == "bare":
        return Wrapping("no communication", lambda module, group: module)
    name, _, reducer = wrapper.partition("-")
    options: dict[str, Any] = {"reducer": reducer} if reducer else {}
    return Wrapping(f"reducer {reducer}" if reducer else "defaults", partial(wrap, wrapper=name, **options))


def build_module(model: str, seed: int, device: torch.device) -> nn.Module:
    """The model with parameters that follow from the seed, made on the device: a large one takes long elsewhere."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        with torch.device(device):
            return WORKLOADS[model].build()


def measure_wrappers(settings: WrapperSettings) -> Measured:
    """Time and check every cell: each number of ranks x each model. Collective: all ranks must call this."""

    def measure(world: World, groups: Sequence[Group], model: str, report: Report) -> list[StepRecord]:
        try:
            return _Cell(settings, world, groups, model).measure(report)
        finally:
            _free()  # the next cell finds the memory that this one found

    return run_cells(settings, settings.models, str, measure)


class _Findings(Probe):
    """What this rank finds of one replica: the parameters that changed differently than under torch's wrapper, and on
    GPUs what it and its wrapper hold between steps, and what a step adds at its peak."""

    def __init__(self, replica: Replica, held_bytes: int) -> None:
        self.replica, self._device, self.held_bytes = replica, replica.device, held_bytes
        self.peak_step_bytes = self.num_wrong = self._num_steps = 0

    def begin(self, kind: str, hooks: contextlib.ExitStack) -> Phases | None:
        if self._device.type == "cuda":
            # A wrapper may make its buffers in its first steps; only this replica works between two barriers.
            self._before = _count_allocated(self._device, self._num_steps < _SETTLING_STEPS)
            torch.cuda.reset_peak_memory_stats(self._device)
        return None

    def end(self, kind: str, end_s: float, phases_s: dict[str, float]) -> None:
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) - self._before
            self.peak_step_bytes = max(self.peak_step_bytes, peak)
            if self._num_steps < _SETTLING_STEPS:
                self.held_bytes += _count_allocated(self._device, True) - self._before
            self._num_steps += 1


class _Cell:
    """One model on the first n ranks: every wrapper on every backend. Ranks outside take part in the waiting only."""

    def __init__(self, settings: WrapperSettings, world: World, groups: Sequence[Group], model: str) -> None:
        self.settings, self.world, self.groups, self.model = settings, world, groups, model
        self.workload, self.batch_size = WORKLOADS[model], settings.batch_of(model)
        self.is_in, self.is_low = world.rank < groups[0].world_size, settings.dtype == "bfloat16"
        self.labels = {"model": model, "precision": PRECISIONS[settings.dtype], "batch_size": self.batch_size}
        # On GPUs Paceline's wrapper reads the control words of its first ten steps at once, and waits for the GPU then.
        self.warmup = 12 if groups[0].device.type == "cuda" else 3
        self.labels |= {"num_parameters": self.workload.num_parameters, "num_bytes": 4 * self.workload.num_elements}

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
            is_measured = kind == "marked"  # and not one of the candidates
            variant.replica, held_bytes = self._build_replica(group, wrapping, is_measured)
            if is_measured:
                variant.probe = _Findings(variant.replica, held_bytes)
        return variant

    def _build_replica(self, group: Group, wrapping: Wrapping, settle: bool = False) -> tuple[Replica, int]:
        """A new replica in its wrapper, and the bytes that both hold, exactly if the GPU may `settle` before. Ranks
        begin with different parameters: a wrapper that does not broadcast rank 0's is found. Collective: every rank of
        the group must call this."""
        workload, device, rank = self.workload, group.device, self.world.rank
        if device.type == "cuda":
            # NCCL frees the memory of its last message when another one is over: perhaps a former replica's.
            dist.all_reduce(torch.zeros(1, device=device), group=group.data)
        before = _count_allocated(device, settle)
        module = build_module(self.model, _SEED + rank, device)
        model = wrapping.wrap(module, group=group.data)
        held_bytes = _count_allocated(device, settle) - before
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
        """Refuse on every rank what does not fit the GPU of one."""
        on_gpu = [group for group in self.groups if group.device.type == "cuda"]
        for group in on_gpu:
            sharing = math.ceil(group.world_size / torch.cuda.device_count())  # too many where there are several hosts
            need = self.settings.replica_bytes(self.model, len(on_gpu)) * sharing
            free = min(self.world.share(torch.cuda.mem_get_info(group.device)[0]))
            found = f"{format_bytes(need)} and {format_bytes(free)} are free on the GPU"
            advice = self.settings.memory_words[1]
            refuse((need > free, f"the replicas of {self.model} take about {found}: {advice}"), code="memory")

    def _find_wrappings(self, group: Group) -> dict[str, Wrapping]:
        """What each wrapper is on this group; tuned ones are found by trying, before anything else takes memory."""
        names, wrappings = self.settings.wrappers, dict[str, Wrapping]()
        for name in names:
            if name.endswith("-tuned"):
                wrappings[name] = self._tune(group, name.removesuffix("-tuned"))
                _free()
        return {name: wrappings.get(name) or find_wrapping(name) for name in names}

    def _tune(self, group: Group, wrapper: str) -> Wrapping:
        """The fastest of several ways to set a wrapper's buckets, with the medians of all as its note."""
        plan = None  # one more candidate for torch: what Paceline's wrapper uses after its first step
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
        medians = [record.timing.median_s for record in records]
        tried = zip((candidate.configuration.rpartition(", ")[2] for candidate in candidates), medians, strict=True)
        text = "; ".join(f"{name} {format_duration(median)}" for name, median in tried)
        note = f"fastest of {len(candidates)} in {records[0].timing.count} rounds: {text}"
        return replace(candidates[medians.index(min(medians))], note=note)

    def _compare_with_torch(self, bench: StepBench, variants: Sequence[tuple[Group, Variant]]) -> None:
        """Count, in each replica, the parameters that changed differently than under torch's wrapper. After the
        warm-ups: later, rounding alone can lead replicas far apart."""
        num_steps = bench.num_warmup
        for group in self.groups if self.is_in and num_steps else ():
            mine = {v.labels["wrapper"]: cast(_Findings, v.probe) for of, v in variants if of is group}
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
        """The record, with the parameters checked to be equal on all ranks."""
        mine, wrapper = None, variant.labels["wrapper"]
        if self.is_in:
            found = cast(_Findings, variant.probe)
            params = found.replica.parameters
            unequal = count_wrong_parameters(params, params, None, group.data, 0, 0.0) if wrapper != "bare" else 0
            plan = getattr(found.replica.model, "plan", None) if wrapper.startswith("paceline") else None
            buckets = f", {len(plan.buckets)} buckets: {plan.rule}" if plan is not None else ""
            counts = max(found.num_wrong, unequal), len(params), found.held_bytes, found.peak_step_bytes
            mine = *counts, variant.labels["configuration"] + buckets
        answers = [of_rank for of_rank in self.world.share(mine) if of_rank is not None]
        wrong, checked, held, peaks, configurations = zip(*answers, strict=True)
        more: dict[str, Any] = {"held_bytes": max(held), "peak_step_bytes": max(peaks)}
        more |= {"num_wrong": sum(wrong), "num_checked": sum(checked)} if wrapper != "bare" else {}
        return bench.build_record(variant, configuration=configurations[0], **more)


def build_candidates(module: nn.Module, ours: Plan | None, wrapper: str = "torch") -> list[Wrapping]:
    """Ways to set a wrapper's buckets, without those that give the same buckets; `ours` is one more where torch can do
    it. Sameness is judged by the reverse order of parameters, which is close to the order of gradients."""
    gradients, is_torch = list_gradients(module), wrapper == "torch"
    order, total = list(reversed(range(len(gradients)))), sum(gradient.num_bytes for gradient in gradients)
    ways: list[tuple[str, list[int], dict[str, Any]]] = [
        ("torch's own caps", [TORCH_FIRST_CAP_BYTES, TORCH_CAP_BYTES], {}) if is_torch else ("defaults", [], {}),
        *((f"cap {cap} MiB", [cap * MIB], {"bucket_cap_mb": cap}) for cap in _CAPS_MIB),
        ("one bucket", [total + 1], {"bucket_cap_mb": math.ceil(total / MIB) + 1}),
    ]
    if ours is not None:
        with contextlib.suppress(ConfigError):  # torch's rule cannot make these buckets
            options = ours.as_torch_kwargs()
            if set(options) <= _OPTIONS:
                ways.append(("Paceline's plan", [], options))
    found: dict[Any, Wrapping] = {}
    for name, caps, options in ways:
        known = plan_like_torch(gradients, order, caps) if caps or (is_torch and ours is None) else ours
        text = f"bucket view, static graph, no buffers in forward, {name}" if is_torch else name
        options = {**_TUNED, **options} if is_torch else options
        found.setdefault(known and known.partition, Wrapping(text, partial(wrap, wrapper=wrapper, **options)))
    assert len(found) <= MAX_CANDIDATES
    return list(found.values())


@torch.no_grad()
def count_wrong_parameters(
    parameters: Sequence[torch.Tensor], start: Sequence[torch.Tensor], reference: Sequence[torch.Tensor] | None,
    group: dist.ProcessGroup, num_steps: int, tolerance: float,
) -> int:  # fmt: skip
    """The parameters of this rank that are not equal to rank 0's or, after these steps, not close to the reference.

    Close means: the change since `start` (rank 0's) differs from the reference's change by at most a share `tolerance`
    of it. A comparison of values instead of changes would not find a wrong gradient after few small steps.
    Collective: every rank of the group must call this.
    """
    wrong = 0
    for index, (parameter, origin) in enumerate(zip(parameters, start, strict=True)):
        first = parameter.detach().clone()
        dist.broadcast(first, group=group, group_src=0)
        is_wrong = not torch.equal(first, parameter)
        if reference is not None:
            theirs = reference[index]
            # Rounding: one ulp of the value in each step, and gradients that are zero but for rounding.
            ulps = torch.finfo(theirs.dtype).eps * math.sqrt(num_steps) * float(theirs.norm())
            slack = ulps + 1e-6 * _LEARNING_RATE * num_steps * math.sqrt(theirs.numel())
            change, apart = float((theirs - origin).norm()), float((parameter - theirs).norm())
            is_wrong = is_wrong or not apart <= tolerance * change + slack  # `not <=`, so that NaN is wrong
        wrong += is_wrong
    return wrong


def _count_allocated(device: torch.device, settle: bool) -> int:
    """What tensors take on a GPU, once NCCL's watchdog has had the time to free messages that are over."""
    if device.type != "cuda":
        return 0
    if settle:
        gc.collect()  # a wrapper that was tried before may hold its tensors in a cycle
        torch.cuda.synchronize(device)
        time.sleep(_WATCHDOG_S)
    return torch.cuda.memory_allocated(device)


def _free() -> None:
    gc.collect()  # a wrapped module is full of cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
