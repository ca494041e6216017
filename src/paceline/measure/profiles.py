"""Profiles of a job: when each gradient of the bare model is ready, what its blocks take, and the phases of its steps.

How steps take turns is in `steps`; what follows from the times is in `records.layers` and `records.steps`. No hook
waits for the device: on CUDA a moment is an event on the stream, and is read when the step is over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from paceline.training.loader import Window
from paceline.training.settings import TrainSettings
from paceline.training.step import PhaseTimes
from paceline.units import format_number_of
from paceline.workloads.models import find_blocks

_PACE = Pace(budget_s=15.0, min_iters=12, max_iters=100, warmup=4)
_KINDS = ("plain", "marked", "no_comm")
_LAYER_ITERS, _LAYER_WARMUP = 20, 3
_OUTSIDE = -1

Block = tuple[str, nn.Module]
Tell = Callable[[float], None]


# -- moments and hooks ------------------------------------------------------------------------------------------------


class Moments:
    """Moments in the order of their marks: clock readings on CPU, events on CUDA that are used again in each step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._readings_s: list[float] = []
        self._count = 0

    def restart(self) -> None:
        self._readings_s.clear()
        self._count = 0

    def mark(self) -> int:
        """Note this moment, and return its number."""
        if not self._on_gpu:
            self._readings_s.append(time.perf_counter())
            return len(self._readings_s) - 1
        number = self._count
        self._count += 1
        if number == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        self._events[number].record()
        return number

    def read_s(self) -> list[float]:
        """Seconds of every moment since the first one; waits for the device."""
        synchronize(self._device)
        if self._on_gpu:
            first = self._events[0]
            return [first.elapsed_time(event) / 1e3 for event in self._events[: self._count]]
        return [reading - self._readings_s[0] for reading in self._readings_s]


class LayerHooks:
    """What happened in one step, as numbers of moments: gradients that became ready, and blocks that came and went.

    A hook on a parameter would cost in every later step even after its removal, because torch still looks for it; a
    hook on the node that accumulates its gradient goes with the graph. Full backward hooks of modules put views around
    every output, which breaks operations in place; hooks on the nodes of a block's inputs and outputs do not.
    """

    def __init__(self, params: Sequence[torch.Tensor], blocks: Sequence[nn.Module], moments: Moments) -> None:
        self._params, self._blocks, self._moments = params, blocks, moments
        self._clear()

    def _clear(self) -> None:
        self.ready: dict[int, int] = {}
        self.calls: list[tuple[int, int, int]] = []  # block, begin and end of one forward
        self.owners: list[tuple[int, int]] = []  # from this moment of backward on, this block or none is at work
        self._open: dict[int, tuple[int, list[Any]]] = {}  # a block that runs again may stop half-way
        self._is_forward = True

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

    def read_blocks(self, at_s: Sequence[float]) -> tuple[list[float], list[float]]:
        """Seconds of each block in forward and in backward, given those of all moments."""
        forward_s, backward_s = [0.0] * len(self._blocks), [0.0] * len(self._blocks)
        for index, first, last in self.calls:
            forward_s[index] += at_s[last] - at_s[first]
        for (first, index), (last, _) in itertools.pairwise(self.owners):
            if index != _OUTSIDE:
                backward_s[index] += at_s[last] - at_s[first]
        return forward_s, backward_s

    def begin_backward(self, moment: int) -> None:
        # A forward that is run again from here on (checkpointing) is part of its block's backward.
        self._is_forward = False
        self.owners.append((moment, _OUTSIDE))

    def end_backward(self, moment: int) -> None:
        self._is_forward = True
        self.owners.append((moment, _OUTSIDE))

    def _note_ready(self, index: int, *grads: Any) -> None:
        self.ready[index] = self._moments.mark()  # a gradient may come in parts: the last one counts

    def _begin_forward(self, index: int, block: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = _find_nodes(*args, *kwargs.values())
        self._open[index] = self._moments.mark(), inputs
        if not self._is_forward:
            self._begin_block(index)

    def _end_forward(self, index: int, block: nn.Module, args: Any, output: Any) -> None:
        begin, inputs = self._open.pop(index)
        if self._is_forward:
            self.calls.append((index, begin, self._moments.mark()))
        # A block that hands on its input has no backward of its own.
        for node in _find_nodes(output):
            if not any(node is other for other in inputs):
                node.register_prehook(functools.partial(self._begin_block, index))
        waiting = set(range(len(inputs)))
        for number, node in enumerate(inputs):
            node.register_prehook(functools.partial(self._end_block, index, waiting, number))

    def _begin_block(self, index: int, *grads: Any) -> None:
        if self.owners[-1][1] != index:
            self.owners.append((self._moments.mark(), index))

    def _end_block(self, index: int, waiting: set[int], number: int, *grads: Any) -> None:
        waiting.discard(number)
        if not waiting and self.owners[-1][1] == index:
            self.owners.append((self._moments.mark(), _OUTSIDE))


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


class _LayerPhases:
    """The phases of one step as moments; it tells the hooks when backward begins and ends."""

    def __init__(self, moments: Moments, hooks: LayerHooks | None) -> None:
        self._moments, self._hooks = moments, hooks
        self.marks: list[tuple[str, int]] = []

    def enter(self, phase: str) -> None:
        moment = self._moments.mark()
        if self._hooks is not None:
            if self.marks and self.marks[-1][0] == "backward":
                self._hooks.end_backward(moment)
            if phase == "backward":
                self._hooks.begin_backward(moment)
        self.marks.append((phase, moment))

    def end(self) -> PhaseTimes:
        self.enter("end")
        return PhaseTimes()

    def spans(self, phase: str) -> list[tuple[int, int]]:
        """The moments at which each occurrence of a phase begins and ends."""
        return [(begin, end) for (name, begin), (_, end) in itertools.pairwise(self.marks) if name == phase]


# -- layers of the bare model -----------------------------------------------------------------------------------------


@dataclass
class _Steps:
    """The phases of every step of one sort, in seconds: whole step, forward, backward, optimizer."""

    phases_s: list[tuple[float, float, float, float]] = field(default_factory=list)

    def samples(self, phase: int, warmup: int) -> Samples:
        rows = tuple((phases[phase],) for phases in self.phases_s)
        return Samples(seconds=rows[warmup:], warmup_seconds=rows[:warmup])


@dataclass(frozen=True)
class _Seen:
    """What the hooks saw in one step: seconds of backward before a gradient was ready, seconds by block."""

    ready_s: dict[int, float]
    forward_s: list[float]
    backward_s: list[float]


def measure_layers(
    replica: Replica,
    labels: dict[str, Any],
    blocks: Sequence[Block] | None = None,
    *,
    iters: int = _LAYER_ITERS,
    warmup: int = _LAYER_WARMUP,
    tell: Tell | None = None,
) -> LayerProfileRecord:
    """Profile `iters` steps of a bare replica after `warmup` others, in turns with plain steps.

    The record therefore says what profiling costs. `labels` are those of its job (model, precision, batch_size).
    `blocks` are modules that do not contain each other, by name and in the order of the model's definition; by default
    the module's children. The steps train the module. No hook is left on it. `tell` gets the share that is done.
    """
    if iters < 1 or warmup < 0:
        raise ConfigError(f"{iters} steps after {warmup} warm-ups: at least one step and no fewer than 0 warm-ups")
    module, model = replica.module, labels["model"]
    names = _name_parameters(module)
    device = _find_device(model, module, names)
    chosen = list(_find_children(module)) or [("model", module)] if blocks is None else list(blocks)
    _check_blocks(module, chosen)
    moments = Moments(device)
    hooks = LayerHooks(list(names), [block for _, block in chosen], moments)
    plain, profiled, seen = _Steps(), _Steps(), []
    with no_garbage_collection():
        replica.activate()
        for number in range(warmup + iters):
            # The order changes, so that neither sort always follows the other.
            for is_plain in (True, False) if number % 2 else (False, True):
                phases_s, sight = _take_step(replica, model, device, moments, None if is_plain else hooks)
                (plain if is_plain else profiled).phases_s.append(phases_s)
                if sight is not None:
                    seen.append(sight)
            if tell is not None and number >= warmup:
                tell((number + 1 - warmup) / iters)
    return _build_record(labels, module, device, names, chosen, plain, profiled, seen[warmup:], warmup)


def _take_step(
    replica: Replica, model: str, device: torch.device, moments: Moments, hooks: LayerHooks | None
) -> tuple[tuple[float, float, float, float], _Seen | None]:
    given = replica.load()
    synchronize(device)
    moments.restart()
    phases = _LayerPhases(moments, hooks)
    with hooks.attached() if hooks else contextlib.nullcontext():
        replica.run(given, phases)
        phases.end()
    at_s = moments.read_s()
    forward_s, backward_s, optimizer_s = (
        sum(at_s[end] - at_s[begin] for begin, end in phases.spans(phase))
        for phase in ("forward", "backward", "optimizer")
    )
    for phase in ("forward", "backward"):
        if not phases.spans(phase):
            raise MeasurementError(
                f"the step of {model} ran no {phase}: it must call the model that it gets, and backward() on a loss",
                code="no-phase",
            )
    whole_s = at_s[phases.marks[-1][1]] - at_s[phases.marks[0][1]]
    if hooks is None:
        return (whole_s, forward_s, backward_s, optimizer_s), None
    # A step may run backward several times: a gradient is ready after so much of backward as had passed by then.
    ready_s = {
        index: sum(
            min(at_s[end], at_s[moment]) - at_s[begin] for begin, end in phases.spans("backward") if begin <= moment
        )
        for index, moment in hooks.ready.items()
    }
    return (whole_s, forward_s, backward_s, optimizer_s), _Seen(ready_s, *hooks.read_blocks(at_s))


def _name_parameters(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """The names of every trained parameter; a tied one has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    return names


def _find_device(model: str, module: nn.Module, names: dict[nn.Parameter, list[str]]) -> torch.device:
    if hasattr(module, "no_sync"):
        raise ConfigError(f"{model} is wrapped in {type(module).__name__}: pass the bare module, which sends nothing")
    devices = {parameter.device for parameter in names}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device, for nothing is trained"
        raise ConfigError(f"the trained parameters of {model} are on {found}: they must be on one device")
    return devices.pop()


def _find_children(module: nn.Module, prefix: str = "") -> Iterator[Block]:
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # never called itself
            yield from _find_children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _check_blocks(module: nn.Module, blocks: Sequence[Block]) -> None:
    inside = set(module.modules())
    owner: dict[nn.Module, str] = {}
    for name, block in blocks:
        if block not in inside:
            raise ConfigError(f"block {name} is not a part of the module: pass blocks of the module that is profiled")
        for part in block.modules():
            if part in owner:
                raise ConfigError(f"blocks {owner[part]} and {name} share a module: blocks must not contain each other")
            owner[part] = name


def _build_record(
    labels: dict[str, Any],
    module: nn.Module,
    device: torch.device,
    names: dict[nn.Parameter, list[str]],
    blocks: Sequence[Block],
    plain: _Steps,
    profiled: _Steps,
    seen: list[_Seen],
    warmup: int,
) -> LayerProfileRecord:
    block_of: dict[nn.Parameter, str] = {}
    for name, block in blocks:
        for parameter in block.parameters():
            block_of.setdefault(parameter, name)
    parameters = [
        ParameterTimes(
            name=own[0],
            aliases=tuple(own[1:]),
            num_bytes=parameter.numel() * parameter.element_size(),
            num_elements=parameter.numel(),
            dtype=str(parameter.dtype).removeprefix("torch."),
            block=block_of.get(parameter, ""),
            ready_s=tuple(sight.ready_s.get(index) for sight in seen),
        )
        for index, (parameter, own) in enumerate(names.items())
    ]
    num_frozen = sum(not parameter.requires_grad for parameter in module.parameters())
    return LayerProfileRecord(
        model=labels["model"],
        device=device.type,
        dtype=labels["precision"],
        batch_size=labels["batch_size"],
        parameters=tuple(order_by_ready(parameters)),
        blocks=tuple(
            BlockTimes(name, tuple(s.forward_s[index] for s in seen), tuple(s.backward_s[index] for s in seen))
            for index, (name, _) in enumerate(blocks)
        ),
        timing=plain.samples(0, warmup),
        forward=plain.samples(1, warmup),
        backward=plain.samples(2, warmup),
        optimizer=plain.samples(3, warmup),
        profiled_step=profiled.samples(0, warmup),
        profiled_forward=profiled.samples(1, warmup),
        profiled_backward=profiled.samples(2, warmup),
        note=f"{num_frozen} parameters are not trained" if num_frozen else "",
    )


def order_by_ready(parameters: list[ParameterTimes]) -> list[ParameterTimes]:
    """By median; equal ones in the reverse of the model's order, which is the usual order of backward."""
    late = float("inf")
    medians = {p.name: late if p.median_s is None else p.median_s for p in parameters}
    return sorted(reversed(parameters), key=lambda parameter: medians[parameter.name])


# -- what ranks run ---------------------------------------------------------------------------------------------------


def _follow(world: World, label: str, number: int = 0, total: int = 1) -> Tell:
    """Post the share of one of several parts that is done, on rank 0."""

    def tell(share: float) -> None:
        if world.rank == 0:
            post(Progress(number + share, total, label))

    tell(0.0)
    return tell


def measure_job_layers(settings: TrainSettings, iters: int, warmup: int) -> LayerProfileRecord:
    """Profile the bare model of a job of ours on one rank: communication would blur it."""
    with open_world(settings) as world:
        job = TrainingJob(build_job(dataclasses.replace(settings, ranks=world.world_size, wrapper="none"), world))
        replica = job.as_replica(job.job.learner)
        try:
            tell = _follow(world, "layers")
            blocks = find_blocks(job.module)
            record = measure_layers(replica, job.labels, blocks, iters=iters, warmup=warmup, tell=tell)
            first: LayerProfileRecord = world.share(record)[0]
            return first
        finally:
            replica.close()


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
        for number, batch_size in enumerate(batch_sizes):
            resized = dataclasses.replace(settings, ranks=world.world_size, batch_size=batch_size)
            job = TrainingJob(build_job(resized, world))
            # Before the first is measured: the largest would end the run, and lose what was measured.
            check_whole(job.job, dataclasses.replace(job.job.batches, batch_size=max(batch_sizes)).global_batch_size)
            label = f"{format_number_of(world.world_size, 'rank')}, batch {batch_size}"
            tell = _follow(world, label, before + number, total)
            records.append(_measure_job_phases(world, job, iters, warmup, tell))
            if world.rank == 0:
                post(Progress(before + number + 1, total, label, (records[-1],)))
    return records


def measure_profile(settings: TrainSettings, iters: int | None, warmup: int | None) -> list[Record]:
    """Layers and, on several ranks, phases of a job of ours. Collective: every rank must call this."""
    with open_world(settings) as world:
        job = TrainingJob(build_job(dataclasses.replace(settings, ranks=world.world_size), world))
        bare = job.build(world)
        records = [_share_layers(world, bare, job, find_blocks(bare.module), iters, warmup)]
        bare.close()
        if world.world_size > 1:
            records.append(_measure_job_phases(world, job, iters, warmup, _follow(world, "phases", 1, 2)))
        return records


def measure_own_profile(
    model: nn.Module | Callable[[], Any],
    step: OwnStep | None,
    wrapper: str,
    options: dict[str, Any],
    kind: str,
    iters: int | None,
    warmup: int | None,
) -> list[Record]:
    """The same of a user's own module and step, or of a factory of both; `options` are those of `join_world`.

    `kind` is "layers", "phases" or "all". Collective: every rank of the world must call this.
    """
    with join_world(**options) as world:
        job = OwnJob(model, step)
        try:
            records: list[Record] = []
            if kind != "phases":
                records.append(_share_layers(world, job.build(world), job, None, iters, warmup))
            if kind == "phases" or (kind == "all" and world.world_size > 1):
                records.append(_measure_own_phases(world, job, wrapper, iters, warmup))
            return records
        finally:
            job.close()


def _share_layers(
    world: World,
    replica: Replica,
    job: MeasuredJob,
    blocks: Sequence[Block] | None,
    iters: int | None,
    warmup: int | None,
) -> Record:
    """Rank 0's layers, the same on every rank. All ranks compute at the same time, as they do in training."""
    record = measure_layers(
        replica,
        job.labels,
        blocks,
        iters=_LAYER_ITERS if iters is None else iters,
        warmup=_LAYER_WARMUP if warmup is None else warmup,
        tell=_follow(world, "layers", 0, 2),
    )
    if world.world_size > 1:
        more = f"of rank 0, while {world.world_size} ranks computed"
        record = dataclasses.replace(record, note="; ".join(filter(None, (record.note, more))))
    first: Record = world.share(record)[0]
    return first


def _measure_job_phases(
    world: World, job: TrainingJob, iters: int | None, warmup: int | None, tell: Tell
) -> StepRecord:
    windows = cycle_windows(job.job)

    def build(windows: Generator[Window, None, None] = windows) -> Replica:
        return job.as_replica(build_learner(job.job.settings, world, job.job.train), windows)

    replica = job.as_replica(job.job.learner, windows)
    timed = TimedMessages(replica, build) if world.world_size > 1 else None
    return _run_phases(world, job, replica, timed, job.job.settings.wrapper, iters, warmup, tell)


def _measure_own_phases(world: World, job: OwnJob, wrapper: str, iters: int | None, warmup: int | None) -> StepRecord:
    def build() -> Replica:
        return job.build(world, None if wrapper == "none" else lambda module: wrap(module, wrapper))

    replica = build()
    # torch's wrapper is timed by a second replica, which one module that all share cannot be.
    can_time = world.world_size > 1 and (wrapper == "paceline" or (wrapper == "torch" and not job.is_shared))
    timed = TimedMessages(replica, build) if can_time else None
    return _run_phases(world, job, replica, timed, wrapper, iters, warmup, _follow(world, "phases", 1, 2))


def _run_phases(
    world: World,
    job: MeasuredJob,
    replica: Replica,
    timed: TimedMessages | None,
    wrapper: str,
    iters: int | None,
    warmup: int | None,
    tell: Tell,
) -> StepRecord:
    labels = job.labels | {"wrapper": wrapper, "num_parameters": len(replica.parameters)}
    with StepBench(world, labels, loads_inside=True) as bench:
        variant = bench.add(Variant({}, replica, _KINDS if timed is None else (*_KINDS, "timed"), timed))
        bench.run(_PACE, iters, warmup, tell)
        return bench.build_record(variant)
