"""Profiles of a job: when each gradient of the bare model is ready, what its blocks take, and the phases of its steps.

No hook waits for the device: on CUDA a moment is an event on the stream, and is read when the step is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from paceline.errors import ConfigError, MeasurementError
from paceline.measure.engine import Pace, no_garbage_collection, synchronize
from paceline.measure.steps import (
    MeasuredJob,
    OwnJob,
    OwnStep,
    Replica,
    StepBench,
    TimedMessages,
    TrainingJob,
    Variant,
    check_whole,
    cycle_windows,
    wrap,
)
from paceline.parallel.backward import find_tensors
from paceline.records import BlockTimes, LayerProfileRecord, ParameterTimes, Record, Samples, StepRecord
from paceline.runtime.session import Progress
from paceline.runtime.worker import post
from paceline.runtime.world import World, join_world
from paceline.training.build import build_job, build_learner, open_world
from paceline.training.settings import TrainSettings
from paceline.training.step import PhaseTimes
from paceline.units import format_number_of
from paceline.workloads.models import find_blocks

_PACE = Pace(budget_s=15.0, min_iters=12, max_iters=100, warmup=4)
_KINDS = ("plain", "marked", "no_comm")
_PHASES = ("forward", "backward", "optimizer")
_OUTSIDE = -1

Block = tuple[str, nn.Module]
Tell = Callable[[float], None]
# A job of ours; or a user's own module and step, or a factory of both, with a wrapper and the options of `join_world`.
Given = TrainSettings | tuple[nn.Module | Callable[[], Any], OwnStep | None, str, dict[str, Any]]


# -- one step, looked into ---------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """Seconds of the whole step and of its phases; of backward before each gradient was ready; of blocks."""

    took_s: dict[str, float]
    ready_s: dict[int, float]
    forward_s: list[float]
    backward_s: list[float]


class LayerClock:
    """The phases of a step, the gradients that become ready in it, and the blocks that come and go, as moments.

    A moment is a number: of a reading of the clock or, on CUDA, of an event, which is used again in each step. A hook
    on a parameter would cost in every later step even after its removal, because torch still looks for it; a hook on
    the node that accumulates its gradient goes with the graph. Full backward hooks of modules put views around every
    output, which breaks operations in place; hooks on the nodes of a block's inputs and outputs do not.
    """

    def __init__(self, params: Sequence[torch.Tensor], blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._params, self._blocks, self.device = params, blocks, device
        self._moments: list[Any] = []
        self._events: list[torch.cuda.Event] = []  # to be used again
        self._clear()

    def _clear(self) -> None:
        if self.device.type == "cuda":
            self._events += self._moments
        self._moments = []
        self.marks: list[tuple[str, int]] = []  # phases and when they begin
        self.ready: dict[int, int] = {}
        self._calls: list[tuple[int, int, int]] = []  # block, begin and end of one forward
        self._owners: list[tuple[int, int]] = []  # from this moment of backward on, this block or none is at work
        self._open: dict[int, tuple[int, list[Any]]] = {}  # a block that runs again may stop half-way

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks for one step; none is left afterwards."""
        self._clear()
        with contextlib.ExitStack() as hooks:
            # The nodes are held until the end: a graph made in backward (checkpointing) then uses the same ones.
            nodes = [get_gradient_edge(param).node for param in self._params]
            for index, node in enumerate(nodes):
                hooks.callback(node.register_hook(functools.partial(self._note_ready, index)).remove)
            for index, block in enumerate(self._blocks):
                before = functools.partial(self._begin_forward, index)
                after = functools.partial(self._end_forward, index)
                hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(block.register_forward_hook(after).remove)
            yield

    def mark(self) -> int:
        """Note this moment, and return its number."""
        if self.device.type == "cuda":
            self._moments.append(self._events.pop() if self._events else torch.cuda.Event(enable_timing=True))
            self._moments[-1].record()
        else:
            self._moments.append(time.perf_counter())
        return len(self._moments) - 1

    def enter(self, phase: str) -> None:
        moment = self.mark()
        if self._is_backward or phase == "backward":
            self._owners.append((moment, _OUTSIDE))
        self.marks.append((phase, moment))

    def end(self) -> PhaseTimes:
        self.enter("end")
        return PhaseTimes([(phase, self._moments[moment]) for phase, moment in self.marks])

    def read_s(self) -> list[float]:
        """Seconds of every moment since the first one; waits for the device."""
        synchronize(self.device)
        first = self._moments[0]
        if self.device.type == "cuda":
            return [first.elapsed_time(event) / 1e3 for event in self._moments]
        return [reading - first for reading in self._moments]

    def read(self) -> Seen:
        at_s = self.read_s()
        took_s = dict.fromkeys(_PHASES, 0.0) | {"whole": at_s[self.marks[-1][1]] - at_s[self.marks[0][1]]}
        spans = [(phase, begin, end) for (phase, begin), (_, end) in itertools.pairwise(self.marks)]
        for phase, begin, end in spans:
            took_s[phase] = took_s.get(phase, 0.0) + at_s[end] - at_s[begin]
        # A step may run backward several times: a gradient is ready after as much of backward as had passed by then.
        backwards = [(begin, end) for phase, begin, end in spans if phase == "backward"]
        ready_s = {
            index: sum(min(at_s[end], at_s[moment]) - at_s[begin] for begin, end in backwards if begin <= moment)
            for index, moment in self.ready.items()
        }
        forward_s, backward_s = [0.0] * len(self._blocks), [0.0] * len(self._blocks)
        for index, begin, end in self._calls:
            forward_s[index] += at_s[end] - at_s[begin]
        for (begin, index), (end, _) in itertools.pairwise(self._owners):
            if index != _OUTSIDE:
                backward_s[index] += at_s[end] - at_s[begin]
        return Seen(took_s, ready_s, forward_s, backward_s)

    @property
    def _is_backward(self) -> bool:
        return bool(self.marks) and self.marks[-1][0] == "backward"

    def _note_ready(self, index: int, *grads: Any) -> None:
        self.ready[index] = self.mark()  # a gradient may come in parts: the last one counts

    def _begin_forward(self, index: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        self._open[index] = self.mark(), _find_nodes(*args, *kwargs.values())
        # A forward that is run again in backward (checkpointing) is part of its block's backward.
        if self._is_backward:
            self._begin_block(index)

    def _end_forward(self, index: int, block: nn.Module, args: Any, output: Any) -> None:
        begin, inputs = self._open.pop(index)
        if not self._is_backward:
            self._calls.append((index, begin, self.mark()))
        # A block that hands on its input has no backward of its own.
        for node in _find_nodes(output):
            if not any(node is other for other in inputs):
                node.register_prehook(functools.partial(self._begin_block, index))
        waiting = set(range(len(inputs)))
        for number, node in enumerate(inputs):
            node.register_prehook(functools.partial(self._end_block, index, waiting, number))

    def _begin_block(self, index: int, *grads: Any) -> None:
        if self._owners[-1][1] != index:
            self._owners.append((self.mark(), index))

    def _end_block(self, index: int, waiting: set[int], number: int, *grads: Any) -> None:
        waiting.discard(number)
        if not waiting and self._owners[-1][1] == index:
            self._owners.append((self.mark(), _OUTSIDE))


def _find_nodes(*values: Any) -> list[Any]:
    """The autograd nodes that made the tensors in nested values."""
    found: list[Any] = []
    for value in values:
        # Nearly always a tensor, and the search takes longer than the rest of a hook.
        for tensor in [value] if isinstance(value, torch.Tensor) else find_tensors(value):
            node = tensor.grad_fn
            if node is not None and not any(node is other for other in found):
                found.append(node)
    return found


# -- layers of the bare model -----------------------------------------------------------------------------------------


def measure_layers(
    replica: Replica,
    labels: dict[str, Any],
    blocks: Sequence[Block] | None = None,
    *,
    iters: int | None = None,
    warmup: int | None = None,
    tell: Tell | None = None,
) -> LayerProfileRecord:
    """Profile `iters` steps of a bare replica after `warmup` others, in turns with plain steps.

    The record therefore says what profiling costs. `labels` are those of its job (model, precision, batch_size).
    `blocks` are modules that do not contain each other, by name and in the order of the model's definition; by default
    the module's children. The steps train the module. No hook is left on it. `tell` gets the share that is done.
    """
    iters, warmup = 20 if iters is None else iters, 3 if warmup is None else warmup
    module, model = replica.module, labels["model"]
    names: dict[nn.Parameter, list[str]] = {}  # of every trained parameter; a tied one has several
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    if len(devices := {parameter.device for parameter in names}) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device, for nothing is trained"
        raise ConfigError(f"the trained parameters of {model} are on {found}: they must be on one device")
    device = devices.pop()
    chosen = list(_find_children(module)) or [("model", module)] if blocks is None else list(blocks)
    block_of = _check_blocks(module, chosen)
    clocks = {"plain": LayerClock([], [], device)}
    clocks["profiled"] = LayerClock(list(names), [block for _, block in chosen], device)
    steps: dict[str, list[Seen]] = {"plain": [], "profiled": []}
    with no_garbage_collection():
        replica.activate()
        for number in range(warmup + iters):
            # The order changes, so that neither sort always follows the other.
            for sort in ("plain", "profiled") if number % 2 else ("profiled", "plain"):
                steps[sort].append(_take_step(replica, model, clocks[sort]))
            if tell is not None and number >= warmup:
                tell((number + 1 - warmup) / iters)

    def samples(sort: str, phase: str) -> Samples:
        rows = tuple((step.took_s[phase],) for step in steps[sort])
        return Samples(seconds=rows[warmup:], warmup_seconds=rows[:warmup])

    seen = steps["profiled"][warmup:]
    parameters = [
        ParameterTimes(
            name=own[0],
            aliases=tuple(own[1:]),
            num_bytes=parameter.nbytes,
            num_elements=parameter.numel(),
            dtype=str(parameter.dtype).removeprefix("torch."),
            block=block_of.get(parameter, ""),
            ready_s=tuple(step.ready_s.get(index) for step in seen),
        )
        for index, (parameter, own) in enumerate(names.items())
    ]
    num_frozen = sum(not parameter.requires_grad for parameter in module.parameters())
    return LayerProfileRecord(
        model=model,
        device=device.type,
        dtype=labels["precision"],
        batch_size=labels["batch_size"],
        parameters=tuple(order_by_ready(parameters)),
        blocks=tuple(
            BlockTimes(name, tuple(s.forward_s[i] for s in seen), tuple(s.backward_s[i] for s in seen))
            for i, (name, _) in enumerate(chosen)
        ),
        timing=samples("plain", "whole"),
        forward=samples("plain", "forward"),
        backward=samples("plain", "backward"),
        optimizer=samples("plain", "optimizer"),
        profiled_step=samples("profiled", "whole"),
        profiled_forward=samples("profiled", "forward"),
        profiled_backward=samples("profiled", "backward"),
        note=f"{num_frozen} parameters are not trained" if num_frozen else "",
    )


def _take_step(replica: Replica, model: str, clock: LayerClock) -> Seen:
    given = replica.load()
    synchronize(clock.device)
    with clock.attached():
        replica.run(given, clock)
        clock.end()
    for phase in ("forward", "backward"):
        if phase not in dict(clock.marks):
            raise MeasurementError(
                f"the step of {model} ran no {phase}: it must call the model that it gets, and backward() on a loss",
                code="no-phase",
            )
    return clock.read()


def _find_children(module: nn.Module, prefix: str = "") -> Iterator[Block]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # never called itself
            yield from _find_children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _check_blocks(module: nn.Module, blocks: Sequence[Block]) -> dict[nn.Parameter, str]:
    """The first block of each parameter that is in one."""
    inside = set(module.modules())
    owner: dict[nn.Module, str] = {}
    for name, block in blocks:
        if block not in inside:
            raise ConfigError(f"block {name} is not a part of the module: pass blocks of the module that is profiled")
        for part in block.modules():
            if part in owner:
                raise ConfigError(f"blocks {owner[part]} and {name} share a module: blocks must not contain each other")
            owner[part] = name
    return {parameter: name for name, block in reversed(blocks) for parameter in block.parameters()}


def order_by_ready(parameters: list[ParameterTimes]) -> list[ParameterTimes]:
    """By median; equal ones in the reverse of the model's order, which is the usual order of backward."""
    return sorted(reversed(parameters), key=lambda parameter: parameter.order_s)


# -- what ranks run ---------------------------------------------------------------------------------------------------


def _follow(world: World, label: str, number: int = 0, total: int = 1) -> Tell:
    """Post the share of one of several parts that is done, on rank 0."""

    def tell(share: float) -> None:
        if world.rank == 0:
            post(Progress(number + share, total, label))

    tell(0.0)
    return tell


@contextlib.contextmanager
def open_job(given: Given, is_bare: bool = False) -> Iterator[tuple[World, MeasuredJob, Callable[[], Replica]]]:
    """The world, the job, and what builds a replica of it in its wrapper, or bare. Collective: call on every rank."""
    if isinstance(given, TrainSettings):
        with open_world(given) as world:
            wrapper = "none" if is_bare else given.wrapper
            job = TrainingJob(build_job(dataclasses.replace(given, ranks=world.world_size, wrapper=wrapper), world))
            job.labels["wrapper"] = wrapper
            windows, built = cycle_windows(job.job), [job.job.learner]

            def build() -> Replica:
                learner = built.pop() if built else build_learner(job.job.settings, world, job.job.train)
                return job.as_replica(learner, windows)

            yield world, job, build
        return
    model, step, wrapper, options = given
    with join_world(**options) as world:
        own = OwnJob(model, step)
        own.labels["wrapper"] = wrapper
        wrap_by = None if is_bare or wrapper == "none" else functools.partial(wrap, wrapper=wrapper)
        try:
            yield world, own, lambda: own.build(world, wrap_by)
        finally:
            own.close()


def measure_phases(
    settings: TrainSettings,
    batch_sizes: tuple[int, ...],
    iters: int | None,
    warmup: int | None,
    before: int = 0,
    after: int = 0,
) -> list[StepRecord]:
    """The phases of a job of ours at each batch size per rank. Collective: every rank must call this.

    `before` and `after` count the cells of other numbers of ranks, for the progress.
    """
    total = before + len(batch_sizes) + after
    records: list[StepRecord] = []
    with open_world(settings) as world:
        for number, batch_size in enumerate(batch_sizes, before):
            with open_job(dataclasses.replace(settings, batch_size=batch_size)) as (_, job, build):
                assert isinstance(job, TrainingJob)
                # Before the first is measured: the largest would end the run, and lose what was measured.
                largest = dataclasses.replace(job.job.batches, batch_size=max(batch_sizes))
                check_whole(job.job, largest.global_batch_size)
                label = f"{format_number_of(world.world_size, 'rank')}, batch {batch_size}"
                records.append(_run_phases(world, job, build, iters, warmup, _follow(world, label, number, total)))
            if world.rank == 0:
                post(Progress(number + 1, total, label, (records[-1],)))
    return records


def measure_profile(given: Given, kind: str, iters: int | None, warmup: int | None) -> list[Record]:
    """Layers of the bare model ("layers"), phases of its steps ("phases"), or on several ranks both ("all").

    Collective: every rank must call this.
    """
    records: list[Record] = []
    with open_job(given, is_bare=kind == "layers") as (world, job, build):
        parts = (kind,) if kind != "all" else ("layers", "phases") if world.world_size > 1 else ("layers",)
        for number, part in enumerate(parts):
            tell = _follow(world, part, number, len(parts))
            if part == "phases":
                records.append(_run_phases(world, job, build, iters, warmup, tell))
            else:
                bare = build() if kind == "layers" else job.build(world)
                records.append(_share_layers(world, job, bare, iters, warmup, tell))
    return records


def _share_layers(
    world: World, job: MeasuredJob, bare: Replica, iters: int | None, warmup: int | None, tell: Tell
) -> LayerProfileRecord:
    """Rank 0's layers, the same on every rank. All ranks compute at the same time, as they do in training."""
    blocks = find_blocks(bare.module) if isinstance(job, TrainingJob) else None
    record = measure_layers(bare, job.labels, blocks, iters=iters, warmup=warmup, tell=tell)
    bare.close()
    if world.world_size > 1:
        more = f"of rank 0, while {world.world_size} ranks computed"
        record = dataclasses.replace(record, note="; ".join(filter(None, (record.note, more))))
    first: LayerProfileRecord = world.share(record)[0]
    return first


def _run_phases(
    world: World, job: MeasuredJob, build: Callable[[], Replica], iters: int | None, warmup: int | None, tell: Tell
) -> StepRecord:
    replica, wrapper = build(), job.labels["wrapper"]
    # torch's wrapper is timed by a second replica, which one module that all share cannot be.
    is_alone = wrapper == "torch" and isinstance(job, OwnJob) and job.is_shared
    can_time = world.world_size > 1 and wrapper in ("paceline", "torch") and not is_alone
    timed = TimedMessages(replica, build) if can_time else None
    with StepBench(world, job.labels | {"num_parameters": len(replica.parameters)}, loads_inside=True) as bench:
        variant = bench.add(Variant({}, replica, (*_KINDS, "timed") if can_time else _KINDS, timed))
        bench.run(_PACE, iters, warmup, tell)
        return bench.build_record(variant)
